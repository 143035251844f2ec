#include "machine/cpu.h"

#include <x86intrin.h>

#include "definitions.h"

namespace gpubpf::machine {

uint64_t ticks() { return __rdtsc(); }

uintptr_t plain_return_address(uintptr_t address) { return address; }

uintptr_t ReturnSlots::next(_Unwind_Context *context) { return _Unwind_GetCFA(context) - sizeof(uintptr_t); }

const uint8_t *const kStub = kHostStub_x86_64;
const size_t kStubSize = sizeof kHostStub_x86_64;
const uint8_t kReturnColumn = 16;

// The values are in the six argument registers and in two more caller-saved registers.
void call_stub(const uint8_t *stub, const uint64_t *fields) {
    register uint64_t r8 asm("r8") = fields[4];
    register uint64_t r9 asm("r9") = fields[5];
    register uint64_t r10 asm("r10") = fields[6];
    register uint64_t r11 asm("r11") = fields[7];
    uint64_t di = fields[0], si = fields[1], dx = fields[2], cx = fields[3];
    // The compiler may keep data below the stack pointer.
    asm volatile("lea -128(%%rsp), %%rsp\n\tcall *%[stub]\n\tlea 128(%%rsp), %%rsp"
                 : "+D"(di), "+S"(si), "+d"(dx), "+c"(cx), "+r"(r8), "+r"(r9), "+r"(r10), "+r"(r11)
                 : [stub] "a"(stub)
                 : "memory", "cc");
}

}  // namespace gpubpf::machine
