"""Demangle kernel names, shorten them as users write them, and match them against ``--kernel``.

Names come from traced processes. A mangled C++ name of 300 bytes can stand for gigabytes, since its parts may refer to
other parts twice. Such names are demangled in a child process with limits. show/table.py escapes names for terminals.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gpubpf.process import libc

_LONGEST = 1 << 16  # bytes of a mangled name
# <substitution>, <template-param> (Itanium C++ ABI 5.1.10, 5.1.11)
_REFERENCE = re.compile(r"[ST][0-9A-Z]*_")
_FEW_REFERENCES = (
    24  # two references can double a name, so these make at most a few thousand times its length
)
_MEMORY, _SECONDS = 1 << 30, 2  # limits of the child: bytes, seconds for each name
_LONGEST_FULL = 1 << 20  # bytes of a demangled name
_MOST_FAILURES = 8  # a program with more names that exceed the limits is malicious

# Longest first, as a compiler reads them (C++ standard, [over.oper]).
_OPERATORS = (
    *("<=>", "<<=", ">>=", "->*", "new[]", "delete[]", "()", "[]", "->", "<<", ">>", "<=", ">=", "==", "!="),
    *("&&", "||", "++", "--", "+=", "-=", "*=", "/=", "%=", "^=", "&=", "|=", "new", "delete", "co_await"),
    *("<", ">", "+", "-", "*", "/", "%", "^", "&", "|", "~", "!", "=", ","),
)
_ANONYMOUS = "(anonymous namespace)"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class KernelName:
    """A kernel's name in three forms."""

    mangled: str
    full: str  # demangled: "void ns::scale<float>(float*, float, int)"
    short: str  # without return type, template arguments and parameter list: "ns::scale"


@functools.lru_cache(maxsize=65536)
def demangle(mangled: str) -> KernelName:
    """Return the name of a kernel. All forms of a name that is not mangled C++ (extern "C", Triton, numba, Rust) are equal."""
    full = mangled
    if mangled.startswith("_Z") and len(mangled) <= _LONGEST:
        full = _helper().demangle(mangled) if _may_explode(mangled) else _cxxfilt(mangled)
    return KernelName(mangled, full, shorten(full) if full != mangled else mangled)


def demangle_all(mangled: Iterable[str]) -> list[KernelName]:
    """Return the names of many kernels, in order."""
    return [demangle(name) for name in mangled]


def labels(mangled: Iterable[str]) -> dict[str, str]:
    """Return labels for kernels that are shown together, by mangled name: short names, or full names for equal short ones."""
    found = {name.mangled: name for name in demangle_all(mangled)}
    shorts = Counter(name.short for name in found.values())
    return {key: name.short if shorts[name.short] == 1 else name.full for key, name in found.items()}


def matches(patterns: Iterable[str], mangled: str) -> bool:
    """Return whether a pattern of ``--kernel`` matches: a glob of the kernel's short name, or its exact mangled name."""
    return any(pattern == mangled or fnmatchcase(demangle(mangled).short, pattern) for pattern in patterns)


def shorten(full: str) -> str:
    """Return a demangled name without return type, template arguments and parameter list."""
    name = ""
    position = 0
    while position < len(full):
        character = full[position]
        if full.startswith(_ANONYMOUS, position):
            name += _ANONYMOUS
            position += len(_ANONYMOUS)
        elif full.startswith("operator", position) and _is_operator(full, position, name):
            text, position = _operator(full, position)
            name += text
        elif character == "<" and name:
            position = _after_arguments(full, position)
        elif character == "{":  # {lambda(int)#1}, {unnamed type#1}
            end = _after_brackets(full, position)
            name += full[position:end]
            position = end
        elif character == "[":  # [abi:cxx11], [clone .isra.0]
            position = _after_brackets(full, position)
        elif character == "(" and name in ("decltype", ""):
            if full[position + 1 : position + 2] in ("*", "&"):
                # The function returns a pointer: int (*name(…))(…).
                position += 2
            else:  # all of a decltype is the return type
                position = _after_brackets(full, position)
                name = ""
        elif character == "(":
            return name
        elif character == " ":  # the text before was a part of the return type
            rest = full[position + 1 :].lstrip()
            if not rest or rest.startswith("["):
                return name
            if not (name == "decltype" and rest.startswith("(")):
                name = ""
            position += 1
        else:
            name += character
            position += 1
    return name or full


def _is_operator(full: str, position: int, name: str) -> bool:
    """Return whether "operator" at `position` is the keyword and not a part of an identifier."""
    before = name[-1:]
    after = full[position + 8 : position + 9]
    return not (before.isalnum() or before in ("_", "$")) and not (after.isalnum() or after in ("_", "$"))


def _operator(full: str, position: int) -> tuple[str, int]:
    """Return the name of the operator function at `position`, and the position after it."""
    position += len("operator")
    spaced = full[position : position + 1] == " "
    start = position + spaced
    for symbol in _OPERATORS:
        word = symbol[0].isalpha()
        if full.startswith(symbol, start) and word == spaced:
            return f"operator{' ' if word else ''}{symbol}", _skip_space(full, start + len(symbol))
    # A literal operator or a conversion ends at its parameter list. Template arguments of the target type are left out.
    text = ""
    while start < len(full) and full[start] != "(":
        if full[start] == "<":
            start = _after_arguments(full, start)
        else:
            text += full[start]
            start += 1
    return f"operator {text}" if spaced else f"operator{text}", start


def _skip_space(full: str, position: int) -> int:
    """Return the position after a space before template arguments, which operators have: operator<< <int>."""
    return position + full.startswith(" <", position)


def _after_arguments(full: str, position: int) -> int:
    """Return the end of the template arguments that begin at `position`. In parentheses, < and > may be comparisons."""
    depth = 0
    while position < len(full):
        character = full[position]
        if character in _CLOSING:
            position = _after_brackets(full, position)
            continue
        if character == ">" and full[position - 1] == "-":  # ->
            position += 1
            continue
        depth += {"<": 1, ">": -1}.get(character, 0)
        position += 1
        if depth == 0:
            break
    return position


def _after_brackets(full: str, position: int) -> int:
    """Return the position after the bracket that closes the one at `position`. Other kinds of brackets inside are balanced."""
    opening = full[position]
    depth = 0
    while position < len(full):
        depth += {opening: 1, _CLOSING[opening]: -1}.get(full[position], 0)
        position += 1
        if depth == 0:
            break
    return position


def _may_explode(mangled: str) -> bool:
    return len(mangled) > 1024 or len(_REFERENCE.findall(mangled)) > _FEW_REFERENCES


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
    """Return `__cxa_demangle` (Itanium C++ ABI 3.4) of libstdc++; None without that library. It raises ValueError for other names."""
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
        return subprocess.Popen(
            # -P: import nothing from the working directory, which anybody may write to.
            [sys.executable, "-P", "-c", "from gpubpf import names; names.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
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
    from gpubpf.process import privileges

    privileges.drop_all()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside the C++ library
    for line in sys.stdin.buffer:
        mangled = line[:-1].decode("utf-8", "replace")
        signal.alarm(_SECONDS)
        full = _cxxfilt(mangled)
        signal.alarm(0)
        shown = full if len(full) <= _LONGEST_FULL and "\n" not in full else mangled
        sys.stdout.buffer.write(shown.encode("utf-8", "replace") + b"\n")
        sys.stdout.buffer.flush()
