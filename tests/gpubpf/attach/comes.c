// Comes to cuInit in some way, and says how many milliseconds that took and when it was over, once for each thread.
#include <cuda.h>
#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

static void *come(void *unused) {
  double before = now();
  fesetround(FE_UPWARD);
  CUresult result = cuInit(0);
  if (result != CUDA_SUCCESS || fegetround() != FE_UPWARD) _exit(3);
  dprintf(1, "%.1f %.1f\n", now() - before, now());
  return NULL;
}

int main(int argc, char **argv) {
  const char *how = argv[1];
  if (strcmp(how, "threads") == 0) {
    pthread_t threads[4];
    for (int i = 0; i < 4; ++i) pthread_create(&threads[i], NULL, come, NULL);
    for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
  } else if (strcmp(how, "fork") == 0) {
    pid_t child = fork();
    if (child == 0) {
      come(NULL);
      return 0;
    }
    int status;
    waitpid(child, &status, 0);
    return status != 0;
  } else if (strcmp(how, "execute") == 0) {
    come(NULL);
    execl("/proc/self/exe", argv[0], "once", NULL);
  } else if (strcmp(how, "again") == 0) {
    come(NULL);
    for (int i = 0; i < 1000; ++i) cuInit(0);
  } else if (strcmp(how, "library") == 0) {
    if (!dlopen(argv[2], RTLD_NOW)) return 4;  // its constructor comes, under the lock of the dynamic linker
  } else if (strcmp(how, "waits") == 0) {
    come(NULL);
    char line;
    if (read(0, &line, 1) < 0) return 5;
  } else if (strcmp(how, "later") == 0) {
    char line;
    if (puts("ready") < 0 || fflush(stdout) || read(0, &line, 1) < 0) return 5;
    come(NULL);
  } else {
    come(NULL);
  }
  return 0;
}
