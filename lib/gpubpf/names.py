"""Demangle kernel names, shorten them as users write them, and match them against ``--kernel``.

Names come from traced processes. A mangled C++ name of 300 bytes can stand for gigabytes, since its parts may refer to
other parts twice. Such names are demangled in a child process with limits. show/table.py escapes names for terminals.
"""

from __future__ import annotations

import ctypes
import functools
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase

from gpubpf.kernel import libc
from gpubpf.record import Record
from gpubpf.show import table
from gpubpf.show.kernel_names import fitted, shorten, told_apart

_OF_RUNTIME = "__amd_rocclr_"
# Device linking makes the names of static kernels and variables unique: nvcc puts the module's name and its length before a name,
# and clang appends a digest.
_NVCC_STATIC = r"__nv_static_([0-9]{1,5})_"
_NVCC_MODULE = _NVCC_STATIC + r"_[0-9a-f]+_([0-9]{1,5})_"  # the group: length of the file's name
_CLANG_STATIC = r"(?:\.(?:static|intern)\.|__(?:static|intern)__)[0-9a-f]{8,}\Z"
_LONGEST = 1 << 16  # bytes of a mangled name
# <substitution>, <template-param> (Itanium C++ ABI 5.1.10, 5.1.11)
_REFERENCE = r"[ST][0-9A-Z]*_"
_FEW_REFERENCES = (
    24  # two references can double a name, so these make at most a few thousand times its length
)
_MEMORY, _SECONDS = 1 << 30, 2  # limits of the child: bytes, seconds for each name
_MOST_SECONDS = 24 * 3600  # CPU time of the child for all names
_LONGEST_FULL = 1 << 20  # bytes of a demangled name
_MOST_FAILURES = 8  # a program with more names that exceed the limits is malicious


class KernelName(Record):
    """A kernel's name in three forms."""

    mangled: str
    full: str  # demangled: "void ns::scale<float>(float*, float, int)"
    short: str  # without return type, template arguments and parameter list: "ns::scale"


@functools.lru_cache(maxsize=65536)
def demangle(mangled: str) -> KernelName:
    """Return the name of a kernel. A name that is not mangled C++ (extern "C", Triton, numba, Rust) stays as it is."""
    symbol = full = _without_module(mangled)
    if symbol.startswith("_Z") and len(symbol) <= _LONGEST:
        full = _helper().demangle(symbol) if _may_explode(symbol) else _cxxfilt(symbol)
    return KernelName(mangled, full, shorten(full) if full != symbol else symbol)


def _without_module(mangled: str) -> str:
    """Return a mangled name without the module's name or digest that device linking adds to static names."""
    if found := re.match(_NVCC_STATIC, mangled):
        end = found.end() + int(found[1])
        if mangled[end : end + 1] == "_" and len(mangled) > end + 1:
            return mangled[end + 1 :]
    return re.sub(_CLANG_STATIC, "", mangled)


def file_of_static(mangled: str) -> str:
    """Return the source file of a static name in code that nvcc's linker linked, such as "v.cu"; "" for other names."""
    found = re.match(_NVCC_MODULE, mangled)
    name = mangled[found.end() : found.end() + int(found[2])] if found else ""
    return table.printable(".".join(name.rsplit("_", 1)))


def demangle_all(mangled: Iterable[str]) -> list[KernelName]:
    """Return the names of many kernels, in order."""
    return [demangle(name) for name in mangled]


def labels(mangled: Iterable[str], width: int | None = None, full: bool = False) -> dict[str, str]:
    """Return labels for kernels that are shown together, by mangled name. Different kernels have different labels.

    A label is the short name, or with `full` the full name. Kernels with equal short names get the full name without `void`, which
    all kernels return.

    width: maximum columns of a label; None: no limit.
    """
    found = {name.mangled: name for name in demangle_all(mangled)}
    shorts = Counter(name.short for name in found.values())
    texts = {
        key: table.printable(
            name.full if full else name.short if shorts[name.short] == 1 else name.full.removeprefix("void ")
        )
        for key, name in found.items()
    }
    texts = told_apart(texts)
    if width is None:
        return texts
    shown = fitted(texts.values(), width)
    return {key: shown[text] for key, text in texts.items()}


class Labels:
    """Labels for kernels that become known one by one. All labels differ. A label may change when a similar kernel becomes known."""

    def __init__(self, ascii: bool = False) -> None:
        self._ascii = ascii  # escape other characters
        self._labels: dict[str, str] = {}  # by mangled name
        self._fitted: dict[int, dict[str, str]] = {}  # by width

    def label(self, mangled: str, width: int | None = None) -> str:
        """Return the label of a kernel in at most `width` columns."""
        if mangled not in self._labels:
            self._labels[mangled] = ""
            self._labels = labels(self._labels)
            if self._ascii:
                for name, text in self._labels.items():
                    self._labels[name] = text.encode("ascii", "backslashreplace").decode()
            self._fitted.clear()
        found = self._labels[mangled]
        return found if width is None else self.cut(found, width)

    def cut(self, label: str, width: int) -> str:
        """Return a label in at most `width` columns."""
        if width not in self._fitted:
            self._fitted[width] = fitted(self._labels.values(), width)
        return self._fitted[width].get(label) or table.fit(label, width)


def matches(patterns: Iterable[str], mangled: str) -> bool:
    """Return whether a pattern of ``--kernel`` matches: a glob of the kernel's short name, or its exact mangled name."""
    return any(pattern == mangled or fnmatchcase(demangle(mangled).short, pattern) for pattern in patterns)


def chosen(patterns: Collection[str], mangled: str) -> bool:
    """Return whether a tool measures a kernel: whether a pattern matches or, without patterns, whether the program launches it.

    Without patterns, the kernels that HIP launches itself are left out."""
    return matches(patterns, mangled) if patterns else not is_of_runtime(mangled)


def is_of_runtime(mangled: str) -> bool:
    """Return whether HIP launches the kernel itself, to copy or fill memory."""
    return mangled.startswith(_OF_RUNTIME)


def _may_explode(mangled: str) -> bool:
    return len(mangled) > 1024 or len(re.findall(_REFERENCE, mangled)) > _FEW_REFERENCES


def _cxxfilt(mangled: str) -> str:
    """Demangle a name in this process. Return it unchanged if that fails."""
    try:
        if (demangler := _cxa_demangle()) is not None:
            return demangler(mangled.encode()).decode()
        import cxxfilt  # slow, 20 ms: it starts programs to find the C++ library

        return str(cxxfilt.demangle(mangled))
    except Exception:  # no C++ library, not a C++ name, not UTF-8
        return mangled


@functools.cache
def _cxa_demangle() -> Callable[[bytes], bytes] | None:
    """Return `__cxa_demangle` (Itanium C++ ABI 3.4) of libstdc++; None without that library.

    The returned function raises ValueError for a name that is not mangled C++."""
    try:
        function = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
        free = libc.library["free"]
    except (OSError, AttributeError):
        return None
    function.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def demangler(mangled: bytes) -> bytes:
        status = ctypes.c_int()
        result = function(ctypes.c_char_p(mangled), None, None, ctypes.byref(status))
        try:
            if status.value != 0 or not result:
                raise ValueError(f"not a C++ name: {mangled!r}")
            return ctypes.string_at(result)
        finally:
            free(result)

    return demangler


class _Helper:
    """A child process with limits that demangles one name at a time. A name that exceeds them is returned unchanged.

    The child is started for the first such name. It ends when its parent closes the pipe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._failures = 0

    def demangle(self, mangled: str) -> str:
        """Demangle a name. May be called from any thread."""
        with self._lock:
            if "\n" in mangled or self._failures >= _MOST_FAILURES:
                return mangled
            try:
                if self._child is None:
                    self._child = self._start()
                pipes = self._child.stdin, self._child.stdout
                assert pipes[0] is not None and pipes[1] is not None
                pipes[0].write(mangled.encode("utf-8", "replace") + b"\n")
                pipes[0].flush()
                answer = pipes[1].readline()
            except OSError:
                answer = b""
            if not answer.endswith(b"\n"):  # it exceeded the limits
                self._stop()
                self._failures += 1
                return mangled
            return answer[:-1].decode("utf-8", "replace")

    def _start(self) -> subprocess.Popen[bytes]:
        from gpubpf.process import children  # imported here, because few programs have such names

        return subprocess.Popen(
            children.python("from gpubpf import names; names.serve()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=children.environment(),
            start_new_session=True,  # Ctrl-C is meant for the tool
        )

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


@functools.cache
def _helper() -> _Helper:
    return _Helper()


def serve() -> None:
    """Run the child: read a mangled name per line from stdin, write the demangled name per line to stdout."""
    from gpubpf.kernel import privileges
    from gpubpf.process import children

    privileges.drop_all()
    children.Limits(_MEMORY, 0, _MOST_SECONDS).apply()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside the C++ library
    for line in sys.stdin.buffer:
        mangled = line[:-1].decode("utf-8", "replace")
        signal.alarm(_SECONDS)
        full = _cxxfilt(mangled)
        signal.alarm(0)
        shown = full if len(full) <= _LONGEST_FULL and "\n" not in full else mangled
        sys.stdout.buffer.write(shown.encode("utf-8", "replace") + b"\n")
        sys.stdout.buffer.flush()
