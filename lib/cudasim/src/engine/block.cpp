// Runs one block: its warps take turns in the calling thread until the block has finished or has used its quantum.

#include <algorithm>
#include <cstring>
#include <tuple>

#include "engine/internal.h"

namespace cudasim {

namespace {

constexpr int kRounds = 4;  // a block's quantum: turns of every warp

// Sets the part of a warp's state that is the same in all warps of a grid.
void prepare(Warp &warp, Block &block) {
    Job &job = *block.job;
    const LaunchDescription &launch = *job.launch;
    cs_warp &w = warp.state;
    memset(static_cast<void *>(&w), 0, sizeof w);
    warp.job = &job;
    warp.tid_of = ~0u;
    w.api = &services;
    w.frame = warp.frame.reserve(job.kernel->frame_bytes + 64);
    w.args = warp.args.reserve(32ull * job.image->args_stride);
    w.local = warp.local.reserve(32ull * job.local_stride);
    w.params = job.parameters.data();
    w.vars = launch.variables;
    w.code_base = launch.code_base ? launch.code_base : launch.image->code_base;
    w.shared_offsets = job.kernel->shared_offsets;
    w.base = launch.environment->region_base;
    w.limit = launch.environment->region_size;
    w.constants = launch.environment->constant_base;
    w.constant_size = launch.environment->constant_size;
    w.shared_window = windows().shared;
    w.local_window = windows().local;
    w.param_window = windows().parameters;
    w.shared_size = w.total_shared = job.shared_size;
    w.local_size = job.local_size;
    w.local_stride = job.local_stride;
    w.param_size = job.kernel->param_bytes;
    w.stack_floor = (job.kernel->local + 15) / 16 * 16;
    memcpy(w.ntid, launch.block, sizeof w.ntid);
    memcpy(w.nctaid, launch.grid, sizeof w.nctaid);
    memcpy(w.cluster_nctaid, job.cluster, sizeof w.cluster_nctaid);
    w.explicit_cluster = launch.cluster[0] != 0;
    w.nwarpid = block.warps;
    w.nsmid = launch.environment->multiprocessors ? launch.environment->multiprocessors : 1;
    w.dynamic_shared = launch.dynamic_shared;
    w.hostile = launch.hostile;
    w.gridid = launch.grid_id;
    w.userdata = launch.userdata;
    w.first_pc = launch.first_pc;
    w.workspace = launch.cooperative ? reinterpret_cast<uint64_t>(job.workspace) : 0;
}

// Sets the thread indices of the lanes of the block's warp `index`.
void number_threads(Warp &warp, uint32_t index, const uint32_t *shape) {
    cs_warp &w = warp.state;
    warp.tid_of = index;
    const uint32_t first = index * 32;
    uint32_t x = first % shape[0], y = first / shape[0] % shape[1], z = first / shape[0] / shape[1];
    if (x + 32 <= shape[0]) {
        for (uint32_t l = 0; l < 32; l++) {
            w.tid[0][l] = x + l;
            w.tid[1][l] = y;
            w.tid[2][l] = z;
        }
        return;
    }
    for (uint32_t l = 0; l < 32; l++) {
        w.tid[0][l] = x;
        w.tid[1][l] = y;
        w.tid[2][l] = z;
        if (++x == shape[0]) {
            x = 0;
            if (++y == shape[1]) {
                y = 0;
                z++;
            }
        }
    }
}

// Sets what differs between the blocks of a cluster. Addresses in shared memory have the rank of the block.
void join_cluster(cs_warp &w, const Block &block) {
    const Job &job = *block.job;
    w.shared_at = block.rank << CS_RANK_SHIFT;
    w.shared_size = block.rank ? 0 : job.shared_size;
    w.shared_offsets = job.cluster_offsets.data() + size_t{job.image->nshared} * block.rank;
}

Warp *make_warp(Block &block, uint32_t index) {
    const Job &job = *block.job;
    if (block.spare.empty()) block.spare.push_back(std::make_unique<Warp>());
    Warp *warp = block.spare.back().release();
    block.spare.pop_back();
    if (warp->job != &job) prepare(*warp, block);
    cs_warp &w = warp->state;
    warp->index = index;
    warp->rotate = false;
    warp->rotate_lane = 31;
    if (job.kernel->recursive) {  // lanes may have exited inside of a recursion
        for (uint32_t l = 0; l < 32; l++) {
            w.lsp[l] = warp->depth[l] = 0;
            w.sp[l] = w.local_size;
            warp->saved[l].clear();
        }
    }
    const uint32_t first = index * 32;
    const uint32_t lanes = block.threads - first < 32 ? block.threads - first : 32;
    w.runnable = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w.exited = ~w.runnable;
    w.parked = w.mask = w.lane = w.line = 0;
    w.waiting_turn = w.turn_lanes = w.asleep = 0;
    w.ordered = job.kernel->ordered;
    w.resume_mask = w.runnable;  // all lanes are at the first basic block, so pick() reads no pcs
    w.resume_pc = job.kernel->entry_pc;
    w.shared = block.shared.reserve(job.shared_size);
    if (job.cluster_blocks > 1) join_cluster(w, block);
    memcpy(w.ctaid, block.id, sizeof w.ctaid);
    w.warpid = index;
    w.smid = block.smid;
    w.block = &block;
    if (job.image->virtual_clock) std::fill(w.time, w.time + 32, job.launch->start_ns);
    if (warp->tid_of != index) number_threads(*warp, index, job.launch->block);
    return warp;
}

// Runs a warp until it waits, yields, or has exited.
void run_warp(Warp &warp, const Job &job) {
    cs_warp &w = warp.state;
    w.budget = job.image->virtual_clock ? kVirtualBudget : kBudget;
    if (!services.pick(&w)) return;
    for (;;) {
        const int reason = job.code[job.image->function_of_pc[w.pc]](&w);
        if (reason == CS_SWITCH) continue;
        if (reason == CS_YIELD) warp.rotate = true;
        return;
    }
}

void check_barriers(Block &block) {
    for (uint32_t bits = block.barriers_in_use; bits; bits &= bits - 1) {
        const auto number = static_cast<uint32_t>(__builtin_ctz(bits));
        if (number == kClusterBarrier) check_cluster_barrier(block);
        else check_barrier(block, number);
    }
}

// Makes lanes runnable whose sleep is over.
void wake_lanes(Warp &warp, Block &block) {
    cs_warp &w = warp.state;
    const uint64_t now = nanoseconds(CLOCK_MONOTONIC);
    for (uint32_t m = w.asleep; m; m &= m - 1) {
        const auto l = static_cast<uint32_t>(__builtin_ctz(m));
        if (warp.wake[l] <= now) {
            w.asleep &= ~(1u << l);
            w.runnable |= 1u << l;
        } else if (!block.wake || warp.wake[l] < block.wake) {
            block.wake = warp.wake[l];
        }
    }
}

// Runs a warp for one turn. Returns whether it could run.
bool run_turn(Block &block, uint32_t index) {
    Warp &warp = *block.active[index];
    cs_warp &w = warp.state;
    if (w.asleep) wake_lanes(warp, block);
    if (!w.runnable && !(w.parked && complete_collectives(&w))) return false;
    const uint32_t exited = w.exited;
    current_guard->warp = &w;  // for a fault that a signal reports
    run_warp(warp, *block.job);
    if (w.exited != exited) {
        block.exited += static_cast<uint32_t>(__builtin_popcount(w.exited & ~exited));
        if (block.barriers_in_use) leave_cluster_barrier(&w, w.exited & ~exited);
        if (w.parked) complete_collectives(&w);
    }
    const bool finished = w.exited == ~0u;
    if (finished) {
        if (block.job->image->virtual_clock) {
            block.end = std::max(block.end, *std::max_element(w.time, w.time + 32));
            if (uint64_t *ends = block.job->launch->ends)
                std::copy_n(w.time, std::min(32u, block.threads - index * 32),
                            ends + block.linear * block.threads + index * 32);
        }
        block.spare.emplace_back(&warp);
        block.active[index] = nullptr;
        block.finished++;
    }
    if (block.barriers_in_use && (finished || w.exited != exited)) check_barriers(block);
    return true;
}

// Calls `act` with the state of each warp of a cluster that has started and not finished.
template <class Act>
void for_each_warp(const Block &leader, Act act) {
    for (uint32_t k = 0; k < leader.job->cluster_blocks; k++) {
        const Block &block = leader.member(k);
        for (uint32_t i = 0; i < block.warps; i++)
            if (block.active[i]) act(block.active[i]->state);
    }
}

bool any_waits_for_turn(const Block &leader) {
    bool any = false;
    for_each_warp(leader, [&](const cs_warp &w) { any |= w.waiting_turn != 0; });
    return any;
}

// Gives each warp of a block a turn. Returns whether one could run.
bool run_round(Block &block) {
    bool progress = false;
    block.wake = 0;
    const uint32_t from =
        block.job->shuffle ? static_cast<uint32_t>(next_random(block.random) % block.warps) : 0;
    for (uint32_t k = 0; k < block.warps; k++) {
        const uint32_t index = (k + from) % block.warps;
        if (block.active[index]) progress |= run_turn(block, index);
    }
    // A warp starts only when the warps before it wait, yield or have finished. So a kernel without barriers needs the
    // memory of one warp.
    bool waiting = false;
    while (!waiting && block.started < block.warps) {
        const uint32_t index = block.order[block.started++];
        block.active[index] = make_warp(block, index);
        progress |= run_turn(block, index);
        waiting = block.active[index] != nullptr && block.active[index]->state.runnable != 0;
    }
    return progress;
}

// The same for the blocks of a cluster that have not finished.
bool run_cluster_round(Block &leader) {
    const uint32_t count = leader.job->cluster_blocks;
    const uint32_t from = leader.job->shuffle ? static_cast<uint32_t>(next_random(leader.random) % count) : 0;
    bool progress = false;
    uint64_t wake = UINT64_MAX;
    for (uint32_t k = 0; k < count; k++) {
        Block &block = leader.member((k + from) % count);
        if (block.done()) continue;
        progress |= run_round(block);
        if (block.wake) wake = std::min(wake, block.wake);
    }
    leader.wake = wake == UINT64_MAX ? 0 : wake;
    return progress;
}

bool is_done(const Block &leader) {
    if (!leader.done()) return false;
    for (uint32_t k = 1; k < leader.job->cluster_blocks; k++)
        if (!leader.member(k).done()) return false;
    return true;
}

// Runs the warps of a cluster in rounds. Faults jump out of here, to run_slice().
Outcome run_rounds(Block &leader) {
    const uint32_t count = leader.job->cluster_blocks;
    for (int round = 0; round < kRounds; round++) {
        const bool progress = count == 1 ? run_round(leader) : run_cluster_round(leader);
        if (is_done(leader)) return Outcome::finished;
        if (!progress) return leader.wake || any_waits_for_turn(leader) ? Outcome::yielded : Outcome::failed;
    }
    leader.wake = 0;
    return Outcome::yielded;
}

}  // namespace

EarliestThread earliest_thread(const Block &leader) {
    uint64_t waiting = UINT64_MAX, running = UINT64_MAX;
    for_each_warp(leader, [&](const cs_warp &w) {
        for (uint32_t m = w.waiting_turn; m; m &= m - 1)
            waiting = std::min(waiting, w.time[__builtin_ctz(m)]);
        for (uint32_t m = w.runnable; m; m &= m - 1) running = std::min(running, w.time[__builtin_ctz(m)]);
    });
    return {std::min(waiting, running), waiting < running};
}

void give_turn(Block &leader) {
    cs_warp *first = nullptr;
    uint32_t lane = 0;
    for_each_warp(leader, [&](cs_warp &w) {
        for (uint32_t m = w.waiting_turn; m; m &= m - 1) {
            const auto l = static_cast<uint32_t>(__builtin_ctz(m));
            if (!first || w.time[l] < first->time[lane]) first = &w, lane = l;
        }
    });
    if (!first) return;
    uint32_t group = 0;
    for (uint32_t m = first->waiting_turn; m; m &= m - 1) {
        const auto l = static_cast<uint32_t>(__builtin_ctz(m));
        if (first->time[l] == first->time[lane] && first->pcs[l] == first->pcs[lane]) group |= 1u << l;
    }
    first->waiting_turn &= ~group;
    first->runnable |= group;
    first->turn_lanes = group;
    first->resume_mask = 0;
}

uint64_t latest_exit(const Block &block) {
    uint64_t found = block.end;
    for (uint32_t k = 0; k < block.warps; k++) {
        if (!block.active[k]) continue;
        const cs_warp &w = block.active[k]->state;
        for (uint32_t m = w.exited; m; m &= m - 1) found = std::max(found, w.time[__builtin_ctz(m)]);
    }
    return found;
}

Block::~Block() {
    for (Warp *warp : active) delete warp;
}

namespace {

void begin_block(Block &block, Job &job, uint64_t linear) {
    const LaunchDescription &launch = *job.launch;
    block.job = &job;
    block.linear = linear;
    const uint32_t multiprocessors = launch.environment->multiprocessors;
    if (linear <= UINT32_MAX) {  // most grids; shorter divisions take less time
        const auto number = static_cast<uint32_t>(linear);
        const bool line = launch.grid[1] == 1 && launch.grid[2] == 1;
        const uint32_t row = line ? 0 : number / launch.grid[0];
        block.id[0] = number - row * launch.grid[0];
        block.id[1] = launch.grid[2] == 1 ? row : row % launch.grid[1];
        block.id[2] = launch.grid[2] == 1 ? 0 : row / launch.grid[1];
        block.smid = multiprocessors ? number % multiprocessors : 0;
    } else {
        block.id[0] = static_cast<uint32_t>(linear % launch.grid[0]);
        block.id[1] = static_cast<uint32_t>(linear / launch.grid[0] % launch.grid[1]);
        block.id[2] = static_cast<uint32_t>(linear / launch.grid[0] / launch.grid[1]);
        block.smid = multiprocessors ? static_cast<uint32_t>(linear % multiprocessors) : 0;
    }
    block.threads = launch.block[0] * launch.block[1] * launch.block[2];
    block.warps = (block.threads + 31) / 32;
    block.started = block.finished = block.exited = block.tensor_units = 0;
    block.end = launch.start_ns;
    if (job.kernel->reserved_shared)
        memset(block.shared.reserve(job.shared_size), 0, job.kernel->reserved_shared);
    if (block.barriers_in_use) {
        for (Barrier &b : block.barriers) b = Barrier();
        if (block.barriers_in_use & 1u << kClusterBarrier) block.cluster_barrier = ClusterBarrier();
        block.barriers_in_use = 0;
    }
    for (uint32_t k = 0; k < block.warps; k++) {
        if (block.active[k]) {  // left from a block that was stopped
            block.active[k]->job = nullptr;
            block.spare.emplace_back(block.active[k]);
            block.active[k] = nullptr;
        }
        block.order[k] = k;
    }
    if (job.shuffle) {
        block.random = launch.seed ^ (linear * 0x9e3779b97f4a7c15ull);
        for (uint32_t k = block.warps; k > 1; k--) {
            const auto other = static_cast<uint32_t>(next_random(block.random) % k);
            std::swap(block.order[k - 1], block.order[other]);
        }
    }
}

}  // namespace

void begin_cluster(Block &leader, Job &job, uint64_t number) {
    if (job.cluster_blocks == 1) {
        begin_block(leader, job, number);
        return;
    }
    while (leader.followers.size() + 1 < job.cluster_blocks) {
        leader.followers.push_back(std::make_unique<Block>());
        leader.followers.back()->leader = &leader;
        leader.followers.back()->rank = static_cast<uint32_t>(leader.followers.size());
    }
    const uint32_t *const grid = job.launch->grid, *const shape = job.cluster;
    const uint64_t clusters_x = grid[0] / shape[0], clusters_y = grid[1] / shape[1];
    const uint64_t first_x = number % clusters_x * shape[0],
                   first_y = number / clusters_x % clusters_y * shape[1],
                   first_z = number / clusters_x / clusters_y * shape[2];
    for (uint32_t rank = 0; rank < job.cluster_blocks; rank++) {
        const uint64_t x = first_x + rank % shape[0], y = first_y + rank / shape[0] % shape[1],
                       z = first_z + rank / shape[0] / shape[1];
        Block &block = leader.member(rank);
        begin_block(block, job, x + grid[0] * (y + grid[1] * z));
        block.shared.reserve(job.shared_size);  // another block may use it before this one runs
    }
}

Outcome run_slice(Block &block, Fault &fault) {
    Guard guard;
    guard.warp = nullptr;
    Guard *const outer = current_guard;
    struct Restore {
        Guard *guard;
        ~Restore() { current_guard = guard; }
    } restore{outer};  // also when an exception is thrown
    if (sigsetjmp(guard.where, 0) == 0) {
        current_guard = &guard;
        const Outcome outcome = run_rounds(block);
        if (outcome == Outcome::finished)
            for (uint32_t k = 1; k < block.job->cluster_blocks; k++)
                block.end = std::max(block.end, block.member(k).end);
        if (outcome != Outcome::failed) return outcome;
        fault.code = CS_FAULT_LAUNCH_FAILED;
        fault.message =
            "deadlock: every thread waits at a barrier or collective for threads that never arrive";
        guard.warp = nullptr;
        for_each_warp(block, [&](const cs_warp &w) {
            if (!guard.warp) guard.warp = &w;
            block.end = std::max(block.end, *std::max_element(w.time, w.time + 32));
        });
        const auto lane = static_cast<uint32_t>(__builtin_ctz(~guard.warp->exited));
        fault.line = guard.warp->line;
        for (int k = 0; k < 3; k++) fault.thread[k] = guard.warp->tid[k][lane];
    } else {
        fault.code = guard.code;
        fault.address = guard.address;
        fault.access = guard.access;
        fault.access_size = guard.size;
        if (guard.what) fault.message = guard.what;
        if (guard.warp) {
            const uint32_t lane = guard.warp->lane & 31;
            fault.line = guard.warp->line;
            for (int k = 0; k < 3; k++) fault.thread[k] = guard.warp->tid[k][lane];
            block.end = guard.warp->time[lane] + guard.warp->elapsed;
        }
    }
    if (fault.line >= CS_PATCH_LINES) {
        fault.patch_offset = uint64_t{fault.line - CS_PATCH_LINES} * CS_INSTRUCTION;
        fault.line = 0;
    }
    const Block &faulty = guard.warp ? *static_cast<const Block *>(guard.warp->block) : block;
    memcpy(fault.block, faulty.id, sizeof fault.block);
    fault.kernel = block.job->kernel->name;
    std::tie(fault.file, fault.source_line) = block.job->launch->image->source_of(fault.line);
    describe(fault);
    return Outcome::failed;
}

}  // namespace cudasim
