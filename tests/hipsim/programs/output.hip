// printf in kernels.
#include "check.h"

__global__ void hello(const char *, double number) {
    if (threadIdx.x % 32 == 5)
        printf("block %d thread %d: %s %.3f %lld\n", static_cast<int>(blockIdx.x),
               static_cast<int>(threadIdx.x), "text", number, 1ll << 40);
}

int main() {
    hello<<<2, 64>>>("unused", 2.5);
    OK(hipDeviceSynchronize());
    for (int i = 0; i < 3; i++) hello<<<1, 32>>>("unused", i);
    OK(hipDeviceSynchronize());
    puts("done");
}
