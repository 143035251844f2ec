#include "log/stack.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>
#include <mutex>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <unwind.h>
#include <vector>

#include "log/log.h"
#include "log/python.h"
#include "machine/cpu.h"
#include "this_agent.h"
#include "wire.h"

struct dwarf_eh_bases {
    void *text, *data, *function;
};
// Both unwinders, that of gcc and that of LLVM, have this function. Returns a frame description entry (FDE) of .eh_frame, or null.
extern "C" const void *_Unwind_Find_FDE(void *code, dwarf_eh_bases *bases);

namespace gpubpf {

namespace {

// Per process. The tool accepts at most 64 MiB of text.
constexpr size_t kMostBytes = 32 << 20;

constexpr size_t kMostFrames = kStackLimit - 1;  // one more says that frames are missing

struct Frames {
    uintptr_t at[kMostFrames];
    // Where the stack holds the return address; 0: the address is not a return address.
    uintptr_t slot[kMostFrames];
    uintptr_t low[kMostFrames];  // the lowest address that belongs to the frame, on the stack
    size_t count = 0;
    const char *missing = kStackNotUnwound;  // why outer frames are missing; null: none are
};

// The address range of a library's code.
struct Extent {
    uintptr_t first = 0, last = 0;
    bool has(uintptr_t at) const { return at >= first && at < last; }
};

Extent extent_around(const void *code) {
    struct Sought {
        uintptr_t at;
        Extent found;
    } sought{reinterpret_cast<uintptr_t>(code), {}};
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
            auto &s = *static_cast<Sought *>(to);
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto &p = info->dlpi_phdr[i];
                const uintptr_t first = info->dlpi_addr + p.p_vaddr;
                if (p.p_type == PT_LOAD) s.found = {first, first + p.p_memsz};
                if (p.p_type == PT_LOAD && s.found.has(s.at)) return 1;
            }
            s.found = {};
            return 0;
        },
        &sought);
    return sought.found;
}

Extent own_extent() {
    static const Extent extent = extent_around(reinterpret_cast<void *>(&extent_around));
    return extent;
}

Extent drivers;

}  // namespace

bool is_internal(uintptr_t code) noexcept { return drivers.has(code) || own_extent().has(code); }

namespace {

// A walk through the stack.
struct Walk {
    Frames &frames;
    machine::ReturnSlots slots{};
};

_Unwind_Reason_Code frame(_Unwind_Context *context, void *to) {
    auto *walk = static_cast<Walk *>(to);
    Frames *frames = &walk->frames;
    const uintptr_t slot = walk->slots.next(context);
    int before = 0;  // nonzero: the address is the instruction itself, not the one after a call
    uintptr_t at = _Unwind_GetIPInfo(context, &before);
    if (!at) {  // the outermost frame has no caller
        frames->missing = nullptr;
        return _URC_END_OF_STACK;
    }
    if (!before) --at;
    if (!frames->count && is_internal(at)) return _URC_NO_REASON;
    if (frames->count == kMostFrames) {
        frames->missing = kStackTooDeep;
        return _URC_END_OF_STACK;
    }
    frames->slot[frames->count] = before ? 0 : slot;
    frames->low[frames->count] = _Unwind_GetCFA(context);
    frames->at[frames->count++] = at;
    return _URC_NO_REASON;
}

// Whether an entry of .eh_frame says that there is no return address. The entry's own instructions begin at `head`.
bool has_no_caller(const uint8_t *entry, size_t head) {
    constexpr uint8_t kUndefined = 0x07;  // DW_CFA_undefined, followed by the number of a register
    uint32_t length;
    memcpy(&length, entry, sizeof length);
    if (length > 4096) return false;  // such a function has many instructions to unwind, and is not a start
    for (size_t i = head; i + 1 < sizeof length + length; ++i)
        if (entry[i] == kUndefined && entry[i + 1] == machine::kReturnColumn) return true;
    return false;
}

// Whether code is in a function that nothing calls, such as _start. The unwinder of LLVM, which zig links, ends there in the same way
// as at code without unwind information.
bool is_outermost(uintptr_t at) {
    constexpr size_t kFdeHead = 16,
                     kCieHead = 9;  // length, CIE, two addresses of 4 bytes; length, 0, version
    dwarf_eh_bases bases{};
    const auto *fde = static_cast<const uint8_t *>(_Unwind_Find_FDE(reinterpret_cast<void *>(at), &bases));
    if (!fde) return false;
    uint32_t back;  // from this field to the common information entry (CIE)
    memcpy(&back, fde + sizeof back, sizeof back);
    return has_no_caller(fde, kFdeHead) || has_no_caller(fde + sizeof back - back, kCieHead);
}

uint64_t mixed(uint64_t h, uint64_t value) {
    h = (h ^ value) * 0x9E3779B97F4A7C15ull;
    return h ^ h >> 29;
}

uint64_t hash_of(const Frames &f, const PythonFrames &python) {
    uint64_t h = f.count;
    for (size_t i = 0; i < f.count; ++i) h = mixed(h, f.at[i]);
    for (size_t i = 0; i < python.count; ++i)
        h = mixed(mixed(h, python.at[i].code), python.at[i].instruction);
    return h;
}

// Returns the size of the message, in bytes.
size_t tell(const message::Stack &stack) {
    const Writer written(stack);
    tell_tool(Message::Stack, written, -1);
    return written.bytes.size();
}

message::StackFrame described(uintptr_t at) {
    Dl_info info{};
    std::string file, symbol;
    uint64_t offset = 0;
    link_map *map = nullptr;
    if (dladdr1(reinterpret_cast<void *>(at), &info, reinterpret_cast<void **>(&map), RTLD_DL_LINKMAP) &&
        info.dli_fname) {
        file = info.dli_fname;
        if (map && !map->l_name[0]) {  // the program itself is listed by the name it was called with
            char path[4096];
            ssize_t n = readlink("/proc/self/exe", path, sizeof path);
            if (n > 0) file.assign(path, static_cast<size_t>(n));
        }
        offset = at - (map ? map->l_addr : 0);
        if (info.dli_sname) {
            int status = 0;
            char *plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
            symbol = plain ? plain : info.dli_sname;
            free(plain);
        }
    }
    return {at, offset, file, symbol};
}

// Whether native frame `i` runs Python frames, which have their `entry` in it, where the interpreter keeps one.
bool evaluates(const Frames &f, size_t i, const std::string &symbol, const PythonFrames &python) {
    bool known = false;
    for (size_t p = 0; p < python.count; ++p) {
        const uintptr_t entry = python.at[p].entry;
        if (entry >= f.low[i] && (i + 1 == f.count || entry < f.low[i + 1])) return true;
        known = known || entry;
    }
    return !known && symbol == kEvaluates;
}

// Sends a stack. A native frame that runs Python frames is replaced by them.
size_t tell(uint32_t number, const Frames &f, const PythonFrames &python) {
    message::Stack stack{number, {}};
    std::vector<message::StackFrame> native;
    std::vector<bool> runs;
    size_t last = 0;  // the outermost frame that runs Python frames
    for (size_t i = 0; i < f.count; ++i) {
        native.push_back(described(f.at[i]));
        runs.push_back(evaluates(f, i, native[i].symbol, python));
        if (runs[i]) last = i;
    }
    const char *missing = f.missing;
    size_t next = 0;
    for (size_t i = 0; i < f.count; ++i) {
        if (stack.frames.size() == kMostFrames) {
            missing = kStackTooDeep;
            break;
        }
        if (!runs[i] || next == python.count) {
            stack.frames.push_back(native[i]);
            continue;
        }
        bool whole = false;
        while (next < python.count && stack.frames.size() < kMostFrames && (!whole || i == last)) {
            whole = python.at[next].is_first;
            stack.frames.push_back(described(python.at[next++]));
        }
    }
    if (next < python.count || python.more) missing = kStackTooDeep;
    if (missing) stack.frames.push_back({0, 0, "", missing});
    return tell(stack);
}

struct Known {
    std::mutex lock;
    std::unordered_map<uint64_t, uint32_t> stacks;  // by hash of their addresses
    std::atomic<size_t> bytes{0};                   // bytes sent so far
};

// A stack seen at one stack depth. If all return addresses are found again in the same slots, from the
// innermost outwards, the stack is the same. This check costs a hundredth of unwinding.
struct Remembered {
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    uint32_t generation = 0, number = 0;
    uintptr_t here = 0;  // address of the agent's own frame
    Frames frames;
};
constexpr size_t kRemembered = 256;  // sets of kWays entries
constexpr size_t kWays = 2;

bool still(const Remembered &r, uintptr_t here) {
    if (r.here != here || r.generation != generation_of_process() || !r.number) return false;
    // A frame's slot exists as long as the frames inside it are unchanged.
    for (size_t i = 0; i < r.frames.count; ++i)
        if (machine::plain_return_address(*reinterpret_cast<const uintptr_t *>(r.frames.slot[i])) - 1 !=
            r.frames.at[i])
            return false;
    return true;
}

AttachmentState<Known> known;

// Returns a number for `hash`, or 0 if there are too many. `is_new`: it must be sent to the tool.
uint32_t number_for(uint64_t hash, bool &is_new) {
    std::lock_guard<std::mutex> hold(known->lock);
    auto it = known->stacks.find(hash);
    is_new = it == known->stacks.end();
    if (!is_new) return it->second;
    if (known->stacks.size() >= kMostStacks || known->bytes >= kMostBytes) return 0;
    const auto number = static_cast<uint32_t>(known->stacks.size()) + 1;
    known->stacks.emplace(hash, number);
    return number;
}

// Whether the program has an interpreter whose frames can be read, given a stack. A library that is not global is found by its frames.
bool runs_python(const Frames &frames) {
    if (void *global = dlsym(RTLD_DEFAULT, kEvaluates))
        return found_python(reinterpret_cast<uintptr_t>(global));
    for (size_t i = 0; i < frames.count; ++i) {
        Dl_info info{};
        if (dladdr(reinterpret_cast<void *>(frames.at[i]), &info) && info.dli_sname &&
            !strcmp(info.dli_sname, kEvaluates))
            return found_python(frames.at[i]);
    }
    return false;
}

uint32_t number_of(const Frames &frames) {
    PythonFrames python;
    python_frames(python);
    bool is_new;
    uint32_t number = number_for(hash_of(frames, python), is_new);
    if (number && is_new && !reads_python() && runs_python(frames)) {  // the first stack with Python frames
        python_frames(python);
        if (python.count) number = number_for(hash_of(frames, python), is_new);
    }
    if (number && is_new) known->bytes += tell(number, frames, python);
    return number;
}

}  // namespace

uint32_t told_name(const std::string &name) {
    bool is_new;
    const uint32_t number = number_for(std::hash<std::string>()(name), is_new);
    if (!number || !is_new) return number;
    known->bytes += tell({number, {{0, 0, "", name}}});
    return number;
}

const Lifetime stack_lifetime{
    [] {
        known.begin();
        drivers = extent_around(driver_code());
    },
    nullptr,
    [] { known.end(); },
    nullptr,
};

const char *called_function() noexcept {
    uintptr_t outermost = 0;
    _Unwind_Backtrace(
        [](_Unwind_Context *context, void *to) {
            const uintptr_t at = _Unwind_GetIP(context) - 1;
            if (!is_internal(at)) return _URC_END_OF_STACK;
            *static_cast<uintptr_t *>(to) = at;
            return _URC_NO_REASON;
        },
        &outermost);
    Dl_info info{};
    const ElfW(Sym) *symbol = nullptr;
    const bool found =
        drivers.has(outermost) &&
        dladdr1(reinterpret_cast<void *>(outermost), &info,
                reinterpret_cast<void **>(const_cast<ElfW(Sym) **>(&symbol)), RTLD_DL_SYMENT) &&
        symbol && outermost - reinterpret_cast<uintptr_t>(info.dli_saddr) < symbol->st_size;
    return found ? info.dli_sname : nullptr;
}

bool stack_lacks(uintptr_t slot) noexcept {
    struct Sought {
        uintptr_t slot;
        bool lacks;
        machine::ReturnSlots slots{};
    } sought{slot, false};
    _Unwind_Backtrace(
        [](_Unwind_Context *context, void *to) {
            auto &s = *static_cast<Sought *>(to);
            const uintptr_t at = s.slots.next(context);
            if (at < s.slot) return _URC_NO_REASON;
            s.lacks = at > s.slot;
            return _URC_END_OF_STACK;
        },
        &sought);
    return sought.lacks;
}

__attribute__((noinline)) uint32_t host_stack() noexcept {
    static Remembered remembered[kRemembered][kWays];
    const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    const auto from = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
    auto &ways = remembered[(here >> 4 ^ here >> 12 ^ from >> 2) % kRemembered];
    uint32_t number = 0;
    quietly([&] {
        for (Remembered &r : ways) {
            if (r.taken.test_and_set(std::memory_order_acquire)) continue;  // another thread is using it
            if (still(r, here)) number = reads_python() ? number_of(r.frames) : r.number;
            r.taken.clear(std::memory_order_release);
            if (number) return;
        }
        Frames frames;
        Walk walk{frames};
        _Unwind_Backtrace(frame, &walk);
        if (frames.count && frames.missing == kStackNotUnwound && is_outermost(frames.at[frames.count - 1]))
            frames.missing = nullptr;
        if (frames.count) number = number_of(frames);
        for (size_t i = 0; i < frames.count; ++i)
            if (!frames.slot[i]) return;  // the stack goes through a signal handler
        Remembered &r = ways[frames.at[0] >> 2 & 1];
        if (!number || r.taken.test_and_set(std::memory_order_acquire)) return;
        r.here = here;
        r.generation = generation_of_process();
        r.number = number;
        r.frames = frames;
        r.taken.clear(std::memory_order_release);
    });
    return number;
}

}  // namespace gpubpf
