/* A simulated libascendcl: the runtime of CANN with host memory for device memory.
 *
 * The real torch_npu links and looks up these functions; its headers, which come with its wheel, declare them, so a
 * wrong signature does not compile. build.py compiles this file and makes stubs that fail loudly for what is missing.
 *
 * Modelled:
 *  - SIMNPU_DEVICES devices of type SIMNPU_SOC; contexts, streams, events with host time.
 *  - Device memory of SIMNPU_MEMORY bytes a device, counted per process: what goes beyond fails with the runtime's
 *    out-of-memory code. Fresh memory holds 0xFF bytes (NaN, -1) and costs the host nothing until it is written.
 *    Reserved, physical and mapped memory as the expandable segments of torch_npu's allocator want it.
 *  - Time: kernels run when they are launched (kernels.py), but what the host may see of them arrives late. An
 *    asynchronous copy to the host puts 0xFF bytes into the host's buffer, and the data only when the host waits for
 *    the stream, or for an event recorded after the copy, or asks either whether it is done. An asynchronous copy from
 *    pinned host memory takes the data at once; when the host waits, the buffer must still hold it, else the wait
 *    fails: on hardware the device might have read the new content. From other host memory the data is taken at once
 *    and for good.
 *  - Capture of graphs: which streams are captured, what is forbidden meanwhile. The captured kernels themselves are
 *    kept by kernels.py, which is told of the end of a capture, of replays and of the end of a graph.
 *  - With SIMNPU_ADAPTERS=FILE the device computes nothing: its memory is addresses alone, which read as zeros and forget
 *    what is written, so that a model of any size fits; every operator (opapi.c), copy, collective and wait of the host
 *    becomes a line of FILE (adapters.py reads it).
 * Not modelled: kernels' execution order between streams (all run at once), memory shared between processes. */
#define _GNU_SOURCE
#include <pthread.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "acl/acl_prof.h"
#include "objects.h"
#include "profiling/aprof_pub.h"

#define MAX_DEVICES 64
#define POISON 0xFF
#define HUGE_PAGE (2UL << 20)

typedef struct Allocation {
    char *address;
    size_t size;
    int device; /* -1 for pinned host memory */
    struct Allocation *next;
} Allocation;

typedef struct Physical {
    size_t size;
    int device;
    char *mapped; /* where, or NULL */
    struct Physical *next;
} Physical;

typedef struct Stream Stream;

/* What a stream has under way: a copy, or a wait for another stream. */
typedef struct Pending {
    enum { TO_HOST, FROM_HOST, WAIT_FOR } kind;
    uint64_t ticket;
    char *host;
    char *data; /* the copy's content, kept until it is done */
    size_t size;
    Stream *other;
    uint64_t other_ticket;
    struct Pending *next;
} Pending;

typedef struct Graph {
    uint32_t id;
    Stream *origin;
    aclmdlRICaptureMode mode;
    pthread_t thread;
    int invalid;
} Graph;

struct Stream {
    int device;
    int32_t id;
    Pending *first, *last;
    Graph *capture; /* the graph that what is launched here goes into, or NULL */
    struct Stream *next;
};

typedef struct Event {
    Stream *stream;  /* where it was recorded last, or NULL */
    uint64_t ticket; /* all that was under way there when it was recorded has a lower ticket */
    uint64_t nanoseconds;
    Graph *capture;
} Event;

typedef struct Context {
    int device;
} Context;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation *allocations;
static Allocation *reservations;
static Physical *physicals;
static Stream *streams;
static size_t used[MAX_DEVICES];
static int active[MAX_DEVICES];
static Context contexts[MAX_DEVICES];
static Stream default_streams[MAX_DEVICES];
static uint64_t ticket = 1;
static uint32_t graphs_made;
static int32_t streams_made;
static int initialised;
static _Thread_local Context *current;
static _Thread_local aclmdlRICaptureMode capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
static _Thread_local char message[1024];

/* Read and called by kernels.py through ctypes. */
int simnpu_captures;                                       /* graphs being captured now */
static void (*on_capture)(uint32_t graph, int begins);     /* a capture begins (1), ends (0) or has failed (-1) */
static int (*on_replay)(uint32_t graph);                   /* run a captured graph */
static void (*on_destroy)(uint32_t graph);                 /* forget it */
static int (*on_operator)(const char *name, void **arguments, int count); /* run one of the operators below */

void simnpu_hooks(void (*capture)(uint32_t, int), int (*replay)(uint32_t), void (*destroy)(uint32_t),
                  int (*operator)(const char *, void **, int)) {
    on_capture = capture;
    on_replay = replay;
    on_destroy = destroy;
    on_operator = operator;
}

/* ---- configuration and errors ---- */

static aclError fail(aclError code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(message, sizeof message, "EE9999: simulated CANN: ");
    vsnprintf(message + length, sizeof message - length, format, arguments);
    va_end(arguments);
    return code;
}

static int device_count(void) {
    const char *asked = getenv("SIMNPU_DEVICES");
    int count = asked ? atoi(asked) : 1;
    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible && *visible) {
        int listed = 1;
        for (const char *c = visible; *c; c++) listed += *c == ',';
        if (listed < count) count = listed;
    }
    return count > MAX_DEVICES ? MAX_DEVICES : count;
}

static size_t memory_total(void) {
    const char *asked = getenv("SIMNPU_MEMORY");
    return asked ? strtoull(asked, NULL, 10) : 64UL << 30;
}

const char *aclGetRecentErrMsg(void) {
    static _Thread_local char given[sizeof message];
    if (!*message) return NULL;
    strcpy(given, message);
    *message = 0;
    return given;
}

/* ---- the log of a device that computes nothing ---- */

int simnpu_logs(void) { return getenv("SIMNPU_ADAPTERS") != NULL; }

/* {"kind": kind, "what": what, more}, in one write: lines of several threads do not mix. */
void simnpu_log(const char *kind, const char *what, const char *more, ...) {
    static int file = -1;
    if (!simnpu_logs()) return;
    char *line = NULL, *rest = NULL;
    va_list arguments;
    va_start(arguments, more);
    int made = vasprintf(&rest, more, arguments);
    va_end(arguments);
    int length = made < 0 ? -1 : asprintf(&line, "{\"kind\": \"%s\", \"what\": \"%s\"%s}\n", kind, what, rest);
    pthread_mutex_lock(&lock);
    if (file < 0) file = open(getenv("SIMNPU_ADAPTERS"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (length < 0 || write(file, line, length) != length) {
        perror("simulated CANN: SIMNPU_ADAPTERS");
        abort();
    }
    pthread_mutex_unlock(&lock);
    free(line);
    free(rest);
}

/* For libhccl: the text of its last error, and a collective to count. */
void simnpu_explain(const char *text) { snprintf(message, sizeof message, "%s", text); }

void simnpu_launched(const char *what) { simnpu_log("collective", what, ""); }

/* For the stubs that build.py writes. */
aclError simnpu_missing(const char *name) {
    static const char *told[256]; /* once each */
    int i = 0;
    while (i < 256 && told[i] && told[i] != name) i++;
    if (i < 256 && !told[i]) {
        told[i] = name;
        fprintf(stderr, "simulated CANN: %s is not modelled\n", name);
    }
    return fail(ACL_ERROR_FEATURE_UNSUPPORTED, "%s is not modelled", name);
}

const char *aclrtGetSocName(void) {
    const char *name = getenv("SIMNPU_SOC");
    return name ? name : "Ascend910B3";
}

aclError aclInit(const char *path) {
    (void)path;
    if (initialised) return ACL_ERROR_REPEAT_INITIALIZE;
    initialised = 1;
    return 0;
}

aclError aclFinalize(void) {
    initialised = 0;
    return 0;
}

aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    int driver = name == ACL_PKG_NAME_DRIVER;
    strcpy(version->version, driver ? "25.5.0" : "9.1.0");
    strcpy(version->majorVersion, driver ? "25" : "9");
    strcpy(version->minorVersion, driver ? "5" : "1");
    strcpy(version->releaseVersion, "0");
    return 0;
}

aclError aclsysGetVersionStr(char *package, char *version) {
    (void)package;
    strcpy(version, "9.1.0");
    return 0;
}

aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    static const aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
    *list = attributes;
    *count = 2;
    return 0;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    *value = attribute != ACL_CANN_ATTR_JIT_COMPILE;
    return 0;
}

size_t aclGetCompileoptSize(aclCompileOpt option) {
    (void)option;
    return sizeof "disable";
}

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    (void)option;
    snprintf(value, length, "disable");
    return 0;
}

aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    (void)option, (void)value;
    return 0;
}

static _Atomic int64_t deterministic;  // what ACL_OPT_DETERMINISTIC was set to last, for the process or a context

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    *value = option == ACL_OPT_DETERMINISTIC ? deterministic : 0;
    return 0;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    if (option == ACL_OPT_DETERMINISTIC) deterministic = value;
    return 0;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return (void)mode, 0; }
aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { return (void)seconds, 0; }
aclError aclrtSetOpWaitTimeout(uint32_t seconds) { return (void)seconds, 0; }

aclError aclrtSetOpExecuteTimeOutV2(uint64_t asked, uint64_t *actual) {
    if (actual) *actual = asked;
    return 0;
}

void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {
    (void)level, (void)function, (void)file, (void)line, (void)format;
}

aclError aclrtGetLastError(aclrtLastErrLevel level) { return (void)level, 0; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { return (void)level, 0; }

/* ---- devices and contexts ---- */

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = device_count();
    return 0;
}

static void use(int device) {
    contexts[device].device = device;
    default_streams[device].device = device;
    active[device] = 1;
    current = &contexts[device];
}

aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count())
        return fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %d of %d", device, device_count());
    use(device);
    return 0;
}

aclError aclrtGetDevice(int32_t *device) {
    if (!current) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current->device;
    return 0;
}

aclError aclrtResetDevice(int32_t device) {
    if (device >= 0 && device < MAX_DEVICES) active[device] = 0;
    return 0;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    *context = current;
    return current ? 0 : ACL_ERROR_RT_CONTEXT_NULL;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    if (!context) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no context");
    current = context;
    return 0;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *is_active) {
    if (flags) *flags = 0;
    *is_active = device >= 0 && device < MAX_DEVICES && active[device];
    return 0;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) {
    *logical = user;
    return 0;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    (void)device, (void)peer;
    *can = 1;
    return 0;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return (void)peer, (void)flags, 0; }

aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = getpid();
    return 0;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    snprintf(uuid->bytes, sizeof uuid->bytes, "simnpu-%d", device);
    return 0;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    (void)device;
    switch (attribute) {
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = 6; break;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = 20; break;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = 40; break;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = memory_total(); break;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = 192 << 20; break;
    case ACL_DEV_ATTR_IS_VIRTUAL: *value = 0; break;
    default: return fail(ACL_ERROR_FEATURE_UNSUPPORTED, "aclrtGetDeviceInfo: attribute %d", attribute);
    }
    return 0;
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    (void)device;
    switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = 20; break;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = 40; break;
    case ACL_DEVICE_INFO_L2_SIZE: *value = 192 << 20; break;
    default: return fail(ACL_ERROR_FEATURE_UNSUPPORTED, "aclGetDeviceCapability: %d", info);
    }
    return 0;
}

aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *utilization) {
    (void)device;
    utilization->cubeUtilization = utilization->vectorUtilization = 0;
    utilization->aicpuUtilization = utilization->memoryUtilization = 0;
    return 0;
}

aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) {
    (void)device;
    *value = type == ACL_RT_DEV_RES_CUBE_CORE ? 20 : 40;
    return 0;
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) {
    return aclrtGetDeviceResLimit(0, type, value);
}

aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value) {
    return (void)stream, aclrtGetDeviceResLimit(0, type, value);
}

/* ---- memory ---- */

static int here(void) { return current ? current->device : 0; }

static aclError take(int device, size_t size) { /* with the lock held */
    if (used[device] + size > memory_total())
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device %d: %zu bytes asked for, %zu of %zu in use", device, size,
                    used[device], memory_total());
    used[device] += size;
    return 0;
}

static size_t rounded(size_t size) { return (size + 511) & ~511UL; }

/* Fresh memory in this place: every byte reads as POISON, and takes host memory only once it is written. */
static void fresh(char *address, size_t size) {
    if (simnpu_logs()) return; /* addresses alone */
    static const size_t piece = 16UL << 20;
    static int file = -1;
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (file < 0) {
        file = memfd_create("simnpu", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, piece)) abort();
        char *filled = mmap(NULL, piece, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (filled == MAP_FAILED) abort();
        memset(filled, POISON, piece);
        munmap(filled, piece);
    }
    pthread_mutex_unlock(&once);
    for (size_t done = 0; done < size; done += piece) {
        size_t length = size - done < piece ? size - done : piece;
        int how = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
        if (mmap(address + done, length, PROT_READ | PROT_WRITE, how, file, 0) == MAP_FAILED) abort();
    }
}

static aclError allocate(void **pointer, size_t size, int device) {
    size = rounded(size ? size : 1);
    pthread_mutex_lock(&lock);
    aclError error = device >= 0 ? take(device, size) : 0;
    if (!error) {
        int access = device >= 0 && simnpu_logs() ? PROT_NONE : PROT_READ | PROT_WRITE;
        char *address = mmap(NULL, size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        Allocation *allocation = malloc(sizeof *allocation);
        if (address == MAP_FAILED || !allocation) abort();
        *allocation = (Allocation){address, size, device, allocations};
        allocations = allocation;
        *pointer = address;
    }
    pthread_mutex_unlock(&lock);
    if (!error && device >= 0) fresh(*pointer, size);
    return error;
}

static Allocation *take_out(Allocation **list, const void *address) { /* with the lock held */
    for (Allocation **link = list; *link; link = &(*link)->next)
        if ((*link)->address == address) {
            Allocation *found = *link;
            *link = found->next;
            return found;
        }
    return NULL;
}

static void complete_all(void);

static aclError release(void *address) {
    pthread_mutex_lock(&lock);
    complete_all(); /* freeing waits for what is under way */
    Allocation *allocation = take_out(&allocations, address);
    if (allocation) {
        if (allocation->device >= 0) used[allocation->device] -= allocation->size;
        munmap(allocation->address, allocation->size);
        free(allocation);
    }
    pthread_mutex_unlock(&lock);
    return allocation ? 0 : fail(ACL_ERROR_RT_PARAM_INVALID, "freeing %p, which is not allocated", address);
}

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy;
    return allocate(pointer, size, here());
}

aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy;
    return allocate(pointer, size, here());
}

aclError aclrtFree(void *pointer) { return release(pointer); }
aclError aclrtMallocHost(void **pointer, size_t size) { return allocate(pointer, size, -1); }

aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *configuration) {
    (void)configuration;
    return allocate(pointer, size, -1);
}

aclError aclrtFreeHost(void *pointer) { return release(pointer); }

aclError aclrtHostRegister(void *pointer, uint64_t size, aclrtHostRegisterType type, void **device_pointer) {
    (void)type;
    Allocation *allocation = malloc(sizeof *allocation);
    if (!allocation) abort();
    pthread_mutex_lock(&lock);
    *allocation = (Allocation){pointer, size, -1, allocations};
    allocations = allocation;
    pthread_mutex_unlock(&lock);
    if (device_pointer) *device_pointer = pointer;
    return 0;
}

aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flag) {
    (void)flag;
    return aclrtHostRegister(pointer, size, ACL_HOST_REGISTER_MAPPED, NULL);
}

aclError aclrtHostUnregister(void *pointer) {
    pthread_mutex_lock(&lock);
    complete_all();
    Allocation *allocation = take_out(&allocations, pointer);
    free(allocation);
    pthread_mutex_unlock(&lock);
    return allocation ? 0 : fail(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "%p is not registered", pointer);
}

aclError aclrtReserveMemAddress(void **pointer, size_t size, size_t alignment, void *expected, uint64_t flags) {
    (void)alignment, (void)expected, (void)flags;
    char *address = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "reserving %zu bytes of addresses", size);
    char *aligned = (char *)(((uintptr_t)address + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
    if (aligned > address) munmap(address, aligned - address);
    munmap(aligned + size, address + HUGE_PAGE - aligned);
    Allocation *reservation = malloc(sizeof *reservation);
    if (!reservation) abort();
    pthread_mutex_lock(&lock);
    *reservation = (Allocation){aligned, size, here(), reservations};
    reservations = reservation;
    pthread_mutex_unlock(&lock);
    *pointer = aligned;
    return 0;
}

aclError aclrtReleaseMemAddress(void *pointer) {
    pthread_mutex_lock(&lock);
    Allocation *reservation = take_out(&reservations, pointer);
    pthread_mutex_unlock(&lock);
    if (!reservation) return fail(ACL_ERROR_RT_PARAM_INVALID, "%p is not reserved", pointer);
    munmap(reservation->address, reservation->size);
    free(reservation);
    return 0;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *properties,
                             uint64_t flags) {
    (void)flags;
    int device = properties->location.type == ACL_MEM_LOCATION_TYPE_DEVICE ? (int)properties->location.id : here();
    pthread_mutex_lock(&lock);
    aclError error = take(device, size);
    if (!error) {
        Physical *physical = malloc(sizeof *physical);
        if (!physical) abort();
        *physical = (Physical){size, device, NULL, physicals};
        physicals = physical;
        *handle = physical;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    pthread_mutex_lock(&lock);
    Physical **link = &physicals;
    while (*link && *link != handle) link = &(*link)->next;
    Physical *physical = *link;
    if (physical) {
        *link = physical->next;
        used[physical->device] -= physical->size;
        free(physical);
    }
    pthread_mutex_unlock(&lock);
    return physical ? 0 : fail(ACL_ERROR_RT_INVALID_HANDLE, "no such physical memory");
}

aclError aclrtMapMem(void *pointer, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    (void)flags;
    Physical *physical = handle;
    if (offset || size != physical->size || physical->mapped)
        return fail(ACL_ERROR_RT_PARAM_INVALID, "only whole physical memory is mapped, and once");
    fresh(pointer, size);
    pthread_mutex_lock(&lock);
    physical->mapped = pointer;
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtUnmapMem(void *pointer) {
    pthread_mutex_lock(&lock);
    complete_all();
    Physical *physical = physicals;
    while (physical && physical->mapped != pointer) physical = physical->next;
    if (physical) {
        int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        if (mmap(pointer, physical->size, PROT_NONE, how, -1, 0) == MAP_FAILED) abort();
        physical->mapped = NULL;
    }
    pthread_mutex_unlock(&lock);
    return physical ? 0 : fail(ACL_ERROR_RT_PARAM_INVALID, "%p is not mapped", pointer);
}

/* With the lock held: the device whose memory an address is in, -1 for pinned host memory, -2 for neither. */
static int location(const void *pointer) {
    const char *address = pointer;
    for (Physical *p = physicals; p; p = p->next)
        if (p->mapped && address >= p->mapped && address < p->mapped + p->size) return p->device;
    for (Allocation *a = allocations; a; a = a->next)
        if (address >= a->address && address < a->address + a->size) return a->device;
    return -2;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    int where = location(pointer);
    pthread_mutex_unlock(&lock);
    attributes->pageSize = 4096;
    attributes->location.id = where >= 0 ? where : 0;
    attributes->location.type = where >= 0    ? ACL_MEM_LOCATION_TYPE_DEVICE
                                : where == -1 ? ACL_MEM_LOCATION_TYPE_HOST
                                              : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    return 0;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total) {
    (void)attribute;
    pthread_mutex_lock(&lock);
    *total = memory_total();
    *available = *total - used[here()];
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtGetMemUsageInfo(int32_t device, aclrtMemUsageInfo *usage, size_t count, size_t *filled) {
    (void)device, (void)usage, (void)count;
    *filled = 0;
    return 0;
}

/* ---- streams, events, what is under way ---- */

static Stream *stream_of(aclrtStream stream) { return stream ? stream : &default_streams[here()]; }

static void add(Stream *stream, Pending pending) { /* with the lock held */
    Pending *added = malloc(sizeof *added);
    if (!added) abort();
    *added = pending;
    added->ticket = ticket++;
    added->next = NULL;
    if (stream->last) stream->last->next = added;
    else stream->first = added;
    stream->last = added;
}

/* With the lock held: all below this ticket on a stream is done. Returns the number of overwritten host buffers. */
static int complete(Stream *stream, uint64_t before) {
    int overwritten = 0;
    while (stream->first && stream->first->ticket < before) {
        Pending *done = stream->first;
        stream->first = done->next;
        if (!stream->first) stream->last = NULL;
        if (done->kind == TO_HOST) memcpy(done->host, done->data, done->size);
        if (done->kind == FROM_HOST) overwritten += memcmp(done->host, done->data, done->size) != 0;
        if (done->kind == WAIT_FOR) overwritten += complete(done->other, done->other_ticket);
        free(done->data);
        free(done);
    }
    return overwritten;
}

/* With the lock held, before another copy of this host memory: a stream copies in order, so earlier ones are done. */
static int complete_copies_of(Stream *stream, const char *host, size_t size) {
    uint64_t before = 0;
    for (Pending *copy = stream->first; copy; copy = copy->next)
        if (copy->kind != WAIT_FOR && copy->host < host + size && host < copy->host + copy->size)
            before = copy->ticket + 1;
    return complete(stream, before);
}

static aclError overwritten_error(int count) {
    if (!count) return 0;
    fail(ACL_ERROR_RT_COPY_DATA,
         "%d pinned host buffer(s) overwritten while a non_blocking copy from there to the device was under way: wait "
         "for the copy (an event, a stream) before the buffer is used again",
         count);
    fprintf(stderr, "%s\n", message);
    return ACL_ERROR_RT_COPY_DATA;
}

static void complete_all(void) {
    int count = 0;
    for (int device = 0; device < MAX_DEVICES; device++) count += complete(&default_streams[device], UINT64_MAX);
    for (Stream *stream = streams; stream; stream = stream->next) count += complete(stream, UINT64_MAX);
    overwritten_error(count);
}

/* The host may not wait for what is captured, nor, unless this thread or the capture is relaxed about it, for a whole
 * device or with a blocking copy while something is captured. `graph` is the capture that this is about, or NULL. */
static aclError forbidden_in_capture(Graph *graph, const char *what) {
    if (!graph && (!simnpu_captures || capture_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED)) return 0;
    int own = graph != NULL;
    pthread_mutex_lock(&lock);
    for (Stream *stream = streams; stream && !own; stream = stream->next) {
        Graph *other = stream->capture;
        if (!other || other->mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) continue;
        if (other->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL || pthread_equal(other->thread, pthread_self()))
            graph = other;
    }
    if (graph) graph->invalid = 1;
    pthread_mutex_unlock(&lock);
    if (!graph) return 0;
    return fail(own ? ACL_ERROR_RT_STREAM_CAPTURED : ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                "%s while a graph is captured", what);
}

static aclError wait_for(Stream *stream, uint64_t before, const char *what) {
    simnpu_log("wait", what, "");
    pthread_mutex_lock(&lock);
    int count = complete(stream, before);
    pthread_mutex_unlock(&lock);
    return overwritten_error(count);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    (void)priority, (void)flag;
    Stream *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->device = here();
    pthread_mutex_lock(&lock);
    made->id = ++streams_made;
    made->next = streams;
    streams = made;
    pthread_mutex_unlock(&lock);
    *stream = made;
    return 0;
}

aclError aclrtCreateStream(aclrtStream *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
    /* Its memory stays: events may name it still. */
    pthread_mutex_lock(&lock);
    int count = complete(stream_of(stream), UINT64_MAX);
    pthread_mutex_unlock(&lock);
    return overwritten_error(count);
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) { return (void)stream, (void)mode, 0; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) { return (void)stream, (void)flag, 0; }

aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
    (void)stream;
    *flag = 0;
    return 0;
}

aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute, aclrtStreamAttrValue *value) {
    return (void)stream, (void)attribute, (void)value, 0;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = stream_of(stream)->id;
    return 0;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    (void)timeout;
    Stream *awaited = stream_of(stream); /* others than the captured ones may be waited for */
    aclError error = awaited->capture ? forbidden_in_capture(awaited->capture, "waiting for a captured stream") : 0;
    return error ? error : wait_for(awaited, UINT64_MAX, "stream");
}

aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    (void)timeout;
    aclError error = forbidden_in_capture(NULL, "waiting for a device");
    if (error) return error;
    simnpu_log("wait", "device", "");
    int device = here(), count = 0;
    pthread_mutex_lock(&lock);
    count += complete(&default_streams[device], UINT64_MAX);
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device) count += complete(stream, UINT64_MAX);
    pthread_mutex_unlock(&lock);
    return overwritten_error(count);
}

aclError aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    Stream *asked = stream_of(stream);
    if (asked->capture) return forbidden_in_capture(asked->capture, "asking a captured stream whether it is done");
    pthread_mutex_lock(&lock);
    int count = complete(asked, UINT64_MAX);
    pthread_mutex_unlock(&lock);
    *status = ACL_STREAM_STATUS_COMPLETE;
    return overwritten_error(count);
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    (void)flag;
    *event = calloc(1, sizeof(Event));
    if (!*event) abort();
    return 0;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
    free(event);
    return 0;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    Event *recorded = event;
    pthread_mutex_lock(&lock);
    uint64_t nanoseconds = now.tv_sec * 1000000000UL + now.tv_nsec;
    *recorded = (Event){stream_of(stream), ticket++, nanoseconds, stream_of(stream)->capture};
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { return (void)event, (void)stream, 0; }

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    Event *awaited = event;
    Stream *waiting = stream_of(stream);
    if (!awaited->stream || awaited->stream == waiting) return 0;
    pthread_mutex_lock(&lock);
    if (awaited->capture && awaited->stream->capture) waiting->capture = awaited->capture; /* joins the capture */
    if (awaited->stream->first)
        add(waiting, (Pending){.kind = WAIT_FOR, .other = awaited->stream, .other_ticket = awaited->ticket});
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    Event *awaited = event;
    aclError error = forbidden_in_capture(awaited->capture, "waiting for an event");
    if (error || !awaited->stream) return error;
    return wait_for(awaited->stream, awaited->ticket, "event");
}

static aclError event_done(Event *asked) {
    if (asked->capture && simnpu_captures) return forbidden_in_capture(asked->capture, "asking an event");
    if (!asked->stream) return 0;
    pthread_mutex_lock(&lock);
    int count = complete(asked->stream, asked->ticket);
    pthread_mutex_unlock(&lock);
    return overwritten_error(count);
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return event_done(event);
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return event_done(event);
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    Event *first = start, *second = end;
    *milliseconds = ((double)second->nanoseconds - (double)first->nanoseconds) / 1e6;
    return 0;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp) {
    *timestamp = ((Event *)event)->nanoseconds / 1000;
    return 0;
}

/* ---- copies ---- */

/* With the lock held. */
static void move(void *target, const void *source, size_t size) {
    if (!simnpu_logs()) memmove(target, source, size);
    else if (location(target) >= 0) return; /* forgotten */
    else if (location(source) >= 0) memset(target, 0, size);
    else memmove(target, source, size);
}

static void log_copy(aclrtMemcpyKind kind, size_t size, int blocks, const void *target, const void *source) {
    static const char *const names[] = {"host_to_host", "host_to_device", "device_to_host", "device_to_device"};
    if (!simnpu_logs()) return;
    pthread_mutex_lock(&lock);
    int pinned = location(target) != -2 && location(source) != -2;
    pthread_mutex_unlock(&lock);
    simnpu_log("copy", (unsigned)kind < 4 ? names[kind] : "default", ", \"bytes\": %zu, \"blocking\": %s, \"pinned\": %s",
               size, blocks ? "true" : "false", pinned ? "true" : "false");
}

aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t size, aclrtMemcpyKind kind) {
    if (size > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes into %zu", size, room);
    aclError error = forbidden_in_capture(NULL, "a blocking copy");
    if (error) return error;
    log_copy(kind, size, 1, target, source);
    pthread_mutex_lock(&lock);
    move(target, source, size);
    pthread_mutex_unlock(&lock);
    return 0;
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t size, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    if (size > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes into %zu", size, room);
    log_copy(kind, size, 0, target, source);
    pthread_mutex_lock(&lock);
    int from = location(source), to = location(target);
    int to_host = kind == ACL_MEMCPY_DEVICE_TO_HOST && to < 0;
    int from_pinned = kind == ACL_MEMCPY_HOST_TO_DEVICE && from == -1;
    int overwritten = 0;
    if (to_host || from_pinned) {
        char *host = to_host ? target : (char *)source;
        overwritten = complete_copies_of(stream_of(stream), host, size);
        char *data = malloc(size ? size : 1);
        if (!data) abort();
        move(data, source, size);
        if (to_host) memset(target, POISON, size);
        else move(target, source, size);
        add(stream_of(stream),
            (Pending){.kind = to_host ? TO_HOST : FROM_HOST, .host = host, .data = data, .size = size});
    } else {
        move(target, source, size);
    }
    pthread_mutex_unlock(&lock);
    return overwritten_error(overwritten);
}

aclError aclrtMemset(void *pointer, size_t room, int32_t value, size_t size) {
    if (size > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes into %zu", size, room);
    simnpu_log("memset", "memset", ", \"bytes\": %zu", size);
    if (!simnpu_logs()) memset(pointer, value, size);
    return 0;
}

aclError aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t size, aclrtStream stream) {
    (void)stream;
    return aclrtMemset(pointer, room, value, size);
}

/* Whether the data of every copy made with a lower ticket has arrived; kernels.py keeps host buffers until then. */
uint64_t simnpu_oldest_ticket(void) {
    uint64_t oldest = UINT64_MAX;
    pthread_mutex_lock(&lock);
    for (int device = 0; device < MAX_DEVICES; device++)
        if (default_streams[device].first && default_streams[device].first->ticket < oldest)
            oldest = default_streams[device].first->ticket;
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->first && stream->first->ticket < oldest) oldest = stream->first->ticket;
    pthread_mutex_unlock(&lock);
    return oldest;
}

uint64_t simnpu_ticket(void) { return ticket; }

/* ---- host functions ---- */

aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType type, aclrtStream stream) {
    (void)type, (void)stream;
    function(argument);
    return 0;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
    (void)stream;
    function(argument);
    return 0;
}

aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) { return (void)thread, (void)stream, 0; }
aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) { return (void)thread, (void)stream, 0; }

aclError aclrtProcessReport(int32_t milliseconds) {
    usleep((milliseconds > 0 ? milliseconds : 100) * 1000);
    return ACL_ERROR_RT_REPORT_TIMEOUT;
}

/* ---- profiling: torch_npu's profiler runs and records the host; of the device there is nothing to tell ---- */

aclError aclprofInit(const char *folder, size_t length) { return (void)folder, (void)length, 0; }
aclError aclprofFinalize(void) { return 0; }

aclprofConfig *aclprofCreateConfig(uint32_t *devices, uint32_t count, aclprofAicoreMetrics metrics,
                                   const aclprofAicoreEvents *events, uint64_t types) {
    (void)devices, (void)count, (void)metrics, (void)events, (void)types;
    return malloc(1);
}

aclError aclprofDestroyConfig(const aclprofConfig *configuration) { return free((void *)configuration), 0; }
aclError aclprofStart(const aclprofConfig *configuration) { return (void)configuration, 0; }
aclError aclprofStop(const aclprofConfig *configuration) { return (void)configuration, 0; }
aclError aclprofWarmup(const aclprofConfig *configuration) { return (void)configuration, 0; }

aclError aclprofSetConfig(aclprofConfigType type, const char *value, size_t length) {
    return (void)type, (void)value, (void)length, 0;
}

aclError aclprofMarkEx(const char *text, size_t length, aclrtStream stream) {
    return (void)text, (void)length, (void)stream, 0;
}

int msptiSubscribe(void **subscriber, void *callback, void *data) {
    (void)callback, (void)data;
    *subscriber = NULL;
    return 0;
}

int msptiUnsubscribe(void *subscriber) { return (void)subscriber, 0; }
int msptiActivityRegisterCallbacks(void *request, void *complete) { return (void)request, (void)complete, 0; }
int msptiActivityEnable(int kind) { return (void)kind, 0; }
int msptiActivityDisable(int kind) { return (void)kind, 0; }
int msptiActivityFlushAll(uint32_t flag) { return (void)flag, 0; }
int msptiActivityPushExternalCorrelationId(int kind, uint64_t id) { return (void)kind, (void)id, 0; }

int msptiActivityPopExternalCorrelationId(int kind, uint64_t *id) {
    (void)kind;
    if (id) *id = 0;
    return 0;
}

int msptiActivityGetNextRecord(void *buffer, size_t size, void **record) {
    (void)buffer, (void)size;
    *record = NULL;
    return 1; /* no further record */
}

int32_t MsprofRegisterCallback(uint32_t module, ProfCommandHandle handle) { return (void)module, (void)handle, 0; }
int32_t MsprofReportApi(uint32_t kept, const struct MsprofApi *api) { return (void)kept, (void)api, 0; }

int32_t MsprofReportCompactInfo(uint32_t kept, const VOID_PTR data, uint32_t length) {
    return (void)kept, (void)data, (void)length, 0;
}

int32_t MsprofReportAdditionalInfo(uint32_t kept, const VOID_PTR data, uint32_t length) {
    return (void)kept, (void)data, (void)length, 0;
}

uint64_t MsprofGetHashId(const char *text, size_t length) { return (void)text, length; }
uint64_t MsprofSysCycleTime(void) { return 0; }

/* ---- graphs ---- */

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    Stream *origin = stream_of(stream);
    if (!stream || origin->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "this stream cannot be captured now");
    Graph *graph = calloc(1, sizeof *graph);
    if (!graph) abort();
    pthread_mutex_lock(&lock);
    graph->id = ++graphs_made;
    graph->origin = origin;
    graph->mode = mode;
    graph->thread = pthread_self();
    origin->capture = graph;
    simnpu_captures++;
    pthread_mutex_unlock(&lock);
    if (on_capture) on_capture(graph->id, 1);
    return 0;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    Graph *graph = stream_of(stream)->capture;
    *status = !graph           ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
              : graph->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                               : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    if (model) *model = graph;
    return 0;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) {
    Stream *origin = stream_of(stream);
    Graph *graph = origin->capture;
    if (!graph) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "this stream is not captured");
    if (graph->origin != origin)
        return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture did not begin on this stream");
    pthread_mutex_lock(&lock);
    for (Stream *joined = streams; joined; joined = joined->next)
        if (joined->capture == graph) joined->capture = NULL;
    simnpu_captures--;
    pthread_mutex_unlock(&lock);
    *model = graph;
    if (on_capture) on_capture(graph->id, graph->invalid ? -1 : 0);
    return graph->invalid ? fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture was invalidated") : 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    aclmdlRICaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
    Graph *graph = model;
    if (graph->invalid) return fail(ACL_ERROR_RT_MODEL_EXECUTE, "the graph is not valid");
    if (stream_of(stream)->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "a graph inside a graph");
    simnpu_log("replay", "graph", "");
    if (simnpu_logs()) return 0;
    if (!on_replay) return simnpu_missing("aclmdlRIExecuteAsync without kernels.py");
    return on_replay(graph->id) ? fail(ACL_ERROR_RT_MODEL_EXECUTE, "a kernel of the graph failed") : 0;
}

aclError aclmdlRIDestroy(aclmdlRI model) {
    if (on_destroy) on_destroy(((Graph *)model)->id);
    free(model);
    return 0;
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) {
    *id = ((Graph *)model)->id;
    return 0;
}

/* The graph that what is launched on a stream goes into; 0 for none. */
uint32_t simnpu_graph(aclrtStream stream) {
    Graph *graph = stream_of(stream)->capture;
    return graph ? graph->id : 0;
}

/* kernels.py met something that may not happen in a capture. */
void simnpu_invalidate(aclrtStream stream) {
    if (stream_of(stream)->capture) stream_of(stream)->capture->invalid = 1;
}

/* ---- operators ----
 * torch_npu calls these from C++ without the dispatcher, in collectives above all. They stand in libopapi, which it
 * asks for functions by name: one takes the arguments, a second runs them. kernels.py computes. */

typedef struct Executor {
    const char *name;
    int count;
    void *arguments[4];
} Executor;

static void *copied(const void *data, size_t size) {
    void *copy = malloc(size ? size : 1);
    if (!copy) abort();
    return memcpy(copy, data, size);
}

/* Objects lie in slots of one reserved range of addresses, so that opapi.c can tell an object among any numbers. */
typedef struct Slot {
    enum kind kind;
    struct Slot *next_free;
    char object[sizeof(Tensor)];
} Slot;

static const size_t SLOTS = 1UL << 20;
static Slot *slots, *free_slots;
static size_t slots_used;

enum kind simnpu_kind(const void *address) {
    uintptr_t from = (uintptr_t)slots + offsetof(Slot, object), place = (uintptr_t)address - from;
    if (!slots || (uintptr_t)address < from || place / sizeof(Slot) >= SLOTS || place % sizeof(Slot)) return NOTHING;
    return slots[place / sizeof(Slot)].kind;
}

static void *make(enum kind kind, const void *data, size_t size) {
    pthread_mutex_lock(&lock);
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!slots) slots = mmap(NULL, SLOTS * sizeof(Slot), PROT_READ | PROT_WRITE, how, -1, 0);
    Slot *slot = free_slots;
    if (slots == MAP_FAILED || (!slot && slots_used == SLOTS)) abort();
    if (slot) free_slots = slot->next_free;
    else slot = &slots[slots_used++];
    slot->kind = kind;
    memcpy(slot->object, data, size);
    pthread_mutex_unlock(&lock);
    return slot->object;
}

static int destroy(const void *object) {
    if (!object) return 0;
    Slot *slot = (Slot *)((char *)object - offsetof(Slot, object));
    pthread_mutex_lock(&lock);
    slot->kind = NOTHING;
    slot->next_free = free_slots;
    free_slots = slot;
    pthread_mutex_unlock(&lock);
    return 0;
}

static void *array(enum kind kind, const void *items, uint64_t count, size_t size) {
    Array made = {count, copied(items, count * size)};
    return make(kind, &made, sizeof made);
}

static int destroy_array(Array *array) {
    if (array) free(array->items);
    return destroy(array);
}

void *aclCreateTensor(const int64_t *sizes, uint64_t dimensions, aclDataType type, const int64_t *strides,
                      int64_t offset, aclFormat format, const int64_t *storage, uint64_t storage_dimensions,
                      void *data) {
    (void)format;
    if (dimensions > 16 || storage_dimensions > 16) return NULL;
    Tensor tensor = {.dimensions = dimensions, .offset = offset, .type = type, .data = data,
                     .storage_dimensions = storage_dimensions};
    memcpy(tensor.sizes, sizes, dimensions * sizeof *sizes);
    memcpy(tensor.strides, strides, dimensions * sizeof *strides);
    memcpy(tensor.storage, storage, storage_dimensions * sizeof *storage);
    return make(TENSOR, &tensor, sizeof tensor);
}

void *aclCreateScalar(const void *value, aclDataType type) {
    static const char sizes[] = {[ACL_FLOAT] = 4, [ACL_FLOAT16] = 2, [ACL_INT8] = 1, [ACL_INT32] = 4, [ACL_UINT8] = 1,
                                 [ACL_INT16] = 2, [ACL_INT64] = 8, [ACL_DOUBLE] = 8, [ACL_BOOL] = 1, [ACL_BF16] = 2};
    Scalar scalar = {.type = type};
    if (type < 0 || (size_t)type >= sizeof sizes || !sizes[type]) return NULL;
    memcpy(scalar.value, value, sizes[type]);
    return make(SCALAR, &scalar, sizeof scalar);
}

int aclDestroyTensor(void *tensor) { return destroy(tensor); }
int aclDestroyScalar(void *scalar) { return destroy(scalar); }
void *aclCreateIntArray(const int64_t *items, uint64_t count) { return array(INTEGERS, items, count, sizeof *items); }
void *aclCreateFloatArray(const float *items, uint64_t count) { return array(FLOATS, items, count, sizeof *items); }
void *aclCreateBoolArray(const bool *items, uint64_t count) { return array(BOOLS, items, count, sizeof *items); }
void *aclCreateTensorList(void *const *items, uint64_t count) { return array(TENSORS, items, count, sizeof *items); }
void *aclCreateScalarList(void *const *items, uint64_t count) { return array(SCALARS, items, count, sizeof *items); }
int aclDestroyIntArray(void *items) { return destroy_array(items); }
int aclDestroyFloatArray(void *items) { return destroy_array(items); }
int aclDestroyBoolArray(void *items) { return destroy_array(items); }

static int destroy_list(Array *list) { /* and what is in it */
    for (uint64_t i = 0; list && i < list->count; i++) destroy(((void **)list->items)[i]);
    return destroy_array(list);
}

int aclDestroyTensorList(void *list) { return destroy_list(list); }
int aclDestroyScalarList(void *list) { return destroy_list(list); }

static aclError prepare(const char *name, int count, void **arguments, uint64_t *size, void **executor) {
    Executor made = {.name = name, .count = count};
    memcpy(made.arguments, arguments, count * sizeof *arguments);
    *size = 0;
    *executor = copied(&made, sizeof made);
    return 0;
}

static aclError run(Executor *executor) {
    int failed = on_operator ? on_operator(executor->name, executor->arguments, executor->count) : 1;
    aclError error = failed ? fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s failed", executor->name) : 0;
    free(executor);
    return error;
}

#define RUN(name)                                                                                                      \
    aclError name(void *workspace, uint64_t size, void *executor, aclrtStream stream) {                               \
        return (void)workspace, (void)size, (void)stream, run(executor);                                              \
    }
#define OPERATOR_2(name)                                                                                               \
    aclError name##GetWorkspaceSize(void *a, void *b, uint64_t *size, void **executor) {                              \
        return prepare(#name, 2, (void *[]){a, b}, size, executor);                                                   \
    }                                                                                                                  \
    RUN(name)
#define OPERATOR_4(name)                                                                                               \
    aclError name##GetWorkspaceSize(void *a, void *b, void *c, void *d, uint64_t *size, void **executor) {            \
        return prepare(#name, 4, (void *[]){a, b, c, d}, size, executor);                                             \
    }                                                                                                                  \
    RUN(name)

OPERATOR_2(aclnnInplaceCopy)
OPERATOR_4(aclnnConstantPadNd)
