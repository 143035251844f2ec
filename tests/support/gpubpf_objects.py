"""Compile eBPF objects for tests, in the conventions of libbpf."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpubpf.ebpf import clang

needs_clang = pytest.mark.skipif(clang.find() is None, reason="needs clang")

HEAD = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef signed int s32; typedef signed long long s64; typedef _Bool bool;
#define SEC(name) __attribute__((section(name), used))
#define __uint(name, val) int (*name)[val]
#define __type(name, val) typeof(val) *name
#define __noinline __attribute__((noinline))
#define core __attribute__((preserve_access_index))
#define MAP(name, number, key_type, value_type, entries) \\
    struct { __uint(type, number); __uint(max_entries, entries); __type(key, key_type); __type(value, value_type); } name SEC(".maps")
#define print_all(text, ...) ({ static const char fmt[] = text; u64 all[] = {__VA_ARGS__}; \\
    bpf_trace_vprintk(fmt, sizeof(fmt), all, sizeof(all)); })
#define print(text, ...) ({ static const char fmt[] = text; bpf_trace_printk(fmt, sizeof(fmt), ##__VA_ARGS__); })
enum { HASH = 1, ARRAY = 2, PERCPU_ARRAY = 6, LRU_HASH = 9, RINGBUF = 27, GPU_HASH = 1501, THREAD_ARRAY = 1502, GPU_ARRAY = 1503,
       SHARED_ARRAY = 1504, GPU_RING = 1527 };
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*bpf_trace_printk)(const char *fmt, u32 size, ...) = (void *)6;
static u64 (*bpf_get_current_pid_tgid)(void) = (void *)14;
static u64 (*bpf_get_current_task)(void) = (void *)35;
static long (*bpf_probe_read_kernel)(void *to, u32 size, const void *from) = (void *)113;
static long (*bpf_trace_vprintk)(const char *fmt, u32 size, const void *values, u32 bytes) = (void *)177;
static long (*bpf_ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;
static u64 (*bpf_get_block_idx)(u64 *x, u64 *y, u64 *z) = (void *)503;
static u64 (*bpf_get_thread_idx)(u64 *x, u64 *y, u64 *z) = (void *)505;
char LICENSE[] SEC("license") = "GPL";
"""


def build(text: str, to: Path, *flags: str) -> Path:
    """Compile a C text, after HEAD, to an object."""
    source, head = to.with_suffix(".c"), to.with_suffix(".h")
    source.write_text(text)
    head.write_text(HEAD)
    own = ["-include", str(head), "-c", str(source), "-o", str(to)]
    command = [str(clang.find()), *"-target bpf -g -O2 -mcpu=v3".split(), *flags, *own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return to
