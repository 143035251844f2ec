"""Whatever is wrong with a cached file: the result is made again, it is the same, and the cache is mended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache_damage import DAMAGES
from gpubpf import cache
from gpubpf.agent.definitions import FoundKernel
from gpubpf.ebpf import compile
from gpubpf.ebpf.probe import Probe
from gpubpf.images import assemble, copies, instrument, mapped
from gpubpf.images.assemble import KernelResources, Target
from gpubpf.images.fatbin import FatbinImage
from gpubpf.kernel import privileges
from gpubpf.lower import programs
from gpubpf_fragments import TIME

TEXT = "int begins(struct gpu_entry *ctx) { return 0; } /* is not compiled here */"
PTX = b".version 8.3\n.target sm_80\n.address_size 64\n.visible .entry fine() { ret; }\n"
IMAGE = FatbinImage("ptx", 80, "", (8, 3), "", 0, "", 0, False, PTX)
STAGES = ("program", "fragment", "sidecar", "assemble", "images", "layouts")


class Made:
    """What each stage makes, and how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.kernel: str | None = "6.18"  # whose verifier accepted the program
        found = next(path for path in programs.PREBUILT.glob("threadhist.json"))
        prebuilt = programs.PrebuiltPrograms(TEXT, programs.json.loads(found.read_bytes()))
        self.function = next(name for name, point in prebuilt.points.items() if point == "exit")
        assembler = SimpleNamespace(
            identity="fake",
            version=0,
            run=self.counted(lambda *_: (b"cubin", {"fine": KernelResources(9)}, ())),
        )
        monkeypatch.setattr(compile, "_compile", self.counted(lambda text: prebuilt.program))
        monkeypatch.setattr(
            programs, "verified", self.counted(lambda _, name: (prebuilt.fragment(name), self.kernel))
        )
        monkeypatch.setattr(copies, "make_copies", self.counted(copies.make_copies))
        monkeypatch.setattr(assemble, "_assemblers", lambda: (assembler,))
        monkeypatch.setattr(mapped, "_names", self.counted(mapped._names))
        monkeypatch.setattr(mapped, "SLOW", -1)
        monkeypatch.setattr(mapped, "_parsed_layouts", self.counted(mapped._parsed_layouts))

    def counted(self, make: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object) -> object:
            self.count += 1
            return make(*arguments)

        return wrapper

    def make(self, stage: str) -> tuple[object, int]:
        """Return the result of a stage, and how often it was made for that."""
        self.count = 0
        match stage:
            case "program":
                made: object = compile.compile_text(TEXT)
            case "fragment":
                made = programs.compiled(TEXT).fragment(self.function)
            case "sidecar":
                made = instrument.instrument_module([IMAGE], [Probe(TIME, "exit")], Target("sim", (9, 0)))
            case "assemble":
                made = assemble._assemble(PTX.decode(), Target("gpu", (8, 0)), ())
            case "layouts":
                made = mapped._layouts(IMAGE, [FoundKernel("fine", ()), FoundKernel("gone", ())])
                assert made == {"fine": ((), (0, 0), None)}
            case _:
                file = mapped._FileImages("app", SimpleNamespace(identity="this file"), ((IMAGE,),))
                made = file.names(0, IMAGE)
                file.cache_names()
        return made, self.count


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Made:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    return Made(monkeypatch)


@pytest.mark.parametrize("stage", STAGES)
def test_each_file_of_each_stage(made: Made, tmp_path: Path, stage: str) -> None:
    first, count = made.make(stage)
    assert count >= 1 and made.make(stage) == (first, 0)
    (file,) = (tmp_path / "gpubpf" / stage).iterdir()
    good = file.read_bytes()
    for name, damage in DAMAGES.items():
        damage(file)
        assert made.make(stage) == (first, 1), name
        assert file.read_bytes() == good, name
        assert made.make(stage) == (first, 0), name
    assert not list(file.parent.glob(".*"))


DEEP = b"[" * 100_000
FUNCTION = b'{"point": "exit", "code": "", "lines": [], "maps": {"%d": "tallies"}}'
PROGRAM = b'{"functions": {"f": %s}, "maps": [], "license": "GPL"}'


@pytest.mark.parametrize(
    "stage, content",
    [
        *((stage, DEEP) for stage in STAGES),
        ("sidecar", len(DEEP).to_bytes(4, "little") + DEEP),
        *(("program", PROGRAM % (FUNCTION % pc)) for pc in (-1, 0, 9)),
        *((stage, content) for stage in STAGES for content in (b"{}", b"[7]", b'{"functions": {"f": 7}}')),
    ],
)
def test_malformed_contents(made: Made, tmp_path: Path, stage: str, content: bytes) -> None:
    """The digest is right: an earlier version may have written the file."""
    first, _ = made.make(stage)
    (file,) = (tmp_path / "gpubpf" / stage).iterdir()
    cache.default().put(stage, file.name, content)
    assert made.make(stage) == (first, 1)
    assert made.make(stage) == (first, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_of_another_version(made: Made, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    first, _ = made.make(stage)
    module = {"program": compile, "fragment": compile, "sidecar": instrument, "assemble": assemble}
    version = "_layouts_version" if stage == "layouts" else "_version"
    monkeypatch.setattr(module.get(stage, mapped), version, lambda: "of another version")
    assert made.make(stage)[1] >= 1
    assert made.make(stage) == (first, 0)


def test_without_a_verdict_of_the_kernel_nothing_is_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would later stand for one, if the kernel could have given it."""
    made.kernel = None
    for capable, again in ((True, 1), (True, 1), (False, 1), (False, 0)):
        monkeypatch.setattr(privileges, "capable", lambda capable=capable: capable)
        assert made.make("fragment")[1] >= again
    assert made.make("fragment")[1] == 0


@pytest.mark.parametrize("wrong", ["a file", "a FIFO", "a symlink", "writable for others"])
def test_the_folder_of_a_stage(made: Made, tmp_path: Path, wrong: str) -> None:
    first, _ = made.make("assemble")
    folder = tmp_path / "gpubpf" / "assemble"
    if wrong == "writable for others":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "elsewhere")
    match wrong:
        case "a file":
            folder.write_text("")
        case "a FIFO":
            os.mkfifo(folder)
        case "a symlink":
            folder.symlink_to(tmp_path / "elsewhere")
    assert made.make("assemble") == made.make("assemble") == (first, 1)


@pytest.fixture
def disk(made: Made, tmp_path: Path) -> Iterator[Path]:
    """A small disk for the cache."""
    folder = tmp_path / "gpubpf"
    folder.mkdir(0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(made: Made, disk: Path) -> None:
    cache.default()  # finds the folder usable
    with open(disk / "rest", "wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(bytes(4096)):
            pass
    for stage in STAGES:
        assert made.make(stage)[1] >= 1
        assert made.make(stage)[1] >= 1
    assert not [path for path in disk.rglob("*") if path.is_file() and path.name != "rest"]


def test_links_to_kernel_headers(tmp_path: Path) -> None:
    common, specific, merged = (tmp_path / name for name in ("common", "specific", "merged"))
    for half, names in ((common, "ab"), (specific, "bc")):
        (half / "include").mkdir(parents=True)
        for name in names:
            (half / "include" / name).write_text(half.name)

    def link() -> dict[str, str]:
        compile._link_headers(merged, ("include",), common, specific)
        return {path.name: path.read_text() for path in (merged / "include").iterdir()}

    wanted = link()
    assert wanted == {"a": "common", "b": "common", "c": "specific"}
    for name, target in (("a", "a"), ("b", "/dev/zero"), ("c", "/nowhere")):
        (merged / "include" / name).unlink()
        (merged / "include" / name).symlink_to(target)
    assert link() == wanted
    (merged / "include" / "a").unlink()
    (merged / "include" / "a").write_text("another text")
    assert link() == wanted
