// Device-side printf. The arguments are in the thread's local memory, each aligned to its size.

#include <cstdio>
#include <cstring>
#include <string>

#include "engine/internal.h"

namespace cudasim {

namespace {

constexpr size_t kMaxString = 1 << 16;  // bytes

template <typename T>
T argument(cs_warp *w, uint64_t &at) {
    at = (at + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    T value;
    memcpy(&value, resolve(w, at, sizeof(T), 'r'), sizeof(T));
    at += sizeof(T);
    return value;
}

template <typename T>
void append(std::string &out, const char *spec, T value) {
    char small[256];
    const int n = snprintf(small, sizeof small, spec, value);
    if (n < 0) return;
    if (static_cast<size_t>(n) < sizeof small) {
        out.append(small, static_cast<size_t>(n));
        return;
    }
    const size_t before = out.size();
    out.resize(before + static_cast<size_t>(n) + 1);
    snprintf(&out[before], static_cast<size_t>(n) + 1, spec, value);
    out.resize(before + static_cast<size_t>(n));
}

void string_at(cs_warp *w, uint64_t address, std::string &to) {
    to.clear();
    while (to.size() < kMaxString) {
        const char c = *static_cast<const char *>(resolve(w, address + to.size(), 1, 'r'));
        if (!c) return;
        to.push_back(c);
    }
}

}  // namespace

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"

// A fault leaves this function by longjmp, which runs no destructors. So the strings are thread_local.
uint32_t device_vprintf(cs_warp *w, uint64_t format, uint64_t at) {
    static thread_local std::string text, out, word;
    string_at(w, format, text);
    out.clear();
    uint32_t arguments = 0;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] != '%') {
            out.push_back(text[i]);
            continue;
        }
        const size_t begin = i++;
        char spec[64] = "%";
        size_t n = 1;
        auto keep = [&](char c) {
            if (n + 8 < sizeof spec) spec[n++] = c;
        };
        auto number = [&](int value) {
            char digits[16];
            snprintf(digits, sizeof digits, "%d", value);
            for (const char *d = digits; *d; d++) keep(*d);
        };
        for (; i < text.size() && strchr("-+ #0", text[i]); i++) keep(text[i]);
        for (int part = 0; part < 2; part++) {  // width, precision
            if (part == 1) {
                if (i >= text.size() || text[i] != '.') break;
                keep(text[i++]);
            }
            if (i < text.size() && text[i] == '*') {
                i++;
                arguments++;
                int value = argument<int>(w, at);
                if (value > 4096 || value < -4096) value = 0;
                number(value);
            }
            for (int digits = 0; i < text.size() && text[i] >= '0' && text[i] <= '9'; i++)
                if (digits++ < 4) keep(text[i]);
        }
        bool wide = false;
        int shorts = 0;
        for (; i < text.size() && strchr("hlLqjzt", text[i]); i++) {
            if (text[i] == 'h') shorts++;
            else wide = true;
        }
        const char conversion = i < text.size() ? text[i] : 0;
        switch (conversion) {
            case '%': out.push_back('%'); break;
            case 'd':
            case 'i': {
                long long value = wide ? argument<long long>(w, at) : argument<int>(w, at);
                if (shorts == 1) value = static_cast<short>(value);
                if (shorts >= 2) value = static_cast<signed char>(value);
                arguments++;
                memcpy(spec + n, "lld", 4);
                append(out, spec, value);
                break;
            }
            case 'u':
            case 'x':
            case 'X':
            case 'o': {
                unsigned long long value =
                    wide ? argument<unsigned long long>(w, at) : argument<unsigned>(w, at);
                if (shorts == 1) value = static_cast<unsigned short>(value);
                if (shorts >= 2) value = static_cast<unsigned char>(value);
                arguments++;
                spec[n] = spec[n + 1] = 'l';
                spec[n + 2] = conversion;
                spec[n + 3] = 0;
                append(out, spec, value);
                break;
            }
            case 'c': {
                const int value = argument<int>(w, at);
                arguments++;
                memcpy(spec + n, "c", 2);
                append(out, spec, value);
                break;
            }
            case 'f':
            case 'F':
            case 'e':
            case 'E':
            case 'g':
            case 'G':
            case 'a':
            case 'A': {
                const double value = argument<double>(w, at);
                arguments++;
                spec[n] = conversion;
                spec[n + 1] = 0;
                append(out, spec, value);
                break;
            }
            case 'p': {
                const auto value = argument<uint64_t>(w, at);
                arguments++;
                memcpy(spec + n, "p", 2);
                append(out, spec, reinterpret_cast<void *>(value));
                break;
            }
            case 's': {
                const auto address = argument<uint64_t>(w, at);
                arguments++;
                if (address) string_at(w, address, word);
                else word = "(null)";
                memcpy(spec + n, "s", 2);
                append(out, spec, word.c_str());
                break;
            }
            default:  // not a conversion: print it unchanged
                out.append(text, begin, i - begin + (conversion ? 1 : 0));
        }
    }
    const Environment &environment = *static_cast<Block *>(w->block)->job->launch->environment;
    if (environment.print) environment.print(environment.self, out.data(), out.size());
    else fwrite(out.data(), 1, out.size(), stdout);
    return arguments;
}

#pragma GCC diagnostic pop

}  // namespace cudasim
