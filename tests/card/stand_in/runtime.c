/* libcudart: the functions that hand something out or change something. All others that torch calls succeed without
   doing anything; `build.py` writes those. */
#define _GNU_SOURCE
#include "card.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static __thread cudaError_t last_error;

static cudaError_t result(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* The device */

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, length, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    const struct card *card = the_card();
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", card->name);
    found->totalGlobalMem = card->bytes;
    found->major = card->major, found->minor = card->minor;
    found->multiProcessorCount = card->multiprocessors;
    found->maxThreadsPerMultiProcessor = threads_per_multiprocessor();
    found->maxBlocksPerMultiProcessor = 32;
    found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = 227 << 10;
    found->sharedMemPerMultiprocessor = 228 << 10, found->reservedSharedMemPerBlock = 1 << 10;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->warpSize = 32, found->maxThreadsPerBlock = 1024;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = INT32_MAX, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->memPitch = INT32_MAX, found->totalConstMem = 64 << 10, found->textureAlignment = 512;
    found->l2CacheSize = 50 << 20, found->memoryBusWidth = 5120, found->asyncEngineCount = 3;
    found->unifiedAddressing = found->managedMemory = found->concurrentKernels = found->canMapHostMemory = 1;
    found->cooperativeLaunch = found->hostRegisterSupported = found->streamPrioritiesSupported = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp card;
    cudaGetDeviceProperties(&card, device);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = card.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = card.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = card.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = card.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = card.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = card.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card.sharedMemPerMultiprocessor; break;
    case cudaDevAttrTotalConstantMemory: *value = card.totalConstMem; break;
    case cudaDevAttrWarpSize: *value = card.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = card.regsPerBlock; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = card.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *value = card.l2CacheSize; break;
    case cudaDevAttrMultiProcessorCount: *value = card.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = card.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = card.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card.minor; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

/* Memory */

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *left = card_free_bytes(), *all = the_card()->bytes;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **address, size_t bytes) {
    *address = card_allocate(bytes);
    return result(*address ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *address) {
    if (address) card_free(address);
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) {
    *address = aligned_alloc(4096, (bytes / 4096 + 1) * 4096);
    return result(*address ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *address) { return free(address), cudaSuccess; }
cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    return result(setting("MEMOPT_CARD_NO_PINNING", 0) ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    found->type = is_on_card(address) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    found->devicePointer = found->hostPointer = (void *)address;
    return cudaSuccess;
}

/* Copies within the card do nothing, as kernels do; those from and to the host are real. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    int within = kind == cudaMemcpyDeviceToDevice || (is_on_card(to) && is_on_card(from));
    if (!within) memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream);
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = calloc(1, 1 << 16);
    return cudaSuccess;
}

/* Streams and events: everything is over as soon as it is begun, and events take the host's clock. */

cudaError_t cudaStreamCreate(cudaStream_t *made) { return *made = new_handle(), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return cudaStreamCreate(made); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    return cudaStreamCreate(made);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    if (id) *id = 0;
    if (count) *count = 0;
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    return call(stream, cudaSuccess, data), cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { return call(data), cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t *made) { return *made = new_handle(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { return cudaEventCreate(made); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    struct timespec *from = (struct timespec *)start, *to = (struct timespec *)end;
    *milliseconds = (to->tv_sec - from->tv_sec) * 1e3f + (to->tv_nsec - from->tv_nsec) * 1e-6f;
    return cudaSuccess;
}

/* Kernels */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024, found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 10 * the_card()->major + the_card()->minor;
    found->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
    int most = threads > 0 ? threads_per_multiprocessor() / threads : 1;
    return *blocks = most > 0 ? most : 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}
cudaError_t __cudaGetKernel(cudaKernel_t *found, const void *kernel) { return *found = (cudaKernel_t)kernel, cudaSuccess; }

/* A driver's function by its name: the one in driver.c, or one that does nothing. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) trace(name), *function = (void *)succeed;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}
