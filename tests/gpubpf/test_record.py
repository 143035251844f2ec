"""Records behave like the dataclasses that they replace."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpubpf.record import MutableRecord, Record, asdict, field, replace

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "lib" / "gpubpf"
OTHERS = (ROOT / "lib" / "cudasim", ROOT / "lib" / "hipsim", ROOT / "tools")


class Site(Record):
    number: int
    source: str = "main.cu"
    counts: dict[str, int] = field(default_factory=dict)
    text: str = field(default="", repr=False, compare=False)

    @property
    def odd(self) -> bool:
        return self.number % 2 == 1


class Sum(MutableRecord):
    value: int = 0
    seen: list[int] = field(default_factory=list)


class Checked(Record):
    value: int

    def __post_init__(self) -> None:
        if self.value < 0:
            raise ValueError(self.value)


@dataclass(frozen=True, slots=True)
class Statement:
    name: str
    site: Site


class Numbered(Site):
    source: str = "other.cu"
    rank: int = 0


def test_a_derived_class_has_the_fields_of_its_base_first():
    one = Numbered(3, counts={"load": 1}, rank=2)
    assert Numbered.__match_args__ == ("number", "source", "counts", "text", "rank")
    assert (one.number, one.source, one.counts, one.text, one.rank) == (3, "other.cu", {"load": 1}, "", 2)
    assert replace(one, rank=1) != one and one != Site(3, "other.cu", {"load": 1})
    assert Site.__match_args__ == ("number", "source", "counts", "text")


def test_values_by_position_by_name_and_by_default():
    site = Site(3, counts={"load": 1})
    assert (site.number, site.source, site.counts, site.text) == (3, "main.cu", {"load": 1}, "")
    assert site.odd
    assert Site(3, "a.cu", {}, "b") == Site(text="b", counts={}, source="a.cu", number=3)
    assert Site.source == "main.cu" and not hasattr(Site, "counts")


@pytest.mark.parametrize(
    "arguments, named",
    [((), {}), ((), {"source": "a"}), ((1, "a", {}, "", 5), {}), ((1,), {"number": 2}), ((1,), {"site": 2})],
)
def test_arguments_that_do_not_fit(arguments, named):
    with pytest.raises(TypeError, match=r"Site\(\)"):
        Site(*arguments, **named)


def test_each_object_has_its_own_default():
    one, other = Site(1), Site(2)
    one.counts["load"] = 1
    assert other.counts == {}


def test_a_record_is_a_value():
    assert Site(1) == Site(1, text="not compared") != Site(2)
    assert Site(1) != Checked(1) and Checked(1) != 1
    assert hash(Checked(1)) == hash(Checked(1))
    assert len({Checked(1), Checked(1), Checked(2)}) == 2
    with pytest.raises(TypeError):
        hash(Site(1))  # a dict has no hash
    site = Site(1)
    with pytest.raises(AttributeError, match=r"Site\.number"):
        site.number = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match=r"Site\.number"):
        del site.number


def test_a_mutable_record_is_an_object():
    total = Sum()
    total.value += 2
    total.seen.append(2)
    assert (total.value, total.seen) == (2, [2])
    assert Sum() != Sum() and len({Sum(), Sum()}) == 2


def test_repr():
    assert repr(Site(1, text="hidden")) == "Site(number=1, source='main.cu', counts={})"


def test_values_are_checked():
    with pytest.raises(ValueError):
        Checked(-1)
    with pytest.raises(ValueError):
        replace(Checked(1), value=-1)


def test_replace_and_asdict_take_records_and_dataclasses():
    site = Site(1, text="kept")
    changed = replace(site, number=2)
    assert (changed.number, changed.text, site.number) == (2, "kept", 1)
    with pytest.raises(TypeError):
        replace(site, site=2)  # type: ignore[call-arg]
    assert replace(Statement("ld", site), name="st") == Statement("st", site)
    plain = {"number": 1, "source": "main.cu", "counts": {}, "text": "kept"}
    assert asdict(Statement("ld", site)) == {"name": "ld", "site": plain}
    assert asdict(Sum(1, [site])) == {"value": 1, "seen": [plain]}  # type: ignore[list-item]


def test_copies_and_patterns():
    site = Site(1, counts={"load": 1})
    assert pickle.loads(pickle.dumps(site)) == copy.deepcopy(site) == site
    match site:
        case Site(number, source=source):
            assert (number, source) == (1, "main.cu")
        case _:
            pytest.fail("no match")


def test_the_library_declares_records_as_records():
    """A dataclass takes time when its module is imported. Only what exists in large numbers, and has slots, is a dataclass."""
    others = []
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = map(ast.unparse, node.decorator_list) if isinstance(node, ast.ClassDef) else ()
            if any("dataclass" in d and "transform" not in d and "slots=True" not in d for d in decorators):
                others.append(f"{path}: {node.name}")  # type: ignore[attr-defined]
    assert others == []


def test_functions_for_dataclasses_are_not_used():
    """mypy takes a record for a dataclass, but `dataclasses.replace` refuses it."""
    files = [path for top in (LIBRARY, *OTHERS) for path in top.rglob("*.py") if path.name != "record.py"]
    text = "\n".join(map(Path.read_text, files))
    imported = re.findall(r"^ *from dataclasses import (.*)$", text, re.MULTILINE)
    assert {name for line in imported for name in line.split(", ")} <= {"dataclass", "field"}
    assert not re.search(r"\bdataclasses\.(replace|asdict|astuple|fields)\(", text)
