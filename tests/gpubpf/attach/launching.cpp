// `launching THREADS`: launches kernels as fast as it can from so many threads, each with a stream of its own, and checks every result.
// One kernel in two is of a module that was loaded at the start, one of a module that is loaded anew every 64 launches.
// Lines on stdin: "pause" (answers with the launches so far, when none is under way), "go", "quit" (checks, says how many, ends).
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <mutex>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

constexpr unsigned kThreads = 128;  // of a grid
constexpr unsigned kRound = 64;

const std::string text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry NAME(.param .u64 out, .param .u32 n) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n ld.param.u32 %r1, [n];\n cvta.to.global.u64 %rd1, %rd1;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";

CUcontext context;
std::atomic<bool> over{false}, paused{false};
std::atomic<int> standing{0};
std::atomic<long> launches{0};

void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, static_cast<int>(r));
  _exit(1);
}

CUmodule load(const char *name, CUfunction *f) {
  std::string ptx = text;
  ptx.replace(ptx.find("NAME"), 4, name);
  CUmodule m;
  check(cuModuleLoadData(&m, ptx.c_str()), "cuModuleLoadData");
  check(cuModuleGetFunction(f, m, name), "cuModuleGetFunction");
  return m;
}

void work(unsigned number) {
  CUdeviceptr out;
  CUstream stream;
  CUfunction steady, fresh;
  unsigned wanted = 0, found = 0, n = number + 1;
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  check(cuMemsetD8(out, 0, 4), "cuMemsetD8");
  check(cuStreamCreate(&stream, 0), "cuStreamCreate");
  load("steady", &steady);
  while (!over) {
    if (paused) {
      ++standing;
      while (paused && !over) usleep(200);
      --standing;
    }
    CUmodule m = load("fresh", &fresh);
    void *parameters[] = {&out, &n};
    for (unsigned i = 0; i < kRound && !over; ++i) {
      check(cuLaunchKernel(i % 2 ? steady : fresh, kThreads / 32, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr), "cuLaunchKernel");
      ++launches;
      wanted += n * kThreads;
    }
    check(cuStreamSynchronize(stream), "cuStreamSynchronize");
    check(cuMemcpyDtoH(&found, out, 4), "cuMemcpyDtoH");
    if (found != wanted) {
      dprintf(2, "thread %u: %u, not %u\n", number, found, wanted);
      _exit(1);
    }
    check(cuModuleUnload(m), "cuModuleUnload");
  }
}

}  // namespace

int main(int argc, char **argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 8;
  CUdevice device;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(work, static_cast<unsigned>(i));
  while (launches < 4 * kRound * count) usleep(1000);
  puts("ready");
  fflush(stdout);
  char line[32];
  while (fgets(line, sizeof line, stdin) && strncmp(line, "quit", 4) != 0) {
    paused = strncmp(line, "pause", 5) == 0;
    while (paused && standing < count) usleep(200);
    printf("%ld\n", launches.load());
    fflush(stdout);
  }
  over = true;
  for (std::thread &t : threads) t.join();
  printf("%ld\n", launches.load());
  return 0;
}
