"""hipsim's decoder: the generated table is what llvm-mc says, and real code decodes as llvm-objdump does."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hipsim_elf import code_objects
from hipsim_engine import GPUS, SOURCE, Engine, assemble, kernel, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

ROCRAND = Path("/usr/lib/x86_64-linux-gnu/librocrand.so.1")


@pytest.fixture(scope="module", params=GPUS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    started = Engine(tmp_path_factory.mktemp("isa"), gpu=request.param)
    yield started
    started.close()


def table(gpu: str) -> str:
    return (SOURCE / "src" / "isa" / f"{gpu}.inc").read_text()


@pytest.mark.every(4)
@pytest.mark.parametrize("gpu", GPUS)
def test_table_is_what_llvm_knows(gpu: str) -> None:
    command = ["python3", SOURCE / "generate.py", gpu]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == table(gpu)


REGISTER = re.compile(r"\b[vsa]\d+\b|\b[vsa]\[\d+:\d+\]|\b(?:vcc|exec|m0|flat_scratch|ttmp)\w*")


def registers(text: str) -> list[str]:
    _, _, operands = text.partition(" ")
    return REGISTER.findall(operands)


def compare(engine: Engine, code: Path) -> int:
    """Compare size, name and registers of each instruction with llvm-objdump's; give the number of instructions."""
    ours = {}
    for line in engine.lines(f"text {code}"):
        address, size, text = line.split(" ", 2)
        ours[int(address, 16)] = int(size), text
    command = ["llvm-objdump-15", "-d", f"--mcpu={engine.gpu}", str(code)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = 0
    for text, address, words in re.findall(
        r"^\t(\S.*?)\s*// ([0-9A-F]+): ((?:[0-9A-F]{8} ?)+)", listing, re.M
    ):
        size, mine = ours[int(address, 16)]
        if text.startswith(".long"):  # no instruction: what lies between functions
            assert int(mine.split()[0], 16) == int(text.split()[1], 16)
            continue
        name = re.sub(r"_(e32|e64|sdwa|dpp)$", "", text.split()[0])
        assert size == 4 * len(words.split()), f"{text}: {mine}"
        assert mine.split()[0] == name, f"{text}: {mine}"
        assert registers(mine) == registers(text), f"{text}: {mine}"
        count += 1
    return count


GFX9_FORMS = """
    v_add_f32_e64 v1, -v2, |s3| clamp
    v_add_u32_sdwa v1, sext(v2), v3 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:WORD_1 src1_sel:BYTE_2
    v_mov_b32_dpp v1, v2 row_shr:3 row_mask:0x5 bank_mask:0x3 bound_ctrl:0
    v_fma_f64 v[2:3], v[4:5], s[6:7], -v[8:9]
    v_madak_f32 v1, v2, v3, 0x12345678
    v_pk_fma_f16 v1, v2, v3, v4 op_sel:[1,0,0] op_sel_hi:[0,1,1] neg_lo:[0,1,0]
    v_cmp_lt_u64_e64 s[10:11], v[2:3], 5
    v_cmp_eq_u32_sdwa s[10:11], v2, v3 src0_sel:BYTE_0 src1_sel:DWORD
    v_addc_co_u32_e64 v1, s[10:11], v2, v3, s[12:13]
    v_readlane_b32 s5, v3, m0
    s_mov_b64 exec, vcc
    s_add_u32 flat_scratch_lo, s6, 0xdeadbeef
    s_load_dwordx4 s[12:15], s[4:5], s9
    s_buffer_load_dwordx2 s[12:13], s[4:7], 0x44
    global_load_dwordx3 v[4:6], v7, s[8:9] offset:-44 glc
    flat_atomic_cmpswap_x2 v[2:3], v[4:5], v[6:9] offset:16 glc slc
    scratch_store_dword off, v3, s7 offset:8
    buffer_store_dwordx4 v[4:7], v2, s[8:11], s3 idxen offset:4
    buffer_load_ubyte_d16_hi v4, off, s[8:11], 0
    ds_write2st64_b64 v1, v[2:3], v[4:5] offset0:3 offset1:7
    ds_read_b128 v[4:7], v1 offset:65520
    s_getreg_b32 s3, hwreg(HW_REG_MODE, 4, 4)
    s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3
"""
GFX10_FORMS = """
    v_add_f32_e64 v1, -v2, |s3| clamp
    v_fma_f32 v1, 0x12345678, v2, s3
    v_cmp_lt_f64_e64 s10, 0x40400000, v[2:3]
    v_pk_add_f16 v1, 0x12345678, v2
    v_add_nc_u32_sdwa v1, sext(v2), v3 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:WORD_1 src1_sel:BYTE_2
    v_mov_b32_dpp v1, v2 row_shr:3 row_mask:0x5 bank_mask:0x3 bound_ctrl:0
    v_mov_b32_dpp v1, v2 row_xmask:5 row_mask:0xf bank_mask:0xf fi:1
    v_add_co_ci_u32_dpp v1, vcc_lo, v2, v3, vcc_lo dpp8:[7,6,5,4,3,2,1,0]
    v_add_co_ci_u32_e64 v1, s10, v2, v3, s12
    v_fmaak_f32 v1, v2, v3, 0x12345678
    v_fmamk_f16 v1, v2, 0x1234, v3
    v_cmp_lt_u64_e64 s10, v[2:3], 5
    v_cmpx_eq_u32_e64 s10, v3
    v_cmpx_eq_u32_sdwa v2, v3 src0_sel:BYTE_0 src1_sel:DWORD
    v_cmp_eq_u32_sdwa s10, v2, v3 src0_sel:BYTE_0 src1_sel:DWORD
    v_cndmask_b32_e32 v1, v2, v3, vcc_lo
    v_readlane_b32 s105, v3, m0
    v_permlanex16_b32 v1, v2, s3, s4 op_sel:[1,1]
    v_mad_u64_u32 v[2:3], null, s104, v1, v[4:5]
    s_mov_b64 exec, vcc
    s_and_saveexec_b32 s102, vcc_lo
    s_add_u32 null, s104, 0xdeadbeef
    s_waitcnt_vscnt null, 0
    s_load_dwordx4 s[12:15], s[4:5], s9 offset:0x44
    s_buffer_load_dwordx2 s[12:13], s[4:7], 0x44 glc dlc
    global_load_dwordx3 v[4:6], v7, s[8:9] offset:-44 glc slc dlc
    global_store_dword v[2:3], v4, off offset:2047
    global_load_dword_addtid v1, s[2:3] offset:4
    flat_atomic_cmpswap_x2 v[2:3], v[4:5], v[6:9] offset:16 glc slc
    scratch_store_dword off, v3, s7 offset:8
    scratch_load_dword v3, v4, off offset:-8
    scratch_load_dword v3, off, off offset:8
    buffer_store_dwordx4 v[4:7], v2, s[8:11], s3 idxen offset:4
    buffer_load_ubyte_d16_hi v4, off, s[8:11], null
    ds_write2st64_b64 v1, v[2:3], v[4:5] offset0:3 offset1:7
    ds_read_b128 v[4:7], v1 offset:65520
    s_getreg_b32 s3, hwreg(HW_REG_SHADER_CYCLES, 4, 4)
    s_setreg_imm32_b32 hwreg(HW_REG_FLAT_SCR_LO, 0, 2), 3
"""


def test_modifiers_and_literals(engine: Engine, tmp_path: Path) -> None:
    body = GFX10_FORMS if engine.gpu == "gfx1030" else GFX9_FORMS
    forms = compare(engine, assemble(kernel("forms", body, gpu=engine.gpu), tmp_path, engine.gpu))
    assert forms > body.count("\n") - 2


def test_forms_of_cdna2(tmp_path_factory: pytest.TempPathFactory) -> None:
    body = """
    v_accvgpr_read_b32 v2, a3
    v_accvgpr_write_b32 a2, v3
    v_accvgpr_write_b32 a2, 1.0
    v_accvgpr_mov_b32 a2, a4
    global_load_dwordx2 a[2:3], v[4:5], off
    global_store_dwordx4 v4, a[8:11], s[4:5] offset:16
    flat_atomic_add_f64 a[2:3], v[4:5], a[6:7] glc
    global_atomic_pk_add_f16 v2, v4, v6, s[4:5] glc
    buffer_load_dwordx2 a[4:5], v2, s[0:3], s4 offen
    buffer_atomic_add_f32 a4, v2, s[0:3], s4 offen glc
    ds_read_b64 a[2:3], v4
    ds_write2_b32 v4, a5, a6 offset1:1
    ds_add_rtn_f64 a[2:3], v4, a[6:7]
    v_mfma_f32_32x32x1f32 a[0:31], v1, a2, a[32:63] cbsz:1 abid:1 blgp:3
    v_mfma_f64_16x16x4f64 v[0:7], v[8:9], a[10:11], v[12:19]
    v_mfma_f32_4x4x4bf16_1k v[0:3], a[8:9], v[10:11], -2.0
    v_ceil_f64_dpp v[2:3], v[4:5] row_newbcast:3 row_mask:0x1 bank_mask:0xf
    v_pk_fma_f32 v[0:1], v[2:3], s[4:5], v[6:7] op_sel:[0,1,0] op_sel_hi:[0,1,1] neg_lo:[0,1,0]
    v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]
    v_fmac_f64_e64 v[0:1], -v[2:3], |v[4:5]|
    v_dot2c_f32_f16_dpp v1, v2, v3 row_newbcast:1 row_mask:0xf bank_mask:0xf
    """
    place = tmp_path_factory.mktemp("cdna2")
    started = Engine(place, gpu="gfx90a")
    assert compare(started, assemble(kernel("forms", body, gpu="gfx90a"), place, "gfx90a")) == 22
    started.close()


@pytest.mark.every(4)
def test_code_of_rocrand(engine: Engine, tmp_path: Path) -> None:
    if not ROCRAND.exists():
        pytest.skip("librocrand is not installed (librocrand1)")
    found = code_objects(ROCRAND, engine.gpu)
    assert found
    total = 0
    for number, content in enumerate(found):
        path = tmp_path / f"{number}.co"
        path.write_bytes(content)
        total += compare(engine, path)
    assert total > 40000


def test_every_instruction_is_known_or_named(engine: Engine) -> None:
    """What the engine executes exists, and what it does not execute is a list that is known."""
    existing = set(re.findall(r'0x[0-9a-f]+, "(\w+)"', table(engine.gpu)))
    executed = set(engine.lines("names"))
    left_out = re.compile(
        r"buffer_(load|store)_format_\w+|ds_(append|consume|ordered_count)|ds_gws_sema_\w+|s_atc_probe\w*"
        r"|s_(buffer_)?atomic_\w+|s_cbranch_(g_fork|i_fork|join)|s_dcache_discard\w*|s_endpgm_\w+|s_rfe_\w+"
        r"|s_scratch_\w+|s_sendmsghalt|s_sethalt|s_setkill|s_setvskip|v_interp_\w+|v_screen_partition_4se_b32"
        r"|s_code_end|s_subvector_loop_\w+|v_mullit_f32"
    )
    missing_names = existing - executed
    assert {name for name in missing_names if not left_out.fullmatch(name)} == set()
    assert len(executed & existing) > 950
