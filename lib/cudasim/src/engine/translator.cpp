// Runs the translator (cudasim.translate), once for each PTX text, and caches its results by content.

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <mutex>
#include <spawn.h>
#include <sstream>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "embedded/cache.h"
#include "embedded/sha256.h"
#include "engine/internal.h"

extern char **environ;

namespace cudasim {

namespace {

// ---------------------------------------------------------------------------------------------------- paths

// Never destroyed: other threads may still translate while the process exits.
std::mutex &translator_mutex = *new std::mutex;
std::string &translator_python = *new std::string, &translator_path = *new std::string;

std::string python() {
    std::string found = embedded::variable("CUDASIM_PYTHON");
    if (found.empty()) {
        std::lock_guard<std::mutex> lock(translator_mutex);
        found = translator_python;
    }
    return found.empty() ? "/usr/bin/python3" : found;
}

std::string pythonpath() {
    std::string found = embedded::variable("CUDASIM_PYTHONPATH");
    if (found.empty()) {
        std::lock_guard<std::mutex> lock(translator_mutex);
        found = translator_path;
    }
    return found;
}

// Returns the paths of the Python files in a folder, sorted.
std::vector<std::string> python_files(const std::string &folder) {
    std::vector<std::string> found;
    DIR *directory = opendir(folder.c_str());
    if (directory == nullptr) return found;
    while (const dirent *entry = readdir(directory)) {
        const std::string name = entry->d_name;
        if (name.size() > 3 && name.compare(name.size() - 3, 3, ".py") == 0)
            found.push_back(folder + "/" + name);
    }
    closedir(directory);
    std::sort(found.begin(), found.end());
    return found;
}

// Returns a digest of the files that make a translation, of their contents. They are read again only when they have changed.
std::string translator_version(const std::string &path) {
    std::vector<std::string> files = python_files(path + "/cudasim/translate");
    for (const std::string &file : python_files(path + "/gpubpf/ptx")) files.push_back(file);
    for (const char *file :
         {"/cudasim/src/device_runtime.h", "/cudasim/src/device_matrix.h",
          "/cudasim/src/device_collectives.h", "/cudasim/src/device_abi.h", "/gpubpf/errors.py"})
        files.push_back(path + file);
    std::string stamps;
    for (const std::string &file : files) {
        struct stat found = {};
        stat(file.c_str(), &found);
        for (const int64_t part :
             {static_cast<int64_t>(found.st_size), static_cast<int64_t>(found.st_ino),
              static_cast<int64_t>(found.st_mtim.tv_sec), static_cast<int64_t>(found.st_mtim.tv_nsec)})
            stamps += std::to_string(part) + " ";
    }
    static auto &mutex = *new std::mutex;
    static auto &known = *new std::map<std::string, std::string>;
    std::lock_guard<std::mutex> lock(mutex);
    std::string &version = known[path + " " + stamps];
    if (!version.empty()) return version;
    embedded::Sha256 hash;
    for (const std::string &file : files) {
        std::ostringstream text;
        text << std::ifstream(file, std::ios::binary).rdbuf();
        const std::string content = text.str();
        hash.add(file.substr(path.size()));
        hash.add(std::to_string(content.size()));
        hash.add(content.data(), content.size());
    }
    return version = hash.hex();
}

// Adds what a translation depends on besides the PTX: the translator, the compiler, the host's instruction set.
void hash_translator(embedded::Sha256 &hash) {
    hash.add(translator_version(pythonpath()));
    hash.add(embedded::variable("CUDASIM_CC_COMPILER"));
#ifdef __x86_64__
    __builtin_cpu_init();  // machine_flags() in compiler.py asks for the same
    hash.add(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                     __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2")
                 ? "avx2"
                 : "base");
#endif
    hash.add(std::to_string(CS_ABI));
}

// ---------------------------------------------------------------------------------------------------- the translator

// Returns whether the translator must not inherit an environment variable.
bool is_excluded(const char *entry) {
    static const char *const prefixes[] = {"LD_",     "CUDA_INJECTION", "GPUBPF_", "PYTHON",
                                           "MALLOC_", "GCONV_PATH=",    "TMPDIR="};
    for (const char *prefix : prefixes)
        if (strncmp(entry, prefix, strlen(prefix)) == 0) return true;
    return false;
}

const char no_room[] =
    "cannot write to a temporary directory for translating a module; free space in /tmp, or set TMPDIR";

std::mutex &images_mutex = *new std::mutex;
auto &images = *new std::map<std::string,
                             std::weak_ptr<const Image>>;  // by hash, so that each is loaded once per process

}  // namespace

void set_translator(std::string interpreter, std::string path) {
    std::lock_guard<std::mutex> lock(translator_mutex);
    translator_python = std::move(interpreter);
    translator_path = std::move(path);
}

// -P: the working directory, which is the program's, must not provide modules.
int run_translator(const std::vector<std::string> &arguments, const std::string &temporary,
                   std::string &log) {
    const std::string interpreter = python(), path = pythonpath();
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        log = "cannot start the translator: out of file descriptors";
        return 3;
    }
    std::vector<std::string> kept;
    for (char **entry = environ; entry && *entry; entry++)
        if (!is_excluded(*entry)) kept.emplace_back(*entry);
    kept.push_back("TMPDIR=" + temporary);
    kept.push_back("PYTHONPATH=" + path);
    // A limit on the size of files would cut short what all users of these modules read.
    kept.push_back("PYTHONDONTWRITEBYTECODE=1");
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
    // glibc has this function since 2.34.
    const auto close_from = reinterpret_cast<int (*)(posix_spawn_file_actions_t *, int)>(
        dlsym(RTLD_DEFAULT, "posix_spawn_file_actions_addclosefrom_np"));
    if (close_from != nullptr) close_from(&actions, 3);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    // Ctrl-C is for the application, which may ignore it.
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    pid_t child = 0;
    const int error =
        posix_spawn(&child, interpreter.c_str(), &actions, &attributes, argv.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    close(ends[1]);
    if (error != 0) {
        close(ends[0]);
        log = "cannot start the translator " + interpreter + ": " + strerror(error);
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
        if (errno != EINTR) return -1;  // the application ignores SIGCHLD, or has waited for the child
    return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
}

// Returns the directory for counts of executed basic blocks; empty: none are counted.
static std::string counts() { return embedded::variable("CUDASIM_COUNT"); }

std::string translation_key(std::string_view ptx, bool virtual_clock) {
    embedded::Sha256 hash;
    hash_translator(hash);
    hash.add(virtual_clock ? "virtual" : "real");
    hash.add(counts());
    hash.add(ptx.data(), ptx.size());
    return hash.hex();
}

std::string translator_key() {
    embedded::Sha256 hash;
    hash_translator(hash);
    return hash.hex();
}

bool run_translation(std::string_view ptx, bool virtual_clock, Translation &made, TranslateError &error) {
    const embedded::ScratchDirectory scratch;
    if (!scratch.write("module.ptx", ptx)) {
        error = {300, no_room};
        return false;
    }
    std::vector<std::string> words = {scratch.path() + "/module.ptx", scratch.path() + "/module.so"};
    if (!counts().empty()) words.insert(words.begin(), {"--count", counts()});
    if (virtual_clock) words.insert(words.begin(), "--virtual");
    std::string log;
    const int status = run_translator(words, scratch.path(), log);
    std::optional<std::string> object = scratch.read("module.so");
    if (!object) {
        error = {status == 2 ? 218 : 300, log.empty() ? "the translator failed" : log};
        return false;
    }
    made.object = std::move(*object);
    while (std::optional<std::string> part =
               scratch.read("module." + std::to_string(made.parts.size()) + ".c"))
        made.parts.push_back(std::move(*part));
    return true;
}

std::map<uint32_t, std::string> compile_parts(const std::map<uint32_t, std::string> &texts,
                                              std::string &log) {
    const embedded::ScratchDirectory scratch;
    std::map<uint32_t, std::string> objects;
    std::vector<std::string> words;
    for (const auto &[number, text] : texts) {
        const std::string stem = std::to_string(number);
        if (!scratch.write(stem + ".c", text)) {
            log = no_room;
            return objects;
        }
        for (const char *suffix : {".c", ".so"}) words.push_back(scratch.path() + "/" + stem + suffix);
    }
    run_translator(words, scratch.path(), log);
    for (const auto &[number, text] : texts)
        if (std::optional<std::string> object = scratch.read(std::to_string(number) + ".so"))
            objects[number] = std::move(*object);
    return objects;
}

std::shared_ptr<const Image> translate(std::string_view ptx, TranslateError &error, bool virtual_clock) {
    while (!ptx.empty() && ptx.back() == '\0') ptx.remove_suffix(1);
    const std::string key = translation_key(ptx, virtual_clock);
    std::lock_guard<std::mutex> lock(images_mutex);
    if (auto found = images[key].lock()) return found;
    std::shared_ptr<LoadedImage> image;
    if (const std::optional<std::string> object = embedded::read_cached(key + ".so"))
        image = LoadedImage::load(key, ptx, *object, error);
    if (!image) {
        Translation made;
        if (!run_translation(ptx, virtual_clock, made, error)) return nullptr;
        // Unless the translator's files have changed meanwhile, such as by an update.
        if (translation_key(ptx, virtual_clock) == key) embedded::write_cached(key + ".so", made.object);
        if (!(image = LoadedImage::load(key, ptx, made.object, error))) return nullptr;
        image->keep_parts(std::move(made.parts));
    }
    images[key] = image;
    return image;
}

// Returns the name of the cached file with the result of link_ptx().
static std::string linked_name(const std::vector<LinkInput> &inputs, bool complete) {
    embedded::Sha256 hash;
    hash_translator(hash);
    hash.add(complete ? "link" : "check");
    for (const LinkInput &input : inputs) {
        hash.add(input.name);
        hash.add(std::to_string(input.text.size()));
        hash.add(input.text);
    }
    return hash.hex() + ".ptx";
}

bool link_ptx(const std::vector<LinkInput> &inputs, bool complete, std::string &text, TranslateError &error) {
    const std::string name = linked_name(inputs, complete);
    if (std::optional<std::string> found = embedded::read_cached(name)) {
        text = std::move(*found);
        return true;
    }
    const embedded::ScratchDirectory scratch;
    std::vector<std::string> words = {complete ? "--link" : "--check", scratch.path() + "/linked.ptx"};
    for (const LinkInput &input : inputs) {
        const std::string file = std::to_string(words.size()) + ".ptx";
        if (!scratch.write(file, input.text)) {
            error = {300, no_room};
            return false;
        }
        words.insert(words.end(), {input.name, scratch.path() + "/" + file});
    }
    std::string log;
    const int status = run_translator(words, scratch.path(), log);
    std::optional<std::string> linked = scratch.read("linked.ptx");
    if (!linked) {
        error = {status == 2 ? 218 : status == 4 ? 999 : 300, log.empty() ? "the linker failed" : log};
        return false;
    }
    text = std::move(*linked);
    if (linked_name(inputs, complete) == name) embedded::write_cached(name, text);
    return true;
}

// Returns the name of the cached file with the result of patch_ptx().
static std::string patched_name(const std::string &ptx, const std::map<uint32_t, std::string> &names,
                                const std::vector<std::string> &patches) {
    embedded::Sha256 hash;
    hash_translator(hash);
    hash.add("patch");
    for (const auto &[point, name] : names) hash.add(std::to_string(point) + "=" + name);
    hash.add(std::to_string(ptx.size()));
    hash.add(ptx);
    for (const std::string &patch : patches) {
        hash.add(std::to_string(patch.size()));
        hash.add(patch);
    }
    return hash.hex() + ".ptx";
}

bool patch_ptx(const std::string &ptx, const std::map<uint32_t, std::string> &names,
               const std::vector<std::string> &patches, std::string &text, TranslateError &error) {
    const std::string cached = patched_name(ptx, names, patches);
    if (std::optional<std::string> found = embedded::read_cached(cached)) {
        text = std::move(*found);
        return true;
    }
    const embedded::ScratchDirectory scratch;
    const std::string output = "patched.ptx", input = "module.ptx";
    bool written = scratch.write(input, ptx);
    std::vector<std::string> words = {"--patch", scratch.path() + "/" + output, scratch.path() + "/" + input};
    for (const auto &[point, name] : names) words.push_back(std::to_string(point) + "=" + name);
    for (size_t k = 0; k < patches.size(); k++) {
        const std::string file = "patches" + std::to_string(k) + ".ptx";
        written = written && scratch.write(file, patches[k]);
        words.push_back(scratch.path() + "/" + file);
    }
    if (!written) {
        error = {300, no_room};
        return false;
    }
    std::string log;
    const int status = run_translator(words, scratch.path(), log);
    std::optional<std::string> made = scratch.read(output);
    if (!made) {
        error = {status == 2 || status == 4 ? 218 : 300,
                 log.empty() ? "the patches cannot be inserted" : log};
        return false;
    }
    text = std::move(*made);
    if (patched_name(ptx, names, patches) == cached) embedded::write_cached(cached, text);
    return true;
}

std::map<std::string, CodeRange> patched_functions(const std::string &text, bool of_patches) {
    const std::string_view mark = of_patches ? "//cudasim.patch " : "//cudasim.function ";
    std::map<std::string, CodeRange> found;
    for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos;) {
        at += mark.size();
        std::istringstream line(text.substr(at, text.find('\n', at) - at));
        std::string name;
        CodeRange range{};
        if (line >> name >> range.offset >> range.size) found[name] = range;
    }
    return found;
}

}  // namespace cudasim
