// The number of registers of each kind that a wave needs to execute an instruction.

#pragma once

#include "isa/instruction.h"

namespace hipsim::isa {

struct Registers {
    unsigned vgprs = 0, agprs = 0, sgprs = 0;
};

// Raises `most` to the registers that a known instruction names.
void add(Registers &most, const Instruction &instruction);

}  // namespace hipsim::isa
