// Can a running program be patched by NVIDIA's Compute Sanitizer API, and left again? late LIBRARY MODULE PATCHES
//
// LIBRARY: libsanitizer-public.so; MODULE: an image with a kernel `triad` (late.ptx); PATCHES: what probes.py makes. The phases: alone,
// subscribed and patched late, unpatched, patched again, unsubscribed. In each, the kernel is launched 100 times in a stream, and 100
// times by a graph that was instantiated before the first patch. Prints a JSON object for each: what the API returned, the µs of a
// launch, the counted exits, the sum of the results, which must stay the same. The program uses only the driver.
#include <cuda.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#define CHECK(x)                                                                         \
    do {                                                                                 \
        if (CUresult result_ = (x)) return std::printf("%s: %d\n", #x, int(result_)), 1; \
    } while (0)

namespace {

constexpr uint32_t BLOCK_EXIT = 2;  // SANITIZER_INSTRUCTION_BLOCK_EXIT
constexpr int LAUNCHES = 100, ELEMENTS = 1 << 16, THREADS = 256;

void *library;

template <typename... Parameters>
int call(const char *name, Parameters... parameters) {
    auto function = reinterpret_cast<int (*)(Parameters...)>(dlsym(library, name));
    return function ? function(parameters...) : -1;
}

std::vector<char> read(const char *path) {
    std::ifstream in(path, std::ios::binary);
    std::vector<char> found((std::istreambuf_iterator<char>(in)), {});
    found.push_back(0);  // PTX ends with a null
    return found;
}

void ignore(void *, int, uint32_t, const void *) {}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 4) return std::puts("usage: late LIBRARY MODULE PATCHES"), 2;
    const std::vector<char> image = read(argv[2]), patches = read(argv[3]);
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    CUstream stream;
    CUdeviceptr a, count;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, image.data()));
    CHECK(cuModuleGetFunction(&kernel, module, "triad"));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    int n = ELEMENTS;
    CHECK(cuMemAlloc(&count, 16));
    CHECK(cuMemAlloc(&a, 3 * 4 * ELEMENTS));
    CHECK(cuMemsetD32(a, 0x3f800000, 3 * ELEMENTS));
    CUdeviceptr b = a + 4 * ELEMENTS, c = b + 4 * ELEMENTS;
    void *arguments[] = {&a, &b, &c, &n};
    const auto launch = [&] {
        return cuLaunchKernel(kernel, ELEMENTS / THREADS, 1, 1, THREADS, 1, 1, 0, stream, arguments, nullptr);
    };
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(launch());
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiate(&exec, graph, 0));
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return std::puts(dlerror()), 1;
    void *subscriber = nullptr;
    const auto patch = [&](bool first) {
        int result = 0;
        if (first) result = call("sanitizerSubscribe", &subscriber, &ignore, static_cast<void *>(nullptr));
        if (!result && first)
            result = call("sanitizerAddPatches", static_cast<const void *>(patches.data()), context);
        if (!result) result = call("sanitizerPatchInstructions", BLOCK_EXIT, module, "countExit");
        if (!result) result = call("sanitizerPatchModule", module);
        if (!result) result = call("sanitizerSetCallbackData", kernel, reinterpret_cast<const void *>(count));
        return result;
    };
    for (const std::string phase : {"alone", "patched", "unpatched", "patched again", "unsubscribed"}) {
        int result = 0;
        if (phase == "patched" || phase == "patched again") result = patch(phase == "patched");
        if (phase == "unpatched" || phase == "unsubscribed") result = call("sanitizerUnpatchModule", module);
        if (!result && phase == "unsubscribed") result = call("sanitizerUnsubscribe", subscriber);
        for (const bool by_graph : {false, true}) {
            CHECK(cuMemsetD32(count, 0, 4));
            CHECK(cuMemsetD32(c, 0, ELEMENTS));
            CHECK(cuCtxSynchronize());
            const auto before = std::chrono::steady_clock::now();
            for (int i = 0; i < LAUNCHES; i++) CHECK(by_graph ? cuGraphLaunch(exec, stream) : launch());
            CHECK(cuStreamSynchronize(stream));
            const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - before;
            std::vector<float> out(ELEMENTS);
            uint64_t exits = 0;
            double sum = 0;
            CHECK(cuMemcpyDtoH(out.data(), c, 4 * ELEMENTS));
            CHECK(cuMemcpyDtoH(&exits, count, sizeof exits));
            for (float x : out) sum += x;
            std::printf(
                "{\"phase\":\"%s\",\"graph\":%s,\"result\":%d,\"us\":%.2f,\"exits\":%llu,\"sum\":%.1f}\n",
                phase.c_str(), by_graph ? "true" : "false", result, took.count() / LAUNCHES,
                static_cast<unsigned long long>(exits), sum);
            std::fflush(stdout);
        }
    }
    return 0;
}
