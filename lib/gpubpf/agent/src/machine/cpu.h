// What the agent needs to know about registers, stacks and counters of the processor (see machine/code.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <unwind.h>

namespace gpubpf::machine {

// A counter that all processors share, for durations. Its rate is constant, and unknown.
uint64_t ticks();

// Return the address at which a frame (`__builtin_frame_address`) keeps the function's return address.
inline uintptr_t *return_slot(uintptr_t frame) { return reinterpret_cast<uintptr_t *>(frame) + 1; }

// Return a return address without what the processor adds to it while it is on the stack.
uintptr_t plain_return_address(uintptr_t address);

// Finds out where the stack keeps return addresses while _Unwind_Backtrace goes through its frames. It must see each frame.
class ReturnSlots {
  public:
    // Return where the stack keeps the address at which the function of `context` continues; 0 if that is not known.
    uintptr_t next(_Unwind_Context *context);

  private:
    uintptr_t inner_ = 0;
};

// Call a stub with eight values in the registers where the tool's programs read them (lower/context.py).
void call_stub(const uint8_t *stub, const uint64_t *fields);
extern const uint8_t *const kStub;  // the code of a stub
extern const size_t kStubSize;
extern const uint8_t kReturnColumn;  // the number that DWARF gives to the return address

}  // namespace gpubpf::machine
