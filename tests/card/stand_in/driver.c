/* libcuda: what torch's expandable segments, inductor and Triton ask of the driver. `build.py` writes the rest. */
#define _GNU_SOURCE
#include "card.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULARITY ((size_t)2 << 20)
#define CONTEXT ((CUcontext)0x10)

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, length, "%s", the_card()->name);
    return CUDA_SUCCESS;
}
/* Both sides number their attributes alike. */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    return *text = "an error of the stand-in for a card", CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) { return *text = "STAND_IN", CUDA_SUCCESS; }

CUresult cuCtxGetCurrent(CUcontext *context) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext *context) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 1024, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = CONTEXT, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *made, const char *path) { return *made = new_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *made, const void *image) { return *made = new_handle(), CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *made, const void *image, unsigned count, CUjit_option *options, void **values) {
    return *made = new_handle(), CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
    return *found = new_handle(), CUDA_SUCCESS;
}
CUresult cuFuncGetModule(CUmodule *found, CUfunction function) { return *found = new_handle(), CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    return *clusters = 16, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = address;
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
    else *(int *)value = 0;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
    return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}

/* Expandable segments: addresses are reserved, and memory is taken from the card when a part is made. */
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish,
                             unsigned long long flags) {
    char *found = mmap(NULL, bytes + GRANULARITY, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = ((CUdeviceptr)found + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
    *made = bytes; /* all that cuMemRelease needs to know */
    return card_take(bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle made) { return card_give_back(made), CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    madvise((void *)address, bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
    return *bytes = GRANULARITY, CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    return (CUresult)cudaGetDriverEntryPointByVersion(name, function, version, flags,
                                                      (enum cudaDriverEntryPointQueryResult *)status);
}
