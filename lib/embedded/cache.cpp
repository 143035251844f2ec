// The cache of an embedded device. Its folder may be full, read-only, damaged or another user's: then everything is made again.
//
// A file is its content, the SHA-256 of (name, NUL, content), and kMark. gpubpf/cache.py has the same format, but puts its
// stage before the name. The name contains a key of everything that the content is made of.

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <vector>

#include "embedded/cache.h"
#include "embedded/sha256.h"

namespace embedded {

namespace {

constexpr std::string_view kMark = "gpubpf cache 1.\n";
constexpr size_t kDigest = std::tuple_size<Sha256::Digest>::value;
constexpr size_t kLargest = 1u << 28;            // bytes of a file
constexpr uint64_t kScratchBytes = 32ull << 20;  // usually enough for the compiler's files

// Returns whether no other user can have changed a file, or the names in a directory. Root can change everything anyway.
bool trusted(const struct stat &found) {
    return (found.st_uid == geteuid() || found.st_uid == 0) && (found.st_mode & 022) == 0;
}

bool is_absolute(const std::string &path) { return path.rfind('/', 0) == 0; }

// Returns whether no other user can replace a directory that this user has in this one.
bool keeps_entries(const struct stat &directory) {
    const bool sticky = directory.st_uid == 0 && (directory.st_mode & S_ISVTX);  // such as /tmp
    return trusted(directory) || sticky;
}

// Creates the missing directories of a path, but none in another user's directory: under sudo, HOME may be another user's.
void make_directories(const std::string &path) {
    for (size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
        const std::string parent = path.substr(0, slash), child = path.substr(0, path.find('/', slash + 1));
        struct stat found;
        if (stat(parent.c_str(), &found) != 0) return;
        if (keeps_entries(found)) mkdir(child.c_str(), 0700);
    }
}

bool usable(const std::string &path) {
    make_directories(path);
    const size_t name = path.find_last_of('/', path.find_last_not_of('/'));
    const std::string parent = name == std::string::npos ? "." : path.substr(0, name + 1);
    struct stat found;
    if (stat(parent.c_str(), &found) != 0 || !keeps_entries(found)) return false;
    return lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode) && trusted(found) &&
           access(path.c_str(), R_OK | W_OK | X_OK) == 0;
}

std::string cache_directory() {
    const std::string device = kDevice;
    std::string chosen_by = device + "_CACHE";
    for (char &c : chosen_by) c = static_cast<char>(toupper(static_cast<unsigned char>(c)));
    std::vector<std::string> places;
    if (const std::string chosen = variable(chosen_by.c_str()); !chosen.empty())
        places.push_back(is_absolute(chosen) ? chosen : "./" + chosen);
    if (const std::string xdg = variable("XDG_CACHE_HOME"); is_absolute(xdg))
        places.push_back(xdg + "/gpubpf/" + device);
    if (const std::string home = variable("HOME"); is_absolute(home))
        places.push_back(home + "/.cache/gpubpf/" + device);
    for (const std::string &place : places)
        if (usable(place)) return place;
    // Not in TMPDIR, as in gpubpf/cache.py.
    const std::string shared = "/tmp/gpubpf-" + std::to_string(geteuid()), place = shared + "/" + device;
    return usable(shared) && usable(place) ? place : "";
}

Sha256::Digest digest(const std::string &name, std::string_view content) {
    Sha256 hash;
    hash.add(name);
    hash.add(content.data(), content.size());
    return hash.digest();
}

bool read_all(int file, char *to, size_t size) {
    while (size != 0) {
        const ssize_t n = read(file, to, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        to += n;
        size -= static_cast<size_t>(n);
    }
    return true;
}

// Reads a regular file. O_NONBLOCK: opening a FIFO must not wait.
std::optional<std::string> read_file(const std::string &path, bool (*accepted)(const struct stat &)) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (file < 0) return std::nullopt;
    struct stat found;
    std::optional<std::string> content;
    if (fstat(file, &found) == 0 && S_ISREG(found.st_mode) && accepted(found) &&
        static_cast<uint64_t>(found.st_size) <= kLargest) {
        content.emplace(static_cast<size_t>(found.st_size), '\0');
        if (!read_all(file, content->data(), content->size())) content.reset();
        futimens(file, nullptr);  // mark as used: gpubpf/cache.py removes the longest unused first
    }
    close(file);
    return content;
}

}  // namespace

std::string variable(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

bool write_all(int file, std::string_view content) {
    rlimit limit;  // beyond it, writing ends the process
    const off_t at = lseek(file, 0, SEEK_CUR);
    if (at < 0 || getrlimit(RLIMIT_FSIZE, &limit) != 0 ||
        limit.rlim_cur < static_cast<uint64_t>(at) + content.size())
        return false;
    while (!content.empty()) {
        const ssize_t n = write(file, content.data(), content.size());
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        content.remove_prefix(static_cast<size_t>(n));
    }
    return true;
}

std::string cached_path(const std::string &name) {
    const std::string directory = cache_directory();
    return directory.empty() ? "" : directory + "/" + name;
}

std::optional<std::string> read_cached(const std::string &name) {
    std::optional<std::string> found = read_file(cached_path(name), trusted);
    if (!found || found->size() < kDigest + kMark.size()) return std::nullopt;
    const size_t size = found->size() - kDigest - kMark.size();
    const std::string_view content(found->data(), size), end(found->data() + size, kDigest + kMark.size());
    if (end.substr(kDigest) != kMark) return std::nullopt;
    const Sha256::Digest wanted = digest(name, content);
    if (memcmp(end.data(), wanted.data(), wanted.size()) != 0) return std::nullopt;
    found->resize(size);
    return found;
}

bool write_cached(const std::string &name, std::string_view content) {
    const std::string directory = cache_directory();
    if (directory.empty() || content.size() > kLargest - kDigest - kMark.size()) return false;
    const std::string path = directory + "/" + name;
    std::string temporary = directory + "/.part-XXXXXX";  // gpubpf/cache.py removes old ones
    const int file = mkostemp(temporary.data(), O_CLOEXEC);
    if (file < 0) return false;
    const Sha256::Digest end = digest(name, content);
    const std::string_view digest_text(reinterpret_cast<const char *>(end.data()), end.size());
    const bool written = write_all(file, content) && write_all(file, digest_text) && write_all(file, kMark);
    const bool closed = close(file) == 0;  // NFS and quotas may report a full disk only here
    if (written && closed) {
        if (rename(temporary.c_str(), path.c_str()) == 0) return true;
        std::error_code ignored;  // a directory stands there
        std::filesystem::remove_all(path, ignored);
        if (rename(temporary.c_str(), path.c_str()) == 0) return true;
    }
    unlink(temporary.c_str());
    return false;
}

ScratchDirectory::ScratchDirectory() {
    for (const std::string &place :
         {variable("TMPDIR"), std::string("/tmp"), std::string("/dev/shm"), cache_directory()}) {
        struct statvfs space;
        if (!is_absolute(place) || statvfs(place.c_str(), &space) != 0) continue;
        std::string path = place + "/" + kDevice + "-XXXXXX";
        if (mkdtemp(path.data()) == nullptr) continue;
        const bool roomy = static_cast<uint64_t>(space.f_bavail) * space.f_frsize >= kScratchBytes;
        if (path_.empty() || roomy) {
            if (!path_.empty()) rmdir(path_.c_str());
            path_ = path;
        } else {
            rmdir(path.c_str());
        }
        if (roomy) return;
    }
}

ScratchDirectory::~ScratchDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

bool ScratchDirectory::write(const std::string &name, std::string_view content) const {
    const int file = open((path_ + "/" + name).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return false;
    const bool written = write_all(file, content);
    return close(file) == 0 && written;
}

std::optional<std::string> ScratchDirectory::read(const std::string &name) const {
    return read_file(path_ + "/" + name, [](const struct stat &) { return true; });  // whatever the umask
}

}  // namespace embedded
