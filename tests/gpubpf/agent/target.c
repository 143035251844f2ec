/* A program on the fake driver: target [MODE] [N]. Its output says what it did, and must not depend on a tool. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

unsigned long fake_launches(void), fake_instrumented(void);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
static const char image[] = "FAKE\nvectorAdd\nreduce\n";
static CUfunction function, other;
static CUcontext context;
static int n = 23;

static void setup(void) {
  CUmodule module;
  cuInit(0);
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
  cuModuleLoadData(&module, image);
  cuModuleGetFunction(&function, module, "vectorAdd");
  cuModuleGetFunction(&other, module, "reduce");
}

static void wait_for_the_end(void) { /* until the file AFTERWARDS is there: the measurement is over */
  for (int turn = 0; turn < 60000 && access(getenv("AFTERWARDS"), F_OK); ++turn) usleep(1000);
}

static void launch(CUfunction f, unsigned grid, unsigned block) {
  int a = 1, b = 2;
  void *parameters[] = {&a, &b};
  CUresult code = cuLaunchKernel(f, grid, 1, 1, block, 1, 1, 0, NULL, parameters, NULL);
  if (code) printf("launch: %d\n", code);
}

static void *many(void *unused) {
  (void)unused;
  cuCtxSetCurrent(context);
  for (int i = 0; i < n; ++i) launch(function, 1, 5);
  return NULL;
}

static sigjmp_buf back;

static void leave(int signal) {
  if (signal == SIGUSR1) pthread_exit(NULL);
  siglongjmp(back, 1);
}

static void *left(void *unused) {
  (void)unused;
  cuCtxSetCurrent(context);
  if (!sigsetjmp(back, 1)) launch(function, 1, 7);
  for (int i = 0; i < n; ++i) launch(function, 1, 5);
  return NULL;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "plain";
  if (argc > 2) n = atoi(argv[2]);
  if (!strcmp(mode, "nocuda")) return 3;
  if (!strcmp(mode, "forks")) { /* before any CUDA call: each child is a process of its own to the tool */
    for (int i = 0; i < n; ++i)
      if (!fork()) {
        setup();
        launch(function, 1, 5);
        exit(0);
      }
    int failed = 0, status;
    while (wait(&status) > 0) failed += status != 0;
    printf("failed %d\n", failed);
    return failed;
  }
  if (!strcmp(mode, "closefirst")) {
    cuInit(0);
    usleep(50000); /* until the agent's thread waits for the tool */
    for (int fd = 3; fd < 1024; ++fd) close(fd);
  }
  setup();
  if (!strcmp(mode, "handlers")) { /* what a program finds, and how it sets its own */
    int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGABRT};
    struct sigaction old, ignore = {.sa_handler = SIG_IGN};
    launch(function, 1, 5);
    for (int i = 0; i < 4; ++i) {
      int found = sigaction(signals[i], NULL, &old);
      printf("%d %d %x\n", found, old.sa_handler == SIG_DFL, (unsigned)old.sa_flags);
    }
    printf("%d %d %d\n", signal(SIGINT, SIG_IGN) == SIG_DFL, sigaction(SIGHUP, &ignore, &old), old.sa_handler == SIG_DFL);
    printf("%d %d\n", signal(SIGINT, SIG_DFL) == SIG_IGN, signal(SIGHUP, SIG_DFL) == SIG_IGN);
  } else if (!strcmp(mode, "longcapture")) { /* until the measurement is over */
    CUgraph graph;
    launch(function, 1, 5);
    cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_RELAXED);
    wait_for_the_end();
    printf("captured %d\n", cuStreamEndCapture(NULL, &graph));
  } else if (!strcmp(mode, "destroylater")) { /* after the measurement */
    CUcontext second;
    CUmodule module;
    CUfunction f;
    cuCtxCreate_v2(&second, 0, 0);
    cuModuleLoadData(&module, image);
    cuModuleGetFunction(&f, module, "vectorAdd");
    launch(f, 1, 5);
    wait_for_the_end();
    cuCtxDestroy_v2(second);
  } else if (!strcmp(mode, "busyterm")) { /* dies after n milliseconds while others launch */
    pthread_t t[4];
    unsigned wait = 1000 * (unsigned)n;
    n = 1 << 30;
    for (int i = 0; i < 4; ++i) pthread_create(&t[i], NULL, many, NULL);
    usleep(wait);
    raise(SIGTERM);
  } else if (!strcmp(mode, "wrong")) { /* parameters in both ways, and too few */
    int a = 1, b = 2;
    size_t size = 0;
    void *parameters[] = {&a, &b}, *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &a, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    printf("%d\n", cuLaunchKernel(function, 1, 1, 1, 5, 1, 1, 0, NULL, parameters, extra));
    cuLaunchKernel(function, 1, 1, 1, 5, 1, 1, 0, NULL, NULL, extra);
  } else if (!strcmp(mode, "leave")) { /* a call that waits: the thread is cancelled, ends, jumps out of it */
    for (int how = 0; how < 3; ++how) {
      pthread_t t;
      unsigned long before = fake_launches();
      signal(SIGUSR1, leave);
      signal(SIGUSR2, leave);
      pthread_create(&t, NULL, left, NULL);
      while (fake_launches() == before) usleep(1000);
      if (how == 0) pthread_cancel(t);
      else pthread_kill(t, how == 1 ? SIGUSR1 : SIGUSR2);
      pthread_join(t, NULL);
    }
  } else if (!strcmp(mode, "threads")) {
    pthread_t t[8];
    for (int i = 0; i < 8; ++i) pthread_create(&t[i], NULL, many, NULL);
    for (int i = 0; i < 8; ++i) pthread_join(t[i], NULL);
  } else if (!strcmp(mode, "time")) {
    double start = now();
    for (int i = 0; i < n; ++i) launch(function, 1, 5);
    double matched = now();
    for (int i = 0; i < n; ++i) launch(other, 1, 5);
    fprintf(stderr, "ns per launch: matched %.1f, not matched %.1f\n", 1e9 * (matched - start) / n, 1e9 * (now() - matched) / n);
    return 0;
  } else if (!strcmp(mode, "slow")) { /* n launches, a millisecond apart */
    for (int i = 0; i < n; ++i) {
      launch(function, 1, 5);
      usleep(1000);
    }
  } else if (!strcmp(mode, "large")) { /* n launches of 100,000 threads, 5 ms apart */
    for (int i = 0; i < n; ++i) {
      launch(function, 100, 1000);
      usleep(5000);
    }
  } else if (!strcmp(mode, "closeall")) { /* as daemons do, and then uses the numbers for files of its own */
    launch(function, 1, 5);
    for (int fd = 3; fd < 1024; ++fd) close(fd);
    FILE *files[300];
    for (int i = 0; i < 300; ++i)
      if (!(files[i] = tmpfile())) return 1;
    for (int i = 0; i < n; ++i) launch(function, 1 + i, 5);
    for (int i = 0; i < 300; ++i) {
      fseek(files[i], 0, SEEK_END);
      if (ftell(files[i])) return 2; /* somebody wrote into it */
    }
  } else if (!strcmp(mode, "maps")) { /* memory at addresses that the program chooses */
    CUdeviceptr at = 0x700000000000, p;
    CUipcMemHandle handle = {};
    memcpy(handle.reserved, &(CUdeviceptr){at + 0x100000}, sizeof at);
    for (int i = 0; i < 4; ++i) cuMemMap(at + i * 0x1000, 0x1000, 0, 1 + i, 0);
    cuMemMap(at + 0x8000, 0x1000, 0, 0, 0); /* refused */
    cuMemUnmap(at + 0x1000, 0x2000);
    cuMemUnmap(at, 0); /* refused */
    cuMemMap(at + 0x2000, 0x1000, 0, 9, 0);
    cuIpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    cuIpcCloseMemHandle(p);
    cuIpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    CUmemPoolPtrExportData of_pool = {};
    memcpy(of_pool.reserved, &(CUdeviceptr){at + 0x200000}, sizeof at);
    cuMemPoolImportPointer(&p, NULL, &of_pool); /* refused */
    cuMemPoolImportPointer(&p, (CUmemoryPool)1, &of_pool);
    cuIpcGetMemHandle(&handle, at + 0x3000);
    launch(function, 1, 5);
  } else if (!strcmp(mode, "batch")) { /* of two copies */
    CUdeviceptr from[2], to[2];
    for (int i = 0; i < 2; ++i) cuMemAlloc(from + i, 64), cuMemAlloc(to + i, 64);
    cuMemcpyBatchAsync(to, from, (size_t[]){64, 64}, n > 2 ? 2 : n, NULL, NULL, 0, NULL);
    launch(function, 1, 5);
  } else if (!strcmp(mode, "shapes")) {
    for (int i = 0; i < n; ++i) launch(function, 1 + i % 3, 5);
    launch(other, 1, 1);
  } else if (!strcmp(mode, "huge")) { /* more threads than have numbers of 32 bits, in a kernel's first launch */
    for (int i = 0; i < n; ++i) launch(function, 2147483647, 1024);
  } else if (!strcmp(mode, "capture")) {
    CUgraph graph;
    launch(function, 1, 5);
    cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL);
    launch(function, 1, 5);
    launch(function, 1, 5);
    cuStreamEndCapture(NULL, &graph);
    launch(function, 1, 5);
  } else if (!strcmp(mode, "childafter")) { /* fork with the agent in the process */
    for (int i = 0; i < n; ++i) launch(function, 1, 5);
    pid_t child = fork();
    if (!child) {
      launch(function, 1, 5);
      _exit(7);
    }
    int status;
    waitpid(child, &status, 0);
    printf("child %d\n", WEXITSTATUS(status));
  } else if (!strcmp(mode, "destroy")) {
    CUcontext second;
    CUmodule module;
    CUfunction f;
    cuCtxCreate_v2(&second, 0, 0);
    cuModuleLoadData(&module, image);
    cuModuleGetFunction(&f, module, "vectorAdd");
    for (int i = 0; i < n; ++i) launch(f, 1, 5);
    cuCtxDestroy_v2(second);
    cuCtxSetCurrent(context);
    launch(function, 1, 5);
  } else if (!strcmp(mode, "reload")) {
    for (int i = 0; i < n; ++i) {
      CUmodule module;
      CUfunction f;
      cuModuleLoadData(&module, image);
      cuModuleGetFunction(&f, module, "vectorAdd");
      launch(f, 1, 5);
      cuModuleUnload(module);
    }
  } else if (!strcmp(mode, "library")) {
    CUlibrary library;
    CUkernel kernel;
    cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0);
    cuLibraryGetKernel(&kernel, library, "vectorAdd");
    for (int i = 0; i < n; ++i) launch((CUfunction)kernel, 1, 5);
    cuLibraryUnload(library);
  } else {
    for (int i = 0; i < n; ++i) launch(function, 1, 5);
  }
  if (!strcmp(mode, "_exit")) _exit(4);
  if (!strcmp(mode, "quick_exit")) quick_exit(5);
  if (!strcmp(mode, "kill")) raise(SIGKILL);
  if (!strcmp(mode, "term")) raise(SIGTERM);
  printf("launched %lu\n", fake_launches());
  if (getenv("SHOW_INSTRUMENTED")) printf("instrumented %lu\n", fake_instrumented());
  return 0;
}
