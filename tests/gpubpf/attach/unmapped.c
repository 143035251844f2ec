// A program whose call of the driver is left in its midst on a stack that is gone afterwards: a coroutine launches with parameters that cannot be read, the
// handler of that signal jumps out (siglongjmp), the coroutine's stack is unmapped, and another one, whose stack lies close below, launches. Again and
// again until a line comes on stdin; says how often.
#include <cuda.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { STACK = 256 << 10 };
static const char *text =
    ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry steady(.param .u64 out) {\n"
    " .reg .b64 %rd<2>;\n .reg .b32 %r<2>;\n ld.param.u64 %rd1, [out];\n mov.u32 %r1, 1;\n red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";
static CUfunction steady;
static CUdeviceptr out;
static sigjmp_buf back;
static ucontext_t begin;
static void *none;  // cannot be read

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}

static void handle(int signal) {
  (void)signal;
  siglongjmp(back, 1);
}

static void launch(void **parameters) { check(cuLaunchKernel(steady, 1, 1, 1, 32, 1, 1, 0, 0, parameters, 0), "cuLaunchKernel"); }
static void launch_bad(void) {
  void *parameters[] = {none};
  launch(parameters);
}
static void launch_good(void) {
  void *parameters[] = {&out};
  launch(parameters);
}

static void on_stack(char *stack, void (*function)(void)) {
  ucontext_t coroutine;
  getcontext(&coroutine);
  coroutine.uc_stack = (stack_t){.ss_sp = stack, .ss_size = STACK};
  coroutine.uc_link = &begin;
  makecontext(&coroutine, function, 0);
  swapcontext(&begin, &coroutine);
}

int main(void) {
  static char own[65536];
  CUdevice device;
  CUcontext context;
  CUmodule module;
  volatile unsigned done = 0;  // as siglongjmp leaves it
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuModuleLoadData(&module, text), "cuModuleLoadData");
  check(cuModuleGetFunction(&steady, module, "steady"), "cuModuleGetFunction");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  check(cuMemsetD8(out, 0, 4), "cuMemsetD8");
  none = mmap(0, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  launch_good();  // the device's own handler is there from now on
  check(cuCtxSynchronize(), "cuCtxSynchronize");
  const stack_t stack = {.ss_sp = own, .ss_size = sizeof own};
  const struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK | SA_NODEFER};
  sigaltstack(&stack, 0);
  sigaction(SIGSEGV, &action, 0);
  puts("ready");
  fflush(stdout);
  struct pollfd input = {0, POLLIN, 0};
  for (; poll(&input, 1, 2) == 0; ++done) {
    char *volatile stacks = mmap(0, 2 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (sigsetjmp(back, 1) == 0) {
      on_stack(stacks + STACK, launch_bad);
      dprintf(2, "a launch came back\n");
      return 1;
    }
    munmap(stacks + STACK, STACK);
    if (sigsetjmp(back, 1) != 0) {
      dprintf(2, "what is gone was read after %u\n", done);
      return 1;
    }
    on_stack(stacks, launch_good);
    munmap(stacks, STACK);
    unsigned found;
    check(cuMemcpyDtoH(&found, out, 4), "cuMemcpyDtoH");
    if (found != 32 * (done + 2)) {
      dprintf(2, "%u additions after %u\n", found, done);
      return 1;
    }
  }
  printf("%u\n", done);
  return 0;
}
