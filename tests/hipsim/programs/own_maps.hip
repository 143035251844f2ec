// A program whose kernels keep maps of their own. It counts numbers from 0 to 999 on each GPU.
//   own_maps [early | again | forks | thread | damaged | module FILE]
#include <gpubpf_maps.h>

#include <sys/wait.h>

#include <cstdio>
#include <thread>
#include <vector>

struct Pair {
    int a, b;
};
struct alignas(32) Four {
    double x, y, z, w;
};
GPUBPF_ARRAY(paths, unsigned, 3);
GPUBPF_ARRAY(sums, double, 2);
GPUBPF_ARRAY(pairs, Pair, 2);
GPUBPF_HASH(keys, int, float, 64);
GPUBPF_HASH(few, unsigned long long, unsigned, 4);
GPUBPF_HASH(wide, short, Four, 3);
GPUBPF_HISTOGRAM(lengths);

#ifdef DAMAGED  // maps that are not what their descriptions say
#define MAP(name, size, ...)                                              \
    __device__ char name[size] __asm__("gpubpf_map." #name);              \
    extern "C" __device__ __attribute__((used)) const gpubpf::Description \
        of_##name __asm__("gpubpf_of." #name) = {__VA_ARGS__}
using gpubpf::Format;
using gpubpf::Kind;
MAP(other, 8, gpubpf::kMagic, 99, Kind::Array, Format::Unsigned, Format::Unsigned, 8, 1, 8, 0);
MAP(longer, 8, gpubpf::kMagic, 1, Kind::Array, Format::Unsigned, Format::Unsigned, 8, 2, 16, 0);
MAP(within, 64, gpubpf::kMagic, 1, Kind::Hash, Format::Unsigned, Format::Unsigned, 8, 1, 64, 60);
MAP(wraps, 64, gpubpf::kMagic, 1, Kind::Hash, Format::Unsigned, Format::Bytes, 1u << 27, 1u << 27, 64, 24);
MAP(huge, (256 << 20) + 8, gpubpf::kMagic, 1, Kind::Array, Format::Unsigned, Format::Unsigned, 8, (32 << 20) + 1,
    (256 << 20) + 8, 0);
MAP(odd, 3, gpubpf::kMagic, 1, Kind::Array, Format::Unsigned, Format::Unsigned, 3, 1, 3, 0);
MAP(unknown, 8, gpubpf::kMagic, 1, Kind(9), Format::Unsigned, Format::Unsigned, 8, 1, 8, 0);
extern "C" __device__ __attribute__((used)) const int short_of __asm__("gpubpf_of.cut") = 1;
__device__ int cut __asm__("gpubpf_map.cut");
__global__ void touch() { other[0] = longer[0] = within[0] = wraps[0] = huge[0] = odd[0] = unknown[0] = cut = 1; }
#endif

extern "C" __global__ void work(int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    paths.increment(i % 3);
    paths.increment(3);  // there is none
    if (double *sum = sums.lookup(1)) atomicAdd(sum, 0.5);
    if (i == 0) pairs.lookup(1)->b = 7;
    keys.increment(i % 5 - 2, 1.5f);
    few.increment(static_cast<unsigned long long>(i % 6) - 1);
    if (Four *value = wide.lookup_or_init(static_cast<short>(-(i % 2)))) atomicAdd(&value->w, 1.0);
    if (wide.lookup(7)) paths.increment(0, 1000);
    lengths.increment(i);
}

int main(int argc, char **argv) {
    const std::string how = argc > 1 ? argv[1] : "";
    if (how == "early") printf("early %zu\n", gpubpf::write_maps());
    int devices = 0;
    if (hipGetDeviceCount(&devices) != hipSuccess) return 1;
    for (int device = 0; device < devices && how != "module"; ++device) {
        (void)hipSetDevice(device);
        work<<<8, 128>>>(1000);
    }
    if (how == "module") {
        hipModule_t module;
        hipFunction_t function;
        int n = 1000;
        void *arguments[] = {&n};
        if (hipModuleLoad(&module, argv[2]) || hipModuleGetFunction(&function, module, "work") ||
            hipModuleLaunchKernel(function, 8, 1, 1, 128, 1, 1, 0, nullptr, arguments, nullptr))
            return 1;
    }
    if (how == "again") {
        printf("again %zu\n", gpubpf::write_maps());
        work<<<8, 128>>>(1000);
    }
    if (how == "forks") {
        (void)hipDeviceSynchronize();
        const pid_t child = fork();
        if (child == 0) exit(0);
        int status = 0;
        waitpid(child, &status, 0);
        printf("child %d\n", status);
    }
    puts("done");
    fflush(stdout);
    if (how == "thread") std::thread([] { exit(0); }).join();
    return 0;
}
