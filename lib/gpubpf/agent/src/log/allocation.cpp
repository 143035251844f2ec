#include "log/allocation.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "log/log.h"
#include "log/stack.h"
#include "this_agent.h"
#include "thread.h"

namespace gpubpf {

namespace {

// Remembered freed ranges. Beyond that, any allocation may reuse freed memory.
constexpr size_t kMostRanges = 4096;
constexpr size_t kMostLive = 1 << 20;    // allocations known at a time
constexpr size_t kMostVariables = 4096;  // variables of loaded modules that are logged

struct Live {
    uint64_t end, serial;
    uint32_t context;
};

struct Allocations {
    std::mutex lock;                // guards the members below
    std::map<uint64_t, Live> live;  // by start address, without overlaps
    // Ranges freed since the epoch began: start and end. Adjacent ranges are merged.
    std::map<uint64_t, uint64_t> ranges;
    bool anywhere = false;  // memory at an unknown address was freed
    uint64_t serials = 0;
    size_t variables = 0;
    std::atomic<uint32_t> misses{0};
};

AttachmentState<Allocations> all;
std::atomic<uint64_t> epoch{0};

// Returns the first entry, by start address, that ends after `base`.
template <class Ranges, class End>
auto first_after(Ranges &ranges, uint64_t base, const End &end) {
    auto it = ranges.upper_bound(base);
    if (it != ranges.begin() && end(std::prev(it)->second) > base) --it;
    return it;
}

uint64_t end_of(const Live &live) { return live.end; }
uint64_t end_of(uint64_t end) { return end; }

constexpr auto kEnd = [](const auto &value) { return end_of(value); };

void remember(Allocations &a, uint64_t base, uint64_t end) {
    auto it = a.ranges.upper_bound(base);
    if (it != a.ranges.begin() && std::prev(it)->second >= base) --it;
    while (it != a.ranges.end() && it->first <= end) {
        base = std::min(base, it->first);
        end = std::max(end, it->second);
        it = a.ranges.erase(it);
    }
    a.ranges.emplace(base, end);
    if (a.ranges.size() <= kMostRanges) return;
    a.ranges.clear();
    a.anywhere = true;
}

// The range of values that look like GPU addresses.
constexpr uint64_t kLeast = uint64_t(1) << 32, kMost = uint64_t(1) << 49;
// The agent asks the driver about values that look like addresses, until this many were not addresses.
constexpr uint32_t kMostMisses = 100000;

bool is_known(uint64_t address) {
    std::lock_guard<std::mutex> hold(all->lock);
    auto it = first_after(all->live, address, kEnd);
    return it != all->live.end() && it->first <= address;
}

// Adds an allocation that the driver reports.
void add_found(uint64_t base, uint64_t bytes, uint32_t context) {
    const uint64_t end = base + bytes < base ? UINT64_MAX : base + bytes;
    {
        Allocations &a = *all;
        std::lock_guard<std::mutex> hold(a.lock);
        auto it = first_after(a.live, base, kEnd);
        if ((it != a.live.end() && it->first < end) || a.live.size() >= kMostLive)
            return;  // another thread was faster
        a.live.emplace(base, Live{end, ++a.serials, context});
    }
    log_allocation(context, "before", base, bytes, 0, 0, kFromBefore);
}

}  // namespace

void log_allocation(uint32_t context, const char *call, uint64_t base, uint64_t bytes, uint64_t epoch_then,
                    uint32_t stack, uint16_t flags) {
    if (!oplog.on()) return;
    Record r;
    r.id = other_id();
    r.kind = Kind::Api;
    r.flags = flags;
    r.thread = thread_id();
    r.call_ns = r.return_ns = now_ns();
    r.context = context == kNoContext ? 0 : context;
    r.stack = stack;
    describe_call(r, kNoFunction, call, bytes);
    describe_memory(r, base, epoch_then);
    oplog.put(r);
}

const Lifetime allocation_lifetime{
    [] {
        all.begin();
        epoch = 0;
    },
    nullptr,
    [] { all.end(); },
    nullptr,
};

uint64_t allocation_epoch() { return epoch.load(std::memory_order_acquire); }

uint64_t allocated(uint64_t base, uint64_t bytes, uint32_t context) {
    const uint64_t end = base + bytes < base ? UINT64_MAX : base + bytes;
    Allocations &a = *all;
    std::lock_guard<std::mutex> hold(a.lock);
    auto range = first_after(a.ranges, base, kEnd);
    bool again = a.anywhere || (range != a.ranges.end() && range->first < end);
    for (auto it = first_after(a.live, base, kEnd); it != a.live.end() && it->first < end; again = true)
        it = a.live.erase(it);  // its end was not seen, or not yet
    if (again) {
        a.ranges.clear();
        a.anywhere = false;
        epoch.fetch_add(1, std::memory_order_acq_rel);
    }
    if (a.live.size() < kMostLive) a.live.emplace(base, Live{end, ++a.serials, context});
    return epoch.load(std::memory_order_relaxed);
}

void log_allocations_before(const void *parameters, size_t size, uint32_t context, FindAllocation find) {
    struct Remembered {
        uint64_t last[64], when;
    } none{};
    Remembered &some = thread_cache(CacheSlot::Addresses, none);
    if (const uint64_t now = attachment.load(std::memory_order_relaxed); some.when != now) {
        some = {};
        some.when = now;
    }
    for (size_t at = 0; at + sizeof(uint64_t) <= size; at += sizeof(uint64_t)) {
        uint64_t value;
        memcpy(&value, static_cast<const char *>(parameters) + at, sizeof value);
        if (value < kLeast || value >= kMost) continue;
        uint64_t &known = some.last[(value >> 8 ^ value >> 20) % std::size(some.last)];
        if (known == value) continue;
        known = value;
        if (is_known(value) || all->misses >= kMostMisses) continue;
        uint64_t base = 0, length = 0;
        if (find(value, base, length) && length) add_found(base, length, context);
        else ++all->misses;
    }
}

Freeing freeing(uint64_t base, uint64_t bytes) {
    Allocations &a = *all;
    std::lock_guard<std::mutex> hold(a.lock);
    auto it = a.live.find(base);
    return {base, bytes, it == a.live.end() ? 0 : it->second.serial, epoch.load(std::memory_order_relaxed)};
}

void freed(const Freeing &what) {
    if (!what.base) return;
    Allocations &a = *all;
    std::lock_guard<std::mutex> hold(a.lock);
    if (what.bytes) {
        const uint64_t end = what.base + what.bytes < what.base ? UINT64_MAX : what.base + what.bytes;
        auto first = a.live.lower_bound(what.base);
        while (first != a.live.end() && first->first < end) first = a.live.erase(first);
        return remember(a, what.base, end);
    }
    if (!what.serial) {  // there was no room for its record
        a.anywhere = true;
        return;
    }
    auto it = a.live.find(what.base);
    if (it == a.live.end() || it->second.serial != what.serial)
        return;  // its addresses already belong to another allocation
    const uint64_t end = it->second.end;
    a.live.erase(it);
    remember(a, what.base, end);
}

void freed_with(uint32_t context) {
    uint64_t when;
    {
        Allocations &a = *all;
        std::lock_guard<std::mutex> hold(a.lock);
        when = epoch.load(std::memory_order_relaxed);
        for (auto it = a.live.begin(); it != a.live.end();) {
            if (it->second.context != context) {
                ++it;
                continue;
            }
            const uint64_t base = it->first, end = it->second.end;
            it = a.live.erase(it);
            remember(a, base, end);
        }
    }
    log_allocation(context, "cuCtxDestroy", 0, 0, when, 0);
}

bool variable_found(uint32_t context, const std::string &name, uint64_t base, uint64_t bytes) {
    if (!oplog.on() || !base || !bytes) return false;
    {
        std::lock_guard<std::mutex> hold(all->lock);
        if (all->variables >= kMostVariables) return false;
        ++all->variables;
    }
    log_allocation(context, "variable", base, bytes, allocated(base, bytes, context), told_name(name));
    return true;
}

void variable_gone(uint32_t context, const char *call, uint64_t base) {
    {
        std::lock_guard<std::mutex> hold(all->lock);
        --all->variables;
    }
    if (!call) return;
    const Freeing what = freeing(base, 0);
    log_allocation(context, call, base, 0, what.epoch, 0);
    freed(what);
}

}  // namespace gpubpf
