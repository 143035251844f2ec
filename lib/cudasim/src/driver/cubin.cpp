#include "driver/cubin.h"

#include <dirent.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "driver/compiled_ptx.h"

namespace cudasim {
namespace {

constexpr size_t kMaxSize = size_t{1} << 31;
constexpr uint16_t kMachine = 190;                  // EM_CUDA
constexpr char kLinkedPtx[] = ".cudasim.ptx";       // section that make_cubin writes
constexpr char kDebugPtx[] = ".nv_debug_ptx_txt";   // section that ptxas writes; its lines end with NUL
constexpr char kHiddenPtx[] = ".cudasim_ptx_text";  // its name where tools must not find it (cudasim/hide.py)
constexpr unsigned char kAbiVersion = 8, kOsAbi = 0x41;    // as ptxas 13 writes them
constexpr uint8_t kSizedValue = 4, kRegisterCount = 0x2f;  // EIFMT_SVAL, EIATTR_REGCOUNT
constexpr unsigned char kCudaEntry = 0x10;                 // STO_CUDA_ENTRY

Elf64_Ehdr header(const uint8_t *image) {
    Elf64_Ehdr found;
    memcpy(&found, image, sizeof found);
    return found;
}

Elf64_Shdr section(const uint8_t *image, const Elf64_Ehdr &elf, size_t index) {
    Elf64_Shdr found;
    memcpy(&found, image + elf.e_shoff + index * sizeof found, sizeof found);
    return found;
}

// Returns whether a section's bytes are in the file. cubin_size() has checked the extent of such a section.
bool has_contents(const Elf64_Shdr &section) {
    return section.sh_type != SHT_NOBITS && section.sh_type != SHT_NULL;
}

// Returns a name in a string table; empty if the table does not contain it.
std::string_view name_at(const uint8_t *image, const Elf64_Shdr &names, uint64_t offset) {
    if (!has_contents(names) || offset >= names.sh_size) return {};
    const char *begin = reinterpret_cast<const char *>(image) + names.sh_offset + offset;
    return {begin, strnlen(begin, names.sh_size - offset)};
}

// Calls `use` with the name and header of each section in the file.
template <class Use>
void for_each_section(const uint8_t *image, const Use &use) {
    const Elf64_Ehdr elf = header(image);
    if (elf.e_shstrndx >= elf.e_shnum) return;
    const Elf64_Shdr names = section(image, elf, elf.e_shstrndx);
    for (size_t i = 0; i < elf.e_shnum; i++)
        if (const Elf64_Shdr found = section(image, elf, i); has_contents(found))
            use(name_at(image, names, found.sh_name), found);
}

// Returns the contents of the sections NAME and NAME.N of a cubin.
std::vector<std::string> section_contents(const uint8_t *image, std::string_view name) {
    std::vector<std::string> texts;
    for_each_section(image, [&](std::string_view title, const Elf64_Shdr &found) {
        if (title.substr(0, name.size()) == name &&
            (title.size() == name.size() || title[name.size()] == '.'))
            texts.emplace_back(reinterpret_cast<const char *>(image) + found.sh_offset, found.sh_size);
    });
    return texts;
}

bool is_ptx(const std::string &text) {
    return text.find(".version ") != std::string::npos && text.find(".target ") != std::string::npos;
}

bool read_file(const std::string &path, std::string &text) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return false;
    struct stat status = {};
    bool good =
        fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && static_cast<size_t>(status.st_size) < kMaxSize;
    if (good) {
        text.resize(static_cast<size_t>(status.st_size));
        good = pread(fd, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
    }
    close(fd);
    return good;
}

std::string triton_cache() {
    if (const char *chosen = getenv("TRITON_CACHE_DIR"); chosen != nullptr && *chosen != '\0') return chosen;
    for (const char *name : {"TRITON_HOME", "HOME"})
        if (const char *home = getenv(name); home != nullptr && *home != '\0')
            return std::string(home) + "/.triton/cache";
    return {};
}

// Finds the PTX of a cubin in Triton's cache, where each kernel has a directory with NAME.cubin, NAME.ptx and more.
bool find_in_triton_cache(const uint8_t *image, size_t size, std::string &text) {
    const std::string cache = triton_cache();
    DIR *cache_entries = cache.empty() ? nullptr : opendir(cache.c_str());
    if (cache_entries == nullptr) return false;
    bool found = false;
    while (const dirent *entry = found ? nullptr : readdir(cache_entries)) {
        const std::string directory = cache + "/" + entry->d_name;
        DIR *files = entry->d_name[0] == '.' ? nullptr : opendir(directory.c_str());
        if (files == nullptr) continue;
        while (const dirent *file = found ? nullptr : readdir(files)) {
            const std::string path = directory + "/" + file->d_name;
            const size_t stem = path.size() - std::min(path.size(), strlen(".cubin"));
            struct stat status = {};
            std::string kept;
            found = path.compare(stem, std::string::npos, ".cubin") == 0 &&
                    stat(path.c_str(), &status) == 0 && static_cast<size_t>(status.st_size) == size &&
                    read_file(path, kept) && kept.size() == size && memcmp(kept.data(), image, size) == 0 &&
                    read_file(path.substr(0, stem) + ".ptx", text) && is_ptx(text);
        }
        closedir(files);
    }
    closedir(cache_entries);
    return found;
}

}  // namespace

bool is_readable(const uint8_t *address, uint64_t size) {
    constexpr uintptr_t kPage = 4096;
    constexpr size_t kPages = 512;  // of a call
    const auto first = reinterpret_cast<uintptr_t>(address), end = first + size;
    if (end < first) return false;
    uint8_t bytes[kPages];
    iovec places[kPages];
    for (uintptr_t at = first; at < end;) {  // a byte of each page
        size_t count = 0;
        for (; at < end && count < kPages; at = (at & ~(kPage - 1)) + kPage)
            places[count++] = {reinterpret_cast<void *>(at), 1};
        const iovec room{bytes, count};
        if (process_vm_readv(getpid(), &room, 1, places, count, 0) == static_cast<ssize_t>(count)) continue;
        if (errno != ENOSYS) return false;
        // Emulators of a processor (qemu-user) lack the call: write the bytes instead.
        const int file = memfd_create("cudasim-readable", MFD_CLOEXEC);
        const bool good =
            file >= 0 && pwritev(file, places, static_cast<int>(count), 0) == static_cast<ssize_t>(count);
        if (file >= 0) close(file);
        if (!good) return false;
    }
    return true;
}

size_t cubin_size(const void *image, size_t limit) {
    const auto *bytes = static_cast<const uint8_t *>(image);
    if (limit < sizeof(Elf64_Ehdr) || !is_readable(bytes, sizeof(Elf64_Ehdr))) return 0;
    const Elf64_Ehdr elf = header(bytes);
    if (elf.e_machine != kMachine || elf.e_ident[EI_CLASS] != ELFCLASS64) return 0;
    if (elf.e_shnum != 0 && (elf.e_shentsize != sizeof(Elf64_Shdr) || elf.e_shoff > kMaxSize)) return 0;
    if (elf.e_phnum != 0 && (elf.e_phentsize != sizeof(Elf64_Phdr) || elf.e_phoff > kMaxSize)) return 0;
    uint64_t end = sizeof elf;
    if (elf.e_shnum != 0) end = std::max<uint64_t>(end, elf.e_shoff + elf.e_shnum * sizeof(Elf64_Shdr));
    if (elf.e_phnum != 0) end = std::max<uint64_t>(end, elf.e_phoff + elf.e_phnum * sizeof(Elf64_Phdr));
    if (end > limit || !is_readable(bytes, end)) return 0;
    for (size_t i = 0; i < elf.e_shnum; i++) {
        const Elf64_Shdr found = section(bytes, elf, i);
        if (found.sh_type == SHT_NOBITS || found.sh_type == SHT_NULL) continue;
        if (found.sh_offset > kMaxSize || found.sh_size > kMaxSize) return 0;
        end = std::max(end, found.sh_offset + found.sh_size);
    }
    return end <= limit && is_readable(bytes, end) ? end : 0;
}

unsigned cubin_sm(const void *image) {
    const Elf64_Ehdr elf = header(static_cast<const uint8_t *>(image));
    return elf.e_ident[EI_ABIVERSION] >= kAbiVersion ? elf.e_flags >> 8 & 0xff : elf.e_flags & 0xff;
}

std::vector<std::string> cubin_ptx(const void *image, size_t size) {
    const auto *bytes = static_cast<const uint8_t *>(image);
    std::vector<std::string> texts = section_contents(bytes, kLinkedPtx);
    if (!texts.empty()) return texts;
    texts = section_contents(bytes, kDebugPtx);
    if (texts.empty()) texts = section_contents(bytes, kHiddenPtx);
    for (std::string &text : texts) std::replace(text.begin(), text.end(), '\0', '\n');
    if (!texts.empty() && std::all_of(texts.begin(), texts.end(), is_ptx)) return texts;
    if (texts = compiled_ptx(image, size); !texts.empty()) return texts;
    texts.assign(1, {});
    if (!find_in_triton_cache(bytes, size, texts[0])) texts.clear();
    return texts;
}

// An entry of .nv.info is a u8 format, a u8 attribute and a u16: the value, or with kSizedValue the size of the value that
// follows. The value of kRegisterCount is a u32 symbol and a u32 count.
std::map<std::string, unsigned> cubin_registers(const void *image, size_t size) {
    std::map<std::string, unsigned> registers;
    const auto *bytes = static_cast<const uint8_t *>(image);
    const Elf64_Ehdr elf = header(bytes);
    Elf64_Shdr info = {}, symbols = {};
    for_each_section(bytes, [&](std::string_view title, const Elf64_Shdr &found) {
        if (found.sh_type == SHT_SYMTAB) symbols = found;
        else if (title == ".nv.info") info = found;
    });
    if (symbols.sh_link >= elf.e_shnum || info.sh_size > size) return registers;
    const Elf64_Shdr names = section(bytes, elf, symbols.sh_link);
    const uint8_t *entries = bytes + info.sh_offset;
    for (uint64_t at = 0; at + 4 <= info.sh_size;) {
        const uint8_t format = entries[at], attribute = entries[at + 1];
        uint16_t length;
        memcpy(&length, entries + at + 2, sizeof length);
        at += 4;
        if (format != kSizedValue) continue;
        if (length > info.sh_size - at) break;
        uint32_t value[2];  // symbol, count
        if (attribute == kRegisterCount && length >= sizeof value) {
            memcpy(value, entries + at, sizeof value);
            Elf64_Sym symbol;
            if (value[0] < symbols.sh_size / sizeof symbol && value[1] != 0 && value[1] <= 255) {
                memcpy(&symbol, bytes + symbols.sh_offset + value[0] * sizeof symbol, sizeof symbol);
                registers.emplace(name_at(bytes, names, symbol.st_name), value[1]);
            }
        }
        at += length;
    }
    return registers;
}

std::string make_cubin(const std::string &ptx, const std::vector<std::string> &kernels, unsigned sm) {
    std::string names(1, '\0'), data(sizeof(Elf64_Ehdr), '\0');
    std::vector<Elf64_Shdr> sections(1);
    auto name = [&](const std::string &text) {
        const size_t at = names.size();
        names.append(text).push_back('\0');
        return static_cast<Elf64_Word>(at);
    };
    auto add = [&](const std::string &title, Elf64_Word type, const void *from, size_t size) {
        data.resize((data.size() + 15) / 16 * 16);
        Elf64_Shdr made = {};
        made.sh_name = name(title);
        made.sh_type = type;
        made.sh_offset = data.size();
        made.sh_size = size;
        made.sh_addralign = 16;
        sections.push_back(made);
        data.append(static_cast<const char *>(from), size);
    };
    add(kLinkedPtx, SHT_PROGBITS, ptx.data(), ptx.size());
    std::vector<Elf64_Sym> symbols(1);
    for (const std::string &kernel : kernels) {
        const char code[16] = {};
        add(".text." + kernel, SHT_PROGBITS, code, sizeof code);
        sections.back().sh_flags = SHF_ALLOC | SHF_EXECINSTR;
        Elf64_Sym symbol = {};
        symbol.st_name = name(kernel);
        symbol.st_info = ELF64_ST_INFO(STB_GLOBAL, STT_FUNC);
        symbol.st_other = kCudaEntry;
        symbol.st_shndx = static_cast<Elf64_Section>(sections.size() - 1);
        symbol.st_size = sizeof code;
        symbols.push_back(symbol);
    }
    add(".symtab", SHT_SYMTAB, symbols.data(), symbols.size() * sizeof(Elf64_Sym));
    sections.back().sh_link = static_cast<Elf64_Word>(sections.size());
    sections.back().sh_info = 1;
    sections.back().sh_entsize = sizeof(Elf64_Sym);
    const Elf64_Word last = name(".strtab");
    data.resize((data.size() + 15) / 16 * 16);
    Elf64_Shdr strings = {};
    strings.sh_name = last;
    strings.sh_type = SHT_STRTAB;
    strings.sh_offset = data.size();
    strings.sh_size = names.size();
    strings.sh_addralign = 1;
    sections.push_back(strings);
    data += names;
    data.resize((data.size() + 15) / 16 * 16);

    Elf64_Ehdr elf = {};
    memcpy(elf.e_ident, ELFMAG, SELFMAG);
    elf.e_ident[EI_CLASS] = ELFCLASS64;
    elf.e_ident[EI_DATA] = ELFDATA2LSB;
    elf.e_ident[EI_VERSION] = EV_CURRENT;
    elf.e_ident[EI_OSABI] = kOsAbi;
    elf.e_ident[EI_ABIVERSION] = kAbiVersion;
    elf.e_type = ET_EXEC;
    elf.e_machine = kMachine;
    elf.e_version = EV_CURRENT;
    elf.e_flags = sm << 8 | 4;
    elf.e_ehsize = sizeof elf;
    elf.e_shoff = data.size();
    elf.e_shentsize = sizeof(Elf64_Shdr);
    elf.e_shnum = static_cast<Elf64_Half>(sections.size());
    elf.e_shstrndx = static_cast<Elf64_Half>(sections.size() - 1);
    data.append(reinterpret_cast<const char *>(sections.data()), sections.size() * sizeof(Elf64_Shdr));
    memcpy(data.data(), &elf, sizeof elf);
    return data;
}

}  // namespace cudasim
