// Products of matrices by the matrix instructions of MI200, each compared with a product on the host. The numbers are small
// integers, so that every sum is exact. Also: atomic additions of doubles, and more registers than there are VGPRs.
#include "check.h"

#include <cstdint>

constexpr int kSize = 64;

typedef float Float4 __attribute__((ext_vector_type(4)));
typedef float Float16 __attribute__((ext_vector_type(16)));
typedef double Double4 __attribute__((ext_vector_type(4)));
typedef int Int16 __attribute__((ext_vector_type(16)));
typedef _Float16 Half4 __attribute__((ext_vector_type(4)));
typedef short Short4 __attribute__((ext_vector_type(4)));

// A tile of 32 × 32 or 16 × 16 elements for each workgroup of one wave. Products of halves take four factors at once.

__global__ void single_product(const float *a, const float *b, float *d) {
#ifdef __gfx90a__
    int lane = threadIdx.x, row = blockIdx.y * 32, column = blockIdx.x * 32;
    Float16 sum = {};
    for (int k = lane / 32; k < kSize; k += 2)
        sum = __builtin_amdgcn_mfma_f32_32x32x2f32(a[(row + lane % 32) * kSize + k], b[k * kSize + column + lane % 32],
                                                   sum, 0, 0, 0);
    for (int n = 0; n < 16; n++)
        d[(row + 8 * (n / 4) + 4 * (lane / 32) + n % 4) * kSize + column + lane % 32] = sum[n];
#endif
}

__global__ void double_product(const double *a, const double *b, double *d) {
#ifdef __gfx90a__
    int lane = threadIdx.x, row = blockIdx.y * 16, column = blockIdx.x * 16;
    Double4 sum = {};
    for (int k = lane / 16; k < kSize; k += 4)
        sum = __builtin_amdgcn_mfma_f64_16x16x4f64(a[(row + lane % 16) * kSize + k], b[k * kSize + column + lane % 16],
                                                   sum, 0, 0, 0);
    for (int n = 0; n < 4; n++) d[(row + 4 * n + lane / 16) * kSize + column + lane % 16] = sum[n];
#endif
}

__global__ void half_product(const _Float16 *a, const _Float16 *b, float *d) {
#ifdef __gfx90a__
    int lane = threadIdx.x, row = blockIdx.y * 32, column = blockIdx.x * 32;
    Float16 sum = {};
    for (int k = lane / 32 * 4; k < kSize; k += 8) {
        Half4 x, y;
        for (int n = 0; n < 4; n++) {
            x[n] = a[(row + lane % 32) * kSize + k + n];
            y[n] = b[(k + n) * kSize + column + lane % 32];
        }
        sum = __builtin_amdgcn_mfma_f32_32x32x8f16(x, y, sum, 0, 0, 0);
    }
    for (int n = 0; n < 16; n++)
        d[(row + 8 * (n / 4) + 4 * (lane / 32) + n % 4) * kSize + column + lane % 32] = sum[n];
#endif
}

__global__ void brain_product(const uint16_t *a, const uint16_t *b, float *d) {
#ifdef __gfx90a__
    int lane = threadIdx.x, row = blockIdx.y * 16, column = blockIdx.x * 16;
    Float4 sum = {};
    for (int k = lane / 16 * 4; k < kSize; k += 16) {
        Short4 x, y;
        for (int n = 0; n < 4; n++) {
            x[n] = short(a[(row + lane % 16) * kSize + k + n]);
            y[n] = short(b[(k + n) * kSize + column + lane % 16]);
        }
        sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, sum, 0, 0, 0);
    }
    for (int n = 0; n < 4; n++) d[(row + 4 * (lane / 16) + n) * kSize + column + lane % 16] = sum[n];
#endif
}

__global__ void byte_product(const int8_t *a, const int8_t *b, int *d) {
#ifdef __gfx90a__
    int lane = threadIdx.x, row = blockIdx.y * 32, column = blockIdx.x * 32;
    Int16 sum = {};
    for (int k = lane / 32 * 4; k < kSize; k += 8) {
        uint32_t x = 0, y = 0;
        for (int n = 0; n < 4; n++) {
            x |= uint32_t(uint8_t(a[(row + lane % 32) * kSize + k + n])) << 8 * n;
            y |= uint32_t(uint8_t(b[(k + n) * kSize + column + lane % 32])) << 8 * n;
        }
        sum = __builtin_amdgcn_mfma_i32_32x32x8i8(int(x), int(y), sum, 0, 0, 0);
    }
    for (int n = 0; n < 16; n++)
        d[(row + 8 * (n / 4) + 4 * (lane / 32) + n % 4) * kSize + column + lane % 32] = sum[n];
#endif
}

// All lanes of all workgroups add to few places.
__global__ void add_doubles(double *sums, int places) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsafeAtomicAdd(&sums[i % places], 0.5 * i);
}

// 300 values that stay alive: more than the VGPRs that a wave has, so the compiler uses AGPRs, too.
__global__ __launch_bounds__(64) void many_registers(const float *in, float *out) {
    float value[300];
    int lane = threadIdx.x;
#pragma unroll
    for (int n = 0; n < 300; n++) value[n] = in[n * 64 + lane];
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 300; n++) {
        asm volatile("" : "+v"(value[n]));
        sum = sum * 0.5f + value[n];
    }
#pragma unroll
    for (int n = 299; n >= 0; n--) out[n * 64 + lane] = value[n] + sum;
}

// A bf16 of a small integer.
uint16_t brain(int x) {
    float value = float(x);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return uint16_t(bits >> 16);
}

template <class Factor, class Sum, class Make>
void check_product(const char *name, void (*kernel)(const Factor *, const Factor *, Sum *), int tile, Make make) {
    std::vector<int> a(kSize * kSize), b(kSize * kSize);
    std::vector<Factor> given_a, given_b;
    uint32_t state = 12345;
    for (std::vector<int> *side : {&a, &b})
        for (int &x : *side) {
            state = state * 1664525 + 1013904223;
            x = int(state >> 24) % 31 - 15;
        }
    for (int x : a) given_a.push_back(make(x));
    for (int x : b) given_b.push_back(make(x));
    Buffer<Factor> device_a(given_a), device_b(given_b);
    Buffer<Sum> device_d(kSize * kSize);
    kernel<<<dim3(kSize / tile, kSize / tile), 64>>>(device_a, device_b, device_d);
    std::vector<Sum> d = device_d.read();
    for (int i = 0; i < kSize; i++)
        for (int j = 0; j < kSize; j++) {
            int sum = 0;
            for (int k = 0; k < kSize; k++) sum += a[i * kSize + k] * b[k * kSize + j];
            CHECK(d[i * kSize + j] == Sum(sum));
        }
    puts(name);
}

int main() {
    check_product<float, float>("single", single_product, 32, [](int x) { return float(x); });
    check_product<double, double>("double", double_product, 16, [](int x) { return double(x); });
    check_product<_Float16, float>("half", half_product, 32, [](int x) { return _Float16(x); });
    check_product<uint16_t, float>("brain", brain_product, 16, brain);
    check_product<int8_t, int>("byte", byte_product, 32, [](int x) { return int8_t(x); });

    constexpr int kPlaces = 7, kItems = 1024;
    std::vector<double> wanted(kPlaces);
    Buffer<double> sums(wanted);
    add_doubles<<<kItems / 256, 256>>>(sums, kPlaces);
    for (int i = 0; i < kItems; i++) wanted[i % kPlaces] += 0.5 * i;
    CHECK(sums.read() == wanted);
    puts("atomics");

    std::vector<float> in(300 * 64);
    for (size_t n = 0; n < in.size(); n++) in[n] = float(n % 977);
    Buffer<float> device_in(in), device_out(in.size());
    many_registers<<<1, 64>>>(device_in, device_out);
    std::vector<float> out = device_out.read();
    for (int lane = 0; lane < 64; lane++) {
        float sum = 0;
        for (int n = 0; n < 300; n++) sum = sum * 0.5f + in[n * 64 + lane];
        for (int n = 0; n < 300; n++) CHECK(out[n * 64 + lane] == in[n * 64 + lane] + sum);
    }
    puts("registers");
}
