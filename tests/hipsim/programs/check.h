// What the HIP programs of the tests share: a failed check names its line and ends the program with status 1.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <hip/hip_runtime.h>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fflush(stdout);                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE_NAME__, __LINE__, #condition); \
            _Exit(1);                                                            \
        }                                                                        \
    } while (0)
#define OK(call)                                                                                            \
    do {                                                                                                    \
        hipError_t status_ = (call);                                                                        \
        if (status_ != hipSuccess) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE_NAME__, __LINE__, #call, hipGetErrorString(status_)); \
            _Exit(1);                                                                                       \
        }                                                                                                   \
    } while (0)

template <typename T>
struct Buffer {
    T *data = nullptr;
    size_t count;
    explicit Buffer(size_t n) : count(n) { OK(hipMalloc(reinterpret_cast<void **>(&data), n * sizeof(T))); }
    explicit Buffer(const std::vector<T> &values) : Buffer(values.size()) {
        OK(hipMemcpy(data, values.data(), count * sizeof(T), hipMemcpyHostToDevice));
    }
    ~Buffer() { OK(hipFree(data)); }
    std::vector<T> read() const {
        std::vector<T> values(count);
        OK(hipMemcpy(values.data(), data, count * sizeof(T), hipMemcpyDeviceToHost));
        return values;
    }
    operator T *() const { return data; }
};

inline int lanes_of_a_wave() {
    hipDeviceProp_t properties;
    OK(hipGetDeviceProperties(&properties, 0));
    return properties.warpSize;
}
