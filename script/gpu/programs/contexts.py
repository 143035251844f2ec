"""contexts.py: launches a kernel in two contexts of a process by turns: 23 times with 32 threads, and 17 times with 64.

Prints "digest HEX" of what both have computed. Exit status 1: that is not what it should be.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.driver import PTX, Driver, DriverError

COUNT = (
    PTX
    + """
.visible .entry count(.param .u64 sums, .param .u64 value) {
    .reg .b32 %r<2>; .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [sums];
    ld.param.u64 %rd2, [value];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 8;
    add.u64 %rd1, %rd1, %rd3;
    ld.global.u64 %rd4, [%rd1];
    add.u64 %rd4, %rd4, %rd2;
    st.global.u64 [%rd1], %rd4;
    ret;
}
"""
)
LAUNCHES = ((32, 23), (64, 17))  # threads, launches


def main() -> int:
    driver = Driver().open()
    # CUDA 13's form, and that of CUDA 4, which older drivers have.
    if driver.has("cuCtxCreate_v4"):
        own = driver.handle("cuCtxCreate_v4", 0, 0, 0)
    else:
        own = driver.handle("cuCtxCreate_v2", 0, 0)
    contexts = [driver.context, own]
    kernels, sums = [], []
    for context, (threads, _) in zip(contexts, LAUNCHES, strict=True):
        driver.must("cuCtxSetCurrent", context)
        kernels.append(driver.kernel(COUNT, "count"))
        sums.append(driver.memory(8 * threads))
    for turn in range(max(launches for _, launches in LAUNCHES)):
        for place, (threads, launches) in enumerate(LAUNCHES):
            if turn < launches:
                driver.must("cuCtxSetCurrent", contexts[place])
                if code := driver.launch(kernels[place], [sums[place], place + 1], block=threads):
                    raise DriverError(f"cuLaunchKernel: {driver.name(code)}")
    wrong = 0
    for place, (threads, launches) in enumerate(LAUNCHES):
        driver.must("cuCtxSetCurrent", contexts[place])
        found = driver.read(sums[place], threads)
        wrong += found != [launches * (place + 1)] * threads
        print(f"context {place}: {found[0]}")
    print(f"digest {sum(launches for _, launches in LAUNCHES):x}")
    driver.must("cuCtxDestroy_v2", own)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
