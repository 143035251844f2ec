// Loads the shared objects that the translator makes.

#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <unistd.h>

#include "engine/internal.h"

namespace cudasim {

LoadedImage::~LoadedImage() {
    for (void *handle : handles_) dlclose(handle);
}

std::shared_ptr<const Image> LoadedImage::load(const std::string &path, TranslateError &error) {
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto *raw = handle ? static_cast<const cs_image *>(dlsym(handle, "cudasim_image")) : nullptr;
    if (raw == nullptr || raw->abi != CS_ABI) {
        const char *why = dlerror();
        error.code = 300;
        error.log = std::string("the translated module cannot be loaded: ") + (why ? why : "wrong version");
        if (handle) dlclose(handle);
        return nullptr;
    }
    auto image = std::make_shared<LoadedImage>();
    image->handles_.push_back(handle);
    image->stem_ = path.substr(0, path.size() - strlen(".so"));
    image->code_.assign(raw->nfunctions, nullptr);
    image->prepared_ = std::vector<std::atomic<bool>>(raw->nkernels);
    image->raw = raw;
    if (dlsym(handle, "cudasim_part") != nullptr && !image->add_code(handle, error)) return nullptr;
    image->ptx_version = static_cast<int>(raw->ptx_version);
    image->target = static_cast<int>(raw->target);
    image->virtual_clock = raw->virtual_clock != 0;
    for (uint32_t k = 0; k < raw->nkernels; k++) {
        const cs_kernel &from = raw->kernels[k];
        Kernel to;
        to.name = from.name;
        for (uint32_t i = 0; i < from.nparams; i++)
            to.parameters.push_back({from.params[i].offset, from.params[i].size, from.params[i].align});
        to.parameter_bytes = from.param_bytes;
        to.static_shared = from.static_shared;
        to.local = from.local;
        to.registers = from.registers;
        memcpy(to.reqntid, from.reqntid, sizeof to.reqntid);
        memcpy(to.maxntid, from.maxntid, sizeof to.maxntid);
        to.recursive = from.recursive != 0;
        to.variables.assign(from.vars, from.vars + from.nvars);
        if (from.refused) to.refused = from.refused;
        image->kernels_.push_back(std::move(to));
    }
    for (uint32_t k = 0; k < raw->nvariables; k++) {
        const cs_variable &from = raw->variables[k];
        Variable to;
        to.name = from.name;
        to.space = from.constant ? Space::constant : Space::global;
        to.size = from.size;
        to.align = from.align;
        to.visible = from.visible != 0;
        to.external = from.external != 0;
        to.managed = from.managed != 0;
        to.initial = std::string_view(reinterpret_cast<const char *>(from.initial), from.initial_size);
        for (uint32_t i = 0; i < from.nrelocs; i++) {
            const cs_reloc &r = from.relocs[i];
            to.relocations.push_back(
                {r.offset, r.width, r.function != 0, r.index, r.addend, r.mask, r.shift});
        }
        image->variables_.push_back(std::move(to));
    }
    return image;
}

bool LoadedImage::add_code(void *handle, TranslateError &error) const {
    const auto *part = static_cast<const cs_part *>(dlsym(handle, "cudasim_part"));
    if (part == nullptr || part->abi != CS_ABI) {
        error = {300, "a part of the translated module is invalid"};
        return false;
    }
    for (uint32_t k = 0; k < part->nfunctions; k++)
        code_[part->functions[k].function] = part->functions[k].run;
    return true;
}

bool LoadedImage::prepare(uint32_t index, TranslateError &error) const {
    if (prepared_[index].load(std::memory_order_acquire)) return true;
    const cs_kernel &kernel = raw->kernels[index];
    if (kernel.refused) {
        error = {801, kernel.refused};
        return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> files;
    for (uint32_t k = 0; k < kernel.nparts; k++) {
        const std::string stem = stem_ + "." + std::to_string(kernel.parts[k]);
        if (access((stem + ".so").c_str(), R_OK) != 0) files.insert(files.end(), {stem + ".c", stem + ".so"});
    }
    std::string log;
    if (!files.empty()) run_translator(files, log);
    for (uint32_t k = 0; k < kernel.nparts; k++) {
        if (parts_.count(kernel.parts[k])) continue;
        const std::string path = stem_ + "." + std::to_string(kernel.parts[k]) + ".so";
        void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            const char *why = dlerror();
            unlink((stem_ + ".so")
                       .c_str());  // a part is missing or damaged, so the next process translates again
            error = {300, !log.empty() ? log
                          : why        ? why
                                       : "a part of the translated module cannot be loaded"};
            return false;
        }
        handles_.push_back(handle);
        if (!add_code(handle, error)) return false;
        parts_.insert(kernel.parts[k]);
    }
    prepared_[index].store(true, std::memory_order_release);
    return true;
}

int Image::find_kernel(std::string_view name) const {
    for (size_t k = 0; k < kernels_.size(); k++)
        if (kernels_[k].name == name) return static_cast<int>(k);
    return -1;
}

int Image::find_variable(std::string_view name) const {
    for (size_t k = 0; k < variables_.size(); k++)
        if (variables_[k].name == name) return static_cast<int>(k);
    return -1;
}

uint64_t Image::function_address(uint32_t index) const { return CS_CODE_BASE + 16ull * (index + 1); }

void Image::initialise(uint32_t index, const uint64_t *addresses, void *destination) const {
    const Variable &v = variables_[index];
    auto *to = static_cast<uint8_t *>(destination);
    const size_t given = std::min<size_t>(v.initial.size(), v.size);
    if (given) memcpy(to, v.initial.data(), given);
    memset(to + given, 0, v.size - given);
    for (const Relocation &r : v.relocations) {
        uint64_t value = r.function ? function_address(r.index) : addresses[r.index];
        value = ((value + static_cast<uint64_t>(r.addend)) & r.mask) >> r.shift;
        if (r.offset + r.width <= v.size) memcpy(to + r.offset, &value, r.width);
    }
}

}  // namespace cudasim
