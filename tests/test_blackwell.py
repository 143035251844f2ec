"""PTX that is new with Blackwell: each construct is parsed, instrumented, and assembled with the programs of each tool."""

from __future__ import annotations

import shutil

import pytest

from conformance import blackwell, copies
from conformance.blackwell_forms import CONSTRUCTS, TARGETS, module
from conformance.outcome import SAME, table
from gpubpf.ebpf.probe import Probe
from gpubpf.inject.inject import inject
from gpubpf.inject.values import PtxProbe
from gpubpf.lower.fragment import Fragment
from gpubpf.ptx.module import PtxInstruction
from gpubpf.ptx.opcodes import facts
from gpubpf.ptx.parser import parse

needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
NOTHING = Fragment("nothing", "{ }", ())


def test_every_opcode_is_known() -> None:
    parsed = parse(module(CONSTRUCTS, "sm_100a"))
    for number, name in enumerate(CONSTRUCTS):
        for statement in parsed.functions[f"k{number}"].body or ():
            if isinstance(statement, PtxInstruction):
                assert facts(statement).is_known, name


def test_copies_are_made_and_no_access_is_lost() -> None:
    """Programs at accesses in all spaces are told of each construct that accesses memory, but for those that name no access."""
    parsed = parse(module(CONSTRUCTS, "sm_100a"))
    spaces = ("global", "shared", "local", "const", "texture", "surface", "tensor", "tmem")
    probe: PtxProbe = Probe(NOTHING, "access", spaces=spaces)
    injected = inject(parsed, {f"k{number}": [probe] for number in range(len(CONSTRUCTS))})
    assert not injected.refusals
    parse(injected.text)
    spaces_of = {
        name: {
            site.space for site in injected.kernels[f"k{number}"].sites if site.opcode.startswith("tcgen05")
        }
        for number, name in enumerate(CONSTRUCTS)
    }
    for name, found in spaces_of.items():
        if name.startswith("tcgen05."):
            moves = name.split(".")[1] in ("ld", "st", "cp", "shift", "mma")
            assert found == (
                {"tmem"} if moves else {"shared"} if "alloc.cta" in name and "dealloc" not in name else set()
            ), name


@needs_ptxas
@pytest.mark.every(60)
@pytest.mark.parametrize("way", copies.WAYS)
@pytest.mark.parametrize("target", TARGETS)
def test_ptxas_assembles_the_copies(target: str, way: str) -> None:
    constructs = blackwell.assembles(target)
    assert len(constructs) > 70
    found = blackwell.outcomes(target, constructs, (way,))
    assert len(found) == len(constructs) and {outcome.verdict for outcome in found} == {SAME}, table(found)


def test_the_page_has_each_construct_and_what_the_device_executes() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:5]]
        for line in blackwell.PAGE.read_text().splitlines()
        if line.startswith("| `")
    ]
    assert [row[0].strip("`") for row in rows] == list(CONSTRUCTS)
    for name, targets, _, says in rows:
        assert says == blackwell.executes(name.strip("`"), f"sm_{targets.split(',')[0]}"), name
