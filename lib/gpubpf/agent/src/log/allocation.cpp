#include "log/allocation.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "log/clock.h"
#include "log/operation.h"
#include "log/stack.h"

namespace gpubpf {

namespace {

// Freed ranges that are remembered. Beyond that, any allocation may reuse freed memory.
constexpr size_t kMostRanges = 4096;
constexpr size_t kMostLive = 1 << 20;    // allocations that are known at once
constexpr size_t kMostVariables = 4096;  // variables of loaded modules that are logged

struct Live {
    uint64_t end, serial;
    const Context *context;
};

struct Allocations {
    std::mutex lock;                // guards the members below
    std::map<uint64_t, Live> live;  // by start address; none overlap
    // Ranges freed since the epoch began: start and end. None of them touch.
    std::map<uint64_t, uint64_t> ranges;
    bool anywhere = false;  // memory at an unknown address was freed
    uint64_t serials = 0;
    size_t variables = 0;
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

void put_record(const Context *context, const char *call, uint64_t base, uint64_t bytes, uint64_t when,
                uint32_t name, uint16_t flags = 0) {
    if (!oplog.on()) return;
    Record r;
    r.id = other_id();
    r.kind = Kind::Api;
    r.flags = flags;
    r.thread = thread_id();
    r.call_ns = r.return_ns = now_ns();
    r.context = context ? context->serial : 0;
    r.stack = name;
    describe_call(r, kNoFunction, call, bytes);
    describe_memory(r, base, when);
    oplog.put(r);
}

}  // namespace

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

uint64_t allocated(uint64_t base, uint64_t bytes, const Context *context) {
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

bool allocation_known(uint64_t address) {
    std::lock_guard<std::mutex> hold(all->lock);
    auto it = first_after(all->live, address, kEnd);
    return it != all->live.end() && it->first <= address;
}

void allocation_found(uint64_t base, uint64_t bytes, const Context *context) {
    const uint64_t end = base + bytes < base ? UINT64_MAX : base + bytes;
    {
        Allocations &a = *all;
        std::lock_guard<std::mutex> hold(a.lock);
        auto it = first_after(a.live, base, kEnd);
        if ((it != a.live.end() && it->first < end) || a.live.size() >= kMostLive)
            return;  // another thread was faster
        a.live.emplace(base, Live{end, ++a.serials, context});
    }
    put_record(context, "before", base, bytes, 0, 0, kFromBefore);
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
    if (!what.serial) {  // there was no room to remember it
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

void freed_with(const Context *context) {
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
    put_record(context, "cuCtxDestroy", 0, 0, when, 0);
}

void variable_found(Module *module, const Context *context, const std::string &name, uint64_t base,
                    uint64_t bytes) {
    if (!oplog.on() || !base || !bytes) return;
    {
        std::lock_guard<std::mutex> hold(all->lock);
        if (all->variables >= kMostVariables) return;
        ++all->variables;
    }
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        module->variables.emplace_back(base, context);  // the thread that unloads the module waits for us
    }
    put_record(context, "variable", base, bytes, allocated(base, bytes, context), told_name(name));
}

void variables_gone(Module *module, const char *call) {
    std::vector<std::pair<uint64_t, const Context *>> gone;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        gone.swap(module->variables);
    }
    {
        std::lock_guard<std::mutex> hold(all->lock);
        all->variables -= gone.size();
    }
    for (const auto &v : gone) {
        if (v.second->dead) continue;
        const Freeing what = freeing(v.first, 0);
        put_record(v.second, call, v.first, 0, what.epoch, 0);
        freed(what);
    }
}

}  // namespace gpubpf
