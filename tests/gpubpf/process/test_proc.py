"""Files of /proc/PID: whatever a process chooses to be in them, and however large it makes them."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import mmap
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from gpubpf import elf
from gpubpf.attach import holding
from gpubpf.attach.loading import Held
from gpubpf.errors import SessionError
from gpubpf.kernel import fresh_thread
from gpubpf.linux import libraries
from gpubpf.linux.libraries import LibraryNames
from gpubpf.process import address_space, limits, proc, ptrace, scans, started_with, traceable
from gpubpf.session import translating
from gpubpf.traced import device, joining, machine
from gpubpf_properties import generated

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PR_SET_NAME = 15
TIGHT = 350_000  # KiB of memory: the tool itself needs less than half
# Files that are not those of other processes.
NO_PROCESS = re.compile(r"/proc/(self/|sys/|kallsyms$)")
# Elsewhere: these list the processes, or name the file system.
OTHER = {
    *(("linux/libraries.py", "/proc"), ("traced/machine.py", "/proc")),
    *(("check/isolation.py", "/proc"), ("check/machine.py", "/proc"), ("kernel/namespaces.py", "/proc")),
}

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
needs_device = pytest.mark.skipif(
    not (device.LIBRARIES / "libcuda.so.1").exists(), reason="needs the embedded device (script/setup)"
)


# --- only one module -----------------------------------------------------------------------------------------------


def _paths(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that begins a path of a process, however the rest is added.

    Of a formatted string, the text is that behind the first value."""
    formatted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and len(node.values) > 1:
            first, second, *rest = node.values
            formatted.add(first)
            if (
                isinstance(first, ast.Constant)
                and str(first.value) == "/proc/"
                and isinstance(second, ast.FormattedValue)
                and ast.unparse(second.value) != "os.getpid()"
            ):
                yield node.lineno, str(rest[0].value) if rest and isinstance(rest[0], ast.Constant) else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and node not in formatted:
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if text.startswith("/proc") and " " not in text and not NO_PROCESS.match(text):
                yield node.lineno, text


def test_only_the_package_process_names_files_of_processes() -> None:
    assert list(_paths(ast.parse('open(f"/proc/{pid}/maps")'))) == [(1, "/maps")]
    for way in ('"/proc/%d/maps" % pid', '"/proc/" + pid', 'b"/proc/%d" % pid', 'Path("/proc") / pid'):
        assert len(list(_paths(ast.parse(way)))) == 1
    library = ROOT / "lib" / "gpubpf"
    found = [
        (str(file.relative_to(library)), line, end)
        for file in sorted(library.rglob("*.py"))
        if file.parent != library / "process"
        for line, end in _paths(ast.parse(file.read_text()))
    ]
    assert [(file, line, end) for file, line, end in found if (file, end) not in OTHER] == []


# --- any bytes -----------------------------------------------------------------------------------------------------

_rest = b" S 1 5 5 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4711 1 1\n"
_names = st.binary(max_size=15).map(lambda name: name.replace(b"\0", b""))
_texts = st.binary(max_size=300)


@contextlib.contextmanager
def _files(patch: pytest.MonkeyPatch, **contents: bytes) -> Iterator[None]:
    """Let all processes have these files, by the last part of their names."""

    @contextlib.contextmanager
    def opened(pid: int, name: str) -> Iterator[int]:
        file = os.memfd_create("test")
        try:
            os.write(file, contents.get(name.rpartition("/")[2], b""))
            os.lseek(file, 0, os.SEEK_SET)
            yield file
        finally:
            os.close(file)

    with patch.context() as patched:
        patched.setattr(proc, "_opened", opened)
        yield


@contextlib.contextmanager
def _environment(patch: pytest.MonkeyPatch, content: bytes) -> Iterator[None]:
    """Let all processes have this environment, read in pieces."""

    def pieces(pid: int, field: int, most: int) -> Iterator[bytes]:
        yield from (content[at : min(at + 65536, most)] for at in range(0, min(len(content), most), 65536))

    with patch.context() as patched:
        patched.setattr(started_with, "_pieces", pieces)
        yield


@generated(200, name=_names)
def test_a_name_may_have_any_bytes(name: bytes) -> None:
    # The kernel escapes line feeds and backslashes in the status file only (fs/proc/array.c).
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    status = (
        b"Name:\t" + escaped + b"\nState:\tS (sleeping)\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \n"
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        _files(patch, comm=name + b"\n", stat=b"7 (" + name + b")" + _rest, status=status),
    ):
        assert traceable.comm(7) == name.decode("utf-8", "replace")
        assert traceable.started(7) == 4711 / os.sysconf("SC_CLK_TCK")
        assert ptrace.parent(7) == 1 and not ptrace.is_dead(7, 7) and not traceable.is_exiting(7)
        user = traceable.user(7)
        assert (user.uid, user.gid, user.groups) == (2, 6, (9, 10)) and scans.user_of(7) == 1


@generated(200, before=_texts, value=_texts, after=_texts)
def test_an_environment_may_have_any_bytes(before: bytes, value: bytes, after: bytes) -> None:
    value = value.replace(b"\0", b"")
    data = before + b"\0WANTED=" + value + b"\0" + after
    earlier = dict(v.partition(b"=")[::2] for v in reversed(before.split(b"\0")) if b"=" in v)
    with pytest.MonkeyPatch.context() as patch, _environment(patch, data):
        found = started_with.environment(7, ["WANTED"])
        assert os.fsencode(found["WANTED"]) == earlier.get(b"WANTED", value)
        machine._started_by_a_tool(7)


@generated(200, path=_texts, garbage=_texts)
def test_a_list_of_mappings_may_have_any_bytes(path: bytes, garbage: bytes) -> None:
    path = b"/" + path.replace(b"\n", b"\\012").replace(b"\0", b"") + b"/libcuda.so.1"
    line = b"1000-3000 r-xp 00002000 08:01 12 " + path + b"\n"
    data = garbage.replace(b"-", b"") + b"\n" + line
    with pytest.MonkeyPatch.context() as patch, _files(patch, maps=data, mountinfo=garbage):
        (mapping,) = address_space.mappings(7)
        assert (mapping.start, mapping.end, mapping.file) == (0x1000, 0x3000, ("08:01", 12))
        assert mapping.path == path.decode("utf-8", "replace")
        assert address_space.mapping_at(7, 0x2000) == mapping and address_space.mapping_at(7, 0x3000) is None
        assert list(machine._drivers(7).values()) == ["/proc/7/map_files/1000-3000"]
        assert [m.path for m in libraries.mapped(7, LibraryNames("libcuda.so"))] == [mapping.path]
        assert address_space.executed_another_program(7)
        address_space.is_local("08:99", 7)
        translating._is_translator(7)


def test_a_real_process_may_have_any_name_and_map_any_path(tmp_path: Path) -> None:
    libc, me = ctypes.CDLL(None), os.getpid()
    before = Path("/proc/self/comm").read_bytes().removesuffix(b"\n")
    try:
        for byte in range(1, 256):
            name = b"a" + bytes([byte]) + "训".encode()[: byte % 4]
            libc.prctl(PR_SET_NAME, name, 0, 0, 0)
            assert traceable.comm(me) == name.decode("utf-8", "replace")
            assert ptrace.parent(me) == os.getppid() and not ptrace.is_dead(me, me)
            assert traceable.started(me) > 0 and traceable.status(me)["Tgid"] == str(me)
            if byte == ord("/"):
                continue
            path = os.path.join(os.fsencode(tmp_path), name)
            with open(path, "wb+") as file:
                file.write(b"1")
                file.flush()
                area = mmap.mmap(file.fileno(), 1)
                inode = os.fstat(file.fileno()).st_ino
            address = ctypes.addressof(ctypes.c_char.from_buffer(area))
            found = address_space.mapping_at(me, address)
            assert found in address_space.mappings(me) and found is not None and found.file[1] == inode
            os.unlink(path)
            found = address_space.mapping_at(me, address)
            assert found in address_space.mappings(me) and found is not None
            assert (
                found.path
                == os.fsdecode(path)
                .encode("utf-8", "surrogateescape")
                .replace(b"\n", b"\\012")
                .decode("utf-8", "replace")
                + " (deleted)"
            )
    finally:
        libc.prctl(PR_SET_NAME, before, 0, 0, 0)


# --- any size ------------------------------------------------------------------------------------------------------


def test_lists_have_limits() -> None:
    line = b"1000-3000 r-xp 00002000 08:01 12 /%s\n"
    with pytest.MonkeyPatch.context() as patch:
        with _files(patch, maps=line % (b"a" * limits.LONGEST_LINE * 3)), pytest.raises(proc.TooLarge):
            address_space.mappings(7)
        many = line % (b"a" * 4000) * 1000
        with _files(patch, maps=many):
            assert len(address_space.mappings(7)) == 1000
            with pytest.raises(proc.TooLarge):
                address_space.mappings(7, most=1 << 20)
        with _files(patch, maps=many):
            patch.setattr(limits, "MAPPINGS", 999)
            with pytest.raises(proc.TooLarge):
                address_space.mappings(7)
            assert address_space.mappings(7, re.compile("none")) == ()
        patch.setattr(limits, "LONGEST_LIST", 0.0)
        with _files(patch, maps=many), pytest.raises(proc.TooLarge):
            address_space.mappings(7)


def test_variables_have_limits() -> None:
    with pytest.MonkeyPatch.context() as patch:
        long = b"LONG=" + b"a" * (limits.LONGEST_VARIABLE + (1 << 17)) + b"LONG=b\0"
        with _environment(patch, long + b"NEXT=1"):
            assert started_with.environment(7, ["LONG", "NEXT"]) == {"NEXT": "1"}
        far = b"FIRST=1\0" + bytes(limits.LARGEST_ENVIRONMENT) + b"FAR=1\0"
        with _environment(patch, far):
            assert started_with.environment(7, ["FIRST", "FAR"]) == {"FIRST": "1"}


def test_each_users_processes_have_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"monotonic": 100.0, "thread_time": 0.0}
    for name in clock:
        monkeypatch.setattr(time, name, lambda name=name: clock[name])
    budget = scans.ScanBudget()
    with budget.scan(1000):
        clock["thread_time"] += limits.SCAN_BURST + 1
    assert budget.exhausted(1000) and not budget.exhausted(1001)
    clock["monotonic"] += 0.9 / limits.SCAN_SHARE
    assert budget.exhausted(1000)
    clock["monotonic"] += 0.2 / limits.SCAN_SHARE
    assert not budget.exhausted(1000)


def test_each_search_of_all_processes_takes_from_the_same_time() -> None:
    said: list[str] = []
    budget, user = scans.ScanBudget(), scans.user_of(os.getpid())
    budget.spend(user, 2 * limits.SCAN_BURST)
    for _ in range(2):
        libraries.running(LibraryNames("libcuda.so"), said.append, budget)
    assert said == [f"some processes of user {user} are"] * 2


@needs_root
def test_the_user_of_a_process_answers_for_the_ids_in_its_user_namespace() -> None:
    code = (
        "import ctypes, os; assert ctypes.CDLL(None).unshare(0x10000000) == 0; print(flush=True); input()\n"
    )
    code += "os.setuid(1); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], user=12345, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        if not child.stdout.readline():
            pytest.skip("no user namespaces here")
        Path(f"/proc/{child.pid}/uid_map").write_text("0 12345 1\n1 700000 10\n")
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert traceable.status(child.pid)["Uid"].split()[0] == "700000"
        assert scans.user_of(child.pid) == 12345
        child.kill()


def test_who_answers_for_delegated_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    content = "root:100000:65536\n12345:300000:65536\nnobody-here:1:2\nx\n"
    monkeypatch.setattr(scans.Path, "read_text", lambda *arguments, **options: content)
    monkeypatch.setattr(scans, "_delegated", scans._delegated.__wrapped__)
    ids = (0, 1, 1000, 100000, 100001, 300000, 365535, 365536)
    assert [scans.responsible(uid) for uid in ids] == [0, 1, 1000, 100000, 100000, 12345, 12345, 365536]


def test_an_overlay_of_a_process_is_local_if_it_cannot_have_layers_from_fuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounts = b"1 2 0:77 / / rw - overlay overlay rw,lowerdir=/a\n3 2 0:78 / /b rw - fuse.sshfs x rw\n"
    foreign: list[str] = []
    monkeypatch.setattr(address_space.fuse, "foreign", lambda: foreign)
    with _files(monkeypatch, mountinfo=mounts):
        monkeypatch.setattr(address_space, "_own_mounts", (time.monotonic() + 60, {}))
        assert address_space.is_local("00:4d", 7) and not address_space.is_local("00:4e", 7)
        foreign.append("40")
        assert not address_space.is_local("00:4d", 7)
        monkeypatch.setattr(address_space, "_own_mounts", (time.monotonic() + 60, {"00:4d": True}))
        assert address_space.is_local("00:4d", 7)  # the tool sees it, so root has mounted it


@pytest.fixture(scope="module")
def large() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpubpf-large-") as name:
        at = Path(name)
        subprocess.run(["gcc", "-O1", "-Wall", HERE / "large.c", "-o", at / "large", "-ldl"], check=True)
        yield at
        subprocess.run(["rm", "-rf", at / "maps"], check=True)  # Python's rmtree needs a file for each level


@contextlib.contextmanager
def _running(large: Path, *arguments: object) -> Iterator[int]:
    command = [large / "large", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.stdin.close()


def _maps(large: Path, depth: int, count: int) -> tuple[object, ...]:
    """Return the arguments for so many mappings."""
    subprocess.run(["rm", "-rf", large / "maps"], check=True)
    (large / "maps").mkdir()
    return "maps", large / "maps", depth, count


def _measured(*arguments: object) -> tuple[str, int]:
    """Run threadhist. Return what it prints, and its peak memory in KiB."""
    code = "import subprocess, resource, sys; done = subprocess.run(sys.argv[1:], stderr=subprocess.STDOUT, timeout=100)\n"
    code += "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    tool = [sys.executable, str(ROOT / "tools" / "threadhist.py"), *map(str, arguments)]
    done = subprocess.run(
        [sys.executable, "-c", code, *tool], capture_output=True, text=True, timeout=120, check=True
    )
    text, _, peak = done.stdout.rpartition("peak ")
    return text, int(peak)


@needs_gcc
@needs_root
@needs_device
def test_a_large_environment_costs_nothing(large: Path) -> None:
    with _running(large, "environ", 1000, "-") as pid:
        assert started_with.environment(pid, ["FIRST"]) == {"FIRST": "1"}
    with _running(large, "environ", 1000, device.LIBRARIES / "libcuda.so.1") as pid:
        text, peak = _measured("-p", pid, "-d", "0.2")
    assert peak < TIGHT, text


@needs_gcc
@needs_root
@needs_device
@pytest.mark.parametrize("depth, count", [(200, 10), (15, 9000)])  # lines that are too long; too many lines
def test_many_mappings_of_long_paths_are_refused(large: Path, depth: int, count: int) -> None:
    with _running(large, *_maps(large, depth, count), device.LIBRARIES / "libcuda.so.1") as pid:
        with pytest.raises(SessionError, match=f"pid {pid} .* cannot be traced: its list of mappings is too"):
            joining.devices_of(pid)
        text, peak = _measured("-p", pid)
        assert f"pid {pid} (large) cannot be traced: its list of mappings is too large" in text
        assert peak < TIGHT, text
        said: list[str] = []
        libraries.running(LibraryNames("libcuda.so"), said.append)
        assert said == [f"process {pid} is"]


@needs_gcc
@needs_root
@needs_device
@pytest.mark.whole_machine
def test_a_tool_that_measures_every_process_reports_large_ones(large: Path) -> None:
    with _running(large, *_maps(large, 15, 9000), "-") as pid:
        text, peak = _measured("-d", "1")
    assert f"pid {pid} (large) cannot be traced: its list of mappings is too large" in text
    assert peak < TIGHT, text


@needs_root
def test_the_hold_helper_reads_mappings_without_realtime_priority() -> None:
    def policies() -> list[int]:
        holding._set_realtime_priority()
        found = [os.sched_getscheduler(0)]
        with holding._ordinary_priority():
            found.append(os.sched_getscheduler(0))
        return [policy & ~os.SCHED_RESET_ON_FORK for policy in (*found, os.sched_getscheduler(0))]

    before, inside, after = fresh_thread.run(policies, "test")
    if before == os.SCHED_OTHER:
        pytest.skip("this container has no real-time priority")
    assert inside == os.SCHED_OTHER
    assert before == after == os.SCHED_RR  # several helpers take turns


def test_a_process_may_map_a_few_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b"%x000-%x000 r-xp 00000000 08:01 %d /%d/libcuda.so.1\n"
    many = b"".join(line % (0x1000 + n, 0x1001 + n, n + 1, n) for n in range(1000))
    read: list[int] = []

    def exports(pid: int, library: address_space.Library) -> frozenset[str]:
        read.append(library.base)
        return frozenset()

    monkeypatch.setattr(address_space, "exports", exports)
    monkeypatch.setattr(traceable, "check_traceable", lambda pid: None)
    monkeypatch.setattr(joining.started_with, "environment", lambda pid, names: {})
    with _files(monkeypatch, maps=many), pytest.raises(SessionError, match="more than 16 drivers"):
        joining.devices_of(7)
    assert not read
    with _files(monkeypatch, maps=b"".join(many.splitlines(keepends=True)[:16])):
        assert len(joining.devices_of(7)) == 1 and len(read) == 16


def test_few_files_exports_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1000))

    @contextlib.contextmanager
    def library_file(pid: int, library: address_space.Library) -> Iterator[object]:
        yield address_space.Identity(1, next(numbers), 1, 1), None, 0

    monkeypatch.setattr(address_space, "library_file", library_file)
    monkeypatch.setattr(address_space.elf, "exports", lambda source, base, most: {"cuInit": None})
    monkeypatch.setattr(address_space, "_exported", type(address_space._exported)())
    for _ in range(1000):
        assert address_space.exports(7, address_space.Library(0, ())) == {"cuInit"}
    assert len(address_space._exported) == 32


@needs_gcc
@needs_root
@needs_device
@pytest.mark.whole_machine
@pytest.mark.may_come_too_late
def test_the_hold_helper_holds_no_process_with_a_large_list(large: Path) -> None:
    """It would read the list while other processes wait. The tool is told, and attaches late."""
    arrived: queue.Queue[tuple[int, bool, bool]] = queue.Queue()

    def on_arrival(pid: int, comm: str, held: Held | None, late: bool) -> None:
        arrived.put((pid, held is not None, late))
        if held is not None:  # not from the helper's thread, which gets the answer
            threading.Thread(target=helper.finish, args=(pid,)).start()

    driver = device.LIBRARIES / "libcuda.so.1"
    helper = machine.HoldHelper(on_arrival, lambda pid: None, lambda how: None)
    try:
        with open(driver, "rb") as file:
            library = elf.LoadedFile(file.fileno())
            entry = library.offset(elf.exports(library)["cuInit"].address)
            helper.add_probe(f"/proc/{os.getpid()}/fd/{file.fileno()}", entry, None, lambda text: None)
            for count, is_held in ((1, True), (600, False)):
                with _running(large, *_maps(large, 15, count), driver) as pid:
                    assert arrived.get(timeout=60) == (pid, is_held, not is_held)
    finally:
        helper.close()


@needs_root
def test_a_user_without_time_left_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes are scanned again once there is time."""
    notes: list[str] = []
    scanned: list[int] = []
    watcher = machine.MachineWatcher(lambda pid, tid: None, lambda *missed: None, notes.append)
    monkeypatch.setattr(machine, "_drivers", lambda pid: scanned.append(pid) or {})
    watcher._hold_helper = SimpleNamespace(exited=False, lost=(0, 0))
    with contextlib.ExitStack() as stack:
        theirs, ours = (
            stack.enter_context(subprocess.Popen(["sleep", "600"], user=user)) for user in (12345, 0)
        )
        stack.callback(ours.kill)
        stack.callback(theirs.kill)
        watcher._budget._left[12345] = -1.0, time.monotonic()
        for _ in range(2):
            watcher._scan(late=True, everything=True)
        assert ours.pid in scanned and theirs.pid not in scanned
        assert [note for note in notes if "user 12345" in note] == [
            "processes of user 12345 may be attached late or missed: searching them for GPU drivers takes too long"
        ]
        watcher._budget._left[12345] = 1.0, time.monotonic()
        watcher._scan(late=True)
        assert theirs.pid in scanned
