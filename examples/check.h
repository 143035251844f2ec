// What every example shares: an error check that ends the program, and the verdict that it prints.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                                   \
    do {                                                                                              \
        cudaError_t error_ = (call);                                                                  \
        if (error_ != cudaSuccess) {                                                                  \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            std::exit(1);                                                                             \
        }                                                                                             \
    } while (0)

// The N-th argument as a number from 1, or what it is by default.
inline long argument(int argc, char **argv, int n, long otherwise) {
    if (n >= argc) return otherwise;
    char *end;
    long value = std::strtol(argv[n], &end, 10);
    if (*end || value < 1) {
        std::fprintf(stderr, "%s: argument %d is a number from 1, not '%s'\n", argv[0], n, argv[n]);
        std::exit(2);
    }
    return value;
}

// Prints the verdict; what main returns.
inline int verdict(const char *name, long wrong) {
    if (wrong)
        std::printf("%s: FAILED, %ld wrong\n", name, wrong);
    else
        std::printf("%s: PASSED\n", name);
    return wrong != 0;
}
