// HIPRTC: kernels that the program compiles while it runs, with options, headers, names of templates and a log of errors.
#include "check.h"
#include <hip/hiprtc.h>

#define RTC(call) CHECK((call) == HIPRTC_SUCCESS)

static const char *const SOURCE = R"(
#include "scale.h"
extern "C" __global__ void scale(const float *in, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = SCALE * in[i] + offset;
}
template <typename T, int size>
__global__ void reversed(const T *in, T *out) {
    __shared__ T tile[size];
    tile[threadIdx.x] = in[blockIdx.x * size + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * size + threadIdx.x] = tile[size - 1 - threadIdx.x];
}
__global__ void votes(unsigned long long *out) {
    unsigned long long odd = __ballot(threadIdx.x & 1);
    if (threadIdx.x == 0) out[blockIdx.x] = odd + atomicAdd(&counter, 1u) * 0;
}
)";
static const char *const HEADER = "constexpr float offset = 0.25f;\n__device__ unsigned counter = 7;\n";

struct Compiled {
    hiprtcProgram program;
    hiprtcResult result;
    Compiled(const char *source, std::vector<const char *> options, std::vector<const char *> names) {
        const char *header = HEADER, *name = "scale.h";
        RTC(hiprtcCreateProgram(&program, source, "kernels.hip", 1, &header, &name));
        for (const char *one : names) RTC(hiprtcAddNameExpression(program, one));
        result = hiprtcCompileProgram(program, int(options.size()), options.data());
    }
    ~Compiled() { RTC(hiprtcDestroyProgram(&program)); }
    std::string log() const {
        size_t size;
        RTC(hiprtcGetProgramLogSize(program, &size));
        std::string text(size, ' ');
        if (size > 0) RTC(hiprtcGetProgramLog(program, text.data()));
        return text;
    }
    std::vector<char> code() const {
        size_t size;
        RTC(hiprtcGetCodeSize(program, &size));
        std::vector<char> bytes(size);
        RTC(hiprtcGetCode(program, bytes.data()));
        return bytes;
    }
    hipFunction_t function(hipModule_t module, const char *expression) const {
        const char *lowered = expression;
        if (strcmp(expression, "scale") != 0) RTC(hiprtcGetLoweredName(program, expression, &lowered));
        hipFunction_t found;
        OK(hipModuleGetFunction(&found, module, lowered));
        return found;
    }
};

template <typename... Values>
static void launch(hipFunction_t function, int blocks, int threads, Values... values) {
    void *arguments[] = {&values...};
    OK(hipModuleLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, nullptr, arguments, nullptr));
    OK(hipDeviceSynchronize());
}

int main() {
    Compiled wrong("__global__ void bad() { undeclared = 1; }", {}, {});
    CHECK(wrong.result == HIPRTC_ERROR_COMPILATION);
    CHECK(wrong.log().find("undeclared identifier 'undeclared'") != std::string::npos);
    puts("errors");

    hipDeviceProp_t properties;
    OK(hipGetDeviceProperties(&properties, 0));
    std::string architecture = std::string("--gpu-architecture=") + properties.gcnArchName;
    architecture = architecture.substr(0, architecture.find(':'));
    const char *reversed = "reversed<double, 128>";
    Compiled good(SOURCE, {architecture.c_str(), "-DSCALE=3.0f"}, {reversed, "votes", "&counter"});
    if (good.result != HIPRTC_SUCCESS) fputs(good.log().c_str(), stderr);
    CHECK(good.result == HIPRTC_SUCCESS);
    std::vector<char> code = good.code();
    hipModule_t module;
    OK(hipModuleLoadData(&module, code.data()));

    const int n = 1000;
    std::vector<float> values(n);
    for (int i = 0; i < n; i++) values[i] = i * 0.5f;
    Buffer<float> in(values), out(n);
    launch(good.function(module, "scale"), 4, 256, in.data, out.data, n);
    std::vector<float> scaled = out.read();
    for (int i = 0; i < n; i++) CHECK(scaled[i] == 3 * values[i] + 0.25f);
    puts("kernel");

    std::vector<double> doubles(512);
    for (int i = 0; i < 512; i++) doubles[i] = i / 7.0;
    Buffer<double> from(doubles), to(512);
    launch(good.function(module, reversed), 4, 128, from.data, to.data);
    std::vector<double> turned = to.read();
    for (int i = 0; i < 512; i++) CHECK(turned[i] == doubles[i / 128 * 128 + 127 - i % 128]);
    puts("template");

    Buffer<unsigned long long> ballots(5);
    launch(good.function(module, "votes"), 5, 64, ballots.data);
    for (unsigned long long ballot : ballots.read())
        CHECK(ballot == (~0ull >> (64 - properties.warpSize) & 0xAAAAAAAAAAAAAAAA));
    const char *name;
    RTC(hiprtcGetLoweredName(good.program, "&counter", &name));
    hipDeviceptr_t place;
    size_t bytes;
    OK(hipModuleGetGlobal(&place, &bytes, module, name));
    unsigned counter;
    OK(hipMemcpyDtoH(&counter, place, sizeof counter));
    CHECK(bytes == sizeof counter && counter == 7 + 5);
    puts("variable");

    OK(hipModuleUnload(module));
}
