#include "driver/stream.h"

#include "state.h"

namespace gpubpf {

// Work runs in the context of its stream or, for a default stream, in the current context.
Context *working_context(StreamRef where) {
    Registry &r = registry();
    CUstream stream = where.handle();
    const bool named = stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
    Context *context = named ? r.context_of(stream) : nullptr;
    return context ? context : r.current();
}

Context *context_of(StreamRef where) {
    if (Context *only = registry().only.load(std::memory_order_acquire)) return only;
    return working_context(where);
}

}  // namespace gpubpf
