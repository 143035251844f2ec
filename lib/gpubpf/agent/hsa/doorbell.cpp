// The program's queues, if the agent attaches to a running process. ROCr can only intercept a queue from its creation on. So the agent
// changes a packet in place, before the program rings the queue's doorbell.
//
// The standard allows a GPU that is processing a queue to take a packet before the doorbell. So each packet has a gate before it: a
// barrier that the agent inserts when the program reserves the packet's slot. The agent opens the gate at the doorbell. If the queue
// has no room for a gate, the GPU still has a whole queue of work to do first. The order of the stores keeps the packet valid at any
// time: the new arguments begin with the program's, and only the last store replaces the kernel.
//
// If a dispatch has the program's own signal, a barrier after the dispatch shows that the dispatch ended. The agent inserts the barrier
// after the doorbell, as any thread of the program may insert packets. If the queue is full, the agent inserts it later.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <set>

#include "agent.h"

namespace gpubpf {

namespace {

constexpr uint64_t kFull = 16;                             // slots that the agent leaves free
constexpr auto kLongest = std::chrono::milliseconds(100);  // longest time that a gate is closed

struct Gate {
    uint64_t index;
    hsa_handle signal;
    std::chrono::steady_clock::time_point since;
    bool open = false;
};

struct Queue {
    hsa_queue *handle;
    std::mutex lock;  // guards the members below
    bool known = false;
    // The program reserves slots by adding to the write index, which several threads may do. Otherwise it may store a write index that
    // it read earlier, so no one else may reserve a slot.
    bool adds = false;
    Gpu *gpu = nullptr;
    uint32_t number = 0;           // its number in the log
    uint64_t end = 0;              // all packets before this index were processed, except `unwritten`
    std::set<uint64_t> unwritten;  // packets that the program has not written yet
    std::set<uint64_t> own;        // the agent's packets that change_up_to() has not reached yet
    std::deque<Gate> gates;
    std::vector<hsa_handle> owed;  // signals of barriers that are still to be inserted

    hsa_packet *at(uint64_t index) const {
        return static_cast<hsa_packet *>(handle->base) + (index & (handle->size - 1));
    }
};

struct State {
    std::shared_mutex lock;  // guards the map; held while a queue is used, so that it is not destroyed
    std::unordered_map<const hsa_queue *, std::unique_ptr<Queue>> queues;
};
AttachmentState<State> state;

std::atomic<uint64_t> destroyed{0};  // number of destroyed queues

// The queue where this thread last reserved a slot, its doorbell, and the value of `destroyed` at that time.
struct LastQueue {
    hsa_queue *queue;
    uint64_t doorbell, destroyed;
};
LastQueue &last_queue() {
    static thread_local LastQueue value __attribute__((tls_model("initial-exec"))) = {nullptr, 0, 0};
    return value;
}

// Returns the queue where this thread last reserved a slot if it has this doorbell and still exists.
hsa_queue *last_queue_of(uint64_t doorbell) {
    const LastQueue &last = last_queue();
    if (!last.queue || last.doorbell != doorbell) return nullptr;
    if (last.destroyed == destroyed) return last.queue;
    bool exists = false;
    if (OwnWork work; work)
        quietly([&] {
            std::shared_lock<std::shared_mutex> known(state->lock);
            exists = state->queues.count(last.queue);
        });
    return exists ? last.queue : nullptr;
}

// Returns the queue that a doorbell signal belongs to, or null. If another tool intercepts it, its doorbell is an ordinary signal.
hsa_queue *queue_of(hsa_handle signal) {
    const auto &memory = *reinterpret_cast<const hsa_signal *>(signal.handle);
    hsa_queue *queue = memory.kind == HSA_DOORBELL ? memory.queue : last_queue_of(signal.handle);
    return queue && queue->doorbell.handle == signal.handle ? queue : nullptr;
}

template <class T>
void store(T &to, T value) {
    __atomic_store_n(&to, value, __ATOMIC_RELEASE);
}

int type_of(const hsa_packet &packet) { return __atomic_load_n(&packet.header, __ATOMIC_ACQUIRE) & 0xff; }

// Sets a queue's GPU, if known. ROCr does not report it, so it is the GPU of a kernel in the queue, or the only GPU.
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

// Changes all written packets up to `last`. Call with the queue's lock held.
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

// Writes a packet into a slot that the agent reserved. Call with the queue's lock held.
void write(Queue &queue, uint64_t index, const hsa_packet &packet) {
    hsa_packet &to = *queue.at(index);
    memcpy(reinterpret_cast<char *>(&to) + sizeof to.header,
           reinterpret_cast<const char *>(&packet) + sizeof to.header, sizeof to - sizeof to.header);
    store(to.header, packet.header);
    queue.own.insert(index);
}

// Inserts the owed barriers that the queue has room for. Call with the queue's lock held.
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

// Returns a signal for a gate: one from a gate that the GPU has passed, or a new one. 0 if none can be created.
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

// Opens the gates up to packet `last` or, with `old`, those that were closed too long.
void open_gates(Queue &queue, uint64_t last, bool old = false) {
    const auto before = std::chrono::steady_clock::now() - kLongest;
    for (Gate &gate : queue.gates) {
        if (gate.open || (old ? gate.since > before : gate.index > last)) continue;
        gate.open = true;
        hsa.signal_store_relaxed(gate.signal, 0);
    }
}

// Reserves `count` slots for the program, and one more for a gate.
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

// Returns the state of a queue, creating it if necessary. Call without the lock; `known` holds it afterwards.
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

// Call before the program rings the doorbell for packet `last`. Returns whether barriers must be inserted afterwards.
bool before_doorbell(hsa_queue *handle, uint64_t last) {
    std::shared_lock<std::shared_mutex> known;
    Queue &queue = known_queue(handle, known);
    std::lock_guard<std::mutex> hold(queue.lock);
    if (!queue.known) queue.end = last + 1;  // earlier packets have no gate
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
    last_queue() = {handle, queue->doorbell.handle, destroyed};
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

void leave_queue(const hsa_queue *handle, LeftQueue &left) {
    ++destroyed;
    std::lock_guard<std::shared_mutex> hold(state->lock);
    const auto found = state->queues.find(handle);
    if (found == state->queues.end()) return;
    const std::unique_ptr<Queue> gone = std::move(found->second);
    state->queues.erase(found);
    for (hsa_handle signal : gone->owed) hsa.signal_subtract_screlease(signal, 1);
    for (const Gate &gate : gone->gates) left.signals.push_back(gate.signal);
    left.gpu = gone->gpu;
    left.number = gone->number;
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
        for (const Gate &gate : queue.second->gates)  // the GPU still needs the other signals
            if (gate.index < read) hsa.signal_destroy(gate.signal);
    }
}

const Lifetime doorbell_lifetime = lifetime_of_attachment_state<state>();

}  // namespace gpubpf
