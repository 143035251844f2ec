// The formats are in the Arm Architecture Reference Manual, chapter C4, "A64 Instruction Set Encoding".

#include "machine/aarch64/instruction.h"

namespace gpubpf::machine {

namespace {

int64_t signed_bits(uint32_t code, unsigned first, unsigned count) {
    const int64_t value = code >> first & ((uint32_t(1) << count) - 1);
    const int64_t top = int64_t(1) << (count - 1);
    return (value ^ top) - top;
}

Instruction relative(Instruction::Kind kind, uint32_t code, unsigned first, unsigned count) {
    return {kind, true, signed_bits(code, first, count) * 4, first, count};
}

Instruction::Kind kind_of_system(uint32_t code) {
    // Exceptions: svc, hvc, smc, brk, hlt, …
    if (code >> 24 == 0xD4) {
        if ((code & 0xFFE0001F) == 0xD4000001) return Instruction::kSystemCall;
        if ((code & 0xFFE0001F) == 0xD4200000 || (code & 0xFFE0001F) == 0xD4400000)
            return Instruction::kBreakpoint;
        return Instruction::kUnknown;
    }
    // Hints, barriers, system registers: none depends on its own address. Armv9.5's hint pacm belongs to instructions that do.
    if (code >> 22 == 0x354)
        return (code & 0xFFFFFFFF) == 0xD50324FF ? Instruction::kUnknown : Instruction::kPlain;
    // Jumps through registers: br, blr, ret, eret, and forms that authenticate the address.
    if (code >> 25 == 0x6B) {
        if ((code >> 16 & 31) != 31) return Instruction::kUnknown;
        switch (code >> 21 & 15) {
            case 0:
            case 2:
            case 4:
            case 8:
            case 10: return (code >> 21 & 7) == 1 ? Instruction::kCall : Instruction::kEnd;
            case 1:
            case 9: return Instruction::kCall;
            default: return Instruction::kUnknown;
        }
    }
    return Instruction::kUnknown;
}

Instruction branch(uint32_t code) {
    if ((code & 0x7C000000) == 0x14000000)
        return relative(code >> 31 ? Instruction::kCall : Instruction::kJump, code, 0, 26);
    if (code >> 24 == 0x54) return relative(Instruction::kBranch, code, 5, 19);  // b.cond, bc.cond
    if ((code & 0x7E000000) == 0x34000000) return relative(Instruction::kBranch, code, 5, 19);  // cbz, cbnz
    if ((code & 0x7E000000) == 0x36000000) return relative(Instruction::kBranch, code, 5, 14);  // tbz, tbnz
    return {kind_of_system(code)};
}

Instruction load_or_store(uint32_t code) {
    if ((code & 0x3B000000) != 0x18000000) return {Instruction::kPlain};
    const unsigned size = code >> 30;
    if (code >> 26 & 1) return size == 3 ? Instruction() : relative(Instruction::kVectorLoad, code, 5, 19);
    return relative(size == 3 ? Instruction::kPrefetch : Instruction::kLoad, code, 5, 19);
}

}  // namespace

Instruction decode(uint32_t code) {
    switch (code >> 25 & 15) {
        case 0:
            return {code >> 16 == 0 ? Instruction::kEnd
                                    : Instruction::kUnknown};  // udf; SME is not for first instructions
        case 2: return {Instruction::kPlain};                  // SVE
        case 8:
            if ((code & 0x1F000000) == 0x10000000) {  // adr, adrp
                const int64_t distance = signed_bits(code, 5, 19) * 4 + (code >> 29 & 3);
                return {Instruction::kAddress, true, code >> 31 ? distance * 4096 : distance, 0, 0};
            }
            return {Instruction::kPlain};
        case 9:
            // Armv9.5's autiasppc authenticates with an address; nothing else has these bits.
            return {(code & 0x7F800000) == 0x73800000 ? Instruction::kUnknown : Instruction::kPlain};
        case 10:
        case 11: return branch(code);
        case 4:
        case 6:
        case 12:
        case 14: return load_or_store(code);
        case 5:
        case 13:
            // Armv9.5's paciasppc and its like sign with their own address.
            return {(code & 0xFFFF8000) == 0xDAC18000 ? Instruction::kUnknown : Instruction::kPlain};
        case 7:
        case 15: return {Instruction::kPlain};
        default: return {};
    }
}

}  // namespace gpubpf::machine
