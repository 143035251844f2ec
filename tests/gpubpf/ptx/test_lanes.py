"""What is proven of addresses holds for all threads of random programs, and a wrong proof is found."""

from __future__ import annotations

from collections import Counter

import pytest

from engine_device import Device
from gpubpf.ptx import lane_terms, lanes
from gpubpf.ptx.lanes import Known, Lanes
from gpubpf.ptx.module import Address, PtxInstruction
from gpubpf.ptx.parser import parse
from gpubpf_properties import TIMES
from lane_programs import Claims, program

SEEDS = range(5 * TIMES)
HEAD = (
    ".version 8.3\n.target sm_80\n.address_size 64\n"
    ".shared .align 16 .b8 tile[64];\n.global .align 16 .b8 table[64];\n"
    ".const .align 16 .b8 fixed[64];\n"
)
REGISTERS = ".reg .b32 %r<99>; .reg .b64 %rd<99>; .reg .pred %p<3>; .reg .f32 %f<9>;"


def known(body: str) -> Known:
    """Return what is known of the last address of a kernel."""
    text = f"{HEAD}.visible .entry k(.param .u64 p, .param .u32 n) {{ {REGISTERS} {body} ret; }}"
    module = parse(text)
    function = module.functions["k"]
    found = Lanes(function, module.variables)
    index, address = [
        (index, operand)
        for index, statement in enumerate(function.body or ())
        if isinstance(statement, PtxInstruction) and "param" not in statement.modifiers
        for operand in statement.operands
        if isinstance(operand, Address)
    ][-1]
    return found.address(index, address)


X = "mov.u32 %r1, %tid.x; "
INDEX = (
    f"{X}mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r4, %r2, %r3, %r1; ld.param.u64 %rd1, [p]; "
)


@pytest.mark.parametrize(
    ("body", "shape", "needs"),
    [
        (X + "mov.u32 %r2, tile; add.u32 %r3, %r1, %r2; ld.shared.u8 %r4, [%r3];", "affine", ""),
        ("ld.param.u64 %rd1, [p]; ld.global.f32 %f1, [%rd1+8];", "same", ""),
        (
            INDEX + "mul.wide.s32 %rd2, %r4, 4; add.s64 %rd3, %rd1, %rd2; ld.global.f32 %f1, [%rd3];",
            "affine",
            "wrap",
        ),
        # A block of 128 threads, whose first one has an index that ends with 7 zeros: no sum can wrap.
        (
            X + "mov.u32 %r2, %ctaid.x; shl.b32 %r3, %r2, 7; and.b32 %r4, %r1, 127; or.b32 %r5, %r3, %r4;"
            " mul.wide.s32 %rd1, %r5, 4; ld.global.f32 %f1, [%rd1];",
            "other",
            "",
        ),
        (X + "xor.b32 %r2, %r1, 5; shl.b32 %r3, %r2, 2; ld.shared.f32 %f1, [%r3];", "other", ""),
        (
            X + "mov.u32 %r2, 0; $L: ld.shared.f32 %f1, [%r1]; add.u32 %r1, %r1, 64; add.u32 %r2, %r2, 1;"
            " setp.lt.u32 %p1, %r2, 9; @%p1 bra $L;",
            "affine",
            "",
        ),
        # The same, where lanes have left the kernel before.
        (
            X + "setp.gt.u32 %p1, %r1, 9; @%p1 bra $E; mov.u32 %r2, 0; $L: add.u32 %r3, %r1, %r2;"
            " ld.shared.f32 %f1, [%r3]; add.u32 %r2, %r2, 64; setp.lt.u32 %p2, %r2, 640; @%p2 bra $L; $E:",
            "affine",
            "",
        ),
        # Lanes took different ways to the loop, so some may be in an earlier turn than others.
        (
            X + "setp.gt.u32 %p1, %r1, 9; @%p1 bra $E; mov.f32 %f2, 0f00000000; $E: mov.u32 %r2, 0;"
            " $L: ld.shared.f32 %f1, [%r2]; add.u32 %r2, %r2, 64; setp.lt.u32 %p2, %r2, 640; @%p2 bra $L;",
            "same",
            "turn",
        ),
        # All threads of the block load the number of turns, which another thread may change.
        (
            "ld.global.u32 %r9, [table]; mov.u32 %r2, 0; $L: ld.shared.f32 %f1, [%r2]; add.u32 %r2, %r2, 64;"
            " setp.lt.u32 %p2, %r2, %r9; @%p2 bra $L;",
            "same",
            "turn",
        ),
        # A lane may leave a loop within a turn.
        (
            X + "mov.u32 %r2, 0; $L: add.u32 %r2, %r2, 64; setp.eq.u32 %p1, %r2, %r1; @%p1 bra $E;"
            " ld.shared.f32 %f1, [%r2]; setp.lt.u32 %p2, %r2, 640; @%p2 bra $L; $E:",
            "same",
            "turn",
        ),
        # What a loop computed, behind it.
        (
            "ld.param.u32 %r9, [n]; mov.u32 %r2, 0; $L: add.u32 %r2, %r2, 64; setp.lt.u32 %p1, %r2, %r9;"
            " @%p1 bra $L; ld.shared.f32 %f1, [%r2];",
            "same",
            "",
        ),
        # The last turn of each lane.
        (
            X + "mov.u32 %r2, 0; $L: add.u32 %r2, %r2, 64; setp.lt.u32 %p1, %r2, %r1; @%p1 bra $L;"
            " add.u32 %r3, %r1, %r2; ld.shared.f32 %f1, [%r3];",
            "affine",
            "turn",
        ),
        (
            X
            + "mov.u32 %r2, 0; setp.lt.u32 %p1, %r1, 9; @%p1 bra $L; mov.u32 %r2, 64; $L: ld.shared.f32 %f1, [%r2];",
            "same",
            "path",
        ),
        (X + "mov.u32 %r2, %r1; mov.u32 %r1, 0; ld.shared.f32 %f1, [%r2];", "affine", ""),
        ("ld.param.u64 %rd1, [p]; ld.global.u64 %rd2, [%rd1]; ld.global.f32 %f1, [%rd2];", "same", "memory"),
        ("ld.param.u64 %rd1, [p]; ld.global.nc.u64 %rd2, [%rd1]; ld.global.f32 %f1, [%rd2];", "same", ""),
        ("ld.const.u64 %rd2, [fixed]; ld.global.f32 %f1, [%rd2];", "same", ""),
    ],
)
def test_of_one_address(body: str, shape: str, needs: str) -> None:
    found = known(body)
    assert (found.reason, found.shape, found.needs) == ("", shape, frozenset(needs.split()))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (X + "ld.shared.u32 %r2, [%r1]; ld.shared.f32 %f1, [%r2];", "data"),
        (INDEX + "shr.u32 %r5, %r4, 5; ld.shared.f32 %f1, [%r5];", "mixed"),
        (X + "cvt.rn.f32.u32 %f1, %r1; cvt.rzi.u32.f32 %r2, %f1; ld.shared.f32 %f1, [%r2];", "other"),
        ("atom.shared.add.u32 %r1, [tile], 1; ld.shared.f32 %f1, [%r1];", "lanes"),
        (
            X
            + "mov.u32 %r2, 0; $L: ld.shared.f32 %f1, [%r2]; add.u32 %r2, %r2, %r1; setp.lt.u32 %p1, %r2, 9;"
            " @%p1 bra $L;",
            "turns",
        ),
        (
            X + "mov.u32 %r2, 0; setp.lt.u32 %p1, %r1, 9; @%p1 mov.u32 %r2, %r1; ld.shared.f32 %f1, [%r2];",
            "path",
        ),
        ("add.cc.u32 %r1, 1, 2; addc.u32 %r2, 1, 1; ld.shared.f32 %f1, [%r2];", "other"),
        (".local .b8 own[8]; ld.local.u32 %r1, [own]; ld.shared.f32 %f1, [%r1];", "local"),
        (X + "mov.u32 %r2, %r1; { .reg .b32 %r1; ld.shared.f32 %f1, [%r1]; }", "other"),  # nothing writes it
    ],
)
def test_why_nothing_is_known(body: str, reason: str) -> None:
    assert known(body).reason == reason
    assert reason in lanes.REASONS


def test_long_computations_are_given_up() -> None:
    twisted = "".join(
        f"shl.b32 %r{n + 1}, %r{n}, 1; xor.b32 %r{n + 1}, %r{n + 1}, %r{n};" for n in range(1, 90)
    )
    assert known(f"{X}{twisted} ld.shared.f32 %f1, [%r90];").reason == "large"


@pytest.fixture(scope="module")
def devices() -> dict[int, Device]:
    return {seed: Device(program(seed)) for seed in SEEDS}


def test_random_programs(devices: dict[int, Device]) -> None:
    kinds: Counter[str] = Counter()
    for seed, device in devices.items():
        claims = Claims(program(seed))
        kinds += claims.kinds()
        assert list(claims.contradictions(device, seed)) == [], seed
    assert kinds["proven"] >= 4 * len(SEEDS) and kinds["compared"] >= len(SEEDS), kinds


@pytest.mark.parametrize("lie", ["wrap", "zeros", "path", "sign", "together"])
def test_a_wrong_proof_is_found(
    lie: str, devices: dict[int, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    if lie == "wrap":  # nothing wraps
        monkeypatch.setattr(lanes, "_extended", lambda one, width, sign: one)
    elif lie == "zeros":  # bits of U are 0 that may be 1
        below = lanes._is_below
        monkeypatch.setattr(lanes, "_is_below", lambda a, bits: below(a, bits + 3))
    elif lie == "path":  # one of the definitions that reach an instruction is forgotten
        reach = Lanes._reach
        monkeypatch.setattr(Lanes, "_reach", lambda self: {at: of[:1] for at, of in reach(self).items()})
    elif lie == "together":  # lanes always stay together
        monkeypatch.setattr(lanes.Paths, "together", lambda self, user, parting: True)
    else:  # all numbers have a sign
        monkeypatch.setattr(lanes, "_read", lambda a, width, sign: lane_terms.signed(a, width))
    assert any(list(Claims(program(seed)).contradictions(device, seed)) for seed, device in devices.items())
