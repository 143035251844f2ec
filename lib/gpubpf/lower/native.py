"""A host program as machine code. Apart from the lowering, so that prebuilt programs start without it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpubpf.errors import VerifyError


@dataclass(frozen=True)
class Given:
    """One value that native code is given.

    kind `context` (`number`: of the field of `struct gpu_launch` or `gpu_operation`), `map_base` (address of the shared array
    `map`), `param` (address of the bytes of the parameter `map`), `helper` (address of the C function that is helper `number`,
    with the arguments of bpf_helpers and result `u64`).
    """

    kind: str
    number: int = 0
    map: str = ""


@dataclass(frozen=True)
class Native:
    """`code` is `void run(const u64 *values)` for x86-64, System V ABI, that may lie anywhere, followed by nothing it needs;
    `values` are what it wants, in order."""

    function: str
    code: bytes
    values: tuple[Given, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "code": base64.b64encode(self.code).decode(),
            "values": [[v.kind, v.number, v.map] for v in self.values],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Native:
        return cls(
            value["function"],
            base64.b64decode(value["code"]),
            tuple(Given(kind, number, name) for kind, number, name in value["values"]),
        )

    @classmethod
    def from_prebuilt(cls, value: Mapping[str, Any] | str) -> Native:
        """A prebuilt program's, or the reason why there is none, which it raises as VerifyError."""
        if isinstance(value, str):
            raise VerifyError(value)
        return cls.from_json(value)
