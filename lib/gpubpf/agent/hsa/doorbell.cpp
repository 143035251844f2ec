// The program's queues where the agent comes while the process runs. ROCr intercepts a queue from its beginning or not at all, so the
// agent changes a packet where it lies, before the program rings the queue's doorbell for it.
//
// By the standard, a GPU that is busy with a queue may take a packet before that. So a gate stands before each packet: a barrier of
// ours, put in when the program takes the place of its packet, which the GPU passes after the doorbell. Where there is no room for
// one, the GPU has a whole queue to do first. And the order of the changes is such that whatever the GPU sees can run: the new arguments
// begin with the program's, and only the last store makes the kernel another one.
//
// A barrier behind a dispatch tells that it has ended, if the program has a signal of its own there. The agent puts it in as any
// thread of the program may put a packet into a queue, after the doorbell; if the queue is full, later.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <set>

#include "agent.h"

namespace gpubpf {

namespace {

constexpr uint64_t kFull = 16;                             // places that the agent leaves free
constexpr auto kLongest = std::chrono::milliseconds(100);  // for which a gate is closed

struct Gate {
    uint64_t index;
    hsa_handle signal;
    std::chrono::steady_clock::time_point since;
    bool open = false;
};

struct Queue {
    hsa_queue *handle;
    std::mutex lock;  // guards what follows
    bool known = false;
    // The program takes places by adding to the write index, as several threads may. Otherwise, it may store what it read before, so
    // nobody else can take a place.
    bool adds = false;
    Gpu *gpu = nullptr;
    uint32_t number = 0;           // in the log
    uint64_t end = 0;              // the packets before this one were looked at, except for
    std::set<uint64_t> unwritten;  // those that their threads had not written yet
    std::set<uint64_t> own;        // packets of the agent that were not met yet
    std::deque<Gate> gates;
    std::vector<hsa_handle> owed;  // signals for barriers that are still to be put in

    hsa_packet *at(uint64_t index) const {
        return static_cast<hsa_packet *>(handle->base) + (index & (handle->size - 1));
    }
};

struct State {
    std::shared_mutex
        lock;  // guards the map; whoever uses a queue holds it, so that none is destroyed meanwhile
    std::unordered_map<const hsa_queue *, std::unique_ptr<Queue>> queues;
};
AttachmentState<State> state;

// The queue that the thread took a place in last, and its doorbell.
struct LastQueue {
    hsa_queue *queue;
    uint64_t doorbell;
};
LastQueue &last_queue() {
    static thread_local LastQueue value __attribute__((tls_model("initial-exec"))) = {nullptr, 0};
    return value;
}

// Returns the queue that a signal is the doorbell of, or null. A queue that another tool intercepts has a doorbell like other signals.
hsa_queue *queue_of(hsa_handle signal) {
    const auto &memory = *reinterpret_cast<const hsa_signal *>(signal.handle);
    hsa_queue *queue = memory.kind == HSA_DOORBELL              ? memory.queue
                       : last_queue().doorbell == signal.handle ? last_queue().queue
                                                                : nullptr;
    return queue && queue->doorbell.handle == signal.handle ? queue : nullptr;
}

template <class T>
void store(T &to, T value) {
    __atomic_store_n(&to, value, __ATOMIC_RELEASE);
}

int type_of(const hsa_packet &packet) { return __atomic_load_n(&packet.header, __ATOMIC_ACQUIRE) & 0xff; }

// The GPU of a queue, if that is known: ROCr does not say it, but a kernel has one.
void find_gpu(Queue &queue, const hsa_packet &packet) {
    if (queue.gpu) return;
    const Kernel *kernel = type_of(packet) == HSA_KERNEL_DISPATCH ? find_kernel(packet.kernel) : nullptr;
    if (kernel) queue.gpu = kernel->gpu;
    else if (agent.gpus.size() == 1) queue.gpu = agent.gpus[0].get();
    if (!queue.gpu) return;
    queue.number = new_queue(*queue.gpu);
    if (agent.log_operations) hsa.amd_profiling_set_profiler_enabled(queue.handle, 1);
}

void change(Queue &queue, hsa_packet &packet) {
    find_gpu(queue, packet);
    const bool dispatch = type_of(packet) == HSA_KERNEL_DISPATCH;
    if (!queue.gpu) {
        if (dispatch) agent.control->unnamed.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    hsa_packet changed[2] = {packet, {}};
    uint64_t made = 1, untimed = 0;
    if (dispatch) made = take_packet(changed, *queue.gpu, queue.number, untimed, !queue.adds);
    if (agent.log_operations)
        quietly([&] { log_packet(packet, *queue.gpu, queue.number, untimed, *changed); });
    if (!dispatch) return;
    if (made == 2) queue.owed.push_back(changed[1].completion);
    store(packet.completion.handle, changed->completion.handle);
    store(packet.arguments, changed->arguments);
    store(packet.kernel, changed->kernel);
}

// Changes all packets up to `last` that are written. Call it with the queue's lock held.
void change_up_to(Queue &queue, uint64_t last) {
    const uint64_t read = hsa.queue_load_read_index_scacquire(queue.handle);
    auto is_left = [&](uint64_t index) {
        if (queue.own.erase(index) || index < read) return false;
        hsa_packet &packet = *queue.at(index);
        if (type_of(packet) == HSA_INVALID) return true;
        change(queue, packet);
        return false;
    };
    for (auto index = queue.unwritten.begin(); index != queue.unwritten.end();)
        index = is_left(*index) ? std::next(index) : queue.unwritten.erase(index);
    for (; queue.end <= last; ++queue.end)
        if (is_left(queue.end)) queue.unwritten.insert(queue.end);
}

// Writes a packet into a place of the queue that the agent took. Call it with the queue's lock held.
void write(Queue &queue, uint64_t index, const hsa_packet &packet) {
    hsa_packet &to = *queue.at(index);
    memcpy(reinterpret_cast<char *>(&to) + sizeof to.header,
           reinterpret_cast<const char *>(&packet) + sizeof to.header, sizeof to - sizeof to.header);
    store(to.header, packet.header);
    queue.own.insert(index);
}

// Puts in the barriers that the queue is to get, as far as there is room. Call it with the queue's lock held.
void put_barriers(Queue &queue) {
    while (!queue.owed.empty()) {
        const uint64_t index = hsa.queue_load_write_index_scacquire(queue.handle);
        if (index - hsa.queue_load_read_index_scacquire(queue.handle) >= queue.handle->size) return;
        if (hsa.queue_cas_write_index_scacq_screl(queue.handle, index, index + 1) != index) continue;
        hsa_packet barrier{};
        barrier.header = HSA_BARRIER;
        barrier.completion = queue.owed.back();
        queue.owed.pop_back();
        write(queue, index, barrier);
        originals.store_screlease(queue.handle->doorbell, static_cast<int64_t>(index));
    }
}

// --- gates ---

// Returns a signal for a gate: of one that the GPU has passed, or a new one. 0: there is none.
hsa_handle take_signal(Queue &queue, uint64_t read) {
    hsa_handle signal{};
    if (!queue.gates.empty() && queue.gates.front().open && queue.gates.front().index < read) {
        signal = queue.gates.front().signal;
        queue.gates.pop_front();
        hsa.signal_store_relaxed(signal, 1);
    } else if (hsa.amd_signal_create(1, 0, nullptr, HSA_SIGNAL_GPU_ONLY, &signal)) {
        signal = {};
    }
    return signal;
}

// Lets the GPU pass the gates before packet `last`, and with `old` those that were closed for too long.
void open_gates(Queue &queue, uint64_t last, bool old = false) {
    const auto before = std::chrono::steady_clock::now() - kLongest;
    for (Gate &gate : queue.gates) {
        if (gate.open || (old ? gate.since > before : gate.index > last)) continue;
        gate.open = true;
        hsa.signal_store_relaxed(gate.signal, 0);
    }
}

// The program takes `count` places. Takes one more, for a gate.
template <class Take>
uint64_t take_places(Queue &queue, uint64_t count, const Take &take) {
    const uint64_t write_index = hsa.queue_load_write_index_scacquire(queue.handle),
                   read = hsa.queue_load_read_index_scacquire(queue.handle);
    const bool room = write_index - read + count + kFull < queue.handle->size;
    if (!queue.known) queue.end = write_index;
    queue.known = queue.adds = true;
    const hsa_handle signal = room && agent.live ? take_signal(queue, read) : hsa_handle{};
    if (!signal.handle) return take(count);
    const uint64_t index = take(count + 1);
    hsa_packet gate{};
    gate.header = HSA_MARKER;
    memcpy(reinterpret_cast<char *>(&gate) + HSA_DEPENDENCY, &signal, sizeof signal);
    write(queue, index, gate);
    queue.gates.push_back({index, signal, std::chrono::steady_clock::now()});
    return index + 1;
}

// Returns what is known of a queue, and makes it; call it without the lock, which `known` then holds.
Queue &known_queue(hsa_queue *handle, std::shared_lock<std::shared_mutex> &known) {
    for (;;) {
        known = std::shared_lock<std::shared_mutex>(state->lock);
        const auto found = state->queues.find(handle);
        if (found != state->queues.end()) return *found->second;
        known.unlock();
        std::lock_guard<std::shared_mutex> add(state->lock);
        auto &made = state->queues[handle];
        if (!made) made = std::make_unique<Queue>();
        made->handle = handle;
    }
}

// The program rings for packet `last`. Returns whether barriers are to be put in after that.
bool before_doorbell(hsa_queue *handle, uint64_t last) {
    std::shared_lock<std::shared_mutex> known;
    Queue &queue = known_queue(handle, known);
    std::lock_guard<std::mutex> hold(queue.lock);
    if (!queue.known) queue.end = last + 1;  // these have no gate
    queue.known = true;
    change_up_to(queue, last);
    open_gates(queue, last);
    return !queue.owed.empty();
}

void after_doorbell(hsa_queue *handle) {
    std::shared_lock<std::shared_mutex> known(state->lock);
    const auto found = state->queues.find(handle);
    if (found == state->queues.end()) return;
    std::lock_guard<std::mutex> hold(found->second->lock);
    put_barriers(*found->second);
}

template <class Store>
void ring(hsa_handle signal, int64_t value, const Store &original) {
    hsa_queue *queue = queue_of(signal);
    if (!queue) return original(signal, value);
    bool owes = false;
    if (OwnWork work; work && agent.live)
        quietly([&] { owes = before_doorbell(queue, static_cast<uint64_t>(value)); });
    original(signal, value);
    if (!owes) return;
    if (OwnWork work; work) quietly([&] { after_doorbell(queue); });
}

}  // namespace

template <int kIndex>
uint64_t on_add_write_index(const hsa_queue *queue, uint64_t count) {
    auto *handle = const_cast<hsa_queue *>(queue);
    last_queue() = {handle, queue->doorbell.handle};
    auto take = [&](uint64_t places) { return originals.add_write_index[kIndex](queue, places); };
    if (OwnWork work; work && agent.live && queue->type != HSA_QUEUE_SINGLE) {
        uint64_t index = 0;
        bool taken = false;
        quietly([&] {
            std::shared_lock<std::shared_mutex> known;
            Queue &of = known_queue(handle, known);
            std::lock_guard<std::mutex> hold(of.lock);
            index = take_places(of, count, [&](uint64_t places) {
                taken = true;
                return take(places);
            });
        });
        if (taken) return index;
    }
    return take(count);
}
template uint64_t on_add_write_index<0>(const hsa_queue *, uint64_t);
template uint64_t on_add_write_index<1>(const hsa_queue *, uint64_t);
template uint64_t on_add_write_index<2>(const hsa_queue *, uint64_t);
template uint64_t on_add_write_index<3>(const hsa_queue *, uint64_t);

void on_store_relaxed(hsa_handle signal, int64_t value) { ring(signal, value, originals.store_relaxed); }
void on_store_screlease(hsa_handle signal, int64_t value) { ring(signal, value, originals.store_screlease); }

hsa_status on_destroy_queue(hsa_queue *handle) {
    std::unique_ptr<Queue> gone;
    if (OwnWork work; work)
        quietly([&] {
            std::lock_guard<std::shared_mutex> hold(state->lock);
            const auto found = state->queues.find(handle);
            if (found == state->queues.end()) return;
            gone = std::move(found->second);
            state->queues.erase(found);
            for (hsa_handle signal : gone->owed) hsa.signal_subtract_screlease(signal, 1);
        });
    const hsa_status status = originals.destroy_queue(handle);
    if (gone)  // the GPU needs them no more
        for (const Gate &gate : gone->gates) hsa.signal_destroy(gate.signal);
    return status;
}

void look_after_queues() {
    std::shared_lock<std::shared_mutex> known(state->lock);
    for (auto &queue : state->queues) {
        std::lock_guard<std::mutex> hold(queue.second->lock);
        open_gates(*queue.second, 0, true);
        put_barriers(*queue.second);
    }
}

void leave_queues() {
    std::shared_lock<std::shared_mutex> known(state->lock);
    for (auto &queue : state->queues) {
        std::lock_guard<std::mutex> hold(queue.second->lock);
        open_gates(*queue.second, UINT64_MAX);
        put_barriers(*queue.second);
        const uint64_t read = hsa.queue_load_read_index_scacquire(queue.first);
        for (const Gate &gate : queue.second->gates)  // the GPU still needs the signals of the others
            if (gate.index < read) hsa.signal_destroy(gate.signal);
    }
}

const Lifetime doorbell_lifetime = lifetime_of_attachment_state<state>();

}  // namespace gpubpf
