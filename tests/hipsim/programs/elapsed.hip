// elapsed: prints how long three kernels took, in ms between two events. Each of their 10,000, 20,000 and 30,000 turns has 4
// instructions.
#include "check.h"

__global__ void work(int turns) {
    for (int i = 0; i < turns; i++) asm volatile("s_nop 0");
}

int main() {
    hipEvent_t begin, end;
    hipStream_t stream;
    OK(hipEventCreate(&begin));
    OK(hipEventCreate(&end));
    OK(hipStreamCreate(&stream));
    for (int i = 1; i <= 3; i++) {
        hipStream_t in = i % 2 ? nullptr : stream;
        OK(hipEventRecord(begin, in));
        work<<<1, 64, 0, in>>>(10000 * i);
        OK(hipEventRecord(end, in));
        OK(hipEventSynchronize(end));
        float milliseconds;
        OK(hipEventElapsedTime(&milliseconds, begin, end));
        printf("%.6f\n", milliseconds);
    }
}
