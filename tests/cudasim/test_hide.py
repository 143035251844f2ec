"""Programs whose PTX only the embedded device finds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cudasim import hide
from cudasim_device import program, run, run_python
from gpubpf.images import device_link, fatbin

LINES = ("-lineinfo", "--compress-mode=none")


def hidden(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cudasim.hide", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("options", [(), LINES])
def test_tools_find_machine_code_only_and_the_device_runs_it(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    built = tmp_path / "adds"
    shutil.copy(program("adds", "-arch=sm_90", *options), built)
    assert not isinstance(device_link.choose(fatbin.images_of_file(built), (9, 0)), str)
    assert hidden(built).returncode == 0
    images = fatbin.images_of_file(built)
    assert device_link.choose(images, (9, 0)) == fatbin.SASS_ONLY
    cubin = fatbin.cubin_for(images, (9, 0))
    assert cubin is not None and fatbin.kernel_names(cubin.payload) == ["_Z4addsPi"]
    done = run([built])
    assert done.returncode == 0, done.stderr
    again = hidden(built)
    assert again.returncode == 1 and "no PTX to hide" in again.stderr


def test_a_cubin_with_its_ptx(tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas here; script/setup --dev installs one")
    source, cubin = tmp_path / "k.ptx", tmp_path / "k.cubin"
    source.write_text(".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n")
    subprocess.run([ptxas, "-arch=sm_90", "-lineinfo", str(source), "-o", str(cubin)], check=True)
    code = f"""
    cu = Driver()
    module = ctypes.c_void_p()
    cu.cuModuleLoad(ctypes.byref(module), {str(cubin)!r}.encode())
    cu.function(module, "nothing")
    """
    assert hidden(cubin).returncode == 0
    assert device_link.choose(fatbin.images_of_file(cubin), (9, 0)) == fatbin.SASS_ONLY
    run_python(code)


def test_damaged_files_stay_as_they_are() -> None:
    """Sizes that lead nowhere, or to themselves."""
    magic = b"\x50\xed\x55\xba"
    for data in (
        magic,
        magic + b"\xff" * 12,
        magic + b"\1\0\x10\0" + b"\xff" * 8 + b"\1\0\0\0" + bytes(12),
        b"text",
    ):
        changed = bytearray(data)
        hide.hide(changed)
        assert len(changed) == len(data)
