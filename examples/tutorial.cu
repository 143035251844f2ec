// tutorial [--fixed]      default: with its three problems; --fixed: without them
//
// The program of docs/tutorial.md. It sums the columns of a triangular matrix and transposes an image. Both results are right
// in both variants; the first variant wastes time in three ways, and --fixed runs the same work without that waste.
//
// Known answers (S = 512 columns, an image of 1024 x 1024 floats):
//     columnSums         thread c loads c + 1 elements: imbalance 2 S / (S + 1) = 1.996 (threadhist --work loads)
//     columnSumsEven     every thread loads S / 2 or S / 2 + 1 elements: imbalance 1.002
//     transpose          stores with stride 1024: ratio 8 (memtrace)
//     transposeTiled     every access has ratio 1, no bank conflicts
//     columnSums waits for two copies, of 1 MiB and 4 MiB; columnSumsEven for the one that it needs, of 1 MiB (launchlate)
#include <cstring>

#include "check.h"

constexpr int SIDE = 512, IMAGE = 1024, TILE = 32, BLOCK = 128;

// The sum of each column of an upper triangular matrix, down to the diagonal.
__global__ void columnSums(const float *matrix, float *sums) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int row = 0; row <= column; row++) sum += matrix[row * SIDE + column];
    sums[column] = sum;
}

// The same, shared evenly. A long column (right) and its mirror image, a short one (left), have SIDE + 1 elements together. One
// thread takes the upper half of the long column; another takes the rest of it, and the short column.
__global__ void columnSumsEven(const float *matrix, float *sums) {
    int left = blockIdx.x * blockDim.x + threadIdx.x, right = SIDE - 1 - left;
    float sum = 0;
    if (blockIdx.y == 0) {
        for (int row = 0; row < SIDE / 2; row++) sum += matrix[row * SIDE + right];
        sums[right] = sum;
    } else {
        for (int row = SIDE / 2; row <= right; row++) sum += matrix[row * SIDE + right];
        sums[SIDE + right] = sum;  // the host adds it to sums[right]
        __syncwarp();              // the lanes left the loop one by one
        sum = 0;
        for (int row = 0; row <= left; row++) sum += matrix[row * SIDE + left];
        sums[left] = sum;
    }
}

__global__ void transpose(const float *in, float *out) {
    int x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    out[x * IMAGE + y] = in[y * IMAGE + x];
}

// The same through a tile in shared memory, so that both global accesses go along rows.
__global__ void transposeTiled(const float *in, float *out) {
    __shared__ float tile[TILE][TILE + 1];
    int x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    tile[threadIdx.y][threadIdx.x] = in[y * IMAGE + x];
    __syncthreads();
    x = blockIdx.y * TILE + threadIdx.x, y = blockIdx.x * TILE + threadIdx.y;
    out[y * IMAGE + x] = tile[threadIdx.x][threadIdx.y];
}

int main(int argc, char **argv) {
    const bool fixed = argc == 2 && !std::strcmp(argv[1], "--fixed");
    if (argc > 1 && !fixed) {
        std::fprintf(stderr, "usage: %s [--fixed]\n", argv[0]);
        return 2;
    }
    constexpr size_t MATRIX_BYTES = SIDE * SIDE * sizeof(float), IMAGE_BYTES = IMAGE * IMAGE * sizeof(float);
    const size_t SUMS_BYTES = (fixed ? 2 : 1) * SIDE * sizeof(float);
    float *matrix, *image, *sums, *turned;  // on the host
    CHECK(cudaMallocHost(&matrix, MATRIX_BYTES));
    CHECK(cudaMallocHost(&image, IMAGE_BYTES));
    CHECK(cudaMallocHost(&sums, SUMS_BYTES));
    CHECK(cudaMallocHost(&turned, IMAGE_BYTES));
    for (int i = 0; i < SIDE * SIDE; i++) matrix[i] = i / SIDE <= i % SIDE;
    for (int i = 0; i < IMAGE * IMAGE; i++) image[i] = i;

    float *dmatrix, *dimage, *dsums, *dturned;
    CHECK(cudaMalloc(&dmatrix, MATRIX_BYTES));
    CHECK(cudaMalloc(&dimage, IMAGE_BYTES));
    CHECK(cudaMalloc(&dsums, SUMS_BYTES));
    CHECK(cudaMalloc(&dturned, IMAGE_BYTES));
    cudaStream_t work, upload;
    cudaEvent_t uploaded;
    CHECK(cudaStreamCreateWithFlags(&work, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&upload, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&uploaded, cudaEventDisableTiming));

    const dim3 tiles(IMAGE / TILE, IMAGE / TILE), tile(TILE, TILE);
    CHECK(cudaMemcpyAsync(dmatrix, matrix, MATRIX_BYTES, cudaMemcpyHostToDevice, work));
    if (fixed) {
        columnSumsEven<<<dim3(SIDE / 2 / BLOCK, 2), BLOCK, 0, work>>>(dmatrix, dsums);
        CHECK(cudaMemcpyAsync(dimage, image, IMAGE_BYTES, cudaMemcpyHostToDevice, upload));
        CHECK(cudaEventRecord(uploaded, upload));
        CHECK(cudaStreamWaitEvent(work, uploaded, 0));
        transposeTiled<<<tiles, tile, 0, work>>>(dimage, dturned);
    } else {
        CHECK(cudaMemcpyAsync(dimage, image, IMAGE_BYTES, cudaMemcpyHostToDevice, work));
        columnSums<<<SIDE / BLOCK, BLOCK, 0, work>>>(dmatrix, dsums);
        transpose<<<tiles, tile, 0, work>>>(dimage, dturned);
    }
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpyAsync(sums, dsums, SUMS_BYTES, cudaMemcpyDeviceToHost, work));
    CHECK(cudaMemcpyAsync(turned, dturned, IMAGE_BYTES, cudaMemcpyDeviceToHost, work));
    CHECK(cudaStreamSynchronize(work));

    long wrong = 0;
    for (int i = 0; i < SIDE; i++) wrong += sums[i] + (fixed && i >= SIDE / 2 ? sums[SIDE + i] : 0) != i + 1;
    for (int y = 0; y < IMAGE; y++)
        for (int x = 0; x < IMAGE; x++) wrong += turned[x * IMAGE + y] != y * IMAGE + x;
    CHECK(cudaEventDestroy(uploaded));
    CHECK(cudaStreamDestroy(upload));
    CHECK(cudaStreamDestroy(work));
    for (float *memory : {dmatrix, dimage, dsums, dturned}) CHECK(cudaFree(memory));
    for (float *memory : {matrix, image, sums, turned}) CHECK(cudaFreeHost(memory));
    return verdict("tutorial", wrong);
}
