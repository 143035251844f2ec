// call_times: how long each call takes the host thread on the virtual clock, in ns; and when kernels of graphs began and ended, in
// ns after the call that launched them.
#include "check.h"

#include <dlfcn.h>
#include <time.h>

struct Times {
    uint64_t began, ended;
};

__global__ void work(Times *times, int turns) {
    times->began = clock64();
    for (int i = 0; i < turns; i++) asm volatile("s_nop 0");
    times->ended = clock64();
}

static uint64_t now() {
    static auto *const function = reinterpret_cast<uint64_t (*)()>(dlsym(RTLD_DEFAULT, "hipsim_virtual_now"));
    CHECK(function != nullptr);
    return function();
}

template <typename Call>
uint64_t took(const char *name, const Call &call) {
    const uint64_t before = now();
    call();
    printf("%s: %llu\n", name, static_cast<unsigned long long>(now() - before));
    return before;
}

int main() {
    const size_t bytes = 1 << 20, few = 1000;
    Buffer<char> device(bytes), other(bytes);
    std::vector<char> pageable(bytes);
    char *pinned, *second;
    for (char **host : {&pinned, &second}) OK(hipHostMalloc(reinterpret_cast<void **>(host), bytes));
    Buffer<Times> times(8);
    hipStream_t stream;
    OK(hipStreamCreateWithFlags(&stream, hipStreamNonBlocking));
    OK(hipDeviceSynchronize());

    for (size_t size : {few, bytes}) {
        const std::string of = size == few ? "few" : "many";
        auto copy = [&](const char *name, void *to, const void *from, hipMemcpyKind kind) {
            took((of + " " + name).c_str(), [&] { OK(hipMemcpy(to, from, size, kind)); });
            OK(hipDeviceSynchronize());
        };
        copy("h2d", device, pageable.data(), hipMemcpyHostToDevice);
        copy("d2h", pageable.data(), device, hipMemcpyDeviceToHost);
        copy("pinned h2d", device, pinned, hipMemcpyHostToDevice);
        copy("pinned d2h", pinned, device, hipMemcpyDeviceToHost);
        took((of + " d2d").c_str(), [&] { OK(hipMemcpy(other, device, size, hipMemcpyDeviceToDevice)); OK(hipDeviceSynchronize()); });
        copy("h2h", second, pinned, hipMemcpyHostToHost);
        copy("pageable h2h", pageable.data(), pinned, hipMemcpyHostToHost);
        took((of + " async h2d").c_str(), [&] {
            OK(hipMemcpyAsync(device, pinned, size, hipMemcpyHostToDevice, stream));
            OK(hipStreamSynchronize(stream));
        });
        took((of + " set").c_str(), [&] { OK(hipMemset(device, 1, size)); OK(hipDeviceSynchronize()); });
    }

    // A graph of three kernels in a row, and one of two that run at once.
    hipGraph_t row, pair;
    hipGraphExec_t row_exec, pair_exec;
    OK(hipStreamBeginCapture(stream, hipStreamCaptureModeGlobal));
    for (int i = 0; i < 3; i++) work<<<1, 64, 0, stream>>>(times + i, 1000);
    OK(hipStreamEndCapture(stream, &row));
    OK(hipGraphInstantiate(&row_exec, row, nullptr, nullptr, 0));
    OK(hipGraphCreate(&pair, 0));
    for (int i = 0; i < 2; i++) {
        Times *at = times + 3 + i;
        int turns = 1000;
        void *arguments[] = {&at, &turns};
        hipKernelNodeParams parameters{};
        parameters.func = reinterpret_cast<void *>(work);
        parameters.gridDim = {1, 1, 1};
        parameters.blockDim = {64, 1, 1};
        parameters.kernelParams = arguments;
        hipGraphNode_t node;
        OK(hipGraphAddKernelNode(&node, pair, nullptr, 0, &parameters));
    }
    OK(hipGraphInstantiate(&pair_exec, pair, nullptr, nullptr, 0));
    OK(hipDeviceSynchronize());
    uint64_t called[2];
    called[0] = took("graph of three", [&] { OK(hipGraphLaunch(row_exec, stream)); });
    OK(hipStreamSynchronize(stream));
    called[1] = took("graph of two", [&] { OK(hipGraphLaunch(pair_exec, stream)); });
    OK(hipStreamSynchronize(stream));
    std::vector<Times> all = times.read();
    for (int i = 0; i < 5; i++)
        printf("kernel %d: %lld %lld\n", i, static_cast<long long>(all[i].began - called[i / 3]),
               static_cast<long long>(all[i].ended - called[i / 3]));
    took("two graphs", [&] { for (int i = 0; i < 2; i++) OK(hipGraphLaunch(row_exec, stream)); });
    OK(hipStreamSynchronize(stream));
    took("kernel", [&] { work<<<1, 64, 0, stream>>>(times, 10); });
    OK(hipStreamSynchronize(stream));

    // Host functions, and the CPU time of waiting for them.
    timespec cpu[2];
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu[0]);
    int called_back = 0;
    for (int i = 0; i < 10; i++) {
        work<<<1, 64, 0, stream>>>(times, 10);
        OK(hipStreamAddCallback(stream, [](hipStream_t, hipError_t, void *to) { ++*static_cast<int *>(to); }, &called_back, 0));
        OK(hipStreamSynchronize(stream));
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu[1]);
    CHECK(called_back == 10);
    fprintf(stderr, "%.3f s\n", (cpu[1].tv_sec - cpu[0].tv_sec) + 1e-9 * (cpu[1].tv_nsec - cpu[0].tv_nsec));
}
