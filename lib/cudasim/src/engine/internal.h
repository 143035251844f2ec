// Shared by the files of the engine.
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

constexpr uint32_t kWindow =
    1u << 24;  // size in bytes of the window of shared memory, and of that of local memory
constexpr uint32_t kParameterWindow = 1u << 16;
constexpr int32_t kBudget = 1024;          // backward jumps before a warp yields
constexpr int32_t kVirtualBudget = 16384;  // the same on the virtual clock, in ns

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
    mutable std::mutex mutex_;  // guards the members below
    mutable std::vector<void *> handles_;
    mutable std::vector<Code> code_;
    mutable std::set<uint32_t> parts_;                 // the parts that are loaded
    mutable std::vector<std::atomic<bool>> prepared_;  // by kernel
};

struct Windows {
    uint64_t shared, local, parameters;
};
const Windows &
windows();  // reserved address ranges: the generic addresses of shared, local and parameter memory

// Memory from mmap. It is zero at first, and not cleared when it is reused.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer();
    uint8_t *reserve(
        size_t size);  // at least `size` bytes, page-aligned; a larger size than before loses the contents

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
    uint64_t wake[32] = {};           // by lane that sleeps: its end, CLOCK_MONOTONIC in ns
    const struct Job *job = nullptr;  // the grid that it is prepared for
    uint32_t index;                   // in the block
    uint32_t rotate_lane;
    bool rotate;
};

struct Barrier {
    uint32_t expected = 0;  // threads; 0: all threads of the block
    uint32_t arrived = 0;
    uint32_t ones = 0, votes = 0;  // for bar.red
    uint32_t kind = CS_BAR_SYNC;
    uint64_t latest = 0;              // virtual clock: the time of the last arrival
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
    uint32_t order[32] = {};  // the order in which warps start
    Warp *active[32] = {};    // by index; null: not started, or finished
    std::vector<std::unique_ptr<Warp>> spare;
    Barrier barriers[17];          // number 16 is barrier.cluster: a cluster has one block
    uint32_t barriers_in_use = 0;  // a bit for each
    Buffer shared;
    uint64_t random = 0;  // hostile mode
    uint64_t wake = 0;    // if all its threads wait or sleep: when the first one wakes; else 0
    uint64_t end =
        0;  // virtual clock: the end of the last thread of the finished warps, or the time of a fault

    Block() = default;
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;
    ~Block();
};

struct Job {  // what the blocks of a grid have in common
    const LaunchDescription *launch = nullptr;
    const cs_image *image = nullptr;
    const cs_kernel *kernel = nullptr;
    const Code *code = nullptr;  // by function
    std::vector<uint8_t> parameters;
    uint32_t shared_size = 0, local_size = 0;
    bool shuffle = false;                              // blocks and warps in random order
    alignas(16) uint32_t workspace[4] = {8, 0, 0, 0};  // of cooperative groups: its size, the grid barrier
};

enum class Outcome { finished, yielded, failed };
// Runs a block until it has finished, has used its quantum, or all its threads wait for their turn.
Outcome run_slice(Block &block, Fault &fault);
void begin_block(Block &block, Job &job, uint64_t linear);

// Ordered kernels on the virtual clock: the earliest thread of a block that can continue.
struct EarliestThread {
    uint64_t time;
    bool waits_for_turn;  // it waits for its turn, and all threads that can run are later
};
EarliestThread earliest_thread(const Block &block);
void give_turn(Block &block);  // to the earliest of the threads that wait for their turn

// Where a fault in generated code jumps to. Each host thread has one while it runs generated code.
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
void install_signal_handlers();
void describe(Fault &fault);  // sets `message`

// Virtual clock: returns the time of the last exit of a thread; 0 if no thread has exited.
uint64_t latest_exit(const Block &block);

extern const cs_services services;
// Completes collectives whose missing lanes have exited. Returns whether there were any.
bool complete_collectives(cs_warp *w);
bool check_barrier(Block &block, uint32_t number);
uint32_t device_vprintf(cs_warp *w, uint64_t format, uint64_t arguments);
void *resolve(cs_warp *w, uint64_t address, uint32_t size, uint32_t access);

// Runs `python -m cudasim.translate ARGUMENTS`; `log` gets its standard error. Returns its exit status, -1 if that is unknown.
int run_translator(const std::vector<std::string> &arguments, std::string &log);

uint64_t next_random(uint64_t &state);
uint64_t nanoseconds(clockid_t which);

}  // namespace cudasim
