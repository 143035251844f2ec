// Functions, modules and contexts that no hook saw: the program had them before the agent was attached, or made
// them through an interface that is not hooked (docs/attach.md, "What was loaded before").
#pragma once

#include "driver/stream.h"
#include "state.h"
#include "wire.h"

namespace gpubpf {

extern const Lifetime preexisting_lifetime;

// Asks the driver once for the meaning of a handle that no hooked call returned: its module was loaded before
// the attachment, or by an interface that is not hooked (NVIDIA's runtime up to 11.8 loads modules through a
// private table). For the thread that is about to use it, in `context`. Returns null if it stays unknown.
const Function *identify_handle(const void *handle, Context *context);
const Function *identify_launched(const void *handle, StreamRef where);
// For a thread that is about to launch a kernel in a context where it has no copy (Kernel::awaited). Waits while
// the kernel may soon have one: while the tool identifies its module, and while the worker thread loads copies into
// a context that was just met. Every thread waits, at most until kForCopies after the module's first launch there.
void await_copies(Kernel &kernel, Context *context);

// Returns modules that were identified through one of their functions and that represent `library` in some
// context. They end with the library.
std::vector<Module *> modules_of_library(CUlibrary library);

// Meets the contexts that the runtime uses, so that copies can be loaded before the next launch. Returns the
// compute capabilities of their GPUs. Other contexts are met when they are used.
std::vector<uint32_t> meet_primary_contexts();

// Tells the tool about new findings.
void report_preexisting();
// The tool has answered about a module. If the answer is ambiguous, also reports kernels launched since.
void found_answered(const Module *module);

}  // namespace gpubpf
