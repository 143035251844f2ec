// The engine behind a C interface, for tests through ctypes: a region of memory, modules, launches.

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "embedded/cache.h"
#include "engine/engine.h"

const char *const embedded::kDevice = "cudasim";

using namespace cudasim;

namespace {

constexpr uint64_t kRegion = 8ull << 30, kConstants = 1ull << 30;

struct World {
    Environment environment;
    uint8_t *region;
    uint64_t used = 0, used_constant = kRegion - kConstants;
    std::string printed;
    std::mutex mutex;
};

uint64_t allocate(World &w, uint64_t &used, uint64_t size) {
    std::lock_guard<std::mutex> lock(w.mutex);
    const uint64_t at = used;
    used += (size + 8191) / 4096 * 4096;
    mprotect(w.region + at, (size + 4095) / 4096 * 4096, PROT_READ | PROT_WRITE);
    return reinterpret_cast<uint64_t>(w.region + at);
}

World &world() {
    static World *found = [] {
        auto *w = new World();
        w->region = static_cast<uint8_t *>(
            mmap(nullptr, kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        w->environment.self = w;
        w->environment.region_base = reinterpret_cast<uint64_t>(w->region);
        w->environment.region_size = kRegion;
        w->environment.constant_base = w->environment.region_base + kRegion - kConstants;
        w->environment.constant_size = kConstants;
        w->environment.print = [](void *self, const char *text, size_t size) {
            auto *to = static_cast<World *>(self);
            std::lock_guard<std::mutex> lock(to->mutex);
            to->printed.append(text, size);
        };
        w->environment.allocate = [](void *self, uint64_t size) -> uint64_t {
            return allocate(*static_cast<World *>(self), static_cast<World *>(self)->used, size);
        };
        w->environment.release = [](void *, uint64_t) { return true; };
        return w;
    }();
    return *found;
}

struct Module {
    std::shared_ptr<const Image> image;
    std::vector<uint64_t> variables;
};

void copy(char *to, size_t size, const std::string &from) {
    if (size == 0) return;
    const size_t n = std::min(size - 1, from.size());
    memcpy(to, from.data(), n);
    to[n] = 0;
}

}  // namespace

extern "C" {

// Memory with unmapped pages after it.
uint64_t harness_allocate(uint64_t size) { return world().environment.allocate(&world(), size); }

void *harness_load(const char *ptx, uint64_t size, int virtual_clock, int *code, char *log, uint64_t log_size) {
    TranslateError error;
    auto image = translate(std::string_view(ptx, size), error, virtual_clock != 0);
    if (!image) {
        *code = error.code;
        copy(log, log_size, error.log);
        return nullptr;
    }
    auto *module = new Module{image, {}};
    for (const Variable &v : image->variables())
        module->variables.push_back(allocate(world(), v.space == Space::constant ? world().used_constant : world().used,
                                             v.size ? v.size : 1));
    for (size_t k = 0; k < module->variables.size(); k++)
        image->initialise(static_cast<uint32_t>(k), module->variables.data(),
                          reinterpret_cast<void *>(module->variables[k]));
    return module;
}

uint64_t harness_variable(void *module, const char *name) {
    auto *m = static_cast<Module *>(module);
    const int k = m->image->find_variable(name);
    return k < 0 ? 0 : m->variables[static_cast<size_t>(k)];
}

// `values`: count addresses of parameter values, as for cuLaunchKernel. Returns the fault's code, -1: no such kernel.
int harness_launch(void *module, const char *name, const uint32_t *grid, const uint32_t *block, uint32_t shared,
                   void **values, uint32_t stack, int hostile, uint64_t seed, char *message, uint64_t message_size,
                   uint64_t *where, uint64_t start_ns, uint64_t *duration_ns, uint64_t *ends) {
    auto *m = static_cast<Module *>(module);
    const int k = m->image->find_kernel(name);
    if (k < 0) return -1;
    const Kernel &kernel = m->image->kernels()[static_cast<size_t>(k)];
    std::vector<uint8_t> parameters(kernel.parameter_bytes + 1);
    for (size_t i = 0; i < kernel.parameters.size(); i++)
        memcpy(parameters.data() + kernel.parameters[i].offset, values[i], kernel.parameters[i].size);
    LaunchDescription launch;
    launch.environment = &world().environment;
    launch.image = m->image.get();
    launch.kernel = static_cast<uint32_t>(k);
    launch.variables = m->variables.data();
    launch.parameters = parameters.data();
    memcpy(launch.grid, grid, sizeof launch.grid);
    memcpy(launch.block, block, sizeof launch.block);
    memcpy(launch.cluster, kernel.cluster, sizeof launch.cluster);
    launch.dynamic_shared = shared;
    launch.stack_limit = stack;
    launch.hostile = hostile != 0;
    launch.seed = seed;
    launch.start_ns = start_ns;
    launch.ends = ends;
    const Fault fault = run(launch, duration_ns);
    copy(message, message_size, fault.message);
    if (where) {
        where[0] = fault.address;
        for (int i = 0; i < 3; i++) where[1 + i] = fault.block[i], where[4 + i] = fault.thread[i];
        where[7] = fault.line;
    }
    return fault.code;
}

// attributes: registers, static shared, local, parameter bytes, reqntid.x, maxntid.x
int harness_kernel(void *module, const char *name, uint32_t *out) {
    auto *m = static_cast<Module *>(module);
    const int k = m->image->find_kernel(name);
    if (k < 0) return -1;
    const Kernel &kernel = m->image->kernels()[static_cast<size_t>(k)];
    const uint32_t values[] = {kernel.registers,       kernel.static_shared, kernel.local,
                               kernel.parameter_bytes, kernel.reqntid[0],    kernel.maxntid[0]};
    memcpy(out, values, sizeof values);
    return 0;
}

uint64_t harness_printed(char *to, uint64_t size) {
    World &w = world();
    std::lock_guard<std::mutex> lock(w.mutex);
    const uint64_t n = std::min<uint64_t>(size, w.printed.size());
    memcpy(to, w.printed.data(), n);
    w.printed.clear();
    return n;
}
}
