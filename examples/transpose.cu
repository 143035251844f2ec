// transpose [rows [columns]]      default: 70 50
//
// Transposes a matrix: straight (stores with a stride) and through a padded tile in shared memory, at sizes that are no
// multiple of the tile, so that threads at the edges have nothing to do.
//
// Known answers (threadhist --work stores): `straight` stores once in the rows * columns threads that are inside the matrix
// and not at all in the others: 3500 of 6144 for 70 x 50, imbalance 1.76, 43 % idle lanes.
#include <vector>

#include "check.h"

constexpr int kTile = 32, kRows = 8;

__global__ void straight(const int *in, int *out, int rows, int columns) {
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row < rows && column < columns) out[column * rows + row] = in[row * columns + column];
}

__global__ void through_tile(const int *in, int *out, int rows, int columns) {
    __shared__ int tile[kTile][kTile + 1];
    int column = blockIdx.x * kTile + threadIdx.x, row = blockIdx.y * kTile + threadIdx.y;
    for (int i = 0; i < kTile; i += kRows)
        if (row + i < rows && column < columns)
            tile[threadIdx.y + i][threadIdx.x] = in[(row + i) * columns + column];
    __syncthreads();
    column = blockIdx.y * kTile + threadIdx.x, row = blockIdx.x * kTile + threadIdx.y;
    for (int i = 0; i < kTile; i += kRows)
        if (row + i < columns && column < rows)
            out[(row + i) * rows + column] = tile[threadIdx.x][threadIdx.y + i];
}

int main(int argc, char **argv) {
    const int rows = argument(argc, argv, 1, 70), columns = argument(argc, argv, 2, 50);
    const int across = (columns + kTile - 1) / kTile, down = (rows + kTile - 1) / kTile;
    std::vector<int> in(rows * columns), out(rows * columns);
    for (int i = 0; i < rows * columns; i++) in[i] = i;
    int *din, *dout;
    CHECK(cudaMalloc(&din, in.size() * sizeof(int)));
    CHECK(cudaMalloc(&dout, in.size() * sizeof(int)));
    CHECK(cudaMemcpy(din, in.data(), in.size() * sizeof(int), cudaMemcpyHostToDevice));
    long wrong = 0;
    for (int tile = 0; tile < 2; tile++) {
        CHECK(cudaMemset(dout, 0xff, in.size() * sizeof(int)));
        if (tile)
            through_tile<<<dim3(across, down), dim3(kTile, kRows)>>>(din, dout, rows, columns);
        else
            straight<<<dim3(across, down), dim3(kTile, kTile)>>>(din, dout, rows, columns);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(out.data(), dout, out.size() * sizeof(int), cudaMemcpyDeviceToHost));
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < columns; column++)
                wrong += out[column * rows + row] != in[row * columns + column];
    }
    return verdict("transpose", wrong);
}
