#include "hook_table.h"
#include "log/cupti.h"

// Each hook asks gpubpf_loads for the original function, and jumps there with the program's own arguments and return address.
// The names are those of gpubpf::hook_dlopen and gpubpf::hook_dlmopen; GCC has no naked functions for this processor.
#define GPUBPF_LOADS(symbol, library, first)                                                         \
    extern "C" __attribute__((used, visibility("hidden"))) const size_t gpubpf_hook_of_##symbol =    \
        gpubpf::kHook_##symbol;                                                                      \
    asm(".text\n.p2align 2\n.globl " first "\n.hidden " first "\n.type " first ", %function\n" first \
        ":\n"                                                                                        \
        "  hint #34\n" /* bti c */                                                                   \
        "  stp x29, x30, [sp, #-48]!\n  mov x29, sp\n"                                               \
        "  stp x0, x1, [sp, #16]\n  str x2, [sp, #32]\n"                                             \
        "  mov x0, " library                                                                         \
        "\n  mov x1, x30\n"                                                                          \
        "  adrp x2, gpubpf_hook_of_" #symbol "\n  ldr x2, [x2, #:lo12:gpubpf_hook_of_" #symbol       \
        "]\n"                                                                                        \
        "  bl gpubpf_loads\n  mov x16, x0\n"                                                         \
        "  ldp x0, x1, [sp, #16]\n  ldr x2, [sp, #32]\n"                                             \
        "  ldp x29, x30, [sp], #48\n  br x16\n"                                                      \
        ".size " first ", . - " first "\n")
GPUBPF_LOADS(dlopen, "x0", "_ZN6gpubpf11hook_dlopenEv");
GPUBPF_LOADS(dlmopen, "x1", "_ZN6gpubpf12hook_dlmopenEv");
