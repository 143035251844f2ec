// What the files of the driver share: its objects behind handles, and the rules that every entry point follows.
//
// A handle that an application holds is the address of a slot in a `Handles` table, looked up at every use: a stale or
// invented handle is an error, never a crash. Objects are shared pointers, so that work under way keeps what it needs.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "config.h"
#include "driver/clock.h"
#include "engine/engine.h"
#include "driver/memory.h"
#include "driver/queue.h"

namespace cudasim::driver {

struct Context;
struct Stream;
struct Graph;
struct GraphNode;

// ---------------------------------------------------------------------------------------------------- handles

// Live objects of one type by handle. In hostile mode a destroyed object's handle is given out again at once, as
// drivers do; otherwise as late as possible, so that a stale handle shows.
template <class T>
class Handles {
  public:
    void *add(std::shared_ptr<T> object) {
        std::unique_lock lock(mutex_);
        void *handle = nullptr;
        if (!unused_.empty() && (config().hostile || unused_.size() > 4096)) {
            handle = config().hostile ? unused_.back() : unused_.front();
            config().hostile ? unused_.pop_back() : unused_.pop_front();
        } else {
            handle = new std::array<uint64_t, 4>();  // kept for ever: only its address counts
        }
        live_.emplace(handle, std::move(object));
        return handle;
    }

    std::shared_ptr<T> get(const void *handle) const {
        std::shared_lock lock(mutex_);
        auto found = live_.find(handle);
        return found == live_.end() ? nullptr : found->second;
    }

    std::shared_ptr<T> remove(const void *handle) {
        std::unique_lock lock(mutex_);
        auto found = live_.find(handle);
        if (found == live_.end()) return nullptr;
        std::shared_ptr<T> object = std::move(found->second);
        live_.erase(found);
        unused_.push_back(const_cast<void *>(handle));
        return object;
    }

    std::vector<std::shared_ptr<T>> all() const {
        std::shared_lock lock(mutex_);
        std::vector<std::shared_ptr<T>> objects;
        for (const auto &[handle, object] : live_) objects.push_back(object);
        return objects;
    }

  private:
    mutable std::shared_mutex mutex_;
    std::unordered_map<const void *, std::shared_ptr<T>> live_;
    std::deque<void *> unused_;
};

// ---------------------------------------------------------------------------------------------------- operations

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
    uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Function;
struct Module;

struct KernelLaunch {
    std::shared_ptr<Function> function;
    std::shared_ptr<Module> module;  // kept until the launch has run, whatever is unloaded meanwhile
    const void *handle = nullptr;    // CUfunction or CUkernel, as the application gave it
    bool kernel_given = false;  // a CUkernel, in the field of a graph node's parameters that is for kernels
    Dim3 grid, block;
    unsigned shared_bytes = 0;
    bool cooperative = false;
    std::vector<uint8_t> parameters;  // in the kernel's layout
};

struct Copy {  // three-dimensional; rows of `width` bytes
    uint64_t source = 0, destination = 0;
    size_t width = 0, height = 1, depth = 1;
    size_t source_pitch = 0, source_slice = 0, destination_pitch = 0, destination_slice = 0;
    size_t bytes() const { return width * height * depth; }
    CUDA_MEMCPY3D described{};  // as the application described it
};

struct Fill {
    uint64_t destination = 0;
    unsigned value = 0, element_size = 1;     // 1, 2, 4
    size_t width = 0, height = 1, pitch = 0;  // width in elements, pitch in bytes
};

struct HostCall {
    CUhostFn function = nullptr;
    void *data = nullptr;
    CUstreamCallback callback = nullptr;  // instead of function
    CUstream stream = nullptr;
};

struct EventState;

// One thing that a stream or a graph does.
struct Operation {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    KernelLaunch kernel;
    Copy copy;
    Fill fill;
    HostCall host;
    std::shared_ptr<struct Event> event;
    std::shared_ptr<EventState>
        recording;             // what an event record completes, and an event wait in a graph waits for
    std::vector<Fence> after;  // more to wait for
    std::shared_ptr<Graph> child;
    std::vector<CUstreamBatchMemOpParams> memory;  // values to write and to wait for
    CUDA_MEM_ALLOC_NODE_PARAMS allocation{};       // of memory nodes; a free has the address alone
    std::function<void()> other;                   // what only a stream does, and no graph holds
    std::shared_ptr<void> keep;                    // what the work reads and nobody else holds
};

// ---------------------------------------------------------------------------------------------------- objects

struct EventState {  // one recording
    std::shared_ptr<Completion> completion = std::make_shared<Completion>();
    uint64_t time_ns = 0;  // once it is done
    Fence fence() const { return {completion}; }
    bool done() const { return completion->reached(); }
};

struct Event {
    std::weak_ptr<Context> context;
    void *handle = nullptr;
    unsigned flags = 0;
    std::mutex mutex;
    std::shared_ptr<EventState> last;  // null: never recorded
    // Recorded while its stream was in capture: what a wait for it depends on.
    std::shared_ptr<Graph> captured_graph;
    std::vector<std::shared_ptr<GraphNode>> captured_after;
};

struct Capture {
    std::shared_ptr<Graph> graph;
    CUgraph graph_handle = nullptr;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    uint64_t id = 0;
    std::thread::id thread;
    std::atomic<bool> invalid{false};
    bool existing_graph = false;  // cuStreamBeginCaptureToGraph
    std::shared_ptr<Stream> origin;
    std::vector<std::shared_ptr<Stream>> streams;  // origin and those that joined
};

struct Stream {
    std::weak_ptr<Context> context;
    void *handle = nullptr;
    uint64_t id = 0;
    unsigned flags = 0;
    int priority = 0;
    bool legacy = false;  // the context's default stream
    bool blocking() const { return !legacy && (flags & CU_STREAM_NON_BLOCKING) == 0; }
    std::shared_ptr<Queue> queue = std::make_shared<Queue>();
    std::shared_ptr<Capture> capture;                       // guarded by the context's submit mutex
    std::vector<std::shared_ptr<GraphNode>> capture_after;  // what the next captured node depends on
    std::vector<CUgraphNode> capture_handles;               // handed out by cuStreamGetCaptureInfo
    std::map<int, CUstreamAttrValue> attributes;
};

struct Module;
struct Library;

// A kernel in a context: what CUfunction stands for.
struct Function {
    std::weak_ptr<Module> module;
    std::shared_ptr<const Image> image;
    uint32_t index = 0;
    void *handle = nullptr;
    const cudasim::Kernel &kernel() const { return image->kernels()[index]; }
    unsigned registers = 0;
    std::atomic<bool> told{false};    // why it cannot run
    std::atomic<bool> loaded{false};  // used before, or loaded eagerly
    // settable attributes
    std::atomic<int> max_dynamic_shared{-1};  // -1: never set
    std::atomic<int> carveout{-1};
    std::atomic<int> nonportable_cluster{0};
    std::atomic<int> cluster_policy{0};
    std::atomic<int> required_cluster[3]{};
    // the obsolete way to launch: cuParamSet*, cuFuncSetBlockShape
    std::mutex mutex;
};

struct Module {
    std::weak_ptr<Context> context;
    void *handle = nullptr;
    std::weak_ptr<Library> library;  // made by one, not by cuModuleLoad*
    std::shared_ptr<const Image> image;
    std::string options;                               // of ptxas
    std::vector<uint64_t> variables;                   // address of each
    std::vector<std::pair<uint64_t, uint64_t>> owned;  // allocations behind them: address, id
    std::vector<std::shared_ptr<Function>> functions;  // by kernel index
    std::vector<bool> requested;                       // functions whose handle was given to somebody
    std::mutex mutex;
    std::set<std::string> asked;  // variables that were asked for through the library
    ~Module();
};

// A kernel of a library, in no context yet: what CUkernel stands for.
struct LibraryKernel {
    std::weak_ptr<Library> library;
    uint32_t index = 0;
    void *handle = nullptr;
    std::map<std::pair<int, int>, int> attributes;  // (attribute, device) → value, for contexts to come
};

struct Library {
    void *handle = nullptr;
    std::shared_ptr<const Image> image;
    std::string options;
    std::mutex mutex;
    std::vector<std::shared_ptr<LibraryKernel>> kernels;
    std::map<const Context *, std::shared_ptr<Module>> modules;
    std::vector<uint64_t> managed;  // addresses of managed variables: one for all contexts; 0 for others
    ~Library();
};

struct MemoryPool {
    void *handle = nullptr;
    int device = 0;
    bool is_default = false;
    uint64_t release_threshold = 0;
    std::map<int, int> switches;
    std::atomic<uint64_t> used{0}, used_high{0};
};

struct Context : std::enable_shared_from_this<Context> {
    void *handle = nullptr;
    uint64_t id = 0;
    int device = 0;
    bool primary = false;
    unsigned flags = 0;
    std::atomic<int> sticky{0};       // the first fault; every later call returns it
    std::atomic<bool> cancel{false};  // the context goes away: running kernels are abandoned
    std::atomic<bool> destroyed{false};

    std::recursive_mutex lock;  // the context lock: taken by every call that changes the context or submits
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // all but the legacy one
    std::map<std::thread::id, std::shared_ptr<Stream>> per_thread;
    std::vector<std::shared_ptr<Module>> modules;
    std::mutex lock_limits;
    std::map<int, size_t> limits;  // guarded by lock_limits
    CUfunc_cache cache_config = CU_FUNC_CACHE_PREFER_NONE;
    CUsharedconfig shared_config = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;
    std::vector<Fence> leftovers;      // work of destroyed streams
    uint32_t stack_high_water = 1024;  // bytes of local memory per thread that launches have needed so far
    std::atomic<uint64_t> next_grid{1};
    Environment environment;
    std::set<int> peers;

    std::mutex print_mutex;
    std::string printed;  // not flushed yet

    std::mutex heap_mutex;  // device-side malloc
    uint64_t heap = 0;
    std::map<uint64_t, size_t> heap_free, heap_used;

    ~Context();
};

struct GraphNode {
    void *handle = nullptr;
    uint64_t id = 0;
    std::weak_ptr<Graph> graph;
    Operation operation;
    std::vector<std::shared_ptr<GraphNode>> after;  // dependencies
    std::shared_ptr<GraphNode> original;  // in an executable graph or a clone: the node it is a copy of
    bool enabled = true;
    std::vector<void *> parameter_pointers;  // handed out by KernelNodeGetParams; point into operation
    std::map<int, CUlaunchAttributeValue> attributes;
    // in an executable graph
    size_t position = 0, lane = 0;
};

// Something of the application's that graphs keep alive: `destroy` is called when nobody holds it any more.
struct UserObject {
    void *data = nullptr;
    CUhostFn destroy = nullptr;
    ~UserObject() { destroy(data); }
};

struct UserReferences {  // what the application itself holds
    std::shared_ptr<UserObject> object;
    std::mutex mutex;
    unsigned count = 0;
};

struct Graph {
    void *handle = nullptr;
    std::weak_ptr<Context> context;
    std::mutex mutex;
    std::vector<std::shared_ptr<GraphNode>> nodes;
    uint64_t next_id = 1;
    std::vector<std::shared_ptr<Queue>>
        lanes;  // of an executable graph whose nodes can run beside each other; else none
    std::map<const void *, std::pair<std::shared_ptr<UserObject>, unsigned>>
        held;  // by handle, with the references
};

struct GraphExec {
    void *handle = nullptr;
    unsigned long long flags = 0;
    std::shared_ptr<Context> context;
    std::shared_ptr<Graph> graph;  // a private copy, in the order of execution
    std::mutex mutex;
    Fence last;  // the replay before: replays of one executable graph do not overlap
};

// Handle tables of the process. Leaked on purpose: threads may still run while the process exits.
struct Tables {
    Handles<Context> contexts;
    Handles<Stream> streams;
    Handles<Event> events;
    Handles<Module> modules;
    Handles<Library> libraries;
    Handles<LibraryKernel> kernels;
    Handles<Function> functions;
    Handles<Graph> graphs;
    Handles<GraphNode> nodes;
    Handles<GraphExec> execs;
    Handles<MemoryPool> pools;
    Handles<UserReferences> user_objects;
};
Tables &tables();

// ---------------------------------------------------------------------------------------------------- rules

constexpr int kMultiprocessors = 16;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kRegisters = 65536;          // per multiprocessor and per block
constexpr int kSharedPerBlock = 48 << 10;  // without opting in
constexpr int kSharedPerBlockOptin = 227 << 10;
constexpr int kSharedPerMultiprocessor = 228 << 10;
constexpr int kSharedReserved = 1 << 10;
constexpr int kThreadsPerBlock = 1024;
constexpr int kVersion = 13000;

// Is the driver initialised in this process (and not merely in its parent)? Else CUDA_ERROR_NOT_INITIALIZED.
CUresult initialized();

// The calling thread's current context; null and an error when there is none or it is broken.
CUresult current(std::shared_ptr<Context> &context);
// The same without looking at faults (for calls that clean up).
std::shared_ptr<Context> current_or_null();
std::shared_ptr<Context> primary_context(int device, CUresult &status);  // retains it
void set_current(const std::shared_ptr<Context> &context);

// The stream behind a handle (null, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD included) and its context.
// `per_thread`: what null means.
CUresult find_stream(CUstream handle, bool per_thread, std::shared_ptr<Stream> &stream,
                     std::shared_ptr<Context> &context);
std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context> &context, unsigned flags, int priority);

// Appends an operation to a stream, or to the graph that the stream is being captured into. `fence` (optional): when
// it is done; unset when captured. `takes`: virtual ns that the call takes when it succeeds.
CUresult submit(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                Operation operation, Fence *fence = nullptr, uint64_t takes = 0);
// The same, and waits until it is done; printf output is flushed.
CUresult submit_and_wait(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                         Operation operation);
// A kernel launch: hostile mode's rules, then submit.
CUresult launch_kernel(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       KernelLaunch launch);
// Does it now, in the calling (worker) thread; from and to virtual times.
uint64_t execute(Context &context, const Operation &operation, uint64_t start);

// Waits for all work that was submitted to a context; flushes its printf output. The calling thread's virtual time
// comes along, unless the wait is one that only hostile mode has.
void drain(Context &context, bool timed = true);
void flush_printf(Context &context);

// Is a call that synchronises or allocates allowed now (no capture forbids it)? If not, the captures that it concerns
// are invalidated.
CUresult allowed_in_capture(const std::shared_ptr<Context> &context);
CUresult no_capture_in(const std::shared_ptr<Context> &context);

CUresult begin_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       CUstreamCaptureMode mode, const std::shared_ptr<Graph> &graph,
                       const std::vector<std::shared_ptr<GraphNode>> &after);
CUresult end_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                     CUgraph *graph);
// Takes a stream that is captured out of its capture's hands: a call that capture does not allow on it.
CUresult invalidate_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream);
CUresult record_event(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                      const std::shared_ptr<Event> &event, bool external);
CUresult wait_event(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                    const std::shared_ptr<Event> &event, bool external);

// Holds the context lock for a call that loads, allocates or frees; in hostile mode also waits for running work.
class Exclusive {
  public:
    explicit Exclusive(const std::shared_ptr<Context> &context);

  private:
    std::shared_ptr<Context> context_;
    std::unique_lock<std::recursive_mutex> lock_;
};

void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));  // "cudasim: …" on stderr

uint64_t now_ns();

// ------------------------------------------------------------------------------------- between the driver's files

CUresult describe_launch(const void *handle, const std::shared_ptr<Context> &context, Dim3 grid, Dim3 block,
                         unsigned shared_bytes, bool cooperative, void **parameters, void **extra,
                         KernelLaunch &launch);
// A function's code is loaded at its first use, which may wait for all that runs (CUDA programming guide, "Lazy Loading").
void load_function(Function &function, const std::shared_ptr<Context> &context);
// The function behind a CUfunction or CUkernel in this context.
CUresult find_function(const void *handle, const std::shared_ptr<Context> &context,
                       std::shared_ptr<Function> &function);
CUresult library_module(const std::shared_ptr<Library> &library, const std::shared_ptr<Context> &context,
                        std::shared_ptr<Module> &module);
int max_threads(const Function &function);
int occupancy(const Function &function, int block, size_t dynamic_shared);
CUresult describe_copy(const CUDA_MEMCPY3D &described, Copy &copy);
CUresult check_range(uint64_t address, size_t bytes);
CUresult launch_graph(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                      const std::shared_ptr<GraphExec> &exec);
CUresult check_memory_operations(const std::vector<CUstreamBatchMemOpParams> &operations);
// Memory of a graph's allocation nodes; it lives as long as a graph that has it.
CUresult allocate_for_graph(const std::shared_ptr<Context> &context, size_t bytes, Operation &operation);
bool belongs_to_graph(uint64_t address);
CUresult free_operation(uint64_t address, Operation &operation);
std::shared_ptr<GraphNode> add_node(const std::shared_ptr<Graph> &graph, Operation operation,
                                    const std::vector<std::shared_ptr<GraphNode>> &after);
void forget_context(const Context *context);  // libraries drop their modules for it
std::shared_ptr<MemoryPool> default_pool(int device);

}  // namespace cudasim::driver
