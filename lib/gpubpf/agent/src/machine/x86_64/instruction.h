// Decodes x86-64 instructions as far as hooks need: length, relative operands, and control flow.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubpf::machine {

struct Instruction {
    enum Kind {
        kPlain,      // the next instruction follows
        kCall,       // relative, or indirect through a register or memory
        kJump,       // relative
        kBranch,     // relative, conditional
        kEnd,        // the next instruction does not follow: ret, ud2, jmp through a register or memory
        kImmovable,  // loop, jrcxz: their distance has only 8 bits
    };
    enum Map : uint8_t { kOneByte, kTwoByte, kOther };

    size_t length = 0;  // 0: unknown instruction; nothing else is set
    Kind kind = kPlain;
    size_t displacement_at = 0;  // offset of a displacement relative to the instruction's end (rip); 0: none
    size_t distance_at = 0;      // offset of the distance of a relative call, jump or branch
    size_t distance_size = 0;    // 1 or 4 bytes; 0: not relative
    uint8_t condition = 0;       // the low four bits of a branch's opcode
    Map map = kOneByte;          // the table that `opcode` belongs to
    uint8_t opcode = 0;          // without prefixes and escape bytes
    uint8_t rex = 0;             // the REX prefix; 0: none
    bool has_prefix = false;     // any prefix other than REX
    const uint8_t *operands = {};  // the bytes after the opcode: ModRM, SIB, displacement, immediate
};

// Decode one instruction. Reads 15 bytes at most, and allocates nothing. Returns length 0 for unknown instructions.
Instruction decode(const uint8_t *code);

}  // namespace gpubpf::machine
