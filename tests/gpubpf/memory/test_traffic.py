"""From cells to numbers and words. What device programs put into cells is tested in tests/tools/test_memtrace_device.py."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from gpubpf.inject.values import LINE, Site
from gpubpf.memory import traffic, traffic_text, updates
from gpubpf.memory.traffic import BROADCAST, GATHER, PART, SHIFTED, SINGLE, STRIDED, UNIT
from gpubpf.memory.updates import Updates
from gpubpf.record import replace
from gpubpf.records import kernel_shapes
from gpubpf.records.results import Instance
from gpubpf.show import table
from gpubpf_properties import generated, rare

CELL = [("requests", "<u8", (2 * PART,))] + [
    (name, "<u8")
    for name in (
        "accesses",
        "least",
        "sectors",
        "bytes",
        "steps",
        "squares",
        "longest_max",
        "shortest_max",
        "gaps",
        "contention_max",
        "addresses",
        "uncounted_max",
    )
]
IMAGE = [("requests", "<u8"), ("accesses", "<u8")]
BANKED = [("cell", CELL), ("phases", "<u8"), ("ways", "<u8"), ("ways_max", "<u8")]


def site(
    number=0, kind="load", space="global", width=4, source="dir/app.cu", line=12, opcode="ld.global.f32"
):
    return Site(number, "k", 40 + number, source, line, "access", opcode, kind, space, width)


def cell(requests=(), **values):
    """One cell as a dictionary; `requests` are (pattern, how many)."""
    counted = [0] * (2 * PART)
    for pattern, count in dict(requests).items():
        counted[pattern] = count
    fields = [name for name, *_ in CELL[1:]] + ["phases", "ways", "ways_max"]
    return {"requests": counted, **dict.fromkeys(fields, 0), **values}


def found(requests, *, at=None, space="global", **values):
    return traffic.site_traffic(at or site(space=space), space, cell(requests, **values))


def kernel(*sites, unknown=0):
    return traffic.KernelTraffic(7, "app", 0, "_Z5scalePf", sites, (10, 32), 2, unknown)


# --- numbers ---


def test_shares_that_do_not_add_up_say_of_what_they_are():
    mixed = kernel(
        found({UNIT: 4}, accesses=128), found({UNIT: 4}, space="shared", accesses=128, phases=4, ways=4)
    )
    text = "\n".join(traffic_text.lines(mixed, "k", True))
    assert " 100 %" in text and "(100 %)" in text and "SHARE in parentheses: of" in text
    assert "(100 %)" not in "\n".join(traffic_text.lines(kernel(found({UNIT: 4}, accesses=128)), "k", True))


def test_loads_of_loops_that_wait():
    """Most of the requests, of one address each, with an opcode that sees what other threads store."""
    other = found({UNIT: 500})

    def said(one):
        return [
            s
            for s in traffic_text.findings(kernel(one, other), traffic_text.group_sites([one, other]))
            if "waits" in s
        ]

    spin = site(opcode="ld.acquire.gpu.u32")
    (text,) = said(found({SINGLE: 4500}, at=spin))
    assert text.endswith(
        ": 90 % of all requests are ld.acquire of one address; perhaps a loop waits for other threads there"
    )
    assert said(found({BROADCAST: 4500}, at=site(opcode="ld.volatile.global.u32")))
    assert (
        not said(found({SINGLE: 4500}))
        and not said(found({UNIT: 4500}, at=spin))
        and not said(found({SINGLE: 400}, at=spin))
    )


def test_several_places_that_wait_are_one_finding():
    """Such as two `grid.sync()` on two lines."""
    spins = [
        found({SINGLE: count}, at=site(line=line, opcode="ld.acquire.gpu.u32"))
        for line, count in ((8, 4000), (11, 5000), (20, 300))
    ]
    sites = [*spins, found({UNIT: 1000}, at=site(line=30))]
    (text,) = [
        s for s in traffic_text.findings(kernel(*sites), traffic_text.group_sites(sites)) if "wait" in s
    ]
    assert text == (
        "app.cu:11 (also app.cu:8): 90 % of all requests are ld.acquire of one address;"
        " perhaps loops wait for other threads there"
    )


def test_a_line_that_waits_may_also_load_something_else():
    """`while (*flag < limit[0])` in one thread: the lanes of the warp have no work to share."""

    def said(*sites):
        rows = traffic_text.group_sites(sites)
        assert len(rows) == 1
        return [s for s in traffic_text.findings(kernel(*sites), rows) if "waits" in s or "alone" in s]

    spin, limit = found({SINGLE: 6000}, at=site(opcode="ld.volatile.global.u32")), found({SINGLE: 6000})
    (text,) = said(spin, limit)
    assert ": 50 % of all requests are ld.volatile of one address; perhaps a loop waits" in text
    assert not said(spin, found({SINGLE: 7000}))
    (text,) = said(limit)
    assert "by one lane alone" in text


def test_whole_warps_are_worked_out_from_the_width():
    one = found({UNIT: 10, SHIFTED: 4, BROADCAST: 2, SINGLE: 3})
    assert (one.requests, one.accesses, one.bytes) == (19, 16 * 32 + 3, 4 * (16 * 32 + 3))
    assert one.sectors == 10 * 4 + 4 * 5 + 2 + 3
    assert one.least == 16 * 4 + 3
    assert one.pattern == "mixed" and one.contention == 32
    wide = found({UNIT: 1, SHIFTED: 1}, at=site(width=16))
    assert (wide.sectors, wide.least, wide.pattern) == (33, 32, "unit")


def test_parts_say_all_themselves():
    one = found({PART + UNIT: 2}, accesses=32, least=4, sectors=4, contention_max=1)
    assert (one.requests, one.accesses, one.sectors, one.least, one.ratio) == (2, 32, 4, 4, 1)
    assert one.pattern == "unit" and one.contention == 1


def test_local_memory_lies_by_lanes():
    one = found({BROADCAST: 5, SINGLE: 2}, space="local", at=site(space="local", width=8))
    assert one.sectors == 5 * 8 + 2 * 2  # two words of 32 lanes, eight lanes to a sector
    assert found({BROADCAST: 5}, space="local", at=site(space="local", width=1)).sectors == 5 * 4


def test_banks():
    one = found({STRIDED: 3, UNIT: 1, SINGLE: 1}, space="shared", ways=96, ways_max=32, steps=3 * 128)
    assert (one.phases, one.ways, one.ways_max) == (5, 98, 32)
    assert one.conflicts == 93 and one.wasted == 0 and one.moved == 98 * 128
    assert one.record(1)["wasted_bytes"] is None
    assert found({UNIT: 1}, space="shared", at=site(space="shared", width=16)).phases == 4
    assert found({UNIT: 1}).phases == 0


@pytest.mark.parametrize("strides", [[8] * 5, [-3] * 4, [1 << 27] * 3, [2]])
def test_one_stride_is_told_from_sums(strides):
    steps = sum(4 * s for s in strides) % 2**64
    squares = sum((4 * s) ** 2 for s in strides) % 2**64
    assert traffic.common_stride(len(strides), steps, squares, 4) == strides[0]


@pytest.mark.parametrize("strides", [[8, 9], [2, -2], [1, 3, 2], [5, 5, 5, 6]])
def test_several_strides_are_none(strides):
    steps = sum(4 * s for s in strides) % 2**64
    squares = sum((4 * s) ** 2 for s in strides)
    assert traffic.common_stride(len(strides), steps, squares, 4) is None
    one = found({STRIDED: len(strides)}, steps=steps, squares=squares)
    assert one.pattern == "mixed" and one.stride is None


def test_sums_that_wrap_around_make_no_common_stride():
    steps, count = (1 << 16, 1 << 17), 1 << 16
    sums = {"steps": count * sum(steps), "squares": count * sum(s * s for s in steps) % 2**64}
    lengths = {"longest_max": steps[1], "shortest_max": 2**64 - 1 - steps[0]}
    assert found({STRIDED: 2 * count}, **sums, **lengths).stride is None
    sums = {"steps": count * steps[0], "squares": count * steps[0] ** 2 % 2**64}
    lengths["longest_max"] = steps[0]
    assert found({STRIDED: count}, **sums, **lengths).stride == steps[0] // 4


def test_small_copies_of_whole_warps_in_shared_memory_have_16_bytes():
    copied = site(kind="async", space="shared", width=0)
    one = found(
        {UNIT: 1, SINGLE: 2, PART + GATHER: 1}, at=copied, space="shared", accesses=3, bytes=184, ways=3
    )
    assert (one.accesses, one.bytes) == (37, 184 + 32 * 16)


def test_what_varies_in_width_has_its_bytes_counted():
    one = found(
        {PART + UNIT: 2}, at=site(kind="async", width=0), accesses=64, bytes=1000, least=32, sectors=32
    )
    assert one.bytes == 1000 and one.width == 16
    copied = {"at": site(kind="async", width=0), "steps": 32, "squares": 32**2, "least": 4, "sectors": 32}
    assert found({PART + STRIDED: 1}, accesses=16, bytes=64, **copied).pattern == "stride 8"
    assert found({PART + STRIDED: 1}, accesses=16, bytes=100, **copied).pattern == "mixed"


def test_pattern_of_single_lanes_alone():
    assert found({SINGLE: 9}).pattern == "broadcast"
    # Both are broadcast in JSON, but only one of them is for people.
    rows = traffic_text.group_sites(
        [found({SINGLE: 9}), found({BROADCAST: 5}), found({BROADCAST: 1, SINGLE: 2})]
    )
    assert [(row.pattern, len(row.sites)) for row in rows] == [("one lane", 1), ("broadcast", 2)]
    assert found({SINGLE: 9, GATHER: 1}, sectors=32).pattern == "gather"


def test_of_textures_only_requests_and_lanes_are_known():
    image = site(3, space="texture", opcode="tex.level.2d.v4.f32.f32", width=16)
    cells = array(2, 4, IMAGE)
    cells["requests"][:, 3], cells["accesses"][:, 3], cells["requests"][0, 1] = (2, 5), (60, 160), 1
    (one,) = traffic.Traffic().read(Session({"unaddressed_cells": [cells]}, {3: image}), since_last=False)
    (found,) = one.sites
    assert (found.space, found.requests, found.accesses, found.bytes, one.unknown) == (
        *("texture", 7, 220),
        *(16 * 220, 1),
    )
    record, total = found.record(one.share([found])), one.record()
    unknown = ("sectors", "sectors_least", "ratio", "pattern", "patterns", "gaps", "contention_max", "share")
    assert {record[name] for name in (*unknown, "wasted_bytes", "bank_ways", "strides")} == {None}
    assert record["lanes_mean"] == round(220 / 7, 6)
    assert (total["texture_requests"], total["surface_requests"], total["requests"]) == (7, 0, 0)
    assert (total["bytes"], total["sectors"], total["ratio"]) == (0, 0, None)
    (cell,) = (row.cells(0) for row in traffic_text.group_sites(one.sites))
    assert (cell["OP"], cell["RATIO"], cell["PATTERN"], cell["SHARE"]) == ("tex.2d", "-", "-", "-")
    assert any(
        "addresses, and so sectors" in s
        for s in traffic_text.findings(one, traffic_text.group_sites(one.sites))
    )


def test_textures_of_one_line_share_a_row_if_they_are_the_same_instruction():
    def image(number, opcode, **more):
        at = site(number, space="texture", opcode=opcode, **more)
        return traffic.site_traffic(at, "texture", {"requests": 1, "accesses": 32})

    rows = traffic_text.group_sites(
        [image(0, "tex.2d.v4.f32.f32"), image(1, "tex.2d.v4.f32.s32"), image(2, "tld4.r.2d.v4.f32.f32")]
    )
    assert [(row.cells(0)["OP"], len(row.sites)) for row in rows] == [("tex.2d", 2), ("tld4.2d", 1)]
    far = [image(n, "tex.3d.v4.f32.f32", line=n) for n in range(30)]
    assert "6 more places; -v shows them" in list(traffic_text.lines(kernel(*far), "k", False))


# --- cells ---


def array(shards, sites, dtype=CELL):
    return np.zeros((shards, sites), np.dtype(dtype))


def test_shards_are_put_together():
    cells = array(4, 2, BANKED)
    cells["cell"]["requests"][:, 1, UNIT] = [1, 2, 3, 1 << 40]
    cells["ways_max"][:, 1] = [3, 9, 1, 0]
    cells["cell"]["contention_max"][2, 0] = 5
    summed = traffic.sum_shards(cells)
    assert summed["requests"][1, UNIT] == 6 + (1 << 40)
    assert summed["ways_max"].tolist() == [0, 9] and summed["contention_max"].tolist() == [5, 0]
    twice = traffic.add_cells(summed, summed)
    assert twice["requests"][1, UNIT] == 2 * summed["requests"][1, UNIT] and twice["ways_max"][1] == 9


class Session:
    """What a session gives: instances by map, sites by kernel."""

    def __init__(self, maps, sites, launches=3):
        self.maps, self.known, self.launches = maps, sites, launches

    def has_map(self, name):
        return name in self.maps

    def instances(self, name):
        definition = None
        return [
            _Read(1, "app", 0, "_Z5scalePf", cells, definition, launches=self.launches)
            for cells in self.maps.get(name, [])
        ]

    def sites(self, mangled, pid, build):
        return self.known


@dataclasses.dataclass(frozen=True)
class _Read:
    pid: int
    comm: str
    gpu: int
    mangled: str
    array: np.ndarray
    definition: object
    process: int = 0
    launches: int = 3
    registers_before: int | None = None
    registers_after: int | None = None
    spilled: int = 0
    wave: int | None = None
    build: int = 0


def test_since_the_last_time():
    assert {"pid", "comm", "gpu", "mangled", "array", "process"} <= {
        *dir(Instance),
        *Instance.__annotations__,
    }
    cells = array(2, 2)
    cells["requests"][0, 0, UNIT] = 5
    session = Session({"global_cells": [cells]}, {0: site()})
    reader = traffic.Traffic()
    (first,) = reader.read(session, since_last=True)
    assert first.sites[0].requests == 5 and first.launches == 3
    assert reader.read(session, since_last=True) == []
    cells["requests"][1, 0, UNIT] = 2
    ((second,)) = reader.read(session, since_last=True)
    assert second.sites[0].requests == 2
    assert traffic.Traffic().read(session, since_last=False)[0].sites[0].requests == 7


def test_what_is_not_part_of_what_was_is_all_new():
    cells = array(1, 2)
    cells["requests"][0, 0, UNIT] = 5
    session = Session({"global_cells": [cells]}, {0: site()})
    reader = traffic.Traffic()
    reader.read(session, since_last=True)
    session.maps["global_cells"] = [array(1, 3)]
    session.maps["global_cells"][0]["requests"][0, 0, UNIT] = 1
    assert reader.read(session, since_last=True)[0].sites[0].requests == 1


def test_nonsense_of_a_process_is_no_crash():
    rng = np.random.default_rng(1)
    known = {
        n: site(n, kind, width=width)
        for n, (kind, width) in enumerate([("load", 4), ("async", 0), ("atomic", 16)])
    }
    for _ in range(50):
        maps = {
            name: [rng.integers(0, 256, 2 * 4 * np.dtype(dtype).itemsize, np.uint8).view(dtype).reshape(2, 4)]
            for name, dtype in (
                ("global_cells", CELL),
                ("local_cells", CELL),
                ("shared_cells", BANKED),
                ("unaddressed_cells", IMAGE),
            )
        }
        if rng.random() < 0.5:
            for (cells,) in maps.values():
                cells[rng.choice(cells.dtype.names)] = 0
        reader = traffic.Traffic()
        for one in reader.read(Session(maps, known), since_last=True):
            assert "\n".join(traffic_text.lines(one, "k", False))
            assert [s.record(one.share([s])) for s in one.sites] and one.record()


def test_more_launches_than_there_can_be_are_no_crash():
    cells = array(1, 1)
    cells["requests"][0, 0, UNIT] = 1
    session = Session({"global_cells": [cells]}, {0: site()}, launches=1 << 70)
    (found,) = traffic.Traffic().read(session, since_last=True)
    assert found.launches == (1 << 64) - 1


def test_a_generic_place_has_a_row_for_each_space_and_an_unknown_one_none():
    cells, shared = array(1, 2), array(1, 2, BANKED)
    cells["requests"][0, 0, UNIT] = 3
    cells["requests"][0, 1, UNIT] = 4
    shared["cell"]["requests"][0, 0, UNIT] = 2
    session = Session({"global_cells": [cells], "shared_cells": [shared]}, {0: site(space="generic")})
    (one,) = traffic.Traffic().read(session, since_last=False)
    assert [(s.space, s.requests) for s in one.sites] == [("global", 3), ("shared", 2)]
    assert one.unknown == 4
    assert "left out: 4 requests" in "\n".join(traffic_text.lines(one, "scale", False))


def test_builds_with_different_sites_are_added_up():
    large, small = array(1, 6), array(1, 2)
    large["requests"][0, :, UNIT] = 100
    small["requests"][0, :, UNIT] = 7
    session = Session({"global_cells": [large, small]}, {n: site(n) for n in range(2, 6)})
    (one,) = traffic.Traffic().read(session, since_last=False)
    assert [(s.site.number, s.requests) for s in one.sites] == [(n, 100) for n in range(2, 6)]
    assert one.unknown == 214  # of sites that differ between the builds


def test_builds_have_their_own_sites():
    """Also in an interval in which the second one is launched for the first time."""
    cells, more = array(1, 3), array(1, 2)
    cells["requests"][0, :, UNIT] = 2, 0, 6
    more["requests"][0, :, UNIT] = 8, 16
    first = [site(0, line=7), replace(site(1, line=9), like=0)]
    second = [site(0, line=8), site(1, line=9)]
    session = Session({"global_cells": [cells]}, None)
    session.sites = lambda mangled, pid, build: dict(enumerate((first, second)[build]))
    reader = traffic.Traffic()

    def read():
        (one,) = reader.read(session, since_last=True)
        assert len({s.site.number for s in one.sites}) == len(one.sites)
        return sorted((s.site.source_line, s.requests) for s in one.sites), one.unknown

    assert read() == ([(7, 2), (9, 2)], 6)
    session.instances = lambda name: [
        _Read(1, "app", 0, "_Z5scalePf", cells, None, build=0),
        _Read(1, "app", 0, "_Z5scalePf", more, None, build=1),
    ]
    cells["requests"][0, :, UNIT] += np.array([1, 0, 2], np.uint64)
    assert read() == ([(7, 1), (8, 8), (9, 1), (9, 16)], 2)


def test_sites_of_machine_code_are_those_that_were_seen():
    """Kernels without PTX have no known sites, at most source lines."""
    cells, seen = array(2, 6), np.zeros((2, 6), [("width_max", "u8"), ("kind_max", "u8")])
    cells["requests"][0, :, UNIT] = 1, 0, 0, 8, 16, 32
    for shard, number, width, kind in ((0, 0, 4, 1), (1, 3, 8, 2), (0, 4, 4, 3), (1, 5, 4, 9)):  # 9: no kind
        seen[shard, number] = width, kind
    lines = [Site(n, "f", 0, "a.cu", 10 + n, LINE, offset=16 * n) for n in (2, 4)]

    def read(known):
        session = Session({"global_cells": [cells], "seen": [seen]}, known)
        (one,) = traffic.Traffic().read(session, since_last=False)
        return [(s.where, s.site.kind, s.space, s.width, s.requests) for s in one.sites], one.unknown

    found = [
        ("instruction +0x0", "load", "global", 4, 1),
        ("instruction +0x30", "store", "global", 8, 8),
        ("instruction +0x40", "atomic", "global", 4, 16),
    ]
    assert read({}) == (found, 32)
    at_lines = [place for place, *_ in read({line.number: line for line in lines})[0]]
    assert at_lines == ["instruction +0x0", "a.cu:12", "a.cu:14"]
    with_ptx = {3: replace(site(3), source="", source_line=0)}  # the program has PTX, whose sites are known
    assert [place for place, *_ in read(with_ptx)[0]] == [kernel_shapes.site_name(with_ptx[3])]


def test_updates_of_builds_that_use_a_number_for_different_sites_are_left_out():
    updates = {0: Updates({0x10: 1}), 1: Updates({0x20: 2}), 2: Updates({0x30: 3})}
    found = traffic._renumber_updates(updates, [{0: 0, 1: 1}, {0: 0, 1: 3, 2: 2}])
    assert found == {0: updates[0], 2: updates[2]}


def test_constants_are_told_from_global_memory():
    cells = array(1, 1)
    cells["requests"][0, 0, BROADCAST] = 1
    rows, _ = traffic.decode_cells({"global_cells": traffic.sum_shards(cells)}, {0: site(space="const")})
    assert rows[0].space == "const"


# --- records and words ---


def test_the_record_has_what_is_promised():
    one = found({STRIDED: 4}, steps=128, squares=4096, sectors=128)
    record = one.record(0.5)
    promised = "site op space width source ptx_line requests accesses bytes sectors sectors_least ratio lanes_mean pattern bank_ways"
    assert {*promised.split(), "contention_max"} <= {*record}
    assert (record["ratio"], record["pattern"], record["lanes_mean"]) == (8, "stride 8", 32)
    assert record["source"] == "app.cu:12" and record["bank_ways"] is None
    assert record["patterns"] == {"stride": 4} and record["wasted_bytes"] == (128 - 16) * 32


def test_copies_of_a_place_are_one_row():
    same = [replace(found({UNIT: 2}), site=site(n)) for n in range(3)]
    other = replace(found({GATHER: 2}, sectors=64), site=site(3))
    rows = traffic_text.group_sites([*same, other])
    assert [len(row.sites) for row in rows] == [1, 3]  # the waste first
    assert rows[1].cells(0.25)["REQUESTS"] == "6"
    bare = [replace(one, site=site(n, source="")) for n, one in enumerate(same)]
    assert len(traffic_text.group_sites(bare)) == 3


def test_bank_conflicts_cost_time_and_are_no_wasted_bytes():
    slow = found({STRIDED: 4}, space="shared", ways=128, ways_max=32)
    unit = replace(found({UNIT: 4}), site=site(1, line=7))
    text = "\n".join(traffic_text.lines(kernel(unit, slow), "k", False))
    assert "app.cu:12 loses the most in shared memory: 32-way bank conflicts" in text
    assert "wastes the most" not in text
    assert " ".join(text.split()).startswith(
        "k: memory traffic app (pid 7), 2 launches, 8 requests at 2 places global and local memory: asked for 512 B, moved 512 B;"
        " contiguous lanes would move 512 B (1.00x) shared memory takes 32.00 times"
    ), text
    wide = replace(found({STRIDED: 4}, sectors=128), site=site(1, line=7))
    text = "\n".join(traffic_text.lines(kernel(wide, replace(slow, ways=100)), "k", False))
    assert "app.cu:7 wastes the most: 100 % of 3.50 KB" in text
    assert "app.cu:12 loses the most in shared memory: up to 32-way bank conflicts" in text


def test_what_contiguous_lanes_would_move_is_told():
    part = found({PART + UNIT: 3}, accesses=57, least=12, sectors=18)
    text = "\n".join(traffic_text.lines(kernel(part), "k", False))
    assert "\n  asked for 228 B, moved 576 B; contiguous lanes would move 384 B (1.50x)\n" in text


def test_gathered_lanes_that_use_whole_sectors_are_rows():
    def cells(one):
        (row,) = traffic_text.group_sites([one])
        return row.cells(1)["PATTERN"]

    rows = found({GATHER: 2}, sectors=8)
    assert (rows.ratio, cells(rows), rows.record(1)["pattern"]) == (1, "rows", "gather")
    assert cells(found({GATHER: 2}, sectors=9)) == cells(found({GATHER: 2}, sectors=2)) == "gather"
    assert cells(found({GATHER: 2}, space="shared", ways=2)) == "gather"


def test_the_table_fits_a_terminal():
    long = site(kind="atomic", space="shared", source="a_file_with_a_long_name_of_its_own.cu", line=123456)
    one = found(
        {STRIDED: 10**12},
        at=long,
        space="shared",
        ways=10**13,
        ways_max=32,
        steps=10**12 * 4096,
        squares=10**12 * 4096**2,
    )
    other = found(
        {PART + STRIDED: 10**12},
        accesses=5 * 10**12,
        least=10**12,
        sectors=10**13,
        steps=8 * 10**12,
        squares=64 * 10**12,
    )
    text = list(traffic_text.lines(kernel(one, other), "k" * 90, False))
    assert max(map(len, text)) <= 80
    assert any("SHARE" in line for line in text)
    assert any("LANES" in line for line in traffic_text.lines(kernel(one, other), "k", True))


def test_shares_are_of_shared_memory_and_of_the_rest():
    one, two = found({UNIT: 3}), found({UNIT: 1})
    banked = found({UNIT: 1}, space="shared")
    whole = kernel(one, two, banked)
    assert [whole.share([s]) for s in (one, two, banked)] == [0.75, 0.25, 1]
    record = whole.record()
    assert (record["sectors"], record["requests"], record["shared_requests"]) == (16, 4, 1)


def test_what_moved_is_more_or_less_than_what_was_asked_for():
    """Lanes that share addresses are no reason for more bytes, which those of few lanes are: they move whole sectors."""
    shared, few = found({BROADCAST: 1}), found({PART + UNIT: 40}, accesses=160, least=40, sectors=40)
    for sites, said in (
        ((shared,), "asked for 128 B, moved 32 B; lanes share addresses"),
        ((shared, few), "asked for 768 B, moved 1.28 KB"),
    ):
        assert said in traffic_text.findings(kernel(*sites), traffic_text.group_sites(sites))


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (found({STRIDED: 1}, steps=32, squares=1024, sectors=32), "stride 8: lanes next to each other in x are 32 bytes apart, so 4"),
        (found({STRIDED: 8}, steps=8 * 1024, squares=8 * 1024**2, sectors=128), "each other in y are closer: swap x and y"),
        (found({STRIDED: 7, GATHER: 1}, steps=7 * 1024, squares=7 * 1024**2, sectors=128), "swap x and y"),
        (found({STRIDED: 8}, steps=8 * 1024, squares=8 * 1024**2, sectors=256), "let them access neighbouring elements"),
        (found({STRIDED: 8}, steps=8 * 16, squares=8 * 16**2, sectors=128), "let them access neighbouring elements"),
        (found({STRIDED: 1}, steps=8, squares=64, sectors=8), "16 of every 32 bytes"),
        (found({PART + STRIDED: 1}, steps=8, squares=64, accesses=12, least=2, sectors=4), "12 of every 32 bytes"),
        (found({SHIFTED: 1}), "align"),
        (found({SHIFTED: 1, UNIT: 3}), "align"),
        (found({SHIFTED: 1, UNIT: 9}), None),
        (found({SHIFTED: 1}, space="const"), "loads constants from several"),
        (found({BROADCAST: 1}, space="const"), None),
        (found({PART + UNIT: 1}, space="local", accesses=32, least=4, sectors=32), "offsets that differ by lane"),
        (found({PART + BROADCAST: 1}, at=site(width=8), space="local", accesses=2, least=1, sectors=2), None),
        (found({SINGLE: 1}, at=site(width=8), space="local"), None),
        (found({STRIDED: 1}, space="shared", ways=32, ways_max=32, steps=128, squares=128**2), "pad each row by one element"),
        (found({STRIDED: 1}, at=site(width=16), space="shared", ways=8, ways_max=8, steps=256, squares=256**2), "row by 16 bytes"),
        (found({STRIDED: 1}, space="shared", ways=16, ways_max=32, steps=128, squares=128**2), "up to 32-way bank conflicts"),
        (found({STRIDED: 1}, space="shared", ways=2, ways_max=2, steps=8, squares=64), "an odd stride avoids them"),
        (found({BROADCAST: 1}, at=site(kind="atomic", opcode="atom.global.add.u32")), "update from one lane"),
        (found({BROADCAST: 1}, at=site(kind="atomic", opcode="atom.global.cas.b32")), None),
        (found({BROADCAST: 1}, at=site(kind="atomic", opcode="flat_atomic_swap")), None),
        (found({UNIT: 1}), None),
        (found({GATHER: 1}, sectors=32), "loads from scattered addresses: 4 of every 32 bytes moved are used"),
        (found({GATHER: 1}, at=site(kind="store"), sectors=32), "collect in shared memory"),
        (found({GATHER: 1}, at=site(kind="atomic"), sectors=32), None),
        (found({GATHER: 1}, sectors=8), None),
        (found({SINGLE: 9, GATHER: 1}, sectors=32), None),
        (found({STRIDED: 2}, steps=24, squares=320, sectors=20), None),
        (found({BROADCAST: 1}), None),
    ],
)  # fmt: skip
def test_advice_where_it_is_certain(one, said):
    text = traffic_text.advice([one])
    assert said in text if said else text is None


def test_neighbours_that_a_stencil_loads_are_not_misaligned():
    """Those beside an element start inside a sector if the element does not. A store has no such neighbour."""
    beside, element = found({SHIFTED: 4}), found({UNIT: 4})
    assert "align" in str(traffic_text.advice([beside], [beside]))
    assert traffic_text.advice([beside], [beside, element]) is None
    store = found({SHIFTED: 4}, at=site(kind="store"))
    assert "align" in str(traffic_text.advice([store], [store, element]))


@pytest.mark.parametrize("kind", ["store", "atomic"])
def test_neighbours_without_the_element_are_not_misaligned(kind):
    """A gradient loads the elements on both sides of one, a convolution loads all in a loop. Results at aligned addresses show that
    the arrays may be aligned."""
    result = found({UNIT: 4}, at=site(2, kind=kind))
    left, right = (found({SHIFTED: 4}, at=site(n)) for n in (0, 1))
    assert traffic_text.advice([left, right], [left, right, result]) is None
    loop = found({UNIT: 1, SHIFTED: 7})
    assert traffic_text.advice([loop], [loop, result]) is None
    # One load for each result, always inside a sector: the array is misaligned. So are rows that are not a multiple of a sector.
    assert "align" in str(traffic_text.advice([left], [left, result]))
    inside = found({UNIT: 1, SHIFTED: 7}, at=site(2, kind="store"))
    assert "align" in str(traffic_text.advice([loop], [loop, inside]))


def test_strides_that_change_get_the_advice_of_strides():
    """A matrix of another size in another launch, or another loop."""
    changing = found(
        {STRIDED: 2},
        steps=1536,
        squares=512**2 + 1024**2,
        sectors=64,
        longest_max=1024,
        shortest_max=2**64 - 1 - 512,
    )
    assert changing.stride is None and changing.pattern == "mixed"
    text = str(traffic_text.advice([changing]))
    assert (
        "with changing strides: lanes next to each other in x are 512 to 1,024 bytes apart, so 4 of every 32"
        in text
    )
    closer = found(
        {STRIDED: 2},
        steps=1028,
        squares=4**2 + 1024**2,
        sectors=36,
        longest_max=1024,
        shortest_max=2**64 - 1 - 4,
    )
    assert traffic_text.advice([closer]) is None


def test_the_rest_of_an_unrolled_loop_may_have_another_pattern():
    copies = [
        found({STRIDED: 200}, at=site(n), steps=200 * 28, squares=200 * 28**2, sectors=200 * 28)
        for n in range(4)
    ]
    rest = found({GATHER: 20}, at=site(4), sectors=400)
    assert "with stride 7: lanes next to each other in x are 28 bytes apart" in str(
        traffic_text.advice([*copies, rest])
    )
    text = "\n".join(traffic_text.lines(kernel(*copies, rest), "k", False))
    assert "stride 7" in text and "scattered" not in text
    assert "stride 7" not in str(traffic_text.advice([copies[0], replace(rest, requests=100, sectors=2000)]))


def test_idle_lanes_may_hide_a_stride_in_rows_of_a_block():
    all_lanes = found({GATHER: 4}, sectors=128)
    assert "scattered addresses: 4 of every 32 bytes moved are used; sort the indices, or" in str(
        traffic_text.advice([all_lanes])
    )
    half = found({PART + GATHER: 4}, accesses=64, sectors=64, least=8)
    assert "let neighbouring lanes access neighbouring elements; if indices decide, sort them, or" in str(
        traffic_text.advice([half])
    )


def test_stores_of_an_unrolled_loop_to_rows_that_are_not_aligned():
    """One copy of eight begins at a sector, by chance."""
    copies = [found({UNIT: 4} if n == 2 else {SHIFTED: 4}, at=site(n, kind="store")) for n in range(8)]
    assert "stores to neighbouring elements, but warps start inside a 32-byte sector" in str(
        traffic_text.advice(copies)
    )
    assert traffic_text.advice([copies[2]] * 5 + copies[:3]) is None


def test_loads_that_hardly_matter_get_no_advice():
    def said(much):
        few = found({STRIDED: 1}, at=site(0), steps=128, squares=128**2, sectors=32)
        sites = [few, found({UNIT: much}, at=site(1, kind="store", line=13))]
        return "loads from memory with stride" in "\n".join(traffic_text.lines(kernel(*sites), "k", False))

    assert said(100) and not said(10000)


def test_a_line_that_loads_and_stores_wastes_as_one():
    def wasteful(number, kind, line, sectors):
        at = site(number, kind=kind, line=line)
        return found({STRIDED: 10}, at=at, steps=1280, squares=163840, sectors=sectors)

    sites = [wasteful(0, "load", 12, 200), wasteful(1, "store", 12, 200), wasteful(2, "load", 20, 320)]
    (text,) = (
        s
        for s in traffic_text.findings(kernel(*sites), traffic_text.group_sites(sites))
        if "wastes the most" in s
    )
    assert text.startswith("app.cu:12 wastes the most: 5")


def test_x_and_y_are_not_swapped_in_a_transpose():
    store = found({STRIDED: 8}, at=site(kind="store"), steps=8 * 1024, squares=8 * 1024**2, sectors=128)
    load = found({UNIT: 8}, at=site(1))
    assert "swap x and y" in str(traffic_text.advice([store], [store]))
    assert "go through a tile in shared memory" in str(traffic_text.advice([store], [store, load]))


def test_one_lane_that_works_for_all():
    other = found({UNIT: 300})

    def said(one):
        rows = traffic_text.group_sites([one, other])
        return [s for s in traffic_text.findings(kernel(one, other), rows) if "one lane alone" in s]

    (sentence,) = said(found({SINGLE: 2700}, at=site(1)))
    assert (
        sentence
        == "app.cu:12: 90 % of all requests are by one lane alone; let the lanes of a warp share the work"
    )
    assert not said(found({SINGLE: 900}, at=site(1)))  # perhaps one for each block
    assert not said(found({SINGLE: 2700}, at=site(1, kind="atomic", opcode="atom.global.add.u32")))
    assert not said(found({SINGLE: 2700}, at=site(1, opcode="ld.volatile.global.u32")))  # waits for others


def test_findings_are_not_about_little():
    much, little = (found({STRIDED: 1}, steps=32, squares=1024, sectors=n) for n in (32, 5))
    other = found({UNIT: 25})
    assert any(
        "wastes the most" in s
        for s in traffic_text.findings(kernel(much, other), traffic_text.group_sites([much, other]))
    )
    text = list(traffic_text.findings(kernel(little, other), traffic_text.group_sites([little, other])))
    assert not any("wastes" in sentence for sentence in text)


def test_files_of_the_same_name_and_long_names_are_told_apart():
    names = (
        "/x/one/util.cuh",
        "/x/two/util.cuh",
        "vectorized_gather_kernel.cuh",
        "vectorized_scatter_kernel.cuh",
    )
    strided = {"steps": 32, "squares": 1024, "sectors": 32}
    sites = [found({STRIDED: 1}, at=site(n, source=name), **strided) for n, name in enumerate(names)]
    said = list(traffic_text.lines(kernel(*sites), "k", False))
    at = next(n for n, line in enumerate(said) if line.startswith("WHERE"))
    rows = {line.split()[0] for line in said[at + 1 : said.index("", at)]}
    assert len(rows) == 4 and {"one/util.cuh:12", "two/util.cuh:12"} < rows
    also = "(also two/util.cuh:12, vectorized_gather_kernel.cuh:12, vectorized_scatter_kernel.cuh:12)"
    assert also in " ".join(map(str.strip, said))


def test_the_steps_of_several_widths_are_all_said():
    narrow = found({STRIDED: 1}, steps=8, squares=64, sectors=8)
    wide = found({STRIDED: 1}, at=site(1, width=8), steps=16, squares=256, sectors=16)
    assert "lanes next to each other in x are 8 or 16 bytes apart" in str(traffic_text.advice([narrow, wide]))


def test_a_ratio_of_one_is_no_finding():
    def said(ways):
        values = {"phases": 10_000, "ways": ways, "ways_max": 2, "steps": 8, "squares": 64}
        return "\n".join(traffic_text.lines(kernel(found({STRIDED: 1}, space="shared", **values)), "k", True))

    assert "as long as without" not in said(10_001) and "1.02 times as long as without" in said(10_200)


def test_elements_of_half_a_word_need_an_odd_number_of_words():
    """A row of 33 elements, as for words, would leave conflicts."""

    def said(step):
        steps = {"steps": step, "squares": step**2}
        one = found({STRIDED: 1}, at=site(width=2), space="shared", ways=2, ways_max=2, **steps)
        return str(traffic_text.advice([one]))

    assert "neighbouring lanes are 128 bytes apart; pad each row by 4 bytes" in said(128)
    assert "neighbouring lanes are 66 bytes apart; an odd number of words (4 bytes) avoids them" in said(66)


def test_advice_is_about_all_copies_of_a_line():
    """The three loads of a stencil cannot all be aligned; any of the copies may have the bank conflicts."""
    shifted, aligned = found({SHIFTED: 4}), found({UNIT: 4}, at=site(1))
    assert traffic_text.advice([shifted, shifted]) == traffic_text.advice([shifted])
    assert traffic_text.advice([shifted, aligned]) is traffic_text.advice([aligned, shifted]) is None
    conflicts = {"steps": 128, "squares": 128**2, "space": "shared"}
    good, bad = (found({STRIDED: 1}, ways=ways, ways_max=ways, **conflicts) for ways in (1, 32))
    assert "32-way bank conflicts" in str(traffic_text.advice([good, bad]))


def test_the_same_advice_is_given_once():
    shifted, stored = found({SHIFTED: 1}, sectors=5), found({SHIFTED: 1}, at=site(kind="store"), sectors=5)
    places = [site(line=14), site(line=17), site(source="dir/other.cu"), site(source="")]
    others = [replace(shifted, site=place) for place in places]
    text = " ".join(" ".join(traffic_text.lines(kernel(shifted, stored, *others), "k", False)).split())
    assert text.count("32-byte sector") == 2
    assert "app.cu:12 loads from and stores to neighbouring elements" in text
    assert "app.cu:14 loads from neighbouring elements" in text
    assert "and the blocks (also app.cu:17, other.cu:12, PTX line 40)" in text
    again = [replace(stored, site=site(line=14, kind="store"))]
    text = " ".join(
        " ".join(traffic_text.lines(kernel(shifted, stored, others[0], *again), "k", False)).split()
    )
    assert text.count("32-byte sector") == 1 and "app.cu:12 loads from and stores to" in text
    assert text.rstrip().endswith("and the blocks (also app.cu:14)")


def test_fields_of_a_structure_may_be_one_access():
    field = found({STRIDED: 4}, steps=32, squares=256, sectors=32)
    other = replace(field, site=site(1))
    assert "; join a thread's accesses if they are side by side, or let lanes" in str(
        traffic_text.advice([field, other])
    )
    assert str(traffic_text.advice([field])).endswith(
        "so 16 of every 32 bytes moved are used; let them access neighbouring elements"
    )
    far = found({STRIDED: 4}, steps=4 * 4096, squares=4 * 4096**2, sectors=128)
    assert "join" not in str(traffic_text.advice([far, replace(far, site=site(1))]))


@pytest.mark.parametrize(("ways", "advised"), [(64, True), (28, False)])
def test_many_bank_conflicts_without_a_stride_have_a_cause(ways, advised):
    """Lanes that read two columns of a tile have no stride; 32 scattered words have 3.5 ways."""
    one = found({GATHER: 8}, space="shared", ways=ways, ways_max=16, sectors=256)
    text = "loads from shared memory with up to 16-way bank conflicts, more than scattered addresses have: pad each row"
    assert (text in str(traffic_text.advice([one]))) == advised


def test_idle_lanes_are_not_taken_for_strides():
    half = found({PART + STRIDED: 4}, accesses=64, steps=32, squares=256, sectors=16, least=8)
    assert "8 bytes apart, so 16 of every 32" in str(traffic_text.advice([half]))
    fourth = replace(half, sectors=32)
    assert "8 bytes apart, and warps have idle lanes, so 8 of every 32" in str(traffic_text.advice([fourth]))
    vectors = found(
        {PART + STRIDED: 4},
        accesses=64,
        at=site(width=16),
        steps=4 * 512,
        squares=4 * 512**2,
        sectors=64,
        least=32,
    )
    assert "512 bytes apart, so 16 of every 32" in str(traffic_text.advice([vectors]))


def test_lanes_have_local_memory_of_their_own():
    same, apart = (
        found({pattern: 5}, space="local", at=site(space="local")) for pattern in (BROADCAST, GATHER)
    )
    assert (same.pattern, same.contention, apart.pattern) == ("unit", 1, "gather")
    assert same.requests_by_pattern == {"unit": 5}


def test_strides_that_change_have_advice():
    """As in the reduction with interleaved addresses: strides 2, 4 … 64."""
    changing = {"steps": 4 * 126, "squares": 16 * 5460, "longest_max": 256, "shortest_max": 2**64 - 1 - 8}
    one = found({PART + STRIDED: 6, SINGLE: 2}, space="shared", ways=24, phases=6, ways_max=8, **changing)
    assert (one.pattern, one.record(1)["strides"]) == ("mixed", [2, 64])
    text = traffic_text.advice([one])
    assert (
        text is not None and "up to 8-way bank conflicts: neighbouring lanes are 2 to 64 words apart" in text
    )
    damaged = found({STRIDED: 2}, space="shared", ways_max=2, ways=9, steps=4, longest_max=1, shortest_max=0)
    assert traffic_text.advice([damaged]) is None and damaged.record(1)["strides"] is None


def test_the_strides_of_an_unrolled_loop_have_one_advice():
    """As in that reduction with a block size that the compiler knows: each copy has a stride of its own."""
    copies = [
        found(
            {STRIDED: 1},
            at=site(n),
            space="shared",
            ways=2 * n,
            ways_max=2 * n,
            steps=8 * n,
            squares=64 * n**2,
        )
        for n in (1, 2, 4)
    ]
    other = found(
        {STRIDED: 1}, at=site(5, line=9), space="shared", ways=32, ways_max=32, steps=128, squares=128**2
    )
    text = " ".join(" ".join(traffic_text.lines(kernel(*copies, other), "k", False)).split())
    assert text.count("apart") == 2 and "app.cu:9 loads from shared memory with 32-way" in text
    assert (
        "app.cu:12 loads from shared memory with up to 8-way bank conflicts: neighbouring lanes are 2 to 8 words"
        in text
    )


def test_idle_lanes_between_others_are_said():
    at = {"accesses": 54, "least": 10, "sectors": 20}
    scattered = found({PART + GATHER: 10}, gaps=10, **at)
    (text,) = (
        line
        for line in traffic_text.findings(kernel(scattered), traffic_text.group_sites([scattered]))
        if "lanes take" in line
    )
    assert text.startswith("app.cu:12: 5.4 of 32 lanes take part on average, with idle lanes between them")
    few = [found({PART + GATHER: 10}, gaps=10, **at), found({UNIT: 40}, at=site(1, line=13))]
    side_by_side = [found({PART + UNIT: 10}, **at)]
    # One lane of each 8 stores what they reduced.
    leaders = {"gaps": 10, "accesses": 40, "least": 10, "sectors": 20}
    stored = [found({PART + GATHER: 10}, at=site(kind="store"), **leaders)]
    loaded = found({PART + GATHER: 10}, **leaders)
    unrolled = [found({PART + GATHER: 10}, at=site(1, kind="store"), **leaders | {"accesses": 80}), *stored]
    for one, said in (([loaded], "4 of 32"), (unrolled, "6 of 32")):
        (text,) = (
            line
            for line in traffic_text.findings(kernel(*one), traffic_text.group_sites(one))
            if "lanes take" in line
        )
        assert said in text
    for sites in (few, side_by_side, stored):
        assert not any(
            "take part" in line
            for line in traffic_text.findings(kernel(*sites), traffic_text.group_sites(sites))
        )


def updated(count, each, number=0, blocks=0, **values):
    """An atomic site whose updates were counted: `each` of `count` addresses."""
    counted = Updates(dict.fromkeys(range(count), each), blocks)
    at = site(number, kind="atomic")
    return traffic.site_traffic(
        at, "global", cell({GATHER: counted.total // 32}, sectors=8, **values), counted
    )


def test_hot_addresses_cost_and_the_ratio_does_not_hide_it():
    some, many = (
        updated(32, 1000, addresses=4000, contention_max=8),
        updated(256, 125, addresses=32000),
    )
    assert (some.record(1)["addresses"], some.record(1)["hot"], some.record(1)["addresses_mean"]) == (
        32,
        1000,
        4,
    )
    assert (many.record(1)["addresses"], many.record(1)["hot"], many.record(1)["addresses_mean"]) == (
        256,
        125,
        32,
    )
    text = "\n".join(traffic_text.findings(kernel(some), rows := traffic_text.group_sites([some])))
    assert "a request updates 4 addresses for 32 lanes; up to 8 lanes of a warp update the same" in text
    assert "32,000 updates of 32 addresses, the hottest 1,000 times (3.1 %)" in text
    assert rows[0].cells(1)["RATIO"] == ""
    assert "updates only 32 addresses 32,000 times: combine those of a block" in str(
        traffic_text.advice([some])
    )
    once = traffic.site_traffic(some.site, "global", cell({SINGLE: 2048}), Updates({0: 2048}))
    assert traffic_text.advice([once]) is None  # blocks may have added up already
    assert traffic_text.advice([updated(32, 1000, blocks=1000)]) is None  # each block once
    copies = [updated(32, 500, number, blocks=999) for number in range(2)]
    assert "32,000 times: combine those" in str(traffic_text.advice(copies))
    text = "\n".join(traffic_text.findings(kernel(many), traffic_text.group_sites([many])))
    assert "at once" not in text and "of 256 addresses, the hottest 125 times (0.4 %)" in text
    assert traffic_text.advice([updated(20_000, 40)]) is None


def test_updates_that_were_not_counted_are_unknown():
    cells = traffic.sum_shards(array(1, 1))
    cells["requests"][0, GATHER] = 4
    counted = {0: Updates({8: 40, 12: 40, 16: 30})}
    for missing, said in ((0, (3, 40)), (1, (None, None))):
        cells["uncounted_max"][0] = missing
        (one,), _ = traffic.decode_cells({"global_cells": cells}, {0: site(kind="atomic")}, counted)
        assert (one.record(1)["addresses"], one.record(1)["hot"]) == said


def test_the_updates_of_copies_are_added_up():
    """As in an unrolled loop: each copy updates the same addresses."""
    copies = [updated(4, 20, number, addresses=80) for number in range(3)]
    text = "\n".join(traffic_text.findings(kernel(*copies), traffic_text.group_sites(copies)))
    assert "240 updates of 4 addresses, the hottest 60 times (25 %)" in text
    assert "updates only 4 addresses 240 times" in str(traffic_text.advice(copies))
    assert copies[0].record(1)["hot"] == 20


def test_updates_are_read_by_kernel_and_site():
    entries = [(2, 1, 1024, 10), (0, 1, 64, 3), (2, 1, 2**47, 30), (2, 2, 1024, 1)]
    sites = [kernel << 32 | number for kernel, number, _, _ in entries]
    # As in gpubpf_updates.h.
    tags = [
        (address + place * 0x9E3779B97F4A7C15) % 2**64 | 1
        for place, (_, _, address, _) in zip(sites, entries, strict=True)
    ]
    arrays = ([0, *tags], [0, *sites], [99, *(count for *_, count in entries)])
    tags, sites, counts = (np.array(one, np.uint64) for one in arrays)
    assert updates.decode_updates(tags, sites, counts) == {
        (2, 1): Updates({1024: 10, 2**47: 30}),
        (0, 1): Updates({64: 3}),
        (2, 2): Updates({1024: 1}),
    }
    assert updates.decode_updates(tags * 0, sites, tags) == {}


def test_numbers_for_people():
    assert [table.size(n) for n in (0, 1023, 1024, 98304, 10**9)] == [
        "0 B", "1,023 B", "1.00 KB", "96.0 KB", "954 MB",
    ]  # fmt: skip
    assert [table.number(n) for n in (31_250, 100_000, 31_000_000_000)] == [
        "31,250",
        "100 k",
        "31.0 G",
    ]


@generated(60)
def test_text_over_generated_traffic(rng: random.Random) -> None:
    """It never fails, fits a terminal, and has a finding."""
    sites = []
    for number in range(rng.choice((1, 3, 40))):
        kind = rng.choice(("load", "store", "atomic", "async"))
        space = rng.choice(("global", "shared", "local", "const"))
        name = rng.choice(("a.cu", "x" * 60 + ".cuh", None))
        at = site(number, kind, space, rng.choice((0, 1, 4, 16)), name, rng.choice((1, 99_999)))
        most = rng.choice((1, 10, 10**6, 10**12))
        counted = {pattern: rng.randint(0, most) for pattern in range(2 * PART) if rare(rng)}
        fields = [name for name, *_ in CELL[1:]] + ["phases", "ways", "ways_max"]
        values = {field: rng.choice((0, 0, 1, most, 32 * most)) for field in fields}
        one = traffic.site_traffic(at, space, cell(counted or {UNIT: 1}, **values))
        if one.requests:
            sites.append(one)
    made = kernel(*sites, unknown=rng.choice((0, 7)))
    for verbose in (False, True):
        lines = list(traffic_text.lines(made, "scale", verbose))
        assert verbose or all(len(line) <= 80 for line in lines), max(lines, key=len)  # -v shows every column
        assert lines[1].strip() and not any("nan" in line for line in lines)
