// runtimes      examples/vectoradd without arguments, on the CUDA runtime that it was linked with, from 11.8 on
//
// nvcc 13 makes host code for its own runtime alone. So this registers the kernel and launches it as nvcc's code has done since CUDA 10.1. FATBIN
// is the file with the device code of examples/vectoradd.cu, so the known answers are the same. The functions have the same parameters in every
// version, so the headers may be those of a later one.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                       \
    do {                                                                                  \
        cudaError_t error_ = (call);                                                      \
        if (error_ != cudaSuccess) {                                                      \
            std::fprintf(stderr, "runtimes: %s: %s\n", #call, cudaGetErrorString(error_)); \
            std::exit(1);                                                                 \
        }                                                                                 \
    } while (0)

extern "C" {
void **__cudaRegisterFatBinary(void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaUnregisterFatBinary(void **);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
extern const char vectorAddImage[];
}

asm(".section .nv_fatbin, \"a\"\n.align 8\nvectorAddImage:\n.incbin \"" FATBIN "\"\n.previous\n");

namespace {

struct Wrapper {
    int magic, version;
    const void *image;
    void *unused;
};
__attribute__((section(".nvFatBinSegment"), used)) Wrapper wrapper = {0x466243b1, 1, vectorAddImage, nullptr};

// Its address stands for the kernel.
void vectorAdd() {}

constexpr int N = 19, THREADS = 5;

}  // namespace

int main() {
    void **handle = __cudaRegisterFatBinary(&wrapper);
    static char name[] = "_Z9vectorAddPKfS0_Pfi";
    auto *kernel = reinterpret_cast<const char *>(&vectorAdd);
    __cudaRegisterFunction(handle, kernel, name, name, -1, nullptr, nullptr, nullptr, nullptr, nullptr);
    __cudaRegisterFatBinaryEnd(handle);
    float a[N], b[N], c[N], *da, *db, *dc;
    for (int i = 0; i < N; i++) a[i] = (float)i, b[i] = 2.0f * (float)i;
    float **arrays[] = {&da, &db, &dc};
    for (float **array : arrays) CHECK(cudaMalloc(reinterpret_cast<void **>(array), sizeof a));
    CHECK(cudaMemcpy(da, a, sizeof a, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b, sizeof b, cudaMemcpyHostToDevice));
    int n = N, version = 0;
    void *arguments[] = {&da, &db, &dc, &n};
    CHECK(cudaLaunchKernel(kernel, dim3{1, 1, 1}, dim3{THREADS, 1, 1}, arguments, 0, nullptr));
    CHECK(cudaMemcpy(c, dc, sizeof c, cudaMemcpyDeviceToHost));
    CHECK(cudaRuntimeGetVersion(&version));
    int wrong = 0;
    for (int i = 0; i < N; i++) wrong += c[i] != a[i] + b[i];
    std::printf("runtime %d.%d: %d wrong\n", version / 1000, version % 1000 / 10, wrong);
    __cudaUnregisterFatBinary(handle);
    return wrong != 0;
}
