// The stand-in for NVIDIA's Compute Sanitizer API (libsanitizer-public.so), as the driver sees it: what the driver tells a
// subscriber, and what it has to know of patched modules. Without a subscriber, each hook is a test of one flag.
//
// Callbacks run in the thread that made the call, without a lock of the driver: a subscriber may have a lock of its own, and call
// the API.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver/driver.h"
#include "sanitizer/api.h"

namespace cudasim::sanitizer {

extern std::atomic<bool> subscribed;
inline bool active() { return subscribed.load(std::memory_order_relaxed); }

// A patch function in a patched module.
struct PatchFunction {
    std::string name;
    CodeRange range;  // from the first one
    uint64_t pc;      // its first program counter; 0: unknown
};

// A module with calls of patch functions: what runs instead of its image.
struct Patched {
    std::shared_ptr<const Image> image;
    std::vector<uint64_t> variables;  // addresses, by index in that image
    std::vector<uint32_t> kernels;    // index in that image, by index in the module's
    std::vector<PatchFunction> functions;
    std::vector<std::shared_ptr<void>> keep_alive;  // own the variables of the patches
};

// A range of program counters. It is given back when its owner no longer exists.
class CodeSpace {
  public:
    explicit CodeSpace(uint64_t size);
    ~CodeSpace();
    CodeSpace(const CodeSpace &) = delete;
    CodeSpace &operator=(const CodeSpace &) = delete;
    uint64_t first() const { return first_; }

  private:
    uint64_t first_, size_;
};

// What the API knows of a module.
struct ModuleState {
    std::once_flag announced;
    std::atomic<bool> quiet{false};         // loaded while there was no subscriber
    std::atomic<bool> patched_now{false};   // whether `patched` is set
    std::mutex mutex;                       // guards the members below
    std::map<uint32_t, std::string> names;  // the patch function, by instruction
    std::shared_ptr<const Patched> patched;
    std::unique_ptr<CodeSpace> code;  // null until a program counter is asked for
    std::map<std::string, CodeRange> functions;
};

// Forgets the patches of a context that is being destroyed.
void forget_patches(const driver::Context &context);

// Hooks for active().
void initialised();
void context_changed(ResourceCallback callback, const driver::Context &context);
void stream_changed(ResourceCallback callback, const driver::Context &context, const driver::Stream &stream);
// Tells the subscriber of a new module, once; a second thread waits until the first one has done so.
void module_loaded(const std::shared_ptr<driver::Module> &module);
void module_unloading(const std::shared_ptr<driver::Module> &module);
void function_loaded(const driver::Function &function);
void synchronized(const driver::Context &context, const driver::Stream *stream);  // null: the context
void graph_exec_changed(GraphsCallback callback, CUgraph graph, CUgraphExec exec);

// Tells the subscriber of a launch, which may set the launch's data; at the end, that it has been submitted.
class Launch {
  public:
    Launch(const std::shared_ptr<driver::Context> &context, const std::shared_ptr<driver::Stream> &stream,
           driver::KernelLaunch &launch);
    ~Launch();
    Launch(const Launch &) = delete;
    Launch &operator=(const Launch &) = delete;

  private:
    LaunchData data_{};
};

// The same for the launch or the upload of a graph, and its nodes. `graph`: the copy that runs.
class GraphLaunch {
  public:
    GraphLaunch(const std::shared_ptr<driver::Context> &context,
                const std::shared_ptr<driver::Stream> &stream, CUgraphExec exec, driver::Graph &graph,
                bool upload);
    ~GraphLaunch();
    GraphLaunch(const GraphLaunch &) = delete;
    GraphLaunch &operator=(const GraphLaunch &) = delete;

  private:
    void visit(driver::Graph &graph);
    void set_data(driver::Graph &graph);

    const std::shared_ptr<driver::Context> context_;
    const std::shared_ptr<driver::Stream> stream_;
    const uint32_t id_;
    GraphLaunchData data_{};
    std::vector<GraphNodeLaunchData> nodes_;
    std::optional<uint64_t> last_;  // the data that was set last
};

// Sets what runs instead of a kernel of a patched module. `patched` keeps it alive.
void use_patches(const driver::KernelLaunch &launch, LaunchDescription &description,
                 std::shared_ptr<const Patched> &patched);
// Names the patch function in which a kernel failed, if it did so in one.
void locate_fault(const Patched &patched, Fault &fault);

}  // namespace cudasim::sanitizer
