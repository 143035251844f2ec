// Streams as arguments of driver calls.
#pragma once

#include "driver/driver.h"

namespace gpubpf {

struct Context;

// A stream argument of a driver call. `per_thread`: null means the calling thread's default stream. `any`:
// the call has no stream argument and submits nothing to a stream.
struct StreamRef {
    CUstream given = nullptr;
    bool per_thread = false;
    bool any = false;
    CUstream handle() const { return !given && per_thread ? CU_STREAM_PER_THREAD : given; }
};

constexpr StreamRef kNoStream{nullptr, false, true};

// Distinguishes streams: default streams have the same handle in every context and thread.
struct StreamKey {
    CUstream stream;
    const Context *context;
    uint64_t thread;  // the thread of a per-thread default stream
    bool operator==(const StreamKey &o) const {
        return stream == o.stream && context == o.context && thread == o.thread;
    }
    struct Hash {
        size_t operator()(const StreamKey &k) const {
            return (reinterpret_cast<size_t>(k.stream) * 31 + reinterpret_cast<size_t>(k.context)) * 31 +
                   k.thread;
        }
    };
};

// Returns the context in which work for the stream runs; null: none. The second one asks the driver.
Context *context_of(StreamRef where);
Context *working_context(StreamRef where);

}  // namespace gpubpf
