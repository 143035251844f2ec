// The state of a wave, and the predecoded instructions that change it.

#pragma once

#include "engine/engine.h"
#include "isa/instruction.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hipsim {

constexpr unsigned lanes = 64;  // of registers; a wave of 32 never uses the upper half

// What an instruction writes to GFX10's null register is stored here, behind the SGPRs. Nothing reads it.
constexpr unsigned null_place = 128, null_words = 16;

struct Op;
struct Wave;
struct Group;
class Program;

using Handler = void (*)(Wave &, const Op &);
using Vgpr = uint32_t[lanes];

// Where a source comes from, resolved when the instruction is predecoded.
struct Source {
    enum Kind : uint8_t {
        vgpr,      // without modifiers
        constant,  // without modifiers
        sgpr,      // without modifiers; VCC, EXEC and M0 among them
        other,     // with modifiers, or a register that is computed
    } kind = constant;
    uint16_t index = 0;  // of the VGPR; or the operand
    uint64_t value = 0;  // of a constant
};

struct Op {
    Handler run = nullptr;
    mutable const Op *target = nullptr;  // of a branch; of a computed jump, the last one
    uint64_t address = 0;
    Source src[3];
    uint16_t dst = 0;              // number of the VGPR or of the SGPR
    bool plain_dst = true;         // no output modifiers, SDWA or DPP
    bool vector = false;           // VALU: subject to the VGPR index mode
    bool keeps_high_half = false;  // a 16-bit result leaves the other half of the register alone
    isa::Instruction i;
};

// A recently looked-up allocation.
struct Range {
    uint64_t begin = 0, end = 0;
    bool may_write = false;
};

enum class State : uint8_t { running, barrier, ended, faulted };

// Bits of the MODE register.
constexpr uint32_t mode_dx10_clamp = 1u << 8, mode_ieee = 1u << 9, mode_fp16_overflow = 1u << 23;

struct alignas(64) Wave {
    uint32_t s[null_place + null_words] = {};  // by operand number: SGPRs, FLAT_SCRATCH, VCC, TTMPs, M0, EXEC
    uint32_t lane_mask[lanes] = {};            // EXEC, one word per lane; see exec_lanes()
    uint64_t lane_mask_of = 0;
    Vgpr *v = nullptr;
    uint64_t existing = ~uint64_t{0};  // lanes: all 64, or the lower 32
    unsigned count = lanes;            // how many these are
    const Op *next = nullptr;
    int64_t budget = 0;     // instructions left of this time slice
    int64_t remaining = 0;  // what budget was when the slice ended early
    int64_t slice = 0;
    uint64_t time = 0;  // instructions (virtual clock: also waits) until the begin of this slice
    bool paused =
        false;  // virtual clock: what runs takes no time; it is `paused_at`, and clocks show `ahead` more
    uint64_t paused_at = 0, ahead = 0;
    uint64_t instructions = 0;
    uint64_t stored_bytes = 0;
    uint64_t dpp_lanes = 0;  // lanes that the DPP instruction in progress may write
    Group *group = nullptr;
    Program *program = nullptr;
    uint8_t *scratch = nullptr;
    uint64_t scratch_bytes = 0;  // of the whole wave
    uint32_t mode = 0;
    uint32_t trap_status = 0;
    uint32_t flat_scratch[2] = {};     // GFX10's hardware register
    uint32_t index = 0;                // of the wave in its group
    uint8_t index_mode = 0;            // s_set_gpr_idx_on: which operands are indexed by M0
    uint8_t round32 = 0, round64 = 0;  // 0 nearest even, 1 +inf, 2 −inf, 3 zero; round64 also for f16
    bool flush_in32 = false, flush_out32 = false, flush_in64 = false, flush_out64 = false;
    bool scc = false;
    bool yielded = false;           // s_sleep
    bool waits_for_others = false;  // at ds_gws_barrier, in this generation:
    uint64_t waits_in = 0;
    State state = State::running;
    unsigned vgprs = 0;
    Range ranges[4];
    unsigned next_range = 0;

    uint64_t pair(unsigned n) const {
        uint64_t value;
        std::memcpy(&value, s + n, 8);
        return value;
    }
    void set_pair(unsigned n, uint64_t value) { std::memcpy(s + n, &value, 8); }
    // Waves of 32 have a mask in one SGPR, and the high halves of EXEC and VCC do not matter.
    uint64_t exec() const { return pair(isa::exec) & existing; }
    uint64_t vcc() const { return pair(isa::vcc) & existing; }
    void set_mask(unsigned n, uint64_t value) {
        if (count == lanes) set_pair(n, value);
        else s[n] = uint32_t(value);
    }

    // Ends the time slice after this instruction.
    void stop() {
        remaining = budget;
        budget = 0;
    }
    uint64_t now() const { return paused ? paused_at + ahead : time + uint64_t(slice - budget); }
    // From here on, nothing takes time. `uncounted`: how many of the instructions until now do not count, this one included.
    void pause(uint64_t uncounted, uint64_t shown_ahead) {
        if (paused) return;
        paused_at = now() - uncounted;
        ahead = shown_ahead;
        paused = true;
    }
    void resume() {
        if (!paused) return;
        paused = false;
        time -= now() - paused_at;
    }
    void set_mode(uint32_t value);
    void fault(Fault::Kind kind, const Op &op, uint64_t address, const std::string &what, bool write = false);
    // Looks an access up; false if the device may not make it (then the wave has a fault).
    bool allow(const Op &op, uint64_t address, uint64_t bytes, bool write);
    // The same without the fault.
    const Range *range(uint64_t address);
    // The value of an operand that is not a VGPR, as its low and high words.
    uint64_t scalar(unsigned operand, unsigned width) const;
};

// Operands of s_nop that say where code of a tool begins and ends, which takes no time on the virtual clock. A GPU uses their lower
// bits only, which are 0. The last two: where it begins before an instruction, or in place of the kernel's end, and clocks show the
// time after that.
constexpr uint16_t untimed_begin = 0x6700, untimed_end = 0x6780, untimed_before = 0x6800,
                   untimed_exit = 0x6880;

// State that the waves of one workgroup share.
struct Group {
    const Launch *launch = nullptr;
    const Target *target = nullptr;
    Memory *memory = nullptr;
    Services *services = nullptr;
    Fault *fault = nullptr;  // where a wave stores its fault
    uint8_t *lds = nullptr;
    uint32_t lds_bytes = 0;
    uint32_t id[3] = {};
    uint32_t number = 0;
};

}  // namespace hipsim
