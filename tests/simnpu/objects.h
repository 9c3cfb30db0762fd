/* What aclCreateTensor and its relatives make: cann.c makes them, kernels.py and opapi.c read them. */
#include <stdint.h>

enum kind { NOTHING, TENSOR, SCALAR, INTEGERS, FLOATS, BOOLS, TENSORS, SCALARS };

typedef struct Tensor {
    int64_t dimensions, sizes[16], strides[16], offset;
    int32_t type;
    void *data; /* the storage's first byte */
    int64_t storage_dimensions, storage[16];
} Tensor;

typedef struct Scalar {
    int32_t type;
    char value[16];
} Scalar;

typedef struct Array {
    uint64_t count;
    void *items;
} Array;

/* What an address is: one of these, alive, or NOTHING. Any number may be asked about. */
enum kind simnpu_kind(const void *address);

/* A line of the log, where one is kept: see cann.c. */
int simnpu_logs(void);
void simnpu_log(const char *kind, const char *what, const char *more, ...) __attribute__((format(printf, 3, 4)));
