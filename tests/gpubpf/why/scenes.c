/*
 * scenes call|gap WHAT ARGUMENT: launches, says "ready", and when something is written to it does WHAT, in a call or outside of one,
 * and launches again. Prints what it took, in ns: beside it, and of the CPU's.
 */
#include "scenes.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static long long now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    scene_launch();
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF)
        return 0;
    scene_launch();
    long long start = now(CLOCK_BOOTTIME), used = now(CLOCK_THREAD_CPUTIME_ID);
    int failed = strcmp(argv[1], "gap") ? scene_work(argv[2], argv[3]) : scene_plainly(argv[2], argv[3]);
    long long end = now(CLOCK_BOOTTIME), spent = now(CLOCK_THREAD_CPUTIME_ID) - used;
    scene_launch();
    if (failed)
        perror(argv[2]);
    printf("%lld %lld\n", end - start, spent);
    fflush(stdout);
    getchar();
    return failed ? 1 : 0;
}
