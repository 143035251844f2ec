// One decoder for each family of encodings.

#pragma once

#include "isa/instruction.h"

namespace hipsim::isa {

Instruction decode_gfx9(const Set &set, const uint32_t *code, uint64_t bytes);
Instruction decode_gfx10(const Set &set, const uint32_t *code, uint64_t bytes);

}  // namespace hipsim::isa
