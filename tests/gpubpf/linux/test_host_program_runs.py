"""A tool with programs on both sides over one shared array, as root and with no capability at all."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpubpf_cuda
from gpubpf.lower.programs import PREBUILT
from gpubpf_host import ROOTLESS, needs_bpf, needs_open_checkout, open_directory

REPOSITORY = Path(__file__).resolve().parents[3]

pytestmark = [
    needs_bpf,
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user"),
    *gpubpf_cuda.needs_cuda,
]

TOOL = r'''
import json, os, sys
from pathlib import Path
from gpubpf.lower import programs
from gpubpf.show import cli
from gpubpf.launches.off_cpu import OffCpu
from gpubpf.program import BPF

programs.PREBUILT = Path(__file__).parent

PROGRAM = r"""
#include <gpubpf.h>
struct slot { u64 launch, call_ns, kernel, threads, gpu, tid, entered, lanes; char comm[16]; };
GPU_SHARED_ARRAY(slots, struct slot, 256);
GPU_PARAM(filter, struct gpu_host_filter);
int on_launch(struct gpu_launch *ctx) {
    int key = ctx->launch % 256, zero = 0;
    struct gpu_host_filter *f = filter.lookup(&zero);
    struct slot *s = slots.lookup(&key);
    if (!f || !s || !gpu_host_selected(f))
        return 0;
    s->launch = ctx->launch;
    s->call_ns = ctx->call_ns;
    s->kernel = ctx->kernel;
    s->threads = ctx->threads;
    s->gpu = ctx->gpu;
    s->tid = (u32)bpf_get_current_pid_tgid();
    bpf_get_current_comm(s->comm, sizeof(s->comm));
    return 0;
}
int on_entry(struct gpu_entry *ctx) {
    int key = ctx->launch % 256;
    struct slot *s = slots.lookup(&key);
    if (s) {
        s->entered = bpf_get_globaltimer();
        __sync_fetch_and_add(&s->lanes, 1);
    }
    return 0;
}
"""

def main():
    made = cli.parser("both", "", "")
    for add in (cli.add_targets, cli.add_kernels, cli.add_device, cli.add_output, cli.add_host_filters):
        add(made)
    args = cli.parse(made)
    with cli.errors("both"):
        out = cli.open_results(cli.Options.of(args).output)
        b = BPF(text=PROGRAM)
        b.attach_launch("on_launch")
        b.attach_gpu_entry(kernel=args.kernel, fn_name="on_entry")
        meanwhile = OffCpu(b) if "MEANWHILE" in os.environ else None
        with b.trace(cli.Options.of(args)) as session:
            for _ in session.intervals():
                for found in session.shared("slots"):
                    used = found.array[(found.array["call_ns"] > 0) | (found.array["lanes"] > 0)]
                    names = [name for name in used.dtype.names if name != "comm"]
                    slots = [{name: int(s[name]) for name in names} for s in used]
                    for slot, s in zip(slots, used):
                        slot["comm"] = s["comm"].tobytes().rstrip(b"\0").decode()
                    out.record(pid=found.pid, slots=slots)
                host = b.host_side
                out.record(kernel=host.in_kernel, runs=[[r.function, r.runs, r.missed] for r in host.runs()])
                if meanwhile:
                    activity = meanwhile.activity()
                    thread = [s["launch"] >> 40 << 32 | s["tid"] for s in slots]
                    told = [activity.explain(t, s["call_ns"], s["call_ns"] + 15_000_000) for t, s in zip(thread, slots)]
                    out.record(known=meanwhile.known, told=told)
                out.record(summary=session.summary())
    return session.status

if __name__ == "__main__":
    sys.exit(main())
'''

APP = r"""
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <unistd.h>
#include <pthread.h>
#include <vector>
__global__ void first(int *out) { atomicAdd(out, 1); }
__global__ void second(int *out) { atomicAdd(out + 1, 1); }
int main(int argc, char **argv) {
    int threads = atoi(argv[1]), launches = atoi(argv[2]), *out, sums[2];
    if (cudaMalloc(&out, 8) || cudaMemset(out, 0, 8)) return 9;
    std::vector<std::thread> all;
    for (int t = 0; t < threads; t++)
        all.emplace_back([=] {
            char name[] = {'w', (char)('0' + t), 0};
            pthread_setname_np(pthread_self(), name);
            cudaStream_t s;
            if (cudaStreamCreate(&s)) exit(8);
            for (int i = 0; i < launches; i++) {
                if (i % 2) first<<<2, 32, 0, s>>>(out);
                else second<<<1, 40, 0, s>>>(out);
                if (argc > 4) puts("launched"), fflush(stdout);
                if (argc > 3) usleep(1000 * atoi(argv[3]));
            }
            if (cudaStreamSynchronize(s)) exit(7);
        });
    for (auto &t : all) t.join();
    if (cudaMemcpy(sums, out, 8, cudaMemcpyDeviceToHost)) return 6;
    int half = threads * (launches / 2);
    return sums[0] != 64 * half || sums[1] != 40 * (threads * launches - half);
}
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """The tool with its programs prebuilt, and what it watches; every user can read them."""
    with open_directory() as made:
        yield from build(made)


def build(made: Path) -> Iterator[Path]:
    (made / "both.py").write_text(TOOL)
    shutil.copy(PREBUILT / "off_cpu.json", made)
    gpubpf_cuda.build(APP, made / "app")
    code = "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); import prebuild; import json\n"
    code += "p = Path(sys.argv[1]); t = prebuild.program_text(p); (p.parent / 'both.json').write_text(json.dumps(prebuild.build(t)))"
    subprocess.run([sys.executable, "-c", code, made / "both.py", REPOSITORY / "script"], check=True)
    yield made


def run(
    place: Path, arguments: list[str], app: list[str], *, prefix: list[str], **more: str
) -> tuple[dict[str, Any], list[str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUDO")} | more
    environment |= {"XDG_CACHE_HOME": "/nonexistent"} if prefix else {}
    command = [*prefix, sys.executable, str(place / "both.py"), "--device", "sim", *arguments, "--", *app]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {"slots": []}
    for line in done.stdout.splitlines():
        record = json.loads(line)
        found["slots"] += record.pop("slots", [])
        found |= record
    return found, done.stderr.splitlines()


def check_slots(found: dict[str, Any], threads: int, launches: int) -> None:
    slots = found["slots"]
    assert len(slots) == threads * launches
    assert len({s["launch"] for s in slots}) == len(slots)
    assert {s["launch"] >> 40 for s in slots} == {1}  # the first process
    for s in slots:
        assert s["lanes"] == s["threads"] and s["threads"] in (40, 64)  # both sides met in this slot
        assert s["entered"] > s["call_ns"] > 0 and s["gpu"] == 0
    for t in range(threads):
        own = [s for s in slots if s["comm"] == f"w{t}"]
        assert len(own) == launches and len({s["tid"] for s in own}) == 1
        assert sum(s["threads"] == 64 for s in own) == launches // 2
    assert len({(s["kernel"], s["threads"]) for s in slots}) == 2


def without_times(found: dict[str, Any]) -> list[Any]:
    """What does not depend on when, and in which process, it ran."""
    rows = [(s["comm"], s["threads"], s["gpu"], s["lanes"]) for s in found["slots"]]
    return sorted(rows)


@pytest.mark.every(2)
def test_both_sides_fill_one_array_as_root_and_rootless(place: Path) -> None:
    app = [str(place / "app"), "4", "23"]
    in_kernel, said = run(place, [], app, prefix=[])
    assert in_kernel["kernel"] and in_kernel["runs"] == [["on_launch", 92, 0]], said
    check_slots(in_kernel, 4, 23)
    native, said = run(place, [], app, prefix=ROOTLESS)
    assert not native["kernel"] and native["runs"] == []
    assert "both: note: no CAP_BPF: the host program runs in the agent" in said
    check_slots(native, 4, 23)
    assert without_times(native) == without_times(in_kernel)
    assert in_kernel["summary"]["launches_seen"] == native["summary"]["launches_seen"] == 92


@needs_open_checkout
def test_root_watches_another_users_command(place: Path) -> None:
    found, said = run(place, ["--user", "nobody"], [str(place / "app"), "2", "5"], prefix=[])
    assert found["kernel"] and found["runs"] == [["on_launch", 10, 0]], said
    check_slots(found, 2, 5)


@pytest.mark.parametrize("prefix", [[], ROOTLESS], ids=["kernel", "native"])
def test_filters_and_kernels(place: Path, prefix: list[str]) -> None:
    app = [str(place / "app"), "3", "6"]
    found, _ = run(place, ["--comm", "w1", "--kernel", "first"], app, prefix=prefix)
    seen = [s for s in found["slots"] if s["call_ns"]]
    assert len(seen) == 3 and {(s["comm"], s["threads"]) for s in seen} == {("w1", 64)}
    others = [s for s in found["slots"] if not s["call_ns"]]
    assert len(others) == 6 and all(
        s["lanes"] == 64 for s in others
    )  # the device side ran, the host side chose
    if not prefix:
        assert found["runs"] == [["on_launch", 9, 0]]


def test_each_process_has_an_array_and_programs_of_its_own(place: Path) -> None:
    both = f"{place / 'app'} 1 4 & {place / 'app'} 2 3; wait"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUDO")}
    command = [sys.executable, str(place / "both.py"), "--device", "sim", "--", "sh", "-c", both]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(len(r["slots"]) for r in records if "slots" in r) == [4, 6], done.stderr
    numbers = [{s["launch"] >> 40 for s in r["slots"]} for r in records if "slots" in r]
    assert sorted(numbers, key=min) == [{1}, {2}]
    assert [r["runs"] for r in records if "runs" in r] == [[["on_launch", 10, 0]]]


@pytest.mark.parametrize("prefix", [[], ROOTLESS], ids=["kernel", "native"])
def test_the_virtual_clock_is_the_same_on_both_sides(place: Path, prefix: list[str]) -> None:
    app = [str(place / "app"), "1", "9"]
    one, two = (run(place, [], app, prefix=prefix, CUDASIM_CLOCK="virtual")[0] for _ in range(2))
    times = [(s["call_ns"], s["entered"]) for s in one["slots"]]
    assert times == [(s["call_ns"], s["entered"]) for s in two["slots"]]
    assert times[1][0] - times[0][0] == 1000  # a launch call takes that, and nothing else takes time
    assert times[0][1] >= times[0][0] + 1000  # the kernel starts when the first call has returned
    assert one["kernel"] is (not prefix)


def test_what_threads_did_meanwhile(place: Path) -> None:
    app = [str(place / "app"), "2", "4", "20"]
    found, said = run(place, [], app, prefix=[], MEANWHILE="1")
    assert found["known"] and len(found["told"]) == 8, said
    # Each launch is followed by a sleep of 20 ms, and 15 ms are looked at. On a busy machine a thread waits for a CPU first.
    assert all(sum(ns for _, ns in told) <= 15e6 for told in found["told"])
    slept = [dict(told).get("off-CPU, blocked in clock_nanosleep", 0) for told in found["told"]]
    assert sum(ns > 0 for ns in slept) >= 4 and max(slept) > 8e6, found["told"]
    assert ["on_launch", 8, 0] in found["runs"]
    assert ["offcpu_launch", 8, 0] in found["runs"]
    found, said = run(place, [], app, prefix=ROOTLESS, MEANWHILE="1")
    assert not found["known"] and found["told"] == [[]] * 8
    unknown = "both: note: off-CPU times of launching threads are unknown: no CAP_BPF"
    assert any(line.startswith(unknown) for line in said)


@pytest.mark.every(2)
@pytest.mark.parametrize("whom", ["tool", "app"])
def test_either_side_dies(place: Path, whom: str) -> None:
    """The program goes on as if nothing had been there; the tool still tells what was."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUDO")}
    command = [
        sys.executable,
        str(place / "both.py"),
        "--device",
        "sim",
        "--",
        str(place / "app"),
        "1",
        "200",
        "20",
        "tell",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as tool:
        assert tool.stderr is not None and tool.stdout is not None
        line = tool.stderr.readline()
        pid = int(line.split("attached to ")[1].split()[0])
        for _ in range(20):
            assert tool.stdout.readline() == "launched\n"
        app = os.pidfd_open(pid)
        try:
            if whom == "tool":
                tool.kill()
                assert tool.wait(60) == -signal.SIGKILL
                status = Path(f"/proc/{pid}/stat")
                assert status.exists()  # it goes on
                assert select.select([app], [], [], 60)[0]
            else:
                signal.pidfd_send_signal(app, signal.SIGKILL)
                out, said = tool.communicate(timeout=60)
                assert tool.returncode == 137, said
                records = [json.loads(line) for line in out.splitlines() if line != "launched"]
                (slots,) = (r["slots"] for r in records if "slots" in r)
                ((_, runs, _),) = next(r["runs"] for r in records if "runs" in r)
                assert 3 < len(slots) < 200 and len(slots) == runs
        finally:
            os.close(app)


@needs_open_checkout
def test_launchlate_counts_the_same_in_the_kernel_and_without(place: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUDO")}
    found = []
    for prefix in ([], ROOTLESS):
        tool = [*prefix, sys.executable, str(REPOSITORY / "tools/launchlate.py"), "--device", "sim", "--json"]
        command = [*tool, "--comm", "w1", "--", str(place / "app"), "3", "8"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd="/")
        records = [json.loads(line) for line in done.stdout.splitlines()]
        counts = {r["kernel"]: r["count"] for r in records if r["type"] == "kernel"}
        found.append((counts, records[-1]))
        assert done.returncode == 0, done.stderr
    (counts, summary), (rootless_counts, rootless) = found
    assert summary["host_programs"]["on_launch"]["runs"] == summary["launches_seen"] == 24
    assert counts == rootless_counts == {"first": 4, "second": 4}  # one of three threads
    assert "host_programs" not in rootless and rootless["launches_instrumented"] == 24
