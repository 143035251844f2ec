// Modules, libraries, kernels and functions.
#include <string.h>

#include <algorithm>

#include "driver/jit.h"
#include "driver/fatbin.h"
#include "sanitizer/hooks.h"

namespace cudasim::driver {
namespace {

// Returns the most threads per block that .reqntid or .maxntid allows; 0 without either directive.
unsigned block_limit(const cudasim::Kernel &kernel) {
    const uint32_t *shape = kernel.reqntid[0] != 0 ? kernel.reqntid : kernel.maxntid;
    return shape[0] * shape[1] * shape[2];
}

// Returns the registers per thread: those in the cubin, or else an estimate. `max`: CU_JIT_MAX_REGISTERS, which has no effect
// on a cubin that a driver runs as it is.
Registers register_count(const cudasim::Kernel &kernel, const ChosenPtx &chosen, unsigned max) {
    Registers registers;
    const auto found = chosen.registers.find(kernel.name);
    registers.known = found != chosen.registers.end();
    registers.count = registers.known ? found->second : std::clamp(kernel.registers, 8u, 255u);
    if (const unsigned recorded = max_registers(chosen.options)) max = recorded;
    if (const unsigned threads = block_limit(kernel)) {
        const unsigned fits = std::max(16u, static_cast<unsigned>(kRegisters) / threads / 8 * 8);
        max = max == 0 ? fits : std::min(max, fits);
    }
    if (kernel.maxnreg != 0) max = max == 0 ? kernel.maxnreg : std::min(max, kernel.maxnreg);
    if (max != 0) registers.limit = std::max(max, 16u);
    if (!registers.known || chosen.compiled) registers.keep_limit();
    return registers;
}

// Translates an image. `registers`: of its kernels, by index. `ptx`: what was translated.
CUresult translate_image(const void *image, const JitOptions &jit, std::shared_ptr<const Image> &translated,
                         std::vector<Registers> &registers, std::shared_ptr<const std::string> &ptx) {
    if (jit.status() != CUDA_SUCCESS) return jit.status();
    ChosenPtx chosen;
    if (CUresult status = select_ptx(image, jit, chosen)) return status;
    if (CUresult status = translate_ptx(chosen.text, jit, translated)) return status;
    ptx = std::make_shared<const std::string>(std::move(chosen.text));
    for (const cudasim::Kernel &kernel : translated->kernels())
        registers.push_back(register_count(kernel, chosen, jit.max_registers()));
    return CUDA_SUCCESS;
}

int registers_per_warp(const Function &function) {
    return static_cast<int>((function.registers.count * 32 + 255) / 256 * 256);
}

// Makes a module in a context: allocates and initialises its variables, and makes its functions. `managed`: the addresses of
// a library's managed variables.
CUresult load_image(const std::shared_ptr<Context> &context, const std::shared_ptr<const Image> &image,
                    const std::vector<Registers> &registers, const std::shared_ptr<const std::string> &ptx,
                    const std::vector<uint64_t> *managed, std::shared_ptr<Module> &module) {
    module = std::make_shared<Module>();
    module->context = context;
    module->image = image;
    module->ptx = ptx;
    module->sanitizer->quiet = !sanitizer::active();
    const std::vector<Variable> &variables = image->variables();
    module->variables.assign(variables.size(), 0);
    Memory &memory = Memory::instance();
    size_t bytes[2] = {0, 0};  // of global and of constant variables
    uint64_t blocks[2] = {0, 0};
    std::vector<size_t> offsets(variables.size(), 0);
    for (size_t i = 0; i < variables.size(); i++) {
        if (variables[i].external || variables[i].managed) continue;
        size_t &end = bytes[variables[i].space == Space::constant];
        size_t align = std::max<size_t>(variables[i].align, 16);
        offsets[i] = end = (end + align - 1) / align * align;
        end += std::max<size_t>(variables[i].size, 1);
    }
    for (int constant : {0, 1}) {
        if (bytes[constant] == 0) continue;
        uint64_t &block = blocks[constant];
        block = memory.allocate(bytes[constant], MemoryKind::device, context->device, context->handle, 0,
                                constant != 0);
        if (block == 0) return CUDA_ERROR_OUT_OF_MEMORY;
        module->owned.push_back({block, memory.find(block)->id});
    }
    for (size_t i = 0; i < variables.size(); i++) {
        if (variables[i].external) continue;
        if (!variables[i].managed) {
            module->variables[i] = blocks[variables[i].space == Space::constant] + offsets[i];
        } else if (managed != nullptr) {
            module->variables[i] = (*managed)[i];
        } else {
            uint64_t address = memory.allocate(std::max<size_t>(variables[i].size, 1), MemoryKind::managed,
                                               context->device, context->handle);
            if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
            module->owned.push_back({address, memory.find(address)->id});
            module->variables[i] = address;
        }
    }
    for (uint32_t i = 0; i < variables.size(); i++)
        if (!variables[i].external && (managed == nullptr || !variables[i].managed))
            image->initialise(i, module->variables.data(), reinterpret_cast<void *>(module->variables[i]));
    for (uint32_t i = 0; i < image->kernels().size(); i++) {
        auto function = std::make_shared<Function>();
        function->module = module;
        function->image = image;
        function->index = i;
        function->registers = registers[i];
        function->loaded = config().eager_loading;
        function->handle = tables().functions.add(function);
        module->functions.push_back(std::move(function));
    }
    module->handle = tables().modules.add(module);
    std::lock_guard lock(context->mutex);
    context->modules.push_back(module);
    return CUDA_SUCCESS;
}

void unload(const std::shared_ptr<Module> &module) {
    if (sanitizer::active()) sanitizer::module_unloading(module);
    remove_handles(*module);
    if (std::shared_ptr<Context> context = module->context.lock()) {
        std::lock_guard lock(context->mutex);
        auto &modules = context->modules;
        modules.erase(std::remove(modules.begin(), modules.end(), module), modules.end());
    }
}

CUresult load_module(CUmodule *handle, const void *image, unsigned count, CUjit_option *options,
                     void **values) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    JitOptions jit(count, options, values);
    std::optional<ExclusiveContext> exclusive;
    std::shared_ptr<const Image> translated;
    std::vector<Registers> registers;
    if (CUresult status = prepare_lazy_load(context, exclusive)) return status;
    std::shared_ptr<const std::string> ptx;
    if (CUresult status = translate_image(image, jit, translated, registers, ptx)) return status;
    std::shared_ptr<Module> module;
    if (CUresult status = load_image(context, translated, registers, ptx, nullptr, module)) return status;
    exclusive.reset();
    if (sanitizer::active()) sanitizer::module_loaded(module);
    *handle = static_cast<CUmodule>(module->handle);
    return CUDA_SUCCESS;
}

// Returns whether a variable has a name that nvcc never registers: function statics, string constants, type information.
bool is_never_registered(const std::string &name) {
    for (const char *prefix : {"_ZZ", "_ZTV", "_ZTI", "_ZTS", "$str", "_$_str", "__unnamed_", ".str"})
        if (name.rfind(prefix, 0) == 0) return true;
    return false;
}

CUresult find_global(const std::shared_ptr<Module> &module, const char *name, bool from_library,
                     CUdeviceptr *address, size_t *bytes) {
    int index = module->image->find_variable(name);
    if (index < 0 || module->image->variables()[index].external) return CUDA_ERROR_NOT_FOUND;
    if (config().hide_variables) {
        std::lock_guard lock(module->mutex);
        if (from_library) module->registered_variables.insert(name);
        else if (is_never_registered(name) && module->registered_variables.count(name) == 0)
            return CUDA_ERROR_NOT_FOUND;
    }
    if (address != nullptr) *address = module->variables[index];
    if (bytes != nullptr) *bytes = module->image->variables()[index].size;
    return CUDA_SUCCESS;
}

CUresult get_attribute(const Function &function, CUfunction_attribute attribute, int *value) {
    const cudasim::Kernel &kernel = function.kernel();
    switch (static_cast<int>(attribute)) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = most_threads_to_launch(function); break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = static_cast<int>(kernel.static_shared); break;
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: {
            uint64_t bytes = 0;
            for (uint32_t index : kernel.variables)
                if (function.image->variables()[index].space == Space::constant)
                    bytes += function.image->variables()[index].size;
            *value = static_cast<int>(bytes);
            break;
        }
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = static_cast<int>(kernel.local); break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = static_cast<int>(function.registers.count); break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION: *value = function.image->target; break;
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = config().cc_major * 10 + config().cc_minor; break;
        case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *value = 0; break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            *value = function.max_dynamic_shared >= 0
                         ? function.max_dynamic_shared.load()
                         : std::max(0, kSharedPerBlock - static_cast<int>(kernel.static_shared));
            break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = function.carveout; break;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: *value = kernel.explicit_cluster; break;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
            *value = function.required(attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH);
            break;
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            *value = function.nonportable_cluster;
            break;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: *value = function.cluster_policy; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult set_attribute(Function &function, int attribute, int value) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            if (value < 0 || value + static_cast<int>(function.kernel().static_shared) > kSharedPerBlockOptin)
                return CUDA_ERROR_INVALID_VALUE;
            function.max_dynamic_shared = value;
            return CUDA_SUCCESS;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
            function.carveout = value;
            return CUDA_SUCCESS;
        case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
            function.nonportable_cluster = value;
            return CUDA_SUCCESS;
        case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
            function.cluster_policy = value;
            return CUDA_SUCCESS;
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
        case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
            if (function.has_fixed_cluster()) return CUDA_ERROR_NOT_PERMITTED;
            if (value < 0) return CUDA_ERROR_INVALID_VALUE;
            function.required_cluster[attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH] = value;
            return CUDA_SUCCESS;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
}

// Finds the function of a CUfunction. A CUkernel is accepted too, except in hostile mode: some drivers reject it.
CUresult find_function_strict(CUfunction handle, std::shared_ptr<Function> &function) {
    if (CUresult status = check_initialized()) return status;
    function = tables().functions.get(handle);
    if (function) return CUDA_SUCCESS;
    if (config().hostile) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    return find_function(handle, context, function);
}

CUresult parameter_info(const cudasim::Kernel &kernel, size_t index, size_t *offset, size_t *size) {
    if (offset == nullptr || index >= kernel.parameters.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = kernel.parameters[index].offset;
    if (size != nullptr) *size = kernel.parameters[index].size;
    return CUDA_SUCCESS;
}

const cudasim::Kernel &kernel_data(const LibraryKernel &kernel, const Library &library) {
    return library.image->kernels()[kernel.index];
}

// Counts the functions of a module, or the kernels of a library.
template <class Owner, class Members>
CUresult count_members(const Handles<Owner> &owners, const void *handle, Members Owner::*members,
                       unsigned *count) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Owner> owner = owners.get(handle);
    if (!owner) return CUDA_ERROR_INVALID_HANDLE;
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = static_cast<unsigned>(((*owner).*members).size());
    return CUDA_SUCCESS;
}

// Writes the handles of the functions of a module, or of the kernels of a library. The rest of `handles` becomes null.
template <class Owner, class Members, class Handle>
CUresult list_members(const Handles<Owner> &owners, const void *handle, Members Owner::*members,
                      Handle *handles, size_t count) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Owner> owner = owners.get(handle);
    if (!owner) return CUDA_ERROR_INVALID_HANDLE;
    if (handles == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
    const Members &all = (*owner).*members;
    for (size_t i = 0; i < count; i++)
        handles[i] = i < all.size() ? static_cast<Handle>(all[i]->handle) : nullptr;
    return CUDA_SUCCESS;
}

// Finds a CUkernel and its library.
CUresult find_kernel(CUkernel handle, std::shared_ptr<LibraryKernel> &kernel,
                     std::shared_ptr<Library> &library) {
    if (CUresult status = check_initialized()) return status;
    kernel = tables().kernels.get(handle);
    library = kernel ? kernel->library.lock() : nullptr;
    return library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

void remove_handles(const Module &module) {
    for (const std::shared_ptr<Function> &function : module.functions)
        tables().functions.remove(function->handle);
    tables().modules.remove(module.handle);
}

Module::Module() : sanitizer(std::make_unique<sanitizer::ModuleState>()) {}

Module::~Module() {
    for (auto [address, id] : owned) Memory::instance().release(address, id);
}

Library::~Library() {
    for (uint64_t address : managed)
        if (address != 0) Memory::instance().release(address);
}

static CUresult find_library_module(const std::shared_ptr<Library> &library,
                                    const std::shared_ptr<Context> &context,
                                    std::shared_ptr<Module> &module) {
    std::lock_guard context_lock(context->mutex);  // before the library's mutex, as in loading
    std::lock_guard lock(library->mutex);
    auto found = library->modules.find(context.get());
    if (found != library->modules.end()) {
        module = found->second;
        return CUDA_SUCCESS;
    }
    if (CUresult status =
            load_image(context, library->image, library->registers, library->ptx, &library->managed, module))
        return status;
    module->library = library;
    for (size_t i = 0; i < library->kernels.size(); i++)
        for (const auto &[key, value] : library->kernels[i]->attributes)
            if (key.second == context->device) set_attribute(*module->functions[i], key.first, value);
    library->modules[context.get()] = module;
    return CUDA_SUCCESS;
}

CUresult library_module(const std::shared_ptr<Library> &library, const std::shared_ptr<Context> &context,
                        std::shared_ptr<Module> &module) {
    if (CUresult status = find_library_module(library, context, module)) return status;
    if (sanitizer::active()) sanitizer::module_loaded(module);
    return CUDA_SUCCESS;
}

void drop_context_modules(const Context *context) {
    for (const std::shared_ptr<Library> &library : tables().libraries.all()) {
        std::lock_guard lock(library->mutex);
        library->modules.erase(context);
    }
}

CUresult find_function(const void *handle, const std::shared_ptr<Context> &context,
                       std::shared_ptr<Function> &function) {
    if (handle == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    function = tables().functions.get(handle);
    if (function) {
        std::shared_ptr<Module> module = function->module.lock();
        return module && module->context.lock() == context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    std::shared_ptr<LibraryKernel> kernel = tables().kernels.get(handle);
    if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Library> library = kernel->library.lock();
    if (!library) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Module> module;
    if (CUresult status = library_module(library, context, module)) return status;
    function = module->functions[kernel->index];
    return CUDA_SUCCESS;
}

CUresult load_module_privately(CUmodule *module, const void *image) {
    return load_module(module, image, 0, nullptr, nullptr);
}

void load_function(Function &function, const std::shared_ptr<Context> &context) {
    if (function.loaded.exchange(true)) return;
    if (config().lazy_loading_waits) ExclusiveContext loading(context);
    if (sanitizer::active()) sanitizer::function_loaded(function);
}

int max_threads(const Function &function) {
    const unsigned limit = block_limit(function.kernel());
    return limit == 0 ? kThreadsPerBlock : std::min(kThreadsPerBlock, static_cast<int>(limit));
}

// The rules are those of cuda_occupancy.h: a warp takes registers in units of 256, each part of a multiprocessor has its own
// registers, and the check of a block counts its warps as a multiple of the parts.
static int block_registers(const Function &function, int block) {
    const int warps = (block + 31) / 32;
    return registers_per_warp(function) * ((warps + kParts - 1) / kParts * kParts);
}

// With an estimated number of registers, the limit is strict in hostile mode only.
int most_threads_to_launch(const Function &function) {
    const bool strict = config().hostile || function.registers.known;
    const int registers = strict ? kRegisters : kRegisters / 2 * 3;
    const int warps = registers / registers_per_warp(function) / kParts * kParts;
    return std::min(max_threads(function), warps * 32);
}

int occupancy(const Function &function, int block, size_t dynamic_shared) {
    if (block <= 0 || block > max_threads(function)) return 0;
    if (block_registers(function, block) > kRegisters) return 0;
    int warps = (block + 31) / 32;
    int blocks = std::min(kBlocksPerMultiprocessor, kThreadsPerMultiprocessor / 32 / warps);
    blocks = std::min(blocks, kRegisters / kParts / registers_per_warp(function) * kParts / warps);
    size_t shared = function.kernel().static_shared + dynamic_shared + kSharedReserved;
    shared = (shared + 127) / 128 * 128;
    return std::min<int>(blocks, static_cast<int>(kSharedPerMultiprocessor / shared));
}

// Any multiprocessors can share a cluster.
uint64_t resident_clusters(const Function &function, int block, size_t dynamic_shared, Dim3 cluster) {
    return static_cast<uint64_t>(occupancy(function, block, dynamic_shared)) * kMultiprocessors /
           cluster.count();
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- modules

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    return load_module(module, image, 0, nullptr, nullptr);
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                            void **values) {
    return load_module(module, image, count, options, values);
}

CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
    return load_module(module, image, 0, nullptr, nullptr);
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::string text;
    if (CUresult status = read_image_file(path, text)) return status;
    return load_module(module, text.data(), 0, nullptr, nullptr);
}

CUresult cuModuleUnload(CUmodule handle) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Module> module = tables().modules.get(handle);
    if (!module || module->library.lock()) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult status = check_unsafe_call()) return status;
    std::optional<ExclusiveContext> exclusive;
    if (CUresult status = prepare_load(context, exclusive)) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    drain(*context);  // as an H200 does: kernels of other modules may use its variables
    unload(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *mode = config().eager_loading ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module_handle, const char *name) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Module> module = tables().modules.get(module_handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    int index = module->image->find_kernel(name);
    if (index < 0) return CUDA_ERROR_NOT_FOUND;
    *handle = static_cast<CUfunction>(module->functions[index]->handle);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule handle) {
    return count_members(tables().modules, handle, &Module::functions, count);
}

CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int count, CUmodule handle) {
    return list_members(tables().modules, handle, &Module::functions, functions, count);
}

CUresult cuModuleGetGlobal(CUdeviceptr *address, size_t *bytes, CUmodule handle, const char *name) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Module> module = tables().modules.get(handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    return find_global(module, name, false, address, bytes);
}

// ---------------------------------------------------------------------------------------------------- libraries

CUresult cuLibraryLoadData(CUlibrary *handle, const void *code, CUjit_option *jit_options, void **jit_values,
                           unsigned int jit_count, CUlibraryOption *, void **, unsigned int) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || code == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::vector<std::shared_ptr<Context>> contexts = tables().contexts.all();
    std::deque<std::optional<ExclusiveContext>> exclusive;
    for (const std::shared_ptr<Context> &context : contexts)
        if (CUresult status = prepare_lazy_load(context, exclusive.emplace_back())) return status;
    auto library = std::make_shared<Library>();
    JitOptions jit(jit_count, jit_options, jit_values);
    if (CUresult status = translate_image(code, jit, library->image, library->registers, library->ptx))
        return status;
    const std::vector<Variable> &variables = library->image->variables();
    library->managed.assign(variables.size(), 0);
    for (uint32_t i = 0; i < variables.size(); i++) {
        if (!variables[i].managed || variables[i].external) continue;
        uint64_t address = Memory::instance().allocate(std::max<size_t>(variables[i].size, 1),
                                                       MemoryKind::managed, 0, library.get());
        if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
        library->managed[i] = address;
        // The initial value of a managed variable contains no addresses, because these differ between contexts.
        std::vector<uint64_t> none(variables.size(), 0);
        library->image->initialise(i, none.data(), reinterpret_cast<void *>(address));
    }
    for (uint32_t i = 0; i < library->image->kernels().size(); i++) {
        auto kernel = std::make_shared<LibraryKernel>();
        kernel->library = library;
        kernel->index = i;
        kernel->handle = tables().kernels.add(kernel);
        library->kernels.push_back(std::move(kernel));
    }
    library->handle = tables().libraries.add(library);
    exclusive.clear();
    for (const std::shared_ptr<Context> &context : contexts) {
        std::shared_ptr<Module> module;
        if (context->destroyed || context->sticky_error != 0) continue;
        if (CUresult status = library_module(library, context, module)) return status;
    }
    *handle = static_cast<CUlibrary>(library->handle);
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadFromFile(CUlibrary *handle, const char *path, CUjit_option *jit_options,
                               void **jit_values, unsigned int jit_count, CUlibraryOption *options,
                               void **values, unsigned int count) {
    if (CUresult status = check_initialized()) return status;
    if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::string text;
    if (CUresult status = read_image_file(path, text)) return status;
    return cuLibraryLoadData(handle, text.data(), jit_options, jit_values, jit_count, options, values, count);
}

CUresult cuLibraryUnload(CUlibrary handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Library> library = tables().libraries.remove(handle);
    if (!library) return CUDA_ERROR_INVALID_HANDLE;
    for (const std::shared_ptr<LibraryKernel> &kernel : library->kernels)
        tables().kernels.remove(kernel->handle);
    std::map<const Context *, std::shared_ptr<Module>> modules;
    {
        std::lock_guard lock(library->mutex);
        modules.swap(library->modules);
    }
    for (const auto &[context, module] : modules)
        unload(module);  // a running kernel keeps its module until it ends
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *handle, CUlibrary library_handle, const char *name) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Library> library = tables().libraries.get(library_handle);
    if (!library) return CUDA_ERROR_INVALID_HANDLE;
    int index = library->image->find_kernel(name);
    if (index < 0) return CUDA_ERROR_NOT_FOUND;
    *handle = static_cast<CUkernel>(library->kernels[index]->handle);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary handle) {
    return count_members(tables().libraries, handle, &Library::kernels, count);
}

CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary handle) {
    return list_members(tables().libraries, handle, &Library::kernels, kernels, count);
}

CUresult cuLibraryGetModule(CUmodule *handle, CUlibrary library_handle) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Library> library = tables().libraries.get(library_handle);
    if (!library) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Module> module;
    if (CUresult status = library_module(library, context, module)) return status;
    *handle = static_cast<CUmodule>(module->handle);
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary handle, const char *name) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Library> library = tables().libraries.get(handle);
    if (!library) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Module> module;
    if (CUresult status = library_module(library, context, module)) return status;
    return find_global(module, name, true, address, bytes);
}

CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *bytes, CUlibrary handle, const char *name) {
    if (CUresult status = check_initialized()) return status;
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Library> library = tables().libraries.get(handle);
    if (!library) return CUDA_ERROR_INVALID_HANDLE;
    int index = library->image->find_variable(name);
    if (index < 0 || library->managed[index] == 0) return CUDA_ERROR_NOT_FOUND;
    if (address != nullptr) *address = library->managed[index];
    if (bytes != nullptr) *bytes = library->image->variables()[index].size;
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetUnifiedFunction(void **, CUlibrary, const char *) { return CUDA_ERROR_NOT_FOUND; }

// ---------------------------------------------------------------------------------------------------- kernels

CUresult cuKernelGetFunction(CUfunction *handle, CUkernel kernel) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!tables().kernels.get(kernel)) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Function> function;
    if (CUresult status = find_function(kernel, context, function)) return status;
    *handle = static_cast<CUfunction>(function->handle);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary *handle, CUkernel kernel_handle) {
    if (CUresult status = check_initialized()) return status;
    if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<LibraryKernel> kernel;
    std::shared_ptr<Library> library;
    if (CUresult status = find_kernel(kernel_handle, kernel, library)) return status;
    *handle = static_cast<CUlibrary>(library->handle);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel handle, CUdevice device) {
    if (CUresult status = check_initialized()) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<LibraryKernel> kernel;
    std::shared_ptr<Library> library;
    if (CUresult status = find_kernel(handle, kernel, library)) return status;
    CUresult status;
    std::shared_ptr<Context> context = primary_context(device, status);
    if (!context) return status;
    std::shared_ptr<Module> module;
    if ((status = library_module(library, context, module)) != CUDA_SUCCESS) return status;
    return get_attribute(*module->functions[kernel->index], attribute, value);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice device) {
    std::shared_ptr<LibraryKernel> kernel;
    std::shared_ptr<Library> library;
    if (CUresult status = find_kernel(handle, kernel, library)) return status;
    CUresult status;
    std::shared_ptr<Context> context = primary_context(device, status);
    if (!context) return status;
    std::shared_ptr<Module> module;
    if ((status = library_module(library, context, module)) != CUDA_SUCCESS) return status;
    if ((status = set_attribute(*module->functions[kernel->index], attribute, value)) != CUDA_SUCCESS)
        return status;
    std::lock_guard lock(library->mutex);
    kernel->attributes[{attribute, device}] = value;
    for (const auto &[other, loaded] : library->modules)
        if (std::shared_ptr<Context> owner = loaded->context.lock(); owner && owner->device == device)
            set_attribute(*loaded->functions[kernel->index], attribute, value);
    return CUDA_SUCCESS;
}

CUresult cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache, CUdevice) {
    if (CUresult status = check_initialized()) return status;
    return tables().kernels.get(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuKernelGetName(const char **name, CUkernel handle) {
    if (CUresult status = check_initialized()) return status;
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<LibraryKernel> kernel;
    std::shared_ptr<Library> library;
    if (CUresult status = find_kernel(handle, kernel, library)) return status;
    *name = kernel_data(*kernel, *library).name.c_str();
    return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t *offset, size_t *size) {
    std::shared_ptr<LibraryKernel> kernel;
    std::shared_ptr<Library> library;
    if (CUresult status = find_kernel(handle, kernel, library)) return status;
    return parameter_info(kernel_data(*kernel, *library), index, offset, size);
}

// ---------------------------------------------------------------------------------------------------- functions

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    std::shared_ptr<Function> function;
    if (CUresult status = find_function_strict(handle, function)) return status;
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return get_attribute(*function, attribute, value);
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    std::shared_ptr<Function> function;
    if (CUresult status = find_function_strict(handle, function)) return status;
    return set_attribute(*function, attribute, value);
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache) {
    std::shared_ptr<Function> function;
    return find_function_strict(handle, function);
}

CUresult cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig) {
    std::shared_ptr<Function> function;
    return find_function_strict(handle, function);
}

CUresult cuFuncGetModule(CUmodule *module, CUfunction handle) {
    std::shared_ptr<Function> function;
    if (CUresult status = find_function_strict(handle, function)) return status;
    if (module == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Module> owner = function->module.lock();
    if (!owner) return CUDA_ERROR_INVALID_HANDLE;
    *module = static_cast<CUmodule>(owner->handle);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char **name, CUfunction handle) {
    std::shared_ptr<Function> function;
    if (CUresult status = find_function_strict(handle, function)) return status;
    if (name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *name = function->kernel().name.c_str();
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size) {
    std::shared_ptr<Function> function;
    if (CUresult status = find_function_strict(handle, function)) return status;
    return parameter_info(function->kernel(), index, offset, size);
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction handle) {
    std::shared_ptr<Function> function;
    if (CUresult status = find_function_strict(handle, function)) return status;
    if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *state = function->loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
    std::shared_ptr<Function> function;
    if (CUresult status = find_function_strict(handle, function)) return status;
    const std::shared_ptr<Module> module = function->module.lock();
    const std::shared_ptr<Context> context = module ? module->context.lock() : nullptr;
    if (!context) return CUDA_ERROR_INVALID_HANDLE;
    if (!function->kernel().refused.empty()) return CUDA_ERROR_NOT_SUPPORTED;  // the launch prints the reason
    load_function(*function, context);
    return CUDA_SUCCESS;
}

extern "C" {
// For tools: a function is an instrumented copy of another. A copy has no cubin. So that the two can be compared, it gets the
// registers of the original, and the difference of the two estimates on top.
CUresult cudasim_is_copy_of(CUfunction copy_handle, CUfunction original_handle) {
    const std::shared_ptr<Function> copy = tables().functions.get(copy_handle);
    const std::shared_ptr<Function> original = tables().functions.get(original_handle);
    if (!copy || !original) return CUDA_ERROR_INVALID_HANDLE;
    if (copy->registers.known || !original->registers.known) return CUDA_SUCCESS;
    const unsigned copy_estimate = copy->kernel().registers, estimate = original->kernel().registers;
    Registers registers = copy->registers;
    registers.count = original->registers.count + std::max(copy_estimate, estimate) - estimate;
    registers.keep_limit();
    registers.known = true;
    copy->registers = registers;
    return CUDA_SUCCESS;
}
}

// ---------------------------------------------------------------------------------------------------- occupancy

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle, int block_size,
                                                              size_t dynamic_shared, unsigned int) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Function> function;
    if (CUresult status = find_function(handle, context, function)) return status;
    if (blocks == nullptr || block_size <= 0) return CUDA_ERROR_INVALID_VALUE;
    *blocks = occupancy(*function, block_size, dynamic_shared);
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int block_size,
                                                     size_t dynamic_shared) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, handle, block_size, dynamic_shared,
                                                                0);
}

namespace {

// Finds the function and the threads per block of a configuration.
CUresult read_configuration(CUfunction handle, const CUlaunchConfig *config,
                            std::shared_ptr<Function> &function, int &threads) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (CUresult status = find_function(handle, context, function)) return status;
    if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
    threads = static_cast<int>(std::min(Dim3{config->blockDimX, config->blockDimY, config->blockDimZ}.count(),
                                        uint64_t{kThreadsPerBlock + 1}));
    return threads > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction handle, const CUlaunchConfig *config) {
    std::shared_ptr<Function> function;
    int threads = 0;
    if (CUresult status = read_configuration(handle, config, function, threads)) return status;
    if (clusters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Dim3 asked = kNoCluster, cluster;
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            asked = cluster_of(config->attrs[i].value);
    if (CUresult status = find_cluster(*function, asked, cluster)) return status;
    if (cluster == kNoCluster) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    *clusters = static_cast<int>(resident_clusters(*function, threads, config->sharedMemBytes, cluster));
    return CUDA_SUCCESS;
}

// Returns the size that the kernel requires, or else the largest one that fits.
CUresult cuOccupancyMaxPotentialClusterSize(int *blocks, CUfunction handle, const CUlaunchConfig *config) {
    std::shared_ptr<Function> function;
    int threads = 0;
    if (CUresult status = read_configuration(handle, config, function, threads)) return status;
    if (blocks == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Dim3 required;
    const CUresult status = find_cluster(*function, kNoCluster, required);
    if (status == CUDA_SUCCESS && required.count() != 0) {
        *blocks = static_cast<int>(required.count());
        return CUDA_SUCCESS;
    }
    if (cudasim::config().cc_major < 9) return CUDA_ERROR_NOT_SUPPORTED;
    *blocks = most_cluster_blocks(*function);
    while (*blocks > 0 && resident_clusters(*function, threads, config->sharedMemBytes,
                                            {static_cast<unsigned>(*blocks)}) == 0)
        --*blocks;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *min_grid, int *block_size, CUfunction handle,
                                                   CUoccupancyB2DSize shared_size, size_t dynamic_shared,
                                                   int limit, unsigned int) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Function> function;
    if (CUresult status = find_function(handle, context, function)) return status;
    if (min_grid == nullptr || block_size == nullptr) return CUDA_ERROR_INVALID_VALUE;
    int most = max_threads(*function);
    if (limit > 0) most = std::min(most, limit);
    int best_threads = 0;
    for (int block = most; block > 0; block = block % 32 == 0 ? block - 32 : block / 32 * 32) {
        size_t shared = shared_size != nullptr ? shared_size(block) : dynamic_shared;
        int blocks = occupancy(*function, block, shared);
        if (blocks * block > best_threads) {
            best_threads = blocks * block;
            *block_size = block;
            *min_grid = blocks * kMultiprocessors;
        }
    }
    return best_threads != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuOccupancyMaxPotentialBlockSize(int *min_grid, int *block_size, CUfunction handle,
                                          CUoccupancyB2DSize shared_size, size_t dynamic_shared, int limit) {
    return cuOccupancyMaxPotentialBlockSizeWithFlags(min_grid, block_size, handle, shared_size,
                                                     dynamic_shared, limit, 0);
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction handle, int blocks,
                                                 int block_size) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    std::shared_ptr<Function> function;
    if (CUresult status = find_function(handle, context, function)) return status;
    if (bytes == nullptr || blocks <= 0 || block_size <= 0) return CUDA_ERROR_INVALID_VALUE;
    int each = kSharedPerMultiprocessor / blocks / 128 * 128 - kSharedReserved;
    each = std::min(each, kSharedPerBlockOptin) - static_cast<int>(function->kernel().static_shared);
    *bytes = static_cast<size_t>(std::max(each, 0));
    return CUDA_SUCCESS;
}
