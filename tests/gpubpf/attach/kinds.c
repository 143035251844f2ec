// Programs of one kind each, named by the first argument: where a thread can be found.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

static volatile long n;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void stay(int signal) {
  for (;;) pause();
}

static void *hold(void *a) {
  pthread_mutex_lock(&mutex);
  for (;;) pause();
  return a;
}

static void *wait_for_ever(void *a) {
  for (;;) pause();
  return a;
}

// setgid waits for this thread for ever, and holds a lock that pthread_create takes.
static void *block_all(void *a) {
  unsigned long all = -1;
  syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, 0, sizeof all);
  for (;;) pause();
  return a;
}

static void pause_for_ever(void) {
  for (;;) pause();
}

int main(int argc, char **argv) {
  const char *kind = argc > 1 ? argv[1] : "";
  pthread_t thread;
  if (!strcmp(kind, "dumpable")) prctl(PR_SET_DUMPABLE, 0);
  if (!strcmp(kind, "leaderless")) pthread_create(&thread, 0, wait_for_ever, 0);
  puts("ready");
  fflush(stdout);
  if (!strcmp(kind, "spin"))
    for (;;) n++;
  if (!strcmp(kind, "malloc"))
    for (;;) {
      char *p = malloc(1 + (size_t)rand() % 3000);
      p[0] = 1;
      n += p[0];
      free(p);
    }
  if (!strcmp(kind, "writes"))
    for (;;) n += write(1, "", 0);
  if (!strcmp(kind, "vfork"))
    for (;;) {
      if (vfork() == 0) {
        usleep(2000);
        _exit(0);
      }
      wait(0);
    }
  if (!strcmp(kind, "handler")) {
    signal(SIGUSR1, stay);
    raise(SIGUSR1);
  }
  if (!strcmp(kind, "coroutine")) {
    static char stack[1 << 16];
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = sizeof stack;
    makecontext(&context, pause_for_ever, 0);
    setcontext(&context);
  }
  if (!strcmp(kind, "mutex")) {
    pthread_create(&thread, 0, hold, 0);
    usleep(100000);
    pthread_mutex_lock(&mutex);
  }
  if (!strcmp(kind, "locked")) {
    pthread_create(&thread, 0, block_all, 0);
    usleep(50000);
    setgid(getgid());
  }
  if (!strcmp(kind, "leaderless")) pthread_exit(0);
  for (;;) pause();
}
