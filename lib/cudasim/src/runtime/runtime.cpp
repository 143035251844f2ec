// Loading the driver, contexts, and the registration of images, kernels and variables by code that nvcc generates.
#include "runtime/runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <unordered_map>

#include "error_text.h"
#include "per_thread.h"

namespace cudasim::runtime {
namespace {

struct Tables {
    Driver legacy, per_thread;
    bool found = false;
    cudaError_t load_error = cudaErrorInitializationError;  // if not found
};

void load(Driver &table, cuuint64_t flags) {
    auto find = [&](const char *name, int version) {
        void *function = nullptr;
        CUdriverProcAddressQueryResult status;
        if (table.GetProcAddress(name, &function, version, flags, &status) != CUDA_SUCCESS)
            return static_cast<void *>(nullptr);
        return function;
    };
#define X(name, version) table.name = reinterpret_cast<decltype(table.name)>(find("cu" #name, version));
    CUDASIM_DRIVER_FUNCTIONS(X)
#undef X
}

Tables &driver_tables() {
    static Tables *const instance = [] {
        auto *tables = new Tables();
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            tables->load_error = cudaErrorInsufficientDriver;
            return tables;
        }
        auto find = reinterpret_cast<decltype(Driver::GetProcAddress)>(dlsym(library, "cuGetProcAddress_v2"));
        if (find == nullptr) {
            tables->load_error = cudaErrorInsufficientDriver;
            return tables;
        }
        tables->legacy.GetProcAddress = tables->per_thread.GetProcAddress = find;
        load(tables->legacy, CU_GET_PROC_ADDRESS_LEGACY_STREAM);
        load(tables->per_thread, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
        tables->found = tables->legacy.Init != nullptr;
        return tables;
    }();
    return *instance;
}

// ---------------------------------------------------------------------------------------------------- registration

struct FatBinary {
    const void *image = nullptr;
    CUlibrary library = nullptr;
    cudaError_t status = cudaErrorNotReady;  // of loading it; cudaErrorNotReady: not loaded yet
    std::vector<const void *> functions, variables;
    std::vector<void **> managed;
};

struct RegisteredFunction {
    FatBinary *binary;
    std::string name;
    CUkernel kernel = nullptr;
};

struct RegisteredVariable {
    FatBinary *binary;
    std::string name;
    size_t size;
    bool managed;
};

struct Registry {
    std::recursive_mutex mutex;
    std::vector<std::unique_ptr<FatBinary>> binaries;
    std::unordered_map<const void *, RegisteredFunction> functions;  // by host function
    std::unordered_map<const void *, RegisteredVariable> variables;  // by host variable
    std::unordered_map<CUkernel, const void *> hosts;                // kernel → host function
    std::map<int, std::pair<CUcontext, uint64_t>> primaries;         // device → context, generation
    std::atomic<uint64_t> generation{1};
};

Registry &registry() {
    static Registry *const instance = new Registry();
    return *instance;
}

// Loads an image, and looks up the kernels and variables that the program registered.
void load_binary(FatBinary &binary) {
    if (binary.status != cudaErrorNotReady) return;
    const Driver &cu = driver(false);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;  // loading must not invalidate a capture
    cu.ThreadExchangeStreamCaptureMode(&mode);
    binary.status = static_cast<cudaError_t>(
        cu.LibraryLoadData(&binary.library, binary.image, nullptr, nullptr, 0, nullptr, nullptr, 0));
    cu.ThreadExchangeStreamCaptureMode(&mode);
    if (binary.status != cudaSuccess) return;
    Registry &all = registry();
    for (const void *host : binary.functions) {
        RegisteredFunction &function = all.functions.at(host);
        if (cu.LibraryGetKernel(&function.kernel, binary.library, function.name.c_str()) == CUDA_SUCCESS)
            all.hosts[function.kernel] = host;
    }
    for (const void *host : binary.variables) {
        RegisteredVariable &variable = all.variables.at(host);
        CUdeviceptr address = 0;
        size_t size = 0;
        if (variable.managed) {
            if (cu.LibraryGetManaged(&address, &size, binary.library, variable.name.c_str()) == CUDA_SUCCESS)
                *static_cast<void **>(const_cast<void *>(host)) = reinterpret_cast<void *>(address);
        } else {
            cu.LibraryGetGlobal(&address, &size, binary.library, variable.name.c_str());
        }
    }
}

struct ThreadState {
    int device = 0;
    cudaError_t last = cudaSuccess;
    uint64_t generation = 0;
    CUcontext context = nullptr;  // the context that the runtime made current in this thread
};

thread_local ThreadState thread_state;

struct CallConfiguration {
    dim3 grid, block;
    size_t shared;
    void *stream;
};

std::vector<CallConfiguration> &call_configurations() { return per_thread<std::vector<CallConfiguration>>(); }

FatBinary *binary_of(void **handle) { return reinterpret_cast<FatBinary *>(handle); }

}  // namespace

const Driver &driver(bool per_thread) {
    return per_thread ? driver_tables().per_thread : driver_tables().legacy;
}

int &current_device() { return thread_state.device; }

cudaError_t record_error(cudaError_t error) {
    if (error != cudaSuccess) thread_state.last = error;
    return error;
}

extern "C" __attribute__((visibility("hidden"))) int cudasim_stub(const char *function) {  // stubs call it
    return record_error(static_cast<cudaError_t>(unsupported(function)));
}

cudaError_t record_error(CUresult status) { return record_error(static_cast<cudaError_t>(status)); }

cudaError_t record_query(CUresult status) {
    return status == CUDA_ERROR_NOT_READY ? cudaErrorNotReady : record_error(status);
}

cudaError_t ensure_driver() {
    Tables &tables = driver_tables();
    if (!tables.found) return tables.load_error;
    static std::atomic<bool> initialised{false};
    if (initialised.load(std::memory_order_acquire)) return cudaSuccess;
    CUresult status = tables.legacy.Init(0);
    if (status == CUDA_SUCCESS) initialised = true;
    return static_cast<cudaError_t>(status);
}

cudaError_t ensure_context() {
    if (cudaError_t error = ensure_driver()) return error;
    const Driver &cu = driver(false);
    Registry &all = registry();
    CUcontext context = nullptr;
    if (CUresult status = cu.CtxGetCurrent(&context)) return static_cast<cudaError_t>(status);
    bool application_context = context != nullptr && context != thread_state.context;
    if (application_context || (context != nullptr && thread_state.generation == all.generation))
        return cudaSuccess;
    std::lock_guard lock(all.mutex);
    int device = thread_state.device;
    auto &primary = all.primaries[device];
    if (primary.first == nullptr) {
        if (CUresult status = cu.DevicePrimaryCtxRetain(&primary.first, device))
            return static_cast<cudaError_t>(status);
    }
    if (CUresult status = cu.CtxSetCurrent(primary.first)) return static_cast<cudaError_t>(status);
    thread_state.context = primary.first;
    thread_state.generation = all.generation;
    for (const std::unique_ptr<FatBinary> &binary : all.binaries) load_binary(*binary);
    return cudaSuccess;
}

cudaError_t find_kernel(const void *host_function, CUkernel &kernel) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    auto found = all.functions.find(host_function);
    if (found == all.functions.end()) {
        kernel = static_cast<CUkernel>(const_cast<void *>(host_function));
        const char *name = nullptr;
        return host_function != nullptr && driver(false).KernelGetName(&name, kernel) == CUDA_SUCCESS
                   ? cudaSuccess
                   : cudaErrorInvalidDeviceFunction;
    }
    load_binary(*found->second.binary);
    if (found->second.binary->status != cudaSuccess) return found->second.binary->status;
    kernel = found->second.kernel;
    return kernel != nullptr ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}

const void *host_function_of(CUfunction function) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    for (const auto &[kernel, host] : all.hosts) {
        CUfunction candidate = nullptr;
        if (driver(false).KernelGetFunction(&candidate, kernel) == CUDA_SUCCESS && candidate == function)
            return host;
    }
    return function;
}

cudaError_t find_symbol(const void *host_variable, Symbol &symbol) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    auto found = all.variables.find(host_variable);
    if (found == all.variables.end()) {
        // Host code has the address of a managed variable's memory instead.
        for (const auto &[host, variable] : all.variables)
            if (variable.managed && *static_cast<void *const *>(host) == host_variable) {
                symbol = {reinterpret_cast<CUdeviceptr>(host_variable), variable.size};
                return cudaSuccess;
            }
        return cudaErrorInvalidSymbol;
    }
    RegisteredVariable &variable = found->second;
    load_binary(*variable.binary);
    if (variable.binary->status != cudaSuccess) return variable.binary->status;
    const Driver &cu = driver(false);
    CUresult status = variable.managed ? cu.LibraryGetManaged(&symbol.address, &symbol.size,
                                                              variable.binary->library, variable.name.c_str())
                                       : cu.LibraryGetGlobal(&symbol.address, &symbol.size,
                                                             variable.binary->library, variable.name.c_str());
    return status == CUDA_ERROR_NOT_FOUND ? cudaErrorInvalidSymbol : static_cast<cudaError_t>(status);
}

cudaError_t find_symbol_range(const void *host_variable, size_t bytes, size_t offset, void *&pointer) {
    Symbol symbol;
    if (cudaError_t error = find_symbol(host_variable, symbol)) return error;
    if (offset > symbol.size || bytes > symbol.size - offset) return cudaErrorInvalidValue;
    pointer = reinterpret_cast<void *>(symbol.address + offset);
    return cudaSuccess;
}

bool valid_configuration(dim3 grid, dim3 block) {
    return grid.x != 0 && grid.y != 0 && grid.z != 0 && block.x != 0 && block.y != 0 && block.z != 0 &&
           grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535 && block.x <= 1024 && block.y <= 1024 &&
           block.z <= 64 && uint64_t{block.x} * block.y * block.z <= 1024;
}

}  // namespace cudasim::runtime

using namespace cudasim::runtime;

extern "C" {

void **__cudaRegisterFatBinary(void *image) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    all.binaries.push_back(std::make_unique<FatBinary>());
    all.binaries.back()->image = image;
    return reinterpret_cast<void **>(all.binaries.back().get());
}

void __cudaRegisterFatBinaryEnd(void **) {}

void __cudaUnregisterFatBinary(void **handle) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    FatBinary *binary = binary_of(handle);
    auto found = std::find_if(
        all.binaries.begin(), all.binaries.end(),
        [binary](const std::unique_ptr<FatBinary> &candidate) { return candidate.get() == binary; });
    if (found == all.binaries.end()) return;
    for (const void *host : binary->functions) {
        all.hosts.erase(all.functions.at(host).kernel);
        all.functions.erase(host);
    }
    for (const void *host : binary->variables) all.variables.erase(host);
    if (binary->library != nullptr) driver(false).LibraryUnload(binary->library);
    all.binaries.erase(found);
}

void __cudaRegisterFunction(void **handle, const char *host, char *, const char *name, int, uint3 *, uint3 *,
                            dim3 *, dim3 *, int *) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    FatBinary *binary = binary_of(handle);
    if (all.functions.insert({host, {binary, name, nullptr}}).second) binary->functions.push_back(host);
}

void __cudaRegisterVar(void **handle, char *host, char *, const char *name, int, size_t size, int, int) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    FatBinary *binary = binary_of(handle);
    if (all.variables.insert({host, {binary, name, size, false}}).second) binary->variables.push_back(host);
}

void __cudaRegisterManagedVar(void **handle, void **host, char *, const char *name, int, size_t size, int,
                              int) {
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    FatBinary *binary = binary_of(handle);
    if (all.variables.insert({host, {binary, name, size, true}}).second) binary->variables.push_back(host);
}

void __cudaRegisterHostVar(void **, const char *, char *, size_t) {}

// Called before the host accesses a managed variable. Its image must be loaded then.
char __cudaInitModule(void **handle) {
    if (ensure_context() != cudaSuccess) return 0;
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    load_binary(*binary_of(handle));
    return binary_of(handle)->status == cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    call_configurations().push_back({grid, block, shared, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (call_configurations().empty()) return record_error(cudaErrorMissingConfiguration);
    const CallConfiguration &last = call_configurations().back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<void **>(stream) = last.stream;
    call_configurations().pop_back();
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
    // nvcc's stub keeps the handle in a static variable. So the handle is the host function's address, which stays valid
    // after a device reset.
    *kernel = static_cast<cudaKernel_t>(const_cast<void *>(host));
    return cudaSuccess;
}

cudaError_t cudaGetKernel(cudaKernel_t *out, const void *host) {
    if (cudaError_t error = ensure_context()) return record_error(error);
    if (out == nullptr) return record_error(cudaErrorInvalidValue);
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(host, kernel)) return record_error(error);
    *out = reinterpret_cast<cudaKernel_t>(kernel);
    return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t *out, const void *host) {
    if (cudaError_t error = ensure_context()) return record_error(error);
    if (out == nullptr) return record_error(cudaErrorInvalidValue);
    CUkernel kernel = nullptr;
    if (cudaError_t error = find_kernel(host, kernel)) return record_error(error);
    return record_error(driver(false).KernelGetFunction(out, kernel));
}

// ---------------------------------------------------------------------------------------------------- errors

cudaError_t cudaGetLastError(void) {
    cudaError_t last = thread_state.last;
    thread_state.last = cudaSuccess;
    return last;
}

cudaError_t cudaPeekAtLastError(void) { return thread_state.last; }

// ---------------------------------------------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int *count) {
    if (count == nullptr) return record_error(cudaErrorInvalidValue);
    *count = 0;
    if (cudaError_t error = ensure_driver()) return record_error(error);
    return record_error(driver(false).DeviceGetCount(count));
}

cudaError_t cudaSetDevice(int device) {
    if (cudaError_t error = ensure_driver()) return record_error(error);
    int count = 0;
    driver(false).DeviceGetCount(&count);
    if (device < 0 || device >= count) return record_error(cudaErrorInvalidDevice);
    thread_state.device = device;
    thread_state.generation = 0;
    thread_state.context = nullptr;
    // ensure_context() replaces the current context by the device's primary context.
    driver(false).CtxGetCurrent(&thread_state.context);
    return record_error(ensure_context());
}

cudaError_t cudaInitDevice(int device, unsigned int, unsigned int) {
    int before = thread_state.device;
    if (cudaError_t error = cudaSetDevice(device)) return error;
    return before == device ? cudaSuccess : cudaSetDevice(before);
}

cudaError_t cudaGetDevice(int *device) {
    if (device == nullptr) return record_error(cudaErrorInvalidValue);
    if (cudaError_t error = ensure_driver()) return record_error(error);
    CUcontext context = nullptr;
    driver(false).CtxGetCurrent(&context);
    *device = thread_state.device;
    if (context != nullptr && context != thread_state.context)
        return record_error(driver(false).CtxGetDevice(device));
    return cudaSuccess;
}

cudaError_t cudaDeviceReset(void) {
    if (cudaError_t error = ensure_driver()) return record_error(error);
    Registry &all = registry();
    std::lock_guard lock(all.mutex);
    CUresult status = driver(false).DevicePrimaryCtxReset(thread_state.device);
    all.primaries.erase(thread_state.device);
    all.generation++;
    thread_state.context = nullptr;
    driver(false).CtxSetCurrent(nullptr);
    thread_state.last = cudaSuccess;
    return record_error(status);
}

}  // extern "C"
