// A kernel with arguments of many kinds, and one with none.
#include "check.h"

struct Big {
    int a[5];
};
struct Odd {
    char c[3];
};

__global__ void many(float *out, int n, double d, char c, Big big, short s, Odd odd, float f, unsigned long long u, bool b) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = d + c + big.a[4] + s + odd.c[2] + f + (u == ~0ull) + b;
}

template <typename T>
__global__ void none() {}

int main() {
    Buffer<float> out(std::vector<float>(128));
    float *to = out;
    Big big = {{7, 2, 3, 4, 5}};
    Odd odd = {{1, 2, 3}};
    printf("%p\n", (void *)to);
    many<<<2, 64>>>(to, 100, 1.5, -3, big, -2, odd, 0.25f, ~0ull, true);
    none<int><<<1, 64>>>();
    for (int i = 0; i < 128; i++) CHECK(out.read()[i] == (i < 100 ? 6.75f : 0));
}
