#include "copies/launch.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>

#include "attachment.h"
#include "copies/patched.h"
#include "log/allocation.h"
#include "log/log.h"
#include "log/ranges.h"

namespace gpubpf {

static void add(std::atomic<uint64_t> &counter, uint64_t n = 1) {
    counter.fetch_add(n, std::memory_order_relaxed);
}

uint32_t count(const Function &function, Reason reason) {
    add(function.kernel->slot->seen);
    add(function.kernel->slot->reasons[reason]);
    return outcome_of(reason);
}

Copy *copy_in(const Kernel &kernel, const Context *context) {
    for (Copy *c = kernel.copies.load(std::memory_order_acquire); c; c = c->next)
        if (c->context == context && !context->dead.load(std::memory_order_relaxed)) return c;
    return nullptr;
}

constexpr uint64_t kNotSaid = UINT64_MAX;
constexpr Reason kNoReason = Reason(kReasons);

// Returns the number of blocks that can be resident at once, 0 if the launch cannot run at all, or kNotSaid
// if the driver does not report it.
static uint64_t resident(CUfunction function, const LaunchShape &shape, uint32_t multiprocessors) {
    uint32_t threads = shape.block[0] * shape.block[1] * shape.block[2];
    int n = 0;
    if (shape.cluster) {
        if (!driver.cuOccupancyMaxActiveClusters) return kNotSaid;
        const CUresult result = driver.cuOccupancyMaxActiveClusters(&n, function, shape.config);
        if (result == CUDA_ERROR_INVALID_CLUSTER_SIZE) return 0;
        if (result != CUDA_SUCCESS || n < 0) return kNotSaid;
        return uint64_t(n) * shape.cluster_size[0] * shape.cluster_size[1] * shape.cluster_size[2];
    }
    if (driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&n, function, static_cast<int>(threads),
                                                           shape.shared) != CUDA_SUCCESS ||
        n < 0)
        return kNotSaid;
    return uint64_t(n) * multiprocessors;
}

// Returns how many registers a thread of this function has; 0 if the driver does not report it.
static uint32_t registers(CUfunction function) {
    int n = 0;
    const bool said = function && driver.cuFuncGetAttribute &&
                      driver.cuFuncGetAttribute(&n, CU_FUNC_ATTRIBUTE_NUM_REGS, function) == CUDA_SUCCESS;
    return said && n > 0 ? n : 0;
}

// Tells the tool once why the launches of a kernel run the original. `tried`: the copy that does not fit.
static void tell_no_room(const Copy &copy, CUfunction tried, uint32_t threads, uint64_t needed,
                         uint64_t allowed) {
    if (copy.kernel->told_no_room.exchange(true)) return;
    DriverScope scope;
    tell_tool(message::NoRoom{copy.kernel->slot_index, threads, needed,
                              allowed == kNotSaid ? kNoRecord : allowed, registers(tried),
                              registers(copy.original)});
}

// Finds the copy's function that can be launched in this shape, or returns why there is none. Kernels whose blocks wait
// for each other hang if fewer blocks are resident than they expect. Other kernels only need room for one block.
static Reason find_room(Copy &copy, const LaunchShape &shape, uint64_t blocks, CUfunction &function) {
    uint32_t threads = shape.block[0] * shape.block[1] * shape.block[2],
             settings = copy.kernel->settings.load();
    Occupancy *first = copy.occupancy.load(std::memory_order_acquire);
    Occupancy *o = first;
    for (; o; o = o->next)
        if (o->threads == threads && o->shared == shape.shared && o->settings == settings &&
            memcmp(o->cluster, shape.cluster_size, sizeof o->cluster) == 0)
            break;
    if (!o) {
        DriverScope scope;
        const auto fits = [&](CUfunction f) { return resident(f, shape, copy.context->multiprocessors); };
        o = new Occupancy{threads, shape.shared, {}, settings, fits(copy.function), 0, kNotSaid, first};
        memcpy(o->cluster, shape.cluster_size, sizeof o->cluster);
        if (copy.limited) o->limited = fits(copy.limited);
        if (copy.original) o->original = fits(copy.original);
        while (!copy.occupancy.compare_exchange_weak(o->next, o)) {
        }
    }
    if (o->original == 0) return kLaunchFailed;  // the driver will reject it
    // If the driver does not report how many blocks of the original fit, the whole grid must fit.
    const uint64_t needed = !copy.layout->waits && o->copy != kNotSaid ? 1
                            : blocks < o->original                     ? blocks
                                                                       : o->original;
    const auto suits = [&](uint64_t resident) { return resident != kNotSaid && resident >= needed; };
    function = suits(o->copy) ? copy.function : suits(o->limited) ? copy.limited : nullptr;
    if (function) return kNoReason;
    const bool limited = o->limited && o->limited != kNotSaid;
    tell_no_room(copy, limited ? copy.limited : copy.function, threads, needed,
                 limited ? o->limited : o->copy);
    return kOccupancy;
}

static Instance *instance_of(Copy &copy, const LaunchShape &shape) {
    uint32_t h = 0;
    for (int i = 0; i < 3; ++i) h = (h * 31 + shape.grid[i]) * 31 + shape.block[i];
    std::atomic<Instance *> &bucket = copy.instances[(h ^ h >> 11 ^ h >> 22) % Copy::kBuckets];
    Instance *first = bucket.load(std::memory_order_acquire);
    for (;;) {
        for (Instance *i = first; i; i = i->next)
            if (memcmp(i->grid, shape.grid, sizeof i->grid) == 0 &&
                memcmp(i->block, shape.block, sizeof i->block) == 0)
                return i;
        auto *made = new Instance;
        memcpy(made->grid, shape.grid, sizeof made->grid);
        memcpy(made->block, shape.block, sizeof made->block);
        made->next = first;
        if (bucket.compare_exchange_strong(first, made)) return made;
        delete made;
    }
}

// Returns how many sites a kernel may have. Those of a patched kernel are its instructions.
static uint32_t site_count(const Copy &copy) {
    return copy.layout->patched ? static_cast<uint32_t>(copy.code_size / kInstructionSize)
                                : copy.layout->sites;
}

// Returns the number of shards of a kernel's site array. With several shards, multiprocessors do not contend. A kernel with
// many sites has fewer shards, so that its array leaves room for those of other kernels.
static uint32_t site_shards(const MapSpec &map, const Copy &copy) {
    uint32_t shards = 1;
    while (shards < copy.context->multiprocessors && shards < kShards) shards *= 2;
    while (shards > 1 && map.per_unit * site_count(copy) * shards > kSiteArrayLimit) shards /= 2;
    return shards;
}

// Returns the number of a map's units in a launch of this shape. For a site array: the kernel's sites in all
// shards.
static uint64_t units(const MapSpec &map, const Copy &copy, uint64_t blocks, uint64_t in_block) {
    switch (map.unit) {
        case Unit::Site: return uint64_t(site_count(copy)) * site_shards(map, copy);
        case Unit::Thread: return blocks * in_block;
        case Unit::Warp: return blocks * ((in_block + 31) / 32);
        case Unit::Block: return blocks;
        default: return 1;
    }
}

static const Array *site_array(const Copy &copy, uint32_t map) {
    for (const Array &a : copy.sites)
        if (a.map == map) return &a;
    return nullptr;
}

// Gives the instance a part of the pool. This is bookkeeping only: the memory was allocated and zeroed when
// the sidecar was loaded.
static bool give_memory(Copy &copy, Instance &instance, uint64_t blocks, uint64_t in_block) {
    Context &context = *copy.context;
    std::lock_guard<std::mutex> hold(context.memory);
    if (instance.launch_block.load(std::memory_order_relaxed)) return true;
    uint32_t generation = context.generation.load(std::memory_order_relaxed);
    if (instance.tried == generation) return false;
    const std::vector<MapSpec> &maps = agent.config.maps;
    uint64_t needed = 0;
    bool fits = true;
    for (const BlockField &f : copy.layout->fields) {
        const MapSpec &m = maps[f.map];
        if (is_shared(m) || site_array(copy, f.map)) continue;
        const uint64_t count = units(m, copy, blocks, in_block);
        // Threads, warps and blocks have 32-bit numbers on the device.
        if (m.per_unit > (UINT64_MAX >> 34) || (m.unit != Unit::Site && count > UINT32_MAX)) fits = false;
        if (fits) needed += map_aligned(m.fixed + m.per_unit * count);
        if (needed > uint64_t(1) << 50) fits = false;
    }
    Pool *pool = nullptr;
    if (fits && needed)
        for (auto &p : context.pools)
            if (p->size - p->used.load(std::memory_order_relaxed) >= needed) {
                pool = p.get();
                break;
            }
    if (!fits || (needed && !pool)) {
        instance.tried = generation;
        if (fits && needed > context.wanted) {
            context.wanted = needed;
            agent.wake_for_pools();
        }
        return false;
    }
    uint64_t at = pool ? pool->used.load(std::memory_order_relaxed) : 0;
    instance.arrays.clear();
    instance.arrays.reserve(copy.layout->fields.size());
    copy.sites.reserve(copy.layout->fields.size());
    auto *block = new uint8_t[copy.layout->block.size()];
    memcpy(block, copy.layout->block.data(), copy.layout->block.size());
    for (const BlockField &f : copy.layout->fields) {
        const MapSpec &m = maps[f.map];
        const Array *known = site_array(copy, f.map);
        Array array{f.map,
                    is_shared(m) ? context.storage[f.map]
                    : known      ? known->base
                                 : 0,
                    0, known ? known->capacity : 0};
        if (!is_shared(m) && !known) {
            array.base = pool->base + at;
            array.bytes = m.fixed + m.per_unit * units(m, copy, blocks, in_block);
            at += map_aligned(array.bytes);
            const bool sites = m.unit == Unit::Site;
            array.capacity = sites ? site_count(copy) | uint64_t(site_shards(m, copy) - 1) << kShardsShift
                                   : units(m, copy, blocks, in_block);
            (sites ? copy.sites : instance.arrays).push_back(array);
        }
        memcpy(block + f.base_offset, &array.base, sizeof array.base);
        if (!is_shared(m) && f.capacity_offset != kNoField)
            memcpy(block + f.capacity_offset, &array.capacity, sizeof array.capacity);
    }
    if (pool) pool->used.store(at, std::memory_order_release);
    instance.launch_block.store(block, std::memory_order_release);
    return true;
}

// Logs allocations that begin at addresses in these bytes, and that were made before the attachment.
static void log_unknown_allocations(const void *bytes, size_t size, const Context &context) {
    log_allocations_before(
        bytes, size, context.serial, [](uint64_t address, uint64_t &base, uint64_t &length) {
            Untimed scope;
            CUdeviceptr at = 0;
            size_t n = 0;
            const bool found = driver.cuMemGetAddressRange_v2 &&
                               driver.cuMemGetAddressRange_v2(&at, &n, address) == CUDA_SUCCESS;
            base = at;
            length = n;
            return found;
        });
}

// Logs allocations in the parameters of an instrumented launch that were made before the attachment.
static void log_mentioned_allocations(const Layout &layout, const Context &context, void **parameters,
                                      const void *given, size_t bytes) noexcept {
    quietly([&] {
        if (given) log_unknown_allocations(given, bytes, context);
        for (size_t i = 0; !given && i < layout.parameters.size(); ++i)
            log_unknown_allocations(parameters[i], layout.parameters[i], context);
    });
}

bool build(const Choice &choice, uint64_t launch, uint64_t replay, void **parameters, void **extra,
           Swap &swap) {
    const Layout &layout = *choice.copy->layout;
    swap.function = choice.function;
    swap.copy = choice.copy;
    swap.instance = choice.instance;
    if (layout.patched) {
        swap.parameters = parameters;
        swap.extra = extra;
        if (layout.numbered) swap.patch_data = patch_data_of(launch);
        return publish(choice);
    }
    const void *given = nullptr;
    size_t given_size = 0;
    if (extra && parameters) return false;  // an error of the caller
    if (extra)
        for (void **e = extra; *e != CU_LAUNCH_PARAM_END; e += 2) {
            if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER) given = e[1];
            else if (*e == CU_LAUNCH_PARAM_BUFFER_SIZE) given_size = *static_cast<size_t *>(e[1]);
            else return false;
        }
    else if (!parameters && !layout.parameters.empty()) return false;
    size_t before = extra ? layout.block_offset : 0;
    if (given_size + 8 <= before) return false;  // too few parameters; the driver will report it
    size_t size = before + layout.block.size();
    uint8_t *bytes = swap.small;
    if (size > sizeof swap.small) {
        swap.large.resize(size);
        bytes = swap.large.data();
    }
    uint8_t *own = bytes + before;
    memcpy(own, choice.block, layout.block.size());
    memcpy(own + kBlockLaunch, &launch, sizeof launch);
    if (replay) memcpy(own + kBlockReplay, &replay, sizeof replay);
    if (layout.pid_tgid != kNoField) {
        uint64_t who = static_cast<uint64_t>(process_id()) << 32 | thread_id();
        memcpy(own + layout.pid_tgid, &who, sizeof who);
    }
    if (layout.kernel != kNoField) {
        uint64_t number = choice.copy->kernel->slot_index;
        memcpy(own + layout.kernel, &number, sizeof number);
    }
    if (choice.executions) memcpy(own + layout.executions, &choice.executions, sizeof choice.executions);
    if (layout.epoch != kNoField) {
        uint64_t now = allocation_epoch();
        memcpy(own + layout.epoch, &now, sizeof now);
    }
    if (agent.late && layout.epoch != kNoField && oplog.on())
        log_mentioned_allocations(layout, *choice.copy->context, parameters, given,
                                  std::min(given_size, before));
    if (extra) {
        if (given_size > before) given_size = before;  // drops padding that the caller included
        if (given) memcpy(bytes, given, given_size);
        memset(bytes + given_size, 0, before - given_size);
        swap.extra_size = size;
        swap.extra_array[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
        swap.extra_array[1] = bytes;
        swap.extra_array[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
        swap.extra_array[3] = &swap.extra_size;
        swap.extra_array[4] = CU_LAUNCH_PARAM_END;
        swap.extra = swap.extra_array;
        return true;
    }
    void **array = swap.few;
    if (layout.parameters.size() + 1 > sizeof swap.few / sizeof *swap.few) {
        swap.many.resize(layout.parameters.size() + 1);
        array = swap.many.data();
    }
    if (!layout.parameters.empty()) memcpy(array, parameters, layout.parameters.size() * sizeof *array);
    array[layout.parameters.size()] = own;
    swap.parameters = array;
    return true;
}

uint32_t choose(const Function &function, Context *context, const LaunchShape &shape, Choice &choice) {
    const Kernel &kernel = *function.kernel;
    Copy *copy = context ? copy_in(kernel, context) : nullptr;
    if (!copy) return kernel.refused.load(std::memory_order_relaxed) ? outcome_of(kRefused) : kNotReady;
    if (copy->withdrawn.load(std::memory_order_relaxed)) return outcome_of(kRefused);
    uint64_t blocks = uint64_t(shape.grid[0]) * shape.grid[1] * shape.grid[2];
    uint64_t in_block = uint64_t(shape.block[0]) * shape.block[1] * shape.block[2];
    if (!blocks || !in_block || in_block > 4096 ||
        (shape.grid[0] && blocks / shape.grid[0] >= uint64_t(1) << 32))
        return outcome_of(kLaunchFailed);  // the driver will reject it
    const Reason lacking = find_room(*copy, shape, blocks, choice.function);
    if (lacking != kNoReason) return outcome_of(lacking);
    choice.copy = copy;
    choice.instance = instance_of(*copy, shape);
    choice.block = choice.instance->launch_block.load(std::memory_order_acquire);
    if (!choice.block && blocks <= UINT32_MAX && give_memory(*copy, *choice.instance, blocks, in_block))
        choice.block = choice.instance->launch_block.load(std::memory_order_acquire);
    return choice.block ? uint32_t(kInstrumented) : outcome_of(kMapTooSmall);
}

// With --budget: whether launch number `n` (from 0) of a kernel is measured. One launch is measured in each `one_in`, at a pseudorandom
// place, so that the places do not follow a rhythm of the program. The first launch shows the tool what a launch costs. It stands for the
// first 2 * one_in launches, so that at no time has more than one launch in `one_in` been measured.
static bool in_budget(const Slot &slot, uint64_t n) {
    const uint64_t one_in = slot.one_in.load(std::memory_order_relaxed);
    if (!one_in) return slot.instrumented.load(std::memory_order_relaxed) == 0;
    if (n < 2 * one_in && one_in > 1) return false;
    auto hash = static_cast<uint32_t>(n / one_in);
    hash = (hash ^ hash >> 16) * 0x7FEB352D;
    hash = (hash ^ hash >> 15) * 0x846CA68B;
    return n % one_in == (hash ^ hash >> 16) % one_in;
}

uint32_t prepare(const Function &function, const LaunchShape &shape, uint64_t id, void **parameters,
                 void **extra, Swap &swap) {
    const Kernel &kernel = *function.kernel;
    Slot &slot = *kernel.slot;
    add(slot.seen);
    auto kept = [&](Reason reason) { return add(slot.reasons[reason]), outcome_of(reason); };
    if (!kernel.copies.load(std::memory_order_acquire))
        return kernel.refused.load(std::memory_order_relaxed) ? kept(kRefused) : uint32_t(kNotMatched);
    const Config &config = agent.config;
    uint64_t number = slot.number.fetch_add(1, std::memory_order_relaxed) + 1;
    if (number < config.launches.first || number > config.launches.second) return kept(kFiltered);
    if (config.sample > 1 && (number - config.launches.first) % config.sample) return kept(kSampledOut);
    if (!config.chosen_ranges.empty() && !open_ranges(config.chosen_ranges).chosen) return kept(kFiltered);
    if (config.budget && !in_budget(slot, number - config.launches.first)) return kept(kSampledOut);
    if (!agent.is_read_later()) return kept(kProcessEnding);
    Choice choice;
    uint32_t outcome =
        choose(function, function.context ? function.context : context_of(shape.where), shape, choice);
    if (outcome == kInstrumented && !build(choice, id, 0, parameters, extra, swap))
        outcome = outcome_of(kCopyFailed);
    const bool counted_later = outcome == outcome_of(kCopyFailed);  // by unswapped()
    if (outcome != kInstrumented && outcome <= kReasons && !counted_later)
        add(slot.reasons[reason_of(outcome)]);
    return outcome;
}

bool count_on_gpu(Choice &choice) {
    Context &context = *choice.copy->context;
    Instance &instance = *choice.instance;
    std::lock_guard<std::mutex> hold(context.memory);
    for (auto &p : context.pools) {
        if (instance.executions) break;
        const uint64_t used = p->used.load(std::memory_order_relaxed);
        if (p->size - used < kMapAlignment) continue;
        instance.executions = p->base + used;
        instance.executed = choice.function;
        p->used.store(used + kMapAlignment, std::memory_order_release);
    }
    choice.executions = instance.executions;
    return choice.executions != 0;
}

void count_launch(CUfunction function, const Copy &copy, Instance &instance, uint64_t launches) {
    Slot &slot = *copy.kernel->slot;
    add(instance.launches, launches);
    add(slot.instrumented, launches);
    if (function == copy.limited) add(slot.limited, launches);
    add(slot.threads, instance.threads() * launches);
}

bool swapped(const HookCall &hook, Swap &swap, CUresult result) {
    const bool counted = hook.keeps_records();  // otherwise the attachment ended meanwhile
    if (result == CUDA_SUCCESS) {
        if (!counted) return true;
        count_launch(swap.function, *swap.copy, *swap.instance);
        agent.launched(1);
        return true;
    }
    switch (result) {
        // Errors that the copy may cause and the original may not.
        case CUDA_ERROR_INVALID_CONTEXT:
            // The copy belongs to another context: no hook saw the current one. From now on, ask the driver for the current context.
            if (counted) registry().only = nullptr;
            return false;
        case CUDA_ERROR_INVALID_VALUE:
        case CUDA_ERROR_OUT_OF_MEMORY:
        case CUDA_ERROR_INVALID_IMAGE:
        case CUDA_ERROR_NO_BINARY_FOR_GPU:
        case CUDA_ERROR_INVALID_HANDLE:
        case CUDA_ERROR_NOT_FOUND:
        case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
        case CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
        case CUDA_ERROR_INVALID_CLUSTER_SIZE:
        case CUDA_ERROR_FUNCTION_NOT_LOADED:
        case CUDA_ERROR_NOT_SUPPORTED: return false;
        default:  // the context was already broken, so the original would also fail
            if (counted) add(swap.copy->kernel->slot->reasons[kLaunchFailed]);
            return true;
    }
}

uint32_t unswapped(const HookCall &hook, const Kernel &kernel, CUresult result) {
    const Reason reason = result == CUDA_SUCCESS ? kCopyFailed : kLaunchFailed;
    if (hook.keeps_records()) add(kernel.slot->reasons[reason]);
    return outcome_of(reason);
}

}  // namespace gpubpf
