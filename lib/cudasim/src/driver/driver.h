// Shared by the files of the driver: the objects behind CUDA's handles, and the functions that entry points use.
//
// A handle is a key into a `Handles` table, and every call looks it up. So a stale or invalid handle returns an error
// and never crashes. Objects are held by shared pointers, so work in progress keeps what it uses alive.
#pragma once

#include <cuda.h>

#include <algorithm>
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
#include "driver/free_list.h"
#include "driver/memory.h"
#include "driver/queue.h"
#include "engine/engine.h"

namespace cudasim::sanitizer {
struct ModuleState;
}

namespace cudasim::driver {

struct Array;
struct Context;
struct Graph;
struct GraphNode;
struct GreenContext;
struct MipmappedArray;
struct PhysicalMemory;
class SharedEvent;
struct Stream;

// ---------------------------------------------------------------------------------------------------- handles

// The live objects of one type, by handle. In hostile mode, the handle of a destroyed object is reused at once, as real
// drivers do. Otherwise it is reused as late as possible, so that the use of a stale handle returns an error.
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
            handle = new std::array<uint64_t, 4>();  // never freed: only its address is used
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
    bool operator==(const Dim3 &other) const { return x == other.x && y == other.y && z == other.z; }
};
constexpr Dim3 kNoCluster = {0, 0, 0};  // a launch without clusters

struct Function;
struct Module;

struct KernelLaunch {
    std::shared_ptr<Function> function;
    std::shared_ptr<Module> module;  // keeps the module loaded until the launch has run
    const void *handle = nullptr;    // the CUfunction or CUkernel that the application passed
    bool by_kernel = false;          // a graph node whose parameters have `kern` set, not `func`
    Dim3 grid, block;
    unsigned shared_bytes = 0;
    bool cooperative = false;
    Dim3 asked_cluster = kNoCluster;   // the launch attribute
    Dim3 cluster = kNoCluster;         // that, or what the kernel requires
    std::vector<uint8_t> parameters;   // the kernel's parameter buffer
    std::optional<uint64_t> userdata;  // of patch functions; nothing: that of the function
};

struct Copy {  // three-dimensional; rows of `width` bytes
    uint64_t source = 0, destination = 0;
    size_t width = 0, height = 1, depth = 1;
    size_t source_pitch = 0, source_slice = 0, destination_pitch = 0, destination_slice = 0;
    size_t bytes() const { return width * height * depth; }
    CUDA_MEMCPY3D described{};                    // as the application passed it
    std::shared_ptr<Array> from_array, to_array;  // keep the memory of arrays
};

struct Memset {
    uint64_t destination = 0;
    unsigned value = 0, element_size = 1;     // 1, 2, 4
    size_t width = 0, height = 1, pitch = 0;  // width in elements, pitch in bytes
};

struct HostCall {
    CUhostFn function = nullptr;
    void *data = nullptr;
    CUstreamCallback callback = nullptr;  // of cuStreamAddCallback; then `function` is null
    CUstream stream = nullptr;
};

struct EventState;

// One operation of a stream, or of a graph node.
struct Operation {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    KernelLaunch kernel;
    Copy copy;
    Memset memset;
    HostCall host;
    std::shared_ptr<struct Event> event;
    std::shared_ptr<EventState>
        recording;                // an event record completes it; an event wait node of a graph waits for it
    std::vector<Fence> wait_for;  // besides the dependencies that follow from the stream
    std::vector<std::shared_ptr<Graph>> children;  // of a child graph: one; of a conditional node: its bodies
    std::shared_ptr<struct Conditional> conditional;
    CUgraphConditionalNodeType conditional_type = CU_GRAPH_COND_TYPE_IF;
    std::vector<CUstreamBatchMemOpParams> memory;  // values to write or to wait for
    CUDA_MEM_ALLOC_NODE_PARAMS allocation{};       // of allocation nodes; free nodes use only `dptr`
    std::function<void()>
        stream_only;  // work that cannot be captured into a graph; before a graph: what to do at its start
    std::shared_ptr<void> keep_alive;  // owns what the work reads, such as staged host memory
};

// ---------------------------------------------------------------------------------------------------- objects

struct EventState {  // one record of an event
    std::shared_ptr<Completion> completion = std::make_shared<Completion>();
    uint64_t time_ns = 0;  // valid once it is done
    // Whether the completion is that of the stream's work: who waits for the event then finds the stream idle, too.
    bool of_stream = false;
    Fence fence() const { return {completion}; }
    bool done() const { return completion->done(); }
};

struct Event {
    std::weak_ptr<Context> context;
    void *handle = nullptr;
    unsigned flags = 0;
    std::mutex mutex;
    std::shared_ptr<EventState> last;     // null: never recorded
    std::shared_ptr<SharedEvent> shared;  // of an interprocess event: only it has the records
    // If it was recorded in a capturing stream: the nodes that a wait for the event depends on.
    std::shared_ptr<Graph> captured_graph;
    std::vector<std::shared_ptr<GraphNode>> captured_dependencies;
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
    std::vector<std::shared_ptr<Stream>> streams;  // the origin and the streams that joined the capture
    // The last nodes of streams that were destroyed meanwhile. Like those of the others, they must be joined at the end.
    std::vector<std::shared_ptr<GraphNode>> destroyed_stream_nodes;
};

struct Stream {
    std::weak_ptr<Context> context;
    std::shared_ptr<GreenContext> green;  // null: made without one
    void *handle = nullptr;
    uint64_t id = 0;
    unsigned flags = 0;
    int priority = 0;
    bool legacy = false;  // the context's default stream
    bool blocking() const { return !legacy && (flags & CU_STREAM_NON_BLOCKING) == 0; }
    std::shared_ptr<Queue> queue = std::make_shared<Queue>();
    std::shared_ptr<Capture> capture;                              // guarded by the context's mutex
    std::vector<std::shared_ptr<GraphNode>> capture_dependencies;  // dependencies of the next captured node
    std::vector<CUgraphNode> capture_handles;  // storage for cuStreamGetCaptureInfo's result
    std::map<int, CUstreamAttrValue> attributes;
};

struct Module;
struct Library;

// The registers per thread of a kernel.
struct Registers {
    unsigned count = 0;
    unsigned limit = 0;  // by -maxrregcount and the size of a block; 0: none
    bool known = false;  // read from a cubin; otherwise estimated
    void keep_limit() { count = std::min(count, limit == 0 ? 255 : limit); }
};

// A CUfunction: a kernel in a context.
struct Function {
    std::weak_ptr<Module> module;
    std::shared_ptr<const Image> image;
    uint32_t index = 0;
    void *handle = nullptr;
    const cudasim::Kernel &kernel() const { return image->kernels()[index]; }
    Registers registers;
    std::atomic<bool> refusal_logged{false};  // whether the reason why it cannot run was printed
    std::atomic<bool> loaded{false};          // used before, or loaded eagerly
    std::atomic<bool> has_userdata{false};    // sanitizerSetCallbackData was called
    std::atomic<uint64_t> userdata{0};
    // attributes that cuFuncSetAttribute sets
    std::atomic<int> max_dynamic_shared{-1};  // -1: never set
    std::atomic<int> carveout{-1};
    std::atomic<int> nonportable_cluster{0};
    std::atomic<int> cluster_policy{0};
    std::atomic<int> required_cluster[3]{};
    bool has_fixed_cluster() const { return kernel().cluster[0] != 0; }  // __cluster_dims__
    int required(int axis) const {
        return has_fixed_cluster() ? static_cast<int>(kernel().cluster[axis]) : required_cluster[axis].load();
    }
};

struct Module {
    std::weak_ptr<Context> context;
    void *handle = nullptr;
    std::weak_ptr<Library> library;  // null for modules of cuModuleLoad*
    std::shared_ptr<const Image> image;
    std::vector<uint64_t> variables;                   // the address of each, by index in the image
    std::vector<std::pair<uint64_t, uint64_t>> owned;  // their allocations: address, id
    std::vector<std::shared_ptr<Function>> functions;  // by kernel index
    std::mutex mutex;
    std::set<std::string> registered_variables;  // variables that cuLibraryGetGlobal was called for
    std::shared_ptr<const std::string> ptx;      // that the image was translated from
    const std::unique_ptr<sanitizer::ModuleState> sanitizer;
    Module();
    ~Module();
};

// A CUkernel: a kernel of a library, independent of contexts.
struct LibraryKernel {
    std::weak_ptr<Library> library;
    uint32_t index = 0;
    void *handle = nullptr;
    std::map<std::pair<int, int>, int> attributes;  // (attribute, device) → value, for contexts created later
};

struct Library {
    void *handle = nullptr;
    std::shared_ptr<const Image> image;
    std::shared_ptr<const std::string> ptx;  // that the image was translated from
    std::vector<Registers> registers;        // by kernel index
    std::mutex mutex;
    std::vector<std::shared_ptr<LibraryKernel>> kernels;
    std::map<const Context *, std::shared_ptr<Module>> modules;
    // Addresses of managed variables, the same in all contexts; 0 for other variables.
    std::vector<uint64_t> managed;
    ~Library();
};

// A memory pool. It lives as long as its allocations.
struct MemoryPool {
    void *handle = nullptr;
    int device = 0;
    bool is_default = false;
    std::shared_ptr<PoolFile> file;  // of a pool that processes share
    size_t most = 0;                 // bytes; 0: no limit
    std::mutex mutex;                // guards the rest
    uint64_t release_threshold = 0;
    std::map<int, int> switches;
    std::map<int, CUmemAccess_flags> access;  // of other devices; it is not enforced
    uint64_t used = 0, used_high = 0;         // bytes
};

struct Context : std::enable_shared_from_this<Context> {
    void *handle = nullptr;
    uint64_t id = 0;
    int device = 0;
    bool primary = false;
    unsigned flags = 0;
    std::atomic<int> sticky_error{0};  // the first fault, which every later call returns
    std::mutex fault_mutex;
    Fault fault;                      // the first one; guarded by fault_mutex
    std::atomic<bool> cancel{false};  // running kernels stop, because the context is being destroyed
    std::atomic<bool> destroyed{false};
    std::atomic<int> waiting{0};  // threads in cuCtxSynchronize

    std::recursive_mutex mutex;  // held by every call that changes the context or submits work
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // without the default streams
    std::map<std::thread::id, std::shared_ptr<Stream>> per_thread;
    std::vector<std::shared_ptr<Module>> modules;
    std::mutex limits_mutex;
    std::map<int, size_t> limits;  // guarded by limits_mutex
    CUfunc_cache cache_config = CU_FUNC_CACHE_PREFER_NONE;
    CUsharedconfig shared_config = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;
    std::vector<Fence> destroyed_stream_work;  // unfinished work of destroyed streams
    uint32_t stack_high_water = 1024;  // most bytes of local memory per thread that a launch has needed
    std::atomic<uint64_t> next_grid{1};
    Environment environment;
    std::set<int> peers;

    std::mutex print_mutex;
    std::string printed;  // device-side printf output, not flushed yet

    std::mutex heap_mutex;  // device-side malloc
    uint64_t heap = 0;
    FreeList heap_free;
    std::map<uint64_t, size_t> heap_used;  // address → bytes

    ~Context();
};

struct ThreadToken {};  // its address names a thread, while it lives

// A part of the multiprocessors of a device. What runs in it runs in the primary context, on all multiprocessors: a green
// context may use more than it asked for.
struct GreenContext {
    std::shared_ptr<Context> primary;
    void *handle = nullptr;     // CUgreenCtx
    void *converted = nullptr;  // CUcontext
    uint64_t id = 0;
    CUdevSmResource multiprocessors{};
    std::weak_ptr<ThreadToken>
        user;  // the thread for which it is current; guarded by the primary context's mutex
    std::atomic<bool> destroyed{false};
};

// The value that kernels set and a conditional node reads. Kernels and the application name it by a number.
struct Conditional {
    uint64_t number = 0;
    std::atomic<uint32_t> value{0};
    uint32_t default_value = 0;
    bool assigns_default = false;   // at the start of each launch
    std::atomic<bool> used{false};  // whether a node has it
    static std::shared_ptr<Conditional> create();
    static std::shared_ptr<Conditional> find(uint64_t number);  // null: it no longer exists
    ~Conditional();
};

struct GraphNode {
    void *handle = nullptr;
    uint64_t id = 0;
    std::weak_ptr<Graph> graph;
    Operation operation;
    std::vector<std::shared_ptr<GraphNode>> dependencies;
    std::shared_ptr<GraphNode> original;  // in a clone or an executable graph: the node that this one copies
    bool enabled = true;
    // Storage for KernelNodeGetParams' result; they point into `operation`.
    std::vector<void *> parameter_pointers;
    std::vector<CUgraph> body_handles;  // handles of a conditional node's bodies, for the application
    std::map<int, CUlaunchAttributeValue> attributes;
    // in an executable graph: indices into Graph::nodes and Graph::queues
    size_t position = 0, queue = 0;
};

// An object of the application that graphs keep alive. `destroy` is called when the last reference is released.
struct UserObject {
    void *data = nullptr;
    CUhostFn destroy = nullptr;
    ~UserObject() { destroy(data); }
};

struct UserReferences {  // the application's own references
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
    std::vector<std::shared_ptr<Conditional>> conditionals;
    std::vector<std::shared_ptr<Queue>> queues;  // only an executable graph with parallel branches has queues
    // By handle, with the number of references.
    std::map<const void *, std::pair<std::shared_ptr<UserObject>, unsigned>> user_objects;
};

struct GraphExec {
    void *handle = nullptr;
    unsigned long long flags = 0;
    std::shared_ptr<Context> context;
    std::shared_ptr<Graph> graph;  // a private copy, in topological order
    std::mutex mutex;
    Fence last;  // the previous launch: launches of one executable graph do not overlap
};

// The handle tables of the process. They are never destroyed, because threads may still run while the process exits.
struct Tables {
    Handles<Context> contexts;
    Handles<GreenContext> green_contexts;
    Handles<GreenContext> converted_green_contexts;  // by CUcontext
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
    Handles<Array> arrays;
    Handles<MipmappedArray> mipmapped_arrays;
    Handles<PhysicalMemory> physical;
};
Tables &tables();

// ---------------------------------------------------------------------------------------------------- limits, context

constexpr int kMultiprocessors = 16;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kRegisters = 65536;          // per multiprocessor and per block
constexpr int kParts = 4;                  // of a multiprocessor, each with a quarter of its registers
constexpr int kSharedPerBlock = 48 << 10;  // without opting in
constexpr int kSharedPerBlockOptin = 227 << 10;
constexpr int kSharedPerMultiprocessor = 228 << 10;
constexpr int kSharedReserved = 1 << 10;
constexpr int kThreadsPerBlock = 1024;
constexpr int kL2Cache = 1 << 20;
constexpr int kPersistingL2Cache = kL2Cache * 3 / 4;
constexpr int kAccessPolicyWindow = 128 << 20;
constexpr int kVersion = 13000;

// Returns CUDA_ERROR_NOT_INITIALIZED before cuInit, and in a child that was forked after it.
CUresult check_initialized();

// Finds the calling thread's current context. Returns an error if no context is current, or if it has a sticky error.
CUresult current_context(std::shared_ptr<Context> &context);
// The same without a check for errors, for calls that clean up.
std::shared_ptr<Context> current_context_or_null();
std::shared_ptr<Context> primary_context(int device, CUresult &status);  // creates it if necessary

// Finds the stream of a handle, which may be null, CU_STREAM_LEGACY or CU_STREAM_PER_THREAD, and its context.
// `per_thread`: a null handle means the calling thread's default stream, not the legacy default stream.
CUresult find_stream(CUstream handle, bool per_thread, std::shared_ptr<Stream> &stream,
                     std::shared_ptr<Context> &context);
std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context> &context, unsigned flags, int priority);
// The same, for the application.
CUstream add_stream(const std::shared_ptr<Context> &context, const std::shared_ptr<GreenContext> &green,
                    unsigned flags, int priority);

// Appends an operation to a stream, or to the graph that the stream is capturing. Sets `fence` to the operation's fence,
// unless it is captured. `call_ns`: virtual time that the call takes if it succeeds.
CUresult submit(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                Operation operation, Fence *fence = nullptr, uint64_t call_ns = 0);
// The same, but waits until the operation is done, and flushes printf output.
CUresult submit_and_wait(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                         Operation operation);
// Submits a kernel launch, after the checks of hostile mode.
CUresult launch_kernel(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       KernelLaunch launch);
// Executes an operation in the calling thread, a worker. Takes and returns virtual times: its start and its end.
uint64_t execute(Context &context, const Operation &operation, uint64_t start);

// Waits for all work that was submitted to a context, and flushes its printf output. `timed`: the wait advances the
// calling thread's virtual time. Waits that only hostile mode adds do not.
void drain(Context &context, bool timed = true);
void flush_printf(Context &context);

// Returns whether a stream that synchronises with the legacy stream is being captured.
bool captures_blocking_stream(const std::shared_ptr<Context> &context);
// Checks whether a potentially unsafe call, such as an allocation, is allowed. A capture that prohibits it is
// invalidated (cuThreadExchangeStreamCaptureMode).
CUresult check_unsafe_call();
// Checks that no stream of a context is capturing, as calls that synchronise with the context must. Otherwise the
// capture is invalidated.
CUresult check_not_capturing(const std::shared_ptr<Context> &context);

// Removes a stream that is being destroyed from its capture, if it has one. If it is the capture's origin, the capture ends.
// The caller holds the context's mutex.
void abandon_capture(const std::shared_ptr<Stream> &stream);
CUresult begin_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       CUstreamCaptureMode mode, const std::shared_ptr<Graph> &graph,
                       const std::vector<std::shared_ptr<GraphNode>> &dependencies);
CUresult end_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                     CUgraph *graph);
// Invalidates the capture of a stream, because of a call that is not allowed on a capturing stream. Returns the error of
// that call; CUDA_SUCCESS if the stream is not capturing.
CUresult invalidate_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream);
CUresult record_event(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                      const std::shared_ptr<Event> &event, bool external);
CUresult wait_event(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                    const std::shared_ptr<Event> &event, bool external);

// Holds a context's mutex for a call that loads, allocates or frees. In hostile mode, it first waits for running work.
class ExclusiveContext {
  public:
    explicit ExclusiveContext(const std::shared_ptr<Context> &context);

  private:
    std::shared_ptr<Context> context_;
    std::unique_lock<std::recursive_mutex> lock_;
};

void log_line(const char *format, ...)
    __attribute__((format(printf, 1, 2)));  // prints "cudasim: …" to standard error

uint64_t now_ns();  // CLOCK_MONOTONIC

bool is_device(CUdevice device);

// ------------------------------------------------------------------------------------- kernels, memory, graphs

Dim3 cluster_of(const CUlaunchAttributeValue &value);
int most_cluster_blocks(const Function &function);  // that a launch may ask for
// Sets the shape of a launch's clusters: what it asks for, or else what its kernel requires. Fails if they differ, or if the device
// cannot run it.
CUresult find_cluster(const Function &function, Dim3 asked, Dim3 &cluster);
// The same for a launch with this grid, which has whole clusters.
CUresult set_cluster(KernelLaunch &launch, Dim3 asked);

// Checks a launch and copies its parameters. Reads launch.asked_cluster.
CUresult describe_launch(const void *handle, const std::shared_ptr<Context> &context, Dim3 grid, Dim3 block,
                         unsigned shared_bytes, bool cooperative, void **parameters, void **extra,
                         KernelLaunch &launch);
// The same as cuModuleLoadData, for the private table.
CUresult load_module_privately(CUmodule *module, const void *image);
// Loads a function at its first use. With lazy loading this may wait for running kernels (CUDA programming guide, "Lazy
// Loading").
void load_function(Function &function, const std::shared_ptr<Context> &context);
// Finds the function of a CUfunction or CUkernel in a context.
CUresult find_function(const void *handle, const std::shared_ptr<Context> &context,
                       std::shared_ptr<Function> &function);
// Finds a library's module in a context; loads it if necessary.
CUresult library_module(const std::shared_ptr<Library> &library, const std::shared_ptr<Context> &context,
                        std::shared_ptr<Module> &module);
// Removes the handles of a module and its functions.
void remove_handles(const Module &module);
int max_threads(const Function &function);                                  // per block, by its launch bounds
int most_threads_to_launch(const Function &function);                       // also by its registers
int occupancy(const Function &function, int block, size_t dynamic_shared);  // blocks per multiprocessor
uint64_t resident_clusters(const Function &function, int block, size_t dynamic_shared, Dim3 cluster);
CUresult describe_copy(const CUDA_MEMCPY3D &described, Copy &copy);
// Checks that [address, address + bytes) lies in one allocation.
CUresult check_range(uint64_t address, size_t bytes);
CUresult launch_graph(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                      const std::shared_ptr<GraphExec> &exec);
CUresult check_memory_operations(const std::vector<CUstreamBatchMemOpParams> &operations);
// Allocates the memory of a graph's allocation node. It lives as long as a graph that has the node.
CUresult allocate_for_graph(const std::shared_ptr<Context> &context, size_t bytes, Operation &operation);
bool belongs_to_graph(uint64_t address);
CUresult free_operation(uint64_t address, Operation &operation);
std::shared_ptr<GraphNode> add_node(const std::shared_ptr<Graph> &graph, Operation operation,
                                    const std::vector<std::shared_ptr<GraphNode>> &dependencies);
void drop_context_modules(const Context *context);  // the modules that libraries loaded into it
// The memory of a pool. The allocation counts as used from now on.
CUresult allocate_from_pool(const std::shared_ptr<MemoryPool> &pool, size_t bytes, const Context &context,
                            uint64_t &address);
// Remembers where managed memory was last prefetched to, because the application can ask.
CUresult note_prefetch(uint64_t address, size_t bytes, const CUmemLocation &location);
void forget_advice(uint64_t id);  // of managed memory that is freed
// Frees the allocation that begins at `base`, if it still has this id.
void free_memory(uint64_t base, uint64_t id);

}  // namespace cudasim::driver
