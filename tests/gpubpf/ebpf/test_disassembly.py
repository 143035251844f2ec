"""Instructions as text: as the kernel's verifier prints them."""

from __future__ import annotations

import re

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import disassembly
from gpubpf.ebpf.bytecode import Instruction
from gpubpf.kernel import bpf_syscall
from gpubpf_host import needs_bpf

# Each is an opcode, dst, src, offset, imm, and its text.
KNOWN = [
    (0xB7, 6, 0, 0, -1, "r6 = -1"),
    (0xB4, 7, 0, 0, 7, "w7 = 7"),
    (0xBF, 8, 6, 0, 0, "r8 = r6"),
    (0xBC, 8, 6, 0, 0, "w8 = w6"),
    (0xBF, 8, 6, 8, 0, "r8 = (s8)r6"),
    (0x07, 6, 0, 0, -8, "r6 += -8"),
    (0x1F, 6, 7, 0, 0, "r6 -= r7"),
    (0x24, 6, 0, 0, 3, "w6 *= 3"),
    (0x3F, 6, 7, 0, 0, "r6 /= r7"),
    (0x37, 6, 0, 1, 5, "r6 s/= 5"),
    (0x97, 6, 0, 0, 5, "r6 %= 5"),
    (0x4F, 6, 7, 0, 0, "r6 |= r7"),
    (0x57, 6, 0, 0, 255, "r6 &= 255"),
    (0x67, 6, 0, 0, 32, "r6 <<= 32"),
    (0x74, 6, 0, 0, 3, "w6 >>= 3"),
    (0xC7, 6, 0, 0, 32, "r6 s>>= 32"),
    (0xAF, 6, 7, 0, 0, "r6 ^= r7"),
    (0x87, 6, 0, 0, 0, "r6 = -r6"),
    (0xDC, 6, 0, 0, 16, "r6 = be16 r6"),
    (0xD7, 6, 0, 0, 32, "r6 = bswap32 r6"),
    (0x7A, 10, 0, -8, 5, "*(u64 *)(r10 -8) = 5"),
    (0x63, 10, 6, -16, 0, "*(u32 *)(r10 -16) = r6"),
    (0x79, 7, 10, -8, 0, "r7 = *(u64 *)(r10 -8)"),
    (0x71, 7, 10, -8, 0, "r7 = *(u8 *)(r10 -8)"),
    (0x91, 7, 10, -8, 0, "r7 = *(s8 *)(r10 -8)"),
    (0xDB, 10, 6, -8, 0, "lock *(u64 *)(r10 -8) += r6"),
    (0xDB, 10, 7, -8, 0x51, "r7 = atomic64_fetch_and((u64 *)(r10 -8), r7)"),
    (0xDB, 10, 7, -8, 0xE1, "r7 = atomic64_xchg((u64 *)(r10 -8), r7)"),
    (0xB7, 0, 0, 0, 0, "r0 = 0"),
    (0xDB, 10, 7, -8, 0xF1, "r0 = atomic64_cmpxchg((u64 *)(r10 -8), r0, r7)"),
    (0x15, 6, 0, 0, 3, "if r6 == 0x3 goto pc+0"),
    (0x6D, 6, 7, 0, 0, "if r6 s> r7 goto pc+0"),
    (0xA6, 6, 0, 0, 9, "if w6 < 0x9 goto pc+0"),
    (0x45, 6, 0, 0, 1, "if r6 & 0x1 goto pc+0"),
    (0x05, 0, 0, 0, 0, "goto pc+0"),
    (0x85, 0, 0, 0, 7, "call bpf_get_prandom_u32#7"),
    (0xB7, 0, 0, 0, 0, "r0 = 0"),
    (0x95, 0, 0, 0, 0, "exit"),
]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known[-1])
def test_texts(known: tuple[int, int, int, int, int, str]) -> None:
    assert disassembly.text(Instruction(*known[:5])) == known[5]


@needs_bpf
def test_the_kernels_verifier_prints_the_same_texts() -> None:
    """The last instruction reads a register that is not set, so the verifier refuses the program, and its log has all of it."""
    code = [*(Instruction(*known[:5]) for known in KNOWN[:-1]), Instruction(0xBF, 0, 5), Instruction(0x95)]
    with pytest.raises(bpf_syscall.Rejected) as error:
        bpf_syscall.load_program(bpf_syscall.TRACEPOINT, b.encode(code, {}))
    if "R5 !read_ok" not in error.value.log:
        pytest.skip("this kernel lacks some of the instructions, which Linux 6.6 has")
    printed = dict(re.findall(r"^(\d+): \([0-9a-f]{2}\) (.*?)(?: +;.*)?$", error.value.log, re.M))
    followed = {int(number): text for number, text in printed.items() if int(number) < len(KNOWN) - 1}
    assert len(followed) > len(KNOWN) - 8  # the verifier leaves out what cannot be reached
    assert followed == {number: KNOWN[number][5] for number in followed}


def test_maps_and_unknown_instructions() -> None:
    assert disassembly.text(Instruction(b.LD_IMM64, 1, b.PSEUDO_MAP, map="counts")) == "r1 = map[counts]"
    value = Instruction(b.LD_IMM64, 1, b.PSEUDO_VALUE, imm=8, map="data")
    assert disassembly.text(value) == "r1 = map[data][0]+8"
    assert disassembly.text(Instruction(b.LD_IMM64, 1, imm=-1)) == "r1 = 0xffffffffffffffff"
    assert disassembly.text(Instruction(0x85, 0, 1, 0, -4)) == "call pc-4"
    assert disassembly.text(Instruction(0x85, imm=9999)) == "call unknown#9999"
    assert disassembly.text(Instruction(0xE7)) == "opcode 0xe7"
