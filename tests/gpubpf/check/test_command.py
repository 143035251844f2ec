"""The command `gpubpf check`: its output, exit status, report, and how it takes what hangs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import manpages
from gpubpf import __main__ as command
from gpubpf.check import probing, table, text
from gpubpf.check.command import EXAMPLES
from gpubpf.check.finding import LIMITED, MISSING, OK, UNKNOWN, Check, Finding, ok
from gpubpf.check.machine import Machine
from gpubpf_host import ORDINARY

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "gpubpf"
HEAVY = (
    "numpy",
    "bcc",
    "llvmlite",
    "elftools",
    "tabulate",
    "argcomplete",
    "cuda",
    "lz4",
    "zstandard",
    "asyncio",
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment
    words = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(words, capture_output=True, text=True, env=variables, timeout=120)


def test_one_record_for_each_check_that_applies() -> None:
    done = run("check", "--json", "--timeout", "60")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    names = [record["name"] for record in records]
    assert names == [check.name for check in table.CHECKS if check.name in names]
    assert {"python", "nvidia-gpu", "bpf", "cache"} <= set(names)
    fields = {"type", "name", "state", "ok", "needed", "value", "consequence", "do"}
    assert all(set(record) == fields for record in records)
    failed = any(record["needed"] and record["ok"] is False for record in records)
    assert (done.returncode, done.stderr) == (int(failed), "")


def test_the_text_fits_a_terminal_and_has_every_title() -> None:
    done = run("check", "--timeout", "60")
    lines = done.stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    applying = [
        json.loads(line)["name"] for line in run("check", "--json", "--timeout", "60").stdout.splitlines()
    ]
    titles = [check.title for check in table.CHECKS if check.name in applying]
    entries = [line for line in lines if re.match(r"(ok|limited|missing|unknown) ", line)]
    assert [entry[9:26].rstrip() for entry in entries] == titles


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_ordinary_user_lacks_ebpf() -> None:
    words = [
        *ORDINARY,
        sys.executable,
        SCRIPT,
        "check",
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    records = {record["name"]: record for record in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, records["bpf"]["state"], records["python"]["state"]) == (1, MISSING, OK)


def test_the_report_has_nothing_personal(tmp_path: Path) -> None:
    home = tmp_path / "home" / "jane.doe"
    (home / ".cache").mkdir(parents=True, mode=0o700)
    identity = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
    done = run(
        "check", "--report", "--timeout", "60",
        HOME=str(home), USER="jane.doe", LOGNAME="jane.doe", SUDO_USER="jdoe77", HOSTNAME="secret-host.example.org",
        XDG_CACHE_HOME="", TMPDIR=str(home), CUDA_INJECTION64_PATH="/home/jane.doe/inject.so",
        CUDASIM_CC_COMPILER=f"/home/other.user/cc-of-jdoe77-{identity}", container="secret-host.example.org",
    )  # fmt: skip
    assert done.stdout.startswith("gpubpf check, as ") and "~/.cache/gpubpf" in done.stdout
    for personal in (
        "jane.doe",
        "jdoe77",
        "secret-host",
        "other.user",
        identity,
        str(tmp_path),
    ):
        assert personal not in done.stdout
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", done.stdout)
    assert "Linux " in done.stdout and "gpubpf 0" in done.stdout


def test_what_is_personal_in_any_text() -> None:
    said = "/home/max/x of max: GPU-01234567-89ab-cdef-0123-456789abcdef on box-7; /root/.cache, maximal; max-width 0"
    environment = {"USER": "max", "HOME": "/srv/max", "HOSTNAME": "box-7"}
    assert text.impersonal(said, environment) == (
        "~/x of USER: UUID on HOST; ~/.cache, maximal; USER-width 0"
    )


def test_checks_that_hang_or_fail_do_not_stop_the_others() -> None:
    def hang(machine: Machine) -> Finding:
        time.sleep(3600)
        return ok("never")

    def forbidden(machine: Machine) -> Finding:
        raise PermissionError(13, "Permission denied", "/proc/1/secret")

    def broken(machine: Machine) -> Finding:
        raise ValueError("no number")

    checks = [
        Check("a", "a", hang),
        Check("b", "b", forbidden),
        Check("c", "c", broken),
        Check("d", "d", lambda machine: None),
        Check("e", "e", lambda machine: ok("fine")),
    ]
    found = {check.name: finding for check, finding in probing.run(checks, Machine(timeout=0.1))}
    assert {name: finding.state for name, finding in found.items()} == {
        "a": UNKNOWN,
        "b": UNKNOWN,
        "c": UNKNOWN,
        "e": OK,
    }
    assert found["a"].value == "no answer in 0.1 s"
    assert found["b"].value == "/proc/1/secret: Permission denied" and "root" in found["b"].action
    assert found["c"].value == "ValueError: no number"


def test_lines_of_findings() -> None:
    long = Finding(MISSING, "nothing " * 12, "the tool does not work", "install it")
    assert list(text.lines([("eBPF", ok("fine")), ("a name", long)])) == [
        "ok       eBPF             fine",
        "missing  a name           nothing nothing nothing nothing nothing nothing",
        "                          nothing nothing nothing nothing nothing nothing",
        "                          so: the tool does not work",
        "                          do: install it",
    ]
    limited = Finding(LIMITED, "x", "y", needed=False)
    assert not limited.fails and long.fails
    assert text.conclusion([("eBPF", limited), ("a name", long)]) == [
        "1 limited, 1 missing; tools or options need: a name"
    ]
    merged = list(text.lines([("threadhist", limited), ("kernelretsnoop", limited)], merge=True))
    assert merged[0] == "limited  threadhist, kernelretsnoop"


def test_help_needs_nothing_heavy_and_fits() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in HEAVY)
    program = f"import sys, runpy\n{blocked}sys.argv = ['gpubpf', 'check', '--help']\n"
    program += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"COLUMNS": "80"}
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: gpubpf check ")
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "words", [[], ["chek"], ["check", "-p", "0"], ["check", "-p", "x"], ["check", "--json", "--report"],
              ["check", "--report", "-p", "1"], ["check", "--timeout", "0"], ["check", "word"]],
)  # fmt: skip
def test_bad_command_lines_are_one_line_and_status_two(words: list[str]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("gpubpf")


def test_options_and_examples_are_in_the_man_page_and_the_other_way_round() -> None:
    page = re.sub(r"\\f[BRIP]", "", manpages.page("gpubpf")).replace("\\-", "-")
    options = page.split(".SH OPTIONS\n")[1].split("\n.SH ")[0]
    described = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", options))
    made = command.build_parser()
    parsers = [made, *made._subparsers._group_actions[0].choices.values()]  # type: ignore[union-attr,union-attr]
    assert described == {name for one in parsers for action in one._actions for name in action.option_strings}
    for example in re.findall(
        r"^\s+((?:sudo )?gpubpf .*?)(?:\s{3,}.*| &&.*| \|.*)?$", EXAMPLES, re.MULTILINE
    ):
        made.parse_args(shlex.split(example.removeprefix("sudo "))[1:])
    fields = page.split(".SH FIELDS\n")[1].split("\n.SH ")[0]
    assert all(check.name in fields for check in table.CHECKS)


def test_tools_and_options_in_consequences_exist() -> None:
    """A finding names tools and options: what it names must be there."""
    tools = {path.stem for path in (ROOT / "tools").glob("*.py")} | {"cudasim", "hipsim"}
    pages = "".join(manpages.page(name) for name in manpages.names()).replace("\\-", "-")
    for path in (ROOT / "lib/gpubpf/check").glob("*.py"):
        for line in path.read_text().splitlines():
            for text_ in re.findall(r'"([^"]*)"', line):
                assert set(
                    re.findall(r"\b(?:gpu(?!bpf)\w+|\w+snoop|\w+hist|mem\w+race)\b", text_)
                ) <= tools | {"gpu", "gpus"}
                if "docker" in text_ or "apt-get" in text_ or "--cap" in text_ or "-target" in text_:
                    continue
                for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", text_):
                    assert option in pages or option in ("--gpus", "--pid", "--device"), (path, option)


@pytest.mark.parametrize(("line", "words"), [("gpubpf ch", ["check"]), ("gpubpf check --rep", ["--report"])])
def test_completion(line: str, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    variables = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"),
    }  # fmt: skip
    subprocess.run([sys.executable, SCRIPT], env=os.environ | variables, timeout=60)
    assert (tmp_path / "words").read_text().split() == words
