// The instruction sets, and their tables that generate.py makes.

#include "isa/families.h"

#include <array>
#include <iterator>

namespace hipsim::isa {
namespace {

const Opcode gfx906[] = {
#include "isa/gfx906.inc"
};
const Opcode gfx90a[] = {
#include "isa/gfx90a.inc"
};

const Set sets[] = {
    {"gfx906", Family::gfx9, false, gfx906},
    {"gfx90a", Family::gfx9, true, gfx90a},
};

constexpr unsigned most_opcodes = 1024;  // of one format

// The rows of a set by format and number.
struct Index {
    std::array<std::array<const Opcode *, most_opcodes>, unsigned(Format::unknown)> of = {};
    void fill(const Set &set) {
        for (const Opcode &row : set.opcodes) of[unsigned(row.format)][row.number] = &row;
    }
};

struct Indices {
    std::array<Index, std::size(sets)> of;
    Indices() {
        for (std::size_t n = 0; n < of.size(); ++n) of[n].fill(sets[n]);
    }
};

}  // namespace

const Opcode *Set::find(Format format, unsigned number) const {
    static const auto *indices = new Indices;
    return indices->of[std::size_t(this - sets)].of[unsigned(format)][number];
}

const Set *find_set(std::string_view gpu) {
    for (const Set &set : sets)
        if (gpu == set.gpu) return &set;
    return nullptr;
}

unsigned Opcode::width(char field) const {
    for (const char *p = operands; *p; p += 2) {
        if ((*p & ~0x20) != field) continue;  // small letters name the same fields
        if (p[1] == 'w') return 32;
        unsigned width = p[1] <= '9' ? p[1] - '0' : p[1] - 'a' + 10;
        return width || field == 'I' ? width : 16;
    }
    return 0;
}

Instruction decode(const Set &set, const uint32_t *code, uint64_t bytes) {
    switch (set.family) {
        case Family::gfx9: return decode_gfx9(set, code, bytes);
    }
    return {};
}

}  // namespace hipsim::isa
