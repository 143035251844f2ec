// From a loaded module to its sidecar: asks the tool, and loads the tool's answer in addition to the application's module.
#pragma once

#include <memory>
#include <vector>

#include "messages.h"
#include "state.h"

namespace gpubpf {

// Call this after the application's own load.
void image_loaded(Module *module, const ImageFile &image);
// Why the variables of a module have their initial values in a context: the program is still in the call that loads the module, or in
// the one that makes the context. The latter holds only while Context::given is 1: another thread can get a primary context meanwhile.
enum class Fresh { No, Module, Context };
// Loads the sidecars of libraries into a new context. `waits`: it may wait for the tool.
void context_ready(Context *context, bool waits = true, Fresh fresh = Fresh::No);
// Gets the tool's answer, and installs the copies.
void load_sidecar(Module *module, Context *context, bool waits = true, Fresh fresh = Fresh::No);
// Gets the copies that kernels of large modules need in a context for their first launch (Kernel::later), and installs them. Waits for
// the tool, unless the modules were loaded before the attachment. Does nothing while a stream is being captured.
void load_copies(const std::vector<Kernel *> &kernels, Context *context);
void retry_waiting();  // call this after a capture
// Without `may_load`, it only uses a sidecar that was loaded ahead.
void install_sidecar(Module *module, Context *context, const std::shared_ptr<const Answer> &answer,
                     bool may_load = true, Fresh fresh = Fresh::No);
// Waits for the tool's answer. Returns false if the tool takes too long or is silent.
bool wait_for_answer(Question &question);
// Prepares a context for instrumented kernels: map memory, maps of the whole context, and rings. Call it with `busy` held and the
// context current.
bool prepare_context(Context &context);
// Returns the application's function in the current context; null: the driver does not return it.
CUfunction original_function(const Module &module, const char *name);
bool has_copy_of(const Answer &answer, const Kernel &kernel);

// Allocates more cells for the launch numbers of graphs. The context must be current.
void prepare_cells(Context &context);

}  // namespace gpubpf
