// The global wave sync: a barrier over all waves of a cooperative launch.
//
// ds_gws_init sets the number of waves that meet at a resource; ds_gws_barrier waits for them. A waiting wave runs its
// instruction again at its next turn, so that all other waves, of any workgroup, make progress meanwhile.

#include "engine/registry.h"

#include <bit>
#include <map>
#include <mutex>
#include <utility>

namespace hipsim {
namespace {

struct Resource {
    uint32_t waves = 1, arrived = 0;
    uint64_t generation = 0;
};

std::mutex mutex;

Resource &resource(const Wave &w, const Op &op) {
    // A resource's number is in M0 and in the offset. Each queue has its own resources; they are never destroyed.
    static auto *all = new std::map<std::pair<uint64_t, uint32_t>, Resource>;
    uint32_t number = (w.s[isa::m0] >> 16 & 63) + (uint32_t(op.i.offset) & 63);
    return (*all)[{w.group->launch->queue, number & 63}];
}

uint32_t first_lane(const Wave &w, unsigned vgpr) {
    uint64_t exec = w.exec();
    return w.v[vgpr][exec ? std::countr_zero(exec) : 0];
}

void init(Wave &w, const Op &op) {
    std::lock_guard lock(mutex);
    Resource &r = resource(w, op);
    r.waves = first_lane(w, op.i.addr) + 1;
    r.arrived = 0;
}

void barrier(Wave &w, const Op &op) {
    std::lock_guard lock(mutex);
    Resource &r = resource(w, op);
    if (w.waits_for_others) {
        if (r.generation != w.waits_in) {
            w.waits_for_others = false;
            return;
        }
    } else if (++r.arrived >= r.waves) {
        r.arrived = 0;
        ++r.generation;
        return;
    } else {
        w.waits_for_others = true;
        w.waits_in = r.generation;
    }
    w.next = &op;
    ++w.budget;  // an instruction counts when it has ended
    w.yielded = true;
    w.stop();
}

}  // namespace

void add_gws(Registry &registry) {
    registry["ds_gws_init"] = {init, nullptr, Type::none, {}};
    registry["ds_gws_barrier"] = {barrier, nullptr, Type::none, {}};
}

}  // namespace hipsim
