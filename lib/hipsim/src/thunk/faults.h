// Reports errors of the device to the program, as KFD and the packet processor do. ROCr and HIP turn them into their
// own messages and codes.
#pragma once

#include <cstdint>
#include <string>

#include "engine/engine.h"
#include "thunk/queues.h"

namespace hipsim {

// Codes in a queue's inactive signal, as ROCr reads them.
enum QueueError : int64_t {
    kInvalidDimensions = 2,
    kInvalidGroupMemory = 4,
    kInvalidCode = 8,
    kInvalidPacket = 32,
    kGroupTooLarge = 64,
    kInvalidVendorPacket = 256,
    kApertureViolation = 0x20000000,
    kIllegalInstruction = 0x40000000,
    kDebugTrap = 0x80000000,
};

// Stops the queue; the program sees the code. `text` is for people, and may be empty.
void report_queue_error(Queue &queue, QueueError error, const std::string &text);

// "Memory access fault by GPU node ..." of ROCr, which ends the program.
void report_memory_fault(Queue &queue, uint64_t address, bool write, const std::string &text);

// Reports a fault that run() found in a kernel.
void report_fault(Queue &queue, uint64_t kernel_object, const Fault &fault);

}  // namespace hipsim
