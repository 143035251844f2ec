// PTX text → Image: the translator is started once for every text, its shared object is cached by content.

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/internal.h"

extern char **environ;

namespace cudasim {

namespace {

// ---------------------------------------------------------------------------------------------------- SHA-256

class Sha256 {  // FIPS 180-4
  public:
    void add(const void *data, size_t size) {
        const auto *bytes = static_cast<const uint8_t *>(data);
        total_ += size;
        while (size) {
            const size_t n = std::min(size, 64 - used_);
            memcpy(block_ + used_, bytes, n);
            used_ += n;
            bytes += n;
            size -= n;
            if (used_ == 64) {
                compress();
                used_ = 0;
            }
        }
    }
    void add(const std::string &text) { add(text.data(), text.size() + 1); }
    std::string hex() {
        const uint64_t bits = total_ * 8;
        const uint8_t end = 0x80, zero = 0;
        add(&end, 1);
        while (used_ != 56) add(&zero, 1);
        uint8_t length[8];
        for (int k = 0; k < 8; k++) length[k] = static_cast<uint8_t>(bits >> (56 - 8 * k));
        add(length, 8);
        char text[65];
        for (int k = 0; k < 8; k++) snprintf(text + 8 * k, 9, "%08x", state_[k]);
        return text;
    }

  private:
    static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }
    // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    static const uint32_t *constants() {
        static uint32_t found[64];
        static const bool ready = [] {
            int n = 0;
            for (uint32_t candidate = 2; n < 64; candidate++) {
                bool prime = true;
                for (uint32_t d = 2; d * d <= candidate; d++) prime &= candidate % d != 0;
                if (!prime) continue;
                unsigned __int128 low = 0, high = static_cast<unsigned __int128>(8) << 32;
                const unsigned __int128 target = static_cast<unsigned __int128>(candidate) << 96;
                while (high - low > 1) {  // floor(cbrt(candidate) * 2^32)
                    const unsigned __int128 middle = (low + high) / 2;
                    if (middle * middle * middle <= target) low = middle;
                    else high = middle;
                }
                found[n++] = static_cast<uint32_t>(low);
            }
            return true;
        }();
        (void)ready;
        return found;
    }
    void compress() {
        const uint32_t *k = constants();
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = static_cast<uint32_t>(block_[4 * i]) << 24 |
                   static_cast<uint32_t>(block_[4 * i + 1]) << 16 |
                   static_cast<uint32_t>(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
                   (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
        memcpy(s, state_, sizeof s);
        for (int i = 0; i < 64; i++) {
            const uint32_t t1 = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
                                ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
            const uint32_t t2 = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
                                ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof *s);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) state_[i] += s[i];
    }
    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t block_[64] = {};
    size_t used_ = 0;
    uint64_t total_ = 0;
};

// ---------------------------------------------------------------------------------------------------- places

// Never destroyed: other threads may still translate while the process exits.
std::mutex &translator_mutex = *new std::mutex;
std::string &translator_python = *new std::string, &translator_path = *new std::string;

std::string variable(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

std::string python() {
    std::string found = variable("CUDASIM_PYTHON");
    if (!found.empty()) return found;
#ifdef CUDASIM_PYTHON
    if (access(CUDASIM_PYTHON, X_OK) == 0)
        found = CUDASIM_PYTHON;  // not so where the library was built elsewhere
#endif
    if (found.empty()) {
        std::lock_guard<std::mutex> lock(translator_mutex);
        found = translator_python;
    }
    return found.empty() ? "/usr/bin/python3" : found;
}

std::string pythonpath() {
    std::string found = variable("CUDASIM_PYTHONPATH");
    if (!found.empty()) return found;
#ifdef CUDASIM_PYTHONPATH
    found = CUDASIM_PYTHONPATH;
#endif
    if (found.empty()) {
        std::lock_guard<std::mutex> lock(translator_mutex);
        found = translator_path;
    }
    return found;
}

// A directory of our own that nobody else can write to; empty if there is none.
std::string private_directory(const std::string &path) {
    for (size_t k = 1; k <= path.size(); k++)
        if (k == path.size() || path[k] == '/') mkdir(path.substr(0, k).c_str(), 0700);
    struct stat found;
    if (lstat(path.c_str(), &found) != 0 || !S_ISDIR(found.st_mode) || found.st_uid != geteuid() ||
        (found.st_mode & 022))
        return "";
    return access(path.c_str(), W_OK) == 0 ? path : "";
}

std::string cache_directory() {
    std::vector<std::string> places;
    if (const std::string chosen = variable("CUDASIM_CACHE"); !chosen.empty()) places.push_back(chosen);
    if (const std::string xdg = variable("XDG_CACHE_HOME"); !xdg.empty())
        places.push_back(xdg + "/gpubpf/cudasim");
    if (const std::string home = variable("HOME"); !home.empty())
        places.push_back(home + "/.cache/gpubpf/cudasim");
    for (const std::string &place : places)
        if (const std::string found = private_directory(place); !found.empty()) return found;
    const std::string shared = "/tmp/gpubpf-" + std::to_string(geteuid());
    return private_directory(shared).empty() ? "" : private_directory(shared + "/cudasim");
}

// What the translation depends on besides the PTX: the translator itself, the compiler, the instruction set.
void add_translator(Sha256 &hash, const std::string &path) {
    static const char *const files[] = {"/cudasim/translate/scope.py",
                                        "/cudasim/translate/values.py",
                                        "/cudasim/translate/arithmetic.py",
                                        "/cudasim/translate/memory.py",
                                        "/cudasim/translate/function.py",
                                        "/cudasim/translate/program.py",
                                        "/cudasim/translate/copies.py",
                                        "/cudasim/translate/matrix.py",
                                        "/cudasim/translate/outline.py",
                                        "/cudasim/translate/compiler.py",
                                        "/cudasim/src/device_runtime.h",
                                        "/cudasim/src/device_abi.h",
                                        "/gpubpf/ptx/module.py",
                                        "/gpubpf/ptx/tokens.py",
                                        "/gpubpf/ptx/flow.py"};
    for (const char *file : files) {
        struct stat found = {};
        stat((path + file).c_str(), &found);
        const int64_t stamp[3] = {found.st_size, found.st_mtim.tv_sec, found.st_mtim.tv_nsec};
        hash.add(stamp, sizeof stamp);
    }
    hash.add(variable("CUDASIM_CC_COMPILER"));
#ifdef __x86_64__
    __builtin_cpu_init();
    hash.add(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? "avx2" : "base");
#endif
    hash.add(std::to_string(CS_ABI));
}

// ---------------------------------------------------------------------------------------------------- the translator

bool unwanted(const char *entry) {
    static const char *const prefixes[] = {"LD_",    "CUDA_INJECTION", "GPUBPF_",
                                           "PYTHON", "MALLOC_",        "GCONV_PATH="};
    for (const char *prefix : prefixes)
        if (strncmp(entry, prefix, strlen(prefix)) == 0) return true;
    return false;
}

bool write_all(int fd, std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = write(fd, text.data(), text.size());
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        text.remove_prefix(static_cast<size_t>(n));
    }
    return true;
}

// Runs `python -m cudasim.translate word…`; its standard error goes to `log`. Returns the exit status, -1 if unknown.
// -P: no module comes from the working directory, which is the program's.
int run_translator(const std::vector<std::string> &arguments, std::string &log) {
    const std::string interpreter = python(), path = pythonpath();
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        log = "the translator could not be started: out of file descriptors";
        return 3;
    }
    std::vector<std::string> kept;
    for (char **entry = environ; entry && *entry; entry++)
        if (!unwanted(*entry)) kept.emplace_back(*entry);
    kept.push_back("PYTHONPATH=" + path);
    kept.push_back("PYTHONDONTWRITEBYTECODE=");
    std::vector<char *> environment;
    for (std::string &entry : kept) environment.push_back(entry.data());
    environment.push_back(nullptr);
    std::vector<std::string> words = {interpreter, "-P", "-m", "cudasim.translate"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char *> argv;
    for (std::string &word : words) argv.push_back(word.data());
    argv.push_back(nullptr);

    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 34)
    posix_spawn_file_actions_addclosefrom_np(&actions, 3);
#endif
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    pid_t child = 0;
    const int error =
        posix_spawn(&child, interpreter.c_str(), &actions, &attributes, argv.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    close(ends[1]);
    if (error != 0) {
        close(ends[0]);
        log = "the translator " + interpreter + " could not be started: " + strerror(error);
        return 3;
    }
    char part[4096];
    for (;;) {
        const ssize_t n = read(ends[0], part, sizeof part);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        if (log.size() < (1u << 16)) log.append(part, static_cast<size_t>(n));
    }
    close(ends[0]);
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return -1;  // the application ignores SIGCHLD, or waited itself
    return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
}

// A file of this content in the cache's directory, beside its final name; empty: `error`.
std::string put_beside(const std::string &stem, std::string_view text, TranslateError &error) {
    std::string name = stem + "-XXXXXX";
    const int fd = mkostemp(name.data(), O_CLOEXEC);
    const bool written = fd >= 0 && write_all(fd, text);
    if (fd >= 0) close(fd);
    if (written) return name;
    if (fd >= 0) unlink(name.c_str());
    error = {300, "the directory for translated modules, " + stem.substr(0, stem.rfind('/')) +
                      ", cannot be written to"};
    return "";
}

const char no_directory[] = "there is no private directory for translated modules; set CUDASIM_CACHE";

std::mutex &images_mutex = *new std::mutex;
auto &images = *new std::map<std::string, std::weak_ptr<const Image>>;  // by hash; loaded once per process

}  // namespace

void set_translator(std::string interpreter, std::string path) {
    std::lock_guard<std::mutex> lock(translator_mutex);
    translator_python = std::move(interpreter);
    translator_path = std::move(path);
}

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
        error = {300, "a part of a translated module is none"};
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
            unlink((stem_ + ".so").c_str());  // its parts may be gone: the next process begins anew
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

std::shared_ptr<const Image> translate(std::string_view ptx, TranslateError &error, bool virtual_clock) {
    while (!ptx.empty() && ptx.back() == '\0') ptx.remove_suffix(1);
    const std::string path = pythonpath();
    Sha256 hash;
    add_translator(hash, path);
    hash.add(virtual_clock ? "virtual" : "real");
    hash.add(ptx.data(), ptx.size());
    const std::string key = hash.hex();

    std::lock_guard<std::mutex> lock(images_mutex);
    if (auto found = images[key].lock()) return found;
    const std::string directory = cache_directory();
    if (directory.empty()) {
        error = {300, no_directory};
        return nullptr;
    }
    const std::string output = directory + "/" + key + ".so";
    if (access(output.c_str(), R_OK) != 0) {
        const std::string input = put_beside(directory + "/" + key, ptx, error);
        if (input.empty()) return nullptr;
        std::string log;
        std::vector<std::string> words = {input, output};
        if (virtual_clock) words.insert(words.begin(), "--virtual");
        const int status = run_translator(words, log);
        unlink(input.c_str());
        if (access(output.c_str(), R_OK) != 0) {
            error = {status == 2 ? 218 : 300, log.empty() ? "the translator failed" : log};
            return nullptr;
        }
    }
    auto image = LoadedImage::load(output, error);
    if (!image) {
        unlink(output.c_str());
        return nullptr;
    }
    images[key] = image;
    return image;
}

bool link_ptx(const std::vector<LinkInput> &inputs, bool complete, std::string &text, TranslateError &error) {
    const std::string path = pythonpath();
    Sha256 hash;
    add_translator(hash, path);
    struct stat linker = {};
    stat((path + "/gpubpf/ptx/link.py").c_str(), &linker);
    hash.add(std::to_string(linker.st_size) + " " + std::to_string(linker.st_mtim.tv_sec));
    hash.add(complete ? "link" : "check");
    for (const LinkInput &input : inputs) {
        hash.add(input.name);
        hash.add(input.text);
    }
    const std::string directory = cache_directory();
    if (directory.empty()) {
        error = {300, no_directory};
        return false;
    }
    const std::string stem = directory + "/" + hash.hex(), output = stem + ".ptx";
    auto read = [&] {
        FILE *file = fopen(output.c_str(), "rbe");
        if (file == nullptr) return false;
        char part[65536];
        text.clear();
        for (size_t n; (n = fread(part, 1, sizeof part, file)) != 0;) text.append(part, n);
        fclose(file);
        return true;
    };
    if (read()) return true;
    std::vector<std::string> words = {complete ? "--link" : "--check", output};
    std::string log;
    int status = 3;
    bool written = true;
    for (const LinkInput &input : inputs) {
        const std::string file = put_beside(stem, input.text, error);
        if (!(written = !file.empty())) break;
        words.insert(words.end(), {input.name, file});
    }
    if (written) status = run_translator(words, log);
    for (size_t k = 3; k < words.size(); k += 2) unlink(words[k].c_str());
    if (!written) return false;
    if (read()) return true;
    error = {status == 2 ? 218 : status == 4 ? 999 : 300, log.empty() ? "the linker failed" : log};
    return false;
}

}  // namespace cudasim
