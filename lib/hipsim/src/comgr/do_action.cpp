// libamd_comgr.so.2, which HIP loads in place of AMD's library of that name. It caches results of AMD's compiler.
//
// HIP compiles its own copy kernels with LLVM in every process, when it creates the first queue. In a small program, that takes most
// of the time. So this library has its own amd_comgr_do_action, which keeps results of AMD's function in the cache of
// embedded/cache.h. Their names are made from all inputs of the function. All other functions are AMD's: this library needs AMD's by
// its full path (Makefile), so dlsym finds them there.

#include <algorithm>
#include <amd_comgr.h>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <filesystem>
#include <functional>
#include <link.h>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "embedded/cache.h"
#include "embedded/sha256.h"

const char *const embedded::kDevice = "hipsim";

extern char **environ;

namespace {

constexpr amd_comgr_data_kind_t kKinds[] = {
    AMD_COMGR_DATA_KIND_SOURCE,      AMD_COMGR_DATA_KIND_INCLUDE,    AMD_COMGR_DATA_KIND_PRECOMPILED_HEADER,
    AMD_COMGR_DATA_KIND_DIAGNOSTIC,  AMD_COMGR_DATA_KIND_LOG,        AMD_COMGR_DATA_KIND_BC,
    AMD_COMGR_DATA_KIND_RELOCATABLE, AMD_COMGR_DATA_KIND_EXECUTABLE, AMD_COMGR_DATA_KIND_BYTES,
    AMD_COMGR_DATA_KIND_FATBIN,
};
// Changes with the format of files, and with the content of keys.
constexpr uint64_t kFormat = 1;
constexpr size_t kLarge = 1 << 16;
constexpr size_t kMostFiles = 1000;

struct Data {
    uint64_t kind;
    std::string name, bytes;
};

// Calls a function that returns a text or bytes of unknown size: first for the size, then for the bytes.
template <typename Get>
bool get_text(std::string &to, Get get) {
    size_t size = 0;
    if (get(&size, nullptr) != AMD_COMGR_STATUS_SUCCESS) return false;
    to.assign(size, '\0');
    return get(&size, to.data()) == AMD_COMGR_STATUS_SUCCESS && size == to.size();
}

// Returns all data of a set; nothing if some of it cannot be read.
std::optional<std::vector<Data>> contents(amd_comgr_data_set_t set) {
    std::vector<Data> found;
    for (const amd_comgr_data_kind_t kind : kKinds) {
        size_t count = 0;
        if (amd_comgr_action_data_count(set, kind, &count) != AMD_COMGR_STATUS_SUCCESS) return std::nullopt;
        for (size_t i = 0; i < count; i++) {
            amd_comgr_data_t data;
            if (amd_comgr_action_data_get_data(set, kind, i, &data) != AMD_COMGR_STATUS_SUCCESS)
                return std::nullopt;
            Data &one = found.emplace_back();
            one.kind = kind;
            const bool read =
                get_text(one.name,
                         [&](size_t *n, char *to) { return amd_comgr_get_data_name(data, n, to); }) &&
                get_text(one.bytes, [&](size_t *n, char *to) { return amd_comgr_get_data(data, n, to); });
            amd_comgr_release_data(data);
            if (!read) return std::nullopt;
        }
    }
    return found;
}

// Returns a library's build ID, empty if it has none.
std::string_view build_id(const dl_phdr_info &library) {
    for (int i = 0; i < library.dlpi_phnum; i++) {
        const ElfW(Phdr) &segment = library.dlpi_phdr[i];
        if (segment.p_type != PT_NOTE) continue;
        const auto *at = reinterpret_cast<const char *>(library.dlpi_addr + segment.p_vaddr),
                   *end = at + segment.p_memsz;
        while (static_cast<size_t>(end - at) >= sizeof(ElfW(Nhdr))) {
            ElfW(Nhdr) note;
            memcpy(&note, at, sizeof note);
            const size_t name = (size_t{note.n_namesz} + 3) & ~size_t{3},
                         id = (size_t{note.n_descsz} + 3) & ~size_t{3};
            at += sizeof note;
            if (static_cast<size_t>(end - at) < name + id) break;
            if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && memcmp(at, "GNU", 4) == 0)
                return {at + name, note.n_descsz};
            at += name + id;
        }
    }
    return {};
}

// The build IDs of the libraries that results depend on: AMD's, and LLVM's if that is a library of its own.
struct Libraries {
    std::vector<std::string> ids;
    bool known = true;  // each has one
};

int add_library(dl_phdr_info *library, size_t, void *to) {
    const std::string_view path = library->dlpi_name ? library->dlpi_name : "";
    const std::string_view name = path.substr(path.rfind('/') + 1);
    const auto begins = [&](const char *start) { return name.rfind(start, 0) == 0; };
    if (!begins("libamd_comgr") && !begins("libLLVM") && !begins("libclang") && !begins("liblld")) return 0;
    auto &libraries = *static_cast<Libraries *>(to);
    const std::string_view id = build_id(*library);
    libraries.known &= !id.empty();
    libraries.ids.emplace_back(id);
    return 0;
}

// Returns whether the result of an action depends only on the content of the key, and not on the system's files or the time.
bool depends_on_input_only(amd_comgr_action_kind_t kind, amd_comgr_language_t language,
                           const std::vector<std::string> &options, const std::vector<Data> &input) {
    switch (kind) {
        case AMD_COMGR_ACTION_LINK_BC_TO_BC:
        case AMD_COMGR_ACTION_OPTIMIZE_BC_TO_BC:
        case AMD_COMGR_ACTION_CODEGEN_BC_TO_RELOCATABLE:
        case AMD_COMGR_ACTION_LINK_RELOCATABLE_TO_EXECUTABLE: break;
        case AMD_COMGR_ACTION_COMPILE_SOURCE_TO_BC:
            if (language != AMD_COMGR_LANGUAGE_OPENCL_1_2 && language != AMD_COMGR_LANGUAGE_OPENCL_2_0)
                return false;
            break;
        default: return false;  // other kinds take little time, or may read files
    }
    for (const std::string &option : options) {  // no option may name a file
        if (option.find_first_of("/@") != std::string::npos) return false;
        if (option.rfind("-", 0) != 0 && option.find('.') != std::string::npos) return false;
        for (const char *start : {"-I", "-i", "-fplugin", "-fmodule", "-mlink", "-load"})
            if (option.rfind(start, 0) == 0) return false;
    }
    for (const Data &data : input) {
        if (data.kind != AMD_COMGR_DATA_KIND_SOURCE && data.kind != AMD_COMGR_DATA_KIND_INCLUDE) continue;
        std::string text = data.bytes;  // without line continuations, which may be inside a word
        for (size_t at; (at = text.find("\\\n")) != std::string::npos;) text.erase(at, 2);
        for (const char *word : {"include", "import", "embed", "__DATE__", "__TIME"})
            if (text.find(word) != std::string::npos) return false;
    }
    for (char **variable = environ; variable && *variable; variable++)  // of AMD's library and of clang
        for (const char *start : {"AMD_COMGR_", "CCC_", "CLANG_", "LLVM_"})
            if (strncmp(*variable, start, strlen(start)) == 0) return false;
    return true;
}

// Returns the name of the result in the cache, empty if the result must not be kept.
std::string key(amd_comgr_action_kind_t kind, amd_comgr_action_info_t info, amd_comgr_data_set_t input) {
    amd_comgr_language_t language;
    bool logging;
    size_t options_count;
    if (amd_comgr_action_info_get_language(info, &language) != AMD_COMGR_STATUS_SUCCESS ||
        amd_comgr_action_info_get_logging(info, &logging) != AMD_COMGR_STATUS_SUCCESS ||
        amd_comgr_action_info_get_option_list_count(info, &options_count) != AMD_COMGR_STATUS_SUCCESS)
        return "";
    std::vector<std::string> texts(options_count);
    for (size_t i = 0; i < options_count; i++)
        if (!get_text(texts[i], [&](size_t *n, char *to) {
                return amd_comgr_action_info_get_option_list_item(info, i, n, to);
            }))
            return "";
    const std::optional<std::vector<Data>> data = contents(input);
    if (!data || !depends_on_input_only(kind, language, texts, *data)) return "";
    std::string isa;
    if (!get_text(isa, [&](size_t *n, char *to) { return amd_comgr_action_info_get_isa_name(info, n, to); }))
        return "";
    Libraries libraries;
    dl_iterate_phdr(add_library, &libraries);
    if (!libraries.known || libraries.ids.empty()) return "";
    texts.insert(texts.end(), {isa});
    texts.insert(texts.end(), libraries.ids.begin(), libraries.ids.end());

    embedded::Sha256 hash;
    const auto add_number = [&](uint64_t number) { hash.add(&number, sizeof number); };
    const auto add_text = [&](const std::string &text) {
        add_number(text.size());
        hash.add(text.data(), text.size());
    };
    for (const uint64_t number :
         {kFormat, uint64_t{kind}, uint64_t{language}, uint64_t{logging}, options_count, texts.size()})
        add_number(number);
    for (const std::string &text : texts) add_text(text);
    for (const Data &one : *data) {
        if (one.kind == AMD_COMGR_DATA_KIND_LOG || one.kind == AMD_COMGR_DATA_KIND_DIAGNOSTIC)
            continue;  // not read
        add_number(one.kind);
        add_text(one.name);
        // AMD's own headers and libraries have megabytes, for which SHA-256 takes 50 ms on some CPUs.
        if (one.bytes.size() <= kLarge) add_text(one.bytes);
        else
            for (const uint64_t number : {one.bytes.size(), std::hash<std::string_view>()(one.bytes)})
                add_number(number);
    }
    return hash.hex();
}

// Packs a result into a file: for each of its data the kind, the sizes of name and bytes, the name, and the bytes.
std::string packed(const std::vector<Data> &result) {
    std::string file;
    for (const Data &data : result) {
        const uint64_t head[] = {data.kind, data.name.size(), data.bytes.size()};
        file.append(reinterpret_cast<const char *>(head), sizeof head);
        file += data.name;
        file += data.bytes;
    }
    return file;
}

std::optional<std::vector<Data>> unpacked(std::string_view file) {
    std::vector<Data> result;
    while (!file.empty()) {
        uint64_t head[3];
        if (file.size() < sizeof head) return std::nullopt;
        memcpy(head, file.data(), sizeof head);
        file.remove_prefix(sizeof head);
        if (head[1] > file.size() || head[2] > file.size() - head[1]) return std::nullopt;
        result.push_back(
            {head[0], std::string(file.substr(0, head[1])), std::string(file.substr(head[1], head[2]))});
        file.remove_prefix(head[1] + head[2]);
    }
    return result;
}

// Replaces the data of a set. Returns whether that succeeded.
bool replace_contents(amd_comgr_data_set_t set, const std::vector<Data> &result) {
    for (const amd_comgr_data_kind_t kind : kKinds)
        if (amd_comgr_data_set_remove(set, kind) != AMD_COMGR_STATUS_SUCCESS) return false;
    for (const Data &one : result) {
        amd_comgr_data_t data;
        if (amd_comgr_create_data(static_cast<amd_comgr_data_kind_t>(one.kind), &data) !=
            AMD_COMGR_STATUS_SUCCESS)
            return false;
        // AMD's library makes empty logs, but no function of it does. HIP reads a log up to the first NUL.
        const std::string_view bytes = one.bytes.empty() ? std::string_view("", 1) : one.bytes;
        const bool added = amd_comgr_set_data(data, bytes.size(), bytes.data()) == AMD_COMGR_STATUS_SUCCESS &&
                           amd_comgr_set_data_name(data, one.name.c_str()) == AMD_COMGR_STATUS_SUCCESS &&
                           amd_comgr_data_set_add(set, data) == AMD_COMGR_STATUS_SUCCESS;
        amd_comgr_release_data(data);
        if (!added) return false;
    }
    return true;
}

// Returns whether the cache has room for another file. Programs that compile many slightly different kernels would fill it.
bool has_room() {
    std::error_code error;
    size_t files = 0;
    for (std::filesystem::directory_iterator file(embedded::cached_path(""), error), end;
         !error && file != end; file.increment(error))
        if (++files >= kMostFiles) return false;
    return !error;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) amd_comgr_status_t
amd_comgr_do_action(amd_comgr_action_kind_t kind, amd_comgr_action_info_t info, amd_comgr_data_set_t input,
                    amd_comgr_data_set_t result) {
    static const auto amds =
        reinterpret_cast<decltype(&amd_comgr_do_action)>(dlsym(RTLD_NEXT, "amd_comgr_do_action"));
    if (amds == nullptr) return AMD_COMGR_STATUS_ERROR;
    const std::string name = key(kind, info, input);
    if (name.empty()) return amds(kind, info, input, result);
    if (const std::optional<std::string> file = embedded::read_cached(name))
        if (const std::optional<std::vector<Data>> kept = unpacked(*file);
            kept && replace_contents(result, *kept))
            return AMD_COMGR_STATUS_SUCCESS;
    const amd_comgr_status_t status = amds(kind, info, input, result);
    if (status == AMD_COMGR_STATUS_SUCCESS && has_room())
        if (const std::optional<std::vector<Data>> made = contents(result))
            embedded::write_cached(name, packed(*made));
    return status;
}
