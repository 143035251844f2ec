#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <elf.h>

#include "engine/engine.h"
#include "thunk/code_object.h"
#include "thunk/heap.h"

namespace hipsim {
namespace {

constexpr uint64_t kDescriptorBytes = 64;
constexpr uint64_t kEntryOffset = 16;  // in the descriptor: where the code begins, relative to the descriptor

// The allocation that holds a loaded code object. Every access is checked: the program may have written into it.
struct Image {
    uint64_t begin = 0, end = 0;

    template <typename T>
    bool read(uint64_t address, T *value) const {
        if (address < begin || address > end || end - address < sizeof(T)) return false;
        memcpy(value, host(address), sizeof(T));
        return true;
    }
    bool text(uint64_t address, std::string *value) const {
        if (address < begin || address >= end) return false;
        const char *start = reinterpret_cast<const char *>(host(address));
        size_t length = strnlen(start, end - address);
        value->assign(start, length);
        return length < end - address;
    }
};

Image image_around(uint64_t address) {
    HsaPointerInfo info{};
    if (heap().describe(reinterpret_cast<const void *>(address), &info) != HSAKMT_STATUS_SUCCESS) return {};
    return {info.GPUAddress, info.GPUAddress + info.SizeInBytes};
}

struct Symbols {
    uint64_t table = 0, strings = 0, count = 0;
};

bool find_symbols(const Image &image, Symbols *symbols) {
    Elf64_Ehdr header;
    if (!image.read(image.begin, &header) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return false;
    uint64_t hash = 0;
    for (unsigned i = 0; i < header.e_phnum; i++) {
        Elf64_Phdr segment;
        if (!image.read(image.begin + header.e_phoff + uint64_t{i} * sizeof(segment), &segment)) return false;
        if (segment.p_type != PT_DYNAMIC) continue;
        Elf64_Dyn entry;
        for (uint64_t at = image.begin + segment.p_vaddr; image.read(at, &entry) && entry.d_tag != DT_NULL;
             at += sizeof(entry)) {
            if (entry.d_tag == DT_SYMTAB) symbols->table = image.begin + entry.d_un.d_ptr;
            if (entry.d_tag == DT_STRTAB) symbols->strings = image.begin + entry.d_un.d_ptr;
            if (entry.d_tag == DT_HASH) hash = image.begin + entry.d_un.d_ptr;
        }
    }
    Elf32_Word counts[2];  // buckets, symbols
    if (hash == 0 || !image.read(hash, &counts)) return false;
    symbols->count = counts[1];
    return symbols->table != 0 && symbols->strings != 0;
}

std::string symbol_at(uint64_t address) {
    Image image = image_around(address);
    Symbols symbols;
    std::string name;
    if (!find_symbols(image, &symbols)) return name;
    for (uint64_t i = 0; i < symbols.count; i++) {
        Elf64_Sym symbol;
        if (!image.read(symbols.table + i * sizeof(symbol), &symbol)) return {};
        if (image.begin + symbol.st_value == address && symbol.st_shndx != SHN_UNDEF &&
            image.text(symbols.strings + symbol.st_name, &name) && !name.empty())
            return name;
    }
    return {};
}

}  // namespace

std::string kernel_name(uint64_t kernel_object) {
    std::string name = symbol_at(kernel_object);
    if (name.empty()) {
        char text[40];
        snprintf(text, sizeof(text), "at 0x%" PRIx64, kernel_object);
        return text;
    }
    if (name.ends_with(".kd")) name.resize(name.size() - 3);
    int status = 0;
    char *demangled = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    if (demangled != nullptr) name = demangled;
    free(demangled);
    return name;
}

uint64_t kernel_entry(uint64_t kernel_object) {
    int64_t offset = 0;
    Image image = image_around(kernel_object);
    if (!image.read(kernel_object + kEntryOffset, &offset)) return 0;
    static_assert(kEntryOffset + sizeof(offset) <= kDescriptorBytes);
    return kernel_object + static_cast<uint64_t>(offset);
}

}  // namespace hipsim
