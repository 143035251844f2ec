/* What the tests call of HIP, declared as its documentation has it: no header of AMD's is needed to build them. */
#ifndef GPUBPF_TESTS_HIP_H
#define GPUBPF_TESTS_HIP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int hipError_t;
typedef struct ihipStream_t *hipStream_t;
typedef struct ihipEvent_t *hipEvent_t;
typedef struct ihipModule_t *hipModule_t;
typedef struct ihipModuleSymbol_t *hipFunction_t;
typedef struct ihipGraph *hipGraph_t;
typedef struct hipGraphExec *hipGraphExec_t;
typedef struct { uint32_t x, y, z; } dim3;
typedef struct { dim3 gridDim, blockDim; size_t dynamicSmemBytes; hipStream_t stream; void *attrs; unsigned numAttrs; } hipLaunchConfig_t;
enum { hipMemcpyHostToHost, hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice, hipMemcpyDefault };
enum {
    hipSuccess = 0, hipErrorInvalidValue = 1, hipErrorOutOfMemory = 2, hipErrorInvalidDeviceFunction = 98, hipErrorNoDevice = 100,
    hipErrorInvalidDevice = 101, hipErrorNotFound = 500, hipErrorNotReady = 600,
};

hipError_t hipInit(unsigned flags);
hipError_t hipGetDeviceCount(int *count);
hipError_t hipGetDevice(int *device);
hipError_t hipSetDevice(int device);
hipError_t hipGetLastError(void);
const char *hipGetErrorName(hipError_t error);
hipError_t hipDeviceSynchronize(void);

hipError_t hipMalloc(void **p, size_t bytes);
hipError_t hipMallocAsync(void **p, size_t bytes, hipStream_t stream);
hipError_t hipMallocManaged(void **p, size_t bytes, unsigned flags);
hipError_t hipMallocPitch(void **p, size_t *pitch, size_t width, size_t height);
hipError_t hipHostMalloc(void **p, size_t bytes, unsigned flags);
hipError_t hipFree(void *p);
hipError_t hipFreeAsync(void *p, hipStream_t stream);
hipError_t hipHostFree(void *p);
hipError_t hipMemGetInfo(size_t *free, size_t *total);

hipError_t hipMemcpy(void *to, const void *from, size_t bytes, int kind);
hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, hipStream_t stream);
hipError_t hipMemcpyHtoD(void *to, void *from, size_t bytes);
hipError_t hipMemcpyDtoH(void *to, void *from, size_t bytes);
hipError_t hipMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind);
hipError_t hipMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind,
                            hipStream_t stream);
hipError_t hipMemset(void *p, int value, size_t bytes);
hipError_t hipMemsetAsync(void *p, int value, size_t bytes, hipStream_t stream);
hipError_t hipMemsetD32(void *p, int value, size_t count);

hipError_t hipStreamCreate(hipStream_t *stream);
hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags);
hipError_t hipStreamDestroy(hipStream_t stream);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamQuery(hipStream_t stream);
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags);
hipError_t hipEventCreate(hipEvent_t *event);
hipError_t hipEventDestroy(hipEvent_t event);
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
hipError_t hipEventQuery(hipEvent_t event);
hipError_t hipEventSynchronize(hipEvent_t event);

hipError_t hipGraphCreate(hipGraph_t *graph, unsigned flags);
hipError_t hipGraphInstantiate(hipGraphExec_t *made, hipGraph_t graph, void *node, char *log, size_t bytes);
hipError_t hipGraphLaunch(hipGraphExec_t graph, hipStream_t stream);

hipError_t hipModuleLoad(hipModule_t *module, const char *path);
hipError_t hipModuleLoadData(hipModule_t *module, const void *image);
hipError_t hipModuleUnload(hipModule_t module);
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name);
hipError_t hipGetFuncBySymbol(hipFunction_t *function, const void *symbol);

hipError_t hipLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, hipStream_t stream);
hipError_t hipLaunchKernel_spt(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, hipStream_t stream);
hipError_t hipExtLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, hipStream_t stream,
                              hipEvent_t start, hipEvent_t stop, int flags);
hipError_t hipLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **args, unsigned shared, hipStream_t stream);
hipError_t hipLaunchKernelExC(const hipLaunchConfig_t *config, const void *kernel, void **args);
hipError_t hipModuleLaunchKernel(hipFunction_t kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                 unsigned shared, hipStream_t stream, void **args, void **extra);
hipError_t hipExtModuleLaunchKernel(hipFunction_t kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                                    uint32_t bz, size_t shared, hipStream_t stream, void **args, void **extra, hipEvent_t start,
                                    hipEvent_t stop, uint32_t flags)
    __asm__("_Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j");

/* What clang writes for a program with kernels. */
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream);
hipError_t __hipPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, hipStream_t *stream);
void **__hipRegisterFatBinary(const void *data);
void __hipRegisterFunction(void **modules, const void *handle, char *function, const char *name, unsigned threads, void *tid,
                           void *bid, dim3 *block, dim3 *grid, int *warp);
void __hipUnregisterFatBinary(void **modules);

#ifdef __cplusplus
}
#endif
#endif
