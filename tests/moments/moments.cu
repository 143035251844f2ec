// Launches kernels at the moments of a process's life that its arguments name, in their order, each as "moment:number". For CUDA and,
// with hipcc, for HIP. tests/test_moments.py knows how many launches each makes. Ends with status 3 if a call fails or a launch is lost.
#include "moments.h"

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <pthread.h>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#ifdef __HIP__
#include <hip/hip_runtime.h>
#define cudaDeviceSynchronize hipDeviceSynchronize
#define cudaError_t hipError_t
#define cudaFree hipFree
#define cudaGetErrorName hipGetErrorName
#define cudaGetLastError hipGetLastError
#define cudaGraphAddChildGraphNode hipGraphAddChildGraphNode
#define cudaGraphAddKernelNode hipGraphAddKernelNode
#define cudaGraphClone hipGraphClone
#define cudaGraphCreate hipGraphCreate
#define cudaGraphDestroy hipGraphDestroy
#define cudaGraphExecDestroy hipGraphExecDestroy
#define cudaGraphExecKernelNodeSetParams hipGraphExecKernelNodeSetParams
#define cudaGraphExec_t hipGraphExec_t
#define cudaGraphLaunch hipGraphLaunch
#define cudaGraphNode_t hipGraphNode_t
#define cudaGraph_t hipGraph_t
#define cudaKernelNodeParams hipKernelNodeParams
#define cudaMalloc hipMalloc
#define cudaMallocHost hipHostMalloc
#define cudaMemcpy hipMemcpy
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
#define cudaMemset hipMemset
#define cudaStreamBeginCapture hipStreamBeginCapture
#define cudaStreamCaptureModeThreadLocal hipStreamCaptureModeThreadLocal
#define cudaStreamCreateWithFlags hipStreamCreateWithFlags
#define cudaStreamEndCapture hipStreamEndCapture
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamSynchronize hipStreamSynchronize
#define cudaStream_t hipStream_t
#define cudaSuccess hipSuccess
#define instantiate(exec, graph) hipGraphInstantiate(exec, graph, nullptr, nullptr, 0)
#else
#include <cuda.h>
#define instantiate(exec, graph) cudaGraphInstantiate(exec, graph, 0)
#endif

__global__ void tick(unsigned *launches) {
    if (threadIdx.x == 0) atomicAdd(launches, 1);
}
__global__ void tock(unsigned *launches) {
    if (threadIdx.x == 0) atomicAdd(launches, 1);
}
__global__ void hold(unsigned *launches, volatile int *until) {
    while (!*until) {
    }
    atomicAdd(launches, 1);
}

namespace {

constexpr int kThreads = 3;
unsigned *launches = nullptr;       // on the GPU
std::atomic<unsigned> expected{0};  // on the host

void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    dprintf(2, "moments: %s: %s\n", what, cudaGetErrorName(error));
    _exit(3);
}

void begin() {
    if (launches) return;
    must(cudaMalloc(&launches, sizeof *launches), "memory");
    must(cudaMemset(launches, 0, sizeof *launches), "memset");
    must(cudaDeviceSynchronize(), "first wait");
}

void launch(int n, cudaStream_t stream = nullptr) {
    for (int i = 0; i < n; ++i) tick<<<1, 32, 0, stream>>>(launches);
    must(cudaGetLastError(), "launch");
    expected += n;
}

void check() {
    if (!launches) return;
    must(cudaDeviceSynchronize(), "wait");
    unsigned found;
    must(cudaMemcpy(&found, launches, sizeof found, cudaMemcpyDeviceToHost), "copy");
    if (found == expected) return;
    dprintf(2, "moments: %u of %u launches ran\n", found, expected.load());
    _exit(3);
}

cudaStream_t stream() {
    cudaStream_t made;
    must(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "stream");
    return made;
}

// --- threads and processes ---

void streams(int n) {
    begin();
    for (cudaStream_t s : {stream(), stream()}) launch(n, s);
}

// Threads that launch at once.
void threads(int n) {
    begin();
    std::atomic<int> waiting{0};
    std::vector<std::thread> all;
    for (int t = 0; t < kThreads; ++t)
        all.emplace_back([&] {
            cudaStream_t own = stream();
            for (++waiting; waiting < kThreads;) {
            }
            launch(n, own);
            must(cudaStreamSynchronize(own), "wait");
        });
    for (std::thread &t : all) t.join();
}

// A thread ends while another one launches.
void leaving(int n) {
    begin();
    std::thread first([&] { launch(n); });
    std::thread second([&] { launch(n); });
    first.join();
    second.join();
}

// A thread that is still there when the process ends.
void detached(int n) {
    begin();
    static std::atomic<bool> done;
    done = false;
    std::thread([n] {
        launch(n);
        done = true;
        for (;;) pause();
    }).detach();
    while (!done) usleep(100);
}

// A thread launches once more from the destructor of a thread-local object.
void thread_end(int n) {
    begin();
    struct Last {
        bool used = false;
        ~Last() {
            launch(1);
            must(cudaDeviceSynchronize(), "wait");
        }
    };
    for (int i = 0; i < n; ++i)
        std::thread([] {
            launch(1);  // first: HIP's own thread-local objects must end after the program's
            static thread_local Last last;
            last.used = true;
        }).join();
}

// A thread is cancelled while it waits for a kernel. Then this thread launches.
void cancelled(int n) {
    begin();
    cudaStream_t own = stream();
    volatile int *until;
    must(cudaMallocHost((void **)&until, sizeof *until), "host memory");
    for (int i = 0; i < n; ++i) {
        *until = 0;
        hold<<<1, 1, 0, own>>>(launches, until);
        ++expected;
        static std::atomic<bool> waits;
        waits = false;
        pthread_t waiting;
        if (pthread_create(
                &waiting, nullptr,
                [](void *in) -> void * {
                    waits = true;
                    cudaStreamSynchronize(static_cast<cudaStream_t>(in));
                    return nullptr;
                },
                own))
            _exit(3);
        while (!waits) usleep(1000);
        usleep(20000);
        pthread_cancel(waiting);
        *until = 1;
        pthread_join(waiting, nullptr);
        must(cudaStreamSynchronize(own), "wait");
        launch(1);
    }
}

void must_end_well(pid_t pid) {
    int status = -1;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status) {
        dprintf(2, "moments: child %d ended with %x\n", static_cast<int>(pid), status);
        _exit(3);
    }
}

// The child is the first that uses the GPU.
void forked(int n, bool quickly) {
    pid_t pid = fork();
    if (!pid) {
        forget_words();
        launch_and_check(n);
        if (quickly) _exit(0);
        exit(0);
    }
    must_end_well(pid);
}

std::vector<char *> again(std::string &moment, int n) {
    static char self[] = "/proc/self/exe";
    moment = "main:" + std::to_string(n);
    return {self, moment.data(), nullptr};
}

void executed(int n) {
    std::string moment;
    std::vector<char *> arguments = again(moment, n);
    pid_t pid = vfork();
    if (!pid) {
        execv(arguments[0], arguments.data());
        _exit(4);
    }
    must_end_well(pid);
}

void spawned(int n) {
    std::string moment;
    std::vector<char *> arguments = again(moment, n);
    pid_t pid = -1;
    posix_spawn(&pid, arguments[0], nullptr, nullptr, arguments.data(), environ);
    must_end_well(pid);
}

// --- graphs ---

void *pointer[] = {&launches};

cudaKernelNodeParams node(void (*kernel)(unsigned *)) {
    cudaKernelNodeParams params{};
    params.func = reinterpret_cast<void *>(kernel);
    params.gridDim = dim3(1);
    params.blockDim = dim3(32);
    params.kernelParams = pointer;
    return params;
}

cudaGraph_t empty() {
    begin();
    cudaGraph_t graph;
    must(cudaGraphCreate(&graph, 0), "graph");
    return graph;
}

cudaGraphNode_t add(cudaGraph_t graph, void (*kernel)(unsigned *)) {
    cudaGraphNode_t made;
    cudaKernelNodeParams params = node(kernel);
    must(cudaGraphAddKernelNode(&made, graph, nullptr, 0, &params), "node");
    return made;
}

void replay(cudaGraphExec_t exec, int n, int each) {
    cudaStream_t own = stream();
    for (int i = 0; i < n; ++i) must(cudaGraphLaunch(exec, own), "graph launch");
    expected += n * each;
    must(cudaStreamSynchronize(own), "wait");
}

void run(cudaGraph_t graph, int n, int each) {
    cudaGraphExec_t exec;
    must(instantiate(&exec, graph), "instantiate");
    replay(exec, n, each);
    must(cudaGraphExecDestroy(exec), "destroy");
    must(cudaGraphDestroy(graph), "destroy");
}

void graph(int n) {
    cudaGraph_t made = empty();
    add(made, tick);
    add(made, tock);
    run(made, n, 2);
}

void child(int n) {
    cudaGraph_t outer = empty(), inner = empty();
    add(inner, tock);
    add(outer, tick);
    cudaGraphNode_t made;
    must(cudaGraphAddChildGraphNode(&made, outer, nullptr, 0, inner), "child");
    run(outer, n, 2);
}

void captured(int n) {
    begin();
    cudaStream_t own = stream();
    cudaGraph_t made;
    must(cudaStreamBeginCapture(own, cudaStreamCaptureModeThreadLocal), "capture");
    tick<<<1, 32, 0, own>>>(launches);
    must(cudaStreamEndCapture(own, &made), "capture");
    run(made, n, 1);
}

void cloned(int n) {
    cudaGraph_t made = empty(), clone;
    add(made, tick);
    must(cudaGraphClone(&clone, made), "clone");
    must(cudaGraphDestroy(made), "destroy");
    run(clone, n, 1);
}

// An executable graph gets another kernel.
void updated(int n) {
    cudaGraph_t made = empty();
    cudaGraphNode_t only = add(made, tick);
    cudaGraphExec_t exec;
    must(instantiate(&exec, made), "instantiate");
    replay(exec, n, 1);
    cudaKernelNodeParams params = node(tock);
    must(cudaGraphExecKernelNodeSetParams(exec, only, &params), "update");
    replay(exec, n, 1);
}

}  // namespace

#ifndef __HIP__
__global__ void step(unsigned *launches, unsigned *turns, unsigned n, cudaGraphConditionalHandle handle) {
    atomicAdd(launches, 1);
    cudaGraphSetConditional(handle, ++*turns % n != 0);
}
__global__ void choose(unsigned *launches, unsigned value, cudaGraphConditionalHandle handle) {
    atomicAdd(launches, 1);
    cudaGraphSetConditional(handle, value);
}

namespace {

template <class... Arguments>
void add_kernel(cudaGraph_t graph, cudaGraphNode_t *made, void (*kernel)(Arguments...),
                Arguments... arguments) {
    void *pointers[] = {&arguments...};
    cudaKernelNodeParams params{};
    params.func = reinterpret_cast<void *>(kernel);
    params.gridDim = params.blockDim = dim3(1);
    params.kernelParams = pointers;
    must(cudaGraphAddKernelNode(made, graph, nullptr, 0, &params), "node");
}

std::vector<cudaGraph_t> conditional(cudaGraph_t graph, cudaGraphNode_t *after,
                                     cudaGraphConditionalHandle handle, cudaGraphConditionalNodeType type,
                                     unsigned bodies) {
    cudaGraphNodeParams params{};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = type;
    params.conditional.size = bodies;
    cudaGraphNode_t made;
    must(cudaGraphAddNode(&made, graph, after, nullptr, after ? 1 : 0, &params), "conditional node");
    return {params.conditional.phGraph_out, params.conditional.phGraph_out + bodies};
}

// A loop that runs its body n times in each of two launches: a step, a child graph, and a captured kernel in an inner condition.
void loop(int n) {
    cudaGraph_t outer = empty(), inner = empty();
    unsigned *turns;
    must(cudaMalloc(&turns, sizeof *turns), "memory");
    must(cudaMemset(turns, 0, sizeof *turns), "memset");
    must(cudaDeviceSynchronize(), "wait");  // the graph runs in a stream that does not wait for the memset
    cudaGraphConditionalHandle handle, always;
    must(cudaGraphConditionalHandleCreate(&handle, outer, 1, cudaGraphCondAssignDefault), "handle");
    must(cudaGraphConditionalHandleCreate(&always, outer, 1, cudaGraphCondAssignDefault), "handle");
    cudaGraph_t body = conditional(outer, nullptr, handle, cudaGraphCondTypeWhile, 1)[0];
    cudaGraphNode_t made;
    add_kernel(body, &made, step, launches, turns, unsigned(n), handle);
    add(inner, tock);
    must(cudaGraphAddChildGraphNode(&made, body, nullptr, 0, inner), "child");
    cudaGraph_t deepest = conditional(body, nullptr, always, cudaGraphCondTypeIf, 1)[0];
    cudaStream_t own = stream();
    must(cudaStreamBeginCaptureToGraph(own, deepest, nullptr, nullptr, 0, cudaStreamCaptureModeThreadLocal),
         "capture");
    tick<<<1, 32, 0, own>>>(launches);
    must(cudaStreamEndCapture(own, nullptr), "capture");
    run(outer, 2, 3 * n);
}

// A kernel chooses between a body with one kernel, one with n, and none.
void choice(int n) {
    struct Case {
        cudaGraphConditionalNodeType type;
        unsigned value;
        int ran;
    };
    for (const Case &c : {Case{cudaGraphCondTypeIf, 1, 1}, Case{cudaGraphCondTypeIf, 0, n},
                          Case{cudaGraphCondTypeSwitch, 1, n}, Case{cudaGraphCondTypeSwitch, 9, 0}}) {
        cudaGraph_t outer = empty();
        cudaGraphConditionalHandle handle;
        must(cudaGraphConditionalHandleCreate(&handle, outer, 0, 0), "handle");
        cudaGraphNode_t first;
        add_kernel(outer, &first, choose, launches, c.value, handle);
        std::vector<cudaGraph_t> bodies = conditional(outer, &first, handle, c.type, 2);
        add(bodies[0], tick);
        for (int i = 0; i < n; ++i) add(bodies[1], tock);
        run(outer, 2, 1 + c.ran);
    }
}

struct Thrown {};

// An exception of the program passes through a call, which asks how much shared memory a block needs.
void thrown(int n) {
    begin();
    auto throws = [](int) -> size_t { throw Thrown{}; };
    for (int i = 0; i < n; ++i) {
        int grid, block;
        try {
            cudaOccupancyMaxPotentialBlockSizeVariableSMem(&grid, &block, tick, throws);
            _exit(3);
        } catch (const Thrown &) {
            launch(1);
        }
    }
}

// Another context, with memory of its own, that is destroyed or stays.
void context(int n, bool stays) {
    begin();
    CUcontext made, popped;
    CUdevice device;
    unsigned *here = launches, before = expected;
    if (cuCtxGetDevice(&device) || cuCtxCreate(&made, nullptr, 0, device)) _exit(3);
    launches = nullptr;
    expected = 0;
    launch_and_check(n);
    if (stays ? cuCtxPopCurrent(&popped) : cuCtxDestroy(made)) _exit(3);
    launches = here;
    expected = before;
}

}  // namespace
#endif

namespace {

// A library that is loaded, launches, and stays or is unloaded.
void load(int n, bool initialiser, bool unload) {
    setenv("MOMENTS_LOAD", initialiser ? std::to_string(n).c_str() : "0", 1);
    void *library = dlopen(getenv("MOMENTS_PART"), RTLD_NOW | RTLD_LOCAL);
    auto part = reinterpret_cast<void (*)(int)>(library ? dlsym(library, "part_launch") : nullptr);
    if (!part) _exit(3);
    if (!initialiser) part(n);
    if (unload) dlclose(library);
}

void at_exit() { launch_and_check(named("atexit")); }

[[noreturn]] void end(const std::string &way) {
    if (way == "_exit") _exit(0);
    if (way == "quick_exit") quick_exit(0);
    if (way == "abort") abort();
    if (way == "kill") raise(SIGKILL);
    if (way == "term") raise(SIGTERM);
    if (way == "segv") *reinterpret_cast<volatile int *>(8) = 1;
    exit(way == "exit" ? 0 : 4);
}

void live(const std::string &moment, int n) {
    if (moment == "main") launch_and_check(n);
    else if (moment == "streams") streams(n);
    else if (moment == "threads") threads(n);
    else if (moment == "leaving") leaving(n);
    else if (moment == "detached") detached(n);
    else if (moment == "thread_end") thread_end(n);
    else if (moment == "cancelled") cancelled(n);
    else if (moment == "fork") forked(n, false);
    else if (moment == "fork_exit") forked(n, true);
    else if (moment == "exec") executed(n);
    else if (moment == "spawn") spawned(n);
    else if (moment == "graph") graph(n);
    else if (moment == "child") child(n);
    else if (moment == "captured") captured(n);
    else if (moment == "cloned") cloned(n);
    else if (moment == "updated") updated(n);
#ifndef __HIP__
    else if (moment == "loop") loop(n);
    else if (moment == "choice") choice(n);
    else if (moment == "thrown") thrown(n);
    else if (moment == "context") context(n, false);
    else if (moment == "contexts") context(n, true);
#endif
    else if (moment == "load") load(n, false, true);
    else if (moment == "stays") load(n, false, false);
    else if (moment == "initialiser") load(n, true, false);
    else if (moment == "atexit") begin(), atexit(at_exit);
    else if (moment == "at_quick_exit")
        begin(), at_quick_exit([] { launch_and_check(named("at_quick_exit")); });
    else if (moment != "early" && moment != "static") _exit(4);
}

}  // namespace

void launch_and_check(int n) {
    if (!n) return;
    begin();
    launch(n);
    check();
}

// The last word may be "end:WAY". GATE: the first launch waits until this file exists.
int main(int argc, char **argv) {
    if (const char *gate = getenv("MOMENTS_GATE")) {
        begin();
        puts("ready");
        fflush(stdout);
        while (access(gate, F_OK)) usleep(1000);
    }
    for (int i = 1; i < argc; ++i) {
        std::string word = argv[i], moment = word.substr(0, word.find(':'));
        if (moment == "end") check(), end(word.substr(4));
        live(moment, atoi(word.c_str() + moment.size() + 1));
    }
    check();
}
