// For CUDA and, with hipcc, for HIP. A program that launches kernels, checks what they computed, and ends in one of many ways. Each process appends
// "PID LAUNCHES" to the file that SOAK_LIVES names, before it ends. Exit status 3 if a result is wrong.
//
//   lives WAY LAUNCHES     WAY: return exit _exit quick_exit abort kill running threads forks execs
//   lives serve            reads lines: "go N" launches N times; "run" launches until "stop"; "count"; "quit"
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#ifdef __HIP__
#include <hip/hip_runtime.h>
#define cudaError_t hipError_t
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaHostAlloc hipHostMalloc
#define cudaHostAllocMapped hipHostMallocMapped
#define cudaMalloc hipMalloc
#define cudaMemcpyAsync hipMemcpyAsync
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
#define cudaMemsetAsync hipMemsetAsync
#define cudaStreamCreateWithFlags hipStreamCreateWithFlags
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamSynchronize hipStreamSynchronize
#define cudaStream_t hipStream_t
#define cudaSuccess hipSuccess
const char *const kDriver = "libamdhip64.so";
const char *const kInit = "hipInit";
#else
#include <cuda_runtime.h>
const char *const kDriver = "libcuda.so.1";
const char *const kInit = "cuInit";
#endif

__global__ void soak_add(int *sums, int by) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    sums[i] += by + i;
}

__global__ void soak_spin(volatile int *stop) {
    while (!*stop) {
    }
}

namespace {

constexpr int kThreads = 64;
std::atomic<long> launched{0};  // in all threads

void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    dprintf(2, "lives: %s: %s\n", what, cudaGetErrorString(error));
    _exit(3);
}

// Libraries call cuInit, each for itself. The runtime does so, too.
void init_often() {
    void *driver = dlopen(kDriver, RTLD_NOW);
    if (auto init = reinterpret_cast<int (*)(unsigned)>(driver ? dlsym(driver, kInit) : nullptr))
        for (int i = 0; i < 100; ++i) init(0);
}

// A stream with sums that its launches change.
class Worker {
  public:
    Worker() {
        init_often();
        must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
        must(cudaMalloc(reinterpret_cast<void **>(&sums_), kThreads * sizeof(int)), "memory");
        must(cudaMemsetAsync(sums_, 0, kThreads * sizeof(int), stream_), "memset");
        must(cudaStreamSynchronize(stream_), "first wait");
    }
    void launch() {
        soak_add<<<2, kThreads / 2, 0, stream_>>>(sums_, ++launches_);
        must(cudaGetLastError(), "launch");
        ++launched;
    }
    long check() {
        int got[kThreads];
        must(cudaMemcpyAsync(got, sums_, sizeof got, cudaMemcpyDeviceToHost, stream_), "copy");
        must(cudaStreamSynchronize(stream_), "wait");
        for (int i = 0; i < kThreads; ++i)
            if (got[i] !=
                static_cast<int>(launches_ * (launches_ + 1l) / 2 + static_cast<long>(launches_) * i)) {
                dprintf(2, "lives: thread %d: %d after %d launches\n", i, got[i], launches_);
                _exit(3);
            }
        return launches_;
    }

  private:
    cudaStream_t stream_ = nullptr;
    int *sums_ = nullptr;
    int launches_ = 0;
};

// The file is opened at once: later there may be no file descriptor left.
int lives = -1;

void tell(long launches) {
    char line[64];
    const int n = snprintf(line, sizeof line, "%d %ld\n", static_cast<int>(getpid()), launches);
    if (write(lives, line, static_cast<size_t>(n)) != n) _exit(4);
}

long live(int launches) {
    Worker worker;
    for (int i = 0; i < launches; ++i) worker.launch();
    return worker.check();
}

void live_and_tell(int launches) { tell(live(launches)); }

void serve() {
    Worker first;
    std::vector<Worker> others(2);
    std::atomic<bool> runs{false};
    std::vector<std::thread> threads;
    auto all = [&] {
        long sum = first.check();
        for (Worker &w : others) sum += w.check();
        return sum;
    };
    auto stop = [&] {
        runs = false;
        for (std::thread &t : threads) t.join();
        threads.clear();
    };
    char line[64];
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "go ", 3)) {
            for (int i = atoi(line + 3); i > 0; --i) first.launch();
        } else if (!strncmp(line, "run", 3) && threads.empty()) {
            runs = true;
            for (Worker &w : others)
                threads.emplace_back([&] {
                    for (int i = 0; runs; ++i) {
                        w.launch();
                        if (i % 16 == 0) w.check();
                    }
                });
            puts("runs");
            fflush(stdout);
            continue;
        } else if (!strncmp(line, "count", 5)) {
            printf("%ld\n", launched.load());
            fflush(stdout);
            continue;
        } else if (!strncmp(line, "quit", 4)) {
            break;
        } else {
            stop();
        }
        printf("%ld\n", all());
        fflush(stdout);
    }
    stop();
    tell(all());
}

}  // namespace

int main(int argc, char **argv) {
    const char *file = getenv("SOAK_LIVES");
    lives = file ? open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : 1;
    if (argc < 2 || lives < 0) return 2;
    const std::string way = argv[1];
    const int launches = argc > 2 ? atoi(argv[2]) : 10;
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    if (way == "serve") {
        serve();
        return 0;
    }
    if (way == "forks") {  // CUDA does not survive a fork, so the children come first
        pid_t children[3];
        for (pid_t &child : children) {
            child = fork();
            if (child) continue;
            live_and_tell(launches);
            exit(0);
        }
        live_and_tell(launches);
        int bad = 0;
        for (pid_t child : children) {
            int status = -1;
            if (waitpid(child, &status, 0) != child || status) bad = 3;
        }
        return bad;
    }
    if (way == "threads") {
        std::vector<std::thread> threads;
        std::atomic<long> sum{0};
        for (int i = 0; i < 4; ++i) threads.emplace_back([&] { sum += live(launches); });
        for (std::thread &t : threads) t.join();
        tell(sum);
        return 0;
    }
    if (way == "execs") {
        live_and_tell(launches);
        const std::string less = std::to_string(launches / 2);
        execl("/proc/self/exe", argv[0], launches > 4 ? "execs" : "return", less.c_str(), nullptr);
        return 3;
    }
    if (way == "running") {  // the process ends while a kernel runs
        const long made = live(launches);
        int *stop = nullptr;
        must(cudaHostAlloc(reinterpret_cast<void **>(&stop), sizeof *stop, cudaHostAllocMapped),
             "host memory");
        *stop = 0;
        soak_spin<<<1, 32>>>(stop);
        must(cudaGetLastError(), "launch");
        tell(made + 1);
        _exit(0);
    }
    live_and_tell(launches);
    if (way == "return") return 0;
    if (way == "exit") exit(0);
    if (way == "_exit") _exit(0);
    if (way == "quick_exit") quick_exit(0);
    if (way == "abort") abort();
    if (way == "kill") raise(SIGKILL);
    return 2;
}
