# Functions whose return instructions are known: each has a label NAME.returns.N, and nothing else does.
    .text
    .macro function name
    .globl \name
    .type \name, @function
    .p2align 4
\name:
    .cfi_startproc
    .endm
    .macro end name
    .cfi_endproc
    .size \name, . - \name
    .endm

    function two_ways
    endbr64
    test %edi, %edi
    je 1f
    mov $0xc3c3c3c3, %eax       # the bytes of a return, within an instruction
two_ways.returns.1:
    ret
1:  movabs $0xc3c3c3c3c3c3c3c3, %rax
two_ways.returns.2:
    repz ret
    end two_ways

    function of_callee
of_callee.returns.1:
    ret $16
    end of_callee

    function only
only.returns.1:
    ret
    end only

    function loops
    mov $3, %ecx
1:  dec %eax
    loop 1b
    jrcxz 2f
    ud2
2:  vpaddd %ymm1, %ymm2, %ymm3
    vpternlogd $255, %zmm1, %zmm2, %zmm3
    lock cmpxchg16b (%rdi)
    .byte 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0
loops.returns.1:
    ret
    end loops

    function jumps_over_data
    jmp 1f
    .byte 0xc3, 0xc3, 0x0f, 0x0b, 0x06
1:
jumps_over_data.returns.1:
    ret
    end jumps_over_data

    function calls_itself
    dec %edi
    js 1f
    push %rbx
    call calls_itself@PLT
    pop %rbx
1:
calls_itself.returns.1:
    ret
    end calls_itself

    # The call does not return, and the next function is none of this one's code.
    function stops_at_call
    test %edi, %edi
    jne 1f
stops_at_call.returns.1:
    ret
1:  push %rax
    call abort@PLT
    end stops_at_call

    function neighbour
neighbour.returns.1:
    ret
    end neighbour

    function jumps_to_neighbour          # which has a return of its own
    jmp neighbour@PLT

    end jumps_to_neighbour

    # The unlikely part is elsewhere, and returns there.
    function has_cold_part
    cmp $7, %edi
    je .Lcold
has_cold_part.returns.1:
    ret
    end has_cold_part
    .section .text.unlikely, "ax", @progbits
    .cfi_startproc
.Lcold:
    xor %eax, %eax
has_cold_part.returns.2:
    ret
    .cfi_endproc
    .text

    # What cannot be known.
    function to_another_library
    jmp strtol@PLT
    end to_another_library

    function to_anywhere
    mov (%rdi), %rax
    jmp *8(%rax)
    end to_anywhere

    function to_pointer
    test %rdi, %rdi
    je 1f
    jmp *%rdi
1:  ret
    end to_pointer

    function forever
1:  pause
    jmp 1b
    end forever

    function table_in_code
    lea 1f(%rip), %rdx
    movslq (%rdx,%rdi,4), %rax
    add %rdx, %rax
    jmp *%rax
1:  .long 2f - 1b, 3f - 1b
2:  ret
3:  xor %eax, %eax
    ret
    end table_in_code

    function not_x86_64
    test %edi, %edi
    je 1f
    .byte 0x06, 0x07
1:  ret
    end not_x86_64

    .section .note.GNU-stack, "", @progbits
