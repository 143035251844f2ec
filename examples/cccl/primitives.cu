// primitives WHAT: runs code of the CUDA toolkit, which NVIDIA wrote, and prints a sum of its results.
//
// sort: thrust::stable_sort of 4,096 numbers by their last digit, which sorts them by merging.
// rake: cub::BlockScan of them in blocks of 512 threads, by its algorithm in which one warp adds for all.
// pow: thrust::pow(z, 2) of the complex numbers 0 to 63. That of 0 divides 0 by 0 on the way.
// sync (guilty): a block leaves the kernel before the barrier of the grid, this_grid().sync(); it never ends.
#include <cooperative_groups.h>
#include <cub/block/block_scan.cuh>
#include <cstdio>
#include <cstring>
#include <thrust/complex.h>
#include <thrust/device_vector.h>
#include <thrust/host_vector.h>
#include <thrust/sort.h>
#include <thrust/transform.h>

using complex = thrust::complex<float>;

struct by_last_digit {
    __device__ bool operator()(unsigned a, unsigned b) const { return a % 10 < b % 10; }
};

struct square {
    __device__ complex operator()(complex z) const { return thrust::pow(z, complex(2)); }
};

__global__ void rake(unsigned *x) {
    using Scan = cub::BlockScan<unsigned, 512, cub::BLOCK_SCAN_RAKING>;
    __shared__ Scan::TempStorage shared;
    unsigned &mine = x[blockIdx.x * 512 + threadIdx.x];
    Scan(shared).InclusiveSum(mine, mine);
}

__global__ void meet(unsigned *x) {
    if (blockIdx.x == gridDim.x - 1) return;
    x[blockIdx.x] = 1;
    cooperative_groups::this_grid().sync();
    x[blockIdx.x] += 1;
}

int main(int argc, char **argv) {
    const char *const what = argc > 1 ? argv[1] : "sort";
    thrust::host_vector<unsigned> host(4096);
    unsigned state = 1;
    for (unsigned &one : host) one = (state = state * 1664525 + 1013904223) >> 8;
    thrust::device_vector<unsigned> numbers = host;
    if (!strcmp(what, "sort")) {
        thrust::stable_sort(numbers.begin(), numbers.end(), by_last_digit());
    } else if (!strcmp(what, "rake")) {
        rake<<<8, 512>>>(thrust::raw_pointer_cast(numbers.data()));
    } else if (!strcmp(what, "pow")) {
        thrust::host_vector<complex> points(64);
        for (int i = 0; i < 64; i++) points[i] = complex(float(i));
        thrust::device_vector<complex> squares = points;
        thrust::transform(squares.begin(), squares.end(), squares.begin(), square());
        points = squares;
        for (int i = 0; i < 64; i++) host[i] = points[i].real() >= 0 ? unsigned(points[i].real() + 0.5f) : 0;
        numbers = host;
    } else if (!strcmp(what, "sync")) {
        unsigned *x = thrust::raw_pointer_cast(numbers.data());
        void *arguments[] = {&x};
        cudaLaunchCooperativeKernel(reinterpret_cast<void *>(meet), dim3(4), dim3(64), arguments, 0, nullptr);
    } else {
        fprintf(stderr, "primitives: sort, rake, pow or sync\n");
        return 2;
    }
    host = numbers;
    unsigned long sum = 0;
    for (int i = 0; i < 4096; i++) sum += host[i] * (i % 7ul);
    printf("%s: %lu\n", what, sum);
}
