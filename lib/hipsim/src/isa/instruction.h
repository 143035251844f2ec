// One decoded instruction of AMD's GCN family, as in "Vega 7nm Shader Instruction Set Architecture", chapter 13, and
// "RDNA 2 Instruction Set Architecture", chapter 13.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace hipsim::isa {

enum class Format : uint8_t {
    sop2,
    sopk,
    sop1,
    sopc,
    sopp,
    smem,
    vop2,
    vop1,
    vopc,
    vop3,
    vop3p,
    mai,  // matrix products and moves of AGPRs, encoded as VOP3P
    ds,
    flat,
    scratch,
    global,
    mubuf,
    unknown
};

enum Variant : uint8_t { none = 0, sdwa = 1, dpp = 2, dpp8 = 4 };

// A row of the table that generate.py makes; it explains `operands`.
struct Opcode {
    Format format;
    uint16_t number;
    const char *name;
    const char *operands;
    uint8_t variants;  // which of SDWA and DPP exist (GFX10: and DPP8)

    // Number of 32-bit registers of the operand in a field; 0: there is no such operand.
    unsigned width(char field) const;
};

// GPUs of one family encode instructions in the same way, but do not have the same opcodes.
enum class Family : uint8_t { gfx9, gfx10 };

// The instruction set of one GPU, for waves of one size.
struct Set {
    const char *gpu;  // as LLVM calls the processor
    Family family;
    unsigned lanes;  // of a wave
    // Some of 512 registers are AGPRs. An operand of several registers begins at an even one. One register has all three
    // work-item IDs. Dot products of halves have no denormals.
    bool cdna2;
    std::span<const Opcode> opcodes;

    // The row of the table; null: there is no such opcode.
    const Opcode *find(Format format, unsigned number) const;
};

// Returns the set of a GPU for waves of `lanes` lanes; 0: the size that hipcc chooses. Null if there is none.
const Set *find_set(std::string_view gpu, unsigned lanes = 0);

// Operands as GFX9 numbers them: 0–101 SGPRs, 106 VCC, 124 M0, 126 EXEC, 128–248 constants, 255 literal,
// 256–511 VGPRs. AGPRs, which have the numbers of VGPRs and a bit elsewhere, follow.
// GFX10 has SGPRs where GFX9 has FLAT_SCRATCH and XNACK_MASK, and 125 is the null register.
enum Operand : uint16_t {
    flat_scratch = 102,
    xnack_mask = 104,
    vcc = 106,
    ttmp0 = 108,
    m0 = 124,
    null = 125,
    exec = 126,
    zero = 128,
    shared_base = 235,
    shared_limit = 236,
    private_base = 237,
    private_limit = 238,
    pops_exiting_wave_id = 239,
    half_float = 240,
    inverse_2pi = 248,
    sdwa_word = 249,
    dpp_word = 250,
    vccz = 251,
    execz = 252,
    scc = 253,
    lds_direct = 254,
    literal = 255,
    vgpr0 = 256,
    agpr0 = 512,
};

struct Instruction {
    const Set *set = nullptr;
    const Opcode *opcode = nullptr;  // null: unknown
    uint32_t words[3] = {};
    uint32_t literal = 0;
    uint8_t size = 4;  // bytes
    Variant variant = none;

    uint16_t dst = 0;   // field D
    uint16_t sdst = 0;  // field S, or VCC
    uint16_t src[3] = {};
    int16_t simm = 0;

    // VALU modifiers; bit n belongs to source n.
    uint8_t abs = 0, neg = 0, neg_hi = 0, op_sel = 0, op_sel_hi = 0;
    uint8_t omod = 0;
    bool clamp = false;
    // SDWA
    uint8_t sel[2] = {6, 6}, sext = 0, dst_sel = 6, dst_unused = 0;
    // DPP
    uint16_t dpp_ctrl = 0;
    uint8_t row_mask = 15, bank_mask = 15;
    bool bound_ctrl = false;
    bool fetch_inactive = false;  // GFX10: lanes outside EXEC are read
    bool eight = false;           // GFX10's DPP8, whose source lanes are in:
    uint32_t lane_sel = 0;        // 3 bits for each of 8 lanes

    // MAI: blocks of A and lanes of B that take the place of others
    uint8_t cbsz = 0, abid = 0, blgp = 0;

    // Memory: vaddr and so on are VGPR numbers (SMEM: operands); 256 and more are AGPRs.
    uint16_t addr = 0, data[2] = {}, vdst = 0;
    uint8_t saddr = 0;  // 0x7f: none
    uint8_t srsrc = 0, soffset = 0;
    int32_t offset = 0;
    bool glc = false, slc = false, lds = false, gds = false, idxen = false, offen = false, tfe = false;
    bool has_imm = false, has_soffset = false;  // SMEM
};

// Decodes the instruction at `code`, of which `bytes` may be read.
Instruction decode(const Set &set, const uint32_t *code, uint64_t bytes);

// Assembler text, close to llvm's. `address` serves for the targets of branches.
std::string text(const Instruction &instruction);

}  // namespace hipsim::isa
