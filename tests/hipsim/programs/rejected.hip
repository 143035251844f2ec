// Five launches that HIP's runtime rejects, and four that it does not: found 320.
#include <hip/hip_runtime.h>
#include <stdio.h>

__global__ void scale(int *x) { atomicAdd(x, 1); }
__global__ void never(int *x) { atomicAdd(x, 1); }

int main() {
    int *x = nullptr, found = 0;
    if (hipMalloc(&x, sizeof *x) != hipSuccess || hipMemset(x, 0, sizeof *x) != hipSuccess) return 1;
    void *arguments[] = {&x};
    for (int i = 0; i < 4; i++) scale<<<1, 80>>>(x);
    int failed = 0;
    scale<<<1, 2048>>>(x);
    failed += hipGetLastError() != hipSuccess;
    scale<<<0, 32>>>(x);
    failed += hipGetLastError() != hipSuccess;
    scale<<<1, 32, 1 << 20>>>(x);
    failed += hipGetLastError() != hipSuccess;
    never<<<1, 1025>>>(x);
    failed += hipGetLastError() != hipSuccess;
    failed += hipLaunchCooperativeKernel((void *)scale, dim3(1), dim3(1056), arguments, 0, 0) != hipSuccess;
    if (hipMemcpy(&found, x, sizeof found, hipMemcpyDeviceToHost) != hipSuccess) return 1;
    printf("%d failed, found %d\n", failed, found);
}
