"""gpucount, gpudist and gputrace for a user without any capability: clang compiles, and gpubpf's verifier decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import gpubpf_cuda
import gpubpf_specs
from gpubpf.ebpf import clang
from gpubpf_host import ROOTLESS, needs_open_checkout, open_directory

pytestmark = [
    *gpubpf_cuda.needs_cuda,
    needs_open_checkout,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which requires root"),
    pytest.mark.skipif(clang.find() is None, reason="needs clang"),
]
ALONE = "the programs were checked by gpubpf's verifier alone; that of the Linux kernel requires root"


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("tool", "arguments", "right"),
    [
        ("gpucount", ["store:ns::work:global (warp == 2)"], ("count", "threads", 2 * 6 * 64)),
        ("gpudist", ["-C", "exit:ns::work:loads:u32:work"], ("dist", "values", {"1": 96, "2": 1056})),
        ("gpudist", ["-C", "store:ns::rest (!isnan(value)):u8:value"], ("dist", "values", {"1": 64})),
        ("gputrace", ['barrier:* (block == 4 && lane == 0) "%u", warp'], ("event", "text", {"0", "1", "2"})),
    ],
)
def test_any_user_may_compile(tool, arguments, right):
    with open_directory() as place:
        app = gpubpf_specs.build(place)
        out = place / "out"
        out.mkdir(mode=0o777)
        out.chmod(0o777)
        command = [
            *ROOTLESS,
            sys.executable,
            gpubpf_specs.ROOT / "tools" / f"{tool}.py",
            "--device",
            "sim",
            *arguments,
        ]
        command += ["--json", "-o", out / "found", "--", app, "2", "0"]
        environment = os.environ | {"XDG_CACHE_HOME": str(out / "cache"), "HOME": str(out)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode, done.stdout) == (7, "launched\nright\n"), done.stderr
        found = [json.loads(line) for line in (out / "found").read_text().splitlines()]
    assert f"{tool}: note: {ALONE}\n" in done.stderr and found[-1]["verified_by"] == ["gpubpf"]
    kind, field, value = right
    values = [one[field] for one in found if one["type"] == kind]
    assert (set(values) if kind == "event" else values[0]) == value
