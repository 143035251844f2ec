#include "copies/sidecar.h"

#include <algorithm>
#include <chrono>
#include <unistd.h>

#include "attachment.h"
#include "copies/deferred.h"
#include "copies/launch.h"
#include "copies/original.h"
#include "copies/patched.h"
#include "copies/shared.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "hook_table.h"
#include "log/allocation.h"
#include "log/clock.h"
#include "log/log.h"

namespace gpubpf {

// --- loading ---

constexpr size_t kCells = 1024;  // cells to allocate at once

void prepare_cells(Context &context) {
    CUdeviceptr base = 0;
    if (driver.cuMemAlloc_v2(&base, kCells * sizeof(uint64_t)) != CUDA_SUCCESS) return;
    std::lock_guard<std::mutex> hold(context.memory);
    context.cell_memory.push_back(base);
    for (size_t i = 0; i < kCells; ++i) context.cells.push_back(base + i * sizeof(uint64_t));
}

namespace {

constexpr uint64_t kExecutionCounters = 256;  // of copies in bodies of conditional graph nodes
constexpr uint64_t kPoolSlack = 64 << 10;     // bytes, for the fixed parts and alignment of array instances

// Prepares a context for the operation log: the agent's stream and the GPU's clock. Call it with `busy` held
// and the context current.
bool prepare_log(Context &context) {
    if (context.followed) return context.stream;
    context.followed = true;
    agent.watch_exit();
    if (driver.cuStreamCreate(&context.stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        context.stream = nullptr;
    tell_tool(message::Context{context.serial, static_cast<uint32_t>(context.device)});
    if (context.stream) calibrate(context);
    return context.stream;
}

}  // namespace

bool prepare_context(Context &context) {
    if (context.prepared) return context.usable;
    context.prepared = true;
    if (!prepare_log(context)) return false;
    const std::vector<MapSpec> &maps = agent.config.maps;
    const uint64_t controls = ring_control_bytes(context);
    uint64_t shared = controls;
    for (const MapSpec &m : maps)
        if (is_shared(m) && m.place == Place::Gpu) shared += map_aligned(m.fixed);
    const bool all_shared =
        std::all_of(maps.begin(), maps.end(), [](const MapSpec &m) { return is_shared(m); });
    // The user's limit is for values only. Everything else is added to it.
    uint64_t size = shared + (all_shared ? 0 : agent.config.map_memory + kPoolSlack) +
                    (agent.config.graphs ? kExecutionCounters * kMapAlignment : 0);
    while (size && !add_pool(context, size)) {  // if the GPU is nearly full, a small pool is better than none
        if (size / 2 < std::max<uint64_t>(shared, 1 << 16)) return false;
        size /= 2;
    }
    uint64_t at = controls;  // control blocks are at the start of the pool
    context.storage.assign(maps.size(), 0);
    for (size_t i = 0; i < maps.size(); ++i) {
        if (!is_shared(maps[i]) || maps[i].place != Place::Gpu || !maps[i].fixed) continue;
        context.storage[i] = context.pools[0]->base + at;
        at += map_aligned(maps[i].fixed);
        if (!maps[i].initial.empty() &&
            driver.cuMemcpyHtoDAsync_v2(context.storage[i], maps[i].initial.data(), maps[i].initial.size(),
                                        context.stream) != CUDA_SUCCESS)
            return false;
    }
    if (!context.pools.empty()) context.pools[0]->used = at;
    if (!prepare_shared(context, context.pools.empty() ? 0 : context.pools[0]->base)) return false;
    if (!wait_for(context.stream, 10000)) return false;
    if (agent.config.graphs) prepare_cells(context);
    context.usable = true;
    return true;
}

namespace {

void refuse(Kernel &kernel, const std::string &reason) {
    kernel.refused = true;
    tell_tool(message::Refused{kernel.slot_index, reason});
}

// Finds a variable of the application's module in the current context.
bool variable_address(const Module &module, const char *name, CUdeviceptr &address, size_t &size) {
    if (module.module)
        return driver.cuModuleGetGlobal_v2(&address, &size, module.module, name) == CUDA_SUCCESS;
    using GetModule = CUresult (*)(CUmodule *, CUlibrary);
    auto get_module = reinterpret_cast<GetModule>(hooks[kHook_cuLibraryGetModule].original);
    CUmodule in_context = nullptr;
    if (get_module && get_module(&in_context, module.library) == CUDA_SUCCESS &&
        driver.cuModuleGetGlobal_v2(&address, &size, in_context, name) == CUDA_SUCCESS)
        return true;
    if (driver.cuLibraryGetGlobal &&
        driver.cuLibraryGetGlobal(&address, &size, module.library, name) == CUDA_SUCCESS)
        return true;
    return driver.cuLibraryGetManaged &&
           driver.cuLibraryGetManaged(&address, &size, module.library, name) == CUDA_SUCCESS;
}

// Returns the address of the number of grids that kernels launch, or 0 if there is no memory for it. Call it with `busy` held and the
// context current.
CUdeviceptr grids_of(Context &context) {
    if (!context.grids && add_pool(context, kMapAlignment, kMapAlignment)) {
        std::lock_guard<std::mutex> hold(context.memory);
        context.grids = context.pools.back()->base;
    }
    return context.grids;
}

// Whether the program is still in the call that makes the context, so that nothing can run in it.
bool is_new(const Context &context, Fresh fresh) { return fresh == Fresh::Context && context.given == 1; }

// Writes the table of variables. Sets `missing` to the kernels that need a variable which was not found, with
// the reason.
bool fill_variables(Module &module, CUmodule sidecar, const Answer &answer, Context &context, Fresh fresh,
                    std::map<std::string, std::string> &missing) {
    if (answer.variables.empty()) return true;
    CUdeviceptr table = 0;
    size_t table_size = 0;
    if (driver.cuModuleGetGlobal_v2(&table, &table_size, sidecar, kVariablesTable) != CUDA_SUCCESS)
        return false;
    std::vector<uint64_t> slots(table_size / 8);
    std::vector<std::pair<CUdeviceptr, CUdeviceptr>> entries;  // from the program's table to the copy's
    const auto add_missing = [&](const VariableSlot &v, const std::string &why) {
        if (v.kernels.empty())
            for (const Layout &l : answer.kernels) missing.emplace(l.name, why);
        for (const std::string &k : v.kernels) missing.emplace(k, why);
    };
    for (const VariableSlot &v : answer.variables) {
        CUdeviceptr address = 0;
        size_t size = 0;
        const bool grids = v.name == kGridsVariable;
        bool found =
            grids ? (address = grids_of(context)) : variable_address(module, v.name.c_str(), address, size);
        const std::pair<uint64_t, const Context *> here(address, &context);
        const auto is_logged = [&] {  // for another sidecar of the module
            std::lock_guard<std::mutex> hold(registry().lock);
            return std::find(module.variables.begin(), module.variables.end(), here) !=
                   module.variables.end();
        };
        if (found && !grids && !is_logged() && variable_found(context.serial, v.name, address, size)) {
            std::lock_guard<std::mutex> hold(registry().lock);
            module.variables.push_back(here);  // the thread that unloads the module waits for this one
        }
        found = found || (v.copied && driver.cuModuleGetGlobal_v2(&address, &size, sidecar, v.name.c_str()) ==
                                          CUDA_SUCCESS);
        if (v.index >= slots.size()) return false;
        slots[v.index] = address;
        std::string why = found ? "" : "variable " + v.name;
        if (found && v.entry != kNoField) {
            if (v.entry + uint64_t(8) > size) return false;
            entries.emplace_back(address + v.entry, table + v.index * uint64_t(8));
        }
        if (!why.empty()) add_missing(v, why);
    }
    if (driver.cuMemcpyHtoDAsync_v2(table, slots.data(), slots.size() * 8, context.stream) != CUDA_SUCCESS)
        return false;
    for (const auto &[from, to] : entries)
        if (!driver.cuMemcpyDtoDAsync_v2 ||
            driver.cuMemcpyDtoDAsync_v2(to, from, 8, context.stream) != CUDA_SUCCESS)
            return false;
    if (!wait_for(context.stream, 10000)) return false;
    // Check this only now, because another thread could have changed the entries before they were copied.
    if (fresh != Fresh::Module && !is_new(context, fresh))
        for (const VariableSlot &v : answer.variables)
            if (!v.refusal.empty()) add_missing(v, v.refusal);
    return true;
}

}  // namespace

// The original is used to compare the copy's occupancy with its own.
CUfunction original_function(const Module &module, const char *name) {
    CUfunction f = nullptr;
    if (module.module) {
        using Get = CUresult (*)(CUfunction *, CUmodule, const char *);
        auto get = reinterpret_cast<Get>(hooks[kHook_cuModuleGetFunction].original);
        return get && get(&f, module.module, name) == CUDA_SUCCESS ? f : nullptr;
    }
    using GetKernel = CUresult (*)(CUkernel *, CUlibrary, const char *);
    using GetFunction = CUresult (*)(CUfunction *, CUkernel);
    auto get_kernel = reinterpret_cast<GetKernel>(hooks[kHook_cuLibraryGetKernel].original);
    auto get_function = reinterpret_cast<GetFunction>(hooks[kHook_cuKernelGetFunction].original);
    CUkernel k = nullptr;
    if (!get_kernel || !get_function || get_kernel(&k, module.library, name) != CUDA_SUCCESS) return nullptr;
    return get_function(&f, k) == CUDA_SUCCESS ? f : nullptr;
}

namespace {

bool mirror_known_attributes(const std::map<int, int> &attributes, int cache, int shared, CUfunction copy) {
    using SetAttribute = CUresult (*)(CUfunction, CUfunction_attribute, int);
    using SetConfig = CUresult (*)(CUfunction, int);
    auto set = reinterpret_cast<SetAttribute>(hooks[kHook_cuFuncSetAttribute].original);
    for (const auto &a : attributes)
        if (!set || set(copy, static_cast<CUfunction_attribute>(a.first), a.second) != CUDA_SUCCESS)
            return false;
    auto set_cache = reinterpret_cast<SetConfig>(hooks[kHook_cuFuncSetCacheConfig].original);
    auto set_shared = reinterpret_cast<SetConfig>(hooks[kHook_cuFuncSetSharedMemConfig].original);
    if (cache >= 0 && set_cache) set_cache(copy, cache);
    if (shared >= 0 && set_shared) set_shared(copy, shared);
    return true;
}

// Gives the copies that kernels launch the attributes of the originals, now and from now on. Returns false if they do not fit.
bool prepare_launched(Module &module, CUmodule sidecar, const Answer &answer, Context &context) {
    using GetFunction = CUresult (*)(CUfunction *, CUmodule, const char *);
    auto get_function = reinterpret_cast<GetFunction>(hooks[kHook_cuModuleGetFunction].original);
    for (const auto &[name, copy_name] : answer.launched) {
        CUfunction copy = nullptr;
        if (get_function(&copy, sidecar, copy_name.c_str()) != CUDA_SUCCESS) return false;
        {
            std::lock_guard<std::mutex> hold(registry().lock);
            auto &launched = registry().kernel(&module, name)->launched;
            const std::pair<CUfunction, Context *> made{copy, &context};
            if (std::find(launched.begin(), launched.end(), made) == launched.end()) launched.push_back(made);
        }
        if (driver.cuFuncLoad && driver.cuFuncLoad(copy) == CUDA_ERROR_NOT_SUPPORTED) return false;
        // Again, because the program may have set an attribute meanwhile.
        for (int times = 0; times < 2; ++times)
            if (!mirror_attributes(original_function(module, name.c_str()), copy)) return false;
    }
    return true;
}

// Whether a sidecar's copies can also serve another answer. Equal code may come from other source lines.
bool equal_copies(const Sidecar &s, const Answer &answer) {
    if (s.answer->image != answer.image || s.copies.size() != answer.kernels.size()) return false;
    for (size_t i = 0; i < s.copies.size(); ++i)
        if (s.copies[i] && s.copies[i]->layout->build != answer.kernels[i].build) return false;
    return true;
}

}  // namespace

using LoadModule = CUresult (*)(CUmodule *, const void *);
using GetFunction = CUresult (*)(CUfunction *, CUmodule, const char *);

void install_sidecar(Module *module, Context *context, const std::shared_ptr<const Answer> &answer,
                     bool may_load, Fresh fresh) {
    Registry &r = registry();
    std::vector<Kernel *> kernels;
    struct Installing {  // the module is not unloaded while this exists
        Module *module = nullptr;
        ~Installing() {
            if (module) --module->installing;
        }
    } installing;
    {
        std::lock_guard<std::mutex> hold(r.lock);
        if (module->gone) return;
        ++module->installing;
        installing.module = module;
        for (const auto &refusal : answer->refusals) r.kernel(module, refusal.first)->refused = true;
        for (const Layout &l : answer->kernels) kernels.push_back(r.kernel(module, l.name));
    }
    if (!kernels.empty() && answer->kernels[0].patched) return install_patches(module, context, answer);
    const bool has_copies = !kernels.empty() && !answer->image.empty();
    if (!has_copies && answer->later.empty()) return;
    std::lock_guard<std::mutex> busy(context->busy);
    if (context->dead || !agent.live) return;
    if (!has_copies) {  // allocates memory before the program does, as for modules whose copies are loaded now
        Current current(*context);
        if (may_load && current.ok()) prepare_context(*context);
        return;
    }
    if (std::all_of(kernels.begin(), kernels.end(),
                    [&](const Kernel *k) { return copy_in(*k, context) || k->refused; }))
        return;
    // The sidecar of an unloaded, equal module, if there is one: some programs load and unload in a loop.
    Sidecar *idle = nullptr;
    {
        std::lock_guard<std::mutex> hold(r.lock);
        for (Sidecar &s : context->sidecars) {
            if (s.module == module && s.answer == answer) return;
            if (s.module->gone && s.handle && equal_copies(s, *answer)) idle = &s;
        }
        if (!idle && !may_load) return;
        if (idle) idle->module = module;
    }
    Current current(*context);
    auto load = reinterpret_cast<LoadModule>(hooks[kHook_cuModuleLoadData].original);
    auto get_function = reinterpret_cast<GetFunction>(hooks[kHook_cuModuleGetFunction].original);
    CUmodule sidecar = idle ? idle->handle : nullptr;
    const char *failed = nullptr;
    CUresult result = CUDA_SUCCESS;
    std::map<std::string, std::string> missing;
    if (!load || !get_function) failed = "the driver lacks a function";
    else if (!current.ok()) failed = "the CUDA context cannot be used";
    else if (!prepare_context(*context)) failed = "no memory for maps";
    else if (!idle && (result = load(&sidecar, answer->image.data())) != CUDA_SUCCESS)
        failed = "the driver rejects the copy";
    else if (!fill_variables(*module, sidecar, *answer, *context, fresh, missing))
        failed = "the copy cannot use the variables";
    else if (!prepare_launched(*module, sidecar, *answer, *context))
        failed = "the copy cannot launch kernels";
    if (!idle) {
        context->sidecars.push_back({module, sidecar, answer, std::vector<Copy *>(kernels.size())});
        idle = &context->sidecars.back();
    }
    for (size_t i = 0; i < kernels.size(); ++i) {
        Kernel &k = *kernels[i];
        const Layout &layout = answer->kernels[i];
        Copy *made = idle->copies[i];
        if (copy_in(k, context)) continue;  // from an earlier answer
        auto copy = std::make_unique<Copy>();
        if (failed) {
            refuse(k, result == CUDA_SUCCESS ? failed
                                             : std::string(failed) + ", error " + std::to_string(result));
            continue;
        }
        auto lacking = missing.find(layout.name);
        if (lacking != missing.end()) {
            refuse(k, lacking->second);
            continue;
        }
        if (get_function(&copy->function, sidecar, layout.name.c_str()) != CUDA_SUCCESS) {
            refuse(k, "the driver does not find the copy");
            continue;
        }
        // Load it now, not in its first launch. The embedded device reports here that it can run neither this
        // kernel nor its original.
        if (driver.cuFuncLoad && driver.cuFuncLoad(copy->function) == CUDA_ERROR_NOT_SUPPORTED) {
            refuse(k, "the device cannot run it");
            continue;
        }
        CUfunction original = original_function(*module, layout.name.c_str());
        std::map<int, int> attributes;
        int cache, shared;
        {
            std::lock_guard<std::mutex> hold(r.lock);
            attributes = k.attributes;
            cache = k.cache_config;
            shared = k.shared_config;
        }
        if (const char *why = module->preexisting ? mismatch(original, layout) : nullptr) {
            refuse(k, why);
            continue;
        }
        if (!mirror_known_attributes(attributes, cache, shared, copy->function) ||
            (module->preexisting && !mirror_attributes(original, copy->function))) {
            refuse(k, "a function attribute does not fit the copy");
            continue;
        }
        // Without its limited copy, fewer launches of a kernel can be measured.
        if (!layout.limited.empty() &&
            (get_function(&copy->limited, sidecar, layout.limited.c_str()) != CUDA_SUCCESS ||
             (driver.cuFuncLoad && driver.cuFuncLoad(copy->limited) != CUDA_SUCCESS) ||
             !mirror_known_attributes(attributes, cache, shared, copy->limited) ||
             (module->preexisting && !mirror_attributes(original, copy->limited))))
            copy->limited = nullptr;
        const CUfunction limited = copy->limited;
        if (!made) {
            copy->context = context;
            copy->answer = answer;
            copy->layout = &layout;
            copy->kernel = &k;
            made = idle->copies[i] = copy.release();
            std::lock_guard<std::mutex> hold(context->memory);
            context->copies.push_back(made);
        }
        made->kernel = &k;
        made->original = original;
        made->limited = limited;
        if (driver.cudasim_is_copy_of && original) {
            driver.cudasim_is_copy_of(made->function, original);
            driver.cudasim_is_copy_of(limited, original);
        }
        made->next = k.copies.load(std::memory_order_relaxed);
        while (!k.copies.compare_exchange_weak(made->next, made)) {
        }
        // Attributes that the application has set meanwhile were set only for the copies that were known.
        bool changed;
        {
            std::lock_guard<std::mutex> hold(r.lock);
            changed = attributes != k.attributes || cache != k.cache_config || shared != k.shared_config;
            attributes = k.attributes;
            cache = k.cache_config;
            shared = k.shared_config;
        }
        if (changed)
            for (CUfunction function : made->functions())
                if (!mirror_known_attributes(attributes, cache, shared, function)) made->withdrawn = true;
    }
}

namespace {

// Loads copies whose module is not known yet. install_sidecar() assigns them to it later.
void load_ahead(Module *ahead, Context *context) {
    const std::shared_ptr<const Answer> answer = ahead->answer;
    if (context->cc != ahead->answer_cc || answer->image.empty()) return;
    std::lock_guard<std::mutex> busy(context->busy);
    if (context->dead || !agent.live) return;
    for (const Sidecar &s : context->sidecars)
        if (s.answer->image == answer->image) return;  // its module is already known
    Current current(*context);
    auto load = reinterpret_cast<LoadModule>(hooks[kHook_cuModuleLoadData].original);
    auto get_function = reinterpret_cast<GetFunction>(hooks[kHook_cuModuleGetFunction].original);
    CUmodule sidecar = nullptr;
    if (!current.ok() || !load || !get_function || !prepare_context(*context) ||
        load(&sidecar, answer->image.data()) != CUDA_SUCCESS)
        return;
    for (const Layout &l : answer->kernels)
        for (const std::string &name : {l.name, l.limited}) {
            CUfunction f = nullptr;
            if (!name.empty() && driver.cuFuncLoad && get_function(&f, sidecar, name.c_str()) == CUDA_SUCCESS)
                driver.cuFuncLoad(f);
        }
    context->sidecars.push_back({ahead, sidecar, answer, std::vector<Copy *>(answer->kernels.size())});
    std::lock_guard<std::mutex> hold(registry().lock);
    ahead->loaded.insert(context);
}

bool is_loaded_ahead(const Module &ahead, const Context *context) {
    std::lock_guard<std::mutex> hold(registry().lock);
    return ahead.loaded.count(context) != 0;
}

}  // namespace

// The tool may be stopped, and sends messages while it works. A late answer is used when it arrives. The wait is divided into pieces,
// because this process may also be stopped.
bool wait_for_answer(Question &question) {
    constexpr auto kPiece = std::chrono::milliseconds(500);
    constexpr int kSilence = 20;  // number of pieces
    std::unique_lock<std::mutex> hold(question.lock);
    auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(agent.config.image_wait_ms);
    int silence =
        agent.heard == agent.silent ? kSilence : 0;  // nothing was received since the last wait was given up
    while (!question.done && silence < kSilence && std::chrono::steady_clock::now() < until) {
        uint32_t heard = agent.heard;
        question.changed.wait_until(hold, std::min(until, std::chrono::steady_clock::now() + kPiece));
        silence = heard == agent.heard ? silence + 1 : 0;
    }
    if (silence >= kSilence) agent.silent = agent.heard.load();
    question.abandoned = !question.done;
    return question.done;
}

namespace {

// Returns the tool's answer about a module for a context's GPU. Null: there is no answer, or not yet.
std::shared_ptr<const Answer> answer_for(Module *module, Context *context, bool waits) {
    std::shared_ptr<Question> question;
    int image = -1;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        const bool asked = module->asked || module->answer;
        if (module->gone || (!asked && module->image.file < 0)) return nullptr;
        // made for another kind of GPU: these launches stay "before ready"
        if (asked && module->answer_cc != context->cc) return nullptr;
        if (module->answer) return module->answer;
        if (!asked) {
            module->asked = std::make_shared<Question>();
            module->answer_cc = context->cc;
            std::swap(image, module->image.file);
        }
        question = module->asked;
    }
    if (image >= 0) {
        const ImageFile &of = module->image;
        agent.ask(message::Image{0, context->cc, static_cast<uint32_t>(context->device), of.size, of.linked,
                                 of.ptx, of.lto},
                  module, context, image, waits, question);
        close(image);
    }
    // Another thread may have asked, for another context.
    if (!waits || (module->preexisting && agent.late) || !wait_for_answer(*question)) return nullptr;
    std::lock_guard<std::mutex> hold(registry().lock);
    return module->gone ? nullptr : module->answer;
}

}  // namespace

namespace {

// Whether a load by the program has just waited for all running work, so that another one returns soon. With lazy
// loading (CUDA_MODULE_LOADING, the default since CUDA 12.2), only the first use of a kernel waits.
bool loads_wait() {
    CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
    return !driver.cuModuleGetLoadingMode || driver.cuModuleGetLoadingMode(&mode) != CUDA_SUCCESS ||
           mode == CU_MODULE_EAGER_LOADING;
}

// Whether copies can be installed in a load by the program, without checking what runs in the context.
bool may_load_now(const Module &module, Context &context, const Answer &answer) {
    if ((answer.image.empty() && answer.later.empty()) || loads_wait() || !launches_begun.load()) return true;
    std::lock_guard<std::mutex> busy(context.busy);
    return std::any_of(context.sidecars.begin(), context.sidecars.end(), [&](const Sidecar &s) {
        return (s.module == &module || s.module->gone) && s.answer->image == answer.image;
    });
}

using ToInstall = std::vector<std::pair<Module *, std::shared_ptr<const Answer>>>;

// Installs copies while nothing runs in the context. Some kernels end only after the program continues: if one is
// running, the worker thread installs the copies later, and for a while other threads hardly wait.
void install_when_idle(Context *context, const ToInstall &work, Fresh fresh) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds kPatience{500}, kLessPatience{5}, kPause{10000};
    constexpr uint32_t kForOthers = 10000;  // ms
    size_t done = 0;
    const auto later = [&] {
        for (; done < work.size(); ++done) install_later(work[done].first, context);
    };
    if (!lock_within(registry().loading, kForOthers)) return later();  // others are loading their copies
    std::lock_guard<std::mutex> mine(registry().loading, std::adopt_lock);
    const bool was_busy = Clock::now().time_since_epoch().count() <= context->busy_until.load();
    const auto patience = was_busy ? kLessPatience : kPatience;
    auto until = Clock::now() + patience;
    const auto ms_left = [&] {
        return std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    };
    while (ms_left() > 0 && agent.live) {
        const bool idle = when_idle(*context, static_cast<uint32_t>(ms_left()), [&](LaunchesHeld &held) {
            do {
                install_sidecar(work[done].first, context, work[done].second, true, fresh);
            } while (++done < work.size() && held.more());
        });
        if (done == work.size()) return;
        if (idle) until = Clock::now() + patience;
        else usleep(500);  // the worker thread may hold launches
    }
    if (!was_busy) context->busy_until = (Clock::now() + kPause).time_since_epoch().count();
    later();
}

}  // namespace

bool has_copy_of(const Answer &answer, const Kernel &kernel) {
    return std::any_of(answer.kernels.begin(), answer.kernels.end(),
                       [&](const Layout &l) { return l.name == kernel.name; });
}

namespace {

// Returns a module's answers about kernels that were launched later (Answer::later), unless they have their copies in the context.
ToInstall further_answers(Module *module, const Context *context) {
    std::lock_guard<std::mutex> hold(registry().lock);
    ToInstall needed;
    for (const auto &answer : module->further)
        if (std::any_of(answer->kernels.begin(), answer->kernels.end(), [&](const Layout &l) {
                const Kernel *k = registry().kernel(module, l.name);
                return !copy_in(*k, context) && !k->refused;
            }))
            needed.emplace_back(module, answer);
    return needed;
}

}  // namespace

void load_sidecar(Module *module, Context *context, bool waits, Fresh fresh) {
    SlowPath slow_path;
    const bool nothing_runs = is_new(*context, fresh);
    if (module->ahead) {
        if (!waits || nothing_runs) load_ahead(module, context);
        else if (!is_loaded_ahead(*module, context)) install_later(module, context);
        return;
    }
    if (module->preexisting) fresh = Fresh::No;
    std::shared_ptr<const Answer> answer = answer_for(module, context, waits);
    if (!answer) return;
    std::vector<Kernel *> first;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        if (registry().captures.load() && !nothing_runs) {  // a capture began meanwhile
            registry().waiting.push_back(module);
            return;
        }
        if (!module->gone)
            for (const std::string &name : answer->first) first.push_back(registry().kernel(module, name));
    }
    if (waits && !nothing_runs && !may_load_now(*module, *context, *answer))
        install_when_idle(context, {{module, answer}}, fresh);
    else install_sidecar(module, context, answer, true, fresh);
    const ToInstall further = further_answers(module, context);
    if (waits && !further.empty() && !nothing_runs) install_when_idle(context, further, Fresh::No);
    else
        for (const auto &[of, answer] : further) install_sidecar(of, context, answer);
    if (!first.empty() && fresh != Fresh::No) load_copies(first, context);
}

void load_copies(const std::vector<Kernel *> &kernels, Context *context) {
    SlowPath slow_path;
    struct Loading {
        std::vector<Kernel *> kernels;
        ~Loading() {
            for (Kernel *k : kernels) --k->loading;
        }
    } mine;
    std::vector<Kernel *> of_others, unknown;  // another thread gets their copies; the tool was not asked yet
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        if (registry().captures.load()) return;
        mine.kernels.reserve(kernels.size());
        for (Kernel *k : kernels) {
            const Module &m = *k->module;
            if (m.gone || m.answer_cc != context->cc) continue;
            if (std::find(k->asked_in.begin(), k->asked_in.end(), context) != k->asked_in.end()) {
                of_others.push_back(k);
                continue;
            }
            k->asked_in.push_back(context);
            mine.kernels.push_back(k);
            ++k->loading;
            if (std::none_of(m.further.begin(), m.further.end(),
                             [&](const auto &answer) { return has_copy_of(*answer, *k); }))
                unknown.push_back(k);
        }
    }
    std::vector<std::shared_ptr<Question>> questions;
    for (const Kernel *k : unknown) {
        const bool waits = !k->module->preexisting || !agent.late;
        const auto question =
            agent.ask(message::WantedKernel{0, context->cc, static_cast<uint32_t>(context->device),
                                            k->module->later_request, k->name},
                      k->module, context, -1, waits);
        if (waits) questions.push_back(question);
    }
    for (const auto &q : questions)
        if (wait_for_answer(*q) && q->answer && q->answer->kernels.empty())
            install_sidecar(q->module, context, q->answer);  // refused, or the answer has come before
    ToInstall work;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        for (const Kernel *k : mine.kernels)
            for (const auto &answer : k->module->further) {
                const std::pair<Module *, std::shared_ptr<const Answer>> one(k->module, answer);
                if (!k->module->gone && !copy_in(*k, context) && has_copy_of(*answer, *k) &&
                    std::find(work.begin(), work.end(), one) == work.end())
                    work.push_back(one);
            }
    }
    if (!work.empty()) install_when_idle(context, work, Fresh::No);
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::milliseconds(agent.config.image_wait_ms);
    for (const Kernel *k : of_others)
        while (agent.live && k->loading && Clock::now() < until) usleep(200);
}

void image_loaded(Module *module, const ImageFile &image) {
    if (image.file < 0) return;
    module->image = image;
    Registry &r = registry();
    if (module->library) r.current();  // creates the context's record, if needed
    std::vector<Context *> contexts;
    {
        std::lock_guard<std::mutex> hold(r.lock);
        if (module->context) contexts.push_back(module->context);
        if (module->library)
            for (auto &c : r.contexts) contexts.push_back(c.second);
        if (r.captures.load()) {
            r.waiting.push_back(module);
            contexts.clear();
        }
    }
    // If there are no contexts, context_ready() loads a library's sidecar later.
    for (Context *c : contexts) load_sidecar(module, c, true, Fresh::Module);
}

void context_ready(Context *context, bool waits, Fresh fresh) {
    SlowPath slow_path;
    Registry &r = registry();
    // The log needs the GPU's clock even if nothing is instrumented.
    const bool captures = r.captures.load() && !is_new(*context, fresh);
    if (oplog.on() && !captures && lock_within(context->busy, 1000)) {
        std::lock_guard<std::mutex> busy(context->busy, std::adopt_lock);
        Current current(*context);
        if (current.ok() && !context->dead) prepare_log(*context);
    }
    std::vector<Module *> libraries;
    {
        std::lock_guard<std::mutex> hold(r.lock);
        for (auto &l : r.libraries) {
            if (captures) r.waiting.push_back(l.second);
            else libraries.push_back(l.second);
        }
        if (!captures) libraries.insert(libraries.end(), r.ahead.begin(), r.ahead.end());
    }
    for (Module *m : libraries) load_sidecar(m, context, waits, fresh);
}

constexpr uint32_t kAtOnce = 50;  // ms that the end of a capture waits for a suitable moment

void retry_waiting() {
    Registry &r = registry();
    std::vector<std::pair<Module *, Context *>> work;
    {
        std::lock_guard<std::mutex> hold(r.lock);
        for (Module *m : r.waiting) {
            if (m->context) work.emplace_back(m, m->context);
            else
                for (auto &c : r.contexts) work.emplace_back(m, c.second);
        }
        r.waiting.clear();
    }
    // The end of a capture does not wait for running work, so neither must this.
    for (auto &w : work) {
        SlowPath slow_path;
        ToInstall answers;
        if (const auto answer = answer_for(w.first, w.second, true)) {
            answers = further_answers(w.first, w.second);
            answers.emplace(answers.begin(), w.first, answer);
        }
        if (!answers.empty() && !when_idle(*w.second, kAtOnce, [&](LaunchesHeld &) {
                for (const auto &[module, answer] : answers) install_sidecar(module, w.second, answer);
            }))
            install_later(w.first, w.second);
    }
}

}  // namespace gpubpf
