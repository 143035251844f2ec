#include "log/clock.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <dlfcn.h>
#include <mutex>
#include <sched.h>
#include <sys/mman.h>
#include <utility>
#include <vector>

#include "attachment.h"
#include "driver/objects.h"
#include "hook_table.h"
#include "log/log.h"
#include "state.h"

namespace gpubpf {

namespace {

constexpr uint64_t kNever = UINT64_MAX;
// In ns: how long the host waits for the kernel to begin, for all answers, and for its end; and how long it
// spins before it yields.
constexpr uint64_t kStart = 150000000, kAnswers = 200000000, kEnd = 5000000, kSpin = 30000;
// number of brackets taken, and of the narrowest that are logged
constexpr unsigned kRounds = 40, kKept = 4;
constexpr uint64_t kPage = 4096;
// ns: the resolution of timing events, 0.5 µs for each of two (CUDA driver API, cuEventElapsedTime)
constexpr uint32_t kEventError = 1000;

uint64_t (*virtual_now)() = nullptr;
uint64_t (*virtual_last)() = nullptr;

uint64_t monotonic() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// The data that host and kernel exchange, in a page of host memory.
struct Page {
    std::atomic<uint64_t> request;  // counts up; kNever: end
    uint64_t pad[7];
    std::atomic<uint64_t> answer;  // the request that the values below answer
    uint64_t gpu, clock64;
    uint32_t sm, tick_ns;
    uint64_t first, last;  // start and end of the kernel
    std::atomic<uint64_t> ended;
};
static_assert(offsetof(Page, answer) == 64 && offsetof(Page, ended) == 112, "clock.ptx knows these");

template <typename Condition>
bool until(uint64_t deadline, const Condition &condition) {
    const uint64_t begin = monotonic();
    for (uint64_t now = begin; !condition(); now = monotonic()) {
        if (now > deadline) return false;
        if (now - begin > kSpin) sched_yield();
    }
    return true;
}

}  // namespace

struct GpuClock : AttachmentObject {
    ~GpuClock() override { newest.reset(); }  // returns its event to `free`
    bool usable = false;
    bool pending = false;  // one of the agent's kernels has not ended
    CUstream stream = nullptr;
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    Page *page = nullptr;
    CUdeviceptr address = 0;
    CUevent end = nullptr;

    std::mutex lock;  // guards the members below
    std::shared_ptr<const Reference> newest;
    std::vector<CUevent> free;  // events of references that are no longer held
};

namespace {

// Returns the tool's cubin for a GPU, or null: of the same generation, and not for a later GPU than this one.
const uint8_t *clock_kernel_for(uint32_t cc) {
    const std::vector<uint8_t> *best = nullptr;
    for (const auto &[built_for, cubin] : agent.config.clock_kernels)
        if (built_for / 10 == cc / 10 && built_for <= cc) best = &cubin;  // they are in ascending order
    return best ? best->data() : nullptr;
}

GpuClock *make(Context &context) {
    auto clock = std::make_unique<GpuClock>();
    auto load =
        reinterpret_cast<CUresult (*)(CUmodule *, const void *)>(hooks[kHook_cuModuleLoadData].original);
    auto find = reinterpret_cast<CUresult (*)(CUfunction *, CUmodule, const char *)>(
        hooks[kHook_cuModuleGetFunction].original);
    const uint8_t *cubin = clock_kernel_for(context.cc);
    void *page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return clock.release();
    if (!driver.cuMemHostRegister_v2 || !driver.cuMemHostGetDevicePointer_v2 || !load || !find ||
        driver.cuMemHostRegister_v2(page, kPage, CU_MEMHOSTREGISTER_DEVICEMAP) != CUDA_SUCCESS) {
        munmap(page, kPage);
        return clock.release();
    }
    context.registered.emplace_back(page, kPage);
    clock->page = static_cast<Page *>(page);
    clock->usable = driver.cuMemHostGetDevicePointer_v2(&clock->address, page, 0) == CUDA_SUCCESS &&
                    driver.cuStreamCreate(&clock->stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                    ((cubin && load(&clock->module, cubin) == CUDA_SUCCESS) ||
                     load(&clock->module, kClockKernel) == CUDA_SUCCESS) &&
                    find(&clock->function, clock->module, "gpubpf_clock") == CUDA_SUCCESS;
    if (clock->usable && driver.cuFuncLoad) driver.cuFuncLoad(clock->function);
    if (clock->usable && driver.cuEventCreate && driver.cuEventRecord && driver.cuEventElapsedTime &&
        driver.cuEventCreate(&clock->end, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        clock->end = nullptr;
    return clock.release();
}

CUevent take_event(GpuClock &clock) {
    if (!clock.end) return nullptr;
    CUevent event = nullptr;
    {
        std::lock_guard<std::mutex> hold(clock.lock);
        if (!clock.free.empty()) {
            event = clock.free.back();
            clock.free.pop_back();
            return event;
        }
    }
    return driver.cuEventCreate(&event, CU_EVENT_DEFAULT) == CUDA_SUCCESS ? event : nullptr;
}

// The kernel runs between two events, and reports when it began and ended. The excess of the events' distance
// is the error.
void refer(GpuClock &clock, CUevent begin) {
    float milliseconds = 0;
    if (driver.cuEventElapsedTime(&milliseconds, begin, clock.end) != CUDA_SUCCESS) {
        std::lock_guard<std::mutex> hold(clock.lock);
        clock.free.push_back(begin);
        return;
    }
    const auto apart = static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
    const int64_t rest =
        std::max<int64_t>(apart - static_cast<int64_t>(clock.page->last - clock.page->first), 0);
    auto *made = new Reference{begin, clock.page->first - static_cast<uint64_t>(rest / 2),
                               static_cast<uint32_t>(std::min<int64_t>(rest / 2 + kEventError, UINT32_MAX))};
    GpuClock *of = &clock;  // it outlives the reference
    std::shared_ptr<const Reference> shared(made, [of](const Reference *r) {
        std::lock_guard<std::mutex> hold(of->lock);
        of->free.push_back(r->event);
        delete r;
    });
    {
        std::lock_guard<std::mutex> hold(clock.lock);
        clock.newest.swap(shared);
    }
}

struct Bracket {
    uint64_t before, gpu, after, clock64;
};

void put(const Context &context, const Page &page, const Bracket &b) {
    Record r;
    r.id = other_id();
    r.kind = Kind::Clock;
    r.thread = thread_id();
    r.call_ns = b.before;
    r.return_ns = b.after;
    r.context = context.serial;
    r.clock = {b.before, b.gpu, b.after, b.clock64, page.sm, page.tick_ns};
    oplog.put(r);
}

}  // namespace

void find_clock(void *library) {
    virtual_now = reinterpret_cast<uint64_t (*)()>(dlsym(library, "cudasim_virtual_now"));
    virtual_last = reinterpret_cast<uint64_t (*)()>(dlsym(library, "cudasim_virtual_last"));
    if (virtual_now && virtual_now() == kNever) virtual_now = nullptr;
}

bool virtual_clock() { return virtual_now != nullptr; }

uint64_t now_ns() { return virtual_now ? virtual_now() : monotonic(); }
uint64_t last_ns() { return virtual_now && virtual_last ? virtual_last() : now_ns(); }

std::shared_ptr<const Reference> reference_of(Context &context) {
    GpuClock *clock = context.clock.load(std::memory_order_acquire);
    if (!clock) return nullptr;
    std::lock_guard<std::mutex> hold(clock->lock);
    return clock->newest;
}

void gather_clock(Context &context, Leftovers &to) {
    GpuClock *clock = context.clock.load();
    if (!clock) return;
    std::shared_ptr<const Reference> newest;
    {
        std::lock_guard<std::mutex> hold(clock->lock);
        newest.swap(clock->newest);
    }
    newest.reset();
    clock->usable = false;
    to.events.insert(to.events.end(), clock->free.begin(), clock->free.end());
    clock->free.clear();
    if (clock->end) to.events.push_back(std::exchange(clock->end, nullptr));
    if (clock->stream) to.streams.push_back(std::exchange(clock->stream, nullptr));
    if (clock->module) to.modules.push_back(std::exchange(clock->module, nullptr));
}

void calibrate(Context &context) {
    if (!oplog.on() || virtual_clock() || registry().captures.load()) return;
    if (!context.clock.load()) context.clock.store(make(context), std::memory_order_release);
    GpuClock &clock = *context.clock.load();
    auto launch = reinterpret_cast<CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                                unsigned, unsigned, CUstream, void **, void **)>(
        hooks[kHook_cuLaunchKernel].original);
    if (!clock.usable || !launch) return;
    if (clock.pending && driver.cuStreamQuery(clock.stream) != CUDA_SUCCESS)
        return;  // the GPU had no room for the kernel
    clock.pending = false;
    Page &page = *clock.page;
    page.request = 0;
    page.answer = 0;
    page.ended = 0;
    CUevent begin = take_event(clock);
    void *parameters[] = {&clock.address};
    bool timed = begin && driver.cuEventRecord(begin, clock.stream) == CUDA_SUCCESS;
    if (launch(clock.function, 1, 1, 1, 1, 1, 1, 0, clock.stream, parameters, nullptr) != CUDA_SUCCESS) {
        clock.usable = false;
        return;
    }
    timed = timed && driver.cuEventRecord(clock.end, clock.stream) == CUDA_SUCCESS;
    const uint64_t start = monotonic();
    std::array<Bracket, kRounds> brackets;
    unsigned taken = 0;
    for (uint64_t round = 1; round <= kRounds + 1;
         ++round) {  // the first round waits for the kernel to begin
        const uint64_t before = monotonic();
        page.request.store(round, std::memory_order_release);
        if (!until(round == 1 ? start + kStart : start + kAnswers,
                   [&] { return page.answer.load(std::memory_order_acquire) == round; }))
            break;
        const uint64_t after = monotonic();
        if (round > 1) brackets[taken++] = {before, page.gpu, after, page.clock64};
    }
    page.request.store(kNever, std::memory_order_release);
    std::sort(brackets.begin(), brackets.begin() + taken,
              [](const Bracket &a, const Bracket &b) { return a.after - a.before < b.after - b.before; });
    for (unsigned i = 0; i < std::min(taken, kKept); ++i) put(context, page, brackets[i]);
    clock.pending = !taken || !until(monotonic() + kEnd, [&] {
        return driver.cuStreamQuery(clock.stream) != CUDA_ERROR_NOT_READY;
    });
    if (!begin) return;
    if (timed && !clock.pending && page.ended.load(std::memory_order_acquire)) return refer(clock, begin);
    std::lock_guard<std::mutex> hold(clock.lock);
    clock.free.push_back(begin);
}

}  // namespace gpubpf
