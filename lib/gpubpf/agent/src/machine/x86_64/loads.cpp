#include "hook_table.h"
#include "log/cupti.h"

// Each hook asks gpubpf_loads for the original function, and jumps there with the program's own arguments and return address.
// The stack has three registers, then the return address.
#define GPUBPF_LOADS(symbol, library)                                                            \
    __attribute__((naked)) void gpubpf::hook_##symbol() {                                        \
        asm("push %%rdi\n push %%rsi\n push %%rdx\n mov %%" library                              \
            ", %%rdi\n mov 24(%%rsp), %%rsi\n"                                                   \
            "mov %0, %%edx\n call gpubpf_loads\n pop %%rdx\n pop %%rsi\n pop %%rdi\n jmp *%%rax" \
            :                                                                                    \
            : "i"(gpubpf::kHook_##symbol));                                                      \
    }
GPUBPF_LOADS(dlopen, "rdi")
GPUBPF_LOADS(dlmopen, "rsi")
