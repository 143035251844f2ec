// Copies that are installed later, by the worker thread, when the driver may wait (gpu_idle.h).
#pragma once

#include "state.h"
#include "wire.h"

namespace gpubpf {

extern const Lifetime deferred_lifetime;
bool is_usable(const Context *context);  // it has neither ended nor failed

// A hook met a context for the first time. Preexisting libraries get copies there, and its clock is
// calibrated.
void context_discovered(Context *context);

// Installs copies of a module's kernels in `context` as soon as that blocks no thread. A null context means
// every context that can have them.
void install_later(Module *module, Context *context);

// Loads copies of a module that may have been loaded before, as soon as that blocks no thread.
void take_ahead(Reader &reader, int image);

// For the worker thread.
int install_due_in();    // ms until install_pending() is due; -1: it is not
void install_pending();  // call it when the driver may wait
void stop_installing();  // no more copies are installed

}  // namespace gpubpf
