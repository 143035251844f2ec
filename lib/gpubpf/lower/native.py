"""A host program as machine code. It is separate from the lowering, which prebuilt programs do not import."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any

from gpubpf.errors import VerifyError
from gpubpf.record import Record

PREBUILT_FOR = "x86_64"  # the machine of the native forms in prebuilt files


class Given(Record):
    """One value that native code receives.

    Kinds:
        context   field `number` of `struct gpu_launch` or `gpu_operation`
        map_base  the address of the shared array `map`
        param     the address of the bytes of the parameter `map`
        helper    the address of the C function for helper `number`, which takes the helper's arguments and returns u64
    """

    kind: str
    number: int = 0
    map: str = ""


class Native(Record):
    """A host program in machine code.

    code    the function `void run(const u64 *values)` in the host's machine code and with its C ABI. It is position-independent and
            does not refer to other code or data
    values  the values that `run` receives, in order
    """

    function: str
    code: bytes
    values: tuple[Given, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "code": binascii.b2a_base64(self.code, newline=False).decode(),
            "values": [[v.kind, v.number, v.map] for v in self.values],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Native:
        return cls(
            value["function"],
            binascii.a2b_base64(value["code"]),
            tuple(Given(kind, number, name) for kind, number, name in value["values"]),
        )

    @classmethod
    def from_prebuilt(cls, value: Mapping[str, Any] | str) -> Native:
        """Return the native form in a prebuilt file. Raises VerifyError if the file has a reason instead of code."""
        if isinstance(value, str):
            raise VerifyError(value)
        return cls.from_json(value)
