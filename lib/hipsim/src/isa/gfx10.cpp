// GFX10 (RDNA and RDNA2): from words to fields. The GPU's table says which opcodes exist.

#include "isa/bits.h"
#include "isa/families.h"
#include "isa/fields.h"

#include <string_view>

namespace hipsim::isa {
namespace {

constexpr unsigned dpp8_word = 233, dpp8_fetching_word = 234;
constexpr unsigned no_saddr = 0x7F;  // as in Instruction

bool is_cmpx(const Opcode &opcode) { return std::string_view(opcode.name).starts_with("v_cmpx_"); }

void decode_dpp8(Instruction &i, uint32_t word, bool fetch_inactive) {
    i.variant = dpp;
    i.eight = true;
    i.src[0] = vgpr0 + bits(word, 7, 0);
    i.lane_sel = bits(word, 31, 8);
    i.fetch_inactive = fetch_inactive;
}

bool decode_vop3(Instruction &i, uint32_t first, uint32_t second) {
    bool packed = bits(first, 31, 26) == 0x33;
    if (packed && bits(first, 25, 23)) return false;
    i.opcode = packed ? i.set->find(Format::vop3p, bits(first, 22, 16))
                      : i.set->find(Format::vop3, bits(first, 25, 16));
    if (!i.opcode) return false;
    decode_long_valu(i, first, second, packed);
    if (!packed && is_cmpx(*i.opcode)) i.dst = exec;
    return true;
}

void decode_smem(Instruction &i, uint32_t first, uint32_t second) {
    i.opcode = i.set->find(Format::smem, bits(first, 25, 18));
    i.dst = bits(first, 12, 6);
    i.src[0] = bits(first, 5, 0) * 2;
    i.glc = bits(first, 16, 16);
    i.offset = signed_bits(second, 20, 0);
    i.has_imm = true;
    i.soffset = bits(second, 31, 25);
    i.has_soffset = i.soffset != null;
}

void decode_ds(Instruction &i, uint32_t first, uint32_t second) {
    i.opcode = i.set->find(Format::ds, bits(first, 25, 18));
    i.gds = bits(first, 17, 17);
    i.offset = bits(first, 15, 0);
    i.addr = bits(second, 7, 0);
    i.data[0] = bits(second, 15, 8);
    i.data[1] = bits(second, 23, 16);
    i.vdst = bits(second, 31, 24);
}

void decode_flat(Instruction &i, uint32_t first, uint32_t second) {
    constexpr Format formats[] = {Format::flat, Format::scratch, Format::global};
    uint32_t segment = bits(first, 15, 14);
    if (segment == 3) return;
    i.opcode = i.set->find(formats[segment], bits(first, 24, 18));
    i.glc = bits(first, 16, 16);
    i.slc = bits(first, 17, 17);
    i.lds = bits(first, 13, 13);
    i.offset = segment ? signed_bits(first, 11, 0) : int32_t(bits(first, 10, 0));
    i.addr = bits(second, 7, 0);
    i.data[0] = bits(second, 15, 8);
    i.vdst = bits(second, 31, 24);
    uint32_t saddr = bits(second, 22, 16);
    // The null register means no scalar address. In SCRATCH, 0x7f means no address, as if the scalar one was 0.
    i.saddr = segment == 0 || saddr == null   ? no_saddr
              : segment == 1 && saddr == 0x7F ? uint32_t{null}
                                              : saddr;
}

void decode_mubuf(Instruction &i, uint32_t first, uint32_t second) {
    i.opcode = i.set->find(Format::mubuf, bits(first, 24, 18));
    i.offset = bits(first, 11, 0);
    i.offen = bits(first, 12, 12);
    i.idxen = bits(first, 13, 13);
    i.glc = bits(first, 14, 14);
    i.lds = bits(first, 16, 16);
    i.slc = bits(second, 22, 22);
    i.addr = bits(second, 7, 0);
    i.data[0] = i.vdst = bits(second, 15, 8);
    i.srsrc = bits(second, 20, 16) * 4;
    i.tfe = bits(second, 23, 23);
    i.soffset = bits(second, 31, 24);
}

bool takes_literal(const Instruction &i) {
    if (i.opcode->width('L')) return true;
    if (i.opcode->format > Format::vop3p || i.opcode->format == Format::smem) return false;
    const char letters[] = {'A', 'B', 'C'};
    for (unsigned n = 0; n < 3; ++n)
        if (i.opcode->width(letters[n]) && i.src[n] == literal) return true;
    return false;
}

// SDWA or DPP, as src0 says; none for other values.
Variant variant_of(const Instruction &i) {
    if (i.opcode->format != Format::vop1 && i.opcode->format != Format::vop2 &&
        i.opcode->format != Format::vopc)
        return none;
    if (!i.opcode->width('A')) return none;
    switch (i.src[0]) {
        case sdwa_word: return sdwa;
        case dpp_word: return dpp;
        case dpp8_word:
        case dpp8_fetching_word: return dpp8;
        default: return none;
    }
}

}  // namespace

Instruction decode_gfx10(const Set &set, const uint32_t *code, uint64_t bytes) {
    Instruction i;
    i.set = &set;
    if (bytes < 4) return i;
    uint32_t first = i.words[0] = code[0];
    uint32_t format = bits(first, 31, 26);
    unsigned words = 1;

    if (format < 0x30) {
        if (!(first >> 31 ? decode_salu(i, first) : decode_short_valu(i, first))) return i;
        if (is_cmpx(*i.opcode)) i.dst = exec;
    } else {
        if (bytes < 8) return i;
        words = 2;
        i.size = 8;
        uint32_t second = i.words[1] = code[1];
        switch (format) {
            case 0x33:
            case 0x35: decode_vop3(i, first, second); break;
            case 0x36: decode_ds(i, first, second); break;
            case 0x37: decode_flat(i, first, second); break;
            case 0x38: decode_mubuf(i, first, second); break;
            case 0x3D: decode_smem(i, first, second); break;
            default: break;  // interpolation, exports, images and typed buffers
        }
        if (!i.opcode) return i;
    }

    Variant variant = variant_of(i);
    bool with_literal = takes_literal(i);
    if (!variant && !with_literal) return i;
    i.size = uint8_t(4 * (words + 1));
    if (bytes < i.size || (variant && !(i.opcode->variants & variant))) {
        if (bytes < i.size) i.size = uint8_t(4 * words);
        else i.words[words] = code[words];
        i.opcode = nullptr;
        return i;
    }
    uint32_t last = i.words[words] = code[words];
    switch (variant) {
        case sdwa:
            decode_sdwa(i, last);
            if (is_cmpx(*i.opcode)) i.dst = exec;
            break;
        case dpp:
            decode_dpp(i, last);
            i.fetch_inactive = bits(last, 18, 18);
            break;
        case dpp8: decode_dpp8(i, last, i.src[0] == dpp8_fetching_word); break;
        default: i.literal = last; break;
    }
    return i;
}

}  // namespace hipsim::isa
