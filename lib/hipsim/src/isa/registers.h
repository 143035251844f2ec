// How many registers of each kind an instruction needs a wave to have.

#pragma once

#include "isa/instruction.h"

namespace hipsim::isa {

struct Registers {
    unsigned vgprs = 0, agprs = 0, sgprs = 0;
};

// Raises `most` to what an instruction that is known names.
void add(Registers &most, const Instruction &instruction);

}  // namespace hipsim::isa
