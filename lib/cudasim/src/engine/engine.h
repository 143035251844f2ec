// The engine of the embedded CUDA device: translated PTX, executed on the CPU.
//
// This header is all that the driver half (contexts, modules, memory, streams) sees of it. The engine knows nothing of
// contexts and streams: it translates PTX into an Image, and runs one grid of a kernel of an Image, in the calling
// thread with the help of a pool of worker threads, until the grid has finished or has failed.
//
// Addresses: a device pointer is a host address inside the device region (Environment::region_*), which the driver half
// reserves and maps piece by piece. Kernels may access what is mapped there, and the host ranges that the driver half
// answers for (Environment::host_range). Shared, local and parameter memory have generic addresses in windows that the
// engine reserves for itself; they never lie in the region.
//
// Thread safety: everything here may be called from any thread; run() may be called from many threads at once, and the
// grids then overlap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace cudasim {

// ---------------------------------------------------------------------------------------------------- images

struct Relocation {
    uint64_t offset;  // byte in the variable
    uint32_t width;   // bytes written: 1, 2, 4, 8 (narrower than 8 with a mask such as 0xFF00(symbol))
    bool function;    // the value is Image::function_address(index); else the address of variable `index`
    uint32_t index;
    int64_t addend;
    uint64_t mask;  // ~0 for all; else (value & mask) >> shift is written
    uint32_t shift;
};

enum class Space { global, constant };

struct Variable {  // a module-scope variable in .global or .const; its storage belongs to the driver half
    std::string name;
    Space space;
    uint64_t size;             // bytes; 0 for `.extern` of unknown size
    uint64_t align;            // power of two
    bool visible;              // .visible, .weak, .common: not local to the module
    bool external;             // .extern: defined in another module, which nothing provides here
    bool managed;              // .attribute(.managed): the host accesses it as well
    std::string_view initial;  // may be shorter than size: the rest is zero
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
    bool recursive;                   // needs stack of unknown depth
    std::vector<uint32_t> variables;  // indices of module variables it reaches (through functions too)
    std::string refused;  // why it cannot run (an instruction that the engine does not know); empty: it can
};

struct TranslateError {
    int code =
        0;  // CUresult: 218 INVALID_PTX, 222 UNSUPPORTED_PTX_VERSION, 300 INVALID_SOURCE (no compiler, …)
    std::string log;  // one or more lines for the error log: instruction and PTX line
};

// A translated module: immutable, shared by all contexts that load the same PTX.
class Image {
  public:
    virtual ~Image() = default;
    const std::vector<Kernel> &kernels() const { return kernels_; }
    const std::vector<Variable> &variables() const { return variables_; }
    // Index into kernels() or variables(), -1 if there is none of that name.
    int find_kernel(std::string_view name) const;
    int find_variable(std::string_view name) const;
    // What `mov` of a function's name gives, and what a relocation to it writes.
    uint64_t function_address(uint32_t index) const;
    // Compiles and loads the code of a kernel, if that was put off (large modules); cheap when it is there. False: `error`.
    virtual bool prepare(uint32_t kernel, TranslateError &error) const = 0;
    // Writes a variable's initial value with relocations applied to `destination` (size bytes). `addresses[i]` is the
    // address of variable i.
    void initialise(uint32_t variable, const uint64_t *addresses, void *destination) const;
    // PTX `.version` and `.target`, for example 90 and 90 (cuFuncGetAttribute PTX_VERSION, BINARY_VERSION).
    int ptx_version = 0;
    int target = 0;
    bool virtual_clock = false;  // as it was translated

  protected:
    std::vector<Kernel> kernels_;
    std::vector<Variable> variables_;
};

// Translates PTX to machine code, or takes it from the cache ($XDG_CACHE_HOME/gpubpf/cudasim and so on). `ptx` need not
// end in NUL. Returns null and fills `error`. Takes some 0.3 s when not cached. Kernels that cannot be translated are there,
// `refused`. Environment variables: CUDASIM_PYTHON
// (interpreter of the translator), CUDASIM_PYTHONPATH (directory that holds the package `cudasim`),
// CUDASIM_CC_COMPILER, CUDASIM_CACHE.
// With `virtual_clock` its kernels keep a clock for each thread, in ns: 1 for each PTX instruction of the application that the
// thread reaches (nothing for what stands between the comments //gpubpf{ and //gpubpf}), beside its own for nanosleep; a barrier
// waits for the last arrival. Clock registers read it, and Environment::globaltimer and ::clock are not asked.
std::shared_ptr<const Image> translate(std::string_view ptx, TranslateError &error,
                                       bool virtual_clock = false);

struct LinkInput {
    std::string name, text;
};

// Joins PTX texts into one (gpubpf.ptx.link). With `complete` all that they use must be defined; else they are only read. False:
// `error`, with code 218 for PTX that cannot be read, 999 for what does not fit together. Cached by content, as translations are.
bool link_ptx(const std::vector<LinkInput> &inputs, bool complete, std::string &text, TranslateError &error);

// Where the translator is, if neither environment variables nor the build (-DCUDASIM_PYTHON=…, -DCUDASIM_PYTHONPATH=…)
// say so: the interpreter, and the directory to be put into PYTHONPATH. Call before the first translate().
void set_translator(std::string python, std::string pythonpath);

// ---------------------------------------------------------------------------------------------------- launches

// What a context offers to kernels. All functions are called with `self`, from any thread, several at once, and must not
// call back into the engine. Must outlive every run() that uses it.
struct Environment {
    void *self = nullptr;
    uint64_t region_base = 0, region_size = 0;  // the reserved device region; its last page is never mapped
    uint64_t constant_base = 0, constant_size = 0;  // … the part of it for .const variables
    // Is [address, address + size) host memory that kernels may access (registered, pinned outside the region, …)?
    bool (*host_range)(void *self, uint64_t address, uint64_t size) = nullptr;
    // Text that a kernel printed: one call per vprintf. Null: to standard output.
    void (*print)(void *self, const char *text, size_t size) = nullptr;
    // Device-side malloc: an address in the region, 16-aligned, or 0. Null: always 0.
    uint64_t (*allocate)(void *self, uint64_t size) = nullptr;
    bool (*release)(void *self, uint64_t address) = nullptr;  // false: not such an address, which is a fault
    // Nanoseconds for %globaltimer, cycles for %clock64. Null: CLOCK_MONOTONIC_RAW with an offset, another for each multiprocessor.
    uint64_t (*globaltimer)(void *self) = nullptr;
    uint64_t (*clock)(void *self, uint32_t multiprocessor) = nullptr;
    uint32_t multiprocessors = 16;           // %nsmid
    uint32_t max_shared_per_block = 232448;  // bytes, static + dynamic
};

struct LaunchDescription {
    const Environment *environment = nullptr;
    const Image *image = nullptr;
    uint32_t kernel = 0;                  // index into image->kernels()
    const uint64_t *variables = nullptr;  // addresses, one per image->variables()
    const void *parameters = nullptr;     // Kernel::parameter_bytes bytes in the layout of Kernel::parameters
    uint32_t grid[3] = {1, 1, 1};
    uint32_t block[3] = {1, 1, 1};
    uint32_t dynamic_shared = 0;  // bytes
    uint64_t grid_id = 0;         // %gridid
    uint32_t stack_limit = 1024;  // bytes per thread for recursion (cudaLimitStackSize)
    bool cooperative = true;      // offers the grid barrier's workspace (false: grid.sync() traps)
    bool shuffle = false;         // hostile mode: random order of blocks and warps …
    uint64_t seed = 0;            // … from this seed
    uint64_t start_ns = 0;        // virtual clock: when every block begins
    uint64_t *ends = nullptr;     // … if not null: gets when each thread of the grid ended, by its number
    const std::atomic<bool> *cancel =
        nullptr;  // becomes true: the grid is abandoned (Fault code 0, cancelled)
};

struct Fault {
    int code = 0;  // CUresult: 0 none, 700 ILLEGAL_ADDRESS, 710 ASSERT, 715 ILLEGAL_INSTRUCTION,
                   // 716 MISALIGNED_ADDRESS, 718 INVALID_PC, 719 LAUNCH_FAILED (trap, stack, deadlock)
    bool cancelled = false;
    std::string kernel;        // mangled name
    uint64_t address = 0;      // where there is one
    char access = 0;           // 'r', 'w', 'a' (atomic), 0
    uint32_t access_size = 0;  // bytes
    uint32_t block[3] = {}, thread[3] = {};
    uint32_t line = 0;    // in the PTX text that was translated; 0 unknown
    std::string message;  // one line saying all of this
    explicit operator bool() const { return code != 0; }
};

// Runs the whole grid and returns when it has finished. The caller has checked the limits (block at most 1024 threads,
// shared memory, …). Memory written by the grid is visible to the caller afterwards. `duration_ns`, on the virtual clock: from
// LaunchDescription::start_ns to the end of the last thread (up to the fault, if there is one); 0 on the real one.
Fault run(const LaunchDescription &launch, uint64_t *duration_ns = nullptr);

// Statistics of the process for tests and for tools.
struct Statistics {
    uint64_t grids, blocks, slices;
};
Statistics statistics();

// After fork() in the child: worker threads do not exist any more; the engine starts new ones when they are needed.
// Registered with pthread_atfork by the engine itself; declared for tests.
void after_fork_in_child();

}  // namespace cudasim
