// pointers
//
// Kernels that call through pointers of every kind, and that launch kernels. Checks its results. Known answers: all three kernels
// that the host launches run once, on 64 threads; `node` launches 14 grids of `node` and 16 of `leaf`, also indirectly.
#include <cstdio>
#include <utility>

typedef int (*Function)(int, int);
__device__ __noinline__ int add(int a, int b) { return a + b; }
__device__ __noinline__ int sub(int a, int b) { return a - b; }
__device__ __noinline__ int mul(int a, int b) { return a * b; }
__device__ __noinline__ int less(int a, int b) { return a < b; }
__device__ __noinline__ int more(int a, int b) { return a > b; }
__device__ Function table[] = {add, sub, mul};  // which the host changes
__constant__ Function fixed[] = {mul, sub};

__global__ void tables(int *out, Function given) {
    int t = threadIdx.x;
    out[t] = table[t % 3](t, 7) + 1000 * fixed[t % 2](t, 7) + 1000000 * given(t, 7);
}

__device__ __noinline__ int fold(Function f, const int *data, int n, int start) {
    for (int i = 0; i < n; i++) start = f(start, data[i]);
    return start;
}

__global__ void callbacks(int *out) {
    int t = threadIdx.x, data[8];
    for (int i = 0; i < 8; i++) data[(i + t) % 8] = 8 * t + i;
    out[t] = fold(t % 2 ? less : more, data, 8, t);
}

__device__ int leaves, visited;
__global__ void leaf(int *out, int number) {
    extern __shared__ int part[];
    part[threadIdx.x] = number;
    __syncthreads();
    out[64 * number + threadIdx.x] = part[63 - threadIdx.x] + 1;
    if (!threadIdx.x) atomicAdd(&leaves, 1);
}
__global__ void node(int *out, int number, int depth) {
    if (threadIdx.x > 1) return;
    atomicAdd(&visited, 1);
    if (depth == 3) leaf<<<1, 64, 64 * sizeof(int)>>>(out, 2 * number + threadIdx.x);
    else node<<<1, 64>>>(out, 2 * number + threadIdx.x, depth + 1);
}

static int wanted(int which, int a, int b) { return which == 0 ? a + b : which == 1 ? a - b : a * b; }

int main() {
    int *out;
    Function read[3];
    if (cudaMallocManaged(&out, 16 * 64 * sizeof *out)) return 9;
    cudaMemcpyFromSymbol(read, table, sizeof read);
    std::swap(read[0], read[2]);
    cudaMemcpyToSymbol(table, read, sizeof read);
    tables<<<1, 64>>>(out, read[1]);
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++)
        if (out[t] != wanted(2 - t % 3, t, 7) + 1000 * wanted(t % 2 ? 1 : 2, t, 7) + 1000000 * wanted(1, t, 7)) return 1;
    callbacks<<<1, 64>>>(out);
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++) {
        int value = t;
        for (int i = 0; i < 8; i++) {
            int data = 8 * t + (i - t % 8 + 8) % 8;
            value = t % 2 ? value < data : value > data;
        }
        if (out[t] != value) return 2;
    }
    node<<<1, 64>>>(out, 0, 0);
    if (cudaDeviceSynchronize()) return 8;
    for (int i = 0; i < 16 * 64; i++)
        if (out[i] != i / 64 + 1) return 3;
    int counted[2];
    cudaMemcpyFromSymbol(counted, leaves, 4), cudaMemcpyFromSymbol(counted + 1, visited, 4);
    if (counted[0] != 16 || counted[1] != 2 + 4 + 8 + 16) return 4;
    puts("pointers: PASSED");
    return 0;
}
