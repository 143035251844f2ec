// Streams, events, capture: how work gets in order.
#include "driver/driver.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>

namespace cudasim::driver {
namespace {

// Captures under way in this process: a call that may synchronise has to look at those of other threads too.
struct Captures {
    std::mutex mutex;
    std::vector<std::shared_ptr<Capture>> active;
};

Captures &captures() {
    static Captures *const made = new Captures();
    return *made;
}

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

std::atomic<uint64_t> next_stream_id{1}, next_capture_id{1};

void append_unique(std::vector<std::shared_ptr<GraphNode>> &to,
                   const std::vector<std::shared_ptr<GraphNode>> &from) {
    for (const std::shared_ptr<GraphNode> &node : from)
        if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
}

bool is_ancestor(const std::shared_ptr<GraphNode> &wanted,
                 const std::vector<std::shared_ptr<GraphNode>> &from) {
    std::set<const GraphNode *> seen;
    std::vector<const GraphNode *> todo;
    for (const std::shared_ptr<GraphNode> &node : from) todo.push_back(node.get());
    while (!todo.empty()) {
        const GraphNode *node = todo.back();
        todo.pop_back();
        if (node == wanted.get()) return true;
        if (!seen.insert(node).second) continue;
        for (const std::shared_ptr<GraphNode> &dependency : node->after) todo.push_back(dependency.get());
    }
    return false;
}

void leave_capture(const std::shared_ptr<Capture> &capture) {
    for (const std::shared_ptr<Stream> &stream : capture->streams) {
        stream->capture.reset();
        stream->capture_after.clear();
    }
    std::lock_guard lock(captures().mutex);
    auto &active = captures().active;
    active.erase(std::remove(active.begin(), active.end(), capture), active.end());
}

// What new work has to wait for. What is done already only counts on the virtual clock.
struct Before {
    std::vector<Fence> fences;
    uint64_t time = 0;
    void add(const Fence &fence) {
        if (fence.reached()) time = std::max(time, fence.end());
        else fences.push_back(fence);
    }
};

// What must be done before new work of `stream`, by the rules of the legacy default stream.
Before implicit_fences(Context &context, const Stream &stream) {
    Before before;
    if (stream.legacy) {
        for (const std::shared_ptr<Stream> &other : context.streams)
            if (other->blocking()) before.add(other->queue->tail());
        for (const auto &[thread, other] : context.per_thread) before.add(other->queue->tail());
        for (const Fence &fence : context.leftovers) before.add(fence);
    } else if (stream.blocking()) {
        before.add(context.legacy->queue->tail());
    }
    return before;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- submitting

std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context> &context, unsigned flags, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->context = context;
    stream->flags = flags;
    stream->priority = std::clamp(priority, -5, 0);
    stream->id = next_stream_id++;
    stream->handle = tables().streams.add(stream);
    return stream;
}

CUresult find_stream(CUstream handle, bool per_thread, std::shared_ptr<Stream> &stream,
                     std::shared_ptr<Context> &context) {
    if (CUresult status = initialized()) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (handle == nullptr) handle = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if (handle == CU_STREAM_LEGACY) {
        if (CUresult status = current(context)) return status;
        stream = context->legacy;
        return CUDA_SUCCESS;
    }
    if (handle == CU_STREAM_PER_THREAD) {
        if (CUresult status = current(context)) return status;
        std::lock_guard lock(context->lock);
        std::shared_ptr<Stream> &own = context->per_thread[std::this_thread::get_id()];
        if (!own) {
            own = std::make_shared<Stream>();
            own->context = context;
            own->id = next_stream_id++;
            own->handle = CU_STREAM_PER_THREAD;
        }
        stream = own;
        return CUDA_SUCCESS;
    }
    stream = tables().streams.get(handle);
    context = stream ? stream->context.lock() : nullptr;
    if (!context) return CUDA_ERROR_INVALID_HANDLE;
    if (context->destroyed) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return static_cast<CUresult>(context->sticky.load());
}

CUresult submit(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                Operation operation, Fence *fence, uint64_t takes) {
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    std::lock_guard lock(context->lock);
    if (const std::shared_ptr<Capture> &capture = stream->capture) {
        if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (operation.other && operation.type == CU_GRAPH_NODE_TYPE_EMPTY) {
            capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        std::shared_ptr<GraphNode> node =
            add_node(capture->graph, std::move(operation), stream->capture_after);
        stream->capture_after = {node};
        host_reaches(host_time() + takes);
        return CUDA_SUCCESS;
    }
    if (stream->legacy) {
        // The legacy stream would have to wait for a stream that is being captured.
        std::lock_guard captured(captures().mutex);
        bool implicit = false;
        for (const std::shared_ptr<Capture> &capture : captures().active)
            for (const std::shared_ptr<Stream> &other : capture->streams)
                if (other->blocking() && other->context.lock() == context) {
                    capture->invalid = true;
                    implicit = true;
                }
        if (implicit) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    Before before = implicit_fences(*context, *stream);
    for (const Fence &more : operation.after) before.add(more);
    operation.after.clear();
    host_reaches(host_time() + takes);
    before.time = std::max(before.time, host_time());
    auto work = [context, operation = std::move(operation)](uint64_t start) {
        return execute(*context, operation, start);
    };
    Fence made = stream->queue->submit(std::move(before.fences), std::move(work), before.time, !untimed());
    if (fence != nullptr) *fence = std::move(made);
    return CUDA_SUCCESS;
}

CUresult submit_and_wait(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                         Operation operation) {
    if (stream->capture) return invalidate_capture(context, stream);
    Fence fence;
    if (CUresult status = submit(context, stream, std::move(operation), &fence)) return status;
    host_waits(fence);
    flush_printf(*context);
    return static_cast<CUresult>(context->sticky.load());
}

CUresult launch_kernel(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       KernelLaunch launch) {
    uint32_t local = launch.function->kernel().local;
    if (config().hostile && !on_worker_thread()) {
        std::lock_guard lock(context->lock);
        if (local > context->stack_high_water) {
            // A device must make room for a larger stack, which waits for running kernels and cannot be captured.
            if (stream->capture) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
            drain(*context, false);
            context->stack_high_water = local;
        }
    }
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_KERNEL;
    operation.kernel = std::move(launch);
    return submit(context, stream, std::move(operation), nullptr, kLaunch);
}

// ---------------------------------------------------------------------------------------------------- capture

CUresult invalidate_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream) {
    std::lock_guard lock(context->lock);
    if (!stream->capture) return CUDA_SUCCESS;
    if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

// CUDA driver API, cuThreadExchangeStreamCaptureMode: which captures forbid a potentially unsafe call.
CUresult allowed_in_capture(const std::shared_ptr<Context> &) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    std::lock_guard lock(captures().mutex);
    CUresult status = CUDA_SUCCESS;
    for (const std::shared_ptr<Capture> &capture : captures().active) {
        bool own =
            capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool others =
            thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!own && !others) continue;
        capture->invalid = true;
        status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return status;
}

// CUDA programming guide, "Prohibited and Unhandled Operations": waiting for a context that has a stream in capture is invalid
// in every mode, and ends the capture.
CUresult no_capture_in(const std::shared_ptr<Context> &context) {
    CUresult status = allowed_in_capture(context);
    std::lock_guard streams(context->lock);
    std::lock_guard lock(captures().mutex);
    for (const std::shared_ptr<Capture> &capture : captures().active) {
        bool here = false;
        for (const std::shared_ptr<Stream> &stream : capture->streams)
            here |= stream->context.lock() == context;
        if (!here) continue;
        capture->invalid = true;
        status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return status;
}

CUresult begin_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       CUstreamCaptureMode mode, const std::shared_ptr<Graph> &graph,
                       const std::vector<std::shared_ptr<GraphNode>> &after) {
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    std::lock_guard lock(context->lock);
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->existing_graph = graph != nullptr;
    if (graph) {
        capture->graph = graph;
    } else {
        capture->graph = std::make_shared<Graph>();
        capture->graph->context = context;
        capture->graph->handle = tables().graphs.add(capture->graph);
    }
    capture->graph_handle = static_cast<CUgraph>(capture->graph->handle);
    capture->mode = mode;
    capture->id = next_capture_id++;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    capture->streams = {stream};
    stream->capture = capture;
    stream->capture_after = after;
    std::lock_guard active(captures().mutex);
    captures().active.push_back(capture);
    return CUDA_SUCCESS;
}

CUresult end_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                     CUgraph *graph) {
    std::lock_guard lock(context->lock);
    std::shared_ptr<Capture> capture = stream->capture;
    if (graph != nullptr) *graph = nullptr;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    bool joined = true;
    for (const std::shared_ptr<Stream> &other : capture->streams)
        for (const std::shared_ptr<GraphNode> &last : other->capture_after)
            if (other != stream && !is_ancestor(last, stream->capture_after)) joined = false;
    bool invalid = capture->invalid;
    leave_capture(capture);
    if (invalid || !joined) {
        if (!capture->existing_graph) tables().graphs.remove(capture->graph_handle);
        return invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    if (graph != nullptr) *graph = capture->graph_handle;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- events

CUresult record_event(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                      const std::shared_ptr<Event> &event, bool external) {
    if (event->context.lock() != context) return CUDA_ERROR_INVALID_HANDLE;
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    operation.event = event;
    std::lock_guard lock(context->lock);
    if (stream->capture) {
        if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (external) return submit(context, stream, std::move(operation));
        std::lock_guard own(event->mutex);
        event->captured_graph = stream->capture->graph;
        event->captured_after = stream->capture_after;
        return CUDA_SUCCESS;
    }
    auto state = std::make_shared<EventState>();
    operation.recording = state;
    std::lock_guard own(event->mutex);
    if (CUresult status = submit(context, stream, std::move(operation))) return status;
    event->last = state;
    event->captured_graph.reset();
    event->captured_after.clear();
    return CUDA_SUCCESS;
}

CUresult wait_event(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                    const std::shared_ptr<Event> &event, bool external) {
    std::lock_guard lock(context->lock);
    std::unique_lock own(event->mutex);
    if (event->captured_graph && !external) {
        std::shared_ptr<Capture> capture = stream->capture;
        if (capture && capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (capture && capture->graph != event->captured_graph) {
            capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_MERGE;
        }
        if (!capture) {
            std::lock_guard active(captures().mutex);
            for (const std::shared_ptr<Capture> &candidate : captures().active)
                if (candidate->graph == event->captured_graph) capture = candidate;
            if (!capture) return CUDA_ERROR_CAPTURED_EVENT;
            if (stream->legacy) {
                capture->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
            capture->streams.push_back(stream);
            stream->capture = capture;
            stream->capture_after.clear();
        }
        append_unique(stream->capture_after, event->captured_after);
        return CUDA_SUCCESS;
    }
    if (stream->capture) {
        if (external) {
            own.unlock();
            Operation operation;
            operation.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT;
            operation.event = event;
            return submit(context, stream, std::move(operation));
        }
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!event->last || (event->last->done() && !virtual_clock())) return CUDA_SUCCESS;
    Operation operation;
    operation.after.push_back(event->last->fence());
    return submit(context, stream, std::move(operation));
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    if (CUresult status = initialized()) return status;
    if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- stream objects

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority) {
    std::shared_ptr<Context> context;
    if (CUresult status = current(context)) return status;
    if (handle == nullptr || (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<Stream> stream = make_stream(context, flags, priority);
    std::lock_guard lock(context->lock);
    context->streams.push_back(stream);
    *handle = static_cast<CUstream>(stream->handle);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned int flags) {
    return cuStreamCreateWithPriority(handle, flags, 0);
}

CUresult cuStreamDestroy(CUstream handle) {
    if (CUresult status = initialized()) return status;
    std::shared_ptr<Stream> stream = tables().streams.get(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Context> context = stream->context.lock();
    if (!context) return CUDA_ERROR_INVALID_HANDLE;
    std::lock_guard lock(context->lock);
    if (stream->capture) {
        stream->capture->invalid = true;
        std::shared_ptr<Capture> capture = stream->capture;
        if (capture->origin == stream) leave_capture(capture);
    }
    tables().streams.remove(handle);
    auto &streams = context->streams;
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    auto &left = context->leftovers;
    left.push_back(stream->queue->tail());
    // Of those that are done the one that ended last says it all.
    Fence latest;
    for (const Fence &fence : left)
        if (fence.reached() && fence.end() > latest.end()) latest = fence;
    left.erase(std::remove_if(left.begin(), left.end(), [](const Fence &fence) { return fence.reached(); }),
               left.end());
    if (latest.end() != 0) left.push_back(latest);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- event objects

CUresult cuEventCreate(CUevent *handle, unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current(context)) return status;
    constexpr unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if (handle == nullptr || (flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
    if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    auto event = std::make_shared<Event>();
    event->context = context;
    event->flags = flags;
    event->handle = tables().events.add(event);
    *handle = static_cast<CUevent>(event->handle);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
    if (CUresult status = initialized()) return status;
    return tables().events.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

namespace {

CUresult event_state(CUevent handle, std::shared_ptr<Context> &context, std::shared_ptr<EventState> &state) {
    if (CUresult status = initialized()) return status;
    std::shared_ptr<Event> event = tables().events.get(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    context = event->context.lock();
    if (!context) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    std::lock_guard lock(event->mutex);
    if (event->captured_graph) return CUDA_ERROR_CAPTURED_EVENT;
    state = event->last;
    return static_cast<CUresult>(context->sticky.load());
}

}  // namespace

CUresult cuEventQuery(CUevent handle) {
    std::shared_ptr<Context> context;
    std::shared_ptr<EventState> state;
    if (CUresult status = event_state(handle, context, state)) return status;
    if (CUresult status = allowed_in_capture(context)) return status;
    return !state || host_sees(state->fence()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
    std::shared_ptr<Context> context;
    std::shared_ptr<EventState> state;
    if (CUresult status = event_state(handle, context, state)) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (CUresult status = allowed_in_capture(context)) return status;
    if (state) host_waits(state->fence());
    flush_printf(*context);
    return static_cast<CUresult>(context->sticky.load());
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    if (CUresult status = initialized()) return status;
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<EventState> states[2];
    CUevent handles[2] = {start_handle, end_handle};
    for (int i = 0; i < 2; i++) {
        std::shared_ptr<Event> event = tables().events.get(handles[i]);
        if (!event || (event->flags & CU_EVENT_DISABLE_TIMING) != 0) return CUDA_ERROR_INVALID_HANDLE;
        std::shared_ptr<Context> context;
        if (CUresult status = event_state(handles[i], context, states[i])) return status;
        if (!states[i]) return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!host_sees(states[0]->fence()) || !host_sees(states[1]->fence())) return CUDA_ERROR_NOT_READY;
    double ns = static_cast<double>(states[1]->time_ns) - static_cast<double>(states[0]->time_ns);
    *milliseconds = static_cast<float>(ns / 1e6);
    return CUDA_SUCCESS;
}

extern "C" {
// For tools: when an event was last recorded, on the virtual timeline in ns. NOT_READY: not yet; NOT_SUPPORTED: the clock is
// real. cuEventElapsedTime rounds to 24 bits.
CUresult cudasim_event_time(CUevent handle, uint64_t *ns) {
    if (!virtual_clock()) return CUDA_ERROR_NOT_SUPPORTED;
    std::shared_ptr<Event> event = tables().events.get(handle);
    if (!event || ns == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    std::lock_guard lock(event->mutex);
    if (!event->last || !event->last->done()) return CUDA_ERROR_NOT_READY;
    *ns = event->last->time_ns;
    return CUDA_SUCCESS;
}

CUresult stream_destroy_v1(CUstream) __asm__("cuStreamDestroy");
CUresult event_destroy_v1(CUevent) __asm__("cuEventDestroy");
CUresult elapsed_v1(float *, CUevent, CUevent) __asm__("cuEventElapsedTime");

CUresult stream_destroy_v1(CUstream stream) { return cuStreamDestroy(stream); }
CUresult event_destroy_v1(CUevent event) { return cuEventDestroy(event); }
CUresult elapsed_v1(float *milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}
}
