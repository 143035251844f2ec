#include "shared_files.h"

#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace gpubpf {

namespace {

constexpr uint64_t kArrayLimit = uint64_t(1) << 32;

struct File {
    void *host;
    uint64_t bytes;
    int file;
    ino_t inode;
};
std::map<uint32_t, File> *arrays = nullptr;  // written before the Welcome, and on detach

bool is_ours(const File &array) {
    struct stat st;
    return fstat(array.file, &st) == 0 && st.st_ino == array.inode;
}

void close_arrays() {
    if (!arrays) return;
    for (const auto &a : *arrays) {
        munmap(a.second.host, a.second.bytes);
        if (is_ours(a.second)) close(a.second.file);
    }
    delete arrays;
    arrays = nullptr;
}

}  // namespace

bool take_shared(Reader &reader, int file) {
    message::SharedFile sent;
    struct stat st;
    if (!reader.read(sent)) return false;
    const uint64_t bytes = sent.size;
    if (file < 0 || !bytes || bytes > kArrayLimit || fstat(file, &st) != 0) return false;
    if (S_ISREG(st.st_mode) && static_cast<uint64_t>(st.st_size) < bytes) return false;
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) return false;
    if (!arrays) arrays = new std::map<uint32_t, File>;
    return arrays->emplace(sent.map, File{at, bytes, fcntl(file, F_DUPFD_CLOEXEC, 200), st.st_ino}).second;
}

void *shared_array(uint32_t map) {
    if (!arrays) return nullptr;
    auto it = arrays->find(map);
    return it == arrays->end() ? nullptr : it->second.host;
}

void *map_shared_file(uint32_t map, uint64_t &bytes) {
    if (!arrays) return nullptr;
    auto it = arrays->find(map);
    if (it == arrays->end() || !is_ours(it->second)) return nullptr;
    bytes = it->second.bytes;
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, it->second.file, 0);
    return at == MAP_FAILED ? nullptr : at;
}

const Lifetime shared_lifetime{nullptr, nullptr, close_arrays, [] { arrays = nullptr; }};

}  // namespace gpubpf
