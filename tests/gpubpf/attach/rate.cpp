// Launches one kernel, a store, of a module that was loaded at the start, again and again, until it is asked something; from then on only when it is
// asked. A line on stdin, "LAUNCHES WORK", has it launch so often, with so many turns of a loop before each launch, and say what that took:
// ns of processor time of the whole process, the work on the device included, and of the launching thread. A quarter as many launches
// come before and are not counted: another process had the caches. The argument is the CPU that it runs on.
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <ctime>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, static_cast<int>(r));
  _exit(1);
}

static long processor_ns(clockid_t whose) {
  timespec t;
  clock_gettime(whose, &t);
  return t.tv_sec * 1'000'000'000L + t.tv_nsec;
}

static const char kModule[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry one_store(.param .u64 at) {
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [at];
  st.global.u32 [%rd1], 1;
  ret;
}
)";

static constexpr long kQueued = 20;  // launches at most: a queue that grows takes memory, and so time, of its own
static CUdeviceptr memory;

static void launch(CUfunction f, long launches, long work) {
  void *parameters[] = {&memory};
  for (long i = 0; i < launches; ++i) {
    for (long turn = 0; turn < work; ++turn) asm volatile("" : "+r"(turn));
    check(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr), "cuLaunchKernel");
    if (i % kQueued == kQueued - 1 || i == launches - 1) check(cuCtxSynchronize(), "cuCtxSynchronize");
  }
}

int main(int argc, char **argv) {
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction f;
  if (argc > 1) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(atoi(argv[1]), &one);
    sched_setaffinity(0, sizeof one, &one);
  }
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuModuleLoadData(&module, kModule), "cuModuleLoadData");
  check(cuModuleGetFunction(&f, module, "one_store"), "cuModuleGetFunction");
  check(cuMemAlloc(&memory, 4), "cuMemAlloc");
  puts("ready");
  fflush(stdout);
  pollfd in{0, POLLIN, 0};
  while (poll(&in, 1, 1) == 0) launch(f, 200, 0);
  char line[64];
  long launches, work;
  while (fgets(line, sizeof line, stdin) && sscanf(line, "%ld %ld", &launches, &work) == 2) {
    launch(f, (launches + 3) / 4, work);
    const long thread = processor_ns(CLOCK_THREAD_CPUTIME_ID), process = processor_ns(CLOCK_PROCESS_CPUTIME_ID);
    launch(f, launches, work);
    const long whole = processor_ns(CLOCK_PROCESS_CPUTIME_ID) - process, own = processor_ns(CLOCK_THREAD_CPUTIME_ID) - thread;
    printf("%ld %ld\n", whole, own);
    fflush(stdout);
  }
  return 0;
}
