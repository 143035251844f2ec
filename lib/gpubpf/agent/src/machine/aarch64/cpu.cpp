#include "machine/cpu.h"

#include "definitions.h"

namespace gpubpf::machine {

uint64_t ticks() {
    uint64_t now;
    asm volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
}

// A function may have signed its return address. xpaclri is a hint, which older processors ignore.
uintptr_t plain_return_address(uintptr_t address) {
    register uintptr_t link asm("x30") = address;
    asm("hint #7" : "+r"(link));
    return link;
}

// A function keeps its return address beside its caller's frame pointer (x29). Its own x29 leads there.
uintptr_t ReturnSlots::next(_Unwind_Context *context) {
    constexpr int kFramePointer = 29;
    const uintptr_t inner = inner_;
    inner_ = _Unwind_GetGR(context, kFramePointer);
    const uintptr_t stack = _Unwind_GetCFA(context);
    // A function without such a record leaves x29 alone. All records of inner frames are below this frame, and not far below.
    if (!inner || inner % sizeof(uintptr_t) || inner >= stack || inner == inner_) return 0;
    const uintptr_t *slot = return_slot(inner);
    return plain_return_address(*slot) == _Unwind_GetIP(context) ? reinterpret_cast<uintptr_t>(slot) : 0;
}

const uint8_t *const kStub = kHostStub_aarch64;
const size_t kStubSize = sizeof kHostStub_aarch64;
const uint8_t kReturnColumn = 30;

// The values are in the eight argument registers.
void call_stub(const uint8_t *stub, const uint64_t *fields) {
    register uint64_t x0 asm("x0") = fields[0];
    register uint64_t x1 asm("x1") = fields[1];
    register uint64_t x2 asm("x2") = fields[2];
    register uint64_t x3 asm("x3") = fields[3];
    register uint64_t x4 asm("x4") = fields[4];
    register uint64_t x5 asm("x5") = fields[5];
    register uint64_t x6 asm("x6") = fields[6];
    register uint64_t x7 asm("x7") = fields[7];
    asm volatile("blr %[stub]"
                 : "+r"(x0), "+r"(x1), "+r"(x2), "+r"(x3), "+r"(x4), "+r"(x5), "+r"(x6), "+r"(x7)
                 : [stub] "r"(stub)
                 : "x30", "memory", "cc");
}

}  // namespace gpubpf::machine
