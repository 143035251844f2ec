// softmax
//
// The softmax of four rows of 64 numbers, by one block for each row. naive (guilty) computes exp(x) of numbers as they are. shifted
// (innocent) subtracts the largest number of the row before. Number 17 of row 2 is 200, and exp(200) does not fit into a float.
//
// Known answers (nansnoop):
//     naive         the first infinity is exp(200), in block 2; inf / inf makes the first NaN, in thread 17 of block 2
//     shifted       no NaN and no infinity
#include <cmath>
#include <vector>

#include "check.h"

const int N = 64, ROWS = 4;

__global__ void naive(const float *in, float *out) {
    const float *row = in + blockIdx.x * N;
    float sum = 0;
    for (int i = 0; i < N; i++) sum += expf(row[i]);
    out[blockIdx.x * N + threadIdx.x] = expf(row[threadIdx.x]) / sum;
}

__global__ void shifted(const float *in, float *out) {
    const float *row = in + blockIdx.x * N;
    float sum = 0, most = row[0];
    for (int i = 1; i < N; i++) most = fmaxf(most, row[i]);
    for (int i = 0; i < N; i++) sum += expf(row[i] - most);
    out[blockIdx.x * N + threadIdx.x] = expf(row[threadIdx.x] - most) / sum;
}

int main() {
    std::vector<float> values(N * ROWS), found(N * ROWS);
    for (int i = 0; i < N * ROWS; i++) values[i] = i % N / 16.0f;
    values[2 * N + 17] = 200;
    float *in, *out;
    const size_t bytes = values.size() * sizeof(float);
    CHECK(cudaMalloc(&in, bytes));
    CHECK(cudaMalloc(&out, bytes));
    CHECK(cudaMemcpy(in, values.data(), bytes, cudaMemcpyHostToDevice));
    long wrong = 0;
    for (bool guilty : {true, false}) {
        (guilty ? naive : shifted)<<<ROWS, N>>>(in, out);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(found.data(), out, bytes, cudaMemcpyDeviceToHost));
        for (int row = 0; row < ROWS; row++) {
            float sum = 0;
            for (int i = 0; i < N; i++) sum += found[row * N + i];
            const bool right = std::fabs(sum - 1) < 1e-4f, lost = guilty && row == 2;
            wrong += lost ? !std::isnan(sum) : !right;
        }
    }
    CHECK(cudaFree(in));
    CHECK(cudaFree(out));
    return verdict("softmax", wrong);
}
