// faults WHAT: kernels that do what they must not.
#include "check.h"

__global__ void writeOutside(int *data, size_t offset) { data[offset + threadIdx.x] = 1; }
__global__ void readOutside(const int *data, int *out) { out[threadIdx.x] = data[threadIdx.x]; }
__global__ void stops(int *data) {
    if (threadIdx.x == 3) abort();
    data[threadIdx.x] = 1;
}
__global__ void asserts(int value) { assert(value == 1); }

int main(int count, char **arguments) {
    std::string what = count > 1 ? arguments[1] : "";
    Buffer<int> data(64);
    if (what == "write") writeOutside<<<1, 64>>>(data, size_t{1} << 33);
    if (what == "near") writeOutside<<<1, 64>>>(data, size_t{100} << 20);  // where ROCr reserves scratch
    if (what == "null") readOutside<<<1, 64>>>(nullptr, data);
    if (what == "host") {
        std::vector<int> own(1 << 20);  // not registered
        readOutside<<<1, 64>>>(own.data(), data);
        fprintf(stderr, "%d\n", static_cast<int>(hipDeviceSynchronize()));
    }
    if (what == "freed") {
        int *gone;
        OK(hipMalloc(reinterpret_cast<void **>(&gone), 8 << 20));
        OK(hipFree(gone));
        readOutside<<<1, 64>>>(gone, data);
    }
    if (what == "abort") stops<<<1, 64>>>(data);
    if (what == "assert") asserts<<<1, 64>>>(2);
    fprintf(stderr, "status %d\n", static_cast<int>(hipDeviceSynchronize()));
}
