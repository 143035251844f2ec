// Services for generated code: choosing lanes, collectives, barriers, generic addresses, calls, time, rounding modes.

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <ctime>
#include <sched.h>

#include "device_collectives.h"
#include "engine/internal.h"

namespace cudasim {

namespace {

inline uint32_t lowest(uint32_t mask) { return static_cast<uint32_t>(__builtin_ctz(mask)); }
inline uint32_t count(uint32_t mask) { return static_cast<uint32_t>(__builtin_popcount(mask)); }

Warp &warp_of(cs_warp *w) { return *reinterpret_cast<Warp *>(w); }  // `state` is its first member
Block &block_of(cs_warp *w) { return *static_cast<Block *>(w->block); }
const Environment &environment_of(cs_warp *w) { return *block_of(w).job->launch->environment; }

uint32_t lanes_at(const cs_warp *w, uint32_t pc) {
    uint32_t mask = 0;
    for (uint32_t l = 0; l < 32; l++) mask |= static_cast<uint32_t>(w->pcs[l] == pc) << l;
    return mask & w->runnable;
}

uint32_t pick(cs_warp *w) {
    const uint32_t runnable = w->runnable;
    w->mask = 0;
    if (runnable == 0) return 0;
    if (w->resume_mask == runnable) {  // all lanes left the same barrier
        w->resume_mask = 0;
        w->pc = w->resume_pc;
        w->next = CS_NO_PC;
        return w->mask = runnable;
    }
    w->resume_mask = 0;
    uint32_t low = CS_NO_PC;
    for (uint32_t m = runnable; m; m &= m - 1) {
        const uint32_t pc = w->pcs[lowest(m)];
        if (pc < low) low = pc;
    }
    Warp &warp = warp_of(w);
    if (warp.rotate) {
        // The lanes at the lowest pc have used their budget and may wait for the other lanes. So the others run now, without
        // a stop where control flow reconverges.
        warp.rotate = false;
        uint32_t others = runnable & ~lanes_at(w, low);
        if (others) {
            const uint32_t later = others & ~((2u << warp.rotate_lane) - 1);
            const uint32_t lane = lowest(warp.rotate_lane < 31 && later ? later : others);
            warp.rotate_lane = lane;
            w->pc = w->pcs[lane];
            w->mask = lanes_at(w, w->pc);
            w->next = CS_NO_PC;
            return w->mask;
        }
    }
    uint32_t mask = 0, next = CS_NO_PC;
    for (uint32_t m = runnable; m; m &= m - 1) {
        const uint32_t l = lowest(m), pc = w->pcs[l];
        if (pc == low) mask |= 1u << l;
        else if (pc < next) next = pc;
    }
    w->pc = low;
    w->mask = mask;
    w->next = next;
    return mask;
}

// ---------------------------------------------------------------------------------------------------- collectives

void synchronize_times(cs_warp *w, uint32_t lanes) {
    uint64_t latest = 0;
    const uint32_t members = w->cm[lowest(lanes)] | lanes;
    // Lanes that have exited count with their time of exit.
    for (uint32_t m = members & (lanes | w->exited); m; m &= m - 1)
        latest = std::max(latest, w->time[lowest(m)]);
    for (uint32_t m = lanes; m; m &= m - 1) w->time[lowest(m)] = latest;
}

// Returns the lanes whose operand a is an odd number: a predicate that holds.
uint32_t holding(const cs_warp *w, uint32_t lanes) {
    uint32_t found = 0;
    for (uint32_t m = lanes; m; m &= m - 1) found |= static_cast<uint32_t>(w->ca[lowest(m)] & 1) << lowest(m);
    return found;
}

void match_any(cs_warp *w, uint32_t lanes) {
    constexpr uint32_t kBits = 6, kPlaces = 1u << kBits, kFree = 32;
    uint8_t firsts[kPlaces],
        first_of[32];   // the first lane of each value, by the value's hash; that of each lane's value
    uint32_t same[32];  // the lanes of a value, at its first lane
    memset(firsts, kFree, sizeof firsts);
    for (uint32_t m = lanes; m; m &= m - 1) {
        const uint32_t l = lowest(m);
        auto at = static_cast<uint32_t>(w->ca[l] * 0x9e3779b97f4a7c15ull >> (64 - kBits));
        while (firsts[at] != kFree && w->ca[firsts[at]] != w->ca[l]) at = (at + 1) % kPlaces;
        if (firsts[at] == kFree) {
            firsts[at] = static_cast<uint8_t>(l);
            same[l] = 0;
        }
        first_of[l] = firsts[at];
        same[first_of[l]] |= 1u << l;
    }
    for (uint32_t m = lanes; m; m &= m - 1) {
        w->cr[lowest(m)] = same[first_of[lowest(m)]];
        w->cp[lowest(m)] = 1;
    }
}

void elect(cs_warp *w, uint32_t lanes) {
    for (uint32_t m = lanes; m; m &= m - 1) {
        w->cr[lowest(m)] = lowest(lanes);
        w->cp[lowest(m)] = lowest(m) == lowest(lanes);
    }
}

// Operand c: bit 0: .abs; bit 1: .NaN, so that one NaN makes the result NaN.
uint32_t reduce_floats(const cs_warp *w, uint32_t lanes, uint32_t op) {
    const bool absolute = w->cc[lowest(lanes)] & 1, propagates = w->cc[lowest(lanes)] & 2;
    uint32_t result = 0;
    bool found = false, nan = false;
    for (uint32_t m = lanes; m; m &= m - 1) {
        const uint32_t x = static_cast<uint32_t>(w->ca[lowest(m)]) & (absolute ? 0x7fffffffu : ~0u);
        if ((x & 0x7fffffffu) > 0x7f800000u) {
            nan = true;
            continue;
        }
        // maps to integers with the same order, -0 below +0
        const auto order = [](uint32_t bits) { return bits >> 31 ? ~bits : bits | 0x80000000u; };
        if (!found || (op == CS_OP_REDUX_MINF ? order(x) < order(result) : order(x) > order(result)))
            result = x;
        found = true;
    }
    return !found || (nan && propagates) ? 0x7fffffffu : result;
}

uint32_t reduce_integers(const cs_warp *w, uint32_t lanes, uint32_t op) {
    auto result = static_cast<uint32_t>(w->ca[lowest(lanes)]);
    for (uint32_t m = lanes & (lanes - 1); m; m &= m - 1) {
        const auto x = static_cast<uint32_t>(w->ca[lowest(m)]);
        const auto sx = static_cast<int32_t>(x), sr = static_cast<int32_t>(result);
        switch (op) {
            case CS_OP_REDUX_ADD: result += x; break;
            case CS_OP_REDUX_MINU: result = x < result ? x : result; break;
            case CS_OP_REDUX_MAXU: result = x > result ? x : result; break;
            case CS_OP_REDUX_MINS: result = sx < sr ? x : result; break;
            case CS_OP_REDUX_MAXS: result = sx > sr ? x : result; break;
            case CS_OP_REDUX_AND: result &= x; break;
            case CS_OP_REDUX_OR: result |= x; break;
            default: result ^= x; break;
        }
    }
    return result;
}

// Executes a collective whose lanes have all arrived.
void execute(cs_warp *w, uint32_t lanes, uint32_t op) {
    switch (op) {
        case CS_OP_SYNC: __atomic_thread_fence(__ATOMIC_SEQ_CST); break;
        case CS_OP_SYNC_TIMES:
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
            synchronize_times(w, lanes);
            break;
        case CS_OP_SHFL_UP:
        case CS_OP_SHFL_DOWN:
        case CS_OP_SHFL_BFLY:
        case CS_OP_SHFL_IDX: cs_shuffle(w, lanes, op, 0, 0, 0); break;
        case CS_OP_VOTE_ALL:
        case CS_OP_VOTE_ANY:
        case CS_OP_VOTE_UNI:
        case CS_OP_VOTE_BALLOT: cs_vote(w, lanes, op, holding(w, lanes)); break;
        case CS_OP_MATCH_ANY: match_any(w, lanes); break;
        case CS_OP_MATCH_ALL: cs_match_all(w, lanes); break;
        case CS_OP_ELECT: elect(w, lanes); break;
        case CS_OP_REDUX_MINF:
        case CS_OP_REDUX_MAXF: cs_give(w, lanes, reduce_floats(w, lanes, op)); break;
        default: cs_give(w, lanes, reduce_integers(w, lanes, op));
    }
}

int collective(cs_warp *w, uint32_t mask, uint32_t op, uint32_t next_pc) {
    const uint32_t members = w->cm[lowest(mask)];
    uint32_t different = 0;
    for (uint32_t m = mask; m; m &= m - 1) different |= w->cm[lowest(m)] ^ members;
    if (!different && !(members & ~w->exited & ~mask)) {
        execute(w, mask, op);
        return 1;
    }
    for (uint32_t m = mask; m; m &= m - 1) {
        w->cop[lowest(m)] = op;
        w->pcs[lowest(m)] = next_pc;
    }
    w->parked |= mask;
    w->runnable &= ~mask;
    complete_collectives(w);
    return 0;
}

// ---------------------------------------------------------------------------------------------------- barriers

// Records the virtual time of arrivals at a barrier.
void arrive(Barrier &b, cs_warp *w, uint32_t lanes) {
    if (!block_of(w).job->image->virtual_clock) return;
    for (uint32_t m = lanes; m; m &= m - 1) b.latest = std::max(b.latest, w->time[lowest(m)]);
}

void barrier(cs_warp *w, uint32_t mask, uint32_t kind, uint32_t next_pc) {
    Block &block = block_of(w);
    const uint32_t index = warp_of(w).index;
    for (uint32_t m = mask; m; m &= m - 1) w->pcs[lowest(m)] = next_pc;
    while (mask) {
        const uint32_t first = lowest(mask);
        const uint64_t number = w->ca[first], expected = w->cb[first];
        uint32_t group = 0;
        for (uint32_t m = mask; m; m &= m - 1) {
            const uint32_t l = lowest(m);
            if (w->ca[l] == number && w->cb[l] == expected) group |= 1u << l;
        }
        mask &= ~group;
        if (number > 15) {
            w->lane = first;
            raise_fault(w, CS_FAULT_ILLEGAL_INSTRUCTION, 0, 0, 0, "barrier number above 15");
        }
        Barrier &b = block.barriers[number];
        block.barriers_in_use |= 1u << number;
        arrive(b, w, group);
        b.expected = static_cast<uint32_t>(expected);
        b.kind = kind == CS_BAR_ARRIVE || kind == CS_BAR_SYNC ? b.kind : kind;
        b.arrived += count(group & ~b.arrived_lanes[index]);
        b.arrived_lanes[index] |= group;
        if (kind != CS_BAR_ARRIVE) {
            b.waiting_lanes[index] |= group;
            w->runnable &= ~group;
            for (uint32_t m = group; m; m &= m - 1) {
                b.ones += w->cc[lowest(m)] != 0;
                b.votes += 1;
            }
        }
        check_barrier(block, static_cast<uint32_t>(number));
    }
}

// bar.sync with constant operands.
void bar_sync(cs_warp *w, uint32_t mask, uint32_t number, uint32_t expected, uint32_t next_pc) {
    Block &block = block_of(w);
    const uint32_t index = warp_of(w).index;
    if (mask == ~0u) {
        for (uint32_t &pc : w->pcs) pc = next_pc;
    } else {
        for (uint32_t m = mask; m; m &= m - 1) w->pcs[lowest(m)] = next_pc;
    }
    w->runnable &= ~mask;
    w->resume_mask = w->runnable ? 0 : mask;
    w->resume_pc = next_pc;
    Barrier &b = block.barriers[number];
    block.barriers_in_use |= 1u << number;
    arrive(b, w, mask);
    b.expected = expected;
    b.arrived += count(mask & ~b.arrived_lanes[index]);
    b.arrived_lanes[index] |= mask;
    b.waiting_lanes[index] |= mask;
    check_barrier(block, number);
}

// Arrives at barrier.cluster, or waits for it (PTX ISA 9.7.13.3).
void cluster_barrier(cs_warp *w, uint32_t mask, uint32_t waits, uint32_t next_pc) {
    Block &block = block_of(w), &leader = *block.leader;
    const Job &job = *block.job;
    const uint32_t index = warp_of(w).index;
    ClusterBarrier &b = block.cluster_barrier, &all = leader.cluster_barrier;
    if (!(leader.barriers_in_use & 1u << kClusterBarrier)) {
        for (uint32_t k = 0; k < job.cluster_blocks; k++) {
            Block &member = leader.member(k);
            member.barriers_in_use |= 1u << kClusterBarrier;
            if (job.image->virtual_clock) all.latest = all.exits = std::max(all.exits, latest_exit(member));
        }
    }
    const uint32_t arrived = b.arrived_lanes[index] | b.passed_lanes[index];
    if (const uint32_t wrong = waits ? mask & ~arrived : mask & arrived) {
        w->lane = lowest(wrong);
        raise_fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0,
                    waits ? "barrier.cluster.wait without barrier.cluster.arrive"
                          : "barrier.cluster.arrive twice without barrier.cluster.wait");
    }
    for (uint32_t m = mask; m; m &= m - 1) w->pcs[lowest(m)] = next_pc;
    if (!waits) {
        b.arrived_lanes[index] |= mask;
        all.arrived += count(mask);
        if (job.image->virtual_clock)
            for (uint32_t m = mask; m; m &= m - 1) all.latest = std::max(all.latest, w->time[lowest(m)]);
        check_cluster_barrier(block);
        return;
    }
    const uint32_t passed = mask & b.passed_lanes[index];
    b.passed_lanes[index] &= ~passed;
    b.waiting_lanes[index] |= mask & ~passed;
    w->runnable &= ~(mask & ~passed);
    if (job.image->virtual_clock)
        for (uint32_t m = passed; m; m &= m - 1)
            w->time[lowest(m)] = std::max(w->time[lowest(m)], all.completed + 1);  // the wait takes 1 ns
}

// ---------------------------------------------------------------------------------------------------- memory

void *cluster_shared(cs_warp *w, uint64_t a, uint32_t n, uint32_t access) {
    uint8_t *const found = shared_memory(w, a, n, access);
    if (found == nullptr || a & (n - 1))
        raise_fault(w, found ? CS_FAULT_MISALIGNED : CS_FAULT_ILLEGAL_ADDRESS, w->shared_window + a, n,
                    static_cast<char>(access), nullptr);
    return found;
}

void fault(cs_warp *w, uint32_t code, uint64_t address, uint32_t size, uint32_t access) {
    raise_fault(w, static_cast<int>(code), address, size, static_cast<char>(access), nullptr);
}

// ---------------------------------------------------------------------------------------------------- calls

void push(cs_warp *w, uint32_t mask, uint32_t function) {
    Warp &warp = warp_of(w);
    const Job &job = *block_of(w).job;
    const cs_function *const f = &job.image->functions[function];
    const uint32_t limit = job.launch->stack_limit;
    const uint32_t least = f->scc_local < 16 ? 16 : f->scc_local;  // on hardware, any call takes stack
    for (uint32_t m = mask; m; m &= m - 1) {
        const uint32_t l = lowest(m);
        if (static_cast<uint64_t>(warp.depth[l] + 1) * least > static_cast<uint64_t>(limit) + least ||
            w->lsp[l] + f->scc_local + job.kernel->local > w->sp[l]) {
            w->lane = l;
            raise_fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0, "stack overflow in a recursive function");
        }
        warp.depth[l]++;
        w->lsp[l] += f->scc_local;
        std::vector<uint8_t> &saved = warp.saved[l];
        const uint8_t *frame = w->frame + f->frame_offset;
        for (uint32_t k = 0; k < f->nfields; k++) {
            const cs_field field = f->fields[k];
            const uint8_t *at = frame + field.offset;
            if (field.width == 0) {
                uint32_t bits;
                memcpy(&bits, at, 4);
                saved.push_back(bits >> l & 1);
            } else {
                at += static_cast<size_t>(field.width) * l;
                saved.insert(saved.end(), at, at + field.width);
            }
        }
    }
}

void pop(cs_warp *w, uint32_t mask, uint32_t function) {
    Warp &warp = warp_of(w);
    const cs_function *const f = &block_of(w).job->image->functions[function];
    for (uint32_t m = mask; m; m &= m - 1) {
        const uint32_t l = lowest(m);
        std::vector<uint8_t> &saved = warp.saved[l];
        uint8_t *frame = w->frame + f->frame_offset;
        for (uint32_t k = f->nfields; k-- > 0;) {
            const cs_field field = f->fields[k];
            uint8_t *at = frame + field.offset;
            if (field.width == 0) {
                uint32_t bits;
                memcpy(&bits, at, 4);
                bits = (bits & ~(1u << l)) | static_cast<uint32_t>(saved.back()) << l;
                memcpy(at, &bits, 4);
                saved.pop_back();
            } else {
                saved.resize(saved.size() - field.width);
                memcpy(at + static_cast<size_t>(field.width) * l, saved.data() + saved.size(), field.width);
            }
        }
        warp.depth[l]--;
        w->lsp[l] -= f->scc_local;
    }
}

uint32_t indirect(cs_warp *w, uint64_t address) {
    const cs_image *image = block_of(w).job->image;
    const uint64_t index = (address - w->code_base) / 16 - 1;
    if (address % 16 || address <= w->code_base || index >= image->nfunctions ||
        image->functions[index].entry_pc == CS_NO_PC)
        raise_fault(w, CS_FAULT_INVALID_PC, address, 0, 0,
                    "indirect call of an address that is not a function of this module");
    return image->functions[index].entry_pc;
}

uint64_t allocate(cs_warp *w, uint64_t size) {
    const Environment &environment = environment_of(w);
    return environment.allocate ? environment.allocate(environment.self, size) : 0;
}

void release(cs_warp *w, uint64_t address) {
    const Environment &environment = environment_of(w);
    if (address == 0) return;
    if (!environment.release || !environment.release(environment.self, address))
        raise_fault(w, CS_FAULT_LAUNCH_FAILED, address, 0, 0,
                    "free() of an address that malloc() did not return");
}

void read_string(cs_warp *w, uint64_t address, char *to, size_t size) {
    size_t n = 0;
    for (; n + 1 < size && address; n++) {
        to[n] = *static_cast<const char *>(resolve(w, address + n, 1, 'r'));
        if (!to[n]) return;
    }
    to[n] = 0;
}

void assertfail(cs_warp *w, uint64_t message, uint64_t file, uint32_t line, uint64_t function) {
    static thread_local char text[4][512];
    read_string(w, message, text[0], sizeof text[0]);
    read_string(w, file, text[1], sizeof text[1]);
    read_string(w, function, text[2], sizeof text[2]);
    const uint32_t l = w->lane;
    const int n = snprintf(text[3], sizeof text[3],
                           "%s:%u: %s: block: [%u,%u,%u], thread: [%u,%u,%u] Assertion `%s` failed.\n",
                           text[1], line, text[2], w->ctaid[0], w->ctaid[1], w->ctaid[2], w->tid[0][l],
                           w->tid[1][l], w->tid[2][l], text[0]);
    if (n > 0) fwrite(text[3], 1, strlen(text[3]), stderr);  // as the driver does
    raise_fault(w, CS_FAULT_ASSERT, 0, 0, 0, nullptr);
}

// ---------------------------------------------------------------------------------------------------- time

// Both clocks differ from every host clock, so a time of the GPU that is used as a time of the host is noticed. They are the
// same in all processes, and are never set or slewed. As on a GPU, the multiprocessors count cycles (here of 1 ns) from
// different starts.
constexpr uint64_t kEpoch = 1'500'000'000'000'000'000, kClockSkew = 1'234'567'891;

uint64_t device_clock(cs_warp *w) {
    const Environment &environment = environment_of(w);
    return environment.clock ? environment.clock(environment.self, w->smid)
                             : nanoseconds(CLOCK_MONOTONIC_RAW) + w->smid * kClockSkew;
}

uint64_t globaltimer(cs_warp *w) {
    const Environment &environment = environment_of(w);
    return environment.globaltimer ? environment.globaltimer(environment.self)
                                   : nanoseconds(CLOCK_MONOTONIC_RAW) + kEpoch;
}

// Sleeps for the operand's time. PTX allows any time from 0 to twice that (ISA 9.7.13).
void nanosleep(cs_warp *w, uint32_t mask, uint32_t next_pc) {
    constexpr uint64_t kMin = 500;  // a shorter sleep only yields, because waking up takes longer
    constexpr uint64_t kMax = 1'000'000;
    const uint64_t now = nanoseconds(CLOCK_MONOTONIC);
    for (uint32_t m = mask; m; m &= m - 1) {
        const uint32_t l = lowest(m);
        const uint64_t length = std::min(w->cb[l], kMax);
        w->pcs[l] = next_pc;
        if (length < kMin) continue;
        warp_of(w).wake[l] = now + length;
        w->asleep |= 1u << l;
    }
    w->runnable &= ~w->asleep;
    w->budget = 0;
}

// ---------------------------------------------------------------------------------------------------- rounding

// Sets a rounding mode while it exists. If only SSE is used, it sets only SSE's mode: fesetround() also sets x87's mode, which
// takes ten times as long.
class Rounding {
  public:
    explicit Rounding(uint32_t mode) {
#ifdef __x86_64__
        static const bool found = __builtin_cpu_supports("fma") != 0;
        fast_ = found;
        if (fast_) {
            before_ = __builtin_ia32_stmxcsr();
            __builtin_ia32_ldmxcsr((before_ & ~0x6000u) |
                                   (mode & 3) << 13);  // CS_ROUND_* are the values of MXCSR.RC
            return;
        }
#endif
        static const int modes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
        before_ = static_cast<uint32_t>(fegetround());
        fesetround(modes[mode & 3]);
    }
    ~Rounding() {
#ifdef __x86_64__
        if (fast_) {
            __builtin_ia32_ldmxcsr(before_);
            return;
        }
#endif
        fesetround(static_cast<int>(before_));
    }

  private:
    uint32_t before_ = 0;
    bool fast_ = false;
};

template <typename T>
T rounded(uint32_t op, uint32_t mode, T x, T y, T z) {
    volatile T a = x, b = y, c = z, r = 0;
    Rounding rounding(mode);
    switch (op) {
        case CS_F_ADD: r = a + b; break;
        case CS_F_SUB: r = a - b; break;
        case CS_F_MUL: r = a * b; break;
        case CS_F_FMA: r = std::fma(static_cast<T>(a), static_cast<T>(b), static_cast<T>(c)); break;
        case CS_F_DIV: r = a / b; break;
        default: r = std::sqrt(static_cast<T>(a)); break;
    }
    return r;
}

float round32(uint32_t op, uint32_t mode, float a, float b, float c) {
    return rounded<float>(op, mode, a, b, c);
}
double round64(uint32_t op, uint32_t mode, double a, double b, double c) {
    return rounded<double>(op, mode, a, b, c);
}

template <typename T>
T converted(uint32_t op, uint32_t mode, int64_t i, double d) {
    volatile int64_t s = i;
    volatile uint64_t u = static_cast<uint64_t>(i);
    volatile double x = d;
    volatile T r = 0;
    if (op == CS_F_FROM_U64 && (u >> 63)) {
        // The compiler's conversion rounds more than once. So halve the number, and keep the lost bit as a sticky bit.
        volatile int64_t half = static_cast<int64_t>(u >> 1 | (u & 1));
        Rounding rounding(mode);
        r = static_cast<T>(half);
        r = r * 2;
        return r;
    }
    Rounding rounding(mode);
    switch (op) {
        case CS_F_FROM_S64:
        case CS_F_FROM_U64: r = static_cast<T>(s); break;
        default: r = static_cast<T>(x); break;
    }
    return r;
}

float convert32(uint32_t op, uint32_t mode, int64_t i, double d) { return converted<float>(op, mode, i, d); }
double convert64(uint32_t op, uint32_t mode, int64_t i) { return converted<double>(op, mode, i, 0); }

}  // namespace

bool complete_collectives(cs_warp *w) {
    bool any = false;
    for (uint32_t left = w->parked; left;) {
        const uint32_t first = lowest(left), members = w->cm[first], op = w->cop[first];
        uint32_t group = 0;
        for (uint32_t m = left; m; m &= m - 1) {
            const uint32_t l = lowest(m);
            if (w->cm[l] == members && w->cop[l] == op) group |= 1u << l;
        }
        left &= ~group;
        if (members & ~w->exited & ~group) continue;
        execute(w, group, op);
        w->parked &= ~group;
        w->runnable |= group;
        any = true;
    }
    return any;
}

// Completes a barrier if all expected threads have arrived. A barrier without a number of threads expects the threads of the
// block that have not exited. With a number of threads, a warp counts in full as soon as its lanes have arrived or exited.
bool check_barrier(Block &block, uint32_t number) {
    Barrier &b = block.barriers[number];
    if (b.expected == 0) {
        if (b.arrived < block.threads - block.exited) return false;
    } else {
        uint32_t total = 0;
        for (uint32_t k = 0; k < block.warps; k++) {
            const uint32_t arrived = b.arrived_lanes[k];
            if (!arrived) continue;
            const uint32_t exited = block.active[k] ? block.active[k]->state.exited : ~0u;
            total += (arrived | exited) == ~0u ? 32 : count(arrived);
        }
        if (total < b.expected) return false;
    }
    uint64_t result = 0;
    if (b.kind == CS_BAR_POPC) result = b.ones;
    else if (b.kind == CS_BAR_AND) result = b.ones == b.votes;
    else if (b.kind == CS_BAR_OR) result = b.ones != 0;
    const bool timed = block.job->image->virtual_clock;
    if (timed && b.expected == 0) b.latest = std::max(b.latest, latest_exit(block));
    bool any = false;
    for (uint32_t k = 0; k < block.warps; k++) {
        const uint32_t waiting = b.waiting_lanes[k];
        if (!waiting || !block.active[k]) continue;
        cs_warp &w = block.active[k]->state;
        if (b.kind != CS_BAR_SYNC)
            for (uint32_t m = waiting; m; m &= m - 1) w.cr[lowest(m)] = result;
        if (timed)
            for (uint32_t m = waiting; m; m &= m - 1) w.time[lowest(m)] = b.latest;
        w.runnable |= waiting & ~w.exited;
        any = true;
    }
    b = Barrier();
    block.barriers_in_use &= ~(1u << number);
    return any;
}

// Completes barrier.cluster if all threads of the cluster have arrived or exited.
void check_cluster_barrier(Block &block) {
    Block &leader = *block.leader;
    const Job &job = *block.job;
    ClusterBarrier &all = leader.cluster_barrier;
    uint32_t left = 0;  // threads that have not exited
    for (uint32_t k = 0; k < job.cluster_blocks; k++)
        left += leader.member(k).threads - leader.member(k).exited;
    if (all.arrived == 0 || all.arrived < left) return;
    for (uint32_t k = 0; k < job.cluster_blocks; k++) {
        const Block &member = leader.member(k);
        if (member.started < member.warps) return;
        for (uint32_t i = 0; i < member.warps; i++)
            if (const Warp *warp = member.active[i])
                if (~(member.cluster_barrier.arrived_lanes[i] | warp->state.exited)) return;
    }
    const bool timed = job.image->virtual_clock;
    all.arrived = 0;
    all.completed = all.latest;
    all.latest = all.exits;
    for (uint32_t k = 0; k < job.cluster_blocks; k++) {
        Block &member = leader.member(k);
        ClusterBarrier &b = member.cluster_barrier;
        for (uint32_t i = 0; i < member.warps; i++) {
            const uint32_t waiting = b.waiting_lanes[i], arrived = b.arrived_lanes[i];
            b.waiting_lanes[i] = b.arrived_lanes[i] = 0;
            if (!member.active[i]) continue;
            cs_warp &w = member.active[i]->state;
            b.passed_lanes[i] = arrived & ~waiting;
            w.runnable |= waiting;
            if (timed)
                for (uint32_t m = waiting; m; m &= m - 1)
                    w.time[lowest(m)] = std::max(w.time[lowest(m)], all.completed + 1);
        }
    }
}

void leave_cluster_barrier(const cs_warp *w, uint32_t lanes) {
    const Block &block = *static_cast<const Block *>(w->block);
    if (!block.job->image->virtual_clock || !(block.barriers_in_use & 1u << kClusterBarrier)) return;
    const uint32_t arrived = block.cluster_barrier.arrived_lanes[reinterpret_cast<const Warp *>(w)->index];
    ClusterBarrier &all = block.leader->cluster_barrier;
    for (uint32_t m = lanes; m; m &= m - 1) {
        all.exits = std::max(all.exits, w->time[lowest(m)]);
        if (!(arrived >> lowest(m) & 1)) all.latest = std::max(all.latest, w->time[lowest(m)]);
    }
}

uint8_t *shared_memory(cs_warp *w, uint64_t a, uint32_t n, uint32_t access) {
    const Block &block = block_of(w);
    if (const uint64_t own = a - w->shared_at; own < w->total_shared && own + n <= w->total_shared)
        return w->shared + own;
    const uint64_t rank = a >> CS_RANK_SHIFT, offset = a & CS_SHARED_OFFSET;
    if (rank >= block.job->cluster_blocks || offset + n > block.job->shared_size) return nullptr;
    const Block &owner = block.leader->member(static_cast<uint32_t>(rank));
    if (owner.done())
        raise_fault(w, CS_FAULT_LAUNCH_FAILED, w->shared_window + a, n, static_cast<char>(access),
                    "shared memory of a block of the cluster that has exited");
    return owner.shared.data() + offset;
}

void *resolve(cs_warp *w, uint64_t a, uint32_t n, uint32_t access) {
    const auto kind = static_cast<char>(access);
    void *found = nullptr;
    if (a - w->base < w->limit) {
        found = reinterpret_cast<void *>(a);
    } else if (a - w->shared_window < kClusterWindow) {
        found = shared_memory(w, a - w->shared_window, n, access);
    } else if (a - w->local_window < kWindow) {
        const uint64_t offset = a - w->local_window;
        if (offset + n <= w->local_size)
            found = w->local + static_cast<uint64_t>(w->lane) * w->local_stride + offset;
    } else if (a - w->param_window < kParameterWindow) {
        const uint64_t offset = a - w->param_window;
        if (offset + n <= w->param_size && kind == 'r') found = const_cast<uint8_t *>(w->params) + offset;
    } else if (w->workspace && a - w->workspace < sizeof(Job::workspace)) {
        if (a - w->workspace + n <= sizeof(Job::workspace)) found = reinterpret_cast<void *>(a);
    } else {
        const Environment &environment = environment_of(w);
        if (environment.host_range && environment.host_range(environment.self, a, n))
            found = reinterpret_cast<void *>(a);
    }
    if (found == nullptr) raise_fault(w, CS_FAULT_ILLEGAL_ADDRESS, a, n, kind, nullptr);
    if (a & (n - 1)) raise_fault(w, CS_FAULT_MISALIGNED, a, n, kind, nullptr);
    return found;
}

uint32_t replicas(cs_warp *w, uint64_t a, uint32_t n, uint32_t access, uint8_t **out) {
    const Environment &environment = environment_of(w);
    const uint32_t count = environment.replicas ? environment.replicas(environment.self, a, n, out) : 0;
    if (count == 0) raise_fault(w, CS_FAULT_ILLEGAL_ADDRESS, a, n, static_cast<char>(access), nullptr);
    if (a & (n - 1)) raise_fault(w, CS_FAULT_MISALIGNED, a, n, static_cast<char>(access), nullptr);
    return count;
}

uint64_t nanoseconds(clockid_t which) {
    timespec now;
    clock_gettime(which, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

uint64_t next_random(uint64_t &state) {  // splitmix64
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

const cs_services services = {
    pick,           collective,     barrier,       bar_sync,    execute,
    resolve,        fault,          push,          pop,         indirect,
    device_vprintf, allocate,       release,       assertfail,  device_clock,
    globaltimer,    nanosleep,      round32,       round64,     convert32,
    convert64,      texture_fetch,  surface,       surface_put, surface_texel,
    texture_query,  device_runtime, tensor_copy,   change_map,  cluster_barrier,
    cluster_shared, replicas,       tensor_memory,
};

}  // namespace cudasim
