"""Children that read untrusted data: what they may use, what they get, and what remains of them."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpubpf.images.assemble import Ptxas
from gpubpf.process import children
from gpubpf.process.children import Limits

MEMORY, FILE, SECONDS = 1 << 30, 1 << 20, 5
LIMITS = Limits(MEMORY, FILE, SECONDS)


def run(directory: Path, program: str) -> children.Done:
    return children.run([sys.executable, "-I", "-c", program], directory, LIMITS, 60)


def test_a_child_has_limits_and_little_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "1")
    monkeypatch.setenv("LD_PRELOAD", "")
    show = "import json, os, resource as r; print(json.dumps([dict(os.environ), os.getcwd(), "
    show += "[r.getrlimit(n)[0] for n in (r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CPU, r.RLIMIT_CORE)]]))"
    done = run(tmp_path, show)
    environment, directory, limits = json.loads(done.text)
    assert set(environment) <= {"PATH", "TMPDIR", "LANG", "LC_CTYPE"} and done.status == 0
    assert directory == environment["TMPDIR"] == str(tmp_path)
    assert limits == [MEMORY, FILE, SECONDS, 0]


@pytest.mark.parametrize(
    "program, statuses",
    [
        ("bytes(2 << 30)", (1,)),
        ("open('large', 'wb').write(bytes(2 << 20))", (1, -signal.SIGXFSZ)),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 5))\nwhile True: pass",
            (-signal.SIGXCPU,),
        ),
    ],
)
def test_a_child_cannot_use_more(tmp_path: Path, program: str, statuses: tuple[int, ...]) -> None:
    assert run(tmp_path, program).status in statuses
    assert not (tmp_path / "large").exists() or (tmp_path / "large").stat().st_size <= FILE


def test_what_a_child_prints_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LONGEST_TEXT", 1000)
    done = run(tmp_path, "import sys; print('a' * 2000, file=sys.stderr)")
    assert done.text == "a" * 1000 and not list(tmp_path.iterdir())


def test_only_a_regular_file_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(bytes(100))
    for name in ("link", "fifo", "large", "missing"):
        with pytest.raises(OSError):
            children.result(tmp_path / name, 99)
    assert children.result(tmp_path / "large", 100) == bytes(100)


def test_a_python_child_runs_no_code_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's HOME, PYTHONPATH and working directory may be those of another user."""
    taken = tmp_path / "taken"
    bad = f"open({str(taken)!r}, 'w')\n"
    site = tmp_path / ".local/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (site / "bad.pth").write_text(f"import os; {bad}")
    for name in ("sitecustomize", "usercustomize", "json"):
        (tmp_path / f"{name}.py").write_text(bad)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    done = subprocess.run(
        children.python("import json, gpubpf; print(gpubpf.__file__)"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith("gpubpf/__init__.py") and not taken.exists()


def test_what_a_killed_tool_leaves_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(directory.stat().st_mode | 0o711)
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    program = tmp_path / "ptxas"
    program.write_text("#!/bin/sh\n[ $1 = --version ] || { echo; exec sleep 600; }\n")
    program.chmod(0o755)
    script = f"from gpubpf.images import assemble; assemble.Ptxas({str(program)!r}).run(b'', 'sm_90', ())"
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as tool:
        until = time.monotonic() + 60
        while not list(place.glob("gpubpf-*/module.ptx")):
            assert tool.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        (left,) = place.iterdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        monkeypatch.setattr(children, "_ABANDONED", -60.0)  # however new it is
        children.remove_abandoned()
        assert left.exists()  # the tool works there
        tool.kill()
    (place / "gpubpf-child-mine").mkdir(mode=0o755)
    (place / "gpubpf-mine").mkdir(mode=0o700)  # of a user, or of another program
    (place / "gpubpf-child-link").symlink_to(tmp_path)
    kept = sorted(path for path in place.iterdir() if path != left)
    # A child that the tool had forked, and that had not become its program yet, has the lock for a moment longer.
    until = time.monotonic() + 60
    while left.exists() and time.monotonic() < until:
        children.remove_abandoned()
        time.sleep(0.01)
    assert sorted(place.iterdir()) == kept
    assert program.exists()


def test_all_children_that_read_untrusted_data_get_the_small_environment() -> None:
    library = Path(children.__file__).parents[1]
    found = []
    for file in (library / "names.py", *(library / "images").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "subprocess.run",
                "subprocess.Popen",
            ):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                found.append((file.name, given.get("env", "").startswith("children.environment(")))
    assert len(found) >= 3 and all(small for _, small in found), found


def test_ptxas_runs_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(directory.stat().st_mode | 0o711)
    monkeypatch.setenv("MY_SECRET", "1")
    made = tmp_path / "ptxas"
    made.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit\n"
        "while [ $# -gt 1 ]; do [ $1 = -o ] && { ulimit -v; ulimit -c; env; } > $2; shift; done\n"
    )
    made.chmod(0o755)
    memory, core, *variables = Ptxas(str(made)).run(b"", "sm_90", ())[0].decode().splitlines()
    assert int(memory) * 1024 <= children.half_of_memory() and core == "0"
    assert not any("MY_SECRET" in variable or "HOME" in variable for variable in variables)
