"""LLVM IR → PTX → `Fragment`: PTX text that the injector places inline in the application's kernels."""

from __future__ import annotations

import re
from typing import Any

from gpubpf.ebpf.bytecode import BpfFunction, Program
from gpubpf.errors import VerifyError
from gpubpf.lower.backend import Backend
from gpubpf.lower.emitter import AXES
from gpubpf.lower.fragment import KEPT_NUMBER, Fragment
from gpubpf.lower.ir import ENTRY, LoweredModule
from gpubpf.verify.values import Checked

_SREG = "llvm.nvvm.read.ptx.sreg."


def _with_active_mask(code: str, constraints: str) -> str:
    """Return inline assembly in which %together is the mask of active lanes.

    The assembly is one piece, so LLVM inserts nothing between the read of the mask and its use.
    """
    lines = ["{", ".reg .b32 %together;", "activemask.b32 %together;", *code.split("\n"), "}"]
    return 'asm sideeffect "' + "\\0A".join(lines) + f'", "{constraints}"'


NVPTX = Backend(
    triple="nvptx64-nvidia-cuda",
    pointer="ptr addrspace(1)",
    scope='syncscope("device")',
    pause='call void asm sideeffect "nanosleep.u32 1000;", "~{memory}"()',
    calls={
        **{
            f"{name}.{axis}": (f"{_SREG}{name}.{axis}", "i32")
            for name in ("tid", "ntid", "ctaid", "nctaid")
            for axis in AXES
        },
        "lane": (f"{_SREG}laneid", "i32"),
        # Not the intrinsic, which LLVM would compare in 64 bits.
        "this_lane": ('asm "mov.u32 $0, %laneid;", "=r"', "i32"),
        "lanes_below": (f"{_SREG}lanemask.lt", "i32"),
        "sm": (f"{_SREG}smid", "i32"),
        "warp_slot": (f"{_SREG}warpid", "i32"),
        # LLVM would use 64-bit instructions here, because it does not know that they cost more.
        # ptxas makes one instruction of mul.wide and add, but three of mad.wide.
        "element": (
            'asm "{\\0A.reg .b64 %wide;\\0Amul.wide.u32 %wide, $1, $2;\\0Aadd.s64 $0, $3, %wide;\\0A}", "=l,r,n,l"',
            "i64",
        ),
        "product": ('asm "mul.wide.u32 $0, $1, $2;", "=l,r,r"', "i64"),
        "scale": ('asm "mul.wide.u32 $0, $1, $2;", "=l,r,n"', "i64"),
        "shift": ('asm "shr.u32 $0, $1, $2;", "=r,r,n"', "i32"),
        # There is no branch, so that ptxas can place later instructions where the kernel waits for its loads. The word does not change
        # while a kernel runs, so the load may precede the kernel's stores.
        "replay": (
            'asm "{\\0A.reg .pred %again;\\0Asetp.ne.b64 %again, $1, 0;\\0Amov.b64 $0, 0;\\0A'
            '@%again ld.global.nc.b64 $0, [$1];\\0A}", "=&l,l"',
            "i64",
        ),
        # These stay in program order with memory accesses: LLVM would move its own intrinsics across atomics.
        "clock": ('asm sideeffect "mov.u64 $0, %clock64;", "=l,~{memory}"', "i64"),
        "globaltimer": ('asm sideeffect "mov.u64 $0, %globaltimer;", "=l,~{memory}"', "i64"),
        "active": ('asm sideeffect "activemask.b32 $0;", "=r"', "i32"),
        "match": (_with_active_mask("match.any.sync.b64 $0, $1, %together;", "=r,l"), "i32"),
        # The mask of active lanes if all of them have the same value; otherwise 0.
        "alike": (_with_active_mask("match.all.sync.b64 $0, $1, %together;", "=r,l"), "i32"),
        "any": (
            _with_active_mask(
                ".reg .pred %holds;\nsetp.ne.b64 %holds, $1, 0;\nvote.sync.any.pred %holds, %holds, %together;\n"
                "selp.b32 $0, 1, 0, %holds;",
                "=r,l",
            ),
            "i32",
        ),
        "ballot": (
            _with_active_mask(
                ".reg .pred %holds;\nsetp.ne.b64 %holds, $1, 0;\nvote.sync.ballot.b32 $0, %holds, %together;",
                "=r,l",
            ),
            "i32",
        ),
        "shuffle": (
            _with_active_mask(
                ".reg .b32 %low, %high;\nmov.b64 {%low, %high}, $1;\n"
                "shfl.sync.idx.b32 %low, %low, $2, 31, %together;\n"
                "shfl.sync.idx.b32 %high, %high, $2, 31, %together;\nmov.b64 $0, {%low, %high};",
                "=l,l,r",
            ),
            "i64",
        ),
        "membar": ("llvm.nvvm.membar.sys", "void"),
        "exit": ('asm sideeffect "exit;", ""', "void"),
        "seldom": ('asm sideeffect "$$gpubpf_seldom:", ""', "void"),
        "keep": (f'asm sideeffect "mov.b64 {KEPT_NUMBER}, $0;", "l"', "void"),
    },
    warps=True,
    given={
        "shard": ("shard", "b64"),
        "group": ("group", "b32"),
        "global_warp": ("global_warp", "b32"),
    },
    reads={"b64": '"mov.b64 $0, {};", "=l"', "b32": '"mov.b32 $0, {};", "=r"'},
)


def lower(program: Program, checked: Checked) -> Fragment:
    """Return a verified device program as a fragment. Raises VerifyError if its stack does not fit into registers."""
    from gpubpf.lower import ir

    module = ir.lower(program, checked, NVPTX)
    ptx = assembly(module.text)
    if ".local" in ptx:  # an array on the stack; with unrolled loops, it may fit into registers
        ptx = assembly(module.text, unroll=True)
    return fragment(checked.function, module, ptx)


def assembly(text: str, unroll: bool = False) -> str:
    """Optimize an LLVM module and return its PTX."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(NVPTX.triple).create_target_machine(
        cpu="sm_70", features="+ptx63", opt=3
    )
    module = llvm.parse_assembly(text)
    module.data_layout = str(machine.target_data)
    module.verify()
    optimize(module, machine, unroll)
    return str(machine.emit_assembly(module))


def optimize(module: Any, machine: Any, unroll: bool = False) -> None:
    """Optimize an LLVM module. unroll: also unroll loops.

    This is off by default: probes should be small, and clang has already unrolled the loops that the C text asks to unroll.
    """
    import llvmlite.binding as llvm

    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = unroll
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getModulePassManager()
    passes.run(module, builder)


_REG = re.compile(r"\.reg\s+\.(\w+)\s+%\w+<(\d+)>;")
_WIDTHS = {"pred": 0, "b16": 1, "b32": 1, "f32": 1, "b64": 2, "f64": 2, "b128": 4}


def _kept_loops(body: list[str]) -> list[str]:
    """Return the body with a pragma "nounroll" (PTX ISA) at each loop head, so that ptxas keeps the loop.

    LLVM emits the pragma only at some loop heads.
    """
    labels = {line[:-1]: at for at, line in enumerate(body) if line.endswith(":")}
    jumps = ((at, re.search(r"\bbra\S*\s+(\S+);", line)) for at, line in enumerate(body))
    heads = {labels[jump[1]] for at, jump in jumps if jump and labels.get(jump[1], at) < at}
    kept = []
    for at, line in enumerate(body):
        if ".pragma" not in line:
            kept += [line, '\t.pragma "nounroll";'] if at in heads else [line]
    return kept


def fragment(function: BpfFunction, module: LoweredModule, ptx: str) -> Fragment:
    """Return the fragment: a block with the body of LLVM's function. Raises VerifyError if the body needs local memory or calls."""
    if "__local_depot" in ptx or ".local" in ptx:
        raise VerifyError(
            f"device program {function.name}: an array on the stack does not fit into registers;"
            " index it by constants, or keep it in a map"
        )
    start = ptx.index("{", ptx.index(f" {ENTRY}"))
    end = ptx.rindex("}")
    body = [re.sub(r"\s*//.*", "", line).rstrip() for line in ptx[start + 1 : end].split("\n")]
    body = _kept_loops([line for line in body if line.strip()])
    lines = []
    seldom: list[str] = []
    registers = 0
    returns = [n for n, line in enumerate(body) if re.search(r"\bret;", line)]
    leaves_early = False
    for number, line in enumerate(body):
        if match := _REG.search(line):
            registers += _WIDTHS.get(match[1], 1) * (int(match[2]) - 1)
        if line.strip() == "$gpubpf_seldom:":
            seldom.append(f"$gpubpf_seldom{len(seldom)}")
            line = f"{seldom[-1]}:"
        if number in returns:
            if number == len(body) - 1:
                continue
            line = line.replace("ret;", "bra \t$gpubpf_end;")
            leaves_early = True
        lines.append(line)
    if leaves_early or (lines and lines[-1].rstrip().endswith(":")):
        lines.append("$gpubpf_end:" if leaves_early else "")
    text = "\n".join(["{", *(line for line in lines if line), "}"])
    if ENTRY in text or re.search(r"\bcall\b", text):
        raise VerifyError(
            f"device program {function.name}: LLVM could not inline all of it; split it into smaller programs"
        )
    used = tuple(a for a in module.arguments if re.search(re.escape(a.register) + r"\b", text))
    return Fragment(function.name, text, used, registers, module.formats, tuple(seldom))
