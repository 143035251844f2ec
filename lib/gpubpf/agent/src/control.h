// The control block: counters in a file that the tool also maps, so that they survive the death of the
// process. protocol.py reads the same layout.
#pragma once

#include <atomic>
#include <cstdint>

#include "definitions.h"

namespace gpubpf {

constexpr Reason kNoReason = Reason(kReasons);

// Counters of one kernel name. A launch that is neither instrumented nor counted under a reason came before
// the copy was ready, or its kernel does not match. The tool knows which.
struct Slot {
    std::atomic<uint64_t> seen;
    std::atomic<uint64_t> instrumented;
    std::atomic<uint64_t> reasons[kReasons];
    std::atomic<uint64_t> number;  // launches of the kernel, as --launch and --sample count them
    // Threads of the instrumented launches. They limit the number of records when the process is killed.
    std::atomic<uint64_t> threads;
    uint64_t reserved[12];
};
static_assert(sizeof(Slot) == 256, "protocol.py knows this size");

struct Control {
    std::atomic<uint32_t> used;     // number of slots in use
    std::atomic<uint32_t> cut;      // the program closed the agent's files; nothing is counted from then on
    std::atomic<uint64_t> unnamed;  // launches of functions whose name was never seen
    std::atomic<uint64_t> graphs;   // graph launches for which the number of kernel executions is unknown
    // On the virtual clock of the embedded device: when the agent was attached, and when the process
    // announced its end. Otherwise 0.
    std::atomic<uint64_t> started_ns, ended_ns;
    // Launches of graphs that were instantiated before the attachment. `graphs` includes them.
    std::atomic<uint64_t> graphs_before;
    // Calls through hooks (each thread reports 64 at a time), how many of them were timed, and the time (ns)
    // that the timed calls spent in the agent, without the driver.
    std::atomic<uint64_t> hooks, hooks_timed, hooks_ticks_ns;
    std::atomic<uint64_t> hooks_rest;  // calls that threads had not reported when the maps were last read
    // Timed calls that took longer than kLong (thread.cpp): their number and time. hooks_ticks_ns does not
    // include them.
    std::atomic<uint64_t> hooks_long, hooks_long_ns;
    std::atomic<uint64_t> hooks_rare_ns;  // total time of rare work that may take long (SlowPath)
    uint64_t reserved[3];
    Slot slots[kSlots];
};
static_assert(sizeof(Control) == 128 + 256 * kSlots, "protocol.py knows this size");

}  // namespace gpubpf
