#include <cstddef>

#include <amd_hsa_signal.h>

#include "engine/engine.h"
#include "thunk/events.h"
#include "thunk/heap.h"
#include "thunk/hostile.h"
#include "thunk/signals.h"

namespace hipsim {
namespace {

amd_signal_t *signal_at(uint32_t node, uint64_t handle, bool write) {
    bool usable = handle % 8 == 0 && heap().usable(node, handle, sizeof(amd_signal_t), write);
    return usable ? reinterpret_cast<amd_signal_t *>(host(handle)) : nullptr;
}

// Stores the event's number into its mailbox and interrupts the host, as the packet processor does. The signal itself
// may no longer exist: the host frees it as soon as its value shows that the work is done.
void notify(uint32_t node, uint64_t mailbox, uint32_t id) {
    if (mailbox == 0 || !heap().usable(node, mailbox, sizeof(uint64_t), true)) return;
    __atomic_store_n(reinterpret_cast<uint64_t *>(host(mailbox)), id, __ATOMIC_RELEASE);
    hostile_delay(200);
    set_event(id);
}

}  // namespace

bool read_signal(uint32_t node, uint64_t handle, int64_t *value) {
    const amd_signal_t *signal = signal_at(node, handle, false);
    if (signal == nullptr) return false;
    *value = __atomic_load_n(&signal->value, __ATOMIC_ACQUIRE);
    return true;
}

uint64_t signal_of_value(uint32_t node, uint64_t address) {
    uint64_t handle = address & ~uint64_t{sizeof(amd_signal_t) - 1};
    uint64_t offset = address - handle - offsetof(amd_signal_t, value);
    const amd_signal_t *signal = signal_at(node, handle, false);
    return signal != nullptr && offset < sizeof signal->value && signal->kind == AMD_SIGNAL_KIND_USER ? handle
                                                                                                      : 0;
}

// ROCr has the timestamps of copies in the 64 bytes after the signal.
uint64_t signal_of_timestamp(uint32_t node, uint64_t address) {
    uint64_t handle = (address & ~uint64_t{sizeof(amd_signal_t) - 1}) - sizeof(amd_signal_t);
    const amd_signal_t *signal = signal_at(node, handle, false);
    return signal != nullptr && signal->kind == AMD_SIGNAL_KIND_USER ? handle : 0;
}

void set_signal_times(uint32_t node, uint64_t handle, uint64_t start, uint64_t end) {
    amd_signal_t *signal = signal_at(node, handle, true);
    if (signal == nullptr) return;
    signal->start_ts = start;
    signal->end_ts = end;
}

uint64_t signal_time(uint32_t node, uint64_t handle) {
    const amd_signal_t *signal = signal_at(node, handle, false);
    return signal == nullptr ? 0 : signal->end_ts;
}

bool complete_signal(uint32_t node, uint64_t handle, uint64_t start, uint64_t end) {
    if (handle == 0) return true;
    amd_signal_t *signal = signal_at(node, handle, true);
    if (signal == nullptr) return false;
    signal->start_ts = start;
    signal->end_ts = end;
    uint64_t mailbox = signal->event_mailbox_ptr;
    uint32_t id = signal->event_id;
    hostile_delay(200);
    __atomic_fetch_sub(&signal->value, 1, __ATOMIC_ACQ_REL);
    notify(node, mailbox, id);
    return true;
}

bool store_signal(uint32_t node, uint64_t handle, int64_t value) {
    amd_signal_t *signal = signal_at(node, handle, true);
    if (signal == nullptr) return false;
    uint64_t mailbox = signal->event_mailbox_ptr;
    uint32_t id = signal->event_id;
    __atomic_store_n(&signal->value, value, __ATOMIC_RELEASE);
    notify(node, mailbox, id);
    return true;
}

}  // namespace hipsim
