// Counts block exits and accesses of global memory of every kernel, by patches of NVIDIA's Compute Sanitizer API: of kernels, too, of which
// there is only machine code. The driver loads this library where CUDA_INJECTION64_PATH names it.
//
// PATCHES_LIBRARY: libsanitizer-public.so; PATCHES_CUBIN: functions by probes.py, assembled; PATCHES_WHICH: "exits", "accesses", both or neither;
// PATCHES_RESULTS: the file that the counts go to at the end, as JSON.
#include <dlfcn.h>
#include <sanitizer.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace {

struct Counts {
    unsigned long long exits = 0, accesses = 0;
};

// What is known of a kernel: its name, its counts in the memory of the GPU.
struct Kernel {
    std::string name;
    Counts *counts = nullptr;
    unsigned long long launches = 0, nodes = 0;
};

// The counts of a context's kernels: zeroed before its first launch, so that no kernel of another stream can be earlier.
constexpr size_t KERNELS = 4096;
struct Context {
    bool patches = false, asked = false;
    Counts *counts = nullptr;
    size_t used = 0;
};

std::mutex lock;  // of what follows; never held while the API is called, which may wait for a thread that is in a callback
std::map<CUfunction, Kernel> *kernels;
std::map<CUcontext, Context> *contexts;
std::map<std::string, int> *errors;  // what was refused, how often
std::set<CUmodule> *patched;
void *library;
bool exits, accesses;

template <typename Function>
Function *function(const char *name, Function *) {
    auto found = reinterpret_cast<Function *>(dlsym(library, name));
    if (!found) {
        std::fprintf(stderr, "patches: there is no %s in the library\n", name);
        std::exit(70);
    }
    return found;
}
// A function of the API, from the library that was loaded.
#define API(name) function(#name, static_cast<decltype(name) *>(nullptr))

bool good(const char *what, SanitizerResult result) {
    if (result == SANITIZER_SUCCESS) return true;
    std::lock_guard<std::mutex> held(lock);
    (*errors)[std::string(what) + " " + std::to_string(result)]++;
    return false;
}

// Zeroed room for the counts of a context, or nullptr.
Counts *room(CUcontext context) {
    void *made = nullptr;
    if (!good("sanitizerAlloc", API(sanitizerAlloc)(context, &made, KERNELS * sizeof(Counts))) ||
        !good("sanitizerMemset", API(sanitizerMemset)(made, 0, KERNELS * sizeof(Counts), nullptr)) ||
        !good("sanitizerStreamSynchronize", API(sanitizerStreamSynchronize)(nullptr)))
        return nullptr;
    return static_cast<Counts *>(made);
}

// The patches have to be in a context before its first module is patched.
void patch(CUmodule module, CUcontext context) {
    bool first;
    {
        std::lock_guard<std::mutex> held(lock);
        if (!patched->insert(module).second) return;
        first = !std::exchange((*contexts)[context].patches, true);
    }
    const char *cubin = std::getenv("PATCHES_CUBIN");
    if (first) good("sanitizerAddPatchesFromFile", API(sanitizerAddPatchesFromFile)(cubin ? cubin : "", context));
    if (exits) good("sanitizerPatchInstructions", API(sanitizerPatchInstructions)(SANITIZER_INSTRUCTION_BLOCK_EXIT, module, "countExit"));
    if (accesses)
        good("sanitizerPatchInstructions", API(sanitizerPatchInstructions)(SANITIZER_INSTRUCTION_GLOBAL_MEMORY_ACCESS, module, "countAccess"));
    good("sanitizerPatchModule", API(sanitizerPatchModule)(module));
}

void launched(const Sanitizer_LaunchData &launch, bool node) {
    bool first;
    {
        std::lock_guard<std::mutex> held(lock);
        auto &context = (*contexts)[launch.context];
        first = (exits || accesses) && !std::exchange(context.asked, true);
    }
    Counts *counts = first ? room(launch.context) : nullptr;
    {
        std::lock_guard<std::mutex> held(lock);
        auto &context = (*contexts)[launch.context];
        if (first) context.counts = counts;
        auto &kernel = (*kernels)[launch.function];
        if (kernel.name.empty()) kernel.name = launch.functionName ? launch.functionName : "?";
        if (!kernel.counts && context.counts && context.used < KERNELS) kernel.counts = context.counts + context.used++;
        kernel.launches++;
        kernel.nodes += node;
        counts = kernel.counts;
    }
    if (counts)
        good("sanitizerSetLaunchCallbackData",
             API(sanitizerSetLaunchCallbackData)(launch.hLaunch, launch.function, launch.hStream, counts));
}

void called(void *, Sanitizer_CallbackDomain domain, Sanitizer_CallbackId id, const void *data) {
    static thread_local bool inside;  // what a function of the API does may be called back, too: it is not the program's
    if (inside) return;
    inside = true;
    if (domain == SANITIZER_CB_DOMAIN_RESOURCE) {
        auto *of = static_cast<const Sanitizer_ResourceModuleData *>(data);
        if (id == SANITIZER_CBID_RESOURCE_MODULE_LOADED && (exits || accesses)) patch(of->module, of->context);
        if (id == SANITIZER_CBID_RESOURCE_MODULE_UNLOAD_STARTING) {
            std::lock_guard<std::mutex> held(lock);
            patched->erase(of->module);
        }
    } else if (domain == SANITIZER_CB_DOMAIN_LAUNCH && id == SANITIZER_CBID_LAUNCH_BEGIN) {
        launched(*static_cast<const Sanitizer_LaunchData *>(data), false);
    } else if (domain == SANITIZER_CB_DOMAIN_GRAPHS && id == SANITIZER_CBID_GRAPHS_NODE_LAUNCH_BEGIN) {
        auto *node = static_cast<const Sanitizer_GraphNodeLaunchData *>(data);
        if (node->nodeType == CU_GRAPH_NODE_TYPE_KERNEL && !node->isGraphUpload) launched(node->launchData, true);
    }
    inside = false;
}

std::string quoted(const std::string &text) {
    std::string out = "\"";
    for (unsigned char c : text)
        if (c >= ' ' && c != '"' && c != '\\') out += static_cast<char>(c);
    return out + "\"";
}

void report() {
    const char *path = std::getenv("PATCHES_RESULTS");
    std::FILE *file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    std::map<std::string, Kernel> by_name;
    std::map<std::string, Counts> sums;
    std::map<CUfunction, Kernel> of;
    {
        std::lock_guard<std::mutex> held(lock);  // not held below: the API may call back
        of = *kernels;
    }
    for (auto &[handle, kernel] : of) {
        Counts counts;
        if (kernel.counts) good("sanitizerMemcpyDeviceToHost", API(sanitizerMemcpyDeviceToHost)(&counts, kernel.counts, sizeof counts, nullptr));
        auto &sum = sums[kernel.name];
        sum.exits += counts.exits, sum.accesses += counts.accesses;
        auto &all = by_name[kernel.name];
        all.launches += kernel.launches, all.nodes += kernel.nodes;
    }
    std::fprintf(file, "{\"kernels\":{");
    const char *comma = "";
    for (auto &[name, kernel] : by_name) {
        std::fprintf(file, "%s%s:{\"launches\":%llu,\"nodes\":%llu,\"exits\":%llu,\"accesses\":%llu}", comma, quoted(name).c_str(),
                     kernel.launches, kernel.nodes, sums[name].exits, sums[name].accesses);
        comma = ",";
    }
    std::fprintf(file, "},\"errors\":{");
    comma = "";
    for (auto &[what, count] : *errors) {
        std::fprintf(file, "%s%s:%d", comma, quoted(what).c_str(), count);
        comma = ",";
    }
    std::fprintf(file, "}}\n");
    std::fclose(file);
}

}  // namespace

extern "C" int InitializeInjection() {
    const char *path = std::getenv("PATCHES_LIBRARY"), *which = std::getenv("PATCHES_WHICH");
    kernels = new std::map<CUfunction, Kernel>;  // never destroyed: callbacks come until the very end
    contexts = new std::map<CUcontext, Context>;
    errors = new std::map<std::string, int>;
    patched = new std::set<CUmodule>;
    library = dlopen(path ? path : "libsanitizer-public.so", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        std::fprintf(stderr, "patches: %s\n", dlerror());
        std::exit(70);
    }
    exits = which && std::strstr(which, "exits");
    accesses = which && std::strstr(which, "accesses");
    Sanitizer_SubscriberHandle subscriber;
    bool works = API(sanitizerSubscribe)(&subscriber, called, nullptr) == SANITIZER_SUCCESS;
    for (auto domain : {SANITIZER_CB_DOMAIN_RESOURCE, SANITIZER_CB_DOMAIN_LAUNCH, SANITIZER_CB_DOMAIN_GRAPHS})
        works = works && API(sanitizerEnableDomain)(1, subscriber, domain) == SANITIZER_SUCCESS;
    if (!works) {
        std::fprintf(stderr, "patches: the Compute Sanitizer API refuses\n");
        std::exit(70);
    }
    std::atexit(report);
    return 1;
}
