// Predecoded code: all that can be reached from a kernel's entry, and from jump targets that are computed at run time.

#pragma once

#include "engine/wave.h"
#include "isa/registers.h"

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace hipsim {

class Program {
  public:
    // The code that starts at `entry`, predecoded or from the cache; null with a fault if it contains an instruction
    // that the engine cannot execute. The code is compared with the cached one word by word.
    static std::shared_ptr<Program> at(uint64_t entry, const isa::Set &set, Memory &memory, Fault &fault);

    const Op *entry() const { return entry_; }
    // The registers that the code decoded so far names.
    isa::Registers registers() {
        std::lock_guard lock(mutex_);
        return registers_;
    }
    // The instruction at an address, which is decoded with all that can be reached from it; null with a reason.
    const Op *find(uint64_t address, std::string &why);

  private:
    struct Stretch {  // code that was read, to see whether it has changed
        uint64_t address;
        std::vector<uint32_t> words;
    };

    bool decode_from(uint64_t address, Fault &fault);
    bool unchanged(Memory &memory) const;

    const isa::Set *set_ = nullptr;
    Memory *memory_ = nullptr;
    const Op *entry_ = nullptr;
    std::mutex mutex_;  // of what follows
    std::unordered_map<uint64_t, const Op *> ops_;
    std::vector<std::unique_ptr<Op[]>> blocks_;
    std::vector<Stretch> stretches_;
    isa::Registers registers_;
};

// Why the engine cannot execute an instruction; empty if it can; `op` is then complete, except for branch targets.
std::string prepare(const isa::Instruction &instruction, uint64_t address, Op &op);

}  // namespace hipsim
