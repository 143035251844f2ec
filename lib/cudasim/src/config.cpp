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

size_t bytes(const char *name, size_t fallback) {
    const char *value = getenv(name);
    if (value == nullptr || *value == '\0') return fallback;
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
    return number >= 1 << 20 ? static_cast<size_t>(number) : fallback;
}

Config read() {
    Config config{};
    const char *devices = getenv("CUDASIM_DEVICES");
    config.devices = devices == nullptr ? 1 : std::clamp(atoi(devices), 0, 64);
    config.cc_major = 9;
    config.cc_minor = 0;
    if (const char *cc = getenv("CUDASIM_CC"); cc != nullptr && *cc != '\0') {
        char *end = nullptr;
        long major = strtol(cc, &end, 10);
        long minor = *end == '.' ? strtol(end + 1, nullptr, 10) : 0;
        if (major >= 3 && major < 100 && minor >= 0 && minor < 10) {
            config.cc_major = static_cast<int>(major);
            config.cc_minor = static_cast<int>(minor);
        }
    }
    config.memory = bytes("CUDASIM_MEMORY", size_t{16} << 30);
    config.hostile = flag("CUDASIM_HOSTILE");
    config.hide_variables = flag("CUDASIM_HIDE_VARIABLES");
    const char *seed = getenv("CUDASIM_SEED");
    config.seed = seed == nullptr ? 1 : strtoull(seed, nullptr, 0);
    const char *clock = getenv("CUDASIM_CLOCK");
    config.virtual_clock = clock != nullptr && strcmp(clock, "virtual") == 0;
    if (clock != nullptr && *clock != '\0' && !config.virtual_clock && strcmp(clock, "real") != 0) {
        fprintf(stderr, "cudasim: CUDASIM_CLOCK is '%s'; unset it, or set it to real or virtual\n", clock);
        _exit(2);
    }
    const char *loading = getenv("CUDA_MODULE_LOADING");
    config.eager_loading = loading != nullptr && strcmp(loading, "EAGER") == 0;
    config.lazy_loading_waits = config.hostile && loading != nullptr && strcmp(loading, "LAZY") == 0;
    return config;
}

}  // namespace

const Config &config() {
    static const Config *const instance = new Config(read());
    return *instance;
}

}  // namespace cudasim
