"""Kernels of GFX9 as GFX10 writes them, for waves of 32 or 64 lanes."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from hipsim_engine import SOURCE, assemble, kernel

GPU = "gfx1030"
WAVES = (32, 64)
NAMES = {
    "v_add_u32": "v_add_nc_u32",
    "v_sub_u32": "v_sub_nc_u32",
    "v_subrev_u32": "v_subrev_nc_u32",
    "v_add_i32": "v_add_nc_i32",
    "v_sub_i32": "v_sub_nc_i32",
    "v_add_u16": "v_add_nc_u16",
    "v_sub_u16": "v_sub_nc_u16",
    "v_add_i16": "v_add_nc_i16",
    "v_sub_i16": "v_sub_nc_i16",
    "v_addc_co_u32": "v_add_co_ci_u32",
    "v_subb_co_u32": "v_sub_co_ci_u32",
    "v_subbrev_co_u32": "v_subrev_co_ci_u32",
}


def cases_of_gfx9(name: str) -> ModuleType:
    """Give a module of tests, whose cases gfx1030 is tested with, too."""
    path = Path(__file__).parents[1] / "hipsim" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_of_gfx9", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def existing() -> set[str]:
    """Give the names of all instructions."""
    table = (SOURCE / "src" / "isa" / f"{GPU}.inc").read_text()
    return set(re.findall(r'0x[0-9a-f]+, "(\w+)"', table))


def stem(name: str) -> str:
    """Give the name of an instruction without LLVM's suffix for the encoding."""
    return re.sub(r"_(e32|e64|sdwa|dpp)$", "", name)


def translated(text: str, lanes: int) -> str:
    """Give a text of GFX9 with GFX10's names; masks of lanes are in s[20:21], s[22:23] and s[6:7], EXEC and VCC."""

    def renamed(match: re.Match[str]) -> str:
        name = match[0]
        short = stem(name)
        return NAMES.get(short, short) + name[len(short) :]

    text = re.sub(r"\bv_\w+", renamed, text)
    if lanes == 64:
        return text
    text = re.sub(r"\bs_(\w+)_b64 (exec|s\[6:7\])", r"s_\1_b32 \2", text)
    text = re.sub(r"\b(vcc|exec)\b", r"\1_lo", text)
    return re.sub(r"\bs\[(20|22|6):\d+\]", r"s\1", text)


def kernel_of(name: str, body: str, lanes: int, lds: int = 0, scratch: int = 0) -> str:
    """Give the text of a kernel, as hipsim_engine.kernel does."""
    return with_waves(kernel(name, body, lds, scratch, GPU), lanes)


def with_waves(text: str, lanes: int) -> str:
    """Say in the kernel descriptor how many lanes a wave has."""
    return text.replace(
        ".end_amdhsa_kernel", f".amdhsa_wavefront_size32 {int(lanes == 32)}\n.end_amdhsa_kernel"
    )


def assemble_for(text: str, place: Path, lanes: int) -> Path:
    """Assemble kernels for waves of that size."""
    other = 96 - lanes
    return assemble(text, place, GPU, f"+wavefrontsize{lanes},-wavefrontsize{other}")
