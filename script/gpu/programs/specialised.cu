// specialised [launches [rounds [blocks]]]      default: 20 3 132
//
// A kernel whose first warp group gives registers to the other two (setmaxnreg, of compute capability 9.0 alone). A consumer keeps 192 sums,
// which fit into the 232 registers it is given, and not into the 168 it starts with. Prints "round HOST_US GPU_US" and "digest HEX" as workloads does.
#include <chrono>
#include <cstdint>
#include <vector>

#include "../../../examples/check.h"

constexpr int GROUP = 128, SUMS = 192, STEPS = 64;

__global__ void __launch_bounds__(3 * GROUP, 1) specialised(const float *in, float *out) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ float handed[2][GROUP];
    int group = threadIdx.x / GROUP, lane = threadIdx.x % GROUP;
    if (group == 0) {  // the producer
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            handed[step % 2][lane] = in[step * GROUP + lane];
            __syncthreads();
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = (float)i;
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        __syncthreads();
        float value = handed[step % 2][lane];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = sums[i] * 0.5f + value;
    }
    float all = 0;
#pragma unroll
    for (int i = 0; i < SUMS; i++) all = all * 0.75f + sums[i];
    out[blockIdx.x * 2 * GROUP + (group - 1) * GROUP + lane] = all;
#endif
}

int main(int argc, char **argv) {
    long launches = argument(argc, argv, 1, 20), rounds = argument(argc, argv, 2, 3), blocks = argument(argc, argv, 3, 132);
    std::vector<float> in(STEPS * GROUP);
    std::vector<uint32_t> out(blocks * 2 * GROUP);
    for (size_t i = 0; i < in.size(); i++) in[i] = (float)(i * 2654435761u >> 8 & 1023) / 1024;
    float *from, *to;
    CHECK(cudaMalloc(&from, in.size() * 4));
    CHECK(cudaMalloc(&to, out.size() * 4));
    CHECK(cudaMemcpy(from, in.data(), in.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(to, 0, out.size() * 4));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (long round = 0; round <= rounds; round++) {
        CHECK(cudaDeviceSynchronize());
        auto before = std::chrono::steady_clock::now();
        CHECK(cudaEventRecord(begin));
        for (long i = 0; i < launches; i++) specialised<<<(int)blocks, 3 * GROUP>>>(from, to);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(end));
        CHECK(cudaDeviceSynchronize());
        std::chrono::duration<double, std::micro> host = std::chrono::steady_clock::now() - before;
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
        if (round) std::printf("round %.4f %.4f\n", host.count() / launches, 1e3 * milliseconds / launches);
    }
    CHECK(cudaMemcpy(out.data(), to, out.size() * 4, cudaMemcpyDeviceToHost));
    uint64_t digest = 14695981039346656037u;
    for (uint32_t word : out) digest = (digest ^ word) * 1099511628211u;
    std::printf("digest %016llx\n", (unsigned long long)digest);
    cudaFuncAttributes of;
    CHECK(cudaFuncGetAttributes(&of, specialised));
    std::printf("registers %d, local memory %zu bytes\n", of.numRegs, of.localSizeBytes);
    return 0;
}
