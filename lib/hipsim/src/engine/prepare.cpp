// Prepares a decoded instruction to run: finds its function and its constants, and refuses what is not supported.

#include "engine/program.h"
#include "engine/registry.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <string_view>

namespace hipsim {
namespace {

bool is_float(Type type) { return type == Type::f32 || type == Type::f64 || type == Type::f16; }
bool is_half(Type type) { return type == Type::b16 || type == Type::f16; }

bool is_constant(unsigned operand) {
    return (operand >= isa::zero && operand <= 208) ||
           (operand >= isa::half_float && operand <= isa::inverse_2pi) || operand == isa::literal;
}

uint64_t constant(const isa::Instruction &i, unsigned operand, Type type) {
    static constexpr double floats[] = {0.5, -0.5, 1, -1, 2, -2, 4, -4};
    static constexpr uint16_t halves[] = {0x3800, 0xB800, 0x3C00, 0xBC00, 0x4000,
                                          0xC000, 0x4400, 0xC400, 0x3118};
    bool wide = type == Type::f64 || type == Type::b64 || type == Type::i64;
    bool half = is_half(type) || type == Type::packed16 || type == Type::packed_f16;
    if (operand == isa::literal) {
        if (type == Type::f64) return uint64_t{i.literal} << 32;
        return type == Type::i64 ? uint64_t(int64_t(int32_t(i.literal))) : i.literal;
    }
    if (operand <= 208) {
        int64_t value = operand <= 192 ? int64_t(operand) - isa::zero : 192 - int64_t(operand);
        return wide ? uint64_t(value) : uint32_t(value);
    }
    unsigned n = operand - isa::half_float;
    if (half) return halves[n];
    if (operand == isa::inverse_2pi) return wide ? 0x3FC45F306DC9C882 : 0x3E22F983;
    return wide ? std::bit_cast<uint64_t>(floats[n]) : std::bit_cast<uint32_t>(float(floats[n]));
}

// Returns which modifier of an instruction its types do not allow.
std::string bad_modifier(const isa::Instruction &i, const Semantics &semantics) {
    bool packed = i.opcode->format == isa::Format::vop3p;
    if (i.variant == isa::sdwa && (i.sel[0] == 7 || i.sel[1] == 7 || i.dst_sel == 7 || i.dst_unused == 3))
        return "a reserved selection of SDWA";
    for (unsigned n = 0; n < 3; ++n) {
        Type type = semantics.src[n];
        unsigned bit = 1u << n;
        bool negatable = is_float(type) || type == Type::packed_f16 || type == Type::packed_f32;
        if (((i.abs | i.neg) & bit) && !negatable) return "neg or abs of an integer";
        if (packed && (i.neg_hi & bit) && !negatable) return "neg of an integer";
        if (!packed && !semantics.own_op_sel && (i.op_sel & bit) && !is_half(type))
            return "op_sel of a 32-bit operand";
        if ((i.sext & bit) && is_float(type)) return "sext of a float";
    }
    if (!packed && (i.op_sel & 8) && !is_half(semantics.dst)) return "op_sel of a 32-bit result";
    bool comparison = i.dst < isa::vgpr0 && std::string_view(i.opcode->name).starts_with("v_cmp");
    if (i.omod && (!is_float(semantics.dst) || comparison)) return "omod of an integer";
    if (i.clamp && (comparison ||
                    !(is_float(semantics.dst) || semantics.dst == Type::packed_f16 || semantics.run_clamped)))
        return "clamp";
    return "";
}

// Consecutive registers are all VGPRs or all AGPRs.
bool beyond(unsigned first, unsigned width) { return first % 256 + width > 256; }

// CDNA2: operands of several registers begin at an even register.
bool at_odd_register(const isa::Instruction &i) {
    if (!i.set->cdna2) return false;
    using isa::Format;
    auto odd = [&](unsigned number, char field) { return i.opcode->width(field) > 1 && number % 2; };
    Format format = i.opcode->format;
    if (format >= Format::ds) {
        bool pair = format == Format::mubuf && i.offen && i.idxen;
        bool scalar = (format == Format::global || format == Format::scratch) && i.saddr != 0x7F;
        return odd(i.vdst, 'D') || (odd(i.addr, 'A') && !scalar && format != Format::mubuf) ||
               odd(i.data[0], 'B') || odd(i.data[1], 'C') || (pair && i.addr % 2);
    }
    const char fields[] = {'A', 'B', 'C'};
    for (unsigned n = 0; n < 3; ++n)
        if (i.src[n] >= isa::vgpr0 && odd(i.src[n], fields[n])) return true;
    return i.dst >= isa::vgpr0 && odd(i.dst, 'D');
}

// Checks which lanes a DPP instruction reads. GFX9 shifts and rotates whole waves and broadcasts rows; GFX10 shares and
// exchanges the lanes of a row.
std::string bad_dpp(const isa::Instruction &i) {
    if (i.variant != isa::dpp || i.eight) return "";
    unsigned control = i.dpp_ctrl, row = control & 0x1F0;
    bool gfx10 = i.set->family == isa::Family::gfx10;
    bool broadcast = i.set->cdna2 && row == 0x150;  // row_newbcast
    static constexpr uint16_t of_waves[] = {0x130, 0x134, 0x138, 0x13C, 0x142, 0x143};
    bool known = control < 0x100 || ((row == 0x100 || row == 0x110 || row == 0x120) && (control & 15)) ||
                 control == 0x140 || control == 0x141 || broadcast;
    if (gfx10) known = known || row == 0x150 || row == 0x160;
    else known = known || std::find(std::begin(of_waves), std::end(of_waves), control) != std::end(of_waves);
    bool wide = i.opcode->width('D') > 1 || i.opcode->width('A') > 1;
    return known && (broadcast || !wide) ? "" : "DPP control";
}

// The hardware writes parts of a large result before it has read all sources. Only C may be in the same place.
bool overwrites_sources(const isa::Instruction &i) {
    unsigned width = i.opcode->width('D');
    auto overlap = [&](unsigned n, char field) {
        return i.src[n] < i.dst + width && i.dst < i.src[n] + i.opcode->width(field);
    };
    return width > 4 && (overlap(0, 'A') || overlap(1, 'B') || (i.src[2] != i.dst && overlap(2, 'C')));
}

// Returns what is not supported in an instruction of CDNA2.
std::string bad_cdna2(const isa::Instruction &i, const Semantics &semantics) {
    auto constant = [&](unsigned n) { return is_constant(i.src[n]); };
    if (semantics.blocks) {
        if (i.src[0] < isa::vgpr0 || i.src[1] < isa::vgpr0) return "a factor that is no VGPR";
        if (i.src[2] < isa::vgpr0 && (!constant(2) || i.src[2] == isa::literal)) return "an SGPR as C";
        if ((1u << i.cbsz) > semantics.blocks || i.abid >= 1u << i.cbsz) return "cbsz or abid";
        if (i.blgp && semantics.dst == Type::f64) return "blgp";
        if (overwrites_sources(i)) return "D that overlaps another operand";
        return "";
    }
    for (const char *p = i.opcode->operands; *p; p += 2)
        if (*p == 'a' && i.src[0] < isa::agpr0) return "an operand that is no AGPR";
    std::string_view name = i.opcode->name;
    // In the low word of a pair, a constant has its value. It is not documented whether the high word repeats it.
    bool packed_single = semantics.src[0] == Type::packed_f32, moves_pair = name == "v_pk_mov_b32";
    for (unsigned n = 0; n < 3 && (packed_single || moves_pair); ++n) {
        bool high = (i.op_sel >> n & 1) || (packed_single && (i.op_sel_hi >> n & 1));
        if (i.opcode->width("ABC"[n]) && constant(n) && i.src[n] != isa::zero && high)
            return "the high word of a constant";
    }
    if (moves_pair && (i.op_sel_hi & 3) != 3) return "op_sel_hi";
    if ((name == "v_pk_fmac_f16" || name == "v_dot2c_f32_f16") && constant(0) && i.src[0] != isa::literal)
        return "a constant for two halves";
    return "";
}

// Returns what is not supported in a memory instruction.
std::string bad_memory(const isa::Instruction &i) {
    using isa::Format;
    bool wave_sync = std::string_view(i.opcode->name).starts_with("ds_gws_");
    if (i.gds && !wave_sync) return "global data share";
    if (i.lds) return "load into LDS";
    if (i.tfe) return "texture fail enable";
    Format format = i.opcode->format;
    if (format == Format::ds) {
        std::string_view name = i.opcode->name;
        if (name == "ds_swizzle_b32" && (i.offset & 0x8000) && (i.offset & 0x7F00)) return "swizzle mode";
    }
    if (format >= Format::ds && format <= Format::mubuf)
        if (beyond(i.vdst, i.opcode->width('D')) || beyond(i.addr, i.opcode->width('A')) ||
            beyond(i.data[0], i.opcode->width('B')) || beyond(i.data[1], i.opcode->width('C')))
            return "a VGPR beyond the last";
    if ((format == Format::global || format == Format::scratch) && i.saddr != 0x7F && i.saddr > 126)
        return "scalar address";
    if (format == Format::mubuf && i.srsrc > 124) return "buffer descriptor";
    if (format == Format::smem && i.opcode->width('D') && i.dst + i.opcode->width('D') > 128)
        return "an SGPR beyond the last";
    if (format == Format::smem && i.src[0] + i.opcode->width('A') > 128) return "an SGPR beyond the last";
    return "";
}

std::string bad_register(const isa::Instruction &i) {
    bool gfx10 = i.set->family == isa::Family::gfx10;
    const std::string_view known_registers = gfx10 ? "\1\2\3\6\7\17\24\25\27\30\35" : "\1\2\3\4\5\6\7\17";
    std::string_view name = i.opcode->name;
    unsigned number = i.simm & 63;
    if (name == "s_getreg_b32" && i.set->cdna2 && number == 5) {
        return "hardware register 5";  // GPR_ALLOC has other fields
    } else if (name == "s_getreg_b32") {
        if (known_registers.find(char(number)) == std::string_view::npos)
            return "hardware register " + std::to_string(number);
    } else if (name == "s_setreg_b32" || name == "s_setreg_imm32_b32") {
        bool scratch = gfx10 && (number == 20 || number == 21);
        if (number != 1 && number != 3 && !scratch)
            return "writing hardware register " + std::to_string(number);
    } else if (name == "s_sendmsg" && (i.simm & 15) != 1) {
        return "message " + std::to_string(i.simm & 15);
    }
    return "";
}

// GFX10's null register: as a source, it is 0; a result is lost. Not supported if an instruction reads and changes it.
std::string bad_null(const isa::Instruction &i) {
    std::string_view name = i.opcode->name;
    bool changes = (i.opcode->format == isa::Format::sopk && !name.starts_with("s_waitcnt_") &&
                    name != "s_movk_i32" && name != "s_cmovk_i32" && name != "s_getreg_b32") ||
                   name.starts_with("s_bitset") || name.starts_with("s_movrel");
    return changes && i.dst == isa::null ? "the null register" : "";
}

void place_null(Op &op) {
    isa::Instruction &i = op.i;
    for (uint16_t &operand : i.src)
        if (operand == isa::null) operand = isa::zero;
    if (i.dst == isa::null) op.dst = null_place;
    if (i.sdst == isa::null) i.sdst = null_place;
}

// 16-bit results of GFX10 keep the other half of their register, but not those of SDWA.
bool keeps_high_half(const isa::Instruction &i, const Semantics &semantics) {
    return semantics.keeps_high_half || i.set->family == isa::Family::gfx10;
}

}  // namespace

std::string prepare(const isa::Instruction &instruction, uint64_t address, Op &op) {
    using isa::Format;
    op.i = instruction;
    op.address = address;
    isa::Instruction &i = op.i;
    // Images have the encoding 0b111100 on GFX9 and GFX10.
    if (!i.opcode)
        return i.words[0] >> 26 == 0x3C ? "image instruction (hipsim has no images)" : "unknown instruction";
    const Registry &known = registry(i.set->family);
    auto found = known.find(i.opcode->name);
    if (found == known.end()) return "unsupported instruction";
    const Semantics &semantics = found->second;
    Format format = i.opcode->format;
    bool vector = format == Format::vop1 || format == Format::vop2 || format == Format::vopc ||
                  format == Format::vop3 || format == Format::vop3p || format == Format::mai;
    std::string why = vector ? bad_modifier(i, semantics) : bad_memory(i);
    if (why.empty()) why = bad_register(i);
    const bool gfx10 = i.set->family == isa::Family::gfx10;
    if (why.empty() && gfx10) why = bad_null(i);
    // Two bytes: what happens to the other half of the register is not documented.
    if (gfx10 && std::string_view(i.opcode->name) == "v_sat_pk_u8_i16") why = "the upper half of the result";
    if (why.empty() && vector) why = bad_dpp(i);
    if (why.empty() && vector) why = bad_cdna2(i, semantics);
    if (why.empty() && at_odd_register(i)) why = "several registers from an odd one";
    if (!why.empty()) return "unsupported: " + why;

    op.run = semantics.run;
    if (i.clamp && vector && !is_float(semantics.dst) && semantics.dst != Type::packed_f16)
        op.run = semantics.run_clamped;
    op.vector = vector;
    op.dst = i.dst >= isa::vgpr0 ? i.dst - isa::vgpr0 : i.dst;
    if (gfx10 && format <= Format::vop3p) place_null(op);
    op.keeps_high_half = keeps_high_half(i, semantics);
    op.plain_dst = !i.omod && !i.clamp && i.variant != isa::dpp && (i.variant != isa::sdwa || i.dst_sel == 6);
    if (format >= Format::smem && !vector) return "";

    // v_mac adds to its destination; v_madmk and v_madak have a literal among their sources.
    if (semantics.accumulates) i.src[2] = i.dst;
    // Their functions access these registers directly, so they must be VGPRs.
    std::string_view name = i.opcode->name;
    bool takes_vgpr = name == "v_swap_b32" || name == "v_swaprel_b32" || name.starts_with("v_movrels");
    if ((takes_vgpr && i.src[0] < isa::vgpr0) || (name == "v_mqsad_u32_u8" && i.src[2] < isa::vgpr0))
        return "unsupported: an SGPR in the place of a VGPR";
    bool has_c = i.opcode->width('C') || semantics.accumulates || semantics.src[2] != Type::none;
    if (i.opcode->width('L') && vector) {
        bool before =
            std::string_view(i.opcode->operands).find('L') < std::string_view(i.opcode->operands).find('B');
        i.src[2] = before ? i.src[1] : uint16_t{isa::literal};
        if (before) i.src[1] = isa::literal;
    }
    unsigned width_d = i.opcode->width('D');
    if (op.dst != null_place && i.dst < isa::vgpr0 && i.dst + (width_d ? width_d : 1) > 128)
        return "unsupported: destination";
    if (i.dst >= isa::vgpr0 && beyond(op.dst, width_d)) return "unsupported: a VGPR beyond the last";
    if (i.opcode->width('S') && i.sdst > 126 && !(gfx10 && i.sdst == null_place))
        return "unsupported: destination";

    const bool used[3] = {i.opcode->width('A') > 0,
                          i.opcode->width('B') > 0 || (vector && i.opcode->width('L')), has_c};
    const char letters[3] = {'A', 'B', 'C'};
    for (unsigned n = 0; n < 3; ++n) {
        if (!used[n]) continue;
        Source &source = op.src[n];
        unsigned operand = i.src[n], width = i.opcode->width(letters[n]);
        if (n == 2 && semantics.accumulates) width = width_d;
        bool modified = ((i.abs | i.neg | i.op_sel | i.neg_hi) >> n & 1) ||
                        (i.variant == isa::dpp && n == 0) ||
                        (i.variant == isa::sdwa && n < 2 && i.sel[n] != 6);
        if (operand >= isa::vgpr0) {
            source.index = uint16_t(operand - isa::vgpr0);
            source.kind = modified ? Source::other : Source::vgpr;
            if (beyond(source.index, width)) return "unsupported: a VGPR beyond the last";
        } else if (operand == isa::literal && format >= Format::vop3 && !gfx10) {  // GFX9 has none there
            return "unsupported: operand " + std::to_string(operand);
        } else if (is_constant(operand)) {
            source.value = constant(i, operand, semantics.src[n]);
            source.kind = modified ? Source::other : Source::constant;
        } else if (operand < isa::zero) {
            source.index = uint16_t(operand);
            source.kind = modified ? Source::other : Source::sgpr;
            if (operand + width > 128) return "unsupported: an SGPR beyond the last";
        } else if (operand >= isa::shared_base && operand <= isa::private_limit) {
            source.kind = Source::other;
        } else if (operand == isa::vccz || operand == isa::execz || operand == isa::scc) {
            source.kind = Source::other;
        } else {
            return "unsupported: operand " + std::to_string(operand);
        }
    }
    return "";
}

}  // namespace hipsim
