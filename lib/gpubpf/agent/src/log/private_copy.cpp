#include "log/private_copy.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "wire.h"

namespace gpubpf {

namespace {

constexpr size_t kLargest = 256 << 20;
constexpr char kPrefix[] = "lib", kOwn[] = "own";

template <typename T>
bool get(const std::vector<char> &bytes, uint64_t at, T &value) {
    if (at > bytes.size() || bytes.size() - at < sizeof value) return false;
    memcpy(&value, bytes.data() + at, sizeof value);
    return true;
}

std::vector<char> read_file(const char *path) {
    std::vector<char> bytes;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat about{};
    if (file >= 0 && fstat(file, &about) == 0 && S_ISREG(about.st_mode) &&
        static_cast<uint64_t>(about.st_size) <= kLargest)
        bytes.resize(static_cast<size_t>(about.st_size));
    size_t done = 0;
    for (ssize_t some = 1; some > 0 && done < bytes.size(); done += some > 0 ? static_cast<size_t>(some) : 0)
        some = read(file, bytes.data() + done, bytes.size() - done);
    if (file >= 0) close(file);
    bytes.resize(done);
    return bytes;
}

}  // namespace

bool rename_library(std::vector<char> &bytes) noexcept {
    ElfW(Ehdr) header{};
    if (!get(bytes, 0, header) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(ElfW(Phdr)))
        return false;
    ElfW(Phdr) dynamic{}, part{};
    auto part_at = [&](uint32_t n) { return get(bytes, header.e_phoff + n * sizeof part, part); };
    for (uint32_t n = 0; n < header.e_phnum && part_at(n); ++n)
        if (part.p_type == PT_DYNAMIC) dynamic = part;
    uint64_t strings = 0, name = 0, size = 0;
    ElfW(Dyn) entry{};
    for (uint64_t at = 0; at + sizeof entry <= dynamic.p_filesz; at += sizeof entry) {
        if (!get(bytes, dynamic.p_offset + at, entry) || entry.d_tag == DT_NULL) break;
        if (entry.d_tag == DT_STRTAB) strings = entry.d_un.d_ptr;
        if (entry.d_tag == DT_STRSZ) size = entry.d_un.d_val;
        if (entry.d_tag == DT_SONAME) name = entry.d_un.d_val;
    }
    if (!strings || !name || name >= size) return false;
    for (uint32_t n = 0; n < header.e_phnum && part_at(n); ++n) {
        if (part.p_type != PT_LOAD || strings < part.p_vaddr || strings - part.p_vaddr >= part.p_filesz)
            continue;
        const uint64_t at = part.p_offset + (strings - part.p_vaddr) + name;
        char begin[sizeof kPrefix - 1];
        if (!get(bytes, at, begin) || memcmp(begin, kPrefix, sizeof begin) != 0) return false;
        memcpy(bytes.data() + at, kOwn, sizeof begin);
        return true;
    }
    return false;
}

void *load_private_copy(const std::string &path) {
    std::vector<char> bytes = read_file(path.c_str());
    if (!rename_library(bytes)) return nullptr;
    const char *slash = strrchr(path.c_str(), '/');
    const int file = memory_file(slash ? slash + 1 : path.c_str(), 0);
    if (file < 0) return nullptr;
    void *library = nullptr;
    // dlopen returns a library already loaded from the same path. So each path encodes the bits of another number. A second agent in
    // this process starts at another number.
    static std::atomic<uint64_t> copies{reinterpret_cast<uint64_t>(&copies) << 16};
    std::string name = "/proc/self/fd/";
    for (uint64_t n = ++copies; n != 0; n >>= 1) name += n & 1 ? "./" : "/";
    name += std::to_string(file);
    if (write_all(file, bytes.data(), bytes.size(), 0)) library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    close(file);
    return library;
}

}  // namespace gpubpf
