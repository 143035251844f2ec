#include "driver/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

namespace cudasim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMostBytes = size_t{1} << 46;

struct Header {  // the first page of a pool's file
    static constexpr uint64_t kMagic = 0x4c4f4f505f534343;
    uint64_t magic = kMagic;
    int32_t device = 0;
};

bool resize(int file, size_t size) {
    rlimit limit{};  // a larger file would end the process by SIGXFSZ
    return getrlimit(RLIMIT_FSIZE, &limit) == 0 && size <= limit.rlim_cur &&
           ftruncate(file, static_cast<off_t>(size)) == 0;
}

}  // namespace

int make_file(size_t size) {
    const int file = memfd_create("cudasim", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return -1;
    if (resize(file, size) && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0) return file;
    close(file);
    return -1;
}

FileRange::FileRange(std::shared_ptr<PoolFile> in, uint64_t at, size_t size)
    : file(std::move(in)), offset(at), bytes(size) {}

FileRange::~FileRange() {
    if (file->imported()) return;
    fallocate(file->file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
    std::lock_guard lock(file->mutex_);
    file->free_.add(offset, bytes);
}

PoolFile::PoolFile(int file, int device, bool imported) : file_(file), device_(device), imported_(imported) {
    struct stat found{};
    if (fstat(file, &found) == 0) inode_ = found.st_ino;
}

PoolFile::~PoolFile() { close(file_); }

std::shared_ptr<PoolFile> PoolFile::create(int device) {
    const int file = make_file(kPage);
    if (file < 0) return nullptr;
    std::shared_ptr<PoolFile> made(new PoolFile(file, device, false));
    Header header;
    header.device = device;
    if (pwrite(file, &header, sizeof header, 0) != sizeof header) return nullptr;
    made->size_ = kPage;
    made->free_.add(kPage, kMostBytes);
    return made;
}

std::shared_ptr<PoolFile> PoolFile::import(int descriptor) {
    const int seals = fcntl(descriptor, F_GET_SEALS);  // a file that can shrink may end the process by SIGBUS
    Header header;
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
        pread(descriptor, &header, sizeof header, 0) != sizeof header || header.magic != Header::kMagic)
        return nullptr;
    const int file = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    return file < 0 ? nullptr : std::shared_ptr<PoolFile>(new PoolFile(file, header.device, true));
}

std::shared_ptr<const FileRange> PoolFile::take(size_t bytes) {
    std::lock_guard lock(mutex_);
    const uint64_t offset = free_.take(bytes);
    if (offset == 0) return nullptr;
    if (offset + bytes > size_) {
        if (!resize(file_, offset + bytes)) {
            free_.add(offset, bytes);
            return nullptr;
        }
        size_ = offset + bytes;
    }
    return std::make_shared<const FileRange>(shared_from_this(), offset, bytes);
}

std::shared_ptr<const FileRange> PoolFile::part(uint64_t offset, size_t bytes) {
    struct stat found{};
    if (fstat(file_, &found) != 0) return nullptr;
    const auto size = static_cast<uint64_t>(found.st_size);
    if (offset % kPage != 0 || bytes % kPage != 0 || offset < kPage || bytes == 0 || offset > size ||
        bytes > size - offset)
        return nullptr;
    return std::make_shared<const FileRange>(shared_from_this(), offset, bytes);
}

}  // namespace cudasim
