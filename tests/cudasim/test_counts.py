"""CUDASIM_COUNT: how often each basic block ran, by warps and by lanes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudasim_device import run_python

# Thread t turns t times. Lines are counted from 1.
KERNEL = """.version 8.0
.target sm_80
.address_size 64
.func (.reg .b32 %o) doubled(.reg .b32 %i)
{
    add.u32 %o, %i, %i;
    ret;
}
.visible .entry turns(.param .u64 at)
{
    .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<3>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, 0;
    ld.param.u64 %rd1, [at];
loop:
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra done;
    add.u32 %r2, %r2, 1;
    bra loop;
done:
    call (%r3), doubled, (%r2);
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd1, %rd1, %rd2;
    st.global.u32 [%rd1], %r3;
    ret;
}
"""
CODE = f"""
    cu = Driver()
    turns = cu.function(cu.module({KERNEL!r}), "turns")
    memory = cu.memory(4 * 64)
    for _ in range(3):
        cu.launch(turns, memory, block=64)
    cu.cuCtxSynchronize()
    print(cu.read(memory, 64) == [2 * t for t in range(64)])
"""


def counts(place: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Return executions by warps and lanes, by function and line."""
    found = {}
    (file,) = place.glob("*.counts")
    name, *rows = file.read_text().splitlines()
    assert (place / name).read_text().rstrip("\0") == KERNEL
    for row in rows:
        warps, lanes, function, *lines = row.split()
        for line in lines:
            found[function, int(line)] = int(warps), int(lanes)
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize("hostile", [False, True])
def test_blocks_are_counted(tmp_path: Path, clock: str, hostile: bool) -> None:
    told = run_python(CODE, hostile, CUDASIM_COUNT=str(tmp_path), CUDASIM_CLOCK=clock)
    assert told == "True\n"
    found, launches = counts(tmp_path), 3
    lines = {text.strip(): n for n, text in enumerate(KERNEL.split("\n"), 1)}

    def of(text: str, function: str = "turns") -> tuple[int, int]:
        return found[function, lines[text]]

    assert of("mov.u32 %r1, %tid.x;") == (2 * launches, 64 * launches)
    assert of("add.u32 %r2, %r2, 1;") == ((31 + 63) * launches, sum(range(64)) * launches)
    assert of("setp.ge.u32 %p1, %r2, %r1;") == ((32 + 64) * launches, sum(range(1, 65)) * launches)
    for text, function in (("st.global.u32 [%rd1], %r3;", "turns"), ("add.u32 %o, %i, %i;", "doubled")):
        assert of(text, function)[1] == 64 * launches


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    assert run_python(CODE, CUDASIM_COUNT="") == "True\n"
    assert not list(tmp_path.iterdir())


def test_lines_are_those_of_the_text_that_is_kept(tmp_path: Path) -> None:
    """In a copy with probes, marks name lines of the original, which other instructions of the copy have, too."""
    marked = KERNEL.replace("    mul.wide.u32", "//gpubpf@3\n    mul.wide.u32")
    code = CODE.replace(repr(KERNEL), repr(marked))
    run_python(code, CUDASIM_COUNT=str(tmp_path))
    (file,) = tmp_path.glob("*.counts")
    name, *rows = file.read_text().splitlines()
    lines = (tmp_path / name).read_text().splitlines()
    counted = [int(line) for row in rows for line in row.split()[3:]]
    assert len(counted) == len(set(counted))
    assert any("mul.wide" in lines[line - 1] for line in counted)
