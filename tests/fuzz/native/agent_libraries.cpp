// A library that the agent copies under another name, or searches for CUPTI.
#include <cstdlib>

#include "log/private_copy.cpp"

#include "log/other_profilers.cpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    std::vector<char> bytes(data, data + size);  // exactly as long as the file
    const bool renamed = gpubpf::rename_library(bytes);
    size_t changed = 0;
    for (size_t i = 0; i < size; i++) changed += bytes[i] != static_cast<char>(data[i]);
    if (bytes.size() != size || changed != (renamed ? 3 : 0)) abort();
    static const int file = memfd_create("fuzz", MFD_CLOEXEC);
    static const std::string path = "/proc/self/fd/" + std::to_string(file);
    if (ftruncate(file, 0) != 0 || pwrite(file, data, size, 0) != static_cast<ssize_t>(size)) abort();
    gpubpf::mentions_cupti(path);
    return 0;
}
