// Threads that leave a kernel at different times, and read the clock themselves shortly before.
#include <vector>

#include <hip/hip_runtime.h>

#include "check.h"

// Of each four threads, two leave at once, one after the first half, one at the end. Each reads the clock after the others have left.
__global__ void staged(long long *when, unsigned *out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned value = i;
    if (i & 1) return;
    when[3 * i] = clock64();
    for (int k = 0; k < 500; k++) value = value * 5 + (value >> 3);
    out[i] = value;
    if (i & 2) return;
    when[3 * i + 1] = clock64();
    for (int k = 0; k < 500; k++) value = value * 5 + (value >> 3);
    out[i] = value;
    when[3 * i + 2] = clock64();
}
__global__ void together(long long *when) { when[blockIdx.x * blockDim.x + threadIdx.x] = clock64(); }

int main() {
    const int n = 4 * 192;
    long long *when;
    unsigned *out;
    OK(hipMalloc(&when, 4 * n * sizeof *when));
    OK(hipMemset(when, 0, 4 * n * sizeof *when));
    OK(hipMalloc(&out, n * sizeof *out));
    OK(hipMemset(out, 0, n * sizeof *out));
    staged<<<4, 192>>>(when, out);
    together<<<4, 192>>>(when + 3 * n);
    std::vector<long long> read(4 * n);
    std::vector<unsigned> values(n);
    OK(hipMemcpy(read.data(), when, 4 * n * sizeof *when, hipMemcpyDeviceToHost));
    OK(hipMemcpy(values.data(), out, n * sizeof *out, hipMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        unsigned value = i;
        for (int k = 0; k < (i & 2 ? 500 : 1000); k++) value = value * 5 + (value >> 3);
        CHECK(values[i] == (i & 1 ? 0 : value));
    }
    for (long long one : read) printf("%lld\n", one);
}
