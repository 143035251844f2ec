// The device runtime: kernels that launch kernels, copy and allocate (cuda_device_runtime_api.h).
//
// A grid that a kernel launches runs after the kernel's own grid, in the order of the launches, each followed by those that it
// launches itself. A program cannot notice this, because it must not wait for such a grid. So streams and events need no work.

#include <cstring>

#include "engine/internal.h"
#include "error_text.h"

namespace cudasim {
namespace {

enum {
    kSuccess = 0,
    kOutOfMemory = 2,
    kInvalidConfiguration = 9,
    kInvalidFunction = 98,
    kLaunchPendingCountExceeded = 69,
    kNotSupported = 801,
    kInvalidClusterSize = 912
};
constexpr uint64_t kThreadsPerBlock = 1024, kPortableCluster = 8;

Job &job_of(const cs_warp *w) { return *static_cast<Block *>(w->block)->job; }
uint32_t &last_error(cs_warp *w) { return reinterpret_cast<Warp *>(w)->last_error[w->lane]; }

uint64_t allocate(cs_warp *w, uint64_t size) {
    const Environment &environment = *job_of(w).launch->environment;
    return environment.allocate ? environment.allocate(environment.self, size) : 0;
}

bool release(cs_warp *w, uint64_t address) {
    const Environment &environment = *job_of(w).launch->environment;
    return environment.release && environment.release(environment.self, address);
}

// Returns the kernel at an address; null if no kernel is there.
const cs_kernel *kernel_at(const cs_warp *w, uint64_t address) {
    const cs_image *image = job_of(w).image;
    const uint64_t index = (address - w->code_base) / 16 - 1;
    if (address % 16 || address <= w->code_base || index >= image->nfunctions) return nullptr;
    const char *name = image->functions[index].name;
    for (uint32_t k = 0; name != nullptr && k < image->nkernels; k++)
        if (strcmp(image->kernels[k].name, name) == 0) return &image->kernels[k];
    return nullptr;
}

uint32_t check(const cs_kernel &kernel, const NestedLaunch &launch, const Environment &environment) {
    const uint64_t blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    const uint64_t threads = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
    if (blocks == 0 || launch.grid[0] > INT32_MAX || launch.grid[1] > 65535 || launch.grid[2] > 65535)
        return kInvalidConfiguration;
    if (threads == 0 || threads > kThreadsPerBlock || launch.block[2] > 64) return kInvalidConfiguration;
    if (kernel.reqntid[0] != 0 && memcmp(kernel.reqntid, launch.block, sizeof launch.block) != 0)
        return kInvalidConfiguration;
    const uint32_t *const cluster = kernel.reqnctapercluster;  // launches here cannot name another shape
    for (int k = 0; k < 3; k++)
        if (cluster[0] != 0 && launch.grid[k] % cluster[k] != 0) return kInvalidClusterSize;
    if (cluster[0] == 0 ? kernel.explicit_cluster != 0
                        : uint64_t{cluster[0]} * cluster[1] * cluster[2] > kPortableCluster)
        return kInvalidClusterSize;
    const uint64_t most = uint64_t{kernel.maxntid[0]} * kernel.maxntid[1] * kernel.maxntid[2];
    if (most != 0 && threads > most) return kInvalidConfiguration;
    const uint64_t shared = uint64_t{kernel.static_shared} + launch.dynamic_shared;
    if (shared > environment.max_shared_per_block) return kInvalidConfiguration;
    return kernel.refused ? kNotSupported : kSuccess;
}

// Returns memory for the parameters of a kernel; 0 if it cannot be launched.
uint64_t parameter_buffer(cs_warp *w, const uint64_t *arguments) {
    Job &job = job_of(w);
    const cs_kernel *kernel = kernel_at(w, arguments[0]);
    NestedLaunch launch;
    for (int k = 0; k < 3; k++) {
        launch.grid[k] = static_cast<uint32_t>(arguments[1 + k]);
        launch.block[k] = static_cast<uint32_t>(arguments[4 + k]);
    }
    launch.dynamic_shared = static_cast<uint32_t>(arguments[7]);
    if (kernel == nullptr) {
        last_error(w) = kInvalidFunction;
        return 0;
    }
    if (const uint32_t error = check(*kernel, launch, *job.launch->environment)) {
        last_error(w) = error;
        return 0;
    }
    launch.kernel = static_cast<uint32_t>(kernel - job.image->kernels);
    launch.parameters.resize(kernel->param_bytes);
    const uint64_t buffer = allocate(w, kernel->param_bytes < 16 ? 16 : kernel->param_bytes);
    if (buffer == 0) {
        last_error(w) = kOutOfMemory;
        return 0;
    }
    std::lock_guard lock(job.nested_mutex);
    job.prepared[buffer] = std::move(launch);
    return buffer;
}

uint32_t launch(cs_warp *w, uint64_t buffer, uint64_t stream) {
    Job &job = job_of(w);
    std::unique_lock lock(job.nested_mutex);
    const auto found = job.prepared.find(buffer);
    if (found == job.prepared.end()) return kInvalidConfiguration;
    NestedLaunch next = std::move(found->second);
    job.prepared.erase(found);
    const bool full = job.nested.size() >= job.launch->pending_limit;
    if (!full) {
        if (!next.parameters.empty())
            memcpy(next.parameters.data(), reinterpret_cast<const void *>(buffer), next.parameters.size());
        next.stream = stream;
        job.nested.push_back(std::move(next));
    }
    lock.unlock();
    release(w, buffer);
    return full ? kLaunchPendingCountExceeded : kSuccess;
}

// Returns a text in device memory. It is not freed: only programs that report an error ask for it.
uint64_t text(cs_warp *w, const char *words) {
    const size_t size = strlen(words) + 1;
    const uint64_t address = allocate(w, size);
    if (address) memcpy(reinterpret_cast<void *>(address), words, size);
    return address;
}

void store(cs_warp *w, uint64_t address, uint64_t value, uint32_t size) {
    memcpy(resolve(w, address, size, 'w'), &value, size);
}

// Copies or sets memory at once. Not supported after a launch into the same stream, which would have to run first.
uint32_t move(cs_warp *w, uint64_t destination, uint64_t source, int value, uint64_t size, uint64_t stream) {
    Job &job = job_of(w);
    {
        std::lock_guard lock(job.nested_mutex);
        for (const NestedLaunch &before : job.nested)
            if (before.stream == stream) return kNotSupported;
    }
    if (size == 0) return kSuccess;
    auto *to = static_cast<uint8_t *>(resolve(w, destination, 1, 'w'));
    resolve(w, destination + size - 1, 1, 'w');
    if (source == 0) {
        memset(to, value, size);
    } else {
        const void *from = resolve(w, source, 1, 'r');
        resolve(w, source + size - 1, 1, 'r');
        memmove(to, from, size);
    }
    return kSuccess;
}

}  // namespace

uint64_t device_runtime(cs_warp *w, uint32_t call, const uint64_t *a) {
    uint32_t error = kSuccess;
    switch (call) {
        case CS_CALL_PARAMETER_BUFFER: return parameter_buffer(w, a);
        case CS_CALL_LAST_ERROR:
            error = last_error(w);
            last_error(w) = kSuccess;
            return error;
        case CS_CALL_PEEK_ERROR: return last_error(w);
        case CS_CALL_ERROR_STRING: return text(w, error_text(static_cast<int>(a[0]), "unknown error"));
        case CS_CALL_LAUNCH: error = launch(w, a[0], a[1]); break;
        case CS_CALL_DEVICE_COUNT: store(w, a[0], 1, 4); break;
        case CS_CALL_DEVICE: store(w, a[0], 0, 4); break;
        case CS_CALL_CREATE: {
            // A handle that is not one of the special handles. It stays valid, and no other stream or event has it.
            static std::atomic<uint64_t> next{0x100};
            store(w, a[0], next++, 8);
            break;
        }
        case CS_CALL_MALLOC: {
            const uint64_t address = allocate(w, a[1]);
            store(w, a[0], address, 8);
            error = address ? kSuccess : kOutOfMemory;
            break;
        }
        case CS_CALL_FREE:
            if (a[0] && !release(w, a[0]))
                raise_fault(w, CS_FAULT_LAUNCH_FAILED, a[0], 0, 0,
                            "cudaFree() of an address that cudaMalloc() did not return");
            break;
        case CS_CALL_COPY: error = move(w, a[0], a[1], 0, a[2], a[4]); break;
        case CS_CALL_SET: error = move(w, a[0], 0, static_cast<int>(a[1]), a[2], a[3]); break;
        case CS_CALL_SET_CONDITIONAL: {
            const Environment &environment = *job_of(w).launch->environment;
            if (environment.set_conditional)
                environment.set_conditional(environment.self, a[0], static_cast<uint32_t>(a[1]));
            break;
        }
        default: break;
    }
    if (error) last_error(w) = error;
    return error;
}

}  // namespace cudasim
