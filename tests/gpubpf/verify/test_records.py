"""The records of rings that declare no size, or only the largest, get that of what programs write."""

from __future__ import annotations

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.errors import VerifyError
from gpubpf.kernel import bpf_syscall
from gpubpf.verify import records, verify
from gpubpf_asm import END, alu, call, load_map, mov, movi, storei

PAGE = ["<u1", [1024]]  # the largest record of bpftime's ring
PAIR = {"fields": [["a", "<u8", 0], ["b", "<u8", 8]], "size": 16}


def perf_output(size, context=None):
    """bpf_perf_event_output(context or NULL, &ring, 0, &data, size)."""
    code = [mov(6, 1), *(storei(10, -8 * n, 1) for n in range(1, 5))]
    code += [movi(1, 0) if context is None else mov(1, context), *load_map(2, "ring"), movi(3, 0)]
    return [*code, mov(4, 10), alu(b.ADD, 4, imm=-32), movi(5, size), call(25), *END]


def ringbuf_output(size):
    code = [
        *(storei(10, -8 * n, 1) for n in range(1, 5)),
        *load_map(1, "ring"),
        mov(2, 10),
        alu(b.ADD, 2, imm=-32),
    ]
    return [*code, movi(3, size), movi(4, 0), call(130), *END]


def made(number, value_size, value_type, *codes, entries=16):
    ring = maps.declared("ring", number, 4, value_size, entries, "<u4", value_type)
    functions = {f"f{n}": BpfFunction(f"f{n}", "exit", tuple(code)) for n, code in enumerate(codes)}
    return Program("", functions, {"ring": ring})


def test_bpftimes_ring_has_room_for_the_largest_record_that_is_written():
    program = made(1527, 1024, PAGE, perf_output(32), perf_output(20))
    before, after = program.maps["ring"], records.sized(program).maps["ring"]
    assert before.max_entries == 16 * 1024 * (8 + 1024)
    assert (after.value_size, after.value_type, after.max_entries) == (32, None, 16 * 1024 * (8 + 32))
    for function in program.functions.values():
        assert verify(records.sized(program), function)


def test_a_record_of_the_declared_type_keeps_it():
    program = made(1527, 16, PAIR, perf_output(16, context=6))
    assert records.sized(program).maps == program.maps
    with pytest.raises(VerifyError, match="a record of 24 bytes in ring buffer ring, whose records have 16"):
        records.sized(made(1527, 16, PAIR, perf_output(24)))


@pytest.mark.parametrize(
    ("number", "entries"), [(bpf_syscall.RINGBUF, 1 << 16), (bpf_syscall.PERF_EVENT_ARRAY, maps.PERF_BYTES)]
)
def test_the_kernels_rings_have_the_size_of_what_is_written(number, entries):
    program = made(number, 4, "<u4", perf_output(32), entries=1 << 16)
    with pytest.raises(VerifyError, match="ring buffer ring has no record size"):
        verify(program, program.functions["f0"])
    ring = records.sized(program).maps["ring"]
    assert (ring.kind, ring.value_size, ring.max_entries) == ("ringbuf", 32, entries)
    assert verify(records.sized(program), program.functions["f0"])


def test_all_records_of_bpf_ringbuf_output_have_one_size():
    program = records.sized(made(bpf_syscall.RINGBUF, 0, None, ringbuf_output(32), ringbuf_output(24)))
    assert verify(program, program.functions["f0"])
    with pytest.raises(VerifyError, match="a record of 24 bytes in ring buffer ring, whose records have 32"):
        verify(program, program.functions["f1"])


def test_the_context_is_the_programs_or_null():
    for context, good in ((None, True), (6, True), (10, False)):
        program = made(1527, 32, None, perf_output(32, context=context))
        if good:
            assert verify(program, program.functions["f0"])
        else:
            with pytest.raises(VerifyError, match="argument ctx is not the context"):
                verify(program, program.functions["f0"])
