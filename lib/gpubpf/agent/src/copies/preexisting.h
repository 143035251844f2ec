// What the program had before the agent was attached: functions, modules and contexts whose creation no hook
// saw (docs/attach.md, "What was loaded before"). Also modules whose copies are installed later, when the
// driver may wait (gpu_idle.h).
#pragma once

#include "log/operation.h"
#include "state.h"
#include "wire.h"

namespace gpubpf {

extern const Lifetime preexisting_lifetime;
void stop_installing();  // the worker thread installs no more copies

// Asks the driver once what a handle stands for that no hooked call returned: its module was loaded before the
// attachment, or by an interface that is not hooked (NVIDIA's runtime up to 11.8 loads modules through a
// private table). For the thread that is about to use it, in `context`. Returns null if that stays unknown.
const Function *identify_handle(const void *handle, Context *context);
// The same for a launch. The first launch of a module that was loaded after the attachment waits for the copies.
const Function *identify_launched(const void *handle, StreamRef where);
Context *context_of(StreamRef where);  // the context in which work for the stream runs; null: none

// For an instrumented launch: logs allocations in its parameters that were made before the attachment.
void log_mentioned_allocations(const Layout &layout, const Context &context, void **parameters,
                               const void *given, size_t bytes) noexcept;

// A hook met a context for the first time. Preexisting libraries get copies there, and its clock is
// calibrated.
void context_discovered(Context *context);

// Installs copies of a module's kernels in `context` as soon as that blocks nobody. A null context means
// every context that can have them.
void install_later(Module *module, Context *context);

// Returns modules that were identified through one of their functions, and that are `library` in some
// context. They end with the library.
std::vector<Module *> modules_of_library(CUlibrary library);

// Meets the contexts that the runtime uses, so that copies can be loaded before the next launch. Returns the
// compute capabilities of their GPUs. Other contexts are met when they are used.
std::vector<uint32_t> meet_primary_contexts();
// The tool has made copies of a module that may have been loaded before. Loads them when that blocks nobody.
void take_ahead(Reader &reader, int image);

// For the worker thread. report_preexisting() tells the tool about new findings.
void report_preexisting();
int install_due_in();    // ms until install_pending() is due; -1: it is not
void install_pending();  // call it when the driver may wait

// Compares a preexisting kernel with the one the tool took it for. Returns null, or the reason why they
// differ. The context must be current.
const char *mismatch(CUfunction original, const Layout &layout);
// Gives the copy the attributes that the program has set on the original. Returns false if that fails.
bool mirror_attributes(CUfunction original, CUfunction copy);

}  // namespace gpubpf
