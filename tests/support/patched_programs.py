"""Programs whose kernels --sass measures, with known numbers of launches and threads."""

from __future__ import annotations

# How often each kernel is launched: see LAUNCHES. Threads leave `ways` in three ways, and `deep` from a function that is not inlined.
PROGRAM = r"""
#include <cstdio>
__device__ __noinline__ int down(int n) { return n ? down(n - 1) + threadIdx.x % 2 : 0; }
__global__ void ways(int *out) {
    if (threadIdx.x == 3) return;
    atomicAdd(out, 1);
    if (threadIdx.x % 2) return;
    atomicAdd(out, 1);
}
__global__ void deep(int *out) { if (down(threadIdx.x % 4) == 77) *out = 0; }
__global__ void other(int *out) { atomicAdd(out, 1); }
int main() {
    int *out, sum = 0;
    cudaStream_t streams[2];
    if (cudaMalloc(&out, 4) || cudaMemset(out, 0, 4) || cudaDeviceSynchronize()) return 1;
    for (auto &s : streams) cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    for (int i = 0; i < 5; i++) ways<<<dim3(2, 2), dim3(8, 3), 0, streams[i % 2]>>>(out);
    ways<<<3, 40>>>(out);
    deep<<<2, 33, 0, streams[0]>>>(out);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    if (cudaDeviceSynchronize() || cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal)) return 2;
    ways<<<3, 40, 0, streams[0]>>>(out);
    deep<<<1, 64, 0, streams[0]>>>(out);
    other<<<2, 8, 0, streams[0]>>>(out);
    if (cudaStreamEndCapture(streams[0], &graph) || cudaGraphInstantiate(&exec, graph, 0)) return 3;
    for (int i = 0; i < 4; i++) if (cudaGraphLaunch(exec, streams[1])) return 4;
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost)) return 5;
    printf("%d\n", sum);
}
"""
LAUNCHES = {  # kernel, threads of the grid → launches
    ("ways", 2 * 2 * 8 * 3): 5,
    ("ways", 3 * 40): 1 + 4,
    ("deep", 2 * 33): 1,
    ("deep", 64): 4,
    ("other", 16): 4,
}
SUM = 5 * 4 * (3 * 7 + 3 * 4) + 5 * 3 * (39 + 20) + 4 * 16
DRIVER = r"""
#include <cuda.h>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <string>
static const char *text[] = {"first", "second"};
static const char *form = ".visible .entry %s(.param .u64 p) {\n"
    ".reg .b64 %%at; .reg .b32 %%x; .reg .pred %%odd; ld.param.u64 %%at, [p]; mov.u32 %%x, %%tid.x; and.b32 %%x, %%x, 1;\n"
    "setp.eq.u32 %%odd, %%x, 1; @%%odd bra OUT; red.global.add.u32 [%%at], 1; ret;\nOUT: red.global.add.u32 [%%at], 2; exit; }\n";
static std::string ptx(int first, int last) {
    std::string made = ".version 7.0\n.target sm_70\n.address_size 64\n";
    for (int k = first; k <= last; k++) {
        char kernel[1000];
        snprintf(kernel, sizeof kernel, form, text[k]);
        made += kernel;
    }
    return made;
}
#define CHECK(x) do { if (int r = (x)) return printf("%s: %d\n", #x, r), 1; } while (0)
"""

# modules ROUNDS MILLISECONDS: in two contexts, loads a module, launches its kernel `first`, and loads another with `second` in its
# place, again and again. The launches of a round are 1 in the first context and 2 in the second. Prints the contexts' sums.
MODULES = (
    DRIVER
    + r"""
int main(int, char **argv) {
    CUcontext contexts[2];
    CUdeviceptr sums[2];
    CHECK(cuInit(0));
    for (int c = 0; c < 2; c++) {
        CHECK(cuCtxCreate(&contexts[c], nullptr, 0, 0));
        CHECK(cuMemAlloc(&sums[c], 4));
        CHECK(cuMemsetD32(sums[c], 0, 1));
    }
    for (int round = 0; round < atoi(argv[1]); round++)
        for (int c = 0; c < 2; c++) {
            CHECK(cuCtxSetCurrent(contexts[c]));
            for (int k = 0; k < 2; k++) {
                CUmodule module;
                CUfunction kernel;
                void *arguments[] = {&sums[c]};
                CHECK(cuModuleLoadData(&module, ptx(k, k).c_str()));
                CHECK(cuModuleGetFunction(&kernel, module, text[k]));
                for (int i = 0; i <= c; i++) CHECK(cuLaunchKernel(kernel, 2, 1, 1, k ? 4 : 6, 1, 1, 0, 0, arguments, 0));
                CHECK(cuCtxSynchronize());
                CHECK(cuModuleUnload(module));
            }
            usleep(1000 * atoi(argv[2]));
        }
    for (int c = 0; c < 2; c++) {
        unsigned sum = 0;
        CHECK(cuCtxSetCurrent(contexts[c]));
        CHECK(cuMemcpyDtoH(&sum, sums[c], 4));
        printf("%u\n", sum);
        CHECK(cuCtxDestroy(contexts[c]));
    }
}
"""
)
# libraries ROUNDS: loads a library with both kernels, launches `first` three times by its handles, in odd rounds `second` once, and
# unloads the library. Then twice the same image as a module, with 3 and 1 launches of `second`. Prints the sum.
LOADED = (
    DRIVER
    + r"""
int main(int, char **argv) {
    CUcontext context;
    CUdeviceptr sum;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate(&context, nullptr, 0, 0));
    CHECK(cuMemAlloc(&sum, 4));
    CHECK(cuMemsetD32(sum, 0, 1));
    void *arguments[] = {&sum};
    const std::string image = ptx(0, 1);
    for (int round = 0; round < atoi(argv[1]); round++) {
        CUlibrary library;
        CUkernel kernel;
        CUfunction function;
        CUmodule module;
        CHECK(cuLibraryLoadData(&library, image.c_str(), 0, 0, 0, 0, 0, 0));
        CHECK(cuLibraryGetKernel(&kernel, library, "first"));
        CHECK(cuKernelGetFunction(&function, kernel));
        CHECK(cuLaunchKernel(function, 2, 1, 1, 6, 1, 1, 0, 0, arguments, 0));
        for (int i = 0; i < 2; i++)
            CHECK(cuLaunchKernel((CUfunction)kernel, 2, 1, 1, 6, 1, 1, 0, 0, arguments, 0));
        if (round % 2) {
            CHECK(cuLibraryGetModule(&module, library));
            CHECK(cuModuleGetFunction(&function, module, "second"));
            CHECK(cuLaunchKernel(function, 2, 1, 1, 4, 1, 1, 0, 0, arguments, 0));
        }
        CHECK(cuCtxSynchronize());
        CHECK(cuLibraryUnload(library));
        for (int launches : {3, 1}) {
            CHECK(cuModuleLoadData(&module, image.c_str()));
            CHECK(cuModuleGetFunction(&function, module, "second"));
            for (int i = 0; i < launches; i++)
                CHECK(cuLaunchKernel(function, 2, 1, 1, 4, 1, 1, 0, 0, arguments, 0));
            CHECK(cuCtxSynchronize());
            CHECK(cuModuleUnload(module));
        }
    }
    unsigned found = 0;
    CHECK(cuMemcpyDtoH(&found, sum, 4));
    printf("%u\n", found);
}
"""
)
# Each thread of `parent` launches `child`, which the host launches, too: in the same shape and in others.
NESTED = r"""
#include <cstdio>
__global__ void child(int *out) { if (threadIdx.x % 2) return; atomicAdd(out, 1); }
__global__ void parent(int *out) {
    child<<<2, 8>>>(out);
    child<<<1, threadIdx.x % 3 + 1>>>(out);
}
__global__ void other(int *out) { atomicAdd(out, 1); }
int main() {
    int *out, sum = 0;
    if (cudaMalloc(&out, 4) || cudaMemset(out, 0, 4)) return 1;
    for (int i = 0; i < 3; i++) {
        child<<<2, 8>>>(out);  // first: the agent knows a shape from the host's first launch on
        parent<<<2, 5>>>(out);
        other<<<2, 5>>>(out);
    }
    if (cudaDeviceSynchronize() || cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost)) return 2;
    printf("%d\n", sum);
}
"""
# Each round has 10 threads that launch: 8 runs of the atomic, and 1, or 2 in every third thread of a block.
NESTED_SUM = 3 * (10 * 8 + 2 * (1 + 1 + 2 + 1 + 1)) + 3 * 8 + 3 * 10
# A graph that is launched 3 times: `step` four times in a row with one shape, then two `step` and `pair` at the same time. `pair` has
# one shape in both branches, which do not wait for each other. `turn` is updated to another grid before the last launch.
NODES = r"""
#include <cstdio>
__global__ void step(int *out) { atomicAdd(out, 1); }
__global__ void pair(int *out) { atomicAdd(out, 1); }
__global__ void turn(int *out) { atomicAdd(out, 1); }
#define CHECK(x) do { if (int r = (x)) return printf("%s: %d\n", #x, r), 1; } while (0)
int main() {
    int *out, sum = 0;
    cudaStream_t s, t;
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaMalloc(&out, 4)); CHECK(cudaMemset(out, 0, 4)); CHECK(cudaDeviceSynchronize());
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&fork)); CHECK(cudaEventCreate(&join));
    step<<<2, 40, 0, s>>>(out);
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 4; i++) step<<<2, 40, 0, s>>>(out);
    CHECK(cudaEventRecord(fork, s)); CHECK(cudaStreamWaitEvent(t, fork, 0));
    pair<<<1, 32, 0, s>>>(out);
    pair<<<1, 32, 0, t>>>(out);
    step<<<3, 40, 0, t>>>(out);
    CHECK(cudaEventRecord(join, t)); CHECK(cudaStreamWaitEvent(s, join, 0));
    turn<<<1, 64, 0, s>>>(out);
    CHECK(cudaStreamEndCapture(s, &graph)); CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(exec, i ? s : t));
    CHECK(cudaDeviceSynchronize());
    size_t count = 0;
    cudaGraphNode_t nodes[16];
    CHECK(cudaGraphGetNodes(graph, nullptr, &count)); CHECK(cudaGraphGetNodes(graph, nodes, &count));
    for (size_t i = 0; i < count; i++) {
        cudaKernelNodeParams p = {};
        CHECK(cudaGraphKernelNodeGetParams(nodes[i], &p));
        if (p.blockDim.x != 64) continue;
        p.gridDim.x = 2;
        CHECK(cudaGraphExecKernelNodeSetParams(exec, nodes[i], &p));
    }
    CHECK(cudaGraphLaunch(exec, s));
    CHECK(cudaDeviceSynchronize()); CHECK(cudaMemcpy(&sum, out, 4, cudaMemcpyDeviceToHost));
    printf("%d\n", sum);
}
"""
NODES_SUM = 80 + 3 * (4 * 80 + 2 * 32 + 120) + 2 * 64 + 128
