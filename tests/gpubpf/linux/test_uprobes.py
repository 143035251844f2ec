"""Programs at functions of libraries: of which files, in which processes, how often, in which order, what is lost."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpubpf_locked
import prebuild
from gpubpf import elf
from gpubpf.errors import SessionError, UsageError
from gpubpf.kernel import bpf_syscall
from gpubpf.linux import host_programs, libraries, uprobes
from gpubpf.linux.host_programs import Host
from gpubpf.linux.libraries import LibraryNames, MappedCode
from gpubpf.lower import programs
from gpubpf.process import fuse, kernel_waits
from gpubpf.program import BPF
from gpubpf_commands import words
from gpubpf_host import needs_bpf

HERE = Path(__file__).with_name("uprobes")
FUNCTIONS = (
    *("snoop_first", "snoop_second", "snoop_again", "snoop_sleep", "snoop_fails", "snoop_pushes"),
    "snoop_absent",
)
TEXT = r"""
#include <uapi/linux/ptrace.h>

struct frame { u64 sp; u64 tid; };   /* one call: also of a function that calls itself, or another one of the table */
struct begun { u64 ns; u64 argument; };
struct event { u64 start_ns, end_ns, function, argument, result; u32 pid, tid; };

BPF_TABLE("lru_hash", struct frame, struct begun, under_way, 16384);
BPF_HASH(targets, u32, u8, 1024);
BPF_ARRAY(counts, u64, 8);   /* 0: entries, 1: returns, 2: lost, 3: returns of what nobody saw begin */
BPF_RINGBUF_OUTPUT(events, 1024);

static __always_inline void count(int which) {
    u64 *n = counts.lookup(&which);
    if (n)
        __sync_fetch_and_add(n, 1);
}

int on_call(struct pt_regs *ctx) {
    u64 id = bpf_get_current_pid_tgid();
    u32 pid = id >> 32;
    if (!targets.lookup(&pid))
        return 1;
    struct frame frame = {.sp = PT_REGS_SP(ctx), .tid = (u32)id};
    struct begun begun = {.ns = bpf_ktime_get_ns(), .argument = PT_REGS_PARM1(ctx)};
    under_way.update(&frame, &begun);
    count(0);
    return 0;
}

int on_return(struct pt_regs *ctx) {
    u64 id = bpf_get_current_pid_tgid();
    u32 pid = id >> 32;
    if (!targets.lookup(&pid))
        return 0;
    struct frame frame = {.sp = PT_REGS_SP(ctx), .tid = (u32)id};
    struct begun *begun = under_way.lookup(&frame);
    if (!begun) {
        count(3);
        return 0;
    }
    struct event e = {.start_ns = begun->ns, .end_ns = bpf_ktime_get_ns(), .function = bpf_get_attach_cookie(ctx),
                      .argument = begun->argument, .result = PT_REGS_RC(ctx), .pid = pid, .tid = (u32)id};
    under_way.delete(&frame);
    count(1);
    if (events.ringbuf_output(&e, sizeof(e), 1 /* BPF_RB_NO_WAKEUP */))
        count(2);
    return 0;
}
"""

pytestmark = [needs_bpf, pytest.mark.skipif(not bpf_syscall._UPROBE_TYPE.exists(), reason="needs uprobes")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("uprobes")
    flags = "-O1 -shared -fPIC -fno-optimize-sibling-calls -Wl,--version-script={here}/library.map"
    for command in (
        f"gcc {flags} -Wl,-soname,libsnoop.so.2 {{here}}/library.c -o {{place}}/libsnoop.so.2.1",
        "gcc -O1 -pthread {here}/calls.c -o {place}/calls -ldl",
    ):
        subprocess.run(words(command, here=HERE, place=place), check=True)
    return place


class Calls:
    """The program that calls, with the library loaded at once, or `late`."""

    def __init__(self, place: Path, library: Path, threads: int = 1, calls: int = 100, late: bool = False,
                 before: tuple[str, ...] = ()) -> None:  # fmt: skip
        command = [
            *before,
            str(place / "calls"),
            str(threads),
            str(calls),
            str(library),
            *([] if late else ["now"]),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        self.pid = self.process.pid

    def go(self, how: str = "c") -> float:
        """ns of a call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(how + "\n")
        return float(self.process.stdout.readline())

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=uprobes.METHODS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if uprobes.METHODS.index(request.param) < uprobes.METHODS.index(uprobes.best_method()):
        pytest.skip(f"this kernel has no {request.param}")
    monkeypatch.setattr(uprobes, "best_method", lambda: request.param)
    return str(request.param)


def attached(
    notes: list[str], library: str = "libsnoop.so", functions: Any = FUNCTIONS, returns: bool = True
) -> Host:
    b = BPF(text=TEXT)
    b.attach_uprobe(library, functions, fn_name="on_call")
    if returns:
        b.attach_uprobe(library, functions, fn_name="on_return", ret=True)
    made = b.host(None, notes.append)
    assert made is not None
    return made


@pytest.fixture
def notes() -> list[str]:
    return []


def watch(host: Host, *calls: Calls) -> None:
    for c in calls:
        host.update("targets", c.pid.to_bytes(4, "little"), b"\1")


def counts(host: Host) -> list[int]:
    return [int(n) for n in host.items("counts")["value"][:4]]


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def test_arguments_results_nesting(built: Path, way: str, notes: list[str]) -> None:
    with Calls(built, built / "libsnoop.so.2.1") as calls, attached(notes) as host:
        watch(host, calls)
        began = time.monotonic_ns()
        calls.go("e")
        took = time.monotonic_ns() - began
        events = host.records("events")
        assert counts(host) == [7, 7, 0, 0]
        assert [
            (FUNCTIONS[e["function"]][6:], int(e["argument"]), int(np.int32(e["result"]))) for e in events
        ] == [
            ("second", 1, 28),
            *(("again", depth, depth) for depth in range(4)),  # the innermost returns first
            ("sleep", 20000, int(np.int32(events[5]["result"]))),
            ("fails", events[6]["argument"], 101),
        ]
        again = events[1:5]
        assert (np.diff(again["start_ns"].astype("i8")) < 0).all() and (
            np.diff(again["end_ns"].astype("i8")) > 0
        ).all()
        slept = int(events[5]["end_ns"] - events[5]["start_ns"])
        assert 20_000_000 <= slept < took
        assert set(events["pid"].tolist()) == {calls.pid}
        assert host.uprobes is not None and host.uprobes.method == way
        (placed,) = host.uprobes.placed
        assert (
            placed.functions == FUNCTIONS[:6] and placed.missing == ("snoop_absent",) and not placed.refused
        )
    assert notes == ["libsnoop.so.2.1 has no snoop_absent; such calls are not traced"]


def test_entries_alone(built: Path, way: str, notes: list[str]) -> None:
    with Calls(built, built / "libsnoop.so.2.1") as calls, attached(notes, returns=False) as host:
        watch(host, calls)
        calls.go()
        assert counts(host) == [100, 0, 0, 0]


def test_processes_before_and_after_and_no_other(built: Path, way: str, notes: list[str]) -> None:
    library = built / "libsnoop.so.2.1"
    with Calls(built, library) as before, Calls(built, library) as other, attached(notes) as host:
        with Calls(built, library, calls=50) as after:
            watch(host, before, after)
            before.go()
            other.go()
            after.go()
            assert counts(host) == [150, 150, 0, 0]
        host.delete("targets", before.pid.to_bytes(4, "little"))
        before.go()
        assert counts(host)[0] == 150
        watch(host, before)
        host.detach()
        before.go()
        assert counts(host)[0] == 150


def test_a_library_that_is_loaded_late(built: Path, tmp_path: Path, notes: list[str]) -> None:
    library = Path(
        shutil.copy(built / "libsnoop.so.2.1", tmp_path / "libsnoop-1a2b3c4d.so.2")
    )  # as wheels have it
    for _ in range(8):
        notes.clear()
        with Calls(built, library, late=True) as calls, attached(notes) as host:
            assert host.uprobes is not None and not host.uprobes.placed
            assert notes[0].startswith("found no libsnoop.so yet")
            watch(host, calls)
            calls.go("w")
            seen = counts(host)[:2]
            if seen == [0, 0]:
                continue  # on a busy machine the probes come after the calls
            assert seen in ([100, 100], [101, 101], [100, 101])  # the sleep that gave time may be seen
            assert [p.path for p in host.uprobes.placed] == [str(library)]
            told = f"process {calls.pid} loaded {library.name} before it had probes; calls of any process until then are not traced"
            assert told in notes
            return
    pytest.fail("the library never had probes in time")


def test_out_of_files_the_probes_are_not_tried_one_by_one(
    built: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes back the probes of each attempt, which is slow: a tool did not end within a minute."""
    method, tried = uprobes.best_method(), list[int]()
    if method == "event":
        pytest.skip("this kernel attaches probes one by one")
    monkeypatch.setattr(uprobes, "best_method", lambda: method)

    def none_left(*_: object) -> int:
        tried.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(bpf_syscall, "link_uprobes", none_left)
    with Calls(built, built / "libsnoop.so.2.1"), attached(notes) as host:
        assert host.uprobes is not None
        assert set(host.uprobes.placed[0].refused) >= {"snoop_first", "snoop_second", "snoop_fails"}
    assert len(tried) <= 2
    assert any("raise the limit (ulimit -n)" in note for note in notes)


def test_a_library_of_a_process_that_has_ended(built: Path, notes: list[str]) -> None:
    """Nobody else can open its file: what it called is not known, and that is said."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with attached(notes) as host:
        assert host.uprobes is not None
        gone = MappedCode(ended.pid, 0x1000, 0x2000, 0, "00:99", 12345, "/own/libsnoop.so")
        host.uprobes._probe_mapped(gone.device, gone.inode, [gone])
        assert not host.uprobes.placed and host.uprobes.incomplete
    told = f"process {ended.pid} mapped /own/libsnoop.so, but ended before probes were attached; its calls are not traced"
    assert told in notes


def test_a_library_that_is_loaded_as_the_probes_go(
    built: Path, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was mapped until then is known, also of a process that has ended."""
    library = Path(shutil.copy(built / "libsnoop.so.2.1", tmp_path / "libsnoop-1a2b3c4d.so.2"))
    with attached(notes) as host:
        probes, read = host.uprobes, libraries.Mappings.read
        assert probes is not None
        monkeypatch.setattr(libraries.Mappings, "read", lambda *args: read(*args) if probes._stopped else [])
        with Calls(built, library, late=True) as calls:
            calls.go("w")
        host.detach()
        assert [(p.path, p.late) for p in probes.placed] == [(str(library), calls.pid)]


def test_another_mount_namespace(built: Path, tmp_path: Path, notes: list[str]) -> None:
    """A library in a file system that nobody else has mounted."""
    if subprocess.run(["unshare", "-m", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no mount namespaces here, as in a chroot")
    inner = tmp_path / "inner"
    inner.mkdir()
    script = f'mount -t tmpfs none {inner} && cp {built}/libsnoop.so.2.1 {inner}/libsnoop.so && exec "$@"'
    before = ("unshare", "-m", "sh", "-c", script, "sh")
    with (
        Calls(built, inner / "libsnoop.so", before=before) as early,
        attached(notes) as host,
        Calls(built, inner / "libsnoop.so", late=True, before=before) as late,
    ):
        assert not (inner / "libsnoop.so").exists()
        watch(host, early, late)
        early.go()
        assert counts(host) == [100, 100, 0, 0]
        late.go("w")
        assert host.uprobes is not None
        found = host.uprobes.placed
        assert within(60, lambda: len(found) == 2)
        first = counts(host)[0]
        late.go()
        assert counts(host)[0] == first + 100


def test_one_file_below_two_overlays_is_one(
    built: Path, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "foreign", list)  # another test may have one
    lower = tmp_path / "lower"
    lower.mkdir()
    shutil.copy(built / "libsnoop.so.2.1", lower / "libsnoop.so.2")
    before = []
    for name in "ab":
        for part in "uwm":
            (tmp_path / (name + part)).mkdir()
        options = f"lowerdir={lower},upperdir={tmp_path}/{name}u,workdir={tmp_path}/{name}w"
        script = f'mount -t overlay none -o {options} {tmp_path}/{name}m && exec "$@"'
        before.append(("unshare", "-m", "sh", "-c", script, "sh"))
    if subprocess.run([*before[0], "true"], capture_output=True).returncode:
        pytest.skip("no overlay can be mounted here")
    with (
        Calls(built, tmp_path / "am/libsnoop.so.2", before=before[0]) as a,
        Calls(built, tmp_path / "bm/libsnoop.so.2", before=before[1]) as b,
        attached(notes) as host,
    ):
        watch(host, a, b)
        a.go()
        b.go()
        assert counts(host) == [200, 200, 0, 0]


def test_exact_at_eight_threads(built: Path, notes: list[str]) -> None:
    threads, each = 8, 100_000
    with Calls(built, built / "libsnoop.so.2.1", threads, each) as calls, attached(notes) as host:
        watch(host, calls)
        records: list[np.ndarray[Any, Any]] = []
        stopped = False

        def read() -> None:
            while not stopped:
                records.append(host.records("events"))
                time.sleep(0.02)

        reader = threading.Thread(target=read)
        reader.start()
        calls.go("p")  # which begins with a push, as most functions do: the kernel need not single-step
        stopped = True
        reader.join()
        records.append(host.records("events"))
        entries, returns, lost, strange = counts(host)
        events = np.concatenate(records)
        assert (entries, returns, strange) == (threads * each, threads * each, 0)
        assert len(events) + lost == threads * each
        if not lost:
            _, of_thread = np.unique(events["tid"], return_counts=True)
            assert of_thread.tolist() == [each] * threads
            assert (np.bincount(events["argument"].astype("i8")) == threads).all()
        assert (events["result"] == events["argument"] + 1).all()


def test_lost_is_counted(built: Path, notes: list[str]) -> None:
    with Calls(built, built / "libsnoop.so.2.1", 1, 100_000) as calls, attached(notes) as host:
        watch(host, calls)
        calls.go()  # nobody reads
        entries, returns, lost, _ = counts(host)
        room = 1024 * 4096 // (8 + 48)
        assert entries == returns == 100_000 and lost == returns - room
        assert len(host.records("events")) == room


def test_default_versions_and_aliases(built: Path, notes: list[str]) -> None:
    file = os.open(built / "libsnoop.so.2.1", os.O_RDONLY)
    with attached(
        notes, functions={"snoop_first": 7, "snoop_other": 8}, library=str(built / "libsnoop.so.2.1")
    ) as host:
        assert host.uprobes is not None
        (placed,) = host.uprobes.placed
        assert placed.functions == ("snoop_first",)  # its default version: the other name has the same code
        assert dict(placed.refused) == {"snoop_other": "it is an alias of snoop_first"}
        with Calls(built, built / "libsnoop.so.2.1") as calls:
            watch(host, calls)
            calls.go()
            assert (host.records("events")["function"] == 7).all() and counts(host)[0] == 100
    os.close(file)


def test_never_where_a_hook_is(built: Path, notes: list[str]) -> None:
    """A process with a jump over the first instruction of one function, and behind the first one of another."""
    library = built / "libsnoop.so.2.1"
    with Calls(built, library) as calls:
        (mapped,) = libraries.mapped(calls.pid, LibraryNames(str(library)))
        from gpubpf.process import address_space

        with open(library, "rb") as file, address_space.Memory(calls.pid) as memory:
            loaded = elf.LoadedFile(file.fileno())
            symbols = elf.exports(loaded)

            def write(name: str, distance: int, code: bytes) -> None:
                at = loaded.offset(symbols[name].address) + distance - mapped.offset + mapped.start
                memory.write(at, code)

            write("snoop_fails", 0, b"\xe9\0\0\0\0")
            write("snoop_second", 8, b"\xe9\0\0\0\0")
        with attached(notes) as host:
            assert host.uprobes is not None
            (placed,) = host.uprobes.placed
            assert set(placed.refused) == {"snoop_fails"} and "snoop_second" in placed.functions
            assert str(calls.pid) in placed.refused["snoop_fails"]


@pytest.mark.parametrize("offset", [1 << 63, (1 << 64) - 4096, 1 << 40])
def test_a_file_that_says_that_its_code_lies_far_behind_its_end(
    built: Path, tmp_path: Path, notes: list[str], offset: int
) -> None:
    data = bytearray((built / "libsnoop.so.2.1").read_bytes())
    table, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    for at in range(table, table + 56 * count, 56):
        if struct.unpack_from("<II", data, at) == (1, 5):  # PT_LOAD, code
            struct.pack_into("<Q", data, at + 8, offset)
    wrong = tmp_path / "libfar.so.9"  # a name of its own: other tests look for theirs in all processes
    wrong.write_bytes(data)
    with open(wrong, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    with mapped, attached(notes, "libfar.so") as host:
        assert host.uprobes is not None
        (placed,) = host.uprobes.placed
        assert placed.path == str(wrong) and not placed.functions


@pytest.fixture
def everybodys(built: Path) -> Iterator[Path]:
    """A copy of the library in a directory that other users may write to."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        yield Path(shutil.copy(built / "libsnoop.so.2.1", f"{place}/libstops.so.1"))


@contextlib.contextmanager
def locked(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield a process of another user that maps the library and holds its lock. Check that others can fork in the end.

    After some seconds it lets go, because the machine must go on."""
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with gpubpf_locked.process(library.parent, user=65534) as (pid, _):
        monkeypatch.delenv("LD_PRELOAD")
        (server,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        guard = threading.Timer(8, os.kill, (int(server), signal.SIGKILL))
        guard.start()
        try:
            yield pid
            subprocess.run(["true"], check=True, preexec_fn=lambda: None)  # with fork(2)
            assert guard.is_alive()
        finally:
            guard.cancel()
            kernel_waits._stopped_by.clear()


def stopped_by(pid: int, notes: list[str]) -> list[str]:
    return [
        note for note in notes if note.startswith(f"process {pid} held its lock, and stopped the machine")
    ]


@pytest.mark.whole_machine
def test_a_process_that_stops_the_machine_loses_its_file_system(
    built: Path, everybodys: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It maps the file and holds its lock: the kernel waits for it with a lock that every fork(2) of the machine needs."""
    with (
        Calls(built, everybodys),
        locked(everybodys, monkeypatch) as pid,
        attached(notes, "libstops.so") as host,
    ):
        assert host.uprobes is not None
        (placed,) = host.uprobes.placed
        assert placed.functions == FUNCTIONS[:6]
        assert kernel_waits.has_stopped_machine(65534)
    (note,) = stopped_by(pid, notes)
    assert "the file systems of user 65534 that did not answer" in note


@pytest.mark.whole_machine
@pytest.mark.parametrize("of_process", [False, True])
def test_a_process_that_stops_the_machine_when_probes_are_removed(
    of_process: bool, everybodys: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its lock after the tool has looked."""
    monkeypatch.setattr(kernel_waits, "lock_holder", lambda seconds: 0)
    monkeypatch.setattr(host_programs, "lock_holder", lambda seconds: 0)
    program = bpf_syscall.load_program(bpf_syscall.KPROBE, uprobes._NOTHING, name="test")
    with open(everybodys, "rb") as opened:
        library = elf.LoadedFile(opened.fileno())
        offset = library.offset(elf.exports(library)["snoop_first"].address)
    with attached([], "libabsent.so") as host:
        host._note = notes.append
        process = host.process()
        process._programs.append(("test", program))
        process._events.append(bpf_syscall.attach_uprobe(program, str(everybodys), offset))
        with locked(everybodys, monkeypatch) as pid:
            if of_process:
                process.detach()
            else:
                host.close()
    assert len(stopped_by(pid, notes)) == 1


def test_a_user_who_has_stopped_the_machine_gets_no_probes_alone(
    built: Path, everybodys: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_waits, "_stopped_by", {65534, 0})
    command = "import mmap, sys; how = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC\n"
    command += "f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, *how); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", command, everybodys], user=65534, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as theirs:
        assert theirs.stdout is not None and theirs.stdout.readline()
        with attached(notes, "libstops.so") as host:
            assert host.uprobes is not None and not host.uprobes.placed and host.uprobes.incomplete
            with pytest.raises(SessionError, match="stopped the machine"):
                host_programs._refuse_locks(host.process(65534)._user)
            host_programs._refuse_locks(host.process(0)._user)
        assert (
            "libraries that user 65534 alone maps are not traced: its processes stopped the machine" in notes
        )
        with Calls(built, everybodys), attached(notes, "libstops.so") as host:
            assert host.uprobes is not None and host.uprobes.placed[0].functions
        theirs.kill()


def test_probes_of_a_process_stay_while_a_process_holds_its_lock(
    built: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are disabled, and removed with those of the next process; there are not many of them."""
    holders = [os.getpid()]
    monkeypatch.setattr(host_programs, "lock_holder", lambda seconds: holders[0])
    with attached(notes) as host:

        def end_process(number: int) -> list[int]:
            process = host.process()
            process._events += (os.eventfd(0) for _ in range(number))
            files = list(process._events)
            process.detach()
            return files

        left = end_process(2)
        assert all(os.path.exists(f"/proc/self/fd/{file}") for file in left)
        more = end_process(host_programs._MOST_LEFT)
        assert not any(os.path.exists(f"/proc/self/fd/{file}") for file in left + more)
        left = end_process(1)
        holders[0] = 0
        more = end_process(1)
        assert not any(os.path.exists(f"/proc/self/fd/{file}") for file in left + more)


@pytest.mark.whole_machine
def test_none_while_a_process_holds_its_lock_that_cannot_be_disconnected(
    built: Path, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "connections", lambda: tmp_path)
    with gpubpf_locked.process(tmp_path) as (pid, _), Calls(built, built / "libsnoop.so.2.1"):
        began = time.monotonic()
        with attached(notes) as host:
            assert host.uprobes is not None
            (placed,) = host.uprobes.placed
            assert not placed.functions
            assert host.uprobes.incomplete
        assert time.monotonic() < began + 60
    why = f"not traced: process {pid} keeps its address space locked, so a probe could stop the whole machine; end it"
    assert any(note.endswith(why) for note in notes)


def test_libraries_get_their_probes_when_no_process_holds_its_lock_any_more(
    built: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [os.getpid()]
    monkeypatch.setattr(uprobes.kernel_waits, "obstacle", lambda: holders[0])
    monkeypatch.setattr(uprobes, "_PLACE_AGAIN", 0.05)
    monkeypatch.setattr(uprobes, "_LOOK_AGAIN", 0.0)
    before = open_files()
    with Calls(built, built / "libsnoop.so.2.1") as calls, attached(notes) as host:
        assert host.uprobes is not None and not any(one.functions for one in host.uprobes.placed)
        time.sleep(0.2)  # tried again in vain
        assert not any(one.functions for one in host.uprobes.placed)
        holders[0] = 0
        assert within(60, lambda: any(one.functions for one in host.uprobes.placed))  # type: ignore[union-attr]
        (placed,) = host.uprobes.placed
        assert placed.functions == FUNCTIONS[:6]
        assert within(
            60, lambda: "libraries that had no probes have them now; calls until now are not traced" in notes
        )
        assert host.uprobes.incomplete
        watch(host, calls)
        calls.go()
        assert counts(host)[0] == 100
    holders[0] = os.getpid()
    with Calls(built, built / "libsnoop.so.2.1"), attached(notes) as host:
        assert host.uprobes is not None and host.uprobes._blocked
    assert within(60, lambda: open_files() <= before)


def open_files() -> int:
    fuse.connections()  # stays open
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("again", [False, True])
def test_probes_that_the_kernel_places_after_the_end_are_removed(
    built: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch, way: str, again: bool
) -> None:
    """The kernel waits for a process while it places them. The tool ends meanwhile."""
    entered, leave, paths = threading.Event(), threading.Event(), list[str]()
    name = "link_uprobes" if way == "multi" else "attach_uprobe"
    place = getattr(bpf_syscall, name)

    def late(*some: object) -> int:
        made: int = place(*some)
        paths.append(os.readlink(some[1]))  # type: ignore[call-overload]
        entered.set()
        leave.wait(60)
        if again and len(paths) == 1:
            os.close(made)
            raise OSError(errno.EINVAL, "refused")
        return made

    monkeypatch.setattr(uprobes, "_ATTACH_WAIT", 0.01)
    before = open_files()
    with Calls(built, built / "libsnoop.so.2.1"), monkeypatch.context() as changed:
        changed.setattr(bpf_syscall, name, late)
        with attached(notes) as host:
            assert host.uprobes is not None and entered.wait(60)
            if again:  # it is tried in parts, and the tool has closed its own descriptor of the library
                leave.set()
                assert within(60, lambda: len(paths) > 2)
        leave.set()
        assert within(60, lambda: not any(t.name == "gpubpf-look" for t in threading.enumerate()))
    assert within(60, lambda: open_files() <= before)  # what earlier tests left may be gone
    assert set(paths) == {str(built / "libsnoop.so.2.1")}
    assert not host.uprobes._events and not host.uprobes.programs


@pytest.mark.whole_machine
def test_they_stay_while_a_process_that_maps_the_file_holds_its_lock(
    everybodys: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool does not wait for it, and others can fork. A child removes the probes later."""
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    with open(everybodys, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    host = attached(notes, "libstops.so")
    mapped.close()
    with locked(everybodys, monkeypatch) as pid:
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", Popen)
            host.close()
        assert started[0].poll() is None
    assert started[0].wait(60) == 0
    assert any(f"the probes stay until process {pid} releases its address space" in note for note in notes)
    assert not stopped_by(pid, notes)


def test_a_probe_of_another_tracer_is_no_hook(built: Path, notes: list[str]) -> None:
    with Calls(built, built / "libsnoop.so.2.1") as calls, attached([]) as other, attached(notes) as host:
        watch(other, calls)
        watch(host, calls)
        calls.go()
        assert counts(host) == counts(other) == [100, 100, 0, 0]


def test_prebuilt_needs_no_bcc(
    tmp_path: Path, built: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    from gpubpf.ebpf import compile

    (tmp_path / "snoop.json").write_text(json.dumps(prebuild.build(TEXT)))
    monkeypatch.setattr(programs, "PREBUILT", tmp_path)
    monkeypatch.setattr(compile, "compile_text", lambda text: pytest.fail("compiled"))
    with Calls(built, built / "libsnoop.so.2.1") as calls, attached(notes) as host:
        watch(host, calls)
        calls.go()
        assert counts(host) == [100, 100, 0, 0]


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("libamdhip64.so", "/opt/rocm/lib/libamdhip64.so.6.2.60204", True),
        ("libamdhip64.so", "/x/torch/lib/libamdhip64.so", True),
        ("libamdhip64.so.[567]", "/x/libamdhip64.so.5.7.31921", True),
        ("libamdhip64.so.[567]", "/x/libamdhip64.so", True),
        ("libamdhip64.so.[567]", "/x/libamdhip64.so.4.3", False),
        ("libamdhip64.so.[567]", "/x/libamdhip64.so.55", False),
        ("libamdhip64.so.5", "/x/libamdhip64-1a2b3c4d.so.5.2 (deleted)", True),
        ("libcuda.so", "/x/libcudart.so.12", False),
        ("libcuda.so", "/x/mylibcuda.so.1", False),
        ("libcuda.so", "/x/libcuda.so.1/other", False),
    ],
)
def test_names(pattern: str, path: str, matches: bool) -> None:
    assert LibraryNames(pattern).match(path) is matches


def test_what_makes_no_sense_is_said() -> None:
    b = BPF(text=TEXT)
    for arguments, said in (
        (("libsnoop", FUNCTIONS, "on_call"), "does not name a library"),
        (("libsnoop.so", (), "on_call"), "no function"),
        (("libsnoop.so", ("a", "a"), "on_call"), "twice"),
        (("libsnoop.so", FUNCTIONS, "on_nothing"), "no program on_nothing"),
    ):
        with pytest.raises(UsageError, match=said):
            b.attach_uprobe(*arguments)
    with pytest.raises(UsageError, match="attach_uprobe"):
        b.attach_launch("on_call")


def test_calls_of_this_process_itself(built: Path, notes: list[str]) -> None:
    library = ctypes.CDLL(str(built / "libsnoop.so.2.1"))
    with attached(notes) as host:
        host.update("targets", os.getpid().to_bytes(4, "little"), b"\1")
        assert library.snoop_fails() == 101
        assert within(60, lambda: counts(host) == [1, 1, 0, 0])


def test_without_files_no_library_seems_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = libraries.LibraryNames("libc.so.6")
    assert libraries.files(names)

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "listdir", fails)
    with pytest.raises(OSError, match="Too many open files"):
        libraries.files(names)
