// Shared by the engine's own files.
#pragma once

#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "device_abi.h"
#include "engine/engine.h"

namespace cudasim {

constexpr uint32_t kWindow = 1u << 24;  // bytes of the shared and of the local window
constexpr uint32_t kParameterWindow = 1u << 16;
constexpr int32_t kBudget = 1024;          // backward jumps before a warp yields
constexpr int32_t kVirtualBudget = 16384;  // … ns of the virtual clock

using Code = int (*)(cs_warp *w);

class LoadedImage final : public Image {
  public:
    ~LoadedImage() override;
    static std::shared_ptr<const Image> load(const std::string &path, TranslateError &error);
    bool prepare(uint32_t kernel, TranslateError &error) const override;
    const Code *code() const { return code_.data(); }  // by function; null: not loaded
    const cs_image *raw = nullptr;

  private:
    bool add_code(void *handle, TranslateError &error) const;

    std::string stem_;          // path of the shared object without its suffix
    mutable std::mutex mutex_;  // of what follows
    mutable std::vector<void *> handles_;
    mutable std::vector<Code> code_;
    mutable std::set<uint32_t> parts_;                 // that are loaded
    mutable std::vector<std::atomic<bool>> prepared_;  // by kernel
};

struct Windows {
    uint64_t shared, local, parameters;
};
const Windows &windows();  // reserved address space for generic addresses of non-global memory

// Memory from the system, zero when fresh.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer();
    uint8_t *reserve(size_t size);  // at least `size` bytes, 64-aligned; contents are kept only if it fits

  private:
    uint8_t *data_ = nullptr;
    size_t size_ = 0;
};

struct Block;

struct Warp {
    cs_warp state;
    Buffer frame, args, local;
    std::vector<uint8_t> saved[32];  // frames of recursive functions, per lane
    uint32_t depth[32] = {};
    uint64_t wake[32] = {};           // of lanes that sleep: when to wake them, CLOCK_MONOTONIC in ns
    const struct Job *job = nullptr;  // for which it is prepared
    uint32_t index;                   // in the block
    uint32_t rotate_lane;
    bool rotate;
};

struct Barrier {
    uint32_t expected = 0;  // threads; 0: all of the block
    uint32_t arrived = 0;
    uint32_t ones = 0, votes = 0;  // for bar.red
    uint32_t kind = CS_BAR_SYNC;
    uint64_t latest = 0;              // virtual clock: the last arrival
    uint32_t arrived_lanes[32] = {};  // per warp
    uint32_t waiting_lanes[32] = {};
};

struct Job;

struct Block {
    Job *job = nullptr;
    uint64_t linear = 0;
    uint32_t id[3] = {};
    uint32_t warps = 0, started = 0, finished = 0;
    uint32_t threads = 0, exited = 0;
    uint32_t order[32] = {};  // in which warps are started
    Warp *active[32] = {};    // by index; null: not started or finished
    std::vector<std::unique_ptr<Warp>> spare;
    Barrier barriers[17];          // 16: clusters of one block
    uint32_t barriers_in_use = 0;  // bits
    Buffer shared;
    uint64_t random = 0;  // hostile mode
    uint64_t wake = 0;    // not 0: all its threads wait or sleep, this is when the first wakes
    uint64_t end = 0;     // virtual clock: of the last thread of the warps that have finished; of a fault

    Block() = default;
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;
    ~Block();
};

struct Job {
    const LaunchDescription *launch = nullptr;
    const cs_image *image = nullptr;
    const cs_kernel *kernel = nullptr;
    const Code *code = nullptr;  // by function
    std::vector<uint8_t> parameters;
    uint32_t shared_size = 0, local_size = 0;
    bool shuffle = false;                              // blocks and warps in random order
    alignas(16) uint32_t workspace[4] = {8, 0, 0, 0};  // cooperative groups: its size, the barrier
};

enum class Outcome { finished, yielded, failed };
Outcome run_slice(
    Block &block,
    Fault &fault);  // until the block finishes, has used its quantum, or all wait for their turn
void begin_block(Block &block, Job &job, uint64_t linear);

// Ordered kernels on the virtual clock. The earliest thread of a block that is not waiting for others.
struct Moment {
    uint64_t time;
    bool held;  // it waits for its turn, and no thread of the block that runs is as early
};
Moment earliest(const Block &block);
void release(Block &block);  // it is the turn of the earliest of those that wait for it

// What a fault in generated code jumps back to. One per thread while it is inside generated code.
struct Guard {
    sigjmp_buf where;
    const cs_warp *warp;
    int code;
    uint64_t address;
    uint32_t size;
    char access;
    const char *what;
};
extern thread_local Guard *current_guard;
[[noreturn]] void raise_fault(cs_warp *w, int code, uint64_t address, uint32_t size, char access,
                              const char *what);
void install_signal_handlers();  // cheap when they are installed already
void describe(Fault &fault);     // fills `message`

uint64_t latest_exit(const Block &block);  // virtual clock: of the threads that have exited; 0: none

extern const cs_services services;
bool complete_parked(cs_warp *w);  // collectives that are complete because lanes have exited
bool check_barrier(Block &block, uint32_t number);
uint32_t device_vprintf(cs_warp *w, uint64_t format, uint64_t arguments);
void *resolve(cs_warp *w, uint64_t address, uint32_t size, uint32_t access);

uint64_t next_random(uint64_t &state);
uint64_t nanoseconds(clockid_t which);

}  // namespace cudasim
