#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "config.h"
#include "embedded/cache.h"

const char *const embedded::kDevice = "cudasim";

namespace cudasim {
namespace {

bool flag(const char *name) {
    const char *value = getenv(name);
    return value != nullptr && *value != '\0' && strcmp(value, "0") != 0;
}

[[noreturn]] void wrong(const char *name, const char *advice) {
    fprintf(stderr, "cudasim: %s is '%s'; %s\n", name, getenv(name), advice);
    _exit(2);
}

bool set(const char *name) {
    const char *value = getenv(name);
    return value != nullptr && *value != '\0';
}

// Parses a decimal number and advances *text past it. Returns -1 without digits, or if there are too many.
long digits(const char **text) {
    size_t length = strspn(*text, "0123456789");
    long number = length > 0 && length < 16 ? strtol(*text, nullptr, 10) : -1;
    *text += length;
    return number;
}

int devices() {
    const char *name = "CUDASIM_DEVICES";
    if (!set(name)) return 1;
    const char *text = getenv(name);
    long number = digits(&text);
    if (number < 0 || number > 64 || *text != '\0') wrong(name, "set it to a number of devices from 0 to 64");
    return static_cast<int>(number);
}

// NVIDIA documents no number for its drivers. 1024 is a guess, not measured.
int queue() {
    const char *name = "CUDASIM_QUEUE";
    if (!set(name)) return 1024;
    const char *text = getenv(name);
    long number = digits(&text);
    if (number < 1 || number > 1 << 20 || *text != '\0')
        wrong(name, "set it to a number of operations from 1 to 1048576");
    return static_cast<int>(number);
}

void compute_capability(Config &config) {
    const char *name = "CUDASIM_CC";
    if (!set(name)) return;
    const char *text = getenv(name);
    long major = digits(&text), minor = 0;
    if (*text == '.') minor = digits(&++text);
    if (major < 3 || major > 19 || minor < 0 || minor > 9 || *text != '\0')
        wrong(name, "set it to a compute capability such as 9.0");
    config.cc_major = static_cast<int>(major);
    config.cc_minor = static_cast<int>(minor);
}

size_t memory() {
    const char *name = "CUDASIM_MEMORY", *units = "kKmMgG";
    if (!set(name)) return size_t{16} << 30;
    const char *text = getenv(name);
    char *end = nullptr;
    double number = strtod(text, &end);
    if (const char *unit = *end ? strchr(units, *end) : nullptr) {
        number *= size_t{1} << 10 * ((unit - units) / 2 + 1);
        end++;
    }
    bool valid =
        strchr("0123456789.", *text) != nullptr && *end == '\0' && number >= 1 << 20 && number < 1e15;
    if (!valid) wrong(name, "set it to a size of at least 1M, such as 16G");
    return static_cast<size_t>(number);
}

// Returns ns; UINT64_MAX: never.
uint64_t optimize_after() {
    const char *name = "CUDASIM_OPTIMIZE_AFTER";
    if (!set(name)) return 10'000'000'000;
    const char *text = getenv(name);
    if (strcmp(text, "never") == 0) return UINT64_MAX;
    long seconds = digits(&text);
    if (seconds < 0 || seconds > 1'000'000 || *text != '\0')
        wrong(name, "set it to a number of seconds such as 10, or to never");
    return static_cast<uint64_t>(seconds) * 1'000'000'000;
}

Config read() {
    Config config{};
    config.devices = devices();
    config.cc_major = 9;
    config.cc_minor = 0;
    compute_capability(config);
    config.memory = memory();
    config.queue = queue();
    config.optimize_after = optimize_after();
    config.hostile = flag("CUDASIM_HOSTILE");
    const char *instructions = getenv("CUDASIM_SANITIZER_INSTRUCTIONS");
    config.sanitizer_instructions = instructions == nullptr ? 47 : strtoul(instructions, nullptr, 10);
    config.hide_variables = flag("CUDASIM_HIDE_VARIABLES");
    const char *seed = getenv("CUDASIM_SEED");
    config.seed = seed == nullptr ? 1 : strtoull(seed, nullptr, 0);
    const char *clock = getenv("CUDASIM_CLOCK");
    config.virtual_clock = clock != nullptr && strcmp(clock, "virtual") == 0;
    if (set("CUDASIM_CLOCK") && !config.virtual_clock && strcmp(clock, "real") != 0)
        wrong("CUDASIM_CLOCK", "unset it, or set it to real or virtual");
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
