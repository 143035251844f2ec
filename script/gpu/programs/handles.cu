// handles [CUPTI]      which handle the CUDA runtime passes to the driver's launch functions
//
// CUPTI (the path of its library) tells the parameters of the driver's calls. Prints a line for each way to launch: "WAY CALL HANDLE",
// HANDLE being function (what cudaGetFuncBySymbol gives), kernel (what cudaGetKernel gives) or other.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "../../../examples/check.h"

__global__ void launched(int *out) {
    if (out) out[0] = 1;
}

namespace {

// As CUPTI's documentation has it, so that its headers are not needed.
struct CallbackData {
    int site;  // 0: the call begins
    const char *name;
    const void *parameters;  // a struct of the function's parameters
};
using Callback = void (*)(void *, int domain, uint32_t id, const CallbackData *);
constexpr int DRIVER_API = 1;

cudaFunction_t function;
cudaKernel_t kernel;
std::string way;

void say(const char *call, const void *handle) {
    const char *what = handle == (const void *)function ? "function" : handle == (const void *)kernel ? "kernel" : "other";
    std::printf("%s %s %s\n", way.c_str(), call, what);
}

void called(void *, int, uint32_t, const CallbackData *call) {
    if (call->site || std::strncmp(call->name, "cuLaunch", 8)) return;
    bool extended = std::strncmp(call->name, "cuLaunchKernelEx", 16) == 0;  // the configuration is the first parameter
    const void *handle;
    std::memcpy(&handle, static_cast<const char *>(call->parameters) + (extended ? sizeof(void *) : 0), sizeof handle);
    say(call->name, handle);
}

}  // namespace

int main(int argc, char **argv) {
    CHECK(cudaFree(0));
    CHECK(cudaGetFuncBySymbol(&function, (const void *)launched));
    CHECK(cudaGetKernel(&kernel, (const void *)launched));
    std::printf("handles %s\n", (const void *)function == (const void *)kernel ? "equal" : "different");
    void *cupti = argc > 1 ? dlopen(argv[1], RTLD_NOW) : nullptr;
    if (!cupti) {
        std::fprintf(stderr, "handles: no CUPTI: %s\n", argc > 1 ? dlerror() : "none given");
        return 77;
    }
    auto subscribe = (int (*)(void **, Callback, void *))dlsym(cupti, "cuptiSubscribe");
    auto enable = (int (*)(uint32_t, void *, int))dlsym(cupti, "cuptiEnableDomain");
    void *subscriber;
    if (!subscribe || !enable || subscribe(&subscriber, called, nullptr) || enable(1, subscriber, DRIVER_API)) {
        std::fprintf(stderr, "handles: CUPTI refuses callbacks\n");
        return 77;
    }
    int *out = nullptr;
    void *arguments[] = {&out};
    way = "<<<>>>";
    launched<<<1, 1>>>(out);
    CHECK(cudaGetLastError());
    way = "cudaLaunchKernel";
    CHECK(cudaLaunchKernel((const void *)launched, 1, 1, arguments, 0, nullptr));
    way = "cudaLaunchKernel(cudaKernel_t)";
    if (cudaLaunchKernel((const void *)kernel, 1, 1, arguments, 0, nullptr)) cudaGetLastError();  // not every runtime takes it
    way = "cudaLaunchKernelExC";
    cudaLaunchConfig_t configuration = {};
    configuration.gridDim = configuration.blockDim = 1;
    CHECK(cudaLaunchKernelExC(&configuration, (const void *)launched, arguments));
    way = "cudaLaunchCooperativeKernel";
    CHECK(cudaLaunchCooperativeKernel((const void *)launched, 1, 1, arguments, 0, nullptr));
    way = "captured";
    cudaStream_t stream;
    cudaGraph_t graph;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launched<<<1, 1, 0, stream>>>(out);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaDeviceSynchronize());
    return 0;
}
