// N threads call `answer` without end, which gives 1 or 2; with "inside" one is in `inside`, with "handler" in a signal handler that came
// to it there, until a line comes on stdin. Then it prints how often each answer came.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int answer(void);
int inside(volatile int *n);

static volatile int go_on = 1;
static volatile int leave;
static long got[3];

static void *ask(void *a) {
  for (;;) {
    int r = answer();
    if (r != 1 && r != 2) {
      dprintf(2, "answer gave %d\n", r);
      _exit(1);
    }
    __atomic_fetch_add(&got[r], 1, __ATOMIC_RELAXED);
    usleep(1000);
  }
  return a;
}

static volatile int there;

static void *be_inside(void *a) {
  there = 1;
  if (inside(&go_on) != 7) _exit(2);
  return a;
}

static void stay(int signal) {
  while (!leave) usleep(1000);
  (void)signal;
}

int main(int argc, char **argv) {
  pthread_t thread;
  const char *kind = argc > 2 ? argv[2] : "";
  for (int i = 0; i < atoi(argv[1]); ++i) pthread_create(&thread, 0, ask, 0);
  if (*kind) {
    pthread_create(&thread, 0, be_inside, 0);
    while (!there) usleep(1000);
    usleep(20000);
  }
  if (!strcmp(kind, "handler")) {
    signal(SIGUSR1, stay);
    usleep(50000);
    pthread_kill(thread, SIGUSR1);
    usleep(50000);
  }
  puts("ready");
  fflush(stdout);
  char line[16];
  if (!fgets(line, sizeof line, stdin)) return 3;
  go_on = 0;
  leave = 1;
  if (*kind) pthread_join(thread, 0);
  puts("out");
  fflush(stdout);
  if (!fgets(line, sizeof line, stdin)) return 3;
  printf("%ld %ld\n", got[1], got[2]);
  return 0;
}
