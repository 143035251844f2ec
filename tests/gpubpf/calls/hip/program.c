/*
 * Makes calls of HIP that its arguments name, and tells what they returned.
 *
 *     program [-t THREADS] [-n TIMES] [-p PAUSE_US] [-w] [-x COMMAND] CALL...
 *
 * -w: says "ready" and waits for a line first. -f: in a forked process, too. -x: becomes itself again, with exec, -w and -x left out.
 * Each thread makes the calls TIMES, one after the other, with a pause between rounds, and in the end there is a line for each call:
 * NAME COUNT RESULT, the last result. See CALLS for which there are, with which arguments.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels.h"

KERNEL(saxpy, "_Z5saxpyfPKfPfi")
KERNEL(reduce, "_ZN4math6reduceIfLi256EEEvPKT_PS1_i") /* void math::reduce<float, 256>(float const*, float*, int) */
KERNEL(plain, "plain_kernel")

__attribute__((constructor)) static void register_kernels(void) {
    register_module();
    register_kernel(&saxpy, "_Z5saxpyfPKfPfi");
    register_kernel(&reduce, "_ZN4math6reduceIfLi256EEEvPKT_PS1_i");
    register_kernel(&plain, "plain_kernel");
}

/* Each thread has what it makes. */
static __thread hipStream_t stream;
static __thread hipEvent_t event;
static __thread hipModule_t module;
static __thread hipFunction_t function;
static __thread hipGraphExec_t graph;
static __thread void *memory;
static char host[1 << 16], device[1 << 16]; /* where the library gives no memory, a copy is of this */

static const dim3 GRID = {10, 2, 3}, BLOCK = {64, 4, 1};
static void *arguments[] = {host};

static void *target(void) { return memory ? memory : device; }

static hipError_t launch_configuration(void) {
    hipLaunchConfig_t c = {.gridDim = GRID, .blockDim = BLOCK, .dynamicSmemBytes = 80, .stream = stream};
    return hipLaunchKernelExC(&c, &saxpy, arguments);
}
#pragma weak hipLaunchKernelExC /* the real library may be older */
#pragma weak hipGetFuncBySymbol

static hipError_t graph_instantiate(void) {
    hipGraph_t made = NULL;
    hipError_t error = hipGraphCreate(&made, 0);
    return error ? error : hipGraphInstantiate(&graph, made, NULL, NULL, 0);
}
static hipError_t launch_stub(void) { /* what <<<>>> is */
    dim3 grid, block;
    size_t shared;
    hipStream_t s;
    __hipPushCallConfiguration(GRID, BLOCK, 48, stream);
    __hipPopCallConfiguration(&grid, &block, &shared, &s);
    return hipLaunchKernel(&reduce, grid, block, arguments, shared, s);
}

static __thread int number;
static __thread size_t size, pitch;
#define CALLS(X)                                                                                                                       \
    X(hipInit, hipInit(0))                                                                                                             \
    X(hipGetDeviceCount, hipGetDeviceCount(&number))                                                                                   \
    X(hipGetDevice, hipGetDevice(&number))                                                                                             \
    X(hipSetDevice, hipSetDevice(0))                                                                                                   \
    X(hipGetLastError, hipGetLastError())                                                                                              \
    X(hipDeviceSynchronize, hipDeviceSynchronize())                                                                                    \
    X(hipMalloc, hipMalloc(&memory, 65536))                                                                                            \
    X(hipMallocAsync, hipMallocAsync(&memory, 65536, stream))                                                                          \
    X(hipMallocManaged, hipMallocManaged(&memory, 65536, 1))                                                                           \
    X(hipMallocPitch, hipMallocPitch(&memory, &pitch, 1000, 60))                                                                       \
    X(hipHostMalloc, hipHostMalloc(&memory, 65536, 0))                                                                                 \
    X(hipFree, hipFree(memory); memory = NULL)                                                                                         \
    X(hipMemGetInfo, hipMemGetInfo(&size, &size))                                                                                      \
    X(hipMemcpy, hipMemcpy(target(), host, 4096, hipMemcpyHostToDevice))                                                               \
    X(hipMemcpyAsync, hipMemcpyAsync(host, target(), 8192, hipMemcpyDeviceToHost, stream))                                             \
    X(hipMemcpyHtoD, hipMemcpyHtoD(target(), host, 1234))                                                                              \
    X(hipMemcpyDtoH, hipMemcpyDtoH(host, target(), 4321))                                                                              \
    X(hipMemcpy2D, hipMemcpy2D(target(), 512, host, 256, 200, 30, hipMemcpyHostToDevice))                                              \
    X(hipMemcpy2DAsync, hipMemcpy2DAsync(target(), 512, host, 256, 100, 40, hipMemcpyHostToDevice, stream))                            \
    X(hipMemset, hipMemset(target(), 1, 3000))                                                                                         \
    X(hipMemsetAsync, hipMemsetAsync(target(), 1, 5000, stream))                                                                       \
    X(hipMemsetD32, hipMemsetD32(target(), 1, 700))                                                                                    \
    X(hipStreamCreate, hipStreamCreate(&stream))                                                                                       \
    X(hipStreamDestroy, hipStreamDestroy(stream); stream = NULL)                                                                       \
    X(hipStreamSynchronize, hipStreamSynchronize(stream))                                                                              \
    X(hipStreamQuery, hipStreamQuery(stream))                                                                                          \
    X(hipStreamWaitEvent, hipStreamWaitEvent(stream, event, 0))                                                                        \
    X(hipEventCreate, hipEventCreate(&event))                                                                                          \
    X(hipEventRecord, hipEventRecord(event, stream))                                                                                   \
    X(hipEventQuery, hipEventQuery(event))                                                                                             \
    X(hipEventSynchronize, hipEventSynchronize(event))                                                                                 \
    X(hipGraphInstantiate, graph_instantiate())                                                                                        \
    X(hipGraphLaunch, hipGraphLaunch(graph, stream))                                                                                   \
    X(hipModuleLoad, hipModuleLoad(&module, "/proc/self/exe"))                                                                         \
    X(hipModuleLoadData, hipModuleLoadData(&module, &fat_binary))                                                                      \
    X(hipModuleGetFunction, hipModuleGetFunction(&function, module, "_Z9from_filePf"))                                                 \
    X(hipGetFuncBySymbol, hipGetFuncBySymbol(&function, &saxpy))                                                                       \
    X(hipModuleUnload, hipModuleUnload(module))                                                                                        \
    X(hipLaunchKernel, hipLaunchKernel(&saxpy, GRID, BLOCK, arguments, 64, stream))                                                    \
    X(hipLaunchKernel_spt, hipLaunchKernel_spt(&plain, GRID, BLOCK, arguments, 32, stream))                                            \
    X(launch, launch_stub())                                                                                                           \
    X(hipExtLaunchKernel, hipExtLaunchKernel(&saxpy, GRID, BLOCK, arguments, 16, stream, NULL, NULL, 0))                               \
    X(hipLaunchCooperativeKernel, hipLaunchCooperativeKernel(&reduce, GRID, BLOCK, arguments, 8, stream))                              \
    X(hipLaunchKernelExC, launch_configuration())                                                                                      \
    X(hipModuleLaunchKernel, hipModuleLaunchKernel(function, 7, 6, 5, 32, 2, 4, 96, stream, arguments, NULL))                          \
    X(hipExtModuleLaunchKernel, hipExtModuleLaunchKernel(function, 320, 12, 8, 32, 2, 4, 112, stream, arguments, NULL, NULL, NULL, 0))

enum {
#define NUMBER(name, call) CALL_##name,
    CALLS(NUMBER) CALL_NONE
};
static const char *const names[] = {
#define NAME(name, call) #name,
    CALLS(NAME)};
static unsigned long counts[CALL_NONE];
static int results[CALL_NONE], chosen[256], length, times = 1, pause_us;

static void call(int which) {
    int result = 0;
    switch (which) {
#define CASE(name, call)                                                                                                               \
    case CALL_##name:                                                                                                                  \
        result = call;                                                                                                                 \
        break;
        CALLS(CASE)
    }
    results[which] = result;
    __atomic_fetch_add(&counts[which], 1, __ATOMIC_RELAXED);
}

static void *work(void *unused) {
    for (int n = 0; n < times; n++) {
        for (int i = 0; i < length; i++)
            call(chosen[i]);
        if (pause_us)
            usleep(pause_us);
    }
    return unused;
}

int main(int argc, char **argv) {
    int threads = 1, wait_first = 0, fork_too = 0, option;
    pthread_t others[256];
    while ((option = getopt(argc, argv, "+t:n:p:wfx")) != -1)
        switch (option) {
        case 't': threads = atoi(optarg); break;
        case 'n': times = atoi(optarg); break;
        case 'p': pause_us = atoi(optarg); break;
        case 'w': wait_first = 1; break;
        case 'f': fork_too = 1; break;
        case 'x': {
            char **again = calloc(argc + 2, sizeof(char *));
            int n = 0;
            again[n++] = argv[0];
            for (int i = 1; i < argc; i++)
                if (strcmp(argv[i], "-x") && strcmp(argv[i], "-w"))
                    again[n++] = argv[i];
            execv("/proc/self/exe", again);
            return 3;
        }
        default: return 2;
        }
    for (int i = optind; i < argc && length < 256; i++) {
        int which = 0;
        while (which < CALL_NONE && strcmp(argv[i], names[which]))
            which++;
        if (which == CALL_NONE) {
            fprintf(stderr, "program: no call %s\n", argv[i]);
            return 2;
        }
        chosen[length++] = which;
    }
    if (wait_first) {
        char line[8];
        puts("ready");
        fflush(stdout);
        if (!fgets(line, sizeof(line), stdin))
            return 4;
    }
    pid_t child = fork_too ? fork() : -1;
    for (int i = 1; i < threads && i < 256; i++)
        pthread_create(&others[i], NULL, work, NULL);
    work(NULL);
    for (int i = 1; i < threads && i < 256; i++)
        pthread_join(others[i], NULL);
    if (child > 0)
        waitpid(child, NULL, 0);
    for (int i = 0; i < CALL_NONE; i++)
        if (counts[i])
            printf("%s %lu %d\n", names[i], counts[i], results[i]);
    return 0;
}
