#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

#include "config.h"
#include "own_code.h"
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

constexpr size_t kMostNamed = 8;        // GPUs in a message
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

std::string joined(const std::vector<std::string> &words, const char *between) {
    std::string text;
    for (const std::string &word : words) text += (text.empty() ? "" : between) + word;
    return text;
}

// Return whether code for a GPU and features, such as "gfx90a:xnack+", runs on a GPU with all these features.
bool suits(const std::string &code, const std::string &target) {
    size_t end = std::min(code.find(':'), code.size());
    if (code.substr(0, end) != target.substr(0, target.find(':'))) return false;
    for (size_t begin = end; begin < code.size(); begin = end) {
        end = std::min(code.find(':', begin + 1), code.size());
        if (target.find(code.substr(begin, end - begin)) == std::string::npos) return false;
    }
    return true;
}

// Return the GPU to emulate: the one that HIPSIM_GPU names, or the first one for which the program has code. Say so if it has
// code for GPUs, but not for this one, because HIP's own message names no GPU.
std::string gpu() {
    const char *asked = value_of("HIPSIM_GPU");
    std::set<std::string> has_code_for = gpus_of_program();
    std::vector<std::string> known, suitable, other(has_code_for.begin(), has_code_for.end());
    auto target = [](const Gpu &one) {
        return one.name + std::string(one.sram_ecc ? ":sramecc+:xnack-" : "");
    };
    auto runs_on = [&](const Gpu &one) {
        return std::any_of(other.begin(), other.end(),
                           [&](const std::string &code) { return suits(code, target(one)); });
    };
    for (const Gpu &one : kGpus) {
        known.emplace_back(one.name);
        if (runs_on(one)) suitable.emplace_back(one.name);
    }
    if (asked != nullptr && std::find(known.begin(), known.end(), asked) == known.end())
        wrong("HIPSIM_GPU", "set it to " + joined(known, " or "));
    std::string gpu = asked != nullptr ? asked : suitable.empty() ? known[0] : suitable[0], emulated = gpu;
    if (!other.empty() && std::find(suitable.begin(), suitable.end(), gpu) == suitable.end()) {
        bool has_processor = std::any_of(other.begin(), other.end(), [&](const std::string &code) {
            return code.substr(0, code.find(':')) == gpu;
        });
        for (const Gpu &one : kGpus)
            if (has_processor && gpu == one.name) emulated = target(one);
        if (other.size() > kMostNamed) other.resize(kMostNamed);
        std::string advice =
            suitable.empty() ? "build it with --offload-arch=" + gpu : "set HIPSIM_GPU=" + suitable[0];
        fprintf(stderr, "hipsim: %s has code for %s, not for %s; %s\n", program_invocation_short_name,
                joined(other, ", ").c_str(), emulated.c_str(), advice.c_str());
    }
    return gpu;
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
