// The packet processor of compute queues (HSA Platform System Architecture Specification 1.2, 2.8 and 2.9).
//
// Packets are processed one after the other, as if each had its barrier bit set: the specification allows this order.
// A packet stays in its slot until it is complete, because ROCr looks at the packet that read_dispatch_id names. Then
// the slot becomes free. Last, the packet's signal is decremented.

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include <hsa.h>
#include <hsa_ext_amd.h>
#include <amd_hsa_queue.h>

#include "config.h"
#include "engine/engine.h"
#include "thunk/clock.h"
#include "thunk/events.h"
#include "thunk/faults.h"
#include "thunk/gpus.h"
#include "thunk/heap.h"
#include "thunk/hostile.h"
#include "thunk/queues.h"
#include "thunk/signals.h"
#include "thunk/submissions.h"

namespace hipsim {
namespace {

constexpr uint64_t kPacketBytes = 64;
constexpr uint8_t kVendorPm4 = 1;  // a jump into PM4 commands; ROCr only uses those that flush caches
constexpr uint64_t kDescriptorBytes = 64;
constexpr uint32_t kLargestGroup = 1024;
constexpr int kDependencies = 5;

union Packet {
    uint16_t header;
    hsa_kernel_dispatch_packet_t dispatch;
    hsa_barrier_and_packet_t barrier;
    hsa_amd_barrier_value_packet_t barrier_value;
    struct {
        uint16_t header;
        uint8_t format;
    } vendor;
};
static_assert(sizeof(Packet) == kPacketBytes);

class DeviceMemory : public Memory {
  public:
    explicit DeviceMemory(uint32_t node) : node_(node) {}
    void range(uint64_t address, uint64_t *begin, uint64_t *end, bool *may_write) override {
        heap().range(node_, address, begin, end, may_write);
    }

  private:
    uint32_t node_;
};

class QueueServices : public Services {
  public:
    explicit QueueServices(const Queue &queue) : queue_(queue) {}
    void interrupt(uint32_t m0) override { hipsim::interrupt(m0); }
    uint64_t counter() override { return now(); }
    bool cancelled() override { return queue_.destroyed.load(std::memory_order_relaxed); }

  private:
    const Queue &queue_;
};

// The engine keeps decoded kernels by the memory that they are in, so there is one memory for each device.
DeviceMemory &memory_of(uint32_t node) {
    static auto *all = new std::map<uint32_t, DeviceMemory>;
    static auto *mutex = new std::mutex;
    std::lock_guard lock(*mutex);
    return all->try_emplace(node, node).first->second;
}

const Target &target() {
    static const Target *const instance = [] {
        auto *made = new Target;
        made->name = gpu().name;
        made->compute_units = gpu().units;
        made->waves_per_unit = gpu().waves_per_simd * gpu().simds_per_unit;
        made->group_bytes_per_unit = kLdsBytes;
        made->shared_base = kLdsAperture;
        made->private_base = kScratchAperture;
        made->threads = static_cast<uint32_t>(config().threads);
        made->virtual_clock = config().virtual_clock;
        made->hostile = config().hostile ? config().seed | 1 : 0;
        return made;
    }();
    return *instance;
}

// The result of processing a packet.
enum class Outcome {
    complete,
    stopped,  // an error, or the queue is destroyed: the packet stays
};

uint8_t packet_type(uint16_t header) { return static_cast<uint8_t>(header >> HSA_PACKET_HEADER_TYPE); }

// Does the packet processor's checks before any wave starts. Returns 0 for a packet that can run.
int64_t check(uint32_t node, const hsa_kernel_dispatch_packet_t &packet) {
    unsigned dimensions = packet.setup >> HSA_KERNEL_DISPATCH_PACKET_SETUP_DIMENSIONS & 3;
    if (dimensions == 0) return kInvalidDimensions;
    if (packet.grid_size_x == 0 || packet.grid_size_y == 0 || packet.grid_size_z == 0)
        return kInvalidDimensions;
    if (packet.workgroup_size_x == 0 || packet.workgroup_size_y == 0 || packet.workgroup_size_z == 0)
        return kInvalidDimensions;
    uint64_t work_items =
        uint64_t{packet.workgroup_size_x} * packet.workgroup_size_y * packet.workgroup_size_z;
    if (work_items > kLargestGroup) return kGroupTooLarge;
    if (packet.group_segment_size > kLdsBytes) return kInvalidGroupMemory;
    if (packet.kernel_object % 64 != 0 || !heap().usable(node, packet.kernel_object, kDescriptorBytes, false))
        return kInvalidCode;
    return 0;
}

// Virtual clock: returns when a dispatch ends.
uint64_t end_of(const hsa_kernel_dispatch_packet_t &packet, const Result &result, uint64_t start) {
    switch (own_kernel(packet.kernel_object)) {
        case OwnKernel::fill: return start + fill_ns(result.stored_bytes);
        case OwnKernel::copy: return start + copy_ns(result.stored_bytes);
        default: return result.end_ns;
    }
}

Outcome dispatch(Queue &queue, uint64_t address, uint64_t index, const hsa_kernel_dispatch_packet_t &packet,
                 uint64_t *start, uint64_t *end) {
    if (int64_t error = check(queue.node, packet); error != 0) {
        report_queue_error(queue, static_cast<QueueError>(error), "");
        return Outcome::stopped;
    }
    Launch launch;
    launch.kernel_object = packet.kernel_object;
    launch.kernarg = reinterpret_cast<uint64_t>(packet.kernarg_address);
    launch.packet = address;
    launch.queue = reinterpret_cast<uint64_t>(queue.read) - offsetof(amd_queue_t, read_dispatch_id);
    launch.dispatch_id = index;
    launch.grid[0] = packet.grid_size_x;
    launch.grid[1] = packet.grid_size_y;
    launch.grid[2] = packet.grid_size_z;
    launch.group[0] = packet.workgroup_size_x;
    launch.group[1] = packet.workgroup_size_y;
    launch.group[2] = packet.workgroup_size_z;
    launch.group_bytes = packet.group_segment_size;
    launch.private_bytes = packet.private_segment_size;
    launch.start_ns = *start;

    QueueServices services(queue);
    Result result = run(launch, memory_of(queue.node), target(), services);
    if (result.fault.kind != Fault::none) {
        report_fault(queue, packet.kernel_object, result.fault);
        return Outcome::stopped;
    }
    *end = config().virtual_clock ? end_of(packet, result, *start) : now();
    return Outcome::complete;
}

// Reads a signal that a barrier depends on. A handle of 0 counts as a signal of value 0.
bool dependency(Queue &queue, uint64_t handle, int64_t *value) {
    *value = 0;
    if (handle == 0 || read_signal(queue.node, handle, value)) return true;
    report_memory_fault(queue, handle, false,
                        "a barrier packet depends on a signal that is not mapped to the device");
    return false;
}

Outcome barrier(Queue &queue, const hsa_barrier_and_packet_t &packet, bool all, uint64_t *start) {
    bool reported = false, any = false;
    auto satisfied = [&] {
        bool every = true;
        any = false;
        for (int i = 0; i < kDependencies; i++) {
            uint64_t handle = packet.dep_signal[i].handle;
            // In a barrier-or, a missing signal does not count; a packet without signals is complete.
            if (handle == 0) continue;
            int64_t value;
            if (!dependency(queue, handle, &value)) return reported = true;
            any = any || value == 0;
            every = every && value == 0;
        }
        bool none = true;
        for (int i = 0; i < kDependencies; i++) none = none && packet.dep_signal[i].handle == 0;
        return none || (all ? every : any);
    };
    if (!wait_for(queue, satisfied) || reported) return Outcome::stopped;
    if (config().virtual_clock)
        for (int i = 0; i < kDependencies; i++)
            if (packet.dep_signal[i].handle != 0)
                *start = std::max(*start, signal_time(queue.node, packet.dep_signal[i].handle));
    return Outcome::complete;
}

Outcome barrier_value(Queue &queue, const hsa_amd_barrier_value_packet_t &packet, uint64_t *start) {
    bool reported = false;
    if (packet.cond > HSA_SIGNAL_CONDITION_GTE) {
        report_queue_error(queue, kInvalidVendorPacket, "");
        return Outcome::stopped;
    }
    auto satisfied = [&] {
        int64_t value;
        if (packet.signal.handle == 0) return true;
        if (!dependency(queue, packet.signal.handle, &value)) return reported = true;
        value &= packet.mask;
        switch (packet.cond) {
            case HSA_SIGNAL_CONDITION_EQ: return value == packet.value;
            case HSA_SIGNAL_CONDITION_NE: return value != packet.value;
            case HSA_SIGNAL_CONDITION_LT: return value < packet.value;
            default: return value >= packet.value;
        }
    };
    if (!wait_for(queue, satisfied) || reported) return Outcome::stopped;
    if (config().virtual_clock && packet.signal.handle != 0)
        *start = std::max(*start, signal_time(queue.node, packet.signal.handle));
    return Outcome::complete;
}

Outcome process(Queue &queue, uint64_t address, uint64_t index, const Packet &packet, uint64_t *start,
                uint64_t *end) {
    Outcome outcome = Outcome::complete;
    switch (packet_type(packet.header)) {
        case HSA_PACKET_TYPE_KERNEL_DISPATCH:
            return dispatch(queue, address, index, packet.dispatch, start, end);
        case HSA_PACKET_TYPE_BARRIER_AND: outcome = barrier(queue, packet.barrier, true, start); break;
        case HSA_PACKET_TYPE_BARRIER_OR: outcome = barrier(queue, packet.barrier, false, start); break;
        case HSA_PACKET_TYPE_VENDOR_SPECIFIC:
            if (packet.vendor.format == HSA_AMD_PACKET_TYPE_BARRIER_VALUE) {
                outcome = barrier_value(queue, packet.barrier_value, start);
                break;
            }
            if (packet.vendor.format == kVendorPm4) break;  // host and device share their caches
            report_queue_error(queue, kInvalidVendorPacket, "");
            return Outcome::stopped;
        default:  // agent dispatches belong in queues of the host
            report_queue_error(queue, kInvalidPacket, "");
            return Outcome::stopped;
    }
    *end = config().virtual_clock ? *start : now();
    return outcome;
}

// Virtual clock: returns when a packet can start, if it depends on no signals.
uint64_t ready_at(const Queue &queue, const Packet &packet) {
    // All packets that can run have their signal at the same place.
    return std::max(
        {queue.time, submission_of(&packet), submission_of_work(packet.dispatch.completion_signal.handle)});
}

}  // namespace

void process_aql(Queue &queue) {
    uint64_t slots = queue.ring_bytes / kPacketBytes;
    while (!queue.destroyed && !queue.suspended) {
        uint64_t index = __atomic_load_n(queue.read, __ATOMIC_RELAXED);
        // A doorbell may be rung out of order, so only the number of packets counts.
        if (index >= __atomic_load_n(queue.write, __ATOMIC_ACQUIRE)) return;
        uint64_t address = queue.ring + index % slots * kPacketBytes;
        uint16_t *header = reinterpret_cast<uint16_t *>(address);
        uint8_t type = packet_type(__atomic_load_n(header, __ATOMIC_ACQUIRE));
        if (type == HSA_PACKET_TYPE_INVALID) return;  // its writer has not rung the doorbell yet
        if (config().virtual_clock && !is_submitted(queue.ring, index)) return;

        hostile_delay(100);
        Packet packet;
        memcpy(&packet, header, sizeof(packet));
        uint64_t start = now(), end = start;
        if (config().virtual_clock) start = end = ready_at(queue, packet);
        // Memory that is freed meanwhile stays mapped until the packet is complete.
        heap().enter();
        struct Leave {
            ~Leave() { heap().leave(); }
        } leave;
        if (process(queue, address, index, packet, &start, &end) == Outcome::stopped) return;

        queue.time = end;
        if (config().virtual_clock) {
            advance(end);
            clear_submission(header);
            forget_work(packet.dispatch.completion_signal.handle);
        }
        __atomic_store_n(header, HSA_PACKET_TYPE_INVALID << HSA_PACKET_HEADER_TYPE, __ATOMIC_RELEASE);
        __atomic_store_n(queue.read, index + 1, __ATOMIC_RELEASE);
        // All packets that can run have their signal at the same place.
        uint64_t signal = packet.dispatch.completion_signal.handle;
        if (!complete_signal(queue.node, signal, start, end)) {
            report_memory_fault(queue, signal, true,
                                "a packet has a completion signal that is not mapped to the device");
            return;
        }
    }
}

}  // namespace hipsim
