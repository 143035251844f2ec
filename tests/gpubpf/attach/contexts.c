// Green contexts, and a launch on several devices. Each way launches `add` and checks what it did:
//   alone ROUNDS    a green context is the only user of the primary context, which ends with it; 20 launches a round
//   kept ROUNDS     the program retains the primary context, and goes on in it after the green context ended; 30 a round
//   several ROUNDS  cuLaunchCooperativeKernelMultiDevice; 1 launch a round
//   until           like "kept", until a line comes on stdin; it says "ready" when it has made the first round
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include <cuda.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char text[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry add(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}
#define DO(call) check(call, #call)

typedef struct {
  CUmodule module;
  CUfunction function;
  CUdeviceptr out;
} Work;

static Work loaded(void) {
  Work w;
  DO(cuModuleLoadData(&w.module, text));
  DO(cuModuleGetFunction(&w.function, w.module, "add"));
  DO(cuMemAlloc(&w.out, 4));
  return w;
}

static void launch(Work w, CUstream stream) {
  void *parameters[] = {&w.out};
  unsigned sum = 0;
  DO(cuMemsetD32(w.out, 0, 1));
  DO(cuCtxSynchronize());
  for (int i = 0; i < 10; ++i) DO(cuLaunchKernel(w.function, 2, 1, 1, 32, 1, 1, 0, stream, parameters, 0));
  DO(cuStreamSynchronize(stream));
  DO(cuMemcpyDtoH(&sum, w.out, 4));
  if (sum != 640) dprintf(2, "%u additions, not 640\n", sum), _exit(1);
}

static CUgreenCtx green(void) {
  CUdevResource all, part;
  CUdevResourceDesc description;
  CUgreenCtx made;
  unsigned parts = 1;
  DO(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
  DO(cuDevSmResourceSplitByCount(&part, &parts, &all, 0, 0, all.sm.minSmPartitionSize));
  DO(cuDevResourceGenerateDesc(&description, &part, 1));
  DO(cuGreenCtxCreate(&made, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
  return made;
}

// Launches in the default stream of the green context and in one more of its streams.
static void launch_in(CUgreenCtx context, const Work *known) {
  CUcontext converted;
  CUstream stream;
  DO(cuCtxFromGreenCtx(&converted, context));
  DO(cuCtxSetCurrent(converted));
  Work w = known ? *known : loaded();
  launch(w, 0);
  DO(cuGreenCtxStreamCreate(&stream, context, CU_STREAM_NON_BLOCKING, 0));
  launch(w, stream);
  DO(cuStreamDestroy(stream));
  DO(cuCtxSetCurrent(0));
  DO(cuGreenCtxDestroy(context));
}

static void round_beside(CUcontext primary, Work w) {
  launch_in(green(), &w);
  DO(cuCtxSetCurrent(primary));
  launch(w, 0);
}

int main(int n, char **a) {
  const char *way = a[1];
  int rounds = n > 2 ? atoi(a[2]) : 1;
  CUcontext primary;
  DO(cuInit(0));
  if (!strcmp(way, "alone")) {
    unsigned flags;
    int active;
    for (int i = 0; i < rounds; ++i) launch_in(green(), 0);
    DO(cuDevicePrimaryCtxGetState(0, &flags, &active));
    return active;
  }
  DO(cuDevicePrimaryCtxRetain(&primary, 0));
  DO(cuCtxSetCurrent(primary));
  Work w = loaded();
  if (!strcmp(way, "kept"))
    for (int i = 0; i < rounds; ++i) round_beside(primary, w);
  if (!strcmp(way, "several")) {
    CUstream stream;
    void *parameters[] = {&w.out};
    DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUDA_LAUNCH_PARAMS one = {w.function, 2, 1, 1, 32, 1, 1, 0, stream, parameters};
    for (int i = 0; i < rounds; ++i) DO(cuLaunchCooperativeKernelMultiDevice(&one, 1, 0));
    DO(cuStreamSynchronize(stream));
  }
  if (!strcmp(way, "until")) {
    struct pollfd input = {0, POLLIN, 0};
    round_beside(primary, w);
    puts("ready");
    fflush(stdout);
    while (poll(&input, 1, 5) == 0) round_beside(primary, w);
  }
  DO(cuDevicePrimaryCtxRelease(0));
  return 0;
}
