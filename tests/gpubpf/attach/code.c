// The library whose code is patched: `answer` gives 1, or 2 once its first instruction is another; `inside` runs in the bytes that are to
// change until `n` is not 0 any more.
__asm__(
    ".text\n.globl answer\n.type answer, @function\nanswer: .byte 0xb8, 1, 0, 0, 0\n ret\n.size answer, .-answer\n"
    ".globl inside\n.type inside, @function\ninside: nop\n1: nop\n cmpl $0, (%rdi)\n jne 1b\n mov $7, %eax\n ret\n.size inside, .-inside\n");
