"""Functions of probes whose compiled code modules share: each module tells its copy where it is."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cudasim.translate.compiler import command
from cudasim.translate.program import TranslatedModule
from engine_device import Array, Device, DeviceFault
from gpubpf.ptx.parser import parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
# r = the sum of 1 to a, times a, by local memory and a call; then it stores r. Lanes part in the loop.
PROBE = """.func (.reg .b32 r) times(.reg .b32 a, .reg .b32 b) {
//gpubpf{
mul.lo.u32 r, a, b;
ret;
//gpubpf}
}
.func (.reg .b32 r) probe(.reg .b32 a, .reg .b64 at) {
//gpubpf{
.local .align 4 .b32 sums[2]; .reg .b32 x<4>; .reg .b64 place; .reg .pred p;
mov.u64 place, sums;
mov.u32 x1, 0; mov.u32 x2, 0;
again: add.u32 x2, x2, 1; add.u32 x1, x1, x2; st.local.u32 [place+4], x1;
setp.lt.u32 p, x2, a; @p bra again;
bar.warp.sync 0xffffffff;
ld.local.u32 x1, [place+4];
call (r), times, (x1, a);
st.global.u32 [at], r;
ret;
//gpubpf}
}
"""
STORE = "st.global.u32 [at], r;"


@functools.cache
def module(kernels: int, offset: int) -> str:
    """Return PTX with some large kernels `k0`, …: each gives its lane `l` the probe of `l + offset`, and adds its number."""
    more = "bar.warp.sync 0xffffffff;" * offset  # basic blocks before the probe's
    own = f".func (.reg .b32 r) own(.reg .b32 a) {{ .local .b64 x[{offset}]; {more} add.u32 r, a, {offset}; ret; }}\n"
    adds = "add.u32 v, v, 1;" * 100 + "bar.sync 0;"
    return HEAD + "\n" * offset + own + PROBE + "".join(
        f".visible .entry k{n}(.param .u64 p) {{ .reg .b32 v; .reg .b64 a, b; mov.u32 v, %tid.x; ld.param.u64 a, [p];\n"
        f"mul.wide.u32 b, v, 4; add.u64 a, a, b; call (v), own, (v);\n//gpubpf{{\ncall (v), probe, (v, a);\n//gpubpf}}\n"
        f"{adds * 8} sub.u32 v, v, {800 - n}; st.global.u32 [a], v; ret; }}\n"
        for n in range(kernels)
    )  # fmt: skip


def portable(text: str, virtual: bool) -> dict[str, list[int]]:
    """Return the numbers that a module has for each text that other modules can have too."""
    image, *parts = TranslatedModule(parse(text), virtual).c_texts()
    lists = [list(map(int, found.split(", "))) for found in re.findall(r"places_\d+\[\] = \{(.*?)\}", image)]
    return dict(zip((p for p in parts if "int run(" in p), lists, strict=True))


@pytest.mark.parametrize("virtual", [False, True])
def test_modules_have_the_same_text_at_other_places(virtual: bool) -> None:
    one, other = (portable(module(*shape), virtual) for shape in ((8, 1), (9, 200)))
    assert len(one) == 2 and one.keys() == other.keys()
    for text, places in one.items():
        assert not re.search(r"fn_\d|frame_\d", text)
        first, second = places[:2], other[text][:2]  # the number of its first block, its line
        assert first[0] < second[0] and first[1] < second[1]
    assert {len(places) for places in one.values()} == {5, 6}  # the second calls the first


@pytest.mark.parametrize("virtual", [False, True])
def test_both_run_in_one_process(virtual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CUDASIM_CACHE", str(tmp_path))
    devices = {shape: Device(module(*shape), virtual) for shape in ((8, 1), (9, 200))}
    for kernel in (3, 7):
        for (_, offset), device in devices.items():
            out = Array(np.zeros(32, np.uint32))
            device.launch(f"k{kernel}", 1, 32, out)
            given = np.arange(32, dtype=np.uint64) + offset
            assert out.host.tolist() == (given * (given + 1) // 2 * given + kernel).tolist()
    objects = [file.name.count(".") for file in tmp_path.glob("*.so")]
    assert objects.count(1) == 2 + 2  # the two modules, and what they share


def test_a_fault_names_the_line_in_its_module() -> None:
    for shape in (8, 1), (9, 200):
        text = module(*shape)
        with pytest.raises(DeviceFault) as caught:
            Device(text).launch("k0", 1, 1, 0x1230)
        assert text.splitlines()[caught.value.line - 1] == STORE


def test_two_functions_with_one_text() -> None:
    double = PROBE + PROBE.replace("times", "times2").replace("probe", "probe2")
    text = module(8, 1).replace(PROBE, double)
    for kernel in (1, 3, 5, 7):
        head, entry, rest = text.partition(f".visible .entry k{kernel}(")
        text = head + entry + rest.replace("(v), probe,", "(v), probe2,", 1)
    device = Device(text)
    for kernel in range(4):
        out = Array(np.zeros(32, np.uint32))
        device.launch(f"k{kernel}", 1, 32, out)
        given = np.arange(32, dtype=np.uint64) + 1
        assert out.host.tolist() == (given * (given + 1) // 2 * given + kernel).tolist()


def test_what_depends_on_its_module_stays_there() -> None:
    with_variable = (
        module(8, 1)
        .replace(STORE, f"mov.u64 place, table; {STORE}")
        .replace(HEAD, f"{HEAD}.global .u32 table[4];\n")
    )
    assert len(portable(with_variable, False)) == 1


@pytest.fixture
def preload(tmp_path: Path) -> str:
    """A library to preload that makes memfd_create fail, so that no code is loaded from memory."""
    made = tmp_path / "preload.so"
    text = "#include <errno.h>\nint memfd_create(const char *name, unsigned flags) { errno = EACCES; return -1; }\n"
    arguments = [*command(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)]
    subprocess.run(arguments, input=text, check=True, text=True)
    return str(made)


def test_where_files_in_memory_cannot_be_executed(preload: str) -> None:
    """The code is then loaded from the cache, and each module still has a copy of its own."""
    inside = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "one_process", __file__]
    # It has the turn of this test, and must not wait for another.
    environment = {**os.environ, "LD_PRELOAD": preload, "GPUBPF_OWN_PROCESSES": "1"}
    done = subprocess.run(inside, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_where_there_is_no_cache_either(preload: str, tmp_path: Path, repository: Path) -> None:
    """The code is then loaded from a directory for temporary files, not from the program's working directory."""
    kernel = tmp_path / "kernel.ptx"
    kernel.write_text(module(8, 1))
    text = f"""
import numpy
from engine_device import Array, Device
for device in [Device(open({str(kernel)!r}).read(), virtual) for virtual in (False, True, False)]:
    out = Array(numpy.zeros(32, numpy.uint32))
    device.launch("k3", 1, 32, out)
    print(out.host[1])
"""
    working, temporary = tmp_path / "working", tmp_path / "temporary"
    working.mkdir()
    temporary.mkdir()
    fallback = f"/tmp/gpubpf-{os.geteuid()}"  # others may write to it, so it is no cache
    mount = f"mkdir -p -m 700 {fallback}; mount -t tmpfs -o mode=777 none {fallback}"
    inside = ["unshare", "--mount", "sh", "-ec"]
    if subprocess.run([*inside, mount], capture_output=True).returncode != 0:
        pytest.skip("needs root")
    unset = ("HOME", "XDG_CACHE_HOME", "CUDASIM_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "LD_PRELOAD": preload,
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join([str(repository / "tests" / "support"), str(repository / "lib")]),
    }
    done = subprocess.run(
        [*inside, f'{mount}; exec "$0" -c "$1"', sys.executable, text],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=working,
        env=environment,
    )
    assert done.stdout.split() == ["9"] * 3, done.stderr
    assert not [*working.iterdir(), *temporary.iterdir()]
