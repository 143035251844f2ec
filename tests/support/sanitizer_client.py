"""A tool for NVIDIA's Compute Sanitizer API by ctypes, with patches in PTX that count what runs, by program counter.

tool = Tool(cu)                       # subscribes
tool.patch_modules({2: "onExit"})     # every module that is loaded from now on
tool.counts("work")                   # {offset of an instruction in the kernel: how often it ran}
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

from cudasim_device import Driver, libraries

RESOURCE, SYNCHRONIZE, LAUNCH, GRAPHS = 3, 4, 5, 10
MODULE_LOADED, UNLOAD_STARTING, LAZY_LOADED, LAZY_PATCHED = 9, 10, 24, 25
LAUNCH_BEGIN, LAUNCH_END, NODE_BEGIN = 1, 3, 4
KERNEL_NODE = 0
SLOTS = 4096  # of the table, one for each program counter
RECORD = 8  # words: calls, sum of sizes, last address, last flags, last value, calls with data, …

c = ctypes
_HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
_COUNT = """.reg .b64 %at, %pc, %ptr, %p, %value; .reg .b32 %r<4>; .reg .pred %has;
ld.param.b64 %pc, [pc]; shr.u64 %at, %pc, 4; and.b64 %at, %at, 4095; mul.lo.u64 %at, %at, 64; add.u64 %at, %at, TABLE;
red.global.add.u64 [%at], 1;
ld.param.b64 %p, [data]; setp.ne.u64 %has, %p, 0; @%has red.global.add.u64 [%at+40], 1;
"""
_DATA = "@%has red.global.add.u64 [%p], 1;\n"
_ACCESS = """ld.param.b32 %r1, [size]; cvt.u64.u32 %p, %r1; red.global.add.u64 [%at+8], %p;
ld.param.b64 %ptr, [ptr]; st.global.b64 [%at+16], %ptr; ld.param.b32 %r1, [flags]; st.global.b32 [%at+24], %r1;
ld.param.b64 %p, [pdata]; setp.ne.u64 %has, %p, 0; @%has ld.u32 %r2, [%p]; @%has st.global.b32 [%at+32], %r2;
"""
_THREE = """ld.param.b32 %r1, [a]; st.global.b32 [%at+16], %r1; ld.param.b32 %r1, [b]; st.global.b32 [%at+24], %r1;
ld.param.b32 %r1, [c]; st.global.b32 [%at+32], %r1;
"""
_PC = ".param .b64 data, .param .b64 pc"
# name → parameters, what it does besides counting
_FUNCTIONS = {
    "onPc": (_PC, ""),
    "onPcWithData": (_PC, _DATA),
    "onAccess": (f"{_PC}, .param .b64 ptr, .param .b32 size, .param .b32 flags, .param .b64 pdata", _ACCESS),
    "onBarrier": (f"{_PC}, .param .b32 a, .param .b32 b, .param .b32 c", _THREE),
    "onMask": (
        f"{_PC}, .param .b32 a",
        "ld.param.b32 %r1, [a]; st.global.b32 [%at+16], %r1;",
    ),
    "onCopy": (
        f"{_PC}, .param .b64 ptr, .param .b32 a, .param .b32 b, .param .b32 c",
        f"ld.param.b64 %ptr, [ptr]; st.global.b64 [%at+8], %ptr;{_THREE}",
    ),
    "onBulkLoad": (
        f"{_PC}, .param .b64 ptr, .param .b32 a, .param .b32 b, .param .b32 c, .param .b32 d",
        f"ld.param.b64 %ptr, [ptr]; st.global.b64 [%at+8], %ptr;{_THREE}",
    ),
    "onReduction": (
        f"{_PC}, .param .b64 ptr, .param .b32 a, .param .b32 b",
        "ld.param.b64 %ptr, [ptr]; st.global.b64 [%at+8], %ptr; ld.param.b32 %r1, [a]; st.global.b32 [%at+16], %r1;"
        "ld.param.b32 %r1, [b]; st.global.b32 [%at+24], %r1;",
    ),
    "onMatrix": (
        f"{_PC}, .param .b32 a, .param .b32 size, .param .b32 b, .param .b32 c, .param .b64 pdata",
        _THREE
        + "ld.param.b64 %p, [pdata]; setp.ne.u64 %has, %p, 0; @%has ld.u32 %r2, [%p]; @%has st.global.b32 [%at+8], %r2;",
    ),
    "onMalloc": (
        f"{_PC}, .param .b64 ptr, .param .b64 size",
        "ld.param.b64 %ptr, [ptr]; st.global.b64 [%at+16], %ptr; ld.param.b64 %p, [size]; st.global.b64 [%at+24], %p;",
    ),
    "onFree": (f"{_PC}, .param .b64 ptr", "ld.param.b64 %ptr, [ptr]; st.global.b64 [%at+16], %ptr;"),
    "onCall": (
        f"{_PC}, .param .b64 ptr, .param .b32 flags",
        "ld.param.b64 %ptr, [ptr]; st.global.b64 [%at+16], %ptr;",
    ),
}


def patches(table: int) -> str:
    """PTX with functions that count in a table at this address."""
    text = _HEAD
    for name, (parameters, more) in _FUNCTIONS.items():
        text += f".visible .func (.param .b32 result) {name}({parameters})\n{{\n{_COUNT}{more}"
        text += "st.param.b32 [result], 0;\nret;\n}\n"
    return text.replace("TABLE", str(table))


class ModuleData(c.Structure):
    _fields_: ClassVar = [
        ("context", c.c_void_p),
        ("module", c.c_void_p),
        ("cubin_size", c.c_size_t),
        ("cubin", c.c_void_p),
        ("library", c.c_void_p),
    ]


class FunctionsData(c.Structure):
    _fields_: ClassVar = [
        ("context", c.c_void_p),
        ("module", c.c_void_p),
        ("functions", c.POINTER(c.c_void_p)),
        ("count", c.c_uint32),
    ]


class LaunchData(c.Structure):
    _fields_: ClassVar = [
        ("context", c.c_void_p),
        ("stream", c.c_void_p),
        ("stream_handle", c.c_void_p),
        ("module", c.c_void_p),
        ("function", c.c_void_p),
        ("name", c.c_char_p),
        ("grid", c.c_uint32 * 3),
        ("block", c.c_uint32 * 3),
        ("cluster", c.c_uint32 * 3),
        ("grid_id", c.c_uint64),
        ("launch", c.c_void_p),
        ("device", c.c_int),
        ("api_context", c.c_void_p),
        ("api_stream", c.c_void_p),
        ("api_stream_handle", c.c_void_p),
        ("split", c.c_uint32),
    ]


class NodeData(c.Structure):
    _fields_: ClassVar = [
        ("exec", c.c_void_p),
        ("launch_id", c.c_uint32),
        ("node", c.c_void_p),
        ("type", c.c_int),
        ("launch", LaunchData),
        ("upload", c.c_uint32),
    ]


_CALLBACK = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.c_uint32, c.c_void_p)


def library() -> ctypes.CDLL:
    """The stand-in."""
    return ctypes.CDLL(str(libraries() / "libsanitizer-public.so"))


class Tool:
    """A subscriber. `log`: the callbacks, as (domain, callback). `data`: the data of a launch, by kernel and node."""

    def __init__(self, cu: Driver, domains: tuple[int, ...] = (RESOURCE, LAUNCH, GRAPHS)) -> None:
        self.cu, self.api = cu, library()
        self.log: list[tuple[int, int]] = []
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = []
        self.nodes: list[tuple[str, bool]] = []
        self.loaded: list[int] = []
        self.unloaded: list[int] = []
        self.lazy: list[tuple[int, int]] = []  # callback, function
        self.wanted: Mapping[int, str] = {}
        self.data: Mapping[str, int] = {}
        self.tables: dict[int, int] = {}  # by context
        self.handle = c.c_void_p()
        self._callback = _CALLBACK(self._called)
        self.call("sanitizerSubscribe", c.byref(self.handle), self._callback, None)
        for domain in domains:
            self.call("sanitizerEnableDomain", 1, self.handle, domain)

    def status(self, name: str, *arguments: object) -> int:
        return int(getattr(self.api, name)(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        assert (status := self.status(name, *arguments)) == 0, f"{name} gives {status}"

    def patch_modules(self, wanted: Mapping[int, str]) -> None:
        self.wanted = wanted

    def table(self, context: int) -> int:
        """The table of a context, and its patches. Made at first use."""
        if context not in self.tables:
            made = c.c_void_p()
            self.call("sanitizerAlloc", c.c_void_p(context), c.byref(made), c.c_size_t(SLOTS * RECORD * 8))
            handle = c.c_void_p()
            self.call("sanitizerGetStreamHandle", c.c_void_p(context), None, c.byref(handle))
            self.call("sanitizerMemset", made, 0, c.c_size_t(SLOTS * RECORD * 8), handle)
            self.call("sanitizerStreamSynchronize", handle)
            self.tables[context] = made.value or 0
            self.call("sanitizerAddPatches", patches(made.value or 0).encode(), c.c_void_p(context))
        return self.tables[context]

    def patch(self, module: int, context: int) -> None:
        self.table(context)
        for instruction, name in self.wanted.items():
            self.call("sanitizerPatchInstructions", instruction, c.c_void_p(module), name.encode())
        self.call("sanitizerPatchModule", c.c_void_p(module))

    def _called(self, _: int, domain: int, callback: int, data: int) -> None:
        self.log.append((domain, callback))
        if domain == RESOURCE and callback in (MODULE_LOADED, UNLOAD_STARTING):
            module = ModuleData.from_address(data)
            (self.loaded if callback == MODULE_LOADED else self.unloaded).append(module.module)
            if callback == MODULE_LOADED and self.wanted:
                self.patch(module.module, module.context)
        if domain == RESOURCE and callback in (LAZY_LOADED, LAZY_PATCHED):
            functions = FunctionsData.from_address(data)
            self.lazy += [(callback, functions.functions[k]) for k in range(functions.count)]
        if domain == LAUNCH and callback == LAUNCH_BEGIN:
            launch = LaunchData.from_address(data)
            self.launches.append(
                (launch.name.decode(), tuple(launch.grid), tuple(launch.block), launch.grid_id)
            )
            self._set_data(launch)
        if domain == GRAPHS and callback == NODE_BEGIN:
            node = NodeData.from_address(data)
            if node.type == KERNEL_NODE:
                self.nodes.append((node.launch.name.decode(), bool(node.upload)))
                self._set_data(node.launch)

    def _set_data(self, launch: LaunchData) -> None:
        if (data := self.data.get(launch.name.decode())) is not None:
            name = "sanitizerSetLaunchCallbackData"
            handles = (
                c.c_void_p(launch.launch),
                c.c_void_p(launch.function),
                c.c_void_p(launch.stream_handle),
            )
            self.call(name, *handles, c.c_void_p(data))

    def place(self, module: c.c_void_p, name: str) -> tuple[int, int]:
        """The first program counter of a function and its size."""
        pc, size = c.c_uint64(), c.c_uint64()
        name_ = "sanitizerGetFunctionPcAndSize"
        self.call(name_, module, name.encode(), c.byref(pc), c.byref(size))
        return pc.value, size.value

    def records(self, module: c.c_void_p, name: str, context: int | None = None) -> dict[int, list[int]]:
        """The words of each program counter of a function that ran, by its offset in instructions."""
        pc, size = self.place(module, name)
        table = self.tables[context if context is not None else self.cu.context.value or 0]
        words = (c.c_uint64 * (SLOTS * RECORD))()
        self.call("sanitizerMemcpyDeviceToHost", words, c.c_void_p(table), c.c_size_t(c.sizeof(words)), None)
        found = {}
        for offset in range(0, size, 16):
            at = ((pc + offset) // 16 % SLOTS) * RECORD
            if words[at]:
                found[offset // 16] = list(words[at : at + RECORD])
        return found

    def counts(self, module: c.c_void_p, name: str, context: int | None = None) -> Counter[int]:
        return Counter({at: words[0] for at, words in self.records(module, name, context).items()})
