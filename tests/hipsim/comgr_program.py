"""Compile with AMD's library as HIP loads it: python comgr_program.py OPTION... < SOURCE. Prints the size of the result."""

import ctypes
import sys

OPENCL_2_0, SOURCE, BITCODE, COMPILE = 2, 1, 6, 2


def main() -> None:
    comgr = ctypes.CDLL("libamd_comgr.so.2")

    class Handle(ctypes.Structure):
        _fields_ = [("handle", ctypes.c_uint64)]

    def made(function: str, *arguments: object) -> Handle:
        handle = Handle()
        call(function, *arguments, ctypes.byref(handle))
        return handle

    def call(function: str, *arguments: object) -> None:
        status = getattr(comgr, function)(*arguments)
        if status:
            sys.exit(f"{function}: status {status}")

    text = sys.stdin.buffer.read()
    options = [option.encode() for option in sys.argv[1:]]
    source = made("amd_comgr_create_data", SOURCE)
    call("amd_comgr_set_data", source, ctypes.c_size_t(len(text)), text)
    call("amd_comgr_set_data_name", source, b"source.cl")
    before, after = made("amd_comgr_create_data_set"), made("amd_comgr_create_data_set")
    call("amd_comgr_data_set_add", before, source)
    info = made("amd_comgr_create_action_info")
    call("amd_comgr_action_info_set_language", info, OPENCL_2_0)
    call("amd_comgr_action_info_set_isa_name", info, b"amdgcn-amd-amdhsa--gfx906")
    array = (ctypes.c_char_p * len(options))(*options)
    call("amd_comgr_action_info_set_option_list", info, array, ctypes.c_size_t(len(options)))
    call("amd_comgr_action_info_set_logging", info, ctypes.c_bool(True))
    call("amd_comgr_do_action", COMPILE, info, before, after)
    size = ctypes.c_size_t()
    result = made("amd_comgr_action_data_get_data", after, BITCODE, ctypes.c_size_t(0))
    call("amd_comgr_get_data", result, ctypes.byref(size), None)
    print(size.value)


if __name__ == "__main__":
    main()
