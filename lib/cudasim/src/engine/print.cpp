// Device-side printf. The arguments are in the thread's local memory, each aligned to its size.

#include <cstdio>
#include <cstring>
#include <string>

#include "engine/internal.h"

namespace cudasim {

namespace {

constexpr size_t kMaxString = 1 << 16;  // bytes

// The arguments of one call.
struct Arguments {
    cs_warp *w;
    uint64_t at;         // address of the next argument
    uint32_t taken = 0;  // how many were read

    template <typename T>
    T next() {
        at = (at + sizeof(T) - 1) / sizeof(T) * sizeof(T);
        T value;
        memcpy(&value, resolve(w, at, sizeof(T), 'r'), sizeof(T));
        at += sizeof(T);
        taken++;
        return value;
    }
};

// One conversion of a format, such as %-8.3lld.
struct Conversion {
    char spec[64] = "%";  // the same for snprintf, up to the precision
    size_t size = 1;      // of `spec`
    bool wide = false;    // whether an integer has 64 bits
    int shorts = 0;       // number of h
    char letter = 0;      // 0: the format ends before it

    void keep(char c) {
        if (size + 8 < sizeof spec) spec[size++] = c;
    }

    // Returns the complete specification: `end` is the length and the letter.
    const char *with(const char *end) {
        strcpy(spec + size, end);
        return spec;
    }
};

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

// Reads the conversion whose % is at `at`, and advances `at` to its letter. Reads the arguments that * stands for.
Conversion read_conversion(const std::string &format, size_t &at, Arguments &arguments) {
    Conversion c;
    const auto next_is = [&](const char *any) { return at < format.size() && strchr(any, format[at]); };
    const auto read_number = [&] {
        if (next_is("*")) {
            at++;
            int value = arguments.next<int>();
            if (value > 4096 || value < -4096) value = 0;
            char digits[16];
            snprintf(digits, sizeof digits, "%d", value);
            for (const char *d = digits; *d; d++) c.keep(*d);
        }
        for (int digits = 0; next_is("0123456789"); at++)
            if (digits++ < 4) c.keep(format[at]);
    };
    for (at++; next_is("-+ #0"); at++) c.keep(format[at]);
    read_number();  // width
    if (next_is(".")) {
        c.keep(format[at++]);
        read_number();  // precision
    }
    for (; next_is("hlLqjzt"); at++) {
        if (format[at] == 'h') c.shorts++;
        else c.wide = true;
    }
    if (at < format.size()) c.letter = format[at];
    return c;
}

// Appends the next argument. Returns false for an unknown conversion.
bool print_argument(std::string &out, Conversion &c, Arguments &arguments) {
    static thread_local std::string word;
    switch (c.letter) {
        case 'd':
        case 'i': {
            long long value = c.wide ? arguments.next<long long>() : arguments.next<int>();
            if (c.shorts == 1) value = static_cast<short>(value);
            if (c.shorts >= 2) value = static_cast<signed char>(value);
            append(out, c.with("lld"), value);
            return true;
        }
        case 'u':
        case 'x':
        case 'X':
        case 'o': {
            unsigned long long value =
                c.wide ? arguments.next<unsigned long long>() : arguments.next<unsigned>();
            if (c.shorts == 1) value = static_cast<unsigned short>(value);
            if (c.shorts >= 2) value = static_cast<unsigned char>(value);
            const char end[] = {'l', 'l', c.letter, 0};
            append(out, c.with(end), value);
            return true;
        }
        case 'c': append(out, c.with("c"), arguments.next<int>()); return true;
        case 'f':
        case 'F':
        case 'e':
        case 'E':
        case 'g':
        case 'G':
        case 'a':
        case 'A': {
            const char end[] = {c.letter, 0};
            append(out, c.with(end), arguments.next<double>());
            return true;
        }
        case 'p': append(out, c.with("p"), reinterpret_cast<void *>(arguments.next<uint64_t>())); return true;
        case 's':
            if (const auto address = arguments.next<uint64_t>()) string_at(arguments.w, address, word);
            else word = "(null)";
            append(out, c.with("s"), word.c_str());
            return true;
        default: return false;
    }
}

}  // namespace

// A fault leaves this file by longjmp, which runs no destructors. So the strings are thread_local.
uint32_t device_vprintf(cs_warp *w, uint64_t format, uint64_t at) {
    static thread_local std::string text, out;
    string_at(w, format, text);
    out.clear();
    Arguments arguments{w, at};
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] != '%') {
            out.push_back(text[i]);
            continue;
        }
        const size_t begin = i;
        Conversion c = read_conversion(text, i, arguments);
        if (c.letter == '%') out.push_back('%');
        else if (!print_argument(out, c, arguments))  // print it unchanged
            out.append(text, begin, i - begin + (c.letter ? 1 : 0));
    }
    const Environment &environment = *static_cast<Block *>(w->block)->job->launch->environment;
    if (environment.print) environment.print(environment.self, out.data(), out.size());
    else fwrite(out.data(), 1, out.size(), stdout);
    return arguments.taken;
}

}  // namespace cudasim
