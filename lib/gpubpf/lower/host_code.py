"""LLVM IR → machine code of the host → `Native`: a host program that the traced process runs."""

from __future__ import annotations

from gpubpf import elf
from gpubpf.ebpf.bytecode import CONTEXTS, BpfFunction, Program
from gpubpf.errors import VerifyError
from gpubpf.lower import context, ir
from gpubpf.lower.backend import Backend
from gpubpf.lower.fragment import Argument
from gpubpf.lower.native import PREBUILT_FOR, Given, Native
from gpubpf.record import Record, replace
from gpubpf.verify.rules import check

HOST = Backend(
    triple="x86_64-unknown-linux-gnu",
    pointer="ptr",
    scope="",
    calls={},
)


class Machine(Record):
    """LLVM's target triple, processor and features for the host."""

    triple: str
    cpu: str
    features: str


# Floating-point registers belong to the application. The code must also be self-contained: no jump tables, no calls of memset.
MACHINES = {
    "x86_64": Machine(HOST.triple, "x86-64", "-mmx,-sse,-sse2,-x87,+soft-float"),
    "aarch64": Machine("aarch64-unknown-linux-gnu", "generic", "-fp-armv8,-neon"),
}
_ATTRIBUTES = '"no-jump-tables"="true" "no-builtins" noimplicitfloat nounwind'
_RUN = "run"  # the function that the agent calls; the code begins with it


def lower(program: Program, function: BpfFunction, machine: str = PREBUILT_FOR) -> Native:
    """Return a host program as machine code. Raises VerifyError, for example for a helper that only the Linux kernel has.

    machine: the processor that the code is for, as in MACHINES
    """
    if machine not in MACHINES:
        raise VerifyError(
            f"host program {function.name}: there is no agent for {machine}; use x86-64 or 64-bit Arm"
        )
    checked = check(program, context.copied(function, context.FIELDS[function.point]))
    module = ir.lower(program, checked, replace(HOST, triple=MACHINES[machine].triple))
    values: dict[Given, int] = {}
    loads: list[str] = []
    passed: list[str] = []
    for argument in module.arguments:
        slot = values.setdefault(_given(argument, function.point), len(values))
        lines, result = _loaded(argument, slot)
        loads += lines
        passed.append(result)
    text = module.text + "\n".join(
        [
            f"define void @{_RUN}(ptr %values) {_ATTRIBUTES} {{",
            *loads,
            f"  call void @{ir.ENTRY}({', '.join(passed)})",
            "  ret void",
            "}",
            "",
        ]
    )
    return Native(function.name, _machine_code(function.name, text, MACHINES[machine]), tuple(values))


def _loaded(argument: Argument, slot: int) -> tuple[list[str], str]:
    """Return LLVM IR that reads an argument from slot `slot` of %values, and the typed value to pass."""
    name, kind = argument.name, "i64" if argument.type == "b64" else "i32"
    lines = [
        f"  %{name}.at = getelementptr i64, ptr %values, i64 {slot}",
        f"  %{name}.value = load i64, ptr %{name}.at, align 8",
    ]
    if argument.kind != "param":
        return lines, f"{kind} %{name}.value"
    part = f"i{8 * argument.width}"
    lines += [
        f"  %{name}.base = inttoptr i64 %{name}.value to ptr",
        f"  %{name}.byte = getelementptr i8, ptr %{name}.base, i64 {argument.offset}",
        f"  %{name}.part = load {part}, ptr %{name}.byte, align {argument.width}",
    ]
    if part == kind:
        return lines, f"{kind} %{name}.part"
    return [*lines, f"  %{name}.wide = zext {part} %{name}.part to {kind}"], f"{kind} %{name}.wide"


def _given(argument: Argument, point: str) -> Given:
    if argument.kind == "launch":
        return Given("context", 0)
    if argument.kind == "context":
        return Given("context", list(CONTEXTS[point]).index(argument.field))
    if argument.kind == "helper":
        return Given("helper", argument.offset)
    return Given(argument.kind, 0, argument.map)


def _machine_code(name: str, text: str, host: Machine) -> bytes:
    import llvmlite.binding as llvm

    from gpubpf.lower import nvptx

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(host.triple)
    machine = target.create_target_machine(
        cpu=host.cpu, features=host.features, opt=2, reloc="pic", codemodel="small"
    )
    module = llvm.parse_assembly(text)
    program = module.get_function(ir.ENTRY)
    program.linkage = llvm.Linkage.internal
    program.add_function_attribute("alwaysinline")
    module.data_layout = str(machine.target_data)
    module.verify()
    nvptx.optimize(module, machine)
    if [function.name for function in module.functions if not function.is_declaration] != [_RUN]:
        raise AssertionError(f"host program {name} has more than one function")
    made = elf.of_bytes(machine.emit_object(module))
    code = b""
    for section in made.sections:
        if section.name == ".text":
            code = made.contents(section)
        elif section.size and section.name.startswith((".rela.text", ".rodata", ".data", ".bss", ".text.")):
            raise VerifyError(
                f"host program {name}: its machine code needs the section {section.name}; split it into smaller programs,"
                " or run as root"
            )
    return code
