// GFX9 (Vega and CDNA): from words to fields. The GPU's table says which opcodes exist.

#include "isa/bits.h"
#include "isa/families.h"
#include "isa/fields.h"

namespace hipsim::isa {
namespace {

// Fields that always name an AGPR have small letters in the table.
void name_agprs(Instruction &i) {
    for (const char *p = i.opcode->operands; *p; p += 2) {
        if (*p == 'd') i.dst += agpr0 - vgpr0;
        if (*p == 'a' && i.src[0] >= vgpr0) i.src[0] += agpr0 - vgpr0;
    }
}

// Matrix products: D, A, B and C are VGPRs or AGPRs.
void decode_mai(Instruction &i, uint32_t first, uint32_t second) {
    i.src[0] = bits(second, 8, 0);
    i.dst = vgpr0 + bits(first, 7, 0);
    if (!i.opcode->width('B')) return name_agprs(i);  // v_accvgpr_read and v_accvgpr_write
    i.src[1] = bits(second, 17, 9);
    i.src[2] = bits(second, 26, 18);
    i.cbsz = bits(first, 10, 8);
    i.abid = bits(first, 14, 11);
    i.blgp = bits(second, 31, 29);
    bool results = bits(first, 15, 15);
    const bool accumulators[] = {bool(bits(second, 27, 27)), bool(bits(second, 28, 28)), results};
    for (unsigned n = 0; n < 3; ++n)
        if (accumulators[n] && i.src[n] >= vgpr0) i.src[n] += agpr0 - vgpr0;
    if (results) i.dst += agpr0 - vgpr0;
}

bool decode_vop3(Instruction &i, uint32_t first, uint32_t second) {
    bool packed = bits(first, 25, 23) == 7;
    Format format = !packed ? Format::vop3 : bits(first, 22, 22) ? Format::mai : Format::vop3p;
    i.opcode = i.set->find(format, packed ? bits(first, 22, 16) : bits(first, 25, 16));
    if (!i.opcode) return false;
    if (format == Format::mai) {
        decode_mai(i, first, second);
        return true;
    }
    decode_long_valu(i, first, second, packed);
    return true;
}

void decode_smem(Instruction &i, uint32_t first, uint32_t second) {
    i.opcode = i.set->find(Format::smem, bits(first, 25, 18));
    i.dst = bits(first, 12, 6);
    i.src[0] = bits(first, 5, 0) * 2;
    i.glc = bits(first, 16, 16);
    i.has_imm = bits(first, 17, 17);
    i.has_soffset = bits(first, 14, 14);
    // Without an immediate, the field of the offset names an SGPR.
    i.offset = i.has_imm ? signed_bits(second, 20, 0) : 0;
    i.soffset = i.has_soffset ? bits(second, 31, 25) : bits(second, 6, 0);
    if (!i.has_imm) i.has_soffset = true;
}

// CDNA2: the data of a memory access may be in AGPRs.
void data_in_agprs(Instruction &i, bool accumulators) {
    if (!accumulators || !i.set->cdna2) return;
    for (uint16_t *number : {&i.vdst, &i.data[0], &i.data[1]}) *number += agpr0 - vgpr0;
}

void decode_ds(Instruction &i, uint32_t first, uint32_t second) {
    i.opcode = i.set->find(Format::ds, bits(first, 24, 17));
    i.gds = bits(first, 16, 16);
    i.offset = bits(first, 15, 0);
    i.addr = bits(second, 7, 0);
    i.data[0] = bits(second, 15, 8);
    i.data[1] = bits(second, 23, 16);
    i.vdst = bits(second, 31, 24);
    data_in_agprs(i, bits(first, 25, 25));
}

void decode_flat(Instruction &i, uint32_t first, uint32_t second) {
    constexpr Format formats[] = {Format::flat, Format::scratch, Format::global};
    uint32_t segment = bits(first, 15, 14);
    if (segment == 3) return;
    i.opcode = i.set->find(formats[segment], bits(first, 24, 18));
    i.glc = bits(first, 16, 16);
    i.slc = bits(first, 17, 17);
    i.lds = bits(first, 13, 13);
    i.offset = segment ? signed_bits(first, 12, 0) : int32_t(bits(first, 11, 0));
    i.addr = bits(second, 7, 0);
    i.data[0] = bits(second, 15, 8);
    i.saddr = segment ? bits(second, 22, 16) : 0x7F;
    i.vdst = bits(second, 31, 24);
    data_in_agprs(i, bits(second, 23, 23));
}

void decode_mubuf(Instruction &i, uint32_t first, uint32_t second) {
    i.opcode = i.set->find(Format::mubuf, bits(first, 24, 18));
    i.offset = bits(first, 11, 0);
    i.offen = bits(first, 12, 12);
    i.idxen = bits(first, 13, 13);
    i.glc = bits(first, 14, 14);
    i.lds = bits(first, 16, 16);
    i.slc = bits(first, 17, 17);
    i.addr = bits(second, 7, 0);
    i.data[0] = i.vdst = bits(second, 15, 8);
    i.srsrc = bits(second, 20, 16) * 4;
    i.tfe = bits(second, 23, 23) && !i.set->cdna2;
    i.soffset = bits(second, 31, 24);
    data_in_agprs(i, bits(second, 23, 23));
}

bool takes_literal(const Instruction &i) {
    if (i.opcode->width('L')) return true;
    switch (i.opcode->format) {
        case Format::sop2:
        case Format::sopc:
        case Format::vop2:
        case Format::vopc:
        case Format::sop1:
        case Format::vop1:
            return (i.opcode->width('A') && i.src[0] == literal) ||
                   (i.opcode->width('B') && i.src[1] == literal);
        default: return false;
    }
}

}  // namespace

Instruction decode_gfx9(const Set &set, const uint32_t *code, uint64_t bytes) {
    Instruction i;
    i.set = &set;
    if (bytes < 4) return i;
    uint32_t first = i.words[0] = code[0];
    bool more = bytes >= 8;
    uint32_t second = more ? code[1] : 0;
    uint32_t format = bits(first, 31, 26);

    if (format < 0x30) {
        bool vector = !(first >> 31);
        if (!(vector ? decode_short_valu(i, first) : decode_salu(i, first))) return i;
        if (vector) name_agprs(i);
        bool modified = vector && i.opcode->width('A') && (i.src[0] == sdwa_word || i.src[0] == dpp_word);
        if (!modified && !takes_literal(i)) return i;
        Variant variant = !modified ? none : i.src[0] == sdwa_word ? sdwa : dpp;
        i.size = 8;
        i.words[1] = second;
        if (!more || (modified && !(i.opcode->variants & variant))) {
            i.opcode = nullptr;
        } else if (variant == sdwa) {
            decode_sdwa(i, second);
        } else if (variant == dpp) {
            decode_dpp(i, second);
        } else {
            i.literal = second;
        }
        return i;
    }

    if (!more) return i;
    i.size = 8;
    i.words[1] = second;
    switch (format) {
        case 0x30: decode_smem(i, first, second); break;
        case 0x34: decode_vop3(i, first, second); break;
        case 0x36: decode_ds(i, first, second); break;
        case 0x37: decode_flat(i, first, second); break;
        case 0x38: decode_mubuf(i, first, second); break;
        default: break;  // interpolation, exports, images and typed buffers
    }
    return i;
}

}  // namespace hipsim::isa
