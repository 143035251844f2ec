// later PLUGIN.so TEXT.ptx: opens a library with kernels, and loads PTX by the runtime's cudaLibraryLoadData, in every round; closes
// both again. `fill` of the text: p[i] = i + 7. As jit.h, on the runtime.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(condition) ((condition) ? (void)0 : (fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition), exit(1)))

__global__ void own(int *p) { p[threadIdx.x] = threadIdx.x; }

int main(int argc, char **argv) {
    int rounds = 1 + (argc > 3 && !strcmp(argv[3], "--again")), *data, host[32];
    char line[64];
    setvbuf(stdout, NULL, _IOLBF, 0);
    MUST(argc > 2 && !cudaMalloc(&data, sizeof host));
    for (int round = 0; round < rounds; round++) {
        if (round) {
            puts("ready");
            if (!fgets(line, sizeof line, stdin)) return 1;
        }
        own<<<1, 32>>>(data);
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
        auto plugin = reinterpret_cast<int (*)(int)>(dlsym(library, "plugin"));
        MUST(plugin && plugin(10) == 3 * 45 && plugin(20) == 3 * 190);
        dlclose(library);

        cudaLibrary_t text;
        cudaKernel_t fill;
        char log[1024] = "";
        cudaJitOption jit[] = {cudaJitErrorLogBuffer, cudaJitErrorLogBufferSizeBytes};
        void *values[] = {log, reinterpret_cast<void *>(sizeof log)}, *arguments[] = {&data};
        MUST(cudaLibraryLoadData(&text, ".version 7.0\n.target sm_70\nnonsense", jit, values, 2, nullptr, nullptr, 0) == cudaErrorInvalidPtx);
        MUST(strstr(log, "error   :") && (void *)strlen(log) == values[1] && cudaGetLastError() == cudaErrorInvalidPtx);
        MUST(!cudaLibraryLoadFromFile(&text, argv[2], nullptr, nullptr, 0, nullptr, nullptr, 0));
        MUST(!cudaLibraryGetKernel(&fill, text, "fill"));
        for (int i = 0; i < 3; i++) MUST(!cudaLaunchKernel((const void *)fill, 1, 32, arguments, 0, nullptr));
        MUST(!cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
        for (int i = 0; i < 32; i++) MUST(host[i] == i + 7);
        MUST(!cudaLibraryUnload(text));
        printf("round %d {\"_Z3ownPi\": 1, \"_Z5weighi\": 2, \"fill\": 3}\n", round);
    }
    return 0;
}
