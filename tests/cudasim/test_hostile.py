"""Hostile mode: what a driver may do to a program, or to a tool inside it, it does."""

from __future__ import annotations

import pytest

from cudasim_device import run_python


def test_loads_and_allocations_wait_for_running_kernels() -> None:
    code = """
        import threading, time
        cu = Driver()
        spin = cu.function(cu.module(HEADER + SPIN + PUT), "spin")
        flag = cu.handle("cuMemHostAlloc", ctypes.c_size_t(4), 0)
        cell = ctypes.c_int.from_address(flag.value)
        cell.value = 0
        stream = cu.handle("cuStreamCreate", 1)
        cu.launch(spin, flag, stream=stream)
        end = threading.Timer(SECONDS, lambda: setattr(cell, "value", 1))
        end.start()
        WORK
        waited = cell.value == 1
        end.cancel()
        cell.value = 1
        cu.cuCtxSynchronize()
        print(waited)
    """
    for work in ("cu.module(HEADER + PUT)", "cu.memory(4)"):
        for hostile, seconds in ((True, "0.3"), (False, "30")):
            made = code.replace("WORK", work).replace("SECONDS", seconds)
            assert run_python(made, hostile) == f"{hostile}\n", work


def test_capture_forbids_loads_and_allocations() -> None:
    code = """
        cu = Driver()
        put = cu.function(cu.module(HEADER + PUT), "put")
        stream = cu.handle("cuStreamCreate", 1)
        module, library = ctypes.c_void_p(), ctypes.c_void_p()
        text = (HEADER + SPIN).encode() + b"\\0"
        for mode in range(3):  # global, thread-local, relaxed
            for call in (
                lambda: cu.status("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4)),
                lambda: cu.status("cuModuleLoadData", ctypes.byref(module), text),
                lambda: cu.status("cuLibraryLoadData", ctypes.byref(library), text, None, None, 0, None, None, 0),
            ):
                cu.cuStreamBeginCapture_v2(stream, mode)
                status = call()
                end = cu.status("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))
                print(mode, status, end)
    """
    refused, taken = ["900 901"] * 3, ["0 0"] * 3
    expected = [f"{m} {answer}" for m in (0, 1) for answer in refused] + [f"2 {answer}" for answer in taken]
    assert run_python(code, hostile=True).splitlines() == expected
    # A kind driver takes loads in capture, as CUDA 12.3 and later do; allocations never.
    kind = run_python(code, hostile=False).splitlines()
    assert kind[:3] == ["0 900 901", "0 0 0", "0 0 0"]


def test_waiting_for_a_context_ends_captures_in_it() -> None:
    code = """
        cu = Driver()
        stream = cu.handle("cuStreamCreate", 1)
        for mode in range(3):
            cu.cuStreamBeginCapture_v2(stream, mode)
            # Whatever this thread may do: the stream is a part of what is waited for.
            cu.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(2)))
            status = cu.status("cuCtxSynchronize")
            print(status, cu.status("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p())))
    """
    for hostile in (True, False):
        assert run_python(code, hostile=hostile) == "900 901\n" * 3


def test_a_context_must_not_end_while_a_thread_waits_for_it() -> None:
    code = """
        import threading, time
        cu = Driver()
        context = ctypes.c_void_p()
        cu.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
        flag = cu.handle("cuMemHostAlloc", ctypes.c_size_t(4), 0)
        cell = ctypes.c_int.from_address(flag.value)
        cell.value = 0
        cu.launch(cu.function(cu.module(HEADER + SPIN), "spin"), flag)
        waiter = threading.Thread(target=lambda: (cu.cuCtxSetCurrent(context), cu.cuCtxSynchronize()))
        waiter.start()
        time.sleep(1)  # until it waits
        threading.Timer(SECONDS, lambda: setattr(cell, "value", 1)).start()
        cu.cuCtxDestroy_v2(context)
        print("destroyed")
    """
    assert run_python(code.replace("SECONDS", "0.3"), hostile=False) == "destroyed\n"
    with pytest.raises(AssertionError, match="a context is destroyed while another thread waits for it"):
        run_python(code.replace("SECONDS", "30"), hostile=True)


def test_kernels_and_functions_are_told_apart() -> None:
    code = """
        cu = Driver()
        library = cu.handle("cuLibraryLoadData", (HEADER + PUT).encode() + b"\\0", None, None, 0, None, None, 0)
        kernel = cu.handle("cuLibraryGetKernel", library, b"put")
        function = cu.handle("cuKernelGetFunction", kernel)
        value, name = ctypes.c_int(), ctypes.c_char_p()
        print(cu.status("cuFuncGetAttribute", ctypes.byref(value), 0, kernel),
              cu.status("cuFuncGetName", ctypes.byref(name), kernel),
              cu.status("cuKernelGetName", ctypes.byref(name), function),
              cu.status("cuFuncGetParamInfo", kernel, ctypes.c_size_t(0), ctypes.byref(ctypes.c_size_t()), None),
              cu.status("cuFuncGetAttribute", ctypes.byref(value), 0, function),
              cu.launch_status(kernel, cu.memory(4), ctypes.c_int(1)),
              cu.launch_status(function, cu.memory(4), ctypes.c_int(1)))
    """
    assert run_python(code, hostile=True) == "400 400 400 400 0 0 0\n"
    assert run_python(code, hostile=False) == "0 0 400 0 0 0 0\n"


def test_handles_and_addresses_are_used_again_at_once() -> None:
    code = """
        cu = Driver()
        module = cu.module(HEADER + PUT)
        function = cu.function(module, "put")
        cu.cuModuleUnload(module)
        again = cu.module(HEADER + SPIN)
        other = cu.function(again, "spin")
        stream = cu.handle("cuStreamCreate", 0)
        cu.cuStreamDestroy_v2(stream)
        second = cu.handle("cuStreamCreate", 0)
        memory = cu.memory(5000)
        cu.cuMemFree_v2(memory)
        print(module.value == again.value, function.value == other.value, stream.value == second.value,
              cu.memory(5000).value == memory.value)
    """
    assert run_python(code, hostile=True) == "True True True True\n"
    assert run_python(code, hostile=False).startswith("False False False")


def test_variables_that_nobody_registers_are_hidden_on_request() -> None:
    code = """
        cu = Driver()
        library = cu.handle("cuLibraryLoadData", (HEADER + VARIABLES).encode() + b"\\0", None, None, 0, None, None, 0)
        module = cu.handle("cuLibraryGetModule", library)
        for name in (b"visible_counter", b"constant_value", b"_ZZ4kernE5count"):
            print(cu.status("cuModuleGetGlobal_v2", ctypes.byref(ctypes.c_void_p()), None, module, name))
        where = cu.memory(4)
        cu.launch(cu.function(module, "total"), where)
        print(cu.read(where))
    """
    assert run_python(code, CUDASIM_HIDE_VARIABLES="1").splitlines() == ["0", "0", "500", "[18]"]
    assert run_python(code).splitlines() == ["0", "0", "0", "[18]"]


def test_resources_limit_launches() -> None:
    run_python(
        """
        cu = Driver()
        many = "".join(f"ld.volatile.global.u32 %r{i}, [%rd1+{4 * i}];\\n" for i in range(200))
        use = "".join(f"st.volatile.global.u32 [%rd1+{4 * i}], %r{i};\\n" for i in range(200))
        body = ".visible .entry wide(.param .u64 where) { .reg .b64 %rd<2>; .reg .b32 %r<200>; .reg .pred %p<2>;\\n"
        body += "ld.param.u64 %rd1, [where];\\n" + many
        body += "setp.eq.u32 %p1, %r0, 77;\\n@%p1 bra skip;\\n" + "bar.sync 0;\\n" + "skip:\\n" + use + "ret; }"
        wide = cu.function(cu.module(HEADER + body), "wide")
        assert cu.number("cuFuncGetAttribute", 4, wide) >= 200
        where = cu.memory(800)
        assert cu.launch_status(wide, where, block=1024) == 701
        assert cu.launch_status(wide, where, block=128) == 0
        cu.cuCtxSynchronize()
        """,
        hostile=True,
    )


def test_newer_ptx_is_refused() -> None:
    code = """
        cu = Driver()
        text = (HEADER + PUT).replace("sm_70", "sm_90").replace("7.0", "8.0").encode() + b"\\0"
        print(cu.status("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), text))
    """
    assert run_python(code, hostile=True, CUDASIM_CC="8.0") == "218\n"
    assert run_python(code, hostile=False, CUDASIM_CC="8.0") == "0\n"


def test_new_memory_is_not_zero_and_ends_near_an_unmapped_page() -> None:
    run_python(
        """
        cu = Driver()
        memory = cu.memory(1000)
        assert any(cu.read(memory, 250)) and memory.value % 256 == 0
        put = cu.function(cu.module(HEADER + PUT), "put")
        cu.launch(put, ctypes.c_void_p(memory.value + 1280), ctypes.c_int(1))
        assert cu.status("cuCtxSynchronize") == 700
        """,
        hostile=True,
    )
