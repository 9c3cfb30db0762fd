/* libhccl over shared memory: HCCL's interface for processes of one machine whose device memory is host memory.
 *
 * The real torch_npu looks these functions up in libhccl.so, HcclGroupStart and HcclGroupEnd (which it needs for
 * coalescing) in libhcomm.so: that has to be a link to this library. Signatures, limits and codes follow CANN's
 * documentation of HCCL (9.1, Atlas A2); what implements them is our own and simple:
 *
 * - A communicator is one anonymous shared memory file. The process that calls HcclGetRootInfo makes it, the others
 *   open it as /proc/<process>/fd/<number>: it has no name, so nothing can be left behind, however a process dies.
 * - Each rank has two slots in it. A collective goes in rounds: every rank copies the next piece of what it sends into
 *   one of its slots, waits until all have, and takes what it needs from the slots of all. The next round uses the
 *   other slot, so one wait a round is enough: who writes a slot again has seen all ranks pass the wait that came
 *   after their reading of it.
 * - Reductions fold the ranks in the order 0, 1, 2, ... and 16-bit floats in fp32, rounded once: every rank gets the
 *   same bits, and the same ones in every run.
 * - Streams are synchronous here: a call returns when its data have arrived. Waiting sleeps in the kernel (futex).
 *
 * Where it differs from the hardware: a call that waits holds its thread, where the real one returns and its stream
 * waits; ranks that call different collectives get HCCL_E_PARA at once with both named, where the real ones hang until
 * the timeout; collectives inside HcclGroupStart and HcclGroupEnd run at once. What the project does not call (send,
 * receive, reduce, scatter) is not supported.
 *
 * Environment:
 *   HCCL_CONNECT_TIMEOUT, HCCL_EXEC_TIMEOUT   seconds, fractions too (120; 1836, 0: for ever), as in HCCL
 *   SIMNPU_HCCL_PIECE       bytes of a slot (4 MiB)
 *   SIMNPU_HCCL_FAIL        KIND:N[@RANK],... the N-th call of that kind in the process of that rank (RANK, as torchrun
 *                           sets it; without that, the rank in the communicator), or in all, returns HCCL_E_REMOTE
 *   SIMNPU_HCCL_HANG        the same, but the call never returns
 *   SIMNPU_ADAPTERS         device memory is addresses alone: nothing is moved, and no other rank is waited for, so that
 *                           one process can be any rank of any number
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef enum {
    HCCL_SUCCESS = 0,
    HCCL_E_PARA = 1,
    HCCL_E_PTR = 2,
    HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_UNAVAIL = 7,
    HCCL_E_SYSCALL = 8,
    HCCL_E_TIMEOUT = 9,
    HCCL_E_REMOTE = 21,
} HcclResult;

typedef enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3 } HcclReduceOp;

typedef enum {
    INT8 = 0,
    INT16 = 1,
    INT32 = 2,
    FP16 = 3,
    FP32 = 4,
    INT64 = 5,
    UINT64 = 6,
    UINT8 = 7,
    UINT16 = 8,
    UINT32 = 9,
    FP64 = 10,
    BF16 = 11,
    TYPES,
} HcclDataType;

static const struct {
    const char *name;
    size_t size;
} TYPE[TYPES] = {
    [INT8] = {"int8", 1},     [INT16] = {"int16", 2},   [INT32] = {"int32", 4},   [FP16] = {"float16", 2},
    [FP32] = {"float32", 4},  [INT64] = {"int64", 8},   [UINT64] = {"uint64", 8}, [UINT8] = {"uint8", 1},
    [UINT16] = {"uint16", 2}, [UINT32] = {"uint32", 4}, [FP64] = {"float64", 8},  [BF16] = {"bfloat16", 2},
};

enum kind {
    ALL_REDUCE,
    REDUCE_SCATTER,
    BROADCAST,
    ALL_GATHER,
    ALL_TO_ALL,
    ALL_TO_ALL_V,
    BARRIER,
    KINDS,
};

static const char *const KIND[KINDS] = {
    [ALL_REDUCE] = "all_reduce",
    [REDUCE_SCATTER] = "reduce_scatter",
    [BROADCAST] = "broadcast",
    [ALL_GATHER] = "all_gather",
    [ALL_TO_ALL] = "all_to_all",
    [ALL_TO_ALL_V] = "all_to_all_v",
    [BARRIER] = "barrier",
};

#define MAX_RANKS 64
#define NAME_LENGTH 128
#define DEFAULT_PIECE_BYTES ((size_t)4 << 20)
#define SUBGROUPS 64

typedef struct {
    char internal[4108];
} HcclRootInfo;

/* HcclCommConfig grows at its end from version to version and says its own size; these fields have never moved. */
typedef struct {
    size_t size;
    uint32_t magic;
    uint32_t version;
    uint64_t reserved;
    uint32_t buffer_size;
    uint32_t deterministic;
    char name[NAME_LENGTH];
    char user_information[128];
    uint32_t expansion_mode, traffic_class, service_level, world_rank;
    uint64_t job;
    uint8_t zero_copy;
    int32_t exec_timeout;
} HcclCommConfig;

#define CONFIG_MAGIC 0xf0f0f0f0u
#define CONFIG_NAME_END (offsetof(HcclCommConfig, name) + NAME_LENGTH)
#define CONFIG_TIMEOUT_END (offsetof(HcclCommConfig, exec_timeout) + sizeof(int32_t))
/* Of the enumeration HcclCommConfigCapability everything up to HCCL_COMM_CONFIG_BUFFER_NAME is understood: names and
 * timeouts are followed, what concerns real links and buffers makes no difference here. */
#define CONFIG_CAPABILITIES 12

/* ---- what the processes share ---- */

/* What a rank is calling: compared by all, so that a mismatch is an error and not wrong data. */
struct announcement {
    int32_t kind, type, operation, root;
    uint64_t bytes[MAX_RANKS]; /* by part, see struct call */
};

struct place {
    int32_t process, file;
    uint64_t token, piece;
};

struct subgroup {
    _Atomic uint32_t state; /* 0 free, 1 being written, 2 can be read */
    uint64_t id;
    struct place place;
};

struct shared {
    _Atomic uint64_t token;
    _Atomic uint32_t ranks, closed;
    _Atomic uint64_t arrived;
    _Atomic uint32_t generation;           /* waits that all ranks have reached */
    _Atomic uint64_t progress[MAX_RANKS];  /* waits that this rank has reached */
    struct announcement announcements[2][MAX_RANKS];
    struct subgroup subgroups[SUBGROUPS];
    char slots[]; /* 2 * ranks */
};

/* ---- what a process keeps ---- */

typedef struct communicator {
    pthread_mutex_t lock; /* calls on one communicator happen one after the other */
    struct shared *shared;
    size_t length, piece;
    uint32_t rank, ranks;
    uint32_t waits;
    double patience; /* seconds, 0: for ever */
    HcclResult broken; /* after an error nothing fits together any more: every later call returns it again */
    char name[NAME_LENGTH];
} *HcclComm;

static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t calls_of_kind[KINDS];
static int known_rank = -1;

/* The simulated libascendcl makes this the text of aclGetRecentErrMsg(), which torch_npu adds to its exceptions. */
void simnpu_explain(const char *text) __attribute__((weak));
/* And this counts a launch. */
void simnpu_launched(const char *what) __attribute__((weak));

static void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Says what is wrong, where HCCL has its log files. */
static void complain(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "[simulated HCCL, rank %d, process %d] %s\n", known_rank, (int)getpid(), text);
    if (simnpu_explain)
        simnpu_explain(text);
}

static double number_from(const char *name, double otherwise) {
    const char *value = getenv(name);
    return value && *value ? atof(value) : otherwise;
}

static bool alone(void) { return getenv("SIMNPU_ADAPTERS") != NULL; }

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Sleeps until the word is no longer `value` and is woken, at most until the deadline (0: for ever): false when that
 * has passed. May wake for no reason. */
static bool sleep_while(_Atomic uint32_t *word, uint32_t value, double deadline) {
    struct timespec timeout, *limit = NULL;
    if (deadline > 0) {
        double left = deadline - now();
        if (left <= 0)
            return false;
        timeout.tv_sec = (time_t)left;
        timeout.tv_nsec = (long)((left - (double)timeout.tv_sec) * 1e9);
        limit = &timeout;
    }
    syscall(SYS_futex, word, FUTEX_WAIT, value, limit, NULL, 0);
    return true;
}

static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static void hang(void) {
    for (;;)
        pause();
}

static char *slot_of(HcclComm comm, uint32_t rank) {
    return comm->shared->slots + ((size_t)(comm->waits % 2) * comm->ranks + rank) * comm->piece;
}

static size_t length_for(uint32_t ranks, size_t piece) { return sizeof(struct shared) + 2 * ranks * piece; }

/* Returns when all ranks are here, or false when they are not within that many seconds (0: for ever). */
static bool meet(HcclComm comm, double patience) {
    if (alone())
        return true;
    struct shared *shared = comm->shared;
    uint32_t mine = ++comm->waits;
    atomic_store(&shared->progress[comm->rank], mine);
    if (atomic_fetch_add(&shared->arrived, 1) + 1 == (uint64_t)mine * comm->ranks) {
        atomic_store(&shared->generation, mine);
        wake_all(&shared->generation);
        return true;
    }
    double deadline = patience > 0 ? now() + patience : 0;
    for (;;) {
        uint32_t generation = atomic_load(&shared->generation);
        if ((int32_t)(generation - mine) >= 0)
            return true;
        if (!sleep_while(&shared->generation, generation, deadline))
            return false;
    }
}

/* The list of the ranks that have not come to where this one waits, for messages. */
static const char *missing(HcclComm comm, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (uint32_t rank = 0; rank < comm->ranks && used + 16 < size; rank++)
        if (atomic_load(&comm->shared->progress[rank]) < comm->waits)
            used += (size_t)snprintf(text + used, size - used, "%s%u", used ? "," : "", rank);
    return text;
}

/* ---- reductions ---- */

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (value != value)
        return (uint16_t)(wide >> 16 | 0x40);                     /* stays a NaN whatever its lower bits were */
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

static float from_fp16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023, wide;
    float value;
    if (exponent == 0) { /* zero and subnormal numbers: fraction * 2^-24 is exact in fp32 */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    wide = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_fp16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    uint16_t sign = (uint16_t)(wide >> 16 & 0x8000);
    uint32_t magnitude = wide & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return sign | 0x7e00;
    if (magnitude >= 0x477ff000) /* 65520 and above round to infinity */
        return sign | 0x7c00;
    if (magnitude < 0x38800000) { /* below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in the last bits */
        float positive, half = 0.5f;
        memcpy(&positive, &magnitude, sizeof positive);
        positive += half;
        memcpy(&wide, &positive, sizeof wide);
        return (uint16_t)(sign | (wide - 0x3f000000));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

/* `into` op= `from`. Integers wrap around, so they are computed as unsigned; a NaN stays in MAX and MIN, so that a run
 * that has diverged shows. */
#define FOLD(name, type, wrapping)                                                            \
    static void name(type *into, const type *from, size_t count, HcclReduceOp operation) {   \
        if (operation == SUM)                                                                 \
            for (size_t i = 0; i < count; i++)                                                \
                into[i] = (type)((wrapping)into[i] + (wrapping)from[i]);                      \
        else if (operation == PROD)                                                           \
            for (size_t i = 0; i < count; i++)                                                \
                into[i] = (type)((wrapping)into[i] * (wrapping)from[i]);                      \
        else if (operation == MAX)                                                            \
            for (size_t i = 0; i < count; i++)                                                \
                into[i] = from[i] != from[i] || from[i] > into[i] ? from[i] : into[i];        \
        else                                                                                  \
            for (size_t i = 0; i < count; i++)                                                \
                into[i] = from[i] != from[i] || from[i] < into[i] ? from[i] : into[i];        \
    }

FOLD(fold_int8, int8_t, uint32_t)
FOLD(fold_int16, int16_t, uint32_t)
FOLD(fold_int32, int32_t, uint32_t)
FOLD(fold_int64, int64_t, uint64_t)
FOLD(fold_fp32, float, float)

/* The ranks' pieces, in the order of the ranks, into `into`. */
static void reduce(char *into, const char *const *pieces, uint32_t ranks, size_t bytes, HcclDataType type,
                   HcclReduceOp operation) {
    size_t count = bytes / TYPE[type].size;
    if (type == BF16 || type == FP16) {
        float (*widen)(uint16_t) = type == BF16 ? from_bf16 : from_fp16;
        uint16_t (*narrow)(float) = type == BF16 ? to_bf16 : to_fp16;
        enum { BLOCK = 1024 };
        float sum[BLOCK], next[BLOCK];
        for (size_t start = 0; start < count; start += BLOCK) {
            size_t length = count - start < BLOCK ? count - start : BLOCK;
            for (uint32_t rank = 0; rank < ranks; rank++) {
                const uint16_t *piece = (const uint16_t *)pieces[rank] + start;
                float *wide = rank == 0 ? sum : next;
                for (size_t i = 0; i < length; i++)
                    wide[i] = widen(piece[i]);
                if (rank > 0)
                    fold_fp32(sum, next, length, operation);
            }
            for (size_t i = 0; i < length; i++)
                ((uint16_t *)into)[start + i] = narrow(sum[i]);
        }
        return;
    }
    memcpy(into, pieces[0], bytes);
    for (uint32_t rank = 1; rank < ranks; rank++) {
        const void *piece = pieces[rank];
        switch (type) {
        case INT8: fold_int8((int8_t *)into, piece, count, operation); break;
        case INT16: fold_int16((int16_t *)into, piece, count, operation); break;
        case INT32: fold_int32((int32_t *)into, piece, count, operation); break;
        case INT64: fold_int64((int64_t *)into, piece, count, operation); break;
        default: fold_fp32((float *)into, piece, count, operation); break; /* refuse_reduction() let nothing else by */
        }
    }
}

/* ---- limits ---- */

static bool wrong_type(enum kind kind, HcclDataType type) {
    if ((unsigned)type < TYPES)
        return false;
    complain("EI0003: %s: the data type %d is not supported.", KIND[kind], (int)type);
    return true;
}

/* HCCL's reductions on Atlas A2 and A3 take int8, int16, int32, int64, float16, float32 and bfloat16, and PROD neither
 * int16 nor bfloat16. */
static bool refuse_reduction(enum kind kind, HcclDataType type, HcclReduceOp operation) {
    if ((unsigned)operation > MIN) {
        complain("EI0003: %s: the reduction %d is not supported.", KIND[kind], (int)operation);
        return true;
    }
    bool takes = type == INT8 || type == INT16 || type == INT32 || type == INT64 || type == FP16 || type == FP32 ||
                 type == BF16;
    if (takes && !(operation == PROD && (type == INT16 || type == BF16)))
        return false;
    complain("EI0003: %s: %s is not supported with the reduction %d (0 sum, 1 prod, 2 max, 3 min).", KIND[kind],
             TYPE[type].name, (int)operation);
    return true;
}

/* torch_npu documents limits for all_gather_into_tensor and reduce_scatter_tensor that HCCL has not, and that
 * all_gather and reduce_scatter with lists, which make the same call here, have not either: world sizes 3, 5, 6 and 7
 * are excluded, and data types other than bf16, fp16, fp32, int8, int32 (and bool, which travels as uint8, in the
 * gather). So only a call that comes from those methods of its process group may be refused, and the stack tells. */
static bool refuse_tensor(enum kind kind, HcclDataType type, uint32_t ranks) {
    bool wrong_ranks = ranks == 3 || ranks == 5 || ranks == 6 || ranks == 7;
    bool right_type = type == BF16 || type == FP16 || type == FP32 || type == INT8 || type == INT32 ||
                      (type == UINT8 && kind == ALL_GATHER);
    if (!wrong_ranks && right_type)
        return false;
    void *frames[64];
    int depth = backtrace(frames, 64);
    for (int i = 0; i < depth; i++) {
        Dl_info function;
        if (!dladdr(frames[i], &function) || !function.dli_sname || !strstr(function.dli_sname, "ProcessGroupHCCL"))
            continue;
        bool gathers = strstr(function.dli_sname, "_allgather_base") ||
                       strstr(function.dli_sname, "allgather_into_tensor_coalesced");
        bool scatters = strstr(function.dli_sname, "_reduce_scatter_base") ||
                        strstr(function.dli_sname, "reduce_scatter_tensor_coalesced");
        if (!gathers && !scatters)
            continue;
        complain("EI0003: torch_npu's documentation excludes %s of %s in a group of %u: world sizes 3, 5, 6 and 7 and "
                 "types other than bf16, fp16, fp32, int8, int32%s are not supported.",
                 gathers ? "all_gather_into_tensor" : "reduce_scatter_tensor", TYPE[type].name, ranks,
                 gathers ? " and bool" : "");
        return true;
    }
    return false;
}

/* ---- counting and faults ---- */

/* Whether the variable names this call: KIND:N[@RANK],... */
static bool chosen(const char *variable, enum kind kind, uint64_t number, int rank) {
    const char *list = getenv(variable);
    while (list && *list) {
        char name[32];
        unsigned long long which;
        int who;
        int fields = sscanf(list, "%31[a-z_]:%llu@%d", name, &which, &who);
        if (fields < 2) {
            complain("%s=%s: expected KIND:N[@RANK],... such as all_reduce:3@1", variable, getenv(variable));
            abort();
        }
        if (strcmp(name, KIND[kind]) == 0 && which == number && (fields == 2 || who == rank))
            return true;
        list = strchr(list, ',');
        list = list ? list + 1 : NULL;
    }
    return false;
}

/* Outside of any lock: Python listens, and may have to wait for its own. */
static void launched(enum kind kind) {
    char what[32];
    snprintf(what, sizeof what, "hccl::%s", KIND[kind]);
    if (simnpu_launched)
        simnpu_launched(what);
}

/* Counts a call and carries out the fault that is ordered for it. */
static HcclResult begin(HcclComm comm, enum kind kind) {
    pthread_mutex_lock(&process_lock);
    uint64_t number = ++calls_of_kind[kind];
    pthread_mutex_unlock(&process_lock);
    if (comm->broken)
        return comm->broken;
    if (chosen("SIMNPU_HCCL_HANG", kind, number, known_rank)) {
        complain("SIMNPU_HCCL_HANG: %s number %llu never returns.", KIND[kind], (unsigned long long)number);
        hang();
    }
    if (chosen("SIMNPU_HCCL_FAIL", kind, number, known_rank)) {
        complain("SIMNPU_HCCL_FAIL: %s number %llu fails.", KIND[kind], (unsigned long long)number);
        return comm->broken = HCCL_E_REMOTE;
    }
    return HCCL_SUCCESS;
}

/* ---- collectives ---- */

/* A collective as its parts: each rank sends either one message that all may read (parts = 1) or one to each rank
 * (parts = ranks), and takes from every rank the message meant for it, to put them beside each other (reducing false,
 * a NULL in `into` leaves that rank out) or to reduce them into into[0]. */
struct call {
    enum kind kind;
    HcclDataType type;
    uint32_t operation, root;
    bool reducing;
    uint32_t parts;
    const char *from[MAX_RANKS];
    uint64_t from_bytes[MAX_RANKS];
    char *into[MAX_RANKS];
    uint64_t into_bytes[MAX_RANKS];
};

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* All ranks see the same announcements, so all come to the same answer. */
static bool fits(HcclComm comm, const struct call *call, const struct announcement *all) {
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        const struct announcement *theirs = &all[rank], *first = &all[0];
        if (theirs->kind != first->kind || theirs->type != first->type || theirs->operation != first->operation ||
            theirs->root != first->root) {
            complain("EI0005: the ranks of communicator %s call different things: rank 0 %s of %s (operation %d, root "
                     "%d), rank %u %s of %s (operation %d, root %d).",
                     comm->name, KIND[first->kind], TYPE[first->type].name, first->operation, first->root, rank,
                     KIND[theirs->kind], TYPE[theirs->type].name, theirs->operation, theirs->root);
            return false;
        }
        uint64_t sent = theirs->bytes[call->parts == 1 ? 0 : comm->rank];
        uint64_t expected = call->reducing ? call->into_bytes[0] : call->into_bytes[rank];
        if ((call->reducing || call->into[rank]) && sent != expected) {
            complain("EI0005: %s of communicator %s: rank %u sends %llu bytes to rank %u, which expects %llu.",
                     KIND[call->kind], comm->name, rank, (unsigned long long)sent, comm->rank,
                     (unsigned long long)expected);
            return false;
        }
    }
    return true;
}

static HcclResult run(HcclComm comm, const struct call *call) {
    if (alone())
        return HCCL_SUCCESS;
    size_t section = comm->piece / call->parts / 64 * 64; /* of a slot for each part; whole elements of every type */
    uint32_t part = call->parts == 1 ? 0 : comm->rank;
    uint64_t rounds = 1;
    for (uint64_t round = 0; round < rounds; round++) {
        uint64_t done = round * section;
        char *mine = slot_of(comm, comm->rank);
        for (uint32_t i = 0; i < call->parts; i++)
            if (call->from_bytes[i] > done)
                memcpy(mine + i * section, call->from[i] + done, smaller(call->from_bytes[i] - done, section));
        struct announcement *all = comm->shared->announcements[comm->waits % 2];
        if (round == 0) {
            struct announcement *announcement = &all[comm->rank];
            announcement->kind = (int32_t)call->kind;
            announcement->type = (int32_t)call->type;
            announcement->operation = (int32_t)call->operation;
            announcement->root = (int32_t)call->root;
            memcpy(announcement->bytes, call->from_bytes, sizeof announcement->bytes);
        }
        const char *slots = slot_of(comm, 0); /* of this round: the next wait moves on to the others */
        if (!meet(comm, comm->patience)) {
            char text[256];
            complain("EI0002: %s of communicator %s on rank %u of %u: no notification from rank %s within %g s "
                     "(HCCL_EXEC_TIMEOUT).",
                     KIND[call->kind], comm->name, comm->rank, comm->ranks,
                     missing(comm, text, sizeof text), comm->patience);
            return HCCL_E_TIMEOUT;
        }
        if (round == 0) {
            if (!fits(comm, call, all))
                return HCCL_E_PARA;
            for (uint32_t rank = 0; rank < comm->ranks; rank++)
                for (uint32_t i = 0; i < call->parts; i++) {
                    uint64_t needed = (all[rank].bytes[i] + section - 1) / section;
                    rounds = needed > rounds ? needed : rounds;
                }
        }
        const char *pieces[MAX_RANKS];
        for (uint32_t rank = 0; rank < comm->ranks; rank++)
            pieces[rank] = slots + rank * comm->piece + part * section;
        if (call->reducing && call->into[0] && call->into_bytes[0] > done)
            reduce(call->into[0] + done, pieces, comm->ranks, smaller(call->into_bytes[0] - done, section), call->type,
                   call->operation);
        for (uint32_t rank = 0; rank < comm->ranks && !call->reducing; rank++)
            if (call->into[rank] && call->into_bytes[rank] > done)
                memcpy(call->into[rank] + done, pieces[rank], smaller(call->into_bytes[rank] - done, section));
    }
    return HCCL_SUCCESS;
}

static HcclResult collective(HcclComm comm, const struct call *call) {
    launched(call->kind);
    pthread_mutex_lock(&comm->lock);
    HcclResult result = begin(comm, call->kind);
    if (!result)
        result = comm->broken = run(comm, call);
    pthread_mutex_unlock(&comm->lock);
    return result;
}

static bool wrong_root(HcclComm comm, enum kind kind, uint32_t root) {
    if (root < comm->ranks)
        return false;
    complain("EI0003: %s: root %u is not in 0..%u.", KIND[kind], root, comm->ranks - 1);
    return true;
}

HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
                         HcclComm comm, void *stream) {
    (void)stream;
    if (!comm)
        return HCCL_E_PTR;
    if (wrong_type(ALL_REDUCE, type))
        return HCCL_E_PARA;
    if (refuse_reduction(ALL_REDUCE, type, operation))
        return HCCL_E_NOT_SUPPORT;
    uint64_t bytes = count * TYPE[type].size;
    struct call call = {ALL_REDUCE, type, operation, 0, true, 1, {send}, {bytes}, {receive}, {bytes}};
    return collective(comm, &call);
}

HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
                             HcclComm comm, void *stream) {
    (void)stream;
    if (!comm)
        return HCCL_E_PTR;
    if (wrong_type(REDUCE_SCATTER, type))
        return HCCL_E_PARA;
    if (refuse_reduction(REDUCE_SCATTER, type, operation) || refuse_tensor(REDUCE_SCATTER, type, comm->ranks))
        return HCCL_E_NOT_SUPPORT;
    uint64_t bytes = count * TYPE[type].size;
    struct call call = {REDUCE_SCATTER, type, operation, 0, true, comm->ranks, {0}, {0}, {receive}, {bytes}};
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        call.from[rank] = (const char *)send + rank * bytes;
        call.from_bytes[rank] = bytes;
    }
    return collective(comm, &call);
}

HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, void *stream) {
    (void)stream;
    if (!comm)
        return HCCL_E_PTR;
    if (wrong_type(BROADCAST, type) || wrong_root(comm, BROADCAST, root))
        return HCCL_E_PARA;
    uint64_t bytes = count * TYPE[type].size;
    struct call call = {.kind = BROADCAST, .type = type, .root = root, .parts = 1};
    if (comm->rank == root) {
        call.from[0] = buffer;
        call.from_bytes[0] = bytes;
    } else {
        call.into[root] = buffer;
        call.into_bytes[root] = bytes;
    }
    return collective(comm, &call);
}

HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type, HcclComm comm, void *stream) {
    (void)stream;
    if (!comm)
        return HCCL_E_PTR;
    if (wrong_type(ALL_GATHER, type))
        return HCCL_E_PARA;
    if (refuse_tensor(ALL_GATHER, type, comm->ranks))
        return HCCL_E_NOT_SUPPORT;
    uint64_t bytes = count * TYPE[type].size;
    struct call call = {.kind = ALL_GATHER, .type = type, .parts = 1, .from = {send}, .from_bytes = {bytes}};
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        call.into[rank] = (char *)receive + rank * bytes;
        call.into_bytes[rank] = bytes;
    }
    return collective(comm, &call);
}

HcclResult HcclAlltoAll(const void *send, uint64_t send_count, HcclDataType send_type, const void *receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm comm, void *stream) {
    (void)stream;
    if (!comm)
        return HCCL_E_PTR;
    if (wrong_type(ALL_TO_ALL, send_type) || wrong_type(ALL_TO_ALL, receive_type))
        return HCCL_E_PARA;
    uint64_t send_bytes = send_count * TYPE[send_type].size, receive_bytes = receive_count * TYPE[receive_type].size;
    struct call call = {.kind = ALL_TO_ALL, .type = send_type, .parts = comm->ranks};
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        call.from[rank] = (const char *)send + rank * send_bytes;
        call.from_bytes[rank] = send_bytes;
        call.into[rank] = (char *)receive + rank * receive_bytes;
        call.into_bytes[rank] = receive_bytes;
    }
    return collective(comm, &call);
}

HcclResult HcclAlltoAllV(const void *send, const void *send_counts, const void *send_offsets, HcclDataType send_type,
                         const void *receive, const void *receive_counts, const void *receive_offsets,
                         HcclDataType receive_type, HcclComm comm, void *stream) {
    (void)stream;
    if (!comm)
        return HCCL_E_PTR;
    if (wrong_type(ALL_TO_ALL_V, send_type) || wrong_type(ALL_TO_ALL_V, receive_type))
        return HCCL_E_PARA;
    size_t send_size = TYPE[send_type].size, receive_size = TYPE[receive_type].size;
    struct call call = {.kind = ALL_TO_ALL_V, .type = send_type, .parts = comm->ranks};
    for (uint32_t rank = 0; rank < comm->ranks; rank++) {
        call.from[rank] = (const char *)send + ((const uint64_t *)send_offsets)[rank] * send_size;
        call.from_bytes[rank] = ((const uint64_t *)send_counts)[rank] * send_size;
        call.into[rank] = (char *)receive + ((const uint64_t *)receive_offsets)[rank] * receive_size;
        call.into_bytes[rank] = ((const uint64_t *)receive_counts)[rank] * receive_size;
    }
    return collective(comm, &call);
}

HcclResult HcclBarrier(HcclComm comm, void *stream) {
    (void)stream;
    if (!comm)
        return HCCL_E_PTR;
    struct call call = {.kind = BARRIER, .parts = 1};
    return collective(comm, &call);
}

HcclResult HcclGroupStart(void) { return HCCL_SUCCESS; }

HcclResult HcclGroupEnd(void) { return HCCL_SUCCESS; }

/* ---- communicators ---- */

static HcclResult make_shared_memory(size_t piece, struct place *place) {
    int file = memfd_create("simulated HCCL", MFD_CLOEXEC);
    uint64_t token;
    if (file < 0 || ftruncate(file, sizeof(struct shared)) || getrandom(&token, sizeof token, 0) != sizeof token ||
        pwrite(file, &token, sizeof token, offsetof(struct shared, token)) != sizeof token) {
        complain("no shared memory: %s", strerror(errno));
        return HCCL_E_SYSCALL;
    }
    *place = (struct place){.process = (int32_t)getpid(), .file = file, .token = token, .piece = piece};
    return HCCL_SUCCESS;
}

static HcclResult join(const struct place *place, uint32_t rank, uint32_t ranks, const HcclCommConfig *config,
                       HcclComm *result) {
    pthread_mutex_lock(&process_lock);
    if (known_rank < 0)
        known_rank = (int)number_from("RANK", rank);
    pthread_mutex_unlock(&process_lock);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", place->process, place->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    size_t length = length_for(ranks, place->piece);
    struct shared *shared = MAP_FAILED;
    struct stat status;
    if (file >= 0 && fstat(file, &status) == 0 && (status.st_size >= (off_t)length || !ftruncate(file, (off_t)length)))
        shared = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (shared == MAP_FAILED || atomic_load(&shared->token) != place->token) {
        complain("EI0015: the memory of the root process %d cannot be opened (%s): is it still alive?", place->process,
                 strerror(errno));
        return HCCL_E_UNAVAIL;
    }
    uint32_t unset = 0;
    if (!atomic_compare_exchange_strong(&shared->ranks, &unset, ranks) && unset != ranks) {
        complain("EI0003: rank %u says that the communicator has %u ranks, another says %u.", rank, ranks, unset);
        munmap(shared, length);
        return HCCL_E_PARA;
    }

    HcclComm comm = calloc(1, sizeof *comm);
    pthread_mutex_init(&comm->lock, NULL);
    comm->shared = shared;
    comm->length = length;
    comm->piece = place->piece;
    comm->rank = rank;
    comm->ranks = ranks;
    comm->patience = number_from("HCCL_EXEC_TIMEOUT", 1836);
    if (config && config->size >= CONFIG_TIMEOUT_END && config->exec_timeout >= 0)
        comm->patience = config->exec_timeout;
    if (config && config->size >= CONFIG_NAME_END && config->name[0])
        snprintf(comm->name, NAME_LENGTH, "%.*s", NAME_LENGTH - 1, config->name);
    else
        snprintf(comm->name, NAME_LENGTH, "simulated_%d_%llx", place->process,
                 (unsigned long long)place->token);

    double patience = number_from("HCCL_CONNECT_TIMEOUT", 120);
    if (!meet(comm, patience)) {
        char text[256];
        complain("EI0015: rank %u of %u of communicator %s: not all ranks have come within %g s "
                 "(HCCL_CONNECT_TIMEOUT). List of unconnected ranks: \"[%s]\"",
                 rank, ranks, comm->name, patience, missing(comm, text, sizeof text));
        munmap(shared, length);
        free(comm);
        return HCCL_E_TIMEOUT;
    }
    /* Everybody has mapped it: the file of the process that made it is needed no more. */
    if (place->process == getpid() && atomic_exchange(&shared->closed, 1) == 0)
        close(place->file);

    *result = comm;
    return HCCL_SUCCESS;
}

HcclResult HcclGetRootInfo(HcclRootInfo *root_info) {
    if (!root_info)
        return HCCL_E_PTR;
    struct place place;
    HcclResult result = make_shared_memory((size_t)number_from("SIMNPU_HCCL_PIECE", DEFAULT_PIECE_BYTES), &place);
    if (result)
        return result;
    memset(root_info, 0, sizeof *root_info);
    memcpy(root_info->internal, &place, sizeof place);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *root_info, uint32_t rank,
                                      const HcclCommConfig *config, HcclComm *comm) {
    if (!root_info || !comm)
        return HCCL_E_PTR;
    if (ranks == 0 || ranks > MAX_RANKS || rank >= ranks || (config && config->magic != CONFIG_MAGIC)) {
        complain("EI0003: rank %u of %u (1..%d are possible) or its configuration is not valid.", rank, ranks,
                 MAX_RANKS);
        return HCCL_E_PARA;
    }
    struct place place;
    memcpy(&place, root_info->internal, sizeof place);
    return join(&place, rank, ranks, config, comm);
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *root_info, uint32_t rank, HcclComm *comm) {
    return HcclCommInitRootInfoConfig(ranks, root_info, rank, NULL, comm);
}

/* A communicator of some ranks of another one: its first rank makes the memory and says in the memory of the parent
 * where it is. A process that takes no part passes no ranks and gets none. */
HcclResult HcclCreateSubCommConfig(HcclComm *parent_pointer, uint32_t ranks, uint32_t *rank_ids, uint64_t id,
                                   uint32_t rank, HcclCommConfig *config, HcclComm *comm) {
    if (!parent_pointer || !*parent_pointer || !comm)
        return HCCL_E_PTR;
    HcclComm parent = *parent_pointer;
    if (!rank_ids) {
        *comm = NULL;
        return HCCL_SUCCESS;
    }
    if (ranks == 0 || rank >= ranks || ranks > parent->ranks || rank_ids[rank] != parent->rank ||
        (config && config->magic != CONFIG_MAGIC))
        return HCCL_E_PARA;
    struct place place;
    double patience = number_from("HCCL_CONNECT_TIMEOUT", 120), deadline = now() + patience;
    if (rank == 0 || alone()) {
        HcclResult result = make_shared_memory(parent->piece, &place);
        if (result)
            return result;
        struct subgroup *free_one = NULL;
        for (int i = 0; i < SUBGROUPS && !free_one; i++) {
            uint32_t empty = 0;
            if (atomic_compare_exchange_strong(&parent->shared->subgroups[i].state, &empty, 1))
                free_one = &parent->shared->subgroups[i];
        }
        if (!free_one)
            return HCCL_E_UNAVAIL;
        free_one->id = id;
        free_one->place = place;
        atomic_store(&free_one->state, 2);
        result = join(&place, rank, ranks, config, comm);
        atomic_store(&free_one->state, 0); /* all have read it, or it is too late */
        return result;
    }
    for (;;) {
        for (int i = 0; i < SUBGROUPS; i++) {
            struct subgroup *subgroup = &parent->shared->subgroups[i];
            if (atomic_load(&subgroup->state) == 2 && subgroup->id == id) {
                place = subgroup->place;
                return join(&place, rank, ranks, config, comm);
            }
        }
        if (now() > deadline) {
            complain("EI0015: rank %u of %u of a new communicator of %s: its first rank has not come within %g s "
                     "(HCCL_CONNECT_TIMEOUT).",
                     rank, ranks, parent->name, patience);
            return HCCL_E_TIMEOUT;
        }
        usleep(2000);
    }
}

/* Its memory stays as long as another rank has it mapped, so nobody has to wait. A communicator in which a thread of
 * this process still waits stays mapped too. */
HcclResult HcclCommDestroy(HcclComm comm) {
    if (!comm)
        return HCCL_E_PTR;
    if (pthread_mutex_trylock(&comm->lock))
        return HCCL_SUCCESS;
    munmap(comm->shared, comm->length);
    pthread_mutex_unlock(&comm->lock);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char *name) {
    if (!comm || !name)
        return HCCL_E_PTR;
    strcpy(name, comm->name);
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t *ranks) {
    if (!comm || !ranks)
        return HCCL_E_PTR;
    *ranks = comm->ranks;
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) {
    if (!comm || !rank)
        return HCCL_E_PTR;
    *rank = comm->rank;
    return HCCL_SUCCESS;
}

/* Nothing goes wrong behind a call's back here: every error is the result of the call itself. */
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *error) {
    if (!comm || !error)
        return HCCL_E_PTR;
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}

const char *HcclGetErrorString(HcclResult code) {
    static const char *const TEXT[] = {
        "no error",
        "parameter error",
        "empty pointer",
        "memory error",
        "internal error",
        "not support feature",
        "not found specific resource",
        "resource unavailable",
        "call system interface error",
        "timeout",
        "open file fail",
        "tcp connect fail",
        "roce connect fail",
        "tcp transfer fail",
        "roce transfer fail",
        "call runtime api fail",
        "call driver api fail",
        "call profiling api fail",
        "call cce api fail",
        "call network api fail",
        "try again",
        "error cqe",
    };
    return (unsigned)code < sizeof TEXT / sizeof *TEXT ? TEXT[code] : "unknow error";
}

uint32_t HcclGetCommConfigCapability(void) { return CONFIG_CAPABILITIES; }

/* HCCL_DETERMINISTIC is the only setting that torch_npu makes: everything here is deterministic anyway. */
HcclResult HcclSetConfig(int config, int32_t value) {
    (void)config;
    (void)value;
    return HCCL_SUCCESS;
}

/* Optional parts of HCCL, which torch_npu asks for only when told to, and collectives that this project never calls. */
#define UNSUPPORTED(name) \
    HcclResult name(void) { return HCCL_E_NOT_SUPPORT; }

UNSUPPORTED(HcclReduce)
UNSUPPORTED(HcclScatter)
UNSUPPORTED(HcclSend)
UNSUPPORTED(HcclRecv)
UNSUPPORTED(HcclBatchSendRecv)
UNSUPPORTED(HcclCommInitAll)
UNSUPPORTED(HcclCommInitClusterInfo)
UNSUPPORTED(HcclCommInitClusterInfoConfig)
UNSUPPORTED(HcclGetRootInfoScalable)
UNSUPPORTED(HcclCommInitRootInfoScalable)
UNSUPPORTED(HcclCommSuspend)
UNSUPPORTED(HcclCommResume)
UNSUPPORTED(HcclCommWorkingDevNicSet)
UNSUPPORTED(HcclCommSetMemoryRange)
UNSUPPORTED(HcclCommUnsetMemoryRange)
UNSUPPORTED(HcclCommActivateCommMemory)
UNSUPPORTED(HcclCommDeactivateCommMemory)
UNSUPPORTED(HcclCommRegister)
UNSUPPORTED(HcclCommDeregister)
UNSUPPORTED(HcclCommExchangeMem)
UNSUPPORTED(HcclCommSymWinRegister)
UNSUPPORTED(HcclCommSymWinDeregister)
