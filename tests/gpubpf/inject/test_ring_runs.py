"""Ring buffers written by many warps at once on the embedded device: no record twice, none that is not accounted for.

The device's libcuda is used in a child process (this file as a script).
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "support"))
sys.path.insert(0, str(HERE))

from gpubpf.ebpf.maps import MapDefinition  # noqa: E402
from gpubpf.ebpf.probe import Probe  # noqa: E402

BLOCKS, THREADS = 8, 100
RING = MapDefinition(
    "ring",
    "ringbuf",
    0,
    24,
    65536,
    None,
    {"fields": [["launch", "<u8", 0], ["site", "<u8", 8], ["thread", "<u8", 16]], "size": 24},
)
# lanes leave at once, after turns of a loop, by exit in a function, and together
KERNEL = """.version 7.0
.target sm_70
.address_size 64
.func leave(.param .b32 n) { .reg .b32 %r<2>; .reg .pred %p<2>; ld.param.b32 %r1, [n]; setp.eq.u32 %p1, %r1, 5; @%p1 exit; ret; }
.visible .entry ways() {
    .reg .pred %p<6>; .reg .b32 %r<6>;
    mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 7;
    setp.eq.u32 %p1, %r2, 3; @%p1 ret;
    { .param .b32 n; st.param.b32 [n], %r2; call leave, (n); }
turn:
    setp.eq.u32 %p2, %r2, 0; @%p2 bra out;
    sub.u32 %r2, %r2, 1; bra turn;
out:
    setp.lt.u32 %p3, %r1, 40; @%p3 bra done;
    add.u32 %r1, %r1, 1;
done:
    ret;
}
"""


def test_what_warps_write_at_once_is_all_there() -> None:
    from test_inject_runs import LIBCUDA

    if not LIBCUDA.exists():
        pytest.skip("the embedded device is not built; run script/setup")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wide"] == {"once": True, "reserved": 2 * BLOCKS * THREADS, "lost": 0}
    tight = found["tight"]
    assert tight["once"] and tight["lost"] > 0
    assert tight["reserved"] + tight["lost"] == 5 * 2 * BLOCKS * THREADS


# --- the script ---------------------------------------------------------------------------------------


def program(point: str) -> Any:
    """The PTX of a program that puts {launch, site, thread} into the ring; at entry, 1000 for the site."""
    from gpubpf.ebpf.bytecode import ADD
    from gpubpf.lower import nvptx
    from gpubpf.verify.rules import check
    from gpubpf_asm import alu, call, leave, load, load_map, mov, movi, store
    from gpubpf_asm import program as assembled

    code = [mov(6, 1), load(3, 6, 0), store(10, -24, 3), load(3, 6, 8)]
    code += [movi(3, 1000)] if point == "entry" else []
    code += [store(10, -16, 3), call(606)]
    code += [
        store(10, -8, 0),
        *load_map(1, "ring"),
        mov(2, 10),
        alu(ADD, 2, imm=-24),
        movi(3, 24),
        movi(4, 0),
        call(130),
    ]
    made, function = assembled([*code, movi(0, 0), leave()], (RING,), point)
    return nvptx.lower(made, check(made, function))


def main() -> None:
    from test_inject_runs import Device

    from gpubpf.inject.inject import inject
    from gpubpf.ptx.parser import parse
    from gpubpf.records.rings import RingReader
    from gpubpf_ring import control, place_of

    device = Device()
    injected = inject(parse(KERNEL), {"ways": [Probe(program(p), p) for p in ("entry", "exit")]})
    assert not injected.refusals, injected.refusals
    module, block = device.load(injected.text), injected.kernels["ways"].block
    found = {}
    for name, shards, launches in (("wide", 3, 1), ("tight", 1, 5)):
        place = place_of(RING, shards, 4096)
        data = device.allocate(bytes(place.size))
        before = control(place, data)
        block_at = device.allocate(before)
        for launch in range(launches):
            hidden = bytearray(block.size)
            struct.pack_into("<Q", hidden, block.launch_id, 1 + launch)
            struct.pack_into("<Q", hidden, block.bases["ring"], block_at)
            device.launch(module, "ways", BLOCKS, THREADS, 0, [bytes(hidden)])
        reader = RingReader(place, RING.value_dtype, None)
        records = reader.read_copy(device.read(data, place.size))
        reader.control(device.read(block_at, len(before)))
        counts = reader.counts()
        assert all(shard.received == shard.reserved for shard in counts)
        seen = Counter((int(r["launch"]), bool(r["site"] == 1000), int(r["thread"])) for r in records)
        once = set(seen.values()) == {1} and all(
            launch in range(1, launches + 1) and thread in range(BLOCKS * THREADS)
            for launch, _, thread in seen
        )
        reserved, lost = (sum(getattr(shard, what) for shard in counts) for what in ("reserved", "lost"))
        found[name] = {"once": once, "reserved": reserved, "lost": lost}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
