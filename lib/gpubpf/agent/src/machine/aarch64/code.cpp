// What hooks need to know about A64 code. A hook writes one instruction, so one aligned store puts the hook in or takes it out.
#include "machine/code.h"

#include <atomic>
#include <cstring>

#include "machine/aarch64/instruction.h"

namespace gpubpf::machine {

namespace {

constexpr size_t kSize = 4;  // of each instruction
constexpr uint32_t kNop = 0xD503201F, kPaciasp = 0xD503233F, kPacibsp = 0xD503237F, kAutiasp = 0xD50323BF,
                   kAutibsp = 0xD50323FF;

uint32_t at(const uint8_t *code) {
    uint32_t found;
    memcpy(&found, code, sizeof found);
    return found;
}

void put(uint8_t *&to, uint32_t code) {
    memcpy(to, &code, sizeof code);
    to += sizeof code;
}

bool fits(int64_t distance, unsigned bits) {
    const int64_t limit = int64_t(1) << (bits - 1);
    return -limit <= distance && distance < limit;
}

bool is_hint(uint32_t code) { return (code & 0xFFFFF01F) == 0xD503201F; }

uint32_t field(int64_t distance, unsigned first, unsigned bits) {
    return (static_cast<uint32_t>(distance / 4) & ((uint32_t(1) << bits) - 1)) << first;
}

// Write adrp and add, which load an address. Return false if it is too far.
bool put_address(uint8_t *&to, uint32_t reg, uintptr_t address) {
    const auto here = reinterpret_cast<uintptr_t>(to);
    const int64_t pages = static_cast<int64_t>(address >> 12) - static_cast<int64_t>(here >> 12);
    if (!fits(pages, 21)) return false;
    const auto low = static_cast<uint32_t>(pages);
    put(to, 0x90000000 | (low & 3) << 29 | (low >> 2 & 0x7FFFF) << 5 | reg);
    put(to, 0x91000000 | static_cast<uint32_t>(address & 0xFFF) << 10 | reg << 5 | reg);
    return true;
}

// Whether a function that overwrites the register first does not use the argument in it: x0 to x17.
bool holds_argument_at_most(uint32_t reg) { return reg <= 17; }
// x9 to x17 hold no argument.
bool holds_no_argument(uint32_t reg) { return reg >= 9 && reg <= 17; }

// Whether an instruction only computes a register from others, or from none. `reads`: it may read the register.
bool computes(uint32_t code, bool &reads) {
    reads = false;
    if ((code & 0x7F800000) == 0x52800000 || (code & 0x7F800000) == 0x12800000) return true;  // movz, movn
    if ((code & 0x1F000000) == 0x10000000) return true;                                       // adr, adrp
    if ((code & 0x7FE0FFE0) == 0x2A0003E0) return true;  // mov register, register
    reads = true;
    // add, sub, logical operations and moves with a constant, bit fields; the same with registers, without flags
    if ((code & 0x3F800000) == 0x11000000 || (code & 0x1F800000) == 0x12000000) return (code >> 29 & 3) != 3;
    if ((code & 0x1F800000) == 0x12800000 || (code & 0x1F800000) == 0x13000000) return true;
    return (code & 0x1F000000) == 0x0A000000 || (code & 0x3F000000) == 0x0B000000;
}

// Return the bytes by which a store before the stack pointer moves it down; 0 for other instructions.
uint32_t pushed(uint32_t code) {
    if ((code >> 5 & 31) != 31) return 0;
    const bool tags = (code >> 30 & 1) && !(code >> 26 & 1);  // stgp
    if ((code & 0x3BC00000) == 0x29800000 && !tags) {         // stp …, [sp, #-N]!
        const uint32_t size = code >> 26 & 1 ? 4u << (code >> 30) : code >> 31 ? 8 : 4;
        const uint32_t back = code >> 15 & 127;
        return back & 64 ? (128 - back) * size : 0;
    }
    // str …, [sp, #-N]!
    const bool general = (code & 0xBFE00C00) == 0xB8000C00, vector = (code & 0x3F600C00) == 0x3C000C00;
    const uint32_t back = code >> 12 & 511;
    return (general || vector) && back & 256 ? 512 - back : 0;
}

}  // namespace

const size_t kJumpSize = kSize;  // b
const int64_t kReach = int64_t(1) << 27;
const int kAddressBits = 48;
const size_t kMoreMoved = 4 * kSize;

Step step(const uint8_t *code) {
    const Instruction found = decode(at(code));
    Step step{kSize, Step::kPlain, nullptr};
    switch (found.kind) {
        case Instruction::kUnknown: return {};
        case Instruction::kCall: step.kind = Step::kCall; break;
        case Instruction::kJump: step.kind = Step::kJump; break;
        case Instruction::kBranch: step.kind = Step::kBranch; break;
        case Instruction::kEnd: step.kind = Step::kEnd; break;
        case Instruction::kSystemCall: step.kind = Step::kImmovable; break;
        case Instruction::kBreakpoint: step.kind = Step::kBreakpoint; break;
        default: return step;
    }
    if (found.relative) step.destination = code + found.distance;
    return step;
}

bool is_padding(const uint8_t *code, size_t size) {
    for (size_t i = 0; i + kSize <= size; i += kSize)
        if (at(code + i) != kNop && at(code + i) != 0) return false;
    return true;
}

size_t landing_pad(const uint8_t *code) {
    return (at(code) & 0xFFFFFF3F) == 0xD503241F ? kSize : 0;  // bti, with any operand
}

Prologue prologue_of(const uint8_t *code) {
    Prologue found;
    uint8_t *undo = found.undo;
    const uint32_t first = at(code), reg = first & 31;
    bool reads;
    if (first == kPaciasp || first == kPacibsp) {
        put(undo, first == kPaciasp ? kAutiasp : kAutibsp);
    } else if (const uint32_t down = pushed(first)) {
        put(undo, 0x910003FF | down << 10);           // add sp, sp, #N
    } else if ((first & 0xFF8003FF) == 0xD10003FF) {  // sub sp, sp, #N
        put(undo, first ^ 0x40000000);
    } else if (is_hint(first)) {
        // Those that sign or check another register are none that compilers put first.
        if (first != kNop && !landing_pad(code)) return found;
    } else if ((first & 0x7F00001F) == 0x7100001F || (first & 0x7F20001F) == 0x6B00001F ||
               (first & 0x7F80001F) == 0x7200001F || (first & 0x7F20001F) == 0x6A00001F) {
        // cmp, tst: no function finds a value in the flags
    } else if (!(computes(first, reads) && (reads ? holds_no_argument(reg) : holds_argument_at_most(reg)))) {
        return found;
    }
    found.undo_size = static_cast<size_t>(undo - found.undo);
    found.length = kSize;
    return found;
}

const char *move_instruction(const uint8_t *source, const uint8_t *from, uint8_t *&to) {
    const uint32_t code = at(source), reg = code & 31;
    const Instruction moved = decode(code);
    const auto here = reinterpret_cast<uintptr_t>(from);
    const bool is_page = moved.kind == Instruction::kAddress && code >> 31;
    const uintptr_t operand =
        (is_page ? here & ~uintptr_t(4095) : here) + static_cast<uintptr_t>(moved.distance);
    switch (moved.kind) {
        case Instruction::kJump:
        case Instruction::kCall:
        case Instruction::kBranch: {
            if (!moved.relative) break;
            if (moved.kind == Instruction::kBranch) {  // to the jump that follows the next one
                const uint32_t field_bits = ((uint32_t(1) << moved.bits) - 1) << moved.first_bit;
                put(to, (code & ~field_bits) | field(8, moved.first_bit, moved.bits));
                put(to, 0x14000000 | field(8, 0, 26));
            }
            const int64_t distance = static_cast<int64_t>(operand - reinterpret_cast<uintptr_t>(to));
            if (!fits(distance, 28)) return "too far a jump";
            put(to, (moved.kind == Instruction::kCall ? 0x94000000 : 0x14000000) | field(distance, 0, 26));
            return nullptr;
        }
        case Instruction::kAddress: return put_address(to, reg, operand) ? nullptr : "too far an operand";
        case Instruction::kLoad: {
            static constexpr uint32_t kLoads[] = {0xB9400000, 0xF9400000, 0xB9800000};  // ldr, ldr, ldrsw
            if (reg == 31) {                                                            // to no register
                put(to, kNop);
                return nullptr;
            }
            if (!put_address(to, reg, operand)) return "too far an operand";
            put(to, kLoads[code >> 30] | reg << 5 | reg);
            return nullptr;
        }
        case Instruction::kVectorLoad: {
            static constexpr uint32_t kLoads[] = {0xBD400000, 0xFD400000, 0x3DC00000};  // ldr s, d, q
            put(to, 0xF81F0FF1);  // str x17, [sp, #-16]!
            if (!put_address(to, 17, operand)) return "too far an operand";
            put(to, kLoads[code >> 30] | 17 << 5 | reg);
            put(to, 0xF84107F1);  // ldr x17, [sp], #16
            return nullptr;
        }
        case Instruction::kPrefetch: put(to, kNop); return nullptr;
        default: break;
    }
    put(to, code);
    return nullptr;
}

bool put_jump(uint8_t *code, const uint8_t *at, const uint8_t *to) {
    const int64_t distance = to - at;
    if (distance >= kReach || distance < -kReach) return false;
    put(code, 0x14000000 | field(distance, 0, 26));
    return true;
}

void put_jump_through(uint8_t *code, const void *variable) {
    const int64_t distance = static_cast<const uint8_t *>(variable) - code;
    put(code, 0x58000000 | field(distance, 5, 19) | 16);  // ldr x16, variable
    put(code, 0xD61F0000 | 16 << 5);                      // br x16, which bti c lets pass
}

bool exchange_code(uint8_t *at, const uint8_t *before, const uint8_t *after, size_t size) {
    if (size != kSize || reinterpret_cast<uintptr_t>(at) % kSize) return false;
    uint32_t old, value;
    memcpy(&old, before, kSize);
    memcpy(&value, after, kSize);
    return reinterpret_cast<std::atomic<uint32_t> *>(at)->compare_exchange_strong(old, value);
}

}  // namespace gpubpf::machine
