// Code objects that the program loads. When an executable is frozen, the agent sends its code objects to the tool. The tool answers
// with modified ones whose kernels have probes. They are loaded as separate executables, so the program's stay unchanged.
#include <algorithm>
#include <cstring>
#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "agent.h"

namespace gpubpf {

namespace {

struct Code {  // a code object of the program, in its memory or read from its file
    const void *at = nullptr;
    uint64_t size = 0;
    std::vector<char> own;
};
struct LoadedImage {
    Gpu *gpu;
    int file;
    uint64_t size;
};

struct State {
    std::mutex installing;  // held while copies are loaded, and while a program's executable is destroyed
    std::mutex lock;        // guards the members below; never held during a ROCr call or a wait
    std::map<uint64_t, std::shared_ptr<Code>> readers;
    std::map<uint64_t, std::vector<LoadedImage>> loaded;               // by executable, before it is frozen
    std::map<uint64_t, std::vector<std::unique_ptr<Module>>> modules;  // by executable
    std::vector<std::unique_ptr<Module>> gone;  // of destroyed executables; answers may still arrive for them
    std::map<std::string, uint32_t> slots;
    std::shared_mutex kernels_lock;
    std::unordered_map<uint64_t, Kernel *> kernels;  // by the address of the descriptor
    std::vector<std::unique_ptr<Kernel>> all_kernels;

    ~State() {
        for (const auto &executable : loaded)
            for (const LoadedImage &image : executable.second)
                if (image.file >= 0) close(image.file);
    }
};
AttachmentState<State> state;

Slot *slot_of(const std::string &name, uint32_t &index) {
    auto known = state->slots.find(name);
    if (known != state->slots.end()) {
        index = known->second;
    } else {
        index = agent.control->used.load(std::memory_order_relaxed);
        if (index + 1 < kSlots) {
            state->slots.emplace(name, index);
            agent.control->used.store(index + 1, std::memory_order_release);
            tell_tool(message::KernelName{index, name});
        } else {
            index = kSlots - 1;
        }
    }
    return &agent.control->slots[index];
}

struct Symbol {
    std::string name;
    uint64_t object;  // the address of a kernel's descriptor or a variable
    uint32_t bytes;   // the size of a kernel's arguments or a variable
};

// Returns the kernels or the variables of an executable.
template <uint32_t kType>
std::vector<Symbol> symbols_of(hsa_handle executable, hsa_handle on) {
    std::vector<Symbol> found;
    auto each = [](hsa_handle, hsa_handle, hsa_handle symbol, void *data) -> hsa_status {
        constexpr bool kKernel = kType == HSA_KERNEL;
        uint32_t type = 0, length = 0;
        Symbol s{};
        if (hsa.executable_symbol_get_info(symbol, HSA_SYMBOL_TYPE, &type) || type != kType ||
            hsa.executable_symbol_get_info(symbol, HSA_SYMBOL_NAME_LENGTH, &length) ||
            hsa.executable_symbol_get_info(symbol, kKernel ? HSA_SYMBOL_KERNEL_OBJECT : HSA_SYMBOL_ADDRESS,
                                           &s.object) ||
            hsa.executable_symbol_get_info(symbol, kKernel ? HSA_SYMBOL_KERNARG_SIZE : HSA_SYMBOL_SIZE,
                                           &s.bytes))
            return 0;
        quietly([&] {
            s.name.resize(length);
            if (hsa.executable_symbol_get_info(symbol, HSA_SYMBOL_NAME, s.name.data())) return;
            if (kKernel && length > 3 && s.name.compare(length - 3, 3, ".kd") == 0) s.name.resize(length - 3);
            static_cast<std::vector<Symbol> *>(data)->push_back(s);
        });
        return 0;
    };
    hsa.executable_iterate_agent_symbols(executable, on, each, &found);
    return found;
}

// Whether the compiler or HIP's headers define a variable (blockIdx.x is a member of __HIP_Coordinates).
bool is_of_hip(const std::string &name) {
    return name.compare(0, 6, "__hip_") == 0 || name.find("__HIP_") != std::string::npos;
}

// Logs the variables of an instrumented module, except those of HIP.
void add_variables(Module &module) {
    if (!agent.config.allocation_stacks) return;
    for (const Symbol &s : symbols_of<HSA_VARIABLE>(module.executable, module.gpu->agent))
        if (!is_of_hip(s.name) && variable_found(module.gpu->number, s.name, s.object, s.bytes))
            module.variables.push_back(s.object);
}

// Records the kernels of a module.
void add_kernels(Module &module) {
    for (const Symbol &s : symbols_of<HSA_KERNEL>(module.executable, module.gpu->agent)) {
        auto kernel = std::make_unique<Kernel>();
        kernel->name = s.name;
        kernel->gpu = module.gpu;
        kernel->argument_bytes = s.bytes;
        {
            std::lock_guard<std::mutex> hold(state->lock);
            kernel->slot = slot_of(s.name, kernel->slot_index);
        }
        std::unique_lock<std::shared_mutex> hold(state->kernels_lock);
        module.kernels[s.name] = state->kernels[s.object] = kernel.get();
        state->all_kernels.push_back(std::move(kernel));
    }
}

void refuse(Kernel &kernel, const std::string &reason) {
    kernel.refused = true;
    tell_tool(message::Refused{kernel.slot_index, reason});
}

// Redirects addresses computed by a kernel's copy to the original code object, `by` bytes away.
bool redirect(const Layout &layout, uint64_t copy, uint64_t by) {
    for (const auto &[place, literals] : layout.references) {
        const uint64_t distance = literals + by;
        const auto low = static_cast<uint32_t>(distance), high = static_cast<uint32_t>(distance >> 32);
        char *at = reinterpret_cast<char *>(copy + static_cast<uint64_t>(place));
        if (hsa.memory_copy(at + kLowLiteral, &low, sizeof low) ||
            hsa.memory_copy(at + kHighLiteral, &high, sizeof high))
            return false;
    }
    return true;
}

// Loads a modified code object. Returns its executable; 0 if ROCr rejects it.
hsa_handle load_copies(const Gpu &gpu, const Answer &answer) {
    hsa_handle reader{}, made{}, none{};
    int profile = 0;
    hsa.agent_get_info(gpu.agent, HSA_AGENT_PROFILE, &profile);
    if (originals.reader_of_memory(answer.image.data(), answer.image.size() - 1, &reader)) return none;
    if (!hsa.executable_create_alt(profile, 0, nullptr, &made) &&
        (originals.load(made, gpu.agent, reader, nullptr, nullptr) || originals.freeze(made, nullptr))) {
        originals.destroy_executable(made);
        made = none;
    }
    originals.destroy_reader(reader);
    return made;
}

void publish(Module &module, const std::shared_ptr<const Answer> &answer, const std::vector<Symbol> &copies,
             const Layout &layout) {
    const auto kernel = module.kernels.find(layout.name);
    if (kernel == module.kernels.end()) return;
    Kernel &of = *kernel->second;
    uint64_t original = 0, object = 0;
    for (const Symbol &s : copies)
        if (s.name == layout.name) object = s.object;
    {
        std::shared_lock<std::shared_mutex> hold(state->kernels_lock);
        for (const auto &k : state->kernels)
            if (k.second == &of) original = k.first;
    }
    if (layout.parameters.size() != 1 || layout.parameters[0] != of.argument_bytes)
        return refuse(of, "its metadata and its descriptor differ");
    if (!object || !original || !redirect(layout, object, original - object))
        return refuse(of, "ROCr does not load the copy");
    auto copy = std::make_unique<Copy>();
    copy->kernel = &of;
    copy->answer = answer;
    copy->layout = &layout;
    copy->object = object;
    std::lock_guard<std::mutex> hold(of.gpu->lock);
    of.copy = copy.get();
    of.gpu->copies.push_back(std::move(copy));
}

// --- code loaded before the agent attached ---

constexpr size_t kCompared = 1 << 20;  // bytes

// Copies a code object's image into a file. The program may have freed the image. Returns the file, or -1.
int copy_image(uint64_t at, uint64_t size) {
    if (!at || !size || size > kImageLimit) return -1;
    const int file = memory_file("gpubpf-image", size);
    std::vector<char> part(std::min<uint64_t>(size, kCompared));
    for (uint64_t done = 0; file >= 0 && done < size;) {
        const iovec to{part.data(), std::min<uint64_t>(part.size(), size - done)},
            from{reinterpret_cast<void *>(at + done), to.iov_len};
        if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != static_cast<ssize_t>(to.iov_len) ||
            !write_all(file, part.data(), to.iov_len, static_cast<off_t>(done))) {
            close(file);
            return -1;
        }
        done += to.iov_len;
    }
    return file;
}

// Whether the GPU has this image's code and constants, `by` bytes away. The program may have reused the image's memory.
bool is_loaded(int file, uint64_t size, uint64_t by) {
    Elf64_Ehdr header;
    if (!read_all(file, &header, sizeof header, 0) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr))
        return false;
    std::vector<char> ours(kCompared), theirs(kCompared);
    bool code = false;
    for (int i = 0; i < header.e_phnum; ++i) {
        Elf64_Phdr segment;
        if (!read_all(file, &segment, sizeof segment,
                      static_cast<off_t>(header.e_phoff + i * sizeof segment)))
            return false;
        if (segment.p_type != PT_LOAD || segment.p_flags & PF_W) continue;
        if (segment.p_offset > size || segment.p_filesz > size - segment.p_offset) return false;
        code = code || segment.p_flags & PF_X;
        for (uint64_t done = 0; done < segment.p_filesz;) {
            const uint64_t part = std::min<uint64_t>(kCompared, segment.p_filesz - done);
            if (!read_all(file, ours.data(), part, static_cast<off_t>(segment.p_offset + done)) ||
                hsa.memory_copy(theirs.data(), reinterpret_cast<void *>(by + segment.p_vaddr + done), part) ||
                memcmp(ours.data(), theirs.data(), part) != 0)
                return false;
            done += part;
        }
    }
    return code;
}

struct Loaded {
    hsa_handle executable;
    bool frozen;
    LoadedImage image;
};

hsa_loader loader{};

void add_loaded(hsa_handle executable, hsa_handle object, std::vector<Loaded> &found) {
    hsa_handle on{};
    uint64_t at = 0, size = 0, by = 0;
    uint32_t state_of = 0;
    if (loader.loaded_get_info(object, HSA_LOADED_AGENT, &on) ||
        loader.loaded_get_info(object, HSA_LOADED_DELTA, &by) ||
        hsa.executable_get_info(executable, HSA_EXECUTABLE_STATE, &state_of))
        return;
    Gpu *gpu = agent.gpu(on);
    if (!gpu) return;
    if (loader.loaded_get_info(object, HSA_LOADED_MEMORY, &at) ||
        loader.loaded_get_info(object, HSA_LOADED_MEMORY_SIZE, &size))
        at = size = 0;
    int file = copy_image(at, size);
    if (file >= 0 && state_of == HSA_FROZEN && !is_loaded(file, size, by)) {
        close(file);
        file = -1;
    }
    found.push_back({executable, state_of == HSA_FROZEN, {gpu, file, file >= 0 ? size : 0}});
}

// Returns the code objects that the program has loaded. ROCr destroys no executable during the iteration.
std::vector<Loaded> all_loaded() {
    std::vector<Loaded> found;
    loader = {};
    if (hsa.system_get_major_extension_table(HSA_EXTENSION_LOADER, 1, sizeof loader, &loader) ||
        !loader.iterate_executables)
        return found;
    loader.iterate_executables(
        [](hsa_handle executable, void *all) -> hsa_status {
            return loader.iterate_loaded(
                executable,
                [](hsa_handle of, hsa_handle object, void *to) -> hsa_status {
                    quietly([&] { add_loaded(of, object, *static_cast<std::vector<Loaded> *>(to)); });
                    return 0;
                },
                all);
        },
        &found);
    return found;
}

// Records a module of a frozen executable.
Module &add_module(hsa_handle executable, Gpu *gpu) {
    auto made = std::make_unique<Module>();
    Module &module = *made;
    module.gpu = gpu;
    module.executable = executable;
    {
        std::lock_guard<std::mutex> hold(state->lock);
        state->modules[executable.handle].push_back(std::move(made));
    }
    add_kernels(module);
    return module;
}

}  // namespace

void install(Module &module, const std::shared_ptr<const Answer> &answer) {
    for (const auto &[name, reason] : answer->refusals)
        if (const auto kernel = module.kernels.find(name); kernel != module.kernels.end())
            refuse(*kernel->second, reason);
    std::lock_guard<std::mutex> installing(state->installing);
    if (answer->image.empty() || answer->kernels.empty() || module.gone) return;
    const bool ready = prepare(*module.gpu);
    if (ready) module.copies = load_copies(*module.gpu, *answer);
    const std::vector<Symbol> symbols = module.copies.handle
                                            ? symbols_of<HSA_KERNEL>(module.copies, module.gpu->agent)
                                            : std::vector<Symbol>();
    if (module.copies.handle) add_variables(module);
    for (const Layout &layout : answer->kernels) {
        if (ready) publish(module, answer, symbols, layout);
        else if (const auto kernel = module.kernels.find(layout.name); kernel != module.kernels.end())
            refuse(*kernel->second, "the GPU has no memory for maps");
    }
}

void find_loaded() {
    std::set<uint64_t> ours;  // executables added here; a hook may already have added others
    for (const Loaded &loaded : all_loaded()) {
        const uint64_t executable = loaded.executable.handle;
        {
            std::lock_guard<std::mutex> hold(state->lock);
            if (!loaded.frozen) state->loaded[executable].push_back(loaded.image);
            if (!state->modules.count(executable)) ours.insert(executable);
        }
        if (!loaded.frozen) continue;
        if (!ours.count(executable)) {
            if (loaded.image.file >= 0) close(loaded.image.file);
            continue;
        }
        Module &module = add_module(loaded.executable, loaded.image.gpu);
        for (const auto &kernel : module.kernels) {
            kernel.second->waits = loaded.image.file >= 0;
            if (loaded.image.file < 0 && agent.config.match_all)
                refuse(*kernel.second, "the program has no longer the code that it loaded");
        }
        if (loaded.image.file < 0) continue;
        agent.ask_for_later(module, *loaded.image.gpu, loaded.image.file, loaded.image.size);
        close(loaded.image.file);
    }
}

void unload_copies(const Gpu &gpu) {
    std::lock_guard<std::mutex> hold(state->lock);
    for (auto &executable : state->modules)
        for (auto &module : executable.second)
            if (module->gpu == &gpu && module->copies.handle)
                originals.destroy_executable(std::exchange(module->copies, {}));
}

Kernel *find_kernel(uint64_t object) {
    std::shared_lock<std::shared_mutex> hold(state->kernels_lock);
    const auto found = state->kernels.find(object);
    return found == state->kernels.end() ? nullptr : found->second;
}

// --- the program's calls ---

hsa_status on_reader_of_memory(const void *code, size_t size, hsa_handle *reader) {
    const hsa_status status = originals.reader_of_memory(code, size, reader);
    if (OwnWork work; work && !status && agent.live)
        quietly([&] {
            auto made = std::make_shared<Code>();
            made->at = code;
            made->size = size;
            std::lock_guard<std::mutex> hold(state->lock);
            state->readers[reader->handle] = made;
        });
    return status;
}

hsa_status on_reader_of_file(int file, hsa_handle *reader) {
    const hsa_status status = originals.reader_of_file(file, reader);
    if (OwnWork work; work && !status && agent.live)
        quietly([&] {
            struct stat st;
            if (fstat(file, &st) != 0 || !S_ISREG(st.st_mode) || uint64_t(st.st_size) > kImageLimit) return;
            auto made = std::make_shared<Code>();
            made->own.resize(static_cast<size_t>(st.st_size));
            if (!read_all(file, made->own.data(), made->own.size(), 0)) return;
            made->at = made->own.data();
            made->size = made->own.size();
            std::lock_guard<std::mutex> hold(state->lock);
            state->readers[reader->handle] = made;
        });
    return status;
}

hsa_status on_destroy_reader(hsa_handle reader) {
    if (OwnWork work; work)
        quietly([&] {
            std::lock_guard<std::mutex> hold(state->lock);
            state->readers.erase(reader.handle);
        });
    return originals.destroy_reader(reader);
}

hsa_status on_load(hsa_handle executable, hsa_handle on, hsa_handle reader, const char *options,
                   hsa_handle *result) {
    const hsa_status status = originals.load(executable, on, reader, options, result);
    if (OwnWork work; work && !status && agent.live)
        quietly([&] {
            std::shared_ptr<Code> code;
            {
                std::lock_guard<std::mutex> hold(state->lock);
                const auto found = state->readers.find(reader.handle);
                if (found != state->readers.end()) code = found->second;
            }
            Gpu *gpu = agent.gpu(on);
            if (!gpu) return;
            // Without the code, kernels are known and counted, but not instrumented.
            int file = code && code->size <= kImageLimit ? memory_file("gpubpf-image", code->size) : -1;
            if (file >= 0 && !write_all(file, code->at, code->size, 0)) {
                close(file);
                file = -1;
            }
            std::lock_guard<std::mutex> hold(state->lock);
            state->loaded[executable.handle].push_back({gpu, file, file >= 0 ? code->size : 0});
        });
    return status;
}

hsa_status on_freeze(hsa_handle executable, const char *options) {
    const hsa_status status = originals.freeze(executable, options);
    OwnWork work;
    if (!work) return status;
    SlowPath slow;
    std::vector<LoadedImage> images;
    quietly([&] {
        std::lock_guard<std::mutex> hold(state->lock);
        const auto found = state->loaded.find(executable.handle);
        if (found == state->loaded.end()) return;
        images = std::move(found->second);
        state->loaded.erase(found);
    });
    for (const LoadedImage &image : images) {
        if (!status && agent.live)
            quietly([&] {
                Module &module = add_module(executable, image.gpu);
                if (image.file >= 0) agent.instrument(module, *image.gpu, image.file, image.size);
            });
        if (image.file >= 0) close(image.file);
    }
    return status;
}

// The program has already waited for the kernels of an executable that it destroys.
hsa_status on_destroy_executable(hsa_handle executable) {
    OwnWork work;
    if (!work) return originals.destroy_executable(executable);
    std::lock_guard<std::mutex> installing(state->installing);
    std::vector<hsa_handle> copies;
    quietly([&] {
        std::lock_guard<std::mutex> hold(state->lock);
        std::unique_lock<std::shared_mutex> both(state->kernels_lock);
        const auto found = state->modules.find(executable.handle);
        if (found == state->modules.end()) return;
        for (auto &module : found->second) {
            module->gone = true;
            if (module->copies.handle) copies.push_back(module->copies);
            for (const uint64_t variable : module->variables)
                variable_gone(module->gpu->number, "hsa_executable_destroy", variable);
            for (auto k = state->kernels.begin(); k != state->kernels.end();) {
                const auto own = module->kernels.find(k->second->name);
                k = own != module->kernels.end() && own->second == k->second ? state->kernels.erase(k) : ++k;
            }
            state->gone.push_back(std::move(module));
        }
        state->modules.erase(found);
    });
    for (hsa_handle one : copies) originals.destroy_executable(one);
    return originals.destroy_executable(executable);
}

const Lifetime code_lifetime = lifetime_of_attachment_state<state>();

}  // namespace gpubpf
