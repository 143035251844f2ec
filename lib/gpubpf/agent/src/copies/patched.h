// The functions of patches that launches and sidecars need. patches.cpp, on a higher floor, defines them.
#pragma once

#include <memory>
#include <vector>

#include "messages.h"
#include "state.h"
#include "thread.h"

namespace gpubpf {

struct Choice;

// Patches a module in the context, and makes the copies of its kernels that stand for the patched kernels. Asks the tool
// for the patches if the context has none yet.
void install_patches(Module *module, Context *context, const std::shared_ptr<const Answer> &answer);
// Puts the launch block of a patched kernel's shape into GPU memory. Returns false if there is no room or no time for it.
bool publish(const Choice &choice);

// While it exists, patches in the launches of the calling thread get this data (lower/patch_function.py). 0: of no known launch.
class PatchData {
  public:
    explicit PatchData(uint64_t data) : thread_(own_record()) { set(data); }
    ~PatchData() { set(0); }
    PatchData(const PatchData &) = delete;
    PatchData &operator=(const PatchData &) = delete;

  private:
    void set(uint64_t data) {
        if (thread_) thread_->patch_data = data;
    }
    Thread *thread_;
};

// The data for a launch in a stream.
inline uint64_t patch_data_of(uint64_t launch) {
    return uint64_t(kPatchStream) << kNumberBits | (launch & ((uint64_t(1) << kNumberBits) - 1));
}

// The kernel nodes of a graph that have one kernel and shape, in the order in which they run. No numbers: they cannot be told apart.
struct AlikeNodes {
    const Instance *instance;
    std::vector<uint32_t> numbers;
};
// The record of a graph, for patches that read the launch's number.
struct GraphRecord {
    CUdeviceptr at = 0;  // 0: there is none
    uint64_t size = 0;   // bytes that it may have
    uint64_t data = 0;   // what the patches get
    std::vector<uint32_t> words;
    uint32_t counters_at = 0, counters = 0;  // u32s to be zeroed before each launch: their offset and number
};
// Writes the record; another one if its contents change, since a launch may be using it. Returns false if there is no room or no time.
bool write_graph(Context &context, GraphRecord &record, CUdeviceptr cell,
                 const std::vector<AlikeNodes> &nodes);
void forget_graph(Context &context, GraphRecord &record);
}  // namespace gpubpf
