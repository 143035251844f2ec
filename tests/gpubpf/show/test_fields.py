"""Records whose fields are declared once: JSON, CSV, tables, schemas and man pages."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

import manpages
from gpubpf.show.fields import Field, Fields, having, many, maybe
from gpubpf_schema import declared, problems
from test_contract import TOOLS

FIRST = having(Field("launch", "integer"), Field("block", "index"))
MADE = Fields(
    "made",
    "One for each.",
    (
        Field("name", "string", "with --name", header="NAME", left=True),
        Field("count", "integer", get=lambda one: one.n, header="COUNT", show="{:,}".format),
        Field("block", "index?"),
        Field("late_ns", "distribution"),
        Field("kind", "a|b", get=lambda one: one.kind or None, when="with -k"),
        Field("first", maybe(FIRST), "the first", get=lambda one: None),
        Field("address", "hex", when="with -a"),
    ),
    csv="name more count block late_ns mean=late_ns.mean first.launch first.block address",
    csv_fields=(Field("more", "string"),),
)
TIMES = {"mean": 1.5, "p50": 1, "p99": 2, "max": 3}


def one(**changed: Any) -> Any:
    return SimpleNamespace(
        **{"name": "n,1", "n": 1000, "block": (1, 2, 3), "late_ns": TIMES, "kind": "", **changed}
    )


def test_json() -> None:
    record = MADE.record(one())
    assert json.dumps(record) == json.dumps(
        {"type": "made", "name": "n,1", "count": 1000, "block": [1, 2, 3], "late_ns": TIMES, "first": None}
    )
    given = MADE.record(one(kind="a"), address="0x1", count=5)
    assert (given["kind"], given["address"], given["count"]) == ("a", "0x1", 5)
    with pytest.raises(TypeError, match="no field other"):
        MADE.record(one(), other=1)


def test_csv() -> None:
    assert MADE.columns == (
        *("name", "more", "count", "block_x", "block_y", "block_z"),
        *("late_mean_ns", "late_p50_ns", "late_p99_ns", "late_max_ns", "mean"),
        *("launch", "block_x", "block_y", "block_z", "address"),
    )
    times = [1.5, 1, 2, 3, 1.5]
    assert MADE.row(MADE.record(one()), more=7) == ["n,1", 7, 1000, 1, 2, 3, *times, *[None] * 5]
    first = MADE.record(one(block=None), first={"launch": 4, "block": [5, 6, 7]})
    assert MADE.row(first) == ["n,1", None, 1000, *[None] * 3, *times, 4, 5, 6, 7, None]
    with pytest.raises(KeyError):
        Fields("made", "", MADE.fields, csv="unknown").columns  # noqa: B018


def test_many_records_are_written_as_single_ones_are() -> None:
    few = Fields(
        "few",
        "",
        (*MADE.fields[:2], Field("block", "index"), *MADE.fields[4:5], MADE.fields[6]),
        csv="name block address",
    )
    texts = few.json_texts({"name": 'n"'}, "kind", "address")
    columns = ("7", "1", "2", "3", "b", "1f", "")
    line = "".join(text.decode() + column for text, column in zip(texts, columns, strict=True))
    values = {"name": 'n"', "count": 7, "block": [1, 2, 3], "kind": "b", "address": "0x1f"}
    assert line == json.dumps(few.record(**values), separators=(",", ":")) + "\n"
    assert b"kind" not in b"".join(few.json_texts({}))
    assert few.csv_texts({"name": "n,"}) == [b'"n,",', b",", b",", b",0x", b"\n"]


def test_tables() -> None:
    assert MADE.cells(one()) == {"NAME": "n,1", "COUNT": "1,000"}
    assert MADE.cells(one(), name="[1]")["NAME"] == "[1]" and MADE.left == ("NAME",)


def test_schema() -> None:
    record = MADE.record(one(kind="a"), first={"launch": 1, "block": (1, 2, 3)}, address="0x1")
    right = json.loads(json.dumps(record))
    assert not list(problems(MADE.schema, right))
    for changed in (
        {"count": 1.5}, {"count": True}, {"block": [1, 2]}, {"kind": "c"}, {"kind": None}, {"address": "1"},
        {"type": "other"}, {"more": 1}, {"first": {"launch": 1}}, {"late_ns": None},
    ):  # fmt: skip
        assert len(list(problems(MADE.schema, right | changed))) == 1, changed
    del right["name"], right["address"]
    assert list(problems(MADE.schema, right)) == [": name is missing"]
    assert list(problems(many("integer"), [1, "a"])) == ["[1]: 'a' is not of type integer"]


def test_the_man_page_names_all_fields_and_their_objects() -> None:
    text = "\n".join(manpages.record(MADE, set()))
    for part in (
        ".B made\nOne for each.",
        r"\fIname\fR (with \fB\-\-name\fR);",
        r"\fIfirst\fR (the first: \fIlaunch\fR, \fIblock\fR);",
        r"\fIkind\fR (a or b, with \fB\-k\fR);",
    ):
        assert part in text
    assert text.endswith(r"\fIaddress\fR (with \fB\-a\fR).")
    known: set[str] = set()
    list(manpages.record(MADE, known))
    *_, line = manpages.record(MADE, known)
    assert line.startswith(r"\fIname\fR, \fIcount\fR, ") and line.endswith(r"\fIaddress\fR.")


# --- the tools ---


def test_the_fragments_are_those_of_the_declarations() -> None:
    """Otherwise run script/manpages.py --fields."""
    for name, text in manpages.fields().items():
        assert (manpages.MAN / "fragments" / name).read_text() == text, name


def names_in(schema: dict[str, Any]) -> set[str]:
    """Return the names of all fields in a schema."""
    inner = [schema.get("items"), schema.get("additionalProperties"), *schema.get("properties", {}).values()]
    found = {*schema.get("properties", ())}
    return found.union(*(names_in(one) for one in inner if isinstance(one, dict)))


@pytest.mark.parametrize("tool", TOOLS)
def test_fields_has_the_fields_that_the_tool_prints_and_no_others(tool: str) -> None:
    page = manpages.page(tool).split('\n.SS "JSON records"\n')[1].split("\n.SH ")[0].split("\n.SS ")[0]
    described = re.findall(r"^\.TP\n\.B (\S+)$", page, re.MULTILINE)
    records = declared(tool)
    assert sorted({*described}) == sorted({one.name for one in records})
    sections = dict(zip(described, re.split(r"^\.TP\n\.B \S+$", page, flags=re.MULTILINE)[1:], strict=True))
    explained: set[str] = set()
    for one in sorted(records, key=lambda one: described.index(one.name)):
        shown = set(re.findall(r"\\fI(\w+)\\fR", sections[one.name]))
        explained |= shown
        fields = names_in(one.schema) - {"type"}
        # An object is explained where it is first.
        lacking = [{*one.schema["properties"]} - shown - {"type"}, fields - explained]
        assert lacking == [set(), set()], f"the man page of {tool} lacks fields of {one.name}"
        assert shown <= {*fields, "N"}, f"{tool} prints no such fields in {one.name}"


@pytest.mark.parametrize("tool", ["kernelretsnoop", "memtrace"])
def test_a_summary_has_counts_of_records_only_if_there_are_records(tool: str) -> None:
    (summary,) = (one for one in declared(tool) if one.name == "summary")
    of_records = {"records", "records_lost", "records_incomplete", "records_unknown", "log_lost"}
    assert of_records <= {*summary.schema["properties"]} and not of_records & {*summary.schema["required"]}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_columns_of_csv_are_in_the_man_page(tool: str) -> None:
    page = manpages.page(tool)
    for one in declared(tool):
        if one.csv and one.name != "listed":
            assert ", ".join(one.columns) in page


@pytest.mark.parametrize("tool", TOOLS)
def test_every_column_of_a_table_is_in_the_man_page(tool: str) -> None:
    columns = manpages.page(tool).split("\n.SH FIELDS\n")[1].split('\n.SS "JSON records"\n')[0]
    for field in (field for one in declared(tool) for field in one.fields if field.header):
        assert re.search(rf"\b{field.header}\b", columns), field.header
