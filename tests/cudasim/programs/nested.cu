// Kernels that launch kernels. Prints a line for each part that went as CUDA defines it.
#include <cstdio>
#include <cstring>

__device__ int log_[4096], logged;
__device__ void note(int what) { log_[atomicAdd(&logged, 1)] = what; }

__global__ void leaf(int what) {
    if (blockIdx.x == 0 && threadIdx.x == 0) note(what);
}
__global__ void tree(int depth, int number) {  // each grid launches two, down to depth 0: one after the other in one stream
    note(number);
    if (depth == 0) return;
    tree<<<1, 1>>>(depth - 1, 2 * number);
    tree<<<1, 1>>>(depth - 1, 2 * number + 1);
}
__global__ void order() {
    leaf<<<1, 1, 0, cudaStreamTailLaunch>>>(9);
    leaf<<<2, 32>>>(2);
    leaf<<<1, 1, 0, cudaStreamFireAndForget>>>(3);
    cudaStream_t stream;
    cudaEvent_t event;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    leaf<<<1, 1, 0, stream>>>(4);
    cudaEventRecord(event, stream);
    cudaEventDestroy(event);
    cudaStreamDestroy(stream);
    note(1);
}
__global__ void add(int *sums, const int *data, int count, int *shared_bytes) {
    extern __shared__ int part[];
    part[threadIdx.x] = data[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int s = blockDim.x / 2; s; s /= 2) {
        if (threadIdx.x < s) part[threadIdx.x] += part[threadIdx.x + s];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(sums, part[0]), *shared_bytes = count;
}
struct Many { int values[7]; double more; };
__global__ void given(Many many, char last, double *out) { *out = many.values[6] + many.more + last; }
__global__ void sizes(int *sums, const int *data, double *out) {  // every thread launches one
    add<<<2, 64, 64 * sizeof(int)>>>(sums + threadIdx.x, data + 128 * threadIdx.x, threadIdx.x, sums + 32 + threadIdx.x);
    Many many = {{1, 2, 3, 4, 5, 6, 70}, 0.5};
    if (threadIdx.x == 0) given<<<1, 1>>>(many, 'a', out);
}
__global__ void errors(int *found) {
    leaf<<<1, 2048>>>(0);
    found[0] = cudaPeekAtLastError();
    found[1] = cudaGetLastError();
    found[2] = cudaGetLastError();
    leaf<<<0, 1>>>(0);
    found[3] = cudaGetLastError();
    for (int i = 0; i < 20; i++) leaf<<<1, 1>>>(5);
    found[4] = cudaGetLastError();
    printf("%s\n", cudaGetErrorString(cudaErrorMemoryAllocation));
}
__global__ void use(int *memory, int *out) { *out = memory[5] + memory[0]; }
__global__ void memory(int *out) {
    int *own, devices = 0, device = 9;
    cudaGetDeviceCount(&devices);
    cudaGetDevice(&device);
    out[1] = 10 * devices + device;
    cudaMalloc(&own, 64);
    cudaMemsetAsync(own, 1, 64, 0);
    cudaMemcpyAsync(own + 5, out + 2, 4, cudaMemcpyDeviceToDevice, 0);
    use<<<1, 1>>>(own, out);
    out[3] = cudaMemsetAsync(own, 0, 64, 0);  // must not be before the launch
}
__global__ void fault(int *at) { *at = 1; }
__global__ void faulty() { fault<<<1, 1>>>((int *)16); }

static bool is(const char *what, std::initializer_list<int> expected) {
    int count = 0, got[64];
    cudaMemcpyFromSymbol(&count, logged, sizeof count);
    cudaMemcpyFromSymbol(got, log_, sizeof got);
    int zero = 0;
    cudaMemcpyToSymbol(logged, &zero, sizeof zero);
    bool same = count == (int)expected.size() && !memcmp(got, expected.begin(), sizeof(int) * expected.size());
    printf("%s: %s", what, same ? "right\n" : "wrong:");
    for (int i = 0; !same && i < count; i++) printf(" %d%s", got[i], i + 1 == count ? "\n" : "");
    return same;
}

int main() {
    tree<<<1, 1>>>(2, 1);
    is("tree", {1, 2, 4, 5, 3, 6, 7});
    order<<<1, 1>>>();
    is("order", {1, 2, 3, 4, 9});
    int *data, host[64], *ints;
    cudaMallocManaged(&data, 128 * 32 * sizeof(int));
    for (int i = 0; i < 128 * 32; i++) data[i] = i;
    cudaMalloc(&ints, sizeof host);
    cudaMemset(ints, 0, sizeof host);
    double *out, given = 0;
    cudaMalloc(&out, sizeof *out);
    sizes<<<1, 32>>>(ints, data, out);
    cudaMemcpy(host, ints, sizeof host, cudaMemcpyDeviceToHost);
    cudaMemcpy(&given, out, sizeof given, cudaMemcpyDeviceToHost);
    bool right = given == 70 + 0.5 + 'a';
    for (int i = 0; i < 32; i++) right = right && host[i] == 128 * 128 * i + 127 * 64 && host[32 + i] == i;
    printf("sizes: %s\n", right ? "right" : "wrong");
    cudaDeviceSetLimit(cudaLimitDevRuntimePendingLaunchCount, 12);
    errors<<<1, 1>>>(ints);
    cudaMemcpy(host, ints, sizeof host, cudaMemcpyDeviceToHost);
    right = host[0] == cudaErrorInvalidConfiguration && host[1] == host[0] && host[2] == 0;
    right = right && host[3] == cudaErrorInvalidConfiguration && host[4] == cudaErrorLaunchPendingCountExceeded;
    printf("errors: %s\n", right ? "right" : "wrong");
    is("as many as the limit", {5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5});
    host[2] = 7;
    cudaMemcpy(ints, host, sizeof host, cudaMemcpyHostToDevice);
    memory<<<1, 1>>>(ints);
    cudaMemcpy(host, ints, sizeof host, cudaMemcpyDeviceToHost);
    right = host[0] == 0x01010101 + 7 && host[1] == 10 && host[3] == cudaErrorNotSupported;
    printf("memory: %s\n", right ? "right" : "wrong");
    faulty<<<1, 1>>>();
    printf("fault: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    return 0;
}
