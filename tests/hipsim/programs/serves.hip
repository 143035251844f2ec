// serves [late]: prints "ready", then does what the lines of its standard input say, and answers each with "done". With "late", it calls
// no function of HIP before the first line.
//   rounds N      N times: two kernels, hipStreamSynchronize, a copy to the host, a pause of a millisecond
//   threads T N   T threads launch N kernels each, on streams of their own
//   long N        one kernel of N steps, then hipStreamSynchronize
//   module F N    loads the code object F, launches its kernel "store" N times, checks the result, unloads it
//   fail          calls that fail
//   leave         ends by _exit, without an answer
#include "check.h"

#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>

__global__ void work(float *x, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < steps; k++) x[i] = x[i] * 0.5f + 1;
}

__global__ void tiny(float *x) { x[threadIdx.x] += 1; }

int main(int count, char **) {
    if (count > 1) {
        puts("loaded");
        fflush(stdout);
        getchar();
    }
    OK(hipSetDeviceFlags(hipDeviceScheduleBlockingSync));
    Buffer<float> data(std::vector<float>(4096));
    hipStream_t stream;
    OK(hipStreamCreate(&stream));
    std::vector<float> host(4096);
    puts("ready");
    fflush(stdout);
    char line[8192];
    while (fgets(line, sizeof line, stdin)) {
        int n, threads;
        if (sscanf(line, "rounds %d", &n) == 1) {
            for (int k = 0; k < n; k++) {
                work<<<16, 256, 0, stream>>>(data, 2);
                tiny<<<1, 64, 0, stream>>>(data);
                OK(hipStreamSynchronize(stream));
                OK(hipMemcpy(host.data(), data, sizeof(float) * 4096, hipMemcpyDeviceToHost));
                usleep(1000);
            }
        } else if (sscanf(line, "threads %d %d", &threads, &n) == 2) {
            std::vector<std::thread> all;
            for (int t = 0; t < threads; t++)
                all.emplace_back([&, n] {
                    hipStream_t own;
                    OK(hipStreamCreate(&own));
                    for (int k = 0; k < n; k++) tiny<<<1, 64, 0, own>>>(data);
                    OK(hipStreamSynchronize(own));
                    OK(hipStreamDestroy(own));
                });
            for (std::thread &thread : all) thread.join();
        } else if (char *last = strrchr(line, ' '); last && strncmp(line, "module ", 7) == 0) {
            const char *file = line + 7;  // it may contain spaces
            *last = 0;
            n = atoi(last + 1);
            hipModule_t module;
            hipFunction_t function;
            OK(hipModuleLoad(&module, file));
            OK(hipModuleGetFunction(&function, module, "store"));
            Buffer<int> stored(64);
            int *at = stored, value = 0;
            void *arguments[] = {&at, &value};
            for (value = 1; value <= n; value++)
                OK(hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, stream, arguments, nullptr));
            OK(hipStreamSynchronize(stream));
            for (int i = 0; i < 64; i++) CHECK(stored.read()[i] == n + i);
            OK(hipModuleUnload(module));
        } else if (sscanf(line, "long %d", &n) == 1) {
            work<<<16, 256, 0, stream>>>(data, n);
            OK(hipStreamSynchronize(stream));
        } else if (!strcmp(line, "leave\n")) {
            _exit(0);
        } else {
            void *memory = nullptr;
            CHECK(hipMalloc(&memory, size_t{1} << 50) == hipErrorOutOfMemory);
            CHECK(hipMemcpy(nullptr, data, 64, hipMemcpyDeviceToHost) == hipErrorInvalidValue);
            work<<<1, 4096, 0, stream>>>(data, 1);  // more threads than a block may have
            CHECK(hipGetLastError() != hipSuccess);
        }
        puts("done");
        fflush(stdout);
    }
}
