// Streams, events and stream capture: the order in which work runs.
#include "driver/context.h"
#include "driver/ipc.h"
#include "sanitizer/hooks.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>

namespace cudasim::driver {
namespace {

// The active captures of the process. A potentially unsafe call checks those of all threads.
struct Captures {
    std::mutex mutex;
    std::vector<std::shared_ptr<Capture>> active;
};

Captures &captures() {
    static Captures *const instance = new Captures();
    return *instance;
}

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

std::atomic<uint64_t> next_stream_id{1}, next_capture_id{1};

void append_unique(std::vector<std::shared_ptr<GraphNode>> &to,
                   const std::vector<std::shared_ptr<GraphNode>> &from) {
    for (const std::shared_ptr<GraphNode> &node : from)
        if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
}

bool is_ancestor(const std::shared_ptr<GraphNode> &ancestor,
                 const std::vector<std::shared_ptr<GraphNode>> &from) {
    std::set<const GraphNode *> seen;
    std::vector<const GraphNode *> todo;
    for (const std::shared_ptr<GraphNode> &node : from) todo.push_back(node.get());
    while (!todo.empty()) {
        const GraphNode *node = todo.back();
        todo.pop_back();
        if (node == ancestor.get()) return true;
        if (!seen.insert(node).second) continue;
        for (const std::shared_ptr<GraphNode> &dependency : node->dependencies)
            todo.push_back(dependency.get());
    }
    return false;
}

void leave_capture(const std::shared_ptr<Capture> &capture) {
    for (const std::shared_ptr<Stream> &stream : capture->streams) {
        stream->capture.reset();
        stream->capture_dependencies.clear();
    }
    std::lock_guard lock(captures().mutex);
    auto &active = captures().active;
    active.erase(std::remove(active.begin(), active.end(), capture), active.end());
}

// Removes a stream that is being destroyed from a capture. The capture continues, and keeps the stream's work.
void leave_capture(Capture &capture, const std::shared_ptr<Stream> &stream) {
    append_unique(capture.destroyed_stream_nodes, stream->capture_dependencies);
    std::lock_guard lock(captures().mutex);
    capture.streams.erase(std::remove(capture.streams.begin(), capture.streams.end(), stream),
                          capture.streams.end());
    stream->capture.reset();
    stream->capture_dependencies.clear();
}

// What new work waits for: fences, and on the virtual clock also a time, the latest end of fences that are done already.
struct Dependencies {
    std::vector<Fence> fences;
    uint64_t time = 0;
    void add(const Fence &fence) {
        if (fence.done()) time = std::max(time, fence.end());
        else fences.push_back(fence);
    }
};

// Returns what new work of a stream waits for because of the legacy default stream, which synchronises with all blocking
// streams.
Dependencies implicit_dependencies(Context &context, const Stream &stream) {
    Dependencies dependencies;
    if (stream.legacy) {
        for (const std::shared_ptr<Stream> &other : context.streams)
            if (other->blocking()) dependencies.add(other->queue->tail());
        for (const auto &[thread, other] : context.per_thread) dependencies.add(other->queue->tail());
        for (const Fence &fence : context.destroyed_stream_work) dependencies.add(fence);
    } else if (stream.blocking()) {
        dependencies.add(context.legacy->queue->tail());
    }
    return dependencies;
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

CUstream add_stream(const std::shared_ptr<Context> &context, const std::shared_ptr<GreenContext> &green,
                    unsigned flags, int priority) {
    std::shared_ptr<Stream> stream = make_stream(context, flags, priority);
    stream->green = green;
    {
        std::lock_guard lock(context->mutex);
        context->streams.push_back(stream);
    }
    if (sanitizer::active()) sanitizer::stream_changed(sanitizer::kStreamCreated, *context, *stream);
    return static_cast<CUstream>(stream->handle);
}

CUresult find_stream(CUstream handle, bool per_thread, std::shared_ptr<Stream> &stream,
                     std::shared_ptr<Context> &context) {
    if (CUresult status = check_initialized()) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (handle == nullptr) handle = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if (handle == CU_STREAM_LEGACY) {
        if (CUresult status = current_context(context)) return status;
        stream = context->legacy;
        return CUDA_SUCCESS;
    }
    if (handle == CU_STREAM_PER_THREAD) {
        if (CUresult status = current_context(context)) return status;
        std::lock_guard lock(context->mutex);
        std::shared_ptr<Stream> &per_thread_stream = context->per_thread[std::this_thread::get_id()];
        if (!per_thread_stream) {
            per_thread_stream = std::make_shared<Stream>();
            per_thread_stream->context = context;
            per_thread_stream->id = next_stream_id++;
            per_thread_stream->handle = CU_STREAM_PER_THREAD;
        }
        stream = per_thread_stream;
        return CUDA_SUCCESS;
    }
    stream = tables().streams.get(handle);
    context = stream ? stream->context.lock() : nullptr;
    if (!context) return CUDA_ERROR_INVALID_HANDLE;
    if (context->destroyed || (stream->green && stream->green->destroyed))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return static_cast<CUresult>(context->sticky_error.load());
}

CUresult submit(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                Operation operation, Fence *fence, uint64_t call_ns) {
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (!stream->capture) stream->queue->wait_for_room(static_cast<size_t>(config().queue));
    std::lock_guard lock(context->mutex);
    if (const std::shared_ptr<Capture> &capture = stream->capture) {
        if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (operation.stream_only && operation.type == CU_GRAPH_NODE_TYPE_EMPTY) {
            capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        std::shared_ptr<GraphNode> node =
            add_node(capture->graph, std::move(operation), stream->capture_dependencies);
        stream->capture_dependencies = {node};
        advance_host_time(host_time() + call_ns);
        return CUDA_SUCCESS;
    }
    if (stream->legacy) {
        // The legacy stream would have to wait for a capturing stream.
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
    Dependencies dependencies = implicit_dependencies(*context, *stream);
    for (const Fence &explicit_fence : operation.wait_for) dependencies.add(explicit_fence);
    operation.wait_for.clear();
    advance_host_time(host_time() + call_ns);
    dependencies.time = std::max(dependencies.time, host_time());
    auto work = [context, operation = std::move(operation)](uint64_t start) {
        return execute(*context, operation, start);
    };
    Fence submitted =
        stream->queue->submit(std::move(dependencies.fences), std::move(work), dependencies.time, !untimed());
    if (fence != nullptr) *fence = std::move(submitted);
    return CUDA_SUCCESS;
}

CUresult submit_and_wait(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                         Operation operation) {
    if (stream->capture) return invalidate_capture(context, stream);
    Fence fence;
    if (CUresult status = submit(context, stream, std::move(operation), &fence)) return status;
    wait_on_host(fence);
    flush_printf(*context);
    return static_cast<CUresult>(context->sticky_error.load());
}

CUresult launch_kernel(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       KernelLaunch launch) {
    uint32_t local = launch.function->kernel().local;
    if (config().hostile && !on_worker_thread()) {
        std::lock_guard lock(context->mutex);
        if (local > context->stack_high_water) {
            // A real device reallocates its stack memory, which waits for running kernels and cannot be captured.
            if (stream->capture) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
            drain(*context, false);
            context->stack_high_water = local;
        }
    }
    std::optional<sanitizer::Launch> told;
    if (sanitizer::active() && !stream->capture) told.emplace(context, stream, launch);
    Operation operation;
    operation.type = CU_GRAPH_NODE_TYPE_KERNEL;
    operation.kernel = std::move(launch);
    return submit(context, stream, std::move(operation), nullptr, kLaunchNs);
}

// ---------------------------------------------------------------------------------------------------- capture

CUresult invalidate_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream) {
    std::lock_guard lock(context->mutex);
    if (!stream->capture) return CUDA_SUCCESS;
    if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

bool captures_blocking_stream(const std::shared_ptr<Context> &context) {
    std::lock_guard lock(captures().mutex);
    for (const std::shared_ptr<Capture> &capture : captures().active)
        for (const std::shared_ptr<Stream> &stream : capture->streams)
            if (stream->blocking() && stream->context.lock() == context) return true;
    return false;
}

// The rules are those of cuThreadExchangeStreamCaptureMode (CUDA driver API).
CUresult check_unsafe_call() {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    std::lock_guard lock(captures().mutex);
    CUresult status = CUDA_SUCCESS;
    for (const std::shared_ptr<Capture> &capture : captures().active) {
        bool this_thread =
            capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool other_thread =
            thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (!this_thread && !other_thread) continue;
        capture->invalid = true;
        status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return status;
}

// It is invalid in every mode to synchronise with a context that has a capturing stream (CUDA programming guide, "Prohibited
// and Unhandled Operations").
CUresult check_not_capturing(const std::shared_ptr<Context> &context) {
    CUresult status = check_unsafe_call();
    std::lock_guard context_lock(context->mutex);
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

void abandon_capture(const std::shared_ptr<Stream> &stream) {
    if (std::shared_ptr<Capture> capture = stream->capture; capture && capture->origin == stream) {
        capture->invalid = true;
        leave_capture(capture);
    } else if (capture) {
        leave_capture(*capture, stream);
    }
}

CUresult begin_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                       CUstreamCaptureMode mode, const std::shared_ptr<Graph> &graph,
                       const std::vector<std::shared_ptr<GraphNode>> &dependencies) {
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    std::lock_guard lock(context->mutex);
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
    stream->capture_dependencies = dependencies;
    std::lock_guard captures_lock(captures().mutex);
    captures().active.push_back(capture);
    return CUDA_SUCCESS;
}

CUresult end_capture(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                     CUgraph *graph) {
    std::lock_guard lock(context->mutex);
    std::shared_ptr<Capture> capture = stream->capture;
    if (graph != nullptr) *graph = nullptr;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    std::vector<std::shared_ptr<GraphNode>> forked = capture->destroyed_stream_nodes;
    for (const std::shared_ptr<Stream> &other : capture->streams)
        if (other != stream) append_unique(forked, other->capture_dependencies);
    const bool joined =
        std::all_of(forked.begin(), forked.end(), [&](const std::shared_ptr<GraphNode> &last) {
            return is_ancestor(last, stream->capture_dependencies);
        });
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
    std::lock_guard lock(context->mutex);
    if (event->shared) {
        if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        const uint64_t number = event->shared->begin_record();
        operation.type = CU_GRAPH_NODE_TYPE_EMPTY;
        operation.stream_only = [shared = event->shared, number] { shared->finish_record(number); };
        return submit(context, stream, std::move(operation));
    }
    if (stream->capture) {
        if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (external) return submit(context, stream, std::move(operation));
        std::lock_guard event_lock(event->mutex);
        event->captured_graph = stream->capture->graph;
        event->captured_dependencies = stream->capture_dependencies;
        return CUDA_SUCCESS;
    }
    auto state = std::make_shared<EventState>();
    state->of_stream = true;
    operation.recording = state;
    std::lock_guard event_lock(event->mutex);
    Fence fence;
    if (CUresult status = submit(context, stream, std::move(operation), &fence)) return status;
    state->completion = fence.completion;
    event->last = state;
    event->captured_graph.reset();
    event->captured_dependencies.clear();
    return CUDA_SUCCESS;
}

CUresult wait_event(const std::shared_ptr<Context> &context, const std::shared_ptr<Stream> &stream,
                    const std::shared_ptr<Event> &event, bool external) {
    std::lock_guard lock(context->mutex);
    if (event->shared) {
        if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        Operation operation;
        operation.stream_only = [shared = event->shared, number = event->shared->last_record(),
                                 self = context.get()] { shared->wait(number, *self); };
        return submit(context, stream, std::move(operation));
    }
    std::unique_lock event_lock(event->mutex);
    if (event->captured_graph && !external) {
        std::shared_ptr<Capture> capture = stream->capture;
        if (capture && capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (capture && capture->graph != event->captured_graph) {
            capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_MERGE;
        }
        if (!capture) {
            std::lock_guard captures_lock(captures().mutex);
            for (const std::shared_ptr<Capture> &candidate : captures().active)
                if (candidate->graph == event->captured_graph) capture = candidate;
            if (!capture) return CUDA_ERROR_CAPTURED_EVENT;
            if (stream->legacy) {
                capture->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
            capture->streams.push_back(stream);
            stream->capture = capture;
            stream->capture_dependencies.clear();
        }
        append_unique(stream->capture_dependencies, event->captured_dependencies);
        return CUDA_SUCCESS;
    }
    if (stream->capture) {
        if (external) {
            event_lock.unlock();
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
    operation.wait_for.push_back(event->last->fence());
    return submit(context, stream, std::move(operation));
}

}  // namespace cudasim::driver

using namespace cudasim;
using namespace cudasim::driver;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    if (CUresult status = check_initialized()) return status;
    if (mode == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- stream objects

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    if (handle == nullptr || (flags & ~unsigned{CU_STREAM_NON_BLOCKING}) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *handle = add_stream(context, context_stack().back().green, flags, priority);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned int flags) {
    return cuStreamCreateWithPriority(handle, flags, 0);
}

CUresult cuStreamDestroy(CUstream handle) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Stream> stream = tables().streams.get(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    std::shared_ptr<Context> context = stream->context.lock();
    if (!context) return CUDA_ERROR_INVALID_HANDLE;
    if (sanitizer::active()) sanitizer::stream_changed(sanitizer::kStreamDestroyStarting, *context, *stream);
    std::lock_guard lock(context->mutex);
    abandon_capture(stream);
    tables().streams.remove(handle);
    auto &streams = context->streams;
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    auto &work = context->destroyed_stream_work;
    work.push_back(stream->queue->tail());
    // Among the fences that are done, only the one with the latest end matters.
    Fence latest;
    for (const Fence &fence : work)
        if (fence.done() && fence.end() > latest.end()) latest = fence;
    work.erase(std::remove_if(work.begin(), work.end(), [](const Fence &fence) { return fence.done(); }),
               work.end());
    if (latest.end() != 0) work.push_back(latest);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------- event objects

CUresult cuEventCreate(CUevent *handle, unsigned int flags) {
    std::shared_ptr<Context> context;
    if (CUresult status = current_context(context)) return status;
    constexpr unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    if (handle == nullptr || (flags & ~known) != 0) return CUDA_ERROR_INVALID_VALUE;
    const bool shared = (flags & CU_EVENT_INTERPROCESS) != 0;
    if (shared && (flags & CU_EVENT_DISABLE_TIMING) == 0) return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_shared<Event>();
    if (shared && !(event->shared = SharedEvent::create())) return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = context;
    event->flags = flags;
    event->handle = tables().events.add(event);
    *handle = static_cast<CUevent>(event->handle);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
    if (CUresult status = check_initialized()) return status;
    return tables().events.remove(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

namespace {

CUresult event_state(CUevent handle, std::shared_ptr<Context> &context, std::shared_ptr<EventState> &state,
                     std::shared_ptr<SharedEvent> *shared = nullptr) {
    if (CUresult status = check_initialized()) return status;
    std::shared_ptr<Event> event = tables().events.get(handle);
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    context = event->context.lock();
    if (!context) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    std::lock_guard lock(event->mutex);
    if (event->captured_graph) return CUDA_ERROR_CAPTURED_EVENT;
    state = event->last;
    if (shared != nullptr) *shared = event->shared;
    return static_cast<CUresult>(context->sticky_error.load());
}

}  // namespace

CUresult cuEventQuery(CUevent handle) {
    std::shared_ptr<Context> context;
    std::shared_ptr<EventState> state;
    std::shared_ptr<SharedEvent> shared;
    if (CUresult status = event_state(handle, context, state, &shared)) return status;
    if (CUresult status = check_unsafe_call()) return status;
    if (shared) return shared->done(shared->last_record()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    return !state || host_query(state->fence()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
    std::shared_ptr<Context> context;
    std::shared_ptr<EventState> state;
    std::shared_ptr<SharedEvent> shared;
    if (CUresult status = event_state(handle, context, state, &shared)) return status;
    if (on_worker_thread()) return CUDA_ERROR_NOT_PERMITTED;
    if (CUresult status = check_unsafe_call()) return status;
    if (shared) shared->wait(shared->last_record(), *context);
    if (state) wait_on_host(state->fence());
    flush_printf(*context);
    return static_cast<CUresult>(context->sticky_error.load());
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle) {
    if (CUresult status = check_initialized()) return status;
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
    if (!host_query(states[0]->fence()) || !host_query(states[1]->fence())) return CUDA_ERROR_NOT_READY;
    double ns = static_cast<double>(states[1]->time_ns) - static_cast<double>(states[0]->time_ns);
    *milliseconds = static_cast<float>(ns / 1e6);
    return CUDA_SUCCESS;
}

extern "C" {
// For tools: gets the virtual time in ns at which an event was last recorded, which cuEventElapsedTime rounds to 24 bits.
// Returns NOT_READY if it is not recorded yet, NOT_SUPPORTED on the real clock.
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
