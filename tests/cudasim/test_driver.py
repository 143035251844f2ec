"""The driver of the embedded device, called as any program may: by symbol, by cuGetProcAddress, by cuda.bindings."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cudasim import generate
from cudasim_device import (
    CUDASIM,
    PROGRAMS,
    Driver,
    DriverError,
    cuda_include,
    libraries,
    nvcc,
    run,
    run_python,
)


def exported(name: str) -> set[str]:
    output = subprocess.run(
        ["nm", "-D", "--defined-only", str(libraries() / name)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in output.splitlines()}


def test_everything_that_the_headers_declare_is_exported() -> None:
    driver, runtime = exported("libcuda.so.1"), exported("libcudart.so.13")
    assert generate.driver_names(Path(cuda_include()))[0] <= driver
    assert {f"{name}@@libcudart.so.13" for name in generate.runtime_names(Path(cuda_include()))} <= runtime
    graphics = [generate.graphics_names(Path(cuda_include()), library) for library in ("cu", "cuda")]
    assert {"cuGraphicsGLRegisterBuffer", "cuGLGetDevices_v2"} <= graphics[0] <= driver
    assert "cudaGraphicsGLRegisterBuffer" in graphics[1]
    assert {f"{name}@@libcudart.so.13" for name in graphics[1]} <= runtime
    for (
        name
    ) in "cuLaunchKernel cuLaunchKernel_ptsz cuMemcpyHtoD_v2_ptds cuCtxCreate_v2 cuGetProcAddress".split():
        assert name in driver
    for name in "__cudaRegisterFatBinary __cudaLaunchKernel __cudaLaunchKernel_ptsz cudaMemcpy_ptds".split():
        assert f"{name}@@libcudart.so.13" in runtime
    assert all(name.startswith(("cu", "libcuda")) for name in driver)


def test_unsupported_functions_say_their_names() -> None:
    """Each says it once. The runtime also records the error."""
    code = """if True:
        import ctypes, sys
        cuda, runtime = (ctypes.CDLL(path) for path in sys.argv[1:])
        print(cuda.cuMemBatchDecompressAsync(None), cuda.cuMemBatchDecompressAsync(None), cuda.cuMemDiscardBatchAsync_ptsz())
        print(runtime.cudaLogsCurrent(None, 0), runtime.cudaGetLastError(), runtime.cudaGetLastError())
    """
    paths = [str(libraries() / name) for name in ("libcuda.so.1", "libcudart.so.13")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    assert done.stdout == "801 801 801\n801 801 0\n"
    assert done.stderr.splitlines() == [
        f"cudasim: {name} is not supported"
        for name in ("cuMemBatchDecompressAsync", "cuMemDiscardBatchAsync", "cudaLogsCurrent")
    ]


def test_nothing_but_the_system_is_needed() -> None:
    for name in ("libcuda.so.1", "libcudart.so.13"):
        output = subprocess.run(
            ["readelf", "-d", str(libraries() / name)], capture_output=True, text=True, check=True
        ).stdout
        needed = set(re.findall(r"NEEDED.*\[(.+)\]", output))
        assert all(re.match(r"(libc|libm|libdl|libpthread|libstdc\+\+|ld-linux.*)\.so", n) for n in needed), (
            needed
        )


def test_make_is_quiet_when_nothing_is_to_do() -> None:
    libraries()
    done = subprocess.run(
        ["make", "--silent", "-C", str(CUDASIM)], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


def test_entry_points_by_name_and_version() -> None:
    cu = Driver(start=False)

    def find(name: bytes, version: int, flags: int = 0) -> tuple[int, int]:
        function, status = ctypes.c_void_p(), ctypes.c_int(-1)
        cu.cuGetProcAddress_v2(
            name, ctypes.byref(function), version, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        return function.value or 0, status.value

    def address(name: str) -> int:
        return ctypes.cast(getattr(cu.library, name), ctypes.c_void_p).value or 0

    assert find(b"cuLaunchKernel", 13000) == (address("cuLaunchKernel"), 0)
    assert find(b"cuLaunchKernel", 13000, 2) == (address("cuLaunchKernel_ptsz"), 0)
    assert find(b"cuMemAlloc", 13000, 2) == (address("cuMemAlloc_v2"), 0)
    assert find(b"cuMemcpyHtoD", 12000, 2) == (address("cuMemcpyHtoD_v2_ptds"), 0)
    assert find(b"cuCtxCreate", 12000) == (address("cuCtxCreate_v3"), 0)
    assert find(b"cuCtxCreate", 13000) == (address("cuCtxCreate_v4"), 0)
    assert find(b"cuLibraryLoadData", 11000) == (0, 2)  # not yet in that version
    assert find(b"cuNoSuchThing", 13000) == (0, 1)
    function = ctypes.c_void_p()
    assert (
        cu.status("cuGetProcAddress_v2", b"cuInit", ctypes.byref(function), 99000, ctypes.c_uint64(0), None)
        == 1
    )


def test_before_and_after_initialisation() -> None:
    assert run_python(
        """
        cu = Driver(start=False)
        print(cu.status("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4)))
        print(cu.status("cuInit", 1), cu.number("cuDriverGetVersion"))
        assert cu.status("cuProfilerStart") == 3
        cu.cuInit(0)
        print(cu.status("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4)))
        name = ctypes.create_string_buffer(100)
        cu.cuDeviceGetName(name, 100, 0)
        print(cu.number("cuDeviceGetCount"), name.value.decode())
        print(cu.number("cuDeviceGetAttribute", 75, 0), cu.number("cuDeviceGetAttribute", 76, 0))
        print(cu.status("cuDeviceGet", ctypes.byref(ctypes.c_int()), 3))
        """,
        CUDASIM_DEVICES="3",
        CUDASIM_CC="8.6",
    ).splitlines() == ["3", "1 13000", "201", "3 cudasim embedded device (software)", "8 6", "101"]


def test_no_device() -> None:
    assert run_python('print(Driver(start=False).status("cuInit", 0))', CUDASIM_DEVICES="0").strip() == "100"


def test_launch_with_pointers_and_with_a_buffer() -> None:
    run_python(
        """
        cu = Driver()
        put = cu.function(cu.module(HEADER + PUT), "put")
        where = cu.memory(8)
        assert cu.status("cuProfilerStart") == cu.status("cuProfilerStop") == 0
        cu.launch(put, where, ctypes.c_int(41))
        assert cu.read(where) == [41]
        block = where.value.to_bytes(8, "little") + (43).to_bytes(4, "little")
        size = ctypes.c_size_t(len(block))
        extra = (ctypes.c_void_p * 5)(1, ctypes.cast(block, ctypes.c_void_p), 2,
                                      ctypes.cast(ctypes.pointer(size), ctypes.c_void_p), 0)
        cu.cuLaunchKernel(put, 1, 1, 1, 1, 1, 1, 0, None, None, extra)
        assert cu.read(where) == [43]
        cu.launch(put, where, ctypes.c_int(44), name="cuLaunchKernel_ptsz")
        cu.cuCtxSynchronize()
        assert cu.read(where) == [44]
        for shape in ({"grid": 0}, {"block": 1025}, {"shared": 300 << 10}):
            assert cu.launch_status(put, where, ctypes.c_int(1), **shape) == 1
        assert cu.status("cuLaunchKernel", put, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 1
        assert cu.launch_status(ctypes.c_void_p(0x1234), where) == 400
        offset, width = ctypes.c_size_t(), ctypes.c_size_t()
        cu.cuFuncGetParamInfo(put, ctypes.c_size_t(1), ctypes.byref(offset), ctypes.byref(width))
        assert (offset.value, width.value) == (8, 4)
        assert cu.status("cuFuncGetParamInfo", put, ctypes.c_size_t(2), ctypes.byref(offset), None) == 1
        name = ctypes.c_char_p()
        cu.cuFuncGetName(ctypes.byref(name), put)
        assert name.value == b"put"
        """
    )


def test_attributes_of_launches_work_or_are_refused_by_name(tmp_path: Path) -> None:
    """Those that are hints change nothing, such as .preferredClusterDim (11). No kernel can update another node (13)."""
    run_python(
        """
        cu = Driver()
        put = cu.function(cu.module(HEADER + PUT), "put")
        where = cu.memory(8)
        class Attribute(ctypes.Structure):
            _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]
        class Config(ctypes.Structure):
            _fields_ = [("shape", ctypes.c_uint * 7), ("stream", ctypes.c_void_p),
                        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)]
        def status(number, *values):
            value = ctypes.c_int(number)
            arguments = (ctypes.c_void_p * 2)(ctypes.addressof(where), ctypes.addressof(value))
            attribute = Attribute(number, 0, (ctypes.c_int * 16)(*values))
            config = Config((1, 1, 1, 1, 1, 1, 0), None, ctypes.pointer(attribute), 1)
            return cu.status("cuLaunchKernelEx", ctypes.byref(config), put, arguments, None)
        for hint in (0, 1, 5, 6, 8, 9, 10, 11, 14, 16):
            assert status(hint) == 0 and cu.read(where) == [hint]
        assert status(13, 0) == 0 and cu.read(where) == [13]
        cu.cuMemsetD32_v2(where, 7, ctypes.c_size_t(1))
        os.dup2(os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT), 2)
        assert status(13, 1) == 801 and cu.read(where) == [7]
        """,
        LOG=str(tmp_path / "log"),
    )
    assert "no kernel nodes that kernels update" in (tmp_path / "log").read_text()


def test_image_is_copied_and_errors_are_logged() -> None:
    run_python(
        """
        cu = Driver()
        image = ctypes.create_string_buffer((HEADER + PUT).encode())
        module = cu.handle("cuModuleLoadData", image)
        ctypes.memset(image, 0x78, len(image) - 1)
        where = cu.memory(4)
        cu.launch(cu.function(module, "put"), where, ctypes.c_int(9))
        assert cu.read(where) == [9]
        assert cu.status("cuModuleGetFunction", ctypes.byref(ctypes.c_void_p()), module, b"gone") == 500
        log = ctypes.create_string_buffer(500)
        options = (ctypes.c_int * 2)(5, 6)  # error log buffer and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 500)
        broken = (HEADER + PUT.replace("st.global.u32", "st.global.u32 st")).encode() + b"\\0"
        status = cu.status("cuModuleLoadDataEx", ctypes.byref(module), broken, 2, options, values)
        assert status == 218 and log.value, (status, log.value)
        assert cu.status("cuModuleLoadData", ctypes.byref(module), b"\\x7fELF" + bytes(100)) == 209
        assert cu.status("cuModuleLoadData", ctypes.byref(module), b"\\1\\2\\3\\4") == 200
        """
    )


def test_nothing_in_the_programs_directory_is_taken_for_the_translators(tmp_path: Path) -> None:
    for name in ("json", "hashlib", "cudasim"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    run_python(
        f"""
        os.chdir({str(tmp_path)!r})
        os.environ["CUDASIM_CACHE"] = {str(tmp_path / "cache")!r}
        cu = Driver()
        where = cu.memory(4)
        cu.launch(cu.function(cu.module(HEADER + PUT), "put"), where, ctypes.c_int(9))
        assert cu.read(where) == [9]
        """
    )


def test_damaged_fat_binaries_are_errors() -> None:
    run_python(
        """
        import struct
        cu = Driver()
        module = ctypes.c_void_p()
        text = (HEADER + PUT).encode()
        image = struct.pack("<HHIQIIHHI", 1, 0, 64, len(text), 0, 0, 0, 8, 70).ljust(64, b"\\0") + text
        for size, payload, status in ((len(image), None, 0), (1 << 60, None, 0), (1 << 60, 1 << 50, 200)):
            changed = image[:8] + struct.pack("<Q", payload or len(text)) + image[16:]
            fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, size) + changed + bytes(8192)
            assert cu.status("cuModuleLoadData", ctypes.byref(module), fatbin) == status, (size, payload)
        wrapper = struct.pack("<IIQQ", 0x466243B1, 1, 4096, 0)
        assert cu.status("cuModuleLoadData", ctypes.byref(module), wrapper) == 200
        """
    )


def test_a_kernel_with_an_unknown_instruction_cannot_be_launched() -> None:
    """The module loads and its other kernels run; the launch says why, once."""
    run_python(
        """
        cu = Driver()
        odd = ".visible .entry odd() { tcgen05.shift.cta_group::1.down [0]; ret; }"
        module = cu.module(HEADER + odd + PUT)
        where = cu.memory(4)
        log = os.memfd_create("log")
        stderr = os.dup(2)
        os.dup2(log, 2)
        for _ in range(2):
            odd = cu.function(module, "odd")
            assert cu.status("cuFuncLoad", odd) == 801
            assert cu.status("cuLaunchKernel", odd, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 801
        os.dup2(stderr, 2)
        text = os.pread(log, 1000, 0).decode()
        line = "PTX line 4: the embedded device does not support tcgen05.shift.cta_group::1.down"
        assert text == f"cudasim: kernel odd cannot run: {line}\\n", text
        cu.launch(cu.function(module, "put"), where, ctypes.c_int(9))
        assert cu.read(where) == [9]
        """
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("packing", ["none", "speed", "size"])  # plain, LZ4, zstd
def test_fat_binary_gives_the_best_ptx(packing: str, tmp_path: Path) -> None:
    path = tmp_path / "plugin.fatbin"
    targets = [
        f"-gencode=arch=compute_{cc},code={code}_{cc}"
        for cc, code in ((75, "compute"), (90, "compute"), (80, "sm"))
    ]
    command = [
        nvcc(),
        "-w",
        "-fatbin",
        f"-compress-mode={packing}",
        *targets,
        "-o",
        path,
        PROGRAMS / "plugin.cu",
    ]
    subprocess.run(list(map(str, command)), check=True)
    code = f"""
        cu = Driver()
        text = open({str(path)!r}, "rb").read()
        module = ctypes.c_void_p()
        status = cu.status("cuModuleLoadData", ctypes.byref(module), text)
        print(status or cu.number("cuFuncGetAttribute", 5, cu.function(module, "_Z8multiplyi")))
    """
    for cc, hostile, expected in (
        ("8.6", True, 75),
        ("9.0", False, 90),
        ("7.0", False, 75),
        ("7.0", True, 209),
    ):
        assert run_python(code, hostile, CUDASIM_CC=cc) == f"{expected}\n"


def test_library_kernels_and_variables() -> None:
    run_python(
        """
        cu = Driver()
        text = (HEADER + PUT + VARIABLES).encode() + b"\\0"
        library = cu.handle("cuLibraryLoadData", text, None, None, 0, None, None, 0)
        assert cu.number("cuLibraryGetKernelCount", library, kind=ctypes.c_uint) == 2
        kernel = cu.handle("cuLibraryGetKernel", library, b"total")
        function = cu.handle("cuKernelGetFunction", kernel)
        module = cu.handle("cuLibraryGetModule", library)
        assert cu.function(module, "total").value == function.value != kernel.value
        where = cu.memory(4)
        cu.launch(kernel, where)
        assert cu.read(where) == [18]
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        cu.cuLibraryGetGlobal(ctypes.byref(address), ctypes.byref(size), library, b"visible_counter")
        assert size.value == 4 and cu.read(address) == [5]
        cu.cuMemsetD32_v2(address, 100, ctypes.c_size_t(1))
        cu.launch(function, where)
        assert cu.read(where) == [113]
        # another context has variables of its own
        other = cu.handle("cuCtxCreate_v4", None, 0, 0)
        where = cu.memory(4)
        cu.launch(kernel, where)
        assert cu.read(where) == [18]
        assert cu.launch_status(function, where) == 400  # a function of the first context
        cu.cuCtxDestroy_v2(other)
        assert cu.number("cuKernelGetAttribute", 0, kernel, 0) == 1024
        cu.cuKernelSetAttribute(8, 70000, kernel, 0)
        assert cu.number("cuFuncGetAttribute", 8, function) == 70000
        cu.cuLibraryUnload(library)
        assert cu.status("cuFuncGetName", ctypes.byref(ctypes.c_char_p()), function) == 400
        """
    )


def test_a_module_is_unloaded_when_the_kernels_of_its_context_have_ended() -> None:
    """A kernel of another module may have the address of its variable, as the tools' copies of kernels have."""
    text = run_python(
        """
        cu = Driver()
        first = cu.module(HEADER + ".visible .global .u32 word;")
        second = cu.module(HEADER + '''
        .visible .entry count(.param .u64 where) {
            .reg .b64 %a; .reg .b32 %i; .reg .pred %p;
            ld.param.u64 %a, [where]; mov.u32 %i, 0;
            again: st.volatile.global.u32 [%a], %i; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 2000000; @%p bra again;
            ret;
        }''')
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        cu.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), first, b"word")
        cu.launch(cu.function(second, "count"), ctypes.c_void_p(address.value))
        cu.cuModuleUnload(first)
        print(cu.status("cuStreamQuery", None), cu.status("cuCtxSynchronize"))
        """
    )
    assert text.split() == ["0", "0"]


def test_errors_have_names_and_words() -> None:
    cu = Driver(start=False)
    text = ctypes.c_char_p()
    cu.cuGetErrorName(700, ctypes.byref(text))
    assert text.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    cu.cuGetErrorString(700, ctypes.byref(text))
    assert text.value == b"an illegal memory access was encountered"
    with pytest.raises(DriverError):
        cu.cuGetErrorName(12345, ctypes.byref(text))


def test_fork_before_and_after_initialisation() -> None:
    run_python(
        """
        import os
        child = os.fork()
        if child == 0:
            cu = Driver()
            os._exit(0 if cu.read(cu.memory(4)) else 1)
        assert os.waitpid(child, 0)[1] == 0
        cu = Driver()
        put, where = cu.function(cu.module(HEADER + PUT), "put"), cu.memory(4)
        child = os.fork()
        if child == 0:
            os._exit(cu.status("cuCtxSynchronize"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3  # not initialised there
        cu.launch(put, where, ctypes.c_int(4))
        assert cu.read(where) == [4]
        """
    )


def test_forks_and_programs_started_beside_launches() -> None:
    output = run_python(
        """
        import os, threading
        cu = Driver()
        text = HEADER + PUT.replace("st.global.u32", "red.global.add.u32")
        add, context, over = cu.function(cu.module(text), "put"), ctypes.c_void_p(), False
        cu.cuCtxGetCurrent(ctypes.byref(context))
        def work(found):
            cu.cuCtxSetCurrent(context)
            where, stream, launches = cu.memory(4), cu.handle("cuStreamCreate", 1), 0
            cu.cuMemsetD8_v2(where, 0, ctypes.c_size_t(4))
            cu.cuCtxSynchronize()  # or the stream would not wait for that
            while not over:
                cu.launch(add, where, ctypes.c_int(1), grid=8, stream=stream)
                cu.cuStreamSynchronize(stream)
                launches += 1
            found.append((cu.read(where)[0], launches))
        found = []
        threads = [threading.Thread(target=work, args=[found]) for _ in range(2)]
        for t in threads: t.start()
        for i in range(100):
            if i % 4 == 0:
                child = os.posix_spawn("/bin/true", ["true"], {})  # as vfork does it
            elif (child := os.fork()) == 0:
                os.execv("/bin/true", ["true"]) if i % 2 else os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        over = True
        for t in threads: t.join()
        print(all(launches and sum == 8 * launches for sum, launches in found), len(found))
        """
    )
    assert output == "True 2\n"


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for CUDA_INJECTION64_PATH that asks the driver something and counts how often it is called."""
    folder = tmp_path_factory.mktemp("injection")
    source = folder / "injection.c"
    source.write_text(
        """
        #include <dlfcn.h>
        #include <stdio.h>
        int InitializeInjection(void) {
            void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
            int (*init)(unsigned) = dlsym(driver, "cuInit");
            int (*count)(int *) = dlsym(driver, "cuDeviceGetCount");
            int devices = -1;
            int again = init(0), status = count(&devices);
            fprintf(stderr, "injected %d %d %d\\n", again, status, devices);
            return 1;
        }
        """
    )
    library = folder / "injection.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def test_injection(injected: Path) -> None:
    code = "import ctypes; l = ctypes.CDLL('libcuda.so.1'); print(l.cuInit(0), l.cuInit(0))"
    done = run([sys.executable, "-c", code], CUDA_INJECTION64_PATH=str(injected))
    assert (done.stdout, done.stderr) == ("0 0\n", "injected 0 0 1\n")
    done = run([sys.executable, "-c", code], CUDA_INJECTION64_PATH="/nonexistent.so")
    assert done.stdout == "0 0\n" and done.stderr.count("\n") == 1 and "/nonexistent.so" in done.stderr


def test_two_copies_of_the_driver_in_a_process(tmp_path: Path) -> None:
    """The dynamic linker takes a library for the one that it has loaded by the same path. Both load from files in memory."""
    copy = shutil.copy(libraries() / "libcuda.so.1", tmp_path / "libcuda.so.1")
    printed = run_python(
        f"""
        for path, name in (str(libraries() / "libcuda.so.1"), "one"), ({str(copy)!r}, "two"):
            driver = ctypes.CDLL(path)
            context, module, function = (ctypes.c_void_p() for _ in range(3))
            text = f".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry {{name}}() {{{{ ret; }}}}\\n"
            print(
                driver.cuInit(0),
                driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0),
                driver.cuModuleLoadData(ctypes.byref(module), text.encode()),
                driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            )
        """,
        CUDASIM_PYTHON=sys.executable,
        CUDASIM_PYTHONPATH=str(CUDASIM.parent),
    )
    assert printed == "0 0 0 0\n" * 2


def test_cuda_bindings() -> None:
    pytest.importorskip("cuda.bindings")
    run_python(
        """
        import numpy
        from cuda.bindings import driver

        def check(result):
            assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
            return result[1] if len(result) == 2 else result[1:]

        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(0))
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
        module = check(driver.cuModuleLoadData((HEADER + PUT).encode()))
        put = check(driver.cuModuleGetFunction(module, b"put"))
        where = check(driver.cuMemAlloc(4))
        stream = check(driver.cuStreamCreate(0))
        arguments = ((where, 77), (None, ctypes.c_int))
        check(driver.cuLaunchKernel(put, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
        check(driver.cuStreamSynchronize(stream))
        host = numpy.zeros(1, numpy.int32)
        check(driver.cuMemcpyDtoH(host.ctypes.data, where, 4))
        assert host[0] == 77
        check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        arguments = ((where, 78), (None, ctypes.c_int))
        check(driver.cuLaunchKernel(put, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
        graph = check(driver.cuStreamEndCapture(stream))
        execution = check(driver.cuGraphInstantiate(graph, 0))
        check(driver.cuGraphLaunch(execution, stream))
        check(driver.cuStreamSynchronize(stream))
        check(driver.cuMemcpyDtoH(host.ctypes.data, where, 4))
        assert host[0] == 78
        """
    )


def test_a_segmentation_fault_that_was_sent_ends_the_program() -> None:
    code = """
        import os, signal
        cu = Driver()
        word = cu.memory(4)
        cu.launch(cu.function(cu.module(HEADER + PUT), "put"), word, ctypes.c_int(1))
        cu.cuCtxSynchronize()
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGSEGV)
            os._exit(0)
        print(os.waitpid(child, 0)[1] & 127)
    """
    assert run_python(code) == "11\n"


HOSTILE = pytest.mark.parametrize("hostile", [False, True], ids=["kind", "hostile"])


@HOSTILE
def test_registered_mappings_serve_kernels_and_streams(hostile: bool) -> None:
    run_python(
        """
        import mmap, os
        cu = Driver()
        file = os.memfd_create("shared")
        os.ftruncate(file, 8192)
        mapping = mmap.mmap(file, 8192)
        words = (ctypes.c_uint64 * 1024).from_buffer(mapping)
        size = ctypes.c_size_t(8192)
        cu.cuMemHostRegister_v2(words, size, 2)
        assert cu.status("cuMemHostRegister_v2", words, size, 2) == 712
        where = cu.handle("cuMemHostGetDevicePointer_v2", words, 0)
        put = cu.function(cu.module(HEADER + PUT), "put")
        stream, other = (cu.handle("cuStreamCreate", 1) for _ in range(2))
        at = lambda index: ctypes.c_void_p(where.value + 8 * index)
        value = ctypes.c_uint64
        # the stream waits for what the host writes, the other for what the stream writes
        cu.cuStreamWaitValue64_v2(stream, at(0), value(5), 1)
        cu.launch(put, at(1), ctypes.c_int(7), stream=stream)
        cu.cuStreamWriteValue64_v2(stream, at(2), value(2**40), 0)
        cu.cuStreamWaitValue64_v2(other, at(2), value(2**40), 0)
        cu.cuStreamWriteValue32_v2_ptsz(other, at(3), ctypes.c_uint32(9), 0)
        assert cu.status("cuStreamQuery", other) == 600 and words[1] == 0
        words[0] = 5
        cu.cuStreamSynchronize(other)
        assert list(words[:4]) == [5, 7, 2**40, 9] and os.pread(file, 1, 8) == b"\\x07"
        # several at once; in a capture they are a node
        batch = (ctypes.c_uint64 * 12)(4, at(4).value, 44, 0, 0, 0, 5, at(5).value, 55, 0, 0, 0)
        batch[0], batch[6] = 2, 5  # write 32, write 64
        cu.cuStreamBeginCapture_v2(stream, 0)
        cu.cuStreamBatchMemOp_v2(stream, 2, batch, 0)
        graph = ctypes.c_void_p()
        cu.cuStreamEndCapture(stream, ctypes.byref(graph))
        replay = cu.handle("cuGraphInstantiateWithFlags", graph, value(0))
        assert words[4] == 0
        cu.cuGraphLaunch(replay, stream)
        cu.cuStreamSynchronize(stream)
        assert list(words[4:6]) == [44, 55]
        assert cu.status("cuStreamWriteValue64_v2", stream, ctypes.c_void_p(where.value + 8190), value(0), 0) == 1
        assert cu.status("cuStreamWriteValue64_v2", stream, ctypes.c_void_p(where.value + 8192), value(0), 0) == 1
        cu.cuMemHostUnregister(words)
        assert cu.status("cuMemHostUnregister", words) == 713
        assert cu.status("cuStreamWriteValue64_v2", stream, at(0), value(0), 0) == 1
        cu.launch(put, at(1), ctypes.c_int(8))
        assert cu.status("cuCtxSynchronize") == 700
        """,
        hostile,
    )


def test_some_queries_of_a_captured_stream_end_its_capture() -> None:
    """As an H200 with driver 580 answered (script/gpu/questions/waiting.py); unloading and waiting for a stream count as unsafe."""
    run_python(
        """
        cu = Driver()
        context, flags, number, priority = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint64(), ctypes.c_int()
        private, unloaded = cu.handle("cuStreamCreate", 1), cu.module(HEADER + PUT)
        calls = (
            ("cuStreamGetCtx", context, True), ("cuStreamGetPriority", priority, True),
            ("cuStreamGetFlags", flags, False), ("cuStreamGetId", number, False),
        )
        def capture(mode, name, *arguments):
            stream = cu.handle("cuStreamCreate", 1)
            cu.cuStreamBeginCapture_v2(stream, mode)
            status = cu.status(name, *(arguments or (stream,)))
            graph = ctypes.c_void_p()
            return status, cu.status("cuStreamEndCapture", stream, ctypes.byref(graph))
        for mode in (0, 1, 2):
            for name, out, good in calls:
                stream = cu.handle("cuStreamCreate", 1)
                cu.cuStreamBeginCapture_v2(stream, mode)
                assert cu.status(name, stream, ctypes.byref(out)) == (0 if good else 900), name
                graph = ctypes.c_void_p()
                assert cu.status("cuStreamEndCapture", stream, ctypes.byref(graph)) == (0 if good else 901), name
                assert cu.status(name, stream, ctypes.byref(out)) == 0
        assert capture(1, "cuStreamSynchronize", private) == (900, 901)
        assert capture(2, "cuStreamSynchronize", private) == (0, 0)
        assert capture(0, "cuModuleUnload", unloaded) == (900, 901)
        assert capture(2, "cuModuleUnload", unloaded) == (0, 0)
        """
    )


@HOSTILE
def test_kernel_nodes_are_read_as_they_were_given(hostile: bool) -> None:
    """A function as a function, a kernel as a kernel with its context; to older callers always a function."""
    run_python(
        """
        cu = Driver()
        library = cu.handle("cuLibraryLoadData", (HEADER + PUT).encode() + b"\\0", None, None, 0, None, None, 0)
        kernel = cu.handle("cuLibraryGetKernel", library, b"put")
        function = cu.handle("cuKernelGetFunction", kernel)
        class Parameters(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
            _fields_ = [("func", ctypes.c_void_p), ("shape", ctypes.c_uint * 7), ("parameters", ctypes.c_void_p),
                        ("extra", ctypes.c_void_p), ("kern", ctypes.c_void_p), ("ctx", ctypes.c_void_p)]
        where, value = cu.memory(4), ctypes.c_int(6)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(where), ctypes.addressof(value))
        graph = cu.handle("cuGraphCreate", 0)
        read, old = Parameters(), Parameters()
        for func, kern in ((function.value, None), (None, kernel.value)):
            given = Parameters(func, (1, 1, 1, 1, 1, 1, 0), ctypes.addressof(arguments), None, kern, None)
            node = cu.handle("cuGraphAddKernelNode_v2", graph, None, ctypes.c_size_t(0), ctypes.byref(given))
            for _ in range(2):
                cu.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(read))
                assert (read.func, read.kern) == (func, kern)
                assert read.ctx == (cu.context.value if kern else None)
                cu.cuGraphKernelNodeGetParams(node, ctypes.byref(old))
                assert old.func == function.value and not old.kern
                cu.cuGraphKernelNodeSetParams_v2(node, ctypes.byref(read))  # its own arguments
            cu.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(read))
            pointers = ctypes.cast(read.parameters, ctypes.POINTER(ctypes.POINTER(ctypes.c_int)))
            assert pointers[1][0] == 6
        given.kern = 0x1234
        assert cu.status("cuGraphKernelNodeSetParams_v2", node, ctypes.byref(given)) == 400
        cu.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(read))
        assert read.kern == kernel.value
        replay = cu.handle("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))
        cu.cuGraphLaunch(replay, None)
        assert cu.read(where) == [6]
        """,
        hostile,
    )


@HOSTILE
def test_a_green_context_shares_the_primary_context(hostile: bool) -> None:
    """Modules, memory and streams. It retains the primary context; what is left of it cannot be used after its end."""
    run_python(
        """
        cu = Driver()
        class Resource(ctypes.Structure):  # CUdevResource
            _fields_ = [("type", ctypes.c_int), ("padding", ctypes.c_ubyte * 92), ("sm", ctypes.c_uint * 12)]
        def of(name, stream, *more):
            made = ctypes.c_void_p()
            getattr(cu, name)(stream, ctypes.byref(made), *more)
            return made.value
        everything, parts, rest = Resource(), (Resource * 9)(), Resource()
        cu.cuDeviceGetDevResource(0, ctypes.byref(everything), 1)
        smallest = everything.sm[1]
        number = ctypes.c_uint(9)
        cu.cuDevSmResourceSplitByCount(parts, ctypes.byref(number), ctypes.byref(everything), ctypes.byref(rest), 0, 1)
        assert number.value == everything.sm[0] // smallest and parts[0].sm[0] == smallest
        assert number.value * smallest + rest.sm[0] == everything.sm[0]
        too_many = everything.sm[0] + 1
        assert cu.status("cuDevSmResourceSplitByCount", None, ctypes.byref(number), ctypes.byref(everything), None, 0, too_many) == 1
        green = cu.handle("cuGreenCtxCreate", cu.handle("cuDevResourceGenerateDesc", parts, 2), 0, 1)
        cu.cuGreenCtxGetDevResource(green, ctypes.byref(rest), 1)
        assert rest.sm[0] == 2 * smallest
        put, where = cu.function(cu.module(HEADER + PUT), "put"), cu.memory(4)
        converted = cu.handle("cuCtxFromGreenCtx", green)
        cu.cuCtxSetCurrent(converted)
        assert cu.handle("cuCtxGetCurrent").value == converted.value != cu.context.value
        stream = cu.handle("cuGreenCtxStreamCreate", green, 1, 0)
        for value, used in ((5, None), (6, stream), (7, cu.handle("cuStreamCreate", 1))):
            cu.launch(put, where, ctypes.c_int(value), stream=used)
            cu.cuCtxSynchronize()
            assert cu.read(where) == [value]
            assert of("cuStreamGetCtx", used) == converted.value
            found = ctypes.c_void_p()
            assert of("cuStreamGetCtx_v2", used, ctypes.byref(found)) == cu.context.value
            assert found.value == of("cuStreamGetGreenCtx", used) == green.value
        cu.cuCtxSetCurrent(cu.context)
        assert of("cuStreamGetCtx", None) == cu.context.value and not of("cuStreamGetGreenCtx", None)
        active = ctypes.c_int()
        cu.cuDevicePrimaryCtxRelease_v2(0)  # the green context still has it
        cu.cuDevicePrimaryCtxGetState(0, ctypes.byref(ctypes.c_uint()), ctypes.byref(active))
        assert active.value and cu.read(where) == [7]
        cu.cuCtxSetCurrent(converted)
        cu.cuGreenCtxDestroy(green)
        cu.cuDevicePrimaryCtxGetState(0, ctypes.byref(ctypes.c_uint()), ctypes.byref(active))
        assert not active.value
        assert cu.status("cuCtxSynchronize") == 709
        assert cu.status("cuCtxSetCurrent", converted) == 201
        """,
        hostile,
    )
