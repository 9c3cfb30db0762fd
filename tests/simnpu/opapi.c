/* A libopapi that knows every operator by name and computes none: what torch_npu's own C++ adapters ask CANN for.
 *
 * Each operator of CANN is two functions. aclnnXGetWorkspaceSize(arguments..., &size, &executor) takes the arguments,
 * aclnnX(workspace, size, executor, stream) launches. build.py writes OPERATOR(aclnnX) for each name that the wheel
 * looks up. Here the first describes its arguments, the second puts the line into the log: its order is the order of
 * the launches, from whichever thread they come. No workspace is asked for.
 *
 * Nobody tells the types of the arguments. They are read one machine word after another:
 *  - a word that is the address of a tensor, scalar or list (cann.c makes them) is described in full,
 *  - the list ends with the addresses of `size` and `executor`: two neighbours on the caller's stack, both still 0,
 *  - any other word is a small integer, a bool or a null pointer, or else (a string) `null` in the log,
 *  - floats go through registers of their own: they are not in the log. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "objects.h"

#define MOST_WORDS 128
#define STACK (1UL << 20) /* how far above this frame the caller's variables are looked for */

static void list(FILE *text, const char *name, const int64_t *items, int64_t count) {
    fprintf(text, "\"%s\": [", name);
    for (int64_t i = 0; i < count; i++) fprintf(text, "%s%ld", i ? ", " : "", (long)items[i]);
    fputs("]", text);
}

static void describe_scalar(FILE *text, const Scalar *scalar) {
    int64_t integer = 0;
    float single;
    double number;
    memcpy(&single, scalar->value, sizeof single);
    memcpy(&number, scalar->value, sizeof number);
    memcpy(&integer, scalar->value, sizeof integer); /* the rest of the value is 0 */
    if (scalar->type == 0) number = single;
    if (scalar->type == 0 || scalar->type == 11) fprintf(text, "{\"scalar\": \"%.9g\"}", number); /* nan, inf */
    else fprintf(text, "{\"scalar\": \"%ld\"}", (long)integer);
}

static void describe(FILE *text, uint64_t word) {
    const void *object = (const void *)word;
    enum kind kind = simnpu_kind(object);
    const Tensor *tensor = object;
    const Array *array = object;
    switch (kind) {
    case TENSOR:
        fputs("{", text);
        list(text, "shape", tensor->sizes, tensor->dimensions);
        fputs(", ", text);
        list(text, "strides", tensor->strides, tensor->dimensions);
        fputs(", ", text);
        list(text, "storage", tensor->storage, tensor->storage_dimensions);
        fprintf(text, ", \"offset\": %ld, \"dtype\": %d, \"at\": %lu}", (long)tensor->offset, tensor->type,
                (unsigned long)tensor->data);
        break;
    case SCALAR: describe_scalar(text, object); break;
    case INTEGERS:
        fputs("{", text);
        list(text, "integers", array->items, array->count);
        fputs("}", text);
        break;
    case TENSORS:
    case SCALARS:
        fputs("[", text);
        for (uint64_t i = 0; i < array->count; i++) {
            if (i) fputs(", ", text);
            describe(text, (uint64_t)((void **)array->items)[i]);
        }
        fputs("]", text);
        break;
    case FLOATS:
    case BOOLS: fprintf(text, "{\"count\": %lu}", (unsigned long)array->count); break;
    case NOTHING: {
        int64_t number = word;
        if (number > -(1L << 40) && number < 1L << 40) fprintf(text, "%ld", (long)number);
        else fputs("null", text);
    }
    }
}

/* The objects of cann.c may lie right above the stack of a thread, and a scalar tensor begins with a 0. */
static int on_stack(uint64_t word) {
    uint64_t frame = (uint64_t)__builtin_frame_address(0);
    return word > frame && word < frame + STACK && word % 8 == 0 && simnpu_kind((const void *)word) == NOTHING;
}

static int prepare(const char *name, uint64_t first, va_list rest) {
    uint64_t words[MOST_WORDS] = {first};
    int count = 1;
    for (;; count++) {
        if (count == MOST_WORDS) {
            fprintf(stderr, "simulated CANN: %s: no end of its arguments found\n", name);
            return 1;
        }
        words[count] = va_arg(rest, uint64_t);
        uint64_t size = words[count - 1], executor = words[count];
        if (on_stack(size) && on_stack(executor) && !*(uint64_t *)size && !*(uint64_t *)executor) break;
    }
    char *line;
    size_t length;
    FILE *text = open_memstream(&line, &length);
    if (!text) abort();
    fprintf(text, "%s", name);
    fputc(0, text); /* launch() finds the arguments behind the name */
    for (int i = 0; i < count - 1; i++) {
        if (i) fputs(", ", text);
        describe(text, words[i]);
    }
    fclose(text);
    *(char **)words[count] = line;
    return 0;
}

static int launch(char *line) {
    simnpu_log("operator", line, ", \"arguments\": [%s]", line + strlen(line) + 1);
    free(line);
    return 0;
}

#define OPERATOR(name)                                                                                                 \
    int name##GetWorkspaceSize(uint64_t first, ...) {                                                                  \
        va_list rest;                                                                                                  \
        va_start(rest, first);                                                                                         \
        int error = prepare(#name, first, rest);                                                                       \
        va_end(rest);                                                                                                  \
        return error;                                                                                                  \
    }                                                                                                                  \
    int name(void *workspace, uint64_t size, void *executor, void *stream) {                                           \
        return (void)workspace, (void)size, (void)stream, launch(executor);                                            \
    }

#include "operators.h"
