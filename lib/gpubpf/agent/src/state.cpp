#include "state.h"

#include <chrono>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include "attachment.h"

namespace gpubpf {

AttachmentState<Registry> the_registry;
std::atomic<uint64_t> handles_changed{1}, contexts_changed{1};

struct AttachmentObject::List {
    std::mutex lock;
    AttachmentObject *first = nullptr;
    static ProcessState<List> all;

    static void free_all() {
        while (all->first) delete all->first;
    }
};
ProcessState<AttachmentObject::List> AttachmentObject::List::all;

AttachmentObject::AttachmentObject() {
    std::lock_guard<std::mutex> hold(List::all->lock);
    after_ = List::all->first;
    if (after_) after_->before_ = this;
    List::all->first = this;
}

AttachmentObject::~AttachmentObject() {
    std::lock_guard<std::mutex> hold(List::all->lock);
    if (after_) after_->before_ = before_;
    (before_ ? before_->after_ : List::all->first) = after_;
}

const Lifetime registry_lifetime{
    [] {
        the_registry.begin();
        ++handles_changed;
        ++contexts_changed;
    },
    nullptr,
    [] {
        AttachmentObject::List::free_all();
        the_registry.end();
    },
    [] { AttachmentObject::List::all.in_forked_child(); },
};

Context::~Context() {
    for (const auto &r : registered) munmap(r.first, r.second);  // for a context that no longer exists
}

Copy::~Copy() {
    for (Occupancy *o = occupancy.load(); o;) delete std::exchange(o, o->next);
}

Module::~Module() {
    if (image.file >= 0) close(image.file);
}

FunctionTable::FunctionTable() : table_(new Table(1024)) {}

void FunctionTable::put(Table *t, uintptr_t key, const Function *value) {
    size_t i = hash(key) & t->mask;
    for (uintptr_t k; (k = t->cells[i].key.load(std::memory_order_relaxed)) && k != key;)
        i = (i + 1) & t->mask;
    t->cells[i].value.store(value, std::memory_order_release);
    if (!t->cells[i].key.load(std::memory_order_relaxed)) {
        t->cells[i].key.store(key, std::memory_order_release);
        ++t->filled;
    }
}

void FunctionTable::set(const void *handle, const Function *value) {
    if (!handle) return;
    Table *t = table_.load(std::memory_order_relaxed);
    if (!value && !find(handle)) return;
    if (value && t->filled * 2 > t->mask) {
        auto *larger = new Table((t->mask + 1) * 2);
        for (size_t i = 0; i <= t->mask; ++i)
            if (const Function *f = t->cells[i].value.load(std::memory_order_relaxed))
                put(larger, t->cells[i].key.load(std::memory_order_relaxed), f);
        table_.store(larger, std::memory_order_release);
        t = larger;
    }
    put(t, reinterpret_cast<uintptr_t>(handle), value);
}

namespace {

// Returns null if the context is not a green context. It is asked through a stream in it. Without one, it must be current:
// the default stream is then one, and a green context may be made current to one thread only.
CUcontext primary_of_green(CUcontext handle, CUstream stream) {
    CUcontext current = nullptr, primary = nullptr;
    CUgreenCtx green = nullptr;
    if (!driver.cuStreamGetCtx_v2) return nullptr;
    if (!stream && (driver.cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != handle)) return nullptr;
    if (!stream) stream = CU_STREAM_LEGACY;
    const bool asked = driver.cuStreamGetCtx_v2(stream, &primary, &green) == CUDA_SUCCESS;
    return asked && green ? primary : nullptr;
}

}  // namespace

// How long launches wait for the copies in a context that a launch has met.
constexpr std::chrono::milliseconds kForMet{500};

Context *Registry::context(CUcontext handle, bool made, CUstream stream) {
    struct Remembered {
        uint64_t when;
        CUcontext handle;
        Context *context;
    } none{};
    if (!handle) return nullptr;
    Remembered &last = thread_cache(CacheSlot::Context, none);
    const uint64_t now = contexts_changed.load(std::memory_order_acquire);
    if (last.handle == handle && last.when == now) return last.context;
    {
        std::lock_guard<std::mutex> hold(lock);
        auto it = contexts.find(handle);
        bool found = it != contexts.end();
        if (!found) it = green.find(handle), found = it != green.end();
        if (found) {
            last = {now, handle, it->second};
            return it->second;
        }
    }
    DriverScope scope;
    if (CUcontext primary = made ? nullptr : primary_of_green(handle, stream)) {
        Context *c = context(primary);
        if (!c) return nullptr;
        std::lock_guard<std::mutex> hold(lock);
        return green[handle] = c;
    }
    auto *c = new Context;
    c->handle = handle;
    CUcontext before = nullptr, popped;
    driver.cuCtxGetCurrent(&before);
    bool push = before != handle;
    if (push && driver.cuCtxPushCurrent_v2(handle) != CUDA_SUCCESS) {
        delete c;
        return nullptr;
    }
    int major = 0, minor = 0, count = 1;
    driver.cuCtxGetDevice(&c->device);
    driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, c->device);
    driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, c->device);
    driver.cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, c->device);
    if (push) driver.cuCtxPopCurrent_v2(&popped);
    c->cc = static_cast<uint32_t>(major * 10 + minor);
    c->multiprocessors = static_cast<uint32_t>(count);
    {
        std::lock_guard<std::mutex> hold(lock);
        auto put = contexts.emplace(handle, c);
        if (!put.second) {  // another thread was faster
            delete c;
            return put.first->second;
        }
        c->serial = serials++;
        c->before = !made;
        if (!made) {
            c->met_until = (std::chrono::steady_clock::now() + kForMet).time_since_epoch().count();
            for (const auto &l : libraries)
                for (const auto &k : l.second->kernels) k.second->awaited = true;
        }
        only.store(serials == 1 && !agent.late ? c : nullptr, std::memory_order_release);
    }
    if (!made) context_discovered(c);
    return c;
}

Context *Registry::current() {
    CUcontext handle = nullptr;
    if (driver.cuCtxGetCurrent(&handle) != CUDA_SUCCESS) return nullptr;
    return context(handle);
}

Context *Registry::context_of(CUstream stream) {
    CUcontext handle = nullptr;
    const bool known = driver.cuStreamGetCtx && driver.cuStreamGetCtx(stream, &handle) == CUDA_SUCCESS;
    return known ? context(handle, false, stream) : nullptr;
}

std::vector<Context *> Registry::all_contexts() {
    std::lock_guard<std::mutex> hold(lock);
    std::vector<Context *> all;
    for (const auto &c : contexts) all.push_back(c.second);
    return all;
}

Kernel *Registry::kernel(Module *module, const std::string &name) {
    Kernel *&known_kernel = module->kernels[name];
    if (known_kernel) return known_kernel;
    auto k = std::make_unique<Kernel>();
    k->name = name;
    k->module = module;
    auto known = slots.find(name);
    if (known != slots.end()) {
        k->slot_index = known->second;
    } else {
        uint32_t index = agent.control->used.load(std::memory_order_relaxed);
        if (index + 1 < kSlots) {
            agent.control->used.store(index + 1, std::memory_order_release);
            slots.emplace(name, index);
            tell_tool(message::KernelName{index, name});
        } else {
            index = kSlots - 1;
        }
        k->slot_index = index;
    }
    k->slot = &agent.control->slots[k->slot_index];
    k->later = module->later.count(name) != 0;
    k->awaited = module->preexisting;
    return known_kernel = k.release();
}

void Registry::record(Module *module, Context *context, const void *handle, const char *name) {
    if (!handle || !name) return;
    std::lock_guard<std::mutex> hold(lock);
    if (module->gone) return;
    Kernel *k = kernel(module, name);
    const Function *known = functions.find(handle);
    if (known && known->kernel == k && known->context == context) return;
    // First, because every handle in the table must be forgotten eventually.
    module->handles.push_back(const_cast<void *>(handle));
    functions.set(handle, &(new HandleFunction(k, context))->is);
    ++handles_changed;
}

void Registry::forget(Module *module) {
    module->gone = true;
    ++handles_changed;
    for (void *handle : module->handles) functions.set(handle, nullptr);
    module->handles.clear();
    if (module->module) modules.erase(module->module);
    if (module->library) libraries.erase(module->library);
    for (CUmodule m : module->modules)
        if (const auto it = modules.find(m); it != modules.end() && it->second == module) modules.erase(it);
}

}  // namespace gpubpf
