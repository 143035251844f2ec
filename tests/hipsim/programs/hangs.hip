// hangs WHAT [N [wait]]: the kernels of examples/hangs.cu for AMD GPUs. `slow` ends; the program waits N seconds for the others, then
// exits. With `wait`, the program has launched a kernel, and reads a line, before it launches the one that hangs.
//
// barrier: wave 1 waits for a flag that thread 0 raises after the barrier to which wave 1 does not come.
// pipeline: two blocks wait for each other in every turn, and get further.
#include <unistd.h>

#include "check.h"

__global__ void slow(unsigned *x, unsigned turns) {
    unsigned value = x[threadIdx.x];
    for (unsigned i = 0; i < turns; i++) {
        value = value * 3 + (value >> 7);
        asm volatile("" : "+v"(value));
    }
    x[threadIdx.x] = value;
}

__global__ void barrier(unsigned *x) {
    volatile unsigned *flag = x;
    if (threadIdx.x / warpSize == 1)
        while (*flag == 0) {
        }
    __syncthreads();
    if (threadIdx.x == 0) *flag = 1;
}

__device__ void take(unsigned *lock) {
    while (atomicCAS(lock, 0, 1) != 0) {
    }
}

__global__ void lock(unsigned *x) {
    if (threadIdx.x) return;
    take(x);
    x[1]++;
    take(x);
    x[1]++;
    atomicExch(x, 0);
}

__global__ void blocks(volatile unsigned *x) {
    if (threadIdx.x == 0) {
        while (x[1 - blockIdx.x] == 0) {
        }
        x[blockIdx.x] = 1;
    }
    __syncthreads();
    x[2 + threadIdx.x] = 1;
}

__global__ void flag(volatile unsigned *x) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        x[0] = 1;
        x[0] = 0;
    } else if (threadIdx.x == 0) {
        while (x[0] == 0) {
        }
    }
    __syncthreads();
    x[1 + threadIdx.x] = 1;
}

__global__ void loop(unsigned *x) {
    unsigned value = x[threadIdx.x];
    if (value < 1000)
        for (;;) {
            value = value * 3 + 1;
            asm volatile("" : "+v"(value));
        }
    x[threadIdx.x] = value;
}

__global__ void count(unsigned *x) {
    unsigned value = 1;
    while (value != 0) {
        value += 2;
        asm volatile("" : "+v"(value));
    }
    x[threadIdx.x] = value;
}

__global__ void pipeline(volatile int *x) {
    for (int i = 1; threadIdx.x == 0 && i < 2000000000; i++) {
        while (x[1 - blockIdx.x] < i - static_cast<int>(1 - blockIdx.x)) {
        }
        x[blockIdx.x] = i;
    }
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "slow";
    const unsigned number = argc > 2 ? strtoul(argv[2], nullptr, 0) : 60;
    unsigned *x;
    OK(hipMalloc(&x, 4096));
    OK(hipMemset(x, 0, 4096));
    if (argc > 3) {
        slow<<<2, 128>>>(x, 1);
        OK(hipDeviceSynchronize());
        puts("hangs: ready");
        fflush(stdout);
        getchar();
    }
    if (what == "slow") slow<<<2, 128>>>(x, number);
    else if (what == "barrier") barrier<<<2, 128>>>(x);
    else if (what == "lock") lock<<<1, 128>>>(x);
    else if (what == "blocks") blocks<<<2, 128>>>(x);
    else if (what == "flag") flag<<<3, 128>>>(x);
    else if (what == "loop") loop<<<2, 128>>>(x);
    else if (what == "count") count<<<2, 128>>>(x);
    else if (what == "pipeline") pipeline<<<2, 64>>>(reinterpret_cast<int *>(x));
    else return 2;
    OK(hipGetLastError());
    if (what != "slow")
        for (unsigned wait = 0; hipStreamQuery(nullptr) == hipErrorNotReady; wait++) {
            if (wait == 100 * number) {
                printf("hangs: still running after %u s\n", number);
                fflush(stdout);
                _Exit(0);
            }
            usleep(10000);
        }
    OK(hipDeviceSynchronize());
    std::vector<unsigned> found(128);
    OK(hipMemcpy(found.data(), x, found.size() * sizeof found[0], hipMemcpyDeviceToHost));
    for (unsigned value : found) CHECK(value == 0);
    puts("hangs: PASSED");
}
