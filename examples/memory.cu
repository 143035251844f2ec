// memory [KERNEL…]      default: all of them, once each; grids of 1,024 threads, 32 warps, unless said
//
// Kernels that touch memory in one known way each.
//
// Known answers (memtrace), for each request of 32 lanes: sectors / least possible = ratio, pattern.
// Where nothing is said of a kernel's other accesses, they are unit: 4 / 4 = 1 (of 4 bytes), and shared memory is read 1-way.
//     stride1 … stride32   load:  4, 8, 32, 32 / 4 = 1, 2, 8, 8, "stride 2", "stride 8", "stride 32" (stride1: unit)
//     misaligned           load:  5 / 4 = 1.25, unit: one element off
//     broadcast            load:  1 / 4 = 0.25, broadcast
//     readOnly             load:  4 / 4, unit, by ld.global.nc
//     wide2, wide4         load and store: 8 / 8 and 16 / 16, unit, 8 and 16 bytes a lane
//     halfWarp, predicated load and store: 2 / 2, unit, 16 lanes: those of the upper half do not take the branch, or their predicate is false
//     gather               index: unit; load: 32 / 4 = 8, gather
//     transposeNaive       64 x 64; store: 32 / 4 = 8, stride 64
//     transposeShared      64 x 64; store: 4 / 4; load from shared memory 32-way, stride 32
//     transposePadded      64 x 64; store: 4 / 4; load from shared memory 1-way, stride 33
//     histogramGlobal      atomic: 1 / 4, gather over 8 bins of 4 bytes: 4 lanes on each
//     histogramShared      atomic: 4 bins in shared memory, 1-way, 8 lanes on each; then 4 lanes of each block add to global memory
//     generic              load from shared memory through a generic address: 2-way, stride 2
//     asynchronous         from compute capability 8.0 on: cp.async of 4 bytes, read in global memory stride 2, written to shared memory 1-way
//     localArray           16 elements in local memory: 32 lanes at one offset are 128 bytes side by side, 4 / 4
//     localScattered       each lane at an offset of its own, by turns of 16: 32 / 4 = 8
//     unused               reads the first half of an allocation and writes to another of the same size; 4,096 bytes of each are never touched
// The bytes of `in` that are never read: stride1 0, stride2 4,096, stride8 28,672, stride32 126,976; misaligned 4 (the first);
// broadcast 0 (there is one element).
#include <cstring>
#include <vector>

#include "check.h"

constexpr int N = 1024, BLOCK = 256, SIDE = 64, TILE = 32, LOCAL = 16;

__device__ int mine() { return blockIdx.x * blockDim.x + threadIdx.x; }

// --- global memory ---

__global__ void stride1(const int *in, int *out) { out[mine()] = in[mine()]; }
__global__ void stride2(const int *in, int *out) { out[mine()] = in[2 * mine()]; }
__global__ void stride8(const int *in, int *out) { out[mine()] = in[8 * mine()]; }
__global__ void stride32(const int *in, int *out) { out[mine()] = in[32 * mine()]; }
__global__ void misaligned(const int *in, int *out) { out[mine()] = in[mine() + 1]; }
__global__ void broadcast(const int *in, int *out) { out[mine()] = in[0]; }
__global__ void readOnly(const int *in, int *out) { out[mine()] = __ldg(in + mine()); }
__global__ void wide2(const int2 *in, int2 *out) { out[mine()] = in[mine()]; }
__global__ void wide4(const int4 *in, int4 *out) { out[mine()] = in[mine()]; }
__global__ void unused(const int *in, int *out) { out[mine()] = in[mine()]; }

__global__ void halfWarp(const int *in, int *out) {
    if (threadIdx.x % 32 < 16) out[mine()] = in[mine()];
}

__global__ void predicated(const int *in, int *out) {
    asm volatile("{ .reg .pred low; .reg .b32 value;\n"
                 "  setp.lt.u32 low, %0, 16;\n"
                 "  @low ld.global.b32 value, [%1];\n"
                 "  @low st.global.b32 [%2], value; }"
                 :: "r"(threadIdx.x % 32), "l"(in + mine()), "l"(out + mine()) : "memory");
}

__global__ void gather(const int *in, int *out, const int *index) { out[mine()] = in[index[mine()]]; }

// --- transposes: a block of 32 x 32 threads for each tile ---

__global__ void transposeNaive(const int *in, int *out) {
    int x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    out[x * SIDE + y] = in[y * SIDE + x];
}

template <int WIDTH> __device__ void throughShared(const int *in, int *out) {
    __shared__ int tile[TILE][WIDTH];
    int x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    tile[threadIdx.y][threadIdx.x] = in[y * SIDE + x];
    __syncthreads();
    x = blockIdx.y * TILE + threadIdx.x, y = blockIdx.x * TILE + threadIdx.y;
    out[y * SIDE + x] = tile[threadIdx.x][threadIdx.y];
}

__global__ void transposeShared(const int *in, int *out) { throughShared<TILE>(in, out); }
__global__ void transposePadded(const int *in, int *out) { throughShared<TILE + 1>(in, out); }

// --- atomics ---

__global__ void histogramGlobal(const int *in, int *out) { atomicAdd(out + in[mine()] % 8, 1); }

__global__ void histogramShared(const int *in, int *out) {
    __shared__ int bins[4];
    if (threadIdx.x < 4) bins[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(bins + in[mine()] % 4, 1);
    __syncthreads();
    if (threadIdx.x < 4) atomicAdd(out + threadIdx.x, bins[threadIdx.x]);
}

// --- shared and local memory ---

__global__ void generic(const int *in, int *out) {
    __shared__ int values[2 * BLOCK];
    values[threadIdx.x] = in[mine()];
    values[BLOCK + threadIdx.x] = -in[mine()];
    __syncthreads();
    int value;
    asm volatile("ld.b32 %0, [%1];" : "=r"(value) : "l"(values + 2 * threadIdx.x) : "memory");
    out[mine()] = value;
}

__global__ void asynchronous(const int *in, int *out) {
    __shared__ int values[BLOCK];
#if __CUDA_ARCH__ >= 800
    unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(values + threadIdx.x));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n"
                 "cp.async.wait_all;" :: "r"(to), "l"(in + 2 * mine()) : "memory");
#else
    values[threadIdx.x] = in[2 * mine()];
#endif
    __syncthreads();
    out[mine()] = values[threadIdx.x];
}

// Elements of a local array from `first` on, around; the value that comes out is the one that went in.
__device__ int throughLocal(int first, int value) {
    int values[LOCAL];
#pragma unroll 1
    for (int i = 0; i < LOCAL; i++) values[(first + i) % LOCAL] = value + i;
    return values[first % LOCAL];
}

__global__ void localArray(const int *in, int *out) { out[mine()] = throughLocal(blockIdx.x, in[mine()]); }
__global__ void localScattered(const int *in, int *out) { out[mine()] = throughLocal(threadIdx.x, in[mine()]); }

// --- on the host ---

// Elements of `in`, of `out`; what `in` holds by its index, what `out` must hold by its.
struct Case {
    const char *name;
    long ins, outs;
    int (*in)(int);
    int (*right)(int);
    void (*launch)(const int *in, int *out, const int *index);
};

int same(int i) { return i; }
int upper(int i) { return i % 32 < 16 ? i : 0; }
int reversed(int i) {  // of 10 bits
    int r = 0;
    for (int bit = 0; bit < 10; bit++) r |= (i >> bit & 1) << (9 - bit);
    return r;
}
int transposed(int i) { return i % SIDE * SIDE + i / SIDE; }
int everySecond(int i) {  // of a block's 256 values and the same values negative behind them
    int block = i / BLOCK * BLOCK, at = 2 * (i % BLOCK);
    return at < BLOCK ? block + at : -(block + at - BLOCK);
}

#define LINEAR(kernel) [](const int *in, int *out, const int *) { kernel<<<N / BLOCK, BLOCK>>>(in, out); }
#define TILED(kernel) [](const int *in, int *out, const int *) { kernel<<<dim3(2, 2), dim3(TILE, TILE)>>>(in, out); }

const Case CASES[] = {
    {"stride1", N, N, same, same, LINEAR(stride1)},
    {"stride2", 2 * N, N, same, [](int i) { return 2 * i; }, LINEAR(stride2)},
    {"stride8", 8 * N, N, same, [](int i) { return 8 * i; }, LINEAR(stride8)},
    {"stride32", 32 * N, N, same, [](int i) { return 32 * i; }, LINEAR(stride32)},
    {"misaligned", N + 1, N, same, [](int i) { return i + 1; }, LINEAR(misaligned)},
    {"broadcast", 1, N, [](int) { return 7; }, [](int) { return 7; }, LINEAR(broadcast)},
    {"readOnly", N, N, same, same, LINEAR(readOnly)},
    {"wide2", 2 * N, 2 * N, same, same,
     [](const int *in, int *out, const int *) { wide2<<<N / BLOCK, BLOCK>>>((const int2 *)in, (int2 *)out); }},
    {"wide4", 4 * N, 4 * N, same, same,
     [](const int *in, int *out, const int *) { wide4<<<N / BLOCK, BLOCK>>>((const int4 *)in, (int4 *)out); }},
    {"halfWarp", N, N, same, upper, LINEAR(halfWarp)},
    {"predicated", N, N, same, upper, LINEAR(predicated)},
    {"gather", N, N, same, reversed,
     [](const int *in, int *out, const int *index) { gather<<<N / BLOCK, BLOCK>>>(in, out, index); }},
    {"transposeNaive", SIDE * SIDE, SIDE * SIDE, same, transposed, TILED(transposeNaive)},
    {"transposeShared", SIDE * SIDE, SIDE * SIDE, same, transposed, TILED(transposeShared)},
    {"transposePadded", SIDE * SIDE, SIDE * SIDE, same, transposed, TILED(transposePadded)},
    {"histogramGlobal", N, 8, same, [](int) { return N / 8; }, LINEAR(histogramGlobal)},
    {"histogramShared", N, 4, same, [](int) { return N / 4; }, LINEAR(histogramShared)},
    {"generic", N, N, same, everySecond, LINEAR(generic)},
    {"asynchronous", 2 * N, N, same, [](int i) { return 2 * i; }, LINEAR(asynchronous)},
    {"localArray", N, N, same, same, LINEAR(localArray)},
    {"localScattered", N, N, same, same, LINEAR(localScattered)},
    {"unused", 2 * N, 2 * N, same, [](int i) { return i < N ? i : 0; }, LINEAR(unused)},
};

long verify(const Case &c) {
    std::vector<int> in(c.ins), out(c.outs), index(N);
    for (int i = 0; i < c.ins; i++) in[i] = c.in(i);
    for (int i = 0; i < N; i++) index[i] = reversed(i);
    int *din, *dout, *dindex;
    CHECK(cudaMalloc(&din, c.ins * sizeof(int)));
    CHECK(cudaMalloc(&dout, c.outs * sizeof(int)));
    CHECK(cudaMalloc(&dindex, N * sizeof(int)));
    CHECK(cudaMemcpy(din, in.data(), c.ins * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dindex, index.data(), N * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(dout, 0, c.outs * sizeof(int)));
    c.launch(din, dout, dindex);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(out.data(), dout, c.outs * sizeof(int), cudaMemcpyDeviceToHost));
    long count = 0;
    for (int i = 0; i < c.outs; i++) count += out[i] != c.right(i);
    if (count) std::printf("%s: %ld wrong\n", c.name, count);
    CHECK(cudaFree(din));
    CHECK(cudaFree(dout));
    CHECK(cudaFree(dindex));
    return count;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        bool known = false;
        for (const Case &c : CASES) known |= !std::strcmp(c.name, argv[i]);
        if (!known) {
            std::fprintf(stderr, "%s: there is no kernel '%s'\n", argv[0], argv[i]);
            return 2;
        }
    }
    long count = 0;
    for (const Case &c : CASES) {
        bool asked = argc == 1;
        for (int i = 1; i < argc; i++) asked |= !std::strcmp(c.name, argv[i]);
        if (asked) count += verify(c);
    }
    return verdict("memory", count);
}
