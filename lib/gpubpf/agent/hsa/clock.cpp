// The clocks of the host and the GPUs, and hipsim's virtual clock.
#include <algorithm>
#include <cmath>
#include <ctime>
#include <dlfcn.h>

#include "agent.h"

namespace gpubpf {

namespace {

constexpr uint64_t kReal = UINT64_MAX;
// ns: ROCr reads the two clocks one after the other, and assumes this uncertainty (amd_gpu_agent.cpp, TranslateTime).
constexpr uint64_t kCertain = 4000;
constexpr uint64_t kFuture = uint64_t(1) << 56;  // ticks; for a future time, ROCr reads the clocks again
constexpr uint64_t kApart = uint64_t(1) << 40;   // ticks

uint64_t (*virtual_now)() = nullptr;
void (*hipsim_untimed)(int on) = nullptr;

uint64_t host(clockid_t clock) {
    timespec t{};
    clock_gettime(clock, &t);
    return uint64_t(t.tv_sec) * 1000000000 + uint64_t(t.tv_nsec);
}

// Returns by how many ns CLOCK_BOOTTIME, which ROCr uses, is ahead of CLOCK_MONOTONIC.
uint64_t asleep() {
    const uint64_t monotonic = host(CLOCK_MONOTONIC);
    return host(CLOCK_BOOTTIME) - monotonic;
}

// Returns the time at which the GPU's counter shows `ticks`, on CLOCK_BOOTTIME in ns; 0: unknown.
uint64_t time_of(const Gpu &gpu, uint64_t ticks) {
    uint64_t ns = 0;
    return hsa.amd_profiling_convert_tick_to_system_domain(gpu.agent, ticks, &ns) ? 0 : ns;
}

}  // namespace

void find_virtual_clock() {
    void *library = dlopen("libhsakmt.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (library) virtual_now = reinterpret_cast<uint64_t (*)()>(dlsym(library, "hipsim_virtual_now"));
    if (virtual_now && virtual_now() == kReal) virtual_now = nullptr;
    if (virtual_now) hipsim_untimed = reinterpret_cast<void (*)(int)>(dlsym(library, "hipsim_untimed"));
}

Untimed::Untimed() noexcept : hipsim_(hipsim_untimed) {
    if (hipsim_) hipsim_(1);
}

Untimed::~Untimed() {
    if (hipsim_) hipsim_(0);
}

bool virtual_clock() { return virtual_now != nullptr; }

uint64_t now_ns() { return virtual_now ? virtual_now() : host(CLOCK_MONOTONIC); }

void find_tick(Gpu &gpu) {
    if (virtual_now) {
        gpu.tick = uint64_t(1) << kTickBits;
        return;
    }
    const uint64_t near = time_of(gpu, kFuture), far = time_of(gpu, kFuture + kApart);
    if (!near || far <= near) return;
    gpu.tick_ns = static_cast<double>(far - near) / static_cast<double>(kApart);
    gpu.tick = static_cast<uint64_t>(std::llround(gpu.tick_ns * (1 << kTickBits)));
}

bool times_of(const Gpu *gpu, hsa_handle signal, SpanPart &span) {
    uint64_t times[2] = {0, 0};
    if (gpu ? hsa.amd_profiling_get_dispatch_time(gpu->agent, signal, times)
            : hsa.amd_profiling_get_async_copy_time(signal, times))
        return false;
    if (times[1] < times[0]) return false;
    const uint64_t off = virtual_now ? 0 : asleep();
    if (times[0] <= off) return false;
    span.start = times[0] - off;
    span.end = times[1] - off;
    span.error_ns = virtual_now ? 0 : kCertain;
    return true;
}

void calibrate(const Gpu &gpu) {
    if (!oplog.on() || virtual_now || !gpu.tick) return;
    const uint64_t future = time_of(gpu, kFuture), now = host(CLOCK_BOOTTIME);
    if (future <= now) return;
    const uint64_t ticks = kFuture - static_cast<uint64_t>(static_cast<double>(future - now) / gpu.tick_ns);
    const uint64_t at = time_of(gpu, ticks), off = asleep();
    if (at < off + kCertain) return;
    Record r;
    r.kind = Kind::Clock;
    r.id = other_id();
    r.call_ns = at - off - kCertain;
    r.return_ns = at - off + kCertain;
    r.context = gpu.number;
    const auto tick_ns = static_cast<uint32_t>(std::ceil(gpu.tick_ns));
    r.clock = {r.call_ns, ticks * gpu.tick >> kTickBits, r.return_ns, 0, kNoSm, tick_ns};
    oplog.put(r);
}

}  // namespace gpubpf
