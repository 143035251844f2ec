// vectoradd [N]: the sum of two vectors, checked.
#include "check.h"

__global__ void vectorAdd(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

int main(int count, char **arguments) {
    int n = count > 1 ? atoi(arguments[1]) : 1000;
    std::vector<float> a(n), b(n);
    for (int i = 0; i < n; i++) a[i] = i * 0.5f, b[i] = 1000.25f - i;
    Buffer<float> device_a(a), device_b(b), c(n);
    vectorAdd<<<(n + 255) / 256, 256>>>(device_a, device_b, c, n);
    OK(hipGetLastError());
    std::vector<float> sum = c.read();
    for (int i = 0; i < n; i++) CHECK(sum[i] == a[i] + b[i]);
    printf("%d sums are right\n", n);
}
