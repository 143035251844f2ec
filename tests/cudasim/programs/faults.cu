// Kernels that fail, one way per run: what the program sees afterwards. Usage: faults stray|freed|host|trap|assert|exit|print
#include "check.h"

#include <cassert>
#include <cstring>
#include <vector>

__global__ void store(int *where, int index) {
    if (blockIdx.x == 1 && threadIdx.x == 3) where[index] = 1;
}

__global__ void stop() { asm("trap;"); }

__global__ void claim(int value) { assert(value == 3); }

__global__ void forever(volatile int *flag) {
    while (*flag == 0) {
    }
}

__global__ void speak(int number) { printf("kernel %d thread %d\n", number, threadIdx.x); }

static int broken(cudaError_t expected) {
    cudaError_t status = cudaDeviceSynchronize();
    printf("sync: %s\n", cudaGetErrorName(status));
    void *more = nullptr;
    REQUIRE(status == expected);
    REQUIRE(cudaMalloc(&more, 10) == expected);  // and so does everything else
    REQUIRE(cudaGetLastError() == expected);
    store<<<1, 1>>>(nullptr, 0);
    REQUIRE(cudaGetLastError() == expected);
    REQUIRE(cudaDeviceReset() == cudaSuccess);
    CHECK(cudaMalloc(&more, 10));  // a new context works
    CHECK(cudaMemset(more, 0, 10));
    CHECK(cudaDeviceSynchronize());
    return 0;
}

int main(int count, char **arguments) {
    const char *how = count > 1 ? arguments[1] : "";
    int *data = nullptr;
    CHECK(cudaMalloc(&data, 4096));
    if (strcmp(how, "stray") == 0) {
        store<<<2, 32>>>(data, 1 << 24);
        return broken(cudaErrorIllegalAddress);
    }
    if (strcmp(how, "freed") == 0) {
        CHECK(cudaFree(data));
        store<<<2, 32>>>(data, 0);
        return broken(cudaErrorIllegalAddress);
    }
    if (strcmp(how, "host") == 0) {
        std::vector<int> host(100);
        store<<<2, 32>>>(host.data(), 5);
        return broken(cudaErrorIllegalAddress);
    }
    if (strcmp(how, "trap") == 0) {
        stop<<<1, 32>>>();
        return broken(cudaErrorLaunchFailure);
    }
    if (strcmp(how, "assert") == 0) {
        claim<<<1, 1>>>(4);
        return broken(cudaErrorAssert);
    }
    if (strcmp(how, "exit") == 0) {
        int *flag = nullptr;
        CHECK(cudaMallocHost(&flag, sizeof *flag));
        *flag = 0;
        forever<<<1, 32>>>(flag);
        CHECK(cudaGetLastError());
        puts("leaving");
        return 7;
    }
    if (strcmp(how, "print") == 0) {
        printf("first\n");
        speak<<<1, 2>>>(1);
        CHECK(cudaDeviceSynchronize());
        printf("second\n");
        cudaStream_t stream;
        CHECK(cudaStreamCreate(&stream));
        speak<<<1, 1, 0, stream>>>(2);
        CHECK(cudaStreamSynchronize(stream));
        printf("third\n");
        return 0;
    }
    return 2;
}
