// Fields that GFX9 and GFX10 have in the same places.

#include "isa/fields.h"

#include "isa/bits.h"

#include <string_view>

namespace hipsim::isa {

bool decode_salu(Instruction &i, uint32_t word) {
    if (bits(word, 31, 23) == 0x17F) {
        i.opcode = i.set->find(Format::sopp, bits(word, 22, 16));
        i.simm = int16_t(word);
    } else if (bits(word, 31, 23) == 0x17E) {
        i.opcode = i.set->find(Format::sopc, bits(word, 22, 16));
        i.src[0] = bits(word, 7, 0);
        i.src[1] = bits(word, 15, 8);
    } else if (bits(word, 31, 23) == 0x17D) {
        i.opcode = i.set->find(Format::sop1, bits(word, 15, 8));
        i.src[0] = bits(word, 7, 0);
        i.dst = bits(word, 22, 16);
    } else if (bits(word, 31, 28) == 0xB) {
        i.opcode = i.set->find(Format::sopk, bits(word, 27, 23));
        i.dst = bits(word, 22, 16);
        i.simm = int16_t(word);
    } else {
        i.opcode = i.set->find(Format::sop2, bits(word, 29, 23));
        i.src[0] = bits(word, 7, 0);
        i.src[1] = bits(word, 15, 8);
        i.dst = bits(word, 22, 16);
    }
    return i.opcode != nullptr;
}

bool decode_short_valu(Instruction &i, uint32_t word) {
    i.src[0] = bits(word, 8, 0);
    i.sdst = vcc;
    if (bits(word, 31, 25) == 0x3F) {
        i.opcode = i.set->find(Format::vop1, bits(word, 16, 9));
        i.dst = vgpr0 + bits(word, 24, 17);
    } else if (bits(word, 31, 25) == 0x3E) {
        i.opcode = i.set->find(Format::vopc, bits(word, 24, 17));
        i.src[1] = vgpr0 + bits(word, 16, 9);
        i.dst = vcc;
    } else {
        i.opcode = i.set->find(Format::vop2, bits(word, 30, 25));
        i.src[1] = vgpr0 + bits(word, 16, 9);
        i.dst = vgpr0 + bits(word, 24, 17);
        i.src[2] = vcc;   // for instructions with a carry or a condition
        i.op_sel_hi = 7;  // each half is in its own place
    }
    if (!i.opcode) return false;
    if (std::string_view(i.opcode->name) == "v_readfirstlane_b32") i.dst -= vgpr0;
    return true;
}

void decode_sdwa(Instruction &i, uint32_t word) {
    i.variant = sdwa;
    i.src[0] = bits(word, 7, 0) + (bits(word, 23, 23) ? 0 : vgpr0);
    i.sel[0] = bits(word, 18, 16);
    i.sel[1] = bits(word, 26, 24);
    i.sext = bits(word, 19, 19) | bits(word, 27, 27) << 1;
    i.neg = bits(word, 20, 20) | bits(word, 28, 28) << 1;
    i.abs = bits(word, 21, 21) | bits(word, 29, 29) << 1;
    if (bits(word, 31, 31)) i.src[1] -= vgpr0;  // an SGPR
    if (i.opcode->format == Format::vopc) {
        i.dst = bits(word, 15, 15) ? bits(word, 14, 8) : uint32_t{vcc};
    } else {
        i.dst_sel = bits(word, 10, 8);
        i.dst_unused = bits(word, 12, 11);
        i.clamp = bits(word, 13, 13);
        i.omod = bits(word, 15, 14);
    }
}

void decode_dpp(Instruction &i, uint32_t word) {
    i.variant = dpp;
    i.src[0] = vgpr0 + bits(word, 7, 0);
    i.dpp_ctrl = bits(word, 16, 8);
    i.bound_ctrl = bits(word, 19, 19);
    i.neg = bits(word, 20, 20) | bits(word, 22, 22) << 1;
    i.abs = bits(word, 21, 21) | bits(word, 23, 23) << 1;
    i.bank_mask = bits(word, 27, 24);
    i.row_mask = bits(word, 31, 28);
}

void decode_long_valu(Instruction &i, uint32_t first, uint32_t second, bool packed) {
    i.src[0] = bits(second, 8, 0);
    i.src[1] = bits(second, 17, 9);
    i.src[2] = bits(second, 26, 18);
    i.neg = bits(second, 31, 29);
    i.dst = vgpr0 + bits(first, 7, 0);
    i.clamp = bits(first, 15, 15);
    if (packed) {
        i.op_sel = bits(first, 13, 11);
        i.op_sel_hi = bits(second, 28, 27) | bits(first, 14, 14) << 2;
        i.neg_hi = bits(first, 10, 8);
        return;
    }
    i.omod = bits(second, 28, 27);
    if (i.opcode->width('S')) {
        i.sdst = bits(first, 14, 8);
    } else {
        i.abs = bits(first, 10, 8);
        i.op_sel = bits(first, 14, 11);
    }
    std::string_view name = i.opcode->name;
    // Comparisons and lane reads write SGPRs.
    if (i.opcode->number < 0x100 || name == "v_readlane_b32" || name == "v_readfirstlane_b32") i.dst -= vgpr0;
}

}  // namespace hipsim::isa
