// What the test programs share: every call is checked, and a wrong answer is the exit status.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                                   \
    do {                                                                                              \
        cudaError_t status_ = (call);                                                                 \
        if (status_ != cudaSuccess) {                                                                 \
            printf("%s:%d: %s gives %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(status_));     \
            exit(2);                                                                                  \
        }                                                                                             \
    } while (0)

// A call that must fail, and how.
#define FAILS(call, expected)                                                                         \
    do {                                                                                              \
        cudaError_t status_ = (call);                                                                 \
        if (status_ != (expected)) {                                                                  \
            printf("%s:%d: %s gives %s, not %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(status_), \
                   cudaGetErrorName(expected));                                                       \
            exit(2);                                                                                  \
        }                                                                                             \
        cudaGetLastError();                                                                           \
    } while (0)

#define REQUIRE(condition)                                                                            \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                            \
            exit(3);                                                                                  \
        }                                                                                             \
    } while (0)
