// generic: pointers whose lanes are in global memory, LDS and scratch at the same instruction, with types of all widths.
#include "check.h"

struct Four {
    int x, y, z, w;
};
__device__ __host__ Four operator+(Four a, Four b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
bool operator==(Four a, Four b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }

template <class T>
__device__ __host__ T of(int n) {
    return T(n);
}
template <>
__device__ __host__ Four of(int n) {
    return {n, -n, 3 * n, n ^ 5};
}

template <class T>
__device__ __noinline__ T add(T *at, T more) {
    T old = *at;
    *at = old + more;
    return old;
}

template <class T>
__global__ void anywhere(T *global, T *out, int places) {
    __shared__ T shared[64];
    T own[48];  // too large to be put into LDS
    int i = threadIdx.x;
    shared[i] = of<T>(i + 100);
    for (int k = 0; k < 48; k++) own[k] = of<T>(i + 200 + k);
    __syncthreads();
    T *at = i % places == 0 ? &global[i] : i % places == 1 ? &shared[i] : &own[i % 48];
    T old = add(at, of<T>(i));
    out[i] = old + *at;
}

template <class T>
void everywhere(int places) {
    std::vector<T> begin;
    for (int i = 0; i < 64; i++) begin.push_back(of<T>(i + 50));
    Buffer<T> global(begin), out(64);
    anywhere<T><<<1, 64>>>(global, out, places);
    std::vector<T> got = out.read(), after = global.read();
    for (int i = 0; i < 64; i++) {
        int old = i % places == 0 ? i + 50 : i % places == 1 ? i + 100 : i + 200 + i % 48;
        T sum = of<T>(old) + of<T>(i);
        CHECK(got[i] == T(of<T>(old) + sum));
        CHECK(after[i] == (i % places == 0 ? sum : begin[i]));
    }
}

int main() {
    for (int places = 2; places <= 3; places++) {
        everywhere<unsigned char>(places);
        everywhere<short>(places);
        everywhere<int>(places);
        everywhere<double>(places);
        everywhere<unsigned long long>(places);
        everywhere<Four>(places);
    }
    puts("ok");
}
