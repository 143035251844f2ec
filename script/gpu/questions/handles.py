"""Symbols and handles that the driver returns and accepts."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpu.driver import (
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    CU_FUNC_ATTRIBUTE_NUM_REGS,
    CU_GET_PROC_ADDRESS_LEGACY_STREAM,
    CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
    CU_MODULE_EAGER_LOADING,
    CU_MODULE_LAZY_LOADING,
    PTX,
    PUT,
    Driver,
    DriverError,
)
from gpu.questions.asking import Answer, CannotAsk, question, row_by_row

AGENT = Path(__file__).resolve().parents[3] / "lib" / "gpubpf" / "agent" / "src"
VERSION = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")


def hooked() -> list[str]:
    """Return the names of the driver's functions that the agent hooks, from its tables."""
    names = []
    for file in sorted(AGENT.glob("hooks*.def")):
        names += re.findall(r"^GPUBPF_HOOK\((cu[A-Z]\w+)\)", file.read_text(), re.MULTILINE)
    if not names:
        raise CannotAsk("the agent's tables of hooks are not in this checkout")
    return sorted(set(names))


@question(
    "are the driver's exported symbols and what cuGetProcAddress gives one address?",
    "yes, for every function that is hooked: hooks at exported symbols see all calls",
)
def symbols() -> Answer:
    driver = Driver().open()
    found: dict[str, int] = {}
    missing, different = [], {}
    for name in hooked():
        if not driver.has(name):
            missing.append(name)
            continue
        found[name] = ctypes.cast(getattr(driver.library, name), ctypes.c_void_p).value or 0
    bases = {VERSION.sub("", name) for name in found}
    exported = {address: name for name, address in found.items()}
    for base, version, kind in itertools.product(
        sorted(bases), ("", "_v2", "_v3", "_v4"), ("", "_ptsz", "_ptds")
    ):
        if driver.has(name := base + version + kind):
            address = ctypes.cast(getattr(driver.library, name), ctypes.c_void_p).value or 0
            exported.setdefault(address, name)
    asked, unhooked = 0, set()
    kinds = {
        "legacy": CU_GET_PROC_ADDRESS_LEGACY_STREAM,
        "per-thread": CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,
    }
    for base in sorted(bases):
        for release, kind in itertools.product((13000, 12000, 11040, 10000, 8000), kinds):
            pointer, status = ctypes.c_void_p(), ctypes.c_int()
            code = driver.call(
                "cuGetProcAddress_v2",
                ctypes.c_char_p(base.encode()),
                ctypes.byref(pointer),
                release,
                kinds[kind],
                ctypes.byref(status),
            )
            if code == 0 and pointer.value:
                asked += 1
                if pointer.value not in exported:
                    different[f"{base} {release} {kind}"] = hex(pointer.value)
                elif exported[pointer.value] not in found:
                    unhooked.add(exported[pointer.value])
    starts = Counter(bytes((ctypes.c_ubyte * 5).from_address(address)).hex() for address in found.values())
    crossing = [name for name, address in found.items() if address % 16 > 11]
    return {
        "answer": f"{len(found)} exported, {asked} asked of cuGetProcAddress, {len(different)} at other addresses",
        "agrees": not different,
        "other_addresses": dict(list(different.items())[:40]),
        "not_exported": missing,
        "given_but_not_hooked": sorted(unhooked),
        "first_five_bytes": dict(starts.most_common(12)),
        "not_within_16_bytes": crossing,
    }


# (handle, function, rest of the arguments): what is tried with a handle of each kind.
def _tries(driver: Driver) -> dict[str, Callable[[int], int]]:
    text, number, size, offset = ctypes.c_char_p(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    value = ctypes.c_int()
    return {
        "cuFuncGetName": lambda f: driver.call("cuFuncGetName", ctypes.byref(text), f),
        "cuKernelGetName": lambda f: driver.call("cuKernelGetName", ctypes.byref(text), f),
        "cuFuncGetModule": lambda f: driver.call("cuFuncGetModule", ctypes.byref(number), f),
        "cuKernelGetLibrary": lambda f: driver.call("cuKernelGetLibrary", ctypes.byref(number), f),
        "cuFuncGetParamInfo": lambda f: driver.call(
            "cuFuncGetParamInfo", f, 1, ctypes.byref(offset), ctypes.byref(size)
        ),
        "cuKernelGetParamInfo": lambda f: driver.call(
            "cuKernelGetParamInfo", f, 1, ctypes.byref(offset), ctypes.byref(size)
        ),
        "cuFuncGetAttribute": lambda f: driver.call(
            "cuFuncGetAttribute", ctypes.byref(value), CU_FUNC_ATTRIBUTE_NUM_REGS, f
        ),
        "cuKernelGetAttribute": lambda f: driver.call(
            "cuKernelGetAttribute", ctypes.byref(value), CU_FUNC_ATTRIBUTE_NUM_REGS, f, 0
        ),
        "cuFuncSetAttribute": lambda f: driver.call(
            "cuFuncSetAttribute", f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024
        ),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda f: driver.call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(value), f, 32, 0
        ),
        "cuLaunchKernel": lambda f: driver.launch(f, [driver.memory(8), 1]),
    }


def _handles(driver: Driver) -> dict[str, int]:
    image = ctypes.c_char_p(PUT.encode())
    library = driver.handle("cuLibraryLoadData", image, 0, 0, 0, 0, 0, 0)
    kernel = driver.handle("cuLibraryGetKernel", library, ctypes.c_char_p(b"put"))
    return {
        "function of a module": driver.kernel(PUT, "put"),
        "kernel of a library": kernel,
        "function of that kernel": driver.handle("cuKernelGetFunction", kernel),
    }


@question(
    "which of cuFuncGetName, cuFuncGetModule, cuKernelGetLibrary … take a CUfunction, which a CUkernel?",
    "a launch takes both; a name is told of both; cuFuncGetModule refuses a CUkernel, cuKernelGetLibrary a CUfunction, without harm",
    60,
)
def handles() -> Answer:
    kinds = ("function of a module", "kernel of a library", "function of that kernel")

    def tried(kind: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        driver = Driver().open()
        handle, tries = _handles(driver)[kind], _tries(driver)
        for name in names:
            yield name, driver.name(tries[name](handle)) if driver.has(name) else "not exported"

    names = list(_tries(Driver()))
    found = {kind: row_by_row(names, functools.partial(tried, kind), 18) for kind in kinds}
    ok = "CUDA_SUCCESS"
    kernel, function = found["kernel of a library"], found["function of a module"]
    died = [
        f"{name} of a {kind}"
        for kind in kinds
        for name, said in found[kind].items()
        if said.startswith("died")
    ]
    agrees = (
        kernel["cuLaunchKernel"] == function["cuLaunchKernel"] == ok
        and function["cuFuncGetName"] == ok
        and not died
    )
    taken = [name for name, said in kernel.items() if said == ok]
    return {
        "answer": f"of a CUkernel: {', '.join(taken)}" + (f"; died: {', '.join(died)}" if died else ""),
        "agrees": agrees,
        "found": found,
    }


GLOBALS = (
    PTX
    + """
.visible .global .align 8 .u64 seen = 7;
.global .align 8 .u64 hidden = 8;
.global .align 8 .u64 untouched = 9;
.visible .const .align 8 .u64 constant = 10;
.const .align 8 .u64 hidden_constant = 11;
.weak .global .align 8 .u64 weakly = 12;
.global .align 1 .b8 $str[4] = {97, 98, 99, 0};
.global .align 8 .u64 _ZZ4usedvE1s = 13;
.extern .shared .align 8 .b8 dynamic[];
.visible .entry use(.param .u64 out) {
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [out];
    ld.global.u64 %rd2, [seen];
    ld.global.u64 %rd3, [hidden];
    add.u64 %rd2, %rd2, %rd3;
    ld.const.u64 %rd3, [constant];
    add.u64 %rd2, %rd2, %rd3;
    ld.const.u64 %rd3, [hidden_constant];
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u64 %rd3, [weakly];
    add.u64 %rd2, %rd2, %rd3;
    ld.global.u64 %rd3, [_ZZ4usedvE1s];
    add.u64 %rd2, %rd2, %rd3;
    mov.u64 %rd4, $str;
    add.u64 %rd2, %rd2, %rd4;
    st.global.u64 [seen], %rd2;
    st.global.u64 [hidden], %rd2;
    st.global.u64 [_ZZ4usedvE1s], %rd2;
    st.global.u64 [%rd1], %rd2;
    ret;
}
"""
)


@question(
    "which module-level symbols does cuModuleGetGlobal find?",
    "global and constant variables, also those that are LOCAL symbols; what no kernel uses may be gone",
)
def module_symbols() -> Answer:
    driver = Driver().open()
    names = ["seen", "hidden", "untouched", "constant", "hidden_constant", "weakly", "$str", "_ZZ4usedvE1s"]
    images = {"PTX": GLOBALS.encode() + b"\0"}
    if cubin := _assembled(GLOBALS, driver.cc()):
        images["cubin by ptxas"] = cubin
    found: dict[str, dict[str, str]] = {}
    failed: dict[str, str] = {}
    for kind, image in images.items():
        try:
            module = driver.module(image)
        except DriverError as error:
            failed[kind] = str(error)
            continue
        address, size = ctypes.c_uint64(), ctypes.c_uint64()
        for name in names:
            code = driver.call(
                "cuModuleGetGlobal_v2",
                ctypes.byref(address),
                ctypes.byref(size),
                module,
                ctypes.c_char_p(name.encode()),
            )
            found.setdefault(kind, {})[name] = f"{size.value} bytes" if code == 0 else driver.name(code)
    lost = {kind: [name for name, said in of.items() if "bytes" not in said] for kind, of in found.items()}
    return {
        "answer": "; ".join(
            f"{kind}: all but {', '.join(of)}" if of else f"{kind}: all found" for kind, of in lost.items()
        ),
        "agrees": all(name in ("untouched", "$str") for of in lost.values() for name in of),
        "found": found,
        "not_loaded": failed,
        "kernels are loaded": _loading(driver),
    }


def _loading(driver: Driver) -> str:
    """Return whether kernels are loaded with their module, or at their first use (CUDA_MODULE_LOADING)."""
    mode = ctypes.c_int()
    if driver.has("cuModuleGetLoadingMode"):
        driver.must("cuModuleGetLoadingMode", ctypes.byref(mode))
    modes = {CU_MODULE_EAGER_LOADING: "with their module", CU_MODULE_LAZY_LOADING: "when they are needed"}
    return modes.get(mode.value, "the driver does not say when")


def _assembled(ptx: str, cc: int) -> bytes | None:
    """Return the cubin that ptxas makes of a text; None without ptxas."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(OSError, subprocess.TimeoutExpired):
        out = Path(scratch, "cubin")
        command = ["ptxas", f"-arch=sm_{cc}", "-o", str(out), "-"]
        if subprocess.run(command, input=ptx.encode(), capture_output=True, timeout=10).returncode == 0:
            return out.read_bytes()
    return None
