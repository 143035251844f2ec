// NVTX: the ranges that a program marks with NVIDIA's headers (nvtx3/nvToolsExt.h).
//
// Each library that is compiled with these headers has its own table of functions. At its first call of NVTX, it loads the library that
// NVTX_INJECTION64_PATH names, and calls InitializeInjectionNvtx2, which puts functions into the table. NVTX's interface for this is
// documented in nvtx3/nvtxDetail/nvtxInit.h and nvtxTypes.h.
#include <cstddef>
#include <cstdint>
#include <cwchar>
#include <string>

#include "log/ranges.h"
#include "this_agent.h"

namespace gpubpf {

namespace {

// As nvtxTypes.h and nvToolsExt.h define them.
enum { kCallbacks = 1 };                          // a table that NVTX exports
enum { kCore = 1, kCore2 = 5 };                   // modules of functions
enum { kAscii = 1, kWide = 2, kRegistered = 3 };  // types of a message
using Function = void (*)();
struct Callbacks {
    size_t size;
    int (*functions_of)(int module, Function ***table, unsigned *count);
};
struct Message {
    int32_t type, unused;
    union {
        const char *ascii;
        const wchar_t *wide;
        uintptr_t registered;
    };
};
struct Attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    Message message;
};
static_assert(offsetof(Attributes, message) == 32 && sizeof(Attributes) == 48);

uint32_t number(const char *text) { return text_number(text ? text : ""); }

uint32_t number(const wchar_t *text) {
    std::string made;
    quietly([&] {
        for (const wchar_t *at = text ? text : L""; *at && made.size() < 4096; ++at) {
            const auto c = static_cast<uint32_t>(*at);
            if (c < 0x80) {
                made += static_cast<char>(c);
                continue;
            }
            const int further = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
            made += static_cast<char>((0xFF80 >> further & 0xFF) | c >> 6 * further);
            for (int i = further; i-- > 0;) made += static_cast<char>(0x80 | (c >> 6 * i & 0x3F));
        }
    });
    return text_number(made);
}

uint32_t number(const Attributes *given) {
    if (!given || given->size < sizeof *given) return number("");
    switch (given->message.type) {
        case kAscii: return number(given->message.ascii);
        case kWide: return number(given->message.wide);
        case kRegistered: {
            const uintptr_t known = given->message.registered;
            return known && known <= kMostTexts ? static_cast<uint32_t>(known) : kUnknownText;
        }
        default: return number("");
    }
}

// A domain's handle, and that of a registered text, is the number of its text.
using Handle = uintptr_t;
uint32_t domain_of(Handle domain) { return static_cast<uint32_t>(domain); }

template <class Text>
int push(Text text) {
    return push_range(0, number(text));
}
template <class Text>
uint64_t start(Text text) {
    return start_range(0, number(text));
}
template <class Text>
Handle text_handle(Text text) {
    return number(text);
}
int pop() { return pop_range(0); }
void end(uint64_t id) { end_range(id); }
int push_in(Handle domain, const Attributes *given) { return push_range(domain_of(domain), number(given)); }
int pop_in(Handle domain) { return pop_range(domain_of(domain)); }
uint64_t start_in(Handle domain, const Attributes *given) {
    return start_range(domain_of(domain), number(given));
}
void end_in(Handle, uint64_t id) { end_range(id); }
template <class Text>
Handle register_in(Handle, Text text) {
    return number(text);
}

struct Put {
    unsigned at;
    Function function;
};
template <class Type>
Put put(unsigned at, Type *function) {
    return {at, reinterpret_cast<Function>(function)};
}

const Put kOfCore[] = {
    put(4, start<const Attributes *>), put(5, start<const char *>),
    put(6, start<const wchar_t *>),    put(7, end),
    put(8, push<const Attributes *>),  put(9, push<const char *>),
    put(10, push<const wchar_t *>),    put(11, pop),
};
const Put kOfCore2[] = {
    put(2, start_in),
    put(3, end_in),
    put(4, push_in),
    put(5, pop_in),
    put(10, register_in<const char *>),
    put(11, register_in<const wchar_t *>),
    put(12, text_handle<const char *>),
    put(13, text_handle<const wchar_t *>),
};

template <size_t kCount>
bool fill(const Callbacks &callbacks, int module, const Put (&functions)[kCount]) {
    Function **table = nullptr;
    unsigned count = 0;
    if (!callbacks.functions_of(module, &table, &count) || !table) return false;
    for (const Put &one : functions)
        if (one.at < count && table[one.at]) *table[one.at] = one.function;
    return true;
}

}  // namespace

}  // namespace gpubpf

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    const void *(*exported)(uint32_t table)) {
    using namespace gpubpf;
    const auto *callbacks = static_cast<const Callbacks *>(exported ? exported(kCallbacks) : nullptr);
    if (!callbacks || callbacks->size < sizeof *callbacks) return 0;
    return fill(*callbacks, kCore, kOfCore) && fill(*callbacks, kCore2, kOfCore2);
}
