"""Programs at operations: one run for each call, told what the log tells, in the kernel and in the traced process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_bcc
import gpubpf_cuda
from gpubpf.images.sidecar import Sidecar
from gpubpf.kernel import bpf_syscall
from gpubpf.linux.host_programs import Host, HostProbe
from gpubpf.lower import host_code
from gpubpf.records import operation_log
from gpubpf.records.results import ProcessLog
from gpubpf.session.session import Session
from gpubpf.traced.device import LIBRARIES, choose
from gpubpf.traced.measurement import Follow, Plan, Targets
from gpubpf.traced.workers import SidecarBuilder
from gpubpf_host import needs_bpf

pytestmark = [needs_bpf, *gpubpf_cuda.needs_cuda]

SLOTS = 4096
TEXT = r"""
#include <gpubpf.h>
struct slot { u64 id, kind, stream, call_ns, bytes, destination, source, gpu, tid, runs; };
GPU_SHARED_ARRAY(slots, struct slot, 4096);
GPU_SHARED_ARRAY(launches, u64, 1);
int on_operation(struct gpu_operation *ctx) {
    int key = ctx->id & 4095;
    struct slot *s = slots.lookup(&key);
    if (!s)
        return 0;
    s->id = ctx->id;
    s->kind = ctx->kind;
    s->stream = ctx->stream;
    s->call_ns = ctx->call_ns;
    s->bytes = ctx->bytes;
    s->destination = ctx->destination;
    s->source = ctx->source;
    s->gpu = ctx->gpu;
    s->tid = (u32)bpf_get_current_pid_tgid();
    __sync_fetch_and_add(&s->runs, 1);
    return 0;
}
int on_launch(struct gpu_launch *ctx) {
    int zero = 0;
    u64 *n = launches.lookup(&zero);
    if (n)
        __sync_fetch_and_add(n, ctx->threads);
    return 0;
}
"""

# What each thread asks for, `rounds` times; main() prints how often, by kind as in operation_log.py.
APP = r"""
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <thread>
#include <vector>
__global__ void work(int *p) { atomicAdd(p, 1); }
static std::atomic<int> counts[16];
static void check(int error, int line) { if (error) { fprintf(stderr, "line %d: error %d\n", line, error); exit(3); } }
#define DO(kind, call) (counts[kind]++, check(call, __LINE__))
static void thread(int rounds) {
    CUcontext context;
    check(cuDevicePrimaryCtxRetain(&context, 0), __LINE__);
    check(cuCtxSetCurrent(context), __LINE__);
    CUstream a, b;
    CUevent e;
    check(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING), __LINE__);
    check(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING), __LINE__);
    check(cuEventCreate(&e, 0), __LINE__);
    for (int i = 0; i < rounds; i++) {
        CUdeviceptr p, q, m, s;
        void *h;
        size_t pitch;
        int pageable[64] = {};
        DO(11, cuMemAlloc(&p, 4096 + i));
        DO(11, cuMemAllocPitch(&q, &pitch, 100, 10, 4));
        DO(11, cuMemAllocManaged(&m, 1024, CU_MEM_ATTACH_GLOBAL));
        DO(11, cuMemHostAlloc(&h, 2048, 0));
        DO(11, cuMemAllocAsync(&s, 512, a));
        DO(6, cuMemsetD32(p, 0, 256));
        DO(6, cuMemsetD8Async(q, 1, 100, a));
        DO(2, cuMemcpyHtoD(p, pageable, sizeof pageable));
        DO(2, cuMemcpyHtoDAsync(p, h, 1000, a));
        DO(3, cuMemcpyDtoHAsync(h, p, 1000, a));
        DO(4, cuMemcpyDtoDAsync(q, p, 800, b));
        DO(2, cuMemcpy(p, (CUdeviceptr)pageable, 128));
        DO(3, cuMemcpyAsync((CUdeviceptr)h, p, 64, a));
        DO(4, cuMemcpyAsync(q, p, 96, a));
        DO(5, cuMemcpy((CUdeviceptr)h, (CUdeviceptr)pageable, 32));
        CUDA_MEMCPY2D two = {};
        two.srcMemoryType = CU_MEMORYTYPE_HOST;
        two.srcHost = pageable;
        two.srcPitch = two.dstPitch = two.WidthInBytes = 32;
        two.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        two.dstDevice = p;
        two.Height = 4;
        DO(2, cuMemcpy2D(&two));
        DO(7, cuEventRecord(e, a));
        DO(8, cuStreamWaitEvent(b, e, 0));
        DO(10, cuEventSynchronize(e));
        work<<<1, 32, 0, a>>>((int *)p);
        DO(11, cuMemFreeAsync(s, a));
        DO(10, cuStreamSynchronize(a));
        DO(10, cuStreamSynchronize(b));
        DO(10, cuCtxSynchronize());
        DO(11, cuMemFree(p));
        DO(11, cuMemFree(q));
        DO(11, cuMemFree(m));
        DO(11, cuMemFreeHost(h));
        DO(11, cuMemFree(0));
        if (cuMemFree(12345) == CUDA_SUCCESS) exit(4);  // refused, and asked for all the same
        counts[11]++;
    }
}
int main(int argc, char **argv) {
    check(cudaSetDevice(0), __LINE__);
    std::vector<std::thread> all;
    for (int t = 0; t < atoi(argv[1]); t++) all.emplace_back(thread, atoi(argv[2]));
    for (auto &t : all) t.join();
    // A graph: what is captured happens when it is launched, and is one operation then.
    CUstream s;
    CUdeviceptr p;
    check(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), __LINE__);
    DO(11, cuMemAlloc(&p, 4096));
    CUgraph graph;
    CUgraphExec exec;
    check(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED), __LINE__);
    check(cuMemsetD8Async(p, 0, 4096, s), __LINE__);
    work<<<1, 32, 0, s>>>((int *)p);
    check(cuStreamEndCapture(s, &graph), __LINE__);
    check(cuGraphInstantiate(&exec, graph, 0), __LINE__);
    for (int i = 0; i < 3; i++) DO(9, cuGraphLaunch(exec, s));
    DO(10, cuStreamSynchronize(s));
    for (int i = 0; i < 12; i++) printf("%d ", counts[i].load());
}
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("operations") / "app", f"-L{LIBRARIES}", "-lcuda")


def measure(
    command: list[str],
    text: str,
    points: dict[str, str],
    log: int,
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
) -> tuple[dict[str, np.ndarray[Any, Any]], list[ProcessLog], Host]:
    program = gpubpf_bcc.compiled(text)
    if native:  # as where the kernel takes no programs of ours

        def refuse() -> int:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(bpf_syscall, "uprobe_type", refuse)
    logs: list[ProcessLog] = []
    host = Host(
        program,
        [HostProbe(name, point) for name, point in points.items()],
        native=lambda name: host_code.lower(program, program.functions[name]),
    )
    with (
        host,
        Session(
            Targets(command),
            Plan(choose("sim"), list(program.maps.values()), host=host, follow=Follow(log_records=log)),
            SidecarBuilder(lambda image, target: Sidecar()),
        ) as session,
    ):
        assert host.in_kernel != native
        for _ in session.intervals(0.1):
            logs += session.logs()
        logs += session.logs()
        arrays = {name: session.shared(name)[0].array for name in program.maps}
    assert session.status == 0
    return arrays, logs, host


@pytest.mark.every(2)
@pytest.mark.parametrize("native", [False, True], ids=["kernel", "native"])
@pytest.mark.parametrize(
    ("log", "clock", "hostile"), [(0, "real", "1"), (1 << 13, "real", "0"), (1 << 13, "virtual", "1")]
)
def test_each_call_once(
    app: Path,
    native: bool,
    log: int,
    clock: str,
    hostile: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDASIM_CLOCK", clock)
    monkeypatch.setenv("CUDASIM_HOSTILE", hostile)
    points = {"on_operation": "operation", "on_launch": "launch"}
    arrays, logs, host = measure([str(app), "4", "6"], TEXT, points, log, monkeypatch, native)
    wanted = [int(n) for n in capfd.readouterr().out.split()]
    slots = arrays["slots"]
    slots = slots[slots["id"] != 0]
    assert (slots["runs"] == 1).all() and (slots["gpu"] == 0).all() and (slots["call_ns"] > 0).all()
    assert np.bincount(slots["kind"].astype(int)).tolist() == wanted
    assert arrays["launches"].tolist() == [4 * 6 * 32 + 3 * 32]
    runs = {r.function: r.runs for r in host.runs()}
    assert runs == ({} if native else {"on_operation": len(slots), "on_launch": 4 * 6 + 3})
    if not log:
        return
    assert not logs[-1].lost
    records = np.concatenate([part.records for part in logs])
    names = records["api"]["name"]
    memory = (
        np.char.startswith(names, b"cuMemAlloc")
        | np.char.startswith(names, b"cuMemFree")
        | (names == b"cuMemHostAlloc")
    )
    asked = (records["kind"] > operation_log.KERNEL) & (records["kind"] <= operation_log.API)
    asked &= (records["kind"] != operation_log.API) | memory
    asked &= records["flags"] & operation_log.CAPTURED == 0
    records = records[asked]
    records, slots = records[np.argsort(records["id"])], slots[np.argsort(slots["id"])]
    for name in ("id", "kind", "stream"):
        assert (records[name] == slots[name]).all()
    assert (slots["tid"] == records["thread"]).all()
    assert (slots["call_ns"] <= records["call_ns"]).all()
    copies = np.isin(records["kind"], (*operation_log.COPIES, operation_log.MEMSET))
    for name in ("bytes", "destination"):
        assert (records["copy"][name][copies] == slots[name][copies]).all()
    assert (records["copy"]["source"][copies] == slots["source"][copies]).all()
    calls = records["kind"] == operation_log.API
    frees = calls & np.char.startswith(records["api"]["name"], b"cuMemFree")
    assert (slots["source"][frees] == records["api"]["address"][frees]).all() and not slots["bytes"][
        frees
    ].any()
    makes = calls & ~frees
    pitched = records["api"]["name"] == b"cuMemAllocPitch"
    assert (slots["bytes"][makes & ~pitched] == records["api"]["bytes"][makes & ~pitched]).all()
    assert (slots["bytes"][pitched] == 1000).all() and not slots["destination"][calls].any()
    assert not slots["bytes"][~copies & ~calls].any()


def test_programs_run_in_their_order(
    app: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
    #include <gpubpf.h>
    GPU_SHARED_ARRAY(order, u64, 1);
    int first(struct gpu_operation *ctx) { int k = 0; u64 *v = order.lookup(&k); if (v) *v = *v % 1000 * 10 + 1; return 0; }
    int second(struct gpu_operation *ctx) { int k = 0; u64 *v = order.lookup(&k); if (v) *v = *v % 1000 * 10 + 2; return 0; }
    """
    for native in (False, True):
        points = {"first": "operation", "second": "operation"}
        arrays, _, _ = measure([str(app), "0", "0"], text, points, 0, monkeypatch, native)
        capfd.readouterr()
        assert arrays["order"].tolist() == [1212], native
