#include "log/ranges.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fnmatch.h>
#include <mutex>
#include <new>
#include <unordered_map>

#include "log/log.h"
#include "this_agent.h"
#include "thread.h"

namespace gpubpf {

namespace {

constexpr size_t kLongest = 1024;              // bytes of a text; the rest is cut off
constexpr size_t kMostTextBytes = 16 << 20;    // of all texts
constexpr uint32_t kMostProbes = 64;           // places where a text may be
constexpr uint32_t kMostOpen = 256;            // ranges of a thread, or of the process
constexpr size_t kMostTold = kStackLimit - 1;  // ranges of a launch; the inner ones are left out
constexpr size_t kMostCombinations = kMostStacks;

struct Open {
    uint32_t domain, name;  // numbers of texts
};

struct OfThread {
    Open open[kMostOpen];
    uint32_t count, beyond;  // beyond: open ranges that do not fit
    uint64_t changes;        // how often the thread has opened or closed one
    // What `open_ranges` returned last, and for which state.
    bool known;
    uint32_t generation;
    uint64_t changes_then, started_then;
    OpenRanges then;
};

// A text, which is never freed. Its number is its place in the table and 1.
struct Text {
    uint32_t length;
    char bytes[];
    std::string_view view() const { return {bytes, length}; }
};
std::atomic<const Text *> texts[kMostTexts];
std::atomic<size_t> text_bytes{0};

std::string_view text_of(uint32_t number) {
    if (!number) return {};
    if (number > kMostTexts) return kUnknownRange;
    return texts[number - 1].load(std::memory_order_acquire)->view();
}

const Text *new_text(std::string_view text) noexcept {
    const size_t size = sizeof(Text) + text.size();
    if (text_bytes.fetch_add(size, std::memory_order_relaxed) > kMostTextBytes) return nullptr;
    void *memory = ::operator new(size, std::nothrow);
    if (!memory) return nullptr;
    auto *made = static_cast<Text *>(memory);
    made->length = static_cast<uint32_t>(text.size());
    memcpy(made->bytes, text.data(), text.size());
    return made;
}

// The open ranges of the process, the first ones first.
struct Started {
    struct Range {
        uint64_t id;
        Open open;
    };
    std::mutex lock;
    std::vector<Range> ranges;
};
ProcessState<Started> started;
std::atomic<uint64_t> started_changes{0};
std::atomic<bool> any{false};  // the program has opened a range

// The combinations of ranges that the tool knows.
struct Told {
    std::mutex lock;
    std::unordered_map<std::string, uint32_t> numbers;  // by the bytes of an array of Open
};
AttachmentState<Told> told;

uint32_t number_of(const std::vector<Open> &ranges) {
    const std::string key(reinterpret_cast<const char *>(ranges.data()), ranges.size() * sizeof(Open));
    uint32_t number;
    {
        std::lock_guard<std::mutex> hold(told->lock);
        auto it = told->numbers.find(key);
        if (it != told->numbers.end()) return it->second;
        if (told->numbers.size() >= kMostCombinations) return 0;
        number = static_cast<uint32_t>(told->numbers.size()) + 1;
        told->numbers.emplace(key, number);
    }
    message::Ranges sent{number, {}};
    for (const Open &one : ranges)
        sent.ranges.push_back({std::string(text_of(one.domain)), std::string(text_of(one.name))});
    tell_tool(sent);
    return number;
}

bool matches(const Open &range, const std::vector<std::string> &globs) {
    const std::string name(text_of(range.name));
    return std::any_of(globs.begin(), globs.end(), [&](const std::string &glob) {
        return fnmatch(glob.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
    });
}

OpenRanges found(const OfThread &thread, const std::vector<std::string> &globs) {
    std::vector<Open> all;
    {
        std::lock_guard<std::mutex> hold(started->lock);
        for (const Started::Range &range : started->ranges) all.push_back(range.open);
    }
    all.insert(all.end(), thread.open, thread.open + thread.count);
    if (all.empty()) return {0, globs.empty()};
    const bool chosen = globs.empty() || std::any_of(all.begin(), all.end(),
                                                     [&](const Open &one) { return matches(one, globs); });
    if (all.size() > kMostTold) all.resize(kMostTold);
    return {number_of(all), chosen};
}

uint32_t level(const OfThread &thread, uint32_t domain) {
    return static_cast<uint32_t>(std::count_if(thread.open, thread.open + thread.count,
                                               [&](const Open &one) { return one.domain == domain; }));
}

}  // namespace

uint32_t text_number(std::string_view text) noexcept {
    text = text.substr(0, kLongest);
    const size_t hash = std::hash<std::string_view>()(text);
    const Text *mine = nullptr;
    for (uint32_t i = 0; i < kMostProbes; ++i) {
        const auto place = static_cast<uint32_t>((hash + i) % kMostTexts);
        const Text *there = texts[place].load(std::memory_order_acquire);
        if (!there && (mine || (mine = new_text(text))) &&
            texts[place].compare_exchange_strong(there, mine, std::memory_order_acq_rel))
            return place + 1;
        if (!there) return kUnknownText;  // no memory
        if (there->view() != text) continue;
        ::operator delete(const_cast<Text *>(mine));
        return place + 1;
    }
    ::operator delete(const_cast<Text *>(mine));
    return kUnknownText;
}

int push_range(uint32_t domain, uint32_t name) noexcept {
    OfThread none{};
    OfThread &thread = thread_cache(CacheSlot::Ranges, none);
    any.store(true, std::memory_order_relaxed);
    ++thread.changes;
    if (thread.count == kMostOpen) return static_cast<int>(level(thread, domain) + thread.beyond++);
    const uint32_t before = level(thread, domain);
    thread.open[thread.count++] = {domain, name};
    return static_cast<int>(before);
}

int pop_range(uint32_t domain) noexcept {
    OfThread none{};
    OfThread &thread = thread_cache(CacheSlot::Ranges, none);
    if (thread.beyond) return static_cast<int>(level(thread, domain) + --thread.beyond);
    for (uint32_t i = thread.count; i-- > 0;) {
        if (thread.open[i].domain != domain) continue;
        std::copy(thread.open + i + 1, thread.open + thread.count, thread.open + i);
        --thread.count;
        ++thread.changes;
        return static_cast<int>(level(thread, domain));
    }
    return -1;
}

uint64_t start_range(uint32_t domain, uint32_t name) noexcept {
    static std::atomic<uint64_t> last{0};
    uint64_t id = 0;
    quietly([&] {
        std::lock_guard<std::mutex> hold(started->lock);
        if (started->ranges.size() >= kMostOpen) return;
        id = ++last;
        started->ranges.push_back({id, {domain, name}});
        any.store(true, std::memory_order_relaxed);
        started_changes.fetch_add(1, std::memory_order_release);
    });
    return id;
}

void end_range(uint64_t id) noexcept {
    quietly([&] {
        std::lock_guard<std::mutex> hold(started->lock);
        auto &all = started->ranges;
        auto it = std::find_if(all.begin(), all.end(), [&](const auto &one) { return one.id == id; });
        if (it == all.end()) return;
        all.erase(it);
        started_changes.fetch_add(1, std::memory_order_release);
    });
}

OpenRanges open_ranges(const std::vector<std::string> &globs) noexcept {
    OpenRanges now{0, globs.empty()};
    if (!any.load(std::memory_order_relaxed)) return now;
    OfThread none{};
    OfThread &thread = thread_cache(CacheSlot::Ranges, none);
    const uint64_t since = started_changes.load(std::memory_order_acquire);
    const uint32_t generation = generation_of_process();
    if (thread.known && thread.generation == generation && thread.changes_then == thread.changes &&
        thread.started_then == since)
        return thread.then;
    quietly([&] {
        now = found(thread, globs);
        thread.then = now;
        thread.generation = generation;
        thread.changes_then = thread.changes;
        thread.started_then = since;
        thread.known = true;
    });
    return now;
}

const Lifetime ranges_lifetime{
    [] { told.begin(); },
    nullptr,
    [] { told.end(); },
    [] {
        started.in_forked_child();
        started_changes.fetch_add(1, std::memory_order_release);
    },
};

}  // namespace gpubpf
