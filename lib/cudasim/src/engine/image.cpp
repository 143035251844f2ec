// Loads the shared objects that the translator builds.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <mutex>
#include <optional>
#include <sys/mman.h>
#include <unistd.h>

#include "embedded/cache.h"
#include "embedded/sha256.h"
#include "engine/internal.h"

namespace cudasim {

// Suffixes of a part's files: its C text, its code, the code compiled with more optimization, and an empty file once the part has run
// for a long time. With that, the optimized code is used.
constexpr const char *kText = ".c", *kCode = ".so", *kOptimized = ".optimized.so", *kSlow = ".slow";
// How a text begins that is to be compiled with more optimization (compiler.py).
constexpr const char *kRunsLong = "/* runs for a long time */\n";
static std::atomic<uint64_t> optimize_after{UINT64_MAX};

void set_optimize_after(uint64_t ns) { optimize_after = ns; }

LoadedImage::~LoadedImage() {
    for (void *handle : handles_) dlclose(handle);
}

// Returns a file in memory with this content, sealed against changes; -1 if that is not possible.
static int sealed_file(std::string_view content) {
    const int file = memfd_create("cudasim", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return -1;
    if (embedded::write_all(file, content) &&
        fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        return file;
    close(file);
    return -1;
}

// Loads a shared object by way of a new file, which is removed again. Returns null on failure.
static void *load_by_file(std::string_view object, const std::string &path) {
    const int file = open(path.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0) return nullptr;
    const bool written = embedded::write_all(file, object);
    close(file);
    void *handle = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path.c_str());
    return handle;
}

// Loads a shared object from memory, so that the code that runs is the code that was checked. Returns null on failure; see dlerror().
// `writable`: what is loaded must not be shared with others that load the same object.
static void *load_object(std::string_view object, const std::string &name, bool writable) {
    void *handle = nullptr;
    if (const int file = sealed_file(object); file >= 0) {
        // dlopen returns a library already loaded from the same path. So each path encodes the bits of another number. A
        // second copy of the embedded device in this process starts at another number.
        static std::atomic<uint64_t> loaded{reinterpret_cast<uint64_t>(&loaded) << 16};
        std::string path = "/proc/self/fd/";
        for (uint64_t n = ++loaded; n; n >>= 1) path += n & 1 ? "./" : "/";
        handle = dlopen((path + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
        close(file);
    }
    if (handle) return handle;
    // Some systems do not execute files in memory, and some not those in the directory for temporary files.
    const std::string cached = embedded::cached_path(name);
    if (!cached.empty() && writable) {
        static std::atomic<uint32_t> number;
        handle =
            load_by_file(object, cached + "." + std::to_string(getpid()) + "." + std::to_string(number++));
    } else if (!cached.empty() && embedded::read_cached(name) == object) {
        handle = dlopen(cached.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (handle) return handle;
    const embedded::ScratchDirectory scratch;
    return scratch.path().empty() ? nullptr : load_by_file(object, scratch.path() + "/" + name);
}

std::shared_ptr<LoadedImage> LoadedImage::load(const std::string &key, std::string_view ptx,
                                               std::string_view object, TranslateError &error) {
    void *handle = load_object(object, key + ".so", false);
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
    image->key_ = key;
    image->translator_ = translator_key();
    image->code_.assign(raw->nfunctions, nullptr);
    image->prepared_ = std::vector<std::atomic<bool>>(raw->nkernels);
    image->ran_ = std::vector<std::atomic<uint64_t>>(raw->nkernels);
    image->raw = raw;
    image->read_source_lines(ptx);
    if (dlsym(handle, "cudasim_part") != nullptr && !image->add_code(handle, nullptr, error)) return nullptr;
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
        to.maxnreg = from.maxnreg;
        memcpy(to.cluster, from.reqnctapercluster, sizeof to.cluster);
        to.max_cluster_rank = from.maxclusterrank;
        to.explicit_cluster = from.explicit_cluster != 0;
        to.recursive = from.recursive != 0;
        to.variables.assign(from.vars, from.vars + from.nvars);
        if (from.refused) to.refused = from.refused;
        if (from.nparts != 0) image->ptx_ = ptx;
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

bool LoadedImage::add_code(void *handle, const cs_portable *shared, TranslateError &error) const {
    const auto *part = static_cast<const cs_part *>(dlsym(handle, "cudasim_part"));
    const uint32_t nplaces = shared ? shared->nplaces : 0;
    if (part == nullptr || part->abi != CS_ABI || part->nplaces != nplaces) {
        error = {300, "a part of the translated module is invalid"};
        return false;
    }
    if (shared) {
        std::copy_n(shared->places, nplaces, part->places);
        code_[shared->function] = part->functions[0].run;
        return true;
    }
    for (uint32_t k = 0; k < part->nfunctions; k++)
        code_[part->functions[k].function] = part->functions[k].run;
    return true;
}

const cs_portable *LoadedImage::portable(uint32_t part) const {
    return part < raw->nparts && raw->portable[part].digest ? &raw->portable[part] : nullptr;
}

// Returns whether a text may be stored for all images that have this part.
bool LoadedImage::is_text_of(uint32_t part, std::string_view text) const {
    const cs_portable *shared = portable(part);
    if (shared == nullptr) return true;
    embedded::Sha256 hash;
    hash.add(text.data(), text.size());
    return hash.hex() == shared->digest;
}

// Images share the files of portable parts.
std::string LoadedImage::part_name(uint32_t part, const char *suffix) const {
    if (const cs_portable *shared = portable(part)) {
        embedded::Sha256 hash;
        hash.add(translator_);
        hash.add(shared->digest);
        return hash.hex() + suffix;
    }
    return key_ + "." + std::to_string(part) + suffix;
}

std::set<uint32_t> LoadedImage::slow(const std::vector<uint32_t> &parts) const {
    std::set<uint32_t> found;
    if (optimize_after == UINT64_MAX) return found;
    for (const uint32_t part : parts)
        if (embedded::read_cached(part_name(part, kSlow))) found.insert(part);
    return found;
}

void LoadedImage::keep_parts(std::vector<std::string> texts) const {
    for (uint32_t k = 0; k < texts.size(); k++)
        if (!is_text_of(k, texts[k]) || !embedded::write_cached(part_name(k, kText), texts[k]))
            texts_[k] = std::move(texts[k]);
}

// Makes the shared objects of these parts, from their C texts, or from the PTX if the cache has lost a text.
bool LoadedImage::compile(const std::vector<uint32_t> &parts, const std::set<uint32_t> &slow,
                          std::map<uint32_t, std::string> &objects, TranslateError &error) const {
    // A translator that was updated meanwhile may divide the module in another way, and its results have another key.
    const bool current = translation_key(ptx_, virtual_clock) == key_;
    std::map<uint32_t, std::string> texts;
    for (const uint32_t part : parts) {
        if (const auto kept = texts_.find(part); kept != texts_.end()) texts[part] = kept->second;
        else if (std::optional<std::string> text = embedded::read_cached(part_name(part, kText)))
            texts[part] = std::move(*text);
    }
    if (texts.size() < parts.size()) {
        Translation made;
        if (!current) {
            error = {300, "cudasim was updated while the program ran; start the program again"};
            return false;
        }
        if (!run_translation(ptx_, virtual_clock, made, error)) return false;
        for (const uint32_t part : parts)
            if (part < made.parts.size()) texts[part] = made.parts[part];
        keep_parts(std::move(made.parts));
    }
    std::string log;
    std::map<uint32_t, std::string> given = texts;
    for (auto &[part, text] : given)
        if (slow.count(part)) text = kRunsLong + text;
    std::map<uint32_t, std::string> compiled = compile_parts(given, log);
    const bool still_current = current && translation_key(ptx_, virtual_clock) == key_;
    for (auto &[part, object] : compiled) {
        if (still_current && is_text_of(part, texts[part]))
            embedded::write_cached(part_name(part, slow.count(part) ? kOptimized : kCode), object);
        objects[part] = std::move(object);
    }
    for (const uint32_t part : parts) {
        if (objects.count(part)) continue;
        error = {300, log.empty() ? "a part of the translated module cannot be compiled" : log};
        return false;
    }
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
    std::map<uint32_t, std::string> objects;
    std::vector<uint32_t> missing;
    const std::set<uint32_t> slow = this->slow({kernel.parts, kernel.parts + kernel.nparts});
    const auto name = [&](uint32_t part) { return part_name(part, slow.count(part) ? kOptimized : kCode); };
    for (uint32_t k = 0; k < kernel.nparts; k++) {
        const uint32_t part = kernel.parts[k];
        if (parts_.count(part)) continue;
        if (std::optional<std::string> object = embedded::read_cached(name(part)))
            objects[part] = std::move(*object);
        else missing.push_back(part);
    }
    if (!missing.empty() && !compile(missing, slow, objects, error)) return false;
    for (const auto &[part, object] : objects) {
        void *handle = load_object(object, name(part), portable(part) != nullptr);
        if (handle == nullptr) {
            const char *why = dlerror();
            error = {300, why ? why : "a part of the translated module cannot be loaded"};
            return false;
        }
        handles_.push_back(handle);
        if (!add_code(handle, portable(part), error)) return false;
        parts_.insert(part);
    }
    prepared_[index].store(true, std::memory_order_release);
    return true;
}

void LoadedImage::ran(uint32_t index, uint64_t ns) const {
    const uint64_t enough = optimize_after.load(std::memory_order_relaxed),
                   before = ran_[index].fetch_add(ns, std::memory_order_relaxed);
    if (enough == UINT64_MAX || before > enough || before + ns <= enough) return;
    const cs_kernel &kernel = raw->kernels[index];
    for (uint32_t k = 0; k < kernel.nparts; k++)
        embedded::write_cached(part_name(kernel.parts[k], kSlow), "");
}

// Reads .file and .loc (PTX ISA 11.5). A function has no line information until its first .loc. In a copy that a tool has made, the
// comment //gpubpf@N says that the next line is line N of the original; faults have the numbers of these lines.
void Image::read_source_lines(std::string_view ptx) {
    if (ptx.find(".loc") == ptx.npos) return;
    constexpr std::string_view kMark = "//gpubpf@";
    const bool marked = ptx.find(kMark) != ptx.npos;
    uint32_t number = 0;
    bool begins = false;  // a function whose first mark has not come yet
    for (size_t at = 0; at < ptx.size(); at++) {
        const size_t end = std::min(ptx.find('\n', at), ptx.size());
        number++;
        const std::string text(ptx.substr(at, std::min<size_t>(end - at, 4096)));
        unsigned file = 0, line = 0;
        if (const size_t mark = marked ? text.find(kMark) : text.npos; mark != text.npos) {
            number = static_cast<uint32_t>(strtoul(text.c_str() + mark + kMark.size(), nullptr, 10)) - 1;
            if (std::exchange(begins, false)) source_lines_.push_back({number + 1, 0, 0});
        } else if (sscanf(text.c_str(), " .loc %u %u", &file, &line) == 2) {
            source_lines_.push_back({number, file, line});
        } else if (sscanf(text.c_str(), " .file %u", &file) == 1) {
            const size_t first = text.find('"'), last = text.find('"', first + 1);
            if (last != text.npos) source_files_[file] = text.substr(first + 1, last - first - 1);
        } else if (text.find(".entry") != text.npos || text.find(".func") != text.npos) {
            if (marked) begins = true;
            else source_lines_.push_back({number, 0, 0});
        }
        at = end;
    }
    std::stable_sort(source_lines_.begin(), source_lines_.end(),
                     [](const SourceLine &a, const SourceLine &b) { return a.ptx_line < b.ptx_line; });
}

std::pair<std::string, uint32_t> Image::source_of(uint32_t ptx_line) const {
    auto after = std::upper_bound(source_lines_.begin(), source_lines_.end(), ptx_line,
                                  [](uint32_t line, const SourceLine &one) { return line < one.ptx_line; });
    if (ptx_line == 0 || after == source_lines_.begin()) return {};
    const SourceLine &found = *std::prev(after);
    const auto file = source_files_.find(found.file);
    if (found.line == 0 || file == source_files_.end()) return {};
    return {file->second, found.line};
}

// Addresses of functions are in a range where programs rarely map anything: a MiB for each image, which has at most 65,535.
static uint64_t next_code_base() {
    static std::atomic<uint64_t> images;
    return 0x7c0de0000000 + (images++ % (1 << 20) << 20);
}

Image::Image() : code_base(next_code_base()) {}

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

uint64_t Image::function_address(uint32_t index) const { return code_base + 16ull * (index + 1); }

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
