// What the program had before the agent came: functions, modules and contexts that it did not see made (docs/attach.md, "What was loaded
// before"). And modules whose copies are made later, when the driver may wait (quiet.h).
#pragma once

#include "operation.h"
#include "state.h"

namespace gpubpf {

extern const Lifetime found_lifetime;
void stop_found();  // the worker thread makes no more copies

// What a handle stands for that no hooked call gave: the driver is asked, once. For the thread that is about to use it, in `context`.
// Null: it is not known.
const Function *found(const void *handle, Context *context);
Context *context_of(Where where);  // in which what is put there runs; null: none

// Of a launch that is instrumented: allocations that its parameters mention are logged, if they are from before.
void mentioned(const Layout &layout, const Context &context, void **parameters, const void *given,
               size_t bytes) noexcept;

// A context that was met: libraries of before have copies there, too, and its clock is wanted.
void context_met(Context *context);

// Has the copies of a module's kernels made in `context` (null: in every one that can have them), once that does no harm.
void apply_later(Module *module, Context *context);

// Modules that were found by a function of theirs, and are what `library` is in some context: they go with it.
std::vector<Module *> modules_of_library(CUlibrary library);

// Of the worker thread. The first tells the tool of what was found since.
void tell_found();
int apply_waits();  // ms until the second is wanted; -1: it is not
void apply_now();   // where the driver may wait

// Of a kernel that was found, whose copy is made: nothing, or why that cannot be what the tool took it for. The context is current.
const char *differs(CUfunction original, const Layout &layout);
// Has the copy the attributes that the program gave the original before? False: it cannot.
bool mirror_attributes(CUfunction original, CUfunction copy);

}  // namespace gpubpf
