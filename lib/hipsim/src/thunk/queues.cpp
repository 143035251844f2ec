#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <amd_hsa_queue.h>

#include "config.h"
#include "thunk/gpus.h"
#include "thunk/heap.h"
#include "thunk/queues.h"
#include "thunk/forked.h"
#include "thunk/submissions.h"
#include "thunk/threads.h"

namespace hipsim {
namespace {

constexpr uint32_t kDoorbells = 1024;  // one page of 8 KiB, as KFD gives a process
constexpr uint64_t kAqlPacket = 64;

struct Queues {
    std::mutex mutex;
    std::map<uint64_t, std::shared_ptr<Queue>> by_id;
    uint64_t next_id = 1;  // for ROCr, 0 means "no queue" in SDMA
    uint64_t *doorbells = nullptr;
    std::vector<uint32_t> free_doorbells;
    bool looking = false;  // the look-out runs
    std::atomic<uint32_t> idle{0};
};

Queues &queues() {
    static Queues *const instance = new Queues;
    return *instance;
}

void sleep_microseconds(long microseconds) {
    timespec time{0, microseconds * 1000};
    nanosleep(&time, nullptr);
}

// Wakes every queue whose doorbell has changed. Returns whether there was one.
bool look(Queues &all) {
    bool any = false;
    std::lock_guard lock(all.mutex);
    for (const auto &[id, queue] : all.by_id) {
        uint64_t now = __atomic_load_n(queue->doorbell, __ATOMIC_ACQUIRE);
        if (now == queue->rung) continue;
        queue->rung = now;
        any = true;
        std::lock_guard queue_lock(queue->mutex);
        queue->pending = true;
        queue->wake.notify_one();
    }
    return any;
}

// Sees a store to a doorbell after at most 20 us while the device is used, and after at most 500 us if it was not
// used for half a second. A host thread that waits checks the doorbells itself.
[[noreturn]] void look_out() {
    Queues &all = queues();
    for (;;) {
        if (look(all)) all.idle.store(0, std::memory_order_relaxed);
        uint32_t idle = all.idle.fetch_add(1, std::memory_order_relaxed);
        if (idle < 50) sched_yield();
        else if (idle < 10000) sleep_microseconds(20);
        else sleep_microseconds(idle < 20000 ? 100 : 500);
    }
}

void run(Queue &queue) {
    std::unique_lock lock(queue.mutex);
    while (!queue.destroyed) {
        if (!queue.pending || queue.suspended || queue.failed) {
            queue.wake.wait(lock);
            continue;
        }
        queue.pending = false;
        queue.working = true;
        lock.unlock();
        if (queue.aql) process_aql(queue);
        else process_sdma(queue);
        lock.lock();
        queue.working = false;
    }
}

std::shared_ptr<Queue> find(HSA_QUEUEID id) {
    Queues &all = queues();
    std::lock_guard lock(all.mutex);
    auto found = all.by_id.find(id);
    return found == all.by_id.end() ? nullptr : found->second;
}

bool take_doorbell(Queues &all, Queue &queue) {
    if (all.doorbells == nullptr) {
        // Aligned to its size: ROCr finds the queue of a doorbell by the low bits of its address.
        HsaMemFlags flags{};
        flags.ui32.HostAccess = 1;
        void *page = nullptr;
        if (heap().allocate(0, kDoorbells * sizeof(uint64_t), kDoorbells * sizeof(uint64_t), flags, &page) !=
            HSAKMT_STATUS_SUCCESS)
            return false;
        heap().map(page, kDoorbells * sizeof(uint64_t), Nodes{});
        all.doorbells = static_cast<uint64_t *>(page);
        for (uint32_t i = kDoorbells; i-- > 0;) all.free_doorbells.push_back(i);
    }
    if (all.free_doorbells.empty()) return false;
    queue.doorbell = &all.doorbells[all.free_doorbells.back()];
    all.free_doorbells.pop_back();
    return true;
}

}  // namespace

void wake_queues() {
    Queues &all = queues();
    if (look(all)) all.idle.store(0, std::memory_order_relaxed);
}

bool queues_wait() {
    wake_queues();
    Queues &all = queues();
    std::lock_guard lock(all.mutex);
    for (const auto &[id, queue] : all.by_id) {
        std::lock_guard queue_lock(queue->mutex);
        if (queue->suspended || queue->failed) continue;
        if (queue->working ? !queue->waiting : queue->pending) return false;
    }
    return true;
}

void wake_queue(uint64_t ring) {
    Queues &all = queues();
    std::lock_guard lock(all.mutex);
    for (const auto &[id, queue] : all.by_id) {
        if (queue->ring != ring) continue;
        std::lock_guard queue_lock(queue->mutex);
        queue->pending = true;
        queue->wake.notify_one();
    }
}

void pause(uint32_t step) {
    if (step < 100) sched_yield();
    else sleep_microseconds(step < 1000 ? 20 : 100);
}

}  // namespace hipsim

using namespace hipsim;

extern "C" {
#pragma GCC visibility push(default)

HSAKMT_STATUS hsaKmtCreateQueue(HSAuint32 node, HSA_QUEUE_TYPE type, HSAuint32 percentage,
                                HSA_QUEUE_PRIORITY priority, void *address, HSAuint64 bytes, HsaEvent *,
                                HsaQueueResource *resource) {
    HIPSIM_NOT_IN_CHILD;
    if (resource == nullptr || percentage > 100) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (node == 0 || node > static_cast<uint32_t>(config().devices)) return HSAKMT_STATUS_INVALID_NODE_UNIT;
    if (priority < HSA_QUEUE_PRIORITY_MINIMUM || priority > HSA_QUEUE_PRIORITY_MAXIMUM)
        return HSAKMT_STATUS_INVALID_PARAMETER;
    bool aql = type == HSA_QUEUE_COMPUTE_AQL;
    if (!aql && type != HSA_QUEUE_SDMA && type != HSA_QUEUE_SDMA_XGMI) return HSAKMT_STATUS_NOT_SUPPORTED;
    uint64_t ring = reinterpret_cast<uint64_t>(address);
    bool power = bytes >= kPage && (bytes & (bytes - 1)) == 0 && bytes <= uint64_t{1} << 32;
    if (!power || ring % 256 != 0 || !heap().usable(node, ring, bytes, true))
        return HSAKMT_STATUS_INVALID_PARAMETER;

    auto queue = std::make_shared<Queue>();
    queue->node = node;
    queue->aql = aql;
    queue->ring = ring;
    queue->ring_bytes = bytes;
    if (aql) {
        for (uint64_t *pointer : {resource->Queue_read_ptr_aql, resource->Queue_write_ptr_aql})
            if (!heap().usable(node, reinterpret_cast<uint64_t>(pointer), sizeof *pointer, true))
                return HSAKMT_STATUS_INVALID_PARAMETER;
        queue->read = resource->Queue_read_ptr_aql;
        queue->write = resource->Queue_write_ptr_aql;
    } else {
        queue->read = &queue->own_pointers[0];
        queue->write = &queue->own_pointers[1];
        resource->Queue_read_ptr_aql = queue->read;
        resource->Queue_write_ptr_aql = queue->write;
    }

    Queues &all = queues();
    std::lock_guard lock(all.mutex);
    if (!take_doorbell(all, *queue)) return HSAKMT_STATUS_OUT_OF_RESOURCES;
    // AQL doorbells hold the last packet's index, those of SDMA the end of the packets.
    queue->rung = aql ? ~uint64_t{0} : 0;
    *queue->doorbell = queue->rung;
    queue->suspended = percentage == 0;
    queue->id = all.next_id++;
    queue->thread = start_thread(aql ? "hipsim queue" : "hipsim sdma", [queue] { run(*queue); });
    all.by_id[queue->id] = queue;
    if (!all.looking) {
        all.looking = true;
        start_thread("hipsim doorbell", look_out).detach();
    }
    resource->QueueId = queue->id;
    resource->Queue_DoorBell_aql = queue->doorbell;
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtUpdateQueue(HSA_QUEUEID id, HSAuint32 percentage, HSA_QUEUE_PRIORITY, void *address,
                                HSAuint64 bytes, HsaEvent *) {
    HIPSIM_NOT_IN_CHILD;
    std::shared_ptr<Queue> queue = find(id);
    if (queue == nullptr) return HSAKMT_STATUS_INVALID_HANDLE;
    if (percentage > 100) return HSAKMT_STATUS_INVALID_PARAMETER;
    // KFD can move a ring; ROCr never does.
    if (address != nullptr &&
        (reinterpret_cast<uint64_t>(address) != queue->ring || bytes != queue->ring_bytes))
        return HSAKMT_STATUS_NOT_SUPPORTED;
    std::lock_guard lock(queue->mutex);
    queue->suspended = percentage == 0;
    queue->pending = true;
    queue->wake.notify_one();
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtDestroyQueue(HSA_QUEUEID id) {
    HIPSIM_NOTHING_IN_CHILD;
    Queues &all = queues();
    std::shared_ptr<Queue> queue;
    {
        std::lock_guard lock(all.mutex);
        auto found = all.by_id.find(id);
        if (found == all.by_id.end()) return HSAKMT_STATUS_INVALID_PARAMETER;
        queue = found->second;
        all.by_id.erase(found);
    }
    {
        std::lock_guard lock(queue->mutex);
        queue->destroyed = true;
        queue->wake.notify_one();
    }
    queue->thread.join();  // the program frees the ring now
    std::lock_guard lock(all.mutex);
    all.free_doorbells.push_back(static_cast<uint32_t>(queue->doorbell - all.doorbells));
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtSetQueueCUMask(HSA_QUEUEID id, HSAuint32 count, HSAuint32 *mask) {
    HIPSIM_NOT_IN_CHILD;
    std::shared_ptr<Queue> queue = find(id);
    if (queue == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (count == 0 || count % 32 != 0 || mask == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    std::lock_guard lock(queue->mutex);
    queue->cu_mask.assign(mask, mask + count / 32);  // which units work makes no difference to results
    return HSAKMT_STATUS_SUCCESS;
}

HSAKMT_STATUS hsaKmtGetQueueInfo(HSA_QUEUEID id, HsaQueueInfo *info) {
    HIPSIM_NOT_IN_CHILD;
    std::shared_ptr<Queue> queue = find(id);
    if (queue == nullptr || info == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    memset(info, 0, sizeof(*info));
    std::lock_guard lock(queue->mutex);
    info->NumCUAssigned = static_cast<HSAuint32>(queue->cu_mask.size() * 32);
    info->CUMaskInfo = queue->cu_mask.empty() ? nullptr : queue->cu_mask.data();
    return HSAKMT_STATUS_SUCCESS;
}

// Global wave sync, which grid-wide barriers of cooperative launches use. One queue of a device has it at a time.
HSAKMT_STATUS hsaKmtAllocQueueGWS(HSA_QUEUEID id, HSAuint32 count, HSAuint32 *first) {
    HIPSIM_NOT_IN_CHILD;
    if (find(id) == nullptr) return HSAKMT_STATUS_INVALID_PARAMETER;
    if (count > kGlobalWaveSyncs) return HSAKMT_STATUS_OUT_OF_RESOURCES;
    if (first != nullptr) *first = 0;
    return HSAKMT_STATUS_SUCCESS;
}

#pragma GCC visibility pop
}
