#include "copies/drain.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "attachment.h"
#include "copies/deferred.h"
#include "copies/launch.h"
#include "copies/shared.h"
#include "driver/current.h"
#include "driver/fault.h"
#include "driver/gpu_idle.h"
#include "driver/waiting_call.h"
#include "log/clock.h"
#include "log/cupti.h"
#include "log/stamp.h"
#include "rows.h"
#include "thread.h"

namespace gpubpf {

namespace {

// ms that enlarging a pool may wait for a suitable moment before other work continues
constexpr uint32_t kAtOnce = 20;

// keep_latest takes some ten microseconds, or longer if copies of the program are in front of its own. So it
// takes at most 1 % of the time, beyond 100 ms.
constexpr int64_t kKeepShare = 100, kKeepCredit = 10'000'000'000;  // ns
constexpr uint32_t kKeepWait = 100;                                // ms

constexpr uint32_t kIdleWait = 20;  // ms that kernels may take to finish before a reading without a request

constexpr uint32_t kCopyWait = 5000;  // ms, for the parts of a snapshot

constexpr uint64_t kPage = 4096;
uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) & ~(kPage - 1); }

struct Range {
    CUdeviceptr base;
    uint64_t size, offset;  // in the file
};

bool copy_out(Context &context, void *to, CUdeviceptr from, uint64_t bytes) {
    return driver.cuMemcpyDtoHAsync_v2(to, from, bytes, context.stream) == CUDA_SUCCESS;
}

// Copies the words of `count` slots of Config::kept, from `slot` on, to the context's `staging`: those of
// slot + n are at n, n + count, n + 2 * count, …
bool copy_words(Context &context, uint64_t slot, uint64_t count) {
    const message::KeptMap &kept = agent.config.kept;
    CUDA_MEMCPY2D plan{};
    plan.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    plan.srcDevice = context.storage[kept.source] + slot * 8;
    plan.srcPitch = kept.slots * 8;
    plan.dstMemoryType = CU_MEMORYTYPE_HOST;
    plan.dstHost = context.staging;
    plan.dstPitch = plan.WidthInBytes = count * 8;
    plan.Height = rows_kept(agent.config);
    return driver.cuMemcpy2DAsync_v2 && driver.cuMemcpy2DAsync_v2(&plan, context.stream) == CUDA_SUCCESS;
}

// Reads the largest word of each of `count` launches, from `first` on. Each part of the copy may take
// `wait_ms`.
bool copy_largest(Context &context, uint64_t *largest, uint64_t first, uint64_t count, uint32_t wait_ms) {
    const message::KeptMap &kept = agent.config.kept;
    for (uint64_t done = 0; done < count;) {
        const uint64_t slot = (first + done) % kept.slots;
        const uint64_t n = std::min({count - done, kStagedLaunches, kept.slots - slot});
        if (!copy_words(context, slot, n) || !wait_for(context.stream, wait_ms)) return false;
        std::copy_n(context.staging, n, largest + done);
        for (uint64_t row = 1; row < rows_kept(agent.config); ++row)
            raise_to(largest + done, context.staging + row * n, n);
        done += n;
    }
    return true;
}

// Copies the records that the tool has not consumed yet from a ring in GPU memory, each to its place in the
// ring. The ring's control block was copied before.
bool copy_records(Context &context, const RingMemory &ring, const char *control, char *to) {
    const uint64_t first = first_record(ring.shards);
    for (uint32_t shard = 0; shard < ring.shards; ++shard) {
        uint64_t reserved;
        memcpy(&reserved, control + kRingHeader + shard * kRingShard, sizeof reserved);
        uint64_t at = shard < ring.consumed.size() ? ring.consumed[shard] : 0;
        const uint64_t begin = first + shard * ring.capacity * ring.stride;
        if (reserved < at || reserved - at > ring.capacity)
            reserved = at + ring.capacity;  // cannot happen if the generated code is right
        while (at < reserved) {
            const uint64_t index = at & (ring.capacity - 1),
                           n = std::min(reserved - at, ring.capacity - index);
            const uint64_t place = begin + index * ring.stride;
            if (!copy_out(context, to + place, ring.data + place, n * ring.stride)) return false;
            at += n;
        }
    }
    return true;
}

template <class Use>
void each_instance(const Copy &copy, const Use &use) {
    for (const auto &bucket : copy.instances)
        for (Instance *i = bucket.load(std::memory_order_acquire); i; i = i->next) use(*i);
}

// Records how often each copy was launched. Call this before the wait for these launches: the snapshot may lack
// later launches.
void note_launches(Context &context) {
    std::lock_guard<std::mutex> hold(context.memory);
    for (const Copy *c : context.copies)
        each_instance(*c, [](Instance &i) { i.awaited = i.launches.load(); });
}

struct ExecutionCounter {
    const Copy *copy;
    Instance *instance;
    uint64_t offset;  // in the file
};

// The contents of a snapshot, and their locations in the file.
struct Contents {
    uint64_t size = 0;                   // size of the file
    std::vector<Range> pools;            // their used parts, from the start of the file
    uint64_t largest = 0, launches = 0;  // offset and count of the largest words of Config::kept
    uint64_t grids = UINT64_MAX;         // offset of the number of grids that kernels launched
    std::vector<uint64_t> rings;         // offsets of the records of each ring
    std::vector<ExecutionCounter> executions;
    message::Snapshot told;  // without its first fields

    uint64_t offset_of(CUdeviceptr base) const {
        for (const Range &r : pools)
            if (base >= r.base && base < r.base + r.size) return r.offset + (base - r.base);
        return 0;
    }
    uint64_t add(uint64_t bytes) { return std::exchange(size, size + whole_pages(bytes)); }
    void add_pool(CUdeviceptr base, uint64_t bytes) {
        if (bytes) pools.push_back({base, bytes, add(bytes)});
    }
};

void add_instances(Contents &contents, const Copy &copy) {
    uint64_t of_all = 0;
    auto put = [&](const uint32_t *grid, const uint32_t *block, uint64_t launches,
                   const std::vector<Array> &arrays) {
        auto &row = contents.told.instances.emplace_back(message::InstancePart{copy.kernel->slot_index,
                                                                               copy.layout->build,
                                                                               {grid[0], grid[1], grid[2]},
                                                                               {block[0], block[1], block[2]},
                                                                               launches,
                                                                               {}});
        for (const Array &a : arrays)
            row.arrays.push_back({a.map, contents.offset_of(a.base), a.bytes, a.capacity});
    };
    each_instance(copy, [&](const Instance &i) {
        if (!i.awaited || !i.launch_block.load(std::memory_order_acquire)) return;
        put(i.grid, i.block, i.awaited, i.arrays);
        of_all += i.awaited;
    });
    constexpr uint32_t kAnyShape[3] = {0, 0, 0};
    if (of_all && !copy.sites.empty()) put(kAnyShape, kAnyShape, of_all, copy.sites);
}

// Counts executions that copies have counted on the GPU since the last snapshot.
void count_executions(const ExecutionCounter &counter, const char *bytes) {
    Instance &instance = *counter.instance;
    uint64_t now;
    memcpy(&now, bytes + counter.offset, sizeof now);
    const uint64_t more = now - std::exchange(instance.executions_counted, now);
    Slot &slot = *counter.copy->kernel->slot;
    slot.seen.fetch_add(more);
    slot.number.fetch_add(more);
    agent.executions.fetch_add(more);
    count_launch(instance.executed, *counter.copy, instance, more);
    instance.awaited += more;
}

Contents contents_of(Context &context, bool only_rings) {
    Contents contents;
    const message::KeptMap &kept = agent.config.kept;
    std::lock_guard<std::mutex> hold(context.memory);
    for (auto &p : context.pools) {
        uint64_t used = p->used.load(), begin = used,
                 end = used;  // from begin to end: the words of Config::kept
        if (only_rings) used = begin = end = p == context.pools[0] ? ring_control_bytes(context) : 0;
        else if (kept.slots && p == context.pools[0]) {
            begin = context.storage[kept.source] - p->base;
            end = begin + agent.config.maps[kept.source].fixed;
        }
        contents.add_pool(p->base, begin);
        contents.add_pool(p->base + end, used - end);
    }
    if (!only_rings && context.grids) contents.grids = contents.offset_of(context.grids);
    if (!only_rings) {
        contents.launches = kept.slots;
        contents.largest = contents.add(kept.slots * 8);
        for (const Copy *c : context.copies)
            each_instance(*c, [&](Instance &i) {
                if (i.executions) contents.executions.push_back({c, &i, contents.offset_of(i.executions)});
            });
    }
    for (uint32_t m = 0; m < context.storage.size() && !only_rings; ++m)
        if (context.storage[m] && agent.config.maps[m].place == Place::Gpu) {
            const bool reduced = kept.slots && m == kept.source;
            const uint64_t at = reduced ? contents.largest : contents.offset_of(context.storage[m]),
                           size = reduced ? kept.slots * 8 : agent.config.maps[m].fixed;
            contents.told.shared.push_back({m, {at, size}});
        }
    for (const RingMemory &r : context.rings) {
        const uint64_t bytes = r.mapped ? 0 : r.bytes;
        contents.rings.push_back(contents.add(bytes));
        contents.told.rings.push_back(
            {r.map, contents.offset_of(r.control), r.mapped ? 0 : contents.rings.back(), bytes});
    }
    return contents;
}

// Copies the contents from the GPU to the file.
bool fill(int fd, Context &context, const Contents &contents) {
    char *bytes = nullptr;
    if (contents.size) {
        void *to =
            fd < 0 ? MAP_FAILED : mmap(nullptr, contents.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (to == MAP_FAILED) return false;
        bytes = static_cast<char *>(to);
    }
    bool copied = true;
    for (const Range &r : contents.pools)
        if (!copy_out(context, bytes + r.offset, r.base, r.size)) copied = false;
    if (!wait_for(context.stream, kCopyWait)) copied = false;
    if (copied && contents.grids != UINT64_MAX) {
        uint64_t grids;
        memcpy(&grids, bytes + contents.grids, sizeof grids);
        agent.control->grids.fetch_add(grids - std::exchange(context.grids_counted, grids));
    }
    if (copied)
        for (const ExecutionCounter &counter : contents.executions) count_executions(counter, bytes);
    // Copy this last: an end that was copied before the start of its launch would seem to belong to another launch.
    auto *largest = reinterpret_cast<uint64_t *>(bytes + contents.largest);
    if (copied) copied = copy_largest(context, largest, 0, contents.launches, kCopyWait);
    for (size_t i = 0; i < context.rings.size() && copied; ++i) {
        // Control blocks are at the start of the first pool, which is first in the file.
        const RingMemory &r = context.rings[i];
        if (!r.mapped)
            copied = copy_records(context, r, bytes + (r.control - context.pools[0]->base),
                                  bytes + contents.rings[i]);
    }
    if (!wait_for(context.stream, kCopyWait)) copied = false;
    // After a failure, a copy may still be writing to the mapping, so the mapping stays.
    if (!copied || !bytes) return copied;
    for (const auto &[map, at] : contents.told.shared) make_holes(fd, bytes, at.first, at.second);
    munmap(bytes, contents.size);
    return true;
}

// Counts calls of patches that counted nothing since the last snapshot.
void count_lost_calls(Context &context) {
    Patches &p = context.patches;
    std::lock_guard<std::mutex> hold(p.lock);
    if (!p.usable || !copy_out(context, p.lost, p.table, sizeof p.lost) ||
        !wait_for(context.stream, kCopyWait))
        return;
    agent.control->calls_unknown.fetch_add(p.lost[0] - std::exchange(p.lost_counted[0], p.lost[0]));
    agent.control->calls_elsewhere.fetch_add(p.lost[1] - std::exchange(p.lost_counted[1], p.lost[1]));
}

// A thread that waits for a context, as long as kernels run there. A context has at most one, even across
// attachments.
struct Idle {
    enum Result { waits, failed, over, refused };  // refused: a capture began before it could wait
    std::atomic<Result> result{waits};
};

struct Idles {
    std::mutex lock;  // guards the member below
    std::map<CUcontext, std::shared_ptr<Idle>> known;
};
ProcessState<Idles> idles;

void start_waiting(const std::shared_ptr<Idle> &idle, const Context &context, bool goes_on) {
    Stay stay(context);
    if (!stay) return idle->result.store(Idle::failed);
    SignalsBlocked blocked;
    std::thread([idle, entered = std::move(stay), handle = context.handle, goes_on]() mutable {
        std::optional<Stay> stay(std::move(entered));
        prctl(PR_SET_NAME, "gpubpf-wait");
        DriverScope scope;
        CUcontext popped;
        if (driver.cuCtxPushCurrent_v2(handle) != CUDA_SUCCESS) return idle->result.store(Idle::failed);
        Idle::Result result = Idle::over;
        {
            std::optional<WaitingCall> call;
            if (goes_on) {
                Visit visit;
                if (!attachment.load()) result = Idle::failed;
                else if (!call.emplace(captured_now)) result = Idle::refused;
            }
            if (result == Idle::over && driver.cuCtxSynchronize() != CUDA_SUCCESS) result = Idle::failed;
        }
        driver.cuCtxPopCurrent_v2(&popped);
        stay.reset();
        idle->result.store(result);
    }).detach();
}

// Returns whether all work of the context finished in time. A separate thread waits, because a persistent
// kernel never ends. `goes_on`: the application continues, so its captures must not be disturbed.
bool idle_within(const Context &context, uint32_t wait_ms, bool goes_on) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
    auto is_over = [&](const Idle &idle) {
        for (useconds_t pause = 20; idle.result == Idle::waits && std::chrono::steady_clock::now() < until;
             pause = pause < 1000 ? pause * 2 : 1000)
            usleep(pause);
        return idle.result != Idle::waits;
    };
    for (;;) {
        while (goes_on && captured_now()) {
            if (std::chrono::steady_clock::now() > until) return false;
            usleep(500);
        }
        std::shared_ptr<Idle> before, own = std::make_shared<Idle>();
        {
            std::lock_guard<std::mutex> hold(idles->lock);
            before = idles->known[context.handle];
        }
        if (before && !is_over(*before)) return false;  // the work that it waits for still runs
        try {
            {
                std::lock_guard<std::mutex> hold(idles->lock);
                if (idles->known[context.handle] != before) return false;  // another thread has asked
                idles->known[context.handle] = own;
            }
            start_waiting(own, context, goes_on);
        } catch (...) {
            own->result = Idle::failed;
        }
        if (!is_over(*own)) return false;
        if (own->result != Idle::refused) return own->result == Idle::over;
    }
}

// Call it with context.busy held. `only_idle`: does nothing if kernels keep running. Returns false if so.
bool snapshot(Context &context, uint32_t sequence, uint32_t wait_ms, uint32_t flags, bool only_idle = false) {
    if (!context.stream) return true;
    Current current(context);
    if (!(flags & kOfRings)) note_launches(context);
    if (!current.ok()) flags |= kFailed;
    else if (!wait_ms || !idle_within(context, wait_ms, !(flags & kClosed))) flags |= kRunning;
    if (only_idle && (flags & (kRunning | kFailed))) return false;
    if (current.ok() && wait_ms && !only_idle) calibrate(context);
    if (!context.usable) return true;

    Contents contents = contents_of(context, flags & kOfRings);
    const int fd = memory_file("gpubpf-maps", contents.size);
    const uint64_t taken_ns = now_ns();
    if (!(flags & kFailed) && fd >= 0 && !fill(fd, context, contents)) flags |= kFailed;
    if (flags & kFailed) tell_fault(context);
    else if (!(flags & kOfRings)) count_lost_calls(context);
    if (fd < 0) {
        tell_tool(message::NoFile{});
        return true;
    }
    if (!(flags & kOfRings)) {
        std::lock_guard<std::mutex> hold(context.memory);
        for (const Copy *c : context.copies) add_instances(contents, *c);
    }
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);  // so that the tool can map it safely

    tell_tool(message::Snapshot{sequence, context.serial, static_cast<uint32_t>(context.device), flags,
                                contents.size, taken_ns, std::move(contents.told.instances),
                                std::move(contents.told.shared), std::move(contents.told.rings)},
              fd);
    close(fd);
    return true;
}

}  // namespace

const Lifetime drain_lifetime = lifetime_of_process_state<idles>();

bool drain(uint32_t sequence, uint32_t wait_ms, bool rings) {
    bool all = true;
    for (Context *c : registry().all_contexts()) {
        if (!lock_within(c->busy, wait_ms + 1000)) {
            all = false;
            continue;
        }
        std::lock_guard<std::mutex> busy(c->busy, std::adopt_lock);
        // Nothing is copied during a capture, unless this is the end.
        if (c->dead || (registry().captures.load() && !wait_ms)) all = all && c->dead;
        else snapshot(*c, sequence, wait_ms, rings ? uint32_t(kOfRings) : 0u);
        if (!c->dead) collect_stamps(*c, std::min<uint32_t>(wait_ms, 500));
    }
    collect_cupti();
    agent.control->hooks_rest = rest_of_calls();
    tell_tool(message::Drained{sequence, all});
    return all;
}

void read_maps() {
    for (Context *c : registry().all_contexts()) {
        if (!lock_within(c->busy, 1000)) continue;
        std::lock_guard<std::mutex> busy(c->busy, std::adopt_lock);
        if (!c->dead && !registry().captures.load()) snapshot(*c, 0, 0, kUnasked);
    }
}

bool read_complete_maps() {
    bool all = true;
    for (Context *c : registry().all_contexts()) {
        bool read = false;
        if (lock_within(c->busy, kKeepWait)) {
            std::lock_guard<std::mutex> busy(c->busy, std::adopt_lock);
            read = c->dead || (!registry().captures.load() && snapshot(*c, 0, kIdleWait, kUnasked, true));
        }
        all = all && read;
    }
    return all;
}

namespace {

int64_t steady_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Copies the values of launches from `first` on to the shared array. Call it with context.busy held. Returns
// false if the copy has not ended in time.
bool keep(Context &context, uint64_t first, uint64_t count) {
    const message::KeptMap &kept = agent.config.kept;
    const uint64_t element = agent.config.maps[kept.target].fixed / kept.slots;
    std::array<uint64_t, kKeptLaunches> largest;
    if (driver.cuStreamQuery(context.stream) !=
            CUDA_SUCCESS ||  // an earlier copy may still write to `staging`
        !copy_largest(context, largest.data(), first, count, kKeepWait))
        return false;
    for (uint64_t n = 0; n < count; ++n) {
        auto *word = reinterpret_cast<uint64_t *>(static_cast<char *>(context.kept) +
                                                  (first + n) % kept.slots * element + kept.offset);
        // Launches of other contexts share the array: each context has zeros or older values for them.
        if (largest[n] > *word) *word = largest[n];
    }
    return true;
}

}  // namespace

uint64_t keep_latest(Context &context) {
    const message::KeptMap &kept = agent.config.kept;
    const int64_t begin = steady_ns();
    if (!kept.slots || !agent.connected || context.next_keep_ns > begin + kKeepCredit) return 0;
    const uint64_t next = next_launch_id(), number = next & ((1ull << kNumberBits) - 1);
    const uint64_t count = std::min<uint64_t>({number ? number - 1 : 0, kKeptLaunches, kept.slots});
    bool copied = false;
    if (lock_within(context.busy, 1)) {
        std::lock_guard<std::mutex> busy(context.busy, std::adopt_lock);
        if (context.dead || !context.usable || !context.staging || registry().captures.load()) return 0;
        collect_stamps(context, 0);
        Current current(context);
        copied = current.ok() && count && keep(context, next - count, count);
    }
    context.next_keep_ns = std::max(context.next_keep_ns.load(), begin) + kKeepShare * (steady_ns() - begin);
    return copied ? next - count : 0;
}

void calibrate_all() {
    for (Context *c : registry().all_contexts()) {
        if (!lock_within(c->busy, 10)) continue;
        std::lock_guard<std::mutex> busy(c->busy, std::adopt_lock);
        Current current(*c);
        if (current.ok() && !c->dead && c->stream) calibrate(*c);
    }
}

// The application is destroying the context. So no other thread may be in it, and the agent does not use it
// again (`dead`).
void close_context(Context *context) {
    bool ours = lock_within(context->busy, 10000);
    if (ours && agent.connected) quietly([&] { snapshot(*context, 0, 2000, kClosed); });
    if (ours) quietly([&] { collect_stamps(*context, 500); });
    collect_cupti();
    if (ours && context->stream)
        quietly([&] {
            Current current(*context);
            if (current.ok() && idle_within(*context, 100, false)) release_shared(*context);
        });
    context->dead = true;
    if (ours) context->busy.unlock();
}

// Whether the context ends is known only after the application's call. If it does not end, a later drain
// replaces this one.
void drain_context(Context *context) {
    if (!agent.connected || !lock_within(context->busy, 10000)) return;
    std::lock_guard<std::mutex> busy(context->busy, std::adopt_lock);
    if (context->dead) return;
    quietly([&] { snapshot(*context, 0, registry().captures.load() ? 0 : 2000, 0); });
    quietly([&] { collect_stamps(*context, 500); });
}

void drop_context(Context *context) {
    bool ours = lock_within(context->busy, 10000);
    context->dead = true;
    context->usable = false;
    context->stream = nullptr;
    if (ours) context->busy.unlock();
}

void enlarge_pools() {
    for (Context *c : registry().all_contexts()) {
        {
            std::lock_guard<std::mutex> hold(c->memory);
            if (!c->wanted) continue;
        }
        if (!when_idle(*c, kAtOnce, [&](LaunchesHeld &) { enlarge_pool(*c); })) install_later(nullptr, c);
    }
}

void enlarge_pool(Context &c) {
    uint64_t wanted;
    {
        std::lock_guard<std::mutex> hold(c.memory);
        wanted = std::exchange(c.wanted, 0);
    }
    if (!wanted || !lock_within(c.busy, 1000)) return;
    std::lock_guard<std::mutex> busy(c.busy, std::adopt_lock);
    if (c.dead || !c.usable) return;
    Current current(c);
    size_t free = 0, total = 0;
    uint64_t taken = 0;
    for (auto &p : c.pools) taken += p->size;
    // Allocate twice the requested size, because the next launch shape is likely to be as large. Leave half
    // of the free memory, and take at most a quarter of the device's memory, because the application may need
    // the rest.
    if (current.ok() && driver.cuMemGetInfo_v2 && driver.cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS) {
        uint64_t room = std::min<uint64_t>(free / 2, total / 4 > taken ? total / 4 - taken : 0);
        if (wanted <= room) add_pool(c, std::min(wanted * 2, room));
    }
}

}  // namespace gpubpf
