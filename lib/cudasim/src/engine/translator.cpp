// Runs the translator (cudasim.translate), once for each PTX text, and caches its results by content.

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/internal.h"
#include "engine/sha256.h"

extern char **environ;

namespace cudasim {

namespace {

// ---------------------------------------------------------------------------------------------------- paths

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
        found = CUDASIM_PYTHON;  // it may be missing if the library was built elsewhere
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

// Creates a directory that belongs to this user and that no other user can write to. Returns its path, empty if that fails.
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

// Adds what a translation depends on besides the PTX: the translator, the compiler, the host's instruction set.
void hash_translator(Sha256 &hash, const std::string &path) {
    std::vector<std::string> files = python_files(path + "/cudasim/translate");
    for (const std::string &file : python_files(path + "/gpubpf/ptx")) files.push_back(file);
    for (const char *file :
         {"/cudasim/src/device_runtime.h", "/cudasim/src/device_abi.h", "/gpubpf/errors.py"})
        files.push_back(path + file);
    for (const std::string &file : files) {
        struct stat found = {};
        stat(file.c_str(), &found);
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

// Returns whether the translator must not inherit an environment variable.
bool is_excluded(const char *entry) {
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

// Writes a temporary file beside `stem` in the cache. Returns its path; empty, with `error` set, if that fails.
std::string write_temporary(const std::string &stem, std::string_view text, TranslateError &error) {
    std::string name = stem + "-XXXXXX";
    const int fd = mkostemp(name.data(), O_CLOEXEC);
    const bool written = fd >= 0 && write_all(fd, text);
    if (fd >= 0) close(fd);
    if (written) return name;
    if (fd >= 0) unlink(name.c_str());
    error = {300, "cannot write to the directory for translated modules, " + stem.substr(0, stem.rfind('/'))};
    return "";
}

const char no_directory[] = "no private directory for translated modules; set CUDASIM_CACHE";

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
int run_translator(const std::vector<std::string> &arguments, std::string &log) {
    const std::string interpreter = python(), path = pythonpath();
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        log = "cannot start the translator: out of file descriptors";
        return 3;
    }
    std::vector<std::string> kept;
    for (char **entry = environ; entry && *entry; entry++)
        if (!is_excluded(*entry)) kept.emplace_back(*entry);
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

std::shared_ptr<const Image> translate(std::string_view ptx, TranslateError &error, bool virtual_clock) {
    while (!ptx.empty() && ptx.back() == '\0') ptx.remove_suffix(1);
    const std::string path = pythonpath();
    Sha256 hash;
    hash_translator(hash, path);
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
        const std::string input = write_temporary(directory + "/" + key, ptx, error);
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
    hash_translator(hash, path);
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
        const std::string file = write_temporary(stem, input.text, error);
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
