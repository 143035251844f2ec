/*
 * A library with symbols and versions of libamdhip64.so, whose calls succeed and take times that are told. There is no GPU behind it:
 * memory is the host's, a kernel is a time.
 *
 * STANDIN says what calls do, as NAME=WHAT:NUMBER, parted by spaces, NAME a function or *:
 *
 *     sleep:US    off the CPU          busy:US   on it, so long by the clock      cpu:US   on it, so long by the thread's CPU time
 *     device:US   a kernel that takes so long: what waits for the device waits for it
 *     result:N    fails with this error
 *
 * A program may change that by standin_set(), and with standin_inside() have a function of its own run inside each call, so that
 * anything can happen there. With STANDIN_COUNTS=FILE the number of calls of each function is appended to FILE as the process ends,
 * as lines PID NAME COUNT. hipMallocPitch and hipMallocManaged call hipMalloc, as a library calls itself.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "hip.h"

struct call {
    const char *name;
    struct call *next;
    unsigned long count;
    long sleep_us, busy_us, cpu_us, device_us, result;
    int known;
};
struct kernel {
    const void *handle;
    const char *name;
    struct kernel *next;
};
struct ihipModule_t { int functions; };
struct ihipModuleSymbol_t { char name[256]; };
struct ihipStream_t { unsigned flags; };
struct ihipEvent_t { long end_ns; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct call *calls;
static struct kernel *kernels;
static char plan[4096];
static long device_end_ns;
static void (*inside)(const char *name);
static __thread int depth;
static __thread struct { dim3 grid, block; size_t shared; hipStream_t stream; } configuration;

static long now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void sleep_until(long ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static void burn(clockid_t clock, long us) {
    long end = now_ns(clock) + us * 1000;
    while (now_ns(clock) < end)
        ;
}

/* The plan, for one function. Later words hold. */
static void learn(struct call *call) {
    char copy[sizeof(plan)], *rest = NULL;
    strcpy(copy, plan);
    call->sleep_us = call->busy_us = call->cpu_us = call->device_us = call->result = 0;
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *what = strchr(word, '='), *number = what ? strchr(what, ':') : NULL;
        if (!number)
            continue;
        *what++ = *number++ = 0;
        if (strcmp(word, "*") && strcmp(word, call->name))
            continue;
        long n = atol(number);
        *(strcmp(what, "sleep") == 0    ? &call->sleep_us
          : strcmp(what, "busy") == 0   ? &call->busy_us
          : strcmp(what, "cpu") == 0    ? &call->cpu_us
          : strcmp(what, "device") == 0 ? &call->device_us
                                        : &call->result) = n;
    }
}

void standin_set(const char *text) {
    pthread_mutex_lock(&lock);
    strncpy(plan, text, sizeof(plan) - 1);
    for (struct call *call = calls; call; call = call->next)
        learn(call);
    pthread_mutex_unlock(&lock);
}

void standin_inside(void (*function)(const char *name)) { inside = function; }

static void forked(void) {
    for (struct call *call = calls; call; call = call->next)
        call->count = 0;
}

__attribute__((constructor)) static void begin(void) {
    pthread_atfork(NULL, NULL, forked);
    if (getenv("STANDIN"))
        standin_set(getenv("STANDIN"));
}

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("STANDIN_COUNTS");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (file < 0)
        return;
    for (struct call *call = calls; call; call = call->next)
        if (call->count)
            dprintf(file, "%d %s %lu\n", getpid(), call->name, call->count);
    close(file);
}

static hipError_t enter(struct call *call) {
    if (!__atomic_load_n(&call->known, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&lock);
        if (!call->known) {
            learn(call);
            call->next = calls;
            calls = call;
            __atomic_store_n(&call->known, 1, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&lock);
    }
    if (!depth)
        __atomic_fetch_add(&call->count, 1, __ATOMIC_RELAXED);
    if (inside)
        inside(call->name);
    if (call->sleep_us)
        sleep_until(now_ns(CLOCK_MONOTONIC) + call->sleep_us * 1000);
    if (call->busy_us)
        burn(CLOCK_MONOTONIC, call->busy_us);
    if (call->cpu_us)
        burn(CLOCK_THREAD_CPUTIME_ID, call->cpu_us);
    if (call->device_us) {
        long start = now_ns(CLOCK_MONOTONIC), end = __atomic_load_n(&device_end_ns, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&device_end_ns, &end, (end > start ? end : start) + call->device_us * 1000, 0,
                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            ;
    }
    return (hipError_t)call->result;
}

/* Counts, takes its time, and may fail. */
#define BEGIN                                                                                                                          \
    static struct call me = {.name = __func__};                                                                                        \
    hipError_t failed = enter(&me);                                                                                                    \
    if (failed)                                                                                                                        \
        return failed;

static hipError_t drain(void) {
    long end = __atomic_load_n(&device_end_ns, __ATOMIC_RELAXED);
    if (end > now_ns(CLOCK_MONOTONIC))
        sleep_until(end);
    return hipSuccess;
}

static hipError_t ready(long end_ns) { return now_ns(CLOCK_MONOTONIC) < end_ns ? hipErrorNotReady : hipSuccess; }

static hipError_t make(void **p, size_t bytes) { return (*p = calloc(1, bytes ? bytes : 1)) ? hipSuccess : hipErrorOutOfMemory; }

static struct kernel *registered(const void *handle) {
    struct kernel *k = __atomic_load_n(&kernels, __ATOMIC_ACQUIRE);
    while (k && k->handle != handle)
        k = k->next;
    return k;
}

/* --- devices --- */

hipError_t hipInit(unsigned flags) { BEGIN return flags ? hipErrorInvalidValue : hipSuccess; }
hipError_t hipGetDeviceCount(int *count) { BEGIN *count = 1; return hipSuccess; }
hipError_t hipGetDevice(int *device) { BEGIN *device = 0; return hipSuccess; }
hipError_t hipSetDevice(int device) { BEGIN return device ? hipErrorInvalidDevice : hipSuccess; }
hipError_t hipGetLastError(void) { BEGIN return hipSuccess; }
hipError_t hipDeviceSynchronize(void) { BEGIN return drain(); }
const char *hipGetErrorName(hipError_t error) { return error ? "an error" : "hipSuccess"; }

/* --- memory --- */

hipError_t hipMalloc(void **p, size_t bytes) { BEGIN return make(p, bytes); }
hipError_t hipMallocAsync(void **p, size_t bytes, hipStream_t stream) { BEGIN (void)stream; return make(p, bytes); }
hipError_t hipHostMalloc(void **p, size_t bytes, unsigned flags) { BEGIN (void)flags; return make(p, bytes); }
hipError_t hipFree(void *p) { BEGIN free(p); return hipSuccess; }
hipError_t hipFreeAsync(void *p, hipStream_t stream) { BEGIN (void)stream; free(p); return hipSuccess; }
hipError_t hipHostFree(void *p) { BEGIN free(p); return hipSuccess; }
hipError_t hipMemGetInfo(size_t *left, size_t *total) { BEGIN *left = *total = (size_t)16 << 30; return hipSuccess; }

hipError_t hipMallocManaged(void **p, size_t bytes, unsigned flags) {
    BEGIN
    (void)flags;
    depth++;
    hipError_t error = hipMalloc(p, bytes);
    depth--;
    return error;
}

hipError_t hipMallocPitch(void **p, size_t *pitch, size_t width, size_t height) {
    BEGIN
    *pitch = (width + 255) / 256 * 256;
    depth++;
    hipError_t error = hipMalloc(p, *pitch * height);
    depth--;
    return error;
}

/* --- copies --- */

static void copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height) {
    for (size_t y = 0; y < height; y++)
        memcpy(to + y * to_pitch, from + y * from_pitch, width);
}

hipError_t hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
    BEGIN (void)kind;
    drain();
    memmove(to, from, bytes);
    return hipSuccess;
}
hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, hipStream_t stream) {
    BEGIN (void)kind, (void)stream;
    memmove(to, from, bytes);
    return hipSuccess;
}
hipError_t hipMemcpyHtoD(void *to, void *from, size_t bytes) { BEGIN memmove(to, from, bytes); return hipSuccess; }
hipError_t hipMemcpyDtoH(void *to, void *from, size_t bytes) { BEGIN drain(); memmove(to, from, bytes); return hipSuccess; }
hipError_t hipMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind) {
    BEGIN (void)kind;
    copy_rows(to, to_pitch, from, from_pitch, width, height);
    return hipSuccess;
}
hipError_t hipMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind,
                            hipStream_t stream) {
    BEGIN (void)kind, (void)stream;
    copy_rows(to, to_pitch, from, from_pitch, width, height);
    return hipSuccess;
}
hipError_t hipMemset(void *p, int value, size_t bytes) { BEGIN memset(p, value, bytes); return hipSuccess; }
hipError_t hipMemsetAsync(void *p, int value, size_t bytes, hipStream_t stream) {
    BEGIN (void)stream;
    memset(p, value, bytes);
    return hipSuccess;
}
hipError_t hipMemsetD32(void *p, int value, size_t count) {
    BEGIN
    for (size_t i = 0; i < count; i++)
        ((int *)p)[i] = value;
    return hipSuccess;
}

/* --- streams, events, graphs --- */

hipError_t hipStreamCreate(hipStream_t *stream) { BEGIN return make((void **)stream, sizeof(**stream)); }
hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags) {
    BEGIN (void)flags;
    return make((void **)stream, sizeof(**stream));
}
hipError_t hipStreamDestroy(hipStream_t stream) { BEGIN free(stream); return hipSuccess; }
hipError_t hipStreamSynchronize(hipStream_t stream) { BEGIN (void)stream; return drain(); }
hipError_t hipStreamQuery(hipStream_t stream) { BEGIN (void)stream; return ready(device_end_ns); }
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
    BEGIN (void)stream, (void)event, (void)flags;
    return hipSuccess;
}
hipError_t hipEventCreate(hipEvent_t *event) { BEGIN return make((void **)event, sizeof(**event)); }
hipError_t hipEventDestroy(hipEvent_t event) { BEGIN free(event); return hipSuccess; }
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
    BEGIN (void)stream;
    event->end_ns = device_end_ns;
    return hipSuccess;
}
hipError_t hipEventQuery(hipEvent_t event) { BEGIN return ready(event->end_ns); }
hipError_t hipEventSynchronize(hipEvent_t event) {
    BEGIN
    if (ready(event->end_ns))
        sleep_until(event->end_ns);
    return hipSuccess;
}
hipError_t hipGraphCreate(hipGraph_t *graph, unsigned flags) { BEGIN (void)flags; return make((void **)graph, 8); }
hipError_t hipGraphInstantiate(hipGraphExec_t *made, hipGraph_t graph, void *node, char *log, size_t bytes) {
    BEGIN (void)graph, (void)node, (void)log, (void)bytes;
    return make((void **)made, 8);
}
hipError_t hipGraphLaunch(hipGraphExec_t graph, hipStream_t stream) { BEGIN (void)graph, (void)stream; return hipSuccess; }

/* --- modules and registration --- */

hipError_t hipModuleLoad(hipModule_t *module, const char *path) {
    BEGIN
    return access(path, R_OK) ? 301 : make((void **)module, sizeof(**module));
}
hipError_t hipModuleLoadData(hipModule_t *module, const void *image) {
    BEGIN
    return image ? make((void **)module, sizeof(**module)) : hipErrorInvalidValue;
}
hipError_t hipModuleUnload(hipModule_t module) { BEGIN free(module); return hipSuccess; }
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
    BEGIN
    if (!module || !*name || !strcmp(name, "absent"))
        return hipErrorNotFound;
    hipError_t error = make((void **)function, sizeof(**function));
    if (!error)
        strncpy((*function)->name, name, sizeof((*function)->name) - 1);
    return error;
}
hipError_t hipGetFuncBySymbol(hipFunction_t *function, const void *symbol) {
    BEGIN
    struct kernel *k = registered(symbol);
    if (!k)
        return hipErrorInvalidDeviceFunction;
    hipError_t error = make((void **)function, sizeof(**function));
    if (!error)
        strncpy((*function)->name, k->name, sizeof((*function)->name) - 1);
    return error;
}

void **__hipRegisterFatBinary(const void *data) {
    void **module = calloc(1, sizeof(void *));
    *module = (void *)data;
    return module;
}
void __hipRegisterFunction(void **modules, const void *handle, char *function, const char *name, unsigned threads, void *tid,
                           void *bid, dim3 *block, dim3 *grid, int *warp) {
    (void)modules, (void)function, (void)threads, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    struct kernel *k = malloc(sizeof(*k));
    *k = (struct kernel){handle, strdup(name), NULL}; /* as the library does, which makes a string of it */
    pthread_mutex_lock(&lock);
    k->next = kernels;
    __atomic_store_n(&kernels, k, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
}
void __hipUnregisterFatBinary(void **modules) { free(modules); }

hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return hipSuccess;
}
hipError_t __hipPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, hipStream_t *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared, *stream = configuration.stream;
    return hipSuccess;
}

/* --- launches --- */

static hipError_t launched(const void *kernel, dim3 grid, dim3 block) {
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || (size_t)block.x * block.y * block.z > 1024)
        return 9; /* hipErrorInvalidConfiguration */
    return registered(kernel) ? hipSuccess : hipErrorInvalidDeviceFunction;
}
hipError_t hipLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, hipStream_t stream) {
    BEGIN (void)args, (void)shared, (void)stream;
    return launched(kernel, grid, block);
}
hipError_t hipLaunchKernel_spt(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, hipStream_t stream) {
    BEGIN (void)args, (void)shared, (void)stream;
    return launched(kernel, grid, block);
}
hipError_t hipExtLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, hipStream_t stream,
                              hipEvent_t start, hipEvent_t stop, int flags) {
    BEGIN (void)args, (void)shared, (void)stream, (void)start, (void)stop, (void)flags;
    return launched(kernel, grid, block);
}
hipError_t hipLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **args, unsigned shared, hipStream_t stream) {
    BEGIN (void)args, (void)shared, (void)stream;
    return launched(kernel, grid, block);
}
hipError_t hipLaunchKernelExC(const hipLaunchConfig_t *config, const void *kernel, void **args) {
    BEGIN (void)args;
    return launched(kernel, config->gridDim, config->blockDim);
}
hipError_t hipModuleLaunchKernel(hipFunction_t kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                 unsigned shared, hipStream_t stream, void **args, void **extra) {
    BEGIN (void)shared, (void)stream, (void)args, (void)extra;
    return kernel && gx && gy && gz && bx && by && bz ? hipSuccess : hipErrorInvalidValue;
}
hipError_t hipExtModuleLaunchKernel(hipFunction_t kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by,
                                    uint32_t bz, size_t shared, hipStream_t stream, void **args, void **extra, hipEvent_t start,
                                    hipEvent_t stop, uint32_t flags) {
    BEGIN (void)shared, (void)stream, (void)args, (void)extra, (void)start, (void)stop, (void)flags;
    return kernel && gx && gy && gz && bx && by && bz ? hipSuccess : hipErrorInvalidValue;
}
