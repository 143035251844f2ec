// The instruction sets, with the tables that generate.py makes.

#include "isa/families.h"

#include <array>
#include <deque>
#include <iterator>
#include <string>

namespace hipsim::isa {
namespace {

const Opcode gfx906[] = {
#include "isa/gfx906.inc"
};
const Opcode gfx90a[] = {
#include "isa/gfx90a.inc"
};
const Opcode gfx1030[] = {
#include "isa/gfx1030.inc"
};

const Set sets[] = {
    {"gfx906", Family::gfx9, 64, false, gfx906},
    {"gfx90a", Family::gfx9, 64, true, gfx90a},
    {"gfx1030", Family::gfx10, 32, false, gfx1030},
    {"gfx1030", Family::gfx10, 64, false, gfx1030},
};

constexpr unsigned most_opcodes = 1024;  // of one format

// The rows of a set by format and number. Lane masks get the width that they have in the set's waves.
struct Index {
    std::array<std::array<const Opcode *, most_opcodes>, unsigned(Format::unknown)> of = {};
    std::deque<Opcode> rows;
    std::deque<std::string> operands;
    void fill(const Set &set) {
        for (const Opcode &row : set.opcodes) of[unsigned(row.format)][row.number] = with_masks(row, set);
    }

  private:
    const Opcode *with_masks(const Opcode &row, const Set &set) {
        std::string changed = row.operands;
        for (std::size_t n = 1; n < changed.size(); n += 2)
            if (changed[n] == 'm') changed[n] = set.lanes == 32 ? '1' : '2';
        if (changed == row.operands) return &row;
        rows.push_back(row);
        rows.back().operands = operands.emplace_back(changed).c_str();
        return &rows.back();
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

const Set *find_set(std::string_view gpu, unsigned lanes) {
    for (const Set &set : sets)
        if (gpu == set.gpu && (lanes == 0 || lanes == set.lanes)) return &set;
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
        case Family::gfx10: return decode_gfx10(set, code, bytes);
    }
    return {};
}

}  // namespace hipsim::isa
