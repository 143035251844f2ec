// The driver's state in the process: initialisation, contexts, current context, heap of device-side malloc.
#include "driver/context.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>

#include "driver/array.h"
#include "driver/compiled_ptx.h"
#include "driver/virtual_memory.h"
#include "sanitizer/hooks.h"
#include "per_thread.h"

namespace cudasim::driver {
namespace {

enum class State { none, starting, ready };

struct Process {
    std::mutex mutex;
    std::condition_variable changed;
    State state = State::none;
    std::thread::id starter;
};

Process &process() {
    static Process *const instance = new Process();
    return *instance;
}

std::atomic<bool> usable{false};  // calls are allowed, also from InitializeInjection
std::atomic<bool> forked{false};  // this process was forked after cuInit, so it cannot use the driver

// Returns the interpreter of the environment that script/setup makes for this user, if `packages` is the directory `lib` of a
// checkout; else "".
std::string interpreter_of_checkout(const std::string &packages) {
    const std::string checkout = packages.substr(0, packages.rfind('/'));
    if (access((checkout + "/script/setup").c_str(), F_OK) != 0) return "";
    for (const std::string &environment :
         {geteuid() == 0 ? "" : checkout + "/.venv", std::string("/opt/gpubpf")}) {
        const std::string found = environment + "/bin/python3";
        if (!environment.empty() && access(found.c_str(), X_OK) == 0) return found;
    }
    return "";
}

// Returns the interpreter of the environment that a package is installed in, as PREFIX/lib/python3.X/site-packages; "" if it is not
// installed. Users may install packages in their home directory for the system's interpreter.
std::string interpreter_of(const std::string &packages) {
    const size_t end = packages.rfind('/');
    const size_t start = end == 0 || end == std::string::npos ? end : packages.rfind('/', end - 1);
    if (start == 0 || start == std::string::npos) return "";
    const std::string name = packages.substr(start + 1, end - start - 1);
    const size_t prefix = packages.rfind('/', start - 1);
    if (name.compare(0, 6, "python") != 0 || prefix == std::string::npos) return "";
    for (const std::string &place : {packages.substr(0, prefix), std::string("/usr")}) {
        const std::string found = place + "/bin/" + name;
        if (access(found.c_str(), X_OK) == 0) return found;
    }
    return "";
}

// Finds the package `cudasim` from the path of this library, which is DIR/cudasim/lib/libcuda.so.1 or deeper.
void find_translator() {
    Dl_info info;
    if (dladdr(reinterpret_cast<void *>(&find_translator), &info) == 0) return;
    char resolved[PATH_MAX];
    if (realpath(info.dli_fname, resolved) == nullptr) return;
    std::string path = resolved;
    for (size_t slash; (slash = path.rfind('/')) != std::string::npos;) {
        path.resize(slash);
        if (access((path + "/cudasim/translate").c_str(), F_OK) != 0) continue;
        const std::string installed = interpreter_of(path);
        set_translator(installed.empty() ? interpreter_of_checkout(path) : installed, path);
        return;
    }
}

// Loads the library that CUDA_INJECTION64_PATH names, as a driver does in cuInit.
void load_injection_library() {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    if (path == nullptr || *path == '\0') return;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        log_line("CUDA_INJECTION64_PATH: %s; continuing without it", dlerror());
        return;
    }
    auto start = reinterpret_cast<int (*)()>(dlsym(library, "InitializeInjection"));
    if (start == nullptr) {
        log_line("CUDA_INJECTION64_PATH: %s has no InitializeInjection; continuing without it", path);
        return;
    }
    if (start() == 0) log_line("CUDA_INJECTION64_PATH: InitializeInjection of %s failed; continuing", path);
}

void at_exit() {
    if (forked) return;
    for (const std::shared_ptr<Context> &context : tables().contexts.all()) flush_printf(*context);
}

void print(void *self, const char *text, size_t size) {
    auto &context = *static_cast<Context *>(self);
    std::lock_guard lock(context.print_mutex);
    context.printed.append(text, size);
}

bool host_range(void *, uint64_t address, uint64_t size) {
    std::optional<Allocation> found = Memory::instance().find(address);
    return found && found->mapped_to_device && size <= found->size - (address - found->base);
}

constexpr size_t kHeapAlign = 16;

// Device-side malloc, in a heap of CU_LIMIT_MALLOC_HEAP_SIZE bytes.
uint64_t heap_allocate(void *self, uint64_t size) {
    auto &context = *static_cast<Context *>(self);
    if (size == 0) return 0;
    size = (size + kHeapAlign - 1) & ~(kHeapAlign - 1);
    std::lock_guard lock(context.heap_mutex);
    if (context.heap == 0) {
        std::lock_guard limits(context.limits_mutex);
        auto limit = context.limits.find(CU_LIMIT_MALLOC_HEAP_SIZE);
        size_t bytes = limit == context.limits.end() ? kDefaultHeapSize : limit->second;
        context.heap = Memory::instance().allocate(bytes, MemoryKind::device, context.device, context.handle);
        if (context.heap == 0) return 0;
        context.heap_free.add(context.heap, bytes & ~(kHeapAlign - 1));
    }
    const uint64_t address = context.heap_free.take(size);
    if (address != 0) context.heap_used[address] = size;
    return address;
}

void set_conditional(void *, uint64_t number, uint32_t value) {
    if (std::shared_ptr<Conditional> found = Conditional::find(number)) found->value = value;
}

bool heap_release(void *self, uint64_t address) {
    auto &context = *static_cast<Context *>(self);
    if (address == 0) return true;
    std::lock_guard lock(context.heap_mutex);
    auto used = context.heap_used.find(address);
    if (used == context.heap_used.end()) return false;
    context.heap_free.add(address, used->second);
    context.heap_used.erase(used);
    return true;
}

}  // namespace

Device &device_state(int device) {
    static auto *const devices = new std::vector<Device>(std::max(config().devices, 1));
    return (*devices)[device];
}

bool is_device(CUdevice device) { return device >= 0 && device < config().devices; }

std::vector<CurrentContext> &context_stack() { return per_thread<std::vector<CurrentContext>>(); }

CurrentContext find_context(const void *handle) {
    if (std::shared_ptr<GreenContext> green = tables().converted_green_contexts.get(handle))
        return {green->primary, green};
    return {tables().contexts.get(handle), nullptr};
}

std::shared_ptr<Context> create_context(int device, unsigned flags, bool primary) {
    static std::atomic<uint64_t> next_id{1};
    auto context = std::make_shared<Context>();
    context->id = next_id++;
    context->device = device;
    context->flags = flags;
    context->primary = primary;
    context->legacy = std::make_shared<Stream>();
    context->legacy->context = context;
    context->legacy->legacy = true;
    context->legacy->id = 0;
    context->legacy->handle = nullptr;
    const Memory &memory = Memory::instance();
    Environment &environment = context->environment;
    environment.self = context.get();
    environment.region_base = memory.begin();
    environment.region_size = memory.end() - memory.begin();
    environment.constant_base = memory.constant_base();
    environment.constant_size = Memory::kConstantBytes;
    environment.host_range = host_range;
    environment.replicas = replicas;
    environment.print = print;
    environment.texture = find_texture;
    environment.allocate = heap_allocate;
    environment.release = heap_release;
    environment.set_conditional = set_conditional;
    environment.multiprocessors = kMultiprocessors;
    environment.max_shared_per_block = kSharedPerBlockOptin;
    context->handle = tables().contexts.add(context);
    if (sanitizer::active()) sanitizer::context_changed(sanitizer::kContextCreationFinished, *context);
    return context;
}

CUresult retain_primary(CUdevice device, std::shared_ptr<Context> &context, bool count) {
    Device &state = device_state(device);
    std::lock_guard lock(state.mutex);
    if (!state.primary) {
        if (Memory::instance().begin() == 0) return CUDA_ERROR_OUT_OF_MEMORY;
        state.primary = create_context(device, state.flags, true);
        state.retained = 0;
    }
    if (count) state.retained++;
    context = state.primary;
    return CUDA_SUCCESS;
}

Context::~Context() = default;

Tables &tables() {
    static Tables *const instance = new Tables();
    return *instance;
}

void log_line(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    size_t end = strlen(text);
    while (end != 0 && text[end - 1] == '\n') text[--end] = '\0';
    fprintf(stderr, "cudasim: %s\n", text);
}

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

CUresult check_initialized() {
    if (!usable || forked) return CUDA_ERROR_NOT_INITIALIZED;
    host_time();  // starts the thread's virtual time
    return CUDA_SUCCESS;
}

std::shared_ptr<Context> current_context_or_null() {
    return context_stack().empty() ? nullptr : context_stack().back().context;
}

CUresult current_context(std::shared_ptr<Context> &context) {
    if (CUresult status = check_initialized()) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;  // a callback must not call CUDA
    context = current_context_or_null();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (context_stack().back().destroyed()) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return static_cast<CUresult>(context->sticky_error.load());
}

std::shared_ptr<Context> primary_context(int device, CUresult &status) {
    std::shared_ptr<Context> context;
    status = retain_primary(device, context, false);
    return context;
}

void flush_printf(Context &context) {
    std::string text;
    {
        std::lock_guard lock(context.print_mutex);
        text.swap(context.printed);
    }
    if (text.empty()) return;
    fwrite(text.data(), 1, text.size(), stdout);
    fflush(stdout);
}

void drain(Context &context, bool timed) {
    std::vector<Fence> fences;
    {
        std::lock_guard lock(context.mutex);
        fences.push_back(context.legacy->queue->tail());
        for (const std::shared_ptr<Stream> &stream : context.streams) fences.push_back(stream->queue->tail());
        for (const auto &[thread, stream] : context.per_thread) fences.push_back(stream->queue->tail());
        for (const Fence &fence : context.destroyed_stream_work) fences.push_back(fence);
    }
    for (const Fence &fence : fences) {
        fence.wait();
        if (timed) advance_host_time(fence.end());
    }
    flush_printf(context);
}

ExclusiveContext::ExclusiveContext(const std::shared_ptr<Context> &context)
    : context_(context), lock_(context->mutex) {
    if (config().hostile && !on_worker_thread()) drain(*context, false);
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

// ---------------------------------------------------------------------------------------------------- initialisation

CUresult cuInit(unsigned int flags) {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (config().devices == 0) return CUDA_ERROR_NO_DEVICE;
    Process &self = process();
    std::unique_lock lock(self.mutex);
    if (self.state == State::starting && self.starter == std::this_thread::get_id()) return CUDA_SUCCESS;
    self.changed.wait(lock, [&] { return self.state != State::starting; });
    if (self.state == State::ready) return CUDA_SUCCESS;
    if (Memory::instance().begin() == 0) {
        log_line("cannot reserve address space for device memory; raise the limit (ulimit -v)");
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    self.state = State::starting;
    self.starter = std::this_thread::get_id();
    lock.unlock();
    find_translator();
    set_optimize_after(config().optimize_after);
    pthread_atfork(nullptr, nullptr, [] {
        forked = true;
        compilers_in_forked_child();
    });
    watch_compilers();
    atexit(at_exit);
    usable = true;
    load_injection_library();
    if (sanitizer::active()) sanitizer::initialised();
    lock.lock();
    self.state = State::ready;
    self.changed.notify_all();
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *version = kVersion;
    return CUDA_SUCCESS;
}

static CUresult create_context_privately(CUcontext *handle, CUdevice device) {
    std::shared_ptr<Context> context = create_context(device, 0, false);
    context_stack().push_back({context, nullptr});
    *handle = static_cast<CUcontext>(context->handle);
    return CUDA_SUCCESS;
}

// A private table, as NVIDIA's driver has for its runtime: no tool that hooks exported functions sees these calls.
static const struct {
    CUresult (*load_module)(CUmodule *, const void *image);
    CUresult (*create_context)(CUcontext *, CUdevice);
} private_table = {load_module_privately, create_context_privately};
constexpr char kPrivateTable[] = "cudasim private.";  // its UUID

CUresult cuGetExportTable(const void **table, const CUuuid *uuid) {
    if (table != nullptr) *table = nullptr;
    if (table != nullptr && uuid != nullptr && memcmp(uuid, kPrivateTable, sizeof *uuid) == 0) {
        *table = &private_table;
        return CUDA_SUCCESS;
    }
    // NVIDIA's private interfaces are not supported. NVIDIA's runtime cannot work without them; its compilers can.
    Dl_info caller = {};
    dladdr(__builtin_return_address(0), &caller);
    const char *file = caller.dli_fname != nullptr ? caller.dli_fname : "";
    if (strstr(file, "libnvrtc") != nullptr || strstr(file, "libnvJitLink") != nullptr)
        return CUDA_ERROR_NOT_SUPPORTED;
    static std::once_flag logged;
    std::call_once(logged, [] {
        log_line(
            "the program contains NVIDIA's CUDA runtime, which needs a real driver; build it with nvcc "
            "-cudart shared");
    });
    return CUDA_ERROR_NOT_SUPPORTED;
}
