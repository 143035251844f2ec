// first_use: a kernel that runs until another one has run. The second was launched before, so its code is loaded, and nothing may wait
// for the first; then a third, which was not: where kernels are loaded at their first use (CUDA_MODULE_LOADING=LAZY) its launch may
// wait for what runs, so another thread lets that end.
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "jit.h"

// wait(p): until *p is not 0. tell(p): *p = 1. other(p): p[1] = 2.
static const char text[] = HEAD
    ".visible .entry wait(.param .u64 p)\n{\n .reg .b64 %rd<2>;\n .reg .b32 %r<2>;\n .reg .pred %q;\n ld.param.u64 %rd1, [p];\n"
    "AGAIN:\n ld.volatile.global.u32 %r1, [%rd1];\n setp.eq.u32 %q, %r1, 0;\n @%q bra AGAIN;\n ret;\n}\n"
    ".visible .entry tell(.param .u64 p)\n{\n .reg .b64 %rd<2>;\n ld.param.u64 %rd1, [p];\n st.volatile.global.u32 [%rd1], 1;\n ret;\n}\n"
    ".visible .entry other(.param .u64 p)\n{\n .reg .b64 %rd<2>;\n ld.param.u64 %rd1, [p];\n st.volatile.global.u32 [%rd1+4], 2;\n ret;\n}\n";

static int *flags;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *later(void *unused) {
    usleep(300000);
    *(volatile int *)flags = 1;
    return unused;
}

int main(int argc, char **argv) {
    CUcontext context = begin(argc, argv);
    CUmodule module;
    CUfunction wait, tell, other;
    CUstream streams[2];
    CUdeviceptr address;
    CUfunctionLoadingState state;
    CUmoduleLoadingMode mode;
    pthread_t thread;
    (void)context;
    CHECK(cuMemHostAlloc((void **)&flags, 8, CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuMemHostGetDevicePointer(&address, flags, 0));
    void *parameters[] = {&address};
    for (int i = 0; i < 2; i++) CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    CHECK(cuModuleLoadData(&module, text));
    CHECK(cuModuleGetFunction(&wait, module, "wait"));
    CHECK(cuModuleGetFunction(&tell, module, "tell"));
    CHECK(cuModuleGetFunction(&other, module, "other"));
    CHECK(cuModuleGetLoadingMode(&mode));
    CHECK(cuFuncIsLoaded(&state, wait));
    MUST((mode == CU_MODULE_EAGER_LOADING) == (state == CU_FUNCTION_LOADING_STATE_LOADED));
    CHECK(cuFuncLoad(wait));
    CHECK(cuFuncIsLoaded(&state, wait));
    MUST(state == CU_FUNCTION_LOADING_STATE_LOADED);
    flags[0] = flags[1] = 0;
    CHECK(cuLaunchKernel(tell, 1, 1, 1, 1, 1, 1, 0, streams[1], parameters, NULL));
    CHECK(cuStreamSynchronize(streams[1]));
    MUST(flags[0] == 1);
    for (int i = 0; i < 5; i++) {
        flags[0] = 0;
        CHECK(cuLaunchKernel(wait, 1, 1, 1, 1, 1, 1, 0, streams[0], parameters, NULL));
        CHECK(cuLaunchKernel(tell, 1, 1, 1, 1, 1, 1, 0, streams[1], parameters, NULL));
        CHECK(cuStreamSynchronize(streams[0]));
        CHECK(cuStreamSynchronize(streams[1]));
    }
    flags[0] = 0;
    CHECK(cuLaunchKernel(wait, 1, 1, 1, 1, 1, 1, 0, streams[0], parameters, NULL));
    pthread_create(&thread, NULL, later, NULL);
    double began = now();
    CHECK(cuLaunchKernel(other, 1, 1, 1, 1, 1, 1, 0, streams[1], parameters, NULL));
    double took = now() - began;
    pthread_join(thread, NULL);
    CHECK(cuStreamSynchronize(streams[0]));
    CHECK(cuStreamSynchronize(streams[1]));
    MUST(flags[1] == 2);
    printf("round 0 {\"wait\": 6, \"tell\": 6, \"other\": 1}\nthe first use took %s\n", took > 0.2 ? "long" : "no time");
    return 0;
}
