"""CO-RE: relocations get what is true for the running kernel."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

import gpubpf_host
from gpubpf.ebpf import btf
from gpubpf.ebpf import bytecode as b
from gpubpf.errors import Error
from gpubpf.kernel import privileges
from gpubpf.linux import btf as kernel
from gpubpf.linux.host_programs import Host, HostProbe
from gpubpf.linux.process_functions import FunctionProbe
from gpubpf.objects import core, loading
from gpubpf.objects.core import TYPE_MATCHES, Relocations
from gpubpf_objects import build, needs_clang

pytestmark = [
    needs_clang,
    pytest.mark.skipif(
        not Path("/sys/kernel/btf/vmlinux").exists(), reason="the kernel has no type information"
    ),
]

# Members in another order and of other sizes than the kernel's; a flavor; names that the kernel does not have.
TEXT = """
typedef int pid_t;
struct task_struct { u8 somewhere[3]; pid_t tgid; pid_t pid; char comm[16]; struct task_struct *real_parent; } core;
struct task_struct___old { long gone; pid_t pid; } core;
struct nobody_has_this { int x; } core;
enum bpf_map_type { BPF_MAP_TYPE_RINGBUF = 99, NEVER_A_TYPE = 3 };
struct list_head { struct list_head *prev; struct list_head *next; } core;
MAP(found, ARRAY, u32, u64, 16);
static __attribute__((always_inline)) void put(u32 key, u64 value) { bpf_map_update_elem(&found, &key, &value, 0); }

SEC("raw_tp/sys_enter")
int values(void *ctx) {
    struct task_struct *task = 0;
    struct task_struct___old *old = 0;
    struct list_head *list = 0;
    put(0, __builtin_preserve_field_info(task->tgid, 0));
    put(1, __builtin_preserve_field_info(task->comm, 1));
    put(2, __builtin_preserve_field_info(old->gone, 2));
    put(3, __builtin_preserve_field_info(old->pid, 2));
    put(4, __builtin_preserve_type_info(*(struct list_head *)0, 1));
    put(5, __builtin_preserve_type_info(*(struct nobody_has_this *)0, 0));
    put(6, __builtin_preserve_enum_value(*(enum bpf_map_type *)BPF_MAP_TYPE_RINGBUF, 1));
    put(7, __builtin_preserve_enum_value(*(enum bpf_map_type *)NEVER_A_TYPE, 0));
    put(8, (u64)&list->prev);
    put(9, __builtin_preserve_field_info(task->tgid, 3));
    put(10, (u64)&task->comm[3]);
    put(11, __builtin_preserve_type_info(*(struct list_head *)0, 0));
    return 0;
}
"""


def stored(path: Path) -> dict[int, int]:
    """Return what `put` stores under each key: the last number that is written to the place of a key before each call."""
    code = loading.load(str(path)).programs.program.functions["values"].instructions
    registers: dict[int, int] = {}
    stack: dict[int, int] = {}
    found: dict[int, int] = {}
    for i in code:
        if i.opcode == b.LD_IMM64:
            registers[i.dst] = i.imm
        elif i.cls in (b.ALU, b.ALU64) and i.opcode & 0xF0 == b.MOV:
            registers[i.dst] = registers.get(i.src, 0) if i.opcode & 8 else i.imm
        elif i.cls in (b.STX, b.ST) and i.dst == 10:
            stack[i.offset] = registers.get(i.src, 0) if i.cls == b.STX else i.imm
        elif i.opcode == b.JMP | b.CALL:
            key, value = sorted(stack, reverse=True)[:2]
            found[stack[key]] = stack[value]
    return found


def test_values_for_this_kernel(tmp_path: Path) -> None:
    types = kernel.types()
    (list_head,) = [n for n in types.by_name["list_head"] if types.kind(n) == btf.STRUCT]
    map_type = next(n for n in types.by_name["bpf_map_type"] if types.kind(n) == btf.ENUM)
    found = stored(build(TEXT, tmp_path / "values.bpf.o"))
    comm = kernel.member("task_struct", "comm").offset
    assert found == {
        0: kernel.member("task_struct", "tgid").offset,
        1: 16,
        2: 0,
        3: 1,
        4: 16,
        5: 0,
        6: dict(types.values(map_type))["BPF_MAP_TYPE_RINGBUF"],
        7: 0,
        8: 8,
        9: 1,
        10: comm + 3,
        11: 1,
    }
    assert types.size(list_head) == 16


def test_members_of_types_are_not_compared() -> None:
    types = kernel.types()
    relocations = Relocations(types, types)
    with pytest.raises(Error, match=r"\(bpf_core_type_matches\), which is not supported; use"):
        relocations.value(types.by_name["list_head"][0], "0", TYPE_MATCHES)


def test_a_missing_member_must_not_be_reached(tmp_path: Path) -> None:
    text = """
    struct task_struct___old { long gone; } core;
    SEC("raw_tp/sys_enter") int f(u64 *ctx) {
        struct task_struct___old *old = (void *)bpf_get_current_task();
        u64 value = 7;
        %s bpf_probe_read_kernel(&value, 8, &old->gone);
        return value;
    }
    """
    guarded = text % "if (__builtin_preserve_field_info(old->gone, 2))"
    for name, body, poisoned in (("bare", text % "", True), ("guarded", guarded, False)):
        loaded = loading.load(str(build(body, tmp_path / f"{name}.bpf.o")))
        code = loaded.programs.program.functions["f"].instructions
        assert any(i.imm == b.POISON for i in code)
        if privileges.capable():
            probes = [HostProbe("f", "sys_enter")]
            if poisoned:
                with pytest.raises(
                    Error,
                    match="host program f: it uses a member or type that this kernel does not have",
                ):
                    Host(loaded.programs.program, probes)
            else:
                Host(loaded.programs.program, probes).close()


def test_damaged_relocations_are_refused(tmp_path: Path) -> None:
    file = build(TEXT, tmp_path / "values.bpf.o")
    types = kernel.types()
    relocations = Relocations(types, types)
    root = types.by_name["list_head"][0]
    for access, kind in (("x", 0), ("0:9", 0), ("-1", 0), ("0:0:0:0", 0), ("0", 40)):
        with pytest.raises(Error):
            relocations.value(root, access, kind)
    assert file.exists()


PROGRAM = """
typedef int pid_t;
struct task_struct { u8 somewhere[3]; pid_t tgid; char comm[16]; struct task_struct *real_parent; } core;
struct seen { u64 tgid, parent; char comm[16]; };
MAP(seen, SHARED_ARRAY, u32, struct seen, 1);
const volatile u32 slot = 0;
SEC("uprobe/PATH:twice") int on_twice(void *ctx) {
    struct task_struct *task = (void *)bpf_get_current_task(), *parent = 0;
    u32 key = slot;
    struct seen *to = bpf_map_lookup_elem(&seen, &key);
    pid_t number = 0;
    if (!to)
        return 0;
    bpf_probe_read_kernel(&number, sizeof(number), &task->tgid);
    to->tgid = number;
    bpf_probe_read_kernel(&to->comm, sizeof(to->comm), &task->comm);
    bpf_probe_read_kernel(&parent, sizeof(parent), &task->real_parent);
    bpf_probe_read_kernel(&number, sizeof(number), &parent->tgid);
    to->parent = number;
    return 0;
}
"""
VICTIM = """
#include <stdio.h>
static __attribute__((noinline)) int twice(int x) { __asm__ volatile(""); return 2 * x; }
int main(void) { int c; puts("ready"); fflush(stdout); while ((c = getchar()) != EOF) twice(c); return 0; }
"""


@gpubpf_host.needs_bpf
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
def test_a_program_in_one_process_reads_the_kernel(tmp_path: Path) -> None:
    """The function is in no table of exported symbols, and another process of the same program is left alone."""
    victim = tmp_path / "victim"
    subprocess.run(["cc", "-g", "-x", "c", "-", "-o", victim], input=VICTIM, text=True, check=True)
    path = build(PROGRAM.replace("PATH", str(victim)), tmp_path / "task.bpf.o")
    loaded = loading.load(str(path))
    processes = [
        subprocess.Popen([victim], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    maps = [one for one in loaded.programs.maps.values() if one.kind == "shared_array"]
    with Host(
        loaded.programs.program, (), own=[FunctionProbe("on_twice", str(victim), "twice")], shared=maps
    ) as host:
        sides = []
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            side = host.process()
            side.attach_functions(process.pid)
            sides.append(side)
        for number in (0, 1):
            seen = sides[number].array("seen")[0]
            assert seen["tgid"] == 0
            stdin = processes[number].stdin
            assert stdin is not None
            stdin.write("x")
            stdin.close()
            processes[number].wait()
            deadline = time.monotonic() + 10
            while not sides[number].array("seen")[0]["tgid"] and time.monotonic() < deadline:
                time.sleep(0.01)
            seen = sides[number].array("seen")[0]
            assert (seen["tgid"], seen["parent"], seen["comm"]) == (
                processes[number].pid,
                os.getpid(),
                b"victim",
            )
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()


def test_the_members_of_a_type_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object may have a million relocations about a type with 65,535 members."""
    members = b"".join(struct.pack("<III", 3, 2, 32 * n) for n in range(500))
    data = struct.pack("<III", 1, btf.STRUCT << 24 | 500, 2000) + members
    data += struct.pack("<IIII", 0, btf.INT << 24, 4, 32)
    names = b"\0s\0m\0"
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(data), len(data), len(names))
    types = btf.Types(header + data + names)
    read: list[int] = []
    members_of = btf.Types.members
    monkeypatch.setattr(
        btf.Types, "members", lambda self, number: (read.append(number), members_of(self, number))[1]
    )
    relocations = Relocations(types, types)
    for step in range(500):
        assert relocations.value(1, f"0:{step}", core.FIELD_OFFSET)[0] == 0  # the first member of this name
    assert len(read) <= 2
