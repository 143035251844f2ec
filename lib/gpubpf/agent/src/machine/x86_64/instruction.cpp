// The formats are in Intel's SDM, volume 2, chapter 2; the opcode tables in appendix A.
//
// This decoder is hand-written because no package has a static Zydis: libzydis-dev of Ubuntu 22.04 (3.2.1), Debian 12 and
// Ubuntu 24.04 (both 4.0.0) only has a shared library, which a traced process may lack. A copy of Zydis' source would be 6.7 MB
// of generated tables instead of 280 lines. In minimal mode, it would add 143 kB to an agent of 910 kB, and take 150 ns per
// instruction instead of 15 ns. In 392 million instructions of 1617 libraries, both found the same lengths, kinds and relative
// operands wherever both knew the instruction. This decoder also knows newer ones (AVX-IFMA, SHA-512), but not XOP.

#include "machine/x86_64/instruction.h"

namespace gpubpf::machine {

namespace {

// The bytes after an opcode.
enum Operands : uint8_t {
    kNone = 0,
    kModRm = 1,
    kImm8 = 2,
    kImm32 = 4,  // 16 bits with prefix 66
    kUnknown = 128,
};

constexpr size_t kLongest = 15;      // bytes of an instruction; longer ones are invalid
constexpr size_t kMostPrefixes = 7;  // as many as assemblers emit; more leave decode() no room for the rest

uint8_t one_byte_operands(uint8_t opcode) {
    if (opcode < 0x40) switch (opcode & 7) {
            case 0:
            case 1:
            case 2:
            case 3: return kModRm;
            case 4: return kImm8;
            case 5: return kImm32;
            default: return kUnknown;
        }
    if ((opcode >= 0x50 && opcode <= 0x5F) || (opcode >= 0x90 && opcode <= 0x99) ||
        (opcode >= 0x9B && opcode <= 0x9F))
        return kNone;
    if ((opcode >= 0x70 && opcode <= 0x7F) || (opcode >= 0xB0 && opcode <= 0xB7) ||
        (opcode >= 0xE0 && opcode <= 0xE3) || opcode == 0xEB)
        return kImm8;
    if (opcode >= 0xB8 && opcode <= 0xBF) return kImm32;
    if ((opcode >= 0x84 && opcode <= 0x8F) || (opcode >= 0xD0 && opcode <= 0xD3) ||
        (opcode >= 0xD8 && opcode <= 0xDF))
        return kModRm;
    switch (opcode) {
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

uint8_t two_byte_operands(uint8_t opcode) {
    if (opcode >= 0x80 && opcode <= 0x8F) return kImm32;
    if ((opcode >= 0x10 && opcode <= 0x1F) || (opcode >= 0x28 && opcode <= 0x2F) ||
        (opcode >= 0x40 && opcode <= 0x6F) || (opcode >= 0x90 && opcode <= 0x9F) ||
        (opcode >= 0xD0 && opcode != 0xFF))
        return kModRm;
    if (opcode >= 0x70 && opcode <= 0x73) return kModRm | kImm8;
    if (opcode >= 0xC8 && opcode <= 0xCF) return kNone;
    switch (opcode) {
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

// Return the operands of an instruction with a VEX or EVEX prefix. Map 1 has the opcodes after 0F, map 2 those after 0F 38, map 3
// those after 0F 3A. Maps 5 and 6 exist only with EVEX; they contain 16-bit floating point.
uint8_t vector_operands(unsigned map, uint8_t opcode, bool evex) {
    switch (map) {
        case 1:
            if (opcode == 0x77 && !evex) return kNone;  // vzeroupper, vzeroall
            return two_byte_operands(opcode) & kModRm ? two_byte_operands(opcode) : uint8_t(kUnknown);
        case 2: return kModRm;
        case 3: return kModRm | kImm8;
        case 5:
        case 6: return evex ? kModRm : kUnknown;
        default: return kUnknown;
    }
}

bool is_prefix(uint8_t byte) {
    switch (byte) {
        case 0x26:
        case 0x2E:
        case 0x36:
        case 0x3E:
        case 0x64:
        case 0x65:
        case 0x66:
        case 0x67:
        case 0xF0:
        case 0xF2:
        case 0xF3: return true;
        default: return false;
    }
}

// Whether decode() knows this instruction of a one-byte opcode that several instructions share. `reg`: ModRM's second field.
bool is_known_in_group(uint8_t opcode, uint8_t reg) {
    switch (opcode) {
        case 0x8F:  // pop; others are AMD's XOP instructions, which are longer
        case 0xC6:
        case 0xC7: return reg == 0;  // mov; others are xabort, and xbegin, which has a distance
        case 0xFE: return reg < 2;
        case 0xFF: return reg != 7;
        default: return true;
    }
}

// Return the kind of an instruction whose map, opcode and operands are known.
Instruction::Kind kind_of(const Instruction &instruction) {
    const uint8_t opcode = instruction.opcode;
    if (instruction.map == Instruction::kOneByte) {
        if (opcode == 0xFF) {
            const uint8_t reg = *instruction.operands >> 3 & 7;  // of ModRM
            if (reg == 2 || reg == 3) return Instruction::kCall;
            if (reg == 4 || reg == 5) return Instruction::kEnd;
        }
        if (opcode == 0xE8) return Instruction::kCall;
        if (opcode == 0xE9 || opcode == 0xEB) return Instruction::kJump;
        if (opcode >= 0x70 && opcode <= 0x7F) return Instruction::kBranch;
        if (opcode >= 0xE0 && opcode <= 0xE3) return Instruction::kImmovable;
        if (opcode == 0xC3) return Instruction::kEnd;
    } else if (instruction.map == Instruction::kTwoByte) {
        if (opcode >= 0x80 && opcode <= 0x8F) return Instruction::kBranch;
        if (opcode == 0x0B) return Instruction::kEnd;
    }
    return Instruction::kPlain;
}

}  // namespace

Instruction decode(const uint8_t *code) {
    Instruction found;
    const uint8_t *p = code;
    bool operand16 = false, address32 = false, invalid_before_vex = false;
    for (; is_prefix(*p) && static_cast<size_t>(p - code) < kMostPrefixes; ++p) {
        operand16 = operand16 || *p == 0x66;
        address32 = address32 || *p == 0x67;
        invalid_before_vex = invalid_before_vex || *p == 0x66 || *p >= 0xF0;
        found.has_prefix = true;
    }
    if ((*p & 0xF0) == 0x40) found.rex = *p++;
    const bool wide = found.rex & 8;
    if (wide) operand16 = false;
    invalid_before_vex = invalid_before_vex || found.rex;

    uint8_t opcode = *p++, operands;
    if (opcode == 0xC5 || opcode == 0xC4 || opcode == 0x62) {
        const bool evex = opcode == 0x62;
        const unsigned map = opcode == 0xC5 ? 1 : *p & (evex ? 7 : 31);
        if (invalid_before_vex || (evex && ((*p & 8) || !(p[1] & 4)))) return Instruction();
        p += evex ? 3 : opcode == 0xC4 ? 2 : 1;
        found.map = Instruction::kOther;
        opcode = *p++;
        operands = vector_operands(map, opcode, evex);
    } else if (opcode == 0x0F) {
        opcode = *p++;
        found.map = Instruction::kTwoByte;
        if (opcode == 0x38 || opcode == 0x3A) {
            operands = opcode == 0x38 ? kModRm : kModRm | kImm8;
            found.map = Instruction::kOther;
            opcode = *p++;
        } else {
            operands = two_byte_operands(opcode);
        }
    } else {
        operands = one_byte_operands(opcode);
    }
    if (operands & kUnknown) return Instruction();
    const bool one_byte = found.map == Instruction::kOneByte;
    found.opcode = opcode;
    found.operands = p;

    if (operands & kModRm) {
        const uint8_t modrm = *p++, mod = modrm >> 6, rm = modrm & 7, reg = modrm >> 3 & 7;
        if (mod != 3 && rm == 4) {
            const uint8_t sib = *p++;
            if (mod == 0 && (sib & 7) == 5) p += 4;
        } else if (mod == 0 && rm == 5) {
            if (address32) return Instruction();  // relative to the lower half of rip
            found.displacement_at = static_cast<size_t>(p - code);
            p += 4;
        }
        if (mod == 1) p += 1;
        if (mod == 2) p += 4;
        if (one_byte) {
            if (!is_known_in_group(opcode, reg)) return Instruction();
            if (opcode == 0xF6 && reg < 2) operands |= kImm8;
            if (opcode == 0xF7 && reg < 2) operands |= kImm32;
        }
    }
    found.kind = kind_of(found);
    if (found.kind == Instruction::kJump || found.kind == Instruction::kBranch ||
        (found.kind == Instruction::kCall && operands == kImm32)) {
        if (operand16) return Instruction();  // Intel's processors ignore the prefix, AMD's do not
        found.condition = opcode & 15;
        found.distance_at = static_cast<size_t>(p - code);
        found.distance_size = operands & kImm8 ? 1 : 4;
    }
    if (operands & kImm8) p += 1;
    if (operands & kImm32) p += one_byte && opcode >= 0xB8 && opcode <= 0xBF && wide ? 8 : operand16 ? 2 : 4;
    found.length = static_cast<size_t>(p - code);
    return found.length <= kLongest ? found : Instruction();
}

}  // namespace gpubpf::machine
