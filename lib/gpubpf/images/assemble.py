"""Assemble PTX into a cubin with ptxas, or with nvJitLink if ptxas is missing, and read each kernel's resource use.

The application's own ptxas options come with its PTX (FatbinImage.options). Without them, a kernel built for 32 registers would get as
many as ptxas chooses, and its large blocks would fail to launch. The options are as untrusted as the PTX. Only options that affect the
generated code are passed on, and never through a shell.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeAlias

from gpubpf import cache
from gpubpf.errors import AssembleError, ImageError
from gpubpf.images import fatbin, yields
from gpubpf.kernel import privileges
from gpubpf.process import children
from gpubpf.process.children import Limits
from gpubpf.ptx.symbols import DEVICE_RUNTIME, FUNCTION
from gpubpf.record import Record, asdict, field

GENERATIONS = (70, 75, 80, 90, 100, 110, 120)  # compute capabilities; Turing is 7.5
# Tegra GPUs. Their code does not run on desktop GPUs of the same major number, or vice versa (CUDA programming guide, "Binary
# Compatibility").
_TEGRA = ((7, 2), (8, 7), (10, 1), (11, 0))
_STAGE = "assemble"
INSTALL = "install the CUDA toolkit, or nvidia-cuda-nvcc or nvidia-nvjitlink from PyPI"
_TIMEOUT = 600  # seconds: large template libraries take minutes
_ENTRIES = "--entry"  # an option of ptxas; nvJitLink always compiles all kernels
_LONGEST_LIST = 1 << 16  # bytes; Linux limits an argument to 128 KiB (MAX_ARG_STRLEN)

# Options that affect the generated code (ptxas --help), short and long, with the pattern of their values. None: no value.
_NUMBER, _CACHING, _BOOLEAN = r"\d{1,4}|archmax|archmin", r"c[agsvb]|wb|wt|lu", r"true|false"
_STEERING: dict[str, str | None] = {
    **dict.fromkeys(("-maxrregcount", "--maxrregcount", "-func-maxrregcount"), _NUMBER),
    **dict.fromkeys(("--device-function-maxrregcount", "-minnctapersm", "--minnctapersm"), _NUMBER),
    **dict.fromkeys(("-O", "--opt-level", "-regUsageLevel", "--register-usage-level"), r"\d{1,2}"),
    **dict.fromkeys(("-maxntid", "--maxntid"), r"[\d,]{1,20}"),
    **dict.fromkeys(("-Ofc", "--Ofast-compile"), r"0|min|mid|max"),
    **dict.fromkeys(("-dlcm", "--def-load-cache", "-dscm", "--def-store-cache"), _CACHING),
    **dict.fromkeys(("-flcm", "--force-load-cache", "-fscm", "--force-store-cache"), _CACHING),
    **dict.fromkeys(("-fmad", "--fmad"), _BOOLEAN),
    **dict.fromkeys(("-allow-expensive-optimizations", "--allow-expensive-optimizations"), _BOOLEAN),
    **dict.fromkeys(("-device-stack-protector", "--device-stack-protector"), _BOOLEAN),
    **dict.fromkeys(("-g", "--device-debug", "-lineinfo", "--generate-line-info"), None),
    **dict.fromkeys(("-suppress-debug-info", "--suppress-debug-info"), None),
    **dict.fromkeys(("-no-bb-merge", "--dont-merge-basicblocks", "-ret-end", "--return-at-end"), None),
    **dict.fromkeys(("-disable-optimizer-consts", "--disable-optimizer-constants"), None),
    **dict.fromkeys(("-opt-fp-atomics", "--optimize-float-atomics"), None),
    **dict.fromkeys(("-override-directive-values", "--override-directive-values"), None),
    **dict.fromkeys(("-make-errors-visible-at-exit", "--make-errors-visible-at-exit"), None),
    **dict.fromkeys(("-legacy-bar-warp-wide-behavior", "--legacy-bar-warp-wide-behavior"), None),
}


class Target(Record):
    """The device to generate code for."""

    device: str  # "gpu" or "sim": the embedded device
    cc: tuple[int, int] = (9, 0)  # compute capability
    driver: int = 0  # its driver's CUDA version, such as 12; 0: unknown
    release: str = ""  # preferred ptxas release, such as "12.8"; "": the first suitable one


class KernelResources(Record):
    """The resources that one kernel needs, as printed by `ptxas -v`: 32-bit registers per thread; everything else in bytes.

    For a device function that is not inlined, only the stack and the spills are known.
    """

    registers: int
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0  # for the deepest call chain
    shared: int = 0  # static
    constant: int = 0


class Assembled(Record):
    """An assembled module: the code that the device loads, and its functions' resources."""

    cubin: bytes = field(repr=False)  # for the embedded device: PTX, which it loads directly
    functions: dict[str, KernelResources]  # by mangled name; empty for the embedded device
    ignored: tuple[str, ...] = ()  # the application's options that were not passed on
    advisories: tuple[str, ...] = ()  # "C7508: Potential Performance Loss: …", for any kernel


def assemble(ptx: str, target: Target, options: str = "") -> Assembled:
    """Assemble `ptx` into the image that `target` loads. The embedded device loads PTX, so nothing is assembled for it.

    `options`: the application's own ptxas options. Raises AssembleError with the message of ptxas.
    """
    passed, ignored = steering(options)
    if target.device == "sim":
        return Assembled(_encode(ptx), {}, ignored)
    cubin, functions, advisories = _assemble(ptx, target, passed)
    return Assembled(cubin, functions, ignored, advisories)


def assemble_patches(ptx: str, target: Target) -> bytes:
    """Return the image of patches for NVIDIA's Compute Sanitizer API: functions without a kernel. Raises AssembleError."""
    if target.device == "sim":
        return _encode(ptx)
    return _assemble(ptx, target, ("--compile-as-tools-patch",))[0]


def for_each_generation(ptx: str, driver: int) -> Iterator[tuple[int, bytes]]:
    """Yield compute capabilities (90 for 9.0) and cubins of `ptx` for them, where an assembler is available.

    A cubin runs on its GPU and on later ones with the same major number. driver: as in Target.
    """
    for cc in GENERATIONS:
        with contextlib.suppress(AssembleError, OSError):  # OSError: ptxas was removed after it was found
            yield cc, assemble(ptx, Target("gpu", divmod(cc, 10), driver)).cubin


def registers(
    ptx: str, target: Target, options: str = "", kernels: Collection[str] = (), niceness: int = 0
) -> dict[str, KernelResources] | None:
    """Return the resources that kernels of `ptx` need on a GPU; None without an assembler, or if it rejects the PTX.

    options: the application's own ptxas options
    kernels: the kernels to compile, which saves the time for others; () for all. The result may contain other kernels, too.
    niceness: added to this process's niceness for ptxas, if nothing waits for the result

    Raises TemporaryFailure.
    """
    try:
        return _assemble(ptx, target, (*steering(options)[0], *_only(kernels)), niceness)[1]
    except TemporaryFailure:
        raise
    except AssembleError:
        return None


def with_lines(ptx: str, target: Target, options: str, kernels: Collection[str]) -> bytes | None:
    """Return a cubin that maps its code to lines of `ptx` (`compiled_sums`); None without an assembler, or if it rejects the PTX.

    options, kernels: as in `registers`. The PTX may lack a function that only other kernels call.

    Raises TemporaryFailure.
    """
    # With --compile-only, ptxas accepts that another kernel calls a missing function.
    for further in ((), ("--compile-only",)):
        try:
            return _assemble(ptx, target, (*steering(options)[0], "-lineinfo", *further, *_only(kernels)))[0]
        except TemporaryFailure:
            raise
        except AssembleError:
            continue
    return None


def _only(kernels: Collection[str]) -> tuple[str, ...]:
    names = ",".join(sorted(kernels))
    return (f"{_ENTRIES}={names}",) if names and len(names) < _LONGEST_LIST else ()


def steering(options: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options to pass on, one argument each, and the ignored options."""
    passed: list[str] = []
    ignored: list[str] = []
    words = iter(options.split())
    for word in words:
        name, equals, value = word.partition("=")
        if (joined := re.fullmatch(r"(-O)(\d)", name)) is not None:
            name, equals, value = "-O", "=", joined[2]
        allowed = _STEERING.get(name, "")
        if allowed is None and not equals:
            passed.append(name)
        elif allowed and (equals or (value := next(words, ""))) and re.fullmatch(allowed, value):
            passed.append(f"{name}={value}" if name != "-O" else f"-O{value}")
        else:
            ignored.append(word if equals or not allowed else f"{word} {value}".strip())
    return tuple(passed), tuple(ignored)


# A cubin, its kernels' resources, advisories.
_Made: TypeAlias = tuple[bytes, dict[str, KernelResources], tuple[str, ...]]

# A declaration of a function of the device runtime, as render() writes it. Such a module must be linked with libcudadevrt.a.
_OF_RUNTIME = rb"(?m)^\.extern \.func (?:\([^)]*\) )?" + DEVICE_RUNTIME.encode()


def _assemble(ptx: str, target: Target, options: tuple[str, ...], niceness: int = 0) -> _Made:
    """Return the result of the first assembler that supports the PTX version and the GPU, from the cache if possible.

    A driver loads cubins of its own CUDA version and of older ones ("CUDA Compatibility", minor version compatibility). Cubins of
    ptxas 13 have an ELF ABI version that CUDA 12 drivers reject. Raises AssembleError.
    """
    cc = target.cc
    data = _encode(ptx)
    image = fatbin.ptx_image(data)
    suffix = image.suffix if image is not None else ""
    refusals: list[AssembleError] = []
    newer: list[int] = []
    assemblers = _assemblers()
    if target.release:
        assemblers = iter(sorted(assemblers, key=lambda assembler: assembler.release != target.release))
    for assembler in assemblers:
        if not suits(assembler, target.driver):
            newer.append(assembler.version)
            continue
        for arch in _architectures(cc, suffix):
            try:
                return _run(assembler, data, arch, options, niceness)
            except _UnknownArchitecture as error:
                refusals.append(AssembleError(str(error)))
            except (_UnknownVersion, _CannotLoad) as error:
                refusals.append(AssembleError(str(error)))
                break
    if refusals:
        raise refusals[0]
    if newer:
        raise AssembleError(
            f"ptxas is of CUDA {min(newer)}, and the driver of CUDA {target.driver} does not load its code;"
            f" {install_for(target.driver)}"
        )
    raise AssembleError(f"ptxas is missing; {INSTALL}")


def install_for(driver: int) -> str:
    """Return the text of what to install if no assembler suits a driver of CUDA version `driver`."""
    return f"install nvidia-cuda-nvcc-cu{driver} from PyPI"


def _architectures(cc: tuple[int, int], suffix: str) -> list[str]:
    """Return the architectures to try for a GPU, best first. An older assembler may support an earlier GPU of the generation."""
    major, newest = cc
    alone = suffix == "a" or cc in _TEGRA
    minors = [m for m in range(newest, -1, -1) if m == newest or not (alone or (major, m) in _TEGRA)]
    return [f"sm_{major}{minor}{suffix}" for minor in minors]


def _run(
    assembler: Ptxas | NvJitLink, ptx: bytes, arch: str, options: tuple[str, ...], niceness: int
) -> _Made:
    """Return an assembler's result, from the cache if possible. Raises AssembleError. The cache also holds _REFUSALS."""
    store = cache.default()
    linking = " ".join(_identity(path) for path in assembler.linking()) if re.search(_OF_RUNTIME, ptx) else ""
    key = cache.key(_version(), assembler.identity, linking, arch, " ".join(options), ptx)
    kept = _unpack(store.get(_STAGE, key) or b"")
    if isinstance(kept, AssembleError):
        raise kept
    if kept is not None:
        return kept
    try:
        cubin, functions, advisories = assembler.run(ptx, arch, options, niceness)
        if FUNCTION.encode() in ptx:
            cubin = yields.without_yields(cubin)
        made = (cubin, functions, advisories)
    except _REFUSALS as error:
        store.put(_STAGE, key, json.dumps([type(error).__name__, str(error)]).encode())
        raise
    store.put(_STAGE, key, _pack(made))
    return made


def _identity(path: str) -> str:
    status = os.stat(path)
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


@functools.cache
def _version() -> str:
    """Return a cache key that changes with the code that parses and changes an assembler's output."""
    return cache.key_of_files([Path(__file__), Path(yields.__file__)])


def _encode(ptx: str) -> bytes:
    return ptx.encode("utf-8", "surrogateescape")


def _pack(made: _Made) -> bytes:
    cubin, functions, advisories = made
    header = [{name: asdict(needs) for name, needs in functions.items()}, advisories]
    return json.dumps(header).encode() + b"\n" + cubin


def _unpack(kept: bytes) -> _Made | AssembleError | None:
    """Return the result or the refusal in a cache file; None if it has neither."""
    header, _, cubin = kept.partition(b"\n")
    try:
        functions, advisories = json.loads(header)
        for refusal in _REFUSALS:
            if functions == refusal.__name__:
                return refusal(str(advisories))
        return (
            cubin,
            {name: KernelResources(**needs) for name, needs in functions.items()},
            tuple(map(str, advisories)),
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


class _UnknownVersion(AssembleError):
    """This assembler is older than the PTX. Another one may accept it."""


class _UnknownArchitecture(AssembleError):
    """This assembler is older than the GPU."""


_REFUSALS = (_UnknownArchitecture, _UnknownVersion)  # always the same


class TemporaryFailure(AssembleError):
    """The assembler could not be run, was killed, or gave no reason. It may succeed later."""


class _CannotLoad(TemporaryFailure):
    """This assembler cannot be loaded. Another one may work."""


# --- ptxas --------------------------------------------------------------------------------------------------

_ERROR = r"(?m)^ptxas (?:\S.*?, line (?P<line>\d+); )?(?:error|fatal)\s*: (?P<text>.*)$"
# ptxas reads input from a program, so its output is also untrusted: no pattern may take long.
_ENTRY = r"Compiling entry function '([^']+)' for '"
_PROPERTIES = r"Function properties for (.+)$"
_SPILLS = r"(\d{1,18}) bytes stack frame, (\d{1,18}) bytes spill stores, (\d{1,18}) bytes spill loads"
_USED = r"Used (\d{1,18}) registers"
_ADVISORY = r"\((C75\d\d)\) (.*)"
_NOT_LINKED = r"[Uu]ndefined reference to '([^']*)'"  # in nvlink's output
_THREADS_SINCE = (12, 8)  # the first release whose ptxas compiles kernels on all CPUs
_AMOUNT = r"(\d{1,18}) bytes (cumulative stack size|smem|cmem)"


class Ptxas(Record):
    """The assembler as a program, from the CUDA toolkit."""

    path: str

    @functools.cached_property
    def identity(self) -> str:
        """A part of the cache key. It changes with the file. Running ptxas for its version each time would be slower."""
        return f"ptxas {_identity(self.path)}"

    @property
    def release(self) -> str:
        """The CUDA release of this ptxas, such as "12.8"; "" if unknown."""
        return _ptxas_release(self.path)

    @property
    def version(self) -> int:
        """The CUDA version of this ptxas, such as 12; 0 if unknown."""
        return int(self.release.partition(".")[0] or 0)

    def run(self, ptx: bytes, arch: str, options: tuple[str, ...], niceness: int = 0) -> _Made:
        """Run ptxas, and nvlink if needed, without privileges, because the PTX is untrusted. Raises AssembleError."""
        linking = self.linking() if re.search(_OF_RUNTIME, ptx) else ()
        _remove_abandoned()
        return privileges.run_unprivileged(
            lambda: self._run(ptx, arch, options, niceness, linking), (self.path, *linking)
        )

    def linking(self) -> tuple[str, ...]:
        """Return the paths of nvlink and libcudadevrt.a. Raises AssembleError."""
        import shutil  # imported here because the import is slow

        beside = os.path.join(os.path.dirname(os.path.realpath(self.path)), "nvlink")
        nvlink = beside if _executable(beside) else shutil.which("nvlink")
        if nvlink is None:
            raise _CannotLoad("needs device linking, and nvlink is missing; install the CUDA toolkit")
        return nvlink, device_runtime(self.path)

    def _run(
        self, ptx: bytes, arch: str, options: tuple[str, ...], niceness: int, linking: tuple[str, ...]
    ) -> _Made:
        with children.temporary_directory() as directory:
            source, result = directory / "module.ptx", directory / "module.cubin"
            source.write_bytes(ptx)
            # 0: on all CPUs. The code of each kernel is the same, but their order in the cubin may differ.
            threads = ["-split-compile=0"] if _numbers(self.release) >= _THREADS_SINCE else []
            words = ["-v", f"-arch={arch}", *(["-c"] if linking else threads), *options, str(source)]
            talk = _run_program([self.path, *words], result, niceness)
            if linking:
                nvlink, library = linking
                linked = directory / "linked.cubin"
                _run_program([nvlink, f"-arch={arch}", str(result), library], linked, niceness)
                result = linked
            made = children.result(result, fatbin.LARGEST_FATBIN)
            return made, parse_verbose(talk), parse_advisories(talk)


@functools.cache
def _remove_abandoned() -> None:
    """Remove directories of tools that were killed, once."""
    with contextlib.suppress(OSError):
        children.remove_abandoned()


def _run_program(command: list[str], result: Path, niceness: int) -> str:
    """Run ptxas or nvlink, which writes the file `result`. Return what it prints. Raises AssembleError."""
    name = os.path.basename(command[0])
    cpus = os.cpu_count() or 1
    limits = Limits(children.half_of_memory(), fatbin.LARGEST_FATBIN, _TIMEOUT * cpus)
    try:
        done = children.run([*command, "-o", str(result)], result.parent, limits, _TIMEOUT, niceness)
    except subprocess.TimeoutExpired:
        raise AssembleError(f"{name} took more than {_TIMEOUT} s; leave this kernel out") from None
    except OSError as error:
        raise TemporaryFailure(
            f"cannot run {command[0]}: {error.strerror}; install the CUDA toolkit"
        ) from None
    if done.status == 0 and result.exists():
        return done.text
    if name != "nvlink":
        raise _refusal(done.text, done.status)
    found = re.search(_NOT_LINKED, done.text)
    cause = found[1] if found is not None else " ".join(done.text.split())[:200] or f"status {done.status}"
    raise AssembleError(f"needs device linking: {cause}")


def device_runtime(assembler: str) -> str:
    """Return the path of libcudadevrt.a, preferably of the assembler's own toolkit or packages. Raises AssembleError."""
    import glob  # imported here because the import is slow

    own = os.path.dirname(os.path.dirname(os.path.realpath(assembler)))
    homes = [home for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    homes += ["/usr/local/cuda", *sorted(glob.glob("/usr/local/cuda-*"), key=_version_in_path, reverse=True)]
    for root in (own, *homes):
        for place in ("lib", "lib64", "targets/*/lib", "../cuda_runtime/lib"):
            for path in glob.glob(f"{root}/{place}/libcudadevrt.a"):
                return path
    raise _CannotLoad("needs device linking, and libcudadevrt.a is missing; install the CUDA toolkit")


@functools.cache
def _ptxas_release(path: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=children.environment(),
            timeout=10,
        )
        if (found := re.search(rb"release (\d+\.\d+)", done.stdout)) is not None:
            return found[1].decode()
    return ""


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split(".") if number)


def _refusal(talk: str, status: int) -> AssembleError:
    """Return an exception for the first error that ptxas printed."""
    found = re.search(_ERROR, talk)
    if found is None:
        return TemporaryFailure(f"ptxas failed with status {status}; look at the PTX with --ptx")
    text = found["text"].strip()
    if "is not defined for option 'gpu-name'" in text:
        return _UnknownArchitecture(f"ptxas does not know this GPU: {text}; install a newer CUDA toolkit")
    if text.startswith("Unsupported .version"):
        return _UnknownVersion(f"ptxas is older than the PTX: {text}; install a newer CUDA toolkit")
    place = f" in line {found['line']}" if found["line"] else ""
    return AssembleError(f"ptxas rejects the PTX{place}: {text}; look at it with --ptx")


def parse_advisories(talk: str) -> tuple[str, ...]:
    """Return ptxas's advisories about slow code, without duplicates."""
    return tuple(dict.fromkeys(f"{number}: {text.strip()}" for number, text in re.findall(_ADVISORY, talk)))


def parse_verbose(talk: str) -> dict[str, KernelResources]:
    """Return the resources of each kernel, and of each device function that is not inlined, from the output of `ptxas -v`.

    ptxas may compile a device function once for each kernel that calls it. The compilation with the largest stack counts.
    """
    functions: dict[str, KernelResources] = {}
    spills: dict[str, tuple[int, int, int]] = {}
    entry = described = ""
    for line in talk.splitlines():
        if (found := re.search(_ENTRY, line)) is not None:
            entry = found[1]
        elif (found := re.search(_PROPERTIES, line)) is not None:
            described = found[1]
        elif (found := re.search(_SPILLS, line)) is not None:
            spills[described] = max(
                (int(found[1]), int(found[2]), int(found[3])), spills.get(described, (0, 0, 0))
            )
        elif entry and (found := re.search(_USED, line)) is not None:
            frame, stores, loads = spills.get(entry, (0, 0, 0))
            amounts: dict[str, int] = {}
            for size, what in re.findall(_AMOUNT, line):
                amounts[what] = amounts.get(what, 0) + int(size)
            functions[entry] = KernelResources(
                registers=int(found[1]),
                spill_stores=stores,
                spill_loads=loads,
                stack=amounts.get("cumulative stack size", frame),
                shared=amounts.get("smem", 0),
                constant=amounts.get("cmem", 0),
            )
            entry = ""
    for name, (frame, stores, loads) in spills.items():
        functions.setdefault(name, KernelResources(0, stores, loads, frame))
    return functions


# --- nvJitLink ----------------------------------------------------------------------------------------------


class NvJitLink(Record):
    """The assembler of ptxas as a library, called through its C interface (nvJitLink documentation, "API")."""

    path: str

    @functools.cached_property
    def identity(self) -> str:
        return f"nvJitLink {_identity(self.path)}"

    @functools.cached_property
    def release(self) -> str:
        """The CUDA release of this library, such as "12.8"; "0.0" if unknown, as before CUDA 12.3."""
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(self.path).nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    @property
    def version(self) -> int:
        """The CUDA version of this library, such as 12; 0 if unknown."""
        return int(self.release.partition(".")[0])

    def linking(self) -> tuple[str, ...]:
        """Return the path of libcudadevrt.a. Raises AssembleError."""
        return (device_runtime(self.path),)

    def run(self, ptx: bytes, arch: str, options: tuple[str, ...], niceness: int = 0) -> _Made:
        """Assemble in this process, whatever the `niceness`. Raises AssembleError."""
        try:
            library = ctypes.CDLL(self.path)
        except OSError as error:
            raise _CannotLoad(f"cannot load {self.path}: {error}; install the CUDA toolkit") from None
        # nvJitLink's own options have the same names as those of ptxas. The others go through -Xptxas.
        own = ("-maxrregcount", "-g", "-lineinfo")
        words = [f"-arch={arch}", "-verbose"]
        words += [
            word if name in own else f"-Xptxas={word}"
            for word in options
            if (name := word.partition("=")[0]) != _ENTRIES
        ]
        array = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        handle = ctypes.c_void_p()
        if library.nvJitLinkCreate(ctypes.byref(handle), ctypes.c_uint32(len(words)), array) != 0:
            raise _UnknownArchitecture(
                f"nvJitLink does not know {arch} or an option; install a newer CUDA toolkit"
            )
        try:
            ptx_input = 2  # NVJITLINK_INPUT_PTX
            size = ctypes.c_size_t(len(ptx) + 1)  # including the terminating zero
            status = library.nvJitLinkAddData(handle, ptx_input, ctypes.c_char_p(ptx), size, b"module.ptx")
            if status == 0 and re.search(_OF_RUNTIME, ptx):
                library_input = 6  # NVJITLINK_INPUT_LIBRARY
                (runtime,) = self.linking()
                status = library.nvJitLinkAddFile(handle, library_input, os.fsencode(runtime))
            if status == 0:
                status = library.nvJitLinkComplete(handle)
            if status != 0:
                raise _refusal(_log(library, handle, "Error"), status)
            data = _buffer(library, handle, "nvJitLinkGetLinkedCubinSize", "nvJitLinkGetLinkedCubin")
            talk = _log(library, handle, "Info")
            advisories = parse_advisories(talk)
            if any("setmaxnreg" in advisory for advisory in advisories):
                # nvJitLink always compiles for linking (--compile-only), but `setmaxnreg` needs a whole program.
                raise AssembleError(
                    "nvJitLink ignores setmaxnreg; install nvidia-cuda-nvcc from PyPI, for its ptxas"
                )
            return data, parse_verbose(talk) or _from_cubin(data), advisories
        finally:
            library.nvJitLinkDestroy(ctypes.byref(handle))


def _buffer(library: ctypes.CDLL, handle: ctypes.c_void_p, size_function: str, function: str) -> bytes:
    size = ctypes.c_size_t()
    if library[size_function](handle, ctypes.byref(size)) != 0:
        return b""
    data = ctypes.create_string_buffer(size.value + 1)
    return data.raw[: size.value] if library[function](handle, data) == 0 else b""


def _log(library: ctypes.CDLL, handle: ctypes.c_void_p, which: str) -> str:
    data = _buffer(library, handle, f"nvJitLinkGet{which}LogSize", f"nvJitLinkGet{which}Log")
    return data.rstrip(b"\0").decode("utf-8", "replace")


def _from_cubin(cubin: bytes) -> dict[str, KernelResources]:
    """Return the registers that a cubin states for its kernels, for use when the assembler printed nothing."""
    try:
        kernels = fatbin.kernels(cubin)
    except ImageError:
        return {}
    return {
        name: KernelResources(kernel.registers)
        for name, kernel in kernels.items()
        if kernel.registers is not None
    }


# --- finding assemblers -----------------------------------------------------------------------------------------


def _assemblers() -> Iterator[Ptxas | NvJitLink]:
    """Yield the installed assemblers, the preferred one first."""
    for path in _found(
        os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), os.environ.get("PATH", "")
    ):
        yield Ptxas(path)
    for path in _libraries():
        yield NvJitLink(path)


def installed() -> list[Ptxas | NvJitLink]:
    """Return the installed assemblers, the preferred one first."""
    return list(_assemblers())


def suits(assembler: Ptxas | NvJitLink, driver: int) -> bool:
    """Return whether a driver of CUDA version `driver`, such as 12, loads what an assembler makes. 0: unknown."""
    return not driver or assembler.version <= driver


def assemblers(target: Target) -> list[str]:
    """Return the identities of the installed assemblers, for cache keys: a new assembler may accept input that others rejected.

    Return [] for the embedded device.
    """
    found = []
    for assembler in _assemblers() if target.device == "gpu" else ():
        with contextlib.suppress(OSError):  # removed after it was found
            found.append(assembler.identity)
    return found


def find_ptxas() -> str | None:
    """Return the path of the preferred ptxas; None if none is installed."""
    return next((assembler.path for assembler in _assemblers() if isinstance(assembler, Ptxas)), None)


@functools.lru_cache(maxsize=4)
def _found(cuda_home: str, cuda_path: str, path: str) -> tuple[str, ...]:
    import glob  # imported here because the import is slow
    import shutil
    import sysconfig

    candidates = [os.path.join(home, "bin", "ptxas") for home in (cuda_home, cuda_path) if home]
    if (on_path := shutil.which("ptxas", path=path)) is not None:
        candidates.append(on_path)
    candidates += ["/usr/local/cuda/bin/ptxas"]
    candidates += sorted(glob.glob("/usr/local/cuda-*/bin/ptxas"), key=_version_in_path, reverse=True)
    for packages in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        candidates += sorted(glob.glob(f"{packages}/nvidia/*/bin/ptxas"), reverse=True)
        candidates += glob.glob(f"{packages}/triton/backends/nvidia/bin/ptxas")
    seen: dict[str, str] = {}
    for candidate in candidates:
        if _executable(candidate):
            seen.setdefault(os.path.realpath(candidate), candidate)
    return tuple(seen.values())


def _version_in_path(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


def _executable(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    if not os.access(path, os.X_OK) and "site-packages" in path:
        with contextlib.suppress(OSError):  # PyPI's wheels lack the executable bit
            os.chmod(path, 0o755)
    return os.access(path, os.X_OK)


def _libraries() -> list[str]:
    import glob  # imported here because the import is slow
    import sysconfig

    places = [f"{sysconfig.get_path('purelib')}/nvidia/*/lib", "/usr/local/cuda*/lib64"]
    return [
        path for place in places for path in sorted(glob.glob(f"{place}/libnvJitLink.so.*"), reverse=True)
    ]
