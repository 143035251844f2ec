// Assembler text of an instruction, for messages and for comparison with llvm-objdump.

#include "isa/instruction.h"

#include <cstdio>
#include <cstring>

namespace hipsim::isa {
namespace {

std::string hexadecimal(uint32_t value) {
    char buffer[16];
    std::snprintf(buffer, sizeof buffer, "0x%x", value);
    return buffer;
}

std::string range(const char *kind, unsigned first, unsigned width) {
    if (width <= 1) return kind + std::to_string(first);
    return std::string(kind) + "[" + std::to_string(first) + ":" + std::to_string(first + width - 1) + "]";
}

// The pair at `first`, or one of its halves.
std::string pair(const char *name, unsigned operand, unsigned first, unsigned width) {
    if (width == 2) return name;
    return std::string(name) + (operand == first ? "_lo" : "_hi");
}

std::string operand(const Instruction &i, unsigned code, unsigned width) {
    static const char *const floats[] = {"0.5",  "-0.5", "1.0",  "-1.0",      "2.0",
                                         "-2.0", "4.0",  "-4.0", "0.15915494"};
    if (code >= agpr0) return range("a", code - agpr0, width);
    if (code >= vgpr0) return range("v", code - vgpr0, width);
    bool gfx10 = i.set->family == Family::gfx10;
    if (code < (gfx10 ? vcc : flat_scratch)) return range("s", code, width);
    if (code < xnack_mask) return pair("flat_scratch", code, flat_scratch, width);
    if (code < vcc) return pair("xnack_mask", code, xnack_mask, width);
    if (code < ttmp0) return pair("vcc", code, vcc, width);
    if (code < m0) return range("ttmp", code - ttmp0, width);
    if (code == m0) return "m0";
    if (code == null && gfx10) return "null";
    if (code == exec || code == exec + 1) return pair("exec", code, exec, width);
    if (code >= zero && code <= 192) return std::to_string(code - zero);
    if (code > 192 && code <= 208) return std::to_string(192 - int(code));
    if (code >= half_float && code <= inverse_2pi) return floats[code - half_float];
    switch (code) {
        case shared_base: return "src_shared_base";
        case shared_limit: return "src_shared_limit";
        case private_base: return "src_private_base";
        case private_limit: return "src_private_limit";
        case pops_exiting_wave_id: return "src_pops_exiting_wave_id";
        case vccz: return "src_vccz";
        case execz: return "src_execz";
        case scc: return "src_scc";
        case lds_direct: return "src_lds_direct";
        case literal: return hexadecimal(i.literal);
        default: return "?" + std::to_string(code);
    }
}

std::string source(const Instruction &i, unsigned n, unsigned width) {
    std::string result = operand(i, i.src[n], width);
    if (i.opcode->format == Format::vop3p) return result;
    if (i.variant == sdwa && (i.sext >> n & 1)) result = "sext(" + result + ")";
    if (i.abs >> n & 1) result = "|" + result + "|";
    if (i.neg >> n & 1) result = "-" + result;
    return result;
}

std::string address(const Instruction &i, unsigned width) {
    if (i.opcode->format == Format::mubuf) {
        if (!i.offen && !i.idxen) return "off";
        return range("v", i.addr, i.offen && i.idxen ? 2 : 1);
    }
    bool scalar = i.opcode->format != Format::ds && i.opcode->format != Format::flat && i.saddr != 0x7F;
    if (i.opcode->format == Format::scratch && scalar) return "off";
    return range("v", i.addr, scalar ? 1 : width);
}

std::string field(const Instruction &i, char letter, unsigned width) {
    Format format = i.opcode->format;
    bool vector_memory = format >= Format::ds;
    switch (letter) {
        case 'd':
        case 'D': return operand(i, vector_memory ? vgpr0 + i.vdst : i.dst, width);
        case 'S': return operand(i, i.sdst, width);
        case 'a':
        case 'A': return vector_memory ? address(i, width) : source(i, 0, width);
        case 'B': return vector_memory ? operand(i, vgpr0 + i.data[0], width) : source(i, 1, width);
        case 'C': return vector_memory ? operand(i, vgpr0 + i.data[1], width) : source(i, 2, width);
        case 'R': return range("s", i.srsrc, width);
        case 'O': return operand(i, i.soffset, width);
        // SDWA comparisons may write another pair.
        case 'V': return operand(i, i.opcode->format == Format::vopc ? i.dst : uint16_t{vcc}, width);
        case 'L': return hexadecimal(i.literal);
        default: return hexadecimal(uint16_t(i.simm));
    }
}

}  // namespace

std::string text(const Instruction &i) {
    if (!i.opcode) {
        std::string words = hexadecimal(i.words[0]);
        for (unsigned n = 1; n < i.size / 4u; ++n) words += " " + hexadecimal(i.words[n]);
        return words;
    }
    std::string result = i.opcode->name;
    const char *separator = " ";
    for (const char *p = i.opcode->operands; *p; p += 2) {
        result += separator + field(i, *p, i.opcode->width(char(*p & ~0x20)));
        separator = ", ";
        // The three parts of a hardware register's name are one field.
        if (*p == 'I')
            while (p[2] == 'I') p += 2;
    }
    if (i.saddr != 0x7F && (i.opcode->format == Format::scratch || i.opcode->format == Format::global))
        result += ", saddr " + operand(i, i.saddr, i.opcode->format == Format::global ? 2 : 1);
    if (i.opcode->format == Format::smem && i.has_soffset) result += ", " + operand(i, i.soffset, 1);
    if (i.offset) result += " offset:" + std::to_string(i.offset);
    const std::pair<bool, const char *> flags[] = {{i.idxen, "idxen"}, {i.offen, "offen"}, {i.glc, "glc"},
                                                   {i.slc, "slc"},     {i.lds, "lds"},     {i.gds, "gds"},
                                                   {i.tfe, "tfe"},     {i.clamp, "clamp"}};
    for (auto [set, name] : flags)
        if (set) result += std::string(" ") + name;
    if (i.omod) result += " omod:" + std::to_string(i.omod);
    if (i.cbsz) result += " cbsz:" + std::to_string(i.cbsz);
    if (i.abid) result += " abid:" + std::to_string(i.abid);
    if (i.blgp) result += " blgp:" + std::to_string(i.blgp);
    if (i.opcode->format == Format::vop3p) {
        result += " op_sel:" + std::to_string(i.op_sel) + " op_sel_hi:" + std::to_string(i.op_sel_hi);
        result += " neg_lo:" + std::to_string(i.neg) + " neg_hi:" + std::to_string(i.neg_hi);
    } else if (i.op_sel) {
        result += " op_sel:" + std::to_string(i.op_sel);
    }
    if (i.variant == sdwa) {
        result += " sdwa dst_sel:" + std::to_string(i.dst_sel) +
                  " dst_unused:" + std::to_string(i.dst_unused) + " src0_sel:" + std::to_string(i.sel[0]) +
                  " src1_sel:" + std::to_string(i.sel[1]);
    } else if (i.variant == dpp && i.eight) {
        result += " dpp8:" + hexadecimal(i.lane_sel);
    } else if (i.variant == dpp) {
        result += " dpp " + hexadecimal(i.dpp_ctrl) + " row_mask:" + hexadecimal(i.row_mask) +
                  " bank_mask:" + hexadecimal(i.bank_mask) + (i.bound_ctrl ? " bound_ctrl:0" : "");
    }
    if (i.fetch_inactive) result += " fi:1";
    return result;
}

}  // namespace hipsim::isa
