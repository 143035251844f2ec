"""Arithmetic that PTX leaves open and the embedded device has to decide."""

from __future__ import annotations

import itertools

from gpu.driver import PTX, Driver, DriverError
from gpu.questions.asking import Answer, question

# The instruction that sets the carry, the one that uses it.
PAIRS = tuple(itertools.product(("add.cc", "sub.cc"), ("addc", "subc")))
VALUES = {
    32: (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF),
    64: (0, 1, 1 << 32, 0x7FFFFFFFFFFFFFFF, 1 << 63, (1 << 64) - 2, (1 << 64) - 1),
}


def _kernel() -> str:
    """Return carry(out, a, b): for each pair and width, the result of `second b, a` behind `first a, b`."""
    lines = [
        ".visible .entry carry(.param .u64 out, .param .u64 a, .param .u64 b) {",
        ".reg .b32 %r<5>; .reg .b64 %rd<6>;",
        "ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [a]; ld.param.u64 %rd3, [b];",
        "cvt.u32.u64 %r1, %rd2; cvt.u32.u64 %r2, %rd3;",
    ]
    for place, (width, (first, second)) in enumerate(itertools.product(VALUES, PAIRS)):
        if width == 32:
            lines.append(f"{first}.u32 %r3, %r1, %r2; {second}.u32 %r4, %r2, %r1; cvt.u64.u32 %rd5, %r4;")
        else:
            lines.append(f"{first}.u64 %rd4, %rd2, %rd3; {second}.u64 %rd5, %rd3, %rd2;")
        lines.append(f"st.global.u64 [%rd1+{8 * place}], %rd5;")
    return PTX + "\n".join([*lines, "ret;", "}"]) + "\n"


CARRY = _kernel()


def expected(first: str, second: str, width: int, a: int, b: int) -> int:
    """Return what the embedded device computes: a - b is a + ~b + 1, so that a subtraction carries unless it borrows."""
    mask = (1 << width) - 1
    carry = (a + (~b & mask) + 1 if first == "sub.cc" else a + b) >> width
    return (b + (~a if second == "subc" else a) + carry) & mask


@question(
    "what carry does sub.cc leave to addc, and add.cc to subc?",
    "the adder's: a - b is a + ~b + 1, so that sub.cc sets the carry unless it borrows, as the embedded device computes",
)
def carry_flag() -> Answer:
    driver = Driver().open()
    kernel, out = driver.kernel(CARRY, "carry"), driver.memory(8 * len(VALUES) * len(PAIRS))
    different: dict[str, str] = {}
    asked = 0
    for width, values in VALUES.items():
        for a, b in itertools.product(values, repeat=2):
            if code := driver.launch(kernel, [out, a, b]) or driver.call("cuCtxSynchronize"):
                raise DriverError(driver.name(code))
            found = driver.read(out, len(VALUES) * len(PAIRS))
            for place, (of, (first, second)) in enumerate(itertools.product(VALUES, PAIRS)):
                right = expected(first, second, of, a, b)
                if of == width and found[place] != right:
                    different.setdefault(
                        f"{first}.u{of} {a:#x}, {b:#x}; {second} b, a", f"{found[place]:#x}, not {right:#x}"
                    )
                asked += of == width
    pairs = sorted({f"{first}; {second}" for first, second in PAIRS if any(
        key.startswith(f"{first}.u") and f"; {second} " in key for key in different)})  # fmt: skip
    return {
        "answer": f"{asked} results, {len(different)} differ" + (f", of {', '.join(pairs)}" if pairs else ""),
        "agrees": not different,
        "different": dict(list(different.items())[:40]),
    }
