// Maps in GPU memory, rings in files that the tool maps, and snapshots of both.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "agent.h"
#include "rows.h"
#include "shared_files.h"
#include "thread.h"

namespace gpubpf {

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint32_t kIdleWait = 20;  // ms that kernels may take to finish before a reading without a request
constexpr uint64_t kPoolSlack = 64 << 10;  // bytes, for the fixed parts and alignment of array instances

uint64_t aligned(uint64_t bytes, uint64_t to) { return (bytes + to - 1) & ~(to - 1); }
uint64_t map_aligned(uint64_t bytes) { return aligned(bytes, kMapAlignment); }
void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }
bool is_ring(const MapSpec &map) { return map.place == Place::HostRing || map.place == Place::GpuRing; }
bool is_in_file(const MapSpec &map) { return map.place == Place::Shared || map.place == Place::Host; }
uint32_t shards_of(const Gpu &gpu) { return std::min(std::max(gpu.compute_units, 1u), kShards); }
uint64_t control_bytes(const Gpu &gpu) { return map_aligned(kRingHeader + kRingShard * shards_of(gpu)); }

// Allocates zeroed GPU memory.
bool add_pool(Gpu &gpu, uint64_t size) {
    void *base = nullptr;
    size = aligned(size, kPage);
    if (hsa.amd_memory_pool_allocate(gpu.own_pool, size, 0, &base)) return false;
    // The embedded device's memory is a file in memory. Removing its pages zeroes it without touching them: filling 256 MB takes a second.
    // For memory of a GPU, the kernel refuses to do that.
    if (madvise(base, size, MADV_REMOVE) && hsa.amd_memory_fill(base, 0, size / sizeof(uint32_t))) {
        hsa.amd_memory_pool_free(base);
        return false;
    }
    std::lock_guard<std::mutex> hold(gpu.lock);
    gpu.pools.push_back({reinterpret_cast<uint64_t>(base), size, 0});
    return true;
}

// Creates a ring. Its records are in a file that the tool maps; its control block is at `control`.
bool make_ring(Gpu &gpu, uint32_t map, const MapSpec &spec, uint64_t control) {
    const uint32_t shards = shards_of(gpu);
    uint64_t capacity = kLeastCapacity;
    while (capacity * 2 * shards * spec.per_unit <= spec.fixed) capacity *= 2;
    const uint64_t first = aligned(kRingShard * shards, kRingPage);
    const uint64_t bytes = aligned(first + shards * capacity * spec.per_unit, kRingPage);
    if (bytes > kRingLimit || spec.place != Place::HostRing) return false;
    const int file = sealed_file("gpubpf-ring", bytes);
    if (file < 0) return false;
    void *host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0), *address = nullptr;
    bool made = host != MAP_FAILED && !hsa.amd_memory_lock(host, bytes, &gpu.agent, 1, &address);
    if (made) gpu.locked.push_back({host, bytes});
    const uint64_t header[] = {shards, capacity, reinterpret_cast<uint64_t>(address)};
    made = made && !hsa.memory_copy(pointer(control), header, sizeof header);
    if (made) {
        gpu.rings.push_back({map, shards, control});
        tell_tool(
            message::RingPlace{map, gpu.number, gpu.number, spec.place, shards, capacity, spec.per_unit},
            file);
    }
    close(file);
    return made;
}

// Returns the GPU address of a shared array, or 0 if ROCr cannot lock it.
uint64_t lock_shared(Gpu &gpu, uint32_t map) {
    uint64_t bytes = 0;
    void *address = nullptr, *host = map_shared_file(map, bytes);
    if (host && hsa.amd_memory_lock(host, bytes, &gpu.agent, 1, &address)) munmap(host, bytes);
    else if (host) gpu.locked.push_back({host, bytes});
    return reinterpret_cast<uint64_t>(address);
}

bool make_maps(Gpu &gpu) {
    const std::vector<MapSpec> &maps = agent.config.maps;
    if (!gpu.own_pool.handle || !gpu.argument_pool.handle) return false;
    tell_tool(message::Context{gpu.number, gpu.number});
    uint64_t shared = 0;
    bool all_shared = true;
    for (const MapSpec &m : maps) {
        if (m.place == Place::GpuRing) return false;
        if (is_in_file(m)) continue;
        if (is_shared(m)) shared += is_ring(m) ? control_bytes(gpu) : map_aligned(m.fixed);
        all_shared = all_shared && is_shared(m);
    }
    // The user's limit is for values only. Everything else is added to it.
    uint64_t size = shared + (all_shared ? 0 : agent.config.map_memory + kPoolSlack);
    while (size && !add_pool(gpu, size)) {  // if the GPU is nearly full, a small pool is better than none
        if (size / 2 < std::max<uint64_t>(shared, 1 << 16)) return false;
        size /= 2;
    }
    gpu.storage.assign(maps.size(), 0);
    for (uint32_t m = 0; m < maps.size(); ++m)
        if (maps[m].place == Place::Shared && !(gpu.storage[m] = lock_shared(gpu, m))) return false;
    uint64_t at = 0;
    for (bool rings : {true, false})  // control blocks are at the start of the pool
        for (uint32_t m = 0; m < maps.size(); ++m) {
            if (!is_shared(maps[m]) || is_in_file(maps[m]) || is_ring(maps[m]) != rings) continue;
            gpu.storage[m] = gpu.pools[0].base + at;
            at += rings ? control_bytes(gpu) : map_aligned(maps[m].fixed);
            if (rings && !make_ring(gpu, m, maps[m], gpu.storage[m])) return false;
            const std::vector<uint8_t> &initial = maps[m].initial;
            if (!rings && !initial.empty() &&
                hsa.memory_copy(pointer(gpu.storage[m]), initial.data(), initial.size()))
                return false;
        }
    if (!gpu.pools.empty()) gpu.pools[0].used = at;
    return true;
}

// With several shards, compute units do not contend. A kernel with many sites has fewer shards.
uint32_t site_shards(const Gpu &gpu, const MapSpec &map, uint32_t sites) {
    uint32_t shards = 1;
    while (shards < gpu.compute_units && shards < kShards) shards *= 2;
    while (shards > 1 && map.per_unit * sites * shards > kSiteArrayLimit) shards /= 2;
    return shards;
}

struct Room {
    uint64_t units, capacity;
};

// Returns how many units of a map this launch shape needs, and the capacity as stored in the launch block.
Room room_for(const Gpu &gpu, const MapSpec &map, const Layout &layout, const Shape &shape) {
    const uint64_t threads = uint64_t(shape[0]) * shape[1] * shape[2];
    const uint64_t blocks = uint64_t(shape[3]) * shape[4] * shape[5];
    const uint64_t lanes = layout.wave;
    const uint32_t shards = map.unit == Unit::Site ? site_shards(gpu, map, layout.sites) : 1;
    switch (map.unit) {
        case Unit::Site:
            return {uint64_t(layout.sites) * shards, layout.sites | uint64_t(shards - 1) << kShardsShift};
        case Unit::Thread: return {blocks * threads, blocks * threads};
        case Unit::Warp:
            return {blocks * ((threads + lanes - 1) / lanes), blocks * ((threads + lanes - 1) / lanes)};
        case Unit::Block: return {blocks, blocks};
        default: return {1, 1};
    }
}

const Array *site_array(const Copy &copy, uint32_t map) {
    for (const Array &a : copy.sites)
        if (a.map == map) return &a;
    return nullptr;
}

struct Range {
    uint64_t base, size, offset;  // the offset in the file
};

struct Contents {  // the contents of a snapshot
    uint64_t size = 0;
    std::vector<Range> pools;
    uint64_t largest = 0, launches = 0;  // offset and count of the largest words of Config::kept
    message::Snapshot told;              // without its first fields

    uint64_t offset_of(uint64_t base) const {
        for (const Range &r : pools)
            if (base >= r.base && base < r.base + r.size) return r.offset + (base - r.base);
        return 0;
    }
    uint64_t add(uint64_t bytes) { return std::exchange(size, size + aligned(bytes, kPage)); }
    void add_pool(uint64_t base, uint64_t bytes) {
        if (bytes) pools.push_back({base, bytes, add(bytes)});
    }
};

void add_instances(Contents &contents, const Copy &copy) {
    uint64_t of_all = 0;
    auto put = [&](const Shape &shape, uint64_t launches, const std::vector<Array> &arrays) {
        auto &row = contents.told.instances.emplace_back(message::InstancePart{copy.kernel->slot_index,
                                                                               copy.layout->build,
                                                                               {shape[3], shape[4], shape[5]},
                                                                               {shape[0], shape[1], shape[2]},
                                                                               launches,
                                                                               {}});
        for (const Array &a : arrays)
            row.arrays.push_back({a.map, contents.offset_of(a.base), a.bytes, a.capacity});
    };
    for (const auto &[shape, instance] : copy.instances) {
        if (!instance.awaited || instance.launch_block.empty()) continue;
        put(shape, instance.awaited, instance.arrays);
        of_all += instance.awaited;
    }
    if (of_all && !copy.sites.empty()) put(Shape{}, of_all, copy.sites);
}

Contents contents_of(Gpu &gpu, bool only_rings) {
    Contents contents;
    const message::KeptMap &kept = agent.config.kept;
    std::lock_guard<std::mutex> hold(gpu.lock);
    for (const Pool &p : gpu.pools) {
        const bool first = &p == &gpu.pools[0];
        uint64_t used = p.used, begin = used, end = used;  // from begin to end: the words of Config::kept
        if (only_rings) used = begin = end = first ? gpu.rings.size() * control_bytes(gpu) : 0;
        else if (kept.slots && first) {
            begin = gpu.storage[kept.source] - p.base;
            end = begin + agent.config.maps[kept.source].fixed;
        }
        contents.add_pool(p.base, begin);
        contents.add_pool(p.base + end, used - end);
    }
    if (!only_rings) {
        contents.launches = kept.slots;
        contents.largest = contents.add(kept.slots * 8);
        for (const auto &copy : gpu.copies) add_instances(contents, *copy);
    }
    for (uint32_t m = 0; m < gpu.storage.size() && !only_rings; ++m)
        if (gpu.storage[m] && agent.config.maps[m].place == Place::Gpu) {
            const bool reduced = kept.slots && m == kept.source;
            const uint64_t at = reduced ? contents.largest : contents.offset_of(gpu.storage[m]);
            contents.told.shared.push_back({m, {at, reduced ? kept.slots * 8 : agent.config.maps[m].fixed}});
        }
    for (const Ring &r : gpu.rings)
        contents.told.rings.push_back({r.map, contents.offset_of(r.control), 0, 0});
    return contents;
}

// Reads the largest word of each launch of Config::kept.
bool copy_largest(const Gpu &gpu, uint64_t *largest, uint64_t launches) {
    if (!launches) return true;
    const uint64_t from = gpu.storage[agent.config.kept.source];
    std::vector<uint64_t> words(launches);
    if (hsa.memory_copy(largest, pointer(from), launches * 8)) return false;
    for (uint64_t row = 1; row < rows_kept(agent.config); ++row) {
        if (hsa.memory_copy(words.data(), pointer(from + row * launches * 8), launches * 8)) return false;
        raise_to(largest, words.data(), launches);
    }
    return true;
}

bool wait_until_idle(Gpu &gpu, uint32_t wait_ms) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(wait_ms);
    for (useconds_t pause = 20; !is_idle(gpu); pause = pause < 1000 ? pause * 2 : 1000) {
        look_after_queues();
        if (std::chrono::steady_clock::now() >= until || agent.is_over()) return false;
        usleep(pause);
    }
    return true;
}

// `only_idle`: does nothing if kernels keep running. Returns false if so.
bool snapshot(Gpu &gpu, uint32_t sequence, uint32_t wait_ms, uint32_t flags, bool only_idle = false) {
    const bool only_rings = flags & kOfRings;
    std::lock_guard<std::mutex> busy(gpu.busy);
    if (!gpu.usable) return true;
    if (!only_rings) {  // the snapshot may lack later launches
        std::lock_guard<std::mutex> hold(gpu.lock);
        for (const auto &copy : gpu.copies)
            for (auto &instance : copy->instances) instance.second.awaited = instance.second.launches;
    }
    if (!wait_until_idle(gpu, wait_ms) || gpu.cut_off) flags |= kRunning;
    if (only_idle && flags & kRunning) return false;
    calibrate(gpu);
    if (agent.log_operations) log_known_times();
    Contents contents = contents_of(gpu, only_rings);
    const int file = memory_file("gpubpf-maps", contents.size);
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    void *to = file < 0 || !contents.size
                   ? MAP_FAILED
                   : mmap(nullptr, contents.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    bool copied = to != MAP_FAILED || !contents.size;
    for (const Range &r : contents.pools)
        copied = copied && !hsa.memory_copy(static_cast<char *>(to) + r.offset, pointer(r.base), r.size);
    // Copy this last: an end that was copied before the start of its launch would seem to belong to another launch.
    copied =
        copied && copy_largest(gpu, reinterpret_cast<uint64_t *>(static_cast<char *>(to) + contents.largest),
                               contents.launches);
    if (to != MAP_FAILED) {
        for (const auto &[map, at] : contents.told.shared)
            if (copied) make_holes(file, static_cast<const char *>(to), at.first, at.second);
        munmap(to, contents.size);
    }
    if (!copied) flags |= kFailed;
    if (file < 0) {
        tell_tool(message::NoFile{});
        return true;
    }
    fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    const uint64_t taken_ns = uint64_t(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
    tell_tool(message::Snapshot{sequence, gpu.number, gpu.number, flags, contents.size, taken_ns,
                                std::move(contents.told.instances), std::move(contents.told.shared),
                                std::move(contents.told.rings)},
              file);
    close(file);
    return true;
}

}  // namespace

bool prepare(Gpu &gpu) {
    std::lock_guard<std::mutex> busy(gpu.busy);
    if (!gpu.prepared) {
        gpu.prepared = true;
        find_tick(gpu);
        gpu.usable = make_maps(gpu);
        if (gpu.usable) calibrate(gpu);
    }
    return gpu.usable;
}

bool give_memory(Gpu &gpu, Copy &copy, const Shape &shape, Instance &instance) {
    if (instance.tried == gpu.pools.size()) return false;
    const std::vector<MapSpec> &maps = agent.config.maps;
    const Layout &layout = *copy.layout;
    uint64_t needed = 0;
    for (const BlockField &f : layout.fields) {
        const MapSpec &m = maps[f.map];
        if (is_shared(m) || site_array(copy, f.map)) continue;
        const uint64_t units = room_for(gpu, m, layout, shape).units;
        // Threads, warps and blocks have 32-bit numbers on the device.
        if (m.per_unit > (UINT64_MAX >> 34) || units > UINT32_MAX) return false;
        needed += map_aligned(m.fixed + m.per_unit * units);
    }
    Pool *pool = nullptr;
    for (Pool &p : gpu.pools)
        if (!pool && p.size - p.used >= needed) pool = &p;
    if (needed && !pool) {
        instance.tried = gpu.pools.size();
        gpu.wanted = std::max(gpu.wanted, needed);
        agent.wake();
        return false;
    }
    std::vector<uint8_t> block = layout.block;
    for (const BlockField &f : layout.fields) {
        const MapSpec &m = maps[f.map];
        const Array *known = site_array(copy, f.map);
        Array array{f.map,
                    is_shared(m) ? gpu.storage[f.map]
                    : known      ? known->base
                                 : 0,
                    0, known ? known->capacity : 0};
        if (!is_shared(m) && !known) {
            const Room room = room_for(gpu, m, layout, shape);
            array = {f.map, pool->base + pool->used, m.fixed + m.per_unit * room.units, room.capacity};
            pool->used += map_aligned(array.bytes);
            (m.unit == Unit::Site ? copy.sites : instance.arrays).push_back(array);
        }
        memcpy(block.data() + f.base_offset, &array.base, sizeof array.base);
        if (!is_shared(m) && f.capacity_offset != kNoField)
            memcpy(block.data() + f.capacity_offset, &array.capacity, sizeof array.capacity);
    }
    instance.launch_block = std::move(block);
    return true;
}

void enlarge(Gpu &gpu) {
    uint64_t wanted;
    {
        std::lock_guard<std::mutex> hold(gpu.lock);
        wanted = std::exchange(gpu.wanted, 0);
    }
    // Twice the requested size, because the next launch shape is likely to be as large.
    if (wanted && !add_pool(gpu, 2 * wanted)) add_pool(gpu, wanted);
}

void release(Gpu &gpu, uint32_t patience_ms) {
    std::lock_guard<std::mutex> busy(gpu.busy);
    if (!wait_until_idle(gpu, patience_ms)) return;
    unload_copies(gpu);
    free_arguments(gpu);
    for (const Pool &pool : gpu.pools) hsa.amd_memory_pool_free(pointer(pool.base));
    for (const LockedMemory &memory : gpu.locked) {
        hsa.amd_memory_unlock(memory.host);
        munmap(memory.host, memory.bytes);
    }
    gpu.pools.clear();
    gpu.locked.clear();
    gpu.usable = false;
}

void read_maps() {
    for (auto &gpu : agent.gpus) snapshot(*gpu, 0, 0, kUnasked);
}

bool read_complete_maps() {
    bool all = true;
    for (auto &gpu : agent.gpus) all = snapshot(*gpu, 0, kIdleWait, kUnasked, true) && all;
    return all;
}

bool drain(uint32_t sequence, uint32_t wait_ms, bool rings) {
    if (virtual_clock()) agent.control->ended_ns = now_ns();
    agent.control->hooks_rest = rest_of_calls();
    for (auto &gpu : agent.gpus) snapshot(*gpu, sequence, wait_ms, rings ? uint32_t(kOfRings) : 0u);
    tell_tool(message::Drained{sequence, true});
    return true;
}

}  // namespace gpubpf
