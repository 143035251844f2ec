// `steps KIND`: the main thread waits for lines on stdin, in a way that KIND names, and echoes each with the number of SIGUSR1 so far.
// It ends with a message if anything of its state has changed that only the program itself changes.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t handled;
static sigset_t expected_mask;
static stack_t expected_stack;
static char line[128];
static int have_line;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;

static void fail(const char *what, long value) {
  fprintf(stderr, "%s: %ld\n", what, value);
  _exit(1);
}

static void handler(int number) { handled++; }

static int is_readable(int timeout) {
  struct pollfd file = {0, POLLIN, 0};
  int n, before;
  do {
    before = handled;
    n = poll(&file, 1, timeout);
  } while (n < 0 && errno == EINTR && handled != before);
  if (n < 0) fail("poll", errno);
  return n;
}

// Registers that a system call leaves alone, and the red zone. `number`: of a call, or -1: compute instead.
static void keep_registers(long number, long a, long b, long c) {
  static uint64_t in[4] __attribute__((aligned(32))) = {0x1111111111111111, 0x2222222222222222, 0x3333333333333333, 0x4444444444444444};
  static uint64_t out[4];
  uint64_t bad = 0;
  long result = number;
  register long r10 asm("r10") = 0x1010;
  register long r8 asm("r8") = 0x8080;
  register long r9 asm("r9") = 0x9090;
  asm volatile(
      "vmovdqu %[in], %%ymm0\n vmovdqu %[in], %%ymm15\n"
      "mov $0x1212, %%r12\n mov $0x1313, %%r13\n mov $0x1414, %%r14\n mov $0x1515, %%r15\n"
      "mov %%r12, -8(%%rsp)\n mov %%r13, -128(%%rsp)\n"
      "cmp $-1, %%rax\n jne 3f\n"
      "mov $20000000, %%rcx\n 1: dec %%rcx\n jnz 1b\n cmp $0, %%rcx\n jne 9f\n xor %%eax, %%eax\n jmp 4f\n"
      "3: syscall\n"
      "4: cmp $0x1212, %%r12\n jne 9f\n cmp $0x1313, %%r13\n jne 9f\n cmp $0x1414, %%r14\n jne 9f\n cmp $0x1515, %%r15\n jne 9f\n"
      "cmp $0x1010, %%r10\n jne 9f\n cmp $0x8080, %%r8\n jne 9f\n cmp $0x9090, %%r9\n jne 9f\n"
      "cmp %%r12, -8(%%rsp)\n jne 9f\n cmp %%r13, -128(%%rsp)\n jne 9f\n"
      "vptest %%ymm0, %%ymm0\n jz 9f\n vpxor %%ymm0, %%ymm15, %%ymm15\n vptest %%ymm15, %%ymm15\n jnz 9f\n"
      "jmp 8f\n 9: inc %[bad]\n 8: vmovdqu %%ymm0, %[out]\n vzeroupper\n"
      : "+a"(result), [bad] "+b"(bad), "+r"(r10), "+r"(r8), "+r"(r9), [out] "=m"(out)
      : [in] "m"(in), "D"(a), "S"(b), "d"(c)
      : "rcx", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0", "xmm15");
  if (bad || memcmp(in, out, sizeof in)) fail("a register changed", (long)bad);
  if (result < 0 && result != -EINTR) fail("a system call failed", result);
}

static void *reader(void *unused) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, 0);
  for (;;) {
    char text[128];
    char *got = fgets(text, sizeof text, stdin);
    pthread_mutex_lock(&mutex);
    if (got) strcpy(line, text);
    have_line = got ? 1 : -1;
    pthread_cond_signal(&condition);
    while (have_line) pthread_cond_wait(&condition, &mutex);
    pthread_mutex_unlock(&mutex);
  }
  return unused;
}

static int next_line(const char *kind) {
  static int events = -1;
  if (!strcmp(kind, "futex")) {
    pthread_mutex_lock(&mutex);
    while (!have_line) pthread_cond_wait(&condition, &mutex);
    return have_line > 0;
  }
  if (!strcmp(kind, "poll")) is_readable(-1);
  if (!strcmp(kind, "rawpoll")) {
    struct pollfd file = {0, POLLIN, 0};
    do keep_registers(7, (long)&file, 1, -1);
    while (!is_readable(0));
  }
  if (!strcmp(kind, "ppoll")) {
    struct pollfd file = {0, POLLIN, 0};
    sigset_t open;
    sigemptyset(&open);
    int n;
    do n = ppoll(&file, 1, 0, &open);
    while (n < 0 && errno == EINTR);
    if (n != 1) fail("ppoll", errno);
  }
  if (!strcmp(kind, "epoll")) {
    struct epoll_event event = {EPOLLIN};
    if (events < 0) {
      events = epoll_create1(0);
      epoll_ctl(events, EPOLL_CTL_ADD, 0, &event);
    }
    int n;
    do n = epoll_wait(events, &event, 1, -1);
    while (n < 0 && errno == EINTR);  // a stop alone can cause that, see signal(7)
    if (n != 1) fail("epoll_wait", errno);
  }
  if (!strcmp(kind, "nanosleep"))
    while (!is_readable(0)) {
      struct timespec pause = {0, 30000000};
      int before = handled, failed = nanosleep(&pause, 0);
      if (failed && (errno != EINTR || handled == before)) fail("nanosleep", errno);
    }
  if (!strcmp(kind, "compute"))
    while (!is_readable(0)) keep_registers(-1, 0, 0, 0);
  return fgets(line, sizeof line, stdin) != 0;
}

int main(int argc, char **argv) {
  const char *kind = argv[1];
  static char memory[1 << 16];
  stack_t own = {memory, 0, sizeof memory};
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigaction(SIGUSR1, &action, 0);
  sigaltstack(&own, 0);
  sigemptyset(&expected_mask);
  sigaddset(&expected_mask, SIGUSR2);
  sigprocmask(SIG_SETMASK, &expected_mask, 0);
  sigprocmask(SIG_SETMASK, 0, &expected_mask);
  sigaltstack(0, &expected_stack);
  pthread_t thread;
  if (!strcmp(kind, "futex")) pthread_create(&thread, 0, reader, 0);
  puts("ready");
  fflush(stdout);
  while (next_line(kind)) {
    sigset_t mask;
    stack_t stack;
    sigprocmask(SIG_SETMASK, 0, &mask);
    sigaltstack(0, &stack);
    if (memcmp(&mask, &expected_mask, 8)) fail("the signal mask changed", *(long *)&mask);
    if (memcmp(&stack.ss_sp, &expected_stack.ss_sp, 8) || stack.ss_size != expected_stack.ss_size) fail("the signal stack changed", 0);
    printf("%d %s", (int)handled, line);
    fflush(stdout);
    if (!strcmp(kind, "futex")) {
      have_line = 0;
      pthread_cond_signal(&condition);
      pthread_mutex_unlock(&mutex);
    }
  }
  return 0;
}
