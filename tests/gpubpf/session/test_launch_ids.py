"""The number of a launch, as the GPU saw it and as the host logged it: one to one, whoever launched and how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
from gpubpf_bcc import compiled

# Every launch of a host thread has a shape of its own: grid = number of the thread + 1, block = number of the kernel in it.
CUDA = r"""
#include <cstdio>
#include <cstdlib>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>
__global__ void touch(int *x) { if (threadIdx.x == 0) atomicAdd(x, 1); }
static int *x;
static void work(int number) {
    cudaStream_t stream, other;
    cudaStreamCreate(&stream);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    cudaGraph_t graph, child;
    cudaGraphExec_t exec;
    cudaGraphNode_t node, first, last;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    for (int i = 0; i < 3; i++) touch<<<number + 1, 101 + i, 0, stream>>>(x);
    cudaStreamEndCapture(stream, &child);
    cudaGraphCreate(&graph, 0);
    void *arguments[] = {&x};
    cudaKernelNodeParams kernel = {};
    kernel.func = (void *)touch;
    kernel.gridDim = dim3(number + 1);
    kernel.kernelParams = arguments;
    kernel.blockDim = dim3(100);
    cudaGraphAddKernelNode(&first, graph, nullptr, 0, &kernel);
    cudaGraphAddChildGraphNode(&node, graph, &first, 1, child);
    kernel.blockDim = dim3(104);
    cudaGraphAddKernelNode(&last, graph, &node, 1, &kernel);
    cudaGraphInstantiate(&exec, graph, 0);
    for (int i = 0; i < 10; i++) {
        touch<<<number + 1, 1 + i, 0, stream>>>(x);
        if (i == 5) {
            kernel.blockDim = dim3(105);
            cudaGraphExecKernelNodeSetParams(exec, last, &kernel);
        }
        if (i == 7) cudaGraphNodeSetEnabled(exec, first, 0);
        cudaGraphLaunch(exec, i % 3 == 2 ? other : stream);
    }
    cudaStreamSynchronize(stream);  // not the device: that would end the other threads' captures
    cudaStreamSynchronize(other);
    cudaGraphExecDestroy(exec);
}
int main(int argc, char **argv) {
    int children = argc > 1 ? atoi(argv[1]) : 0, number = 0, failed = 0;
    for (int i = 1; i <= children; i++) if (!fork()) { number = i; break; }
    if (children && !number) {
        for (int status; wait(&status) > 0;) failed += status != 0;
        return failed;
    }
    cudaMalloc(&x, sizeof *x);
    cudaMemset(x, 0, sizeof *x);
    std::vector<std::thread> threads;
    for (int i = 0; i < (children ? 1 : 8); i++) threads.emplace_back(work, i);
    for (std::thread &thread : threads) thread.join();
    int result = -1;
    cudaMemcpy(&result, x, sizeof result, cudaMemcpyDeviceToHost);
    printf("%d\n", result);
}
"""
TEXT = r"""
#include <gpubpf.h>
struct execution { u64 launch; u32 grid, block; };
GPU_HASH(seen, struct execution, u64, 4096);

int on_entry(struct gpu_entry *ctx) {
    u64 x, y, z, blocks, threads;
    bpf_get_block_idx(&x, &y, &z);
    if (x)
        return 0;
    bpf_get_thread_idx(&x, &y, &z);
    if (x)
        return 0;
    struct execution e = {};
    gpu_grid_dim(&blocks, &y, &z);
    bpf_get_block_dim(&threads, &y, &z);
    e.launch = ctx->launch;
    e.grid = blocks;
    e.block = threads;
    seen.increment(e);
    return 0;
}
"""
SCRIPT = """
import json, sys
from gpubpf.records import operation_log as oplog
from gpubpf.show import cli
from gpubpf.program import BPF
from gpubpf.traced.measurement import Follow
parser = cli.parser("probe", "", "")
for add in (cli.add_targets, cli.add_kernels, cli.add_threads, cli.add_device, cli.add_looks, cli.add_output):
    add(parser)
args = cli.parse(parser, sys.argv[2:])
b = BPF(text=open(sys.argv[1]).read())
b.attach_gpu_entry(fn_name="on_entry")
logged, lost = {}, 0
def look():
    global lost
    for log in session.logs():
        r = log.records
        r = r[(r["kind"] == oplog.KERNEL) & (r["flags"] & oplog.CAPTURED == 0)]
        lost += log.lost
        logged.setdefault(log.pid, []).extend(
            zip(r["id"].tolist(), r["kernel"]["grid"][:, 0].tolist(), r["kernel"]["block"][:, 0].tolist(),
                r["kernel"]["outcome"].tolist(), r["kernel"]["exec"].tolist(), r["kernel"]["replay"].tolist(),
                r["kernel"]["node"].tolist()))
with b.trace(cli.Options.of(args), follow=Follow(log_records=1 << 14, graphs=True)) as session:
    for _ in session.intervals(args.interval, args.count):
        look()
    look()
seen = {}
for i in session.instances("seen"):
    seen.setdefault(i.pid, []).extend(i.array.tolist())
json.dump({"logged": logged, "seen": seen, "lost": lost, "summary": session.summary()}, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiled(TEXT)
    where = tmp_path_factory.mktemp("identity")
    gpubpf_cuda.build(CUDA, where / "app")
    (where / "probe.c").write_text(TEXT)
    (where / "probe.py").write_text(SCRIPT)
    return where


PLAIN = 10
REPLAYS = 10
ENABLED = 5 * 7 + 4 * 3  # kernels that the replays run


@pytest.mark.every(2)
@pytest.mark.parametrize("children", [0, 8])
def test_each_execution_has_its_own_number(where: Path, children: int) -> None:
    command = [sys.executable, "probe.py", "probe.c", "--device", "sim", "--", "./app", str(children)]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((where / "found.json").read_text())
    assert found["lost"] == 0
    processes, threads = max(children, 1), 1 if children else 8
    of_process = threads * (PLAIN + ENABLED)
    blocks = sum(range(1, threads + 1)) * (PLAIN + ENABLED)
    assert done.stdout.split() == [str(blocks)] * processes
    assert len(found["logged"]) == len(found["seen"]) == processes
    every: set[int] = set()
    for pid, logged in found["logged"].items():
        seen = {tuple(key): times for key, times in found["seen"][pid]}
        assert set(seen.values()) == {1}
        assert all(reason == 0 for _, _, _, reason, *_ in logged)
        assert {(number, grid, block) for number, grid, block, *_ in logged} == set(seen)
        assert len(logged) == len(seen) == of_process
        every |= {number for number, *_ in logged}
        # Within a replay: one number for each node, in the nodes' order.
        replays: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, _, _, _, graph, replay, node in logged:
            if graph:
                replays.setdefault((graph, replay), []).append((number, node))
        assert len(replays) == threads * REPLAYS
        assert all(len({number - node for number, node in one}) == 1 for one in replays.values())
    assert len(every) == processes * of_process
    summary = found["summary"]
    assert summary["launches_seen"] == summary["launches_instrumented"] == processes * of_process
