"""Host programs: in the kernel, on a stub in this process, and as native code; both leave the same behind."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import gpubpf_asm as asm
import gpubpf_bcc
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import maps
from gpubpf.ebpf.bytecode import HOST_STUB, Program
from gpubpf.ebpf.filters import host_filter_bytes
from gpubpf.ebpf.maps import MapDefinition, pad8
from gpubpf.errors import Error, SessionError, UsageError, VerifyError
from gpubpf.kernel import bpf_syscall
from gpubpf.linux import host_programs
from gpubpf.linux.host_programs import Host, HostProbe
from gpubpf.process import kernel_waits
from gpubpf.show import cli, option_values
from gpubpf_host import ROOTLESS, Agent, native_of, needs_bpf, open_directory, open_stub

TEXT = r"""
#include <gpubpf.h>

struct slot {
    u64 launch, kernel, stream, call_ns, threads, gpu;
    u64 now, pid_tgid, uid_gid, cgroup;
    char comm[16];
    u32 count;
    u16 wide;
    u8 narrow, odd[3];
};
struct settings { u64 least; u32 mask; u16 add; u8 few; };

GPU_SHARED_ARRAY(slots, struct slot, 64);
GPU_PARAM(settings, struct settings);

int on_launch(struct gpu_launch *ctx) {
    int zero = 0;
    struct settings *s = settings.lookup(&zero);
    if (!s || ctx->threads < s->least)
        return 0;
    int key = ctx->launch % 64;
    struct slot *slot = slots.lookup(&key);
    if (!slot)
        return 0;
    slot->launch = ctx->launch;
    slot->kernel = ctx->kernel;
    slot->stream = ctx->stream;
    slot->call_ns = ctx->call_ns;
    slot->threads = ctx->threads / 3 + (ctx->gpu >> 1);
    slot->gpu = ctx->gpu;
    slot->now = bpf_ktime_get_ns();
    slot->pid_tgid = bpf_get_current_pid_tgid();
    slot->uid_gid = bpf_get_current_uid_gid();
    slot->cgroup = bpf_get_current_cgroup_id();
    bpf_get_current_comm(slot->comm, sizeof(slot->comm));
    __sync_fetch_and_add(&slot->count, s->add);
    slot->wide = (u16)ctx->stream & s->mask;
    slot->narrow = s->few;
    int i;
#pragma unroll
    for (i = 0; i < 3; i++)
        slot->odd[i] = i * slot->narrow;
    return 0;
}
"""
SETTINGS = np.array(
    (100, 0xFF0, 7, 9), {"names": ["least", "mask", "add", "few"], "formats": ["<u8", "<u4", "<u2", "u1"],
                         "offsets": [0, 8, 12, 14], "itemsize": 16},
).tobytes()  # fmt: skip


@pytest.fixture
def stub() -> Iterator[tuple[int, Callable[..., None]]]:
    with open_stub() as made:
        yield made


def launches() -> list[tuple[int, ...]]:
    return [(1 << 40 | n, n % 5, 0x7F00_1234_5670 + n, n * n, 90 + n, n % 3) for n in range(23)]


@needs_bpf
def test_kernel_and_native_code_leave_the_same(stub: tuple[int, Callable[..., None]]) -> None:
    program = gpubpf_bcc.compiled(TEXT)
    definition = program.maps["slots"]
    where = (HostProbe("on_launch", "launch"),)
    with Host(program, where, params={"settings": SETTINGS}) as running:
        assert running.in_kernel and not running.natives
        process = running.process()
        process.attach(stub[0])
        for fields in launches():
            stub[1](*fields)
        (runs,) = running.runs()
        assert (runs.function, runs.runs, runs.missed) == ("on_launch", 23, 0)
        assert 0 < runs.mean_ns < 1e6
        kernels = process.array("slots")
        process.detach()
        stub[1](*launches()[0])
        assert running.runs() == [runs]  # what was counted stays, and nothing is added
        assert (process.array("slots") == kernels).all()

    memory = np.zeros(definition.max_entries * pad8(definition.value_size), np.uint8)
    agent = Agent(native_of(program), {"slots": memory.ctypes.data}, {"settings": SETTINGS})
    for fields in launches():
        agent(*fields)
    stride = pad8(definition.value_size)
    own = np.ndarray((64,), definition.value_dtype, memory.data, 0, (stride,))
    used = kernels["launch"] != 0
    assert used.sum() == 13  # threads from 90 to 112, at least 100
    for field in definition.value_dtype.names or ():
        if field == "now":
            assert (np.diff(own["now"][used].astype("i8")) >= 0).all()
            assert (kernels["now"][used] < own["now"][used]).all()
        elif field != "cgroup":
            assert (kernels[field] == own[field]).all(), field
    assert (kernels["cgroup"][used] > 0).all() and (own["cgroup"][used] == 80).all()
    assert list(kernels["odd"][used][0]) == [0, 9, 18]


@needs_bpf
def test_programs_are_loaded_before_locks_are_watched(
    stub: tuple[int, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes no lock of a process, but may take long. Meanwhile, no process would be to blame, and this one could not fork."""
    guarded: list[tuple[str, bool]] = []

    def watched(name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(*args: object) -> int:
            guarded.append((name, bool(kernel_waits._guarded)))
            return function(*args)

        return call

    with Host(
        gpubpf_bcc.compiled(TEXT), (HostProbe("on_launch", "launch"),), params={"settings": SETTINGS}
    ) as running:
        process = running.process()
        monkeypatch.setattr(host_programs, "load", watched("load", host_programs.load))
        place = watched("attach", host_programs.bpf_syscall.attach_uprobe)
        monkeypatch.setattr(host_programs.bpf_syscall, "attach_uprobe", place)
        process.attach(stub[0])
    assert guarded == [("load", False), ("attach", True)]


def shared(name: str, size: int = 24, entries: int = 3) -> MapDefinition:
    return MapDefinition(name, "shared_array", 4, size, entries, "<i4", f"|V{size}", 1024, 2)


@pytest.mark.parametrize("in_kernel", [pytest.param(True, marks=needs_bpf), False])
def test_shared_arrays_are_memory_of_one_process(in_kernel: bool) -> None:
    with Host(Program("", {}, {}), (), shared=[shared("a", 20), shared("b")]) as running:
        running._loaded = in_kernel
        one, two = running.process(), running.process()
        assert sorted(one.files) == ["a", "b"]
        with mmap.mmap(one.files["a"], maps.storage_size(running.shared["a"])) as area:
            area[24:44] = bytes(range(20))  # the second element: 20 bytes take 24
        assert one.array("a")[1].tobytes() == bytes(range(20))
        assert two.array("a").tobytes() == bytes(60)
        two.close()
        assert one.array("a")[1].tobytes() == bytes(range(20))


@needs_bpf
def test_refuses_to_watch_a_file_that_is_no_stub(tmp_path: Path) -> None:
    program = gpubpf_bcc.compiled(TEXT)
    with Host(program, (HostProbe("on_launch", "launch"),)) as running:
        process = running.process()
        ordinary = tmp_path / "library.so"
        ordinary.write_bytes(HOST_STUB.ljust(4096, b"\0"))
        unsealed = os.memfd_create("stubs", os.MFD_ALLOW_SEALING)
        os.write(unsealed, HOST_STUB)
        other = os.memfd_create("stubs", os.MFD_ALLOW_SEALING)
        os.write(other, b"\x55" + HOST_STUB)
        fcntl.fcntl(other, fcntl.F_ADD_SEALS, host_programs._SEALS)
        files = [os.open(ordinary, os.O_RDONLY), unsealed, other, os.open("/dev/null", os.O_RDONLY)]
        for file in files:
            with pytest.raises(SessionError, match="without the stub"):
                process.attach(file)
        process.attach(other, 1)
        for file in files:
            os.close(file)


TRACEPOINT = r"""
#include <gpubpf.h>
struct enter { u64 common; s64 number; u64 arguments[6]; };
struct record { u64 number; u32 tid; u32 pad; };
BPF_HASH(wanted, u32, u64, 8);
BPF_PERCPU_ARRAY(seen, u64, 2);
BPF_RINGBUF_OUTPUT(records, 1);
BPF_ARRAY(lost, u64, 1);

int on_enter(struct enter *ctx) {
    u32 tid = bpf_get_current_pid_tgid();
    u64 *number = wanted.lookup(&tid);
    if (!number || *number != ctx->number)
        return 0;
    int key = 1, zero = 0;
    u64 *count = seen.lookup(&key);
    if (count)
        *count += 1;
    struct record r = {.number = ctx->number, .tid = tid};
    u64 *missed = lost.lookup(&zero);
    if (records.ringbuf_output(&r, sizeof(r), 1) && missed)
        __sync_fetch_and_add(missed, 1);
    return 0;
}
"""


@needs_bpf
def test_tracepoints_maps_and_the_ring_buffer() -> None:
    program = gpubpf_bcc.compiled(TRACEPOINT)
    getppid = 110
    with Host(program, (HostProbe("on_enter", "raw_syscalls:sys_enter"),)) as running:
        tid = threading.get_native_id()
        running.update("wanted", tid.to_bytes(4, "little"), getppid.to_bytes(8, "little"))
        for _ in range(5):
            os.getppid()
        records = running.records("records")
        assert records["number"].tolist() == [getppid] * 5 and records["tid"].tolist() == [tid] * 5
        assert not len(running.records("records"))
        room = 4096 // 24
        for _ in range(500):
            os.getppid()
        assert len(running.records("records")) == room
        assert running.items("lost")["value"].tolist() == [500 - room]
        os.getppid()
        assert len(running.records("records")) == 1  # there is room again
        seen = running.items("seen")
        assert seen["key"].tolist() == [0, 1] and seen["value"].sum(axis=1).tolist() == [0, 506]
        assert running.items("wanted").tolist() == [(tid, getppid)]
        running.detach()
        running.wait_until_detached()
        os.getppid()
        assert not len(running.records("records"))


@needs_bpf
def test_tracefs_is_found_without_being_mounted_for_others() -> None:
    before = Path("/proc/self/mounts").read_text()
    found = bpf_syscall.tracepoint("sched:sched_switch")
    assert found.fields["prev_pid"] == (24, 4)
    assert Path("/proc/self/mounts").read_text() == before
    with pytest.raises(Error, match="no tracepoint sched:nothing; check its name"):
        bpf_syscall.tracepoint("sched:nothing")


def text(body: str, maps: str = "") -> str:
    return f"#include <gpubpf.h>\n{maps}\nint on_launch(struct gpu_launch *ctx) {{\n{body}\nreturn 0;\n}}\n"


@needs_bpf
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            text("u64 k = 1; counts.increment(k);", "BPF_HASH(counts);"),
            "map counts exists only in the kernel",
        ),
        (text("bpf_get_current_task();"), "bpf_get_current_task exists only in the kernel; run as root"),
        (text("u64 x = bpf_jiffies64();"), "helper number 118 exists only in the kernel"),
    ],
)
def test_what_only_the_kernel_has_is_refused_by_name(source: str, message: str) -> None:
    program = gpubpf_bcc.compiled(source)
    with Host(program, (HostProbe("on_launch", "launch"),)):
        pass  # the kernel has it
    with pytest.raises(VerifyError, match=message):
        native_of(program)


@needs_bpf
def test_the_kernels_verdict_names_the_line() -> None:
    program = gpubpf_bcc.compiled(
        text("int k = 9; u64 *v = a.lookup(&k);\n*v = ctx->launch;", "GPU_SHARED_ARRAY(a, u64, 4);")
    )
    with pytest.raises(VerifyError, match=r"host program on_launch, C line 5 `\*v = ctx->launch;`"):
        Host(program, (HostProbe("on_launch", "launch"),))


@needs_bpf
def test_a_context_kept_over_calls_and_branches(stub: tuple[int, Callable[..., None]]) -> None:
    body = """
    u64 sum = 0;
    int i, key = ctx->gpu & 3;
    for (i = 0; i < 4; i++)
        sum += bpf_get_smp_processor_id() * 0 + ((u32)ctx->threads >> i);
    struct gpu_launch *again = ctx;
    if (ctx->stream & 1)
        sum += again->call_ns;
    else
        sum += again->kernel;
    u64 *v = a.lookup(&key);
    if (v) *v = sum;
    """
    program = gpubpf_bcc.compiled(text(body, "GPU_SHARED_ARRAY(a, u64, 4);"))
    with Host(program, (HostProbe("on_launch", "launch"),)) as running:
        process = running.process()
        process.attach(stub[0])
        for gpu in range(4):
            stub[1](1, 1000, gpu, 50, 64 | 1 << 40, gpu)
        assert process.array("a").tolist() == [1120, 170, 1120, 170]
    memory = (ctypes.c_uint64 * 4)()
    agent = Agent(native_of(program), {"a": ctypes.addressof(memory)}, {})
    for gpu in range(4):
        agent(1, 1000, gpu, 50, 64 | 1 << 40, gpu)
    assert list(memory) == [1120, 170, 1120, 170]


@needs_bpf
def test_a_shared_array_belongs_to_no_tracepoint() -> None:
    source = """#include <gpubpf.h>
    GPU_SHARED_ARRAY(a, u64, 4);
    struct enter { u64 common; s64 number; };
    int on_enter(struct enter *ctx) { int k = 0; u64 *v = a.lookup(&k); if (v) *v = 1; return 0; }"""
    with pytest.raises(UsageError, match="whole machine"):
        Host(gpubpf_bcc.compiled(source), (HostProbe("on_enter", "raw_syscalls:sys_enter"),))


@needs_bpf
def test_the_virtual_clock_keeps_programs_that_ask_for_time_out_of_the_kernel() -> None:
    program = gpubpf_bcc.compiled(TEXT)
    native = native_of(program)
    where = (HostProbe("on_launch", "launch"),)
    with Host(program, where, native=lambda name: native, virtual=True) as running:
        assert not running.in_kernel and running.natives == (native,)


WITHOUT_CAPABILITY = """
import pickle, sys
from gpubpf.linux.host_programs import HostProbe, Host
program, native = pickle.load(open(sys.argv[1], "rb"))
said = []
with Host(program, (HostProbe("on_launch", "launch"),), native=lambda name: native, note=said.append) as running:
    print(running.in_kernel, len(running.natives), said)
    process = running.process()
    print(process.array("slots")["launch"].sum(), running.runs())
try:
    Host(program, (HostProbe("on_launch", "sched:sched_switch"),))
except Exception as error:
    print(error)
"""


@needs_bpf
def test_without_capability_the_agent_gets_the_program() -> None:
    program = gpubpf_bcc.compiled(TEXT)
    plain = Program(program.text, dict(program.functions), dict(program.maps), program.license)
    with open_directory() as place:
        kept = place / "program"
        kept.write_bytes(pickle.dumps((plain, native_of(program))))
        command = [*ROOTLESS, sys.executable, "-c", WITHOUT_CAPABILITY, str(kept)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "False 1 ['no CAP_BPF: the host program runs in the agent']",
        "0 []",
        "no CAP_BPF: host programs at sched:sched_switch require CAP_BPF and CAP_PERFMON; run as root",
    ]


FILTERED = r"""
#include <gpubpf.h>
GPU_PARAM(filter, struct gpu_host_filter);
GPU_SHARED_ARRAY(hits, u64, 1);
int on_launch(struct gpu_launch *ctx) {
    int zero = 0;
    struct gpu_host_filter *f = filter.lookup(&zero);
    u64 *hit = hits.lookup(&zero);
    if (f && hit && gpu_host_selected(f))
        *hit += 1;
    return 0;
}
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A new cgroup v2 below the one this process is in, and back."""
    root = next(
        (
            p
            for p in map(Path, ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
            if (p / "cgroup.controllers").exists()
        ),
        None,
    )
    if root is None or os.geteuid():
        pytest.skip("needs root and cgroup v2")
    before = next(
        line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
    )
    place = root / f"gpubpf-test-{os.getpid()}" / "inner"
    place.mkdir(parents=True)
    (place / "cgroup.procs").write_text(str(os.getpid()))
    yield place
    (root / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
    place.rmdir()
    place.parent.rmdir()


@needs_bpf
def test_host_filters(stub: tuple[int, Callable[..., None]], cgroup: Path) -> None:
    program = gpubpf_bcc.compiled(FILTERED)
    comm = Path("/proc/self/comm").read_text().strip()
    own, outer = option_values.parse_cgroup(str(cgroup)), option_values.parse_cgroup("/" + cgroup.parent.name)
    tid = threading.get_native_id()
    cases = [
        ((None, None, None), 1),
        ((own, None, None), 1),
        ((outer, None, None), 1),
        ((1, None, None), 1),  # the root
        ((own + outer, None, None), 0),
        ((None, comm, None), 1),
        ((None, comm + "x", None), 0),
        ((None, comm[:-1], None), 0),
        ((None, None, tid), 1),
        ((None, None, tid + 1), 0),
        ((outer, comm, tid), 1),
        ((outer, "other", tid), 0),
    ]
    native = native_of(program)
    for choice, expected in cases:
        params = {"filter": host_filter_bytes(*choice)}
        with Host(program, (HostProbe("on_launch", "launch"),), params=params) as running:
            process = running.process()
            process.attach(stub[0])
            stub[1](1, 2, 3, 4, 5, 6)
            assert process.array("hits").tolist() == [expected], choice
        memory = ctypes.c_uint64()
        agent = Agent(native, {"hits": ctypes.addressof(memory)}, params)
        agent.helpers[123] = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int32)(
            lambda level: [1, outer, own, 0][min(level, 3)]
        )
        agent(1, 2, 3, 4, 5, 6)
        assert memory.value == expected, choice


def test_the_command_line_of_host_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = cli.parser("x", "", "")
    cli.add_host_filters(made)
    cli.add_targets(made)
    args = cli.parse(made, ["--comm", "worker", "-t", "12", "--cgroup", "345"])
    assert (args.cgroup, args.comm, args.tid) == (345, "worker", 12)
    assert host_filter_bytes(None, None, None)[:32] == bytes(32)
    for wrong in (
        ["--comm", "x" * 16],
        ["--comm", ""],
        ["-t", "0"],
        ["--cgroup", str(tmp_path)],
        ["--cgroup", "/no/such"],
    ):
        with pytest.raises(SystemExit):
            cli.parse(made, wrong)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5 and all(line.startswith("x: argument ") for line in said)
    assert "is not a cgroup v2" in said[3] and "there is no cgroup '/no/such'" in said[4]


STACKS = r"""
#include <gpubpf.h>
#include <linux/sched.h>
struct seen { s64 stack; u64 task; u64 kernel; };
BPF_STACK_TRACE(stacks, 64);
BPF_HASH(launches, u64, struct seen, 64);
int on_launch(struct gpu_launch *ctx) {
    u64 key = ctx->launch;
    struct seen s = {};
    if (ctx->gpu)
        s.stack = -1;
    else
        s.stack = stacks.get_stackid(ctx, BPF_F_USER_STACK);
    s.task = bpf_get_current_task();
    s.kernel = ctx->kernel;
    launches.update(&key, &s);
    return 0;
}
"""


@needs_bpf
def test_what_only_the_kernel_has(stub: tuple[int, Callable[..., None]]) -> None:
    program = gpubpf_bcc.compiled(STACKS)
    with Host(program, (HostProbe("on_launch", "launch"),)) as running:
        process = running.process()
        process.attach(stub[0])
        for gpu in range(2):
            stub[1](77 + gpu, 5, 0, 0, 0, gpu)
        found = {int(row["key"]): row["value"] for row in running.items("launches")}
        assert set(found) == {77, 78} and found[77]["kernel"] == 5
        assert found[77]["task"] == found[78]["task"] > 1 << 63  # this task, in the kernel's memory
        addresses = running.stack("stacks", int(found[77]["stack"]))
        assert len(addresses) >= 2
        assert addresses[0] == ctypes.cast(stub[1], ctypes.c_void_p).value  # the stub itself
        assert running.stack("stacks", int(found[78]["stack"])) == ()


@needs_bpf
def test_a_program_that_needs_the_whole_stack(stub: tuple[int, Callable[..., None]]) -> None:
    """Since Linux 6.13 it may have it. Before, the copy of its context and its stack share 512 bytes."""
    body = """int key = 0; u64 *o = out.lookup(&key); if (!o) return 0;
    u64 a[60] = {}; bpf_get_current_comm(a, 64); *o = ctx->gpu + a[59];"""
    program = gpubpf_bcc.compiled(text(body, "GPU_SHARED_ARRAY(out, u64, 1);"))
    try:
        with Host(program, (HostProbe("on_launch", "launch"),)) as running:
            process = running.process()
            process.attach(stub[0])
            stub[1](1, 2, 3, 4, 5, 6)
            assert process.array("out").tolist() == [6]
    except VerifyError as error:
        assert "combined stack size" in str(error)


FILLS_ITS_STACK = r"""
#include <gpubpf.h>
GPU_SHARED_ARRAY(out, u64, 1);
static noinline u64 twice(u64 *a) { return 2 * *a; }
int on_launch(struct gpu_launch *ctx) {
    int key = 0;
    u64 *o = out.lookup(&key);
    if (!o)
        return 0;
    u64 a[24];
    POINTER = &a[23];
    LOOP
    for (int i = 0; i < 24; i++)
        *p-- = 1000 + i;
    *o = ctx->gpu + (ctx->kernel << 8);
    CALL
    return 0;
}
"""


@needs_bpf
@pytest.mark.parametrize("call", ["", "*o += twice(o);"])
@pytest.mark.parametrize("loop", ["unroll", "nounroll"])
@pytest.mark.parametrize("pointer", ["volatile u64 *p", "u64 *volatile p"])
def test_an_array_of_the_program_does_not_overwrite_the_copy_of_its_context(
    stub: tuple[int, Callable[..., None]], pointer: str, loop: str, call: str
) -> None:
    """Clang computes addresses in the array by several adds, or in a loop."""
    source = FILLS_ITS_STACK.replace("POINTER", pointer).replace("LOOP", f"#pragma {loop}")
    program = gpubpf_bcc.compiled(source.replace("CALL", call))
    expected = (7 + (5 << 8)) * (3 if call else 1)
    with Host(program, (HostProbe("on_launch", "launch"),)) as running:
        process = running.process()
        process.attach(stub[0])
        stub[1](1, 5, 2, 3, 4, 7)
        assert process.array("out").tolist() == [expected]
    memory = ctypes.c_uint64()
    Agent(native_of(program), {"out": ctypes.addressof(memory)}, {})(1, 5, 2, 3, 4, 7)
    assert memory.value == expected


@needs_bpf
@pytest.mark.parametrize(
    "body",
    [
        "struct bpf_pidns_info id; long s = bpf_get_ns_current_pid_tgid(0, 0, &id, 8); *o = id.pid + id.tgid + s;",
        "struct bpf_pidns_info id; bpf_get_ns_current_pid_tgid(0, 0, &id, 8); if (id.tgid == 7) *o = 1;",
        "u64 id; bpf_get_ns_current_pid_tgid(0, 0, (void *)&id, 8); if (id < 8) ((char *)o)[id] = 1;",
        "bpf_get_ns_current_pid_tgid(0, 0, (void *)o, 8);",
    ],
)
def test_a_helper_that_fails_clears_its_buffer(stub: tuple[int, Callable[..., None]], body: str) -> None:
    """Code that reads bytes which nothing wrote may do anything: compilers leave its end out."""
    program = gpubpf_bcc.compiled(
        text(
            f"int key = 0; u64 *o = out.lookup(&key); if (!o) return 0; {body}",
            "GPU_SHARED_ARRAY(out, u64, 1);",
        )
    )
    with Host(program, (HostProbe("on_launch", "launch"),)) as running:
        process = running.process()
        process.attach(stub[0])
        stub[1](1, 5, 2, 3, 4, 7)
        expected = process.array("out").tolist()
    memory = ctypes.c_uint64()
    Agent(native_of(program), {"out": ctypes.addressof(memory)}, {})(1, 5, 2, 3, 4, 7)
    assert [memory.value] == expected


EDGES = (0, 1, 2, 63, 64, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
OPERATIONS = (b.ADD, b.SUB, b.MUL, b.OR, b.AND, b.XOR, b.LSH, b.RSH, b.ARSH, b.DIV, b.MOD)
JUMPS = (b.JEQ, b.JGT, b.JGE, b.JSET, b.JNE, b.JSGT, b.JSGE, b.JLT, b.JLE, b.JSLT, b.JSLE)
NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8)  # r6 is the context, r9 the value of the map


def random_step(rng: random.Random) -> list[b.Instruction]:
    to, other, wide = rng.choice(NUMBERS), rng.choice(NUMBERS), rng.random() < 0.5
    kind = rng.randrange(5)
    if kind == 0:
        return [asm.load(to, 6, 8 * rng.randrange(6))]
    if kind == 1:
        size = rng.choice((1, 2, 4, 8))
        at = -size * rng.randrange(1, 64 // size)
        return [asm.store(10, at, other, size), asm.load(to, 10, at, size)]
    if kind == 2:
        body = [i for _ in range(rng.randrange(1, 4)) for i in random_step(rng)]
        imm = b.signed(rng.choice(EDGES), 32)
        source = other if rng.random() < 0.5 else None
        return [asm.jump(rng.choice(JUMPS), to, len(body), source, 0 if source else imm, wide), *body]
    op = rng.choice(OPERATIONS)
    offset = rng.randrange(2) if op in (b.DIV, b.MOD) else 0
    if kind == 3:
        return [asm.alu(op, to, other, wide=wide, offset=offset)]
    imm = b.signed(rng.getrandbits(32), 32)
    imm = imm & (63 if wide else 31) if op in (b.LSH, b.RSH, b.ARSH) else imm or 3
    return [asm.alu(op, to, imm=imm, wide=wide, offset=offset)]


def random_program(rng: random.Random, out: str) -> list[b.Instruction]:
    code = [
        asm.mov(6, 1),
        *asm.lookup(out, 0, -72),
        asm.jump(b.JNE, 0, 2),
        asm.movi(0, 0),
        asm.leave(),
        asm.mov(9, 0),
    ]
    for number, register in enumerate(NUMBERS):
        code.append(asm.load(register, 6, 8 * (number % 6)))
    for at in range(-64, 0, 8):
        code.append(asm.storei(10, at, at, 8))
    for _ in range(60):
        code += random_step(rng)
    for number, register in enumerate(NUMBERS):
        code.append(asm.store(9, 8 * number, register))
    return [*code, asm.movi(0, 0), asm.leave()]


@needs_bpf
def test_random_programs_do_the_same_in_the_kernel_and_natively(
    stub: tuple[int, Callable[..., None]],
) -> None:
    rng = random.Random(11)
    names = [f"p{n}" for n in range(12)]
    outs = {
        f"out_{name}": MapDefinition(f"out_{name}", "shared_array", 4, 64, 1, "<i4", "|V64", 1024, 2)
        for name in names
    }
    functions = {
        name: b.BpfFunction(name, "launch", tuple(random_program(rng, f"out_{name}"))) for name in names
    }
    program = Program("", functions, outs)
    with Host(program, [HostProbe(name, "launch") for name in names]) as running:
        process = running.process()
        process.attach(stub[0])
        memory = {name: (ctypes.c_uint64 * 8)() for name in names}
        agents = [
            Agent(native_of(program, name), {f"out_{name}": ctypes.addressof(memory[name])}, {})
            for name in names
        ]
        for _ in range(8):
            fields = [rng.choice(EDGES) if rng.random() < 0.5 else rng.getrandbits(64) for _ in range(6)]
            stub[1](*fields)
            for name, agent in zip(names, agents, strict=True):
                agent(*fields)
                assert process.array(f"out_{name}")[0].tobytes() == bytes(memory[name]), (name, fields)
