// Two devices: their own memory, copies between them, and kernels that use the other's memory.
#include "check.h"

__global__ void add(int *data, const int *other, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += other[i];
}

int main() {
    int count;
    OK(hipGetDeviceCount(&count));
    CHECK(count == 2);
    const int n = 5000;
    std::vector<int> first(n), second(n);
    for (int i = 0; i < n; i++) first[i] = i, second[i] = 7 * i;
    int *memory[2], *third;
    for (int device = 0; device < 2; device++) {
        OK(hipSetDevice(device));
        OK(hipMalloc(reinterpret_cast<void **>(&memory[device]), n * sizeof(int)));
        OK(hipMemcpy(memory[device], (device == 0 ? first : second).data(), n * sizeof(int),
                     hipMemcpyHostToDevice));
    }
    hipPointerAttribute_t attributes;
    OK(hipPointerGetAttributes(&attributes, memory[1]));
    CHECK(attributes.device == 1);

    // Each device works on its own, at the same time.
    for (int device = 0; device < 2; device++) {
        OK(hipSetDevice(device));
        add<<<20, 256>>>(memory[device], memory[device], n);
    }
    for (int device = 0; device < 2; device++) {
        OK(hipSetDevice(device));
        OK(hipDeviceSynchronize());
    }

    OK(hipMalloc(reinterpret_cast<void **>(&third), n * sizeof(int)));  // of device 1
    OK(hipMemcpyPeer(third, 1, memory[0], 0, n * sizeof(int)));
    std::vector<int> got(n);
    OK(hipMemcpy(got.data(), third, n * sizeof(int), hipMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) CHECK(got[i] == 2 * i);

    int able = 0;
    OK(hipDeviceCanAccessPeer(&able, 1, 0));
    CHECK(able == 1);
    OK(hipDeviceEnablePeerAccess(0, 0));
    add<<<20, 256>>>(third, memory[0], n);  // device 1 reads memory of device 0
    OK(hipMemcpy(got.data(), third, n * sizeof(int), hipMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) CHECK(got[i] == 4 * i);
    puts("devices are right");
}
