// Kernels of many kinds, each with an answer that the host knows.
#include "check.h"

__global__ void transpose(const float *in, float *out, int width, int height) {
    __shared__ float tile[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < width && y + j < height) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * width + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x;
    y = blockIdx.x * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (x < height && y + j < width) out[(y + j) * height + x] = tile[threadIdx.x][threadIdx.y + j];
}

static void check_transpose() {
    const int width = 100, height = 70;
    std::vector<float> in(width * height);
    std::iota(in.begin(), in.end(), 0.5f);
    Buffer<float> from(in), to(in.size());
    transpose<<<dim3((width + 31) / 32, (height + 31) / 32), dim3(32, 8)>>>(from, to, width, height);
    std::vector<float> out = to.read();
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++) CHECK(out[x * height + y] == in[y * width + x]);
}

__global__ void shuffles(const int *in, int *sums, int *others) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, value = in[i];
    others[i] = __shfl(value, (threadIdx.x + 5) % warpSize) + 1000 * __shfl_xor(value, 17);
    for (int offset = warpSize / 2; offset > 0; offset /= 2) value += __shfl_down(value, offset);
    if (threadIdx.x % warpSize == 0) sums[i / warpSize] = value;
}

static void check_shuffles() {
    std::vector<int> in(256);
    for (int i = 0; i < 256; i++) in[i] = i * i % 97;
    const int lanes = lanes_of_a_wave(), waves = 256 / lanes;
    Buffer<int> from(in), sums(waves), others(256);
    shuffles<<<2, 128>>>(from, sums, others);
    std::vector<int> sum = sums.read(), other = others.read();
    for (int wave = 0; wave < waves; wave++) {
        const int *of = &in[wave * lanes];
        CHECK(sum[wave] == std::accumulate(of, of + lanes, 0));
        for (int lane = 0; lane < lanes; lane++)
            CHECK(other[wave * lanes + lane] == of[(lane + 5) % lanes] + 1000 * of[lane ^ 17]);
    }
}

__global__ void votes(const int *in, unsigned long long *ballots, int *any_all) {
    int i = threadIdx.x;
    unsigned long long ballot = __ballot(in[i] % 3 == 0);
    if (i % warpSize == 0) ballots[i / warpSize] = ballot;
    any_all[i] = __any(in[i] > 190) * 2 + __all(in[i] < 128);
}

static void check_votes() {
    std::vector<int> in(192);
    std::iota(in.begin(), in.end(), 0);
    Buffer<int> from(in), flags(192);
    const int lanes = lanes_of_a_wave();
    Buffer<unsigned long long> ballots(192 / lanes);
    votes<<<1, 192>>>(from, ballots, flags);
    std::vector<unsigned long long> ballot = ballots.read();
    std::vector<int> flag = flags.read();
    for (int i = 0; i < 192; i++) {
        CHECK((ballot[i / lanes] >> (i % lanes) & 1) == (i % 3 == 0));
        int first = i / lanes * lanes, last = first + lanes - 1;
        CHECK(flag[i] == (last > 190) * 2 + (last < 128));
    }
}

__global__ void atomics(unsigned *counters, float *total, unsigned long long *wide, int n) {
    __shared__ unsigned local;
    if (threadIdx.x == 0) local = 0;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        atomicAdd(&counters[i % 10], 1u);
        atomicMax(&counters[10], static_cast<unsigned>(i));
        atomicMin(&counters[11], static_cast<unsigned>(i));
        atomicOr(&counters[12], 1u << i % 31);
        atomicXor(&counters[13], static_cast<unsigned>(i));
        atomicInc(&counters[14], 99);
        atomicAdd(total, 0.5f);
        atomicAdd(wide, 0x100000001ull);
        atomicAdd(&local, 1u);
        unsigned old = counters[15], seen;
        do {
            seen = old;
            old = atomicCAS(&counters[15], seen, seen + 3);
        } while (old != seen);
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&counters[16], local);
}

static void check_atomics() {
    const int n = 1000;
    std::vector<unsigned> start(17, 0);
    start[11] = ~0u;
    Buffer<unsigned> counters(start);
    Buffer<float> total(std::vector<float>{0});
    Buffer<unsigned long long> wide(std::vector<unsigned long long>{0});
    atomics<<<8, 128>>>(counters, total, wide, n);
    std::vector<unsigned> got = counters.read();
    unsigned parity = 0;
    for (int i = 0; i < n; i++) parity ^= i;
    for (int i = 0; i < 10; i++) CHECK(got[i] == n / 10);
    CHECK(got[10] == n - 1 && got[11] == 0 && got[12] == 0x7fffffff && got[13] == parity &&
          got[14] == n % 100);
    CHECK(got[15] == 3 * n && got[16] == n && total.read()[0] == n * 0.5f &&
          wide.read()[0] == 0x100000001ull * n);
}

__global__ void multiply(const float *a, const float *b, float *c, int n) {
    __shared__ float as[16][16], bs[16][16];
    int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int tile = 0; tile < n; tile += 16) {
        as[threadIdx.y][threadIdx.x] = a[row * n + tile + threadIdx.x];
        bs[threadIdx.y][threadIdx.x] = b[(tile + threadIdx.y) * n + column];
        __syncthreads();
        for (int k = 0; k < 16; k++) sum = fmaf(as[threadIdx.y][k], bs[k][threadIdx.x], sum);
        __syncthreads();
    }
    c[row * n + column] = sum;
}

static void check_multiply() {
    const int n = 64;
    std::vector<float> a(n * n), b(n * n);
    for (int i = 0; i < n * n; i++) a[i] = std::sin(i * 0.1f), b[i] = std::cos(i * 0.2f);
    Buffer<float> device_a(a), device_b(b), device_c(n * n);
    multiply<<<dim3(n / 16, n / 16), dim3(16, 16)>>>(device_a, device_b, device_c, n);
    std::vector<float> c = device_c.read();
    for (int row = 0; row < n; row++)
        for (int column = 0; column < n; column++) {
            float sum = 0;
            for (int k = 0; k < n; k++) sum = std::fmaf(a[row * n + k], b[k * n + column], sum);
            CHECK(c[row * n + column] == sum);
        }
}

extern __shared__ int dynamic[];
__global__ void reversed(int *data, int n) {
    dynamic[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = dynamic[n - 1 - threadIdx.x];
}

static void check_dynamic() {
    std::vector<int> in(1000);
    std::iota(in.begin(), in.end(), 7);
    Buffer<int> data(in);
    reversed<<<1, 1000, 1000 * sizeof(int)>>>(data, 1000);
    std::vector<int> out = data.read();
    for (int i = 0; i < 1000; i++) CHECK(out[i] == in[999 - i]);
}

// An array with an index that is known at run time only lies in scratch.
__device__ __noinline__ int chosen(const int *table, int index) { return table[index]; }
__global__ void scratch(const int *in, int *out) {
    int table[32];
    for (int i = 0; i < 32; i++) table[i] = in[threadIdx.x] * i + blockIdx.x;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = chosen(table, in[threadIdx.x] & 31) + table[(threadIdx.x * 7) & 31];
}

static void check_scratch() {
    std::vector<int> in(100);
    for (int i = 0; i < 100; i++) in[i] = i * 37 % 101;
    Buffer<int> from(in), to(1000);
    scratch<<<10, 100>>>(from, to);
    std::vector<int> out = to.read();
    for (int block = 0; block < 10; block++)
        for (int i = 0; i < 100; i++)
            CHECK(out[block * 100 + i] == in[i] * (in[i] & 31) + block + in[i] * (i * 7 & 31) + block);
}

__constant__ int constants[4] = {3, 1, 4, 1};
__device__ int variable = 5;
struct Arguments {
    char byte;
    double wide;
    short half;
    int *out;
    dim3 shape;
};
__global__ void arguments(Arguments a, unsigned long long last) {
    unsigned index = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    unsigned size = blockDim.x * blockDim.y * blockDim.z;
    a.out[index * size + thread] = a.byte + static_cast<int>(a.wide) + a.half + constants[index & 3] +
                                   variable + static_cast<int>(last >> 40) +
                                   static_cast<int>(a.shape.y * 1000 + index * 7 + thread);
}

static void check_arguments() {
    int changed = 50;
    OK(hipMemcpyToSymbol(HIP_SYMBOL(variable), &changed, sizeof(changed)));
    Buffer<int> out(2 * 3 * 4 * 3 * 5 * 2);
    arguments<<<dim3(2, 3, 4), dim3(3, 5, 2)>>>(Arguments{'A', 1234.75, -7, out, dim3(1, 9)}, 1ull << 45);
    std::vector<int> got = out.read();
    const int fixed[4] = {3, 1, 4, 1};
    for (int index = 0; index < 24; index++)
        for (int thread = 0; thread < 30; thread++)
            CHECK(got[index * 30 + thread] ==
                  'A' + 1234 - 7 + fixed[index & 3] + 50 + 32 + 9000 + index * 7 + thread);
    int back = 0;
    OK(hipMemcpyFromSymbol(&back, HIP_SYMBOL(variable), sizeof(back)));
    CHECK(back == 50);
}

__global__ void doubles(const double *in, double *out, int n) {
    int i = threadIdx.x;
    if (i < n) out[i] = fma(in[i], in[i], 1.0) / sqrt(in[i] + 2.0);
}

static void check_doubles() {
    std::vector<double> in(200);
    for (int i = 0; i < 200; i++) in[i] = i * 0.37;
    Buffer<double> from(in), to(in.size());
    doubles<<<1, 256>>>(from, to, 200);
    std::vector<double> out = to.read();
    for (int i = 0; i < 200; i++) CHECK(out[i] == std::fma(in[i], in[i], 1.0) / std::sqrt(in[i] + 2.0));
}

// Blocks that wait for each other: the last one that arrives adds up what the others wrote.
__global__ void last_block(unsigned *arrived, int *parts, int *total) {
    parts[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    if (atomicAdd(arrived, 1u) == gridDim.x - 1) {
        __threadfence();
        int sum = 0;
        for (unsigned i = 0; i < gridDim.x; i++) sum += parts[i];
        *total = sum;
    }
}

static void check_last_block() {
    Buffer<unsigned> arrived(std::vector<unsigned>{0});
    Buffer<int> parts(50), total(1);
    last_block<<<50, 1>>>(arrived, parts, total);
    CHECK(total.read()[0] == 50 * 51 / 2);
}

// Half of the blocks store words of 64 bits whose halves are equal, the others load them.
__global__ void whole_words(volatile unsigned long long *words, unsigned *torn) {
    for (unsigned i = 1; i <= 20000; i++) {
        if (blockIdx.x % 2) {
            words[threadIdx.x] = i * 0x100000001ull;
        } else {
            unsigned long long word = words[threadIdx.x];
            if (word >> 32 != unsigned(word)) atomicAdd(torn, 1u);
        }
    }
}

static void check_whole_words() {
    Buffer<unsigned long long> words(std::vector<unsigned long long>(64, 0));
    Buffer<unsigned> torn(std::vector<unsigned>{0});
    whole_words<<<8, 64>>>(words, torn);
    CHECK(torn.read()[0] == 0);
}

int main(int count, char **names) {
    struct {
        const char *name;
        void (*check)();
    } checks[] = {
        {"transpose", check_transpose},   {"shuffles", check_shuffles},      {"votes", check_votes},
        {"atomics", check_atomics},       {"multiply", check_multiply},      {"dynamic", check_dynamic},
        {"scratch", check_scratch},       {"arguments", check_arguments},    {"doubles", check_doubles},
        {"last_block", check_last_block}, {"whole_words", check_whole_words}};
    for (auto &one : checks)
        if (count < 2 || strcmp(names[1], one.name) == 0) {
            one.check();
            printf("%s\n", one.name);
        }
}
