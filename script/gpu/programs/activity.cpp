// Activity records of every kernel, as profilers ask CUPTI for them: what that costs. The driver loads this library where
// CUDA_INJECTION64_PATH names it; ACTIVITY_CUPTI has the candidates for CUPTI's library, with ':' between.
//
// Declared here as CUPTI's documentation has it, so that its headers are not needed.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr int CONCURRENT_KERNEL = 10;  // CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
constexpr size_t BUFFER = 8u << 20;

using Requested = void (*)(uint8_t **buffer, size_t *size, size_t *records);
using Completed = void (*)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

std::atomic<unsigned long> kernels;
int (*next_record)(uint8_t *, size_t, void **);
int (*flush_all)(uint32_t);

void requested(uint8_t **buffer, size_t *size, size_t *records) {
    *buffer = static_cast<uint8_t *>(std::aligned_alloc(8, BUFFER));
    *size = *buffer ? BUFFER : 0;
    *records = 0;
}

void completed(void *, uint32_t, uint8_t *buffer, size_t, size_t valid) {
    void *record = nullptr;
    while (next_record(buffer, valid, &record) == 0) kernels++;
    std::free(buffer);
}

void report() {
    flush_all(1);
    std::fprintf(stderr, "activity: %lu kernels\n", kernels.load());
}

}  // namespace

extern "C" int InitializeInjection() {
    void *library = nullptr;
    std::string names = std::getenv("ACTIVITY_CUPTI") ? std::getenv("ACTIVITY_CUPTI") : "libcupti.so.13";
    for (size_t begin = 0; !library && begin <= names.size();) {
        size_t end = names.find(':', begin);
        if (end == std::string::npos) end = names.size();
        library = dlopen(names.substr(begin, end - begin).c_str(), RTLD_NOW);
        begin = end + 1;
    }
    auto find = [&](const char *name) { return library ? dlsym(library, name) : nullptr; };
    auto callbacks = reinterpret_cast<int (*)(Requested, Completed)>(find("cuptiActivityRegisterCallbacks"));
    auto enable = reinterpret_cast<int (*)(int)>(find("cuptiActivityEnable"));
    next_record = reinterpret_cast<decltype(next_record)>(find("cuptiActivityGetNextRecord"));
    flush_all = reinterpret_cast<decltype(flush_all)>(find("cuptiActivityFlushAll"));
    if (!callbacks || !enable || !next_record || !flush_all || callbacks(requested, completed) || enable(CONCURRENT_KERNEL)) {
        std::fprintf(stderr, "activity: CUPTI cannot be used\n");
        std::exit(70);  // not measured, rather than measured without
    }
    std::atexit(report);
    return 1;
}
