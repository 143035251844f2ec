// Multicast objects: multimem instructions on the memory of several devices, compared with what the host works out.
#include "check.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <vector>

#define DRIVER(call)                                                             \
    do {                                                                         \
        CUresult status_ = (call);                                               \
        if (status_ != CUDA_SUCCESS) {                                           \
            printf("%s:%d: %s gives %d\n", __FILE__, __LINE__, #call, status_);  \
            exit(2);                                                             \
        }                                                                        \
    } while (0)

constexpr int kDevices = 3, kThreads = 64;

// Each thread has 64 bytes: 16 words.
struct Cell {
    unsigned word[8];
    float single[4];
    __half2 halves;
    __nv_bfloat162 bfloats;
    unsigned long long wide;
};
struct Seen {
    unsigned sum, all, any, odd, most;
    int least;
    float singles[4], single;
    __half2 halves, halves_twice;
    __nv_bfloat162 bfloats;
    unsigned long long wide;
};

__device__ unsigned bits(const void *value) {
    unsigned found;
    memcpy(&found, value, 4);
    return found;
}

__global__ void reduce(Cell *cells, Seen *seen) {
    Cell *cell = cells + threadIdx.x;
    Seen &to = seen[threadIdx.x];
#define REDUCE(how, type, letter, out, in) \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." how "." type " %0, [%1];" : "=" letter(out) : "l"(in) : "memory")
    REDUCE("add", "u32", "r", to.sum, &cell->word[0]);
    REDUCE("and", "b32", "r", to.all, &cell->word[1]);
    REDUCE("or", "b32", "r", to.any, &cell->word[2]);
    REDUCE("xor", "b32", "r", to.odd, &cell->word[3]);
    REDUCE("max", "u32", "r", to.most, &cell->word[4]);
    REDUCE("min", "s32", "r", to.least, &cell->word[5]);
    REDUCE("add", "f32", "f", to.single, &cell->single[1]);
    REDUCE("add", "u64", "l", to.wide, &cell->wide);
    asm volatile("multimem.ld_reduce.weak.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to.singles[0]), "=f"(to.singles[1]), "=f"(to.singles[2]), "=f"(to.singles[3])
                 : "l"(&cell->single[0]));
    unsigned halves, twice, bfloats;
    REDUCE("max", "f16x2", "r", halves, &cell->halves);
    REDUCE("add.acc::f32", "f16x2", "r", twice, &cell->halves);
    REDUCE("add", "bf16x2", "r", bfloats, &cell->bfloats);
    memcpy(&to.halves, &halves, 4);
    memcpy(&to.halves_twice, &twice, 4);
    memcpy(&to.bfloats, &bfloats, 4);
}

__global__ void change(Cell *cells) {
    Cell *cell = cells + threadIdx.x;
    asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(&cells->word[6]), "r"(threadIdx.x) : "memory");
    asm volatile("multimem.red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(&cell->single[2]), "f"(0.5f) : "memory");
    asm volatile("multimem.st.relaxed.sys.global.b32 [%0], %1;" ::"l"(&cell->word[7]), "r"(threadIdx.x * 3) : "memory");
    asm volatile("multimem.st.weak.global.v2.f32 [%0], {%1, %2};" ::"l"(&cell->single[0]), "f"(1.5f), "f"(threadIdx.x + 0.25f) : "memory");
}

__global__ void touch(Cell *cells) { cells[threadIdx.x].word[0]++; }

int main(int argc, char **argv) {
    CHECK(cudaFree(nullptr));
    int supported = 0, devices = 0;
    DRIVER(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0));
    DRIVER(cuDeviceGetCount(&devices));
    REQUIRE(supported == 1 && devices == kDevices);
    CUmulticastObjectProp wanted = {};
    wanted.numDevices = kDevices;
    size_t unit = 0;
    DRIVER(cuMulticastGetGranularity(&unit, &wanted, CU_MULTICAST_GRANULARITY_MINIMUM));
    wanted.size = 2 * unit;
    CUmemGenericAllocationHandle object, memory[kDevices];
    DRIVER(cuMulticastCreate(&object, &wanted));
    REQUIRE(cuMulticastAddDevice(object, kDevices) == CUDA_ERROR_INVALID_DEVICE);

    // The second half of the object: by handle on two devices, by address on the third.
    CUdeviceptr own[kDevices], team;
    std::vector<CUmemAccessDesc> access(kDevices);
    for (int i = 0; i < kDevices; i++)
        access[i].location = {CU_MEM_LOCATION_TYPE_DEVICE, i}, access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (int i = 0; i < kDevices; i++) {
        CUmemAllocationProp properties = {};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = access[i].location;
        DRIVER(cuMemCreate(&memory[i], unit, &properties, 0));
        DRIVER(cuMemAddressReserve(&own[i], unit, 0, 0, 0));
        DRIVER(cuMemMap(own[i], unit, 0, memory[i], 0));
        DRIVER(cuMemSetAccess(own[i], unit, access.data(), access.size()));
        if (i == 0) REQUIRE(cuMulticastBindMem(object, unit, memory[0], 0, unit, 0) == CUDA_ERROR_INVALID_DEVICE);
    }
    for (int i = 0; i < kDevices; i++) DRIVER(cuMulticastAddDevice(object, i));
    REQUIRE(cuMulticastAddDevice(object, 0) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(cuMulticastBindMem(object, unit, memory[0], 0, unit, 0));
    DRIVER(cuMulticastBindMem(object, unit, memory[1], 0, unit, 0));
    REQUIRE(cuMulticastBindMem(object, unit, memory[1], 0, unit, 0) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(cuMulticastBindMem(object, 2 * unit, memory[2], 0, unit, 0) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(cuMulticastBindMem(memory[0], 0, memory[2], 0, unit, 0) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(cuMulticastBindAddr(object, unit, own[2], unit, 0));
    DRIVER(cuMemAddressReserve(&team, 2 * unit, 0, 0, 0));
    DRIVER(cuMemMap(team, 2 * unit, 0, object, 0));
    DRIVER(cuMemSetAccess(team, 2 * unit, access.data(), access.size()));
    auto *cells = reinterpret_cast<Cell *>(team + unit);

    std::vector<Cell> host[kDevices];
    for (int i = 0; i < kDevices; i++) {
        host[i].resize(kThreads);
        for (int t = 0; t < kThreads; t++) {
            Cell &cell = host[i][t];
            for (int k = 0; k < 8; k++) cell.word[k] = (t * 2654435761u + k * 40503u) ^ (i * 0x9e3779b9u);
            for (int k = 0; k < 4; k++) cell.single[k] = t * 0.5f + k - i * 3.25f;
            cell.word[6] = 10 * i;
            cell.halves = __floats2half2_rn(t + 0.1f * i, 2048.0f + i);
            cell.bfloats = __floats2bfloat162_rn(t - 8.0f * i, 3.0f * i);
            cell.wide = (1ull << 40) * t + i;
        }
        DRIVER(cuMemcpyHtoD(own[i], host[i].data(), kThreads * sizeof(Cell)));
    }
    if (argc > 1) {  // faults
        if (!strcmp(argv[1], "load")) touch<<<1, kThreads>>>(cells);
        if (!strcmp(argv[1], "unbound")) change<<<1, kThreads>>>(reinterpret_cast<Cell *>(team));
        if (!strcmp(argv[1], "own")) change<<<1, kThreads>>>(reinterpret_cast<Cell *>(own[0]));
        printf("sync: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
        return 0;
    }
    Seen *seen;
    CHECK(cudaMallocManaged(&seen, kThreads * sizeof(Seen)));
    reduce<<<1, kThreads>>>(cells, seen);
    CHECK(cudaDeviceSynchronize());
    for (int t = 0; t < kThreads; t++) {
        const Cell &a = host[0][t], &b = host[1][t], &c = host[2][t];
        const Seen &s = seen[t];
        REQUIRE(s.sum == a.word[0] + b.word[0] + c.word[0]);
        REQUIRE(s.all == (a.word[1] & b.word[1] & c.word[1]));
        REQUIRE(s.any == (a.word[2] | b.word[2] | c.word[2]));
        REQUIRE(s.odd == (a.word[3] ^ b.word[3] ^ c.word[3]));
        REQUIRE(s.most == std::max({a.word[4], b.word[4], c.word[4]}));
        REQUIRE(s.least == std::min({static_cast<int>(a.word[5]), static_cast<int>(b.word[5]), static_cast<int>(c.word[5])}));
        REQUIRE(s.wide == a.wide + b.wide + c.wide);
        REQUIRE(s.single == a.single[1] + b.single[1] + c.single[1]);
        for (int k = 0; k < 4; k++) REQUIRE(s.singles[k] == a.single[k] + b.single[k] + c.single[k]);
        REQUIRE(__low2float(s.halves) == __low2float(c.halves) && __high2float(s.halves) == 2050.0f);
        const float low = __low2float(a.halves) + __low2float(b.halves) + __low2float(c.halves);
        const float high = __high2float(a.halves) + __high2float(b.halves) + __high2float(c.halves);
        REQUIRE(__low2float(s.halves_twice) == __half2float(__float2half(low)));
        REQUIRE(__high2float(s.halves_twice) == __half2float(__float2half(high)));
        const float exact = __low2float(a.bfloats) + __low2float(b.bfloats) + __low2float(c.bfloats);
        REQUIRE(__low2float(s.bfloats) == exact && __high2float(s.bfloats) == 9.0f);
    }
    change<<<1, kThreads>>>(cells);
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < kDevices; i++) {
        std::vector<Cell> now(kThreads);
        DRIVER(cuMemcpyDtoH(now.data(), own[i], kThreads * sizeof(Cell)));
        REQUIRE(now[0].word[6] == 10u * i + kThreads * (kThreads - 1) / 2);
        for (int t = 0; t < kThreads; t++) {
            REQUIRE(now[t].word[7] == 3u * t && now[t].single[2] == host[i][t].single[2] + 0.5f);
            REQUIRE(now[t].single[0] == 1.5f && now[t].single[1] == t + 0.25f);
            REQUIRE(now[t].word[5] == host[i][t].word[5]);
        }
    }
    // Without one device's memory, the address has none.
    DRIVER(cuMulticastUnbind(object, 1, unit, unit));
    REQUIRE(cuMulticastUnbind(object, 1, unit, unit) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(cuMemUnmap(team, 2 * unit));
    DRIVER(cuMemRelease(object));
    REQUIRE(cuMulticastAddDevice(object, 0) == CUDA_ERROR_INVALID_VALUE);
    puts("multicast ok");
}
