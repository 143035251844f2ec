// modules FILE [BYTES]: runs a kernel of the code object, or loads its first BYTES.
#include <algorithm>
#include "check.h"

static std::vector<char> contents(const char *path) {
    std::vector<char> bytes;
    FILE *file = fopen(path, "rb");
    CHECK(file != nullptr);
    for (int c; (c = getc(file)) != EOF;) bytes.push_back(static_cast<char>(c));
    fclose(file);
    return bytes;
}

int main(int count, char **arguments) {
    CHECK(count >= 2);
    std::vector<char> code = contents(arguments[1]);
    hipModule_t module;
    if (count == 3) {
        // Zeros behind the end: the loader is not told how long the code object is.
        size_t size = strtoul(arguments[2], nullptr, 0);
        std::fill(code.begin() + std::min(size, code.size()), code.end(), 0);
        puts(hipGetErrorName(hipModuleLoadData(&module, code.data())));
        return 0;
    }
    hipFunction_t function;
    OK(hipModuleLoadData(&module, code.data()));
    OK(hipModuleGetFunction(&function, module, "store"));
    CHECK(hipModuleGetFunction(&function, module, "absent") == hipErrorNotFound);
    OK(hipModuleGetFunction(&function, module, "store"));
    Buffer<int> data(64);
    struct {
        int *data;
        int value;
    } parameters{data, 17};
    size_t size = sizeof(parameters);
    void *extra[] = {HIP_LAUNCH_PARAM_BUFFER_POINTER, &parameters, HIP_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     HIP_LAUNCH_PARAM_END};
    OK(hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, nullptr, nullptr, extra));
    std::vector<int> got = data.read();
    for (int i = 0; i < 64; i++) CHECK(got[i] == 17 + i);
    OK(hipModuleUnload(module));

    CHECK(hipModuleLoad(&module, "/absent") != hipSuccess);
}
