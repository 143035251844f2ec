// Patches, patched modules, program counters.
#include <algorithm>
#include <cstring>

#include "driver/fatbin.h"
#include "driver/jit.h"
#include "sanitizer/entry_points.h"
#include "sanitizer/subscriber.h"

namespace cudasim::sanitizer {

using driver::log_line;

using driver::tables;

namespace {

// What sanitizerAddPatches loads into a context: functions, and variables that all patched modules of the context share.
struct PatchSet {
    std::string text;
    std::map<std::string, CodeRange> functions;
    std::shared_ptr<const Image> image;
    std::vector<uint64_t> variables;                   // addresses, by index in the image
    std::vector<std::pair<uint64_t, uint64_t>> owned;  // their allocations: address, id
    std::unique_ptr<CodeSpace> code;
    ~PatchSet() {
        for (auto [address, id] : owned) Memory::instance().release(address, id);
    }
};

struct PatchSets {
    std::mutex mutex;
    std::map<uint64_t, std::vector<std::shared_ptr<PatchSet>>> by_context;  // by Context::id
};

PatchSets &patch_sets() {
    static auto *const instance = new PatchSets();
    return *instance;
}

// Returns the set with a patch function that was added last.
std::shared_ptr<PatchSet> find_patch(const driver::Context &context, const std::string &name) {
    PatchSets &sets = patch_sets();
    std::lock_guard lock(sets.mutex);
    const auto found = sets.by_context.find(context.id);
    if (found == sets.by_context.end()) return nullptr;
    for (auto set = found->second.rbegin(); set != found->second.rend(); ++set)
        if ((*set)->functions.count(name) != 0) return *set;
    return nullptr;
}

// Returns the context of a handle; a null handle means the current context.
std::shared_ptr<driver::Context> find_context(CUcontext handle) {
    return handle == nullptr ? driver::current_context_or_null() : tables().contexts.get(handle);
}

// The free and used program counters of the process. In hostile mode, those that are given back are used again at once.
struct Counters {
    std::mutex mutex;
    uint64_t next = 0x7fa000000000;
    std::vector<std::pair<uint64_t, uint64_t>> free;  // first, size
};

Counters &counters() {
    static auto *const instance = new Counters();
    return *instance;
}
constexpr uint64_t kCodeAlignment = 1 << 12;

uint64_t rounded(uint64_t size) { return (size + kCodeAlignment) / kCodeAlignment * kCodeAlignment; }

// Allocates and initialises the variables of a set of patches.
bool load_variables(PatchSet &set, const driver::Context &context) {
    const std::vector<Variable> &variables = set.image->variables();
    for (const Variable &variable : variables) {
        const uint64_t address = Memory::instance().allocate(
            std::max<size_t>(variable.size, 1), MemoryKind::device, context.device, context.handle, 0,
            variable.space == cudasim::Space::constant);
        if (address == 0) return false;
        set.owned.push_back({address, Memory::instance().find(address)->id});
        set.variables.push_back(address);
    }
    for (uint32_t k = 0; k < variables.size(); k++)
        set.image->initialise(k, set.variables.data(), reinterpret_cast<void *>(set.variables[k]));
    return true;
}

// Takes the address of each variable of the patched image from the module, or else from the sets of patches. Variables of
// different functions may have the same name, so the first of a name is that of the first function.
void find_variables(Patched &patched, const driver::Module &module,
                    const std::vector<std::shared_ptr<PatchSet>> &sets) {
    std::multimap<std::string, uint64_t> known;
    const auto add = [&](const std::vector<Variable> &variables, const std::vector<uint64_t> &addresses) {
        for (size_t k = 0; k < variables.size(); k++) known.emplace(variables[k].name, addresses[k]);
    };
    add(module.image->variables(), module.variables);
    for (const std::shared_ptr<PatchSet> &set : sets) add(set->image->variables(), set->variables);
    for (const Variable &variable : patched.image->variables()) {
        const auto found = known.find(variable.name);
        patched.variables.push_back(found == known.end() ? 0 : found->second);
        if (found != known.end()) known.erase(found);
    }
}

// Makes what runs instead of a module's image. Returns null and sets `error` if it fails.
std::shared_ptr<const Patched> patch(const driver::Module &module, const driver::Context &context,
                                     const std::map<uint32_t, std::string> &names, TranslateError &error) {
    std::vector<std::shared_ptr<PatchSet>> sets;
    for (const auto &[instruction, name] : names)
        if (const std::shared_ptr<PatchSet> set = find_patch(context, name);
            set && std::find(sets.begin(), sets.end(), set) == sets.end())
            sets.push_back(set);
    std::vector<std::string> texts;
    for (const std::shared_ptr<PatchSet> &set : sets) texts.push_back(set->text);
    std::string text;
    if (!patch_ptx(*module.ptx, names, texts, text, error)) return nullptr;
    auto patched = std::make_shared<Patched>();
    patched->image = translate(text, error, config().virtual_clock);
    if (!patched->image) return nullptr;
    for (const Kernel &kernel : module.image->kernels()) {
        const int index = patched->image->find_kernel(kernel.name);
        if (index < 0) {
            error = {999, "the patched module lacks the kernel " + kernel.name};
            return nullptr;
        }
        patched->kernels.push_back(static_cast<uint32_t>(index));
    }
    find_variables(*patched, module, sets);
    for (const auto &[name, range] : patched_functions(text, true)) {
        uint64_t pc = 0;
        for (const std::shared_ptr<PatchSet> &set : sets)
            if (const auto found = set->functions.find(name); found != set->functions.end())
                pc = set->code->first() + found->second.offset;
        patched->functions.push_back({name, range, pc});
    }
    patched->keep_alive.assign(sets.begin(), sets.end());
    return patched;
}

}  // namespace

CodeSpace::CodeSpace(uint64_t size) : size_(rounded(size)) {
    Counters &all = counters();
    std::lock_guard lock(all.mutex);
    for (auto range = all.free.rbegin(); config().hostile && range != all.free.rend(); ++range) {
        if (range->second < size_) continue;
        first_ = range->first;
        range->first += size_;
        range->second -= size_;
        return;
    }
    first_ = all.next;
    all.next += size_;
}

CodeSpace::~CodeSpace() {
    Counters &all = counters();
    std::lock_guard lock(all.mutex);
    all.free.push_back({first_, size_});
}

bool lay_out(const driver::Module &module, ModuleState &state) {
    if (state.code) return true;
    std::string text;
    TranslateError error;
    if (!patch_ptx(*module.ptx, {}, {}, text, error)) {
        log_line("%s", error.log.c_str());
        return false;
    }
    state.functions = patched_functions(text);
    uint64_t size = 0;
    for (const auto &[name, range] : state.functions) size = std::max(size, range.offset + range.size);
    state.code = std::make_unique<CodeSpace>(size);
    return true;
}

void forget_patches(const driver::Context &context) {
    PatchSets &sets = patch_sets();
    std::lock_guard lock(sets.mutex);
    sets.by_context.erase(context.id);
}

void use_patches(const driver::KernelLaunch &launch, LaunchDescription &description,
                 std::shared_ptr<const Patched> &patched) {
    ModuleState &state = *launch.module->sanitizer;
    {
        std::lock_guard lock(state.mutex);
        patched = state.patched;
        if (!patched) return;
        description.first_pc = state.code->first();
    }
    const uint32_t kernel = patched->kernels[launch.function->index];
    TranslateError error;
    if (!patched->image->prepare(kernel, error)) {
        log_line("kernel %s runs without patches: %s", launch.function->kernel().name.c_str(),
                 error.log.c_str());
        return;
    }
    description.code_base = launch.function->image->code_base;
    description.image = patched->image.get();
    description.kernel = kernel;
    description.variables = patched->variables.data();
    description.nested_userdata = missing_data();
    description.userdata = launch.userdata                 ? *launch.userdata
                           : launch.function->has_userdata ? launch.function->userdata.load()
                                                           : missing_data();
}

void locate_fault(const Patched &patched, Fault &fault) {
    for (const PatchFunction &function : patched.functions) {
        if (!fault.patch_offset || *fault.patch_offset - function.range.offset >= function.range.size)
            continue;
        fault.patch = function.name;
        if (function.pc) fault.patch_pc = function.pc + (*fault.patch_offset - function.range.offset);
    }
}

}  // namespace cudasim::sanitizer

// ---------------------------------------------------------------------------------------------------- entry points

using namespace cudasim;
using namespace cudasim::sanitizer;

namespace cudasim::sanitizer::entry {

Result AddPatches(const void *image, CUcontext handle) {
    const std::shared_ptr<driver::Context> context = find_context(handle);
    if (image == nullptr) return kInvalidParameter;
    if (!context) return kInvalidContext;
    ChosenPtx chosen;
    if (driver::select_ptx(image, driver::JitOptions(), chosen) != CUDA_SUCCESS) return kInvalidParameter;
    auto set = std::make_shared<PatchSet>();
    set->text = std::move(chosen.text);
    TranslateError error;
    std::string laid_out;
    if (patch_ptx(set->text, {}, {}, laid_out, error))
        set->image = translate(set->text, error, config().virtual_clock);
    if (!set->image) {
        log_line("patches cannot be added: %s", error.log.c_str());
        return kInvalidParameter;
    }
    set->functions = patched_functions(laid_out);
    if (!load_variables(*set, *context)) return kOutOfMemory;
    uint64_t size = 0;
    for (const auto &[name, range] : set->functions) size = std::max(size, range.offset + range.size);
    set->code = std::make_unique<CodeSpace>(size);
    PatchSets &sets = patch_sets();
    std::lock_guard lock(sets.mutex);
    sets.by_context[context->id].push_back(std::move(set));
    return kSuccess;
}

Result AddPatchesFromFile(const char *file, CUcontext context) {
    std::string content;
    if (file == nullptr || driver::read_image_file(file, content) != CUDA_SUCCESS) return kInvalidParameter;
    return AddPatches(content.data(), context);
}

Result PatchInstructions(uint32_t instruction, CUmodule handle, const char *name) {
    const std::shared_ptr<driver::Module> module = tables().modules.get(handle);
    const std::shared_ptr<driver::Context> context = module ? module->context.lock() : nullptr;
    if (!context || name == nullptr || instruction == 0 || instruction > config().sanitizer_instructions ||
        !find_patch(*context, name))
        return kInvalidParameter;
    std::lock_guard lock(module->sanitizer->mutex);
    module->sanitizer->names[instruction] = name;
    return kSuccess;
}

Result PatchModule(CUmodule handle) {
    const std::shared_ptr<driver::Module> module = tables().modules.get(handle);
    const std::shared_ptr<driver::Context> context = module ? module->context.lock() : nullptr;
    if (!context) return kInvalidParameter;
    ModuleState &state = *module->sanitizer;
    {
        std::lock_guard lock(state.mutex);
        if (!lay_out(*module, state)) return kUnknown;
        TranslateError error;
        std::shared_ptr<const Patched> patched = patch(*module, *context, state.names, error);
        if (!patched) {
            log_line("a module cannot be patched: %s", error.log.c_str());
            return kInvalidParameter;
        }
        state.patched = std::move(patched);
        state.patched_now = true;
    }
    return kSuccess;
}

Result UnpatchModule(CUmodule handle) {
    const std::shared_ptr<driver::Module> module = tables().modules.get(handle);
    if (!module) return kInvalidParameter;
    std::lock_guard lock(module->sanitizer->mutex);
    module->sanitizer->patched_now = false;
    module->sanitizer->patched = nullptr;
    module->sanitizer->names.clear();
    return kSuccess;
}

Result SetCallbackData(CUfunction handle, const void *userdata) {
    const std::shared_ptr<driver::Function> function = tables().functions.get(handle);
    if (!function) return kInvalidParameter;
    function->userdata = reinterpret_cast<uint64_t>(userdata);
    function->has_userdata = true;
    return kSuccess;
}

Result SetLaunchCallbackData(LaunchHandle launch, CUfunction, StreamHandle, const void *userdata) {
    return set_launch_data(launch, reinterpret_cast<uint64_t>(userdata)) ? kSuccess : kInvalidParameter;
}

// The embedded device has no graphs that kernels launch.
Result SetDeviceGraphData(CUgraphExec exec, StreamHandle, const void *) {
    return tables().execs.get(exec) ? kSuccess : kInvalidParameter;
}

Result GetFunctionPcAndSize(CUmodule handle, const char *name, uint64_t *pc, uint64_t *size) {
    const std::shared_ptr<driver::Module> module = tables().modules.get(handle);
    if (!module || name == nullptr || pc == nullptr || size == nullptr) return kInvalidParameter;
    // With lazy loading, a kernel has no place before its first use.
    const int kernel = module->image->find_kernel(name);
    if (config().hostile && kernel >= 0 && !module->functions[static_cast<size_t>(kernel)]->loaded)
        return kInvalidParameter;
    std::lock_guard lock(module->sanitizer->mutex);
    if (!lay_out(*module, *module->sanitizer)) return kUnknown;
    const auto found = module->sanitizer->functions.find(name);
    if (found == module->sanitizer->functions.end()) return kInvalidParameter;
    *pc = module->sanitizer->code->first() + found->second.offset;
    *size = found->second.size;
    return kSuccess;
}

Result GetCallbackPcAndSize(CUcontext handle, const char *name, uint64_t *pc, uint64_t *size) {
    const std::shared_ptr<driver::Context> context = find_context(handle);
    if (!context || name == nullptr || pc == nullptr || size == nullptr) return kInvalidParameter;
    const std::shared_ptr<PatchSet> set = find_patch(*context, name);
    if (!set) return kInvalidParameter;
    *pc = set->code->first() + set->functions.at(name).offset;
    *size = set->functions.at(name).size;
    return kSuccess;
}

Result GetFunctionLoadedStatus(CUfunction handle, uint32_t *status) {
    constexpr uint32_t kNotLoaded = 0, kLoaded = 2;
    const std::shared_ptr<driver::Function> function = tables().functions.get(handle);
    if (!function || status == nullptr) return kInvalidParameter;
    *status = function->loaded ? kLoaded : kNotLoaded;
    return kSuccess;
}

Result GetCudaBarrierCount(CUfunction, uint32_t *) { return kNotImplemented; }

}  // namespace cudasim::sanitizer::entry

extern "C" const entry::Table *cudasim_sanitizer(void);
extern "C" const entry::Table *cudasim_sanitizer(void) {
    static const entry::Table table = {
#define X(name, parameters, arguments) entry::name,
        SANITIZER_ENTRY_POINTS(X)
#undef X
    };
    return &table;
}
