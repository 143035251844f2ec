// The table of all state, in the order in which it begins.
#include <cstddef>

#include "copies/deferred.h"
#include "copies/drain.h"
#include "copies/graph.h"
#include "copies/image.h"
#include "copies/link.h"
#include "copies/preexisting.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "driver/leftovers.h"
#include "driver/waiting_call.h"
#include "lifetime.h"
#include "log/allocation.h"
#include "log/log.h"
#include "log/host_program.h"
#include "log/operation.h"
#include "log/ranges.h"
#include "log/stack.h"
#include "log/stamp.h"
#include "patch.h"
#include "shared_files.h"
#include "state.h"
#include "thread.h"

namespace gpubpf {

namespace {

// In the order of initialization. They end in reverse order, so that each may use the ones above it until its
// own end.
//
// Three things are not in the table:
// - agent.cpp owns the connection, the control block and the configuration. They exist before the first
//   begin() and after the last end().
// - The worker thread calls stop_installing() and release_driver_objects() as its last work. That is before
//   any stop(): hooks may still run.
// - CUPTI's tables stay for the life of the process, because CUPTI may call back late (cupti.cpp).
// clang-format off: one in each line
const Lifetime *const kLifetimes[] = {
    &thread_lifetime,
    &patch_lifetime,
    &waiting_call_lifetime,
    &current_lifetime,
    &leftovers_lifetime,
    &drain_lifetime,
    &registry_lifetime,
    &log_lifetime,
    &shared_lifetime,
    &host_program_lifetime,
    &stack_lifetime,
    &ranges_lifetime,
    &image_lifetime,
    &link_lifetime,
    &allocation_lifetime,
    &operation_lifetime,
    &graph_lifetime,
    &gpu_idle_lifetime,
    &preexisting_lifetime,
    &deferred_lifetime,  // may hold a Watching, whose end uses gpu_idle.cpp's state
    &stamp_lifetime,
};
// clang-format on
constexpr size_t kCount = sizeof kLifetimes / sizeof *kLifetimes;

}  // namespace

void begin_state() {
    for (const Lifetime *lifetime : kLifetimes)
        if (lifetime->begin) lifetime->begin();
}

void stop_state() noexcept {
    for (size_t i = kCount; i-- > 0;)
        if (kLifetimes[i]->stop) kLifetimes[i]->stop();
}

void end_state() noexcept {
    for (size_t i = kCount; i-- > 0;)
        if (kLifetimes[i]->end) kLifetimes[i]->end();
}

void abandon_state() {
    for (const Lifetime *lifetime : kLifetimes)
        if (lifetime->in_forked_child) lifetime->in_forked_child();
}

}  // namespace gpubpf
