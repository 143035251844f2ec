/*
 * scenes call|gap WHAT ARGUMENT: says "ready", and when something is written to it launches, does WHAT, in a call or outside of one,
 * and launches again. Prints what it took, in ns: beside it, of the CPU's, and while it could have run and did not; and how
 * often it waited.
 */
#include "scenes.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static long long now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* As the kernel counts it. */
static void ask(long long *delay, long *waits)
{
    struct rusage usage;
    FILE *file = fopen("/proc/thread-self/schedstat", "re");
    if (!file || fscanf(file, "%*s %lld", delay) != 1)
        *delay = 0;
    if (file)
        fclose(file);
    getrusage(RUSAGE_THREAD, &usage);
    *waits = usage.ru_nvcsw;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF)
        return 0;
    scene_launch();
    scene_launch(); /* so that what lies between the first two is nothing */
    long long delay, later;
    long waits, more;
    ask(&delay, &waits);
    long long start = now(CLOCK_BOOTTIME), used = now(CLOCK_THREAD_CPUTIME_ID);
    int failed = strcmp(argv[1], "gap") ? scene_work(argv[2], argv[3]) : scene_plainly(argv[2], argv[3]);
    long long end = now(CLOCK_BOOTTIME), spent = now(CLOCK_THREAD_CPUTIME_ID) - used;
    ask(&later, &more);
    scene_launch();
    if (failed)
        perror(argv[2]);
    printf("%lld %lld %lld %ld\n", end - start, spent, later - delay, more - waits);
    fflush(stdout);
    getchar();
    return failed ? 1 : 0;
}
