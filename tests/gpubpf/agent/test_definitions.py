"""What tool and agent agree on: the C++ header compiles, no source repeats it, and the documentation shows the same tables."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpubpf import agent
from gpubpf.agent import definitions, packing
from gpubpf.ebpf import headers
from gpubpf.ebpf.bytecode import CONTEXTS, HOST_POINTS
from gpubpf.ebpf.helpers import HELPERS
from gpubpf.images import fatbin
from gpubpf.launches import device_times
from gpubpf.memory import access_trace
from gpubpf.records import operation_log
from gpubpf.tools import launchlate

ROOT = Path(__file__).resolve().parents[3]
AGENT = Path(agent.__file__).parent
SOURCES = {
    path: path.read_text()
    for folder in ("src", "hsa")
    for path in (AGENT / folder).rglob("*")
    if path.suffix in (".cpp", ".h")
}


def test_the_header_compiles_with_the_offsets_that_python_reads(tmp_path: Path) -> None:
    (tmp_path / "definitions.h").write_text(definitions.cpp())
    (tmp_path / "all.cpp").write_text('#include "definitions.h"\n')
    compiler = [shutil.which("g++") or "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([*compiler, tmp_path / "all.cpp"], check=True)
    for part in definitions.PARTS:
        for field, at in part.offsets():
            read = operation_log.DTYPE.fields[part.name][0] if part.name != "queue" else operation_log.DTYPE
            offset = read.fields[field.name][1]
            assert offset == (at if part.name != "queue" else definitions.PART_OFFSET + at)
            assert f"offsetof({part.name.title()}Part, {field.name}) == {at})" in definitions.cpp()
    for layout in (definitions.CONTROL, definitions.SLOT, definitions.LOG_HEADER, definitions.PATCH):
        for field, at in layout.offsets():
            assert f"offsetof({layout.name}, {field.name}) == {at})" in definitions.cpp()
        assert layout.packing().size == layout.size


WRITES_AND_READS = """
#include "messages.h"
#include <cstdio>
#include <unistd.h>
using namespace gpubpf;
template <class Message>
int copy() {
    std::vector<uint8_t> payload(1 << 16);
    payload.resize(read(0, payload.data(), payload.size()));
    Message message;
    if (!Reader(payload).read(message)) return 1;
    const std::vector<uint8_t> written = Writer(message).bytes;
    for (size_t size = 0; size < payload.size(); ++size)
        if (Message part; Reader(payload.data(), size).read(part)) return 2;
    return write(1, written.data(), written.size()) == ssize_t(written.size()) ? 0 : 3;
}
int main(int, char **argv) {
    switch (*argv[1]) {
        case 'W': return copy<message::Welcome>();
        case 'S': return copy<message::Sidecar>();
        default: return copy<message::Consumed>();
    }
}
"""


def test_what_python_packs_is_what_cpp_packs(tmp_path: Path) -> None:
    """C++ reads the messages that the tool sends and writes the same bytes. It refuses them if the end is missing."""
    (tmp_path / "definitions.h").write_text(definitions.cpp())
    (tmp_path / "copy.cpp").write_text(WRITES_AND_READS)
    sources = [tmp_path / "copy.cpp", AGENT / "src" / "wire.cpp"]
    include = ["-iquote", str(AGENT / "src"), f"-I{tmp_path}"]
    compiler = [shutil.which("g++") or "c++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", *include]
    subprocess.run([*compiler, *sources, "-o", tmp_path / "copy"], check=True)
    host = definitions.HostCode(
        "operation", b"code", b"parameters", ((definitions.HostArgument.PARAM, 1, 1 << 40),)
    )
    config = definitions.AgentConfig(
        [definitions.MapSpec(1 << 33, 8, b"abc", definitions.Unit.SITE, definitions.Place.GPU)],
        1 << 20,
        launches=(2, None),
        image_wait=1.5,
        budget=True,
        host=[host],
        host_points=["launch"],
        clock_kernels={90: b"cubin"},
    )
    layout = definitions.KernelLayout(
        "k", [8, 4], 16, bytes(64), (definitions.BlockField(0, 8, None),), references=[(-8, 1 << 63)], tick=8
    )
    variable = definitions.VariableSlot("v", 1, True, ("k",), None, "a reason")
    answer = definitions.Answer(
        9, (layout,), {"other": "reason"}, [variable], [("a", "b")], ["c"], patches=[(3, "p")]
    )
    for message in (
        definitions.Welcome(definitions.PROTOCOL_VERSION, 7, "tool", config),
        definitions.Sidecar(5, answer),
        definitions.Consumed(1, 2, [3, 1 << 63]),
    ):
        payload = packing.encode(message)
        done = subprocess.run([tmp_path / "copy", type(message).__name__], input=payload, capture_output=True)
        assert (done.returncode, done.stdout) == (0, payload)
        assert packing.encode(packing.decode(type(message), payload)) == payload


def test_the_header_needs_only_the_standard_library() -> None:
    command = [sys.executable, "-S", "-B", "-m", "gpubpf.agent.definitions"]
    made = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT / "lib")}, check=True, capture_output=True, text=True
    )
    assert made.stdout == definitions.cpp()


def test_the_agent_was_built_from_these_definitions() -> None:
    made = AGENT / "lib" / "build" / "definitions.h"
    if not made.exists():
        pytest.skip("the agent is installed without the header that it was built with")
    assert made.read_text() == definitions.cpp(), "run make -C lib/gpubpf/agent"


def test_the_agent_exports_the_names_that_the_tool_looks_up() -> None:
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--print-size", agent.LIBRARY], check=True, capture_output=True
    )
    sizes = {
        words[3]: int(words[1], 16)
        for line in listed.stdout.decode().splitlines()
        if len(words := line.split()) == 4
    }
    assert sizes[definitions.OWNER_VARIABLE] == definitions.OWNER_SIZE
    assert definitions.ATTACH_FUNCTION in sizes


def test_no_source_of_the_agent_repeats_a_name_or_a_number() -> None:
    for path, text in SOURCES.items():
        for name in definitions._TEXTS.values():
            assert f'"{name}"' not in text, path
        for constants in definitions._CONSTANTS.values():
            for name in constants:
                assert not re.search(rf"\bk{definitions._camel(name)}\s*=", text), f"{path} defines {name}"


def test_every_constant_is_used() -> None:
    used = set(re.findall(r"\bk[A-Z]\w*", "".join(SOURCES.values())))
    names = [name for constants in definitions._CONSTANTS.values() for name in constants]
    assert {f"k{definitions._camel(name)}" for name in (*names, *definitions._TEXTS)} <= used


def test_the_agent_has_every_helper_that_is_a_function_there() -> None:
    source = (AGENT / "src" / "log" / "host_program.cpp").read_text()
    helpers = {
        number for number, helper in HELPERS.items() if helper.native and helper.native.lowering == "function"
    }
    assert set(map(int, re.findall(r"^ +case (\d+):", source, re.M))) == helpers


def test_the_contexts_of_host_programs_are_those_of_the_header_for_programs() -> None:
    text = re.sub(r"/\*.*?\*/", "", (headers.INCLUDE / "gpubpf.h").read_text(), flags=re.S)
    for point in HOST_POINTS:
        body = re.search(rf"struct gpu_{point} {{(.*?)}};", text, re.S)
        assert body is not None
        assert re.findall(r"u64 (\w+(?:, \w+)*);", body[1]) != []
        fields = ", ".join(re.findall(r"u64 (\w+(?:, \w+)*);", body[1])).split(", ")
        assert fields == list(CONTEXTS[point])


def test_device_programs_have_the_numbers_that_decode_their_records() -> None:
    assert _defined(access_trace.PROGRAM)["NUMBER_BITS"] == str(definitions.NUMBER_BITS)
    launches = _defined(launchlate.PROGRAM)
    assert launches["SLOTS"] == str(launchlate.SLOTS)
    assert launches["TIME"] == f"((1ULL << {device_times.TIME_BITS}) - 1)"
    assert set(re.findall(r"SLOTS\) << (\d+)", launchlate.PROGRAM)) == {str(device_times.TIME_BITS)}


def _defined(text: str) -> dict[str, str]:
    """Return the macros of a C text with their values."""
    return dict(re.findall(r"^#define (\w+) (\S.*?)\s*(?:/\*.*)?$", text, re.M))


def test_every_kind_has_one_part() -> None:
    kinds = [kind for part in definitions.PARTS for kind in part.kinds]
    assert sorted(kinds) == sorted(definitions.Kind)
    for part in definitions.PARTS:
        last, at = list(part.offsets())[-1]
        assert (
            at + definitions.SIZES[last.type] * last.count
            <= definitions.RECORD_SIZE - definitions.PART_OFFSET
        )


def test_the_documentation_shows_them() -> None:
    assert definitions.markdown() in (ROOT / "docs" / "timing.md").read_text(), (
        "docs/timing.md: put in what python -m gpubpf.agent.definitions --markdown prints"
    )


@pytest.mark.parametrize("reader", ["gpubpf/agent/src/copies/image.cpp", "cudasim/src/driver/fatbin.cpp"])
def test_the_marks_of_fatbins_are_the_same_everywhere(reader: str) -> None:
    text = (ROOT / "lib" / reader).read_text()
    for name in ("WRAPPER_MAGIC", "FATBIN_MAGIC"):
        (value,) = re.findall(rf"k{name.title().replace('_', '')} = (0x[0-9a-fA-F]+)", text)
        assert int(value, 16) == getattr(fatbin, name)
