#include "copies/patches.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <tuple>
#include <utility>

#include "attachment.h"
#include "copies/launch.h"
#include "copies/patched.h"
#include "copies/sanitizer_api.h"
#include "copies/sidecar.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "library.h"
#include "log/log.h"
#include "log/other_profilers.h"
#include "signals.h"

namespace gpubpf {

using namespace sanitizer;

namespace {

Functions api;

// Only one thread at a time may call the API (sanitizer_patching.h, "Thread-safety"). This lock is taken after Patches::lock.
std::mutex serial;
Subscriber subscriber = nullptr;  // guarded by `serial`, like the next one
std::string refusal = "GPUBPF_SANITIZER names no library";
bool follows_launches = false;  // on_launch is called for them

bool find(void *library) {
    FunctionsOf functions(library);
    const bool all = functions.get(api.Subscribe, "sanitizerSubscribe")
                         .get(api.Unsubscribe, "sanitizerUnsubscribe")
                         .get(api.EnableDomain, "sanitizerEnableDomain")
                         .get(api.EnableCallback, "sanitizerEnableCallback")
                         .get(api.SetLaunchCallbackData, "sanitizerSetLaunchCallbackData")
                         .get(api.AddPatches, "sanitizerAddPatches")
                         .get(api.PatchInstructions, "sanitizerPatchInstructions")
                         .get(api.PatchModule, "sanitizerPatchModule")
                         .get(api.UnpatchModule, "sanitizerUnpatchModule")
                         .get(api.GetFunctionPcAndSize, "sanitizerGetFunctionPcAndSize")
                         .all();
    functions.get(api.GetCallbackPcAndSize, "sanitizerGetCallbackPcAndSize");  // not in 12.4
    return all;
}

// Gives the patches in a launch of the calling thread their data. A launch without a number gets 0, since it might get another's.
void on_launch(void *, uint32_t domain, uint32_t callback, const void *data) {
    const LaunchData *launch = nullptr;
    if (domain == kLaunchDomain && callback == kLaunchBegin) {
        launch = static_cast<const LaunchData *>(data);
    } else if (domain == kGraphsDomain && callback == kNodeLaunchBegin) {
        const auto *node = static_cast<const GraphNodeLaunchData *>(data);
        if (node->nodeType == CU_GRAPH_NODE_TYPE_KERNEL) launch = &node->launchData;
    }
    if (!launch || !launch->hLaunch) return;
    const Thread *thread = own_record();
    // Without `serial`, which this function need not be called with: a thread that has it may wait for a lock of the driver.
    api.SetLaunchCallbackData(launch->hLaunch, launch->function, launch->hStream,
                              reinterpret_cast<const void *>(thread ? thread->patch_data : 0));
}

// Returns whether on_launch is called for launches from now on.
bool follow_launches() {
    std::lock_guard<std::mutex> alone(serial);
    if (follows_launches || !subscriber) return follows_launches;
    SignalsBlocked blocked;
    follows_launches = api.EnableCallback(1, subscriber, kLaunchDomain, kLaunchBegin) == kSuccess &&
                       api.EnableCallback(1, subscriber, kGraphsDomain, kNodeLaunchBegin) == kSuccess;
    return follows_launches;
}

std::string in_words(int result) {
    switch (result) {
        case kMaxLimitReached: return "another tool in the process has subscribed to it";
        case kNotInitialized: return "it cannot be used with this driver";
        default: return "error " + std::to_string(result);
    }
}

constexpr uint64_t kTableSlots = uint64_t(1) << kSlotBits, kSlotSize = 16;
constexpr uint64_t kTableSize = kPatchHeader + kTableSlots * kSlotSize;
constexpr uint64_t kRecordAlignment = 16;
constexpr size_t kUnusedGraphs =
    256;  // records of graphs are used again when there are so many: launches may still use newer ones
constexpr uint32_t kPatience = 2000;  // ms that a copy to the table may take

// Copies bytes to GPU memory and waits. The context is current.
bool write(const Context &context, CUdeviceptr to, const void *bytes, size_t size) {
    return context.stream && driver.cuMemcpyHtoDAsync_v2(to, bytes, size, context.stream) == CUDA_SUCCESS &&
           wait_for(context.stream, kPatience);
}

// Returns the address of memory for a record; 0 if no memory is left. Call this with `lock` held.
CUdeviceptr take(Patches &p, uint64_t size) {
    const CUdeviceptr at = p.records;
    size = (size + kRecordAlignment - 1) & ~(kRecordAlignment - 1);
    if (size > p.records_end - at) return 0;
    p.records += size;
    return at;
}

// Makes the slots of a function's granules refer to `record`. A slot's function is written before its granule, so that a kernel that
// runs never sees an incomplete one. Only slots that refer to `before` change, unless it is null. Call it with `lock` held.
bool write_slots(const Context &context, Patches &p, uint64_t pc, uint64_t size, CUdeviceptr record,
                 const CUdeviceptr *before = nullptr) {
    for (uint64_t granule = pc >> kGranuleBits; granule <= (pc + size - 1) >> kGranuleBits; ++granule) {
        uint64_t slot = granule * kHashFactor >> (64 - kSlotBits);
        uint32_t left = kPatchProbes;
        while (left && p.slots[slot].first && p.slots[slot].first != granule) {
            slot = (slot + 1) % kTableSlots;
            --left;
        }
        if (!left) return false;
        auto &own = p.slots[slot];
        if (before && (own.first != granule || own.second != *before)) continue;
        const CUdeviceptr at = p.table + kPatchHeader + slot * kSlotSize;
        own.second = record;
        if (!write(context, at + 8, &own.second, 8)) return false;
        if (own.first == granule) continue;
        own.first = granule;
        if (!write(context, at, &own.first, 8)) return false;
    }
    return true;
}

// Prepares a context for patches: its table, and the patches from the tool. numbered: they read the launch's number. Returns why it
// cannot, or "".
std::string prepare_patches(Module *module, Context &context, bool numbered) {
    static std::mutex preparing;  // other threads need the same patches
    std::lock_guard<std::mutex> in_turn(preparing);
    Patches &p = context.patches;
    {
        std::lock_guard<std::mutex> hold(p.lock);
        if (p.usable) return "";
        if (p.tried) return p.why;
        p.tried = true;
    }
    const auto failed = [&](const std::string &why) {
        std::lock_guard<std::mutex> hold(p.lock);
        return p.why = why;
    };
    {
        std::lock_guard<std::mutex> hold(serial);
        if (!subscriber) return failed(refusal);
    }
    if (numbered && !follow_launches()) return failed("the library reports no launches");
    {
        std::lock_guard<std::mutex> busy(context.busy);
        Current current(context);
        CUdeviceptr memory = 0;  // not in a pool, because readings of the maps copy the pools
        if (!current.ok() || !prepare_context(context) ||
            driver.cuMemAlloc_v2(&memory, kTableSize + kPatchRecords) != CUDA_SUCCESS)
            return failed("no memory for the table of patches");
        std::lock_guard<std::mutex> hold(p.lock);
        p.table = memory;
        if (driver.cuMemsetD8Async(memory, 0, kTableSize + kPatchRecords, context.stream) != CUDA_SUCCESS ||
            !wait_for(context.stream, kPatience))
            return p.why = "the table of patches cannot be written";
        p.records = p.table + kTableSize;
        p.records_end = p.records + kPatchRecords;
        p.slots.assign(kTableSlots, {});
    }
    const auto question =
        agent.ask(message::PatchTable{0, context.cc, static_cast<uint32_t>(context.device), p.table}, module,
                  &context, -1, true);
    if (!wait_for_answer(*question) || !question->answer) return failed("the tool did not send the patches");
    const Answer &answer = *question->answer;
    if (answer.patches.empty() || answer.image.empty())
        return failed(answer.refusals.empty() ? "the tool has no patches for this GPU"
                                              : answer.refusals[0].second);
    Current current(context);
    if (!current.ok()) return failed("the CUDA context cannot be used");
    SignalsBlocked blocked;
    std::lock_guard<std::mutex> hold(p.lock);
    std::lock_guard<std::mutex> alone(serial);
    if (const int result = api.AddPatches(answer.image.data(), context.handle); result != kSuccess)
        return p.why = "the library rejects the patches, " + in_words(result);
    p.functions = answer.patches;
    for (const auto &[instruction, name] : p.functions)
        if (uint64_t pc, size; api.GetCallbackPcAndSize &&
                               api.GetCallbackPcAndSize(context.handle, name.c_str(), &pc, &size) == kSuccess)
            p.code.push_back({pc, size});
    p.usable = true;
    return p.why = "";
}

// Patches a module, once. Call it with `lock` held and the context current. Returns the library's error.
int patch(Patches &p, CUmodule module) {
    if (std::find(p.modules.begin(), p.modules.end(), module) != p.modules.end()) return kSuccess;
    SignalsBlocked blocked;
    std::lock_guard<std::mutex> alone(serial);
    for (const auto &[instruction, name] : p.functions)
        if (const int result = api.PatchInstructions(instruction, module, name.c_str());
            result != kSuccess && !(kPatchOptional >> instruction & 1))
            return result;
    if (const int result = api.PatchModule(module); result != kSuccess) return result;
    p.modules.push_back(module);
    return kSuccess;
}

// Finds a kernel's code, and puts its record into the table. Returns why it cannot, or "". Call it with `lock` held and the context
// current.
std::string record_function(Context &context, Copy &copy, CUmodule module) {
    Patches &p = context.patches;
    {
        SignalsBlocked blocked;
        std::lock_guard<std::mutex> alone(serial);
        const int result =
            api.GetFunctionPcAndSize(module, copy.layout->name.c_str(), &copy.pc, &copy.code_size);
        if (result != kSuccess) return "its code is not found, " + in_words(result);
    }
    if (copy.code_size / kInstructionSize > kSitesLimit) return "it has too many instructions";
    if (!copy.code_size || copy.pc % (1 << kGranuleBits)) return "its code is at an unexpected address";
    copy.record = take(p, 16);
    const uint64_t record[2] = {copy.pc, 0};
    if (!copy.record || !write(context, copy.record, record, sizeof record) ||
        !write_slots(context, p, copy.pc, copy.code_size, copy.record))
        return "no room in the table of patches";
    return "";
}

}  // namespace

std::string start_sanitizer(const std::string &libraries) {
    std::lock_guard<std::mutex> alone(serial);
    if (const std::string other = other_profiler(); !other.empty())
        return refusal = "another profiler is in the process (" + other + "); end it";
    refusal = "libsanitizer-public.so cannot be loaded";
    DriverScope scope;
    SignalsBlocked blocked;
    const bool found = any_path(libraries, [](const std::string &path) {
        void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library && find(library)) return true;
        if (library) refusal = "libsanitizer-public.so is too old";
        return false;
    });
    if (!found) return refusal;
    Subscriber made = nullptr;
    int result = api.Subscribe(&made, on_launch, nullptr);
    if (result == kSuccess) {
        result = api.EnableDomain(1, made, kResourceDomain);
        if (result != kSuccess) api.Unsubscribe(made);
    }
    if (result != kSuccess) return refusal = in_words(result);
    subscriber = made;
    return "";
}

bool has_patches() {
    std::lock_guard<std::mutex> alone(serial);
    return subscriber;
}

void stop_sanitizer() {
    if (!has_patches()) return;
    std::vector<Context *> contexts;
    for (Context *c : registry().all_contexts())
        if (!c->dead && c->patches.usable) contexts.push_back(c);
    const auto unpatch = [](Context &context) {
        Current current(context);
        std::lock_guard<std::mutex> hold(context.patches.lock);
        std::lock_guard<std::mutex> alone(serial);
        SignalsBlocked blocked;
        auto &modules = context.patches.modules;
        while (!modules.empty() && current.ok() && api.UnpatchModule(modules.back()) == kSuccess)
            modules.pop_back();
    };
    if (!contexts.empty())
        when_idle(contexts, kPatience, [&](LaunchesHeld &) {
            for (Context *c : contexts) unpatch(*c);
            agent.live = false;  // no launch is between the decision about it and the driver
        });
    const bool all = std::all_of(contexts.begin(), contexts.end(),
                                 [](const Context *c) { return c->patches.modules.empty(); });
    std::lock_guard<std::mutex> alone(serial);
    SignalsBlocked blocked;
    DriverScope scope;
    if (!all) return;
    api.Unsubscribe(std::exchange(subscriber, nullptr));
    follows_launches = false;
}

void install_patches(Module *module, Context *context, const std::shared_ptr<const Answer> &answer) {
    Registry &r = registry();
    std::vector<Kernel *> kernels;
    {
        std::lock_guard<std::mutex> hold(r.lock);
        for (const Layout &l : answer->kernels) kernels.push_back(r.kernel(module, l.name));
    }
    std::string why = is_agents_thread() ? "it was loaded too late for patches"
                                         : prepare_patches(module, *context, answer->kernels[0].numbered);
    Current current(*context);
    if (why.empty() && !current.ok()) why = "the CUDA context cannot be used";
    for (size_t i = 0; i < kernels.size(); ++i) {
        Kernel &k = *kernels[i];
        if (copy_in(k, context) || k.refused) continue;
        auto copy = std::make_unique<Copy>();
        copy->context = context;
        copy->answer = answer;
        copy->layout = &answer->kernels[i];
        copy->kernel = &k;
        std::string lacking = why;
        if (lacking.empty()) {
            copy->function = copy->original = original_function(*module, k.name.c_str());
            CUmodule in = module->module;
            // A function's code may be loaded at its first launch.
            if (!copy->function || (driver.cuFuncLoad && driver.cuFuncLoad(copy->function) != CUDA_SUCCESS) ||
                (!in &&
                 (!driver.cuFuncGetModule || driver.cuFuncGetModule(&in, copy->function) != CUDA_SUCCESS)))
                lacking = "the driver does not find it";
            if (lacking.empty()) {
                std::lock_guard<std::mutex> hold(context->patches.lock);
                copy->patched_in = in;
                const int result = patch(context->patches, in);
                lacking = result == kSuccess ? record_function(*context, *copy, in)
                                             : "the library rejects its module, " + in_words(result);
            }
        }
        if (!lacking.empty()) {
            k.refused = true;
            tell_tool(message::Refused{k.slot_index, "Compute Sanitizer: " + lacking});
            continue;
        }
        Copy *made = copy.release();
        {
            std::lock_guard<std::mutex> hold(context->memory);
            context->copies.push_back(made);
        }
        made->next = k.copies.load(std::memory_order_relaxed);
        while (!k.copies.compare_exchange_weak(made->next, made)) {
        }
    }
}

bool publish(const Choice &choice) {
    Instance &instance = *choice.instance;
    if (instance.published.load(std::memory_order_acquire)) return true;
    Copy &copy = *choice.copy;
    Context &context = *copy.context;
    Patches &p = context.patches;
    std::lock_guard<std::mutex> hold(p.lock);
    if (instance.published.load(std::memory_order_relaxed)) return true;
    const Layout &layout = *copy.layout;
    std::vector<uint8_t> record(kPatchBlock + layout.block.size());
    memcpy(record.data(), &copy.shape, 8);
    memcpy(record.data() + 8, instance.block, sizeof instance.block);
    memcpy(record.data() + 20, instance.grid, sizeof instance.grid);
    memcpy(record.data() + kPatchBlock, choice.block, layout.block.size());
    if (layout.kernel != kNoField) {
        const uint64_t number = copy.kernel->slot_index;
        memcpy(record.data() + kPatchBlock + layout.kernel, &number, sizeof number);
    }
    // In place of the launch's number: what a patch needs to find it.
    const uint64_t process = next_launch_id() >> kNumberBits << kNumberBits;
    memcpy(record.data() + kPatchBlock + kBlockLaunch, &p.shapes, sizeof p.shapes);
    memcpy(record.data() + kPatchBlock + kBlockReplay, &process, sizeof process);
    const CUdeviceptr at = copy.shapes < kPatchShapes ? take(p, record.size()) : 0;
    Current current(context);
    if (!at || !current.ok() || !write(context, at, record.data(), record.size()) ||
        !write(context, copy.record + 8, &at, sizeof at))
        return false;
    copy.shape = at;
    ++copy.shapes;
    instance.shape = p.shapes++;
    instance.published.store(true, std::memory_order_release);
    return true;
}

bool write_graph(Context &context, GraphRecord &record, CUdeviceptr cell,
                 const std::vector<AlikeNodes> &nodes) {
    Patches &p = context.patches;
    std::lock_guard<std::mutex> hold(p.lock);
    uint32_t shapes = 0;
    for (const AlikeNodes &n : nodes) shapes = std::max(shapes, n.instance->shape + 1);
    std::vector<uint32_t> words(kPatchPlaces / 4 + shapes);
    const uint64_t head[3] = {kPatchGraphMark, cell, shapes};
    memcpy(words.data(), head, sizeof head);
    std::vector<size_t> counted;  // the groups that need a counter
    for (const AlikeNodes &n : nodes) {
        words[kPatchPlaces / 4 + n.instance->shape] = 4 * words.size();
        if (n.numbers.size() > 1) counted.push_back(words.size());
        words.insert(words.end(), {static_cast<uint32_t>(n.numbers.size()),
                                   static_cast<uint32_t>(n.instance->threads()), 0});
        words.insert(words.end(), n.numbers.begin(), n.numbers.end());
    }
    record.counters_at = 4 * words.size();
    record.counters = counted.size();
    for (size_t at : counted) {
        words[at + kPatchNodes / 4 - 1] = 4 * words.size();
        words.push_back(0);
    }
    if (record.at && record.words == words) return true;
    if (record.at) p.graphs.emplace_back(record.at, record.size);
    const uint64_t size = 4 * words.size();
    record.size = size + size / 2;  // so that other graphs can use it later
    record.at = p.graphs.size() < kUnusedGraphs ? take(p, record.size) : 0;
    const auto unused =
        std::find_if(p.graphs.begin(), p.graphs.end(), [&](const auto &r) { return r.second >= size; });
    if (!record.at && unused != p.graphs.end()) {
        std::tie(record.at, record.size) = *unused;
        p.graphs.erase(unused);
    }
    if (!record.at) record.at = take(p, record.size);
    record.words = std::move(words);
    record.data = record.at ? uint64_t(kPatchGraph) << kNumberBits | (record.at - p.table) : 0;
    Current current(context);
    return record.at && current.ok() && write(context, record.at, record.words.data(), size);
}

void forget_graph(Context &context, GraphRecord &record) {
    std::lock_guard<std::mutex> hold(context.patches.lock);
    if (record.at) context.patches.graphs.emplace_back(record.at, record.size);
    record = {};
}

void forget_patches(Module *module) {
    std::vector<Copy *> copies;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        for (const auto &[name, kernel] : module->kernels)
            for (Copy *c = kernel->copies.load(std::memory_order_acquire); c; c = c->next)
                if (c->layout->patched && c->record) copies.push_back(c);
    }
    for (Copy *c : copies) {
        Context &context = *c->context;
        if (context.dead) continue;
        Current current(context);
        std::lock_guard<std::mutex> hold(context.patches.lock);
        if (!current.ok()) continue;
        write_slots(context, context.patches, c->pc, c->code_size, 0, &c->record);
        auto &modules = context.patches.modules;
        modules.erase(std::remove(modules.begin(), modules.end(), c->patched_in), modules.end());
    }
}

}  // namespace gpubpf
