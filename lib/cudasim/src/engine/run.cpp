// Runs grids. The thread that calls run() runs blocks of its grid. The threads of a pool run blocks of all grids in turn. So
// launches overlap, and a grid that waits for another grid does not block it.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <system_error>
#include <thread>
#include <tuple>

#include "engine/internal.h"

namespace cudasim {

namespace {

constexpr uint64_t kMaxResident = 65536;  // threads of a grid that have started; more than fit on the device
// Up to these sizes, the memory of a block is kept for other grids: local memory in bytes per thread, shared memory in
// bytes per block.
constexpr uint32_t kSmallLocal = 4096, kSmallShared = 65536;
constexpr size_t kMostKept = 64 << 20;  // bytes of ordered blocks
constexpr uint32_t kCacheLine = 64;     // bytes

struct Grid : Job {
    // A block is a cluster here, if clusters have several blocks: the block of rank 0 stands for its cluster.
    uint64_t total = 0, next = 0;  // blocks; [next, total) have not started
    uint64_t resumed = 0;          // slices of suspended blocks since the last block started
    uint32_t running = 0;          // host threads that run a slice
    std::deque<std::unique_ptr<Block>> suspended;
    std::multimap<uint64_t, std::unique_ptr<Block>> asleep;  // by when they wake, CLOCK_MONOTONIC in ns
    std::vector<std::unique_ptr<Block>> idle;
    std::condition_variable changed;  // wakes the thread in run()
    Fault fault;
    uint64_t end = 0, fault_end = 0;  // virtual clock: the end of the last thread; the time of the fault
    bool stop = false;
    uint64_t multiplier = 1,
             shift = 0;  // hostile mode: the i-th block to start is (i * multiplier + shift) % total

    uint64_t threads() const {
        return static_cast<uint64_t>(launch->block[0]) * launch->block[1] * launch->block[2] * cluster_blocks;
    }
    // Limits the memory of sleeping blocks.
    bool can_start_block() const { return next < total && asleep.size() * threads() < kMaxResident; }
    bool has_work() const { return !stop && (can_start_block() || !suspended.empty()); }
    bool finished() const {
        return running == 0 && (stop || (next == total && suspended.empty() && asleep.empty()));
    }
};

struct Pool {
    std::mutex mutex;
    std::condition_variable work;
    std::list<Grid *> grids;
    std::vector<std::unique_ptr<Block>> idle;          // from finished grids, to reuse their memory
    std::vector<std::unique_ptr<Block>> idle_ordered;  // from an ordered one
    uint32_t threads = 0;                              // of the pool
    uint32_t limit = 0;
    Statistics statistics = {};
};

alignas(Pool) unsigned char pool_memory[sizeof(Pool)];
Pool *pool = nullptr;
std::once_flag once;

uint32_t thread_limit() {
    if (const char *text = getenv("CUDASIM_THREADS")) {
        const long value = strtol(text, nullptr, 10);
        if (value >= 1 && value <= 1024) return static_cast<uint32_t>(value);
    }
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
    return std::max(1u, std::thread::hardware_concurrency());
}

// The pool is never destroyed, because kernels may run while the process exits.
void make_pool() {
    pool = new (pool_memory) Pool();
    pool->limit = thread_limit();
}

Pool &get_pool() {
    std::call_once(once, [] {
        make_pool();
        pthread_atfork(nullptr, nullptr, after_fork_in_child);
    });
    return *pool;
}

uint64_t shuffled_index(const Grid &grid, uint64_t k) {
    if (grid.multiplier == 1 && grid.shift == 0) return k;
    return static_cast<uint64_t>((static_cast<unsigned __int128>(k) * grid.multiplier + grid.shift) %
                                 grid.total);
}

// Runs an ordered kernel, with all its threads in the calling host thread. The earliest thread runs until it has to wait for its
// turn again. So the order in which threads communicate depends on their virtual times alone, not on the host. Above
// kMaxResident threads, a block starts when another one ends.
void run_ordered(Grid &grid) {
    enum { starts, runs, waits_for_turn };
    using Key = std::tuple<uint64_t, int, uint64_t>;  // time; what happens then; number
    std::map<Key, std::unique_ptr<Block>> events;
    const LaunchDescription &launch = *grid.launch;
    uint64_t places = 0, turns = 0;
    while (places < std::min(grid.total, std::max<uint64_t>(1, kMaxResident / grid.threads())))
        events.emplace(Key{launch.start_ns, starts, places++}, nullptr);
    while (!events.empty()) {
        if (turns++ % 1024 == 0 && launch.cancel && launch.cancel->load(std::memory_order_relaxed)) {
            grid.fault.cancelled = true;
            return;
        }
        auto node = events.extract(events.begin());
        std::unique_ptr<Block> block = std::move(node.mapped());
        const int kind = std::get<1>(node.key());
        if (kind == starts) {
            if (grid.next == grid.total) {
                if (block) grid.idle.push_back(std::move(block));
                continue;
            }
            if (!block && !grid.idle.empty()) {
                block = std::move(grid.idle.back());
                grid.idle.pop_back();
            }
            if (!block) block = std::make_unique<Block>();
            begin_cluster(*block, grid, grid.next++);
        } else if (kind == waits_for_turn) {
            give_turn(*block);
        }
        Fault fault;
        const Outcome outcome = run_slice(*block, fault);
        if (outcome == Outcome::failed) {
            grid.fault = fault;
            grid.fault_end = block->end;
            return;
        }
        if (outcome == Outcome::finished) {
            grid.end = std::max(grid.end, block->end);
            const uint64_t end = block->end;
            events.emplace(Key{end, starts, places++}, std::move(block));
        } else {
            const EarliestThread thread = earliest_thread(*block);
            const uint64_t number = block->linear;
            events.emplace(Key{thread.time, thread.waits_for_turn ? waits_for_turn : runs, number},
                           std::move(block));
        }
    }
}

uint64_t gcd(uint64_t a, uint64_t b) { return b ? gcd(b, a % b) : a; }

Fault out_of_memory_fault(const Grid &grid) {
    Fault fault;
    fault.code = CS_FAULT_LAUNCH_FAILED;
    fault.kernel = grid.kernel->name;
    fault.message = "out of host memory for the threads of a block";
    return fault;
}

// The next work of a host thread: a slice of a suspended block, or the first slices of some new blocks.
struct Work {
    std::unique_ptr<Block> block;   // the suspended block, or one to reuse; may be null
    bool resume = false;            // whether it is a suspended block
    uint64_t first = 0, count = 1;  // new blocks
};

// The result of some work.
struct Result {
    Fault fault;
    uint64_t fault_end = 0;  // virtual clock
    std::vector<std::unique_ptr<Block>> unfinished;
    uint64_t slices = 0;
    uint64_t end = 0;  // virtual clock: the end of the last thread
};

// Makes the blocks that have slept long enough ready to run.
void wake_blocks(Grid &grid) {
    for (auto it = grid.asleep.begin();
         it != grid.asleep.end() && it->first <= nanoseconds(CLOCK_MONOTONIC);) {
        grid.suspended.push_back(std::move(it->second));
        it = grid.asleep.erase(it);
    }
}

Work take_work(Pool &p, Grid &grid) {  // mutex held
    Work work;
    // A suspended block has used its quantum, and may wait for a block that has not started. So each suspended block gets one
    // slice before the next block starts.
    if (!grid.suspended.empty() && (!grid.can_start_block() || grid.resumed < grid.suspended.size())) {
        work.block = std::move(grid.suspended.front());
        grid.suspended.pop_front();
        grid.resumed++;
        work.resume = true;
        return work;
    }
    const uint64_t left = grid.total - grid.next;
    work.count = std::clamp<uint64_t>(left / (8ull * p.limit), 1, 64);
    if (!grid.suspended.empty() || !grid.asleep.empty() || grid.image->virtual_clock) work.count = 1;
    work.first = grid.next;
    grid.next += work.count;
    grid.resumed = 0;
    std::vector<std::unique_ptr<Block>> &idle = grid.idle.empty() ? p.idle : grid.idle;
    if (!idle.empty()) {
        work.block = std::move(idle.back());
        idle.pop_back();
    }
    return work;
}

Result run_work(Grid &grid, Work &work) {
    Result result;
    std::unique_ptr<Block> &block = work.block;
    for (uint64_t k = 0; k < work.count; k++) {
        Outcome outcome = Outcome::failed;
        try {
            if (!block) block = std::make_unique<Block>();
            if (!work.resume) begin_cluster(*block, grid, shuffled_index(grid, work.first + k));
            result.slices++;
            outcome = run_slice(*block, result.fault);
        } catch (const std::bad_alloc &) {
            result.fault = out_of_memory_fault(grid);
        }
        if (outcome == Outcome::finished) result.end = std::max(result.end, block->end);
        if (outcome == Outcome::yielded) result.unfinished.push_back(std::move(block));
        if (outcome == Outcome::failed) {
            result.fault_end = block ? block->end : 0;
            break;
        }
    }
    return result;
}

// Takes some work of a grid and does it. The mutex is held on entry and on return. Returns false if the grid has no work.
bool run_some(Pool &p, Grid &grid, std::unique_lock<std::mutex> &lock) {
    wake_blocks(grid);
    if (!grid.has_work()) return false;
    if (grid.launch->cancel && grid.launch->cancel->load(std::memory_order_relaxed)) {
        grid.fault.cancelled = true;
        grid.stop = true;
        grid.changed.notify_all();
        return true;
    }
    Work work = take_work(p, grid);
    grid.running++;
    lock.unlock();
    Result result = run_work(grid, work);
    lock.lock();
    grid.running--;
    p.statistics.slices += result.slices;
    p.statistics.blocks += work.resume ? 0 : work.count * grid.cluster_blocks;
    if (work.block) grid.idle.push_back(std::move(work.block));
    for (auto &b : result.unfinished) {
        if (const uint64_t wake = b->wake) grid.asleep.emplace(wake, std::move(b));
        else grid.suspended.push_back(std::move(b));
    }
    grid.end = std::max(grid.end, result.end);
    if (result.fault.code && !grid.fault.code) {
        grid.fault = result.fault;
        grid.fault_end = result.fault_end;
        grid.stop = true;
    }
    if (grid.finished() || !result.unfinished.empty()) grid.changed.notify_all();
    return true;
}

void worker() {
    Pool &p = *pool;
    std::unique_lock<std::mutex> lock(p.mutex);
    for (;;) {
        Grid *chosen = nullptr;
        for (auto it = p.grids.begin(); it != p.grids.end(); ++it) {
            if ((*it)->has_work()) {
                chosen = *it;
                p.grids.splice(p.grids.end(), p.grids, it);  // the other grids are next
                break;
            }
        }
        if (chosen) run_some(p, *chosen, lock);
        else p.work.wait(lock);
    }
}

void start_workers(Pool &p) {  // mutex held
    while (p.threads + 1 < p.limit) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // the application's own threads handle its signals
        sigdelset(&all, SIGSEGV);
        sigdelset(&all, SIGBUS);
        sigdelset(&all, SIGFPE);
        sigdelset(&all, SIGILL);
        pthread_sigmask(SIG_SETMASK, &all, nullptr);
        bool ok = true;
        try {
            std::thread(worker).detach();
        } catch (const std::system_error &) {
            ok = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (!ok) {
            p.limit = p.threads + 1;
            return;
        }
        p.threads++;
    }
}

void make_clusters(Grid &grid) {
    const uint32_t *const shape = grid.launch->cluster;
    std::copy_n(shape, 3, grid.cluster);
    grid.cluster_blocks = shape[0] * shape[1] * shape[2];
    grid.total /= grid.cluster_blocks;
    for (uint32_t rank = 0; rank < grid.cluster_blocks; rank++)
        for (uint32_t k = 0; k < grid.image->nshared; k++)
            grid.cluster_offsets.push_back(grid.kernel->shared_offsets[k] + (rank << CS_RANK_SHIFT));
}

std::unique_ptr<Grid> make_grid(const LaunchDescription &launch, const LoadedImage &image) {
    auto grid = std::make_unique<Grid>();
    grid->launch = &launch;
    grid->image = image.raw;
    grid->code = image.code();
    grid->kernel = &image.raw->kernels[launch.kernel];
    const cs_kernel &kernel = *grid->kernel;
    grid->parameters.resize(kernel.param_bytes + 64);
    if (kernel.param_bytes) memcpy(grid->parameters.data(), launch.parameters, kernel.param_bytes);
    grid->shared_size = kernel.reserved_shared + kernel.static_shared + launch.dynamic_shared;
    grid->local_size = (kernel.local + 15) / 16 * 16;
    if (kernel.recursive) {
        // the stack limit allows activations of at least 16 bytes
        grid->local_size += (launch.stack_limit + 15) / 16 * 16 + kernel.local;
    }
    // An odd number of cache lines: lanes that use the same offset do not compete for one set of the cache.
    grid->local_stride = grid->local_size < kCacheLine
                             ? grid->local_size
                             : ((grid->local_size + kCacheLine - 1) / kCacheLine | 1) * kCacheLine;
    grid->total = static_cast<uint64_t>(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    if (launch.cluster[0] != 0) make_clusters(*grid);
    // On the virtual clock, even races repeat exactly: one host thread runs all blocks, in one order.
    grid->shuffle = launch.hostile && !image.virtual_clock;
    if (grid->shuffle && grid->total > 1) {
        uint64_t state = launch.seed;
        do grid->multiplier = next_random(state) % std::min<uint64_t>(grid->total, 1u << 31) | 1;
        while (gcd(grid->multiplier, grid->total) != 1);
        grid->shift = next_random(state) % grid->total;
    }
    return grid;
}

// Keeps the memory of a grid's blocks for other grids, unless the blocks are large.
void keep_idle_blocks(Pool &p, Grid &grid) {  // mutex held
    if (grid.local_size > kSmallLocal || grid.shared_size > kSmallShared) return;
    while (!grid.stop && !grid.idle.empty() && p.idle.size() < p.limit) {
        for (const std::unique_ptr<Warp> &warp : grid.idle.back()->spare) warp->job = nullptr;
        grid.idle.back()->followers.clear();
        p.idle.push_back(std::move(grid.idle.back()));
        grid.idle.pop_back();
    }
}

size_t memory_of(const Block &block) {
    size_t bytes = block.shared.size();
    for (const std::unique_ptr<Warp> &warp : block.spare)
        bytes += warp->frame.size() + warp->args.size() + warp->local.size();
    return bytes;
}

// The same for an ordered grid, all of whose blocks have memory at once. To map it for each launch takes longer than a short kernel.
void keep_ordered_blocks(Pool &p, Grid &grid) {  // mutex held
    if (grid.fault.code || grid.fault.cancelled || !p.idle_ordered.empty()) return;
    size_t bytes = 0;
    for (std::unique_ptr<Block> &block : grid.idle) {
        block->followers.clear();
        bytes += memory_of(*block);
        if (bytes > kMostKept) break;
        for (const std::unique_ptr<Warp> &warp : block->spare) warp->job = nullptr;
        p.idle_ordered.push_back(std::move(block));
    }
    grid.idle.clear();
}

}  // namespace

void after_fork_in_child() {
    if (pool)
        make_pool();  // the threads of the old pool exist only in the parent, and its mutex may be locked
}

Statistics statistics() {
    Pool &p = get_pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    return p.statistics;
}

namespace {

// Runs one grid. `nested` gets the grids that it launched.
Fault run_grid(const LaunchDescription &launch, uint64_t *duration_ns, std::vector<NestedLaunch> &nested) {
    Pool &p = get_pool();
    install_signal_handlers();
    const auto &image = static_cast<const LoadedImage &>(*launch.image);
    TranslateError error;
    if (!image.prepare(launch.kernel, error)) {
        Fault fault;
        fault.code = CS_FAULT_LAUNCH_FAILED;
        fault.kernel = image.kernels()[launch.kernel].name;
        fault.message = "kernel " + fault.kernel + ": " + error.log;
        return fault;
    }
    std::unique_ptr<Grid> grid = make_grid(launch, image);
    Grid &g = *grid;
    const uint64_t start = nanoseconds(CLOCK_MONOTONIC);
    std::unique_lock<std::mutex> lock(p.mutex);
    p.statistics.grids++;
    if (g.kernel->ordered) {
        p.statistics.blocks += g.total * g.cluster_blocks;
        g.idle.swap(p.idle_ordered);
        lock.unlock();
        try {
            run_ordered(g);
        } catch (const std::bad_alloc &) {
            g.fault = out_of_memory_fault(g);
        }
        g.stop = true;
        lock.lock();
        keep_ordered_blocks(p, g);
    }
    const bool shared = g.total > 1 && !image.virtual_clock;
    if (shared) {
        p.grids.push_back(&g);
        start_workers(p);
        p.work.notify_all();
    }
    while (!g.finished()) {
        if (!run_some(p, g, lock)) {
            if (g.asleep.empty()) g.changed.wait(lock);
            else
                g.changed.wait_until(lock, std::chrono::steady_clock::time_point(
                                               std::chrono::nanoseconds(g.asleep.begin()->first)));
        } else if (shared && !g.suspended.empty()) p.work.notify_all();
    }
    if (shared) p.grids.remove(&g);
    keep_idle_blocks(p, g);
    lock.unlock();
    image.ran(launch.kernel, nanoseconds(CLOCK_MONOTONIC) - start);
    if (duration_ns && g.image->virtual_clock) {
        const uint64_t end = g.fault.code ? g.fault_end : g.end;
        *duration_ns = end > launch.start_ns ? end - launch.start_ns : 0;
    }
    for (const auto &[buffer, unused] : g.prepared)
        if (launch.environment->release) launch.environment->release(launch.environment->self, buffer);
    nested = std::move(g.nested);
    return g.fault;
}

constexpr uint64_t kTailLaunch = 3;  // cudaStreamTailLaunch

// Adds the grids that one grid launched to the stack `todo`, whose last grid runs next. Tail launches run after the others.
void add_nested(std::vector<NestedLaunch> &todo, std::vector<NestedLaunch> &nested) {
    for (const bool tail : {true, false})
        for (auto it = nested.rbegin(); it != nested.rend(); ++it)
            if ((it->stream == kTailLaunch) == tail) todo.push_back(std::move(*it));
    nested.clear();
}

}  // namespace

Fault run(const LaunchDescription &launch, uint64_t *duration_ns) {
    uint64_t duration = 0, launched = 0;
    std::vector<NestedLaunch> nested, todo;
    Fault fault = run_grid(launch, &duration, nested);
    for (add_nested(todo, nested); !todo.empty() && !fault && !fault.cancelled; add_nested(todo, nested)) {
        const NestedLaunch next = std::move(todo.back());
        todo.pop_back();
        LaunchDescription child = launch;
        child.kernel = next.kernel;
        child.parameters = next.parameters.data();
        memcpy(child.grid, next.grid, sizeof child.grid);
        memcpy(child.block, next.block, sizeof child.block);
        child.dynamic_shared = next.dynamic_shared;
        child.grid_id = launch.grid_id | ++launched << 32;
        child.cooperative = false;
        child.userdata = launch.nested_userdata;
        const cs_kernel &kernel = static_cast<const LoadedImage &>(*launch.image).raw->kernels[next.kernel];
        memcpy(child.cluster, kernel.reqnctapercluster, sizeof child.cluster);
        child.seed = launch.seed + launched;
        child.start_ns = launch.start_ns + duration;
        child.ends = nullptr;
        uint64_t more = 0;
        fault = run_grid(child, &more, nested);
        duration += more;
    }
    if (duration_ns) *duration_ns = duration;
    return fault;
}

}  // namespace cudasim
