#include "patch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "hooks.h"
#include "lasting.h"
#include "prologue.h"

namespace gpubpf {

// --- decoding: Intel SDM volume 2, appendix A (opcode maps) ---

namespace {

enum Operands : uint8_t {
    kNone = 0,
    kModRm = 1,
    kImm8 = 2,
    kImm32 = 4,  // 16 bits with prefix 66
    kUnknown = 128,
};

uint8_t one_byte(uint8_t op) {
    if (op < 0x40) switch (op & 7) {
            case 0:
            case 1:
            case 2:
            case 3: return kModRm;
            case 4: return kImm8;
            case 5: return kImm32;
            default: return kUnknown;
        }
    if ((op >= 0x50 && op <= 0x5F) || (op >= 0x90 && op <= 0x99) || (op >= 0x9B && op <= 0x9F)) return kNone;
    if ((op >= 0x70 && op <= 0x7F) || (op >= 0xB0 && op <= 0xB7) || (op >= 0xE0 && op <= 0xE3) || op == 0xEB)
        return kImm8;
    if (op >= 0xB8 && op <= 0xBF) return kImm32;
    if ((op >= 0x84 && op <= 0x8F) || (op >= 0xD0 && op <= 0xD3) || (op >= 0xD8 && op <= 0xDF)) return kModRm;
    switch (op) {
        case 0x63:
        case 0xF6:
        case 0xF7:
        case 0xFE:
        case 0xFF: return kModRm;
        case 0x69:
        case 0x81:
        case 0xC7: return kModRm | kImm32;
        case 0x6B:
        case 0x80:
        case 0x83:
        case 0xC0:
        case 0xC1:
        case 0xC6: return kModRm | kImm8;
        case 0x68:
        case 0xA9:
        case 0xE8:
        case 0xE9: return kImm32;
        case 0x6A:
        case 0xA8: return kImm8;
        case 0xA4:
        case 0xA5:
        case 0xA6:
        case 0xA7:
        case 0xAA:
        case 0xAB:
        case 0xAC:
        case 0xAD:
        case 0xAE:
        case 0xAF:
        case 0xC3:
        case 0xC9:
        case 0xCC:
        case 0xF4:
        case 0xF5:
        case 0xF8:
        case 0xF9:
        case 0xFC:
        case 0xFD: return kNone;
        default: return kUnknown;
    }
}

uint8_t two_byte(uint8_t op) {
    if (op >= 0x80 && op <= 0x8F) return kImm32;
    if ((op >= 0x10 && op <= 0x1F) || (op >= 0x28 && op <= 0x2F) || (op >= 0x40 && op <= 0x6F) ||
        (op >= 0x90 && op <= 0x9F) || (op >= 0xD0 && op != 0xFF))
        return kModRm;
    if (op >= 0x70 && op <= 0x73) return kModRm | kImm8;
    if (op >= 0xC8 && op <= 0xCF) return kNone;
    switch (op) {
        case 0x05:
        case 0x0B:
        case 0x31:
        case 0x77:
        case 0xA0:
        case 0xA1:
        case 0xA2:
        case 0xA8:
        case 0xA9: return kNone;
        case 0x01:
        case 0x0D:
        case 0x74:
        case 0x75:
        case 0x76:
        case 0x7C:
        case 0x7D:
        case 0x7E:
        case 0x7F:
        case 0xA3:
        case 0xA5:
        case 0xAB:
        case 0xAD:
        case 0xAE:
        case 0xAF:
        case 0xB0:
        case 0xB1:
        case 0xB3:
        case 0xB6:
        case 0xB7:
        case 0xB8:
        case 0xBB:
        case 0xBC:
        case 0xBD:
        case 0xBE:
        case 0xBF:
        case 0xC0:
        case 0xC1:
        case 0xC3:
        case 0xC7: return kModRm;
        case 0xA4:
        case 0xAC:
        case 0xBA:
        case 0xC2:
        case 0xC4:
        case 0xC5:
        case 0xC6: return kModRm | kImm8;
        default: return kUnknown;
    }
}

}  // namespace

Decoded decode(const uint8_t *code) {
    Decoded d;
    const uint8_t *p = code;
    bool operand16 = false, wide = false;
    for (; p - code < 14; ++p) {
        if (*p == 0x66) operand16 = true;
        else if (*p != 0xF0 && *p != 0xF2 && *p != 0xF3 && *p != 0x2E && *p != 0x36 && *p != 0x3E &&
                 *p != 0x26 && *p != 0x64 && *p != 0x65)
            break;
    }
    if ((*p & 0xF0) == 0x40) wide = (*p++ & 8) != 0;
    uint8_t op = *p++, what;
    bool vex = false;
    if (op == 0xC5 || op == 0xC4) {
        unsigned map = op == 0xC5 ? 1 : *p & 31;
        p += op == 0xC5 ? 1 : 2;
        op = *p++;
        vex = true;
        what = map == 1 ? two_byte(op) : map == 2 ? kModRm : map == 3 ? kModRm | kImm8 : kUnknown;
    } else if (op == 0x0F) {
        op = *p++;
        if (op == 0x38) {
            ++p;
            what = kModRm;
        } else if (op == 0x3A) {
            ++p;
            what = kModRm | kImm8;
        } else {
            what = two_byte(op);
            if (op >= 0x80 && op <= 0x8F) {
                d.kind = Decoded::kBranch;
                d.condition = op & 15;
                d.relative_size = 4;
            } else if (op == 0x0B) {
                d.kind = Decoded::kEnd;
            }
        }
        vex = true;  // none of the one-byte cases below
    } else {
        what = one_byte(op);
    }
    if (what & kUnknown) return d;
    if (what & kModRm) {
        uint8_t modrm = *p++, mod = modrm >> 6, rm = modrm & 7, reg = modrm >> 3 & 7;
        if (mod != 3 && rm == 4) {
            uint8_t sib = *p++;
            if (mod == 0 && (sib & 7) == 5) p += 4;
        } else if (mod == 0 && rm == 5) {
            d.rip_at = static_cast<size_t>(p - code);
            p += 4;
        }
        if (mod == 1) p += 1;
        if (mod == 2) p += 4;
        if (!vex && op == 0xF6 && reg < 2) p += 1;
        if (!vex && op == 0xF7 && reg < 2) p += operand16 ? 2 : 4;
        if (!vex && op == 0xFF && (reg == 4 || reg == 5)) d.kind = Decoded::kEnd;  // jmp to what memory says
    }
    if (!vex) {
        if (op == 0xE8 || op == 0xE9 || op == 0xEB || (op >= 0x70 && op <= 0x7F)) {
            d.kind = op == 0xE8                 ? Decoded::kCall
                     : op == 0xE9 || op == 0xEB ? Decoded::kJump
                                                : Decoded::kBranch;
            d.condition = op & 15;
            d.relative_size = what & kImm8 ? 1 : 4;
            if (operand16) return Decoded();
        } else if (op >= 0xE0 && op <= 0xE3) {
            d.kind = Decoded::kFixed;
        } else if (op == 0xC3) {
            d.kind = Decoded::kEnd;
        }
    }
    if (d.relative_size) d.relative_at = static_cast<size_t>(p - code);
    if (what & kImm8) p += 1;
    if (what & kImm32)
        p += !vex && op >= 0xB8 && op <= 0xBF && wide ? 8 : operand16 && !d.relative_size ? 2 : 4;
    d.length = static_cast<size_t>(p - code);
    return d;
}

#ifdef __x86_64__

namespace {

constexpr size_t kJump = 5;        // jmp rel32
constexpr size_t kSlotSize = 128;  // for a hook: the way to the replacement, and the moved instructions
constexpr size_t kWay = 32;        // of it, for the former
constexpr size_t kSeen = 512;      // bytes of a function that are looked at
constexpr int64_t kReach = int64_t(1) << 31;

// Executable memory within reach of a 32-bit distance from the hooked functions. It is never given back: a thread may be on its way
// through it. Where a slot leads to can be changed: that lies in the page behind.
class Island {
  public:
    using Goal = std::atomic<const void *>;
    // Room for one hook near `target`, or null.
    uint8_t *take(const uint8_t *target) {
        for (Page &page : pages_)
            if (page.used + kSlotSize <= kPageSize && near(page.base, target))
                return page.base + (page.used += kSlotSize) - kSlotSize;
        uint8_t *base = map_near(target);
        if (!base) return nullptr;
        pages_.push_back({base, kSlotSize});
        return base;
    }
    static Goal *goal_of(uint8_t *slot) {
        const auto at = reinterpret_cast<uintptr_t>(slot);
        const uintptr_t page = at & ~uintptr_t(kPageSize - 1);
        return reinterpret_cast<Goal *>(page + kPageSize + (at - page) / kSlotSize * sizeof(Goal));
    }
    // From now on the code runs, and cannot be written.
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
                munmap(p, 2 * kPageSize);  // a kernel that does not know the flag took it for a hint
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

// What compilers put between functions.
bool is_padding(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n;) {
        if (p[i] == 0xCC || p[i] == 0x90 || p[i] == 0x00) {
            ++i;
            continue;
        }
        Decoded d = decode(p + i);
        size_t skip = 0;
        while (p[i + skip] == 0x66 || p[i + skip] == 0x2E) ++skip;
        bool nop = d.length && ((p[i + skip] == 0x0F && p[i + skip + 1] == 0x1F) || p[i + skip] == 0x90);
        if (!nop) return false;
        i += d.length;
    }
    return true;
}

const uint8_t *goal_of(const uint8_t *code, const Decoded &d) {
    int32_t distance = 0;
    if (d.relative_size == 4) memcpy(&distance, code + d.relative_at, 4);
    else distance = static_cast<int8_t>(code[d.relative_at]);
    return code + d.length + distance;
}

// Whether something further on, such as a short loop, jumps between the first `span` bytes of the function.
bool jumps_into(const std::vector<uint8_t> &code, size_t span) {
    constexpr size_t kLongest = 15;
    for (size_t at = 0; at + kLongest < code.size();) {
        const uint8_t *p = code.data() + at;
        Decoded d = decode(p);
        if (!d.length) break;
        if (d.relative_size && goal_of(p, d) > code.data() && goal_of(p, d) < code.data() + span) return true;
        at += d.length;
    }
    return false;
}

// Moves instructions of at least `span` bytes from `from`, where `code` is, to `to`, and back to what follows them. Null, or why it cannot
// be done.
const char *move(const uint8_t *from, const std::vector<uint8_t> &code, size_t span, uint8_t *to,
                 const uint8_t *end, size_t &moved) {
    moved = 0;
    while (moved < span) {
        const uint8_t *source = code.data() + moved;
        Decoded d = decode(source);
        if (!d.length || d.kind == Decoded::kFixed) return "an instruction that cannot be moved";
        if (*source == 0xCC) return "a breakpoint: another tool traces this process";
        if (to + d.length + 16 > end) return "its first instructions are too long";
        if (d.relative_size) {
            const uint8_t *goal = from + (goal_of(source, d) - code.data());
            if (goal == from) return "a jump to its beginning";
            if (d.kind == Decoded::kBranch) {
                *to++ = 0x0F;
                *to++ = static_cast<uint8_t>(0x80 | d.condition);
            } else {
                *to++ = d.kind == Decoded::kCall ? 0xE8 : 0xE9;
            }
            if (!put_distance(to, 4, goal)) return "too far a jump";
            to += 4;
        } else {
            memcpy(to, source, d.length);
            if (d.rip_at) {
                int32_t displacement;
                memcpy(&displacement, source + d.rip_at, 4);
                if (!put_distance(to + d.rip_at, d.length - d.rip_at, from + moved + d.length + displacement))
                    return "too far an operand";
            }
            to += d.length;
        }
        moved += d.length;
        if (d.kind == Decoded::kEnd || d.kind == Decoded::kJump) {
            if (moved < span && !is_padding(code.data() + moved, span - moved)) return "too short";
            return jumps_into(code, moved) ? "a jump into its first instructions" : nullptr;
        }
    }
    *to++ = 0xE9;
    if (jumps_into(code, moved)) return "a jump into its first instructions";
    return put_distance(to, 4, from + moved) ? nullptr : "too far a jump";
}

// Code that is made writable for as long as the object lives, a page after the other.
class Writable {
  public:
    Writable() = default;
    ~Writable() { close(); }
    Writable(const Writable &) = delete;
    Writable &operator=(const Writable &) = delete;
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

// Changes bytes of code from `before` to `after` in one store: whoever runs there sees the old ones or the new. False: they are not `before`, or
// do not lie in one aligned word of 8 or 16 bytes.
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

// Writes code where no thread can be. By way of /proc/self/mem where the mapping may not be made writable.
bool write_code(Writable &writable, const Patch &patch) {
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

// Where the function begins: behind the landing pad that indirect calls need.
uint8_t *entry_of(FileCode &file, void *target) {
    auto *at = static_cast<uint8_t *>(target);
    const std::vector<uint8_t> code = file.read(at, sizeof kEndbr64);
    return code.size() == sizeof kEndbr64 && memcmp(code.data(), kEndbr64, sizeof kEndbr64) == 0
               ? at + sizeof kEndbr64
               : at;
}

}  // namespace

namespace {

// Whether a thread may have to come back into the first `span` bytes.
bool has_call(const std::vector<uint8_t> &from, size_t span) {
    for (size_t i = 0; i < span && i + 15 < from.size();) {
        Decoded d = decode(from.data() + i);
        if (!d.length || d.kind == Decoded::kCall || (from[i] == 0xFF && (from[i + 1] >> 3 & 7) == 2))
            return true;
        i += d.length;
    }
    return false;
}

// A function that was hooked once: its slot serves again.
struct Place {
    Patch patch{};
    uint8_t *slot = nullptr;
    std::vector<uint8_t> code;  // that was moved
    const char *name = nullptr;
    bool wanted = false;  // by the attachment that there is
    uint8_t *original() const { return slot + kWay; }
    uint8_t *at() const { return reinterpret_cast<uint8_t *>(patch.at); }
    bool is_in() const { return memcmp(at(), patch.after, patch.size) == 0; }
};

struct Places {
    std::mutex lock;                 // guards below
    std::map<uint8_t *, Place> all;  // by their function's beginning
};
Lasting<Places> first_places;
Places *places = &first_places.value;

// With the lock held: has calls come to the driver's own code again.
void take_out(Place &place, Writable &writable) {
    Island::goal_of(place.slot)->store(place.original(), std::memory_order_release);
    // Where the code cannot be changed back the jump stays, and leads there.
    if (place.is_in() && writable.open(place.at(), place.patch.size))
        exchange_code(place.at(), place.patch.after, place.patch.before, place.patch.size);
}

std::string prepare(Hook *hooks, size_t count, std::string &left_out, bool running,
                    std::vector<Patch> &patches) {
    std::lock_guard<std::mutex> hold(places->lock);
    std::map<uint8_t *, size_t> by_entry;
    std::string failed;
    Island island;
    FileCode file;
    for (size_t i = 0; i < count; ++i)
        if (hooks[i].target) by_entry.emplace(entry_of(file, hooks[i].target), i);
    for (size_t i = 0; i < count; ++i) {
        Hook &h = hooks[i];
        if (!h.target) continue;
        uint8_t *at = entry_of(file, h.target);
        size_t first = by_entry[at];
        if (first != i) {  // another name of the same function
            h.original = hooks[first].original;
            continue;
        }
        const char *why = nullptr;
        std::vector<uint8_t> code = file.read(at, kSeen);
        if (code.size() < kWay + kJump) {
            (h.optional ? left_out : failed) += std::string(h.name) + ": the end of its library\n";
            continue;
        }
        Decoded d = decode(code.data());
        if (d.kind == Decoded::kJump) {
            uint8_t *goal = entry_of(file, at + (goal_of(code.data(), d) - code.data()));
            if (by_entry.count(goal)) continue;  // hooked there
        }
        auto known = places->all.find(at);
        if (known != places->all.end() &&
            std::equal(known->second.code.begin(), known->second.code.end(), code.begin())) {
            Place &place = known->second;
            if (!place.is_in() && memcmp(place.at(), place.patch.before, place.patch.size) != 0) {
                (h.optional ? left_out : failed) +=
                    std::string(h.name) + ": another tool has changed its first instructions\n";
                continue;
            }
            h.original = place.original();
            place.wanted = true;
            Island::goal_of(place.slot)->store(h.replacement, std::memory_order_release);
            if (!place.is_in()) patches.push_back(place.patch);
            continue;
        }
        uint8_t *slot = island.take(at), *const entry = at;
        size_t moved = 0;
        Prologue first_one = at == h.target ? prologue_of(code.data()) : Prologue();
        if (!slot) {
            why = "no memory within reach";
        } else {
            why = move(at, code, first_one.length + kJump, slot + kWay, slot + kSlotSize, moved);
            if (why && first_one.length) {  // not behind it, then in its place
                first_one = Prologue();
                why = move(at, code, kJump, slot + kWay, slot + kSlotSize, moved);
            }
            if (!why && running && has_call(code, moved)) why = "a call in its first instructions";
            if (!why && memcmp(at + first_one.length, code.data() + first_one.length,
                               std::max(moved - first_one.length, kJump)) != 0)
                why = "another tool has changed its first instructions";
            // What the first instruction did is undone; jmp [rip + distance]: where that leads is the replacement, or the original.
            uint8_t indirect[6] = {0xFF, 0x25, 0, 0, 0, 0};
            memcpy(slot, first_one.undo, first_one.undo_size);
            memcpy(slot + first_one.undo_size, indirect, sizeof indirect);
            put_distance(slot + first_one.undo_size + 2, 4,
                         reinterpret_cast<uint8_t *>(Island::goal_of(slot)));
            Island::goal_of(slot)->store(h.replacement, std::memory_order_release);
        }
        if (why) {
            (h.optional ? left_out : failed) += std::string(h.name) + ": " + why + "\n";
            continue;
        }
        h.original = slot + kWay;
        at += first_one.length;
        Patch patch{reinterpret_cast<uintptr_t>(at), {}, {0xE9}, kJump};
        memcpy(patch.before, at, kJump);
        auto distance = static_cast<int32_t>(slot - (at + kJump));
        memcpy(patch.after + 1, &distance, sizeof distance);
        patches.push_back(patch);
        code.resize(moved);
        places->all[entry] = {patch, slot, std::move(code), h.name, true};
    }
    for (size_t i = 0; i < count; ++i)  // names that came before the one that was hooked
        if (hooks[i].target) hooks[i].original = hooks[by_entry[entry_of(file, hooks[i].target)]].original;
    if (!island.seal()) return "all: memory cannot be made executable\n";
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return failed;
}

}  // namespace

std::string install(Hook *hooks, size_t count, std::string &left_out) {
    std::vector<Patch> patches;
    std::string failed = prepare(hooks, count, left_out, false, patches);
    Writable writable;
    for (const Patch &p : patches)
        if (!write_code(writable, p)) failed += "code cannot be written\n";
    return failed;
}

std::string prepare(Hook *hooks, size_t count, std::string &left_out, std::vector<Patch> &patches) {
    return prepare(hooks, count, left_out, true, patches);
}

void take_out(bool (*keep)(const char *name)) {
    {
        std::lock_guard<std::mutex> hold(places->lock);
        Writable writable;
        for (auto &p : places->all) {
            p.second.wanted = false;
            if (!keep(p.second.name)) take_out(p.second, writable);
        }
    }
    barrier_in_all_threads();
}

void take_out_rest(bool (*keep)(const char *name)) {
    {
        std::lock_guard<std::mutex> hold(places->lock);
        Writable writable;
        for (auto &p : places->all)
            if (!p.second.wanted && !keep(p.second.name)) take_out(p.second, writable);
    }
    barrier_in_all_threads();
}

// Another thread of the parent's may have been changing them: then nobody knows them any more, and what is hooked cannot be hooked anew.
void forget_patching() {
    auto *copy = new Places;
    if (places->lock.try_lock()) copy->all = places->all;
    places = copy;
}

#else

std::string install(Hook *, size_t, std::string &) { return "all: hooks are written for x86-64 only\n"; }
std::string prepare(Hook *, size_t, std::string &, std::vector<Patch> &) {
    return "all: hooks are written for x86-64 only\n";
}
void take_out(bool (*)(const char *)) {}
void take_out_rest(bool (*)(const char *)) {}
void forget_patching() {}

#endif

namespace {

// Commands of membarrier(2).
constexpr int kBarrier = 1 << 3, kRegisterBarrier = 1 << 4, kCoreBarrier = 1 << 5,
              kRegisterCoreBarrier = 1 << 6;
constexpr useconds_t kDrained =
    20000;  // µs after which no processor still holds a store back, whatever the kernel says

}  // namespace

void barrier_in_all_threads() {
    static const bool can = syscall(SYS_membarrier, kRegisterBarrier, 0, 0) == 0;
    static const bool can_core = syscall(SYS_membarrier, kRegisterCoreBarrier, 0, 0) == 0;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const bool core = can_core && syscall(SYS_membarrier, kCoreBarrier, 0, 0) == 0;
    if (!core && !(can && syscall(SYS_membarrier, kBarrier, 0, 0) == 0)) usleep(kDrained);
}

int patch_file(const std::vector<Patch> &patches) {
    int fd = memfd_create("gpubpf-patches", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    const size_t size = patches.size() * sizeof(Patch);
    if (fd >= 0 && (write(fd, patches.data(), size) != static_cast<ssize_t>(size) ||
                    fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

}  // namespace gpubpf
