// workloads all                              each kernel once, at a small size
// workloads WORK SIZE LAUNCHES [ROUNDS]      one of them, timed
//
// WORK: empty, addTo, triad, tiled, sums, softmax, polynomial, stencil (SIZE threads, elements or, for tiled, rows), decode and decode-graph (a
// token's chain of small kernels, launched one by one or as a graph; SIZE is the model's width, LAUNCHES are tokens).
//
// Prints for each round "round HOST_US GPU_US": of one launch, by the host's clock until all are over, and by the GPU's events. The first
// round is not shown. SIGTERM ends it after a round. At the end "digest HEX" of the results: the same in every run, since no sum depends on an order.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../../../examples/check.h"

constexpr int BLOCK = 256, TILE = 16;

__global__ void empty() {}

__global__ void addTo(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

__global__ void triad(const float *b, const float *c, float *a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = b[i] + 3.0f * c[i];
}

// c = a b, square matrices whose side is a multiple of TILE.
__global__ void tiled(const float *a, const float *b, float *c, int side) {
    __shared__ float left[TILE][TILE], right[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < side; k += TILE) {
        left[threadIdx.y][threadIdx.x] = a[row * side + k + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * side + column];
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    c[row * side + column] = sum;
}

// The sum of each block's elements, as a tree.
__global__ void sums(const float *in, float *out, int n) {
    __shared__ float part[BLOCK];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? in[i] : 0;
    for (int step = BLOCK / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}

// A row of `width` elements for each block.
__global__ void softmax(const float *in, float *out, int width) {
    __shared__ float part[BLOCK];
    const float *row = in + (size_t)blockIdx.x * width;
    float most = row[0];
    for (int i = threadIdx.x; i < width; i += BLOCK) most = fmaxf(most, row[i]);
    part[threadIdx.x] = most;
    for (int step = BLOCK / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + step]);
    }
    __syncthreads();
    most = part[0];
    __syncthreads();
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += BLOCK) sum += __expf(row[i] - most);
    part[threadIdx.x] = sum;
    for (int step = BLOCK / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += BLOCK) out[(size_t)blockIdx.x * width + i] = __expf(row[i] - most) / part[0];
}

// A polynomial whose coefficients are in constant memory: each is the operand of one FMA, and all lanes read the same.
constexpr int DEGREE = 128;
__constant__ float coefficients[DEGREE];

__global__ void polynomial(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float at = x[i], sum = 0;
#pragma unroll
    for (int k = 0; k < DEGREE; k++) sum = sum * at + coefficients[k];
    y[i] = sum;
}

// out = m in, a warp for each row.
__global__ void multiply(const float *m, const float *in, float *out, int width) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= width) return;
    float sum = 0;
    for (int i = lane; i < width; i += 32) sum += m[(size_t)row * width + i] * in[i];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
    if (lane == 0) out[row] = sum;
}

// Each element of a cube 16 wide and 8 high from its neighbours; the opposite side is next to the edge. The lanes of a warp part and
// meet again seven times, and then compute with numbers of their block. The result is a difference of products.
__global__ void stencil(const float *in, float *out, int height) {
    __shared__ float s[6][10][18];
    int x = threadIdx.x, y = 2 * threadIdx.y, z = threadIdx.z,
        place = ((blockIdx.z * 4 + z) * height + y) * 16 + x;
    s[z + 1][y + 1][x + 1] = in[place];
    s[z + 1][y + 2][x + 1] = in[place + 16];
    if (y == 0) s[z + 1][0][x + 1] = in[place + (height - 1) * 16];
    if (y == 6) s[z + 1][9][x + 1] = in[place - 6 * 16];
    if (x == 0) {
        s[z + 1][y + 1][0] = in[place + 15];
        s[z + 1][y + 2][0] = in[place + 31];
    }
    if (x == 15) {
        s[z + 1][y + 1][17] = in[place - 15];
        s[z + 1][y + 2][17] = in[place + 1];
    }
    if (z == 0) {
        int layer = blockIdx.z == 0 ? gridDim.z * 4 - 1 : blockIdx.z * 4 - 1;
        s[0][y + 1][x + 1] = in[(layer * height + y) * 16 + x];
        s[0][y + 2][x + 1] = in[(layer * height + y + 1) * 16 + x];
    }
    if (z == 3) {
        if (blockIdx.z == gridDim.z - 1) {
            s[5][y + 1][x + 1] = in[y * 16 + x];
            s[5][y + 2][x + 1] = in[(y + 1) * 16 + x];
        } else {
            int layer = blockIdx.z * 4 + 4;
            s[5][y + 1][x + 1] = in[(layer * height + y) * 16 + x];
            s[5][y + 2][x + 1] = in[(layer * height + y + 1) * 16 + x];
        }
    }
    __syncthreads();
    for (int i = 1; i <= 2; i++) {
        float left = s[z + 1][y + i][x], right = s[z + 1][y + i][x + 2], above = s[z + 1][y + i - 1][x + 1],
              below = s[z + 1][y + i + 1][x + 1];
        float before = s[z][y + i][x + 1], after = s[z + 2][y + i][x + 1];
        out[place + (i - 1) * 16] = left * right - above * below + before * after;
    }
}

struct Memory {
    std::vector<float *> arrays;
    std::vector<size_t> sizes;

    // n floats on the device, with numbers that are the same in every run.
    float *take(size_t n) {
        std::vector<float> content(std::min(n, (size_t)1 << 20));
        for (size_t i = 0; i < content.size(); i++) content[i] = (float)((i * 2654435761u >> 8) % 1000) / 1000.0f;
        float *made;
        CHECK(cudaMalloc(&made, n * sizeof(float)));
        for (size_t i = 0; i < n; i += content.size())
            CHECK(cudaMemcpy(made + i, content.data(), std::min(n - i, content.size()) * sizeof(float), cudaMemcpyHostToDevice));
        arrays.push_back(made);
        sizes.push_back(n);
        return made;
    }
    // FNV-1a over all of them, or as much as a moment allows.
    uint64_t digest() {
        uint64_t value = 14695981039346656037u;
        for (size_t i = 0; i < arrays.size(); i++) {
            std::vector<uint32_t> words(std::min(sizes[i], (size_t)1 << 20));
            CHECK(cudaMemcpy(words.data(), arrays[i], words.size() * 4, cudaMemcpyDeviceToHost));
            for (uint32_t word : words) value = (value ^ word) * 1099511628211u;
        }
        return value;
    }
};

int blocks(long n, int block = BLOCK) { return (int)((n + block - 1) / block); }

// What a launch of this work is; a token for decode.
std::function<void()> prepare(const std::string &work, long size, Memory &memory, cudaStream_t stream) {
    int n = (int)size;
    if (work == "empty") return [=] { empty<<<blocks(size), BLOCK, 0, stream>>>(); };
    if (work == "addTo" || work == "triad") {
        float *a = memory.take(n), *b = memory.take(n), *c = memory.take(n);
        int block = n < BLOCK ? n : BLOCK;
        if (work == "addTo") return [=] { addTo<<<blocks(n, block), block, 0, stream>>>(a, b, c, n); };
        return [=] { triad<<<blocks(n, block), block, 0, stream>>>(a, b, c, n); };
    }
    if (work == "tiled") {
        int side = (n + TILE - 1) / TILE * TILE;
        float *a = memory.take((size_t)side * side), *b = memory.take((size_t)side * side), *c = memory.take((size_t)side * side);
        return [=] { tiled<<<dim3(side / TILE, side / TILE), dim3(TILE, TILE), 0, stream>>>(a, b, c, side); };
    }
    if (work == "sums") {
        float *in = memory.take(n), *out = memory.take(blocks(n));
        return [=] { sums<<<blocks(n), BLOCK, 0, stream>>>(in, out, n); };
    }
    if (work == "polynomial") {
        float *x = memory.take(n), *y = memory.take(n), values[DEGREE];
        for (int k = 0; k < DEGREE; k++) values[k] = (float)(k % 7) / 7;
        CHECK(cudaMemcpyToSymbol(coefficients, values, sizeof values));
        return [=] { polynomial<<<blocks(n), BLOCK, 0, stream>>>(x, y, n); };
    }
    if (work == "stencil") {
        int layers = n < 1024 ? 2 : n / 512;
        float *in = memory.take(512 * (size_t)layers), *out = memory.take(512 * (size_t)layers);
        return [=] { stencil<<<dim3(1, 1, layers), dim3(16, 4, 4), 0, stream>>>(in, out, 8); };
    }
    if (work == "softmax") {
        int width = n < 4096 ? n : 4096, rows = n / width;
        float *in = memory.take((size_t)width * rows), *out = memory.take((size_t)width * rows);
        return [=] { softmax<<<rows, BLOCK, 0, stream>>>(in, out, width); };
    }
    if (work == "decode" || work == "decode-graph") {
        constexpr int LAYERS = 8;
        float *state = memory.take(n), *next = memory.take(n), *matrix = memory.take((size_t)n * n);
        auto token = [=] {
            for (int layer = 0; layer < LAYERS; layer++) {
                multiply<<<blocks(32L * n), BLOCK, 0, stream>>>(matrix, state, next, n);
                softmax<<<1, BLOCK, 0, stream>>>(next, state, n);
                addTo<<<blocks(n), BLOCK, 0, stream>>>(state, next, state, n);
            }
            softmax<<<1, BLOCK, 0, stream>>>(state, state, n);
        };
        if (work == "decode") return token;
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        token();
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        return [=] { CHECK(cudaGraphLaunch(executable, stream)); };
    }
    std::fprintf(stderr, "workloads: there is no work '%s'\n", work.c_str());
    std::exit(2);
}

volatile std::sig_atomic_t told_to_end;  // by SIGTERM: after this round

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: workloads all | WORK SIZE LAUNCHES [ROUNDS]\n");
        return 2;
    }
    std::string work = argv[1];
    Memory memory;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (work == "all") {
        for (const char *name : {"empty", "addTo", "triad", "tiled", "sums", "softmax", "polynomial",
                                 "stencil", "decode", "decode-graph"}) {
            prepare(name, std::strcmp(name, "tiled") ? 1000 : 48, memory, stream)();
            CHECK(cudaGetLastError());
        }
        CHECK(cudaStreamSynchronize(stream));
    } else {
        long size = argument(argc, argv, 2, 1), launches = argument(argc, argv, 3, 1), rounds = argument(argc, argv, 4, 5);
        auto launch = prepare(work, size, memory, stream);
        cudaEvent_t begin, end;
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
        std::signal(SIGTERM, [](int) { told_to_end = 1; });
        for (long round = 0; round <= rounds && !told_to_end; round++) {
            CHECK(cudaStreamSynchronize(stream));
            auto before = std::chrono::steady_clock::now();
            CHECK(cudaEventRecord(begin, stream));
            for (long i = 0; i < launches; i++) launch();
            CHECK(cudaGetLastError());
            CHECK(cudaEventRecord(end, stream));
            CHECK(cudaStreamSynchronize(stream));
            std::chrono::duration<double, std::micro> host = std::chrono::steady_clock::now() - before;
            float milliseconds;
            CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
            if (round) std::printf("round %.4f %.4f\n", host.count() / launches, 1e3 * milliseconds / launches);
            std::fflush(stdout);
        }
    }
    std::printf("digest %016llx\n", (unsigned long long)memory.digest());
    return 0;
}
