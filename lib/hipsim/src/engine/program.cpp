#include "engine/program.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string_view>

namespace hipsim {
namespace {

std::string hexadecimal(uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

bool is_branch(std::string_view name) { return name == "s_branch" || name.starts_with("s_cbranch_"); }
bool ends_flow(std::string_view name) {
    return name == "s_endpgm" || name == "s_branch" || name == "s_setpc_b64";
}

bool is_call(std::string_view name) { return name == "s_swappc_b64" || name == "s_call_b64"; }

uint64_t branch_target(const isa::Instruction &i, uint64_t address) {
    return address + 4 + int64_t{i.simm} * 4;
}

// Follows the usual computation of a function's address: s_getpc, then s_add_u32 and s_addc_u32 of constants.
class KnownPairs {
  public:
    void after(const isa::Instruction &i, uint64_t address) {
        std::string_view name = i.opcode->name;
        bool constant = i.src[1] == isa::literal || (i.src[1] >= isa::zero && i.src[1] <= 208);
        bool in_place = constant && i.src[0] == i.dst;
        if (name == "s_getpc_b64") {
            pairs_[i.dst] = address + 4;
        } else if (name == "s_add_u32" && in_place && pairs_.count(i.dst)) {
            pairs_[i.dst] += value(i);  // with the carry that the s_addc_u32 adds
        } else if (name == "s_addc_u32" && in_place && pairs_.count(i.dst - 1u)) {
            pairs_[i.dst - 1u] += uint64_t{value(i)} << 32;
        } else if (i.opcode->format <= isa::Format::smem) {
            for (unsigned n = 0; n <= i.opcode->width('D'); ++n) pairs_.erase(i.dst + n - 1u);
        }
    }
    uint64_t target(const isa::Instruction &i) const {
        auto known = pairs_.find(i.src[0]);
        return known == pairs_.end() ? 0 : known->second;
    }

  private:
    static uint32_t value(const isa::Instruction &i) {
        unsigned operand = i.src[1];
        if (operand == isa::literal) return i.literal;
        return uint32_t(operand <= 192 ? int32_t(operand - isa::zero) : 192 - int32_t(operand));
    }
    std::map<unsigned, uint64_t> pairs_;  // by the number of the pair's first SGPR
};

void fell_off(Wave &w, const Op &op) {
    w.fault(Fault::illegal_instruction, op, op.address, "the code goes on where no instruction was decoded");
}

// Continues at the next instruction in memory, which is elsewhere in the array.
void go_on(Wave &w, const Op &op) {
    w.next = op.target;
    ++w.budget;  // no instruction
}

}  // namespace

bool Program::decode_from(uint64_t first, Fault &fault) {
    std::map<uint64_t, isa::Instruction> found;
    std::vector<uint64_t> work{first};
    uint64_t begin = 0, end = 0;
    bool may_write = false;
    while (!work.empty()) {
        uint64_t address = work.back();
        work.pop_back();
        KnownPairs pairs;
        // Instructions found since the last call, whose function may not return.
        bool called = false;
        std::vector<uint64_t> since_call;
        std::size_t work_at_call = 0;
        while (!found.count(address)) {
            if (address < begin || address >= end) memory_->range(address, &begin, &end, &may_write);
            isa::Instruction i;
            if (address % 4 == 0 && address >= begin && address < end)
                i = isa::decode(*set_, reinterpret_cast<const uint32_t *>(host(address)), end - address);
            else i.size = 0;
            Op probe;
            std::string why = i.size ? prepare(i, address, probe) : "no code";
            if (called && (!i.size || !i.opcode)) {  // no code follows the call
                for (uint64_t wrong : since_call) found.erase(wrong);
                work.resize(work_at_call);
                break;
            }
            if (!why.empty()) {
                fault.kind = Fault::illegal_instruction;
                fault.address = fault.pc = address;
                fault.text = why + (i.size ? " " + isa::text(i) : "");
                return false;
            }
            found.emplace(address, i);
            since_call.push_back(address);
            std::string_view name = i.opcode->name;
            uint64_t next = address + i.size;
            if (is_branch(name) || name == "s_call_b64") work.push_back(branch_target(i, address));
            if (name == "s_setpc_b64" || name == "s_swappc_b64")
                if (uint64_t target = pairs.target(i)) work.push_back(target);
            if (is_call(name)) {
                called = true;
                since_call.clear();
                work_at_call = work.size();
            }
            pairs.after(i, address);
            if (ends_flow(name)) break;
            address = next;
        }
    }

    // One array in the order of addresses, so that the next instruction is the next element.
    std::size_t breaks = 1;
    for (auto it = found.begin(); it != found.end(); ++it) {
        auto next = std::next(it);
        breaks += next == found.end() || next->first != it->first + it->second.size;
    }
    auto ops = std::make_unique<Op[]>(found.size() + breaks);
    std::map<uint64_t, Op *> place;
    std::vector<std::pair<Op *, uint64_t>> continuations;
    std::size_t n = 0;
    for (auto it = found.begin(); it != found.end(); ++it) {
        Op &op = ops[n++];
        prepare(it->second, it->first, op);
        place[it->first] = &op;
        auto next = std::next(it);
        uint64_t following = it->first + it->second.size;
        if (next == found.end() || next->first != following) {
            Op &more = ops[n++];
            more.run = fell_off;
            more.address = following;
            more.i = it->second;
            if (!ends_flow(it->second.opcode->name) && found.count(following))
                continuations.emplace_back(&more, following);
        }
    }
    for (auto [op, address] : continuations) {
        op->run = go_on;
        op->target = place.at(address);
    }
    for (auto &[address, op] : place) {
        std::string_view name = op->i.opcode->name;
        if (is_branch(name) || name == "s_call_b64") op->target = place.at(branch_target(op->i, address));
    }

    std::lock_guard lock(mutex_);
    for (auto &[address, op] : place) {
        ops_.emplace(address, op);
        isa::add(registers_, op->i);
    }
    // The code that was read, in stretches without gaps.
    for (auto &[address, i] : found) {
        if (stretches_.empty() || stretches_.back().address + 4 * stretches_.back().words.size() != address)
            stretches_.push_back({address, {}});
        for (unsigned word = 0; word < i.size / 4u; ++word) stretches_.back().words.push_back(i.words[word]);
    }
    blocks_.push_back(std::move(ops));
    return true;
}

bool Program::unchanged(Memory &memory) const {
    uint64_t begin = 0, end = 0;
    bool may_write = false;
    for (const Stretch &stretch : stretches_) {
        uint64_t bytes = 4 * stretch.words.size();
        if (stretch.address < begin || stretch.address >= end)
            memory.range(stretch.address, &begin, &end, &may_write);
        if (stretch.address < begin || stretch.address >= end || end - stretch.address < bytes) return false;
        if (std::memcmp(host(stretch.address), stretch.words.data(), bytes) != 0) return false;
    }
    return true;
}

const Op *Program::find(uint64_t address, std::string &why) {
    {
        std::lock_guard lock(mutex_);
        auto known = ops_.find(address);
        if (known != ops_.end()) return known->second;
    }
    Fault fault;
    if (!decode_from(address, fault)) {
        why = "jump to " + hexadecimal(address) + ": " + fault.text;
        return nullptr;
    }
    std::lock_guard lock(mutex_);
    return ops_.at(address);
}

std::shared_ptr<Program> Program::at(uint64_t entry, const isa::Set &set, Memory &memory, Fault &fault) {
    constexpr std::size_t most = 1024;  // kernels that stay predecoded
    static auto *mutex = new std::mutex;
    using Key = std::pair<const isa::Set *, uint64_t>;
    static auto *cache = new std::map<Key, std::shared_ptr<Program>>;
    std::lock_guard lock(*mutex);
    auto known = cache->find(Key(&set, entry));
    if (known != cache->end()) {
        std::lock_guard of_program(known->second->mutex_);
        if (known->second->memory_ == &memory && known->second->unchanged(memory)) return known->second;
    }
    auto program = std::make_shared<Program>();
    program->set_ = &set;
    program->memory_ = &memory;
    if (!program->decode_from(entry, fault)) return nullptr;
    program->entry_ = program->ops_.at(entry);
    if (cache->size() >= most) cache->clear();
    (*cache)[Key(&set, entry)] = program;
    return program;
}

}  // namespace hipsim
