"""eBPF objects become programs and maps; bad ones are refused with one line."""

from __future__ import annotations

import math
import struct
import subprocess
from pathlib import Path

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import Error, ImageError, UsageError, VerifyError
from gpubpf.objects import attach_points, listing, loading, settings
from gpubpf.objects.attach_points import attach_point
from gpubpf.objects.object_file import ObjectFile
from gpubpf.objects.settings import Settings
from gpubpf_objects import build, needs_clang

pytestmark = needs_clang

TEXT = """
struct cell { u8 small; s32 pair[2]; struct { u16 inner; char name[5]; } part; u64 last; };
MAP(cells, GPU_ARRAY, u32, struct cell, 7);
MAP(sums, GPU_HASH, u64, u32, 100);
MAP(tallies, THREAD_ARRAY, u32, u64, 2);
struct { __uint(type, ARRAY); __uint(max_entries, 3); __uint(key_size, 4); __uint(value_size, 12); } plain SEC(".maps");
const volatile u32 limit = 5;
const volatile char label[8] = "begin";
u64 counts[4] = {1, 2};
u32 zeros[3];

static __noinline u64 twice(u64 x) { counts[1] += x; return 2 * x; }
static __noinline u64 deeper(u64 x) { return x > limit ? twice(x) + 1 : twice(x + 3); }

SEC("kprobe/_Z4workPi")
int on_entry(void *ctx) {
    u64 x, y, z;
    bpf_get_thread_idx(&x, &y, &z);
    counts[0] += deeper(x);
    print("thread %lu of %u", x, limit);
    return 0;
}

SEC("kprobe/_Z4workPi")
int second(void *ctx) {
    u32 key = 1, size[3] = {1, 2, 3};
    u64 *mine = bpf_map_lookup_elem(&tallies, &key), four = 4;
    struct cell *cell = bpf_map_lookup_elem(&cells, &key);
    if (mine)
        *mine += deeper(label[0]);
    if (cell)
        cell->last = zeros[2]++;
    bpf_map_update_elem(&plain, &key, size, 0);
    return 0;
}

SEC("kretprobe/_Z4workPi")
int on_exit(void *ctx) {
    u64 key = 9;
    u32 one = limit;
    bpf_map_update_elem(&sums, &key, &one, 0);
    return 0;
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TEXT, tmp_path_factory.mktemp("objects") / "probe.bpf.o")


def test_maps_have_their_types_and_kinds(path: Path) -> None:
    found = loading.load(str(path)).programs.maps
    kinds = {name: (one.kind, one.key_size, one.value_size, one.max_entries) for name, one in found.items()}
    assert kinds == {
        "cells": ("array", 4, 32, 7),
        "sums": ("hash", 8, 4, 100),
        "tallies": ("thread_array", 4, 8, 2),
        "plain": ("array", 4, 12, 3),
        "data": ("array", 4, 32, 1),
        "bss": ("array", 4, 16, 1),
        "rodata": ("array", 4, len(found["rodata"].contents), 1),
    }
    cell = found["cells"].value_dtype
    assert {name: cell.fields[name][1] for name in cell.names or ()} == {
        "small": 0,
        "pair": 4,
        "part": 12,
        "last": 24,
    }
    assert cell["part"]["name"].kind == "S"
    assert found["data"].value_dtype.names == ("counts",) and found["bss"].value_dtype.names == ("zeros",)
    assert struct.unpack("<4Q", found["data"].contents) == (1, 2, 0, 0)
    assert found["rodata"].constant and not found["data"].constant
    assert {"limit", "label"} <= set(found["rodata"].value_dtype.names or ())


@pytest.mark.parametrize("value", ["1e50", "-1e400"])
@pytest.mark.filterwarnings("error")
def test_a_floating_point_number_that_is_too_large_is_refused(value: str) -> None:
    number = MapDefinition("number", "array", 4, 4, 1, "<u4", "<f4")
    with pytest.raises(UsageError, match="does not fit"):
        settings.with_values({"number": number}, (), [f"number={value}"])
    found = settings.with_values({"number": number}, (), ["number=-inf"])
    assert struct.unpack("<f", found["number"].contents) == (-math.inf,)


def test_programs_of_one_section_have_the_subprograms_that_they_call(path: Path) -> None:
    loaded = loading.load(str(path))
    functions = loaded.programs.program.functions
    assert {name: (place.event, place.kernels) for name, place in loaded.places.items()} == {
        "on_entry": ("entry", ("_Z4workPi",)),
        "second": ("entry", ("_Z4workPi",)),
        "on_exit": ("exit", ("_Z4workPi",)),
    }
    for name, exits in {"on_entry": 3, "second": 3, "on_exit": 1}.items():
        code = functions[name].instructions
        assert sum(i.opcode == b.JMP | b.EXIT for i in code) == exits, name
        for pc, i in enumerate(code):
            if i.opcode == b.JMP | b.CALL and i.src == b.PSEUDO_CALL:
                assert 0 < pc + 1 + i.imm < len(code)
    line = next(
        i.line for i in functions["on_entry"].instructions if i.imm == 505 and i.opcode == b.JMP | b.CALL
    )
    assert "bpf_get_thread_idx" in loaded.programs.program.quote(line)


def test_both_verifiers_accept_them_and_know_constants(path: Path) -> None:
    programs = loading.load(str(path)).programs
    for name in programs.points:
        programs.fragment(name)
    assert list(programs.fragment("on_entry").formats.values()) == ["thread %lu of %u"]
    # `limit` is a constant: nothing reads it from memory.
    assert {a.map for a in programs.fragment("on_exit").arguments if a.kind == "map_base"} == {"sums"}
    assert {a.map for a in programs.fragment("on_entry").arguments if a.kind == "map_base"} == {
        "data",
        "gpubpf_prints",
    }


def test_values_are_set_before_the_programs_run(path: Path) -> None:
    settings = ("limit=0x10", "label=else", "counts[3]=7", "plain[1]=1,0,0,0,2,0,0,0,3,0,0,0", "tallies=1")
    maps = loading.load(str(path), Settings(values=settings[:-1])).programs.maps
    constants = maps["rodata"]
    at = {name: offset for name, _, offset in constants.value_type["fields"]}
    assert constants.contents[at["limit"] :][:4] == (16).to_bytes(4, "little")
    assert struct.unpack("<6I", maps["plain"].contents) == (0, 0, 0, 1, 2, 3)
    assert constants.contents[at["label"] :][:8] == b"else\0\0\0\0"
    assert struct.unpack("<4Q", maps["data"].contents) == (1, 2, 0, 7)
    repeated = loading.load(str(path), Settings(values=("counts=5*3,6",))).programs.maps["data"]
    assert struct.unpack("<4Q", repeated.contents) == (5, 5, 5, 6)
    cells = loading.load(str(path), Settings(values=("cells[1]=9,-1,0x10,7,ab,99",))).programs.maps["cells"]
    assert cells.contents == bytes(32) + struct.pack("<B3xiiH5s5xQ", 9, -1, 16, 7, b"ab", 99)
    for wrong, why in {
        "tallies=1": "map tallies is of kind thread_array; only arrays and hashes can be set",
        "limit": "has no value",
        "limit=-1": "does not fit the type",
        "limit=1,2": "the type has 1 number, not 2",
        "counts[4]=1": "no element 4; it has the elements 0 to 3",
        "limit[1]=1": "no element 1; set it as a whole",
        "plain[3]=1,2,3,4,5,6,7,8,9,10,11,12": "map plain has only 3 elements",
        "sums=1": "map sums is a hash; write sums[KEY]=VALUE",
        "sums[x]=1": "'x' does not fit the type, uint64; write numbers such as 7",
        "sums[1,2]=1": "the type has 1 number, not 2",
        "sums[1]=-1": "'-1' does not fit the type, uint32",
        "label=muchtoolong": "the text has 11 bytes; shorten it to at most 7",
        "other=1": "there is no variable, array or hash other; use one of: limit, label, counts, zeros, cells, plain, sums",
    }.items():
        with pytest.raises(UsageError) as error:
            loading.load(str(path), Settings(values=(wrong,)))
        assert why in str(error.value) and "\n" not in str(error.value)


def test_a_program_gets_another_section(path: Path) -> None:
    loaded = loading.load(str(path), Settings({"on_exit": "kretprobe/a,b", "second": "?kprobe/c"}))
    assert loaded.places["on_exit"].kernels == ("a", "b") and "second" not in loaded.places
    there_are = "there is no program three; use one of: on_entry, second, on_exit$"
    with pytest.raises(UsageError, match=f"^--attach 'three': {there_are}"):
        loading.load(str(path), Settings({"three": "kprobe/a"}))
    with pytest.raises(UsageError, match=f"^--run 'three': {there_are}"):
        loading.load(str(path), Settings(alone="three"))


def test_the_listing_names_maps_helpers_and_lines(path: Path) -> None:
    text = "\n".join(listing.lines(loading.load(str(path))))
    assert "map cells: array, key 4 bytes, value 32 bytes, 7 entries" in text
    assert "program on_exit: section kretprobe/_Z4workPi" in text
    assert "bpf_map_update_elem" in text and "bpf_map_update_elem(&sums, &key, &one, 0);" in text


@pytest.mark.parametrize("name", ["s;tr", 'm")(', "su m", "s.ms", "säs", "gpubpf_sampled"])
def test_names_of_maps_cannot_become_code(path: Path, tmp_path: Path, name: str) -> None:
    """A name from the symbols of an object is neither code nor that of a map that the library adds."""
    changed = tmp_path / "changed.o"
    if name.startswith("gpubpf_"):
        text = f'MAP({name}, ARRAY, u32, u64, 4); SEC("kretprobe/k") int on_exit(void *ctx) {{ u32 key = 0; '
        build(text + f"bpf_map_lookup_elem(&{name}, &key); return 0; }}", changed)
    else:
        changed.write_bytes(path.read_bytes().replace(b"\0sums\0", b"\0%b\0" % name.encode()))
    programs = loading.load(str(changed)).programs
    with pytest.raises(VerifyError, match="a map cannot have the name"):
        programs.fragment("on_exit")


# --- sections ---


@pytest.mark.parametrize(
    ("section", "event", "kernels", "target"),
    [
        ("kprobe/_Z4workPi", "entry", ("_Z4workPi",), ""),
        ("kretprobe/cuda_do_exit", "exit", ("do_exit",), ""),
        ("kprobe/__memcapture", "access", (), ""),
        ("kprobe/__directly_run", "alone", (), ""),
        ("tracepoint/sched/sched_switch", "tracepoint", (), "sched:sched_switch"),
        ("tp/sched/sched_switch", "tracepoint", (), "sched:sched_switch"),
        ("raw_tp/sched_switch", "raw", (), "sched_switch"),
        ("uretprobe//usr/lib/libc.so.6:malloc", "function", (), "malloc"),
        ("kprobe/vfs_read", "kernel_function", (), "vfs_read"),
        ("kretprobe/__x64_sys_getpid", "kernel_function", (), "__x64_sys_getpid"),
        ("perf_event/cpu-clock:99hz", "perf_event", (), "cpu-clock:99hz"),
    ],
)
def test_sections(section: str, event: str, kernels: tuple[str, ...], target: str) -> None:
    found = attach_point(section)
    assert (found.event, found.kernels, found.target) == (event, kernels, target)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ("xdp", "is not supported"),
        ("perf_event", "as in --attach PROGRAM=perf_event/EVENT:N or perf_event/EVENT:Nhz"),
        ("perf_event/cpu-clock", "'cpu-clock' names no perf event; use EVENT:N"),
        ("perf_event/cpu-clock:0hz", "'cpu-clock:0hz' names no perf event"),
        ("perf_event/cycles:99hz", "there is no perf event 'cycles'; use one of: cpu-clock, task-clock"),
        ("uprobe/./app:main+x", "has an offset that is not a number; use FUNCTION+OFFSET"),
        ("uretprobe/./app:main+4", "has an offset, but a function returns only once; leave +4 out"),
        ("kretprobe/vfs_read+4", "has an offset, but a function returns only once"),
        (
            "kprobe/vfs_read,scale",
            "the Linux kernel has a function vfs_read, and a program there can have only one",
        ),
        ("kprobe", "names no kernel; name it with --attach, as in --attach PROGRAM=kprobe/KERNEL"),
        ("uprobe", "does not say where its program goes"),
        ("uprobe/./app", "names no function; use uprobe/PATH:FUNCTION"),
        ("tracepoint/sched", "names no tracepoint"),
        ("uprobe/app:main", "'app' does not name a library"),
        ("kprobe/__other", "bpftime's names are __memcapture and __directly_run"),
    ],
)
def test_sections_that_are_refused(section: str, why: str) -> None:
    with pytest.raises(ImageError) as error:
        attach_point(section)
    assert why in str(error.value)


def test_offsets_are_hexadecimal_or_decimal() -> None:
    found = [attach_point(section) for section in ("uprobe/./app:main+0x1f", "kprobe/vfs_read+16")]
    assert [(one.target, one.path, one.offset) for one in found] == [
        ("main", "./app", 31),
        ("vfs_read", "", 16),
    ]


def test_functions_of_modules_of_linux_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_points, "_symbols", lambda: b"0000000000000000 t nvidia_ioctl\t[nvidia]\n")
    assert attach_point("kprobe/nvidia_ioctl").event == "kernel_function"
    assert attach_point("kprobe/vfs_read").event == attach_point("kprobe/cuda_nvidia_ioctl").event == "entry"


# --- what is refused ---

BODY = 'SEC("kprobe/k") int f(void *ctx) {{ u32 key = 0; {} return 0; }}'
WRONG = {
    "section": ('SEC("xdp") int f(void *ctx) { return 0; }', "program f: section 'xdp' is not supported; use kprobe/KERNEL"),
    "helper": (BODY.format("((long (*)(void))203)();"), "program f, C line 1: calls helper number 203, which does not exist on a GPU"),
    "helper of the host": (BODY.format("bpf_get_current_task();"), "calls bpf_get_current_task, which does not exist on a GPU"),
    "time of the host": (
        BODY.format("key = ((u64 (*)(void))5)();"),
        "program f, C line 1: calls bpf_ktime_get_ns, which does not exist on a GPU; use bpf_get_globaltimer",
    ),
    "helper of the GPU": (
        'SEC("uprobe/./app:f") int f(void *ctx) { u64 x, y, z; bpf_get_block_idx(&x, &y, &z); return 0; }',
        "calls bpf_get_block_idx, which exists only on a GPU",
    ),
    "map type": (
        "MAP(m, 1777, u32, u64, 1);" + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "map m is of type 1777, which is not known",
    ),
    "map of the kernel": (
        "MAP(m, LRU_HASH, u32, u64, 1);" + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "map m is of kind lru_hash, which GPU memory does not have, and f uses it on the GPU",
    ),
    "no entries": (
        "MAP(m, HASH, u32, u64, 0);" + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "map m has a max_entries of 0, or none",
    ),
    "key of an array": (
        "MAP(m, ARRAY, u64, u64, 1);" + BODY.format("u64 k = 0; bpf_map_lookup_elem(&m, &k);"),
        "map m is an array, but its key has 8 bytes",
    ),
    "large value": (
        "struct big { char c[70000]; }; MAP(m, ARRAY, u32, struct big, 1);" + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "map m has a value of 70000 bytes",
    ),
    "inner maps": (
        "struct { __uint(type, 13); __uint(max_entries, 1); __type(key, u32); int *values[]; } m SEC(\".maps\");"
        + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "map m: it is declared with values, which is not supported",
    ),
    "old maps": (
        "struct { u32 type, key_size, value_size, max_entries; } m SEC(\"maps\") = {2, 4, 4, 1};"
        + BODY.format("bpf_map_lookup_elem(&m, &key);"),
        "it has maps of the old kind, in a section 'maps'",
    ),
    "hash of both sides": (
        "MAP(m, HASH, u32, u64, 8);"
        + BODY.format("bpf_map_lookup_elem(&m, &key);")
        + ' SEC("uprobe/./app:g") int g(void *ctx) { u32 key = 0; bpf_map_lookup_elem(&m, &key); return 0; }',
        "map m of kind hash is used by f on the GPU and by g on the host; only arrays can be shared",
    ),
    "shared by the whole machine": (
        "MAP(m, ARRAY, u32, u64, 8);"
        + BODY.format("bpf_map_lookup_elem(&m, &key);")
        + ' SEC("raw_tp/sys_enter") int g(void *ctx) { u32 key = 0; bpf_map_lookup_elem(&m, &key); return 0; }',
        "map m is shared with the GPU, so each process has its own, but g runs for the whole machine",
    ),
    "kernel symbol": ("extern int jiffies; " + BODY.format("if (jiffies) return 1;"), "refers to jiffies, which it does not define"),
    "no program": ("int x;", "it has no programs"),
    "call back": (
        "static long each(u32 i, void *c) { return i; }" + BODY.format("((long (*)(u32, void *, void *, u64))181)(4, each, &key, 0);"),
        "takes the address of function each",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_objects_that_are_refused(name: str, tmp_path: Path) -> None:
    text, why = WRONG[name]
    path = build(text, tmp_path / "wrong.bpf.o")
    with pytest.raises(Error) as error:
        loading.load(str(path))
    assert (
        str(error.value).startswith(f"{path}: ") and why in str(error.value) and "\n" not in str(error.value)
    )


def test_a_device_program_cannot_read_registers_of_the_host(tmp_path: Path) -> None:
    text = 'SEC("kprobe/k") int f(u64 *ctx) { print("%lu", ctx[3]); return 0; }'
    programs = loading.load(str(build(text, tmp_path / "f.bpf.o"))).programs
    with pytest.raises(VerifyError, match="program f reads its argument, but a GPU has no struct pt_regs"):
        programs.fragment("f")


def test_texts_are_on_the_stack_or_in_constants(tmp_path: Path) -> None:
    text = """
    const volatile char name[6] = "hello";
    char other[6] = "other";
    SEC("kprobe/k") int f(void *ctx) {
        char own[4] = "own";
        print("%s, %s, %s", "abc", (const char *)name, own);
        return 0;
    }
    SEC("kprobe/k") int g(void *ctx) { print("%s", other); return 0; }
    """
    programs = loading.load(str(build(text, tmp_path / "f.bpf.o"))).programs
    assert list(programs.fragment("f").formats.values()) == ["abc, hello, own"]
    with pytest.raises(VerifyError, match="its text is not on the stack"):
        programs.fragment("g")


def test_prints_of_many_values_that_are_refused(tmp_path: Path) -> None:
    many = ", ".join(["1"] * 13)
    for name, (text, why) in {
        "conversion": (
            'print_all("%d %d %d %d", 1, 2, 3);',
            "of a text with 4 conversions, but 3 values; pass a value for each conversion",
        ),
        "many": (f'print_all("%d", {many});', "with 104 bytes of values; pass at most 12 values"),
        "address": ('print_all("%d %d %d %d", 1, 2, 3, (u64)ctx);', "value 4 is an address"),
        "unset": (
            'u64 two[2]; two[0] = 1; asm volatile("" : : "r"(two) : "memory");'
            ' static const char fmt[] = "%d %d"; bpf_trace_vprintk(fmt, 6, two, 16);',
            "which was never written",
        ),
    }.items():
        path = build(f'SEC("kprobe/k") int f(void *ctx) {{ {text} return 0; }}', tmp_path / f"{name}.bpf.o")
        with pytest.raises(VerifyError) as error:
            loading.load(str(path)).programs.fragment("f")
        assert why in str(error.value), name


def test_a_constant_cannot_be_written(tmp_path: Path) -> None:
    text = 'const volatile u32 limit = 1; SEC("kprobe/k") int f(void *ctx) { *(volatile u32 *)&limit = 2; return 0; }'
    programs = loading.load(str(build(text, tmp_path / "f.bpf.o"))).programs
    with pytest.raises(VerifyError, match="writes to a constant in rodata"):
        programs.fragment("f")


def test_files_that_are_no_objects(path: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    for data, why in {
        b"": "it is not a 64-bit little-endian ELF file",
        b"#!/bin/sh\n": "it is not a 64-bit little-endian ELF file",
        Path("/bin/true").read_bytes(): "it has code for a CPU or GPU \\(ELF machine 62\\), not eBPF",
        path.read_bytes()[:-40]: "it is cut short",
        path.read_bytes()[
            :100
        ]: "it is cut short: it has 100 bytes, too few for [0-9]+ sections; build it again",
        path.read_bytes()[:5] + b"\x02" + path.read_bytes()[6:]: "it is big-endian; compile it with clang",
    }.items():
        wrong.write_bytes(data)
        with pytest.raises(Error, match=why):
            loading.load(str(wrong))
    with pytest.raises(Error, match=r"nothing: cannot be read \(No such file or directory\)"):
        loading.load(str(tmp_path / "nothing"))


def test_no_type_information(tmp_path: Path) -> None:
    path = build(TEXT, tmp_path / "bare.bpf.o", "-g0")
    with pytest.raises(Error, match=r"it has no type information \(BTF\); compile it with -g"):
        loading.load(str(path))


def test_every_truncation_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for size in range(0, len(data), 257):
        with pytest.raises(Error):
            loading.read(data[:size])


def test_a_stripped_object_is_refused(path: Path, tmp_path: Path) -> None:
    strip = next(
        (
            Path(f"/usr/bin/llvm-strip{v}")
            for v in ("", "-15", "-19")
            if Path(f"/usr/bin/llvm-strip{v}").exists()
        ),
        None,
    )
    if strip is None:
        pytest.skip("needs llvm-strip")
    bare = tmp_path / "bare.o"
    subprocess.run([strip, "--strip-all", "-o", bare, path], check=True)
    with pytest.raises(ImageError):
        ObjectFile(bare.read_bytes()).programs  # noqa: B018
