// The copy engine: SDMA packets as ROCr writes them (AMD's SDMA 4 and 5, whose layouts agree in these packets).
//
// Indices are bytes and only grow. The ring holds 32-bit words; a packet never crosses the ring's end, because ROCr
// fills the rest with zeros, which are NOPs of one word.

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "config.h"
#include "engine/engine.h"
#include "thunk/clock.h"
#include "thunk/events.h"
#include "thunk/faults.h"
#include "thunk/heap.h"
#include "thunk/hostile.h"
#include "thunk/queues.h"
#include "thunk/signals.h"
#include "thunk/submissions.h"

namespace hipsim {
namespace {

enum Operation : uint32_t {
    kNop = 0,
    kCopy = 1,
    kWrite = 2,
    kFence = 5,
    kTrap = 6,
    kPollMemory = 8,
    kAtomic = 10,
    kConstantFill = 11,
    kTimestamp = 13,
    kCacheControl = 17,
};
enum CopyOperation : uint32_t { kLinear = 0, kLinearWindow = 4 };
constexpr uint32_t kTimestampGlobal = 2;
constexpr uint32_t kAtomicAdd64 = 47;
constexpr size_t kLongest = 13;  // words

uint32_t bits(uint32_t word, unsigned first, unsigned count) { return word >> first & ((1u << count) - 1); }

class Engine {
  public:
    explicit Engine(Queue &queue) : queue_(queue) {}
    // Executes the packet at the read index, of which `available` bytes are there. Returns its words; 0 on an error,
    // or if the queue is destroyed.
    uint32_t execute(uint64_t available);

  private:
    uint32_t word(uint32_t index) const {
        uint64_t at = (*queue_.read + uint64_t{index} * 4) & (queue_.ring_bytes - 1);
        return __atomic_load_n(reinterpret_cast<const uint32_t *>(queue_.ring + at), __ATOMIC_RELAXED);
    }
    uint64_t address(uint32_t index) const { return word(index) | uint64_t{word(index + 1)} << 32; }

    // Checks that the device may use an address; reports a memory fault if not.
    bool may(uint64_t address, uint64_t bytes, bool write);
    uint32_t unknown(const char *what);
    void took(uint64_t nanoseconds) { queue_.spent += nanoseconds; }

    // Virtual clock. ROCr writes the packets of a copy one after the other: those that wait for signals, the copy itself between
    // two timestamps, and one that decrements the copy's signal. A copy of ROCr's own, such as that of code, takes no time.
    bool is_timed(uint64_t signal) const { return submission_of_work(signal) != kUnknownTime; }
    uint64_t began(uint64_t signal) const {
        return std::max({queue_.time, queue_.ready, submission_of_work(signal)});
    }
    uint64_t time_of_copy(uint64_t signal) const {
        return is_timed(signal) ? began(signal) + queue_.spent : queue_.time;
    }
    void end_copy(uint64_t signal);

    uint32_t copy_linear();
    uint32_t copy_window();
    uint32_t write();
    uint32_t fill();
    uint32_t poll();
    uint32_t atomic();
    uint32_t timestamp();
    uint32_t fence();

    Queue &queue_;
};

bool Engine::may(uint64_t address, uint64_t bytes, bool write) {
    if (heap().usable(queue_.node, address, bytes, write)) return true;
    char text[160];
    snprintf(text, sizeof(text),
             "SDMA: %s %" PRIu64 " bytes at 0x%" PRIx64 ", which %s not mapped to the device",
             write ? "write of" : "read of", bytes, address, bytes > 1 ? "are" : "is");
    report_memory_fault(queue_, address, write, text);
    return false;
}

uint32_t Engine::unknown(const char *what) {
    fprintf(stderr, "hipsim: SDMA: unknown %s in the packet 0x%08x; the queue stops\n", what, word(0));
    queue_.failed = true;
    return 0;
}

uint32_t Engine::copy_linear() {
    uint64_t bytes = uint64_t{bits(word(1), 0, 30)} + 1, from = address(3), to = address(5);
    if (!may(from, bytes, false) || !may(to, bytes, true)) return 0;
    memmove(host(to), host(from), bytes);
    took(copy_ns(bytes));
    return 7;
}

// A window of up to three dimensions. Pitches, offsets and sizes count elements of 1 to 16 bytes.
uint32_t Engine::copy_window() {
    struct Side {
        uint64_t base, x, y, z, pitch, slice;
        uint64_t row(uint64_t row_y, uint64_t row_z, unsigned shift) const {
            return base + ((x + (y + row_y) * pitch + (z + row_z) * slice) << shift);
        }
    };
    auto side = [this](uint32_t first) {
        uint32_t corner = word(first + 2), depth = word(first + 3);
        return Side{address(first),     bits(corner, 0, 14),      bits(corner, 16, 14),
                    bits(depth, 0, 11), bits(depth, 13, 19) + 1u, uint64_t{bits(word(first + 4), 0, 28)} + 1};
    };
    unsigned shift = bits(word(0), 29, 3);
    if (shift > 4) return unknown("element size");
    Side from = side(1), to = side(6);
    uint64_t width = bits(word(11), 0, 14) + 1u, height = bits(word(11), 16, 14) + 1u,
             depth = bits(word(12), 0, 11) + 1u;
    uint64_t bytes = width << shift;
    for (uint64_t z = 0; z < depth; z++)
        for (uint64_t y = 0; y < height; y++) {
            uint64_t source = from.row(y, z, shift), target = to.row(y, z, shift);
            if (!may(source, bytes, false) || !may(target, bytes, true)) return 0;
            memmove(host(target), host(source), bytes);
        }
    took(copy_ns(bytes * height * depth));
    return 13;
}

uint32_t Engine::write() {
    uint32_t words = bits(word(3), 0, 20) + 1;
    uint64_t to = address(1);
    if (!may(to, uint64_t{words} * 4, true)) return 0;
    for (uint32_t i = 0; i < words; i++) {
        uint32_t value = word(4 + i);
        memcpy(host(to + uint64_t{i} * 4), &value, 4);
    }
    return 4 + words;
}

uint32_t Engine::fill() {
    uint32_t unit = 1u << bits(word(0), 30, 2), value = word(3);
    if (unit == 8) return unknown("fill size");
    uint64_t bytes = (uint64_t{bits(word(4), 0, 22)} + unit) & ~uint64_t{unit - 1}, to = address(1);
    if (!may(to, bytes, true)) return 0;
    for (uint64_t at = to; at < to + bytes; at += unit) memcpy(host(at), &value, unit);
    took(fill_ns(bytes));
    return 5;
}

// Waits until a word in memory compares; without "memory poll" it is a flush of the host's data path.
uint32_t Engine::poll() {
    if (bits(word(0), 31, 1) == 0) return 6;
    uint64_t at = address(1);
    uint32_t function = bits(word(0), 28, 3), reference = word(3), mask = word(4);
    if (function > 6) return unknown("comparison");
    if (!may(at, 4, false)) return 0;
    bool known = true;
    bool done = wait_for(queue_, [&] {
        if (!heap().usable(queue_.node, at, 4, false)) {
            known = false;
            return true;
        }
        uint32_t value =
            __atomic_load_n(reinterpret_cast<const uint32_t *>(host(at)), __ATOMIC_ACQUIRE) & mask;
        switch (function) {
            case 1: return value < reference;
            case 2: return value <= reference;
            case 3: return value == reference;
            case 4: return value != reference;
            case 5: return value >= reference;
            case 6: return value > reference;
            default: return true;
        }
    });
    if (!known) may(at, 4, false);
    if (!done || !known) return 0;
    if (uint64_t signal = config().virtual_clock ? signal_of_value(queue_.node, at) : 0; signal != 0)
        queue_.ready = std::max(queue_.ready, signal_time(queue_.node, signal));
    return 6;
}

void Engine::end_copy(uint64_t signal) {
    if (is_timed(signal)) {
        uint64_t start = began(signal);
        queue_.time = start + queue_.spent;
        set_signal_times(queue_.node, signal, start, queue_.time);
        forget_work(signal);
        advance(queue_.time);
    }
    queue_.ready = queue_.spent = 0;
}

uint32_t Engine::atomic() {
    uint64_t at = address(1), operand = address(3);
    if (bits(word(0), 25, 7) != kAtomicAdd64) return unknown("atomic operation");
    if (at % 8 != 0 || !may(at, 8, true)) return 0;
    hostile_delay(200);
    if (config().virtual_clock) end_copy(signal_of_value(queue_.node, at));
    __atomic_fetch_add(reinterpret_cast<uint64_t *>(host(at)), operand, __ATOMIC_ACQ_REL);
    return 8;
}

uint32_t Engine::timestamp() {
    uint64_t at = address(1), time = now();
    if (config().virtual_clock) time = time_of_copy(signal_of_timestamp(queue_.node, at));
    if (bits(word(0), 8, 8) != kTimestampGlobal) return unknown("timestamp");
    if (!may(at, 8, true)) return 0;
    memcpy(host(at), &time, 8);
    return 3;
}

uint32_t Engine::fence() {
    uint64_t at = address(1);
    if (at % 4 != 0 || !may(at, 4, true)) return 0;
    __atomic_store_n(reinterpret_cast<uint32_t *>(host(at)), word(3), __ATOMIC_RELEASE);
    return 4;
}

uint32_t Engine::execute(uint64_t available) {
    uint32_t header = word(0), words = 0;
    switch (static_cast<Operation>(bits(header, 0, 8))) {
        case kNop: words = 1 + bits(header, 16, 14); break;
        case kCopy:
            if (bits(header, 8, 8) == kLinear) words = copy_linear();
            else if (bits(header, 8, 8) == kLinearWindow) words = copy_window();
            else words = unknown("copy");
            break;
        case kWrite: words = write(); break;
        case kFence: words = fence(); break;
        case kTrap:
            interrupt(bits(word(1), 0, 28));
            words = 2;
            break;
        case kPollMemory: words = poll(); break;
        case kAtomic: words = atomic(); break;
        case kConstantFill: words = fill(); break;
        case kTimestamp: words = timestamp(); break;
        case kCacheControl: words = 5; break;  // host and device share their caches
        default: words = unknown("operation"); break;
    }
    if (uint64_t{words} * 4 > available) return unknown("length");
    return words;
}

}  // namespace

void process_sdma(Queue &queue) {
    Engine engine(queue);
    while (!queue.destroyed && !queue.suspended && !queue.failed) {
        uint64_t read = __atomic_load_n(queue.read, __ATOMIC_RELAXED);
        uint64_t end = __atomic_load_n(queue.doorbell, __ATOMIC_ACQUIRE);
        if (read >= end || end - read > queue.ring_bytes) return;
        heap().enter();
        uint32_t words = engine.execute(end - read);
        heap().leave();
        if (words == 0) return;
        __atomic_store_n(queue.read, read + uint64_t{words} * 4, __ATOMIC_RELEASE);
    }
}

}  // namespace hipsim
