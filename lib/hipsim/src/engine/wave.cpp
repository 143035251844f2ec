#include "engine/wave.h"

#include <cstdio>

namespace hipsim {

void Wave::set_mode(uint32_t value) {
    mode = value;
    round32 = value & 3;
    round64 = value >> 2 & 3;
    // Bit 0 of each pair allows denormals in sources, bit 1 in results.
    flush_in32 = !(value >> 4 & 1);
    flush_out32 = !(value >> 5 & 1);
    flush_in64 = !(value >> 6 & 1);
    flush_out64 = !(value >> 7 & 1);
}

void Wave::fault(Fault::Kind kind, const Op &op, uint64_t address, const std::string &what, bool write) {
    if (state == State::faulted) return;
    state = State::faulted;
    stop();
    Fault &f = *group->fault;
    f.kind = kind;
    f.address = address;
    f.pc = op.address;
    f.write = write;
    f.trap_id = kind == Fault::trap ? op.i.simm & 0xFF : 0;
    f.text = what;
    char where[80];
    std::snprintf(where, sizeof where, "; workgroup %u,%u,%u, wave %u", group->id[0], group->id[1],
                  group->id[2], index);
    f.executed = isa::text(op.i) + where;
}

const Range *Wave::range(uint64_t address) {
    for (Range &known : ranges)
        if (address >= known.begin && address < known.end) return &known;
    Range found;
    group->memory->range(address, &found.begin, &found.end, &found.may_write);
    if (address < found.begin || address >= found.end) return nullptr;
    Range &kept = ranges[next_range++ % 4];
    kept = found;
    return &kept;
}

bool Wave::allow(const Op &op, uint64_t address, uint64_t bytes, bool write) {
    const Range *found = range(address);
    bool inside = found && found->end - address >= bytes;
    if (found && !inside) {
        // The access ends in the next allocation, or beyond all of them.
        uint64_t rest = bytes - (found->end - address), end = found->end;
        bool writable = found->may_write;
        const Range *second = range(end);
        inside = second && second->end - end >= rest && (!write || (writable && second->may_write));
        if (inside) return true;
    }
    if (inside && (!write || found->may_write)) return true;
    char what[96];
    std::snprintf(what, sizeof what, "%s of %llu bytes at 0x%llx, which %s", write ? "store" : "load",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address),
                  found && inside ? "the device may only read" : "is not mapped to the device");
    fault(Fault::memory, op, address, what, write);
    return false;
}

uint64_t Wave::scalar(unsigned operand, unsigned width) const {
    if (operand < isa::zero) return width == 2 && operand < 127 ? pair(operand) : s[operand];
    if (operand <= 192) return operand - isa::zero;
    if (operand <= 208)
        return width == 2 ? uint64_t(192 - int64_t(operand)) : uint32_t(192 - int32_t(operand));
    const Target &target = *group->target;
    // The apertures' registers have 64 bits; a 32-bit read returns the low word.
    uint64_t value = 0;
    switch (operand) {
        case isa::shared_base: value = target.shared_base; break;
        case isa::shared_limit: value = target.shared_base | 0xFFFFFFFF; break;
        case isa::private_base: value = target.private_base; break;
        case isa::private_limit: value = target.private_base | 0xFFFFFFFF; break;
        case isa::vccz: value = vcc() == 0; break;
        case isa::execz: value = exec() == 0; break;
        case isa::scc: value = scc; break;
        default: break;
    }
    return width == 2 ? value : uint32_t(value);
}

}  // namespace hipsim
