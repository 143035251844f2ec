// Decodes A64 instructions as far as hooks need: what depends on the instruction's own address, and control flow.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubpf::machine {

struct Instruction {
    enum Kind {
        kPlain,       // works at any address; the next instruction follows
        kCall,        // bl, blr
        kJump,        // b
        kBranch,      // b.cond, bc.cond, cbz, cbnz, tbz, tbnz
        kEnd,         // the next instruction does not follow: ret, br, eret, udf
        kAddress,     // adr, adrp: an address to a register
        kLoad,        // a literal to a general register
        kVectorLoad,  // a literal to a vector register
        kPrefetch,    // of a literal
        kSystemCall,  // svc: the kernel may go back to it
        kBreakpoint,  // brk, hlt
        kUnknown,
    };
    Kind kind = kUnknown;
    bool relative = false;   // `distance` is valid
    int64_t distance = 0;    // from the instruction to its operand; of adrp: from the instruction's page
    unsigned first_bit = 0;  // of a relative branch: where its distance begins,
    unsigned bits = 0;       // and how long it is
};

Instruction decode(uint32_t code);

}  // namespace gpubpf::machine
