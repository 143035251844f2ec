/* Launches kernels: program MODE [N]. What it does besides is in its modes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { uint32_t x, y, z; } dim3;

void __hipRegisterFunction(void **, const void *, char *, const char *, int, void *, void *, void *, void *, int *);
int hipLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
int hipGraphLaunch(void *, void *);
int hipDeviceSynchronize(void);
int hipMalloc(void **, size_t);

const void *const _Z9vectorAddPKfS0_Pfi = "add";
const void *const _Z5scalePff = "scale";
static int count;

static void launch(int number) {
    const void *which = number % 2 ? &_Z5scalePff : &_Z9vectorAddPKfS0_Pfi;
    dim3 block = {64u << number % 2, 1, 1};
    if (hipLaunchKernel(which, (dim3){4, 2, 1}, block, NULL, 16, (void *)(uintptr_t)(0x100 * (1 + number % 2))))
        abort();
}

static void *launches(void *unused) {
    for (int i = 0; i < count; i++)
        launch(i);
    return unused;
}

static int launched(void) {
    launches(NULL);
    return hipDeviceSynchronize();
}

static void named(const void *handle, const char *name) {
    if (strlen(name) > 2) /* now the page with the name is there */
        __hipRegisterFunction(NULL, handle, "", name, -1, NULL, NULL, NULL, NULL, NULL);
}

int main(int argc, char **argv) {
    const char *mode = argv[1];
    count = argc > 2 ? atoi(argv[2]) : 5;
    named(&_Z9vectorAddPKfS0_Pfi, "_Z9vectorAddPKfS0_Pfi");
    named(&_Z5scalePff, "_Z5scalePff");
    if (!strcmp(mode, "threads")) {
        pthread_t threads[8];
        for (int i = 0; i < 8; i++)
            pthread_create(&threads[i], NULL, launches, NULL);
        for (int i = 0; i < 8; i++)
            pthread_join(threads[i], NULL);
        hipDeviceSynchronize();
    } else if (!strcmp(mode, "graph")) {
        for (int i = 0; i < count; i++)
            hipGraphLaunch((void *)0x77, (void *)0x100);
        hipDeviceSynchronize();
    } else if (!strcmp(mode, "forks")) { /* before it uses the runtime, and after */
        if (!fork())
            exit(launched());
        wait(NULL);
        launched();
        if (!fork()) {
            launch(0); /* no thread of the runtime's is here */
            _exit(0);
        }
        wait(NULL);
    } else if (!strcmp(mode, "exec")) {
        launched();
        usleep(100000);
        execl("/proc/self/exe", argv[0], "plain", argc > 2 ? argv[2] : "5", NULL);
    } else if (!strcmp(mode, "killed")) {
        launched();
        launch(0);
        kill(getpid(), SIGKILL);
    } else if (!strcmp(mode, "left")) { /* at once, with kernels under way */
        launches(NULL);
        _exit(3);
    } else if (!strcmp(mode, "exits")) {
        launches(NULL);
        return 4;
    } else if (!strcmp(mode, "asks")) { /* whether to go on */
        launched();
        getchar();
        launched();
    } else if (!strcmp(mode, "limits")) {
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){4096, 4096});
        launched();
    } else if (!strcmp(mode, "closes")) {
        launch(0);
        int file = open("/dev/null", O_RDONLY);
        printf("%d\n", file);
        for (int i = 3; i < 64; i++)
            close(i);
        launched();
    } else {
        launched();
    }
    return 0;
}
