// Queues intercepted since their creation: ROCr passes their packets to `on_packets` before the GPU gets them.
#include <algorithm>
#include <unistd.h>

#include "agent.h"
#include "room.h"

namespace gpubpf {

namespace {

// Packets to change at once. ROCr passes packets one at a time, and before 6.0 it accepts only one write per call.
constexpr uint64_t kBatch = ROOM_MOST / 2 - 1;
constexpr useconds_t kRoomPause = 50;

// A queue of the program. It outlives the attachment, because ROCr may call on_packets as long as the queue exists. The next attach
// finds a running process, and doorbell.cpp handles the queue.
struct Queue {
    uint64_t attachment;
    Gpu *gpu;
    uint32_t number;  // its number in the log
    struct room room;
};

struct Intercepted {
    std::mutex lock;
    std::unordered_map<const hsa_queue *, std::unique_ptr<Queue>> queues;
};
ProcessState<Intercepted> intercepted;

void free_signal(Queue &queue) {
    if (queue.room.ahead.handle) hsa.signal_destroy(queue.room.ahead);
}

// Remembers a queue that the program created.
void add(const hsa_queue *handle, std::unique_ptr<Queue> made) {
    std::lock_guard<std::mutex> hold(intercepted->lock);
    auto &queue = intercepted->queues[handle];
    if (queue) free_signal(*queue);  // it was destroyed while the agent was detached
    queue = std::move(made);
}

// Forgets a queue that the program destroys. Returns null if it is not intercepted.
std::unique_ptr<Queue> take(const hsa_queue *handle) {
    std::lock_guard<std::mutex> hold(intercepted->lock);
    const auto found = intercepted->queues.find(handle);
    if (found == intercepted->queues.end()) return nullptr;
    std::unique_ptr<Queue> queue = std::move(found->second);
    intercepted->queues.erase(found);
    return queue;
}

// ROCr calls this in the thread that submits the packets.
void on_packets(const void *data, uint64_t count, uint64_t, void *user, hsa_writer write) {
    const auto *packets = static_cast<const hsa_packet *>(data);
    Queue &queue = *static_cast<Queue *>(user);
    hsa_packet changed[2 * kBatch + 1];
    for (uint64_t at = 0; at < count;) {
        const uint64_t end = std::min(count, at + kBatch);
        uint64_t made = 0;
        while (!room_fits(&queue.room, 2 * (end - at))) usleep(kRoomPause);
        for (OwnWork work; at < end; ++at) {
            changed[made] = packets[at];
            const bool dispatch = (packets[at].header & 0xff) == HSA_KERNEL_DISPATCH;
            const bool ours = work && agent.live && attachment == queue.attachment;
            hsa_packet &to = changed[made];
            uint64_t untimed = 0;
            made += dispatch && ours ? take_packet(&to, *queue.gpu, queue.number, untimed) : 1;
            if (agent.log_operations && ours)
                quietly([&] { log_packet(packets[at], *queue.gpu, queue.number, untimed, to); });
        }
        made += room_take(&queue.room, made, &changed[made]);
        write(changed, made);
    }
}

}  // namespace

hsa_status on_create_queue(hsa_handle on, uint32_t size, uint32_t type, hsa_queue_error error, void *data,
                           uint32_t scratch, uint32_t shared, hsa_queue **made) {
    uint64_t of = 0;  // the attachment that intercepts its packets
    if (OwnWork work; work && agent.live && !agent.running && agent.gpu(on)) of = attachment;
    auto create = [&](hsa_create_queue how, uint32_t packets) {
        return how(on, packets, type, error, data, scratch, shared, made);
    };
    // Twice the size, if the GPU supports it: a dispatch may become two packets.
    if (!of || !made ||
        (create(originals.create_intercepted_queue, 2 * size) &&
         create(originals.create_intercepted_queue, size)))
        return create(originals.create_queue, size);
    OwnWork work;
    Gpu *gpu = work && attachment == of ? agent.gpu(on) : nullptr;
    if (!gpu) return 0;
    quietly([&] {
        auto made_queue = std::make_unique<Queue>(Queue{of, gpu, new_queue(*gpu), {{}, (*made)->size, 0}});
        Queue *queue = made_queue.get();
        add(*made, std::move(made_queue));
        if (hsa.amd_signal_create(0, 0, nullptr, HSA_SIGNAL_GPU_ONLY, &queue->room.ahead))
            queue->room.ahead = {};
        originals.intercept(*made, on_packets, queue);
    });
    if (agent.log_operations) hsa.amd_profiling_set_profiler_enabled(*made, 1);
    return 0;
}

hsa_status on_destroy_queue(hsa_queue *handle) {
    LeftQueue left;
    std::unique_ptr<Queue> queue;
    uint64_t of = 0;  // the attachment that `left.gpu` belongs to
    if (OwnWork work; work)
        quietly([&] {
            of = attachment;
            leave_queue(handle, left);
            queue = take(handle);
            if (queue && queue->attachment == of && !left.gpu) {
                left.gpu = queue->gpu;
                left.number = queue->number;
            }
            if (left.gpu) wait_for_queue(*left.gpu, left.number);
        });
    const hsa_status status = originals.destroy_queue(handle);
    // The GPU no longer needs the signals and the arguments.
    OwnWork work;
    for (const hsa_handle signal : left.signals) hsa.signal_destroy(signal);
    if (queue) free_signal(*queue);
    if (work && left.gpu && attachment == of) quietly([&] { forget_queue(*left.gpu, left.number); });
    return status;
}

void forget_intercepted_queues() {
    std::lock_guard<std::mutex> hold(intercepted->lock);
    for (auto &queue : intercepted->queues) free_signal(*queue.second);
    intercepted->queues.clear();
}

const Lifetime queue_lifetime = lifetime_of_process_state<intercepted>();

}  // namespace gpubpf
