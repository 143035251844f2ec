// Replacements of functions that launch kernels, of functions that create and end contexts and captures, and
// of libc functions that end the process.
#include "hooks.h"

#include <csignal>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <optional>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "copies/drain.h"
#include "copies/launch.h"
#include "copies/patched.h"
#include "copies/preexisting.h"
#include "copies/sidecar.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "driver/leftovers.h"
#include "driver/stream.h"
#include "driver/waiting_call.h"
#include "hook_call.h"
#include "log/cupti.h"
#include "log/allocation.h"
#include "log/clock.h"
#include "log/host_program.h"
#include "log/operation.h"
#include "log/ranges.h"
#include "log/stack.h"
#include "signals.h"

namespace gpubpf {

namespace {

// --- launches ---

[[gnu::always_inline]] inline bool is_matched(const Kernel &kernel) {
    return kernel.copies.load(std::memory_order_acquire) || kernel.refused.load(std::memory_order_relaxed) ||
           kernel.later.load(std::memory_order_relaxed);
}

const Function *function_of(CUfunction f, StreamRef where) {
    const Function *function = registry().functions.find(f);
    if (__builtin_expect(!function, 0)) quietly([&] { function = identify_launched(f, where); });
    return function;
}

// Whether a launch may have to get its copy first.
[[gnu::always_inline]] inline bool may_lack_copy(const Kernel &kernel) {
    return kernel.later.load(std::memory_order_relaxed) || kernel.awaited.load(std::memory_order_relaxed);
}

// Gets the copy of a kernel at its first launch: of a large module, or one that may soon be ready.
[[gnu::noinline]] void get_copy_for(const Function &function, StreamRef where) {
    Kernel &kernel = *function.kernel;
    const Context *probably = function.context ? function.context : registry().only.load();
    if (probably && copy_in(kernel, probably)) return;  // all launches but the first
    if (kernel.refused || capturing(where.handle())) return;
    quietly([&] {
        Context *context = function.context ? function.context : context_of(where);
        if (!context || copy_in(kernel, context)) return;
        LaunchPaused paused;
        if (kernel.awaited) await_copies(kernel, context);
        if (kernel.later && !copy_in(kernel, context)) load_copies({&kernel}, context);
    });
}

// Counts the launch. If it returns kInstrumented, launch `swap` instead.
uint32_t decide(const Function *function, const LaunchShape &shape, uint64_t id, void **parameters,
                void **extra, Swap &swap) {
    if (!function) {
        agent.control->unnamed.fetch_add(1, std::memory_order_relaxed);
        return kNotMatched;
    }
    if (!is_matched(*function->kernel)) {
        function->kernel->slot->seen.fetch_add(1, std::memory_order_relaxed);
        return kNotMatched;
    }
    try {
        return prepare(*function, shape, id, parameters, extra, swap);
    } catch (...) {  // no memory
        return outcome_of(kCopyFailed);
    }
}

// A launch with a host program or a log.
template <typename Launch>
CUresult described_launch(const HookCall &hook, const Function *function, CUfunction f,
                          const LaunchShape &shape, void **parameters, void **extra, const Launch &original) {
    Operation operation(Kind::Kernel, shape.where, 0);
    Record &r = operation.record;
    const bool captured = r.flags & kCaptured;  // each launch of the graph counts it
    r.kernel.slot = function ? function->kernel->slot_index : kNoSlot;
    memcpy(r.kernel.grid, shape.grid, sizeof shape.grid);
    memcpy(r.kernel.block, shape.block, sizeof shape.block);
    r.kernel.shared = shape.shared;
    Swap swap;
    uint32_t outcome = kNotMatched;
    if (!captured) outcome = decide(function, shape, r.id, parameters, extra, swap);
    if (agent.config.stacks) r.stack = host_stack();
    if (agent.config.ranges) {
        const OpenRanges ranges = open_ranges(agent.config.chosen_ranges);
        r.kernel.ranges = ranges.number;
        if (!ranges.chosen) r.flags |= kNotChosen;
    }
    if (!captured && host_program() &&
        (agent.config.match_all || (function && is_matched(*function->kernel)))) {
        uint64_t threads = uint64_t(shape.grid[0]) * shape.grid[1] * shape.grid[2] * shape.block[0] *
                           shape.block[1] * shape.block[2];
        run_host_program(
            {r.id, r.kernel.slot, r.stream, now_ns(), threads,
             operation.queue.context ? static_cast<uint64_t>(operation.queue.context->device) : 0});
    }
    CUresult result;
    if (outcome == kInstrumented) {
        operation.called();
        PatchData data(swap.patch_data);
        result = in_driver_with_copy([&] { return original(swap.function, swap.parameters, swap.extra); });
        r.kernel.build = swap.copy->layout->build;
        if (!swapped(hook, swap, result)) {
            result = in_driver([&] { return original(f, parameters, extra); });
            outcome = unswapped(hook, *function->kernel, result);
        } else if (result != CUDA_SUCCESS) {
            outcome = outcome_of(kLaunchFailed);
        }
    } else {
        operation.time();
        operation.called();
        result = in_driver([&] { return original(f, parameters, extra); });
        if (outcome == outcome_of(kCopyFailed)) outcome = unswapped(hook, *function->kernel, result);
    }
    operation.returned(result);
    r.kernel.outcome = outcome;
    operation.log();
    return result;
}

template <typename Launch>
[[gnu::noinline]] CUresult swapped_launch(const HookCall &hook, CUfunction f, const LaunchShape &shape,
                                          void **parameters, void **extra, const Launch &original) {
    auto own = [&] { return in_driver([&] { return original(f, parameters, extra); }); };
    if (!hook) return own();
    const Function *function = function_of(f, shape.where);
    if (function && may_lack_copy(*function->kernel)) get_copy_for(*function, shape.where);
    if (oplog.on() || host_program())
        return described_launch(hook, function, f, shape, parameters, extra, original);
    if (capturing(shape.where.handle())) return own();
    Swap swap;
    const uint32_t outcome = decide(function, shape, take_ids(1), parameters, extra, swap);
    CUresult result;
    if (outcome == kInstrumented) {
        PatchData data(swap.patch_data);
        result = in_driver_with_copy([&] { return original(swap.function, swap.parameters, swap.extra); });
        if (swapped(hook, swap, result)) return result;
    }
    result = own();
    if (outcome == kInstrumented || outcome == outcome_of(kCopyFailed))
        unswapped(hook, *function->kernel, result);
    return result;
}

template <typename Launch>
[[gnu::always_inline]] inline CUresult launch(CUfunction f, const LaunchShape &shape, void **parameters,
                                              void **extra, const Launch &original) {
    Launching launching;
    HookCall hook;
    CUresult result;
    // Most launches do not match when few kernels are instrumented. This path keeps their overhead low.
    const Function *unmatched =
        hook && !oplog.on() && !host_program() ? registry().functions.find(f) : nullptr;
    if (unmatched && !is_matched(*unmatched->kernel) && !may_lack_copy(*unmatched->kernel) &&
        !capturing(shape.where.handle())) {
        unmatched->kernel->slot->seen.fetch_add(1, std::memory_order_relaxed);
        InDriver in_driver;
        result = original(f, parameters, extra);
    } else {
        result = swapped_launch(hook, f, shape, parameters, extra, original);
    }
    if (hook.keeps_records()) launched_in(shape.where);
    return result;
}

LaunchShape shape_of(const CUlaunchConfig &c, bool per_thread) {
    LaunchShape s{{c.gridDimX, c.gridDimY, c.gridDimZ},
                  {c.blockDimX, c.blockDimY, c.blockDimZ},
                  c.sharedMemBytes,
                  {c.hStream, per_thread},
                  false,
                  {0, 0, 0},
                  &c};
    for (unsigned i = 0; c.attrs && i < c.numAttrs; ++i)
        if (c.attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            s.cluster = true;
            s.cluster_size[0] = c.attrs[i].value.clusterDim.x;
            s.cluster_size[1] = c.attrs[i].value.clusterDim.y;
            s.cluster_size[2] = c.attrs[i].value.clusterDim.z;
        }
    return s;
}

#define LAUNCH_PARAMETERS                                                                       \
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
        unsigned shared, CUstream stream, void **parameters

CUresult hook_cuLaunchKernel(LAUNCH_PARAMETERS, void **extra) {
    return launch(f, {{gx, gy, gz}, {bx, by, bz}, shared, {stream, false}, false, {0, 0, 0}, nullptr},
                  parameters, extra, [&](CUfunction g, void **p, void **e) {
                      return ORIGINAL(cuLaunchKernel)(g, gx, gy, gz, bx, by, bz, shared, stream, p, e);
                  });
}

CUresult hook_cuLaunchKernel_ptsz(LAUNCH_PARAMETERS, void **extra) {
    return launch(f, {{gx, gy, gz}, {bx, by, bz}, shared, {stream, true}, false, {0, 0, 0}, nullptr},
                  parameters, extra, [&](CUfunction g, void **p, void **e) {
                      return ORIGINAL(cuLaunchKernel_ptsz)(g, gx, gy, gz, bx, by, bz, shared, stream, p, e);
                  });
}

// The launch itself records these events. The log does not show which operation records them.
CUresult forget_events(CUresult r, const CUlaunchConfig &c) {
    for (unsigned i = 0; c.attrs && i < c.numAttrs; ++i) {
        const CUlaunchAttribute &a = c.attrs[i];
        CUevent event = a.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ? a.value.programmaticEvent.event
                        : a.id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
                            ? a.value.launchCompletionEvent.event
                            : nullptr;
        if (!event) continue;
        HookCall hook;
        if (hook.keeps_records() && oplog.on()) quietly([&] { forget_event(event); });
    }
    return r;
}

CUresult hook_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
    if (!config) return ORIGINAL(cuLaunchKernelEx)(config, f, parameters, extra);
    CUresult r =
        launch(f, shape_of(*config, false), parameters, extra,
               [&](CUfunction g, void **p, void **e) { return ORIGINAL(cuLaunchKernelEx)(config, g, p, e); });
    return forget_events(r, *config);
}

CUresult hook_cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **parameters,
                                    void **extra) {
    if (!config) return ORIGINAL(cuLaunchKernelEx_ptsz)(config, f, parameters, extra);
    CUresult r = launch(f, shape_of(*config, true), parameters, extra, [&](CUfunction g, void **p, void **e) {
        return ORIGINAL(cuLaunchKernelEx_ptsz)(config, g, p, e);
    });
    return forget_events(r, *config);
}

CUresult hook_cuLaunchCooperativeKernel(LAUNCH_PARAMETERS) {
    return launch(f, {{gx, gy, gz}, {bx, by, bz}, shared, {stream, false}, false, {0, 0, 0}, nullptr},
                  parameters, nullptr, [&](CUfunction g, void **p, void **) {
                      return ORIGINAL(cuLaunchCooperativeKernel)(g, gx, gy, gz, bx, by, bz, shared, stream,
                                                                 p);
                  });
}

CUresult hook_cuLaunchCooperativeKernel_ptsz(LAUNCH_PARAMETERS) {
    return launch(f, {{gx, gy, gz}, {bx, by, bz}, shared, {stream, true}, false, {0, 0, 0}, nullptr},
                  parameters, nullptr, [&](CUfunction g, void **p, void **) {
                      return ORIGINAL(cuLaunchCooperativeKernel_ptsz)(g, gx, gy, gz, bx, by, bz, shared,
                                                                      stream, p);
                  });
}

// The obsolete launch functions. For the first three, earlier calls set the shape, and the driver holds the parameters.
void count_obsolete(Record &r, const Function *function) {
    r.kernel.slot = function ? function->kernel->slot_index : kNoSlot;
    r.kernel.outcome = kNotMatched;
    if (r.flags & kCaptured) return;
    if (function) r.kernel.outcome = count(*function, kLegacyLaunch);
    else agent.control->unnamed.fetch_add(1, std::memory_order_relaxed);
}

template <typename Launch>
CUresult counted_launch(const HookCall &hook, CUfunction f, StreamRef where, int width, int height,
                        const Launch &original) {
    if (!hook) return in_driver(original);
    Operation operation(Kind::Kernel, where, 0);
    Record &r = operation.record;
    count_obsolete(r, function_of(f, where));
    r.kernel.grid[0] = static_cast<uint32_t>(width);
    r.kernel.grid[1] = static_cast<uint32_t>(height);
    r.kernel.grid[2] = 1;
    operation.time();
    operation.called();
    CUresult result = in_driver(original);
    operation.returned(result);
    operation.log();
    return result;
}

template <typename Launch>
[[gnu::always_inline]] inline CUresult legacy_launch(CUfunction f, StreamRef where, int width, int height,
                                                     const Launch &original) {
    Launching launching;
    HookCall hook;
    CUresult result = counted_launch(hook, f, where, width, height, original);
    if (hook.keeps_records()) launched_in(where);
    return result;
}

CUresult hook_cuLaunch(CUfunction f) {
    return legacy_launch(f, {}, 1, 1, [&] { return ORIGINAL(cuLaunch)(f); });
}

CUresult hook_cuLaunchGrid(CUfunction f, int width, int height) {
    return legacy_launch(f, {}, width, height, [&] { return ORIGINAL(cuLaunchGrid)(f, width, height); });
}

CUresult hook_cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    return legacy_launch(f, {stream, false}, width, height,
                         [&] { return ORIGINAL(cuLaunchGridAsync)(f, width, height, stream); });
}

// One call launches a kernel on each of several devices. The log has a record for each.
CUresult hook_cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned n, unsigned flags) {
    Launching launching;
    HookCall hook;
    const auto original = [&] { return ORIGINAL(cuLaunchCooperativeKernelMultiDevice)(launches, n, flags); };
    std::vector<std::unique_ptr<Operation>> operations;
    if (hook && launches)
        quietly([&] {
            for (unsigned i = 0; i < n; ++i) {
                const CUDA_LAUNCH_PARAMS &l = launches[i];
                const StreamRef where{l.hStream, false};
                operations.push_back(std::make_unique<Operation>(Kind::Kernel, where, 0));
                Record &r = operations.back()->record;
                count_obsolete(r, function_of(l.function, where));
                const uint32_t grid[] = {l.gridDimX, l.gridDimY, l.gridDimZ};
                const uint32_t block[] = {l.blockDimX, l.blockDimY, l.blockDimZ};
                memcpy(r.kernel.grid, grid, sizeof grid);
                memcpy(r.kernel.block, block, sizeof block);
                r.kernel.shared = l.sharedMemBytes;
            }
        });
    for (auto &o : operations) o->time(), o->called();
    CUresult result = in_driver(original);
    for (auto &o : operations) o->returned(result), o->log();
    if (hook.keeps_records() && launches)
        for (unsigned i = 0; i < n; ++i) launched_in({launches[i].hStream, false});
    return result;
}

// --- contexts ---

// `existed`: the driver had made it before this call.
CUresult created(CUresult r, const HookCall &hook, CUcontext *context, bool existed = false) {
    if (hook && r == CUDA_SUCCESS && context)
        quietly([&] {
            Context *c = registry().context(*context, true);
            if (!c) return;
            const bool first = c->given.fetch_add(1) == 0;
            context_ready(c, true, first && !existed && !c->before ? Fresh::Context : Fresh::No);
        });
    return r;
}

CUresult hook_cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device) {
    HookCall hook;
    CUresult r = FORWARD(cuCtxCreate)(context, flags, device);
    return created(r, hook, context);
}

CUresult hook_cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
    HookCall hook;
    CUresult r = FORWARD(cuCtxCreate_v2)(context, flags, device);
    return created(r, hook, context);
}

CUresult hook_cuCtxCreate_v3(CUcontext *context, void *affinity, int n, unsigned flags, CUdevice device) {
    HookCall hook;
    CUresult r = FORWARD(cuCtxCreate_v3)(context, affinity, n, flags, device);
    return created(r, hook, context);
}

CUresult hook_cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device) {
    HookCall hook;
    CUresult r = FORWARD(cuCtxCreate_v4)(context, parameters, flags, device);
    return created(r, hook, context);
}

void destroyed(CUcontext handle, void (*end)(Context *) = close_context) {
    Context *c = nullptr;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        auto it = registry().contexts.find(handle);
        if (it == registry().contexts.end()) return;
        c = it->second;
        registry().contexts.erase(it);
        for (auto green = registry().green.begin(); green != registry().green.end();)
            green = green->second == c ? registry().green.erase(green) : std::next(green);
        ++contexts_changed;
        if (registry().only.load() == c) registry().only = nullptr;
    }
    end(c);
    forget_queues(c);
    forget_streams(c);
    freed_with(c->serial);
    std::lock_guard<std::mutex> hold(registry().lock);
    for (auto it = registry().modules.begin(); it != registry().modules.end();) {
        Module *m = it->second;
        ++it;  // forget() erases this one
        if (m->module && m->context == c) registry().forget(m);
    }
}

CUresult hook_cuCtxDestroy(CUcontext context) {
    HookCall hook;
    if (hook.keeps_records()) quietly([&] { destroyed(context); });
    leftovers_end_with(context);
    ContextClosed closed(context);
    return FORWARD(cuCtxDestroy)(context);
}

CUresult hook_cuCtxDestroy_v2(CUcontext context) {
    HookCall hook;
    if (hook.keeps_records()) quietly([&] { destroyed(context); });
    leftovers_end_with(context);
    ContextClosed closed(context);
    return FORWARD(cuCtxDestroy_v2)(context);
}

bool primary_is_active(CUdevice device) {
    unsigned flags = 0;
    int active = 1;
    DriverScope scope;
    return !driver.cuDevicePrimaryCtxGetState ||
           driver.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS || active;
}

// `before`: it was active before this user came.
void retained(CUdevice device, CUcontext primary, bool before) {
    std::lock_guard<std::mutex> hold(registry().lock);
    if (before && !registry().primary.count(device)) {  // it has users that were not counted
        ++registry().retained_since[device];
        return;
    }
    registry().primary[device] = primary;
    ++registry().retained[device];
}

CUresult hook_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    HookCall hook;
    const bool before = hook.keeps_records() && primary_is_active(device);
    CUresult r = FORWARD(cuDevicePrimaryCtxRetain)(context, device);
    if (hook.keeps_records() && r == CUDA_SUCCESS) quietly([&] { retained(device, *context, before); });
    return created(r, hook, context, before || !hook.keeps_records());
}

// Returns the primary context of `device` if the application got it before the attachment. Its number of
// users is unknown.
Context *primary_from_before(CUdevice device) {
    std::vector<Context *> candidates;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        if (registry().primary.count(device)) return nullptr;
        for (auto &c : registry().contexts)
            if (c.second->device == device && !c.second->dead) candidates.push_back(c.second);
    }
    DriverScope scope;
    for (Context *c : candidates)
        if (is_primary(c->handle, device)) return c;
    return nullptr;
}

// Call this when a user releases the primary context of `device`, or resets it. Returns the context if it ends.
CUcontext primary_released(CUdevice device, bool reset) {
    CUcontext handle = nullptr;
    if (Context *before = reset ? primary_from_before(device) : nullptr) {
        handle = before->handle;
        destroyed(handle);
        return handle;
    }
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        auto it = registry().primary.find(device);
        if (it == registry().primary.end()) return nullptr;
        uint32_t &users = registry().retained[device];
        if (!reset && users > 1) {
            --users;
            return nullptr;
        }
        if (!reset) users = 0;
        handle = it->second;
        registry().primary.erase(it);
    }
    destroyed(handle);
    return handle;
}

// Call this when a primary context from before the attachment is released. Returns whether it has other users for sure.
bool keeps_users(CUdevice device) {
    std::lock_guard<std::mutex> hold(registry().lock);
    return registry().retained_since[device]-- > 0;
}

// Releases the context through `original`. For a context from before the attachment, this may be the last
// release. So its maps are read first, and the driver is asked afterwards whether the context still exists.
template <class Original>
CUresult release_primary(const HookCall &hook, CUdevice device, const Original &original) {
    Context *before = nullptr;
    CUcontext ending = nullptr;
    if (hook.keeps_records())
        quietly([&] {
            before = primary_from_before(device);
            if (!before) ending = primary_released(device, false);
            else if (keeps_users(device)) before = nullptr;
            else drain_context(before), ending = before->handle;
        });
    else if (depth() == 1)
        ending = primary_of(device);  // threads of an earlier attachment may be in the context
    std::optional<ContextClosed> closed(ending);
    CUresult r = original(device);
    leftovers_end_with_device(device);
    if (before && hook.keeps_records() && !primary_is_active(device)) {
        before->dead = true;
        {
            std::lock_guard<std::mutex> hold(registry().lock);
            registry().retained_since.erase(device);
        }
        closed.reset();
        quietly([&] { destroyed(before->handle, drop_context); });
    }
    return r;
}

CUresult hook_cuDevicePrimaryCtxRelease(CUdevice device) {
    HookCall hook;
    return release_primary(hook, device, [](CUdevice d) { return FORWARD(cuDevicePrimaryCtxRelease)(d); });
}

CUresult hook_cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    HookCall hook;
    return release_primary(hook, device, [](CUdevice d) { return FORWARD(cuDevicePrimaryCtxRelease_v2)(d); });
}

template <class Original>
CUresult reset_primary(const HookCall &hook, CUdevice device, const Original &original) {
    CUcontext ending = nullptr;
    if (hook.keeps_records()) quietly([&] { ending = primary_released(device, true); });
    else if (depth() == 1)
        ending = primary_of(device);  // threads of an earlier attachment may be in the context
    ContextClosed closed(ending);
    CUresult r = original(device);
    leftovers_end_with_device(device);
    return r;
}

CUresult hook_cuDevicePrimaryCtxReset(CUdevice device) {
    HookCall hook;
    return reset_primary(hook, device, [](CUdevice d) { return FORWARD(cuDevicePrimaryCtxReset)(d); });
}

CUresult hook_cuDevicePrimaryCtxReset_v2(CUdevice device) {
    HookCall hook;
    return reset_primary(hook, device, [](CUdevice d) { return FORWARD(cuDevicePrimaryCtxReset_v2)(d); });
}

// A green context retains the primary context of its device.
CUresult hook_cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc description, CUdevice device,
                               unsigned flags) {
    HookCall hook;
    const bool before = hook.keeps_records() && primary_is_active(device);
    CUresult r = FORWARD(cuGreenCtxCreate)(green, description, device, flags);
    if (!hook.keeps_records() || r != CUDA_SUCCESS) return r;
    CUcontext primary = nullptr;
    quietly([&] {
        DriverScope scope;
        primary = primary_of(device);
        if (primary) retained(device, primary, before);
        std::lock_guard<std::mutex> hold(registry().lock);
        registry().green_devices[*green] = device;
    });
    return created(r, hook, primary ? &primary : nullptr, before);
}

// Returns -1 if it is unknown.
CUdevice device_of_green(const HookCall &hook, CUgreenCtx green) {
    CUcontext converted = nullptr;
    CUdevice device = -1;
    DriverScope scope;
    if (driver.cuCtxFromGreenCtx && driver.cuCtxFromGreenCtx(&converted, green) != CUDA_SUCCESS) return -1;
    if (hook.keeps_records()) {
        std::lock_guard<std::mutex> hold(registry().lock);
        registry().green.erase(converted);  // its handle may be used again
        ++contexts_changed;
        auto known = registry().green_devices.find(green);
        if (known != registry().green_devices.end()) {
            device = known->second;
            registry().green_devices.erase(known);
            return device;
        }
    }
    const bool told =
        driver.cuCtxGetDevice_v2 && driver.cuCtxGetDevice_v2(&device, converted) == CUDA_SUCCESS;
    return told ? device : -1;
}

CUresult hook_cuGreenCtxDestroy(CUgreenCtx green) {
    HookCall hook;
    CUdevice device = -1;
    if (hook.keeps_records() || depth() == 1) quietly([&] { device = device_of_green(hook, green); });
    if (device < 0) return FORWARD(cuGreenCtxDestroy)(green);
    return release_primary(hook, device, [green](CUdevice) { return FORWARD(cuGreenCtxDestroy)(green); });
}

// --- captures ---

CUstream own_stream(CUstream stream) { return StreamRef{stream, true}.handle(); }

// The capture is counted before it begins, so that none of the agent's calls is in progress then.
template <typename Begin>
[[gnu::always_inline]] inline CUresult begin_capture(CUstream stream, const Begin &original) {
    Launching launching;
    HookCall hook;
    const bool left = depth() == 1 && has_leftovers(), counted = hook.keeps_records();
    if (counted && oplog.on()) queue_of({stream, false});  // later, it cannot be asked for
    if (left) leftovers_captured(1);
    if (counted) registry().captures.fetch_add(1);
    if (left || counted) before_capture();
    CUresult r = original();
    if (r == CUDA_SUCCESS) {
        if (counted && hook.keeps_records()) quietly([&] { capture_began(stream); });
        return r;
    }
    if (left) leftovers_captured(-1);
    if (counted && hook.keeps_records()) registry().captures.fetch_sub(1);
    return r;
}

CUresult hook_cuStreamBeginCapture(CUstream stream) {
    return begin_capture(stream, [&] { return FORWARD(cuStreamBeginCapture)(stream); });
}

CUresult hook_cuStreamBeginCapture_ptsz(CUstream stream) {
    return begin_capture(own_stream(stream), [&] { return FORWARD(cuStreamBeginCapture_ptsz)(stream); });
}

CUresult hook_cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    return begin_capture(stream, [&] { return FORWARD(cuStreamBeginCapture_v2)(stream, mode); });
}

CUresult hook_cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
    return begin_capture(own_stream(stream),
                         [&] { return FORWARD(cuStreamBeginCapture_v2_ptsz)(stream, mode); });
}

CUresult hook_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *from,
                                          const void *edges, size_t n, CUstreamCaptureMode mode) {
    return begin_capture(
        stream, [&] { return FORWARD(cuStreamBeginCaptureToGraph)(stream, graph, from, edges, n, mode); });
}

CUresult hook_cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *from,
                                               const void *edges, size_t n, CUstreamCaptureMode mode) {
    return begin_capture(own_stream(stream), [&] {
        return FORWARD(cuStreamBeginCaptureToGraph_ptsz)(stream, graph, from, edges, n, mode);
    });
}

// A capture that was invalidated ends with an error. Ending a capture that never began changes nothing.
CUresult end_capture(CUresult r, const HookCall &hook, CUstream stream) {
    if (r == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED || r == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD ||
        r == CUDA_ERROR_INVALID_VALUE || r == CUDA_ERROR_INVALID_HANDLE || r == CUDA_ERROR_ILLEGAL_STATE)
        return r;
    if (depth() == 1 && has_leftovers()) leftovers_captured(-1);
    if (!hook.keeps_records()) return r;
    bool seen = true;
    quietly([&] { seen = capture_ended(stream); });
    if (!seen) return r;
    int before = registry().captures.load();
    while (before > 0 && !registry().captures.compare_exchange_weak(before, before - 1)) {
    }
    if (before == 1 && hook) quietly(retry_waiting);
    return r;
}

CUresult hook_cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    HookCall hook;
    CUresult r = FORWARD(cuStreamEndCapture)(stream, graph);
    return end_capture(r, hook, stream);
}

CUresult hook_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    HookCall hook;
    CUresult r = FORWARD(cuStreamEndCapture_ptsz)(stream, graph);
    return end_capture(r, hook, own_stream(stream));
}

// --- libc ---

int hook_sigaction(int signal, const struct sigaction *act, struct sigaction *old) {
    return program_sigaction(ORIGINAL(sigaction), signal, act, old);
}

// These end the process without running exit handlers. exit() calls _exit, too, once they have run.

void hook__exit(int status) {
    agent.finish(kAtExit, Reading::Last);
    ORIGINAL(_exit)(status);
}

void hook__Exit(int status) {
    agent.finish(kAtExit, Reading::Last);
    ORIGINAL(_Exit)(status);
}

// These make the process another program, if they succeed. The child of vfork() calls them in the memory of its parent.

int hook_execve(const char *path, char *const *arguments, char *const *environment) {
    agent.finish(kAtExit, Reading::OnTheWay);
    return ORIGINAL(execve)(path, arguments, environment);
}

int hook_execveat(int folder, const char *path, char *const *arguments, char *const *environment, int flags) {
    agent.finish(kAtExit, Reading::OnTheWay);
    return ORIGINAL(execveat)(folder, path, arguments, environment, flags);
}

int hook_fexecve(int file, char *const *arguments, char *const *environment) {
    agent.finish(kAtExit, Reading::OnTheWay);
    return ORIGINAL(fexecve)(file, arguments, environment);
}

}  // namespace

Hook hooks[2 * kHooks] = {
#define GPUBPF_HOOK(symbol) {#symbol, nullptr, nullptr, nullptr, nullptr},
#include "hooks_all.def"
};

static size_t hooks_used = kHooks;
size_t hook_count() { return hooks_used; }

static void own_hooks() {
#define GPUBPF_HOOK(symbol) hooks[kHook_##symbol].replacement = reinterpret_cast<void *>(&hook_##symbol);
#include "hooks.def"
#undef GPUBPF_HOOK
}

static bool ends_in(const std::string &name, const char *suffix) {
    size_t n = strlen(suffix);
    return name.size() > n && name.compare(name.size() - n, n, suffix) == 0;
}

// Deprecated since CUDA 4.0, the last since 11.3. Current programs do not launch with these.
static bool is_obsolete(const std::string &name) {
    return name == "cuLaunch" || name == "cuLaunchGrid" || name == "cuLaunchGridAsync" ||
           name == "cuLaunchCooperativeKernelMultiDevice";
}

void find_hook_targets(void *library) {
    own_hooks();
    module_hooks();
    graph_hooks();
    log_hooks();
    // A hook from an earlier attachment may be called meanwhile. It must still call the original.
    static void *before[kHooks];
    hooks_used = kHooks;
    for (size_t i = 0; i < kHooks; ++i) {
        Hook &h = hooks[i];
        bool libc = strncmp(h.name, "cu", 2) != 0;
        h.target = dlsym(libc ? RTLD_DEFAULT : library, h.name);
        h.lack = libc                  ? kLacksExit
                 : is_obsolete(h.name) ? kLacksObsolete
                 : i >= kAlways        ? kLacksLog
                 : i >= kNeeded        ? kLacksHolding
                                       : nullptr;
        if (h.target != before[i]) h.original = before[i] = h.target;
    }
    // The driver may return addresses that it does not export. A name without a version always means the same
    // function, however it is looked up.
    auto *get = driver.cuGetProcAddress_v2;
    if (!get) return;
    for (size_t i = 0; i < kHooks; ++i) {
        Hook &h = hooks[i];
        std::string name = h.name;
        bool per_thread = ends_in(name, "_ptsz") || ends_in(name, "_ptds");
        if (per_thread) name.resize(name.size() - 5);
        if (!h.target || ends_in(name, "_v2") || ends_in(name, "_v3") || ends_in(name, "_v4") ||
            name.compare(0, 2, "cu") != 0)
            continue;
        if (dlsym(library, (name + "_v2").c_str()))
            continue;  // without a version, the driver would return another function
        void *address = nullptr;
        CUdriverProcAddressQueryResult found;
        if (get(name.c_str(), &address, 13000, per_thread ? 2 : 1, &found) != CUDA_SUCCESS || !address)
            continue;
        bool known = false;
        for (size_t k = 0; k < hooks_used; ++k) known = known || hooks[k].target == address;
        if (!known) hooks[hooks_used++] = {h.name, h.replacement, address, address, h.lack};
    }
}

bool is_in(HookIndex hook) { return hooks[hook].target && hooks[hook].original != hooks[hook].target; }

void choose_hooks(bool operations, bool loads) {
    if (!loads) hooks[kHook_dlopen].target = hooks[kHook_dlmopen].target = nullptr;
    if (operations) return;
    for (size_t i = 0; i < hooks_used; ++i) {
        Hook &h = hooks[i];
        for (size_t k = kAlways; k < kHooks; ++k)
            if (h.name == hooks[k].name) h.target = nullptr;
    }
}

}  // namespace gpubpf
