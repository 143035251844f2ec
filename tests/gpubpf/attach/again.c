// A program that launches a kernel which does not end until it is told again and again, and `steady` beside it, which it waits for each time. While
// a tool's agent gets in, or has left something to be freed, one ends and the next is launched every few ms, at the moment at which a thread that waits for
// the context goes on; the first ones that meet something to be freed even before the one before them ends. With the argument `graph`, in graphs; with `value`,
// it is a stream that waits for the host instead. Lines on stdin, each answered with one:
//   stop  no more such kernels
//   free  bytes of the GPU's memory that are free
//   quit  ends; says how often it was launched
#include <cuda.h>
#include <dirent.h>
#include <poll.h>
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

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// Whether the process has a thread of that name.
static int has_thread(const char *name) {
  char path[64], found[32] = "";
  int has = 0;
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *e; tasks && !has && (e = readdir(tasks));) {
    snprintf(path, sizeof path, "/proc/self/task/%.16s/comm", e->d_name);
    FILE *f = fopen(path, "r");
    has = f && fgets(found, sizeof found, f) && strcmp(strtok(found, "\n"), name) == 0;
    if (f) fclose(f);
  }
  if (tasks) closedir(tasks);
  return has;
}

static volatile unsigned *host;  // for each of two kernels: that it is to end, that it runs
static CUdeviceptr flags;
static CUfunction endless;
static CUstream streams[2];
static CUgraphExec graphs[2];
static int value;
static unsigned long launches;

static void put(int i) {
  CUdeviceptr its = flags + 8 * (unsigned)i;
  void *parameters[] = {&its};
  check(cuLaunchKernel(endless, 1, 1, 1, 32, 1, 1, 0, streams[i], parameters, 0), "cuLaunchKernel");
}

static void begin(int i) {
  host[2 * i] = host[2 * i + 1] = 0;
  if (graphs[i]) check(cuGraphLaunch(graphs[i], streams[i]), "cuGraphLaunch");
  else if (value) check(cuStreamWaitValue32(streams[i], flags + 8 * (unsigned)i, 1, CU_STREAM_WAIT_VALUE_EQ), "cuStreamWaitValue32");
  else put(i);
  ++launches;
}

static void end(int i, int all) {
  host[2 * i] = 1;
  check(all ? cuCtxSynchronize() : cuStreamSynchronize(streams[i]), "its end");
}

int main(int argc, char **argv) {
  const int graph_too = argc > 1 && !strcmp(argv[1], "graph");
  value = argc > 1 && !strcmp(argv[1], "value");
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction steady;
  CUstream t;
  CUevent event;
  CUdeviceptr out;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuMemHostAlloc((void **)&host, 16, CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc");
  check(cuMemHostGetDevicePointer(&flags, (void *)host, 0), "cuMemHostGetDevicePointer");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  check(cuMemsetD8(out, 0, 4), "cuMemsetD8");
  check(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  check(cuModuleLoadData(&module, text), "cuModuleLoadData");
  check(cuModuleGetFunction(&steady, module, "steady"), "cuModuleGetFunction");
  check(cuModuleGetFunction(&endless, module, "endless"), "cuModuleGetFunction");
  void *of_steady[] = {&out};
  for (int i = 0; i < 2; ++i) {
    check(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    if (!graph_too) continue;
    CUgraph graph;
    check(cuStreamBeginCapture(streams[i], CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
    put(i);
    check(cuStreamEndCapture(streams[i], &graph), "cuStreamEndCapture");
    check(cuGraphInstantiateWithFlags(&graphs[i], graph, 0), "cuGraphInstantiate");
  }
  puts("ready");
  fflush(stdout);
  unsigned long steadies = 0;
  double attached = 0, begun = 0;  // the agent came; the kernel was launched
  int stopped = 0, runs = -1, met = 0;
  for (struct pollfd in = {0, POLLIN, 0};;) {
    if (poll(&in, 1, 1) > 0) {
      char line[32] = "";
      ssize_t n = read(0, line, sizeof line - 1);
      size_t free = 0, total = 0;
      if (n <= 0 || !strncmp(line, "quit", 4)) break;
      stopped = stopped || !strncmp(line, "stop", 4);
      if (!strncmp(line, "free", 4)) check(cuMemGetInfo(&free, &total), "cuMemGetInfo");
      if (stopped && runs >= 0) end(runs, 0);
      if (stopped) runs = -1;
      printf("%zu\n", free);
      fflush(stdout);
    }
    if (!stopped) {
      const int frees = has_thread("gpubpf-free");
      met = frees ? met + 1 : 0;
      if (!has_thread("gpubpf")) attached = 0;
      else if (!attached) attached = now();
      const int often = frees || (attached && now() - attached < 0.7);
      const int due = runs < 0 || now() - begun > (often ? 0.005 : 1.5), next = runs == 0;
      if (due && runs >= 0 && !(met && met < 100)) {
        end(runs, 1);
        runs = -1;
      }
      if (due) {
        begin(next);
        begun = now();
        if (runs >= 0) end(runs, 0);
        runs = next;
      }
    }
    check(cuLaunchKernel(steady, 4, 1, 1, 32, 1, 1, 0, t, of_steady, 0), "cuLaunchKernel");
    check(cuEventRecord(event, t), "cuEventRecord");
    check(cuEventSynchronize(event), "cuEventSynchronize");
    ++steadies;
  }
  host[0] = host[2] = 1;
  check(cuCtxSynchronize(), "cuCtxSynchronize");
  unsigned sum = 0;
  check(cuMemcpyDtoH(&sum, out, 4), "cuMemcpyDtoH");
  if (sum != (unsigned)(steadies * 128)) return 1;
  printf("%lu launches\n", launches);
  return 0;
}
