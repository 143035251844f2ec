#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "config.h"
#include "thunk/gpus.h"

namespace hipsim {
namespace {

const char *value_of(const char *name) {
    const char *value = getenv(name);
    return value != nullptr && *value != '\0' ? value : nullptr;
}

[[noreturn]] void wrong(const char *name, const std::string &advice) {
    fprintf(stderr, "hipsim: %s is '%s'; %s\n", name, getenv(name), advice.c_str());
    _exit(2);
}

int number(const char *name, int least, int most, int otherwise, const char *advice) {
    const char *text = value_of(name);
    if (text == nullptr) return otherwise;
    size_t digits = strspn(text, "0123456789");
    long value = digits > 0 && digits < 10 && text[digits] == '\0' ? strtol(text, nullptr, 10) : -1;
    if (value < least || value > most) wrong(name, advice);
    return static_cast<int>(value);
}

constexpr double kMostMemory = 0x1p43;  // 8T

uint64_t memory() {
    const char *name = "HIPSIM_MEMORY", *units = "kKmMgGtT";
    const char *text = value_of(name);
    if (text == nullptr) return uint64_t{16} << 30;
    char *end = nullptr;
    double size = strtod(text, &end);
    if (const char *unit = *end ? strchr(units, *end) : nullptr) {
        size *= static_cast<double>(uint64_t{1} << 10 * ((unit - units) / 2 + 1));
        end++;
    }
    bool valid =
        strchr("0123456789.", *text) != nullptr && *end == '\0' && size >= 64 << 20 && size <= kMostMemory;
    if (!valid) wrong(name, "set it to a size from 64M to 8T, such as 16G");
    return static_cast<uint64_t>(size) & ~uint64_t{0xfff};
}

std::string gpu() {
    const char *text = value_of("HIPSIM_GPU");
    if (text == nullptr) return kGpus[0].name;
    std::string names;
    for (const Gpu &known : kGpus) {
        if (strcmp(known.name, text) == 0) return text;
        names += names.empty() ? known.name : std::string(" or ") + known.name;
    }
    wrong("HIPSIM_GPU", "set it to " + names);
}

bool virtual_clock() {
    const char *text = value_of("HIPSIM_CLOCK");
    if (text != nullptr && strcmp(text, "virtual") != 0 && strcmp(text, "real") != 0)
        wrong("HIPSIM_CLOCK", "unset it, or set it to real or virtual");
    return text != nullptr && strcmp(text, "virtual") == 0;
}

Config read() {
    Config config{};
    config.gpu = gpu();
    config.devices = number("HIPSIM_DEVICES", 0, 4, 1, "set it to a number of devices from 0 to 4");
    config.memory = memory();
    config.threads = number("HIPSIM_THREADS", 1, 1024, 0, "set it to a number of threads from 1 to 1024");
    config.virtual_clock = virtual_clock();
    config.hostile = number("HIPSIM_HOSTILE", 0, 1, 0, "set it to 0 or 1") != 0;
    config.seed = static_cast<uint64_t>(
        number("HIPSIM_SEED", 0, 999999999, 1, "set it to a number of at most 9 digits"));
    return config;
}

}  // namespace

const Config &config() {
    static const Config *const instance = new Config(read());
    return *instance;
}

}  // namespace hipsim
