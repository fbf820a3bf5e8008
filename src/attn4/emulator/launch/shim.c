/* What host code compiled by CuTe-DSL calls, answered on a machine without a driver.

   It takes the place of libcute_dsl_runtime.so and holds no state of its own: whatever has a meaning is handed
   to the table of functions that Python installs. Every call completes before it returns, so that streams and
   events have nothing to do, and device memory is host memory.

   It is built with every name changed to one that nothing else on the machine asks for (shim.py). */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_DEVICE = 101, OUT_OF_MEMORY = 2, UNKNOWN = 999 };

struct callbacks {
    int (*load_library)(void **library, const void *code);
    int (*get_kernel)(void **kernel, void *library, const char *name);
    int (*set_attribute)(void *kernel, int attribute, int value);
    int (*get_attribute)(int *value, int attribute, void *kernel);
    int (*device_attribute)(int *value, int attribute);
    int (*launch)(const void *config, void *kernel, void **arguments);
    int (*allocate)(void **memory, size_t bytes);
    int (*release)(void *memory);
    int (*touch)(const void *memory, size_t bytes);
    int (*occupancy)(int *blocks, void *kernel, int threads, size_t bytes);
};

struct extent {
    unsigned x, y, z;
};

/* cudaLaunchConfig_t */
struct configuration {
    struct extent grid, block;
    size_t shared_bytes;
    void *stream, *attributes;
    unsigned attribute_count;
};

enum { HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };

static const struct callbacks *installed;
static _Thread_local char reason[2048];

void attn4_shim_install(const struct callbacks *table) { installed = table; }

void attn4_shim_explain(const char *text) {
    snprintf(reason, sizeof reason, "%s", text);
}

#define HAND_OVER(function, ...) return installed ? installed->function(__VA_ARGS__) : UNKNOWN

/* Libraries and kernels */

int _cudaLibraryLoadData(void **library, const void *code, void *jit_options, void *jit_values, unsigned jit_count,
                         void *options, void *values, unsigned count) {
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    HAND_OVER(load_library, library, code);
}

int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    HAND_OVER(get_kernel, kernel, library, name);
}

int _cudaLibraryUnload(void *library) {
    (void)library;
    return SUCCESS;
}

int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    if (device != 0) return INVALID_DEVICE;
    HAND_OVER(set_attribute, kernel, attribute, value);
}

int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    HAND_OVER(set_attribute, kernel, attribute, value);
}

int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    if (device != 0) return INVALID_DEVICE;
    HAND_OVER(get_attribute, value, attribute, kernel);
}

int _cudaLaunchKernelEx(const void *config, void *kernel, void **arguments) {
    HAND_OVER(launch, config, kernel, arguments);
}

int _cudaLaunchKernel(void *kernel, struct extent grid, struct extent block, void **arguments, size_t shared_bytes,
                      void *stream) {
    struct configuration config = {grid, block, shared_bytes, stream, NULL, 0};
    HAND_OVER(launch, &config, kernel, arguments);
}

int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *kernel, int threads, size_t bytes) {
    HAND_OVER(occupancy, blocks, kernel, threads, bytes);
}

/* Two threads that come first at once load twice, and one of the two is forgotten: a lock held around Python
   code would wait for a thread that waits for the interpreter. Nothing here calls Python when the process ends. */
int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int),
                                   void (*set_raised)(const char *kind, const char *message)) {
    if (__atomic_load_n(library, __ATOMIC_ACQUIRE)) return SUCCESS;
    void *loaded = NULL;
    int error = init(&loaded);
    if (error == SUCCESS && load) error = load(&loaded, 0);
    if (error != SUCCESS) {
        if (set_raised) set_raised("RuntimeError", reason);
        return error;
    }
    __atomic_store_n(library, loaded, __ATOMIC_RELEASE);
    return SUCCESS;
}

void cuda_dialect_unload_library_once(void **library) { __atomic_store_n(library, NULL, __ATOMIC_RELEASE); }

/* Device */

int _cudaGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}

int _cudaSetDevice(int device) { return device == 0 ? SUCCESS : INVALID_DEVICE; }

int _cudaGetDeviceCount(int *count) {
    *count = 1;
    return SUCCESS;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 0) return INVALID_DEVICE;
    HAND_OVER(device_attribute, value, attribute);
}

int _cudaDeviceSynchronize(void) { return SUCCESS; }

int _cudaProfilerStart(void) { return SUCCESS; }

int _cudaProfilerStop(void) { return SUCCESS; }

/* Memory */

int _cudaMalloc(void **memory, size_t bytes) { HAND_OVER(allocate, memory, bytes); }

int _cudaMallocAsync(void **memory, size_t bytes, void *stream) {
    (void)stream;
    HAND_OVER(allocate, memory, bytes);
}

int _cudaFree(void *memory) { HAND_OVER(release, memory); }

int _cudaFreeAsync(void *memory, void *stream) {
    (void)stream;
    HAND_OVER(release, memory);
}

static int touch(const void *memory, size_t bytes) { HAND_OVER(touch, memory, bytes); }

int _cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    int error = SUCCESS;
    if (kind == HOST_TO_DEVICE || kind == DEVICE_TO_DEVICE) error = touch(to, bytes);
    if (error == SUCCESS && (kind == DEVICE_TO_HOST || kind == DEVICE_TO_DEVICE)) error = touch(from, bytes);
    if (error == SUCCESS) memmove(to, from, bytes);
    return error;
}

int _cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)stream;
    return _cudaMemcpy(to, from, bytes, kind);
}

int _cudaMemset(void *memory, int value, size_t bytes) {
    int error = touch(memory, bytes);
    if (error == SUCCESS) memset(memory, value, bytes);
    return error;
}

int _cudaMemsetAsync(void *memory, int value, size_t bytes, void *stream) {
    (void)stream;
    return _cudaMemset(memory, value, bytes);
}

int _cudaMallocManaged(void **memory, size_t bytes, unsigned flags) {
    (void)flags;
    HAND_OVER(allocate, memory, bytes);
}

int _cudaMallocHost(void **memory, size_t bytes) { HAND_OVER(allocate, memory, bytes); }

int _cudaFreeHost(void *memory) { HAND_OVER(release, memory); }

/* Streams and events: a handle, and nothing to wait for */

static int handle(void **made) {
    *made = malloc(1);
    return *made ? SUCCESS : OUT_OF_MEMORY;
}

static int drop(void *made) {
    free(made);
    return SUCCESS;
}

int _cudaStreamCreate(void **stream) { return handle(stream); }
int _cudaStreamDestroy(void *stream) { return drop(stream); }
int _cudaEventCreate(void **event) { return handle(event); }
int _cudaEventDestroy(void *event) { return drop(event); }

int _cudaStreamSynchronize(void *stream) {
    (void)stream;
    return SUCCESS;
}

int _cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return SUCCESS;
}

int _cudaEventRecord(void *event, void *stream) {
    (void)event, (void)stream;
    return SUCCESS;
}

/* Errors: the reason was given by whoever failed */

typedef void set_raised_parts(const char *kind, const char **parts, int count);

void CuteDSLRT_TVMFFISetRaisedCudaError(set_raised_parts *set_raised, int error) {
    char code[64];
    snprintf(code, sizeof code, "emulated CUDA call failed (%d): ", error);
    const char *parts[] = {code, reason};
    if (set_raised) set_raised("RuntimeError", parts, 2);
}

/* The first argument is the setter; the launch's configuration follows, and Python has it already. */
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(set_raised_parts *set_raised, int error) {
    CuteDSLRT_TVMFFISetRaisedCudaError(set_raised, error);
}

const char *cuda_dialect_get_error_name(int error) { return error == SUCCESS ? "cudaSuccess" : "emulated CUDA error"; }

void cuda_dialect_print_on_error(int error) {
    if (error != SUCCESS) fprintf(stderr, "emulated CUDA call failed (%d): %s\n", error, reason);
}

void cuda_dialect_assert_success(int error) {
    if (error == SUCCESS) return;
    cuda_dialect_print_on_error(error);
    abort();
}
