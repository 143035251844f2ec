"""What the tool gives up, thread by thread."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from gpubpf import names
from gpubpf.images import assemble
from gpubpf.kernel import privileges

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


def status(text: str) -> dict[str, list[str]]:
    return {line.split(":")[0]: line.split()[1:] for line in text.splitlines() if ":" in line}


def mine() -> dict[str, list[str]]:
    return status(Path("/proc/thread-self/status").read_text())


def childs() -> dict[str, list[str]]:
    return status(subprocess.check_output(["cat", "/proc/self/status"], text=True))


def test_what_reads_a_targets_text_has_no_privileges() -> None:
    before = mine()

    def work() -> tuple[dict[str, list[str]], dict[str, list[str]], int]:
        with tempfile.TemporaryDirectory() as directory:
            return mine(), childs(), os.stat(directory).st_uid

    thread, child, owner = privileges.run_unprivileged(work, ("/bin/cat",))
    for found in (thread, child):
        assert int(found["CapEff"][0], 16) == int(found["CapPrm"][0], 16) == 0
        assert found["NoNewPrivs"] == ["1"]
        assert found["Uid"] == [str(owner)] * 4
    if ROOT:
        assert 61184 <= owner <= 65519 and thread["Groups"] == []
    assert {k: mine()[k] for k in ("Uid", "CapEff", "NoNewPrivs")} == {
        k: before[k] for k in ("Uid", "CapEff", "NoNewPrivs")
    }


@needs_root
def test_what_others_cannot_reach_runs_as_root_without_capabilities(tmp_path: Path) -> None:
    tool = tmp_path / "private"
    tool.write_text("#!/bin/sh\ncat /proc/self/status\n")
    tool.chmod(0o700)
    found = status(
        privileges.run_unprivileged(lambda: subprocess.check_output(tool, text=True), (str(tool),))
    )
    assert found["Uid"] == ["0"] * 4
    assert int(found["CapEff"][0], 16) == int(found["CapPrm"][0], 16) == 0


def test_errors_come_through() -> None:
    with pytest.raises(KeyError, match="7"):
        privileges.run_unprivileged(lambda: {}[7])


@needs_root
def test_threads_give_up_by_themselves() -> None:
    """In threads of this test's own: capabilities do not come back."""
    made = privileges.Privileges()
    found: list[frozenset[int]] = []
    turn = threading.Barrier(2)

    def other() -> None:
        made.apply()
        found.append(privileges.effective())
        turn.wait()
        turn.wait()
        made.apply()
        found.append(privileges.effective())

    def main() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        turn.wait()
        made.keep(privileges.MEASURING, True)
        found.append(privileges.effective())
        turn.wait()
        thread.join()
        found.append(frozenset(map(int, [childs()["Uid"][0]])))

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    before, first, second, _ = found
    assert before == privileges.effective() > privileges.MEASURING
    assert first == second == privileges.MEASURING & before


LOOKS = """
import subprocess, sys
from pathlib import Path
from gpubpf.kernel import privileges
with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as command:
    made = privileges.Privileges()
    made.keep(privileges.MEASURING, True)
    Path(f"/proc/{command.pid}/maps").read_bytes()
    print(sorted(privileges.effective() - privileges.MEASURING), privileges.SYS_PTRACE in privileges.effective())
"""


@needs_root
@pytest.mark.parametrize(
    ("without", "kept"),
    [("-sys_ptrace", "False"), ("-sys_ptrace,-setpcap", "False"), ("-sys_nice", "[] True")],
)
def test_a_tool_sees_its_command_in_a_container(without: str, kept: str) -> None:
    """Without CAP_SYS_PTRACE, a tool that had dropped a capability could no longer look at the command, which has it."""
    words = ["setpriv", f"--bounding-set={without}", "--inh-caps=-all", sys.executable, "-c", LOOKS]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip().endswith(kept)


def test_ptxas_runs_without_privileges(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    said: list[dict[str, list[str]]] = []
    run = subprocess.run

    def seen(command: list[str], **how: object) -> object:
        said.append(mine())
        return run(command, **how)  # type: ignore[call-overload]

    if not (path := assemble.find_ptxas()):
        pytest.skip("no ptxas here")
    monkeypatch.setattr(assemble.subprocess, "run", seen)
    text = b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { ret; }\n"
    cubin, functions, _ = assemble.Ptxas(path).run(text, "sm_75", ())
    assert cubin[:4] == b"\x7fELF" and "k" in functions
    assert int(said[0]["CapEff"][0], 16) == 0 and said[0]["NoNewPrivs"] == ["1"]
    assert not ROOT or said[0]["Uid"] != ["0"] * 4


def test_who_demangles_what_could_grow_has_no_privileges() -> None:
    helper = names._Helper()
    assert helper.demangle("_Z3fooi") == "foo(int)"
    assert helper._child is not None
    found = status(Path(f"/proc/{helper._child.pid}/status").read_text())
    helper._stop()
    assert int(found["CapEff"][0], 16) == 0 and found["NoNewPrivs"] == ["1"]
    assert not ROOT or found["Uid"] != ["0"] * 4


def test_capabilities_of_a_user_namespace_load_no_programs() -> None:
    unshare = ("unshare", "-U", "-r")
    if subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs user namespaces")
    code = "from gpubpf.kernel import privileges as p; print(p.BPF in p.effective(), p.capable())"
    done = subprocess.run([*unshare, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
