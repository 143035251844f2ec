"""Both gates: what is rejected, with the C line that is to blame, and what must not be."""

from __future__ import annotations

import random
import re

import pytest

from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import VerifyError
from gpubpf.kernel import bpf_syscall
from gpubpf.lower import nvptx
from gpubpf.record import replace
from gpubpf.verify import kernel, ranges, verify
from gpubpf.verify.flow import loop_exits
from gpubpf.verify.rules import MAX_INSTRUCTIONS, check
from gpubpf_asm import (
    END,
    HASH,
    OUT,
    RING,
    alu,
    atomic,
    call,
    call_program,
    ja,
    jump,
    leave,
    load,
    load_map,
    lookup,
    mov,
    movi,
    program,
    store,
    storei,
)
from gpubpf_bcc import compiled

HEAD = """#include <gpubpf.h>
struct tally { u64 runs, work; };
struct event { u32 kind; u64 value; };
struct __attribute__((packed)) odd { u8 tag; u64 value; };
struct table { u64 cells[8]; };
struct pair { u32 a, b; };
GPU_THREAD_ARRAY(tallies, struct tally, 1);
GPU_ARRAY(counts, struct table, 4);
GPU_ARRAY(odds, struct odd, 1);
GPU_HASH(seen, u64, u64, 64);
GPU_RINGBUF(events, struct event, 4);
GPU_PARAM(chosen, struct table);
GPU_WARP_ARRAY(warps, u64, 2);
GPU_BLOCK_ARRAY(blocks, u64, 2);
GPU_KERNEL_ARRAY(whole, u64, 2);
GPU_SHARED_ARRAY(shared, struct pair, 2);
"""
LOOKUP = "int key = 0; struct tally *mine = tallies.lookup(&key); if (!mine) return 0;"
TABLE = "int key = ctx->site; struct table *t = counts.lookup(&key); if (!t) return 0;"
PARAM = "int key = 0; struct table *t = chosen.lookup(&key); if (!t) return 0;"

# Name: (body of on_exit with /*!*/ on the line to blame, part of the message).
BAD = {
    "context beyond its end": ("return *(u64 *)((char *)ctx + 24) & 1; /*!*/", "beyond struct gpu_exit"),
    "context before its start": ("return *(u64 *)((char *)ctx - 8) & 1; /*!*/", "beyond struct gpu_exit"),
    "context read unaligned": ("return *(u32 *)((char *)ctx + 2) & 1; /*!*/", "unaligned"),
    "context written": ("ctx->work = 1; /*!*/", "writes to its context"),
    "context at a variable offset": (
        "u64 at = bpf_get_globaltimer() & 8;\nreturn *(u64 *)((char *)ctx + at) & 1; /*!*/",
        "not constant",
    ),
    "lookup not tested": (
        "int key = ctx->site;\nstruct tally *mine = tallies.lookup(&key);\nmine->runs++; /*!*/",
        "NULL",
    ),
    "beyond a map value": (f"{LOOKUP}\n((u64 *)mine)[2] = 1; /*!*/", "16 bytes"),
    "before a map value": (f"{LOOKUP}\n((u64 *)mine)[-1] = 1; /*!*/", "offset -8"),
    "index without bounds": (f"{TABLE}\nt->cells[ctx->work] = 1; /*!*/", "without bounds"),
    "index bounded too high": (f"{TABLE}\nt->cells[ctx->work & 15] = 1; /*!*/", "64 bytes"),
    "packed value": (
        "int key = 0; struct odd *o = odds.lookup(&key); if (!o) return 0;\n__sync_fetch_and_add(&o->value, 1); /*!*/",
        "not aligned",
    ),
    "a maximum on the stack": (
        "u64 cell = ctx->work;\ngpu_max(&cell, 5); /*!*/\nreturn cell & 1;",
        "not in the value of a map",
    ),
    "a maximum beyond a value": (
        f"{LOOKUP}\ngpu_max((u64 *)mine + 2, 5); /*!*/",
        "reaches beyond the 16 bytes",
    ),
    "a maximum in a parameter": (f"{PARAM}\ngpu_max(&t->cells[1], 5); /*!*/", "not in the value of a map"),
    "parameter written": (f"{PARAM}\nt->cells[0] = 1; /*!*/", "read-only"),
    "parameter at a variable offset": (f"{PARAM}\nreturn t->cells[ctx->work & 7] & 1; /*!*/", "not constant"),
    "parameter with another key": (
        "int key = ctx->site;\nstruct table *t = chosen.lookup(&key); /*!*/\nif (t && t->cells[0]) return 0;",
        "key that is not constant",
    ),
    "address in a map": (f"{LOOKUP}\nmine->work = (u64)mine; /*!*/", "stores an address"),
    "record size not constant": (
        "struct event e = {};\nevents.ringbuf_output(&e, ctx->work & 7, 0); /*!*/",
        "size that is not constant",
    ),
    "record with unwritten padding": (
        "struct event e;\ne.kind = 1;\ne.value = 2;\nevents.ringbuf_output(&e, sizeof(e), 0); /*!*/",
        "never written",
    ),
    "record never submitted": (
        "struct event *e = events.ringbuf_reserve(sizeof(struct event)); /*!*/\nif (e) e->value = 1;",
        "not submitted",
    ),
    "record used after submit": (
        "struct event *e = events.ringbuf_reserve(sizeof(struct event));\nif (!e) return 0;\n"
        "events.ringbuf_submit(e, 0);\ne->value = 1; /*!*/",
        "",
    ),
    "beyond a reserved record": (
        "u64 *e = events.ringbuf_reserve(16);\nif (!e) return 0;\ne[2] = 1; /*!*/\nevents.ringbuf_submit(e, 0);",
        "16 bytes",
    ),
    "record too long": (
        "u64 *e = events.ringbuf_reserve(5000); /*!*/\nif (e) events.ringbuf_submit(e, 0);",
        "5000",
    ),
    "a mark where a record is held": (
        "u64 *e = events.ringbuf_reserve(16);\nif (!e) return 0;\ngpu_seldom(); /*!*/\n"
        "e[0] = 1; e[1] = 2;\nevents.ringbuf_submit(e, 0);",
        "calls gpu_seldom while the record reserved in events is held",
    ),
    "a mark behind a store": (
        "int key = 0;\nstruct tally *mine = tallies.lookup(&key);\nif (mine) mine->runs = 1;\ngpu_seldom(); /*!*/",
        "and may begin again here; call gpu_seldom before",
    ),
    "a mark behind an effect of one path": (
        "u64 key = 0;\nif (gpu_clock() & 1) seen.increment(key, 1);\ngpu_seldom(); /*!*/",
        "and may begin again here; call gpu_seldom before",
    ),
    "a mark in a loop with effects": (
        "u64 key = 0;\nfor (u32 i = 0; i < 4; i++) {\nif (i == gpu_lane()) gpu_seldom(); /*!*/\nseen.increment(key, 1);\n}",
        "and may begin again here; call gpu_seldom before",
    ),
    "an exit of a thread that leaves": (
        "bpf_cuda_exit(); /*!*/",
        "does not work at this point; call it in a program with a struct gpu_entry",
    ),
    "a record held in a long loop": (
        "struct event *e = events.ringbuf_reserve(sizeof(struct event)); u64 s = 0; if (!e) return 0;\n"
        'for (u64 n = 0; n < ctx->work; n++) { s += n; asm volatile("" : "+r"(s)); } /*!*/\n'
        "e->value = s; events.ringbuf_submit(e, 0);",
        "more than 65536 instructions",
    ),
    "a string that is not constant": (
        'char name[4] = {};\nname[0] = ctx->work;\nbpf_trace_printk("%s", name); /*!*/',
        "not constant",
    ),
    "a string that is a number": ('bpf_trace_printk("%s", ctx->work); /*!*/', "not on the stack"),
    "time of the host": (
        "return bpf_ktime_get_ns() & 1; /*!*/",
        "bpf_ktime_get_ns does not exist on a GPU; use bpf_get_globaltimer",
    ),
    "helper unknown on a GPU": ("return bpf_get_prandom_u32() & 1; /*!*/", "does not exist on a GPU"),
    "helper of kernels only": (
        "char name[16];\nbpf_get_current_comm(name, 16); /*!*/",
        "does not exist on a GPU",
    ),
    "number as an address": ("u64 *p = (u64 *)ctx->work;\n*p = 1; /*!*/", "only a number"),
    "kernel memory": (
        "u64 *p = (u64 *)0xffff800000000000ull;\n*(volatile u64 *)p = 1; /*!*/",
        "only a number",
    ),
    "array on the stack with a variable index": (
        "u64 a[8] = {};\n__builtin_memset(a, 1, sizeof(a));\nreturn *(volatile u64 *)&a[ctx->work & 7] & 1; /*!*/",
        "not constant",
    ),
    "loop without end": (
        'u64 n = ctx->work;\nwhile (n != 1) { /*!*/\nn = n & 1 ? 3 * n + 1 : n / 2;\nasm volatile("" : "+r"(n));\n}',
        "",
    ),
    "waits for another thread": (
        f"{TABLE}\nwhile (__sync_val_compare_and_swap(&t->cells[0], 0, 1)) /*!*/\n;\nt->cells[0] = 0;",
        "another thread",
    ),
    "waits for a flag": (f"{TABLE}\nwhile (!*(volatile u64 *)&t->cells[1]) /*!*/\n;", "another thread"),
    "too many turns": (
        f"{TABLE} u64 at = 0;\nfor (u64 n = 0; n < 100000; n++) {{ t->cells[at] = n; at = at == 7 ? 0 : at + 1; }} /*!*/",
        "more than 65536 instructions",
    ),
    "text that is not constant": (
        "char text[8] = {};\ntext[0] = ctx->work;\ngpubpf_puts(text); /*!*/",
        "not constant",
    ),
    "value that may be NULL given to a helper": (
        "u64 key = 1, *v = seen.lookup(&key);\nseen.update(&key, v); /*!*/",
        "NULL",
    ),
    "variable never set": ("u64 v;\nseen.update(&v, &v); /*!*/", "never written"),
}


def bad_text(body):
    return f"{HEAD}int on_exit(struct gpu_exit *ctx) {{\n{body}\nreturn 0;\n}}\n"


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BAD)
def test_rejected_with_its_line(name):
    body, message = BAD[name]
    text = bad_text(body)
    made = compiled(text)
    with pytest.raises(VerifyError) as caught:
        verify(made, made.functions["on_exit"])
    said = str(caught.value)
    line = next(n for n, source in enumerate(text.split("\n"), 1) if "/*!*/" in source)
    named = re.search(r"C line (\d+) `(.*?)`:", said)
    assert named, said
    # Compilers put a loop's test, and what they hoist, at a line beside.
    near = 3 if "loop" in name or "turns" in name or "waits" in name else 1
    assert abs(int(named[1]) - line) <= near, said
    assert message in said, said
    assert said.count(";") >= 1
    assert "\n" not in said
    assert said.startswith("device program on_exit, instruction ")


def test_there_are_enough_kinds():
    assert len(BAD) >= 25


GOOD = {
    "a tally": f"{LOOKUP} mine->runs++; mine->work += ctx->work;",
    "an index within bounds": f"{TABLE} t->cells[ctx->work & 7] = 1;",
    "an index tested": f"{TABLE} u64 n = ctx->work; if (n < 8) t->cells[n]++;",
    "a signed index tested": f"{TABLE} s64 n = ctx->work; if (n >= 0 && n < 8) t->cells[n]++;",
    "atomics": f"{TABLE} __sync_fetch_and_add(&t->cells[3], ctx->work);",
    "a loop over a value": f"{TABLE} u64 s = 0; for (int n = 0; n < 8; n++) s += t->cells[n]; t->cells[0] = s;",
    "a bounded try at a lock": (
        f"{TABLE} for (int n = 0; n < 16; n++) if (!__sync_val_compare_and_swap(&t->cells[0], 0, 1)) break;"
    ),
    "a hash": "u64 key = ctx->work, one = 1; u64 *v = seen.lookup(&key); if (v) *v += 1; else seen.update(&key, &one);",
    "lookup or init": (
        "u64 key = ctx->work, zero = 0; u64 *v = seen.lookup_or_try_init(&key, &zero); if (v) __sync_fetch_and_add(v, 1);"
    ),
    "increments": "seen.increment(ctx->work); seen.increment(ctx->work, 5);",
    "a record": "struct event e = {}; e.kind = 1; e.value = ctx->work; events.ringbuf_output(&e, sizeof(e), 0);",
    "a reserved record": (
        "struct event *e = events.ringbuf_reserve(sizeof(struct event)); if (!e) return 0; e->value = ctx->work;"
        " if (ctx->work & 1) events.ringbuf_discard(e, 0); else events.ringbuf_submit(e, 0);"
    ),
    "prints": 'bpf_trace_printk("work %d at %d\\n", ctx->work, ctx->site); gpu_puts("100% done");',
    "a maximum": f"{TABLE} gpu_max(&t->cells[ctx->work & 7], ctx->launch + gpu_active());",
    "every array by shape": (
        "int key = 1; u64 *w = warps.lookup(&key), *b = blocks.lookup(&key), *k = whole.lookup(&key);"
        " struct pair *s = shared.lookup(&key);"
        " if (w && b && k && s) { __sync_fetch_and_add(w, 1); gpu_max(b, *k); *k = *w; s->b = s->a; }"
    ),
    "every index": (
        "u64 x, y, z, d; bpf_get_block_idx(&x, &y, &z); d = x; bpf_get_block_dim(&x, &y, &z); d += y;"
        " bpf_get_thread_idx(&x, &y, &z); d += z; gpu_grid_dim(&x, &y, &z); d += x + gpu_lane() + gpu_warp() + gpu_sm();"
        f" d += gpu_global_thread() + gpu_clock(); bpf_gpu_membar(); {TABLE} t->cells[d & 7] = bpf_get_current_pid_tgid();"
    ),
    "bpftime's numbers": (
        "u64 x, y, z; bpf_get_grid_dim(&x, &y, &z);"
        f" {TABLE} t->cells[x & 7] = bpf_get_sm_id() + bpf_get_warp_id() + bpf_get_lane_id();"
    ),
    "a loop of unknown length": (
        f'{TABLE} u64 s = 0; for (u64 n = 0; n < ctx->work; n++) {{ s += n; asm volatile("" : "+r"(s)); }} t->cells[0] = s;'
    ),
    "a deletion in an array": f"{TABLE} int zero = 0; t->cells[0] = counts.delete(&zero);",
    "a parameter": f"{PARAM} u64 s = t->cells[0]; for (int n = 1; n < 8; n++) s += t->cells[n]; return s & 1;",
    "a part of a context field": "return (u32)(ctx->work >> 32) & 1;",
    "a structure by value": (
        "struct pair p = { 1, ctx->site }, q = p; u64 key = q.a; u64 v = q.b; seen.update(&key, &v);"
    ),
    "memory read twice in a loop": (
        f"{TABLE} u64 s = 0; for (int n = 0; n < 100; n++) s += *(volatile u64 *)&t->cells[n & 7]; t->cells[0] = s;"
    ),
    "many branches": (
        "u64 s = 0; "
        + "".join(f"if (ctx->work >> {n} & 1) s += {n} * bpf_get_globaltimer();" for n in range(24))
        + f"{TABLE} t->cells[0] = s;"
    ),
    "a switch": (
        f"{TABLE} switch (ctx->site) {{ case 0: t->cells[1]++; break; case 1: t->cells[2]++; break;"
        " default: t->cells[3]++; }"
    ),
    "a function of its own": f"{TABLE} t->cells[twice(ctx->work) & 7]++;",
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", GOOD)
def test_accepted_by_both(name):
    from gpubpf.lower import nvptx

    text = bad_text(GOOD[name]).replace(
        "int on_exit", "static noinline u64 twice(u64 x) { return 2 * x + 1; }\nint on_exit"
    )
    made = compiled(text)
    checked, release = verify(made, made.functions["on_exit"])
    assert release
    assert nvptx.lower(made, checked).ptx.startswith("{")


def test_a_string_becomes_part_of_the_text():
    body = (
        'char name[] = "load 50%"; bpf_trace_printk("%d: %s%% (%-3s)\\n", ctx->work, name, name);'
        'char short_[] = "ab", empty[] = ""; bpf_trace_printk("%4s|%s", short_, empty);'
        'bpf_trace_printk("%016llx %s", ctx->work, short_);'
    )
    made = compiled(HEAD + f"int on_exit(struct gpu_exit *ctx) {{ {body} return 0; }}")
    checked, release = verify(made, made.functions["on_exit"])
    printed = [call for call in checked.calls.values() if call.helper == 6]
    assert {call.text for call in printed} == {"%d: load 50%%%% (load 50%%)\n", "  ab|", "%016llx ab"}
    assert release


def test_contexts_of_other_points_are_shorter():
    made = compiled(HEAD + "int f(struct gpu_block_begin *ctx) { return *(u64 *)((char *)ctx + 16) & 1; }")
    with pytest.raises(VerifyError, match="beyond struct gpu_block_begin"):
        verify(made, made.functions["f"])


# In instructions: what a C compiler does not produce


def rejected(code, match, maps=(OUT,), **more):
    code = [replace(i, line=n + 1) for n, i in enumerate(code)]
    made, function = program(code, maps, text="\n".join(f"line {n + 1}" for n in range(len(code))), **more)
    with pytest.raises(VerifyError, match=match) as caught:
        check(made, function)
    return str(caught.value)


def test_instructions_that_make_no_sense():
    for code, match in [
        ([], "empty"),
        ([movi(0, 0)], "past the end"),
        ([movi(11, 0), *END], "beyond r10"),
        ([b.Instruction(0x08 | b.LDX), *END], "unknown instruction"),
        ([b.Instruction(b.ALU64 | b.ADD, 1, 0, 7), *END], "unknown instruction"),
        ([b.Instruction(b.LD_IMM64, 1), *END], "half of an ld_imm64"),
        ([ja(5), *END], "out of the program"),
        ([ja(1), *load_map(1, "out"), *END], "out of the program"),
        ([ja(-1), *END], "never end"),
        ([movi(10, 0), *END], "frame pointer"),
        ([mov(0, 2), leave()], "before it has a value"),
        ([leave()], "without a value"),
        ([mov(0, 10), leave()], "returns an address"),
        ([*load_map(1, "missing"), *END], "not declared"),
        ([b.Instruction(b.LD_IMM64, 1, 3, imm=5), b.Instruction(0), *END], "variable or an unknown map"),
        ([call_program(500), *END], "calls no function"),
        ([atomic(0x33, 10, -8, 1), *END], "unknown instruction"),
        ([movi(1, 1), alu(b.LSH, 1, imm=64), *END], "shifts by 64"),
        ([movi(1, 1), alu(b.MOD, 1, imm=0), *END], "constant 0"),
        ([storei(10, -12, 0), *END], "unaligned"),
        ([movi(1, 1), alu(b.RSH, 1, imm=32, wide=False), *END], "shifts by 32"),
        ([call(99999), *END], "does not exist"),
        ([movi(0, 0)] * (MAX_INSTRUCTIONS + 1) + [leave()], "at most"),
    ]:
        rejected(code, match)


def test_addresses_are_not_numbers():
    value = [*lookup("out"), mov(9, 0)]
    for code, match in [
        ([mov(1, 10), alu(b.MUL, 1, imm=2), *END], "calculates with an address"),
        ([mov(1, 10), alu(b.ADD, 1, imm=2, wide=False), *END], "calculates with an address"),
        ([mov(1, 10), alu(b.ADD, 1, 10), *END], "two addresses"),
        ([mov(1, 10), alu(b.NEG, 1), *END], "negates"),
        ([mov(1, 10), b.Instruction(b.ALU | b.END | 8, 1, imm=64), *END], "swaps"),
        ([alu(b.MOV, 1, 10, wide=False), *END], "truncates an address"),
        ([jump(b.JGT, 10, 0, imm=5), *END], "compares an address"),
        ([store(10, -8, 10, 4), *END], "a part of an address"),
        ([store(10, -8, 10), load(1, 10, -8, 4), *END], "a part of an address"),
        ([*value, mov(1, 10), atomic(0xE1, 9, 0, 1), *END], "atomic operation on an address"),
        ([store(10, -8, 10), movi(1, 1), atomic(0x00, 10, -8, 1), *END], "atomic operation on an address"),
        ([*load_map(1, "out"), load(2, 1, 0), *END], "reads or writes the map out"),
        ([*load_map(1, "out"), alu(b.ADD, 1, imm=8), *END], "address of a map"),
        ([*value, mov(1, 9), alu(b.ADD, 1, imm=0x7FFFFFFF), *END], "without bounds"),
        ([*value, atomic(0, 9, 4, 8), *END], "before it has a value|not aligned"),
        ([load(1, 10, -8), *END], "never written"),
        ([storei(10, -520, 0), *END], "outside of the stack"),
        ([storei(10, 0, 0), *END], "outside of the stack"),
    ]:
        rejected(code, match)


@pytest.mark.parametrize("size, step", [(4, 4), (6, 4), (12, 8), (24, 8)])
def test_keys_in_maps_are_aligned_as_they_are_read(size: int, step: int):
    """A key of 12 bytes is read as 8 and 4. On a GPU, a load that is not aligned ends the context."""
    sized = MapDefinition("sized", "hash", size, 8, 64)
    for at in range(17):
        code = [*lookup("out"), mov(2, 0), alu(b.ADD, 2, imm=at), *load_map(1, "sized"), call(1), *END]
        if at % step:
            with pytest.raises(VerifyError, match="its key is not aligned"):
                check(*program(code, (OUT, sized)))
        else:
            check(*program(code, (OUT, sized)))


def test_calls_of_helpers():
    key = [storei(10, -8, 1), mov(2, 10), alu(b.ADD, 2, imm=-8)]
    maps = (OUT, HASH, RING)
    for code, match in [
        ([*load_map(1, "ring"), *key, call(1), *END], "does not work on map ring"),
        ([*load_map(1, "ring"), *key, call(3), *END], "does not work on map ring"),
        ([movi(1, 1), *key, call(1), *END], "given no map"),
        ([*load_map(1, "hash"), movi(2, 5), call(1), *END], "not the address of readable"),
        ([*load_map(1, "hash"), *key, mov(3, 2), movi(4, 9), call(2), *END], "flags 9"),
        ([movi(1, 1), mov(2, 10), mov(3, 10), call(503), *END], "not the address of writable"),
        ([*load_map(1, "ring"), movi(2, 8), movi(3, 1), call(131), *END], "with flags"),
        (
            [storei(10, -8, 1), mov(1, 10), alu(b.ADD, 1, imm=-8), movi(2, 0), call(132), *END],
            "not a reserved record",
        ),
        (
            [*load_map(1, "hash"), store(10, -8, 10), mov(2, 10), alu(b.ADD, 2, imm=-8), call(1), *END],
            "holds an address",
        ),
        ([*load_map(1, "hash"), *key, call(1), load(3, 2, 0), *END], "before it has a value"),
        ([mov(1, 10), movi(2, 8), call(6), *END], "outside of the stack|never written"),
    ]:
        rejected(code, match, maps)


def test_helpers_write_no_constants():
    constants = replace(OUT, name="constants", contents=bytes(256), constant=True)
    maps = (constants, OUT, HASH)
    address = [*lookup("constants"), mov(6, 0)]
    rest = [mov(2, 6), alu(b.ADD, 2, imm=8), mov(3, 6), alu(b.ADD, 3, imm=16)]
    key = [storei(10, -8, 1), mov(2, 10), alu(b.ADD, 2, imm=-8)]
    for code in [
        [*address, mov(1, 6), *rest, call(503), *END],
        [*address, mov(1, 6), movi(2, 5), call(607), *END],
        [*address, *load_map(1, "constants"), *key, mov(3, 6), movi(4, 0), call(2), *END],
        [*address, storei(6, 0, 1), *END],
    ]:
        rejected(code, "writes to a constant in constants; declare the variable without const", maps)
        other = [replace(i, map="out") if i.map == "constants" else i for i in code]
        check(*program(other, maps))


def test_what_a_helper_writes_is_an_effect():
    """The program may begin again in `gpu_seldom` (620), and would do it twice."""
    where = [mov(1, 6), mov(2, 6), alu(b.ADD, 2, imm=8), mov(3, 6), alu(b.ADD, 3, imm=16)]
    for write in ([*where, call(503)], [mov(1, 6), movi(2, 5), call(607)], [storei(6, 0, 1)]):
        rejected([*lookup("out"), mov(6, 0), *write, call(620), *END], "may begin again here")
        check(*program([*lookup("out"), mov(6, 0), call(620), *write, *END]))
    here = [mov(1, 10), alu(b.ADD, 1, imm=-8), mov(2, 10), alu(b.ADD, 2, imm=-16)]
    check(*program([*here, mov(3, 10), alu(b.ADD, 3, imm=-24), call(503), call(620), *END]))


def test_different_maps_at_one_call():
    """Each branch has a call of its own, unless another block is between them and the call."""
    other = replace(OUT, name="other")
    code = [
        storei(10, -4, 0, 4),
        load(6, 1, 0),
        *load_map(1, "out"),
        jump(b.JEQ, 6, 2, imm=0),
        *load_map(1, "other"),
    ]
    code += [mov(2, 10), alu(b.ADD, 2, imm=-4), call(1), *END]
    made, function = program(code, (OUT, other))
    assert {call.map for call in verify(made, function)[0].calls.values()} == {"out", "other"}
    rejected([*code[:-5], ja(0), *code[-5:]], "different maps", (OUT, other))


def test_different_memory_at_one_load():
    code = [mov(6, 1), *lookup("out"), mov(1, 0), storei(10, -8, 0), load(3, 6, 0), jump(b.JEQ, 3, 2, imm=0)]
    code += [mov(1, 10), alu(b.ADD, 1, imm=-8), load(4, 1, 0), *END]
    made, function = program(code)
    kinds = {access.kind for access in verify(made, function)[0].accesses.values()}
    assert kinds == {"stack", "memory", "context"}
    rejected([*code[:-3], ja(0), *code[-3:]], "different memory")


def test_recursion_ends():
    assert "nested more than" in rejected([call_program(1), leave(), call_program(-1), leave()], "nested")


def test_address_of_a_dead_variable():
    code = [
        call_program(3),
        load(1, 0, 0),
        *END,
        storei(10, -8, 0),
        mov(0, 10),
        alu(b.ADD, 0, imm=-8),
        leave(),
    ]
    rejected(code, "local variable")


def test_the_line_is_named():
    said = rejected([movi(0, 0), movi(1, 5), load(2, 1, 0), leave()], "only a number")
    assert "instruction 2, C line 3 `line 3`" in said


def test_null_is_told_for_every_copy():
    """Tested through one register, used through another and through the stack."""
    two = replace(OUT, max_entries=2)
    code = [
        load(3, 1, 0),
        store(10, -4, 3, 4),
        *load_map(1, "out"),
        mov(2, 10),
        alu(b.ADD, 2, imm=-4),
        call(1),
    ]
    code += [
        mov(6, 0),
        store(10, -16, 0),
        jump(b.JNE, 6, 2, imm=0),
        *END,
        load(1, 0, 0),
        load(2, 10, -16),
        load(3, 2, 8),
        *END,
    ]
    made, function = program(code, (two,))
    assert check(made, function).steps


@pytest.mark.parametrize("seed", range(150))
def test_never_fails_otherwise_on_random_bytecode(seed):
    """Only VerifyError, whatever the bytes are; also near what is right."""
    rng = random.Random(seed)
    good = [
        *lookup("out"),
        mov(9, 0),
        load(1, 9, 0),
        atomic(1, 9, 8, 1),
        storei(10, -16, 3),
        load(2, 10, -16),
        *END,
    ]
    if seed % 3 == 0:
        code = list(b.decode(rng.randbytes(8 * rng.randrange(1, 40)) + bytes(8)))
    else:
        code = list(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(code))
            field = rng.choice(("opcode", "dst", "src", "offset", "imm"))
            limits = {
                "opcode": (0, 255),
                "dst": (0, 15),
                "src": (0, 15),
                "offset": (-520, 520),
                "imm": (-600, 600),
            }
            code[at] = replace(code[at], **{field: rng.randint(*limits[field])})
    made, function = program(code)
    try:
        checked = check(made, function)
    except VerifyError as error:
        assert "\n" not in str(error)
    else:
        kernel.stand_in(checked)


def test_ranges_hold_what_is_computed():
    """Every operation and comparison on random ranges, against sampled members."""
    rng = random.Random(11)
    operations = (b.ADD, b.SUB, b.MUL, b.DIV, b.OR, b.AND, b.LSH, b.RSH, b.MOD, b.XOR, b.ARSH)
    from gpubpf_asm import Interpreter

    def some():
        kind = rng.randrange(4)
        if kind == 0:
            return ranges.constant(rng.getrandbits(rng.choice((3, 8, 33, 64))))
        if kind == 1:
            lo = rng.getrandbits(rng.choice((4, 32, 64)))
            return ranges.within(lo, min(lo + rng.getrandbits(rng.choice((3, 31, 40))), ranges.U64))
        if kind == 2:
            return ranges.extend(ranges.within(0, rng.getrandbits(16)), 8)
        return ranges.operate(b.AND, ranges.ANY, ranges.constant(rng.getrandbits(64)), True, False)

    def member(r):
        for _ in range(20):
            x = rng.randint(r.lo, r.hi) & r.unknown | r.bits
            if r.lo <= x <= r.hi and r.slo <= b.signed(x) <= r.shi:
                return x
        return r.lo if r.includes(ranges.constant(r.lo)) else None

    for _ in range(4000):
        x, y = some(), some()
        p, q = member(x), member(y)
        if p is None or q is None:
            continue
        op, wide = rng.choice(operations), rng.random() < 0.5
        signed = op in (b.DIV, b.MOD) and rng.random() < 0.3
        result = ranges.operate(op, x, y, wide, signed)
        i = alu(op, 0, 1, wide=wide, offset=int(signed))
        assert result.includes(ranges.constant(Interpreter.arithmetic(i, p, q))), (
            op,
            wide,
            x,
            y,
            p,
            q,
            result,
        )
        op = rng.choice((b.JEQ, b.JGT, b.JGE, b.JSET, b.JNE, b.JSGT, b.JSGE, b.JLT, b.JLE, b.JSLT, b.JSLE))
        taken = Interpreter.taken(jump(op, 0, 0, 1, wide=wide), [p, q])
        refined = (ranges.refine if wide else ranges.refine32)(op, x, y, taken)
        assert refined is not None, (op, wide, x, y, p, q)
        assert refined[0].includes(ranges.constant(p)), (op, wide, x, y, p, q, refined)
        assert refined[1].includes(ranges.constant(q)), (op, wide, x, y, p, q, refined)


def indexed(*bound):
    """Access `out`, of 256 bytes, at r7, a field of the context, once `bound` has limited it."""
    code = [mov(6, 1), *lookup("out"), mov(9, 0), load(7, 6, 16), *bound]
    return program([*code, alu(b.ADD, 9, 7), load(1, 9, 0, 1), *END])


NARROW = alu(b.MOV, 7, 7, wide=False)
AT_LEAST_0, BELOW_0 = jump(b.JSGE, 7, 1, imm=0, wide=False), jump(b.JSGE, 7, 1, imm=-1, wide=False)
LIMITED = [
    (NARROW, AT_LEAST_0, movi(7, 0), jump(b.JSLE, 7, 1, imm=255, wide=False), movi(7, 255)),
    (alu(b.AND, 7, imm=255), b.Instruction(b.ALU | 8 | b.END, 7, imm=16), alu(b.RSH, 7, imm=8)),
    (alu(b.AND, 7, imm=255), movi(3, 0), jump(b.JSET, 3, 1, 7), ja(1), movi(7, 256)),
    (
        alu(b.MOV, 7, 7, offset=32),
        jump(b.JSGE, 7, 2, imm=0, wide=False),
        *END,
        jump(b.JSLE, 7, 2, imm=255, wide=False),
        *END,
    ),
]
TOO_FAR = [
    (NARROW, BELOW_0, movi(7, 0), jump(b.JSLE, 7, 1, imm=255, wide=False), movi(7, 255)),
    (AT_LEAST_0, movi(7, 0), jump(b.JSLE, 7, 1, imm=255, wide=False), movi(7, 255)),
    (alu(b.AND, 7, imm=1), b.Instruction(b.ALU | 8 | b.END, 7, imm=16)),
    (alu(b.AND, 7, imm=255), movi(3, 1), jump(b.JSET, 3, 1, 7), ja(1), movi(7, 256)),
]


@pytest.mark.parametrize("bound", LIMITED)
def test_bounds_by_32_bits_by_bytes_and_by_bits(bound):
    check(*indexed(*bound))


@pytest.mark.parametrize("bound", TOO_FAR)
def test_bounds_that_do_not_hold(bound):
    with pytest.raises(VerifyError):
        check(*indexed(*bound))


# The kernel's gate by itself


def test_the_kernel_is_asked():
    """A program that our gate would take is rejected by the kernel, and its words are quoted with the line."""
    text = (
        HEAD + f"int on_exit(struct gpu_exit *ctx) {{\n{TABLE}\nt->cells[ctx->work & 7] = 1;\nreturn 0;\n}}\n"
    )
    made = compiled(text)
    function = made.functions["on_exit"]
    checked = check(made, function)
    assert kernel.check(made, checked)
    pc = next(n for n, i in enumerate(function.instructions) if i.opcode & 0xF0 == b.AND and i.imm == 7)
    code = list(function.instructions)
    code[pc] = replace(code[pc], imm=8191)
    wrong = replace(checked, function=replace(function, instructions=tuple(code)))
    with pytest.raises(VerifyError, match=r"C line 19 .*the kernel's verifier says: .*(invalid|R\d)"):
        kernel.check(made, wrong)


def test_without_the_right_to_ask(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(bpf_syscall, "bpf", refuse)
    made, function = program([*lookup("out"), *END])
    assert kernel.check(made, check(made, function)) is None


BRANCHING_LOOP = r"""
#include <gpubpf.h>
GPU_KERNEL_ARRAY(words, u64, 1);
GPU_KERNEL_ARRAY(most, u64, 1);
int on_exit(struct gpu_exit *ctx) {
    int key = 0;
    u64 *word = words.lookup(&key), *cell = most.lookup(&key), best = 0;
    if (!word || !cell)
        return 0;
    #pragma nounroll
    for (int i = 0; i < 32; i++) {
        u64 value = *word >> i;
        if (value > best)
            best = value;
        if (value & 1)
            gpu_max(cell, value << gpu_log2(value));
    }
    gpu_max(cell, best);
    return 0;
}
"""


def test_a_loop_with_branches_is_one_way_where_their_numbers_do_not_matter():
    """2^64 ways through it, which differ in numbers that decide nothing; and it stays a loop in PTX."""
    made = compiled(BRANCHING_LOOP)
    checked = check(made, made.functions["on_exit"])
    assert checked.steps < 20000
    text = nvptx.lower(made, checked).ptx
    assert text.count("ld.global") <= 3 and text.count('.pragma "nounroll";') == 1


def test_what_an_index_is_known_to_be_survives_the_stack():
    """Also behind more ways than are followed apart: it decides which memory is reached."""
    code = [mov(6, 1), *lookup("out"), mov(9, 0), load(7, 6, 16), alu(b.AND, 7, imm=7), store(10, -24, 7)]
    code += [load(3, 6, 16), movi(5, 0)]
    for bit in range(6):
        code += [
            mov(4, 3),
            alu(b.AND, 4, imm=8 << bit),
            jump(b.JEQ, 4, 1, imm=0),
            alu(b.ADD, 5, imm=1 << bit),
        ]
    code += [load(1, 10, -24), alu(b.LSH, 1, imm=3), alu(b.ADD, 9, 1), store(9, 0, 5), movi(0, 0), leave()]
    made, function = program(code)
    assert check(made, function).steps < 1000


def test_the_loop_exits_of_a_loop_in_a_loop_that_is_entered_in_its_middle():
    """Compilers put an inner loop's test before its body and jump over it: no jump back to where the body begins tells the loop."""
    outer, test, body = 1, 2, 4
    after = [(outer,), (body,), (3, 6), (body,), (5,), (test,), (outer, 7), ()]
    assert loop_exits(after) == {test, 6}
