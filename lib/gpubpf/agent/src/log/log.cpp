#include "log/log.h"

#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "wire.h"

namespace gpubpf {

int Log::open(uint64_t records, bool virtual_clock) {
    if (!records || records & (records - 1) || records > kLogLimit) return -1;
    const uint64_t size = sizeof(LogHeader) + records * sizeof(Record);
    int fd = memory_file("gpubpf-log", size);
    if (fd < 0) return -1;
    void *at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        if (at != MAP_FAILED) munmap(at, size);
        ::close(fd);
        return -1;
    }
    madvise(at, size, MADV_DONTFORK);  // a child must not write there
    auto *header = static_cast<LogHeader *>(at);
    header->capacity = records;
    header->clock = virtual_clock;
    records_ = reinterpret_cast<Record *>(static_cast<char *>(at) + sizeof(LogHeader));
    capacity_ = records;
    header_ = header;
    return fd;
}

void Log::close() {
    if (header_) munmap(header_, sizeof(LogHeader) + capacity_ * sizeof(Record));
    header_ = nullptr;
}

void Log::put(const Record &record) {
    LogHeader *h = header_;
    if (!h) return;
    uint64_t position = h->reserved.load(std::memory_order_relaxed);
    do {
        // A faulty tool may claim to have consumed more records than exist.
        if (position - h->consumed.load(std::memory_order_acquire) >= capacity_) {
            h->lost.fetch_add(1, std::memory_order_relaxed);
            return;
        }
    } while (!h->reserved.compare_exchange_weak(position, position + 1, std::memory_order_relaxed));
    Record &to = records_[position & (capacity_ - 1)];
    memcpy(reinterpret_cast<char *>(&to) + sizeof to.mark,
           reinterpret_cast<const char *>(&record) + sizeof record.mark, sizeof to - sizeof to.mark);
    __atomic_store_n(&to.mark, position + 1, __ATOMIC_RELEASE);
}

// Uses the name in the program's source.
void describe_call(Record &r, uint32_t index, const char *name, uint64_t bytes) {
    r.api.function = index;
    r.api.bytes = bytes;
    constexpr size_t kRoom = sizeof r.api.name;
    size_t length = strnlen(name, kRoom - 1);
    for (const char *suffix : {"_ptsz", "_ptds", "_v2"}) {
        size_t n = strlen(suffix);
        if (length > n && memcmp(name + length - n, suffix, n) == 0) length -= n;
    }
    memcpy(r.api.name, name, length);
}

}  // namespace gpubpf
