#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include "thunk/clock.h"
#include "thunk/hip_calls.h"

namespace hipsim {
namespace {

constexpr uint64_t kLaunch = 1000;  // ns of a call that launches

// What the calling thread does in a call of HIP.
struct Current {
    bool launches_graph = false;
    bool submitted = false;
};
thread_local Current current;

// While it exists, the calling thread is in a call of HIP. Calls do not nest: those of HIP itself come from within its library.
class InCall {
  public:
    explicit InCall(bool launches_graph) { current = {.launches_graph = launches_graph}; }
    ~InCall() { current = {}; }
    InCall(const InCall &) = delete;
    InCall &operator=(const InCall &) = delete;
};

using Launch = int (*)(void *graph, void *stream);
using Copy = int (*)(void *to, const void *from, size_t bytes, int kind);
using CopyIn = int (*)(void *to, const void *from, size_t bytes, int kind, void *stream);

// HIP's own function by its place in kReplaced.
void *originals[7];

template <size_t kIndex>
int launch_graph(void *graph, void *stream) {
    InCall here(true);
    return reinterpret_cast<Launch>(originals[kIndex])(graph, stream);
}

// The CPU has made the copy if HIP has submitted nothing.
template <size_t kIndex, class Function, class... Arguments>
int copy(void *to, const void *from, size_t bytes, Arguments... arguments) {
    InCall here(false);
    const int result = reinterpret_cast<Function>(originals[kIndex])(to, from, bytes, arguments...);
    if (result == 0 && !current.submitted) advance_host(host_time() + copy_ns(bytes));
    return result;
}

struct Replaced {
    const char *name;
    void *function;
};
template <class Function>
void *address(Function *function) {
    return reinterpret_cast<void *>(function);
}
const Replaced kReplaced[] = {
    {"hipGraphLaunch", address(launch_graph<0>)},
    {"hipGraphLaunch_spt", address(launch_graph<1>)},
    {"hipMemcpy", address(copy<2, Copy, int>)},
    {"hipMemcpy_spt", address(copy<3, Copy, int>)},
    {"hipMemcpyAsync", address(copy<4, CopyIn, int, void *>)},
    {"hipMemcpyAsync_spt", address(copy<5, CopyIn, int, void *>)},
    {"hipMemcpyWithStream", address(copy<6, CopyIn, int, void *>)},
};
static_assert(std::size(kReplaced) == std::size(originals));

bool is_hip(const char *path) {
    const char *name = strrchr(path, '/');
    return strncmp(name == nullptr ? path : name + 1, "libamdhip64.so", 14) == 0;
}

// Writes to a slot of an object that the dynamic linker may have made read-only.
void write_slot(void **slot, void *value, const dl_phdr_info &object) {
    const auto at = reinterpret_cast<uintptr_t>(slot);
    const auto page = static_cast<uintptr_t>(getpagesize());
    bool read_only = false;
    for (size_t i = 0; i < object.dlpi_phnum; i++) {
        const auto &part = object.dlpi_phdr[i];
        const uintptr_t begin = object.dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_GNU_RELRO && at >= begin && at < begin + part.p_memsz) read_only = true;
    }
    void *begin = reinterpret_cast<void *>(at / page * page);
    if (read_only && mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return;
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    if (read_only) mprotect(begin, page, PROT_READ);
}

// Replaces the functions in the slots through which an object calls them.
int replace_in(dl_phdr_info *object, size_t, void *) {
    if (is_hip(object->dlpi_name)) return 0;
    const ElfW(Dyn) *dynamic = nullptr;
    for (size_t i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = reinterpret_cast<const ElfW(Dyn) *>(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    const ElfW(Sym) *symbols = nullptr;
    const char *strings = nullptr;
    std::pair<const ElfW(Rela) *, size_t> tables[2]{};  // with their sizes in bytes
    for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; dynamic++) {
        const uint64_t value = dynamic->d_un.d_val;
        switch (dynamic->d_tag) {
            case DT_SYMTAB: symbols = reinterpret_cast<const ElfW(Sym) *>(value); break;
            case DT_STRTAB: strings = reinterpret_cast<const char *>(value); break;
            case DT_JMPREL: tables[0].first = reinterpret_cast<const ElfW(Rela) *>(value); break;
            case DT_PLTRELSZ: tables[0].second = value; break;
            case DT_RELA: tables[1].first = reinterpret_cast<const ElfW(Rela) *>(value); break;
            case DT_RELASZ: tables[1].second = value; break;
        }
    }
    // The dynamic linker has added the object's address to these pointers, except in the kernel's vDSO.
    if (reinterpret_cast<uint64_t>(symbols) < object->dlpi_addr || strings == nullptr) return 0;
    for (const auto &[table, bytes] : tables) {
        for (size_t i = 0; table != nullptr && i < bytes / sizeof *table; i++) {
            const uint64_t type = ELF64_R_TYPE(table[i].r_info);
            if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
            const char *name = strings + symbols[ELF64_R_SYM(table[i].r_info)].st_name;
            for (size_t k = 0; k < std::size(kReplaced); k++)
                if (originals[k] != nullptr && strcmp(name, kReplaced[k].name) == 0)
                    write_slot(reinterpret_cast<void **>(object->dlpi_addr + table[i].r_offset),
                               kReplaced[k].function, *object);
        }
    }
    return 0;
}

}  // namespace

void watch_hip_calls() {
    std::string path;
    dl_iterate_phdr(
        [](dl_phdr_info *object, size_t, void *to) {
            if (is_hip(object->dlpi_name)) *static_cast<std::string *>(to) = object->dlpi_name;
            return 0;
        },
        &path);
    void *library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) return;
    for (size_t k = 0; k < std::size(kReplaced); k++) originals[k] = dlsym(library, kReplaced[k].name);
    dl_iterate_phdr(replace_in, nullptr);
}

void begin_submission(bool launches_kernel) {
    if (untimed()) return;
    if (current.launches_graph ? !current.submitted : launches_kernel) advance_host(host_time() + kLaunch);
    current.submitted = true;
}

}  // namespace hipsim
