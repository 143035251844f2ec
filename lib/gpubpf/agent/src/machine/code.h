// What hooks need to know about machine code. Each directory in machine/ implements these functions for one processor, and make chooses
// the directory. No other file depends on the processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpubpf::machine {

extern const size_t kJumpSize;    // bytes of the jump that a hook writes into a function: 8 at most
extern const int64_t kReach;      // the jump reaches destinations whose distance is below this
extern const int kAddressBits;    // of addresses that a process can use
constexpr size_t kMostRead = 15;  // bytes of code that step() reads at most

// One instruction.
struct Step {
    enum Kind {
        kPlain,       // the next instruction follows
        kCall,        // with or without a known destination
        kJump,        // to a known destination
        kBranch,      // to a known destination, or to the next instruction
        kEnd,         // the next instruction does not follow: a return, a jump through a register
        kImmovable,   // it cannot be moved elsewhere
        kBreakpoint,  // perhaps of another tool
    };
    size_t length = 0;  // 0: unknown instruction; nothing else is set
    Kind kind = kPlain;
    const uint8_t *destination = nullptr;  // null: none, or unknown
};
Step step(const uint8_t *code);

// Return whether all bytes are padding that compilers put between functions.
bool is_padding(const uint8_t *code, size_t size);

// Return the size of a function's first instruction if indirect calls need it to be there (endbr64, bti); otherwise 0.
constexpr size_t kLandingPadSize = 4;
size_t landing_pad(const uint8_t *code);

// A hook leaves a function's first instruction in place and begins after it. The kernel's uprobes, which other tracers put at the
// beginning of functions, can change it at any time: to a breakpoint, or to a call over a five-byte nop. When a thread reaches the
// breakpoint, the kernel runs the file's instruction instead, and continues after it. A hook in the same bytes would be torn apart.
// The instruction's effect is undone before the replacement runs.
struct Prologue {
    size_t length = 0;     // 0: the effect cannot be undone
    uint8_t undo[8];       // code
    size_t undo_size = 0;  // 0: the replacement does not notice the effect
};
Prologue prologue_of(const uint8_t *code);

// Write an instruction from `source` to `to`, to have the effect there that it has at `from`. Advance `to` behind it: by the
// instruction's length and kMoreMoved at most. Return null, or the reason why it cannot be moved.
extern const size_t kMoreMoved;
const char *move_instruction(const uint8_t *source, const uint8_t *from, uint8_t *&to);

// Write a jump to `to`, of kJumpSize bytes, as it must be at `at`. Return false if the distance is too long.
bool put_jump(uint8_t *code, const uint8_t *at, const uint8_t *to);
// Write a jump to the address in `variable`, which is less than 64 KiB behind `code`.
void put_jump_through(uint8_t *code, const void *variable);
constexpr size_t kJumpThroughSize = 16;  // bytes, at most

// Change bytes of code from `before` to `after` in one store: a thread that runs there sees either the old bytes or the new ones.
// Return false if the bytes are not `before`, or if one store cannot change them.
bool exchange_code(uint8_t *at, const uint8_t *before, const uint8_t *after, size_t size);

}  // namespace gpubpf::machine
