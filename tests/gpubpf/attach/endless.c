// A program with a kernel that does not end until it is told: endless OWN. The kernel is in the context that all else is in (OWN is 0), in one of
// its own (1), or in the primary context, and all else is in another one (2). A thread launches
// `steady` all the time in another stream, directly and in graphs that it captures, and checks what it did. Lines on stdin, each answered with one:
//   start    launches `endless`, and waits until it runs
//   stop     has it end
//   capture  begins to capture a blocking stream, and puts `steady` into the capture
//   captured ends the capture
//   load     loads a module with `fresh`
//   fresh    launches that, and checks what it did
//   behind   another thread launches `steady` three times behind that
//   large    launches `steady` with 131,072 threads in a stream of its own, and checks what it did (OWN is 0)
//   free     bytes of the GPU's memory that are free
//   retain   retains and releases the primary context three times; how many ms that took
//   destroy  ends the kernel's context (OWN is 1)
//   later MS likewise, by a reset if it is the primary context, but the kernel only ends MS ms afterwards. If OWN is 0, the program ends then
//   leave    ends while the kernel runs
//   quit     ends; says how many launches of `steady` there were
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry steady(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n"
    ".visible .entry endless(.param .u64 flags) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n .reg .pred %p;\n"
    " ld.param.u64 %rd1, [flags];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " st.volatile.global.u32 [%rd1+4], %r1;\n"
    "L: nanosleep.u32 100000;\n ld.volatile.global.u32 %r1, [%rd1];\n setp.eq.u32 %p, %r1, 0;\n @%p bra L;\n ret;\n}\n";

static CUcontext common, its;
static CUfunction steady;
static volatile int over;
static volatile long launches;

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}

static CUfunction load(const char *name) {
  CUmodule m;
  CUfunction f;
  check(cuModuleLoadData(&m, text), "cuModuleLoadData");
  check(cuModuleGetFunction(&f, m, name), "cuModuleGetFunction");
  return f;
}

static const char *fresh_text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry fresh(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " st.global.u32 [%rd1], %r1;\n ret;\n}\n";

static CUstream stream;
static CUdeviceptr unread;

static void *launch_behind(void *a) {
  void *parameters[] = {&unread};
  pthread_setname_np(pthread_self(), "behind");
  check(cuCtxSetCurrent(its), "cuCtxSetCurrent");
  for (int i = 0; i < 3; ++i) check(cuLaunchKernel(steady, 2, 1, 1, 64, 1, 1, 0, stream, parameters, 0), "cuLaunchKernel");
  return a;
}

static useconds_t its_ms;

static void *end_later(void *host) {
  usleep(its_ms * 1000);
  *(volatile unsigned *)host = 1;
  return NULL;
}

static void *work(void *a) {
  CUdeviceptr out;
  CUstream s;
  CUgraph graph;
  CUgraphExec exec;
  check(cuCtxSetCurrent(common), "cuCtxSetCurrent");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  check(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  steady = load("steady");
  void *parameters[] = {&out};
  while (!over) {
    unsigned found = 0;
    check(cuMemsetD8Async(out, 0, 4, s), "cuMemsetD8Async");
    check(cuLaunchKernel(steady, 4, 1, 1, 32, 1, 1, 0, s, parameters, 0), "cuLaunchKernel");
    check(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    check(cuLaunchKernel(steady, 4, 1, 1, 32, 1, 1, 0, s, parameters, 0), "cuLaunchKernel, captured");
    usleep(3000);
    check(cuStreamEndCapture(s, &graph), "cuStreamEndCapture");
    check(cuGraphInstantiateWithFlags(&exec, graph, 0), "cuGraphInstantiate");
    check(cuGraphLaunch(exec, s), "cuGraphLaunch");
    check(cuStreamSynchronize(s), "cuStreamSynchronize");
    check(cuMemcpyDtoHAsync(&found, out, 4, s), "cuMemcpyDtoHAsync");
    check(cuStreamSynchronize(s), "cuStreamSynchronize");
    check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
    check(cuGraphDestroy(graph), "cuGraphDestroy");
    if (found != 2 * 128) {
      dprintf(2, "%u additions, not 256\n", found);
      _exit(1);
    }
    ++launches;
    usleep(2000);
  }
  return a;
}

int main(int argc, char **argv) {
  const int own = argc > 1 && atoi(argv[1]);
  pthread_t thread;
  CUdevice device;
  CUdeviceptr flags;
  volatile unsigned *host;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&its, device), "cuDevicePrimaryCtxRetain");
  common = its;
  if (own == 2) check(cuCtxCreate(&common, NULL, 0, device), "cuCtxCreate");
  check(cuCtxSetCurrent(common), "cuCtxSetCurrent");
  check(cuMemHostAlloc((void **)&host, 8, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
  check(cuMemHostGetDevicePointer(&flags, (void *)host, 0), "cuMemHostGetDevicePointer");
  CUstream large, blocking;
  CUdeviceptr out;
  check(cuStreamCreate(&large, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(cuStreamCreate(&blocking, CU_STREAM_DEFAULT), "cuStreamCreate");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  check(cuMemAlloc(&unread, 4), "cuMemAlloc");
  if (own == 1) check(cuCtxCreate(&its, NULL, 0, device), "cuCtxCreate");
  check(cuCtxSetCurrent(its), "cuCtxSetCurrent");
  check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  CUfunction endless = load("endless"), fresh = NULL;
  pthread_create(&thread, 0, work, 0);
  while (!launches) usleep(1000);
  puts("ready");
  fflush(stdout);
  char line[32];
  while (fgets(line, sizeof line, stdin) && strncmp(line, "quit", 4) != 0) {
    long said = 0;
    if (!strncmp(line, "start", 5)) {
      void *parameters[] = {&flags};
      host[0] = host[1] = 0;
      check(cuLaunchKernel(endless, 1, 1, 1, 32, 1, 1, 0, stream, parameters, 0), "cuLaunchKernel");
      while (!host[1]) usleep(1000);
    } else if (!strncmp(line, "stop", 4)) {
      host[0] = 1;
      check(cuStreamSynchronize(stream), "cuStreamSynchronize");
    } else if (!strncmp(line, "captured", 8)) {
      CUgraph graph;
      check(cuStreamEndCapture(blocking, &graph), "cuStreamEndCapture");
      check(cuGraphDestroy(graph), "cuGraphDestroy");
    } else if (!strncmp(line, "capture", 7)) {
      void *parameters[] = {&unread};
      check(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
      check(cuLaunchKernel(steady, 4, 1, 1, 32, 1, 1, 0, blocking, parameters, 0), "cuLaunchKernel, captured");
    } else if (!strncmp(line, "load", 4)) {
      CUmodule m;
      check(cuModuleLoadData(&m, fresh_text), "cuModuleLoadData");
      check(cuModuleGetFunction(&fresh, m, "fresh"), "cuModuleGetFunction");
    } else if (!strncmp(line, "fresh", 5)) {
      void *parameters[] = {&out};
      unsigned found = 0;
      check(cuMemsetD8Async(out, 0, 4, large), "cuMemsetD8Async");
      check(cuLaunchKernel(fresh, 1, 1, 1, 32, 1, 1, 0, large, parameters, 0), "cuLaunchKernel");
      check(cuMemcpyDtoHAsync(&found, out, 4, large), "cuMemcpyDtoHAsync");
      check(cuStreamSynchronize(large), "cuStreamSynchronize");
      said = found;
    } else if (!strncmp(line, "behind", 6)) {
      pthread_t behind;
      pthread_create(&behind, 0, launch_behind, 0);
      pthread_detach(behind);
    } else if (!strncmp(line, "large", 5)) {
      void *parameters[] = {&out};
      unsigned found = 0;
      check(cuMemsetD8Async(out, 0, 4, large), "cuMemsetD8Async");
      check(cuLaunchKernel(steady, 4096, 1, 1, 32, 1, 1, 0, large, parameters, 0), "cuLaunchKernel");
      check(cuMemcpyDtoHAsync(&found, out, 4, large), "cuMemcpyDtoHAsync");
      check(cuStreamSynchronize(large), "cuStreamSynchronize");
      if (found != 4096 * 32) {
        dprintf(2, "%u additions, not 131072\n", found);
        _exit(1);
      }
    } else if (!strncmp(line, "later", 5)) {
      pthread_t later;
      its_ms = (useconds_t)atoi(line + 5);
      pthread_create(&later, 0, end_later, (void *)host);
      pthread_detach(later);
      over |= !own;
      if (over) pthread_join(thread, 0);
      check(own == 1 ? cuCtxDestroy(its) : cuDevicePrimaryCtxReset(device), "end of the context");
      if (over) return printf("0\n%ld launches\n", launches) < 0;
      check(cuCtxSetCurrent(common), "cuCtxSetCurrent");
    } else if (!strncmp(line, "retain", 6)) {
      struct timespec before, after;
      CUcontext same;
      clock_gettime(CLOCK_MONOTONIC, &before);
      for (int i = 0; i < 3; ++i) {
        check(cuDevicePrimaryCtxRetain(&same, device), "cuDevicePrimaryCtxRetain");
        check(cuDevicePrimaryCtxRelease(device), "cuDevicePrimaryCtxRelease");
      }
      clock_gettime(CLOCK_MONOTONIC, &after);
      said = (after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000;
    } else if (!strncmp(line, "leave", 5)) {
      over = 1;
      pthread_join(thread, 0);
      return 0;
    } else if (!strncmp(line, "destroy", 7)) {
      host[0] = 1;
      check(cuCtxDestroy(its), "cuCtxDestroy");
      check(cuCtxSetCurrent(common), "cuCtxSetCurrent");
    } else {
      size_t free = 0, total = 0;
      check(cuMemGetInfo(&free, &total), "cuMemGetInfo");
      said = (long)free;
    }
    printf("%ld\n", said);
    fflush(stdout);
  }
  host[0] = 1;
  over = 1;
  pthread_join(thread, 0);
  printf("%ld launches\n", launches);
  return 0;
}
