/* program WHAT …: makes calls to library.c's functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct shape {
    unsigned x, y, z;
};
struct config {
    struct shape grid, block;
    unsigned shared;
    void *stream;
};
int calls_quick(int);
int calls_launch(void *, struct shape, struct shape, void **, long, void *);
int calls_unwatched(void *, struct shape, struct shape, void **, long, void *);
int calls_launch_by(struct config *, void *);
int calls_launch_from(void **);
int calls_outer(int);
int calls_ends_in_quick(int);
int calls_back(void (*)(void *), void *);
int calls_gives(uintptr_t *, long);
int calls_query(int);
const char *calls_text(int);
int calls_sleep(int);

static int times;
static jmp_buf before;
static pthread_barrier_t all;

static void *quick(void *failing) {
    for (int i = 0; i < times; i++) calls_quick(failing && i % 4 == 0 ? 101 : 0);
    return 0;
}
static void *waits_inside(void *unused);
static void wait_for_all(void *unused) {
    pthread_barrier_wait(&all);
    pthread_barrier_wait(&all);
}
static void *waits_inside(void *unused) {
    calls_back(wait_for_all, 0);
    return 0;
}
static char **self;
static void *executes(void *unused) { /* which ends the thread that made the process */
    calls_quick(0);
    execl(self[0], self[0], "quick", "2", "3", (char *)0);
    abort();
}
static void jump(void *unused) { longjmp(before, 1); }
static void end_thread(void *unused) { pthread_exit(0); }
static void *ends_inside(void *unused) {
    calls_back(end_thread, 0);
    return 0;
}
static void end(void *unused) { _exit(0); }
static void nothing(void *unused) {}
static int __attribute__((noinline)) deeper(int depth) {
    volatile char room[256];
    memset((char *)room, depth, sizeof room);
    if (depth) return deeper(depth - 1) + room[3] * 0;
    return calls_quick(0);
}

static void run(int threads, void *(*of)(void *), void *with) {
    pthread_t *made = calloc(threads, sizeof *made);
    pthread_attr_t small;

    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 65536);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&made[i], &small, of, with)) abort();
    for (int i = 0; i < threads; i++) pthread_join(made[i], 0);
}

int main(int argc, char **argv) {
    const char *what = argv[1];
    int number = argc > 2 ? atoi(argv[2]) : 1;

    times = argc > 3 ? atoi(argv[3]) : 1;
    if (!strcmp(what, "each")) {
        struct config config = {{7, 8, 9}, {10, 11, 12}, 13, (void *)14};
        uintptr_t out = 0;
        void *kernel = (void *)0x6000;

        calls_quick(0);
        calls_quick(2);
        calls_launch((void *)0x4000, (struct shape){1, 2, 3}, (struct shape){4, 5, 6}, 0, 77, (void *)0x5000);
        calls_launch_by(&config, (void *)0x7000);
        calls_launch_from(&kernel);
        calls_gives(&out, 4096);
        calls_query(600);
        calls_query(1);
        calls_text(3);
    } else if (!strcmp(what, "quick")) { /* THREADS TIMES */
        run(number, quick, 0);
    } else if (!strcmp(what, "failing")) { /* THREADS TIMES: every fourth */
        run(number, quick, argv);
    } else if (!strcmp(what, "nested")) {
        calls_outer(5);
        calls_ends_in_quick(3);
        calls_back(nothing, 0);
    } else if (!strcmp(what, "jump")) { /* TIMES out of a call, and once more from further down */
        for (volatile int i = 0; i < number; i++)
            if (!setjmp(before)) calls_back(jump, 0);
        deeper(20);
        calls_quick(0);
    } else if (!strcmp(what, "thread-ends")) {
        run(number, ends_inside, 0);
    } else if (!strcmp(what, "ends")) {
        calls_back(end, 0);
    } else if (!strcmp(what, "inside")) { /* THREADS are inside of calls at once */
        pthread_barrier_init(&all, 0, number);
        run(number, waits_inside, 0);
    } else if (!strcmp(what, "forks")) { /* TIMES, one after the other, each of which makes a call, forks and executes this */
        for (int i = 0; i < number; i++) {
            if (!fork()) {
                calls_quick(0);
                if (!fork()) {
                    execl(argv[0], argv[0], "quick", "1", "2", (char *)0);
                    abort();
                }
                wait(0);
                _exit(0);
            }
            wait(0);
        }
    } else if (!strcmp(what, "executes")) { /* in another thread than the first */
        calls_quick(0);
        self = argv;
        run(1, executes, 0);
    } else if (!strcmp(what, "gaps")) { /* TIMES launches, US in between */
        for (int i = 0; i < number; i++) {
            if (i) usleep(times);
            calls_launch((void *)0x4000, (struct shape){1, 1, 1}, (struct shape){1, 1, 1}, 0, 0, 0);
        }
    } else if (!strcmp(what, "sleep")) { /* US */
        calls_sleep(number);
    } else if (!strcmp(what, "named")) {
        calls_quick(0);
        prctl(PR_SET_NAME, "othername");
        calls_quick(0);
        calls_quick(0);
    } else if (!strcmp(what, "kernels")) { /* that many */
        for (int i = 1; i <= number; i++) calls_launch((void *)(uintptr_t)i, (struct shape){1, 1, 1}, (struct shape){1, 1, 1}, 0, 0, 0);
    } else if (!strcmp(what, "serve")) { /* each line of input: a call */
        char line[64];

        puts("ready");
        fflush(stdout);
        while (fgets(line, sizeof line, stdin)) {
            calls_quick(0);
            puts("called");
            fflush(stdout);
        }
    } else if (!strcmp(what, "work")) {
        /* Each line of input: that many launches, TIMES turns of a loop before each, and as many that are not watched, in turns of some
           launches; says how many ns of a CPU both took. */
        int together = times > 1000 ? 10 : 1000;
        char line[64];

        puts("ready");
        fflush(stdout);
        while (fgets(line, sizeof line, stdin)) {
            long took[2] = {0, 0};

            for (int i = 0; i < 2 * number; i += together) {
                int watched = i / together % 2;
                struct timespec start, end;

                clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
                for (int k = 0; k < together; k++) {
                    for (volatile int turn = 0; turn < times; turn++) {}
                    (watched ? calls_launch : calls_unwatched)((void *)0x4000, (struct shape){1, 1, 1}, (struct shape){1, 1, 1}, 0, 0, 0);
                }
                clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
                took[watched] += (end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec;
            }
            printf("%ld %ld\n", took[1], took[0]);
            fflush(stdout);
        }
    } else {
        return 2;
    }
    return 0;
}
