#include "log/other_profilers.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

extern char **environ;

namespace gpubpf {

namespace {

// Variables that Nsight Systems, Nsight Compute and users of CUPTI and NVTX set for the program.
constexpr const char *kProfilers[] = {"NSYS_",   "NV_NSIGHT_", "NV_COMPUTE_PROFILER",
                                      "NV_TPS_", "CUPTI_",     "NVTX_INJECTION",
                                      "ROCP_",   "LD_AUDIT="};
// The variables among these that are set if a profiler runs, and the names of its libraries.
constexpr const char *kProfiling[] = {"NSYS_", "NV_NSIGHT_", "NV_COMPUTE_PROFILER", "NV_TPS_"};
constexpr const char *kLibraries[] = {"libsanitizer-collection", "libTreeLauncher", "libInterceptorInjection",
                                      "libToolsInjection", "libcuda-injection"};
constexpr const char *kDriver[] = {"libcuda.so", "libnvidia-"};
// dlopen() needs the name of the library. A static CUPTI contains names of errors.
constexpr std::string_view kMentions[] = {"cupti", "CUPTI_"};

bool begins(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// Whether a variable is the one with which the tool makes the program's NVTX load this agent (log/nvtx.cpp).
bool is_own_nvtx(const char *variable) {
    constexpr std::string_view kName = "NVTX_INJECTION64_PATH=";
    Dl_info own{};
    return begins(variable, kName.data()) && dladdr(reinterpret_cast<void *>(&cupti_is_free), &own) &&
           own.dli_fname && variable + kName.size() == std::string_view(own.dli_fname);
}

bool is_driver(const std::string &name) {
    return std::any_of(std::begin(kDriver), std::end(kDriver),
                       [&](const char *prefix) { return begins(name.c_str(), prefix); });
}

struct Object {  // a loaded executable or library
    std::string path, name, soname;
    std::vector<std::string> needs;
    bool agents = false;
    bool expected = false;  // it came with the program, the driver or the agent
};

Object describe(const dl_phdr_info &info, bool first) {
    Object made;
    made.path = first ? "/proc/self/exe" : info.dlpi_name;
    made.name = file_name(info.dlpi_name);
    const auto own = reinterpret_cast<uintptr_t>(&cupti_is_free);
    const ElfW(Dyn) *dynamic = nullptr;
    for (int i = 0; i < info.dlpi_phnum; ++i) {
        const ElfW(Phdr) &part = info.dlpi_phdr[i];
        const uintptr_t begin = info.dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn) *>(begin);
        if (part.p_type == PT_LOAD && own - begin < part.p_memsz) made.agents = true;
    }
    made.expected = first || made.agents || is_driver(made.name);
    uintptr_t strings = 0;
    for (auto *d = dynamic; d && d->d_tag != DT_NULL; ++d)
        if (d->d_tag == DT_STRTAB) strings = d->d_un.d_ptr;
    if (!strings) return made;
    if (strings < info.dlpi_addr) strings += info.dlpi_addr;  // the loader did not relocate it
    auto text = [&](const ElfW(Dyn) &d) { return reinterpret_cast<const char *>(strings + d.d_un.d_val); };
    for (auto *d = dynamic; d->d_tag != DT_NULL; ++d) {
        if (d->d_tag == DT_NEEDED) made.needs.push_back(file_name(text(*d)));
        if (d->d_tag == DT_SONAME) made.soname = text(*d);
    }
    return made;
}

std::vector<Object> loaded_objects() {
    std::vector<Object> found;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
            auto &all = *static_cast<std::vector<Object> *>(to);
            if (!strstr(info->dlpi_name, "linux-vdso")) all.push_back(describe(*info, all.empty()));
            return 0;
        },
        &found);
    return found;
}

// Marks the objects that the expected ones need.
void follow_needs(std::vector<Object> &objects) {
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < objects.size(); ++i)
            for (size_t n = 0; objects[i].expected && n < objects[i].needs.size(); ++n)
                for (Object &other : objects)
                    if (!other.expected &&
                        (other.name == objects[i].needs[n] || other.soname == objects[i].needs[n]))
                        other.expected = more = true;
    }
}

class File {
  public:
    explicit File(const char *path) : fd_(open(path, O_RDONLY | O_CLOEXEC)) {}
    ~File() {
        if (fd_ >= 0) close(fd_);
    }
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    bool read(void *to, size_t size, uint64_t at) const {
        return pread(fd_, to, size, static_cast<off_t>(at)) == static_cast<ssize_t>(size);
    }
    uint64_t size() const {
        struct stat about{};
        return fd_ >= 0 && fstat(fd_, &about) == 0 ? static_cast<uint64_t>(about.st_size) : 0;
    }
    bool mentions_cupti(uint64_t at, uint64_t size) const {
        constexpr size_t kPart = 1 << 20, kOverlap = 8;
        std::vector<char> bytes(std::min<uint64_t>(size, kPart));
        for (uint64_t done = 0; done < size; done += kPart - kOverlap) {
            const size_t some = std::min<uint64_t>(size - done, kPart);
            if (!read(bytes.data(), some, at + done)) return true;
            for (std::string_view word : kMentions)
                if (memmem(bytes.data(), some, word.data(), word.size())) return true;
            if (some < kPart) break;
        }
        return false;
    }

  private:
    int fd_;
};

// Returns whether the code or data of a file mentions CUPTI, or cannot be read. Device code is skipped: some
// libraries have hundreds of megabytes of it.
bool mentions_cupti(const std::string &path) {
    const File file(path.c_str());
    const uint64_t size = file.size();
    ElfW(Ehdr) header{};
    if (!size || !file.read(&header, sizeof header, 0)) return true;
    std::vector<ElfW(Shdr)> sections(header.e_shnum);
    std::string names;
    bool known = !sections.empty() && header.e_shentsize == sizeof(ElfW(Shdr)) &&
                 header.e_shstrndx < sections.size() &&
                 file.read(sections.data(), sections.size() * sizeof(ElfW(Shdr)), header.e_shoff) &&
                 sections[header.e_shstrndx].sh_size < size;
    if (known) {
        names.resize(sections[header.e_shstrndx].sh_size);
        known = file.read(names.data(), names.size(), sections[header.e_shstrndx].sh_offset);
    }
    if (!known) return file.mentions_cupti(0, size);
    return std::any_of(sections.begin(), sections.end(), [&](const ElfW(Shdr) &section) {
        if (section.sh_type == SHT_NOBITS || !(section.sh_flags & SHF_ALLOC)) return false;
        const char *name = section.sh_name < names.size() ? names.c_str() + section.sh_name : "";
        if (begins(name, ".nv") || begins(name, "__nv")) return false;
        return file.mentions_cupti(section.sh_offset, section.sh_size);
    });
}

}  // namespace

bool cupti_is_free() {
    for (char **variable = environ; variable && *variable; ++variable)
        for (const char *prefix : kProfilers)
            if (begins(*variable, prefix) && !is_own_nvtx(*variable)) return false;
    std::vector<Object> objects = loaded_objects();
    follow_needs(objects);
    return std::none_of(objects.begin(), objects.end(), [](const Object &object) {
        return !object.expected || begins(object.name.c_str(), "libcupti") ||
               (!object.agents && !is_driver(object.name) && mentions_cupti(object.path));
    });
}

std::string other_profiler() {
    for (char **variable = environ; variable && *variable; ++variable)
        for (const char *prefix : kProfiling)
            if (begins(*variable, prefix)) return std::string(*variable, strcspn(*variable, "="));
    for (const Object &object : loaded_objects())
        for (const char *prefix : kLibraries)
            if (begins(object.name.c_str(), prefix)) return object.name;
    return "";
}

bool is_drivers(const void *address, const void *cupti) {
    Dl_info at{}, other{};
    if (!dladdr(address, &at) || !at.dli_fname) return false;
    for (const void *ours : {reinterpret_cast<const void *>(&cupti_is_free), cupti})
        if (dladdr(ours, &other) && other.dli_fbase == at.dli_fbase) return true;
    return is_driver(file_name(at.dli_fname));
}

}  // namespace gpubpf
