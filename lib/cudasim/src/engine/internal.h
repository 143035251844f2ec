// Shared by the files of the engine.
#pragma once

#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "device_abi.h"
#include "engine/engine.h"

namespace cudasim {

// Sizes in bytes of the windows: of a block's shared memory and of local memory; of a cluster's shared memory, with addresses of a
// block that no cluster has.
constexpr uint32_t kWindow = 1u << CS_RANK_SHIFT, kClusterWindow = (CS_MOST_BLOCKS + 1) << CS_RANK_SHIFT;
constexpr uint32_t kParameterWindow = 1u << 16;
constexpr int32_t kBudget = 1024;          // backward jumps before a warp yields
constexpr int32_t kVirtualBudget = 16384;  // the same on the virtual clock, in ns

using Code = int (*)(cs_warp *w);

class LoadedImage final : public Image {
  public:
    ~LoadedImage() override;
    // Loads the shared object of a translation. `key` is that of the translation in the cache, `ptx` what it was made of.
    static std::shared_ptr<LoadedImage> load(const std::string &key, std::string_view ptx,
                                             std::string_view object, TranslateError &error);
    // Stores the C texts of all parts in the cache, and keeps those that cannot be stored.
    void keep_parts(std::vector<std::string> texts) const;
    bool prepare(uint32_t kernel, TranslateError &error) const override;
    // Notes how long a grid of a kernel ran. The next process compiles with more optimization what ran for a long time.
    void ran(uint32_t kernel, uint64_t ns) const;
    const Code *code() const { return code_.data(); }  // by function; null: not loaded
    const cs_image *raw = nullptr;

  private:
    bool add_code(void *handle, const cs_portable *shared, TranslateError &error) const;
    bool is_text_of(uint32_t part, std::string_view text) const;
    const cs_portable *portable(uint32_t part) const;  // null for a part that belongs to this image
    bool compile(const std::vector<uint32_t> &parts, const std::set<uint32_t> &slow,
                 std::map<uint32_t, std::string> &objects, TranslateError &error) const;
    std::string part_name(uint32_t part, const char *suffix) const;
    // Returns which of these parts ran for a long time in an earlier process.
    std::set<uint32_t> slow(const std::vector<uint32_t> &parts) const;

    std::string key_, translator_;  // translation_key() and translator_key() of when it was loaded
    std::string ptx_;               // only if there are parts: what makes them again if the cache loses them
    mutable std::mutex mutex_;      // guards the members below
    mutable std::map<uint32_t, std::string> texts_;  // C of the parts that the cache does not have
    mutable std::vector<void *> handles_;
    mutable std::vector<Code> code_;
    mutable std::set<uint32_t> parts_;                 // the parts that are loaded
    mutable std::vector<std::atomic<bool>> prepared_;  // by kernel
    mutable std::vector<std::atomic<uint64_t>> ran_;   // by kernel: ns that its grids took
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
    size_t size() const { return size_; }
    uint8_t *data() const { return data_; }

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
    uint32_t last_error[32] = {};     // of the device runtime, by lane
    uint32_t index;                   // in the block
    uint32_t tid_of = ~0u;            // the index for which state.tid is set
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

// The state of barrier.cluster.
struct ClusterBarrier {
    // The threads of the cluster that have arrived; only in the block of rank 0. Virtual clock: the time of the last arrival, where
    // the exit of a thread that has not arrived counts as one; that of the last exit; that when the barrier was last complete.
    uint32_t arrived = 0;
    uint64_t latest = 0, exits = 0, completed = 0;
    // Per warp of the block. `passed`: the barrier is complete, and they have not waited yet.
    uint32_t arrived_lanes[32] = {}, waiting_lanes[32] = {}, passed_lanes[32] = {};
};

struct Job;

// One host thread runs all blocks of a cluster in turn: a slice is a slice of the block of rank 0 and its followers.
struct Block {
    Job *job = nullptr;
    Block *leader = this;  // of rank 0
    uint32_t rank = 0;     // in the cluster
    std::vector<std::unique_ptr<Block>>
        followers;  // of rank 1 and more; the last ones may be left from another grid
    uint64_t linear = 0;
    uint32_t id[3] = {}, smid = 0;
    uint32_t warps = 0, started = 0, finished = 0;
    uint32_t threads = 0, exited = 0;
    uint32_t order[32] = {};  // the order in which warps start
    Warp *active[32] = {};    // by index; null: not started, or finished
    std::vector<std::unique_ptr<Warp>> spare;
    Barrier barriers[16];
    ClusterBarrier cluster_barrier;
    uint32_t barriers_in_use = 0;  // a bit for each, and kClusterBarrier
    Buffer shared;
    Buffer tensor;              // tensor memory; no memory until it is used
    uint32_t tensor_units = 0;  // a bit for each 32 columns of it that are allocated
    uint64_t random = 0;        // hostile mode
    uint64_t wake = 0;          // if all its threads wait or sleep: when the first one wakes; else 0
    uint64_t end =
        0;  // virtual clock: the end of the last thread of the finished warps, or the time of a fault

    Block() = default;
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;
    ~Block();
    bool done() const { return finished == warps; }
    // Returns a block of the cluster of this block of rank 0.
    Block &member(uint32_t of_rank) { return of_rank ? *followers[of_rank - 1] : *this; }
    const Block &member(uint32_t of_rank) const { return of_rank ? *followers[of_rank - 1] : *this; }
};
constexpr uint32_t kClusterBarrier = 16;  // a bit of Block::barriers_in_use, as the numbers of barriers are

// A grid that a kernel launches. It runs when the kernel's own grid has finished.
struct NestedLaunch {
    uint32_t kernel = 0;  // index into the image's kernels
    uint32_t grid[3] = {}, block[3] = {};
    uint32_t dynamic_shared = 0;
    uint64_t stream = 0;
    std::vector<uint8_t> parameters;
};

struct Job {  // what the blocks of a grid have in common
    const LaunchDescription *launch = nullptr;
    const cs_image *image = nullptr;
    const cs_kernel *kernel = nullptr;
    const Code *code = nullptr;  // by function
    std::vector<uint8_t> parameters;
    uint32_t shared_size = 0, local_size = 0;
    uint32_t local_stride = 0;  // from one lane's local memory to the next
    uint32_t cluster[3] = {1, 1, 1},
             cluster_blocks = 1;            // the shape of a cluster, and the number of its blocks
    std::vector<uint32_t> cluster_offsets;  // cs_kernel.shared_offsets for each block of a cluster of several
    bool shuffle = false;                   // blocks and warps in random order
    alignas(16) uint32_t workspace[4] = {8, 0, 0, 0};  // of cooperative groups: its size, the grid barrier
    std::mutex nested_mutex;                           // guards the members below
    std::map<uint64_t, NestedLaunch> prepared;         // by the address of its parameters
    std::vector<NestedLaunch> nested;                  // in the order of their launches
};

enum class Outcome { finished, yielded, failed };
// Runs the cluster of a block of rank 0 until it has finished, has used its quantum, or all its threads wait for their turn.
Outcome run_slice(Block &block, Fault &fault);
// Begins the cluster of this number. `block` becomes its block of rank 0.
void begin_cluster(Block &block, Job &job, uint64_t number);

// Ordered kernels on the virtual clock: the earliest thread of a cluster that can continue.
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
void check_cluster_barrier(Block &block);
// Virtual clock: notes the exit of lanes for barrier.cluster, if it is in use.
void leave_cluster_barrier(const cs_warp *w, uint32_t lanes);
// Returns the host address of an address in the cluster's shared memory; null if it is not in the memory of one of the blocks.
uint8_t *shared_memory(cs_warp *w, uint64_t address, uint32_t size, uint32_t access);
uint32_t device_vprintf(cs_warp *w, uint64_t format, uint64_t arguments);
uint64_t device_runtime(cs_warp *w, uint32_t call, const uint64_t *arguments);
void *resolve(cs_warp *w, uint64_t address, uint32_t size, uint32_t access);
void texture_fetch(cs_warp *w, cs_texture_fetch *fetch);
void *surface(cs_warp *w, const cs_surface_access *access);
void *surface_texel(cs_warp *w, const cs_surface_access *access, uint32_t *is_signed);
void surface_put(cs_warp *w, const cs_surface_access *access, const uint32_t *values, uint32_t count);
uint32_t texture_query(cs_warp *w, uint64_t handle, uint32_t what, uint32_t level);
uint32_t tensor_copy(cs_warp *w, const cs_tensor_copy *copy);
uint32_t tensor_memory(cs_warp *w, const cs_tensor_memory *request);
void change_map(cs_warp *w, const cs_map_change *change);

struct Translation {
    std::string object;              // a shared object
    std::vector<std::string> parts;  // C texts of the code that it lacks
};
// Returns the name of a translation in the cache: a digest of the PTX and of all that translates it.
std::string translation_key(std::string_view ptx, bool virtual_clock);

// Returns what all translations depend on besides the PTX.
std::string translator_key();
// Runs the translator. Returns false and sets `error` if it fails.
bool run_translation(std::string_view ptx, bool virtual_clock, Translation &made, TranslateError &error);
// Compiles the C texts of parts. Returns the shared objects; those that fail are missing, and `log` says why.
std::map<uint32_t, std::string> compile_parts(const std::map<uint32_t, std::string> &texts, std::string &log);

uint64_t next_random(uint64_t &state);
uint64_t nanoseconds(clockid_t which);

}  // namespace cudasim
