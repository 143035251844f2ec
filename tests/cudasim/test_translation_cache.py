"""The cache of translated modules: whatever is wrong with it, the program runs, and the next run finds a mended cache."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_damage import DAMAGES
from cudasim.translate.program import SPLIT_LINES, TranslatedModule
from cudasim_device import libraries
from gpubpf import cache
from gpubpf.ptx.parser import parse
from gpubpf_commands import quoted

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
# argv: the PTX of a small module, of a large one, and of two to link. All use the same file descriptor to load their code.
PROGRAM = """
import ctypes, sys
cu = ctypes.CDLL("libcuda.so.1")
small, large, first, second = (open(name, "rb").read() + b"\\0" for name in sys.argv[1:])

def made(name, *arguments):
    handle = ctypes.c_void_p()
    call(name, ctypes.byref(handle), *arguments)
    return handle

def call(name, *arguments):
    if status := getattr(cu, name)(*arguments):
        sys.exit(f"{name} gives {status}")

def run(image, kernel):
    function = made("cuModuleGetFunction", made("cuModuleLoadData", image), kernel)
    memory, found = made("cuMemAlloc_v2", ctypes.c_size_t(4)), ctypes.c_uint(0)
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(memory), ctypes.c_void_p))
    call("cuLaunchKernel", function, *[1] * 6, 0, None, parameters, None)
    call("cuMemcpyDtoH_v2", ctypes.byref(found), memory, ctypes.c_size_t(4))
    print(found.value)

call("cuInit", 0)
call("cuCtxSetCurrent", made("cuDevicePrimaryCtxRetain", 0))
run(small, b"small")
run(large, b"k7")
linker, size = ctypes.c_void_p(), ctypes.c_size_t()
call("cuLinkCreate_v2", 0, None, None, ctypes.byref(linker))
for text in first, second:
    call("cuLinkAddData_v2", linker, 1, text, ctypes.c_size_t(len(text)), b"text", 0, None, None)
image = ctypes.c_void_p()
call("cuLinkComplete", linker, ctypes.byref(image), ctypes.byref(size))
run(image, b"linked")
run(large, b"k9")
"""
ANSWERS = "11\n1014\n42\n1018\n"
KINDS = ("small.so", "large.so", "large.part.c", "large.part.so", "linked.ptx", "linked.so")
# Runs the translator, or repeats what it made of the same files, since a C compiler is slow. Each call adds a line to `calls`.
REPLAY = """#!/bin/sh
cd {place} || exit 9
echo "$@" >> calls
for last; do :; done
at=${{last%/*}}
made=$(cd "$at" && ls && cat -- *)
made=made/$(printf %s "$made" | sha256sum | cut -c 1-64)
if [ ! -d "$made" ]; then
    before=$(ls "$at")
    {python} "$@" || exit
    mkdir -p made "$made.$$"
    cp "$at"/* "$made.$$"/ && (cd "$made.$$" && rm -f -- $before) && mv "$made.$$" "$made"
fi
cp "$made"/* "$at"/
"""


def _large() -> str:
    adds = "add.u32 v, v, 1;" * 100 + "bar.sync 0;"
    shared = ".func (.reg .b32 r) twice(.reg .b32 a) { add.u32 r, a, a; ret; }\n"
    return HEAD + shared + "".join(
        f".visible .entry k{n}(.param .u64 p) {{ .reg .b32 v; .reg .b64 a; mov.u32 v, {n}; {adds * 5} "
        "call (v), twice, (v); ld.param.u64 a, [p]; st.global.u32 [a], v; ret; }\n"
        for n in range(12)
    )  # fmt: skip


def _entry(name: str, body: str) -> str:
    store = "ld.param.u64 a, [p]; st.global.u32 [a], v; ret;"
    return f".visible .entry {name}(.param .u64 p) {{ .reg .b32 v; .reg .b64 a; {body} {store} }}\n"


class Runs:
    """The program, its cache, and the translator that it runs."""

    def __init__(self, place: Path) -> None:
        self.place, self.cache = place, place / "cache"
        texts = {
            "small": HEAD + _entry("small", "mov.u32 v, 11;"),
            "large": _large(),
            "first": HEAD + ".visible .func (.reg .b32 r) answer() { mov.u32 r, 42; ret; }\n",
            "second": f"{HEAD}.extern .func (.reg .b32 r) answer();\n"
            + _entry("linked", "call (v), answer;"),
        }
        assert sum(c.count("\n") for c in TranslatedModule(parse(texts["large"])).c_texts()) > SPLIT_LINES
        self.command = [sys.executable, "-I", "-S", "-c", PROGRAM]
        for name, text in texts.items():
            (place / name).write_text(text)
            self.command.append(str(place / name))
        translator = place / "translator"
        translator.write_text(REPLAY.format(place=quoted(place), python=quoted(sys.executable)))
        translator.chmod(0o755)
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(libraries()),
            "CUDASIM_PYTHON": str(translator),
            "CUDASIM_CACHE": str(self.cache),
        }

    def start(self, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command,
            env=self.environment | more,
            stdin=subprocess.PIPE,  # stays open: reading it would wait
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None and process.stderr is not None
        try:
            process.wait(300)
        finally:
            process.kill()
        said = process.stdout.read(), process.stderr.read()
        assert (*said, process.returncode) == (ANSWERS, "", 0)

    def run(self, **more: str) -> int:
        """Run the program, which must notice nothing. Return how often it ran the translator."""
        calls = self.place / "calls"
        calls.unlink(missing_ok=True)
        self.finish(self.start(**more))
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    def fill(self) -> None:
        """Make the cache that an undisturbed run leaves."""
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.copytree(self.place / "filled", self.cache)
        self.cache.chmod(0o700)

    def of_kind(self, kind: str) -> list[Path]:
        """The files of a kind. A module with parts is the one that has files with a number; the linked one is made last."""
        files = sorted(self.cache.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        numbered = [file for file in files if file.name.count(".") == 2]
        large = numbered[0].name[:64]
        whole = [file for file in files if file.suffix == ".so" and file.name.count(".") == 1]
        small, linked = (file for file in whole if file.stem != large)
        return {
            "small.so": [small],
            "large.so": [self.cache / f"{large}.so"],
            "large.part.c": [file for file in numbered if file.suffix == ".c"],
            "large.part.so": [file for file in numbered if file.suffix == ".so"],
            "linked.ptx": [file for file in files if file.suffix == ".ptx"],
            "linked.so": [linked],
        }[kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("translations"))
    assert made.run() == 8  # three modules, a link with its two texts checked, and the parts for two launches
    assert {stat.S_IMODE(file.stat().st_mode) for file in made.cache.iterdir()} == {0o600}
    shutil.copytree(made.cache, made.place / "filled")
    assert made.run() == 0
    return made


@pytest.mark.every(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_is_damaged(runs: Runs, damage: str) -> None:
    runs.fill()
    before = sorted(file.name for file in runs.cache.iterdir())
    for name in before:
        DAMAGES[damage](runs.cache / name)
    assert runs.run() >= 4
    assert [file.name for file in runs.cache.glob(".*")] == []
    assert runs.run() == 0
    assert all(
        (runs.cache / name).read_bytes() == (runs.place / "filled" / name).read_bytes() for name in before
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_of_file_is_damaged(runs: Runs, kind: str) -> None:
    runs.fill()
    if kind == "large.part.c":  # which is read only for a part that is not compiled
        for file in runs.of_kind("large.part.so"):
            file.unlink()
    for file in runs.of_kind(kind):
        DAMAGES["bit flipped in the middle"](file)
    assert runs.run() > 0
    assert runs.run() == 0


def test_lost_parts_are_made_again(runs: Runs) -> None:
    runs.fill()
    for kind in ("large.part.c", "large.part.so"):
        for file in runs.of_kind(kind):
            file.unlink()
    assert runs.run() == 3  # the parts for two launches; the text of all parts once
    assert runs.run() == 0


def test_processes_at_once(runs: Runs) -> None:
    shutil.rmtree(runs.cache)
    for process in [runs.start() for _ in range(4)]:
        runs.finish(process)
    assert {file.name for file in runs.cache.iterdir()} == {
        file.name for file in (runs.place / "filled").iterdir()
    }
    assert runs.run() == 0


def test_another_translator_has_other_files(runs: Runs) -> None:
    runs.fill()
    copy = runs.place / "lib"
    ignored = shutil.ignore_patterns("lib", "build", "__pycache__", "*.so*")
    for name in ("cudasim", "gpubpf"):
        shutil.copytree(libraries().parents[1] / name, copy / name, ignore=ignored, symlinks=True)
    more = {"CUDASIM_PYTHONPATH": str(copy)}
    assert runs.run(**more) == 0  # the same translator
    header = copy / "cudasim" / "src" / "device_runtime.h"
    was = header.stat()
    header.write_bytes(header.read_bytes().replace(b"\n", b" ", 1))
    os.utime(header, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert runs.run(**more) > 0
    assert runs.run(**more) == runs.run() == 0
    shutil.rmtree(runs.cache)
    for process in [runs.start(**translator) for translator in (more, {}, more, {})]:
        runs.finish(process)
    assert runs.run(**more) == runs.run() == 0


@pytest.fixture
def mount(runs: Runs) -> Iterator[Callable[..., Path]]:
    """Mount a small file system over the folder of the cache; root only."""
    shutil.rmtree(runs.cache, ignore_errors=True)
    runs.cache.mkdir(0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=32k,mode=700", "tmpfs", str(runs.cache)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield lambda *options: subprocess.run(
            ["mount", "-o", ",".join(("remount", *options)), str(runs.cache)], check=True
        )
    finally:
        subprocess.run(["umount", str(runs.cache)], check=True)


def test_full_disk(runs: Runs, mount: Callable[..., None]) -> None:
    for _ in range(2):
        assert runs.run() > 0
        assert not list(runs.cache.glob(".*"))
    (runs.cache / "rest").write_bytes(bytes(4096) * (os.statvfs(runs.cache).f_bavail))
    assert runs.run() > 0


def test_read_only_disk(runs: Runs, mount: Callable[..., None]) -> None:
    mount("ro")
    runs.run(HOME="/proc/nowhere", XDG_CACHE_HOME="/proc/nowhere")
    assert not list(runs.cache.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        "a file",
        "writable for others",
        "a symlink",
        "another user's",
        "in another user's",
        "where others can replace it",
        "where another user can replace it",
    ],
)
def test_folder_that_is_not_used(runs: Runs, tmp_path: Path, wrong: str) -> None:
    """The next place in the list is used."""
    if "user" in wrong and os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    chosen = tmp_path / "theirs" / "cache"
    chosen.parent.mkdir()
    match wrong:
        case "a file":
            chosen.write_text("")
        case "writable for others":
            chosen.mkdir()
            chosen.chmod(0o777)
        case "a symlink":
            (tmp_path / "elsewhere").mkdir(0o700)
            chosen.symlink_to(tmp_path / "elsewhere")
        case "another user's":
            chosen.mkdir(0o700)
            os.chown(chosen, 65534, 65534)
        case "where others can replace it":
            chosen.mkdir(0o700)
            chosen.parent.chmod(0o777)
        case "where another user can replace it":
            chosen.mkdir(0o700)
            os.chown(chosen.parent, 65534, 65534)
        case _:
            os.chown(chosen.parent, 65534, 65534)
    runs.fill()
    shutil.copytree(runs.cache, tmp_path / "gpubpf" / "cudasim")
    for path in (tmp_path / "gpubpf", tmp_path / "gpubpf" / "cudasim"):
        path.chmod(0o700)
    assert runs.run(CUDASIM_CACHE=str(chosen), XDG_CACHE_HOME=str(tmp_path)) == 0
    assert wrong != "in another user's" or not chosen.exists()
    assert "replace" not in wrong or not list(chosen.iterdir())


def test_nothing_is_left_where_files_are_exchanged(runs: Runs, tmp_path: Path) -> None:
    shutil.rmtree(runs.cache)
    assert runs.run(TMPDIR=str(tmp_path)) == 8
    assert not list(tmp_path.iterdir())


def test_the_sweep_keeps_the_translations_that_were_used_last(runs: Runs, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place = tmp_path / "gpubpf" / "cudasim"
    shutil.copytree(runs.place / "filled", place)
    for directory in (place.parent, place):
        directory.chmod(0o700)
    unused = place / f"{'0' * 64}.so"
    unused.write_bytes(bytes(100))
    before = dict.fromkeys(place.iterdir(), (1, 1)) | {unused: (2, 2)}
    for file, times in before.items():
        os.utime(file, times)
    assert runs.run(CUDASIM_CACHE="", XDG_CACHE_HOME=str(tmp_path)) == 0
    used = {file for file in before if file.stat().st_mtime > 2}
    assert len(used) >= 4  # not the texts of compiled parts
    cache.Cache(place.parent, limit=sum(file.stat().st_size for file in used)).sweep()
    assert set(place.iterdir()) == used


def test_without_a_home_both_caches_are_in_one_directory(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = {"XDG_CACHE_HOME": "", "HOME": "", "TMPDIR": str(tmp_path)}
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    directory = cache.default().directory
    assert directory == Path(f"/tmp/gpubpf-{os.geteuid()}")
    place = directory / "cudasim"
    found = set(place.iterdir()) if place.exists() else set()
    try:
        runs.run(CUDASIM_CACHE="", **nowhere)
        assert {file.name for file in (runs.place / "filled").iterdir()} <= set(os.listdir(place))
        assert runs.run(CUDASIM_CACHE="", **nowhere) == 0
    finally:
        for file in set(place.iterdir()) - found:
            file.unlink()
