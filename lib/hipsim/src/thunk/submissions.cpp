#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <amd_hsa_signal.h>
#include <hsa_ext_amd.h>

#include "engine/engine.h"
#include "thunk/clock.h"
#include "thunk/code_object.h"
#include "thunk/heap.h"
#include "thunk/hip_calls.h"
#include "thunk/queues.h"
#include "thunk/submissions.h"

namespace hipsim {
namespace {

// The upper half of a time in a packet, which tells it from what else the field may hold.
constexpr uint64_t kMark = uint64_t{0x7469} << 48, kTime = (uint64_t{1} << 48) - 1;
constexpr uint64_t kFuture = 1'000'000'000;  // ns: no time in a packet is later than the latest by more
constexpr size_t kReservedOffset = offsetof(hsa_kernel_dispatch_packet_t, reserved2);
static_assert(kReservedOffset == offsetof(hsa_barrier_and_packet_t, reserved2));
constexpr size_t kFormatOffset = offsetof(hsa_amd_vendor_packet_header_t, AmdFormat);
constexpr size_t kDescriptor = 64;
constexpr std::string_view kOwn = "__amd_rocclr_", kFill = "__amd_rocclr_fill", kCopy = "__amd_rocclr_copy";

// A queue that the program writes. `mutex` guards the rest.
struct Written {
    const hsa_queue_t *queue;
    std::mutex mutex;
    uint64_t end = 0;            // packets before this one have been submitted, except
    std::set<uint64_t> missing;  // those that were not written yet
    std::deque<std::pair<uint64_t, uint64_t>>
        signalled;          // index and signal of packets that may not be complete
    uint64_t complete = 0;  // packets before this one are complete
    void complete_up_to(uint64_t index) {
        complete = std::max(complete, index + 1);
        while (!signalled.empty() && signalled.front().first <= index) signalled.pop_front();
    }
    // What is waiting for this signal is complete.
    void complete_signal(uint64_t signal) {
        for (size_t i = signalled.size(); i-- > 0;)
            if (signalled[i].second == signal) return complete_up_to(signalled[i].first);
    }
    uint8_t *at(uint64_t index) const {
        return static_cast<uint8_t *>(queue->base_address) + (index & (queue->size - 1)) * 64;
    }
};

struct Submissions {
    std::mutex mutex;
    std::map<uint64_t, std::shared_ptr<Written>> by_doorbell, by_ring;
    std::unordered_map<uint64_t, uint64_t> work;  // times by signal
    // By the address of a kernel's descriptor. With the descriptor, because addresses are used again.
    std::unordered_map<uint64_t, std::pair<OwnKernel, std::string>> kernels;
};

Submissions &submissions() {
    static Submissions *const instance = new Submissions;
    return *instance;
}

std::shared_ptr<Written> find(const std::map<uint64_t, std::shared_ptr<Written>> &from, uint64_t key) {
    std::lock_guard lock(submissions().mutex);
    auto found = from.find(key);
    return found == from.end() ? nullptr : found->second;
}

uint8_t type_of(const uint8_t *packet) {
    return static_cast<uint8_t>(
        __atomic_load_n(reinterpret_cast<const uint16_t *>(packet), __ATOMIC_ACQUIRE));
}

// Gives a packet the calling thread's time. Returns false if the packet is not there yet.
bool submit(Written &written, uint64_t index) {
    uint8_t *packet = written.at(index);
    uint8_t type = type_of(packet);
    if (type == HSA_PACKET_TYPE_INVALID) return false;
    const auto *dispatch = reinterpret_cast<const hsa_kernel_dispatch_packet_t *>(packet);
    begin_submission(type == HSA_PACKET_TYPE_KERNEL_DISPATCH &&
                     own_kernel(dispatch->kernel_object) == OwnKernel::no);
    // All packets that can run have their signal at the same place.
    if (uint64_t signal = dispatch->completion_signal.handle) {
        written.complete_signal(signal);  // the program uses it again
        written.signalled.emplace_back(index, signal);
    }
    // Other packets of AMD's own may have something else there.
    if (type == HSA_PACKET_TYPE_VENDOR_SPECIFIC && packet[kFormatOffset] != HSA_AMD_PACKET_TYPE_BARRIER_VALUE)
        return true;
    auto *field = reinterpret_cast<uint64_t *>(packet + kReservedOffset);
    if (*field == 0) *field = kMark | (host_time() & kTime);
    return true;
}

}  // namespace

OwnKernel own_kernel(uint64_t object) {
    HsaPointerInfo info{};
    if (heap().describe(reinterpret_cast<const void *>(object), &info) != HSAKMT_STATUS_SUCCESS ||
        info.GPUAddress + info.SizeInBytes - object < kDescriptor)
        return OwnKernel::no;
    std::string descriptor(reinterpret_cast<const char *>(host(object)), kDescriptor);
    Submissions &all = submissions();
    std::lock_guard lock(all.mutex);
    auto &[own, known] = all.kernels[object];
    if (known != descriptor) {
        std::string name = kernel_name(object);
        own = name.starts_with(kFill)   ? OwnKernel::fill
              : name.starts_with(kCopy) ? OwnKernel::copy
              : name.starts_with(kOwn)  ? OwnKernel::other
                                        : OwnKernel::no;
        known = descriptor;
    }
    return own;
}

void note_queue(const hsa_queue_t *queue) {
    auto made = std::make_shared<Written>();
    made->queue = queue;
    Submissions &all = submissions();
    std::lock_guard lock(all.mutex);
    all.by_doorbell[queue->doorbell_signal.handle] = made;
    all.by_ring[reinterpret_cast<uint64_t>(queue->base_address)] = made;
}

void forget_queue(const hsa_queue_t *queue) {
    Submissions &all = submissions();
    std::lock_guard lock(all.mutex);
    all.by_doorbell.erase(queue->doorbell_signal.handle);
    all.by_ring.erase(reinterpret_cast<uint64_t>(queue->base_address));
}

void forget_submissions() {
    Submissions &all = submissions();
    std::lock_guard lock(all.mutex);
    all.by_doorbell.clear();
    all.by_ring.clear();
    all.work.clear();
}

bool submit_packets(hsa_signal_t doorbell, uint64_t value) {
    std::shared_ptr<Written> written = find(submissions().by_doorbell, doorbell.handle);
    if (written == nullptr) return false;
    {
        std::lock_guard lock(written->mutex);
        uint64_t size = written->queue->size, first = value < size ? 0 : value + 1 - size;
        std::erase_if(written->missing,
                      [&](uint64_t index) { return index < first || submit(*written, index); });
        if (value >= written->end)
            for (uint64_t index = std::max(written->end, first); index <= value; index++)
                if (!submit(*written, index)) written->missing.insert(index);
        written->end = std::max(written->end, value + 1);
    }
    wake_queue(reinterpret_cast<uint64_t>(written->queue->base_address));
    return true;
}

uint64_t packets_complete(const hsa_queue_t *queue) {
    std::shared_ptr<Written> written = find(submissions().by_doorbell, queue->doorbell_signal.handle);
    if (written == nullptr) return UINT64_MAX;
    uint64_t time = host_time();
    std::lock_guard lock(written->mutex);
    while (!written->signalled.empty()) {
        auto [index, signal] = written->signalled.front();
        const auto *memory = reinterpret_cast<const amd_signal_t *>(signal);
        if (__atomic_load_n(&memory->value, __ATOMIC_ACQUIRE) > 0 || memory->end_ts > time) break;
        written->complete_up_to(index);
    }
    return written->complete;
}

void forget_signal(uint64_t signal) {
    std::vector<std::shared_ptr<Written>> queues;
    {
        std::lock_guard lock(submissions().mutex);
        for (const auto &[doorbell, queue] : submissions().by_doorbell) queues.push_back(queue);
        submissions().work.erase(signal);
    }
    for (const auto &queue : queues) {
        std::lock_guard lock(queue->mutex);
        queue->complete_signal(signal);
    }
}

bool is_submitted(uint64_t ring, uint64_t index) {
    std::shared_ptr<Written> written = find(submissions().by_ring, ring);
    if (written == nullptr) return true;
    std::lock_guard lock(written->mutex);
    return index < written->end && !written->missing.contains(index);
}

uint64_t submission_of(const void *packet) {
    uint64_t field;
    memcpy(&field, static_cast<const uint8_t *>(packet) + kReservedOffset, sizeof field);
    uint64_t time = field & kTime;
    return (field & ~kTime) == kMark && time <= now() + kFuture ? time : kUnknownTime;
}

void clear_submission(void *packet) {
    auto *field = reinterpret_cast<uint64_t *>(static_cast<uint8_t *>(packet) + kReservedOffset);
    if ((*field & ~kTime) == kMark) *field = 0;
}

void submit_work(uint64_t signal, uint64_t time) {
    if (signal == 0) return;
    std::lock_guard lock(submissions().mutex);
    submissions().work[signal] = time;
}

uint64_t submission_of_work(uint64_t signal) {
    std::lock_guard lock(submissions().mutex);
    auto found = submissions().work.find(signal);
    return found == submissions().work.end() ? kUnknownTime : found->second;
}

void forget_work(uint64_t signal) {
    std::lock_guard lock(submissions().mutex);
    submissions().work.erase(signal);
}

}  // namespace hipsim
