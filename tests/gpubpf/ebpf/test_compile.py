"""C text to bytecode: lines, maps, relocations, and one clear line for everything that does not compile."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpubpf import cache
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import compile, headers, maps
from gpubpf.errors import CompileError
from gpubpf.kernel import privileges
from gpubpf.linux import host_programs
from gpubpf.lower import host_code, nvptx
from gpubpf.verify import verify
from gpubpf.verify.rules import check
from gpubpf_asm import Native
from gpubpf_bcc import compiled

HEAD = "#include <gpubpf.h>\nGPU_ARRAY(cells, u64, 8);\n"


def test_maps_and_their_types():
    made = compiled(
        """#include <gpubpf.h>
struct tally { u64 runs; u32 hits[3]; u8 tag; };
struct key { u16 kind; u32 number; };
GPU_THREAD_ARRAY(tallies, struct tally, 2);
GPU_SITE_ARRAY(sites, struct tally);
GPU_ARRAY(cells, u64, 8);
GPU_HASH(seen, struct key, struct tally, 100);
GPU_HISTOGRAM(sizes, 64);
GPU_RINGBUF(events, struct tally, 16);
GPU_PARAM(filter, struct gpu_filter);
BPF_ARRAY(plain, u32, 5);
BPF_HASH(table, u32);
BPF_PERCPU_ARRAY(each, u64, 1);
BPF_HISTOGRAM(dist, u32, 32);
BPF_RINGBUF_OUTPUT(ring, 8);
"""
    )
    kinds = {name: (m.kind, m.key_size, m.value_size, m.max_entries) for name, m in made.maps.items()}
    assert kinds == {
        "tallies": ("thread_array", 4, 24, 2),
        "sites": ("site_array", 4, 24, 1),
        "cells": ("array", 4, 8, 8),
        "seen": ("hash", 8, 24, 100),
        "sizes": ("array", 4, 8, 64),
        "events": ("ringbuf", 0, 24, 65536),
        "filter": ("param", 4, 48, 1),
        "plain": ("array", 4, 4, 5),
        "table": ("hash", 4, 8, 10240),
        "each": ("percpu_array", 4, 8, 1),
        "dist": ("hash", 4, 8, 32),
        "ring": ("ringbuf", 0, 4, 32768),
    }
    tally = made.maps["tallies"].value_dtype
    assert tally.names == ("runs", "hits", "tag")
    assert (tally.itemsize, tally["hits"].shape) == (24, (3,))
    assert made.maps["events"].value_dtype == tally
    assert made.maps["seen"].key_dtype.names == ("kind", "number")
    cell = np.zeros((), made.maps["filter"].value_dtype)
    cell["block"]["lo"] = 1, 2, 3
    cell["thread"]["span"][2] = 9
    assert cell.tobytes()[8:12] == b"\2\0\0\0"
    assert cell.tobytes()[44:] == b"\t\0\0\0"


def test_ring_buffers_of_bcc_know_their_records():
    """And bcc's other way to submit them is a ring buffer too."""
    made = compiled(
        """#include <gpubpf.h>
struct event { u64 launch; u32 hits[3]; char name[4]; u16 tag; };
BPF_RINGBUF_OUTPUT(ring, 8);
BPF_PERF_OUTPUT(perf);
GPU_RINGBUF(own, struct event, 2);
int f(struct gpu_exit *ctx) {
    struct event event = {};
    event.launch = ctx->launch;
    ring.ringbuf_output(&event, sizeof(event), 0);
    perf.perf_submit(ctx, &event, sizeof(event));
    own.perf_submit(ctx, &event, sizeof(event));
    return 0;
}
"""
    )
    for name, size in (("ring", 32768), ("perf", 1 << 18), ("own", 8192)):
        definition = made.maps[name]
        assert (definition.kind, definition.value_size, definition.max_entries) == ("ringbuf", 32, size)
        assert definition.value_dtype == made.maps["own"].value_dtype
    assert made.maps["own"].value_dtype.names == ("launch", "hits", "name", "tag")
    checked, release = verify(made, made.functions["f"])
    assert release
    assert [call.helper for _, call in sorted(checked.calls.items())] == [130, 25, 25]


def test_lines_are_those_of_the_text():
    """Also after what bcc rewrites, for code that comes from the header, and inside of a macro."""
    made = compiled(
        HEAD
        + """#define TWICE(x) \\
    ((x) * 2)

int on_exit(struct gpu_exit *ctx)
{
    int key = 1;
    u64 *cell = cells.lookup(&key);
    if (!cell)
        return 0;
    *cell += ctx->work;
    u64 x, y, z;
    bpf_get_thread_idx(&x, &y, &z);
    /* a comment */
    *cell += TWICE(x);
    cells.increment(key);
    return 0;
}
"""
    )
    code = made.functions["on_exit"].instructions
    of_call = {i.imm: i.line for i in code if i.opcode == 0x85}
    assert of_call[505] == 14
    assert next(i.line for i in code if i.opcode == 0x85) == 9
    assert {i.line for i in code if i.opcode == 0xDB} == {17}
    assert next(i.line for i in code if i.opcode == 0x79 and i.offset == 16) == 12
    assert all(i.line for i in code)
    assert made.quote(12) == "*cell += ctx->work;"


def test_bytecode_round_trip():
    made = compiled(
        HEAD
        + "int f(struct gpu_exit *ctx) { int k = 0; u64 *c = cells.lookup(&k); return c && *c > 0x123456789abcull; }"
    )
    function = made.functions["f"]
    raw = b.encode(function.instructions, {"cells": 77})
    again = b.decode(raw, [i.line for i in function.instructions], {77: "cells"})
    assert again == function.instructions
    assert compile.from_json(json.loads(json.dumps(compile.to_json(made))), made.text) == made
    for wrong in (raw[:-1], raw[: 8 * next(n for n, i in enumerate(again) if i.opcode == b.LD_IMM64) + 8]):
        with pytest.raises(ValueError, match="bytecode"):
            b.decode(wrong)


def test_points_of_functions():
    made = compiled(
        HEAD
        + """/* int not_this(struct gpu_exit *ctx) */
int enters(struct gpu_entry *ctx) { return 0; }
int leaves(const struct gpu_exit *ctx) { return 0; }
int kernel_side(struct pt_regs *ctx) { u64 one = 1; int k = 0; cells.update(&k, &one); return 0; }
"""
    )
    assert {f.name: f.point for f in made.functions.values()} == {
        "enters": "entry",
        "leaves": "exit",
        "kernel_side": "uprobe",
    }
    assert [f.name for f in made.device_functions] == ["enters", "leaves"]


def test_a_program_for_every_point():
    """Each reads all fields of its context, which lie where the compiler thinks they are."""
    programs = "".join(
        f"int at_{point}(struct gpu_{point} *ctx) {{\nu64 all = 0;\n"
        + "".join(f'all ^= ctx->{name};\nasm volatile("" : "+r"(all));\n' for name in fields)
        + "return all & 1;\n}\n"
        for point, fields in b.CONTEXTS.items()
    )
    made = compiled(HEAD + programs)
    assert {f.point: f.name for f in made.functions.values()} == {
        point: f"at_{point}" for point in b.CONTEXTS
    }
    assert {f.point for f in made.host_functions} == {"launch", "operation"}
    for function in made.device_functions:
        checked, release = verify(made, function)
        assert release
        assert [a.name for _, a in sorted(checked.accesses.items())] == list(b.CONTEXTS[function.point])
        fragment = nvptx.lower(made, checked)
        fields = {a.field or a.kind for a in fragment.arguments if a.kind in ("context", "launch")}
        assert fields <= set(b.CONTEXTS[function.point])
    for function in made.host_functions:
        host_programs.try_load(made, function)
        native = host_code.lower(made, function)
        assert {v.number for v in native.values} == set(range(len(b.CONTEXTS[function.point])))


def test_numbers_of_kinds_spaces_and_operations():
    """Those of the header are those of the library."""
    from gpubpf.ebpf.bytecode import KINDS, SPACES
    from gpubpf.records import operation_log

    operations = ("H2D", "D2H", "D2D", "H2H", "MEMSET", "EVENT_RECORD", "STREAM_WAIT", "GRAPH", "SYNC", "API")
    names = [f"GPU_{name.upper()}" for name in (*KINDS, *SPACES)] + [f"GPU_OP_{name}" for name in operations]
    adds = "".join(f'*cell += {name};\nasm volatile("");\n' for name in names)
    made = compiled(
        f"{HEAD}int f(struct gpu_exit *ctx) {{\nint key = 0; volatile u64 *cell = cells.lookup(&key);\n"
        f"if (cell) {{\n{adds}}}\nreturn 0; }}\n"
    )
    lines = (HEAD + "int f\n\n\n").count("\n")
    added = {
        i.line: i.imm
        for i in made.functions["f"].instructions
        if i.opcode == b.ALU64 | b.ADD and i.line > lines
    }
    expected = [*range(4), *range(4)]
    expected += [
        *(operation_log.H2D, operation_log.D2H, operation_log.D2D, operation_log.H2H, operation_log.MEMSET),
        *(
            operation_log.RECORDED,
            operation_log.WAIT,
            operation_log.GRAPH,
            operation_log.SYNC,
            operation_log.API,
        ),
    ]
    found = [added.get(lines + 1 + 2 * n, 0) for n in range(len(names))]
    assert found == expected


def test_host_programs_stand_beside_device_programs():
    """And their maps know how the kernel wants to have them made."""
    made = compiled(
        """#include <gpubpf.h>
struct seen { u64 launch, host_ns; u32 gpu; };
struct record { u64 ns; char comm[16]; };
GPU_SHARED_ARRAY(cells, struct seen, 4096);
GPU_WARP_ARRAY(warps, u64, 2);
BPF_HASH(starts, u32, u64);
BPF_RINGBUF_OUTPUT(ring, 8);
BPF_PERF_OUTPUT(perf);
BPF_STACK_TRACE(stacks, 1024);
BPF_PERCPU_ARRAY(counts, u64, 3);
int at_launch(struct gpu_launch *ctx) {
    int key = ctx->launch & 4095;
    struct seen *cell = cells.lookup(&key);
    if (cell)
        cell->host_ns = bpf_ktime_get_ns() - ctx->call_ns;
    struct record record = {.ns = ctx->threads + ctx->gpu + ctx->stream + ctx->kernel};
    bpf_get_current_comm(&record.comm, sizeof(record.comm));
    ring.ringbuf_output(&record, sizeof(record), 0);
    perf.perf_submit(ctx, &record, sizeof(record));
    u32 thread = bpf_get_current_pid_tgid();
    u64 stack = stacks.get_stackid(ctx, BPF_F_USER_STACK);
    starts.update(&thread, &stack);
    counts.increment(1);
    return 0;
}
int enters(struct gpu_entry *ctx) {
    int key = ctx->launch & 4095;
    struct seen *cell = cells.lookup(&key);
    u64 *count = warps.lookup(&key);
    if (cell && count)
        cell->gpu = *count;
    return 0;
}
RAW_TRACEPOINT_PROBE(sched_switch) { return 0; }
"""
    )
    assert {f.name: f.point for f in made.functions.values()} == {
        "at_launch": "launch",
        "enters": "entry",
        "raw_tracepoint__sched_switch": "host",
    }
    assert [f.name for f in made.device_functions] == ["enters"]
    assert [f.name for f in made.host_functions] == ["at_launch", "raw_tracepoint__sched_switch"]
    assert {name: (m.kind, m.kernel_attributes) for name, m in made.maps.items()} == {
        "cells": ("shared_array", (2, 4, 24, 4096, 1 << 10)),
        "warps": ("warp_array", (2, 4, 8, 2, 0)),
        "starts": ("hash", (1, 4, 8, 10240, 0)),
        "ring": ("ringbuf", (27, 0, 0, 32768, 0)),
        "perf": ("ringbuf", (4, 4, 4, 0, 0)),
        "stacks": ("type 7", (7, 4, 127 * 8, 1024, 0)),
        "counts": ("percpu_array", (6, 4, 8, 3, 0)),
    }
    assert made.maps["ring"].value_dtype.names == ("ns", "comm")
    assert compile.from_json(json.loads(json.dumps(compile.to_json(made))), made.text) == made


BAD = {
    "a map on both sides": (
        "int f(struct gpu_exit *ctx) { int k = 0; u64 *v = cells.lookup(&k); return v ? *v : 0; }\n"
        "int g(struct gpu_launch *ctx) { int k = 0; u64 *v = cells.lookup(&k); return v ? *v : 0; }",
        "map cells is used by f on the GPU and by g on the host; declare it with GPU_SHARED_ARRAY",
    ),
    "a map of threads on the host": (
        "GPU_THREAD_ARRAY(own, u64, 1);\n"
        "int g(struct gpu_launch *ctx) { int k = 0; u64 *v = own.lookup(&k); return v ? *v : 0; }",
        "map own is in GPU memory, which host program g cannot access",
    ),
    "what lanes find out on the host": (
        "GPU_SHARED_ARRAY(own, u64, 1);\nint g(struct gpu_operation *ctx) {\nint k = 0; u64 *v = own.lookup(&k);\n"
        "if (v)\n*v = gpu_match(ctx->bytes);\nreturn 0; }",
        "C line 7: gpu_match exists only on a GPU, and g runs on the host",
    ),
    "an array by site on the host": (
        "GPU_SITE_ARRAY(own, u64);\n"
        "int g(struct gpu_launch *ctx) { int k = 0; u64 *v = own.lookup(&k); return v ? *v : 0; }",
        "map own is in GPU memory, which host program g cannot access",
    ),
    "a tracepoint that is not there": (
        "TRACEPOINT_PROBE(sched, sched_swatch) { return args->prev_pid; }",
        "no tracepoint sched:sched_swatch",
    ),
    "a name that is not there": (
        "int f(struct gpu_exit *ctx) {\nreturn nothing; }",
        "C line 4: use of undeclared",
    ),
    "a missing semicolon": ("int f(struct gpu_exit *ctx) {\nreturn 0 }", "C line 4: expected ';'"),
    "a header that is not there": ("#include <nothing.h>", "C line 3: 'nothing.h' file not found"),
    "an unknown method": (
        "int f(struct gpu_exit *ctx) {\ncells.multiply(1); return 0; }",
        "C line 4: no member named",
    ),
    "an unknown type": ("GPU_HASH(h, struct nothing, u64, 4);", "C line 3: "),
    "a map of no entries": (
        "GPU_ARRAY(none, u64, 0);",
        "the kernel cannot create map none: Invalid argument; correct its sizes",
    ),
    "a static program": ("static int f(struct gpu_exit *ctx) { return 0; }", "f is static or inline"),
    "a function elsewhere": ("int g(int);\nint f(struct gpu_exit *ctx) { return g(1); }", "C line 4: "),
    "a string": (
        'int f(struct gpu_exit *ctx) {\ngpubpf_puts("a text that is long enough"); return 0; }',
        "C line 4: refers to",
    ),
    "a table of constants": (
        "static const u64 t[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};\nint f(struct gpu_exit *ctx) {\nreturn t[ctx->work % 9]; }",
        "C line 5: refers to",
    ),
    "a global variable": ("u64 all;\nint f(struct gpu_exit *ctx) {\nreturn all++; }", "C line 5: refers to"),
    "a signed division": (
        "int f(struct gpu_exit *ctx) {\nreturn (s64)ctx->work / 3; }",
        "C line 4: BPF has no signed division",
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BAD)
def test_what_does_not_compile(name, capfd):
    text, message = BAD[name]
    compiled(HEAD)  # skips where nothing compiles
    with pytest.raises(CompileError) as caught:
        compile.compile_text(HEAD + text)
    said = str(caught.value)
    assert message in said.replace("device program f, ", "")
    assert "\n" not in said
    assert ";" in said
    assert capfd.readouterr() == ("", "")


def test_maps_that_the_kernel_does_not_make():
    """That is not a fault of the text, whatever words are in it."""
    text = (
        HEAD
        + "BPF_ARRAY(plain, u64, 8); /* an error, invalid */\n"
        + "".join(f"BPF_ARRAY(more{i}, u64, 8);\n" for i in range(40))
    )
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = (n for n in itertools.count() if not os.path.exists(f"/proc/self/fd/{n}"))
    limit = next(itertools.islice(unused, 20, None))  # it bounds the numbers of files, and there may be gaps
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with pytest.raises(
            CompileError, match=r"^the kernel cannot create map \w+: Too many open files; raise the limits"
        ):
            compile._compile(text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_compiled_on_another_thread():
    """There, the C library's memory lies at addresses of more than 32 bits."""
    made = compiled(HEAD)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(compile._compile, HEAD).result() == made


def test_compiled_in_a_directory_with_a_long_path(monkeypatch, tmp_path):
    place = tmp_path.joinpath(*["a long path"] * 24)
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    text = HEAD + "int on_exit(struct gpu_exit *ctx) { return 7; }\n"
    assert list(compile._compile(text).functions) == ["on_exit"]


def test_compiled_once(monkeypatch, tmp_path):
    """The second time needs no bcc; another text, or a changed header, is another program."""
    compiled(HEAD)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = compile.compile_text(HEAD)
    monkeypatch.setattr(compile, "_compile", lambda text: pytest.fail("compiled again"))
    assert compile.compile_text(HEAD) == made
    key = compile.program_key(HEAD)
    monkeypatch.setattr(headers, "content", lambda: b"others")
    assert compile.program_key(HEAD) != key


def test_damaged_cache_is_passed_over(monkeypatch, tmp_path):
    compiled(HEAD)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = compile.compile_text(HEAD)
    monkeypatch.setattr(compile, "_compile", lambda text: made)
    for damage in (b"", b"{", b"[]", b'{"functions": {"f": {}}, "maps": []}', b'{"functions": 3}'):
        cache.default().put("program", compile.program_key(HEAD), damage)
        assert compile.compile_text(HEAD) == made


def test_without_bcc_or_the_right_to_use_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(privileges, "capable", lambda: False)
    text = HEAD + "/* not compiled before */"
    with pytest.raises(CompileError, match=r"CAP_BPF; run it as root|python3-bpfcc"):
        compile.compile_text(text)
    monkeypatch.setitem(__import__("sys").modules, "bcc", None)
    with pytest.raises(CompileError, match="python3-bpfcc"):
        compile.compile_text(text)


def test_the_other_package_of_that_name(monkeypatch, tmp_path):
    import types

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "bcc", types.ModuleType("bcc"))
    with pytest.raises(CompileError, match="another project's"):
        compile.compile_text(HEAD + "/* nor this */")


def test_increments_are_spelled_out():
    text = 'a.increment(k);\n/* b.increment(k) */ "c.increment(k)";\nd . atomic_increment ( f(x, y),\n 3 ); e.increment('
    made = compile.spell_out_increments(text)
    assert made.count("lookup_or_try_init") == 2
    assert made.count("\n") == text.count("\n")
    assert "typeof(d.key) _gpubpf_key = ( f(x, y))" in made
    assert '/* b.increment(k) */ "c.increment(k)"' in made
    assert made.endswith("e.increment(")


def test_header_offers_what_bpf_programs_use():
    """A program with everything, run natively: its counts are right."""
    made = compiled(
        """#include <gpubpf.h>
GPU_HASH(seen, u32, u64, 64);
GPU_HISTOGRAM(sizes, 64);
GPU_PARAM(filter, struct gpu_filter);
static noinline u64 half(u64 x) { return x / 2; }
int f(struct gpu_exit *ctx) {
    int zero = 0;
    struct gpu_filter *chosen = filter.lookup(&zero);
    if (!chosen || !gpu_selected(chosen))
        return 0;
    u32 kind = half(ctx->work);
    seen.increment(kind);
    seen.increment(kind, 10);
    sizes.increment(bpf_log2l(ctx->work));
    return 0;
}
"""
    )
    function = made.functions["f"]
    check(made, function)
    native = Native(made, function, {"tid.x": 5, "ctaid.x": 2})
    memory = {name: ctypes.create_string_buffer(maps.initial(d)) for name, d in made.maps.items()}
    arguments = {f"map_{name}": ctypes.addressof(m) for name, m in memory.items()}
    for low, high in ((0, 9), (6, 9), (5, 5), (0, 4)):
        for a in native.module.arguments:
            if a.kind == "param":
                arguments[a.name] = 0 if a.offset % 8 == 0 else 0xFFFFFFFF
                if a.offset == 24:
                    arguments[a.name] = low
                if a.offset == 28:
                    arguments[a.name] = high - low
        native(**arguments, work=1000)
    found = maps.decode(made.maps["seen"], memory["seen"].raw)
    assert found.tolist() == [(500, 22)]
    assert np.flatnonzero(maps.decode(made.maps["sizes"], memory["sizes"].raw)).tolist() == [10]
