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

// "kernel 'name': what is wrong", and a line for the instruction
std::string describe(uint64_t kernel_object, const Fault &fault) {
    std::string text = "kernel '" + kernel_name(kernel_object) + "': " + fault.text;
    if (fault.pc == 0) return text;
    uint64_t entry = kernel_entry(kernel_object);
    std::string place = fault.pc >= entry ? "+" + hexadecimal(fault.pc - entry) : hexadecimal(fault.pc);
    return text + "\nhipsim: instruction at " + place + (fault.executed.empty() ? "" : ": " + fault.executed);
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
    // KFD only knows the page of the address.
    if (report_memory_fault(queue.node, address & ~(kPage - 1), failure)) return;
    complain("the program takes no memory faults (HSA_ENABLE_INTERRUPT=0); it ends");
    abort();
}

void report_fault(Queue &queue, uint64_t kernel_object, const Fault &fault) {
    std::string text = describe(kernel_object, fault);
    switch (fault.kind) {
        case Fault::memory: report_memory_fault(queue, fault.address, fault.write, text); break;
        case Fault::illegal_instruction: report_queue_error(queue, kIllegalInstruction, text); break;
        case Fault::trap: report_queue_error(queue, kDebugTrap, text); break;
        case Fault::bad_launch: report_queue_error(queue, kInvalidCode, text); break;
        case Fault::none:
        case Fault::cancelled: break;
    }
}

}  // namespace hipsim
