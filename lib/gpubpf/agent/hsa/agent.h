// The agent in a process that uses AMD GPUs. AMD's runtime (ROCr) loads this library at startup because HSA_TOOLS_LIB names it, or the
// tool loads it into a running process.
//
//   agent.cpp      the connection to the tool; startup and shutdown
//   rocr.cpp       ROCr functions: those that the agent calls, and those that it replaces
//   code.cpp       code objects that the program loads, and their instrumented copies
//   dispatch.cpp   replaces a kernel with its instrumented copy, at each dispatch
//   queue.cpp      queues intercepted since their creation
//   doorbell.cpp   queues that existed when the agent attached
//   memory.cpp     memory for maps and rings, and snapshots of both
//   operations.cpp the log of operations on queues and copy engines
//   room.h         free space in an intercepted queue
//   allocations.cpp the log of memory that the program allocates
//   hip_calls.cpp  start and return times of the program's HIP calls
//   clock.cpp      host and GPU clocks
//   ends.cpp       libc functions that end the process without exit handlers
//
// The agent uses the protocol and the messages of the CUDA agent (../src).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hsa.h"
#include "lifetime.h"
#include "log/allocation.h"
#include "log/log.h"
#include "messages.h"
#include "patch.h"
#include "signals.h"
#include "this_agent.h"
#include "thread.h"
#include "wire.h"

namespace gpubpf {

// Functions that ROCr exports. Their symbols are these names with the prefix "hsa_".
struct Functions {
    hsa_status (*init)();
    hsa_status (*shut_down)();
    hsa_status (*system_get_major_extension_table)(uint16_t extension, uint16_t version, size_t size, void *);
    hsa_status (*iterate_agents)(hsa_status (*)(hsa_handle agent, void *), void *);
    hsa_status (*agent_get_info)(hsa_handle agent, int what, void *);
    hsa_status (*memory_copy)(void *to, const void *from, size_t size);
    hsa_status (*executable_get_info)(hsa_handle executable, int what, void *);
    hsa_status (*executable_create_alt)(int profile, int rounding, const char *options, hsa_handle *);
    hsa_status (*executable_iterate_agent_symbols)(hsa_handle executable, hsa_handle agent,
                                                   hsa_status (*)(hsa_handle executable, hsa_handle agent,
                                                                  hsa_handle symbol, void *),
                                                   void *);
    hsa_status (*executable_symbol_get_info)(hsa_handle symbol, int what, void *);
    uint64_t (*queue_load_read_index_scacquire)(const hsa_queue *);
    uint64_t (*queue_load_write_index_scacquire)(const hsa_queue *);
    uint64_t (*queue_cas_write_index_scacq_screl)(const hsa_queue *, uint64_t expected, uint64_t value);
    hsa_status (*signal_destroy)(hsa_handle signal);
    int64_t (*signal_load_scacquire)(hsa_handle signal);
    void (*signal_add_relaxed)(hsa_handle signal, int64_t value);
    void (*signal_subtract_screlease)(hsa_handle signal, int64_t value);
    hsa_status (*amd_signal_create)(int64_t value, uint32_t count, const hsa_handle *consumers,
                                    uint64_t attributes, hsa_handle *);
    hsa_status (*amd_agent_iterate_memory_pools)(hsa_handle agent, hsa_status (*)(hsa_handle pool, void *),
                                                 void *);
    hsa_status (*amd_memory_pool_get_info)(hsa_handle pool, int what, void *);
    hsa_status (*amd_memory_pool_allocate)(hsa_handle pool, size_t size, uint32_t flags, void **);
    hsa_status (*amd_memory_pool_free)(void *);
    hsa_status (*amd_agents_allow_access)(uint32_t count, const hsa_handle *agents, const uint32_t *flags,
                                          const void *);
    hsa_status (*amd_memory_fill)(void *to, uint32_t value, size_t count);
    hsa_status (*amd_profiling_convert_tick_to_system_domain)(hsa_handle agent, uint64_t tick, uint64_t *ns);
    void (*signal_store_relaxed)(hsa_handle signal, int64_t value);
    hsa_status (*amd_profiling_async_copy_enable)(bool enable);
    hsa_status (*amd_profiling_set_profiler_enabled)(hsa_queue *, int enable);
    hsa_status (*amd_profiling_get_dispatch_time)(hsa_handle agent, hsa_handle signal, uint64_t times[2]);
    hsa_status (*amd_profiling_get_async_copy_time)(hsa_handle signal, uint64_t times[2]);
    hsa_status (*amd_memory_lock)(void *host, size_t size, hsa_handle *agents, int count, void **address);
    hsa_status (*amd_memory_unlock)(void *host);
    hsa_status (*amd_pointer_info)(const void *at, hsa_pointer *info, void *(*allocate)(size_t),
                                   uint32_t *count, hsa_handle **agents);

    bool find();  // looks them up in the process; returns false if one is missing
};
extern Functions hsa;

// The original functions of replaced table entries. They stay valid after detach.
struct Originals {
    hsa_create_queue create_queue, create_intercepted_queue;
    hsa_intercept intercept;
    hsa_status (*destroy_queue)(hsa_queue *queue);
    uint64_t (*add_write_index[4])(const hsa_queue *queue, uint64_t count);
    void (*store_relaxed)(hsa_handle signal, int64_t value);
    void (*store_screlease)(hsa_handle signal, int64_t value);
    hsa_freeze freeze;
    hsa_status (*destroy_executable)(hsa_handle executable);
    hsa_status (*destroy_signal)(hsa_handle signal);
    hsa_copy copy;
    hsa_copy_by_engine copy_by_engine;
    hsa_copy_box copy_box;
    hsa_status (*pool_allocate)(hsa_handle pool, size_t size, uint32_t flags, void **made);
    hsa_status (*pool_free)(void *base);
    hsa_status (*allocate)(hsa_handle region, size_t size, void **made);
    hsa_status (*free)(void *base);
    hsa_status (*lock)(void *host, size_t size, hsa_handle *agents, int count, void **made);
    hsa_status (*lock_to_pool)(void *host, size_t size, hsa_handle *agents, int count, hsa_handle pool,
                               uint32_t flags, void **made);
    hsa_status (*unlock)(void *host);
    hsa_status (*reader_of_file)(int file, hsa_handle *reader);
    hsa_status (*reader_of_memory)(const void *code, size_t size, hsa_handle *reader);
    hsa_status (*destroy_reader)(hsa_handle reader);
    hsa_status (*load)(hsa_handle executable, hsa_handle agent, hsa_handle reader, const char *options,
                       hsa_handle *loaded);
};
extern Originals originals;

// --- rocr.cpp ---

// Returns the function tables that ROCr's exported functions use; empty ones if this version's tables are unknown.
hsa_tables find_tables();
// Replaces table entries with the agent's functions. `running`: the program may already have queues.
void put_in(const hsa_tables &tables, bool running, bool operations, bool allocations);
void take_out_of_tables();

// --- what the agent knows about the process; valid until it detaches ---

struct Array {  // a map's memory. `capacity`: in the map's units; for a site array, as in the launch block
    uint32_t map;
    uint64_t base, bytes, capacity;
};

using Shape = std::array<uint32_t, 6>;  // threads per block, blocks per grid: as in the launch block

struct Instance {  // one launch shape of a copy
    uint64_t launches = 0, awaited = 0;
    std::vector<uint8_t> launch_block;  // complete except for the launch id; empty: no memory yet
    size_t tried = SIZE_MAX;            // the number of pools when no pool had room
    std::vector<Array> arrays;
};

struct Kernel;
struct Gpu;

struct Copy {  // an instrumented copy of a kernel, in one executable
    Kernel *kernel;
    std::shared_ptr<const Answer> answer;
    const Layout *layout;
    uint64_t object;  // the address of its descriptor
    std::map<Shape, Instance> instances;
    std::vector<Array> sites;
};

struct Kernel {  // a kernel of the program, in one executable
    std::string name;
    Gpu *gpu;
    Slot *slot;
    uint32_t slot_index = 0;
    uint64_t argument_bytes = 0;
    std::atomic<bool> refused{false};
    std::atomic<bool> waits{false};  // the tool has not answered yet
    std::atomic<Copy *> copy{nullptr};
};

struct Pool {
    uint64_t base, size, used;
};

struct Ring {
    uint32_t map, shards;
    uint64_t control;
};

struct LockedMemory {  // host memory that the GPU can access
    void *host;
    uint64_t bytes;
};

// Memory for dispatch arguments. It is reused when `running` is 0 and it is full.
struct Arguments {
    char *base = nullptr;
    size_t size = 0, used = 0;
    hsa_handle running{};  // a signal whose value is the number of unfinished dispatches
};

struct Gpu {
    hsa_handle agent;
    uint32_t number, compute_units = 1, wave = 0;  // wave: lanes
    hsa_handle own_pool{}, argument_pool{};
    std::mutex busy;  // held while maps are created or read
    bool prepared = false, usable = false;
    uint64_t tick = 0;  // length of the counter's tick, in ns << kTickBits; 0: unknown
    double tick_ns = 0;
    std::vector<Ring> rings;
    std::vector<LockedMemory> locked;

    std::mutex lock;  // guards the members below; never held while waiting
    std::vector<Pool> pools;
    uint64_t wanted = 0;            // largest request that did not fit, in bytes
    std::vector<uint64_t> storage;  // by map: its address, unless each instance has its own memory
    std::vector<std::unique_ptr<Copy>> copies;
    // By queue number of the log. The last buffer of a queue has room.
    std::unordered_map<uint32_t, std::vector<std::unique_ptr<Arguments>>> arguments;
    bool cut_off = false;  // the program destroyed a queue while an instrumented kernel ran
};

// --- agent.cpp ---

struct Module;

struct Question {  // asks the tool for the instrumented copy of a module
    Module *module;
    bool done = false, abandoned = false;  // abandoned: no thread waits for the answer
    std::shared_ptr<const Answer> answer;
};

// OnTheWay: the program may launch more. Last: the process is about to end.
enum class Reading { OnTheWay, Last };

struct Agent {
    std::atomic<bool> live{false}, connected{false};
    // The thread that runs the exit handlers, once they have reached the agent's; 0: the process is not exiting.
    std::atomic<uint32_t> exit_thread{0};
    // The agent's exit handler has read the maps, and that thread has launched nothing since. The service thread leaves ROCr alone.
    std::atomic<bool> resting{false};
    std::atomic<bool> ending{false};  // the maps are read for the last time
    // Whether the maps will be read after a launch of this thread. If not, it runs the original (Reason::PROCESS_ENDING).
    bool is_read_later() const {
        const uint32_t exiting = exit_thread.load(std::memory_order_relaxed);
        return !ending.load(std::memory_order_relaxed) && (!exiting || exiting == thread_id());
    }
    bool running = false;  // the tool attached to a running process
    Config config;
    Control *control = nullptr;
    bool log_operations = false;  // the tool requests operation records and call times
    std::vector<std::unique_ptr<Gpu>> gpus;

    Gpu *gpu(hsa_handle agent) const;
    // Requests the copies of a module whose image is in `file`, and installs them. Waits as long as the tool reports progress; if the
    // answer comes later, the service thread installs them.
    void instrument(Module &module, const Gpu &gpu, int file, uint64_t size);
    // Requests the copies without waiting. The service thread loads them when they arrive, and tells the tool.
    void ask_for_later(Module &module, const Gpu &gpu, int file, uint64_t size);
    void wake();  // wakes the service thread
    // Counts an instrumented launch. The service thread reads the maps once per Config::pump launches. If the exit handler has run, it
    // runs again next, before what may shut ROCr down.
    void launched();
    std::atomic<uint64_t> pumped{0};
    // Whether ROCr has been shut down, or may have been while the agent rests. Then the agent must not call ROCr on its own.
    bool is_over() const;
    // Sends all measurements. Returns when that is done, or after wait_ms + 3 s.
    void finish(uint32_t wait_ms, Reading reading);
};
extern Agent &agent;

// --- code.cpp ---

struct Module {  // a code object that the program has loaded
    Gpu *gpu;
    hsa_handle executable;
    std::map<std::string, Kernel *> kernels;
    hsa_handle copies{};              // executable with the copies
    std::vector<uint64_t> variables;  // the addresses of the logged variables
    bool gone = false;                // these three are guarded by `installing` (code.cpp)
};
// Loads the copies of a module's kernels, unless the program has destroyed its executable.
void install(Module &module, const std::shared_ptr<const Answer> &answer);
Kernel *find_kernel(uint64_t object);
// Finds the code objects that the program has already loaded, and requests copies.
void find_loaded();
void unload_copies(const Gpu &gpu);  // the GPU must be idle
extern const Lifetime code_lifetime;

hsa_status on_reader_of_file(int file, hsa_handle *reader);
hsa_status on_reader_of_memory(const void *code, size_t size, hsa_handle *reader);
hsa_status on_destroy_reader(hsa_handle reader);
hsa_status on_load(hsa_handle executable, hsa_handle agent, hsa_handle reader, const char *options,
                   hsa_handle *loaded);
hsa_status on_freeze(hsa_handle executable, const char *options);
hsa_status on_destroy_executable(hsa_handle executable);

// --- dispatch.cpp ---

// Processes a dispatch that the program put into queue number `queue` of the log, and rewrites it for the GPU. Sets `untimed` to the
// dispatch's id if no probe times it. Returns the number of packets: a barrier may follow. `alone`: nothing can follow.
uint64_t take_packet(hsa_packet *packet, Gpu &gpu, uint32_t queue, uint64_t &untimed, bool alone = false);
bool is_idle(Gpu &gpu);  // whether all instrumented kernels have ended
// Waits a moment until the GPU has processed the agent's packets in a queue. Call before the program destroys the queue.
void wait_for_queue(Gpu &gpu, uint32_t queue);
// Frees the arguments of a queue that the program has destroyed.
void forget_queue(Gpu &gpu, uint32_t queue);
void free_arguments(Gpu &gpu);  // the GPU must be idle

// --- queue.cpp ---

hsa_status on_create_queue(hsa_handle agent, uint32_t size, uint32_t type, hsa_queue_error error, void *data,
                           uint32_t scratch, uint32_t shared, hsa_queue **made);
hsa_status on_destroy_queue(hsa_queue *queue);
void forget_intercepted_queues();  // frees their signals; call when ROCr shuts down
extern const Lifetime queue_lifetime;

// --- doorbell.cpp ---

// What the agent owns of a queue that the program is destroying.
struct LeftQueue {
    Gpu *gpu = nullptr;  // null: unknown
    uint32_t number = 0;
    std::vector<hsa_handle> signals;  // to be destroyed after the queue
};
void leave_queue(const hsa_queue *queue, LeftQueue &left);
template <int kIndex>
uint64_t on_add_write_index(const hsa_queue *queue, uint64_t count);
void on_store_relaxed(hsa_handle signal, int64_t value);
void on_store_screlease(hsa_handle signal, int64_t value);
// Inserts barriers that did not fit into their queues before, and opens gates that have been closed too long.
void look_after_queues();
void leave_queues();  // opens all gates; call at detach, when no thread is in a hook
extern const Lifetime doorbell_lifetime;

// --- memory.cpp ---

bool prepare(Gpu &gpu);  // creates the maps on the first call
// Allocates an instance's arrays and launch block. Call with `gpu.lock` held. Returns false if there is no room.
bool give_memory(Gpu &gpu, Copy &copy, const Shape &shape, Instance &instance);
void enlarge(Gpu &gpu);
// Frees the memory, unless kernels keep running for `patience_ms`.
void release(Gpu &gpu, uint32_t patience_ms);
bool drain(uint32_t sequence, uint32_t wait_ms, bool rings);
void read_maps();           // without a request from the tool, and without waiting for kernels
bool read_complete_maps();  // the same, when no kernel runs; false: kernels keep running

// --- operations.cpp ---

struct Call;
uint32_t new_queue(const Gpu &gpu);  // returns a log number for a queue
// Logs an operation. In a HIP call of this thread, the record is held until the call returns, to get its times.
void put_operation(Record &record);
// Turns the record of a kernel that HIP launches itself into the record of the copy or memset that the program asked for.
void describe_own_kernel(Record &record, const std::string &kernel);
// Logs a copy that HIP made on the CPU, in a call that copied nothing through a queue. Does nothing if other threads logged copies during
// the call.
void log_copy_of_host(Call &call);
uint64_t copies_logged();
// Logs the signals that a packet waits for, then its completion signal. Log a dispatch before that. `untimed`: the id of a dispatch
// that no probe times; `changed`, the packet for the GPU, may get a signal for timing.
void log_packet(const hsa_packet &packet, const Gpu &gpu, uint32_t queue, uint64_t untimed,
                hsa_packet &changed);
void log_known_times();   // the times of completed copies and dispatches
void give_back_timers();  // destroys the agent's signals, except those that packets may still set
extern const Lifetime operations_lifetime;
hsa_status on_destroy_signal(hsa_handle signal);
hsa_status on_copy(void *to, hsa_handle at, const void *from, hsa_handle of, size_t size, uint32_t count,
                   const hsa_handle *signals, hsa_handle completion);
hsa_status on_copy_by_engine(void *to, hsa_handle at, const void *from, hsa_handle of, size_t size,
                             uint32_t count, const hsa_handle *signals, hsa_handle completion, int engine,
                             bool force);
hsa_status on_copy_box(const hsa_box *to, const uint32_t *to_offset, const hsa_box *from,
                       const uint32_t *from_offset, const uint32_t *extent, hsa_handle by, int direction,
                       uint32_t count, const hsa_handle *signals, hsa_handle completion);

// --- allocations.cpp ---

// Returns ROCr's information on an address; empty if no GPU can use its memory.
hsa_pointer info_of(uint64_t address);
hsa_status on_pool_allocate(hsa_handle pool, size_t size, uint32_t flags, void **made);
hsa_status on_pool_free(void *base);
hsa_status on_allocate(hsa_handle region, size_t size, void **made);
hsa_status on_free(void *base);
hsa_status on_lock(void *host, size_t size, hsa_handle *agents, int count, void **made);
hsa_status on_lock_to_pool(void *host, size_t size, hsa_handle *agents, int count, hsa_handle pool,
                           uint32_t flags, void **made);
hsa_status on_unlock(void *host);
// Call before a kernel with these arguments runs: logs the allocations that they point into, unless already logged.
void log_allocations_of(const void *arguments, size_t bytes, const Gpu &gpu);
// For HIP's own pools: memory that a call returned to a pool, or took from one without calling ROCr.
void freed_into_pool(const Freeing &what, const char *function);
void allocated_from_pool(const void *base, size_t bytes, const Call &call);
// Call after the program exported the memory at `base` to other processes.
void exported(const void *base, const char *function);
extern const Lifetime allocations_lifetime;

// --- hip_calls.cpp ---

constexpr uint64_t kUnknownStream = UINT64_MAX;
// The memory that a call copies or sets; 0: unknown.
struct Moved {
    uint64_t to = 0, from = 0, bytes = 0;
};
struct Call {                          // a HIP call of the program
    uint64_t began = 0;                // ns
    uint64_t stream = kUnknownStream;  // the handle that the program passed
    uint32_t stack = 0;                // the id of its host stack; 0: none
    bool waits = false;                // the function waits for its copies from or to the host
    bool for_event = false;            // the function makes a stream wait for an event
    Moved moved;                       // by a function that copies or sets memory
    uint64_t copies = 0;               // how many copies had been logged when it began
    const char *allocates = nullptr;   // the name of a function that allocates
    bool allocated = false;            // this call has called ROCr to allocate
    std::vector<Record> records;       // operation records, held until the function returns
    uint64_t working = 0;              // ns: when the agent's current work began; 0: none
    // The start of the call, moved by the time that the agent has worked in it.
    uint64_t called_at() const { return began + (working ? now_ns() - working : 0); }
};
inline Call *&own_call() {
    static thread_local Call *value __attribute__((tls_model("initial-exec"))) = nullptr;
    return value;
}
// Returns the calling thread's hooked call; null if there is none.
inline Call *current_call() { return depth() ? own_call() : nullptr; }

// While an object exists, the calling thread's work takes no time on hipsim's virtual clock.
class Untimed {
  public:
    Untimed() noexcept;
    ~Untimed();
    Untimed(const Untimed &) = delete;
    Untimed &operator=(const Untimed &) = delete;

  private:
    void (*hipsim_)(int on);
};

// Put this around the agent's work in a ROCr function. The work counts as overhead of the HIP function that the thread is in, or else
// as a separate hooked call. The work is subtracted from the HIP function's duration.
// The object is false if the agent is detached, or if the agent itself calls the function: then there is nothing to do.
class OwnWork {
  public:
    [[gnu::always_inline]] OwnWork() noexcept : hook_(depth() != 0) {
        if (depth() == 1) own_call() = nullptr;
        if (!back_) return;
        thread_ = own_record();
        if (thread_->timed_since == 1) resume_timed(*thread_);
        else thread_ = nullptr;
        Call *call = current_call();
        if (!call || call->working || virtual_clock()) return;
        call->working = now_ns();
        call_ = call;
    }
    ~OwnWork() {
        if (call_) {
            call_->began = call_->called_at();
            call_->working = 0;
        }
        if (thread_) pause_timed(*thread_);
    }
    OwnWork(const OwnWork &) = delete;
    OwnWork &operator=(const OwnWork &) = delete;
    explicit operator bool() const { return back_ || hook_.keeps_records(); }

  private:
    BackFromDriver back_;  // used in a HIP function
    HookCall hook_;        // used outside HIP functions
    Untimed untimed_;
    Thread *thread_ = nullptr;  // null: overhead is not measured in this call; only every 64th call is
    Call *call_ = nullptr;
};
constexpr uint32_t kAtExit = 2000;  // ms that running kernels may take to finish at process exit

// Functions to hook. Functions without a target are not hooked.
struct HookTable {
    Hook *hooks;
    size_t count;
};
// The HIP functions to hook. `work`: those that submit work to the GPU. `allocations`: those that allocate or free memory.
HookTable calls_to_hook(bool work, bool allocations);
bool allocates_memory(const char *function);  // of a HIP function
extern const Lifetime hip_lifetime;

// --- ends.cpp ---

HookTable ends_to_hook();  // libc functions that end the program without running exit handlers, and sigaction
SignalAction original_sigaction();

// --- clock.cpp ---

void find_virtual_clock();  // looks for hipsim's virtual clock
void find_tick(Gpu &gpu);
// Sets when a dispatch on `gpu`, or a copy (null), began and ended, on the log's clock. Returns false if ROCr does not know the times.
bool times_of(const Gpu *gpu, hsa_handle signal, SpanPart &span);
// Logs the GPU counter's value at a host time, in the unit of the launch block's tick.
void calibrate(const Gpu &gpu);

}  // namespace gpubpf
