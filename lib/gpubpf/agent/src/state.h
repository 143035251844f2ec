// What the agent knows about the process: contexts, modules, kernels, and their instrumented copies. Records
// are freed only when the agent detaches, because a launch on another thread may use them. A record of
// something that no longer exists is marked, or removed from the tables.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "definitions.h"
#include "driver/driver.h"
#include "lifetime.h"
#include "messages.h"

namespace gpubpf {

// --- the process ---

// An object that is deleted on detach, unless it was deleted before.
class AttachmentObject {
  public:
    AttachmentObject();
    virtual ~AttachmentObject();
    AttachmentObject(const AttachmentObject &) = delete;
    AttachmentObject &operator=(const AttachmentObject &) = delete;
    struct List;

  private:
    AttachmentObject *before_ = nullptr, *after_ = nullptr;
};

struct Copy;
struct Kernel;
struct Module;
struct Question;

inline uint64_t map_aligned(uint64_t bytes) { return (bytes + kMapAlignment - 1) & ~(kMapAlignment - 1); }

struct Pool {
    CUdeviceptr base = 0;
    uint64_t size = 0;
    std::atomic<uint64_t> used{0};
};

struct Sidecar {  // in one context, while it exists
    Module *
        module;  // the module whose kernels it copies; after its unload, an equal module can take over the sidecar
    CUmodule handle;
    std::shared_ptr<const Answer> answer;
    std::vector<Copy *> copies;  // by the kernel's number in the answer; null: refused
};

struct RingMemory {  // a ring's records in one context
    uint32_t map, shards;
    uint64_t capacity, stride;  // records per shard, bytes per record
    CUdeviceptr control, data;
    uint64_t bytes;                  // size of `data`
    void *mapped;                    // mapping of the file with the records; null: they are in GPU memory
    std::vector<uint64_t> consumed;  // the tool's last position per shard, for a ring in GPU memory
};

struct GpuClock;

struct Stamps;

// A context's table for patches of machine code (lower/patch_function.py), and the patches.
struct Patches {
    std::mutex lock;  // guards the members, and calls of the sanitizer API about the context
    bool tried = false, usable = false;
    std::string why;  // not usable: the reason
    CUdeviceptr table = 0, records = 0, records_end = 0;
    std::vector<std::pair<uint64_t, CUdeviceptr>> slots;  // the table's, as the GPU has them
    std::vector<std::pair<uint32_t, std::string>> functions;
    std::vector<std::pair<uint64_t, uint64_t>> code;  // of the functions: first program counter, size
    std::vector<CUmodule> modules;                    // that are patched
    uint32_t shapes = 0;                              // of all kernels, each has a number
    // Records of graphs that no longer exist, the oldest first: their addresses and sizes in bytes.
    std::deque<std::pair<CUdeviceptr, uint64_t>> graphs;
    // The beginning of the table: calls that counted nothing, as copied from the GPU last, and as far as the control block has them.
    uint64_t lost[2] = {}, lost_counted[2] = {};
};

struct Context : AttachmentObject {
    ~Context() override;
    CUcontext handle = nullptr;
    CUdevice device = 0;
    uint32_t serial = 0, cc = 0, multiprocessors = 1;
    std::atomic<bool> dead{false},
        broken{false};                    // broken: a kernel faulted, so every call fails from then on
    std::atomic<bool> told_fault{false};  // Message::KernelFailed was sent
    std::mutex busy;      // held while the agent loads, drains or destroys something in the context
    bool before = false;  // it existed before the attachment, or no hook saw its creation
    // On steady_clock: until when the worker thread should have loaded copies, since a launch has met the context. 0: it has loaded them.
    std::atomic<int64_t> met_until{0};
    std::atomic<uint32_t> given{0};      // how often the driver has given it to the program, as seen by hooks
    std::atomic<int64_t> busy_until{0};  // on steady_clock: until then, loads hardly wait for a quiet moment
    bool followed = false;  // the stream exists; this and the members below are guarded by `busy`
    bool prepared = false;  // the maps exist
    bool usable = false;
    CUstream stream = nullptr;         // the agent's own, non-blocking
    std::vector<CUdeviceptr> storage;  // by map: its address, unless the memory depends on the launch shape
    std::vector<RingMemory> rings;
    void *kept = nullptr;         // the shared array of Config::kept, as the host sees it
    uint64_t *staging = nullptr;  // where its values are copied to, in memory that the GPU can access
    std::atomic<int64_t> next_keep_ns{0};  // on steady_clock: limits how often values are kept
    // host memory that the GPU can access; unmapped when the context ends
    std::vector<std::pair<void *, uint64_t>> registered;
    std::atomic<GpuClock *> clock{nullptr};  // see clock.cpp
    std::vector<Sidecar> sidecars;
    Patches patches;

    std::atomic<Stamps *> stamps{nullptr};  // timing events; created once
    std::deque<CUdeviceptr> cells;  // unused cells of graphs; guarded by `memory`, like the next member
    std::vector<CUdeviceptr> cell_memory;

    std::mutex memory;      // guards the members below; never held during a driver call
    CUdeviceptr grids = 0;  // a u64: how many grids kernels have launched; 0: none does
    uint64_t grids_counted = 0;
    std::vector<std::unique_ptr<Pool>> pools;
    std::vector<Copy *> copies;
    uint64_t wanted = 0;                  // largest request that did not fit, in bytes
    std::atomic<uint32_t> generation{0};  // generation of the pools
};

// Whether it has neither ended nor failed.
inline bool is_usable(const Context *context) { return context && !context->dead && !context->broken; }

// An array's memory for one instance. `capacity` is in the map's units; for a site array it is
// sites | (shards - 1) << kShardsShift.
struct Array {
    uint32_t map;
    CUdeviceptr base;
    uint64_t bytes, capacity;
};

// One launch shape of a copy.
struct Instance : AttachmentObject {
    ~Instance() override { delete[] launch_block.load(); }
    uint32_t grid[3], block[3];
    std::atomic<uint64_t> launches{0};
    uint64_t awaited = 0;  // launches that the last snapshot waited for; guarded by the context's `busy`
    // complete except for the launch id; null: no memory yet
    std::atomic<const uint8_t *> launch_block{nullptr};
    std::atomic<bool> published{false};  // of a patched kernel: its launch block is in GPU memory (publish)
    uint32_t shape = 0;                  // if published: its number in the context (Patches::shapes)
    uint32_t tried = UINT32_MAX;  // the generation of pools that were too small; UINT32_MAX: not tried yet
    std::vector<Array> arrays;    // valid once launch_block is set
    // How often the copy ran in bodies of conditional graph nodes: the address of a u64 in a pool, in which the
    // copy counts (0: in none), the copy's function there, and how many were counted. The address is guarded by
    // the context's `memory`, the number by its `busy`.
    CUdeviceptr executions = 0;
    CUfunction executed = nullptr;
    uint64_t executions_counted = 0;
    Instance *next = nullptr;

    uint64_t threads() const {
        return uint64_t(grid[0]) * grid[1] * grid[2] * block[0] * block[1] * block[2];
    }
};

struct Occupancy {
    uint32_t threads, shared, cluster[3], settings;
    uint64_t copy, limited, original;  // resident blocks on the whole GPU
    Occupancy *next;
};

// An instrumented kernel in one context.
struct Copy : AttachmentObject {
    ~Copy() override;
    Kernel *kernel = nullptr;
    Context *context = nullptr;
    std::shared_ptr<const Answer> answer;  // keeps `layout` alive
    const Layout *layout = nullptr;
    CUfunction function = nullptr;
    CUfunction limited = nullptr;             // for launches where `function` does not fit; null: none
    CUfunction original = nullptr;            // for its occupancy; null if the driver does not return it
    static constexpr size_t kBuckets = 1024;  // some programs launch with thousands of shapes
    std::atomic<Instance *> instances[kBuckets] = {};
    std::vector<Array> sites;  // its site arrays; guarded by the context's `memory`
    std::atomic<Occupancy *> occupancy{nullptr};
    // A patched kernel has code, a record in the table, and a record of its newest shape. Guarded by Patches::lock.
    uint64_t pc = 0, code_size = 0;
    CUmodule patched_in = nullptr;
    CUdeviceptr record = 0, shape = 0;
    uint32_t shapes = 0;
    std::atomic<bool> withdrawn{false};  // the driver refused an attribute that the original has
    Copy *next = nullptr;

    std::vector<CUfunction> functions() const {
        return limited ? std::vector{function, limited} : std::vector{function};
    }
};

struct Kernel : AttachmentObject {  // the application's kernel, in one module or library
    std::string name;
    Module *module = nullptr;
    Slot *slot = nullptr;
    uint32_t slot_index = 0;
    std::atomic<bool> refused{false};
    std::atomic<bool> told_no_room{false};  // Message::NoRoom was sent
    std::atomic<Copy *> copies{nullptr};    // one per context
    std::map<int, int> attributes;          // set by the application; guarded by Registry::lock
    int cache_config = -1, shared_config = -1;
    std::atomic<uint32_t> settings{0};  // a hash of the three: with others, other numbers of blocks fit
    // The kernel may soon get a copy in a context where it has no copy (await_copies).
    std::atomic<bool> awaited{false};
    // A kernel of a large module: it gets its copy in a context at its first launch there (load_copies).
    std::atomic<bool> later{false};
    std::atomic<int> loading{0};            // threads that get its copies
    std::vector<const Context *> asked_in;  // where it was launched since; guarded by Registry::lock
    // The copies that kernels launch; guarded by Registry::lock.
    std::vector<std::pair<CUfunction, Context *>> launched;
};

// A module's image in a memory file, for the tool.
struct ImageFile {
    int file = -1;
    uint64_t size = 0, ptx = 0;    // bytes of the image, and of the PTX texts behind it
    uint32_t linked = 0, lto = 0;  // inputs that it was made from, and those that were LTO-IR; 0: unknown
};

struct Module : AttachmentObject {
    ~Module() override;
    CUmodule module = nullptr;  // exactly one of the two
    CUlibrary library = nullptr;
    Context *context = nullptr;      // set for a module
    std::atomic<int> installing{0};  // threads that install copies of its kernels
    bool gone = false;               // this and the members below are guarded by Registry::lock
    std::map<std::string, Kernel *> kernels;
    std::vector<void *> handles;    // handles of functions and kernels; forgotten with the module
    std::vector<CUmodule> modules;  // a library's modules, one per context
    std::vector<std::pair<uint64_t, const Context *>> variables;  // logged variables: address and context
    ImageFile image;                                              // its file: -1 once the tool has it
    bool preexisting = false;  // it existed before the attachment, or no hook saw its load
    // On steady_clock, by context: until then, launches wait for the copies (await_copies). Since the first launch.
    std::map<const Context *, int64_t> awaited_until;
    // It only represents copies that are loaded before their module is known. It counts as unloaded, so that
    // the real module takes over the sidecar.
    bool ahead = false;
    std::set<const Context *> loaded;  // if ahead: the contexts that have the copies
    uint32_t request = 0;              // the tool's request that Message::Ready answers; 0: none
    uint32_t answer_cc = 0;
    std::shared_ptr<const Answer> answer;
    std::shared_ptr<Question> asked;  // the question to the tool about this module; null: not asked yet
    // A large module: the kernels that get their copies later, the request that Message::Kernel names, and its answers.
    std::set<std::string> later;
    uint32_t later_request = 0;
    std::vector<std::shared_ptr<const Answer>> further;
};

struct Function {  // what a CUfunction or CUkernel stands for
    Kernel *kernel;
    Context *context;  // null: a CUkernel, which belongs to no context
};

struct HandleFunction : AttachmentObject {
    HandleFunction(Kernel *kernel, Context *context) : is{kernel, context} {}
    const Function is;
};

// Maps handles to Functions, and is read without locks. Old tables stay, because a thread may still be
// reading them.
class FunctionTable {
  public:
    const Function *find(const void *handle) const {
        const Table *t = table_.load(std::memory_order_acquire);
        auto key = reinterpret_cast<uintptr_t>(handle);
        for (size_t i = hash(key) & t->mask;; i = (i + 1) & t->mask) {
            uintptr_t k = t->cells[i].key.load(std::memory_order_acquire);
            if (k == key) return t->cells[i].value.load(std::memory_order_acquire);
            if (!k) return nullptr;
        }
    }
    FunctionTable();
    void set(const void *handle,
             const Function *value);  // null: forgets the handle; callers hold Registry::lock

  private:
    struct Cell {
        std::atomic<uintptr_t> key{0};
        std::atomic<const Function *> value{nullptr};
    };
    struct Table : AttachmentObject {
        explicit Table(size_t size) : mask(size - 1), cells(new Cell[size]) {}
        size_t mask, filled = 0;
        std::unique_ptr<Cell[]> cells;
    };
    static size_t hash(uintptr_t key) {
        return static_cast<size_t>((key >> 4) * 0x9E3779B97F4A7C15ull >> 20);
    }
    static void put(Table *t, uintptr_t key, const Function *value);
    std::atomic<Table *> table_;
};

struct Registry {
    std::mutex lock;  // guards the maps below; never held across a driver call or a wait
    std::map<CUcontext, Context *> contexts;
    // What runs in a green context runs in the primary context, whose modules, memory and streams it shares.
    std::map<CUcontext, Context *> green;
    std::map<CUgreenCtx, CUdevice> green_devices;
    std::map<CUdevice, CUcontext> primary;
    std::map<CUdevice, uint32_t> retained;
    // The same for a context from before the attachment, which had at least one user: retained minus released since.
    std::map<CUdevice, int64_t> retained_since;
    std::map<CUmodule, Module *> modules;
    std::map<CUlibrary, Module *> libraries;
    std::mutex loading;  // held by threads of the program while they wait for a moment to load copies
    std::map<std::string, uint32_t> slots;
    std::vector<Module *> waiting;  // modules waiting for a context, or for the end of a capture
    std::vector<Module *> ahead;    // copies that were loaded before their modules are known
    uint32_t serials = 0;
    // the process's only context, if it never had another; null if unknown
    std::atomic<Context *> only{nullptr};
    std::atomic<int> captures{0};  // number of streams that are being captured

    FunctionTable functions;

    // Returns the context's record, creating it if necessary; null for null. `made`: a hooked call returned the
    // handle. `stream`: one of the context.
    Context *context(CUcontext handle, bool made = false, CUstream stream = nullptr);
    Context *current();
    Context *context_of(CUstream stream);  // null for an unknown stream
    std::vector<Context *> all_contexts();
    Kernel *kernel(Module *module, const std::string &name);  // with lock held
    void record(Module *module, Context *context, const void *handle, const char *name);
    void forget(Module *module);  // with lock held: the module's handles are invalid from now on
};

extern std::atomic<uint64_t> handles_changed;   // increases when an unknown handle may have become known
extern std::atomic<uint64_t> contexts_changed;  // increases when a context ends

// A hook met a context for the first time. Preexisting libraries get copies there, and its clock is calibrated. The floor of the copies
// defines it (copies/deferred.cpp).
void context_discovered(Context *context);

extern AttachmentState<Registry> the_registry;
inline Registry &registry() { return *the_registry; }
extern const Lifetime registry_lifetime;  // also deletes every AttachmentObject

}  // namespace gpubpf
