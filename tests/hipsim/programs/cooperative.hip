// A grid whose blocks wait for each other.
#include "check.h"
#include <hip/hip_cooperative_groups.h>

__global__ void rounds(int *data, int n) {
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int round = 0; round < 5; round++) {
        int left = data[(round & 1) * n + (i + n - 1) % n], right = data[(round & 1) * n + (i + 1) % n];
        data[(1 - (round & 1)) * n + i] = left + right;
        grid.sync();
    }
}

int main() {
    int able = 0;
    OK(hipDeviceGetAttribute(&able, hipDeviceAttributeCooperativeLaunch, 0));
    CHECK(able == 1);
    int n = 8 * 128;
    std::vector<int> values(2 * n, 0);
    values[10] = 1;
    Buffer<int> data(values);
    int *pointer = data;
    void *arguments[] = {&pointer, &n};
    OK(hipLaunchCooperativeKernel(reinterpret_cast<void *>(rounds), dim3(8), dim3(128), arguments, 0,
                                  nullptr));
    std::vector<int> got = data.read();
    std::vector<int> now(values.begin(), values.begin() + n), next(n);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < n; i++) next[i] = now[(i + n - 1) % n] + now[(i + 1) % n];
        std::swap(now, next);
    }
    for (int i = 0; i < n; i++) CHECK(got[n + i] == now[i]);
    puts("all rounds are right");
}
