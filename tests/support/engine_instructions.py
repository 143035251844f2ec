"""Kernels of one instruction, which the engine runs on arrays of operands."""

from __future__ import annotations


def register_type(t: str) -> str:
    return {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32", "u16x2": "b32", "s16x2": "b32"}.get(
        t, t
    )


def bits(t: str) -> int:
    return 32 if t.endswith("x2") else int(t.lstrip("bsuf"))


def kernel(name: str, instruction: str, types: list[str]) -> str:
    """out[i] = instruction(a[i], b[i], c[i]); types: result, then sources. `pred` results are stored as u32."""
    out, *sources = types
    lines = [f".visible .entry {name}(.param .u64 o, .param .u64 a, .param .u64 b, .param .u64 c)", "{"]
    lines += [".reg .b32 %r<4>; .reg .b64 %rd<12>; .reg .pred %p<3>;"]
    for k, t in enumerate(["pred" if out == "pred" else out, *sources]):
        lines.append(f".reg .{register_type(t)} %x{k};")
    lines += [
        "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r0, %r0, %r1, %r2;"
    ]
    for k, t in enumerate(sources):
        lines.append(f"ld.param.u64 %rd{k}, [{'abc'[k]}]; mul.wide.u32 %rd5, %r0, {bits(t) // 8};")
        lines.append(f"add.u64 %rd{k}, %rd{k}, %rd5; ld.global.{_memory(t)} %x{k + 1}, [%rd{k}];")
    if "pred" in sources:
        raise ValueError
    lines.append(instruction.format("%x0", "%x1", "%x2", "%x3"))
    store = "u32" if out == "pred" else _memory(out)
    if out == "pred":
        lines.append("selp.u32 %r3, 1, 0, %x0;")
    lines.append(f"ld.param.u64 %rd6, [o]; mul.wide.u32 %rd5, %r0, {4 if out == 'pred' else bits(out) // 8};")
    lines.append(
        f"add.u64 %rd6, %rd6, %rd5; st.global.{store} [%rd6], {'%r3' if out == 'pred' else '%x0'}; ret; }}"
    )
    return "\n".join(lines)


def _memory(t: str) -> str:
    return f"b{bits(t)}" if t.startswith(("f16", "bf16")) or t.endswith("x2") else t
