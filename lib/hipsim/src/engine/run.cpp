// One dispatch: its kernel descriptor, its workgroups, and the host threads that run them.

#include "engine/engine.h"
#include "engine/pool.h"
#include "engine/program.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <sched.h>
#include <vector>

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace hipsim {
namespace {

constexpr unsigned vgprs_of_a_wave = 256;
// An indexed operand of several registers may extend beyond the last one. AGPRs follow all VGPRs.
constexpr unsigned vgprs_allocated = 260, with_agprs_allocated = 516;
constexpr int64_t wave_slice = 4000;     // instructions of one wave before the next wave's turn
constexpr int64_t group_slice = 200000;  // instructions of one workgroup before the next workgroup's turn

enum Property {
    private_buffer,
    dispatch_pointer,
    queue_pointer,
    kernarg_pointer,
    dispatch_identifier,
    scratch_init,
    private_size,
    wave32 = 10
};

// The fields of a kernel descriptor that say how its waves begin. See "Kernel Descriptor" in LLVM's AMDGPU guide.
struct Descriptor {
    uint32_t group_bytes, private_bytes;
    uint64_t entry;
    uint32_t resources1, resources2, resources3;
    uint16_t properties;

    bool has(unsigned property) const { return properties >> property & 1; }
    // On GFX9, including VCC and the other registers after the numbered ones.
    unsigned sgprs() const { return ((resources1 >> 6 & 15) + 1) * 8; }
    unsigned user_sgprs() const { return resources2 >> 1 & 31; }
    // On CDNA2, including the AGPRs, which begin at accumulator_offset().
    unsigned vgprs(bool cdna2) const { return ((resources1 & 63) + 1) * (cdna2 || has(wave32) ? 8 : 4); }
    unsigned accumulator_offset() const { return ((resources3 & 63) + 1) * 4; }
    bool splits_groups() const { return resources3 >> 16 & 1; }  // over compute units, which have an LDS each
    unsigned work_item_dimensions() const { return resources2 >> 11 & 3; }
    // Rounding and denormals, DX10_CLAMP, IEEE, FP16_OVFL, in their places in MODE.
    uint32_t mode() const {
        return (resources1 >> 12 & 0xFF) | (resources1 >> 21 & 1) << 8 | (resources1 >> 23 & 1) << 9 |
               (resources1 >> 26 & 1) << 23;
    }
};

template <class T>
T read(uint64_t address) {
    T value;
    std::memcpy(&value, host(address), sizeof value);
    return value;
}

bool read_descriptor(const Launch &launch, Memory &memory, Descriptor &d, Fault &fault) {
    uint64_t begin = 0, end = 0;
    bool may_write = false;
    memory.range(launch.kernel_object, &begin, &end, &may_write);
    if (launch.kernel_object < begin || launch.kernel_object >= end || end - launch.kernel_object < 64) {
        fault.kind = Fault::memory;
        fault.address = launch.kernel_object;
        fault.text = "the kernel descriptor is not in memory of the device";
        return false;
    }
    d.group_bytes = read<uint32_t>(launch.kernel_object);
    d.private_bytes = read<uint32_t>(launch.kernel_object + 4);
    d.entry = launch.kernel_object + read<uint64_t>(launch.kernel_object + 16);
    d.resources3 = read<uint32_t>(launch.kernel_object + 44);
    d.resources1 = read<uint32_t>(launch.kernel_object + 48);
    d.resources2 = read<uint32_t>(launch.kernel_object + 52);
    d.properties = read<uint16_t>(launch.kernel_object + 56);
    return true;
}

// Memory that is aligned for vectors, and only takes host memory once it is used.
class Pages {
  public:
    explicit Pages(std::size_t bytes)
        : at_(bytes ? std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096) : nullptr) {
        if (bytes && !at_) throw std::bad_alloc();
    }
    Pages(const Pages &) = delete;
    Pages &operator=(const Pages &) = delete;
    ~Pages() { std::free(at_); }
    uint8_t *get() const { return static_cast<uint8_t *>(at_); }

  private:
    void *at_;
};

// A workgroup with all its waves. An object is used for one workgroup after another.
struct Resident {
    Group group;
    std::vector<Wave> waves;
    std::unique_ptr<Pages> vgprs, lds, scratch;
    uint64_t order = 0;  // state of the order of waves in hostile mode
};

struct Shape {
    uint32_t groups[3];
    uint64_t total;
    unsigned lanes;  // of a wave
    unsigned waves;  // of a whole workgroup
    uint32_t private_bytes, lds_bytes;
    uint32_t scratch_format;  // last word of the descriptor of scratch
};

// x86: results must not depend on what the application's thread has set.
class DefaultFloatingPoint {
  public:
    DefaultFloatingPoint() {
        std::fegetenv(&old_);
        std::fesetround(FE_TONEAREST);
#ifdef __x86_64__
        _mm_setcsr(0x1F80);
#endif
    }
    ~DefaultFloatingPoint() { std::fesetenv(&old_); }

  private:
    std::fenv_t old_;
};

uint64_t next_random(uint64_t &state) {
    state += 0x9E3779B97F4A7C15;
    uint64_t z = state;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// A dispatch in progress. Threads take workgroups from it until there are no more.
class Dispatch : public Job {
  public:
    Dispatch(const Launch &launch, Memory &memory, const Target &target, Services &services,
             const Descriptor &descriptor, const Shape &shape, const isa::Set &set,
             std::shared_ptr<Program> program)
        : launch_(launch),
          memory_(memory),
          set_(set),
          target_(target),
          services_(services),
          descriptor_(descriptor),
          shape_(shape),
          program_(std::move(program)),
          random_(target.hostile) {
        uint64_t of_units =
            uint64_t{target.compute_units} * std::max<uint64_t>(1, target.waves_per_unit / shape.waves);
        if (shape.lds_bytes)
            of_units = std::min(of_units, uint64_t{target.compute_units} *
                                              std::max(1u, target.group_bytes_per_unit / shape.lds_bytes));
        most_resident_ = std::max<uint64_t>(1, of_units);
    }

    void work() override;
    // Waits for the workgroups that other threads still run.
    void finish() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return running_ == 0 && waiting_.empty(); });
    }
    Result result;

  private:
    std::unique_ptr<Resident> take();
    void give(std::unique_ptr<Resident> resident, bool ended, const Fault &fault);
    std::unique_ptr<Resident> make();
    std::size_t registers_bytes() const {  // of a wave
        return (set_.cdna2 ? with_agprs_allocated : vgprs_allocated) * sizeof(Vgpr);
    }
    void start(Resident &resident, uint64_t number);
    void start_wave(Resident &resident, unsigned index, unsigned count, const uint32_t *size);
    bool run_slice(Resident &resident);
    void run_wave(Wave &wave, uint64_t &random);

    const Launch &launch_;
    Memory &memory_;
    const isa::Set &set_;
    const Target &target_;
    Services &services_;
    const Descriptor descriptor_;
    const Shape shape_;
    const std::shared_ptr<Program> program_;
    uint64_t most_resident_;

    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t next_group_ = 0, resident_ = 0, running_ = 0, turns_ = 0;
    std::deque<std::unique_ptr<Resident>> waiting_;  // their turn has ended, but they have not
    std::vector<std::unique_ptr<Resident>> spare_;
    uint64_t random_;
    std::atomic<bool> stop_{false};
};

void Dispatch::work() {
    DefaultFloatingPoint floating_point;
    while (auto resident = take()) {
        Fault fault;
        resident->group.fault = &fault;
        bool ended = true;
        try {
            ended = run_slice(*resident);
        } catch (const std::exception &error) {
            fault.kind = Fault::bad_launch;
            fault.text = error.what();
        }
        give(std::move(resident), ended, fault);
    }
}

// The next workgroup to run: alternately a waiting and a new one, so that workgroups may wait for earlier and later ones.
std::unique_ptr<Resident> Dispatch::take() {
    std::unique_lock lock(mutex_);
    while (true) {
        if (stop_) return nullptr;
        bool can_start = next_group_ < shape_.total && resident_ < most_resident_;
        if (!waiting_.empty() && (!can_start || turns_ % 2)) {
            ++turns_;
            std::size_t at = target_.hostile ? next_random(random_) % waiting_.size() : 0;
            auto resident = std::move(waiting_[at]);
            waiting_.erase(waiting_.begin() + std::ptrdiff_t(at));
            ++running_;
            return resident;
        }
        if (!can_start) return nullptr;
        ++turns_;
        uint64_t number = next_group_++;
        ++resident_;
        ++running_;
        std::unique_ptr<Resident> resident;
        if (!spare_.empty()) {
            resident = std::move(spare_.back());
            spare_.pop_back();
        }
        lock.unlock();
        try {
            if (!resident) resident = make();
            start(*resident, number);
        } catch (const std::bad_alloc &) {
            Fault fault;
            fault.kind = Fault::bad_launch;
            fault.text = "not enough host memory for a workgroup";
            give(nullptr, true, fault);
            return nullptr;
        }
        return resident;
    }
}

void Dispatch::give(std::unique_ptr<Resident> resident, bool ended, const Fault &fault) {
    std::lock_guard lock(mutex_);
    --running_;
    if (fault.kind != Fault::none) {
        if (result.fault.kind == Fault::none) result.fault = fault;
        stop_ = true;
    }
    if (resident && !ended && !stop_) {
        waiting_.push_back(std::move(resident));
    } else {
        --resident_;
        if (resident) {
            for (const Wave &wave : resident->waves) {
                result.instructions += wave.instructions;
                result.stored_bytes += wave.stored_bytes;
                result.end_ns = std::max(result.end_ns, launch_.start_ns + wave.time);
            }
            spare_.push_back(std::move(resident));
        }
    }
    if (stop_) waiting_.clear();
    changed_.notify_all();
}

std::unique_ptr<Resident> Dispatch::make() {
    auto resident = std::make_unique<Resident>();
    resident->waves = std::vector<Wave>(shape_.waves);
    resident->vgprs = std::make_unique<Pages>(shape_.waves * registers_bytes());
    resident->lds = std::make_unique<Pages>(shape_.lds_bytes);
    resident->scratch =
        std::make_unique<Pages>(std::size_t{shape_.waves} * shape_.private_bytes * shape_.lanes);
    Group &group = resident->group;
    group.launch = &launch_;
    group.target = &target_;
    group.memory = &memory_;
    group.services = &services_;
    group.lds = resident->lds->get();
    group.lds_bytes = shape_.lds_bytes;
    return resident;
}

void Dispatch::start(Resident &resident, uint64_t number) {
    Group &group = resident.group;
    if (shape_.lds_bytes) std::memset(group.lds, target_.hostile ? 0xA5 : 0, shape_.lds_bytes);
    group.number = uint32_t(number);
    uint64_t rest = number;
    uint32_t size[3];
    for (unsigned d = 0; d < 3; ++d) {
        group.id[d] = uint32_t(rest % shape_.groups[d]);
        rest /= shape_.groups[d];
        // The last workgroup of a dimension may be smaller.
        size[d] = std::min(launch_.group[d], launch_.grid[d] - group.id[d] * launch_.group[d]);
    }
    unsigned items = size[0] * size[1] * size[2], waves = (items + shape_.lanes - 1) / shape_.lanes;
    resident.waves.resize(waves);
    resident.order = target_.hostile + number;
    for (unsigned n = 0; n < waves; ++n)
        start_wave(resident, n, std::min(shape_.lanes, items - n * shape_.lanes), size);
}

void Dispatch::start_wave(Resident &resident, unsigned index, unsigned count, const uint32_t *size) {
    Wave &w = resident.waves[index];
    w = Wave{};
    w.group = &resident.group;
    w.program = program_.get();
    w.next = program_->entry();
    w.index = index;
    w.vgprs = descriptor_.vgprs(set_.cdna2);
    w.v = reinterpret_cast<Vgpr *>(resident.vgprs->get() + index * registers_bytes());
    unsigned own = set_.cdna2 ? std::min(w.vgprs, descriptor_.accumulator_offset()) : w.vgprs;
    int content = target_.hostile ? 0xA5 : 0;
    std::memset(static_cast<void *>(w.v), content, own * sizeof(Vgpr));
    std::memset(static_cast<void *>(w.v + vgprs_of_a_wave), content,
                std::min(w.vgprs - own, vgprs_of_a_wave) * sizeof(Vgpr));
    w.scratch_bytes = uint64_t{shape_.private_bytes} * shape_.lanes;
    w.scratch = w.scratch_bytes ? resident.scratch->get() + index * w.scratch_bytes : nullptr;
    w.set_mode(descriptor_.mode());
    w.count = shape_.lanes;
    w.existing = shape_.lanes == lanes ? ~uint64_t{0} : (uint64_t{1} << shape_.lanes) - 1;
    w.set_pair(isa::exec, count == lanes ? ~uint64_t{0} : (uint64_t{1} << count) - 1);

    unsigned n = 0;
    auto put = [&](uint64_t value) {
        w.set_pair(n, value);
        n += 2;
    };
    uint64_t scratch = uint64_t(w.scratch);
    if (descriptor_.has(private_buffer)) {
        put(scratch | uint64_t{1} << 63);
        put(w.scratch_bytes | uint64_t{shape_.scratch_format} << 32);
    }
    if (descriptor_.has(dispatch_pointer)) put(launch_.packet);
    if (descriptor_.has(queue_pointer)) put(launch_.queue);
    if (descriptor_.has(kernarg_pointer)) put(launch_.kernarg);
    if (descriptor_.has(dispatch_identifier)) put(launch_.dispatch_id);
    if (descriptor_.has(scratch_init)) put(scratch);
    if (descriptor_.has(private_size)) w.s[n++] = shape_.private_bytes;
    n = descriptor_.user_sgprs();
    for (unsigned d = 0; d < 3; ++d)
        if (descriptor_.resources2 >> (7 + d) & 1) w.s[n++] = resident.group.id[d];
    if (descriptor_.resources2 >> 10 & 1) w.s[n++] = uint32_t(resident.waves.size());
    if (descriptor_.resources2 & 1)
        w.s[n++] = 0;  // the offset of the wave's scratch from its base: each wave has its own base

    for (unsigned l = 0; l < shape_.lanes; ++l) {
        uint32_t item = index * shape_.lanes + l;
        const uint32_t ids[] = {item % size[0], item / size[0] % size[1], item / size[0] / size[1]};
        w.v[0][l] = ids[0];
        for (unsigned d = 1; d <= std::min(descriptor_.work_item_dimensions(), 2u); ++d) {
            if (set_.cdna2) w.v[0][l] |= ids[d] << (10 * d);
            else w.v[d][l] = ids[d];
        }
    }
}

// Runs an instruction with M0 added to the numbers of its VGPR operands (s_set_gpr_idx_on).
void run_indexed(Wave &w, const Op &op) {
    if (op.i.opcode->format == isa::Format::mai)
        return w.fault(Fault::illegal_instruction, op, op.address, "VGPR index mode");
    Op indexed = op;
    unsigned by = w.s[isa::m0] & 0xFF;
    auto move = [&](uint16_t &number) {
        if (number + by >= vgprs_of_a_wave) {
            w.fault(Fault::illegal_instruction, op, op.address, "a VGPR beyond the last");
            return false;
        }
        number = uint16_t(number + by);
        return true;
    };
    for (unsigned n = 0; n < 3; ++n)
        if ((w.index_mode >> n & 1) && op.i.src[n] >= isa::vgpr0 && !move(indexed.src[n].index)) return;
    if ((w.index_mode & 8) && op.i.dst >= isa::vgpr0 && !move(indexed.dst)) return;
    indexed.run(w, indexed);
}

void Dispatch::run_wave(Wave &w, uint64_t &random) {
    int64_t slice = wave_slice;
    if (target_.hostile) slice = 1 + int64_t(next_random(random) % wave_slice);
    w.yielded = false;
    while (slice > 0 && w.state == State::running && !w.yielded) {
        w.slice = w.budget = slice;
        w.remaining = 0;
        if (w.index_mode == 0) {
            while (w.budget > 0) {
                --w.budget;
                const Op &op = *w.next;
                w.next = &op + 1;
                op.run(w, op);
            }
        } else {
            while (w.budget > 0) {
                --w.budget;
                const Op &op = *w.next;
                w.next = &op + 1;
                if (op.vector) run_indexed(w, op);
                else op.run(w, op);
            }
        }
        int64_t done = slice - w.remaining;
        w.instructions += uint64_t(done);
        w.time += uint64_t(done);
        w.slice = w.budget = 0;
        slice = w.remaining;
    }
}

// Runs all waves in turn. Returns true if the workgroup has ended, or has a fault.
bool Dispatch::run_slice(Resident &resident) {
    int64_t left = group_slice;
    std::vector<Wave> &waves = resident.waves;
    std::size_t first = 0;
    for (Wave &w : waves)
        for (Range &range : w.ranges) range = Range{};  // the host may have freed memory meanwhile
    while (left > 0) {
        bool all_yielded = true, any_running = false;
        if (target_.hostile) first = next_random(resident.order) % waves.size();
        for (std::size_t n = 0; n < waves.size(); ++n) {
            Wave &w = waves[(first + n) % waves.size()];
            if (w.state != State::running) continue;
            any_running = true;
            uint64_t before = w.instructions;
            run_wave(w, resident.order);
            left -= int64_t(w.instructions - before);
            if (w.state == State::faulted) return true;
            all_yielded = all_yielded && w.yielded;
        }
        if (!any_running) {
            // All waves that have not ended are at the barrier.
            uint64_t last = 0;
            bool any = false;
            for (Wave &w : waves)
                if (w.state == State::barrier) {
                    last = std::max(last, w.time);
                    any = true;
                }
            if (!any) return true;
            for (Wave &w : waves)
                if (w.state == State::barrier) {
                    w.state = State::running;
                    w.time = last;
                }
            continue;
        }
        if (stop_.load(std::memory_order_relaxed)) return true;
        if (all_yielded) {
            sched_yield();  // they may wait for a host thread that does not run now
            break;
        }
    }
    if (services_.cancelled()) {
        resident.group.fault->kind = Fault::cancelled;
        resident.group.fault->text = "the queue is being destroyed";
        return true;
    }
    return false;
}

Fault bad_launch(const Launch &launch, const std::string &text) {
    Fault fault;
    fault.kind = Fault::bad_launch;
    fault.address = launch.kernel_object;
    fault.text = text;
    return fault;
}

}  // namespace

Result run(const Launch &launch, Memory &memory, const Target &target, Services &services) {
    Result result;
    result.end_ns = launch.start_ns;
    Descriptor descriptor;
    if (!read_descriptor(launch, memory, descriptor, result.fault)) return result;
    auto refuse = [&](const std::string &text) {
        result.fault = bad_launch(launch, text);
        return result;
    };
    if (!isa::find_set(target.name)) return refuse("the instructions of " + target.name + " are not known");
    uint64_t items = 1;
    Shape shape = {};
    shape.total = 1;
    for (unsigned d = 0; d < 3; ++d) {
        if (launch.group[d] == 0 || launch.grid[d] == 0)
            return refuse("a grid or workgroup without work-items");
        items *= launch.group[d];
        if (items > 1024) return refuse("a workgroup of more than 1024 work-items");
        shape.groups[d] = uint32_t((uint64_t{launch.grid[d]} + launch.group[d] - 1) / launch.group[d]);
        if (shape.total > UINT64_MAX / shape.groups[d]) return refuse("too many workgroups");
        shape.total *= shape.groups[d];
    }
    shape.lanes = descriptor.has(wave32) ? 32 : lanes;
    const isa::Set *set = isa::find_set(target.name, shape.lanes);
    if (!set) return refuse("a kernel of " + std::to_string(shape.lanes) + " lanes; this GPU has others");
    bool gfx10 = set->family == isa::Family::gfx10;
    // Swizzled by lanes: elements of 4 bytes, 64 or 32 lanes, each lane's index added. On GFX10, without bounds checks.
    shape.scratch_format = !gfx10 ? 0x00E80FAC : shape.lanes == 32 ? 0x20C80FAC : 0x20E80FAC;
    if (gfx10 && (descriptor.resources3 & 15)) return refuse("shared VGPRs");
    shape.waves = unsigned((items + shape.lanes - 1) / shape.lanes);
    // Hardware uses the packet's sizes. If they are too small, the kernel would access other memory.
    if (launch.private_bytes < descriptor.private_bytes) return refuse("less scratch than the kernel needs");
    if (launch.group_bytes < descriptor.group_bytes) return refuse("less LDS than the kernel needs");
    shape.private_bytes = (launch.private_bytes + 3) & ~3u;
    // LDS is allocated in units of 512 bytes.
    uint32_t lds = launch.group_bytes;
    if (lds > target.group_bytes_per_unit) return refuse("more LDS than a compute unit has");
    shape.lds_bytes = (lds + 511) & ~511u;
    if (set->cdna2 && lds && descriptor.splits_groups()) return refuse("LDS in threadgroup split mode");
    if (shape.private_bytes > 1u << 21) return refuse("more scratch than a work-item can have");
    if (descriptor.mode() & mode_fp16_overflow) return refuse("FP16_OVFL is not supported");

    if (descriptor.entry % 256) return refuse("the first instruction is not at a multiple of 256");

    auto program = Program::at(descriptor.entry, *set, memory, result.fault);
    if (!program) return result;
    isa::Registers used = program->registers();
    unsigned vgprs = descriptor.vgprs(set->cdna2);
    unsigned own = set->cdna2 ? std::min(vgprs, descriptor.accumulator_offset()) : vgprs;
    auto beyond = [](char kind, unsigned number, unsigned had) {
        return std::string("register ") + kind + std::to_string(number - 1) + " of a wave that has " +
               std::to_string(had);
    };
    if (used.vgprs > own) return refuse(beyond('v', used.vgprs, own));
    if (used.agprs > vgprs - own) return refuse(beyond('a', used.agprs, vgprs - own));
    if (!gfx10 && used.sgprs > descriptor.sgprs()) return refuse(beyond('s', used.sgprs, descriptor.sgprs()));

    Dispatch dispatch(launch, memory, target, services, descriptor, shape, *set, program);
    dispatch.result.end_ns = launch.start_ns;
    unsigned helpers = target.threads ? target.threads - 1 : Pool::cpus() - 1;
    helpers = unsigned(std::min<uint64_t>(helpers, shape.total - 1));
    Pool::Shared shared(dispatch, helpers);
    dispatch.work();
    dispatch.finish();
    shared.end();
    return dispatch.result;
}

}  // namespace hipsim
