// Calls NVIDIA's driver, without a GPU, and compares each result with the first: driver_calls ROUNDS THREADS [LIBCUDART]
//
// ROUNDS 0: until stdin ends; each line there is answered with the rounds so far. With a CUDA runtime, it is the runtime that
// first loads and initializes the driver. One thread makes all calls. The others leave out those that initialize, which are slow.
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kCalls = 32, kNone = -1, kThreads = 16 };
static void *driver, *runtime;
static const char *names[kCalls];
static int first[kCalls];
static atomic_int ends, different, rounds, limit;

typedef int Call(const void *, const void *, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t);
typedef int GetProcAddress(const char *, void **, int, size_t, void *);

static int call(Call *f, const void *a, const void *b, size_t c) { return f ? f(a, b, c, 1, 1, 1, 1, 0, 0, 0, 0) : kNone; }

static void call_all(bool initialize, int *codes) {
    int n = 0, value = 0;
    void *made = NULL;
    char copied[8] = "";
    const char *text = "";
#define RESULT(name, value) (names[n] = (name), codes[n++] = (value))
#define CALL(library, name, a, b, c) RESULT(#name, call((Call *)dlsym(library, #name), a, b, c))
    for (int i = 0; i < kCalls; ++i) codes[i] = kNone;
    if (initialize && runtime) {
        CALL(runtime, cudaRuntimeGetVersion, &value, 0, 0);
        RESULT("the runtime's version", value);
        CALL(runtime, cudaGetDeviceCount, &value, 0, 0);
        CALL(runtime, cudaMalloc, &made, (void *)16, 0);
    }
    n = 4;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);  // some runtimes unload it when there is no GPU
    if (!driver) fprintf(stderr, "%s\n", dlerror()), exit(1);
    if (initialize) CALL(driver, cuInit, 0, 0, 0);
    n = 5;
    CALL(driver, cuDriverGetVersion, &value, 0, 0);
    RESULT("the driver's version", value);
    CALL(driver, cuGetErrorString, (void *)100, &text, 0);
    RESULT("an error's text", (int)strlen(text));
    CALL(driver, cuDeviceGetCount, &value, 0, 0);
    CALL(driver, cuCtxSynchronize, 0, 0, 0);
    CALL(driver, cuStreamCreate, &made, 0, 0);
    CALL(driver, cuStreamSynchronize, 0, 0, 0);
    CALL(driver, cuMemAlloc_v2, &made, (void *)16, 0);
    CALL(driver, cuMemcpyDtoH_v2, copied, (void *)16, 4);
    CALL(driver, cuModuleLoadData, &made, copied, 0);
    CALL(driver, cuLaunchKernel, 0, (void *)1, 1);
    CALL(driver, cuLaunchKernel_ptsz, 0, (void *)1, 1);
    GetProcAddress *get = (GetProcAddress *)dlsym(driver, "cuGetProcAddress");
    void *launch = NULL;
    RESULT("cuGetProcAddress", get ? get("cuLaunchKernel", &launch, 11030, 0, NULL) : kNone);
    RESULT("the cuLaunchKernel that it returns", call((Call *)launch, 0, (void *)1, 1));
    if (n > kCalls) abort();
}

static void *loop(void *initialize) {
    int codes[kCalls];
    while (!ends) {
        call_all(initialize != NULL, codes);
        for (int i = 0; i < kCalls; ++i)
            if (codes[i] != kNone && codes[i] != first[i] && !different++)
                fprintf(stderr, "%s: %d, then %d\n", names[i], first[i], codes[i]);
        if (initialize && ++rounds == limit) ends = 1;
        usleep(100);  // so that a tool on a small machine keeps up
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4 || atoi(argv[2]) > kThreads) return 2;
    limit = atoi(argv[1]);
    if (argc == 4 && !(runtime = dlopen(argv[3], RTLD_NOW))) return fprintf(stderr, "%s\n", dlerror()), 1;
    call_all(true, first);
    for (int i = 0; i < kCalls; ++i)
        if (names[i]) printf("%s: %d\n", names[i], first[i]);
    puts("ready");
    fflush(stdout);
    pthread_t threads[kThreads];
    const int n = atoi(argv[2]);
    for (int i = 0; i < n; ++i) pthread_create(&threads[i], NULL, loop, i ? NULL : first);
    for (char byte; !limit && read(0, &byte, 1) > 0;) printf("%d\n", rounds), fflush(stdout);
    if (!limit) ends = 1;
    for (int i = 0; i < n; ++i) pthread_join(threads[i], NULL);
    fprintf(stderr, "%d rounds, %d differences\n", rounds, different);
    return different != 0;
}
