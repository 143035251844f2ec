#include "log/log.h"

#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "thread.h"
#include "wire.h"

namespace gpubpf {

Log oplog;

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
        // A faulty tool may claim to have consumed more than there is.
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

namespace {

// Of this process. A forked child that attaches gets its own.
std::atomic<uint64_t> next_id{0}, next_other{0};
std::atomic<uint32_t> generation{0}, process{0};

}  // namespace

const Lifetime log_lifetime{
    [] {
        process = static_cast<uint32_t>(getpid());
        ++generation;
    },
    nullptr,
    [] { oplog.close(); },
    [] { oplog.forget(); },
};

uint32_t process_id() { return process.load(std::memory_order_relaxed); }

void number_process(uint64_t number) {
    next_id = number << kNumberBits | 1;
    next_other = next_id | kOtherOperation;
}

uint32_t generation_of_process() { return generation.load(std::memory_order_relaxed); }

uint64_t take_ids(uint64_t n) { return next_id.fetch_add(n, std::memory_order_relaxed); }

uint64_t other_id() { return next_other.fetch_add(1, std::memory_order_relaxed); }

uint32_t thread_id() {
    struct Known {
        uint32_t id, of;
    } none{};
    Known &known = thread_cache(CacheSlot::Id, none);
    const uint32_t now = generation.load(std::memory_order_relaxed);
    if (known.of != now) known = {static_cast<uint32_t>(syscall(SYS_gettid)), now};
    return known.id;
}

}  // namespace gpubpf
