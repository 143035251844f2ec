// Replacements of functions that load and unload modules and libraries, look up kernels, and set kernel
// attributes.
#include <unistd.h>

#include "attachment.h"
#include "copies/image.h"
#include "copies/link.h"
#include "copies/patches.h"
#include "copies/preexisting.h"
#include "copies/sidecar.h"
#include "hook_call.h"
#include "log/allocation.h"
#include "log/operation.h"

// These names are the exported symbols, not what the header's macros make of them.
#undef cuLinkCreate
#undef cuLinkAddData
#undef cuLinkAddFile

namespace gpubpf {

namespace {

Context *current_context() { return registry().current(); }

// --- modules and libraries ---

void module_loaded(CUmodule handle, const ImageFile &image) {
    auto *m = new Module;
    m->module = handle;
    m->context = current_context();
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        registry().modules[handle] = m;
    }
    image_loaded(m, image);
}

void library_loaded(CUlibrary handle, const ImageFile &image) {
    auto *m = new Module;
    m->library = handle;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        registry().libraries[handle] = m;
    }
    image_loaded(m, image);
}

// The common part of all loading functions. The driver loads first. Then the tool gets the image, before the
// program continues.
template <class Handle, class Source, class Call>
[[gnu::always_inline]] inline CUresult load(HookIndex index, const Handle *handle, ImageFile (*read)(Source),
                                            Source source, void (*note)(Handle, const ImageFile &),
                                            const Call &original) {
    HookCall hook;
    CUresult r;
    if (hook && oplog.on()) {
        Operation operation(Kind::Api, kNoStream, 0);
        operation.called();
        r = original();
        operation.returned(r);
        if (hook.keeps_records()) {
            describe_call(operation.record, index, 0);
            operation.log();
        }
    } else {
        r = original();
    }
    if (hook && r == CUDA_SUCCESS) quietly([&] { note(*handle, read(source)); });
    return r;
}

CUresult hook_cuModuleLoad(CUmodule *module, const char *path) {
    return load(kHook_cuModuleLoad, module, image_of_file, path, module_loaded,
                [&] { return FORWARD(cuModuleLoad)(module, path); });
}

CUresult hook_cuModuleLoadData(CUmodule *module, const void *data) {
    return load(kHook_cuModuleLoadData, module, image_of, data, module_loaded,
                [&] { return FORWARD(cuModuleLoadData)(module, data); });
}

CUresult hook_cuModuleLoadDataEx(CUmodule *module, const void *data, unsigned n, CUjit_option *options,
                                 void **values) {
    return load(kHook_cuModuleLoadDataEx, module, image_of, data, module_loaded,
                [&] { return FORWARD(cuModuleLoadDataEx)(module, data, n, options, values); });
}

CUresult hook_cuModuleLoadFatBinary(CUmodule *module, const void *data) {
    return load(kHook_cuModuleLoadFatBinary, module, image_of, data, module_loaded,
                [&] { return FORWARD(cuModuleLoadFatBinary)(module, data); });
}

Module *module_of(CUmodule handle) {
    std::lock_guard<std::mutex> hold(registry().lock);
    auto it = registry().modules.find(handle);
    return it == registry().modules.end() ? nullptr : it->second;
}

Module *library_of(CUlibrary handle) {
    std::lock_guard<std::mutex> hold(registry().lock);
    auto it = registry().libraries.find(handle);
    return it == registry().libraries.end() ? nullptr : it->second;
}

// Call this before the driver can reuse the module's handles. Waits for threads that are installing copies of
// its kernels.
void unloading(Module *module, const char *call) {
    if (!module) return;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        registry().forget(module);
    }
    for (int i = 0; module->installing && i < 10000; ++i) usleep(1000);
    std::vector<std::pair<uint64_t, const Context *>> variables;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        variables.swap(module->variables);
    }
    for (const auto &[base, context] : variables)
        variable_gone(context->serial, context->dead ? nullptr : call, base);
}

CUresult hook_cuModuleUnload(CUmodule module) {
    HookCall hook;
    Module *m = nullptr;
    if (hook.keeps_records())
        quietly([&] {
            m = module_of(module);
            if (m && m->module) unloading(m, "cuModuleUnload");
        });
    const CUresult result = FORWARD(cuModuleUnload)(module);
    if (m && result == CUDA_SUCCESS && hook.keeps_records()) quietly([&] { forget_patches(m); });
    return result;
}

CUresult hook_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values,
                                unsigned jits, CUlibraryOption *options, void **values, unsigned n) {
    return load(kHook_cuLibraryLoadData, library, image_of, code, library_loaded, [&] {
        return FORWARD(cuLibraryLoadData)(library, code, jit, jit_values, jits, options, values, n);
    });
}

CUresult hook_cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *jit,
                                    void **jit_values, unsigned jits, CUlibraryOption *options, void **values,
                                    unsigned n) {
    return load(kHook_cuLibraryLoadFromFile, library, image_of_file, path, library_loaded, [&] {
        return FORWARD(cuLibraryLoadFromFile)(library, path, jit, jit_values, jits, options, values, n);
    });
}

CUresult hook_cuLibraryUnload(CUlibrary library) {
    HookCall hook;
    Module *own = nullptr;
    if (hook.keeps_records())
        quietly([&] {
            own = library_of(library);
            unloading(own, "cuLibraryUnload");
            for (Module *m : modules_of_library(library)) unloading(m, "cuLibraryUnload");
        });
    const CUresult result = FORWARD(cuLibraryUnload)(library);
    if (own && result == CUDA_SUCCESS && hook.keeps_records()) quietly([&] { forget_patches(own); });
    return result;
}

CUresult hook_cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    HookCall hook;
    CUresult r = FORWARD(cuModuleGetFunction)(function, module, name);
    if (hook && r == CUDA_SUCCESS)
        quietly([&] {
            if (Module *m = module_of(module))
                registry().record(m, m->context ? m->context : current_context(), *function, name);
        });
    return r;
}

CUresult hook_cuModuleEnumerateFunctions(CUfunction *functions, unsigned n, CUmodule module) {
    HookCall hook;
    CUresult r = FORWARD(cuModuleEnumerateFunctions)(functions, n, module);
    if (hook && r == CUDA_SUCCESS && driver.cuFuncGetName)
        quietly([&] {
            Module *m = module_of(module);
            for (unsigned i = 0; m && i < n; ++i) {
                const char *name = nullptr;
                if (functions[i] && driver.cuFuncGetName(&name, functions[i]) == CUDA_SUCCESS)
                    registry().record(m, m->context ? m->context : current_context(), functions[i], name);
            }
        });
    return r;
}

CUresult hook_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    HookCall hook;
    CUresult r = FORWARD(cuLibraryGetKernel)(kernel, library, name);
    if (hook && r == CUDA_SUCCESS)
        quietly([&] {
            if (Module *m = library_of(library)) registry().record(m, nullptr, *kernel, name);
        });
    return r;
}

CUresult hook_cuLibraryEnumerateKernels(CUkernel *kernels, unsigned n, CUlibrary library) {
    HookCall hook;
    CUresult r = FORWARD(cuLibraryEnumerateKernels)(kernels, n, library);
    if (hook && r == CUDA_SUCCESS && driver.cuKernelGetName)
        quietly([&] {
            Module *m = library_of(library);
            for (unsigned i = 0; m && i < n; ++i) {
                const char *name = nullptr;
                if (kernels[i] && driver.cuKernelGetName(&name, kernels[i]) == CUDA_SUCCESS)
                    registry().record(m, nullptr, kernels[i], name);
            }
        });
    return r;
}

CUresult hook_cuLibraryGetModule(CUmodule *module, CUlibrary library) {
    HookCall hook;
    CUresult r = FORWARD(cuLibraryGetModule)(module, library);
    if (hook && r == CUDA_SUCCESS)
        quietly([&] {
            if (Module *m = library_of(library)) {
                std::lock_guard<std::mutex> hold(registry().lock);
                // Another library's module, whose context has ended, may have had the same handle.
                Module *&known = registry().modules[*module];
                if (known != m) m->modules.push_back(*module);
                known = m;
            }
        });
    return r;
}

CUresult hook_cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    HookCall hook;
    CUresult r = FORWARD(cuKernelGetFunction)(function, kernel);
    if (hook && r == CUDA_SUCCESS)
        quietly([&] {
            if (const Function *f = registry().functions.find(kernel))
                registry().record(f->kernel->module, current_context(), *function, f->kernel->name.c_str());
        });
    return r;
}

// --- linking ---

template <class CacheSlot>
CUresult noted(const HookCall &hook, CUresult r, const CacheSlot &note) {
    if (hook && r == CUDA_SUCCESS) quietly(note);
    return r;
}

// clang-format off
#define LINKING(SUFFIX)                                                                                                              \
  CUresult hook_cuLinkCreate##SUFFIX(unsigned n, CUjit_option *options, void **values, CUlinkState *link) {                           \
    HookCall hook;                                                                                                                     \
    return noted(hook, FORWARD(cuLinkCreate##SUFFIX)(n, options, values, link), [&] { link_began(*link); });                        \
  }                                                                                                                                  \
  CUresult hook_cuLinkAddData##SUFFIX(CUlinkState link, CUjitInputType type, void *data, size_t size, const char *name, unsigned n,  \
                                      CUjit_option *options, void **values) {                                                        \
    HookCall hook;                                                                                                                     \
    return noted(hook, FORWARD(cuLinkAddData##SUFFIX)(link, type, data, size, name, n, options, values),                            \
                 [&] { link_given(link, type, data, size); });                                                                       \
  }                                                                                                                                  \
  CUresult hook_cuLinkAddFile##SUFFIX(CUlinkState link, CUjitInputType type, const char *path, unsigned n, CUjit_option *options,    \
                                      void **values) {                                                                               \
    HookCall hook;                                                                                                                     \
    return noted(hook, FORWARD(cuLinkAddFile##SUFFIX)(link, type, path, n, options, values),                                        \
                 [&] { link_given_file(link, type, path); });                                                                        \
  }
// clang-format on
LINKING()
LINKING(_v2)

CUresult hook_cuLinkComplete(CUlinkState link, void **image, size_t *size) {
    HookCall hook;
    return noted(hook, FORWARD(cuLinkComplete)(link, image, size), [&] { link_made(link, *image); });
}

CUresult hook_cuLinkDestroy(CUlinkState link) {
    HookCall hook;
    if (hook.keeps_records()) quietly([&] { link_ended(link); });
    return FORWARD(cuLinkDestroy)(link);
}

// --- attributes, mirrored to the copies ---

// Called when the copies have what the application has set.
void settings_changed(Kernel *kernel) {
    std::lock_guard<std::mutex> hold(registry().lock);
    uint32_t hash = static_cast<uint32_t>(kernel->cache_config * 31 + kernel->shared_config);
    for (const auto &[attribute, value] : kernel->attributes)
        hash = (hash * 31 + static_cast<uint32_t>(attribute)) * 31 + static_cast<uint32_t>(value);
    kernel->settings = hash;
}

void mirror_attribute(const void *handle, CUfunction_attribute attribute, int value, const CUdevice *device) {
    const Function *f = registry().functions.find(handle);
    if (!f) return;
    std::vector<std::pair<CUfunction, Context *>> launched;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        f->kernel->attributes[attribute] = value;
        launched = f->kernel->launched;
    }
    DriverScope scope;
    const auto set = reinterpret_cast<CUresult (*)(CUfunction, CUfunction_attribute, int)>(
        hooks[kHook_cuFuncSetAttribute].original);
    for (Copy *c = f->kernel->copies.load(std::memory_order_acquire); c; c = c->next)
        if (!c->context->dead && (!f->context || f->context == c->context) &&
            (!device || *device == c->context->device))
            for (CUfunction copy : c->functions())
                if (set(copy, attribute, value) != CUDA_SUCCESS) c->withdrawn = true;
    for (const auto &[copy, context] : launched)
        if (!context->dead && (!f->context || f->context == context) &&
            (!device || *device == context->device) && set(copy, attribute, value) != CUDA_SUCCESS) {
            std::lock_guard<std::mutex> hold(context->memory);
            for (Copy *c : context->copies)
                if (c->kernel->module == f->kernel->module) c->withdrawn = true;
        }
    settings_changed(f->kernel);
}

CUresult hook_cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) {
    HookCall hook;
    CUresult r = FORWARD(cuFuncSetAttribute)(f, attribute, value);
    if (hook && r == CUDA_SUCCESS) quietly([&] { mirror_attribute(f, attribute, value, nullptr); });
    return r;
}

CUresult hook_cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                   CUdevice device) {
    HookCall hook;
    CUresult r = FORWARD(cuKernelSetAttribute)(attribute, value, kernel, device);
    if (hook && r == CUDA_SUCCESS) quietly([&] { mirror_attribute(kernel, attribute, value, &device); });
    return r;
}

// These are preferences: it does not matter if the driver refuses them for the copy.
CUresult hook_cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) {
    HookCall hook;
    CUresult r = FORWARD(cuFuncSetCacheConfig)(f, config);
    const Function *function = hook && r == CUDA_SUCCESS ? registry().functions.find(f) : nullptr;
    if (!function) return r;
    function->kernel->cache_config = config;
    for (Copy *c = function->kernel->copies.load(std::memory_order_acquire); c; c = c->next)
        if (!c->context->dead)
            for (CUfunction copy : c->functions()) ORIGINAL(cuFuncSetCacheConfig)(copy, config);
    settings_changed(function->kernel);
    return r;
}

CUresult hook_cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device) {
    HookCall hook;
    CUresult r = FORWARD(cuKernelSetCacheConfig)(kernel, config, device);
    const Function *function = hook && r == CUDA_SUCCESS ? registry().functions.find(kernel) : nullptr;
    if (!function) return r;
    function->kernel->cache_config = config;
    for (Copy *c = function->kernel->copies.load(std::memory_order_acquire); c; c = c->next)
        if (!c->context->dead && c->context->device == device && hooks[kHook_cuFuncSetCacheConfig].original)
            for (CUfunction copy : c->functions()) ORIGINAL(cuFuncSetCacheConfig)(copy, config);
    settings_changed(function->kernel);
    return r;
}

CUresult hook_cuFuncSetSharedMemConfig(CUfunction f, CUsharedconfig config) {
    HookCall hook;
    CUresult r = FORWARD(cuFuncSetSharedMemConfig)(f, config);
    const Function *function = hook && r == CUDA_SUCCESS ? registry().functions.find(f) : nullptr;
    if (!function) return r;
    function->kernel->shared_config = config;
    for (Copy *c = function->kernel->copies.load(std::memory_order_acquire); c; c = c->next)
        if (!c->context->dead)
            for (CUfunction copy : c->functions()) ORIGINAL(cuFuncSetSharedMemConfig)(copy, config);
    settings_changed(function->kernel);
    return r;
}

}  // namespace

void module_hooks() {
#define GPUBPF_HOOK(symbol) hooks[kHook_##symbol].replacement = reinterpret_cast<void *>(&hook_##symbol);
#include "hooks_module.def"
#undef GPUBPF_HOOK
}

}  // namespace gpubpf
