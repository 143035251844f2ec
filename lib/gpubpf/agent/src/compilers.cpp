#include "compilers.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "machine/code.h"

namespace gpubpf {

namespace {

enum Function : size_t { kGetCubin, kCreate, kAddData, kAddFile, kGetLinked, kDestroy, kFunctions };
constexpr size_t kLibraries = 16;  // hooked at the same time; further ones are not seen
constexpr size_t kMostLinks = 256;
constexpr size_t kMostLto = 64u << 20;  // bytes of LTO-IR to keep for a link
constexpr int kFirstMajor = 12, kLastMajor = 19,
              kLastMinor = 9;  // versions in the names of nvJitLink's functions

// nvJitLinkInputType
enum InputType { kCubin = 1, kPtx = 2, kLtoIr = 3, kAny = 10 };
constexpr uint32_t kLtoMagic = 0x7F4E43ED;

// nvrtcProgram and nvJitLinkHandle are pointers; 0 means success for both libraries.
using GetSize = int (*)(void *, size_t *);
using GetBytes = int (*)(void *, void *);
using Create = int (*)(void **, uint32_t, const char **);
using AddData = int (*)(void *, int, const void *, size_t, const char *);
using AddFile = int (*)(void *, int, const char *);
using Destroy = int (*)(void **);
using Complete = int (*)(void *);

struct Library {
    uintptr_t base = 0;
    GetSize cubin_size = nullptr, ptx_size = nullptr, linked_size = nullptr;
    GetBytes ptx = nullptr;
    // For the PTX of LTO-IR; null: it stays unknown.
    Complete complete = nullptr;
    GetSize linked_ptx_size = nullptr;
    GetBytes linked_ptx = nullptr;
};

struct Link {
    Inputs of;
    std::vector<std::string> options;
    std::vector<std::vector<char>> lto;  // the LTO-IR, if all of it fits into kMostLto
    size_t lto_bytes = 0;
};

struct Open {
    std::mutex lock;
    std::map<void *, Link> links;  // those whose nvJitLinkCreate was seen
};

// The linker's function comes first, then the functions of each library.
Hook table[1 + kLibraries * kFunctions];
Library libraries[kLibraries];
CompilerUser user{};
const char *lacks = nullptr;
const r_debug *linker =
    nullptr;  // the dynamic linker's state; null: libraries that are opened later are not seen
std::mutex *changing = new std::mutex;  // guards the tables above. A forked child gets new locks.
Open *open_links = new Open;

Hook &hook_of(size_t library, size_t function) { return table[1 + library * kFunctions + function]; }

class KeepErrno {
  public:
    KeepErrno() = default;
    ~KeepErrno() { errno = before_; }
    KeepErrno(const KeepErrno &) = delete;
    KeepErrno &operator=(const KeepErrno &) = delete;

  private:
    const int before_ = errno;
};

// Does work in a call of the program, which must not notice it: memory may be short.
template <class Work>
void beside(const Work &work) noexcept {
    KeepErrno keep;
    try {
        if (user.wants()) work();
    } catch (...) {
    }
}

// --- what the program compiles ---

void compiled(const Library &library, void *program, const void *cubin) {
    size_t bytes = 0, text = 0;
    if (library.cubin_size(program, &bytes) != 0 || !bytes) return;
    if (library.ptx_size(program, &text) != 0 || text < 2 || text > kMostPtx) return;
    std::string ptx(text, '\0');
    if (library.ptx(program, &ptx[0]) != 0) return;
    Inputs of;
    of.add_ptx(ptx.data(), ptx.size());
    user.made(cubin, bytes, of);
}

bool is_text(const char *data, size_t bytes) {
    const size_t length = std::min<size_t>(strnlen(data, bytes), 65536);
    return std::string(data, length).find(".version") != std::string::npos;
}

void give(Inputs &of, int type, const void *data, size_t bytes) {
    uint32_t magic = 0;
    if (data) memcpy(&magic, data, std::min(bytes, sizeof magic));
    const bool elf = bytes >= SELFMAG && data && memcmp(data, ELFMAG, SELFMAG) == 0;
    const auto *text = static_cast<const char *>(data);
    Inputs known;
    if (type == kPtx || (type == kAny && !elf && data && is_text(text, bytes))) of.add_ptx(text, bytes);
    else if (type == kLtoIr || (type == kAny && magic == kLtoMagic)) of.add_lto();
    else if ((type == kCubin || type == kAny) && elf && user.known(data, bytes, known)) of.add(known);
    else of.add_other();
}

// Reads an input's file. Returns nothing if it is not a file, or too large.
std::vector<char> content(const char *path) {
    std::vector<char> data;
    const int file = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    struct stat st;
    if (file >= 0 && fstat(file, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 &&
        static_cast<uint64_t>(st.st_size) <= kMostPtx) {
        data.resize(static_cast<size_t>(st.st_size));
        size_t at = 0;
        for (ssize_t n; at < data.size(); at += static_cast<size_t>(n))
            if ((n = pread(file, data.data() + at, data.size() - at, static_cast<off_t>(at))) <= 0) break;
        data.resize(at);
    }
    if (file >= 0) close(file);
    return data;
}

// --- replacements, one for each library ---

template <class Type>
Type original(size_t library, Function function) {
    return reinterpret_cast<Type>(hook_of(library, function).original);
}

template <size_t N>
int get_cubin(void *program, void *cubin) {
    const int status = original<GetBytes>(N, kGetCubin)(program, cubin);
    if (status == 0) beside([&] { compiled(libraries[N], program, cubin); });
    return status;
}

template <size_t N>
int create(void **handle, uint32_t count, const char **options) {
    const int status = original<Create>(N, kCreate)(handle, count, options);
    if (status == 0)
        beside([&] {
            std::lock_guard<std::mutex> hold(open_links->lock);
            if (open_links->links.size() >= kMostLinks) return;
            Link &link = open_links->links[*handle] = {};
            link.options.assign(options, options + count);
        });
    return status;
}

// Adds an input to a link that was seen from its beginning.
void added(void *handle, int type, const void *data, size_t bytes) {
    Inputs more;
    give(more, type, data, bytes);
    std::lock_guard<std::mutex> hold(open_links->lock);
    auto it = open_links->links.find(handle);
    if (it == open_links->links.end()) return;
    Link &link = it->second;
    link.of.add(more);
    if (!more.lto) return;
    link.lto_bytes += bytes;
    const auto *begin = static_cast<const char *>(data);
    if (link.lto_bytes <= kMostLto) link.lto.emplace_back(begin, begin + bytes);
    else link.lto.clear();
}

// Links LTO-IR again, to PTX. nvJitLink makes the cubin from this PTX. Returns nothing if that is not possible.
Inputs ptx_of_lto(size_t library, const Link &link) {
    const Library &of = libraries[library];
    Inputs made;
    if (!of.complete || !of.linked_ptx_size || !of.linked_ptx) return made;
    std::vector<const char *> options;
    for (const std::string &option : link.options) options.push_back(option.c_str());
    options.push_back("-ptx");
    void *handle = nullptr;
    if (original<Create>(library, kCreate)(&handle, static_cast<uint32_t>(options.size()), options.data()) !=
        0)
        return made;
    size_t bytes = 0;
    const auto add = [&](const std::vector<char> &input) {
        return original<AddData>(library, kAddData)(handle, kLtoIr, input.data(), input.size(), "") == 0;
    };
    if (std::all_of(link.lto.begin(), link.lto.end(), add) && of.complete(handle) == 0 &&
        of.linked_ptx_size(handle, &bytes) == 0 && bytes > 1 && bytes <= kMostPtx) {
        std::string ptx(bytes, '\0');
        if (of.linked_ptx(handle, &ptx[0]) == 0) made.add_ptx(ptx.data(), ptx.size());
    }
    original<Destroy>(library, kDestroy)(&handle);
    return made;
}

template <size_t N>
int add_data(void *handle, int type, const void *data, size_t bytes, const char *name) {
    const int status = original<AddData>(N, kAddData)(handle, type, data, bytes, name);
    if (status == 0) beside([&] { added(handle, type, data, bytes); });
    return status;
}

template <size_t N>
int add_file(void *handle, int type, const char *path) {
    const int status = original<AddFile>(N, kAddFile)(handle, type, path);
    if (status == 0)
        beside([&] {
            const std::vector<char> data = content(path);
            added(handle, type, data.data(), data.size());
        });
    return status;
}

template <size_t N>
int get_linked(void *handle, void *cubin) {
    const int status = original<GetBytes>(N, kGetLinked)(handle, cubin);
    if (status == 0)
        beside([&] {
            Link link;
            {
                std::lock_guard<std::mutex> hold(open_links->lock);
                auto it = open_links->links.find(handle);
                if (it == open_links->links.end()) return;
                link = it->second;
            }
            Inputs &of = link.of;
            // Linked PTX and other inputs are not in the PTX of the LTO-IR.
            if (of.lto && of.lto == of.count && link.lto.size() == of.lto)
                if (Inputs made = ptx_of_lto(N, link); made.texts) of = std::move(made);
            size_t bytes = 0;
            if (of.count && libraries[N].linked_size(handle, &bytes) == 0 && bytes)
                user.made(cubin, bytes, of);
        });
    return status;
}

template <size_t N>
int destroy(void **handle) {
    if (handle)
        beside([&] {
            std::lock_guard<std::mutex> hold(open_links->lock);
            open_links->links.erase(*handle);
        });
    return original<Destroy>(N, kDestroy)(handle);
}

using Replacements = std::array<void *, kFunctions>;  // in the order of Function

template <size_t N>
Replacements replacements_of() {
    return {reinterpret_cast<void *>(&get_cubin<N>),  reinterpret_cast<void *>(&create<N>),
            reinterpret_cast<void *>(&add_data<N>),   reinterpret_cast<void *>(&add_file<N>),
            reinterpret_cast<void *>(&get_linked<N>), reinterpret_cast<void *>(&destroy<N>)};
}

template <size_t... N>
std::array<Replacements, kLibraries> all_replacements(std::index_sequence<N...>) {
    return {replacements_of<N>()...};
}

// --- libraries ---

// The functions that a loaded library exports. The library may be so new that the linker has not relocated it, so dlsym() will not do.
class Exports {
  public:
    explicit Exports(const dl_phdr_info &info) : base_(info.dlpi_addr) {
        const ElfW(Dyn) *dynamic = nullptr;
        for (int i = 0; i < info.dlpi_phnum; ++i)
            if (info.dlpi_phdr[i].p_type == PT_DYNAMIC)
                dynamic = reinterpret_cast<const ElfW(Dyn) *>(base_ + info.dlpi_phdr[i].p_vaddr);
        for (; dynamic && dynamic->d_tag != DT_NULL; ++dynamic) {
            uintptr_t at = dynamic->d_un.d_ptr;
            if (at < base_) at += base_;  // the linker did not relocate it
            if (dynamic->d_tag == DT_SYMTAB) symbols_ = reinterpret_cast<const ElfW(Sym) *>(at);
            if (dynamic->d_tag == DT_STRTAB) strings_ = reinterpret_cast<const char *>(at);
            if (dynamic->d_tag == DT_GNU_HASH) hashes_ = reinterpret_cast<const uint32_t *>(at);
        }
    }

    void *find(const char *name) const {
        if (!symbols_ || !strings_ || !hashes_) return nullptr;
        const uint32_t buckets = hashes_[0], first = hashes_[1], words = hashes_[2], shift = hashes_[3];
        if (!buckets || !words) return nullptr;
        uint32_t hash = 5381;
        for (const char *c = name; *c; ++c) hash = hash * 33 + static_cast<uint8_t>(*c);
        const auto *filter = reinterpret_cast<const uint64_t *>(hashes_ + 4);
        const uint64_t bits = uint64_t(1) << hash % 64 | uint64_t(1) << (hash >> shift) % 64;
        if ((filter[hash / 64 % words] & bits) != bits) return nullptr;
        const auto *bucket = reinterpret_cast<const uint32_t *>(filter + words), *chain = bucket + buckets;
        for (uint32_t i = bucket[hash % buckets]; i >= first; ++i) {
            const uint32_t other = chain[i - first];
            const ElfW(Sym) &symbol = symbols_[i];
            if ((other | 1) == (hash | 1) && symbol.st_shndx != SHN_UNDEF &&
                ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && strcmp(strings_ + symbol.st_name, name) == 0)
                return reinterpret_cast<void *>(base_ + symbol.st_value);
            if (other & 1) break;
        }
        return nullptr;
    }

    // Returns a function of nvJitLink, whose exported name may have a version. All versions jump to the same code.
    void *find_of_linker(const char *name) const {
        if (void *plain = find(name)) return behind_jump(plain);
        for (int major = kFirstMajor; major <= kLastMajor; ++major)
            for (int minor = 0; minor <= kLastMinor; ++minor) {
                char versioned[64];
                snprintf(versioned, sizeof versioned, "__%s_%d_%d", name, major, minor);
                if (void *found = find(versioned)) return behind_jump(found);
            }
        return nullptr;
    }

    bool is_linker() const {
        bool is = find("nvJitLinkCreate") != nullptr;
        for (int major = kFirstMajor; major <= kLastMajor && !is; ++major) {
            char versioned[64];
            snprintf(versioned, sizeof versioned, "__nvJitLinkCreate_%d_0", major);
            is = find(versioned) != nullptr;
        }
        return is;
    }

  private:
    static void *behind_jump(void *function) {
        const machine::Step first = machine::step(static_cast<const uint8_t *>(function));
        return first.kind == machine::Step::kJump ? const_cast<uint8_t *>(first.destination) : function;
    }

    uintptr_t base_;
    const ElfW(Sym) *symbols_ = nullptr;
    const char *strings_ = nullptr;
    const uint32_t *hashes_ = nullptr;
};

struct Found {
    Library library;
    std::array<void *, kFunctions> targets{};
};

struct Search {
    std::vector<Found> found;
    unsigned long long added = 0, removed = 0;  // libraries that were ever loaded, and unloaded
};

template <class Type>
void set(Type &function, void *address) {
    function = reinterpret_cast<Type>(address);
}

int examine(dl_phdr_info *info, size_t, void *data) {
    auto *search = static_cast<Search *>(data);
    search->added = info->dlpi_adds;
    search->removed = info->dlpi_subs;
    const Exports exports(*info);
    Found one;
    one.library.base = info->dlpi_addr;
    if (void *get = exports.find("nvrtcGetCUBIN")) {
        set(one.library.cubin_size, exports.find("nvrtcGetCUBINSize"));
        set(one.library.ptx_size, exports.find("nvrtcGetPTXSize"));
        set(one.library.ptx, exports.find("nvrtcGetPTX"));
        if (one.library.cubin_size && one.library.ptx_size && one.library.ptx) one.targets[kGetCubin] = get;
    }
    if (exports.is_linker()) {
        static constexpr std::pair<Function, const char *> kNames[] = {
            {kCreate, "nvJitLinkCreate"},   {kAddData, "nvJitLinkAddData"},
            {kAddFile, "nvJitLinkAddFile"}, {kGetLinked, "nvJitLinkGetLinkedCubin"},
            {kDestroy, "nvJitLinkDestroy"},
        };
        bool all = true;
        set(one.library.linked_size, exports.find_of_linker("nvJitLinkGetLinkedCubinSize"));
        set(one.library.complete, exports.find_of_linker("nvJitLinkComplete"));
        set(one.library.linked_ptx_size, exports.find_of_linker("nvJitLinkGetLinkedPtxSize"));
        set(one.library.linked_ptx, exports.find_of_linker("nvJitLinkGetLinkedPtx"));
        for (const auto &[function, name] : kNames)
            all = (one.targets[function] = exports.find_of_linker(name)) && all;
        if (!all || !one.library.linked_size)
            for (const auto &[function, name] : kNames) one.targets[function] = nullptr;
    }
    for (void *target : one.targets)
        if (target) {
            search->found.push_back(one);
            break;
        }
    return 0;
}

// Fills in the hooks of the libraries that are loaded now. Returns whether there is a new one. Call it with `changing` held.
bool fill_in() {
    Search search;
    dl_iterate_phdr(examine, &search);
    static std::pair<unsigned long long, unsigned long long> seen;
    const std::pair now{search.added, search.removed};
    if (std::exchange(seen, now) == now) return false;
    static const auto replacements = all_replacements(std::make_index_sequence<kLibraries>());
    static constexpr const char *kNames[kFunctions] = {"nvrtcGetCUBIN",           "nvJitLinkCreate",
                                                       "nvJitLinkAddData",        "nvJitLinkAddFile",
                                                       "nvJitLinkGetLinkedCubin", "nvJitLinkDestroy"};
    bool is_new = false;
    const auto loaded = [&](uintptr_t base) {
        return base && std::any_of(search.found.begin(), search.found.end(),
                                   [&](const Found &f) { return f.library.base == base; });
    };
    for (size_t i = 0; i < kLibraries; ++i)
        if (!loaded(libraries[i].base)) {
            libraries[i].base = 0;
            for (size_t function = 0; function < kFunctions; ++function)
                hook_of(i, function).target = nullptr;
        }
    for (const Found &found : search.found) {
        size_t i = 0;
        while (i < kLibraries && libraries[i].base != found.library.base) ++i;
        if (i == kLibraries)
            for (i = 0; i < kLibraries && libraries[i].base;) ++i;
        if (i == kLibraries) continue;
        is_new = is_new || !libraries[i].base;
        libraries[i] = found.library;
        for (size_t function = 0; function < kFunctions; ++function) {
            Hook &hook = hook_of(i, function);
            void *const target = found.targets[function];
            if (hook.target != target)
                hook = {kNames[function], replacements[i][function], target, target, lacks};
        }
    }
    return is_new;
}

// Replaces the function that the dynamic linker calls, with its lock held, after each change of the list of libraries.
void libraries_changed() {
    reinterpret_cast<void (*)()>(table[0].original)();
    if (linker->r_state != r_debug::RT_CONSISTENT) return;
    beside([] {
        std::lock_guard<std::mutex> hold(*changing);
        std::string left_out;
        if (fill_in()) install(table, compiler_hook_count(), left_out);
    });
}

}  // namespace

void find_compilers(const CompilerUser &of, const char *lack) {
    // dlsym takes the dynamic linker's lock, with which libraries_changed() waits for `changing`: so call it first.
    const auto *found = static_cast<const r_debug *>(dlsym(RTLD_DEFAULT, "_r_debug"));
    std::lock_guard<std::mutex> hold(*changing);
    user = of;
    lacks = lack;
    linker = found;
    auto *const notify = linker ? reinterpret_cast<void *>(linker->r_brk) : nullptr;
    if (notify && table[0].target != notify)
        table[0] = {"r_brk", reinterpret_cast<void *>(&libraries_changed), notify, notify, lack};
    fill_in();
}

Hook *compiler_hooks() { return table; }

size_t compiler_hook_count() { return sizeof table / sizeof *table; }

void compilers_in_forked_child() {
    if (auto *lock = new (std::nothrow) std::mutex) changing = lock;
    if (auto *fresh = new (std::nothrow) Open) open_links = fresh;
}

}  // namespace gpubpf
