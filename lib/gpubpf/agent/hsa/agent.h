// The agent in a process that uses AMD GPUs: a library that AMD's runtime (ROCr) loads, as HSA_TOOLS_LIB says, or that the tool loads
// into a running process.
//
//   agent.cpp      the connection to the tool; start and end
//   rocr.cpp       ROCr's functions: those that the agent calls, and those that it puts its own in place of
//   code.cpp       code objects that the program loads, and their instrumented copies
//   dispatch.cpp   at each dispatch, the copy of a kernel or the original
//   queue.cpp      the program's queues, from their beginning
//   doorbell.cpp   the program's queues, from somewhere in the middle
//   memory.cpp     memory of maps and rings, and reading it back
//   operations.cpp the log of what queues and copy engines get to do
//   allocations.cpp the log of memory that the program allocates
//   hip_calls.cpp  when the program's calls of HIP begin and return
//   clock.cpp      the clocks of the host and the GPUs
//
// It speaks the same protocol as the agent for CUDA (../src), and shares its messages.
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

#include "hooks.h"
#include "hsa.h"
#include "lifetime.h"
#include "log/allocation.h"
#include "log/log.h"
#include "messages.h"
#include "this_agent.h"
#include "thread.h"
#include "wire.h"

namespace gpubpf {

// Functions that ROCr exports; their symbols are these names behind "hsa_".
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

    bool find();  // in the process; returns false if one is missing
};
extern Functions hsa;

// What the table had where the agent put its own functions. They stay after that.
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

// Returns ROCr's tables of functions, as its exported functions use them; without tables, if this version's are unknown.
hsa_tables find_tables();
// Puts the agent's functions in the tables of the process. `running`: queues exist.
void put_in(const hsa_tables &tables, bool running, bool operations, bool allocations);
void take_out_of_tables();

// --- what the agent knows about the process, until the end of the attachment ---

struct Array {  // of one instance. `capacity`: in the map's units; of a site array as in the launch block
    uint32_t map;
    uint64_t base, bytes, capacity;
};

using Shape = std::array<uint32_t, 6>;  // threads of a block, blocks of the grid: as in the launch block

struct Instance {  // a copy with one launch shape
    uint64_t launches = 0, awaited = 0;
    std::vector<uint8_t> launch_block;  // complete except for the launch id; empty: no memory yet
    size_t tried = SIZE_MAX;            // the number of pools that had no room
    std::vector<Array> arrays;
};

struct Kernel;
struct Gpu;

struct Copy {  // of a kernel, in one executable
    Kernel *kernel;
    std::shared_ptr<const Answer> answer;
    const Layout *layout;
    uint64_t object;  // address of its descriptor
    std::map<Shape, Instance> instances;
    std::vector<Array> sites;
};

struct Kernel {  // the program's, in one executable
    std::string name;
    Gpu *gpu;
    Slot *slot;
    uint32_t slot_index = 0;
    uint64_t argument_bytes = 0;
    std::atomic<bool> refused{false};
    std::atomic<bool> waits{false};  // for the tool's answer
    std::atomic<Copy *> copy{nullptr};
};

struct Pool {
    uint64_t base, size, used;
};

struct Ring {
    uint32_t map, shards;
    uint64_t control;
};

struct LockedMemory {  // of the host, for the GPU
    void *host;
    uint64_t bytes;
};

// Memory for the arguments of dispatches. It is used again when `running` is 0 and no room is left in it.
struct Arguments {
    char *base = nullptr;
    size_t size = 0, used = 0;
    hsa_handle running{};  // a signal: how many of its dispatches have not ended
};

struct Gpu {
    hsa_handle agent;
    uint32_t number, compute_units = 1;
    hsa_handle own_pool{}, argument_pool{};
    std::mutex busy;  // held while maps are made or read
    bool prepared = false, usable = false;
    uint64_t tick = 0;  // the length of a tick of its counter, in ns << kTickBits; 0: unknown
    double tick_ns = 0;
    std::vector<Ring> rings;
    std::vector<LockedMemory> locked;

    std::mutex lock;  // guards the members below; held for bookkeeping, never while anything is waited for
    std::vector<Pool> pools;
    uint64_t wanted = 0;            // bytes of the largest request that did not fit
    std::vector<uint64_t> storage;  // by map: the address, unless each instance has its own
    std::vector<std::unique_ptr<Copy>> copies;
    std::vector<std::unique_ptr<Arguments>> arguments;  // the last one has room
};

// --- agent.cpp ---

struct Module;

struct Question {  // to the tool: the instrumented copy of a module
    Module *module;
    bool done = false, abandoned = false;  // abandoned: nobody waits for the answer any more
    bool tell = false;                     // the tool waits until the copies are there
    std::shared_ptr<const Answer> answer;
};

struct Agent {
    std::atomic<bool> live{false}, connected{false};
    bool running = false;  // the process ran when the tool came
    Config config;
    Control *control = nullptr;
    bool log_operations = false;  // the tool wants records of everything, and times of calls
    std::vector<std::unique_ptr<Gpu>> gpus;

    Gpu *gpu(hsa_handle agent) const;
    void send(Message type, const Writer &writer, int file = -1);
    // Asks for the copies of a module whose image is in `file`, and waits as long as the tool says that it works on it.
    std::shared_ptr<const Answer> ask(Module &module, const Gpu &gpu, int file, uint64_t size);
    // The same, but the service thread loads the copies when they come, and tells the tool that.
    void ask_for_later(Module &module, const Gpu &gpu, int file, uint64_t size);
    void wake();  // makes the service thread look for work
    // Counts an instrumented launch. The service thread reads the maps each time Config::pump of them have begun.
    void launched();
    std::atomic<uint64_t> pumped{0};
    // The process exits, or ROCr has been shut down: the agent must not call ROCr on its own any more.
    bool is_over() const;
    // Sends everything before the process ends. Returns when that is done, or after wait_ms + 3 s.
    void finish(uint32_t wait_ms);
};
extern Agent &agent;

// --- code.cpp ---

struct Module {  // a code object that the program has loaded
    Gpu *gpu;
    hsa_handle executable;
    std::map<std::string, Kernel *> kernels;
    hsa_handle copies{};              // executable with the copies
    std::vector<uint64_t> variables;  // those that are logged: their addresses
    bool gone = false;                // these three are guarded by `installing` in code.cpp
};
// Loads the copies of a module's kernels, unless the program has destroyed its executable.
void install(Module &module, const std::shared_ptr<const Answer> &answer);
Kernel *find_kernel(uint64_t object);
// Finds what the program has loaded already, and asks for copies.
void find_loaded();
void unload_copies(const Gpu &gpu);  // which is idle
extern const Lifetime code_lifetime;

hsa_status on_reader_of_file(int file, hsa_handle *reader);
hsa_status on_reader_of_memory(const void *code, size_t size, hsa_handle *reader);
hsa_status on_destroy_reader(hsa_handle reader);
hsa_status on_load(hsa_handle executable, hsa_handle agent, hsa_handle reader, const char *options,
                   hsa_handle *loaded);
hsa_status on_freeze(hsa_handle executable, const char *options);
hsa_status on_destroy_executable(hsa_handle executable);

// --- dispatch.cpp ---

// Takes a dispatch that the program put into queue number `queue` of the log, and changes it to what the GPU is to get. `untimed`
// becomes its id if no probe times it. Returns how many
// packets that are: a second one, a barrier, may follow. `alone`: nothing can follow it.
uint64_t take_packet(hsa_packet *packet, Gpu &gpu, uint32_t queue, uint64_t &untimed, bool alone = false);
bool is_idle(Gpu &gpu);         // all instrumented kernels have ended
void free_arguments(Gpu &gpu);  // it is idle

// --- queue.cpp ---

hsa_status on_create_queue(hsa_handle agent, uint32_t size, uint32_t type, hsa_queue_error error, void *data,
                           uint32_t scratch, uint32_t shared, hsa_queue **made);

// --- doorbell.cpp ---

hsa_status on_destroy_queue(hsa_queue *queue);
template <int kIndex>
uint64_t on_add_write_index(const hsa_queue *queue, uint64_t count);
void on_store_relaxed(hsa_handle signal, int64_t value);
void on_store_screlease(hsa_handle signal, int64_t value);
// Puts in the barriers that queues had no room for, and opens gates that are closed for long.
void look_after_queues();
void leave_queues();  // at the end of the attachment, when no thread is in a hook: opens all gates
extern const Lifetime doorbell_lifetime;

// --- memory.cpp ---

bool prepare(Gpu &gpu);  // makes the maps, once
// Gives an instance its arrays and its launch block. Call it with `gpu.lock` held. Returns false if there is no room.
bool give_memory(Gpu &gpu, Copy &copy, const Shape &shape, Instance &instance);
void enlarge(Gpu &gpu);
// Gives the memory back, unless kernels run on and on.
void release(Gpu &gpu);
bool drain(uint32_t sequence, uint32_t wait_ms, bool rings);
void read_maps();  // without being asked, and without waiting for kernels

// --- operations.cpp ---

uint32_t new_queue(const Gpu &gpu);  // returns a number for a queue or a copy engine
// Logs an operation: with the times of the program's call that the thread is in, when that returns; or else at once.
void put_operation(Record &record);
// Logs the signals that a packet waits for, and then that it sets one. A dispatch is logged before that. `untimed`: the id of a
// dispatch that no probe times; `changed`, the packet that the GPU gets, may get a signal for that.
void log_packet(const hsa_packet &packet, const Gpu &gpu, uint32_t queue, uint64_t untimed,
                hsa_packet &changed);
void log_known_times();  // of copies and dispatches that are over
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

hsa_status on_pool_allocate(hsa_handle pool, size_t size, uint32_t flags, void **made);
hsa_status on_pool_free(void *base);
hsa_status on_allocate(hsa_handle region, size_t size, void **made);
hsa_status on_free(void *base);
hsa_status on_lock(void *host, size_t size, hsa_handle *agents, int count, void **made);
hsa_status on_lock_to_pool(void *host, size_t size, hsa_handle *agents, int count, hsa_handle pool,
                           uint32_t flags, void **made);
hsa_status on_unlock(void *host);
// Before a kernel with these arguments runs: logs the allocations that they are in and that are not logged yet.
void log_allocations_of(const void *arguments, size_t bytes, const Gpu &gpu);
// HIP's own pools: memory that a call has given back to one, or got from one without a call of ROCr.
struct Call;
void freed_into_pool(const Freeing &what, const char *function);
void allocated_from_pool(const void *base, size_t bytes, const Call &call);
extern const Lifetime allocations_lifetime;

// --- hip_calls.cpp ---

constexpr uint64_t kUnknownStream = UINT64_MAX;
struct Call {                          // of a function of HIP, which the program has called
    uint64_t began = 0;                // ns
    uint64_t stream = kUnknownStream;  // the handle that the program gave
    uint32_t stack = 0;                // the number of its host stack; 0: none
    bool waits = false;                // the function returns when its copies from or to the host are done
    const char *allocates = nullptr;   // the name of a function that allocates
    bool allocated = false;            // it has called ROCr for that
    std::vector<Record> records;       // of operations, held back until the function returns
    uint64_t working = 0;              // ns: when the agent began the work that it does now; 0: it does none
    // When the call began, later by the time that the agent has worked in it.
    uint64_t called_at() const { return began + (working ? now_ns() - working : 0); }
};
inline Call *&own_call() {
    static thread_local Call *value __attribute__((tls_model("initial-exec"))) = nullptr;
    return value;
}
// Returns the calling thread's; null if it is in none that is hooked.
inline Call *current_call() { return depth() ? own_call() : nullptr; }

// Put this around the agent's work in a function of ROCr. The time of the work is overhead: of the HIP function that the thread
// is in, or, if it is in none, of a hooked call of its own. It is taken out of the time that the HIP function took.
// False if the attachment is over, or if the agent itself calls the function: then there is nothing to do.
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
    BackFromDriver back_;       // if the thread is in a HIP function
    HookCall hook_;             // if it is in none
    Thread *thread_ = nullptr;  // null: the overhead of this HIP function is not measured; only every 64th is
    Call *call_ = nullptr;
};
constexpr uint32_t kAtExit = 2000;  // ms that running kernels get to finish when the process ends

// Functions to hook; those without a target are left as they are.
struct HookTable {
    Hook *hooks;
    size_t count;
};
// The functions of HIP to hook. `work`: those that give the GPU work. `allocations`: those that allocate memory.
HookTable calls_to_hook(bool work, bool allocations);
bool allocates_memory(const char *function);  // of HIP
extern const Lifetime hip_lifetime;

// --- ends.cpp ---

HookTable ends_to_hook();  // the functions of libc that end the process without running exit handlers

// --- clock.cpp ---

void find_virtual_clock();  // of hipsim
void find_tick(Gpu &gpu);
// Fills in when a dispatch on `gpu`, or a copy (null), began and ended, on the log's clock. Returns false if ROCr does not know.
bool times_of(const Gpu *gpu, hsa_handle signal, SpanPart &span);
// Puts what the GPU's counter shows at some time of the host's clock into the log, in the unit of the launch block's tick.
void calibrate(const Gpu &gpu);

}  // namespace gpubpf
