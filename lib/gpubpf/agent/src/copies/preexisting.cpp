#include "copies/preexisting.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <unistd.h>

#include "attachment.h"
#include "copies/launch.h"
#include "copies/original.h"
#include "copies/sidecar.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "hook_table.h"
#include "log/allocation.h"
#include "log/log.h"

namespace gpubpf {

namespace {

constexpr size_t kMostNames = 65536;  // per module
using Clock = std::chrono::steady_clock;

struct Unreported {  // a module that was not reported to the tool yet
    Module *module = nullptr;
    Context *context = nullptr;  // where it was first seen
    bool whole = false;
    std::vector<std::string> names;
    std::vector<message::FoundKernel> kernels;
    size_t told = 0;  // number of `kernels` that were reported to the tool
};

struct State {
    std::mutex lock;  // guards the next members; never held across a driver call
    std::deque<Unreported> unreported;
    std::map<const Module *, Unreported> reported;
};

AttachmentState<State> state;

// --- one handle ---

struct Identity {
    std::string name;
    CUmodule module = nullptr;  // exactly one of the two is set
    CUlibrary library = nullptr;
    CUfunction function = nullptr;  // in the current context; null: the driver does not report it
};

template <class Call>
Call original(HookIndex index) {
    return reinterpret_cast<Call>(hooks[index].original);
}

using GetFunction = CUresult (*)(CUfunction *, CUmodule, const char *);
using GetKernel = CUresult (*)(CUkernel *, CUlibrary, const char *);
using KernelGetFunction = CUresult (*)(CUfunction *, CUkernel);

// A launch accepts both a CUfunction and a CUkernel, and so may any call that takes a CUfunction. So look up
// the function by name in the module that the driver reports. That returns the handle itself only for a
// CUfunction.
bool is_function(void *handle, Identity &who) {
    auto f = static_cast<CUfunction>(handle);
    auto get = original<GetFunction>(kHook_cuModuleGetFunction);
    const char *name = nullptr;
    CUmodule module = nullptr;
    CUfunction same = nullptr;
    if (!driver.cuFuncGetName || !driver.cuFuncGetModule || !get ||
        driver.cuFuncGetName(&name, f) != CUDA_SUCCESS || !name ||
        driver.cuFuncGetModule(&module, f) != CUDA_SUCCESS || get(&same, module, name) != CUDA_SUCCESS ||
        same != f)
        return false;
    who.name = name;
    who.module = module;
    who.function = f;
    return true;
}

bool is_kernel(void *handle, Identity &who) {
    auto k = static_cast<CUkernel>(handle);
    auto get = original<GetKernel>(kHook_cuLibraryGetKernel);
    auto get_function = original<KernelGetFunction>(kHook_cuKernelGetFunction);
    const char *name = nullptr;
    CUlibrary library = nullptr;
    CUkernel same = nullptr;
    if (!driver.cuKernelGetName || driver.cuKernelGetName(&name, k) != CUDA_SUCCESS || !name) return false;
    who.name = name;
    if (!get_function || get_function(&who.function, k) != CUDA_SUCCESS) who.function = nullptr;
    // Before CUDA 12.5, a library is identified by its module in this context.
    if (!driver.cuKernelGetLibrary)
        return who.function && driver.cuFuncGetModule &&
               driver.cuFuncGetModule(&who.module, who.function) == CUDA_SUCCESS;
    if (!get || driver.cuKernelGetLibrary(&library, k) != CUDA_SUCCESS ||
        get(&same, library, name) != CUDA_SUCCESS || same != k)
        return false;
    who.library = library;
    return true;
}

message::FoundKernel describe(const Identity &who) {
    message::FoundKernel d;
    d.name = who.name;
    if (std::vector<Parameter> parameters; who.function && parameters_of(who.function, parameters))
        d.parameters = std::move(parameters);
    const auto tell = [&](int32_t &value, CUfunction_attribute attribute) {
        if (!who.function || !driver.cuFuncGetAttribute ||
            driver.cuFuncGetAttribute(&value, attribute, who.function) != CUDA_SUCCESS)
            value = -1;
    };
    tell(d.registers, CU_FUNC_ATTRIBUTE_NUM_REGS);
    tell(d.shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
    tell(d.max_threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    tell(d.ptx_version, CU_FUNC_ATTRIBUTE_PTX_VERSION);
    return d;
}

// Gets the names of a module's kernels. Returns whether the list is complete.
template <class Handle, class Owner>
bool names_of(Owner owner, CUresult (*count)(unsigned *, Owner), CUresult (*list)(Handle *, unsigned, Owner),
              CUresult (*name_of)(const char **, Handle), std::vector<std::string> &names) {
    unsigned n = 0;
    if (!count || !list || !name_of || count(&n, owner) != CUDA_SUCCESS || !n || n > kMostNames) return false;
    std::vector<Handle> handles(n);
    if (list(handles.data(), n, owner) != CUDA_SUCCESS) return false;
    for (Handle h : handles) {
        const char *name = nullptr;
        if (!h || name_of(&name, h) != CUDA_SUCCESS || !name) return false;
        names.emplace_back(name);
    }
    return true;
}

Unreported unreported(const Identity &who, Module *module, Context *context) {
    Unreported u;
    u.module = module;
    u.context = context;
    u.whole =
        who.library
            ? names_of(
                  who.library, driver.cuLibraryGetKernelCount,
                  original<CUresult (*)(CUkernel *, unsigned, CUlibrary)>(kHook_cuLibraryEnumerateKernels),
                  driver.cuKernelGetName, u.names)
            : names_of(
                  who.module, driver.cuModuleGetFunctionCount,
                  original<CUresult (*)(CUfunction *, unsigned, CUmodule)>(kHook_cuModuleEnumerateFunctions),
                  driver.cuFuncGetName, u.names);
    if (!u.whole) u.names = {who.name};
    return u;
}

// Returns the library that `who.module` is in the current context, if it has a kernel of that name.
Module *library_with(const Identity &who) {
    using GetModule = CUresult (*)(CUmodule *, CUlibrary);
    auto get = original<GetModule>(kHook_cuLibraryGetModule);
    std::vector<Module *> candidates;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        for (auto &l : registry().libraries)
            if (l.second->kernels.count(who.name)) candidates.push_back(l.second);
    }
    CUmodule in_context = nullptr;
    for (Module *m : candidates)
        if (get && get(&in_context, m->library) == CUDA_SUCCESS && in_context == who.module) return m;
    return nullptr;
}

// Call it with the registry's lock held.
Module *known_module(const Identity &who) {
    Registry &r = registry();
    if (who.library) {
        auto it = r.libraries.find(who.library);
        return it == r.libraries.end() ? nullptr : it->second;
    }
    auto it = r.modules.find(who.module);
    return it == r.modules.end() ? nullptr : it->second;
}

// Reports a module to the tool again if its answer was ambiguous and more kernels were launched since.
void tell_more(const Module *module) {
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        const Answer *answer = module->answer.get();
        if (!answer || std::none_of(answer->refusals.begin(), answer->refusals.end(),
                                    [](const auto &refusal) { return refusal.second == kAmbiguous; }))
            return;
    }
    std::lock_guard<std::mutex> hold(state->lock);
    const auto known = state->reported.find(module);
    if (known == state->reported.end() || known->second.kernels.size() <= known->second.told) return;
    state->unreported.push_back(std::move(known->second));
    state->reported.erase(known);
}

const Function *ask_driver(void *handle, Context *context) {
    Current current(*context);
    if (!current.ok()) return nullptr;
    Identity who;
    const bool is_of_context = is_function(handle, who);
    if (!is_of_context && !is_kernel(handle, who)) return nullptr;
    Registry &r = registry();
    message::FoundKernel kernel = describe(who);
    Module *module = nullptr;
    {
        std::lock_guard<std::mutex> hold(r.lock);
        module = known_module(who);
    }
    if (!module && who.module) module = library_with(who);
    if (!module) {
        auto *made = new Module;
        made->preexisting = true;
        made->module = who.module;
        made->library = who.library;
        made->context = who.module ? context : nullptr;
        Unreported u = unreported(who, made, context);
        std::lock_guard<std::mutex> hold(r.lock);
        module = known_module(who);  // another thread may have been faster
        if (!module) {
            module = made;
            if (who.library) r.libraries[who.library] = made;
            else r.modules[who.module] = made;
            std::lock_guard<std::mutex> held(state->lock);
            state->unreported.push_back(std::move(u));
        } else {
            delete made;
        }
    }
    {
        std::lock_guard<std::mutex> hold(state->lock);
        const auto known = state->reported.find(module);
        if (known != state->reported.end()) known->second.kernels.push_back(std::move(kernel));
        else
            for (Unreported &u : state->unreported)
                if (u.module == module) u.kernels.push_back(std::move(kernel));
    }
    tell_more(module);
    r.record(module, is_of_context ? context : nullptr, handle, who.name.c_str());
    agent.wake_to_report();
    return r.functions.find(handle);
}

// --- waiting for copies ---

constexpr std::chrono::milliseconds kForCopies{2000};  // how long launches wait for the copies of a module
constexpr useconds_t kStep = 200;                      // µs

// Whether the worker thread should soon have loaded copies into a context that a launch has met.
bool is_met(const Context &c, Clock::time_point now) {
    return now.time_since_epoch().count() < c.met_until.load();
}

// Whether the tool has sent copies of a kernel before it knows the module. `c`: in this context; null: anywhere.
// Call it with the registry's lock held.
bool is_ahead(const Kernel &k, const Context *c) {
    const auto &all = registry().ahead;
    return k.module->preexisting && std::any_of(all.begin(), all.end(), [&](const Module *a) {
               return (!c || a->loaded.count(c)) && has_copy_of(*a->answer, k);
           });
}

// Whether a kernel that has no copy in a context may soon have one. Call it with the registry's lock held.
bool comes_soon(const Kernel &k, const Context &c, Clock::time_point now) {
    const Module &m = *k.module;
    if (m.gone || (m.context && m.context != &c) || k.refused || !is_usable(&c) || copy_in(k, &c))
        return false;
    if (m.asked && m.answer_cc != c.cc) return false;
    if (m.answer && !has_copy_of(*m.answer, k)) return false;
    const auto until = m.awaited_until.find(&c);
    if (until != m.awaited_until.end() && now.time_since_epoch().count() >= until->second) return false;
    // The program loaded the module in a way that no hook sees. The worker thread loads the copies.
    if (m.preexisting && !agent.late) return true;
    return is_ahead(k, &c) || (is_met(c, now) && (m.answer || is_ahead(k, nullptr)));
}

}  // namespace

void await_copies(Kernel &kernel, Context *context) {
    SlowPath slow_path;
    Module *const module = kernel.module;
    Registry &r = registry();
    report_preexisting();  // the worker thread may be busy
    bool taken = false;    // the copies that were loaded ahead, if they are the module's
    while (agent.live) {
        std::shared_ptr<const Answer> answer;
        {
            std::lock_guard<std::mutex> hold(r.lock);
            const Clock::time_point now = Clock::now();
            int64_t &until =
                module->awaited_until.emplace(context, (now + kForCopies).time_since_epoch().count())
                    .first->second;
            if (taken && agent.late && !is_met(*context, now)) until = 0;  // the worker thread loads others
            if (!comes_soon(kernel, *context, now)) {
                kernel.awaited = std::any_of(r.contexts.begin(), r.contexts.end(), [&](const auto &c) {
                    return comes_soon(kernel, *c.second, now);
                });
                return;
            }
            answer = module->answer;
            // The worker thread loads nothing while a stream is being captured.
            if (r.captures.load() && (taken || !is_ahead(kernel, context))) return;
        }
        if (answer && !std::exchange(taken, true)) install_sidecar(module, context, answer, false);
        else usleep(kStep);
    }
}

const Lifetime preexisting_lifetime = lifetime_of_attachment_state<state>();

const Function *identify_handle(const void *handle, Context *context) {
    struct Remembered {
        const void *handle;
        uint64_t when;
    } none{};
    if (!handle || !context || !(driver.cuFuncGetName || driver.cuKernelGetName)) return nullptr;
    const uint64_t now = handles_changed.load(std::memory_order_acquire);
    Remembered &unknown = thread_cache(CacheSlot::Unknown, none);
    if (unknown.handle == handle && unknown.when == now) return nullptr;
    const Function *f = nullptr;
    SlowPath slow_path;
    quietly([&] { f = ask_driver(const_cast<void *>(handle), context); });
    if (!f) unknown = {handle, now};
    return f;
}

const Function *identify_launched(const void *handle, StreamRef where) {
    return identify_handle(handle, working_context(where));
}

std::vector<Module *> modules_of_library(CUlibrary library) {
    std::vector<Module *> candidates, found;
    std::vector<std::string> names;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        for (auto &m : registry().modules)
            if (m.second->preexisting && m.second->module && !m.second->gone && !m.second->handles.empty() &&
                !m.second->kernels.empty() && is_usable(m.second->context))
                candidates.push_back(m.second);
        for (Module *m : candidates) names.push_back(m->kernels.begin()->first);
    }
    auto get = original<GetKernel>(kHook_cuLibraryGetKernel);
    auto get_function = original<KernelGetFunction>(kHook_cuKernelGetFunction);
    for (size_t i = 0; i < candidates.size() && get && get_function && driver.cuFuncGetModule; ++i) {
        Current current(*candidates[i]->context);
        CUkernel k = nullptr;
        CUfunction f = nullptr;
        CUmodule m = nullptr;
        if (current.ok() && get(&k, library, names[i].c_str()) == CUDA_SUCCESS &&
            get_function(&f, k) == CUDA_SUCCESS && driver.cuFuncGetModule(&m, f) == CUDA_SUCCESS &&
            m == candidates[i]->module)
            found.push_back(candidates[i]);
    }
    return found;
}

std::vector<uint32_t> meet_primary_contexts() {
    using Retain = CUresult (*)(CUcontext *, CUdevice);
    auto retain = original<Retain>(kHook_cuDevicePrimaryCtxRetain);
    auto release = original<CUresult (*)(CUdevice)>(kHook_cuDevicePrimaryCtxRelease_v2);
    std::set<uint32_t> capabilities;
    DriverScope scope;
    unsigned flags = 0;
    int active = 0;
    for (CUdevice d = 0; retain && release && driver.cuDevicePrimaryCtxGetState &&
                         driver.cuDevicePrimaryCtxGetState(d, &flags, &active) == CUDA_SUCCESS;
         ++d) {
        CUcontext handle = nullptr;
        if (!active || retain(&handle, d) != CUDA_SUCCESS) continue;
        if (Context *c = registry().context(handle)) {
            capabilities.insert(c->cc);
            c->met_until = 0;  // the tool prints a notice when the copies are ready
        }
        release(d);
    }
    return {capabilities.begin(), capabilities.end()};
}

void report_preexisting() {
    for (;;) {
        Unreported u;
        {
            std::lock_guard<std::mutex> hold(state->lock);
            if (state->unreported.empty()) return;
            u = std::move(state->unreported.front());
            state->unreported.pop_front();
            u.told = u.kernels.size();
            state->reported[u.module] = u;
        }
        const auto question = std::make_shared<Question>();
        {
            std::lock_guard<std::mutex> hold(registry().lock);
            if (u.module->gone) continue;
            u.module->asked = question;
            u.module->answer_cc = u.context->cc;
        }
        agent.ask(message::Found{0, u.context->cc, static_cast<uint32_t>(u.context->device), u.whole,
                                 std::move(u.names), std::move(u.kernels)},
                  u.module, u.context, -1, false, question);
    }
}

void found_answered(const Module *module) {
    if (!module->preexisting) return;
    tell_more(module);
    agent.wake_to_report();
}

}  // namespace gpubpf
