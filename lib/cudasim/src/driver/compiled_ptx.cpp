#include "driver/compiled_ptx.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "compilers.h"
#include "driver/cubin.h"
#include "driver/driver.h"
#include "patch.h"

namespace cudasim {
namespace {

// What an agent gets of each cubin (copies/link.cpp in lib/gpubpf/agent/src).
using Tell = void (*)(const void *cubin, size_t size, const char *ptx, size_t ptx_size, unsigned count,
                      unsigned texts, unsigned lto);
std::atomic<Tell> agent{nullptr};

gpubpf::Compiled *results = new gpubpf::Compiled;  // a forked child gets another one

// With CUDASIM_COMPILERS=0, for tests of the agent, the device leaves the compilers to the agent.
bool watches() {
    static const bool set = [] {
        const char *value = getenv("CUDASIM_COMPILERS");
        return value == nullptr || strcmp(value, "0") != 0;
    }();
    return set;
}

size_t size_of(const void *cubin, size_t size) {
    const size_t own = cubin_size(cubin, size);
    return own != 0 ? own : size;
}

void made(const void *cubin, size_t size, const gpubpf::Inputs &of) {
    results->remember(cubin, size_of(cubin, size), of);
    if (Tell tell = agent.load())
        tell(cubin, size, of.text.data(), of.text.size(), of.count, of.texts, of.lto);
}

bool known(const void *cubin, size_t size, gpubpf::Inputs &of) {
    return results->find(cubin, size_of(cubin, size), of);
}

}  // namespace

void watch_compilers() {
    if (!watches()) return;
    std::string left_out;
    gpubpf::find_compilers({[] { return true; }, made, known}, "compilers");
    const std::string failed =
        gpubpf::install(gpubpf::compiler_hooks(), gpubpf::compiler_hook_count(), left_out);
    if (!failed.empty() || !left_out.empty())
        driver::log_line("the PTX of cubins by NVRTC and nvJitLink stays unknown: %s%s", failed.c_str(),
                         left_out.c_str());
}

void compilers_in_forked_child() {
    gpubpf::compilers_in_forked_child();
    gpubpf::patch_lifetime.in_forked_child();
}

std::vector<std::string> compiled_ptx(const void *cubin, size_t size) {
    std::vector<std::string> texts;
    gpubpf::Inputs of;
    if (!results->find(cubin, size, of) || of.text.empty()) return texts;
    for (size_t at = 0, end; at <= of.text.size(); at = end + 1) {
        end = std::min(of.text.find('\0', at), of.text.size());
        texts.push_back(of.text.substr(at, end - at));
    }
    return texts;
}

}  // namespace cudasim

// Called by an agent, which wants to know what is compiled from now on. Returns whether this device watches the compilers.
extern "C" int cudasim_watch_compilers(cudasim::Tell tell) {
    if (!cudasim::watches()) return 0;
    cudasim::agent = tell;
    return 1;
}

// Called by an agent that watches the compilers itself.
extern "C" void cudasim_compiled(const void *cubin, size_t size, const char *ptx, size_t ptx_size,
                                 unsigned count, unsigned texts, unsigned lto) {
    try {
        gpubpf::Inputs of;
        of.count = count;
        of.texts = texts;
        of.lto = lto;
        of.text.assign(ptx, ptx_size);
        cudasim::results->remember(cubin, cudasim::size_of(cubin, size), of);
    } catch (const std::exception &) {  // no memory: the cubin has no PTX
    }
}
