#include "copies/shared.h"

#include <algorithm>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "attachment.h"
#include "driver/current.h"
#include "shared_files.h"

namespace gpubpf {

namespace {

bool is_ring(const MapSpec &map) { return map.place == Place::HostRing || map.place == Place::GpuRing; }

uint64_t ring_pages(uint64_t bytes) { return (bytes + kRingPage - 1) & ~(kRingPage - 1); }

uint32_t shards_of(const Context &context) {
    return std::min(std::max(context.multiprocessors, 1u), kShards);
}

uint64_t control_bytes(const Context &context) {
    return map_aligned(kRingHeader + kRingShard * shards_of(context));
}

// Returns the GPU's address of host memory [at, at + bytes), or 0 if the driver refuses.
CUdeviceptr registered(Context &context, void *at, uint64_t bytes) {
    CUdeviceptr address = 0;
    if (!driver.cuMemHostRegister_v2 || !driver.cuMemHostGetDevicePointer_v2 ||
        driver.cuMemHostRegister_v2(at, bytes, CU_MEMHOSTREGISTER_DEVICEMAP) != CUDA_SUCCESS)
        return 0;
    context.registered.emplace_back(at, bytes);
    return driver.cuMemHostGetDevicePointer_v2(&address, at, 0) == CUDA_SUCCESS ? address : 0;
}

// Prepares the reading of Config::kept's words; `at` is its shared array. Returns false if memory is short or the
// driver refuses.
bool stage(Context &context, void *at) {
    const uint64_t launches = std::min<uint64_t>(agent.config.kept.slots, kStagedLaunches),
                   bytes = launches * rows_kept(agent.config) * 8;
    void *staging = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (staging == MAP_FAILED) return false;
    if (!registered(context, staging, bytes) &&
        (context.registered.empty() || context.registered.back().first != staging)) {
        munmap(staging, bytes);
        return false;
    }
    context.kept = at;
    context.staging = static_cast<uint64_t *>(staging);
    return true;
}

CUdeviceptr map_array(Context &context, uint32_t map) {
    uint64_t bytes = 0;
    void *at = map_shared_file(map, bytes);
    if (!at) return 0;
    CUdeviceptr address = registered(context, at, bytes);
    if (!address && (context.registered.empty() || context.registered.back().first != at)) munmap(at, bytes);
    const message::KeptMap &kept = agent.config.kept;
    if (!address || !kept.slots || map != kept.target) return address;
    return bytes >= agent.config.maps[map].fixed && stage(context, at) ? address : 0;
}

bool make_ring(Context &context, uint32_t map, const MapSpec &spec, CUdeviceptr control) {
    RingMemory ring{map, shards_of(context), kLeastCapacity, spec.per_unit, control, 0, 0, nullptr, {}};
    while (ring.capacity * 2 * ring.shards * ring.stride <= spec.fixed) ring.capacity *= 2;
    ring.bytes = ring_pages(first_record(ring.shards) + ring.shards * ring.capacity * ring.stride);
    if (ring.bytes > kRingLimit) return false;
    int file = -1;
    if (spec.place == Place::HostRing) {
        file = sealed_file("gpubpf-ring", ring.bytes);
        if (file < 0) return false;
        ring.mapped = mmap(nullptr, ring.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (ring.mapped != MAP_FAILED) ring.data = registered(context, ring.mapped, ring.bytes);
    } else if (driver.cuMemAlloc_v2(&ring.data, ring.bytes) == CUDA_SUCCESS) {
        // The memory's previous contents must not look like records.
        if (driver.cuMemsetD8Async(ring.data, 0, ring.bytes, context.stream) != CUDA_SUCCESS ||
            !wait_for(context.stream, 10000))
            return false;
    } else {
        ring.data = 0;
    }
    const uint64_t header[] = {ring.shards, ring.capacity, ring.data};
    bool made = ring.data &&
                driver.cuMemcpyHtoDAsync_v2(control, header, sizeof header, context.stream) == CUDA_SUCCESS &&
                wait_for(context.stream, 10000);
    if (made) {
        context.rings.push_back(ring);
        tell_tool(message::RingPlace{map, context.serial, static_cast<uint32_t>(context.device), spec.place,
                                     ring.shards, ring.capacity, ring.stride},
                  file);
    }
    if (file >= 0) close(file);
    return made;
}

}  // namespace

uint64_t first_record(uint32_t shards) { return ring_pages(kRingShard * shards); }

uint64_t ring_control_bytes(const Context &context) {
    uint64_t bytes = 0;
    for (const MapSpec &m : agent.config.maps)
        if (is_ring(m)) bytes += control_bytes(context);
    return bytes;
}

bool prepare_shared(Context &context, CUdeviceptr control) {
    const std::vector<MapSpec> &maps = agent.config.maps;
    for (uint32_t m = 0; m < maps.size(); ++m) {
        if (is_ring(maps[m])) {
            if (!make_ring(context, m, maps[m], control)) return false;
            context.storage[m] = control;
            control += control_bytes(context);
        } else if (maps[m].place == Place::Shared) {
            if (!(context.storage[m] = map_array(context, m))) return false;
        }
    }
    return true;
}

void take_consumed(Reader &reader) {
    message::Consumed sent;
    if (!reader.read(sent) || sent.positions.size() > kShards) return;
    const auto n = static_cast<uint32_t>(sent.positions.size());
    std::vector<uint64_t> heads(kShards * kRingShard / 8);
    for (uint32_t i = 0; i < n; ++i) heads[i * kRingShard / 8] = sent.positions[i];
    Context *context = nullptr;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        for (auto &c : registry().contexts)
            if (c.second->serial == sent.context) context = c.second;
    }
    if (!context || !lock_within(context->busy, 1000)) return;
    std::lock_guard<std::mutex> busy(context->busy, std::adopt_lock);
    if (context->dead || !context->usable || registry().captures.load()) return;
    Current current(*context);
    for (RingMemory &r : context->rings) {
        if (r.map != sent.map || r.mapped || n != r.shards || !current.ok()) continue;
        r.consumed = sent.positions;
        if (driver.cuMemcpyHtoDAsync_v2(r.data, heads.data(), n * kRingShard, context->stream) ==
            CUDA_SUCCESS)
            wait_for(context->stream, 1000);
    }
}

void release_shared(Context &context) {
    for (auto &r : context.registered)
        if (driver.cuMemHostUnregister && driver.cuMemHostUnregister(r.first) == CUDA_SUCCESS)
            munmap(r.first, r.second);
    context.registered.clear();
    context.kept = nullptr;
    context.staging = nullptr;
    for (const RingMemory &r : context.rings)
        if (!r.mapped && r.data) driver.cuMemFree_v2(r.data);
    context.rings.clear();
}

}  // namespace gpubpf
