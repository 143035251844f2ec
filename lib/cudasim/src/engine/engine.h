// The engine of the embedded CUDA device: it executes translated PTX on the CPU.
//
// This header is the whole interface to the driver (contexts, modules, memory, streams). The engine does not know
// contexts and streams. It translates PTX to an Image, and it runs one grid of a kernel until the grid has finished or
// failed. The calling thread and a pool of worker threads run the blocks.
//
// Addresses: a device pointer is a host address in the device region (Environment::region_*), which the driver reserves
// and maps as needed. Kernels may access mapped pages of the region, and host memory that Environment::host_range
// accepts. Shared, local and parameter memory have generic addresses in windows that the engine reserves outside of the
// region.
//
// Thread safety: any thread may call these functions. Several threads may call run() at once; their grids overlap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/texture.h"

namespace cudasim {

// ---------------------------------------------------------------------------------------------------- images

struct Relocation {
    uint64_t offset;  // in the variable, in bytes
    uint32_t width;   // bytes to write: 1, 2, 4, 8 (less than 8 with a mask such as 0xFF00(symbol))
    bool function;    // the value is Image::function_address(index); else the address of variable `index`
    uint32_t index;
    int64_t addend;
    uint64_t mask;  // writes (value & mask) >> shift
    uint32_t shift;
};

enum class Space { global, constant };

struct Variable {  // a module-scope variable in .global or .const; the driver allocates it
    std::string name;
    Space space;
    uint64_t size;             // bytes; 0 for `.extern` of unknown size
    uint64_t align;            // power of two
    bool visible;              // .visible, .weak, .common: not local to the module
    bool external;             // .extern: defined in another module, so it has no storage
    bool managed;              // .attribute(.managed)
    std::string_view initial;  // if shorter than size, the rest is zero
    std::vector<Relocation> relocations;
};

struct Parameter {
    uint32_t offset, size, align;  // bytes
};

struct Kernel {
    std::string name;  // as in PTX (mangled)
    std::vector<Parameter> parameters;
    uint32_t parameter_bytes;
    uint32_t static_shared;           // bytes
    uint32_t local;                   // bytes per thread
    uint32_t registers;               // per thread, estimated
    uint32_t reqntid[3];              // .reqntid; 0, 0, 0 if none
    uint32_t maxntid[3];              // .maxntid; 0, 0, 0 if none
    uint32_t maxnreg;                 // .maxnreg; 0 if none
    uint32_t cluster[3];              // .reqnctapercluster; 0, 0, 0 if none
    uint32_t max_cluster_rank;        // .maxclusterrank: blocks of a cluster; 0 if none
    bool explicit_cluster;            // .explicitcluster: a launch must have a shape of clusters
    bool recursive;                   // needs a stack of unknown size
    std::vector<uint32_t> variables;  // indices of the module variables that it and its callees use
    std::string refused;  // why it cannot run, such as an unsupported instruction; empty if it can
};

struct TranslateError {
    // CUresult: 218 INVALID_PTX, 222 UNSUPPORTED_PTX_VERSION, 300 INVALID_SOURCE (no compiler, …).
    int code = 0;
    std::string log;  // one or more lines, with the instruction and the PTX line
};

// A translated module. It is immutable, and shared by all contexts that load the same PTX.
class Image {
  public:
    Image();
    virtual ~Image() = default;
    const std::vector<Kernel> &kernels() const { return kernels_; }
    const std::vector<Variable> &variables() const { return variables_; }
    // Returns the index of the kernel or variable of that name, or -1.
    int find_kernel(std::string_view name) const;
    int find_variable(std::string_view name) const;
    // Returns a function's address, as `mov` of its name and relocations give it.
    uint64_t function_address(uint32_t index) const;
    // Compiles and loads the code of a kernel of a large module, unless it is loaded already. Returns false and sets `error`
    // on failure.
    virtual bool prepare(uint32_t kernel, TranslateError &error) const = 0;
    // Returns the place in the source of a line of the PTX text: "/home/me/app.cu" and its line. The line is 0 where the PTX has
    // no line information (.loc).
    std::pair<std::string, uint32_t> source_of(uint32_t ptx_line) const;
    // Writes a variable's initial value, relocated, to `destination` (size bytes). `addresses[i]` is the address of
    // variable i.
    void initialise(uint32_t variable, const uint64_t *addresses, void *destination) const;
    // PTX `.version` and `.target`: 90 for 9.0, and for sm_90.
    int ptx_version = 0;
    int target = 0;
    bool virtual_clock = false;  // whether it was translated for the virtual clock
    const uint64_t code_base;    // of the addresses of functions, see cs_warp; each image has its own

  protected:
    std::vector<Kernel> kernels_;
    std::vector<Variable> variables_;
    struct SourceLine {
        uint32_t ptx_line, file, line;  // from this line of the PTX on; line 0: unknown
    };
    std::vector<SourceLine> source_lines_;  // in the order of the PTX
    std::map<uint32_t, std::string> source_files_;
    void read_source_lines(std::string_view ptx);
};

// Translates PTX to machine code, or takes the code from the cache. Takes about 0.3 s if it is not cached. `ptx` need not end
// in NUL. Returns null and sets `error` if it fails. A kernel that cannot be translated is part of the image, with the
// reason in `refused`.
//
// With `virtual_clock`, each thread has a clock in ns, which the clock registers read instead of Environment::globaltimer
// and ::clock. A PTX instruction of the application takes 1 ns, and nanosleep its operand. Instructions between the
// comments //gpubpf{ and //gpubpf} take no time. A barrier sets its threads' clocks to the time of the last arrival.
//
// Environment variables: CUDASIM_PYTHON (the translator's interpreter), CUDASIM_PYTHONPATH (the directory of the package
// `cudasim`), CUDASIM_CC_COMPILER, CUDASIM_CACHE (else $XDG_CACHE_HOME/gpubpf/cudasim, and so on).
std::shared_ptr<const Image> translate(std::string_view ptx, TranslateError &error,
                                       bool virtual_clock = false);

struct LinkInput {
    std::string name, text;
};

// Links PTX texts into one (gpubpf.ptx.link). `complete`: all symbols must be defined; otherwise the texts are only checked.
// Returns false and sets `error` if it fails, with code 218 for PTX that cannot be parsed, 999 for texts that do not fit
// together. Results are cached, as translations are.
bool link_ptx(const std::vector<LinkInput> &inputs, bool complete, std::string &text, TranslateError &error);

// Inserts calls of patch functions into PTX (translate/patches.py). `names`: a function by instrumentation point. `patches`: texts that
// define them. Without names, the text gets only the comments that patched_functions() reads. Returns false and sets `error` if it
// fails. Results are cached, as translations are.
bool patch_ptx(const std::string &ptx, const std::map<uint32_t, std::string> &names,
               const std::vector<std::string> &patches, std::string &text, TranslateError &error);

struct CodeRange {
    uint64_t offset, size;  // bytes, from the module's first program counter
};
// Returns where the functions of a text from patch_ptx() are, by name: those of the module, or those of the patches.
std::map<std::string, CodeRange> patched_functions(const std::string &text, bool of_patches = false);

// Sets the translator's interpreter and its PYTHONPATH, for when no environment variables set them. To be called before the
// first translate().
void set_translator(std::string python, std::string pythonpath);

// Sets how long the grids of a kernel run, in ns, before later processes compile its code with more optimization. Without it, this
// never happens.
void set_optimize_after(uint64_t ns);

// ---------------------------------------------------------------------------------------------------- launches

// What a context provides to kernels. Any thread may call the functions, several at once. They get `self` as first
// argument, and must not call the engine. The environment must outlive every run() that uses it.
struct Environment {
    void *self = nullptr;
    uint64_t region_base = 0, region_size = 0;  // the reserved device region; its last page is never mapped
    uint64_t constant_base = 0, constant_size = 0;  // the part of it with .const variables
    // Returns whether [address, address + size) is host memory that kernels may access, such as registered memory.
    bool (*host_range)(void *self, uint64_t address, uint64_t size) = nullptr;
    // Finds the memory of each device at an address of a multicast object, `size` bytes each, at most CS_MOST_REPLICAS.
    // Returns their number, 0 for an invalid address. Null: there are no multicast objects.
    uint32_t (*replicas)(void *self, uint64_t address, uint32_t size, uint8_t **out) = nullptr;
    // Takes text that a kernel prints, once per vprintf. Null: the text goes to standard output.
    void (*print)(void *self, const char *text, size_t size) = nullptr;
    // Returns the texture or surface that a handle names, or null. It must not change while a grid runs.
    const Texture *(*texture)(void *self, uint64_t handle) = nullptr;
    // Device-side malloc: returns an address in the region, 16-byte aligned, or 0. Null: always 0.
    uint64_t (*allocate)(void *self, uint64_t size) = nullptr;
    // Returns false for an invalid address, which is a fault.
    bool (*release)(void *self, uint64_t address) = nullptr;
    // cudaGraphSetConditional. Null: graphs have no conditional nodes.
    void (*set_conditional)(void *self, uint64_t number, uint32_t value) = nullptr;
    // Return ns for %globaltimer, and cycles for %clock64. Null: CLOCK_MONOTONIC_RAW plus an offset; for %clock64, each
    // multiprocessor has its own offset.
    uint64_t (*globaltimer)(void *self) = nullptr;
    uint64_t (*clock)(void *self, uint32_t multiprocessor) = nullptr;
    uint32_t multiprocessors = 16;           // %nsmid
    uint32_t max_shared_per_block = 232448;  // bytes, static and dynamic
};

struct LaunchDescription {
    const Environment *environment = nullptr;
    const Image *image = nullptr;
    uint32_t kernel = 0;                  // index into image->kernels()
    const uint64_t *variables = nullptr;  // addresses, one per image->variables()
    const void *parameters = nullptr;  // Kernel::parameter_bytes bytes, with the layout of Kernel::parameters
    uint32_t grid[3] = {1, 1, 1};
    uint32_t block[3] = {1, 1, 1};
    uint32_t cluster[3] = {0, 0, 0};  // blocks, at most 16; they divide the grid. 0, 0, 0: not specified
    uint32_t dynamic_shared = 0;      // bytes
    uint64_t grid_id = 0;             // %gridid
    uint64_t userdata = 0;            // of patch functions, for an image of patch_ptx()
    uint64_t nested_userdata = 0;     // that of the grids that the grid launches
    uint64_t first_pc = 0;            // the program counter at which the image begins, for patch functions
    uint64_t code_base = 0;           // of the addresses of functions; 0: image->code_base
    uint32_t stack_limit = 1024;      // bytes per thread for recursion (cudaLimitStackSize)
    uint32_t pending_limit = 2048;    // launches by one grid (cudaLimitDevRuntimePendingLaunchCount)
    bool cooperative = true;          // provides the grid barrier's workspace; without it, grid.sync() traps
    bool hostile = false;             // random order of blocks and warps, from `seed`; calls lose the carry
    uint64_t seed = 0;
    uint64_t start_ns = 0;  // virtual clock: the start of the grid
    // Virtual clock, if not null: gets the end of each thread of the grid, by its number.
    uint64_t *ends = nullptr;
    // Set to true to stop the grid (Fault with code 0 and cancelled).
    const std::atomic<bool> *cancel = nullptr;
};

struct Fault {
    int code = 0;  // CUresult: 0 none, 700 ILLEGAL_ADDRESS, 710 ASSERT, 715 ILLEGAL_INSTRUCTION,
                   // 716 MISALIGNED_ADDRESS, 718 INVALID_PC, 719 LAUNCH_FAILED (trap, stack, deadlock)
    bool cancelled = false;
    std::string kernel;        // mangled name
    uint64_t address = 0;      // 0 if it is not a memory access
    char access = 0;           // 'r', 'w', 'a' (atomic), 0
    uint32_t access_size = 0;  // bytes
    uint32_t block[3] = {}, thread[3] = {};
    uint32_t line = 0;  // in the PTX text; 0: unknown
    // In a patch function: bytes of program counters from the first patch function.
    std::optional<uint64_t> patch_offset;
    std::string patch;      // its name; the caller of run() sets this and the next member
    uint64_t patch_pc = 0;  // its program counter at the fault
    std::string file;       // of the source; empty: unknown
    uint32_t source_line = 0;
    std::string message;  // one line with all of this
    explicit operator bool() const { return code != 0; }
};

// Runs a grid, then the grids that it launches, and returns when all have finished; their writes to memory are then visible to the caller. The caller has checked
// the limits (threads per block, shared memory, …). On the virtual clock, `duration_ns` gets the time from
// LaunchDescription::start_ns to the end of the last thread, or to the fault. On the real clock it gets 0.
Fault run(const LaunchDescription &launch, uint64_t *duration_ns = nullptr);

// Statistics of the process, for tests.
struct Statistics {
    uint64_t grids, blocks, slices;
};
Statistics statistics();

// Resets the engine in a child of fork(), which has no worker threads. New ones start when needed. The engine registers this
// with pthread_atfork; it is declared for tests.
void after_fork_in_child();

}  // namespace cudasim
