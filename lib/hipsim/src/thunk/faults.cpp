#include <cinttypes>
#include <cstdio>
#include <cstdlib>

#include <amd_hsa_queue.h>

#include "thunk/code_object.h"
#include "thunk/events.h"
#include "thunk/faults.h"
#include "thunk/heap.h"
#include "thunk/signals.h"

namespace hipsim {
namespace {

std::string hexadecimal(uint64_t value) {
    char text[32];
    snprintf(text, sizeof(text), "0x%" PRIx64, value);
    return text;
}

void complain(const std::string &text) { fprintf(stderr, "hipsim: %s\n", text.c_str()); }

amd_queue_t *queue_structure(const Queue &queue) {
    return reinterpret_cast<amd_queue_t *>(reinterpret_cast<uint64_t>(queue.read) -
                                           offsetof(amd_queue_t, read_dispatch_id));
}

// "kernel 'name', instruction at +0x1c"
std::string place(uint64_t kernel_object, uint64_t pc) {
    std::string text = "kernel '" + kernel_name(kernel_object) + "'";
    uint64_t entry = kernel_entry(kernel_object);
    if (pc != 0)
        text += ", instruction at " + (pc >= entry ? "+" + hexadecimal(pc - entry) : hexadecimal(pc));
    return text;
}

}  // namespace

void report_queue_error(Queue &queue, QueueError error, const std::string &text) {
    queue.failed = true;
    if (!text.empty()) complain(text);
    amd_queue_t *structure = queue_structure(queue);
    if (store_signal(queue.node, structure->queue_inactive_signal.handle, error)) return;
    complain("the queue has no signal for errors; the program ends");
    abort();
}

void report_memory_fault(Queue &queue, uint64_t address, bool write, const std::string &text) {
    queue.failed = true;
    if (!text.empty()) complain(text);
    HsaAccessAttributeFailure failure{};
    bool read_only = write && heap().usable(queue.node, address, 1, false);
    failure.ReadOnly = read_only;
    failure.NotPresent = !read_only;
    // KFD knows the page, not the address.
    if (report_memory_fault(queue.node, address & ~(kPage - 1), failure)) return;
    complain("the program takes no memory faults (HSA_ENABLE_INTERRUPT=0); it ends");
    abort();
}

void report_fault(Queue &queue, uint64_t kernel_object, const Fault &fault) {
    std::string where = place(kernel_object, fault.pc);
    std::string text = fault.text.empty() ? "" : ": " + fault.text;
    switch (fault.kind) {
        case Fault::memory:
            report_memory_fault(queue, fault.address, fault.write,
                                where + ": " + (fault.write ? "write to " : "read from ") +
                                    hexadecimal(fault.address) + ", which is not mapped to the device" +
                                    text);
            break;
        case Fault::illegal_instruction: report_queue_error(queue, kIllegalInstruction, where + text); break;
        case Fault::trap: report_queue_error(queue, kDebugTrap, where + text); break;
        case Fault::bad_launch: report_queue_error(queue, kInvalidCode, where + text); break;
        case Fault::none:
        case Fault::cancelled: break;
    }
}

}  // namespace hipsim
