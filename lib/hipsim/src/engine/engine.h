// Runs one kernel dispatch on the CPU: what the packet processor calls for an AQL dispatch packet.
//
// The caller passes the contents of the packet and the queue (Launch), the addresses that the device may use (Memory), the
// GPU (Target), and what is outside the shader cores (Services). run() may be called by several threads at once.

#pragma once

#include <cstdint>
#include <string>

namespace hipsim {

struct Launch {
    uint64_t kernel_object = 0;  // address of the kernel descriptor (64 bytes)
    uint64_t kernarg = 0;        // address of the kernarg segment
    uint64_t packet = 0;         // address of the AQL packet (the dispatch pointer in SGPRs)
    uint64_t queue = 0;          // address of amd_queue_t (the queue pointer in SGPRs)
    uint64_t dispatch_id = 0;
    uint32_t grid[3] = {1, 1, 1};   // work-items
    uint32_t group[3] = {1, 1, 1};  // work-items
    uint32_t group_bytes = 0;       // LDS of a workgroup, the dynamic part included
    uint32_t private_bytes = 0;     // scratch per work-item; the engine has its own memory for it
    uint64_t start_ns = 0;          // virtual clock: when the kernel starts
};

// Memory that the program has registered has another address on the device, as with AMD's driver: this bit is set.
constexpr uint64_t registered_bit = uint64_t{1} << 47;

// The host address for a device address.
inline uint8_t *host(uint64_t address) { return reinterpret_cast<uint8_t *>(address & ~registered_bit); }

// Which addresses the device may use. They are host addresses, except for registered_bit. Must be safe to call from several threads.
class Memory {
  public:
    virtual ~Memory() = default;
    // The allocation around an address; *begin == *end if there is none. Seldom called: every wave keeps the last
    // answers, for one time slice at most.
    virtual void range(uint64_t address, uint64_t *begin, uint64_t *end, bool *may_write) = 0;
};

class Services {
  public:
    virtual ~Services() = default;
    virtual void interrupt(uint32_t m0) = 0;  // s_sendmsg MSG_INTERRUPT: the event whose number is in M0
    virtual uint64_t counter() = 0;           // s_memtime and s_memrealtime, where the clock is not virtual
    virtual bool cancelled() {
        return false;
    }  // true: the queue is being destroyed; the waves end where they are
};

struct Target {
    std::string name = "gfx906";  // chooses the instruction set
    uint32_t compute_units = 60;
    uint32_t waves_per_unit = 40;
    uint32_t group_bytes_per_unit = 65536;
    uint64_t shared_base = uint64_t{1} << 48;   // apertures of flat addresses: LDS
    uint64_t private_base = uint64_t{2} << 48;  // and scratch
    uint32_t threads = 0;                       // host threads; 0: one per CPU
    bool virtual_clock = false;                 // 1 ns per instruction of a wave, from Launch::start_ns
    uint64_t hostile = 0;                       // not 0: seed for the order and time slices of waves
};

struct Fault {
    enum Kind {
        none,
        memory,               // an address that the device may not use
        illegal_instruction,  // unknown or unsupported, found before any wave has run where that is possible
        trap,                 // s_trap
        bad_launch,           // a descriptor or a size that cannot be
        cancelled
    } kind = none;
    uint64_t address = 0;  // memory: of the access; else of the instruction
    uint64_t pc = 0;       // of the instruction
    bool write = false;    // memory: a store or an atomic
    uint32_t trap_id = 0;
    std::string text;      // for people: what is wrong
    std::string executed;  // the instruction, its workgroup and its wave; empty if no wave has run
};

struct Result {
    Fault fault;
    uint64_t instructions = 0;  // of all waves
    uint64_t stored_bytes = 0;  // by stores of all lanes
    uint64_t end_ns = 0;        // virtual clock: when the last wave has ended
};

Result run(const Launch &launch, Memory &memory, const Target &target, Services &services);

}  // namespace hipsim
