"""The reasons of reports and of the JSON summary: man pages and documentation explain the same ones."""

from __future__ import annotations

import re
from pathlib import Path

from gpubpf.agent.definitions import PatchFailed
from gpubpf.agent.protocol import KernelFault
from gpubpf.images import fatbin, mapped
from gpubpf.records import reasons

ROOT = Path(__file__).resolve().parents[3]


def _of_fragment(name: str) -> list[set[str]]:
    """Return the bold terms of each entry of a man page's fragment."""
    text = (ROOT / "man" / "fragments" / name).read_text()
    return [set(line.split(r"\fR, \fB")) for line in re.findall(r"^\.TP\n\.B (.+)$", text, re.M)]


def _of_table(page: str, header: str) -> set[str]:
    """Return the reasons in the first column of the table with this header."""
    text = (ROOT / "docs" / page).read_text()
    rows = text.partition(f"| reason | {header} |\n")[2].partition("\n\n")[0].splitlines()[1:]
    return {reason for row in rows for reason in row.split(" | ")[0].strip("| ").replace("*", "").split(", ")}


def test_every_reason_for_launches_is_in_the_man_pages() -> None:
    entries = _of_fragment("not-counted.roff")
    at = next(at for at, entry in enumerate(entries) if fatbin.SASS_ONLY in entry)
    explained, kernels = entries[:at], entries[at]
    assert set.union(*explained) == {*reasons.NOT_COUNTED, mapped.NOT_FOUND, mapped.AMBIGUOUS}
    assert _of_table("instrumentation.md", "explanation") <= set.union(*explained, kernels)
    # The others come from the agents.
    places = [ROOT / "lib" / "gpubpf" / "agent" / part for part in ("src", "hsa")]
    agents = "".join(file.read_text() for place in places for file in place.rglob("*.cpp"))
    assert all(f'"{reason}"' in agents for reason in set.union(*entries[at + 1 :]))


def test_of_a_fault_only_what_is_known_is_said() -> None:
    said = reasons.kernel_failed("pid 7 (app)", KernelFault(0, 700))
    assert said == (
        "pid 7 (app): a kernel failed: illegal address (CUDA error 700); the driver does not say which: "
        "run the program under compute-sanitizer"
    )
    nothing = dict.fromkeys(("kernel", "source", "block", "thread", "address"))
    assert reasons.fault_record(7, "app", KernelFault(0, 700)) == {
        "pid": 7, "comm": "app", "gpu": 0, "error": 700, **nothing, "patch": False
    }  # fmt: skip
    assert "failed: error (CUDA error 999), block" in reasons.kernel_failed("", KernelFault(0, 999, "f"))


def test_a_fault_in_a_patch_is_that_of_the_tool() -> None:
    fault = KernelFault(0, 700, "_Z1fv", ("/a.cu", 8), (1, 0, 0), (2, 0, 0), 16, PatchFailed.YES)
    assert reasons.kernel_failed("pid 7 (app)", fault) == (
        "pid 7 (app): the tool's patch in kernel f() failed, not the program: illegal address (CUDA error 700),"
        " address 0x10, block (1,0,0), thread (2,0,0); run it without --sass"
    )
    assert reasons.fault_record(7, "app", fault)["patch"] is True
    unknown = KernelFault(0, 700, patch=PatchFailed.PERHAPS)
    said = reasons.kernel_failed("pid 7 (app)", unknown)
    assert "run the program without --sass; if it then does not fail, the tool's patches do" in said
    assert reasons.fault_record(7, "app", unknown)["patch"] is None


def test_every_reason_for_processes_is_explained() -> None:
    explained = set.union(*_of_fragment("running-processes-missed.roff"))
    assert explained == set(reasons.MISSED) == _of_table("attach.md", "meaning")
