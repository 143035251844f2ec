// Programs of one kind each, named by the first argument: where a thread can be found.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
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

// What this process calls in place of socketpair: it keeps duplicates of both ends.
static int kept_pair(int domain, int type, int protocol, int pair[2]) {
  long result = syscall(SYS_socketpair, domain, type, protocol, pair);
  dup(pair[0]);
  dup(pair[1]);
  return (int)result;
}

static void keep_sockets(void) {
  unsigned char jump[] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};  // mov rax, kept_pair; jmp rax
  void *to = (void *)kept_pair;
  char *at = (char *)socketpair;
  memcpy(jump + 2, &to, 8);
  mprotect(at - (size_t)at % 4096, 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
  memcpy(at, jump, sizeof jump);
}

// Stay in a system call, with a stack pointer that leads into a file that a program serves.
static void stand_on(const char *file) {
  int opened = open(file, O_RDWR);
  char *at = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE, opened, 0);
  if (at == MAP_FAILED) exit(1);
  at += (1 << 20) - (64 << 10);
  __asm__ volatile("mov %0, %%rsp\n1: mov $34, %%eax\nsyscall\njmp 1b" : : "r"(at));  // pause
}

static void pause_for_ever(void) {
  for (;;) pause();
}

int main(int argc, char **argv) {
  const char *kind = argc > 1 ? argv[1] : "";
  pthread_t thread;
  if (!strcmp(kind, "dumpable")) prctl(PR_SET_DUMPABLE, 0);
  if (!strcmp(kind, "keeps")) keep_sockets();
  if (!strcmp(kind, "leaderless")) pthread_create(&thread, 0, wait_for_ever, 0);
  puts("ready");
  fflush(stdout);
  if (!strcmp(kind, "fuse")) stand_on(argv[2]);
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
  if (!strcmp(kind, "keeps")) keep_sockets();
  if (!strcmp(kind, "leaderless")) pthread_exit(0);
  for (;;) pause();
}
