"""The table of helpers agrees with the C header, the kernel, the agent, the lowering and the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpubpf.ebpf import headers
from gpubpf.ebpf.helpers import (
    HELPERS,
    REAL_TIME,
    TAKE_CONTEXT,
    ArgumentKind,
    Helper,
    Pointer,
    StandIn,
    number_of,
)
from gpubpf.lower.helper_calls import LOWERINGS
from gpubpf.lower.nvptx import NVPTX
from gpubpf.verify import calls

ROOT = Path(__file__).parents[3]
DEVICE = [helper for helper in HELPERS.values() if helper.device is not None]
NATIVE = [helper for helper in HELPERS.values() if helper.native is not None]
OURS = [helper for helper in HELPERS.values() if not helper.in_kernel]
UAPI = Path("/usr/include/linux/bpf.h")


def _names(helpers: list[Helper]) -> list[str]:
    return [helper.name for helper in helpers]


def test_the_header_declares_each_helper_of_a_gpu_with_its_number_and_arguments():
    text = (headers.INCLUDE / "gpubpf.h").read_text()
    declared = {}
    for result, name, parameters, number in re.findall(
        r"static (\w+) \(\*(\w+)\)\(([^)]*)\) = \(void \*\)(\d+);", text
    ):
        wrapped = re.sub(r"^gpubpf_", "gpu_", name)
        if wrapped != name:
            assert re.search(rf"#define {wrapped}\(", text), f"no macro calls {name}"
        names = [p.split()[-1].lstrip("*") for p in parameters.split(",") if p != "void"]
        declared[int(number)] = (wrapped, names, result)
    assert declared == {
        helper.number: (helper.name, [a.name for a in helper.arguments], declared[helper.number][2])
        for helper in OURS
    }
    for helper in OURS:
        assert not isinstance(helper.result, Pointer)
        kind = declared[helper.number][2]
        assert (kind in ("u32", "gpu_mask")) is (helper.result[1] < 1 << 32), helper.name
        assert (kind == "gpu_mask") is (helper.wide is not None and helper.wide[1] >= 1 << 32), helper.name


@pytest.mark.skipif(not UAPI.exists(), reason="needs the kernel's headers")
def test_names_and_numbers_are_the_kernels():
    text = UAPI.read_text()
    found = re.findall(r"^\s*FN\((\w+)(?:, (\d+), ##ctx)?\)", text, re.M)
    numbers = {f"bpf_{name}": int(number or at) for at, (name, number) in enumerate(found)}
    of_kernel = {helper.name: helper.number for helper in HELPERS.values() if helper.in_kernel}
    assert of_kernel == {name: numbers[name] for name in of_kernel}


def test_every_helper_has_a_lowering_and_every_lowering_a_helper():
    uses = [use for helper in HELPERS.values() for use in (helper.device, helper.native) if use is not None]
    assert {use.lowering for use in uses} == set(LOWERINGS)
    for use in uses:
        if use.lowering in ("special", "lanes", "shuffle"):
            assert (use.operand or use.lowering) in {*NVPTX.calls, *NVPTX.given}
        if use.lowering == "index":
            assert {f"{use.operand}.{axis}" for axis in "xyz"} <= set(NVPTX.calls)


def test_the_verifier_checks_every_kind_of_argument():
    assert set(calls._CHECKS) == set(ArgumentKind)
    for helper in DEVICE + NATIVE:
        kinds = set(helper.registers)
        sized = {ArgumentKind.SIZE, ArgumentKind.RECORD_SIZE, ArgumentKind.SHORT_RECORD_SIZE} & kinds
        assert not {ArgumentKind.BUFFER, ArgumentKind.RECORD} & kinds or sized, helper.name
        assert (ArgumentKind.VALUES in kinds) is (ArgumentKind.VALUES_SIZE in kinds), helper.name
        sized |= {ArgumentKind.VALUES_SIZE} & kinds
        for use in (helper.device, helper.native):
            assert use is None or bool(use.maps) is (ArgumentKind.MAP in kinds), helper.name
        for argument in helper.arguments:
            assert 0 <= argument.least <= argument.most
            assert (argument.most > 0) is (argument.kind in sized), helper.name


def test_the_kernels_verifier_knows_a_stand_in_for_each_helper_of_a_gpu():
    """What it does with addresses decides which: a number stands in only for helpers that take none."""
    for helper in DEVICE:
        kinds = set(helper.registers)
        expected = StandIn.NUMBER
        if helper.in_kernel:
            expected = StandIn.RINGBUF if ArgumentKind.CONTEXT in kinds else StandIn.ITSELF
            expected = StandIn.VPRINTK if ArgumentKind.VALUES in kinds else expected
        elif ArgumentKind.RESULT in kinds:
            expected = StandIn.STORES
        elif ArgumentKind.CELL in kinds:
            expected = StandIn.UPDATE
        elif ArgumentKind.TEXT in kinds:
            expected = StandIn.PRINTK
        assert helper.stand_in is expected, helper.name
        if expected is StandIn.NUMBER:
            assert kinds <= {ArgumentKind.NUMBER}, helper.name


def test_the_agent_has_the_functions_that_native_programs_call():
    text = (ROOT / "lib/gpubpf/agent/src/log/host_program.cpp").read_text()
    body = text[text.index("Helper helper(uint64_t number)") :]
    cases = {int(number) for number in re.findall(r"case (\d+):", body[: body.index("default:")])}
    assert cases == {helper.number for helper in NATIVE if helper.native.lowering == "function"}


def test_selections_of_the_table():
    assert sorted(_names([HELPERS[n] for n in TAKE_CONTEXT])) == [
        "bpf_get_attach_cookie",
        "bpf_get_func_ip",
        "bpf_get_stack",
        "bpf_get_stackid",
        "bpf_perf_event_output",
    ]
    assert all("ktime" in HELPERS[number].name for number in REAL_TIME)
    assert [number_of(helper.name) for helper in HELPERS.values()] == list(HELPERS)


def test_other_tables_of_the_documentation_have_the_same_numbers():
    collectives = (ROOT / "docs/memory.md").read_text()
    rows = re.findall(r"^\| `(gpu_\w+)\(.*?\)` \| (\d+) \|", collectives, re.M)
    assert rows and all(HELPERS[int(number)].name == name for name, number in rows)
    section = (ROOT / "docs/timing.md").read_text().partition("| number | helper available in the agent |")[2]
    rows = re.findall(r"^\| (\d+) \| `(\w+)", section.partition("\n\n")[0], re.M)
    documented = {int(number): f"bpf_{name}" for number, name in rows}
    assert all(
        HELPERS[number].name == name and HELPERS[number] in NATIVE for number, name in documented.items()
    )
    functions = {helper.number for helper in NATIVE if helper.native.lowering == "function"}
    assert functions <= set(documented)


def test_the_documentation_has_every_helper():
    """By number in its table for a GPU, by name for the traced process."""
    text = (ROOT / "docs/device-programs.md").read_text()
    documented: list[int] = []
    for names, numbers in re.findall(r"^\| (.*?) \| (\d[\d, –-]*) \|", text, re.M):
        words = [re.sub(r"\(.*", "", word) for word in re.findall(r"`(\w[^`]*)`", names)]
        for part in numbers.split(","):
            first, _, last = part.strip().replace("-", "–").partition("–")
            row = range(int(first), int(last or first) + 1)
            documented += row
            for number in row:
                more = "…" in re.sub(r"`[^`]*`", "", names)
                assert more or any(word and word in HELPERS[number].name for word in words), (names, number)
    assert sorted(documented) == sorted(helper.number for helper in DEVICE)
    missing = [name for name in _names(NATIVE) if "_map_" not in name and f"`{name}" not in text]
    assert not missing
