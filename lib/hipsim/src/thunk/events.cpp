// The rules are KFD's (kfd_events.c in Linux): setting an event wakes all threads that wait for it, and an event that
// resets itself stays set only if no thread waited. ROCr depends on both.
//
// There is one deliberate difference: a wait with a timeout lasts kLongest at most, and ROCr always sets a timeout.
// Otherwise hsa_queue_destroy may hang. All queues of ROCr share one event, and hsa_queue_destroy waits for a signal
// that the thread of asynchronous events stores. If hsa_queue_destroy is interrupted between its last check of the
// signal and its wait, that thread consumes the event. ROCr checks the signal again whenever a wait ends. Newer
// versions count how often an event was set (`ages`).

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "thunk/events.h"
#include "thunk/heap.h"
#include "thunk/hostile.h"
#include "thunk/queues.h"
#include "thunk/forked.h"

namespace hipsim {
namespace {

constexpr uint32_t kMailboxes = 4096;         // KFD's limit on events that a device can set
constexpr uint32_t kFirstOther = 0x80000000;  // first number of the events that a device cannot set
constexpr uint32_t kLongest = 500;            // milliseconds of a wait
constexpr uint64_t kUnsignaled =
    ~uint64_t{0};  // the value of a mailbox until a device stores the event's number

struct Waiter;

struct Event {
    HsaEvent handle{};
    bool manual_reset = false;
    bool signaled = false;
    uint64_t age = 1;  // grows with each set; 0 means "do not compare" in hsaKmtWaitOnEvent_Ext
    bool has_fault = false;
    HsaMemoryAccessFault fault{};
    std::vector<Waiter *> waiters;
};

// One thread in a wait. Its flags are in the order of the events that it waits for.
struct Waiter {
    std::condition_variable wake;
    std::vector<Event *> events;  // null once destroyed
    std::vector<char> activated;
    bool destroyed = false;
};

struct Events {
    std::mutex mutex;
    std::map<uint32_t, std::unique_ptr<Event>> by_id;
    std::unordered_map<const HsaEvent *, Event *> by_handle;  // a destroyed handle must not be read
    uint64_t *mailboxes = nullptr;
    uint32_t next_other = kFirstOther;
};

Events &events() {
    static Events *const instance = new Events;  // ROCr's threads wait here until the process ends
    return *instance;
}

Event *find(Events &all, const HsaEvent *handle) {
    auto found = all.by_handle.find(handle);
    return found != all.by_handle.end() ? found->second : nullptr;
}

// Mailboxes are memory that every device can write.
bool make_mailboxes(Events &all) {
    if (all.mailboxes != nullptr) return true;
    HsaMemFlags flags{};
    flags.ui32.HostAccess = 1;
    void *address = nullptr;
    if (heap().allocate(0, kMailboxes * sizeof(uint64_t), 0, flags, &address) != HSAKMT_STATUS_SUCCESS)
        return false;
    heap().map(address, kMailboxes * sizeof(uint64_t), Nodes{});
    all.mailboxes = static_cast<uint64_t *>(address);
    for (uint32_t i = 0; i < kMailboxes; i++) all.mailboxes[i] = kUnsignaled;
    return true;
}

uint32_t free_signal_id(const Events &all) {
    uint32_t id = 1;  // in signals, 0 stands for no event
    for (const auto &[used, event] : all.by_id) {
        if (used >= kMailboxes || used > id) break;
        id = used + 1;
    }
    return id < kMailboxes ? id : 0;
}

void set(Event &event) {
    event.signaled = event.manual_reset || event.waiters.empty();
    event.age++;
    for (Waiter *waiter : event.waiters) {
        for (size_t i = 0; i < waiter->events.size(); i++)
            if (waiter->events[i] == &event) waiter->activated[i] = 1;
        waiter->wake.notify_one();
    }
}

bool satisfied(const Waiter &waiter, bool all) {
    size_t count = 0;
    for (char flag : waiter.activated) count += flag != 0;
    return all ? count == waiter.activated.size() : count > 0;
}

HSAKMT_STATUS wait(HsaEvent *handles[], uint32_t count, bool all_of_them, uint32_t milliseconds,
                   uint64_t *ages) {
    if (handles == nullptr) return HSAKMT_STATUS_INVALID_HANDLE;
    wake_queues();  // the host may wait for work that was submitted just now
    hostile_delay(50);
    Events &all = events();
    Waiter waiter;
    std::unique_lock lock(all.mutex);
    for (uint32_t i = 0; i < count; i++) {
        Event *event = find(all, handles[i]);
        if (event == nullptr)
            return handles[i] == nullptr ? HSAKMT_STATUS_INVALID_HANDLE : HSAKMT_STATUS_ERROR;
        waiter.events.push_back(event);
    }
    for (uint32_t i = 0; i < count; i++) {
        Event *event = waiter.events[i];
        bool aged = ages != nullptr && event->handle.EventData.EventType == HSA_EVENTTYPE_SIGNAL &&
                    ages[i] != 0 && ages[i] != event->age;
        waiter.activated.push_back(event->signaled || aged);
        if (event->signaled && !event->manual_reset) event->signaled = false;
        event->waiters.push_back(&waiter);
    }

    auto done = [&] { return waiter.destroyed || satisfied(waiter, all_of_them); };
    bool in_time = true;
    if (!done()) {
        std::chrono::milliseconds time(std::min(milliseconds, kLongest));
        if (milliseconds == HSA_EVENTTIMEOUT_INFINITE) waiter.wake.wait(lock, done);
        else in_time = waiter.wake.wait_for(lock, time, done);
    }

    for (uint32_t i = 0; i < count; i++) {
        Event *event = waiter.events[i];
        if (event == nullptr) continue;
        std::erase(event->waiters, &waiter);
        if (ages != nullptr && event->handle.EventData.EventType == HSA_EVENTTYPE_SIGNAL)
            ages[i] = event->age;
        // The waiter's own thread fills in the fault: ROCr reads it without a lock.
        if (waiter.activated[i] && event->has_fault)
            event->handle.EventData.EventData.MemoryAccessFault = event->fault;
    }
    if (waiter.destroyed) return HSAKMT_STATUS_ERROR;
    return in_time ? HSAKMT_STATUS_SUCCESS : HSAKMT_STATUS_WAIT_TIMEOUT;
}

}  // namespace

void set_event(uint32_t id) {
    Events &all = events();
    std::lock_guard lock(all.mutex);
    auto found = all.by_id.find(id);
    if (found == all.by_id.end()) return;
    if (all.mailboxes != nullptr && id < kMailboxes)
        __atomic_store_n(&all.mailboxes[id], kUnsignaled, __ATOMIC_RELAXED);
    set(*found->second);
}

void interrupt(uint32_t id) {
    Events &all = events();
    std::lock_guard lock(all.mutex);
    if (all.mailboxes == nullptr) return;
    for (const auto &[number, event] : all.by_id) {
        if (number >= kMailboxes) break;
        if ((number & 0xff) != (id & 0xff)) continue;
        if (__atomic_exchange_n(&all.mailboxes[number], kUnsignaled, __ATOMIC_ACQ_REL) != kUnsignaled)
            set(*event);
    }
}

bool report_memory_fault(uint32_t node, uint64_t address, HsaAccessAttributeFailure failure) {
    Events &all = events();
    std::lock_guard lock(all.mutex);
    bool any = false;
    for (const auto &[id, event] : all.by_id) {
        if (event->handle.EventData.EventType != HSA_EVENTTYPE_MEMORY) continue;
        event->fault.NodeId = node;
        event->fault.VirtualAddress = address;
        event->fault.Failure = failure;
        event->fault.Flags = HSA_EVENTID_MEMORY_FATAL_PROCESS;
        event->has_fault = true;
        set(*event);
        any = true;
    }
    return any;
}

}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtCreateEvent(HsaEventDescriptor *descriptor, bool manual_reset, bool is_signaled,
                                HsaEvent **event) {
    HIPSIM_NOT_IN_CHILD;
    if (descriptor == nullptr || event == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (descriptor->EventType >= HSA_EVENTTYPE_MAXID) return HSAKMT_STATUS_INVALID_PARAMETER;
    Events &all = events();
    std::lock_guard lock(all.mutex);
    bool signal = descriptor->EventType == HSA_EVENTTYPE_SIGNAL;
    if (signal && !make_mailboxes(all)) return HSAKMT_STATUS_NO_MEMORY;
    uint32_t id = signal ? free_signal_id(all) : all.next_other++;
    if (id == 0) return HSAKMT_STATUS_OUT_OF_RESOURCES;
    auto made = std::make_unique<Event>();
    made->manual_reset = manual_reset;
    made->signaled = is_signaled;
    made->handle.EventId = id;
    made->handle.EventData.EventType = descriptor->EventType;
    made->handle.EventData.EventData.SyncVar = descriptor->SyncVar;
    made->handle.EventData.HWData1 = id;
    made->handle.EventData.HWData3 = id;
    if (signal) made->handle.EventData.HWData2 = reinterpret_cast<uint64_t>(&all.mailboxes[id]);
    *event = &made->handle;
    all.by_handle[*event] = made.get();
    all.by_id[id] = std::move(made);
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtDestroyEvent(HsaEvent *event) {
    HIPSIM_NOTHING_IN_CHILD;
    Events &all = events();
    std::lock_guard lock(all.mutex);
    Event *found = find(all, event);
    if (found == nullptr) return HSAKMT_STATUS_INVALID_HANDLE;
    for (Waiter *waiter : found->waiters) {
        for (Event *&waited : waiter->events)
            if (waited == found) waited = nullptr;
        waiter->destroyed = true;
        waiter->wake.notify_one();
    }
    uint32_t id = found->handle.EventId;
    all.by_handle.erase(event);
    all.by_id.erase(id);
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtSetEvent(HsaEvent *event) {
    HIPSIM_NOT_IN_CHILD;
    Events &all = events();
    std::lock_guard lock(all.mutex);
    Event *found = find(all, event);
    if (found == nullptr) return HSAKMT_STATUS_INVALID_HANDLE;
    set(*found);
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtResetEvent(HsaEvent *event) {
    HIPSIM_NOT_IN_CHILD;
    Events &all = events();
    std::lock_guard lock(all.mutex);
    Event *found = find(all, event);
    if (found == nullptr) return HSAKMT_STATUS_INVALID_HANDLE;
    found->signaled = false;
    return HSAKMT_STATUS_SUCCESS;
}

// AMD's library does not query the state either.
HSAKMT_STATUS hsaKmtQueryEventState(HsaEvent *event) {
    HIPSIM_NOT_IN_CHILD;
    Events &all = events();
    std::lock_guard lock(all.mutex);
    return find(all, event) != nullptr ? HSAKMT_STATUS_SUCCESS : HSAKMT_STATUS_INVALID_HANDLE;
}

HSAKMT_STATUS hsaKmtWaitOnMultipleEvents_Ext(HsaEvent *list[], HSAuint32 count, bool all_of_them,
                                             HSAuint32 milliseconds, uint64_t *ages) {
    HIPSIM_NOT_IN_CHILD;
    return wait(list, count, all_of_them, milliseconds, ages);
}

HSAKMT_STATUS hsaKmtWaitOnMultipleEvents(HsaEvent *list[], HSAuint32 count, bool all_of_them,
                                         HSAuint32 milliseconds) {
    HIPSIM_NOT_IN_CHILD;
    return wait(list, count, all_of_them, milliseconds, nullptr);
}

HSAKMT_STATUS hsaKmtWaitOnEvent_Ext(HsaEvent *event, HSAuint32 milliseconds, uint64_t *age) {
    HIPSIM_NOT_IN_CHILD;
    return event == nullptr ? HSAKMT_STATUS_INVALID_HANDLE : wait(&event, 1, true, milliseconds, age);
}

HSAKMT_STATUS hsaKmtWaitOnEvent(HsaEvent *event, HSAuint32 milliseconds) {
    HIPSIM_NOT_IN_CHILD;
    return event == nullptr ? HSAKMT_STATUS_INVALID_HANDLE : wait(&event, 1, true, milliseconds, nullptr);
}

#pragma GCC visibility pop
}
