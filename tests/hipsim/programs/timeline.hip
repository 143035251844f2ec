// timeline: kernels in several streams, and copies, events, queries and host functions between them. Prints when each kernel began and
// ended by its own clock, in ns after the first one began. On the virtual clock, two runs print the same.
#include "check.h"

#include <atomic>
#include <thread>

struct Times {
    uint64_t began, ended;
};

__global__ void work(Times *times, int turns) {
    times->began = clock64();
    for (int i = 0; i < turns; i++) asm volatile("s_nop 0");
    times->ended = clock64();
}

int main() {
    constexpr int kMost = 256;
    const size_t bytes = 1 << 20;
    Buffer<Times> times(kMost);
    Buffer<char> data(bytes);
    char *host;
    OK(hipHostMalloc(reinterpret_cast<void **>(&host), bytes));
    hipStream_t a, b, c;
    for (hipStream_t *stream : {&a, &b, &c}) OK(hipStreamCreateWithFlags(stream, hipStreamNonBlocking));
    hipEvent_t event, second;
    OK(hipEventCreate(&event));
    OK(hipEventCreateWithFlags(&second, hipEventDisableTiming));
    int at = 0;
    std::vector<std::string> names;
    auto launch = [&](const char *name, hipStream_t stream, int turns) {
        work<<<1, 64, 0, stream>>>(times + at++, turns);
        names.push_back(name);
    };

    launch("first", a, 10);
    OK(hipDeviceSynchronize());
    // Both streams work at once; what the host waits for is the shorter one.
    launch("idle a", a, 1000);
    launch("idle b", b, 20000);
    OK(hipStreamSynchronize(a));
    launch("after a", a, 100);
    launch("behind b", b, 100);
    OK(hipStreamSynchronize(b));
    // Across streams: an event that is long done when the wait is submitted, and one that is not.
    launch("record", a, 5000);
    OK(hipEventRecord(event, a));
    launch("more", a, 5000);
    OK(hipStreamWaitEvent(b, event, 0));
    launch("waits", b, 10);
    OK(hipEventRecord(second, b));
    OK(hipStreamWaitEvent(c, second, 0));
    launch("waits too", c, 10);
    OK(hipEventSynchronize(event));
    launch("after the event", c, 10);
    OK(hipDeviceSynchronize());
    // Copies, and kernels behind them.
    OK(hipMemcpyAsync(data, host, bytes, hipMemcpyHostToDevice, a));
    launch("copied", a, 10);
    OK(hipMemcpyAsync(host, data, bytes / 2, hipMemcpyDeviceToHost, b));
    launch("copied back", b, 10);
    launch("beside", c, 10);
    OK(hipMemsetAsync(data, 0, bytes, c));
    launch("set", c, 10);
    OK(hipDeviceSynchronize());
    OK(hipMemcpy(host, data, bytes, hipMemcpyDeviceToHost));
    launch("waited for the copy", a, 10);
    OK(hipDeviceSynchronize());
    // Many events, and more of them at a time than HIP has signals in its pool.
    for (int i = 0; i < 50; i++) {
        launch("many", i % 2 ? a : b, 300);
        OK(hipEventRecord(i % 3 ? event : second, i % 2 ? a : b));
        if (i % 5 == 0) OK(hipStreamWaitEvent(c, event, 0));
        if (i % 7 == 0) launch("one of c", c, 500);
    }
    OK(hipStreamSynchronize(c));
    launch("after many", c, 10);
    OK(hipDeviceSynchronize());
    for (int i = 0; i < 70; i++) {
        launch("deep", a, 3000);
        OK(hipEventRecord(event, a));
    }
    launch("beside deep", b, 10);
    OK(hipStreamSynchronize(a));
    // A query that is repeated.
    launch("queried", a, 3000);
    OK(hipEventRecord(event, a));
    while (hipEventQuery(event) == hipErrorNotReady) std::this_thread::yield();
    launch("after the query", b, 10);
    OK(hipDeviceSynchronize());
    // Host functions.
    std::atomic<int> called{0};
    launch("before the call", a, 2000);
    OK(hipStreamAddCallback(a, [](hipStream_t, hipError_t, void *to) { ++*static_cast<std::atomic<int> *>(to); }, &called, 0));
    launch("behind the call", a, 10);
    launch("beside the call", b, 10);
    OK(hipStreamSynchronize(a));
    launch("after the call", b, 10);
    OK(hipDeviceSynchronize());
    CHECK(called == 1);

    std::vector<Times> all = times.read();
    for (int i = 0; i < at; i++)
        printf("%s: %lld %lld\n", names[i].c_str(), static_cast<long long>(all[i].began - all[0].began),
               static_cast<long long>(all[i].ended - all[0].began));
}
