// Executes operations in a worker thread: kernels, copies, memsets, host functions, memory operations, graphs.
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>

#include "driver/graph.h"
#include "sanitizer/hooks.h"

namespace cudasim::driver {
namespace {

void report_fault(Context &context, const Fault &fault) {
    {
        std::lock_guard lock(context.fault_mutex);
        if (context.sticky_error == 0) context.fault = fault;
        int none = 0;
        context.sticky_error.compare_exchange_strong(none, fault.code);
    }
    std::string where;
    if (fault.source_line != 0) where = " " + fault.file + ":" + std::to_string(fault.source_line);
    if (fault.patch_offset) where = " in the patch " + fault.patch;
    if (fault.line != 0) where += " PTX line " + std::to_string(fault.line);
    if (fault.code == CUDA_ERROR_ILLEGAL_ADDRESS)
        log_line("kernel %s: illegal address 0x%llx block (%u,%u,%u) thread (%u,%u,%u)%s",
                 fault.kernel.c_str(), static_cast<unsigned long long>(fault.address), fault.block[0],
                 fault.block[1], fault.block[2], fault.thread[0], fault.thread[1], fault.thread[2],
                 where.c_str());
    else log_line("%s", fault.message.c_str());
}

// Runs a kernel. Takes and returns virtual times: its start and its end.
uint64_t run_kernel(Context &context, const KernelLaunch &launch, uint64_t start) {
    if (!launch.module) return start;
    LaunchDescription description;
    description.environment = &context.environment;
    description.image = launch.function->image.get();
    description.kernel = launch.function->index;
    description.variables = launch.module->variables.data();
    description.parameters = launch.parameters.data();
    description.grid[0] = launch.grid.x;
    description.grid[1] = launch.grid.y;
    description.grid[2] = launch.grid.z;
    description.block[0] = launch.block.x;
    description.block[1] = launch.block.y;
    description.block[2] = launch.block.z;
    description.cluster[0] = launch.cluster.x;
    description.cluster[1] = launch.cluster.y;
    description.cluster[2] = launch.cluster.z;
    description.dynamic_shared = launch.shared_bytes;
    description.grid_id = context.next_grid++;
    {
        std::lock_guard lock(context.limits_mutex);
        auto limit = context.limits.find(CU_LIMIT_STACK_SIZE);
        if (limit != context.limits.end()) description.stack_limit = static_cast<uint32_t>(limit->second);
        limit = context.limits.find(CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT);
        if (limit != context.limits.end()) description.pending_limit = static_cast<uint32_t>(limit->second);
    }
    description.hostile = config().hostile;
    description.seed = config().seed + description.grid_id * 0x9e3779b97f4a7c15u;
    description.cooperative = launch.cooperative;
    description.cancel = &context.cancel;
    description.start_ns = start;
    std::shared_ptr<const sanitizer::Patched> patched;
    if (launch.module->sanitizer->patched_now) sanitizer::use_patches(launch, description, patched);
    uint64_t duration = 0;
    Fault fault = run(description, &duration);
    if (patched) sanitizer::locate_fault(*patched, fault);
    if (fault) report_fault(context, fault);
    return start + duration;
}

// Hostile mode: delays work at random, so that streams overlap in different ways.
void delay_randomly() {
    static std::atomic<uint64_t> workers{0};
    thread_local uint64_t state = (config().seed + ++workers) * 0x9e3779b97f4a7c15u;
    state = state * 6364136223846793005u + 1442695040888963407u;
    if (state >> 61 != 0) return;  // one in eight
    timespec pause = {0, static_cast<long>((state >> 32) % 200000)};
    nanosleep(&pause, nullptr);
}

void copy_rows(const Copy &copy) {
    for (size_t z = 0; z < copy.depth; z++)
        for (size_t y = 0; y < copy.height; y++)
            memmove(
                reinterpret_cast<void *>(copy.destination + z * copy.destination_slice +
                                         y * copy.destination_pitch),
                reinterpret_cast<const void *>(copy.source + z * copy.source_slice + y * copy.source_pitch),
                copy.width);
}

// Zeroes a large range of device memory by discarding its pages, which then read as zeros. Returns false if that is not
// possible.
bool discard_to_zero(uint64_t at, size_t size) {
    constexpr size_t kPage = 4096, kMinBytes = size_t{1} << 20;
    if (size < kMinBytes) return false;
    auto found = Memory::instance().find(at);
    if (!found || found->kind != MemoryKind::device || found->file >= 0 || found->mapping > at ||
        at + size > found->mapping + found->mapped)
        return false;
    uint64_t first = (at + kPage - 1) & ~(kPage - 1), last = (at + size) & ~(kPage - 1);
    memset(reinterpret_cast<void *>(at), 0, first - at);
    memset(reinterpret_cast<void *>(last), 0, at + size - last);
    return madvise(reinterpret_cast<void *>(first), last - first, MADV_DONTNEED) == 0;
}

// Stream memory operations: cuStreamWriteValue, cuStreamWaitValue.

bool wait_is_over(uint64_t now, uint64_t value, unsigned flags, bool wide) {
    uint64_t mask = wide ? ~uint64_t{0} : 0xffffffff;
    switch (flags & 3) {
        case CU_STREAM_WAIT_VALUE_EQ: return ((now ^ value) & mask) == 0;
        case CU_STREAM_WAIT_VALUE_AND: return (now & value & mask) != 0;
        case CU_STREAM_WAIT_VALUE_NOR: return (~(now | value) & mask) != 0;
        default:  // CU_STREAM_WAIT_VALUE_GEQ compares the sign of the difference
            return wide
                       ? static_cast<int64_t>(now - value) >= 0
                       : static_cast<int32_t>(static_cast<uint32_t>(now) - static_cast<uint32_t>(value)) >= 0;
    }
}

// The values that streams wrote, with their virtual times. So a wait ends at the same virtual time in every run, no matter
// when the worker checks the value.
class WrittenValues {
  public:
    void write(uint64_t address, uint64_t time, uint64_t before, uint64_t value) {
        std::lock_guard lock(mutex_);
        std::vector<Value> &values = values_[address];
        if (values.empty()) values.push_back({0, before});
        auto later = [](uint64_t at, const Value &other) { return at < other.time; };
        values.insert(std::upper_bound(values.begin(), values.end(), time, later), {time, value});
        if (values.size() > kMaxValues) values.erase(values.begin());
    }
    // Returns the end of a wait that starts at `time`. Values from kernels and from the host have no known time.
    uint64_t end_of_wait(uint64_t address, uint64_t time, uint64_t value, unsigned flags, bool wide) {
        std::lock_guard lock(mutex_);
        bool met = true;
        for (const Value &one : values_[address]) {
            if (one.time > time && met) break;
            met = wait_is_over(one.value, value, flags, wide);
            if (one.time > time && met) return one.time;
        }
        return time;
    }

  private:
    struct Value {
        uint64_t time, value;
    };
    static constexpr size_t kMaxValues = 256;  // per address
    std::mutex mutex_;
    std::unordered_map<uint64_t, std::vector<Value>> values_;
};

WrittenValues &written_values() {
    static WrittenValues *const instance = new WrittenValues();
    return *instance;
}

template <class T>
void write_value(uint64_t address, T value, uint64_t time) {
    T before = __atomic_exchange_n(reinterpret_cast<T *>(address), value, __ATOMIC_SEQ_CST);
    if (virtual_clock()) written_values().write(address, time, before, value);
}

template <class T>
uint64_t wait_for_value(const Context &context, uint64_t address, T value, unsigned flags, uint64_t time) {
    constexpr bool wide = sizeof(T) == 8;
    while (!wait_is_over(__atomic_load_n(reinterpret_cast<T *>(address), __ATOMIC_SEQ_CST), value, flags,
                         wide)) {
        if (context.sticky_error != 0 || context.destroyed) return time;
        timespec pause = {0, 20000};
        nanosleep(&pause, nullptr);
    }
    return virtual_clock() ? written_values().end_of_wait(address, time, value, flags, wide) : time;
}

uint64_t memory_operations(const Context &context, const std::vector<CUstreamBatchMemOpParams> &operations,
                           uint64_t time) {
    for (const CUstreamBatchMemOpParams &one : operations) {
        const auto &write = one.writeValue;
        const auto &wait = one.waitValue;
        switch (one.operation) {
            case CU_STREAM_MEM_OP_WRITE_VALUE_32:
                write_value<uint32_t>(write.address, write.value, time);
                break;
            case CU_STREAM_MEM_OP_WRITE_VALUE_64:
                write_value<uint64_t>(write.address, write.value64, time);
                break;
            case CU_STREAM_MEM_OP_WAIT_VALUE_32:
                time = wait_for_value<uint32_t>(context, wait.address, wait.value, wait.flags, time);
                break;
            case CU_STREAM_MEM_OP_WAIT_VALUE_64:
                time = wait_for_value<uint64_t>(context, wait.address, wait.value64, wait.flags, time);
                break;
            default: break;  // flushes and barriers: all operations are in order anyway
        }
    }
    return time;
}

uint64_t divide_up(uint64_t bytes, uint64_t by) { return (bytes + by - 1) / by; }

template <class T>
void memset_rows(const Memset &memset) {
    for (size_t y = 0; y < memset.height; y++) {
        if (memset.value == 0 &&
            discard_to_zero(memset.destination + y * memset.pitch, memset.width * sizeof(T)))
            continue;
        T *row = reinterpret_cast<T *>(memset.destination + y * memset.pitch);
        std::fill(row, row + memset.width, static_cast<T>(memset.value));
    }
}

uint64_t execute_graph(Context &context, const Graph &graph, uint64_t start);

// Runs the body that the value of a conditional node chooses, if any. Repeats the body of a loop while the value is not 0.
uint64_t execute_conditional(Context &context, const Operation &operation, uint64_t start) {
    const std::vector<std::shared_ptr<Graph>> &bodies = operation.children;
    const auto stopped = [&context] { return context.sticky_error != 0 || context.cancel; };
    if (operation.conditional_type == CU_GRAPH_COND_TYPE_WHILE) {
        while (operation.conditional->value != 0 && !stopped())
            start = execute_graph(context, *bodies.front(), start);
        return start;
    }
    const uint32_t value = operation.conditional->value;
    const bool chooses = operation.conditional_type == CU_GRAPH_COND_TYPE_SWITCH;
    const size_t body = chooses ? value : value != 0 ? 0 : 1;
    return body < bodies.size() && !stopped() ? execute_graph(context, *bodies[body], start) : start;
}

}  // namespace

uint64_t execute(Context &context, const Operation &operation, uint64_t start) {
    if (config().hostile) delay_randomly();
    bool broken = context.sticky_error != 0;
    switch (operation.type) {
        case CU_GRAPH_NODE_TYPE_KERNEL: return broken ? start : run_kernel(context, operation.kernel, start);
        case CU_GRAPH_NODE_TYPE_MEMCPY:
            if (broken) break;
            copy_rows(operation.copy);
            return start + divide_up(operation.copy.bytes(), kCopyBytesPerNs);
        case CU_GRAPH_NODE_TYPE_MEMSET: {
            if (broken) break;
            const Memset &memset = operation.memset;
            if (memset.element_size == 1) memset_rows<uint8_t>(memset);
            if (memset.element_size == 2) memset_rows<uint16_t>(memset);
            if (memset.element_size == 4) memset_rows<uint32_t>(memset);
            return start + divide_up(memset.width * memset.height * memset.element_size, kMemsetBytesPerNs);
        }
        case CU_GRAPH_NODE_TYPE_HOST: {
            WorkerTime now(start);
            if (operation.host.callback != nullptr)
                operation.host.callback(operation.host.stream,
                                        static_cast<CUresult>(context.sticky_error.load()),
                                        operation.host.data);
            else if (!broken) operation.host.function(operation.host.data);
            break;
        }
        case CU_GRAPH_NODE_TYPE_EVENT_RECORD: {
            EventState &state = *operation.recording;
            state.time_ns = virtual_clock() ? start : now_ns();
            if (!state.of_stream) state.completion->finish(start);
            break;
        }
        case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
            if (!operation.recording) break;  // never recorded
            operation.recording->fence().wait();
            return std::max(start, operation.recording->fence().end());
        case CU_GRAPH_NODE_TYPE_GRAPH:
            if (operation.stream_only) operation.stream_only();
            for (const std::shared_ptr<Graph> &child : operation.children)
                return execute_graph(context, *child, start);
            break;
        case CU_GRAPH_NODE_TYPE_CONDITIONAL: return execute_conditional(context, operation, start);
        case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
            if (!broken) return memory_operations(context, operation.memory, start);
            break;
        default:
            if (operation.stream_only) operation.stream_only();
            break;
    }
    return start;
}

namespace {

// Executes the nodes of an executable graph. Nodes in different queues run in parallel.
uint64_t execute_graph(Context &context, const Graph &graph, uint64_t start) {
    std::vector<uint64_t> ends(graph.nodes.size(), start);
    auto run = [&](size_t index) {
        const GraphNode &node = *graph.nodes[index];
        uint64_t begin = start;
        for (const NodePointer &dependency : node.dependencies)
            begin = std::max(begin, ends[dependency->position]);
        ends[index] = node.enabled ? execute(context, node.operation, begin) : begin;
    };
    if (graph.queues.empty()) {
        for (size_t i = 0; i < graph.nodes.size(); i++) run(i);
    } else {
        std::vector<Fence> fences(graph.nodes.size());
        for (const NodePointer &node : graph.nodes) {
            std::vector<Fence> wait_for;
            for (const NodePointer &dependency : node->dependencies)
                if (dependency->queue != node->queue) wait_for.push_back(fences[dependency->position]);
            auto work = [&run, index = node->position](uint64_t) {
                run(index);
                return uint64_t{0};
            };
            fences[node->position] = graph.queues[node->queue]->submit(std::move(wait_for), std::move(work));
        }
        for (const Fence &fence : fences) fence.wait();
    }
    return ends.empty() ? start : *std::max_element(ends.begin(), ends.end());
}

}  // namespace

}  // namespace cudasim::driver
