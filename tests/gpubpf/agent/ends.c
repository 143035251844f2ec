/* A program on the fake driver: ends WAY [NUMBER]. It launches six times, and then ends in this way. */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;
static const char image[] = "FAKE\nvectorAdd\n";
static CUfunction function;
static CUcontext context;
static const char *way;
static int number;
static volatile int launching; /* by a thread */

static int is(const char *other) { return !strcmp(way, other); }

static void launch(int n) {
  int a = 1, b = 2;
  void *parameters[] = {&a, &b};
  for (int i = 0; i < n; ++i)
    if (cuLaunchKernel(function, 1, 1, 1, 5, 1, 1, 0, NULL, parameters, NULL)) puts("failed");
}

static void begin(void) {
  CUmodule module;
  cuInit(0);
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
  cuModuleLoadData(&module, image);
  cuModuleGetFunction(&function, module, "vectorAdd");
}

/* These are registered before the first call of CUDA, so they run after what the driver and the agent register. */
static void oldest(void) {
  if (is("atexit") || is("twice") || is("exits")) launch(3);
  if (is("leaves")) launch(3), _exit(9);
  if (is("thread")) usleep(20000);
  if (is("first")) begin(), launch(3);
}
static void older(void) {
  if (is("twice")) launch(2);
}
static void quick(void) { launch(3); }
static void at_exit(int status, void *unused) {
  (void)unused;
  if (is("on_exit")) launch(status);
}
__attribute__((destructor)) static void last(void) {
  if (is("destructor")) launch(3);
}

static void *endless(void *unused) {
  (void)unused;
  cuCtxSetCurrent(context);
  for (launching = 1;; usleep(100)) launch(1);
  return NULL;
}

static void *exits(void *unused) {
  (void)unused;
  cuCtxSetCurrent(context);
  exit(4);
}

static void restore(int signal_number) {
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

static int overflow(volatile char *before, int depth) {
  volatile char here[4096];
  here[0] = *before;
  return depth < 0 ? 0 : overflow(here, depth + 1) + here[0];
}

int main(int argc, char **argv) {
  pthread_t thread;
  way = argc > 1 ? argv[1] : "";
  number = argc > 2 ? atoi(argv[2]) : 0;
  if (is("nothing")) return 4;
  atexit(oldest);
  atexit(older);
  on_exit(at_exit, NULL);
  at_quick_exit(quick);
  if (is("first")) return 4;
  begin();
  launch(6);
  if (is("thread")) {
    pthread_create(&thread, NULL, endless, NULL);
    while (!launching) usleep(1000);
  }
  if (is("exits")) {
    pthread_create(&thread, NULL, exits, NULL);
    pause();
  }
  if (is("quick")) quick_exit(4);
  if (is("_exit")) _exit(4);
  if (is("exec")) execve("/proc/self/exe", (char *[]){argv[0], "nothing", NULL}, environ);
  if (is("fexecve")) fexecve(open("/bin/true", O_RDONLY), (char *[]){"true", NULL}, environ);
  if (is("noexec")) execlp("/no/such/program", "program", NULL), launch(3);
  if (is("vfork")) {
    if (!vfork()) execl("/bin/true", "true", NULL), _exit(1);
    launch(3);
  }
  if (is("spawns")) launch(system("exit 3") / 256);
  if (is("raise")) raise(number);
  if (is("alarm")) alarm(1), pause();
  if (is("restores")) signal(number, restore), raise(number);
  if (is("fault")) *(volatile int *)8 = 1;
  if (is("overflow")) return overflow("", 0);
  if (is("abort")) abort();
  if (is("later")) { /* once the file is there: the tool has read the maps */
    while (access(argv[2], F_OK)) usleep(1000);
    launch(2);
    raise(SIGKILL);
  }
  return 4;
}
