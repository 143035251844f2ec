"""The engine beyond single instructions, on gfx1030: the kernels and the tests of gfx906, with waves of 32 and of 64."""

import re
from collections.abc import Iterator

import numpy as np
import pytest

from hipsim_engine import Engine, kernel, missing
from hipsim_gfx10 import GPU, WAVES, assemble_for, cases_of_gfx9, translated, with_waves

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

gfx9 = cases_of_gfx9("test_engine_programs")

# What the tests say of the results holds for these kernels, too.
test_loads = pytest.mark.every(5)(gfx9.test_loads)
test_wide_loads_and_stores = gfx9.test_wide_loads_and_stores
test_buffer_bounds = gfx9.test_buffer_bounds
test_stores = gfx9.test_stores
test_atomics = pytest.mark.every(3)(gfx9.test_atomics)
test_counters_of_many_workgroups = gfx9.test_counters_of_many_workgroups
test_barriers = gfx9.test_barriers
test_lds_addresses = gfx9.test_lds_addresses_may_be_negative_before_the_offset_is_added
test_waves_that_wait_for_each_other = gfx9.test_waves_that_wait_for_each_other
test_scratch = gfx9.test_scratch
test_calls = gfx9.test_calls
test_shape_of_partial_workgroups = gfx9.test_shape_of_partial_workgroups
test_faults = gfx9.test_faults
test_bad_launches = gfx9.test_bad_launches

# Scratch by swizzled buffer, by FLAT through the aperture, and by SCRATCH with each kind of address.
SCRATCH = """
    s_load_dwordx2 s[12:13], s[4:5], 0x0
    s_add_u32 s6, s6, s9
    s_addc_u32 s7, s7, 0
    s_setreg_b32 hwreg(HW_REG_FLAT_SCR_LO), s6
    s_setreg_b32 hwreg(HW_REG_FLAT_SCR_HI), s7
    s_add_u32 s0, s0, s9
    s_addc_u32 s1, s1, 0
    v_lshlrev_b32 v1, 4, v0
    v_add_nc_u32 v2, 100, v0
    v_add_nc_u32 v3, 200, v0
    s_movk_i32 s32, {stack}
    buffer_store_dword v2, off, s[0:3], 0 offset:4
    buffer_store_dword v3, off, s[0:3], s32 offset:4
    buffer_load_dword v4, off, s[0:3], 0 offset:4
    s_mov_b64 s[20:21], src_private_base
    v_mov_b32 v7, s21
    v_mov_b32 v6, 4
    flat_load_dword v5, v[6:7] offset:4
    v_mov_b32 v6, 5
    flat_load_ubyte v8, v[6:7]
    v_mov_b32 v9, 4
    s_movk_i32 s22, 12
    scratch_load_dword v10, v9, off
    scratch_load_dword v11, off, s22 offset:-4
    scratch_load_dword v12, off, off offset:4
    s_waitcnt 0
    v_lshl_add_u32 v8, v8, 16, v11
    v_sub_nc_u32 v12, v12, v4
    v_add_nc_u32 v6, v10, v12
    v_mov_b32 v7, v8
    global_store_dwordx4 v1, v[4:7], s[12:13]
"""


def scratch(lanes: int) -> str:
    """Give the kernel of test_scratch: its stack pointer counts the bytes of all lanes."""
    text = kernel("scratch", SCRATCH.format(stack=4 * lanes), scratch=64, gpu=GPU)
    return text.replace(
        "    .amdhsa_user_sgpr_kernarg_segment_ptr 1",
        "    .amdhsa_user_sgpr_private_segment_buffer 1\n    .amdhsa_user_sgpr_kernarg_segment_ptr 1\n"
        "    .amdhsa_user_sgpr_flat_scratch_init 1\n    .amdhsa_system_sgpr_private_segment_wavefront_offset 1",
    )


def kernels(lanes: int) -> str:
    made = gfx9.kernels("gfx906")
    made["scratch"] = scratch(lanes)
    # Offsets of GLOBAL have 12 bits, with the sign.
    made["beyond"] = made["beyond"].replace("global_store_dword v1, v0, s[8:9] offset:4092",
                                            "v_add_u32 v1, 0xffc, v1\n global_store_dword v1, v0, s[8:9]")  # fmt: skip
    # Bounds are checked as those of raw buffers.
    text = "".join(translated(one, lanes).replace("0x27000", "0x31027000") for one in made.values())
    # A workgroup of 64 may have two waves, which read what the other one has written.
    text = re.sub(r"(ds_write_b128 .*)", r"\1\n s_waitcnt 0\n s_barrier", text)
    # Addresses are no masks.
    text = re.sub(r"(s_getpc_b64|s_memtime|s_mov_b64) s20\b", r"\1 s[20:21]", text)
    text = re.sub(r"(s_memrealtime) s22\b", r"\1 s[22:23]", text)
    return with_waves(re.sub(r"(s_swappc_b64 s\[30:31\]), s20\b", r"\1, s[20:21]", text), lanes)


@pytest.fixture(scope="module", params=WAVES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp("programs")
    started = Engine(place, gpu=GPU)
    started.load(assemble_for(kernels(request.param), place, request.param))
    yield started
    started.close()


def test_virtual_clock(engine: Engine) -> None:
    engine.send("set virtual 1")
    engine.put("a", np.zeros(8, dtype=np.uint32))
    outcome = engine.run("clock", ("a", "a", "a"), (256, 1, 1), (64, 1, 1))
    engine.send("set virtual 0")
    assert outcome.fault is None, outcome.fault
    assert set(engine.get("a", np.uint32).reshape(4, 2)[:, 1]) == {3}  # 1 ns for each instruction
    assert outcome.instructions % outcome.end_ns == 0  # all waves run the same number
