// Fields that GFX9 and GFX10 have in the same places. Each function sets those of one format; its caller sets the fields that differ.

#pragma once

#include "isa/instruction.h"

namespace hipsim::isa {

// SOP2, SOPK, SOP1, SOPC and SOPP. Returns false if there is no such opcode.
bool decode_salu(Instruction &i, uint32_t word);

// VOP1, VOP2 and VOPC without a second word. Returns false if there is no such opcode.
bool decode_short_valu(Instruction &i, uint32_t word);

// The second word of VOP1, VOP2 and VOPC.
void decode_sdwa(Instruction &i, uint32_t word);
void decode_dpp(Instruction &i, uint32_t word);

// VOP3, or VOP3P if it is packed; the opcode is known already.
void decode_long_valu(Instruction &i, uint32_t first, uint32_t second, bool packed);

}  // namespace hipsim::isa
