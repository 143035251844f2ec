"""LLVM IR → machine code of AMD GPUs, for the injector of code objects (gpubpf.gcn).

    program = lower(program, checked, wave=64)     # for all GPUs with waves of 64 lanes
    probe = compile_probe([program], block, "gfx90a")
    probe = compile_access_probe({"global": [program]}, block, "gfx90a")
    probe = compile_inner_probe([program], block, "gfx90a", "barrier_leave")

A probe is the code that runs at one or more places in a kernel. It runs the programs in order, in the lanes that are active in EXEC
when it begins. Then it ends with s_endpgm, or returns to the address that was in `BACK` when it began; at the end, this address is in
s[0:1]. The place passes values in SGPRs (`REGISTERS`); the probe loads the other values from the launch block.

Programs at the exit get the time at which their lanes left the kernel (`TIMES`): a wave ends only when all its lanes have left.

A probe in the middle of a kernel (`INSIDE`) preserves all the SGPRs that the place sets, up to and including the return address in
`BACK`. Its registers can be renumbered: it uses only the registers that it receives and those above. The number of its first SGPR must
be a multiple of 4, that of its first VGPR a multiple of 2. At a memory access, the probe receives the address in VGPRs, and what is
known about the instruction in `facts`. After a load, or an atomic with a result, it also receives the loaded value in VGPRs. After a
barrier, the two SGPRs from `TIME` on hold the time at which the threads arrived; at a branch, they hold a mask of lanes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from gpubpf import elf
from gpubpf.ebpf.bytecode import ARGUMENTS, KINDS, REGIONS, SPACES, Program
from gpubpf.ebpf.helpers import HELPERS, number_of
from gpubpf.errors import VerifyError
from gpubpf.lower import ir
from gpubpf.lower.backend import Backend
from gpubpf.lower.emitter import AXES
from gpubpf.lower.fragment import Argument
from gpubpf.lower.launch_block import TICK_BITS, LaunchBlock
from gpubpf.record import Record, asdict, field
from gpubpf.verify.values import Checked

# What a place puts into s0, s1, …: the address of the launch block (two registers), the indices of the workgroup, the work-item
# indices of the wave's first lane (x | y << 10 | z << 20), EXEC at the start of the wave (two registers, which no probe reads), the
# number of the site, and what is known about the access there (`facts`).
REGISTERS = ("ctaid.x", "ctaid.y", "ctaid.z", "first", "lanes.low", "lanes.high", "site", "facts")
BLOCK_REGISTERS = 2
SITE, FACTS = (BLOCK_REGISTERS + REGISTERS.index(name) for name in ("site", "facts"))
KEPT = SITE  # the number of registers whose values do not change while a wave runs
BACK = BLOCK_REGISTERS + len(REGISTERS)  # the first of two SGPRs with the return address
# What a place that passes the time puts into the registers from `TIME` on: s_memtime and s_memrealtime, two registers each.
TIME, TIMES = BACK + 2, ("clock", "globaltimer")
# The points whose programs run together at the beginning and the end of a wave, in this order.
AT_ENTRY, AT_EXIT = ("block_begin", "entry"), ("exit", "block_end")
# The points in the middle of a kernel.
AT_BARRIER = ARRIVE, LEAVE = "barrier_arrive", "barrier_leave"
INSIDE = ("access", "value", "basic_block", "branch", "instruction", "function_entry", *AT_BARRIER)
WITH_PAIR = ("branch", LEAVE)  # points whose places set the two registers from `TIME` on
# The fields of `facts`: first bit and number of bits. Memory instructions add `offset`, a signed number, to the address.
_FACTS = {"offset": (0, 18), "width": (18, 6), "kind": (24, 2), "effect": (26, 5)}
# The flags of `facts` at a branch. WHOLE: a mask other than 0 stands for all lanes. OTHERS: the lanes outside the mask take the
# branch.
WHOLE, OTHERS = 1, 2
_TRIPLE = "amdgcn-amd-amdpal"  # for HSA, LLVM compiles only kernels
_ENTRY = "gpubpf_probe"
_OF_BARRIER = {"barrier": "0", "threads": "0"}  # a workgroup has one barrier, and all threads wait for it
# A wave takes all of its ways one after another: there are no regions.
_OF_REGIONS = {"regions": "0", "region": str(REGIONS)}
_OF_ACCESS = ("address", "width", "space", "kind", "effect")
_OF_VALUE = {"low": "%stored", "old_low": "%value", "high": "%compared", "old_high": "0"}
_VALUES = (
    "address",
    "value",
    "operand",
    "other",
)  # what a place after a load or atomic passes, in two VGPRs each
# The spaces that a generic address can point to. The first two have windows of addresses, here by their LLVM names.
GENERIC_SPACES = ("shared", "local", "global")
_WINDOWS = {"shared": "shared", "local": "private"}
_SHAPE = ("ntid.x", "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z")
_FUNCTIONS = """
declare i32 @llvm.amdgcn.mbcnt.lo(i32, i32)
declare i32 @llvm.amdgcn.mbcnt.hi(i32, i32)
declare i32 @llvm.amdgcn.readfirstlane.i32(i32)
declare i32 @llvm.amdgcn.ds.bpermute(i32, i32)
declare void @llvm.amdgcn.wave.barrier()
declare void @llvm.amdgcn.s.sleep(i32)
declare i64 @llvm.amdgcn.s.memtime()
declare i64 @llvm.ctlz.i64(i64, i1)
declare i$wave @llvm.amdgcn.ballot.i$wave(i1)
define internal i32 @gpubpf.lane() alwaysinline convergent {
  %low = call i32 @llvm.amdgcn.mbcnt.lo(i32 -1, i32 0)
  $high
  ret i32 %lane
}
define internal i64 @gpubpf.ballot(i64 %value) alwaysinline convergent {
  %holds = icmp ne i64 %value, 0
  %mask = call i$wave @llvm.amdgcn.ballot.i$wave(i1 %holds)
  $wide
  ret i64 %result
}
define internal i64 @gpubpf.active() alwaysinline convergent {
  %mask = call i64 @gpubpf.ballot(i64 1)
  ret i64 %mask
}
define internal i64 @gpubpf.lanes_below() alwaysinline convergent {
  %lane = call i32 @gpubpf.lane()
  %wide = zext i32 %lane to i64
  %bit = shl i64 1, %wide
  %below = sub i64 %bit, 1
  ret i64 %below
}
define internal i64 @gpubpf.shuffle(i64 %value, i32 %from) alwaysinline convergent {
  %at = shl i32 %from, 2
  %low = trunc i64 %value to i32
  %shifted = lshr i64 %value, 32
  %high = trunc i64 %shifted to i32
  %low_there = call i32 @llvm.amdgcn.ds.bpermute(i32 %at, i32 %low)
  %high_there = call i32 @llvm.amdgcn.ds.bpermute(i32 %at, i32 %high)
  %low_wide = zext i32 %low_there to i64
  %high_wide = zext i32 %high_there to i64
  %high_up = shl i64 %high_wide, 32
  %result = or i64 %low_wide, %high_up
  ret i64 %result
}
; Three ways, as each is slow where the others are fast: bit by bit, if all values have 8 bits (banks of shared memory). If values
; only rise or only fall from lane to lane, equal ones are neighbours (sectors of most requests). Otherwise value by value.
define internal i64 @gpubpf.match(i64 %value) alwaysinline convergent {
entry:
  %active = call i64 @gpubpf.active()
  %is_large = icmp ugt i64 %value, 255
  %is_large_bit = zext i1 %is_large to i64
  %large = call i64 @gpubpf.ballot(i64 %is_large_bit)
  %are_small = icmp eq i64 %large, 0
  %low = trunc i64 %value to i32
  br i1 %are_small, label %bits, label %order
bits:
  %bit = phi i32 [ 0, %entry ], [ %next_bit, %bits ]
  %left = phi i64 [ %active, %entry ], [ %still, %bits ]
  %down = lshr i32 %low, %bit
  %own_bit = and i32 %down, 1
  %own_wide = zext i32 %own_bit to i64
  %such = call i64 @gpubpf.ballot(i64 %own_wide)
  %inverts = sub i64 %own_wide, 1
  %alike = xor i64 %such, %inverts
  %still = and i64 %left, %alike
  %next_bit = add i32 %bit, 1
  %ends = icmp eq i32 %next_bit, 8
  br i1 %ends, label %found_bits, label %bits
found_bits:
  br label %found
order:
  %below = call i64 @gpubpf.lanes_below()
  %before = and i64 %active, %below
  %is_first = icmp eq i64 %before, 0
  %above = call i64 @llvm.ctlz.i64(i64 %before, i1 false)
  %above_low = trunc i64 %above to i32
  %nearest = sub i32 63, %above_low
  %lane = call i32 @gpubpf.lane()
  %lane_wide = zext i32 %lane to i64
  %from = select i1 %is_first, i32 %lane, i32 %nearest
  %previous = call i64 @gpubpf.shuffle(i64 %value, i32 %from)
  %falls = icmp ult i64 %value, %previous
  %falls_bit = zext i1 %falls to i64
  %falling = call i64 @gpubpf.ballot(i64 %falls_bit)
  %rises = icmp ugt i64 %value, %previous
  %rises_bit = zext i1 %rises to i64
  %rising = call i64 @gpubpf.ballot(i64 %rises_bit)
  %none_falls = icmp eq i64 %falling, 0
  %none_rises = icmp eq i64 %rising, 0
  %one_way = or i1 %none_falls, %none_rises
  br i1 %one_way, label %runs, label %look
runs:
  %minus = sub i64 0, %active
  %lowest = and i64 %active, %minus
  %changes = or i64 %falling, %rising
  %starts = or i64 %changes, %lowest
  %beyond = shl i64 -2, %lane_wide
  %through = xor i64 %beyond, -1
  %earlier = and i64 %starts, %through
  %skipped = call i64 @llvm.ctlz.i64(i64 %earlier, i1 false)
  %begin = sub i64 63, %skipped
  %from_begin = shl i64 -1, %begin
  %later = and i64 %starts, %beyond
  %minus_later = sub i64 0, %later
  %next = and i64 %later, %minus_later
  %until = sub i64 %next, 1
  %run = and i64 %from_begin, %until
  %run_active = and i64 %run, %active
  br label %found
look:
  %shifted = lshr i64 %value, 32
  %high = trunc i64 %shifted to i32
  br label %turn
turn:
  %first_low = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %low)
  %first_high = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %high)
  %same_low = icmp eq i32 %low, %first_low
  %same_high = icmp eq i32 %high, %first_high
  %same = and i1 %same_low, %same_high
  %holds = zext i1 %same to i64
  %mask = call i64 @gpubpf.ballot(i64 %holds)
  br i1 %same, label %found, label %turn
found:
  %result = phi i64 [ %still, %found_bits ], [ %run_active, %runs ], [ %mask, %turn ]
  ret i64 %result
}
define internal i64 @gpubpf.alike(i64 %value) alwaysinline convergent {
  %low = trunc i64 %value to i32
  %shifted = lshr i64 %value, 32
  %high = trunc i64 %shifted to i32
  %first_low = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %low)
  %first_high = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %high)
  %low_wide = zext i32 %first_low to i64
  %high_wide = zext i32 %first_high to i64
  %high_up = shl i64 %high_wide, 32
  %first = or i64 %low_wide, %high_up
  %same = icmp eq i64 %value, %first
  %holds = zext i1 %same to i64
  %mask = call i64 @gpubpf.ballot(i64 %holds)
  ret i64 %mask
}
define internal void @gpubpf.seldom() alwaysinline {
  ret void
}
define internal void @gpubpf.membar() alwaysinline {
  fence seq_cst
  ret void
}
"""
_MASKED_FACTOR = f"""
target triple = "{_TRIPLE}"
define amdgpu_cs void @masked(i64 %x, i64 %y, i64 inreg %place) {{
  %masked = and i64 %x, {(1 << 24) - 1}
  %product = mul i64 %masked, 6
  %sum = add i64 %product, %y
  %there = inttoptr i64 %place to ptr addrspace(1)
  store i64 %sum, ptr addrspace(1) %there
  ret void
}}
"""
# Helpers whose results or arguments are masks or numbers of lanes.
_OF_LANES = frozenset(
    {number_of("gpu_first"), *(number for number, helper in HELPERS.items() if helper.wide is not None)}
)
_COLLECTIVE = frozenset(
    map(number_of, ("gpu_active", "gpu_match", "gpu_ballot", "gpu_shuffle", "gpu_uniform", "gpu_any"))
)
# Operands of s_getreg, on GFX9 and from GFX10 on: register | first bit << 6 | (bits - 1) << 11. HW_ID has the wave and the SIMD in
# bits 0 to 5, and the compute unit, the shader array and the shader engine in bits 8 to 14. HW_ID1 has the wave and the SIMD in bits
# 0 to 9, and the workgroup processor in bits 10 to 13.
_HARDWARE = {
    "sm": (4 | 8 << 6 | 6 << 11, 23 | 10 << 6 | 3 << 11),
    "warp_slot": (4 | 5 << 11, 23 | 9 << 11),
}


def backend(wave: int, at_exit: bool = False) -> Backend:
    """Return the back end for waves of 32 or 64 lanes. at_exit: for programs at the exit of a kernel."""
    text = _FUNCTIONS.replace("$wave", str(wave))
    if wave == 64:
        high = "%lane = call i32 @llvm.amdgcn.mbcnt.hi(i32 -1, i32 %low)"
        wide = "%result = or i64 %mask, 0"
    else:
        high, wide = "%lane = add i32 %low, 0", "%result = zext i32 %mask to i64"
    return Backend(
        triple=_TRIPLE,
        pointer="ptr addrspace(1)",
        scope='syncscope("agent")',
        calls={
            "lane": ("gpubpf.lane", "i32"),
            "this_lane": ("gpubpf.lane", "i32"),
            "lanes_below": ("gpubpf.lanes_below", "i64"),
            "clock": ("llvm.amdgcn.s.memtime", "i64"),
            "active": ("gpubpf.active", "i64"),
            "membar": ("gpubpf.membar", "void"),
            "seldom": ("gpubpf.seldom", "void"),
            "match": ("gpubpf.match", "i64"),
            "ballot": ("gpubpf.ballot", "i64"),
            "shuffle": ("gpubpf.shuffle", "i64"),
            "alike": ("gpubpf.alike", "i64"),
            "any": ("gpubpf.ballot", "i64"),
        },
        given={
            **dict.fromkeys(_SHAPE, ("shape", "b32")),
            **{f"ctaid.{axis}": ("register", "b32") for axis in AXES},
            "first_thread": ("first_thread", "b32"),
            **{name: (name, "b32") for name in _HARDWARE},
            "group": ("sm", "b32"),
            **dict.fromkeys(TIMES if at_exit else TIMES[1:], ("time", "b64")),
        },
        pause="call void @llvm.amdgcn.s.sleep(i32 16)",  # in units of 64 clock cycles
        join="call void @llvm.amdgcn.wave.barrier()",
        functions=text.replace("$high", high).replace("$wide", wide),
        warp=wave,
    )


class WaveProgram(Record):
    """A lowered device program for waves of `wave` lanes: the function ENTRY in LLVM IR, and its arguments.

    together: whether the program uses collective operations, whose results depend on which lanes run together
    """

    function: str
    wave: int
    text: str
    arguments: tuple[Argument, ...]
    formats: Mapping[int, str] = field(default_factory=dict)

    together: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"formats": {str(number): text for number, text in self.formats.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WaveProgram:
        return cls(
            value["function"],
            value["wave"],
            value["text"],
            tuple(Argument(**argument) for argument in value["arguments"]),
            {int(number): text for number, text in value["formats"].items()},
            value["together"],
        )

    @property
    def reads_arguments(self) -> bool:
        """Whether the program reads the arguments of its kernel."""
        return any(one.kind == "context" and one.field in ("args", *ARGUMENTS) for one in self.arguments)

    @property
    def times(self) -> tuple[str, ...]:
        """The `TIMES` that a site at the exit needs: those that the program reads, or one to find the lanes that leave together."""
        kinds = {(argument.kind, argument.field) for argument in self.arguments}
        given = tuple(time for time in TIMES if ("time", time) in kinds)
        return given or (TIMES[:1] if self.together else ())


class ProbeCode(Record):
    """The machine code of a probe, whose entry is its first byte, and the number of registers that it needs."""

    code: bytes
    sgprs: int
    vgprs: int


def lower(program: Program, checked: Checked, wave: int) -> WaveProgram:
    """Return a verified device program in LLVM IR for waves of 32 or 64 lanes. Raises VerifyError."""
    used = {call.helper for call in checked.calls.values()}
    if wave > program.lanes and (lanes := used & _OF_LANES):
        name = HELPERS[min(lanes)].name
        raise VerifyError(
            f"device program {checked.function.name} calls {name}, which is verified for 32 lanes only, and this GPU's waves have 64;"
            " use gpu_mask and GPU_LANES in the C text"
        )
    if number_of("bpf_cuda_exit") in used:
        raise VerifyError(
            f"device program {checked.function.name} calls bpf_cuda_exit, which AMD GPUs do not have:"
            " all lanes of a wave end together; run it on an NVIDIA GPU"
        )
    module = ir.lower(program, checked, _backend(wave, checked.function.point in AT_EXIT))
    # Pointers without an address space are private memory, which LLVM promotes to registers.
    text = re.sub(r"\bptr\b(?! addrspace)", "ptr addrspace(5)", module.text)
    text = re.sub(r"(= alloca [^\n]+)", r"\1, addrspace(5)", text)
    together = not used.isdisjoint(_COLLECTIVE)
    return WaveProgram(checked.function.name, wave, text, module.arguments, module.formats, together)


_backend = cache(backend)


def compile_probe(
    programs: Sequence[WaveProgram],
    block: LaunchBlock,
    gpu: str,
    counters: Sequence[int | None] = (),
    returns: bool = False,
    timed: bool = False,
    sites: Sequence[int] = (),
    arguments: Sequence[tuple[int, int]] = (),
) -> ProbeCode:
    """Compile the programs of one place for a GPU such as "gfx90a". Raises VerifyError if a program needs memory for its stack.

    counters   for each program, the VGPR in which the place passes the thread's work; None: the work is 0
    returns    whether the code does not end with s_endpgm; the caller then appends the jump to s[0:1]
    timed      whether the place passes the time; such a probe returns
    sites      for each program, the number to add to the site number that the place sets
    arguments  the arguments of the kernel, as (offset from the launch block, size), both in bytes
    """
    given = counters or [None] * len(programs)
    each = [_Called(*one) for one in zip(programs, given, sites or [0] * len(programs), strict=True)]
    return _compile(_entry(each, block, gpu, returns, timed, arguments), programs, gpu)


def compile_access_probe(
    programs: Mapping[str, Sequence[WaveProgram]], block: LaunchBlock, gpu: str, has_value: bool = False
) -> ProbeCode:
    """Compile the programs of a memory access for a GPU, by memory space (of `bytecode.SPACES`). Raises VerifyError.

    With more than one space, the address is generic: each lane runs the programs of the space that its address is in.

    has_value: the probe also receives the value, and what an atomic stores and compares with memory: _VALUES.
    """
    ordered = {space: programs[space] for space in GENERIC_SPACES if space in programs}
    every = [program for one in ordered.values() for program in one]
    return _compile(_access_entry(ordered, block, gpu, has_value), every, gpu)


def compile_inner_probe(
    programs: Sequence[WaveProgram], block: LaunchBlock, gpu: str, point: str
) -> ProbeCode:
    """Compile the programs of a point in the middle of a kernel, other than accesses, for a GPU. Raises VerifyError."""
    return _compile(_inner_entry(programs, block, gpu, point), programs, gpu)


def facts(offset: int, width: int, kind: int, effect: int) -> int:
    """Return the value that a place at a memory access puts into FACTS."""
    values = {"offset": offset, "width": width, "kind": kind, "effect": effect}
    return sum((values[name] & (1 << bits) - 1) << first for name, (first, bits) in _FACTS.items())


@cache
def _prepare_llvm() -> None:
    """Make LLVM ready to compile for AMD GPUs. Raises VerifyError if it compiles multiplications wrongly.

    LLVM 22.1 can leave out the mask of a factor of 24 bits, and then multiply all 32 bits of its register:
    `(x & 0xffffff) * 6 + y` becomes v_mad_u64_u32 of x. A program that bounds an index would leave its memory. If this LLVM does
    that, the pass that makes multiplications of 24 bits is turned off.
    """
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if _loses_masks():
        llvm.set_option("gpubpf", "-amdgpu-codegenprepare-mul24=false")
        if _loses_masks():
            raise VerifyError("LLVM multiplies wrongly for AMD GPUs; install another release of llvmlite")


def _loses_masks() -> bool:
    import llvmlite.binding as llvm

    machine = llvm.Target.from_triple(_TRIPLE).create_target_machine(cpu="gfx906", opt=3)
    code = machine.emit_assembly(llvm.parse_assembly(_MASKED_FACTOR))
    return "v_mad_u64_u32" in code and "v_and_b32" not in code


def _compile(text: str, programs: Sequence[WaveProgram], gpu: str) -> ProbeCode:
    """Compile LLVM IR that defines the function _ENTRY, which calls the programs."""
    import llvmlite.binding as llvm

    from gpubpf.lower import nvptx

    _prepare_llvm()
    wave = programs[0].wave
    features = f"+wavefrontsize{wave}" if gpu.startswith(("gfx10", "gfx11", "gfx12")) else ""
    target = llvm.Target.from_triple(_TRIPLE)

    def made(unroll: bool) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
        machine = target.create_target_machine(cpu=gpu, features=features, opt=3)
        module = llvm.parse_assembly(text)
        for number, program in enumerate(programs):
            module.link_in(llvm.parse_assembly(program.text.replace(ir.ENTRY, f"{ir.ENTRY}{number}")))
        for function in module.functions:
            if function.name.startswith(ir.ENTRY):
                function.linkage = llvm.Linkage.internal
                function.add_function_attribute("alwaysinline")
        module.data_layout = str(machine.target_data)
        module.verify()
        nvptx.optimize(module, machine, unroll)
        return module, machine

    for unroll in (False, True):  # with unrolled loops, an array on the stack may fit into registers
        # LLVM can emit a module in one form only, so the module is made twice.
        module, machine = made(unroll)
        stated = dict(re.findall(rf"\.set {_ENTRY}\.(\w+), (\d+)", machine.emit_assembly(module)))
        if stated.get("private_seg_size") == "0":
            break
    module, machine = made(unroll)
    file = elf.of_bytes(machine.emit_object(module))
    name = ", ".join(program.function for program in programs)
    if stated.get("private_seg_size") != "0":
        raise VerifyError(
            f"device program {name}: an array on the stack does not fit into registers; index it by constants, or keep it in a map"
        )
    (section,) = (section for section in file.sections if section.name == ".text")
    (symbols,) = (section for section in file.sections if section.name == ".symtab")
    names = file.name_table(symbols)
    (entry,) = (symbol for symbol in file.symbols(symbols) if names.at(symbol.name) == _ENTRY)
    code = file.contents(section)[: entry.size]  # padding for the instruction cache follows
    if any(s.size and s.name.startswith((".rela.text", ".rodata", ".data", ".bss")) for s in file.sections):
        raise VerifyError(
            f"device program {name}: its code refers to other memory; split it into smaller programs"
        )
    return ProbeCode(code, int(stated["numbered_sgpr"]), int(stated["num_vgpr"]))


class _Called(NamedTuple):
    """A program that a probe calls: the VGPR with the thread's work, the number to add to the site number, and the space of the
    access."""

    program: WaveProgram
    counter: int | None = None
    site: int = 0
    space: str | None = None


def _entry(
    programs: Sequence[_Called],
    block: LaunchBlock,
    gpu: str,
    returns: bool,
    timed: bool,
    arguments: Sequence[tuple[int, int]],
) -> str:
    """Return a module with the function that reads the arguments of the programs and calls the programs in order."""
    given = ["i64 inreg %block", *(f"i32 inreg %{name.replace('.', '_')}" for name in REGISTERS)]
    result, end = "void", ["  ret void"]
    # LLVM ends a function without results with s_endpgm. A function with results falls through to the code after it.
    if returns:
        given += ["i32 inreg %low", "i32 inreg %high"]
        if timed:
            given += [f"i64 inreg %{name}" for name in TIMES]
        result = "{ i32, i32 }"
        end = [
            f"  %one = insertvalue {result} poison, i32 %low, 0",
            f"  %both = insertvalue {result} %one, i32 %high, 1",
            f"  ret {result} %both",
        ]
    counters = [one.counter for one in programs if one.counter is not None]
    given += [f"i32 %work{n}" for n in range(1 + max(counters, default=-1))]
    lines, declared = [], []
    for number, one in enumerate(programs):
        more, declaration = _call(number, one, block, gpu, timed, arguments)
        lines += more
        declared.append(declaration)
    return _module(declared, f"{result} @{_ENTRY}({', '.join(given)})", lines + end)


def _access_entry(
    programs: Mapping[str, Sequence[WaveProgram]], block: LaunchBlock, gpu: str, has_value: bool
) -> str:
    """Return a module with the function of a place at a memory access.

    programs: by space, in the order of GENERIC_SPACES.
    """
    lines = [
        *(
            line
            for name in (_VALUES[1:] if has_value else ())
            for line in _joined(name, f"{name}_low", f"{name}_high")
        ),
        *_joined("written", "address_low", "address_high"),
        *(line for name, (first, bits) in _FACTS.items() for line in _fact(name, first, bits)),
        *(_of_atomics() if has_value else ()),
        "  %signed = sext i32 %offset to i64",
        "  %address = add i64 %written, %signed",
        f"  %address.short = and i64 %address, {(1 << 32) - 1}",
    ]
    declared: list[str] = []
    numbers = iter(range(sum(map(len, programs.values()))))
    *_, last = programs
    for space in programs:
        if space != last:
            declared.append(f"declare i1 @llvm.amdgcn.is.{_WINDOWS[space]}(ptr)")
            lines += [
                f"  %pointer.{space} = inttoptr i64 %written to ptr",
                f"  %is.{space} = call i1 @llvm.amdgcn.is.{_WINDOWS[space]}(ptr %pointer.{space})",
                f"  br i1 %is.{space}, label %in.{space}, label %not.{space}",
                f"in.{space}:",
            ]
        for program in programs[space]:
            called = _Called(program, space=space)
            more, declaration = _call(next(numbers), called, block, gpu, False)
            lines += more
            declared.append(declaration)
        lines.append("  br label %done")
        if space != last:
            lines.append(f"not.{space}:")
    lines.append("done:")
    given = [
        f"i32 %{name}_{half}" for name in _VALUES[: None if has_value else 1] for half in ("low", "high")
    ]
    return _keeping(given, declared, lines)


def _of_atomics() -> list[str]:
    """Return LLVM IR that computes `low` and `high` of a value: of a load, the value; of an atomic, its operands."""
    return [
        f"  %is_atomic = icmp eq i32 %kind, {KINDS.index('atomic')}",
        "  %stored = select i1 %is_atomic, i64 %operand, i64 %value",
        "  %compared = select i1 %is_atomic, i64 %other, i64 0",
    ]


def _inner_entry(programs: Sequence[WaveProgram], block: LaunchBlock, gpu: str, point: str) -> str:
    """Return a module with the function of a place in the middle of a kernel, other than an access."""
    given, lines, declared = [], [], []
    if point == LEAVE:
        declared.append("declare i64 @llvm.amdgcn.s.memtime()")
        given = ["i32 inreg %arrived_low", "i32 inreg %arrived_high"]
        lines = [
            "  %left = call i64 @llvm.amdgcn.s.memtime()",
            *_joined("arrived", "arrived_low", "arrived_high"),
        ]
        lines.append("  %waited = sub i64 %left, %arrived")
    if point == "branch":
        given = ["i32 inreg %mask_low", "i32 inreg %mask_high"]
        lines = _taken(programs[0].wave)
    for number, program in enumerate(programs):
        more, declaration = _call(number, _Called(program), block, gpu, False)
        lines += more
        declared.append(declaration)
    return _keeping(given, declared, lines)


def _taken(wave: int) -> list[str]:
    """Return LLVM IR that computes the mask of lanes that take a branch. Bits of inactive lanes mean nothing."""
    if wave == 64:
        lines = _joined("mask", "mask_low", "mask_high")
    else:
        lines = ["  %mask = zext i32 %mask_low to i64"]
    return [
        *lines,
        f"  %whole.bit = and i32 %facts, {WHOLE}",
        "  %whole = icmp ne i32 %whole.bit, 0",
        "  %any = icmp ne i64 %mask, 0",
        "  %all = sext i1 %any to i64",
        "  %lanes = select i1 %whole, i64 %all, i64 %mask",
        f"  %others.bit = and i32 %facts, {OTHERS}",
        "  %others = icmp ne i32 %others.bit, 0",
        "  %turned = sext i1 %others to i64",
        "  %taken = xor i64 %lanes, %turned",
    ]


def _keeping(given: Sequence[str], declared: Sequence[str], lines: Sequence[str]) -> str:
    """Return the module of a place in the middle of a kernel.

    The function takes all SGPRs up to `BACK` as parameters and returns them as results, so that the probe preserves them.

    given: further parameters
    declared: the declarations that the function needs
    lines: the body of the function
    """
    names = ["low", "high", *(name.replace(".", "_") for name in REGISTERS), "back_low", "back_high"]
    result, value = f"{{ {', '.join(['i32'] * len(names))} }}", "poison"
    text = [*_joined("block", "low", "high"), *lines]
    for number, name in enumerate(names):
        text.append(f"  %result.{number} = insertvalue {result} {value}, i32 %{name}, {number}")
        value = f"%result.{number}"
    parameters = ", ".join([*(f"i32 inreg %{name}" for name in names), *given])
    return _module(declared, f"{result} @{_ENTRY}({parameters})", [*text, f"  ret {result} {value}"])


def _joined(name: str, low: str, high: str) -> list[str]:
    """Return LLVM IR that joins two registers into a 64-bit number."""
    return [
        f"  %{name}.low = zext i32 %{low} to i64",
        f"  %{name}.wide = zext i32 %{high} to i64",
        f"  %{name}.high = shl i64 %{name}.wide, 32",
        f"  %{name} = or disjoint i64 %{name}.high, %{name}.low",
    ]


def _fact(name: str, first: int, bits: int) -> list[str]:
    """Return LLVM IR that extracts a field of `facts`."""
    shift = "ashr" if name == "offset" else "lshr"
    return [
        f"  %{name}.up = shl i32 %facts, {32 - first - bits}",
        f"  %{name} = {shift} i32 %{name}.up, {32 - bits}",
    ]


def _call(
    number: int,
    called: _Called,
    block: LaunchBlock,
    gpu: str,
    timed: bool,
    arguments: Sequence[tuple[int, int]] = (),
) -> tuple[list[str], str]:
    """Return LLVM IR that calls the program with this number, and the program's declaration."""
    program, counter = called.program, called.counter
    family = 0 if gpu.startswith("gfx9") else 1
    lines, passed = [], []
    for argument in program.arguments:
        kind = "i64" if argument.type == "b64" else "i32"
        name = f"{argument.name}.{number}"
        if argument.kind in _HARDWARE:
            field = _HARDWARE[argument.kind][family]
            lines.append(f"  %{name} = call i32 @llvm.amdgcn.s.getreg(i32 {field})")
            value = f"%{name}"
        elif argument.kind == "time":
            more, value = _time(argument.field, block, name, timed)
            lines += more
        elif argument.kind == "context" and argument.field == "work" and counter is not None:
            lines.append(f"  %{name} = zext i32 %work{counter} to i64")
            value = f"%{name}"
        elif argument.kind == "context" and argument.field in _OF_BARRIER:
            value = _OF_BARRIER[argument.field]
        elif argument.kind == "context" and argument.field == "waited":
            value = f"%{name}" if kind == "i32" else "%waited"
            lines += [f"  {value} = trunc i64 %waited to i32"] if kind == "i32" else []
        elif argument.kind == "context" and argument.field == "active":
            more, value = _active(argument, name, program.wave)
            lines += more
        elif argument.kind == "context" and argument.field == "taken":
            more, active = _active(argument, f"{name}.active", program.wave)
            short = [f"  %{name}.taken = trunc i64 %taken to i32"] if kind == "i32" else []
            lines += [*more, *short, f"  %{name} = and {kind} {active}, %{f'{name}.' if short else ''}taken"]
            value = f"%{name}"
        elif argument.kind == "context" and argument.field in _OF_REGIONS:
            value = _OF_REGIONS[argument.field]
        elif argument.kind == "context" and argument.field == "instructions":
            value = f"%{name}" if kind == "i64" else "%facts"
            lines += [f"  {value} = zext i32 %facts to i64"] if kind == "i64" else []
        elif argument.kind == "context" and argument.field == "args":
            value = str(len(arguments))
        elif argument.kind == "context" and argument.field in ARGUMENTS:
            more, value = _argument(argument, arguments, name)
            lines += more
        elif argument.kind == "context" and argument.field in _OF_ACCESS:
            value = _of_access(argument, called.space)
        elif argument.kind == "context" and argument.field in _OF_VALUE and called.space:
            value = _OF_VALUE[argument.field]
        elif argument.kind == "context" and argument.field == "site" and called.site:
            bits = 64 if argument.type == "b64" else 32
            number_at = _value(argument, block, f"{name}.first")
            lines += [*number_at[0], f"  %{name} = add i{bits} {number_at[1]}, {called.site}"]
            value = f"%{name}"
        else:
            more, value = _value(argument, block, name)
            lines += more
        passed.append(f"{kind} {value}")
    kinds = ", ".join(each.split()[0] for each in passed)
    lines.append(f"  call void @{ir.ENTRY}{number}({', '.join(passed)})")
    return lines, f"declare void @{ir.ENTRY}{number}({kinds}) convergent nounwind"


def _of_access(argument: Argument, space: str | None) -> str:
    """Return the value of a context field at an access."""
    assert space is not None
    if argument.field == "address":
        return "%address" if space == "global" else "%address.short"
    return str(SPACES.index(space)) if argument.field == "space" else f"%{argument.field}"


def _argument(argument: Argument, places: Sequence[tuple[int, int]], name: str) -> tuple[list[str], str]:
    """Return LLVM IR that loads the first bytes of a kernel argument, and its value: 0 if there is no such argument."""
    position = ARGUMENTS.index(argument.field)
    if position >= len(places):
        return [], "0"
    offset, size = places[position]
    bits = 64 if argument.type == "b64" else 32
    return _load(name, offset, min(size, bits // 8), bits)


def _active(argument: Argument, name: str, wave: int) -> tuple[list[str], str]:
    """Return LLVM IR that computes the mask of the lanes that run a program, and its value."""
    lines = [f"  %{name} = call i{wave} @llvm.amdgcn.ballot.i{wave}(i1 true)"]
    if argument.type == "b32" or wave == 64:
        return lines, f"%{name}"
    return [*lines, f"  %{name}.wide = zext i{wave} %{name} to i64"], f"%{name}.wide"


def _module(declared: Sequence[str], head: str, lines: Sequence[str]) -> str:
    """Return a module with one function, and the declarations that it needs."""
    every = [
        "declare i32 @llvm.amdgcn.s.getreg(i32)",
        "declare i64 @llvm.amdgcn.s.memrealtime()",
        "declare i64 @llvm.amdgcn.ballot.i64(i1)",
        "declare i32 @llvm.amdgcn.ballot.i32(i1)",
        *declared,
    ]
    return "\n".join(
        [
            f'target triple = "{_TRIPLE}"',
            *every,
            f"define amdgpu_cs {head} nounwind convergent {{",
            *lines,
            "}",
            "!1 = !{}",
            "",
        ]
    )


def _value(argument: Argument, block: LaunchBlock, name: str) -> tuple[list[str], str]:
    """Return LLVM IR that reads an argument, and its value. Raises VerifyError for an argument that AMD GPUs lack."""
    kind, offset = argument.kind, 0
    if kind == "register":
        return [], "%" + argument.field.replace(".", "_")
    if kind == "context" and argument.field == "site":
        if argument.type == "b32":
            return [], "%site"
        return [f"  %{name} = zext i32 %site to i64"], f"%{name}"
    if kind == "context" and argument.field == "work":
        return [], "0"
    if kind == "first_thread":
        return _first_thread(block, name)
    if kind == "launch":
        offset = block.launch_id
    elif kind == "replay":
        offset = block.replay
    elif kind == "map_base":
        offset = block.bases[argument.map]
    elif kind == "map_capacity":
        offset = block.capacities[argument.map]
    elif kind == "param":
        offset = block.params[argument.map][0] + argument.offset
    elif kind == "shape":
        assert block.shape is not None
        offset = block.shape + 4 * _SHAPE.index(argument.field)
    else:
        word = {"kernel": block.kernel, "epoch": block.epoch, "pid_tgid": block.pid_tgid}.get(kind)
        if word is None:
            raise VerifyError(
                f"a device program reads {argument.field or kind}, which AMD GPUs do not have here yet"
            )
        offset = word
    width = argument.width if kind == "param" else 8 if argument.type == "b64" else 4
    return _load(name, offset, width, 64 if argument.type == "b64" else 32)


def _time(field: str, block: LaunchBlock, name: str, timed: bool) -> tuple[list[str], str]:
    """Return LLVM IR that computes one of `TIMES`, and its value. `globaltimer` is in ns."""
    if field == "clock":
        return [], "%clock"
    assert block.tick is not None
    ticks = "%globaltimer" if timed else f"%{name}.now"
    lines = [] if timed else [f"  {ticks} = call i64 @llvm.amdgcn.s.memrealtime()"]
    lines += _load(f"{name}.tick", block.tick, 8, 64)[0]
    lines += [
        f"  %{name}.long = mul i64 {ticks}, %{name}.tick",
        f"  %{name} = lshr i64 %{name}.long, {TICK_BITS}",
    ]
    return lines, f"%{name}"


def _load(name: str, offset: int, width: int, bits: int) -> tuple[list[str], str]:
    """Return LLVM IR that loads `width` bytes of the launch block as an integer of `bits`, and its value."""
    narrow = f"i{8 * width}"
    lines = [
        f"  %{name}.at = add i64 %block, {offset}",
        f"  %{name}.there = inttoptr i64 %{name}.at to ptr addrspace(4)",
        f"  %{name} = load {narrow}, ptr addrspace(4) %{name}.there, align {_alignment(offset, width)}, !invariant.load !1",
    ]
    if 8 * width == bits:
        return lines, f"%{name}"
    return [*lines, f"  %{name}.wide = zext {narrow} %{name} to i{bits}"], f"%{name}.wide"


def _alignment(offset: int, width: int) -> int:
    """Return the alignment, at most 4, of bytes at an offset from the launch block, which is aligned to 8."""
    return min(offset & -offset or 4, width & -width, 4)


def _first_thread(block: LaunchBlock, name: str) -> tuple[list[str], str]:
    """Return LLVM IR for the number of the wave's first work-item in its workgroup, and its value."""
    assert block.shape is not None
    lines = []
    for axis, size in (("x", block.shape), ("y", block.shape + 4)):
        lines += _load(f"{name}.n{axis}", size, 4, 32)[0]
    lines += [
        f"  %{name}.x = and i32 %first, 1023",
        f"  %{name}.yz = lshr i32 %first, 10",
        f"  %{name}.y = and i32 %{name}.yz, 1023",
        f"  %{name}.z = lshr i32 %first, 20",
        f"  %{name}.1 = mul i32 %{name}.z, %{name}.ny",
        f"  %{name}.2 = add i32 %{name}.1, %{name}.y",
        f"  %{name}.3 = mul i32 %{name}.2, %{name}.nx",
        f"  %{name} = add i32 %{name}.3, %{name}.x",
    ]
    return lines, f"%{name}"
