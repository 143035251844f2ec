// The parameters of a launch on the embedded device, as one buffer of any size or one by one.
#include <cstdlib>

#include "driver/launch.cpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    // First the sizes of the parameters, then what the program passes.
    cudasim::Kernel kernel{};
    const size_t count = std::min<size_t>(data[0] % 16, size - 2);
    for (size_t i = 0; i < count; i++) {
        kernel.parameters.push_back({kernel.parameter_bytes, data[2 + i], 1});
        kernel.parameter_bytes += data[2 + i];
    }
    std::vector<uint8_t> passed(data + 2 + count, data + size), buffer;
    size_t told = passed.size();
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, passed.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &told,
                     CU_LAUNCH_PARAM_END};
    if (passed.empty()) extra[1] = nullptr;
    std::vector<std::vector<uint8_t>> values;
    std::vector<void *> pointers;
    for (const auto &parameter : kernel.parameters) values.emplace_back(std::max<size_t>(parameter.size, 1));
    for (auto &value : values) pointers.push_back(data[1] & 2 ? nullptr : value.data());
    const CUresult status =
        data[1] & 1 ? cudasim::driver::gather_parameters(kernel, nullptr, extra, buffer)
                    : cudasim::driver::gather_parameters(kernel, pointers.data(), nullptr, buffer);
    if (status == CUDA_SUCCESS && buffer.size() != kernel.parameter_bytes) abort();
    return 0;
}
