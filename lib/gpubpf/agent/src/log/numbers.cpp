#include <sys/syscall.h>
#include <unistd.h>

#include "log/log.h"
#include "thread.h"

namespace gpubpf {

Log oplog;

namespace {

// For this process. A forked child that attaches gets its own.
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

uint64_t next_launch_id() { return next_id.load(std::memory_order_relaxed); }

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
