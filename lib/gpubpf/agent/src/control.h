// The control block: counters in a file that the tool holds too, so that they survive the death of the process.
// protocol.py reads the same layout.
#pragma once

#include <atomic>
#include <cstdint>

#include "definitions.h"

namespace gpubpf {

constexpr Reason kNoReason = Reason(kReasons);

// Counted for one kernel name. What is not matched, instrumented, or under a reason is "before ready" (or not matched):
// the tool knows which.
struct Slot {
    std::atomic<uint64_t> seen;
    std::atomic<uint64_t> instrumented;
    std::atomic<uint64_t> reasons[kReasons];
    std::atomic<uint64_t> number;  // launches of the kernel as --launch and --sample count them
    std::atomic<uint64_t>
        threads;  // of the launches that were instrumented: what bounds their records when the process is killed
    uint64_t reserved[12];
};
static_assert(sizeof(Slot) == 256, "protocol.py knows this size");

struct Control {
    std::atomic<uint32_t> used;     // slots
    std::atomic<uint32_t> cut;      // the program closed the agent's files: nothing is counted from then on
    std::atomic<uint64_t> unnamed;  // launches of functions whose name was never seen
    std::atomic<uint64_t> graphs;   // launches of graphs of which it is not known how often their kernels run
    // On the embedded device's virtual clock, in ns: when the process was attached to, and when it said that it ends. Else 0.
    std::atomic<uint64_t> started_ns, ended_ns;
    std::atomic<uint64_t>
        graphs_before;  // launches of graphs that were made executable before the attachment; in `graphs`, too
    // Calls that came through hooks (a thread tells them 64 at a time), how many of them were timed, and for how many ns these were in the agent,
    // not in the driver.
    std::atomic<uint64_t> hooks, hooks_timed, hooks_ticks_ns;
    std::atomic<uint64_t> hooks_rest;  // what threads had not told when maps were read last
    // Timed calls that took longer than kLong (thread.cpp): how many, for how many ns; these are not in hooks_ticks_ns.
    std::atomic<uint64_t> hooks_long, hooks_long_ns;
    std::atomic<uint64_t> hooks_rare_ns;  // of what is rare and may take long (Rare), all of it
    uint64_t reserved[3];
    Slot slots[kSlots];
};
static_assert(sizeof(Control) == 128 + 256 * kSlots, "protocol.py knows this size");

}  // namespace gpubpf
