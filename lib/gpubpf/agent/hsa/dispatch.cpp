// Dispatches. An instrumented dispatch runs the copy, with a new argument buffer: the program's arguments, then the launch block.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <unistd.h>

#include "agent.h"
#include "log/host_program.h"

namespace gpubpf {

namespace {

constexpr size_t kArgumentBytes = 64 << 10;  // the least size of an argument buffer
constexpr size_t kArgumentAlignment = 64;
constexpr auto kAtDestroy = std::chrono::seconds(1);  // longest wait for the agent's packets in a queue
constexpr uint64_t kLds = 64 << 10;                   // bytes per compute unit
constexpr uint64_t kMostBlocks = 16;  // multi-wave blocks per compute unit: each needs a barrier

void add(std::atomic<uint64_t> &counter, uint64_t n = 1) { counter.fetch_add(n, std::memory_order_relaxed); }

// Returns memory for the arguments of a dispatch in a queue, or null. Call with `gpu.lock` held.
char *take_arguments(Gpu &gpu, uint32_t queue, size_t size, hsa_handle &running) {
    size = (size + kArgumentAlignment - 1) & ~(kArgumentAlignment - 1);
    auto &parts = gpu.arguments[queue];
    if (parts.empty() || parts.back()->size - parts.back()->used < size) {
        size_t found = parts.size();
        for (size_t i = 0; i + 1 < parts.size() && found == parts.size(); ++i)
            if (parts[i]->size >= size && hsa.signal_load_scacquire(parts[i]->running) == 0) found = i;
        if (found < parts.size()) {
            parts[found]->used = 0;
            std::swap(parts[found], parts.back());
        } else {
            auto made = std::make_unique<Arguments>();
            void *base = nullptr;
            made->size = std::max(size, kArgumentBytes);
            if (hsa.amd_signal_create(0, 0, nullptr, HSA_SIGNAL_GPU_ONLY, &made->running)) return nullptr;
            if (hsa.amd_memory_pool_allocate(gpu.argument_pool, made->size, 0, &base) ||
                hsa.amd_agents_allow_access(1, &gpu.agent, nullptr, base)) {
                hsa.signal_destroy(made->running);
                if (base) hsa.amd_memory_pool_free(base);
                return nullptr;
            }
            made->base = static_cast<char *>(base);
            parts.push_back(std::move(made));
        }
    }
    Arguments &part = *parts.back();
    char *at = part.base + part.used;
    part.used += size;
    running = part.running;
    return at;
}

// Returns false if the grid has incomplete blocks.
bool shape_of(const hsa_packet &packet, Shape &shape) {
    for (int axis = 0; axis < 3; ++axis) {
        const uint32_t block = packet.block[axis], threads = packet.grid[axis];
        if (!block || threads % block) return false;
        shape[axis] = block;
        shape[3 + axis] = threads / block;
    }
    return true;
}

// Returns how many blocks are resident on the whole GPU, if `fit` threads fit on the compute units that a
// block can use.
uint64_t resident(const Gpu &gpu, const Layout &layout, const hsa_packet &packet, uint64_t threads,
                  uint32_t fit) {
    const uint64_t waves = (threads + layout.wave - 1) / layout.wave;
    uint64_t blocks = fit / layout.wave / waves;
    if (packet.shared) blocks = std::min<uint64_t>(blocks, kLds * layout.compute_units / packet.shared);
    if (waves > 1) blocks = std::min(blocks, kMostBlocks * layout.compute_units);
    return blocks * (gpu.compute_units / layout.compute_units);
}

// Whether the copy can run instead of the original. Kernels whose blocks wait for each other hang if fewer blocks are resident than
// they expect. Other kernels only need room for one block.
bool has_room(const Gpu &gpu, const Layout &layout, const hsa_packet &packet, const Shape &shape) {
    const uint64_t threads = uint64_t(shape[0]) * shape[1] * shape[2];
    const uint64_t blocks = uint64_t(shape[3]) * shape[4] * shape[5];
    if (threads > layout.most_threads) return false;
    return !layout.waits ||
           resident(gpu, layout, packet, threads, layout.most_threads) >=
               std::min(blocks, resident(gpu, layout, packet, threads, layout.original_threads));
}

// Changes a dispatch to run the copy. Returns an Outcome or outcome_of(Reason). `barrier`: null if no packet can follow.
uint32_t change(hsa_packet &packet, Gpu &gpu, uint32_t queue, Kernel &kernel, uint64_t launch,
                hsa_packet *barrier) {
    Copy *copy = kernel.copy.load(std::memory_order_acquire);
    if (!copy)
        return kernel.refused ? outcome_of(kRefused) : uint32_t(kernel.waits ? kNotReady : kNotMatched);
    const Config &config = agent.config;
    const uint64_t number = kernel.slot->number.fetch_add(1, std::memory_order_relaxed) + 1;
    if (number < config.launches.first || number > config.launches.second) return outcome_of(kFiltered);
    if (config.sample > 1 && (number - config.launches.first) % config.sample) return outcome_of(kSampledOut);
    if (!config.chosen_ranges.empty())
        return outcome_of(kFiltered);  // the ranges of HIP programs are not known
    const Layout &layout = *copy->layout;
    Shape shape;
    if (!shape_of(packet, shape)) return outcome_of(kIncompleteBlocks);
    if (layout.tick != kNoField && !gpu.tick) return outcome_of(kCopyFailed);
    if (!has_room(gpu, layout, packet, shape)) return outcome_of(kOccupancy);
    if (packet.completion.handle && !barrier) return outcome_of(kCopyFailed);
    if (config.allocation_stacks && packet.arguments)
        log_allocations_of(reinterpret_cast<const void *>(packet.arguments), kernel.argument_bytes, gpu);

    std::lock_guard<std::mutex> hold(gpu.lock);
    if (!agent.is_read_later()) return outcome_of(kProcessEnding);
    Instance &instance = copy->instances[shape];
    if (instance.launch_block.empty() && !give_memory(gpu, *copy, shape, instance))
        return outcome_of(kMapTooSmall);
    hsa_handle running;
    char *arguments = take_arguments(gpu, queue, layout.block_offset + layout.block.size(), running);
    if (!arguments) return outcome_of(kCopyFailed);
    if (packet.arguments && kernel.argument_bytes)
        memcpy(arguments, reinterpret_cast<const void *>(packet.arguments), kernel.argument_bytes);
    char *block = arguments + layout.block_offset;
    memcpy(block, instance.launch_block.data(), layout.block.size());
    auto put = [&](uint32_t at, uint64_t value) {
        if (at != kNoField) memcpy(block + at, &value, sizeof value);
    };
    put(kBlockLaunch, launch);
    put(layout.pid_tgid, static_cast<uint64_t>(process_id()) << 32 | thread_id());
    put(layout.kernel, kernel.slot_index);
    if (layout.epoch != kNoField) put(layout.epoch, allocation_epoch());
    put(layout.tick, gpu.tick);
    if (layout.shape != kNoField) memcpy(block + layout.shape, shape.data(), sizeof shape);

    hsa.signal_add_relaxed(running, 1);
    packet.kernel = copy->object;
    packet.arguments = reinterpret_cast<uint64_t>(arguments);
    if (!packet.completion.handle) {
        packet.completion = running;
    } else {  // keep the program's signal; a barrier after the dispatch shows that it ended
        memset(barrier, 0, sizeof *barrier);
        barrier->header = HSA_BARRIER;
        barrier->completion = running;
    }
    ++instance.launches;
    uint64_t threads = 1;
    for (uint32_t extent : shape) threads *= extent;
    add(kernel.slot->threads, threads);
    add(kernel.slot->instrumented);
    agent.launched();
    return kInstrumented;
}

void log_launch(const hsa_packet &packet, const Gpu &gpu, uint32_t queue, const Kernel &kernel,
                uint64_t launch, uint32_t outcome) {
    Record r;
    r.kind = Kind::Kernel;
    if (!agent.config.chosen_ranges.empty()) r.flags |= kNotChosen;
    r.id = launch;
    r.thread = thread_id();
    r.context = gpu.number;
    r.queue = queue;
    r.kernel.slot = kernel.slot_index;
    r.kernel.outcome = outcome;
    if (outcome == kInstrumented) r.kernel.build = kernel.copy.load()->layout->build;
    for (int axis = 0; axis < 3; ++axis) {
        r.kernel.block[axis] = packet.block[axis];
        r.kernel.grid[axis] =
            packet.block[axis] ? (packet.grid[axis] + packet.block[axis] - 1) / packet.block[axis] : 0;
    }
    r.kernel.shared = packet.shared;
    if (outcome != kInstrumented) describe_own_kernel(r, kernel.name);
    put_operation(r);
}

using Parts = std::vector<std::unique_ptr<Arguments>>;

bool have_ended(const Parts &parts) {
    return std::all_of(parts.begin(), parts.end(),
                       [](const auto &part) { return hsa.signal_load_scacquire(part->running) == 0; });
}

void free_all(const Parts &parts) {
    for (const auto &part : parts) {
        hsa.amd_memory_pool_free(part->base);
        hsa.signal_destroy(part->running);
    }
}

// Runs the host programs for a launch, in the launching thread.
void run_host_programs(const hsa_packet &packet, const Gpu &gpu, const Kernel &kernel, uint64_t launch) {
    if (!host_program()) return;
    if (!agent.config.match_all && !kernel.copy.load(std::memory_order_acquire) && !kernel.refused) return;
    const Call *call = current_call();
    const uint64_t stream = call && call->stream != kUnknownStream ? call->stream : 0;
    run_host_program({launch, kernel.slot_index, stream, call ? call->called_at() : now_ns(),
                      uint64_t(packet.grid[0]) * packet.grid[1] * packet.grid[2], gpu.number});
}

}  // namespace

uint64_t take_packet(hsa_packet *packet, Gpu &gpu, uint32_t queue, uint64_t &untimed, bool alone) {
    Kernel *kernel = find_kernel(packet->kernel);
    if (!kernel) {
        add(agent.control->unnamed);
        return 1;
    }
    add(kernel->slot->seen);
    packet[1].header = 0;
    uint32_t outcome = outcome_of(kCopyFailed);
    const hsa_packet before = *packet;
    const uint64_t launch = take_ids(1);
    quietly([&] {
        outcome = change(*packet, gpu, queue, *kernel, launch, alone ? nullptr : packet + 1);
        run_host_programs(before, gpu, *kernel, launch);
    });
    if (oplog.on()) quietly([&] { log_launch(before, gpu, queue, *kernel, launch, outcome); });
    if (outcome == kInstrumented) return packet[1].header ? 2 : 1;
    *packet = before;
    untimed = launch;
    if (outcome <= kReasons) add(kernel->slot->reasons[reason_of(outcome)]);
    return 1;
}

bool is_idle(Gpu &gpu) {
    std::lock_guard<std::mutex> hold(gpu.lock);
    for (const auto &queue : gpu.arguments)
        if (!have_ended(queue.second)) return false;
    return true;
}

void wait_for_queue(Gpu &gpu, uint32_t queue) {
    auto is_over = [&] {
        std::lock_guard<std::mutex> hold(gpu.lock);
        const auto found = gpu.arguments.find(queue);
        return found == gpu.arguments.end() || have_ended(found->second);
    };
    const auto until = std::chrono::steady_clock::now() + kAtDestroy;
    for (useconds_t pause = 20; !is_over() && std::chrono::steady_clock::now() < until;
         pause = std::min<useconds_t>(2 * pause, 1000))
        usleep(pause);
}

void forget_queue(Gpu &gpu, uint32_t queue) {
    std::lock_guard<std::mutex> hold(gpu.lock);
    const auto found = gpu.arguments.find(queue);
    if (found == gpu.arguments.end()) return;
    if (!have_ended(found->second)) gpu.cut_off = true;
    free_all(found->second);
    gpu.arguments.erase(found);
}

void free_arguments(Gpu &gpu) {
    for (const auto &queue : gpu.arguments) free_all(queue.second);
    gpu.arguments.clear();
}

}  // namespace gpubpf
