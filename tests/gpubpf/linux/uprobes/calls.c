/* calls THREADS CALLS [LIBRARY]: waits for a line, has each thread call, says how many ns a call took on average; until a line is
 * empty. With LIBRARY that is loaded at the first line only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int (*first)(int);
static long (*second)(long, long, long, long, long, long, long);
static int (*again)(int), (*pushes)(int), (*called)(int);
static void (*sleeps)(int);
static int (*fails)(void);
static int calls;

static void *run(void *unused) {
    for (int i = 0; i < calls; i++)
        if (called(i) != i + 1) abort();
    return unused;
}

static void *find(void *library, const char *name) {
    void *found = library ? dlsym(library, name) : 0;
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    return found;
}

int main(int argc, char **argv) {
    int threads = atoi(argv[1]);
    char line[64];
    void *library = argc > 4 ? dlopen(argv[3], RTLD_NOW) : 0;

    calls = atoi(argv[2]);
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) && line[0] != '\n') {
        pthread_t made[64];
        struct timespec start, end;

        if (!library) library = dlopen(argv[3], RTLD_NOW);
        first = find(library, "snoop_first");
        second = find(library, "snoop_second");
        again = find(library, "snoop_again");
        pushes = find(library, "snoop_pushes");
        called = line[0] == 'p' ? pushes : first;
        sleeps = find(library, "snoop_sleep");
        fails = find(library, "snoop_fails");
        if (line[0] == 'w') sleeps(30000);  /* which lets a tool see that the library came */
        clock_gettime(CLOCK_MONOTONIC, &start);
        if (line[0] == 'e') {
            second(1, 2, 3, 4, 5, 6, 7);
            again(3);
            sleeps(20000);
            fails();
        } else {
            for (int i = 0; i < threads; i++) pthread_create(&made[i], 0, run, 0);
            for (int i = 0; i < threads; i++) pthread_join(made[i], 0);
        }
        clock_gettime(CLOCK_MONOTONIC, &end);
        printf("%.1f\n", ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / calls);
        fflush(stdout);
    }
    return 0;
}
