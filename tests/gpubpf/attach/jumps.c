// A program whose calls of the driver are left in their midst: a launch reads parameters that cannot be read, and the handler of that signal jumps out
// (siglongjmp), from where the driver reads a value and from where whoever comes first reads their addresses. Between two of these it launches `steady` and
// checks what that did. The handler has a stack of its own, above the frames that it leaves, and launches there, too. jumps N: N times; without, until a
// line comes on stdin. Says how often.
#include <cuda.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define KERNEL(name)                                                    \
  ".visible .entry " name "(.param .u64 out) {\n"                       \
  " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"                             \
  " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n" \
  " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n"
static const char *text = ".version 7.0\n.target sm_70\n.address_size 64\n" KERNEL("steady") KERNEL("inner");

static CUfunction steady, inner;
static CUdeviceptr outs[2];
static sigjmp_buf back;
static void *none;  // cannot be read

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}

static void launch(CUfunction f, void **parameters) { check(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, 0, parameters, 0), "cuLaunchKernel"); }

static void handle(int signal) {
  (void)signal;
  void *parameters[] = {&outs[1]};
  launch(inner, parameters);
  siglongjmp(back, 1);
}

__attribute__((noinline)) static void deep(int frames, void **parameters) {
  volatile char room[256];
  room[0] = 0;
  if (frames) deep(frames - 1, parameters);
  else launch(steady, parameters);
  room[1] = room[0];
}

int main(int argc, char **argv) {
  char above[65536];
  CUdevice device;
  CUcontext context;
  CUmodule module;
  const long rounds = argc > 1 ? atol(argv[1]) : -1;
  volatile long done = 0;  // as siglongjmp leaves it
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuModuleLoadData(&module, text), "cuModuleLoadData");
  check(cuModuleGetFunction(&steady, module, "steady"), "cuModuleGetFunction");
  check(cuModuleGetFunction(&inner, module, "inner"), "cuModuleGetFunction");
  for (int i = 0; i < 2; ++i) check(cuMemAlloc(&outs[i], 4), "cuMemAlloc"), check(cuMemsetD8(outs[i], 0, 4), "cuMemsetD8");
  none = mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void *good[] = {&outs[0]}, *bad[] = {none};
  launch(steady, good);  // the device's own handler is there from now on
  check(cuCtxSynchronize(), "cuCtxSynchronize");
  const stack_t stack = {.ss_sp = above, .ss_size = sizeof above};
  const struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK | SA_NODEFER};
  sigaltstack(&stack, 0);
  sigaction(SIGSEGV, &action, 0);
  puts("ready");
  fflush(stdout);
  struct pollfd input = {0, POLLIN, 0};
  for (; rounds < 0 ? poll(&input, 1, 2) == 0 : done < rounds; ++done) {
    if (sigsetjmp(back, 1) == 0) {
      if (done & 2) launch(steady, done & 1 ? bad : none);
      else deep(done & 4 ? 100 : 3, done & 1 ? bad : none);
      dprintf(2, "a launch came back\n");
      return 1;
    }
    if (done & 8) deep(5, good);
    else launch(steady, good);
    unsigned found[2];
    for (int i = 0; i < 2; ++i) check(cuMemcpyDtoH(&found[i], outs[i], 4), "cuMemcpyDtoH");
    if (found[0] != 32 * (done + 2) || found[1] != 32 * (done + 1)) {
      dprintf(2, "%u and %u additions after %ld\n", found[0], found[1], done);
      return 1;
    }
  }
  printf("%ld\n", done);
  return 0;
}
