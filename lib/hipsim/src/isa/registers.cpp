// The number of registers of each kind that a wave needs to execute an instruction.

#include "isa/registers.h"

#include <algorithm>

namespace hipsim::isa {
namespace {

void mark(Registers &most, const Set &set, unsigned code, unsigned width) {
    unsigned sgprs = set.family == Family::gfx10 ? vcc : flat_scratch;
    if (code >= agpr0) most.agprs = std::max(most.agprs, code - agpr0 + width);
    else if (code >= vgpr0) most.vgprs = std::max(most.vgprs, code - vgpr0 + width);
    else if (code < sgprs) most.sgprs = std::max(most.sgprs, std::min(code + width, sgprs));
}

}  // namespace

void add(Registers &most, const Instruction &i) {
    Format format = i.opcode->format;
    bool vector_memory = format >= Format::ds;
    bool scalar_address = format != Format::ds && format != Format::flat && i.saddr != 0x7F;
    auto use = [&](unsigned code, unsigned width) { mark(most, *i.set, code, width); };
    for (const char *p = i.opcode->operands; *p; p += 2) {
        char letter = char(*p & ~0x20);
        unsigned width = i.opcode->width(letter);
        switch (letter) {
            case 'D': use(vector_memory ? vgpr0 + i.vdst : i.dst, width); break;
            case 'S': use(i.sdst, width); break;
            case 'A':
                if (!vector_memory) use(i.src[0], width);
                else if (format == Format::mubuf && (i.offen || i.idxen))
                    use(vgpr0 + i.addr, i.offen && i.idxen ? 2 : 1);
                else if (format != Format::mubuf && !(format == Format::scratch && scalar_address))
                    use(vgpr0 + i.addr, scalar_address ? 1 : width);
                break;
            case 'B': use(vector_memory ? vgpr0 + i.data[0] : i.src[1], width); break;
            case 'C': use(vector_memory ? vgpr0 + i.data[1] : i.src[2], width); break;
            case 'R': use(i.srsrc, width); break;
            case 'O': use(i.soffset, width); break;
            default: break;
        }
    }
    if (scalar_address && (format == Format::scratch || format == Format::global))
        use(i.saddr, format == Format::global ? 2 : 1);
    if (format == Format::smem && i.has_soffset) use(i.soffset, 1);
}

}  // namespace hipsim::isa
