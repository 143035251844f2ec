// Kernels whose waves split at an if, an early return, a loop with another number of turns in each lane, and at nested ones.
#include "check.h"

__global__ void ifelse(int *x, int turns) {  // a third of the lanes one way
    int v = x[threadIdx.x];
    if (threadIdx.x % 3 == 0) {
#pragma unroll 1
        for (int i = 0; i < turns; i++) v = v * 3 + (v >> 5);
    } else {
#pragma unroll 1
        for (int i = 0; i < 2 * turns; i++) v = v * 5 + (v >> 3);
    }
    x[threadIdx.x] = v;
}

__global__ void early(int *x, int turns) {
    if (threadIdx.x % 64 >= 50) return;
    int v = x[threadIdx.x];
#pragma unroll 1
    for (int i = 0; i < turns; i++) v = v * 3 + (v >> 5);
    x[threadIdx.x] = v;
}

__global__ void uneven(int *x, int turns) {
    int v = x[threadIdx.x];
#pragma unroll 1
    for (int i = 0; i < static_cast<int>(threadIdx.x); i++) v = v * 3 + (v >> 5);
    x[threadIdx.x] = v;
}

__global__ void nested(int *x, int turns) {
    int v = x[threadIdx.x];
#pragma unroll 1
    for (int i = 0; i < 10; i++) {
        if (v & 1) {
#pragma unroll 1
            for (int j = 0; j < turns + (v & 7); j++) v = v * 3 + (v >> 5);
            if (v & 4)
#pragma unroll 1
                for (int j = 0; j < turns; j++) v = v * 7 + (v >> 5);
        } else if (v & 2) {
#pragma unroll 1
            for (int j = 0; j < turns; j++) v = v * 9 + (v >> 2);
            if (v < -1000000000) break;
        }
        v += threadIdx.x;
    }
    x[threadIdx.x] = v;
}
int main() {
    int *x;
    std::vector<int> start(128);
    for (int i = 0; i < 128; i++) start[i] = i * i;
    OK(hipMalloc(&x, 512));
    for (auto kernel : {ifelse, early, uneven, nested}) {
        OK(hipMemcpy(x, start.data(), 512, hipMemcpyHostToDevice));
        kernel<<<1, 128>>>(x, 20);
    }
    OK(hipDeviceSynchronize());
    std::vector<int> found(128);
    OK(hipMemcpy(found.data(), x, 512, hipMemcpyDeviceToHost));
    for (int value : found) printf("%d\n", value);
}
