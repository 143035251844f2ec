"""C text → lowered programs, from the package's prebuilt files, from the cache, or made now.

    programs = load(text)
    programs.fragment("on_exit")     # a device program, which runs on a GPU
    programs.native("on_launch")     # a host program, which runs in the traced process

A prebuilt text needs no compiler, no LLVM and no privileges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpubpf import cache, processor
from gpubpf.ebpf import headers
from gpubpf.ebpf.bytecode import Program
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.kernel import privileges
from gpubpf.lower.fragment import Fragment
from gpubpf.lower.native import PREBUILT_FOR, Native

if TYPE_CHECKING:
    from gpubpf.lower.amdgcn import WaveProgram
    from gpubpf.verify.values import Checked

PREBUILT = Path(__file__).parent.parent / "ebpf" / "prebuilt"


class LoweredPrograms(Protocol):
    """The programs of one C text. Each is lowered on demand."""

    @property
    def program(self) -> Program:
        """The compiled text."""

    @property
    def maps(self) -> Mapping[str, MapDefinition]:
        """All maps of the text, by name."""

    @property
    def points(self) -> Mapping[str, str]:
        """The point that each function belongs to (see `bytecode.BpfFunction`)."""

    def maps_of(self, name: str) -> frozenset[str]:
        """Return the maps that a device program may use on any GPU. Raises VerifyError.

        On a GPU whose warps have fewer lanes, the lowered program may use fewer maps.
        """

    def fragment(self, name: str) -> Fragment:
        """Return a device program as PTX. Raises VerifyError if it must not run."""

    def wave_program(self, name: str, wave: int) -> WaveProgram:
        """Return a device program for AMD GPUs with waves of 32 or 64 lanes. Raises VerifyError if it must not run there."""

    def native(self, name: str) -> Native:
        """Return a program for launches or operations as machine code. Raises VerifyError if it needs the kernel."""


def load(text: str, any_user: bool = False) -> LoweredPrograms:
    """Return the programs of a C text. Raises CompileError. any_user: see `compile.compile_text`."""
    found = find_prebuilt(text)
    return PrebuiltPrograms(text, found) if found is not None else compiled(text, any_user)


def compiled(text: str, any_user: bool = False) -> CompiledPrograms:
    """Return the programs of a C text that is compiled now or is in the cache. Raises CompileError."""
    from gpubpf.ebpf import compile

    return CompiledPrograms(compile.compile_text(text, any_user), compile.program_key(text, any_user))


class PrebuiltPrograms:
    """The programs of a prebuilt file. They were compiled, verified and lowered when the package was built.

    Only programs for AMD GPUs are lowered here, after the second gate has verified them again.
    """

    def __init__(self, text: str, found: Mapping[str, Any]) -> None:
        self._text, self._found = text, found

    @cached_property
    def program(self) -> Program:
        from gpubpf.ebpf import compile

        return compile.from_json(self._found["program"], self._text)

    @cached_property
    def maps(self) -> Mapping[str, MapDefinition]:
        return {item["name"]: MapDefinition.from_json(item) for item in self._found["program"]["maps"]}

    @property
    def points(self) -> Mapping[str, str]:
        return {name: function["point"] for name, function in self._found["program"]["functions"].items()}

    def maps_of(self, name: str) -> frozenset[str]:
        return frozenset(argument.map for argument in self.fragment(name).arguments)

    def fragment(self, name: str) -> Fragment:
        return Fragment.from_json(self._found["fragments"][name])

    def wave_program(self, name: str, wave: int) -> WaveProgram:
        from gpubpf.ebpf import compile
        from gpubpf.verify import rules

        return _wave_program(
            compile.program_key(self._text),
            name,
            wave,
            lambda: (self.program, rules.check(self.program, self.program.functions[name]), "prebuilt"),
        )

    def native(self, name: str) -> Native:
        if processor.NAME == PREBUILT_FOR:
            return Native.from_prebuilt(self._found["natives"][name])
        from gpubpf.lower import host_code

        return host_code.lower(self.program, self.program.functions[name], processor.NAME)


class CompiledPrograms:
    """The programs of a C text that is compiled here, or of an object file. The cache keeps device programs by `key` and name."""

    def __init__(self, program: Program, key: str) -> None:
        self.program, self._key = program, key

    @property
    def maps(self) -> Mapping[str, MapDefinition]:
        return self.program.maps

    @property
    def points(self) -> Mapping[str, str]:
        return {name: function.point for name, function in self.program.functions.items()}

    def maps_of(self, name: str) -> frozenset[str]:
        return frozenset(i.map for i in self.program.functions[name].instructions if i.map is not None)

    def fragment(self, name: str) -> Fragment:
        key, store = cache.key(self._key, name), cache.default()
        if (kept := cache.from_json(store.get("fragment", key), Fragment.from_json)) is not None:
            return kept
        fragment, release = verified(self.program, name)
        if _lasts(release):
            store.put("fragment", key, json.dumps(fragment.to_json()).encode())
        return fragment

    def wave_program(self, name: str, wave: int) -> WaveProgram:
        from gpubpf.verify import verify

        return _wave_program(
            self._key,
            name,
            wave,
            lambda: (self.program, *verify(self.program, self.program.functions[name])),
        )

    def native(self, name: str) -> Native:
        from gpubpf.lower import host_code

        return host_code.lower(self.program, self.program.functions[name], processor.NAME)


def _wave_program(
    text: str, name: str, wave: int, checked: Callable[[], tuple[Program, Checked, str | None]]
) -> WaveProgram:
    """Return a device program for AMD GPUs, from the cache if it is there. Raises VerifyError.

    text: the key of the C text
    checked: verifies the program, which takes up to a second. Returns the program, the result, and the release of the kernel that
      accepted the program, or None without a verdict.
    """
    from gpubpf.lower import amdgcn

    key, store = cache.key(text, name, str(wave)), cache.default()
    if (kept := cache.from_json(store.get("wave", key), amdgcn.WaveProgram.from_json)) is not None:
        return kept
    program, known, release = checked()
    made = amdgcn.lower(program, known, wave)
    if _lasts(release):
        store.put("wave", key, json.dumps(made.to_json()).encode())
    return made


def _lasts(release: str | None) -> bool:
    """Return whether a result may stay in the cache: without a verdict, the kernel may give one the next time.

    release: the release of the kernel that gave a verdict; None without a verdict
    """
    return release is not None or not privileges.capable()


def verified(program: Program, name: str) -> tuple[Fragment, str | None]:
    """Verify and lower one device program. Also return the release of the kernel that accepted it, or None without a verdict.

    Raises VerifyError.
    """
    from gpubpf.lower import nvptx
    from gpubpf.verify import verify

    checked, release = verify(program, program.functions[name])
    return nvptx.lower(program, checked), release


def is_by_lanes(text: str) -> bool:
    """Return whether a C text depends on the number of lanes. If so, AMD GPUs need a variant of the text that begins with WIDE."""
    return any(word in text for word in ("GPU_LANES", "gpu_mask"))


def find_prebuilt(text: str) -> dict[str, Any] | None:
    """Return the prebuilt file of exactly this C text and the headers of this package, or None."""
    try:
        candidates = sorted(PREBUILT.glob("*.json"))
    except OSError:
        return None
    key = prebuilt_key(text)
    for path in candidates:
        try:
            with path.open("rb") as file:
                start = file.read(256)
                if key.encode() not in start:  # a file begins with its key; reading all files would be slow
                    continue
                found = json.loads(start + file.read())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and found.get("key") == key:
            return found
    return None


def prebuilt_key(text: str) -> str:
    """Return the key of a C text's prebuilt file. It does not cover the code of the stages: a test compares their results instead."""
    return cache.key("prebuilt", text, headers.content())
