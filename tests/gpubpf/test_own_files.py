"""A tool that was started before an upgrade of the package does not need the files that the upgrade replaces."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gpubpf_examples
from gpubpf import cache, own_files

LIB = Path(own_files.__file__).parents[1]
TOOL = """
import sys, threading
from gpubpf import own_files
from gpubpf.tools import threadhist
def keep_soon():
    own_files.keep_now()
    print("kept", file=sys.stderr, flush=True)
own_files._keep_soon = keep_soon
sys.argv[0] = "threadhist"
sys.exit(threadhist.main())
"""


def run(program: str, library: Path) -> str:
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(library)!r})\n" + program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(package: Path, version: str) -> None:
    for place in ("late.py", "part/__init__.py", "part/late.py", "agent/lib/agent.so"):
        (package / place).parent.mkdir(parents=True, exist_ok=True)
        (package / place).write_text(f"VERSION = {version!r}\n")


@pytest.mark.parametrize("compiled", ["compiled", "changed", "source"])
@pytest.mark.parametrize("after", ["removed", "replaced"])
def test_modules_are_those_from_before_an_upgrade(tmp_path: Path, compiled: str, after: str) -> None:
    package = tmp_path / "gpubpf"
    write(package, "something else" if compiled == "changed" else "old")
    (package / "__init__.py").write_text("")
    shutil.copy(own_files.__file__, package)
    if compiled != "source":
        run("import gpubpf.late, gpubpf.part.late", tmp_path)
    write(package, "old")
    program = f"""
        import shutil
        from pathlib import Path
        from gpubpf import own_files
        agent = Path({str(package)!r}, "agent/lib/agent.so")
        own_files.keep_now()
        assert not own_files.is_replaced(agent)
        shutil.rmtree({str(package)!r})
        if {after == "replaced"}:
            shutil.copytree({str(tmp_path / "new")!r}, {str(package)!r})
        import gpubpf.late, gpubpf.part.late
        print(gpubpf.late.VERSION, gpubpf.part.VERSION, gpubpf.part.late.VERSION)
        print(own_files.read(agent).decode(), own_files.is_replaced(agent))
    """
    write(tmp_path / "new", "new")
    printed = run(textwrap.dedent(program), tmp_path)
    assert printed == "old old old\nVERSION = 'old'\n True\n"


def test_a_file_that_was_not_kept_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"as it is")
    assert own_files.read(file) == b"as it is" and not own_files.is_replaced(file)


def test_a_key_of_files_that_an_upgrade_removes(tmp_path: Path) -> None:
    """What such a process makes is nobody else's."""
    assert cache.key_of_files([tmp_path / "gone"]) != cache.key_of_files([tmp_path / "gone"])


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_tool_measures_on_after_its_package_is_removed(tmp_path: Path, options: tuple[str, ...]) -> None:
    if not (LIB / "cudasim/lib/libcuda.so.1").exists():
        pytest.skip("script/setup has not built the C++ parts")
    left_out = shutil.ignore_patterns("build", "src", "sanitize")
    for name in ("gpubpf", "cudasim", "hipsim"):
        shutil.copytree(LIB / name, tmp_path / name, ignore=left_out)
    program = gpubpf_examples.build("vectoradd") / "vectoradd"
    device = {**os.environ, "LD_LIBRARY_PATH": str(gpubpf_examples.DEVICE), "CUDASIM_CLOCK": "real"}
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{TOOL}"
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([program, "19", "5", "1", "1000000000"], env=device, **pipes) as target:
        command = [sys.executable, "-I", "-c", start, *options, "-p", str(target.pid), "0.5", "100"]
        try:
            with subprocess.Popen(command, **pipes) as tool:
                said, waits_for = "", {"kept", "attached to"}
                while waits_for:
                    line = tool.stderr.readline()
                    assert line, said
                    said += line
                    waits_for -= {words for words in waits_for if words in line}
                os.rename(tmp_path / "gpubpf", tmp_path / "~pubpf")
                printed, wanted = "", '"threads": *5' if options else "launches, 5 threads"
                while not re.search(wanted, printed):
                    line = tool.stdout.readline()
                    assert line, said + tool.stderr.read()
                    printed += line
                tool.send_signal(signal.SIGINT)
                more = tool.communicate()[1]
        finally:
            target.kill()
    assert tool.returncode == 0 and "missing" not in more and "Traceback" not in more, more
