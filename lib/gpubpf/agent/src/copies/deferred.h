// Copies that are installed later, by the worker thread, when the driver may wait (gpu_idle.h).
#pragma once

#include "state.h"
#include "wire.h"

namespace gpubpf {

extern const Lifetime deferred_lifetime;

// Installs copies of a module's kernels in `context` as soon as that blocks no thread. A null context means
// every context that can have them.
void install_later(Module *module, Context *context);

// Loads copies of a module that may have been loaded before, as soon as that blocks no thread.
void take_ahead(Reader &reader, int image);

// For the worker thread.
int install_due_in();  // ms until install_pending() is due; -1: nothing is pending
// Installs the copies of a module's kernels in a context or, if `module` is null, the context's memory.
using Install = void (*)(Module *module, Context &context);
void install_pending(Install install);  // call it when the driver may wait
void stop_installing();                 // no more copies are installed

}  // namespace gpubpf
