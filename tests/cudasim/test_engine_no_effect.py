"""Instructions that have no effect on results: hints, profiler events, fences, policies, pragmas."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine_device import Array, Device

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
# %a0: global memory that nobody needs; %a2: local memory; %p0: true for odd threads.
FORMS = [
    *(
        "pmevent 1;",
        "pmevent 7+8;",
        "pmevent.mask 3;",
        "pmevent.mask 0x1|2;",
        "@%p0 pmevent 1;",
        "@!%p0 pmevent.mask 5;",
    ),
    *(
        "prefetch.global.L1 [%a0];",
        "prefetch.global.L2 [%a0+8];",
        "prefetch.local.L1 [%a2];",
        "prefetch.L1 [%a0];",
    ),
    *(
        "prefetch.global.L2::evict_last [%a0];",
        "prefetch.global.L2::evict_normal [%a0];",
        "prefetchu.L1 [%a0];",
    ),
    *("prefetch.tensormap [%a0];", "@%p0 prefetch.L2 [%a0];"),
    *("applypriority.global.L2::evict_normal [%a0], 128;", "discard.global.L2 [%a0], 64+64;"),
    *(
        "createpolicy.fractional.L2::evict_last.b64 %a1, 1.0;",
        "createpolicy.fractional.L2::evict_first.b64 %a1;",
    ),
    "createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %a1, 0.5;",
    "createpolicy.range.L2::evict_last.L2::evict_unchanged.b64 %a1, [%a0], 0x100, 0x200;",
    "createpolicy.cvt.L2.b64 %a1, 0x10F0000000000000; ld.global.L2::cache_hint.u32 %r2, [%a0], %a1;",
    *("griddepcontrol.launch_dependents;", "griddepcontrol.wait;", "nanosleep.u32 1;", "nanosleep.u32 %r2;"),
    *("setmaxnreg.inc.sync.aligned.u32 64;", "setmaxnreg.dec.sync.aligned.u32 64;"),
    *("fence.sc.gpu;", "fence.acq_rel.sys;", "fence.acq_rel.cta;", "fence.sc.cluster;", "fence.acquire.gpu;"),
    *(
        "fence.release.gpu;",
        "fence.mbarrier_init.release.cluster;",
        "fence.proxy.alias;",
        "fence.proxy.async;",
    ),
    "fence.acquire.sync_restrict::shared::cluster.cluster;",
    "fence.release.sync_restrict::shared::cta.cluster;",
    *(
        "fence.proxy.async.global;",
        "fence.proxy.async.shared::cta;",
        "fence.proxy.tensormap::generic.release.gpu;",
    ),
    "fence.proxy.tensormap::generic.acquire.gpu [%a0], 128;",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;",
    *("membar.cta;", "membar.gl;", "membar.sys;", "membar.proxy.alias;", "@%p0 membar.gl;"),
    *(
        '.pragma "nounroll";',
        '.pragma "used_bytes_mask 0xf"; ld.global.u32 %r2, [%a0];',
        '.pragma "something else";',
    ),
    *(
        "cp.async.commit_group;",
        "cp.async.wait_all;",
        "cp.async.wait_group 0;",
        "cp.async.bulk.commit_group;",
    ),
    *("cp.async.bulk.wait_group.read 0;", "cp.async.bulk.prefetch.L2.global [%a0], 128;"),
    *("wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"),
    *(
        "bar.warp.sync -1;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "mov.u32 %r2, %pm3;",
        "mov.u32 %r2, %envreg3;",
    ),
]
KERNEL = """.visible .entry k(.param .u64 out, .param .u64 room) {
    .reg .b64 %a<4>; .reg .b32 %r<4>; .reg .pred %p<2>; .local .align 8 .b8 own[16];
    ld.param.u64 %a0, [room]; ld.param.u64 %a3, [out]; mov.u64 %a2, own; mov.u32 %r2, 1;
    mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 1; setp.ne.u32 %p0, %r1, 0; mad.lo.u32 %r0, %r0, 3, 5;
"""
END = "mov.u32 %r1, %tid.x; mad.wide.u32 %a3, %r1, 4, %a3; st.global.u32 [%a3], %r0; ret; }"


def test_results_are_as_without_them() -> None:
    device = Device(HEAD + KERNEL + "\n".join(FORMS) + END)
    out = Array(np.zeros(128, np.uint32))
    device.launch("k", 1, 128, out, Array(np.zeros(64, np.uint32)))
    assert out.host.tolist() == [3 * n + 5 for n in range(128)]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_ptxas_knows_them(tmp_path: Path) -> None:
    source = tmp_path / "in.ptx"
    source.write_text(HEAD + KERNEL + "\n".join(FORMS) + END)
    command = ["ptxas", "-O0", "-arch=sm_90a", source, "-o", tmp_path / "out.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
