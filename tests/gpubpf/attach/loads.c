// Loads a module, launches its kernel five times, checks what it did, unloads it; again and again, in as many threads as it is told, until a
// line comes on stdin. Then it says how many launches that were. One kernel of a module that is loaded only once is launched in between.
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry NAME(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";

static CUcontext context;
static volatile int over;
static long launches;

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}

static CUmodule load(const char *name, CUfunction *f) {
  char ptx[1024];
  const char *at = strstr(text, "NAME");
  snprintf(ptx, sizeof ptx, "%.*s%s%s", (int)(at - text), text, name, at + 4);
  CUmodule m;
  check(cuModuleLoadData(&m, ptx), "cuModuleLoadData");
  check(cuModuleGetFunction(f, m, name), "cuModuleGetFunction");
  return m;
}

static void launch(CUfunction f, CUdeviceptr out, CUstream s) {
  void *parameters[] = {&out};
  check(cuLaunchKernel(f, 4, 1, 1, 32, 1, 1, 0, s, parameters, 0), "cuLaunchKernel");
}

static void *work(void *a) {
  CUdeviceptr out;
  CUstream s;
  CUfunction old, f;
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  check(cuStreamCreate(&s, 0), "cuStreamCreate");
  load("old", &old);
  while (!over) {
    unsigned before = 0, after = 0;
    check(cuMemcpyDtoH(&before, out, 4), "cuMemcpyDtoH");
    CUmodule m = load("fresh", &f);
    for (int i = 0; i < 5; ++i) launch(f, out, s);
    launch(old, out, s);
    check(cuStreamSynchronize(s), "cuStreamSynchronize");
    check(cuMemcpyDtoH(&after, out, 4), "cuMemcpyDtoH");
    if (after - before != 6 * 128) {
      dprintf(2, "%u additions, not 768\n", after - before);
      _exit(1);
    }
    check(cuModuleUnload(m), "cuModuleUnload");
    __atomic_fetch_add(&launches, 5, __ATOMIC_RELAXED);
    usleep(20000);
  }
  return a;
}

int main(int argc, char **argv) {
  int n = argc > 1 ? atoi(argv[1]) : 1;
  pthread_t threads[64];
  CUdevice device;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  for (int i = 0; i < n; ++i) pthread_create(&threads[i], 0, work, 0);
  usleep(200000);
  puts("ready");
  fflush(stdout);
  char line[16];
  if (!fgets(line, sizeof line, stdin)) return 3;
  over = 1;
  for (int i = 0; i < n; ++i) pthread_join(threads[i], 0);
  printf("%ld launches\n", launches);
  return 0;
}
