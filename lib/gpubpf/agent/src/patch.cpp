#include "patch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <link.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "file_code.h"
#include "lifetime.h"
#include "machine/code.h"
#include "wire.h"

namespace gpubpf {

using namespace machine;

namespace {

constexpr size_t kTrampolineSize = 128;  // per hook: the jump to the replacement, then the moved instructions
constexpr size_t kEntrySize = 32;        // the part of a trampoline that leads to the replacement
constexpr size_t kReadSize = 512;        // bytes of a function to search for jumps

uintptr_t page_size() {
    static const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    return size;
}

// Stores to code are done: processors may now run it.
void code_changed(const uint8_t *at, size_t size) {
    auto *const begin = reinterpret_cast<char *>(const_cast<uint8_t *>(at));
    __builtin___clear_cache(begin, begin + size);
}

// Allocates trampolines: executable memory within reach of the jumps in hooked functions. The memory is never freed, because
// a thread may be about to run it. A trampoline's destination can change. It is in the next page, which stays writable.
class Trampolines {
  public:
    using Destination = std::atomic<const void *>;
    // Return a trampoline near `target`, or null.
    uint8_t *take(const uint8_t *target) {
        for (Page &page : pages_)
            if (page.used + kTrampolineSize <= page_size() && near(page.base, target))
                return page.base + (page.used += kTrampolineSize) - kTrampolineSize;
        uint8_t *base = map_near(target);
        if (!base) return nullptr;
        pages_.push_back({base, kTrampolineSize});
        return base;
    }
    static Destination *destination_of(uint8_t *trampoline) {
        const auto at = reinterpret_cast<uintptr_t>(trampoline);
        const uintptr_t page = at & ~(page_size() - 1);
        return reinterpret_cast<Destination *>(page + page_size() +
                                               (at - page) / kTrampolineSize * sizeof(Destination));
    }
    // Make the trampolines executable, and no longer writable.
    bool seal() {
        bool ok = true;
        for (Page &page : pages_) {
            code_changed(page.base, page_size());
            ok = mprotect(page.base, page_size(), PROT_READ | PROT_EXEC) == 0 && ok;
        }
        pages_.clear();
        return ok;
    }

  private:
    struct Page {
        uint8_t *base;
        size_t used;
    };
    static bool near(const uint8_t *a, const uint8_t *b) {
        int64_t distance = reinterpret_cast<int64_t>(a) - reinterpret_cast<int64_t>(b);
        return distance < kReach - 65536 && distance > -(kReach - 65536);
    }
    static uint8_t *map_near(const uint8_t *target) {
        auto at = reinterpret_cast<uintptr_t>(target) & ~uintptr_t(0xFFFF);
        for (uintptr_t step = 0x10000; step < uintptr_t(kReach) - 0x20000;
             step += step < 0x1000000 ? 0x10000 : 0x400000)
            for (int side = 0; side < 2; ++side) {
                uintptr_t wanted = side ? at - step : at + step;
                if ((side && step > at) || wanted >> kAddressBits) continue;
                void *p = mmap(reinterpret_cast<void *>(wanted), 2 * page_size(), PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
                if (p == MAP_FAILED) continue;
                if (near(static_cast<uint8_t *>(p), target)) return static_cast<uint8_t *>(p);
                munmap(p, 2 * page_size());  // older kernels treat the address as a hint
            }
        return nullptr;
    }
    std::vector<Page> pages_;
};

// Return whether a later instruction, such as the end of a short loop, jumps into the first `span` bytes of the function.
bool jumps_into(const std::vector<uint8_t> &code, size_t span) {
    for (size_t at = 0; at + kMostRead < code.size();) {
        const Step next = step(code.data() + at);
        if (!next.length) break;
        if (next.destination > code.data() && next.destination < code.data() + span) return true;
        at += next.length;
    }
    return false;
}

// Copy instructions of at least `span` bytes from `from` (`code` has their bytes) to `to`, followed by a jump back to the rest.
// Set `moved` to their size. Return null, or the reason why they cannot be moved.
const char *move(const uint8_t *from, const std::vector<uint8_t> &code, size_t span, uint8_t *to,
                 const uint8_t *end, size_t &moved) {
    moved = 0;
    while (moved < span) {
        const uint8_t *source = code.data() + moved;
        const Step next = step(source);
        if (!next.length || next.kind == Step::kImmovable) return "an instruction that cannot be moved";
        if (next.kind == Step::kBreakpoint) return "a breakpoint: another tool traces this process";
        if (to + next.length + kMoreMoved + kJumpSize > end) return "its first instructions are too long";
        if (next.destination == code.data()) return "a jump to its beginning";
        if (const char *why = move_instruction(source, from + moved, to)) return why;
        moved += next.length;
        if (next.kind == Step::kEnd || next.kind == Step::kJump) {
            if (moved < span && !is_padding(code.data() + moved, span - moved)) return "too short";
            return jumps_into(code, moved) ? "a jump into its first instructions" : nullptr;
        }
    }
    if (jumps_into(code, moved)) return "a jump into its first instructions";
    return put_jump(to, to, from + moved) ? nullptr : "too far a jump";
}

// Makes code writable, one region at a time, until the object is destroyed.
class WritableCode {
  public:
    WritableCode() = default;
    ~WritableCode() { close(); }
    WritableCode(const WritableCode &) = delete;
    WritableCode &operator=(const WritableCode &) = delete;
    bool open(const uint8_t *at, size_t size) {
        const uintptr_t first = reinterpret_cast<uintptr_t>(at) & ~(page_size() - 1),
                        end = (reinterpret_cast<uintptr_t>(at) + size + page_size() - 1) & ~(page_size() - 1);
        if (first == first_ && end == end_) return true;
        close();
        if (mprotect(reinterpret_cast<void *>(first), end - first, PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
            return false;
        first_ = first;
        end_ = end;
        return true;
    }

  private:
    void close() {
        if (end_) mprotect(reinterpret_cast<void *>(first_), end_ - first_, PROT_READ | PROT_EXEC);
        first_ = end_ = 0;
    }
    uintptr_t first_ = 0, end_ = 0;
};

// Write code that no thread is running, through /proc/self/mem if the mapping cannot be made writable.
bool write_code(WritableCode &writable, const Patch &patch) {
    auto *at = reinterpret_cast<uint8_t *>(patch.at);
    if (writable.open(at, patch.size)) {
        if (!exchange_code(at, patch.before, patch.after, patch.size)) memcpy(at, patch.after, patch.size);
        code_changed(at, patch.size);
        return true;
    }
    int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    bool ok = fd >= 0 && pwrite(fd, patch.after, patch.size, static_cast<off_t>(patch.at)) ==
                             static_cast<ssize_t>(patch.size);
    if (fd >= 0) close(fd);
    return ok;
}

// Return where the function's own code begins: after what indirect calls need.
uint8_t *entry_of(FileCode &file, void *target) {
    auto *at = static_cast<uint8_t *>(target);
    const std::vector<uint8_t> code = file.read(at, kLandingPadSize);
    return code.size() == kLandingPadSize ? at + landing_pad(code.data()) : at;
}

// Return whether a thread in a call may still have to return into the jump that is written at `jump`.
bool returns_into(const std::vector<uint8_t> &code, size_t jump) {
    for (size_t at = 0; at < jump + kJumpSize && at + kMostRead < code.size();) {
        const Step next = step(code.data() + at);
        if (!next.length) return true;
        at += next.length;
        if (next.kind == Step::kCall && at > jump && at < jump + kJumpSize) return true;
    }
    return false;
}

// A function that was hooked before. The next attachment reuses its trampoline.
struct HookedFunction {
    Patch patch{};
    uint8_t *trampoline = nullptr;
    std::vector<uint8_t> code;  // the instructions that were moved
    const char *name = nullptr;
    bool wanted = false;  // by the current attachment
    uint8_t *original() const { return trampoline + kEntrySize; }
    uint8_t *at() const { return reinterpret_cast<uint8_t *>(patch.at); }
    bool is_in() const { return memcmp(at(), patch.after, patch.size) == 0; }
};

struct HookedFunctions {
    std::mutex lock;  // guards `by_entry`
    std::map<uint8_t *, HookedFunction> by_entry;
};
NeverDestroyed<HookedFunctions> first_functions;
HookedFunctions *functions = &first_functions.value;

// Direct calls to the driver's own code again. The caller holds the lock.
void take_out(HookedFunction &function, WritableCode &writable) {
    Trampolines::destination_of(function.trampoline)->store(function.original(), std::memory_order_release);
    // If the code cannot be changed back, the jump stays and leads to the original.
    if (function.is_in() && writable.open(function.at(), function.patch.size)) {
        exchange_code(function.at(), function.patch.after, function.patch.before, function.patch.size);
        code_changed(function.at(), function.patch.size);
    }
}

// Direct calls to the code of libraries that are still loaded again, except for functions that are to be kept. The linker's lock is held
// meanwhile, so no library is unloaded.
template <class Keep>
void take_out_all(const Keep &keep) {
    std::lock_guard<std::mutex> hold(functions->lock);
    struct State {
        const Keep &keep;
        WritableCode writable;
    } state{keep, {}};
    const auto of_library = [](dl_phdr_info *library, size_t, void *data) {
        auto &now = *static_cast<State *>(data);
        for (int i = 0; i < library->dlpi_phnum; ++i) {
            const ElfW(Phdr) &part = library->dlpi_phdr[i];
            if (part.p_type != PT_LOAD || !(part.p_flags & PF_X)) continue;
            auto *const begin = reinterpret_cast<uint8_t *>(library->dlpi_addr + part.p_vaddr);
            const auto end = functions->by_entry.lower_bound(begin + part.p_memsz);
            for (auto it = functions->by_entry.lower_bound(begin); it != end; ++it)
                if (!now.keep(it->second)) take_out(it->second, now.writable);
        }
        return 0;
    };
    dl_iterate_phdr(of_library, &state);
}

// Hook a function again, through its existing trampoline. Return the reason if that is impossible, or null.
const char *hook_again(Hook &h, HookedFunction &function, std::vector<Patch> &patches) {
    if (!function.is_in() && memcmp(function.at(), function.patch.before, function.patch.size) != 0)
        return kAlreadyChanged;
    h.original = function.original();
    function.wanted = true;
    Trampolines::destination_of(function.trampoline)->store(h.replacement, std::memory_order_release);
    if (!function.is_in()) patches.push_back(function.patch);
    return nullptr;
}

// Hook the function at `entry` for the first time. `code` has its bytes. Return the reason if that is impossible, or null.
const char *hook_first_time(Hook &h, uint8_t *entry, std::vector<uint8_t> code, Trampolines &trampolines,
                            bool running, std::vector<Patch> &patches) {
    uint8_t *const trampoline = trampolines.take(entry);
    if (!trampoline) return "no memory within reach";
    size_t moved = 0;
    auto move_behind = [&](size_t prologue) {
        return move(entry, code, prologue + kJumpSize, trampoline + kEntrySize, trampoline + kTrampolineSize,
                    moved);
    };
    Prologue prologue = entry == h.target ? prologue_of(code.data()) : Prologue();
    const char *why = move_behind(prologue.length);
    if (why && prologue.length) {  // not possible after the first instruction: also replace that one
        prologue = Prologue();
        why = move_behind(0);
    }
    if (why) return why;
    if (running && returns_into(code, prologue.length)) return "a call in its first instructions";
    uint8_t *const at = entry + prologue.length;
    if (memcmp(at, code.data() + prologue.length, std::max(moved - prologue.length, kJumpSize)) != 0)
        return kAlreadyChanged;
    // Undo the first instruction, then jump to the replacement, or to the original after detaching.
    static_assert(sizeof prologue.undo + kJumpThroughSize <= kEntrySize);
    memcpy(trampoline, prologue.undo, prologue.undo_size);
    put_jump_through(trampoline + prologue.undo_size, Trampolines::destination_of(trampoline));
    Trampolines::destination_of(trampoline)->store(h.replacement, std::memory_order_release);
    h.original = trampoline + kEntrySize;
    Patch patch{reinterpret_cast<uintptr_t>(at), {}, {}, kJumpSize};
    memcpy(patch.before, at, kJumpSize);
    if (!put_jump(patch.after, at, trampoline)) return "too far a jump";
    patches.push_back(patch);
    code.resize(moved);
    functions->by_entry[entry] = {patch, trampoline, std::move(code), h.name, true};
    return nullptr;
}

std::string prepare(Hook *hooks, size_t count, std::string &left_out, bool running,
                    std::vector<Patch> &patches) {
    std::lock_guard<std::mutex> hold(functions->lock);
    std::map<uint8_t *, size_t> by_entry;
    std::string failed;
    Trampolines trampolines;
    FileCode file;
    auto hook = [&](Hook &h, uint8_t *at) -> const char * {
        std::vector<uint8_t> code = file.read(at, kReadSize);
        if (code.size() < kEntrySize + kJumpSize) return "the end of its library";
        const Step first = step(code.data());
        if (first.kind == Step::kJump) {
            uint8_t *destination = entry_of(file, at + (first.destination - code.data()));
            if (by_entry.count(destination)) return nullptr;  // the destination is hooked
        }
        auto known = functions->by_entry.find(at);
        if (known != functions->by_entry.end() &&
            std::equal(known->second.code.begin(), known->second.code.end(), code.begin()))
            return hook_again(h, known->second, patches);
        return hook_first_time(h, at, std::move(code), trampolines, running, patches);
    };
    for (size_t i = 0; i < count; ++i)
        if (hooks[i].target) by_entry.emplace(entry_of(file, hooks[i].target), i);
    for (size_t i = 0; i < count; ++i) {
        Hook &h = hooks[i];
        if (!h.target) continue;
        uint8_t *at = entry_of(file, h.target);
        if (by_entry[at] != i) continue;  // the same function by another name
        if (const char *why = hook(h, at)) {
            if (h.lack) left_out += std::string(h.lack) + ": ";
            (h.lack ? left_out : failed) += std::string(h.name) + ": " + why + "\n";
        }
    }
    for (size_t i = 0; i < count; ++i)  // other names of hooked functions
        if (hooks[i].target) hooks[i].original = hooks[by_entry[entry_of(file, hooks[i].target)]].original;
    if (!trampolines.seal()) {
        patches.clear();  // jumps would lead there
        return "all: memory cannot be made executable\n";
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return failed;
}

}  // namespace

std::string install(Hook *hooks, size_t count, std::string &left_out) {
    std::vector<Patch> patches;
    std::string failed = prepare(hooks, count, left_out, false, patches);
    WritableCode writable;
    for (const Patch &p : patches)
        if (!write_code(writable, p)) failed += "code cannot be written\n";
    return failed;
}

std::string prepare(Hook *hooks, size_t count, std::string &left_out, std::vector<Patch> &patches) {
    return prepare(hooks, count, left_out, true, patches);
}

void take_out(bool (*keep)(const char *name)) {
    take_out_all([&](HookedFunction &function) {
        function.wanted = false;
        return keep(function.name);
    });
    barrier_in_all_threads();
}

void take_out_rest(bool (*keep)(const char *name)) {
    take_out_all([&](const HookedFunction &function) { return function.wanted || keep(function.name); });
    barrier_in_all_threads();
}

namespace {

// In a forked child: if another thread of the parent held the lock, the table may be inconsistent. Then the child drops it, and
// cannot hook the same functions again.
void forget_patching() {
    auto *copy = new HookedFunctions;
    if (functions->lock.try_lock()) copy->by_entry = functions->by_entry;
    functions = copy;
}

}  // namespace

const Lifetime patch_lifetime{nullptr, nullptr, nullptr, forget_patching};

namespace {

// Commands of membarrier(2).
constexpr int kBarrier = 1 << 3, kRegisterBarrier = 1 << 4, kCoreBarrier = 1 << 5,
              kRegisterCoreBarrier = 1 << 6;
constexpr useconds_t kDrained =
    20000;  // µs after which no processor holds back a store, without membarrier(2)

}  // namespace

void barrier_in_all_threads() {
    static const bool can = syscall(SYS_membarrier, kRegisterBarrier, 0, 0) == 0;
    static const bool can_core = syscall(SYS_membarrier, kRegisterCoreBarrier, 0, 0) == 0;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool core = can_core && syscall(SYS_membarrier, kCoreBarrier, 0, 0) == 0;
    if (!core && !(can && syscall(SYS_membarrier, kBarrier, 0, 0) == 0)) usleep(kDrained);
}

int patch_file(const std::vector<Patch> &patches) {
    int fd = memory_file("gpubpf-patches", 0);
    const size_t size = patches.size() * sizeof(Patch);
    if (fd >= 0 && (!write_all(fd, patches.data(), size, 0) ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

}  // namespace gpubpf
