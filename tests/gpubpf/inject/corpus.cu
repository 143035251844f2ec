// Kernels of many styles, for tests of what the injector makes of them. None is meant to be useful.
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cstdio>
#include <cassert>
#include <new>

namespace cg = cooperative_groups;

struct Particle { float4 position; double mass; int tags[3]; };
struct Options { int first; short second; char third; double fourth; };

__device__ int counter;
__device__ unsigned long long histogram_cells[64];
static __device__ float private_scale = 2.5f;
__device__ Particle particles[8];
__device__ int *pointer_to_counter = &counter;
__device__ const char *message = "a string";
__managed__ int managed_flag;
__constant__ float weights[16];
__constant__ int squares[4] = {0, 1, 4, 9};

__global__ void empty() {}

__global__ void vectorAdd(const float *a, const float *b, float *c, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        c[i] = a[i] + b[i];
}

__global__ void gridStride(const float *a, const float *b, float *c, int n)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
        c[i] = a[i] + b[i];
}

template <int TILE> __global__ void matmul(const float *a, const float *b, float *c, int n)
{
    __shared__ float sa[TILE][TILE], sb[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int t = 0; t < n; t += TILE) {
        sa[threadIdx.y][threadIdx.x] = a[row * n + t + threadIdx.x];
        sb[threadIdx.y][threadIdx.x] = b[(t + threadIdx.y) * n + column];
        __syncthreads();
        for (int k = 0; k < TILE; k++)
            sum += sa[threadIdx.y][k] * sb[k][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
template __global__ void matmul<8>(const float *, const float *, float *, int);
template __global__ void matmul<16>(const float *, const float *, float *, int);

template <typename T> __global__ void reduce(const T *in, T *out, int n)
{
    extern __shared__ unsigned char raw[];
    T *data = reinterpret_cast<T *>(raw);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    data[threadIdx.x] = i < n ? in[i] : T(0);
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (threadIdx.x < s)
            data[threadIdx.x] += data[threadIdx.x + s];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = data[0];
}
template __global__ void reduce<int>(const int *, int *, int);
template __global__ void reduce<double>(const double *, double *, int);

__global__ void lane31(unsigned long long *p, int n)
{
    if ((threadIdx.x & 31) == 31) {
        for (int i = 0; i < n; i++)
            p[i] = clock64();
        return;
    }
    if (threadIdx.x > 100)
        return;
    p[threadIdx.x] = 1;
}

__global__ void earlyReturnThenBarrier(int *p, int n)
{
    __shared__ int s[64];
    int i = threadIdx.x;
    if (i >= n)
        return;
    s[i] = p[i];
    __syncthreads();
    p[i] = s[n - 1 - i];
}

__global__ void histogram(const unsigned char *in, int n)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
        atomicAdd(&histogram_cells[in[i] & 63], 1ull);
    if (threadIdx.x == 0)
        atomicAdd(&counter, 1);
}

__device__ __noinline__ int helper(int x, int *p)
{
    if (x < 0)
        return 3;
    p[x] = x;
    return x * 3 + p[x + 1];
}
__device__ __noinline__ void storeOrLeave(int x, int *p)
{
    if (x < 0)
        asm volatile("exit;");
    p[x] = x;
}
__device__ __noinline__ void outer(int x, int *p)
{
    storeOrLeave(x - 1, p);
    p[x] += 2;
}
__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
__device__ __noinline__ Particle makeParticle(int x)
{
    Particle made;
    made.position = make_float4(x, 2, 3, 4);
    made.mass = x;
    for (int i = 0; i < 3; i++)
        made.tags[i] = x + i;
    return made;
}
__device__ __noinline__ bool isOdd(int n);
__device__ __noinline__ bool isEven(int n) { return n == 0 ? true : isOdd(n - 1); }
__device__ __noinline__ bool isOdd(int n) { return n == 0 ? false : isEven(n - 1); }

__global__ void calls(int *p, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        p[i] = helper(i, p);
    p[0] = fibonacci(n);
    Particle made = makeParticle(n);
    p[1] = made.tags[n & 1];
    p[2] = (int)made.mass;
    p[3] = isEven(n);
}

__global__ void leavesFromFunction(int *p, int n)
{
    outer(threadIdx.x - n, p);
    p[n] = helper(n, p);
}

__global__ void structByValue(int *p, Options options, Particle particle)
{
    p[threadIdx.x] = options.first + options.second + options.third + (int)options.fourth + particle.tags[threadIdx.x % 3];
}

__global__ void variables(int *p)
{
    p[0] = *pointer_to_counter + managed_flag + squares[threadIdx.x & 3];
    p[1] = (int)(weights[threadIdx.x & 15] * private_scale);
    particles[1].tags[2] = p[2];
    particles[threadIdx.x & 7].mass += 1;
    static __device__ int calls_so_far;
    p[3] = calls_so_far++;
}

__device__ int hidden = 40;
__global__ void hides(int *p)
{
    int local, shared;
    asm volatile("{ .local .u32 hidden; st.local.u32 [hidden], 1; ld.local.u32 %0, [hidden]; }" : "=r"(local));
    asm volatile("{ .shared .u32 hidden; st.shared.u32 [hidden], 2; ld.shared.u32 %0, [hidden]; }" : "=r"(shared));
    hidden += local + shared;
    p[0] = hidden;
}

__global__ void prints(int n)
{
    printf("thread %d of %s: %s %f\n", threadIdx.x, "a literal", message, 1.5 * n);
    assert(n > 0);
}

__global__ void localTable(int *out, int n)
{
    static const int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
    int scratch[32];
    for (int i = 0; i < 32; i++)
        scratch[i] = table[(i * n) & 7];
    for (int i = 0; i < n; i++)
        out[i] = scratch[(out[i] + i) & 31];
}

__global__ void switches(int *p, int n)
{
    switch (n) {
    case 0: p[0] = 1; break;
    case 1: p[1] = p[4] * 3; break;
    case 2: p[5] = p[3]; return;
    case 3: p[7] /= p[3]; return;
    case 4: p[8] = (int)sinf(p[0]); break;
    case 5: p[4] = p[p[4]]; break;
    case 6: return;
    case 7: p[9] ^= 5; break;
    case 8: p[10] = __popc(n); break;
    case 9: p[11] = p[12] - 1; return;
    }
    p[threadIdx.x] = 7;
}

__global__ void exitsByAssembly(int *p, int n)
{
    if (n == 3)
        asm volatile("exit;");
    asm volatile("{ .reg .pred %%p1; setp.gt.s32 %%p1, %0, 100; @%%p1 exit; }" ::"r"(n));
    asm volatile("{ .reg .pred q; setp.lt.s32 q, %0, 0; @!q bra L; exit; L: }" ::"r"(n));
    p[0] = 1;
    if (n == 4)
        __trap();
}

__global__ void shuffles(int *p)
{
    int v = p[threadIdx.x];
    for (int o = 16; o > 0; o >>= 1)
        v += __shfl_down_sync(0xffffffffu, v, o);
    unsigned vote = __ballot_sync(0xffffffffu, v > 3);
    __syncwarp();
    p[threadIdx.x] = v + vote + __syncthreads_count(v);
}

__global__ void groups(int *p, int n)
{
    cg::thread_block block = cg::this_thread_block();
    auto tile = cg::tiled_partition<8>(block);
    int v = p[block.thread_rank()];
    for (int o = tile.size() / 2; o > 0; o /= 2)
        v += tile.shfl_down(v, o);
    block.sync();
    if (tile.thread_rank() == 0)
        atomicAdd(p + n, v);
}

__global__ void gridSync(int *p)
{
    cg::grid_group grid = cg::this_grid();
    p[grid.thread_rank()] = 1;
    grid.sync();
    p[grid.thread_rank()] += p[grid.size() - 1 - grid.thread_rank()];
}

__global__ void halves(__half *p, double *d, int n)
{
    int i = threadIdx.x;
    p[i] = __hfma(p[i], __float2half(2.f), p[i + n]);
    d[i] = sqrt(d[i]) + pow(d[i], 1.5) + exp(d[i]);
}

__global__ void __launch_bounds__(128, 2) nbody(float4 *position, float3 *velocity, int n, float dt)
{
    __shared__ float4 tile[128];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 mine = position[i];
    float3 force = make_float3(0, 0, 0);
    for (int t = 0; t < n / 128; t++) {
        tile[threadIdx.x] = position[t * 128 + threadIdx.x];
        __syncthreads();
#pragma unroll 4
        for (int k = 0; k < 128; k++) {
            float dx = tile[k].x - mine.x, dy = tile[k].y - mine.y, dz = tile[k].z - mine.z;
            float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + 1e-9f);
            float s = tile[k].w * inverse * inverse * inverse;
            force.x += s * dx, force.y += s * dy, force.z += s * dz;
        }
        __syncthreads();
    }
    velocity[i].x += dt * force.x, velocity[i].y += dt * force.y, velocity[i].z += dt * force.z;
}

__global__ void manyReturns(int *p, int n)
{
#define STEP(k) if (p[k] == n + k) return; if (p[k + 64] < n) { p[k] = 1; return; }
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
    STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
    p[99] = 3;
}

__global__ void spins(volatile int *flag, int *p)
{
    if (threadIdx.x == 0) {
        *flag = 1;
        __threadfence();
        return;
    }
    while (*flag == 0)
        ;
    p[threadIdx.x] = 1;
}

struct Shape { __device__ virtual int area(int x) = 0; };
struct Square : Shape { __device__ int area(int x) override { return x * x; } };
struct Line : Shape { __device__ int area(int) override { return 0; } };
__device__ int (*chosen)(int, int *) = helper;

__global__ void virtualCall(int *p, int n)
{
    Square square;
    Line line;
    Shape *shape = n ? (Shape *)&square : (Shape *)&line;
    p[0] = shape->area(n);
}
// These two only pass code addresses on. The first stores that of a vtable, which is a variable.
__global__ void constructs(Square *p) { new (p + threadIdx.x) Square; }
__global__ void keepsAddress(void **p, int n) { p[n] = (void *)(int (*)(int))fibonacci; }
__global__ void throughPointer(int *p, int n) { p[0] = chosen(n, p); }
__global__ void takesAddress(int *p, int n)
{
    int (*f)(int) = n ? fibonacci : (int (*)(int))isEven;
    p[0] = f(n);
}
