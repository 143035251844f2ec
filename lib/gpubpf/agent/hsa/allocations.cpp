// The program's memory allocations, in the operation log (docs/memory.md, "Allocations and epochs").
//
// ROCr's functions are hooked, so all libraries above it are covered. A record names the HIP function that the program called
// (hip_calls.def). HIP's internal allocations are not logged as the program's, but their addresses count for epochs.
#include "agent.h"
#include "log/stack.h"

namespace gpubpf {

hsa_pointer info_of(uint64_t address) {
    hsa_pointer info{};
    info.size = sizeof info;
    if (hsa.amd_pointer_info(reinterpret_cast<const void *>(address), &info, nullptr, nullptr, nullptr) ||
        info.type == HSA_POINTER_UNKNOWN)
        return {};
    return info;
}

namespace {

uint64_t number(const void *at) { return reinterpret_cast<uint64_t>(at); }

// HIP initializes ROCr in the program's first call, which was not hooked yet when it began. If that call allocates memory, HIP's
// internal allocations precede it. So the last allocation is the program's, and it is logged at the next event.
struct InFirstCall {
    uint32_t gpu = 0, stack = 0;
    uint64_t base = 0, bytes = 0, epoch = 0;
    const char *function = nullptr;
};
struct State {
    std::mutex lock;
    InFirstCall first;
    std::atomic<bool> any{false};
};
AttachmentState<State> state;

void log_first() {
    if (!state->any) return;
    std::lock_guard<std::mutex> hold(state->lock);
    const InFirstCall &f = state->first;
    if (state->any.exchange(false)) log_allocation(f.gpu, f.function, f.base, f.bytes, f.epoch, f.stack);
}

// Call after an allocation at `base`. `function`: the called function, `from`: its return address. `counts`: whether HIP's internal
// allocations count for epochs.
void note(const char *function, const void *from, const void *base, size_t bytes, bool counts) {
    if (!base || !bytes) return;
    Call *call = current_call();
    const bool for_program = call && call->allocates, by_hip = is_internal(number(from));
    const char *first = by_hip && !call ? called_function() : nullptr;
    if (first && !allocates_memory(first)) first = nullptr;
    if (by_hip && !for_program && !first && !counts) return;
    const Gpu *gpu = agent.gpu(info_of(number(base)).owner);
    const uint32_t context = gpu ? gpu->number : 0;
    const uint64_t epoch = allocated(number(base), bytes, context);
    if (first) {
        std::lock_guard<std::mutex> hold(state->lock);
        state->first = {context, host_stack(), number(base), bytes, epoch, first};
        state->any = true;
        return;
    }
    log_first();
    if (for_program) {
        call->allocated = true;
        log_allocation(context, call->allocates, number(base), bytes, epoch, call->stack);
    } else if (!by_hip) {
        log_allocation(context, function, number(base), bytes, epoch, host_stack(), gpu ? 0 : kHostMemory);
    }
}

// Calls ROCr to allocate memory, and logs the allocation. The call stores the address at `made`.
template <class Original>
hsa_status allocates(const char *function, const void *from, void **made, size_t bytes, bool counts,
                     const Original &original) {
    const hsa_status status = original();
    if (OwnWork work; work && agent.live && !status && made)
        quietly([&] { note(function, from, *made, bytes, counts); });
    return status;
}

// The same for a call that frees the memory at `base`. `locked`: `base` is a host address; otherwise it is a GPU address.
template <class Original>
hsa_status frees(const char *function, const void *base, bool locked, const Original &original) {
    Freeing what;
    uint64_t of = 0;
    if (OwnWork work; work && agent.live)
        quietly([&] {
            of = attachment;
            what = freeing(locked ? number(info_of(number(base)).agent_base) : number(base), 0);
        });
    const hsa_status status = original();
    if (!what.base || status) return status;
    if (OwnWork work; work && attachment == of)
        quietly([&] {
            log_first();
            if (what.serial) log_allocation(0, function, what.base, 0, what.epoch, 0);
            if (what.serial || !locked) freed(what);
        });
    return status;
}

constexpr char kFree[] = "hsa_amd_memory_pool_free";

}  // namespace

hsa_status on_pool_allocate(hsa_handle pool, size_t size, uint32_t flags, void **made) {
    return allocates("hsa_amd_memory_pool_allocate", __builtin_return_address(0), made, size, true,
                     [&] { return originals.pool_allocate(pool, size, flags, made); });
}

hsa_status on_pool_free(void *base) {
    return frees(kFree, base, false, [&] { return originals.pool_free(base); });
}

hsa_status on_allocate(hsa_handle region, size_t size, void **made) {
    return allocates("hsa_memory_allocate", __builtin_return_address(0), made, size, true,
                     [&] { return originals.allocate(region, size, made); });
}

hsa_status on_free(void *base) {
    return frees(kFree, base, false, [&] { return originals.free(base); });
}

// HIP also locks memory for single copies. Those are not allocations, and they do not count for epochs.
hsa_status on_lock(void *host, size_t size, hsa_handle *agents, int count, void **made) {
    return allocates("hsa_amd_memory_lock", __builtin_return_address(0), made, size, false,
                     [&] { return originals.lock(host, size, agents, count, made); });
}

hsa_status on_lock_to_pool(void *host, size_t size, hsa_handle *agents, int count, hsa_handle pool,
                           uint32_t flags, void **made) {
    return allocates("hsa_amd_memory_lock_to_pool", __builtin_return_address(0), made, size, false,
                     [&] { return originals.lock_to_pool(host, size, agents, count, pool, flags, made); });
}

hsa_status on_unlock(void *host) {
    return frees("hsa_amd_memory_unlock", host, true, [&] { return originals.unlock(host); });
}

void freed_into_pool(const Freeing &what, const char *function) {
    if (!what.serial) return;
    log_first();
    log_allocation(0, function, what.base, 0, what.epoch, 0);
    freed(what);
}

void exported(const void *base, const char *function) {
    log_first();
    log_allocation(0, function, number(base), 0, allocation_epoch(), 0);
}

void allocated_from_pool(const void *base, size_t bytes, const Call &call) {
    if (!base || !bytes) return;
    const Gpu *gpu = agent.gpu(info_of(number(base)).owner);
    const uint32_t context = gpu ? gpu->number : 0;
    const uint64_t epoch = allocated(number(base), bytes, context);
    log_allocation(context, call.allocates, number(base), bytes, epoch, call.stack);
}

void log_allocations_of(const void *arguments, size_t bytes, const Gpu &gpu) {
    log_first();
    if (!agent.running) return;
    log_allocations_before(arguments, bytes, gpu.number,
                           [](uint64_t address, uint64_t &base, uint64_t &size) {
                               const hsa_pointer info = info_of(address);
                               base = number(info.agent_base);
                               size = info.bytes;
                               return base != 0;
                           });
}

const Lifetime allocations_lifetime = lifetime_of_attachment_state<state>();

}  // namespace gpubpf
