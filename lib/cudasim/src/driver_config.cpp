#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "config.h"

namespace cudasim {
namespace {

bool flag(const char *name) {
    const char *value = getenv(name);
    return value != nullptr && *value != '\0' && strcmp(value, "0") != 0;
}

size_t bytes(const char *name, size_t otherwise) {
    const char *value = getenv(name);
    if (value == nullptr || *value == '\0') return otherwise;
    char *end = nullptr;
    double number = strtod(value, &end);
    switch (*end) {
        case 'k':
        case 'K': number *= 1 << 10; break;
        case 'm':
        case 'M': number *= 1 << 20; break;
        case 'g':
        case 'G': number *= 1 << 30; break;
        default: break;
    }
    return number >= 1 << 20 ? static_cast<size_t>(number) : otherwise;
}

Config read() {
    Config made{};
    const char *devices = getenv("CUDASIM_DEVICES");
    made.devices = devices == nullptr ? 1 : std::clamp(atoi(devices), 0, 64);
    made.cc_major = 9;
    made.cc_minor = 0;
    if (const char *cc = getenv("CUDASIM_CC"); cc != nullptr && *cc != '\0') {
        char *end = nullptr;
        long major = strtol(cc, &end, 10);
        long minor = *end == '.' ? strtol(end + 1, nullptr, 10) : 0;
        if (major >= 3 && major < 100 && minor >= 0 && minor < 10) {
            made.cc_major = static_cast<int>(major);
            made.cc_minor = static_cast<int>(minor);
        }
    }
    made.memory = bytes("CUDASIM_MEMORY", size_t{16} << 30);
    made.hostile = flag("CUDASIM_HOSTILE");
    made.hide_variables = flag("CUDASIM_HIDE_VARIABLES");
    const char *seed = getenv("CUDASIM_SEED");
    made.seed = seed == nullptr ? 1 : strtoull(seed, nullptr, 0);
    const char *clock = getenv("CUDASIM_CLOCK");
    made.virtual_clock = clock != nullptr && strcmp(clock, "virtual") == 0;
    if (clock != nullptr && *clock != '\0' && !made.virtual_clock && strcmp(clock, "real") != 0) {
        fprintf(stderr, "cudasim: CUDASIM_CLOCK is '%s'; unset it, or set it to real or virtual\n", clock);
        _exit(2);
    }
    const char *loading = getenv("CUDA_MODULE_LOADING");
    made.eager = loading != nullptr && strcmp(loading, "EAGER") == 0;
    made.lazy_waits = made.hostile && loading != nullptr && strcmp(loading, "LAZY") == 0;
    return made;
}

}  // namespace

const Config &config() {
    static const Config *const made = new Config(read());
    return *made;
}

}  // namespace cudasim
