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

#include "instruction.h"
#include "lifetime.h"
#include "prologue.h"
#include "wire.h"

namespace gpubpf {

#ifdef __x86_64__

namespace {

constexpr size_t kJumpSize = 5;          // jmp rel32
constexpr size_t kTrampolineSize = 128;  // per hook: the jump to the replacement, then the moved instructions
constexpr size_t kEntrySize = 32;        // the part of a trampoline that leads to the replacement
constexpr size_t kReadSize = 512;        // bytes of a function to search for jumps
constexpr size_t kLongestInstruction = 15;
constexpr int64_t kReach = int64_t(1) << 31;

// Allocates trampolines: executable memory within a 32-bit distance of the hooked functions. The memory is never freed, because
// a thread may be about to run it. A trampoline's destination can change. It is in the next page, which stays writable.
class Trampolines {
  public:
    using Destination = std::atomic<const void *>;
    // Return a trampoline near `target`, or null.
    uint8_t *take(const uint8_t *target) {
        for (Page &page : pages_)
            if (page.used + kTrampolineSize <= kPageSize && near(page.base, target))
                return page.base + (page.used += kTrampolineSize) - kTrampolineSize;
        uint8_t *base = map_near(target);
        if (!base) return nullptr;
        pages_.push_back({base, kTrampolineSize});
        return base;
    }
    static Destination *destination_of(uint8_t *trampoline) {
        const auto at = reinterpret_cast<uintptr_t>(trampoline);
        const uintptr_t page = at & ~uintptr_t(kPageSize - 1);
        return reinterpret_cast<Destination *>(page + kPageSize +
                                               (at - page) / kTrampolineSize * sizeof(Destination));
    }
    // Make the trampolines executable, and no longer writable.
    bool seal() {
        bool ok = true;
        for (Page &page : pages_) ok = mprotect(page.base, kPageSize, PROT_READ | PROT_EXEC) == 0 && ok;
        pages_.clear();
        return ok;
    }

  private:
    static constexpr size_t kPageSize = 4096;
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
                if ((side && step > at) || wanted >> 47) continue;
                void *p = mmap(reinterpret_cast<void *>(wanted), 2 * kPageSize, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
                if (p == MAP_FAILED) continue;
                if (near(static_cast<uint8_t *>(p), target)) return static_cast<uint8_t *>(p);
                munmap(p, 2 * kPageSize);  // older kernels treat the address as a hint
            }
        return nullptr;
    }
    std::vector<Page> pages_;
};

bool put_distance(uint8_t *at, size_t after, const uint8_t *to) {
    int64_t distance = to - (at + after);
    if (distance >= kReach || distance < -kReach) return false;
    auto d = static_cast<int32_t>(distance);
    memcpy(at, &d, sizeof d);
    return true;
}

// Return whether all bytes are padding that compilers put between functions.
bool is_padding(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n;) {
        if (p[i] == 0xCC || p[i] == 0x90 || p[i] == 0x00) {
            ++i;
            continue;
        }
        const Instruction found = decode(p + i);
        const bool nop = found.length && !found.rex && p[i] != 0xF3 &&
                         ((found.map == Instruction::kTwoByte && found.opcode == 0x1F) ||
                          (found.map == Instruction::kOneByte && found.opcode == 0x90));
        if (!nop) return false;
        i += found.length;
    }
    return true;
}

// Return the destination of a relative instruction at `code`.
const uint8_t *destination_of(const uint8_t *code, const Instruction &instruction) {
    int32_t distance = 0;
    if (instruction.distance_size == 4) memcpy(&distance, code + instruction.distance_at, 4);
    else distance = static_cast<int8_t>(code[instruction.distance_at]);
    return code + instruction.length + distance;
}

// Return whether a later instruction, such as the end of a short loop, jumps into the first `span` bytes of the function.
bool jumps_into(const std::vector<uint8_t> &code, size_t span) {
    for (size_t at = 0; at + kLongestInstruction < code.size();) {
        const uint8_t *p = code.data() + at;
        const Instruction next = decode(p);
        if (!next.length) break;
        if (next.distance_size && destination_of(p, next) > code.data() &&
            destination_of(p, next) < code.data() + span)
            return true;
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
        const Instruction next = decode(source);
        if (!next.length || next.kind == Instruction::kImmovable)
            return "an instruction that cannot be moved";
        if (*source == 0xCC) return "a breakpoint: another tool traces this process";
        if (to + next.length + 16 > end) return "its first instructions are too long";
        if (next.distance_size) {
            const uint8_t *destination = from + (destination_of(source, next) - code.data());
            if (destination == from) return "a jump to its beginning";
            if (next.kind == Instruction::kBranch) {
                *to++ = 0x0F;
                *to++ = static_cast<uint8_t>(0x80 | next.condition);
            } else {
                *to++ = next.kind == Instruction::kCall ? 0xE8 : 0xE9;
            }
            if (!put_distance(to, 4, destination)) return "too far a jump";
            to += 4;
        } else {
            memcpy(to, source, next.length);
            if (next.displacement_at) {
                int32_t displacement;
                memcpy(&displacement, source + next.displacement_at, 4);
                if (!put_distance(to + next.displacement_at, next.length - next.displacement_at,
                                  from + moved + next.length + displacement))
                    return "too far an operand";
            }
            to += next.length;
        }
        moved += next.length;
        if (next.kind == Instruction::kEnd || next.kind == Instruction::kJump) {
            if (moved < span && !is_padding(code.data() + moved, span - moved)) return "too short";
            return jumps_into(code, moved) ? "a jump into its first instructions" : nullptr;
        }
    }
    *to++ = 0xE9;
    if (jumps_into(code, moved)) return "a jump into its first instructions";
    return put_distance(to, 4, from + moved) ? nullptr : "too far a jump";
}

// Makes code writable, one region at a time, until the object is destroyed.
class WritableCode {
  public:
    WritableCode() = default;
    ~WritableCode() { close(); }
    WritableCode(const WritableCode &) = delete;
    WritableCode &operator=(const WritableCode &) = delete;
    bool open(const uint8_t *at, size_t size) {
        const uintptr_t first = reinterpret_cast<uintptr_t>(at) & ~kPage,
                        end = (reinterpret_cast<uintptr_t>(at) + size + kPage) & ~kPage;
        if (first == first_ && end == end_) return true;
        close();
        if (mprotect(reinterpret_cast<void *>(first), end - first, PROT_READ | PROT_WRITE | PROT_EXEC) != 0)
            return false;
        first_ = first;
        end_ = end;
        return true;
    }

  private:
    static constexpr uintptr_t kPage = 4095;
    void close() {
        if (end_) mprotect(reinterpret_cast<void *>(first_), end_ - first_, PROT_READ | PROT_EXEC);
        first_ = end_ = 0;
    }
    uintptr_t first_ = 0, end_ = 0;
};

// Change bytes of code from `before` to `after` in one store: a thread that runs there sees either the old bytes or the new ones.
// Return false if the bytes are not `before`, or if they cross an aligned 16-byte word.
bool exchange_code(uint8_t *at, const uint8_t *before, const uint8_t *after, size_t size) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    if (memcmp(at, before, size) != 0) return false;
    if (const size_t offset = address & 7; offset + size <= 8) {
        auto *word = reinterpret_cast<std::atomic<uint64_t> *>(at - offset);
        uint64_t old = word->load();
        for (;;) {
            uint64_t value = old;
            if (memcmp(reinterpret_cast<uint8_t *>(&old) + offset, before, size) != 0) return false;
            memcpy(reinterpret_cast<uint8_t *>(&value) + offset, after, size);
            if (word->compare_exchange_strong(old, value)) return true;
        }
    }
    const size_t offset = address & 15;
    if (offset + size > 16) return false;
    uint8_t *word = at - offset;
    uint64_t old[2];
    memcpy(old, word, sizeof old);
    for (;;) {
        uint64_t value[2] = {old[0], old[1]};
        bool done;
        if (memcmp(reinterpret_cast<uint8_t *>(old) + offset, before, size) != 0) return false;
        memcpy(reinterpret_cast<uint8_t *>(value) + offset, after, size);
        asm volatile("lock cmpxchg16b %[word]"
                     : [word] "+m"(*reinterpret_cast<uint64_t (*)[2]>(word)), "+a"(old[0]), "+d"(old[1]),
                       "=@ccz"(done)
                     : "b"(value[0]), "c"(value[1])
                     : "memory");
        if (done) return true;
    }
}

// Write code that no thread is running, through /proc/self/mem if the mapping cannot be made writable.
bool write_code(WritableCode &writable, const Patch &patch) {
    auto *at = reinterpret_cast<uint8_t *>(patch.at);
    if (writable.open(at, patch.size)) {
        if (!exchange_code(at, patch.before, patch.after, patch.size)) memcpy(at, patch.after, patch.size);
        return true;
    }
    int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    bool ok = fd >= 0 && pwrite(fd, patch.after, patch.size, static_cast<off_t>(patch.at)) ==
                             static_cast<ssize_t>(patch.size);
    if (fd >= 0) close(fd);
    return ok;
}

constexpr uint8_t kEndbr64[4] = {0xF3, 0x0F, 0x1E, 0xFA};

// Return where the function's own code begins: after endbr64, which indirect calls need.
uint8_t *entry_of(FileCode &file, void *target) {
    auto *at = static_cast<uint8_t *>(target);
    const std::vector<uint8_t> code = file.read(at, sizeof kEndbr64);
    return code.size() == sizeof kEndbr64 && memcmp(code.data(), kEndbr64, sizeof kEndbr64) == 0
               ? at + sizeof kEndbr64
               : at;
}

// Return whether a thread in a call may still have to return into the jump that is written at `jump`.
bool returns_into(const std::vector<uint8_t> &code, size_t jump) {
    for (size_t at = 0; at < jump + kJumpSize && at + kLongestInstruction < code.size();) {
        const Instruction next = decode(code.data() + at);
        if (!next.length) return true;
        at += next.length;
        if (next.kind == Instruction::kCall && at > jump && at < jump + kJumpSize) return true;
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
    if (function.is_in() && writable.open(function.at(), function.patch.size))
        exchange_code(function.at(), function.patch.after, function.patch.before, function.patch.size);
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
    // Undo the first instruction, then jmp [rip + distance] to the replacement, or to the original after detaching.
    uint8_t indirect[6] = {0xFF, 0x25, 0, 0, 0, 0};
    memcpy(trampoline, prologue.undo, prologue.undo_size);
    memcpy(trampoline + prologue.undo_size, indirect, sizeof indirect);
    put_distance(trampoline + prologue.undo_size + 2, 4,
                 reinterpret_cast<uint8_t *>(Trampolines::destination_of(trampoline)));
    Trampolines::destination_of(trampoline)->store(h.replacement, std::memory_order_release);
    h.original = trampoline + kEntrySize;
    Patch patch{reinterpret_cast<uintptr_t>(at), {}, {0xE9}, kJumpSize};
    memcpy(patch.before, at, kJumpSize);
    auto distance = static_cast<int32_t>(trampoline - (at + kJumpSize));
    memcpy(patch.after + 1, &distance, sizeof distance);
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
        const Instruction first = decode(code.data());
        if (first.kind == Instruction::kJump) {
            uint8_t *destination = entry_of(file, at + (destination_of(code.data(), first) - code.data()));
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

#else

std::string install(Hook *, size_t, std::string &) { return "all: hooks are written for x86-64 only\n"; }
std::string prepare(Hook *, size_t, std::string &, std::vector<Patch> &) {
    return "all: hooks are written for x86-64 only\n";
}
void take_out(bool (*)(const char *)) {}
void take_out_rest(bool (*)(const char *)) {}
const Lifetime patch_lifetime{nullptr, nullptr, nullptr, nullptr};

#endif

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
