"""C text → `Program`. Only this module imports bcc, and only if neither a prebuilt nor a cached program exists.

Where bcc cannot be used, clang compiles a text for any user (clang.py), if the tool asks for that."""

from __future__ import annotations

import binascii
import contextlib
import ctypes
import errno
import functools
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gpubpf import cache, processor
from gpubpf.ebpf import headers, maps
from gpubpf.ebpf.bytecode import (
    CALL,
    JMP,
    LD_IMM64,
    PSEUDO_CALL,
    BpfFunction,
    Instruction,
    Program,
    decode,
    encode,
    points,
    register_functions,
    signed,
    without_comments,
)
from gpubpf.ebpf.headers import ExpandedText
from gpubpf.ebpf.helpers import HELPERS
from gpubpf.ebpf.maps import MapDefinition
from gpubpf.errors import CompileError, how_to_install, in_words
from gpubpf.kernel import bpf_syscall, directories, libc, privileges
from gpubpf.record import replace

INSTALL_BCC = "install the distribution's python3-bpfcc"
INSTALL_HEADERS = "install linux-headers-amd64 (Ubuntu: linux-headers-generic)"
_KEY_KINDS = {f"gpubpf_{kind}": kind for kind in (*maps.DEVICE_KINDS, "shared_array")}
_DEBUG = 0x4 | 0x8  # DEBUG_PREPROCESSOR, DEBUG_SOURCE
# All calls are convergent: the result of a collective helper depends on the lanes that call it, so clang must not move the call.
_FLAGS = (f"-I{headers.INCLUDE}", "-Xclang", "-fconvergent-functions")


@functools.cache
def _version() -> str:
    """Return a cache key that changes with the code of bcc and of the stages ebpf, verify and lower."""
    here = Path(__file__).parent.parent
    patterns = ("elf.py", "ebpf/*.py", "ebpf/*.h", "verify/*.py", "lower/*.py", "lower/templates/*.ll")
    files = [path for pattern in patterns for path in sorted(here.glob(pattern))]
    with contextlib.suppress(ImportError, ValueError):
        if (bcc := importlib.util.find_spec("bcc")) is not None and bcc.origin is not None:
            files += Path(bcc.origin).parent.glob("version.py")
    return cache.key_of_files(files)


def program_key(text: str, any_user: bool = False) -> str:
    """Return the key of a C text in the cache. It covers the text, the headers that the text may include, and the code of the stages.

    A program that clang compiles has a different key, and so has a program that the kernel's verifier cannot check.
    """
    clang = ("clang", str(privileges.capable())) if any_user and not usable() else ()
    return cache.key(_version(), text, headers.content(), *clang)


def object_key(program: Program) -> str:
    """Return the key of a program from an object file. It covers the whole program and the code of the stages."""
    contents = [one.contents.hex() for one in program.maps.values()]
    return cache.key("object", _version(), str(privileges.capable()), json.dumps(to_json(program)), *contents)


def compile_text(text: str, any_user: bool = False) -> Program:
    """Return the program of a C text, from the cache if it was compiled before. Raises CompileError.

    any_user: whether to use clang, which requires no capability, if bcc cannot be used here
    """
    key = program_key(text, any_user)
    store = cache.default()
    kept = cache.from_json(store.get("program", key), lambda value: from_json(value, text))
    if kept is not None:
        return kept
    program = _compile_with_clang(text) if any_user and not usable() else _compile(text)
    store.put("program", key, json.dumps(to_json(program)).encode())
    return program


def to_json(program: Program) -> dict[str, Any]:
    """Return a program as JSON values, without its text."""
    names = dict.fromkeys(program.maps, 0)
    functions = {}
    for function in program.functions.values():
        code = function.instructions
        functions[function.name] = {
            "point": function.point,
            "code": binascii.b2a_base64(encode(code, names), newline=False).decode(),
            "lines": [i.line for i in code],
            "maps": {str(pc): i.map for pc, i in enumerate(code) if i.map is not None},
        }
    definitions = [definition.to_json() for definition in program.maps.values()]
    return {"functions": functions, "maps": definitions, "license": program.license}


def from_json(value: Any, text: str) -> Program:
    """Return the program that `to_json` described. Raises ValueError, KeyError, TypeError or AttributeError if it is malformed."""
    functions = {}
    for name, item in value["functions"].items():
        code = list(decode(binascii.a2b_base64(item["code"]), item["lines"]))
        for pc, map_name in item["maps"].items():
            if not 0 <= int(pc) < len(code):
                raise ValueError(f"{name} has no instruction {pc}")
            code[int(pc)] = replace(code[int(pc)], map=map_name)
        functions[name] = BpfFunction(name, item["point"], tuple(code))
    definitions = {item["name"]: MapDefinition.from_json(item) for item in value["maps"]}
    return Program(text, functions, definitions, value["license"])


def _compile(text: str) -> Program:
    """Compile in a child process, because clang prints to stdout and stderr, and exits on C that it cannot express as BPF."""
    import faulthandler  # imported here because the import is slow
    import tempfile

    with tempfile.TemporaryFile() as talk, tempfile.TemporaryFile() as result:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            try:
                faulthandler.disable()
                os.dup2(talk.fileno(), 1)
                os.dup2(talk.fileno(), 2)
                result.write(json.dumps(_compile_here(text, talk)).encode())
                result.flush()
            except Exception as error:
                result.write(
                    json.dumps({"error": f"the compiler failed: {in_words(error)}; try again"}).encode()
                )
                result.flush()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            raise CompileError(
                "the compiler was killed, perhaps because memory ran out; free memory and try again"
            )
        result.seek(0)
        talk.seek(0)
        output = talk.read().decode("utf-8", "replace")
        try:
            answer = json.loads(result.read())
        except ValueError:
            why = _diagnosis(headers.expand(text), output)
            if why == _NO_CAUSE and os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                why = f"the compiler crashed ({name}); if it does so again, correct the C text"
            raise CompileError(why) from None
    if "error" in answer:
        raise CompileError(answer["error"])
    return from_json(answer, text)


def _compile_here(text: str, talk: IO[bytes]) -> dict[str, Any]:
    """Return the program as JSON values, or `{"error": …}`. stdout and stderr of this process already go to `talk`."""
    try:
        bcc = _import_bcc()
        os.chdir("/")  # bcc fails in a working directory whose path has more than 255 characters
        source = headers.expand(text)
        spelled = spell_out_increments(source.text)
        flags = (ctypes.c_char_p * len(_FLAGS))(*(flag.encode() for flag in _FLAGS))
        with _kernel_source():
            module = bcc.lib.bpf_module_create_c_from_string(
                spelled.encode(), _DEBUG, flags, len(flags), True, None
            )
        libc.library.fflush(None)
        talk.seek(0)
        output = talk.read().decode("utf-8", "replace")
        if not module:
            return {"error": _diagnosis(source, output)}
        return to_json(_collect(bcc.lib, module, text, _lines(source, output)))
    except CompileError as error:
        return {"error": str(error)}


def _import_bcc() -> Any:
    try:
        import bcc  # python3-bpfcc, from the distribution
    except ImportError:
        # A virtual environment usually hides the distribution's modules.
        where = (
            "" if sys.prefix == sys.base_prefix else " and make this environment with --system-site-packages"
        )
        raise CompileError(
            f"this C text is not one of the prebuilt programs and bcc's Python module is missing; {INSTALL_BCC}{where}, "
            "or compile with clang: BPF(text=..., any_user=True)"
        ) from None
    if not hasattr(bcc, "lib"):  # PyPI has an unrelated package of that name
        raise CompileError(
            "the Python module bcc found here is another project's; install python3-bpfcc instead"
        )
    if not privileges.capable():
        raise CompileError(
            "this C text is not one of the prebuilt programs, and compiling one needs CAP_BPF; run it as root"
        )
    return bcc


def found_bcc() -> bool:
    """Return whether bcc's module is installed, and this thread may load programs and maps, as bcc does to compile."""
    return privileges.capable() and importlib.util.find_spec("bcc") is not None


def usable() -> bool:
    """Return whether bcc can compile here: it also needs kernel headers."""
    return found_bcc() and has_kernel_headers()


_NO_CAUSE = "bcc: compilation failed; correct the C text"


def _diagnosis(source: ExpandedText, output: str) -> str:
    """Return the cause of a failed compilation in one line, from the output of clang and bcc."""
    lines = [line for line in output.splitlines() if not line.startswith(("clang -cc1", "#"))]
    if match := re.search(r"incomplete definition of type 'struct tracepoint__(\w+?)__(\w+)'", output):
        return (
            f"there is no tracepoint {match[1]}:{match[2]} in /sys/kernel/tracing; correct its name, or mount tracefs:"
            " mount -t tracefs tracefs /sys/kernel/tracing"
        )
    # Clang counts lines of the text that bcc rewrote. Clang 18 and newer report this like any other error.
    for line in lines:
        if match := re.match(r"(?:Error at line |.*main\.c:)(\d+)\b.*signed division", line):
            header, number = source.origin(_rewritten(source.text, output)[1].get(int(match[1]), 0))
            return f"{header or 'C'} line {number}: BPF has no signed division or remainder; divide unsigned numbers, or shift"
    for pattern in (
        r"(?:\S*/)?main\.c:(\d+):\d+: (?:fatal )?error: (.*)",
        r"error: \S*main\.c:(\d+):\d+: (.*)",
    ):
        for line in lines:
            if match := re.match(pattern, line):
                header, number = source.origin(int(match[1]))
                return f"{header or 'C'} line {number}: {match[2]}; correct the C text"
    for line in lines:
        if match := re.match(r"(\S+):(\d+):\d+: (?:fatal )?error: (.*)", line):
            return f"{Path(match[1]).name} line {match[2]}: {match[3]}; correct the C text"
    if any("kernel headers" in line or "kheaders" in line for line in lines):
        return "bcc cannot find the kernel headers; install the distribution's linux-headers package"
    for line in lines:
        if match := re.match(r"could not open bpf map: (\w+), error: (.*)", line):
            remedy = (
                "correct its sizes"
                if match[2] == os.strerror(errno.EINVAL)
                else "raise the limits of this process (ulimit), or try again"
            )
            return f"the kernel cannot create map {match[1]}: {match[2]}; {remedy}"
    words = ("error", "could not", "cannot", "unable", "unsupported", "invalid")
    code = set(source.text.split("\n"))  # bcc prints this too
    causes = [line for line in lines if line not in code and any(word in line.lower() for word in words)]
    return f"bcc: {causes[0].strip()}; correct the C text" if causes else _NO_CAUSE


def _collect(lib: Any, module: int, text: str, lines: Mapping[str, Sequence[int]]) -> Program:
    for name in ("bpf_table_key_desc_id", "bpf_table_leaf_desc_id"):
        getattr(lib, name).restype = ctypes.c_char_p
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for name in ("bpf_table_fd_id", "bpf_table_key_size_id", "bpf_table_leaf_size_id"):
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # bcc does not declare these functions, so ctypes would pass the module's address as an int. On other threads than the first, the
    # address is larger than an int.
    lib.bpf_num_tables.restype = ctypes.c_size_t
    lib.bpf_num_tables.argtypes = [ctypes.c_void_p]
    definitions: dict[str, MapDefinition] = {}
    by_fd: dict[int, str] = {}
    lib.bpf_table_name.restype = ctypes.c_char_p
    lib.bpf_table_name.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for index in range(lib.bpf_num_tables(module)):
        name = lib.bpf_table_name(module, index).decode()
        by_fd[lib.bpf_table_fd_id(module, index)] = name
        definitions[name] = _definition(lib, module, index, name)
    codes: dict[str, tuple[Instruction, ...]] = {}
    for index in range(lib.bpf_num_functions(module)):
        name = lib.bpf_function_name(module, index).decode()
        start, size = (
            lib.bpf_function_start(module, name.encode()),
            lib.bpf_function_size(module, name.encode()),
        )
        codes[name] = decode(ctypes.string_at(start, size), lines.get(name, ()), by_fd)
    return _program(text, codes, definitions, lib.bpf_module_license(module).decode())


def _program(
    text: str,
    codes: Mapping[str, tuple[Instruction, ...]],
    definitions: Mapping[str, MapDefinition],
    license: str,
) -> Program:
    """Return the program of a text, given the code and the maps that a compiler made of it. Raises CompileError."""
    attached = points(text)
    others = dict.fromkeys(register_functions(headers.expand(text).text), "uprobe")
    functions: dict[str, BpfFunction] = {}
    for name, code in codes.items():
        function = BpfFunction(name, attached.get(name) or others.get(name, "host"), code)
        if function.point != "host":
            _check_relocations(function)
        functions[name] = function
    for name in attached:
        if name not in functions:
            raise CompileError(f"program {name} is static or inline; remove that from its declaration")
    program = Program(text, functions, definitions, license)
    _check_sides(program)
    return program


def install_clang() -> str:
    """Return the text of what to do if clang is missing."""
    from gpubpf.ebpf import clang

    return f"install clang, version {clang.OLDEST} or newer, or for ziglang's {how_to_install('ziglang')}"


def _compile_with_clang(text: str) -> Program:
    """Compile with clang alone. Raises CompileError."""
    from gpubpf.ebpf import clang

    path = clang.find()
    if path is None:
        raise CompileError(
            f"compiling a program requires root and bcc (python3-bpfcc), or clang; {install_clang()}"
        )
    source = headers.expand(text)
    functions, found = clang.compile_text(spell_out_increments(source.text), path, source.origin)
    definitions = {}
    for one in found:
        number = maps.kernel_type(one.kind)
        key_size = 0 if one.kind == "ringbuf" else one.key_size
        sizes = (key_size, one.leaf_size, one.entries, one.flags)
        definitions[one.name] = _described(one.name, number, one.key, maps.type_of(one.leaf), *sizes)
    codes = {}
    for function in functions:
        lines: list[int] = []
        for line in function.lines:  # an instruction of a header has the line before
            header, number = source.origin(line)
            lines.append(lines[-1] if (header or not number) and lines else number)
        codes[function.name] = decode(function.code, lines, function.maps)
    return _program(text, codes, definitions, "GPL")


def _check_sides(program: Program) -> None:
    """Raise CompileError if programs of both sides use a map, or if a host program uses what exists only on a GPU.

    A map is either in GPU memory or in the kernel. Shared arrays are in host memory, and parameters are copied to both sides.
    """
    on_device = {i.map: f.name for f in program.device_functions for i in f.instructions}
    for function in program.host_functions:
        for i in function.instructions:
            helper = HELPERS.get(i.imm) if i.opcode == JMP | CALL and i.src == 0 else None
            if helper is not None and not helper.in_kernel:
                raise CompileError(
                    f"C line {i.line}: {helper.name} exists only on a GPU, and {function.name} runs on the host;"
                    " see docs/device-programs.md for what it may call"
                )
            definition = program.maps.get(i.map or "")
            if definition is None or definition.kind in ("shared_array", "param"):
                continue
            if definition.name in on_device:
                raise CompileError(
                    f"map {definition.name} is used by {on_device[definition.name]} on the GPU and by {function.name}"
                    " on the host; declare it with GPU_SHARED_ARRAY"
                )
            if definition.kind in maps.DEVICE_KINDS:
                raise CompileError(
                    f"C line {i.line}: map {definition.name} is in GPU memory, which host program {function.name} cannot"
                    " access; declare it with GPU_SHARED_ARRAY"
                )


def _check_relocations(function: BpfFunction) -> None:
    """Raise CompileError if the code refers to another function or to constant data: bcc's loader does not resolve these."""
    for pc, i in enumerate(function.instructions):
        where = f"program {function.name}, C line {i.line}"
        if i.opcode == 0x85 and i.src == PSEUDO_CALL:
            raise CompileError(f"{where}: calls a function that is not inlined; make it static inline")
        if i.opcode == LD_IMM64 and i.src == 1 and i.map is None:
            raise CompileError(f"{where}: refers to a map that is not in this text; declare the map here")
        if i.opcode == LD_IMM64 and i.src > 1:
            raise CompileError(
                f"{where}, instruction {pc}: refers to a variable; use a map or an array on the stack"
            )
        # clang loads a number this way only if it needs more than 32 bits: anything else is an unresolved reference.
        if i.opcode == LD_IMM64 and i.map is None and signed(i.imm) == signed(i.imm, 32):
            raise CompileError(
                f"{where}: refers to a global variable or constant; use a map, or an array on the stack,"
                " and print with gpu_puts"
            )


def _definition(lib: Any, module: int, index: int, name: str) -> MapDefinition:
    def described(function: Any) -> Any:
        with contextlib.suppress(ValueError, TypeError):
            return json.loads(function(module, index))
        return None

    key = described(lib.bpf_table_key_desc_id)
    leaf = described(lib.bpf_table_leaf_desc_id)
    number = lib.bpf_table_type_id(module, index)
    kind = maps.kind_of(number)
    value_type = maps.type_of(leaf)
    value_size = lib.bpf_table_leaf_size_id(module, index)
    entries = lib.bpf_table_max_entries_id(module, index)
    if kind == "ringbuf":
        # The kernel's ring buffers have no record type. The text declares it, or it is the type of the records that the program sends.
        if value_type == "<u4":
            value_type = _event_type(lib, module, name) or value_type
        value_size = maps.type_size(value_type)
        entries = maps.PERF_BYTES if number == bpf_syscall.PERF_EVENT_ARRAY else entries
    sizes = (
        lib.bpf_table_key_size_id(module, index),
        value_size,
        entries,
        lib.bpf_table_flags_id(module, index),
    )
    return _described(name, number, key, value_type, *sizes)


def _described(
    name: str,
    number: int,
    key: Any,
    value_type: Any,
    key_size: int,
    value_size: int,
    entries: int,
    flags: int,
) -> MapDefinition:
    """Return the definition of a map.

    number: the kernel's type of map (enum bpf_map_type)
    key: the key's type as bcc describes it; it may mark a kind of map that the kernel does not have
    """
    kind = maps.kind_of(number)
    if isinstance(key, list) and key and key[0] in _KEY_KINDS:
        kind = _KEY_KINDS[key[0]]
        key = "int"
    return MapDefinition(
        name, kind, key_size, value_size, entries, maps.type_of(key), value_type, flags, number
    )


def _event_type(lib: Any, module: int, name: str) -> Any:
    """Return the type of the records that a program sends to BPF_PERF_OUTPUT or BPF_RINGBUF_OUTPUT; None if bcc did not record it."""
    members: list[list[Any]] = []
    for number in range(lib.bpf_perf_event_fields(module, name.encode())):
        field, _, kind = lib.bpf_perf_event_field(module, name.encode(), number).decode().partition("#")
        match = re.match(r"(.+?)((?: ?\[\d+\])*)$", kind)
        if match is None:
            return None
        dimensions = [int(n) for n in re.findall(r"\d+", match[2])]
        base = "unsigned int" if match[1].startswith("enum ") else match[1]
        members.append([field, base, dimensions] if dimensions else [field, base])
    return maps.type_of(["event", members, "struct"]) if members else None


def _rewritten(text: str, output: str) -> tuple[list[str], dict[int, int]]:
    """Return the lines of the C text as bcc rewrote it, and rewritten line → line of `text`, both from 1.

    bcc prints the rewritten text because of DEBUG_PREPROCESSOR.
    """
    rewritten = output.split("\n")
    # Some versions print the compiler's command line first; line 1 of the text is the guard that bcc puts before it.
    for number, line in enumerate(rewritten):
        if line.startswith("#if defined(BPF_LICENSE)"):
            rewritten = rewritten[number:]
            break
    original = text.split("\n")
    lines: dict[int, int] = {}
    import difflib  # imported here because the import is slow

    matcher = difflib.SequenceMatcher(None, original, rewritten, autojunk=False)
    for _, low, high, first, last in matcher.get_opcodes():
        for offset in range(last - first):
            if low < high:
                lines[first + offset + 1] = min(low + offset, high - 1) + 1
    return rewritten, lines


def _lines(source: ExpandedText, output: str) -> dict[str, list[int]]:
    """Return the C line of every instruction slot, by function. Instructions from a header get the last line of the text before them.

    bcc prints the instructions of each function below the lines of the rewritten text (DEBUG_SOURCE).
    """
    head, *parts = re.split(r"^Disassembly of function (\S+)\n", output, flags=re.M)
    rewritten, to_original = _rewritten(source.text, head)
    result: dict[str, list[int]] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=False):
        lines: list[int] = []
        current = 0
        for line in body.split("\n"):
            if match := re.match(r"; (.*) // Line +(\d+)\s*$", line):
                number = int(match[2])
                same = number <= len(rewritten) and rewritten[number - 1].strip() == match[1].strip()
                header, number = source.origin(to_original.get(number, 0))
                if same and number and not header:
                    current = number
            elif match := re.match(r"\s*(\d+):\t", line):
                while len(lines) <= int(match[1]):
                    lines.append(current)
                lines[int(match[1])] = current
        first_known = next((number for number in lines if number), 0)
        result[name] = [number or first_known for number in lines]
    return result


_INCREMENT = re.compile(r"\b(\w+)\s*\.\s*(?:atomic_)?increment\s*\(")


def spell_out_increments(text: str) -> str:
    """Replace `map.increment(key, n)` by an atomic addition, which also counts if several threads insert the key at the same time.

    bcc's own code reads, adds and writes back, which loses counts when threads run in parallel. Line numbers stay.
    """
    blanked = without_comments(text)
    out: list[str] = []
    at = 0
    while match := _INCREMENT.search(blanked, at):
        depth, end, comma = 1, match.end(), -1
        while end < len(blanked) and depth:
            char = blanked[end]
            depth += (char in "([{") - (char in ")]}")
            if char == "," and depth == 1 and comma < 0:
                comma = end
            end += 1
        if depth:
            break
        name = match[1]
        key = text[match.end() : comma if comma >= 0 else end - 1]
        amount = text[comma + 1 : end - 1] if comma >= 0 else "1"
        out.append(text[at : match.start()])
        # The key is copied unchanged: in practice, it does not contain another increment.
        out.append(
            f"({{ typeof({name}.key) _gpubpf_key = ({key}); typeof({name}.leaf) _gpubpf_zero = 0;"
            f" typeof({name}.leaf) *_gpubpf_leaf = {name}.lookup_or_try_init(&_gpubpf_key, &_gpubpf_zero);"
            f" if (_gpubpf_leaf) __sync_fetch_and_add(_gpubpf_leaf, ({amount})); }})"
        )
        at = end
    out.append(text[at:])
    return "".join(out)


def has_kernel_headers() -> bool:
    """Return whether bcc finds the kernel headers that it needs, if necessary those of another release with this module's help."""
    return _bcc_finds_headers() or bool(_header_packages())


def _bcc_finds_headers() -> bool:
    release = os.uname().release
    return (
        "BCC_KERNEL_SOURCE" in os.environ
        or Path(f"/lib/modules/{release}/build/include").exists()
        or Path(f"/lib/modules/{release}/source/include").exists()
        or Path("/sys/kernel/kheaders.tar.xz").exists()
    )


@contextlib.contextmanager
def _kernel_source() -> Iterator[None]:
    """Point bcc to installed headers of another kernel release, if it would not find headers itself."""
    if _bcc_finds_headers():
        yield
        return
    with contextlib.ExitStack() as stack:
        tree = _headers(stack)
        if tree is None:
            raise CompileError(f"bcc needs kernel headers, and /usr/src has none; {INSTALL_HEADERS}")
        os.environ["BCC_KERNEL_SOURCE"] = str(tree)
        try:
            yield
        finally:
            os.environ.pop("BCC_KERNEL_SOURCE", None)


def _header_packages() -> tuple[Path, ...]:
    """Return installed kernel headers: a complete tree, or both halves of Debian's (the rest and -common); () without any."""
    found = sorted(Path("/usr/src").glob("linux-headers-*"), reverse=True)
    for tree in found:
        if (tree / "include/linux/kconfig.h").exists() and (tree / "include/generated/autoconf.h").exists():
            return (tree,)
    for specific in found:
        common = specific.with_name(specific.name.rsplit("-", 1)[0] + "-common")
        if specific != common and (specific / "include/generated").exists() and common.exists():
            return specific, common
    return ()


def _headers(stack: contextlib.ExitStack) -> Path | None:
    """Return a complete tree of kernel headers: a package's, or symbolic links to both halves of Debian's."""
    import tempfile  # imported here because the import is slow

    match _header_packages():
        case (tree,):
            return tree
        case (specific, common):
            pass
        case _:
            return None
    arch = "arm64" if processor.NAME == processor.AARCH64 else "x86"
    parts = ("include", f"arch/{arch}/include")
    if (directory := cache.default().directory) is not None:
        with contextlib.suppress(OSError):  # the cache is full or damaged
            return _link_headers(directory / f"headers-{specific.name}", parts, common, specific)
    place = directories.temporary()
    try:
        temporary = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="gpubpf-headers-", dir=place))
        )
        return _link_headers(temporary, parts, common, specific)
    except OSError as error:
        raise CompileError(
            f"cannot link the kernel headers in {place}: {error.strerror};"
            " free the space or correct its permissions"
        ) from None


def _link_headers(merged: Path, parts: Iterable[str], common: Path, specific: Path) -> Path:
    """Make `merged` a tree of links to both halves, and correct existing links. Raises OSError."""
    for part in parts:
        (merged / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        halves = [half / part for half in (specific, common) if (half / part).exists()]
        for name, entry in {entry.name: entry for half in halves for entry in half.iterdir()}.items():
            link = merged / part / name
            if link.is_symlink() and os.readlink(link) == str(entry):
                continue
            link.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):  # another process was faster
                link.symlink_to(entry)
    return merged
