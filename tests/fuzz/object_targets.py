"""eBPF object files, which anybody may have compiled. See targets.py."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from fuzz.targets import target
from gpubpf import elf
from gpubpf.ebpf import clang, maps
from gpubpf.ebpf.btf import Types
from gpubpf.errors import Error
from gpubpf.objects import listing, loading
from gpubpf.objects.settings import Settings
from gpubpf_objects import build

TEXT = """
struct cell { u8 small; s32 pair[2]; struct { u16 inner; char name[5]; } part; u64 last; };
MAP(cells, ARRAY, u32, struct cell, 7);
MAP(sums, HASH, u64, u32, 100);
struct { __uint(type, RINGBUF); __uint(max_entries, 4096); } events SEC(".maps");
struct task_struct { int pid; struct task_struct *real_parent; } core;
const volatile u32 limit = 5;
u64 counts[4] = {1, 2};
static __noinline u64 twice(u64 x) { counts[1] += x; return 2 * x; }
SEC("kprobe/_Z4workPi") int on_entry(void *ctx) {
    u64 key = twice(limit);
    u32 *sum = bpf_map_lookup_elem(&sums, &key);
    if (sum)
        *sum += 1;
    bpf_ringbuf_output(&events, &key, sizeof(key), 0);
    print("key %lu", key);
    print_all("%lu %s %d %d", key, (u64)"text", 3, 4);
    return 0;
}
SEC("uretprobe/./app:step") int on_step(void *ctx) {
    u32 key = 0, pid = 0;
    struct cell *cell = bpf_map_lookup_elem(&cells, &key);
    struct task_struct *task = (void *)bpf_get_current_task();
    bpf_probe_read_kernel(&pid, sizeof(pid), &task->pid);
    if (cell)
        cell->last += pid + counts[0];
    return 0;
}
SEC("perf_event/cpu-clock:99hz") int on_clock(void *ctx) { return 0; }
"""


@functools.cache
def object_bytes() -> bytes:
    """Return an object with everything that is read."""
    if clang.find() is None:
        pytest.skip("needs clang")
    with tempfile.TemporaryDirectory() as folder:
        return build(TEXT, Path(folder) / "seed.bpf.o").read_bytes()


@target(Error, seeds=lambda: [object_bytes()])
def ebpf_object(data: bytes) -> None:
    """Load an object, list what is in it, and make the types and the first values of its maps."""
    loaded = loading.read(data, Settings(values=("limit=7", "sums[3]=7")))
    for _ in listing.lines(loaded):
        pass
    for one in loaded.programs.maps.values():
        if one.contents:
            maps.header(one)
        assert one.value_dtype.itemsize == one.value_size and one.key_dtype.itemsize == one.key_size


def type_seeds() -> Iterable[bytes]:
    file = elf.of_bytes(object_bytes())
    return [file.contents(section) for section in file.sections if section.name == ".BTF"]


@target(Error, seeds=type_seeds)
def btf(data: bytes) -> None:
    """Read types: everything that can be asked of each."""
    types = Types(data)
    for number in range(len(types)):
        types.layout(number)
        types.members(number)
        types.values(number)
        types.by_name.get(types.name(number))
