// What hooks need to know about x86-64 code.
#include "machine/code.h"

#include <atomic>
#include <cstring>

#include "machine/x86_64/instruction.h"

namespace gpubpf::machine {

namespace {

// Sets of registers, by number. Scratch registers hold no argument.
constexpr unsigned kScratch = 1 << 0 | 1 << 10 | 1 << 11;  // rax, r10, r11
// A function whose first instruction overwrites an argument register does not use that argument.
constexpr unsigned kCallerSaved =
    kScratch | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9;  // and rcx, rdx, rsi, rdi, r8, r9

bool in(unsigned registers, unsigned number) { return registers >> number & 1; }

bool put_distance(uint8_t *at, size_t after, const uint8_t *to) {
    int64_t distance = to - (at + after);
    if (distance >= kReach || distance < -kReach) return false;
    auto d = static_cast<int32_t>(distance);
    memcpy(at, &d, sizeof d);
    return true;
}

// Return the destination of a relative instruction at `code`.
const uint8_t *destination_of(const uint8_t *code, const Instruction &instruction) {
    int32_t distance = 0;
    if (instruction.distance_size == 4) memcpy(&distance, code + instruction.distance_at, 4);
    else distance = static_cast<int8_t>(code[instruction.distance_at]);
    return code + instruction.length + distance;
}

}  // namespace

const size_t kJumpSize = 5;  // jmp rel32
const int64_t kReach = int64_t(1) << 31;
const int kAddressBits = 47;
const size_t kMoreMoved = 11;

Step step(const uint8_t *code) {
    static_assert(Step::kImmovable == static_cast<int>(Instruction::kImmovable));
    const Instruction found = decode(code);
    if (!found.length) return {};
    return {found.length, *code == 0xCC ? Step::kBreakpoint : static_cast<Step::Kind>(found.kind),
            found.distance_size ? destination_of(code, found) : nullptr};
}

bool is_padding(const uint8_t *code, size_t size) {
    for (size_t i = 0; i < size;) {
        if (code[i] == 0xCC || code[i] == 0x90 || code[i] == 0x00) {
            ++i;
            continue;
        }
        const Instruction found = decode(code + i);
        const bool nop = found.length && !found.rex && code[i] != 0xF3 &&
                         ((found.map == Instruction::kTwoByte && found.opcode == 0x1F) ||
                          (found.map == Instruction::kOneByte && found.opcode == 0x90));
        if (!nop) return false;
        i += found.length;
    }
    return true;
}

size_t landing_pad(const uint8_t *code) {
    static constexpr uint8_t kEndbr64[kLandingPadSize] = {0xF3, 0x0F, 0x1E, 0xFA};
    return memcmp(code, kEndbr64, sizeof kEndbr64) == 0 ? sizeof kEndbr64 : 0;
}

Prologue prologue_of(const uint8_t *code) {
    Prologue found;
    const Instruction first = decode(code);
    if (!first.length || first.kind != Instruction::kPlain) return found;
    const uint8_t op = first.opcode, *p = first.operands, modrm = *p, mod = modrm >> 6;
    const unsigned b = first.rex & 1 ? 8 : 0;  // extends ModRM's last field, or the register in the opcode
    if (first.map == Instruction::kTwoByte) {
        if (op == 0x1F) found.length = first.length;  // nop
        return found;
    }
    if (first.map != Instruction::kOneByte) return found;
    if (op == 0x90 && !b) {  // nop
        found.length = first.length;
        return found;
    }
    if (first.has_prefix) return found;

    const unsigned reg = (modrm >> 3 & 7) | (first.rex & 4 ? 8 : 0), rm = (modrm & 7) | b;
    const bool wide = first.rex & 8;
    bool ok = false;
    if (op >= 0x50 && op <= 0x57 && ((op & 7) | b) != 4) {  // push, but not of rsp
        if (b) found.undo[found.undo_size++] = 0x41;
        found.undo[found.undo_size++] = static_cast<uint8_t>(op + 8);  // pop
        ok = true;
    } else if (wide && (op == 0x83 || op == 0x81) && modrm == 0xEC && !b) {  // sub N, %rsp
        int32_t n;
        if (op == 0x83) n = static_cast<int8_t>(p[1]);
        else memcpy(&n, p + 1, 4);
        static constexpr uint8_t kLea[4] = {0x48, 0x8D, 0xA4, 0x24};  // lea N(%rsp), %rsp
        memcpy(found.undo, kLea, 4);
        memcpy(found.undo + 4, &n, 4);
        found.undo_size = 8;
        ok = true;
    } else if (op >= 0xB8 && op <= 0xBF) {  // mov N, register
        ok = in(kCallerSaved, (op & 7) | b);
    } else if (op == 0x31 || op == 0x33) {  // xor of a register with itself
        ok = mod == 3 && reg == rm && in(kCallerSaved, reg);
    } else if (op == 0x8B || op == 0x8D) {  // mov or lea to a register
        ok = in(kScratch, reg) || (op == 0x8B && mod == 3 && in(kCallerSaved, reg));
    } else if (op == 0x89) {  // mov from a register to another one, or to memory below the stack pointer
        const bool to_stack = mod == 1 && (modrm & 7) == 4 && p[1] == 0x24 && !(first.rex & 3);
        ok = mod == 3 ? in(kCallerSaved, rm) : to_stack && static_cast<int8_t>(p[2]) <= -8;
    } else if (op == 0x84 || op == 0x85 || (op >= 0x38 && op <= 0x3D)) {  // test, cmp
        ok = true;
    } else if ((op == 0x80 || op == 0x81 || op == 0x83) && (modrm >> 3 & 7) == 7) {  // cmp with a number
        ok = true;
    } else if ((op == 0xF6 || op == 0xF7) && (modrm >> 3 & 7) == 0) {  // test with a number
        ok = true;
    }
    if (ok) found.length = first.length;
    return found;
}

const char *move_instruction(const uint8_t *source, const uint8_t *from, uint8_t *&to) {
    const Instruction moved = decode(source);
    if (moved.distance_size) {
        if (moved.kind == Instruction::kBranch) {
            *to++ = 0x0F;
            *to++ = static_cast<uint8_t>(0x80 | moved.condition);
        } else {
            *to++ = moved.kind == Instruction::kCall ? 0xE8 : 0xE9;
        }
        if (!put_distance(to, 4, from + (destination_of(source, moved) - source))) return "too far a jump";
        to += 4;
        return nullptr;
    }
    memcpy(to, source, moved.length);
    if (moved.displacement_at) {
        int32_t displacement;
        memcpy(&displacement, source + moved.displacement_at, 4);
        if (!put_distance(to + moved.displacement_at, moved.length - moved.displacement_at,
                          from + moved.length + displacement))
            return "too far an operand";
    }
    to += moved.length;
    return nullptr;
}

bool put_jump(uint8_t *code, const uint8_t *at, const uint8_t *to) {
    const int64_t distance = to - (at + kJumpSize);
    if (distance >= kReach || distance < -kReach) return false;
    const auto low = static_cast<int32_t>(distance);
    code[0] = 0xE9;
    memcpy(code + 1, &low, sizeof low);
    return true;
}

void put_jump_through(uint8_t *code, const void *variable) {
    static constexpr uint8_t kIndirect[2] = {0xFF, 0x25};  // jmp *distance(%rip)
    memcpy(code, kIndirect, sizeof kIndirect);
    put_distance(code + sizeof kIndirect, 4, static_cast<const uint8_t *>(variable));
}

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

}  // namespace gpubpf::machine
