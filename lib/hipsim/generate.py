"""Make the table of encodings of a GPU's instruction set, by asking llvm-mc what each opcode of each format means.

    python3 generate.py gfx90a > src/isa/gfx90a.inc

Each row names one opcode: its format, its number, its name without LLVM's suffix for the encoding (`_e32`), its operands
in the order in which they are written, and whether SDWA and DPP forms exist. An operand is a letter for the field and a
hexadecimal digit for the number of 32-bit registers (0 stands for 16, w for 32). A small letter is a field that always
names an AGPR:

    D  vdst, sdst or sdata     A  src0, addr or sbase      R  srsrc        I  simm16
    S  the second sdst of VOP3 B  src1, data0 or vdata     O  soffset      V  VCC, implied
    G  saddr                   C  src2, data1              L  the literal of v_madmk and v_madak

A GPU whose waves have 32 or 64 lanes is asked about both. The width m is a mask of lanes: one register or two.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

MC = ("llvm-mc-15", "llvm-mc")
MARKER = 0xBF80BEEF  # s_nop 0xbeef, printed after the text of each probe


@dataclass(frozen=True)
class Probe:
    """One guess at an encoding: words, and which field each register number stands for."""

    format: str
    opcode: int
    words: tuple[int, ...]
    fields: dict[str, str]  # first register, as "v10" → letter of the field
    variant: str = ""  # "sdwa", "dpp"


def _salu_probes() -> Iterator[Probe]:
    """Return the scalar formats, which all families encode in the same way."""
    for op in range(0x80 - 0x20):  # the last 32 are SOPK, SOP1, SOPC and SOPP
        yield Probe(
            "sop2", op, (2 << 30 | op << 23 | 16 << 16 | 40 << 8 | 20,), {"s16": "D", "s20": "A", "s40": "B"}
        )
    for op in range(0x20 - 3):
        yield Probe("sopk", op, (0xB << 28 | op << 23 | 16 << 16 | 0x1234,), {"s16": "D"})
        yield Probe(
            "sopk", op, (0xB << 28 | op << 23 | 16 << 16 | 0x0001, 0x89AB), {"s16": "D", "0x89ab": "L"}
        )
    for op in range(0x100):
        yield Probe("sop1", op, (0x17D << 23 | 16 << 16 | op << 8 | 20,), {"s16": "D", "s20": "A"})
    for op in range(0x80):
        yield Probe("sopc", op, (0x17E << 23 | op << 16 | 40 << 8 | 20,), {"s20": "A", "s40": "B"})
        yield Probe("sopp", op, (0x17F << 23 | op << 16 | 0x0001,), {})
        yield Probe("sopp", op, (0x17F << 23 | op << 16,), {})


def _mubuf_probes() -> Iterator[Probe]:
    """Return MUBUF, whose fields that matter here are in the same places in all families."""
    fields = {"v10": "A", "v20": "B", "s40": "R", "s70": "O"}
    for op in range(0x80):
        for glc in (0, 1):
            first = 0x38 << 26 | op << 18 | glc << 14 | 1 << 12
            yield Probe("mubuf", op, (first, 70 << 24 | 10 << 16 | 20 << 8 | 10), fields)
        yield Probe("mubuf", op, (0x38 << 26 | op << 18, 0), {})


def gfx9_probes() -> Iterator[Probe]:
    """Return every opcode number of every format of GFX9, with the operands that may make it valid."""
    yield from _salu_probes()
    for op in range(0x100):
        word = 0x30 << 26 | op << 18 | 16 << 6 | 20
        yield Probe("smem", op, (word | 1 << 17, 0x64), {"s16": "D", "s40": "A"})
        yield Probe("smem", op, (0x30 << 26 | op << 18 | 16 << 6, 0), {"s16": "D"})
        yield Probe("smem", op, (0x30 << 26 | op << 18, 0), {})
    for op in range(0x3E):
        word = op << 25 | 10 << 17 | 40 << 9
        fields = {"v10": "D", "v20": "A", "v40": "B", "vcc": "V", "0x89ab": "L"}
        yield Probe("vop2", op, (word | 0x114,), fields)
        yield Probe("vop2", op, (word | 0x114, 0x89AB), fields)
        yield Probe("vop2", op, (word | 0xF9, 0x06060600 | 20), fields, "sdwa")
        yield Probe("vop2", op, (word | 0xFA, 0xFF000000 | 20), fields, "dpp")
    for op in range(0x100):
        word = 0x3F << 25 | 10 << 17 | op << 9
        fields = {"v10": "D", "s10": "D", "v20": "A", "s20": "A"}
        yield Probe("vop1", op, (word | 0x114,), fields)
        yield Probe("vop1", op, (word | 20,), fields)
        yield Probe("vop1", op, (0x3F << 25 | op << 9,), {})
        yield Probe("vop1", op, (word | 0xF9, 0x00060600 | 20), fields, "sdwa")
        yield Probe("vop1", op, (word | 0xFA, 0xFF000000 | 20), fields, "dpp")
        word = 0x3E << 25 | op << 17 | 40 << 9
        fields = {"v20": "A", "v40": "B", "vcc": "V"}
        yield Probe("vopc", op, (word | 0x114,), fields)
        yield Probe("vopc", op, (word | 0xF9, 0x06060000 | 20), fields, "sdwa")
    for op in range(0x380):
        for src1 in (0x100 | 40, 40):
            for src2 in (0x100 | 60, 60, 0):
                for sdst in (0, 70):
                    first = 0x34 << 26 | op << 16 | sdst << 8 | 10
                    fields = {"v10": "D", "s10": "D", "s70": "S", "v20": "A"}
                    fields |= {"v40": "B", "s40": "B", "v60": "C", "s60": "C"}
                    yield Probe("vop3", op, (first, src2 << 18 | src1 << 9 | 0x114), fields)
        yield Probe("vop3", op, (0x34 << 26 | op << 16 | 10, 0x114), {"v10": "D", "s10": "D", "v20": "A"})
        yield Probe("vop3", op, (0x34 << 26 | op << 16, 0), {})
    for op in range(0x80):
        name = (
            "mai" if op >= 0x40 else "vop3p"
        )  # both are VOP3P; the fields of matrix products have other meanings
        fields = {"v10": "D", "v20": "A", "v40": "B", "v60": "C"}
        for last in (1, 0):
            first = 0x1A7 << 23 | op << 16 | last << 14 | 10
            second = last * (0x100 | 60) << 18 | (0x100 | 40) << 9 | 0x114
            yield Probe(name, op, (first, second), fields)
        yield Probe(name, op, (0x1A7 << 23 | op << 16 | 10, 0x114), fields)
    fields = {"v10": "A", "v20": "B", "v40": "C", "v60": "D"}
    for op in range(0x100):
        for gds in (0, 1):
            for used in range(16):
                vdst, data1, data0, addr = (
                    60 * (used & 1),
                    40 * (used >> 1 & 1),
                    20 * (used >> 2 & 1),
                    10 * (used >> 3),
                )
                words = 0x36 << 26 | op << 17 | gds << 16, vdst << 24 | data1 << 16 | data0 << 8 | addr
                yield Probe("ds", op, words, fields)
    for op in range(0x80):
        for segment, name in enumerate(("flat", "scratch", "global")):
            for glc in (0, 1):
                for used in range(4):
                    first = 0x37 << 26 | op << 18 | glc << 16 | segment << 14
                    vdst, data, saddr = 60 * (used & 1), 20 * (used >> 1), 0x7F if segment else 0
                    yield Probe(name, op, (first, vdst << 24 | saddr << 16 | data << 8 | 10), fields)
    yield from _mubuf_probes()


def gfx10_probes() -> Iterator[Probe]:
    """Return every opcode number of every format of GFX10, except interpolation, exports, images and typed buffers."""
    null = 125
    yield from _salu_probes()
    for op in range(0x100):
        for sbase in (20, 0):
            word = 0x3D << 26 | op << 18 | (16 << 6 if sbase else 0) | sbase
            yield Probe("smem", op, (word, null << 25 | 0x64 if sbase else 0), {"s16": "D", "s40": "A"})
        yield Probe("smem", op, (0x3D << 26 | op << 18 | 16 << 6, 0), {"s16": "D"})
    variants = (("sdwa", 0xF9, 0x06060600), ("dpp", 0xFA, 0xFF000000), ("dpp8", 0xE9, 0))
    for op in range(0x3E):
        word = op << 25 | 10 << 17 | 40 << 9
        fields = {"v10": "D", "v20": "A", "v40": "B", "vcc": "V", "0x89ab": "L"}
        yield Probe("vop2", op, (word | 0x114,), fields)
        yield Probe("vop2", op, (word | 0x114, 0x89AB), fields)
        for name, src0, second in variants:
            yield Probe("vop2", op, (word | src0, second | 20), fields, name)
    for op in range(0x100):
        word = 0x3F << 25 | 10 << 17 | op << 9
        fields = {"v10": "D", "s10": "D", "v20": "A", "s20": "A"}
        yield Probe("vop1", op, (word | 0x114,), fields)
        yield Probe("vop1", op, (word | 20,), fields)
        yield Probe("vop1", op, (0x3F << 25 | op << 9,), {})
        for name, src0, second in variants:
            yield Probe(
                "vop1", op, (word | src0, second & ~(0xFF << 24 if name == "sdwa" else 0) | 20), fields, name
            )
        word = 0x3E << 25 | op << 17 | 40 << 9
        fields = {"v20": "A", "v40": "B", "vcc": "V"}
        yield Probe("vopc", op, (word | 0x114,), fields)
        yield Probe("vopc", op, (word | 0xF9, 0x06060000 | 20), fields, "sdwa")
    for op in range(0x400):
        for src1 in (0x100 | 40, 40):
            for src2 in (0x100 | 60, 60, 0):
                for dst, sdst in ((10, 0), (10, 70), (0, 0)):
                    first = 0x35 << 26 | op << 16 | sdst << 8 | dst
                    fields = {"v10": "D", "s10": "D", "s70": "S", "v20": "A"}
                    fields |= {"v40": "B", "s40": "B", "v60": "C", "s60": "C"}
                    yield Probe("vop3", op, (first, src2 << 18 | src1 << 9 | 0x114), fields)
        yield Probe("vop3", op, (0x35 << 26 | op << 16 | 10, 0x114), {"v10": "D", "s10": "D", "v20": "A"})
        yield Probe("vop3", op, (0x35 << 26 | op << 16, 0), {})
    for op in range(0x80):
        fields = {"v10": "D", "v20": "A", "v40": "B", "v60": "C"}
        for last in (1, 0):
            first = 0x198 << 23 | op << 16 | last << 14 | 10
            second = last * (0x100 | 60) << 18 | (0x100 | 40) << 9 | 0x114
            yield Probe("vop3p", op, (first, second), fields)
    fields = {"v10": "A", "v20": "B", "v40": "C", "v60": "D"}
    for op in range(0x100):
        for gds in (0, 1):
            for used in range(16):
                vdst, data1 = 60 * (used & 1), 40 * (used >> 1 & 1)
                data0, addr = 20 * (used >> 2 & 1), 10 * (used >> 3)
                words = 0x36 << 26 | op << 18 | gds << 17, vdst << 24 | data1 << 16 | data0 << 8 | addr
                yield Probe("ds", op, words, fields)
    for op in range(0x80):
        for segment, name in enumerate(("flat", "scratch", "global")):
            for glc in (0, 1):
                for used in range(4):
                    first = 0x37 << 26 | op << 18 | glc << 16 | segment << 14
                    vdst, data = 60 * (used & 1), 20 * (used >> 1)
                    yield Probe(name, op, (first, vdst << 24 | null << 16 | data << 8 | 10), fields)
    yield from _mubuf_probes()


FAMILIES = {"gfx906": gfx9_probes, "gfx90a": gfx9_probes, "gfx1030": gfx10_probes}
# The features of llvm-mc that choose the lanes of a wave, where a GPU has a choice.
WAVES = {"gfx1030": ("+wavefrontsize32,-wavefrontsize64", "-wavefrontsize32,+wavefrontsize64")}


def disassemble(gpu: str, found: list[Probe], features: str = "") -> list[str | None]:
    """Return llvm-mc's text for each probe; None if it knows none, or if some words do not belong to it."""
    blocks = []
    for probe in found:
        data = b"".join(word.to_bytes(4, "little") for word in probe.words)
        for block in (data, MARKER.to_bytes(4, "little")):  # llvm-mc ends an instruction where a block ends
            blocks.append("[" + " ".join(f"0x{byte:02x}" for byte in block) + "]\n")
    for tool in MC:
        try:
            done = subprocess.run(
                [
                    tool,
                    "--arch=amdgcn",
                    f"-mcpu={gpu}",
                    f"-mattr={features}",
                    "--disassemble",
                    "--show-encoding",
                ],
                input="".join(blocks),
                capture_output=True,
                text=True,
                check=False,
            )
            break
        except FileNotFoundError:
            continue
    else:
        raise SystemExit(f"generate.py: none of {', '.join(MC)} is installed; apt install llvm-15")
    result: list[str | None] = []
    texts: list[tuple[str, int]] = []
    for text, encoding in re.findall(r"^\t([a-z].*?)\s*; encoding: \[(.*)\]$", done.stdout, re.M):
        if text != "s_nop 0xbeef":
            texts.append((text, encoding.count("0x")))
            continue
        whole = len(texts) == 1 and texts[0][1] == 4 * len(found[len(result)].words)
        result.append(texts[0][0] if whole else None)
        texts = []
    return result


def row(probe: Probe, text: str) -> tuple[str, str] | None:
    """Return the name and the operands of one instruction; None if one of its registers stands for no field."""
    name, _, rest = text.partition(" ")
    name = re.sub(r"_(e32|e64|sdwa|dpp)$", "", name)
    operands = ""
    for operand in rest.split(","):
        operand = operand.split()[0] if operand.split() else ""
        match = re.fullmatch(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])", operand)
        if match:
            first = int(match[2] or match[3])
            count = int(match[4]) - first + 1 if match[4] else 1
            field = probe.fields.get(match[1].replace("a", "v") + str(first))
            if field is None:
                return None
            operands += (field.lower() if match[1] == "a" else field) + (
                "w" if count == 32 else f"{count % 16:x}"
            )
        elif operand in ("vcc", "vcc_lo"):
            operands += "V2" if operand == "vcc" else "V1"
        elif operand == "0x89ab":
            operands += "L1"
        elif probe.format in ("sopk", "sopp") and operand:
            operands += "I0"
    return name, operands


Key = tuple[str, int]  # format and number
Rows = dict[Key, tuple[str, str]]  # name and operands


def rows_of(gpu: str, features: str = "") -> tuple[Rows, dict[Key, set[str]]]:
    """Return the rows, and for each opcode which of SDWA and DPP exist."""
    found = list(FAMILIES[gpu]())
    rows: Rows = {}
    variants: dict[Key, set[str]] = {}
    for probe, text in zip(found, disassemble(gpu, found, features), strict=True):
        if text is None:
            continue
        key = probe.format, probe.opcode
        if probe.variant:
            variants.setdefault(key, set()).add(probe.variant)
            continue
        new = row(probe, text)
        if new is None:
            continue
        # The same opcode with other operands may have a result that is returned, or a second sdst.
        if key not in rows or (new[0] == rows[key][0] and len(new[1]) > len(rows[key][1])):
            rows[key] = new
    return rows, variants


def with_masks(narrow: str, wide: str) -> str:
    """Return the operands of an instruction whose lane masks have one register in `narrow` and two in `wide`."""
    pairs = zip(narrow[::2], narrow[1::2], wide[1::2], strict=True)
    return "".join(letter + (one if one == two else "m") for letter, one, two in pairs)


def table(gpu: str) -> list[str]:
    """Return the rows, as C++ initializers."""
    rows, variants = rows_of(gpu, *WAVES.get(gpu, ())[:1])
    if gpu in WAVES:
        wide, _ = rows_of(gpu, WAVES[gpu][1])
        rows = {key: (name, with_masks(operands, wide[key][1])) for key, (name, operands) in rows.items()}
    order = {probe.format: number for number, probe in reversed(list(enumerate(FAMILIES[gpu]())))}
    lines = []
    for key in sorted(rows, key=lambda k: (order[k[0]], k[1])):
        name, operands = rows[key]
        flags = " | ".join(v for v in ("sdwa", "dpp", "dpp8") if v in variants.get(key, ())) or "0"
        lines.append(f'{{Format::{key[0]}, 0x{key[1]:03x}, "{name}", "{operands}", {flags}}},')
    return lines


def main(arguments: list[str]) -> int:
    """Print the table of one GPU."""
    if len(arguments) != 1 or arguments[0] not in FAMILIES:
        print(f"usage: generate.py {'|'.join(FAMILIES)}", file=sys.stderr)
        return 2
    print(f"// Made by generate.py {arguments[0]} from what llvm-mc knows; do not edit.\n")
    print("\n".join(table(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
