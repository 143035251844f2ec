#include "copies/graph.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <unistd.h>
#include <unordered_map>

#include "attachment.h"
#include "copies/launch.h"
#include "copies/patched.h"
#include "copies/preexisting.h"
#include "copies/sidecar.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "driver/objects.h"
#include "driver/stream.h"
#include "log/clock.h"
#include "log/host_program.h"
#include "log/ranges.h"
#include "log/stack.h"

namespace gpubpf {

namespace {

constexpr size_t kMostEdges = 65536;  // edges of one graph that are logged
constexpr int kDeepest = 32;          // nesting of child graphs

struct KernelNode {
    CUgraphNode handle = nullptr;  // handle in the walked graph
    Function function{nullptr, nullptr};
    uint32_t slot = kNoSlot, outcome = kNotMatched;
    LaunchShape shape{};
    Choice choice;  // valid if `outcome` is kInstrumented
    bool enabled = true;
    bool in_body = false;  // the GPU decides how often it runs
};

struct Part {  // range of kernel nodes: those of a child graph
    uint32_t first, count;
};

// The contents of a graph. Kernel nodes are in an order that respects their dependencies. Those of child
// graphs take the place of their node.
struct Walk {
    std::vector<KernelNode> kernels;
    std::vector<KernelNode> bodies;  // kernel nodes in bodies of conditional nodes, at any depth
    bool conditional = false;        // has conditional nodes
    std::unordered_map<CUgraphNode, uint32_t> index;  // kernel nodes outside child graphs → number
    std::unordered_map<CUgraphNode, Part> children;
    std::vector<std::pair<uint32_t, uint32_t>> edges;
    uint32_t others = 0;
    bool programmatic = false;  // a kernel may begin before one that it depends on has ended
    bool whole = true;          // the number of executions of each kernel is known
};

struct Exec {
    // Guards the members below and the executable graph, which no other thread may change meanwhile.
    std::recursive_mutex lock;
    uint64_t serial = 0, replays = 0;
    Context *context = nullptr;
    bool swaps = false;  // its kernels may be replaced by copies
    CUdeviceptr cell = 0;
    Walk walk;
    CUevent last = nullptr;   // the end of the last launch
    uint32_t last_queue = 0;  // the queue of that launch; 0 before the first launch
    bool swapped = false;     // has copies
    // While it has copies: the same graph with the program's kernels. Null: unknown.
    CUgraph own = nullptr;
    GraphRecord record;     // if it has patches that read the launch's number
    bool numbered = false;  // the record has the present nodes
};

struct Execs {
    std::mutex lock;  // guards the members below
    std::unordered_map<CUgraphExec, std::shared_ptr<Exec>> all;
    uint64_t serials = 0;
    // The bodies of each conditional node. The driver reports them only when the node is made.
    std::unordered_map<CUgraphNode, std::vector<CUgraph>> bodies;
};

AttachmentState<Execs> all_execs;
Execs &execs() { return *all_execs; }

std::shared_ptr<Exec> find(CUgraphExec handle) {
    std::lock_guard<std::mutex> hold(execs().lock);
    auto it = execs().all.find(handle);
    return it == execs().all.end() ? nullptr : it->second;
}

std::vector<CUgraph> bodies_of(CUgraphNode node) {
    std::lock_guard<std::mutex> hold(execs().lock);
    auto it = execs().bodies.find(node);
    return it == execs().bodies.end() ? std::vector<CUgraph>() : it->second;
}

Copy *copy_with(CUfunction function) {
    for (Context *c : registry().all_contexts()) {
        std::lock_guard<std::mutex> hold(c->memory);
        for (Copy *copy : c->copies)
            if (copy->function == function || copy->limited == function) return copy;
    }
    return nullptr;
}

// Finds a kernel by name, for a handle that the driver returns but the program never saw. The kernel is null if
// the name is unknown or not unique.
Function named(const char *name, Context *context) {
    Function found{nullptr, context};
    std::lock_guard<std::mutex> hold(registry().lock);
    auto look = [&](const Module *m) {
        auto it = m->kernels.find(name);
        if (it == m->kernels.end() || it->second == found.kernel) return true;
        bool first = !found.kernel;
        found.kernel = it->second;
        return first;
    };
    for (auto &m : registry().modules)
        if (!look(m.second)) return {nullptr, context};
    for (auto &l : registry().libraries)
        if (!look(l.second)) return {nullptr, context};
    return found;
}

Function function_of(const CUDA_KERNEL_NODE_PARAMS &p, Context *context) {
    const void *handle = p.func ? static_cast<const void *>(p.func) : static_cast<const void *>(p.kern);
    if (p.ctx)
        if (Context *other = registry().context(p.ctx)) context = other;
    if (const Function *known = registry().functions.find(handle))
        return {known->kernel, known->context ? known->context : context};
    if (Copy *copy = p.func ? copy_with(p.func) : nullptr) return {copy->kernel, copy->context};
    if (const Function *unseen = identify_handle(handle, context))
        return {unseen->kernel, unseen->context ? unseen->context : context};
    const char *name = nullptr;
    bool has_name =
        p.func ? driver.cuFuncGetName && driver.cuFuncGetName(&name, p.func) == CUDA_SUCCESS
               : p.kern && driver.cuKernelGetName && driver.cuKernelGetName(&name, p.kern) == CUDA_SUCCESS;
    return has_name && name ? named(name, context) : Function{nullptr, context};
}

// `node` has the kernel's attributes; null without attributes.
KernelNode describe(const CUDA_KERNEL_NODE_PARAMS &p, CUgraphNode node, Context *context) {
    KernelNode k;
    k.handle = node;
    k.function = function_of(p, context);
    if (k.function.kernel) k.slot = k.function.kernel->slot_index;
    k.shape = {{p.gridDimX, p.gridDimY, p.gridDimZ},
               {p.blockDimX, p.blockDimY, p.blockDimZ},
               p.sharedMemBytes,
               {},
               false,
               {0, 0, 0},
               nullptr};
    CUkernelNodeAttrValue value{};
    if (node && driver.cuGraphKernelNodeGetAttribute &&
        driver.cuGraphKernelNodeGetAttribute(node, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, &value) ==
            CUDA_SUCCESS &&
        value.clusterDim.x * value.clusterDim.y * value.clusterDim.z > 1) {
        k.shape.cluster = true;
        k.shape.cluster_size[0] = value.clusterDim.x;
        k.shape.cluster_size[1] = value.clusterDim.y;
        k.shape.cluster_size[2] = value.clusterDim.z;
    }
    return k;
}

// --- walking ---

using Ends = std::vector<uint32_t>;  // kernel nodes that later nodes depend on

void join(Ends &to, const Ends &more) {
    Ends both;
    std::set_union(to.begin(), to.end(), more.begin(), more.end(), std::back_inserter(both));
    to.swap(both);
}

// Returns the last nodes of the graph. If the driver does not describe a node, the walk is not `whole`. in_body: the graph is in the
// body of a conditional node.
Ends walk(CUgraph graph, Context *context, const Ends &before, int level, Walk &w, bool in_body = false) {
    size_t n = 0, m = 0;
    std::vector<CUgraphNode> nodes, from, to;
    auto listed = [&] {
        if (driver.cuGraphGetNodes(graph, nullptr, &n) != CUDA_SUCCESS) return false;
        nodes.resize(n);
        if (n && driver.cuGraphGetNodes(graph, nodes.data(), &n) != CUDA_SUCCESS) return false;
        if (driver.cuGraphGetEdges_v2(graph, nullptr, nullptr, nullptr, &m) != CUDA_SUCCESS) return false;
        from.resize(m);
        to.resize(m);
        std::vector<CUgraphEdgeData> data(m);
        if (m && driver.cuGraphGetEdges_v2(graph, from.data(), to.data(), data.data(), &m) != CUDA_SUCCESS)
            return false;
        w.programmatic |= std::any_of(data.begin(), data.end(), [](const CUgraphEdgeData &edge) {
            return edge.type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
        });
        return true;
    };
    if (level > kDeepest || !listed()) {
        w.whole = false;
        return before;
    }
    std::unordered_map<CUgraphNode, size_t> place;
    for (size_t i = 0; i < nodes.size(); ++i) place[nodes[i]] = i;
    std::vector<std::vector<size_t>> after(nodes.size());
    std::vector<size_t> open(nodes.size());  // number of dependencies that were not visited yet
    for (size_t i = 0; i < from.size(); ++i) {
        auto a = place.find(from[i]), b = place.find(to[i]);
        if (a == place.end() || b == place.end()) continue;
        after[a->second].push_back(b->second);
        ++open[b->second];
    }
    std::vector<Ends> ends(nodes.size());  // until a node is visited: of its predecessors; then: its own
    std::vector<bool> has_before(nodes.size());
    std::vector<size_t> order;
    for (size_t i = 0; i < nodes.size(); ++i)
        if (!open[i]) order.push_back(i);
    Ends all;
    for (size_t at = 0; at < order.size(); ++at) {
        size_t i = order[at];
        if (!has_before[i]) ends[i] = before;
        CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
        CUDA_KERNEL_NODE_PARAMS params{};
        CUgraph child = nullptr;
        bool known = driver.cuGraphNodeGetType(nodes[i], &type) == CUDA_SUCCESS;
        if (known && type == CU_GRAPH_NODE_TYPE_KERNEL) {
            known = driver.cuGraphKernelNodeGetParams_v2(nodes[i], &params) == CUDA_SUCCESS;
            KernelNode kernel = known ? describe(params, nodes[i], context) : KernelNode();
            kernel.in_body = in_body;
            if (in_body) {
                w.bodies.push_back(kernel);
            } else {
                auto number = static_cast<uint32_t>(w.kernels.size());
                w.kernels.push_back(kernel);
                if (!level) w.index[nodes[i]] = number;
                for (uint32_t e : ends[i])
                    if (w.edges.size() < kMostEdges) w.edges.emplace_back(e, number);
                ends[i] = {number};
            }
        } else if (known && type == CU_GRAPH_NODE_TYPE_GRAPH) {
            auto first = static_cast<uint32_t>(w.kernels.size());
            known = driver.cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS;
            if (known) ends[i] = walk(child, context, ends[i], level + 1, w, in_body);
            if (!level) w.children[nodes[i]] = {first, static_cast<uint32_t>(w.kernels.size()) - first};
        } else {
            ++w.others;
            if (type == CU_GRAPH_NODE_TYPE_CONDITIONAL) {
                const std::vector<CUgraph> bodies = bodies_of(nodes[i]);
                known = !bodies.empty();  // else it was made before the attachment
                for (CUgraph body : bodies) walk(body, context, {}, level + 1, w, true);
                w.conditional = true;
            }
        }
        w.whole = w.whole && known;
        for (size_t next : after[i]) {
            join(ends[next], ends[i]);
            has_before[next] = true;
            if (!--open[next]) order.push_back(next);
        }
        if (after[i].empty()) join(all, ends[i]);
        if (!after[i].empty()) Ends().swap(ends[i]);
    }
    return nodes.empty() ? before : all;
}

bool can_walk() {
    return driver.cuGraphGetNodes && driver.cuGraphGetEdges_v2 && driver.cuGraphNodeGetType &&
           driver.cuGraphChildGraphNodeGetGraph && driver.cuGraphKernelNodeGetParams_v2;
}

bool can_swap() {
    return driver.cuGraphKernelNodeSetParams_v2 && driver.cuGraphClone && driver.cuGraphNodeFindInClone &&
           driver.cuGraphDestroy && driver.cuGraphExecUpdate_v2 && driver.cuEventCreate &&
           driver.cuEventRecord && driver.cuStreamWaitEvent &&
           (driver.cuStreamWriteValue64_v2 || driver.cuMemsetD32Async);
}

// --- copies ---

bool has_copies(const KernelNode &k) {
    return k.function.kernel && k.function.kernel->copies.load(std::memory_order_acquire);
}

// Returns the outcome for the case that no copy is found.
uint32_t outcome_of_original(const Exec &exec, const KernelNode &k) {
    if (has_copies(k) || (!exec.swaps && k.function.kernel && k.function.kernel->later))
        return outcome_of(kCapture);
    return k.function.kernel && k.function.kernel->refused ? outcome_of(kRefused) : uint32_t(kNotMatched);
}

// Gets the copies of kernels that were not launched before: of large modules, and those that may soon be ready.
void load_copies_for(const Exec &exec, const std::vector<KernelNode> &nodes) {
    if (!exec.swaps) return;
    std::vector<Kernel *> kernels;
    const auto lacks_copy = [&](const KernelNode &k) {
        const Kernel *kernel = k.function.kernel;
        return kernel && !kernel->refused && k.function.context == exec.context &&
               !copy_in(*kernel, exec.context);
    };
    for (const KernelNode &k : nodes) {
        Kernel *kernel = k.function.kernel;
        if (lacks_copy(k) && kernel->awaited) await_copies(*kernel, exec.context);
        if (lacks_copy(k) && kernel->later &&
            std::find(kernels.begin(), kernels.end(), kernel) == kernels.end())
            kernels.push_back(kernel);
    }
    if (!kernels.empty()) load_copies(kernels, exec.context);
}

// Looks for a copy, and makes `params` launch it as kernel node `number`. `swap` owns the bytes.
bool swap_params(const Exec &exec, KernelNode &k, uint32_t number, CUDA_KERNEL_NODE_PARAMS &params,
                 Swap &swap) {
    if (!exec.swaps || !exec.cell || !has_copies(k)) return false;
    if (k.function.context != exec.context) return false;  // the cell is not in that context
    CUlaunchConfig config{};                               // for the occupancy of its clusters
    CUlaunchAttribute cluster{};
    if (k.shape.cluster) {
        config = {k.shape.grid[0],  k.shape.grid[1], k.shape.grid[2], k.shape.block[0], k.shape.block[1],
                  k.shape.block[2], k.shape.shared,  nullptr,         &cluster,         1};
        cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        cluster.value.clusterDim.x = k.shape.cluster_size[0];
        cluster.value.clusterDim.y = k.shape.cluster_size[1];
        cluster.value.clusterDim.z = k.shape.cluster_size[2];
        k.shape.config = &config;
    }
    const Copy *copy = copy_in(*k.function.kernel, exec.context);
    if (k.in_body && copy && copy->layout->executions == kNoField) k.outcome = outcome_of(kConditionalNode);
    else k.outcome = choose(k.function, exec.context, k.shape, k.choice);
    k.shape.config = nullptr;
    if (k.outcome != kInstrumented) return false;
    if (k.in_body && !count_on_gpu(k.choice)) {
        k.outcome = outcome_of(kMapTooSmall);
        return false;
    }
    void **extra = params.kernelParams ? nullptr : params.extra;
    if (!build(k.choice, number, exec.cell, params.kernelParams, extra, swap)) {
        k.outcome = outcome_of(kCopyFailed);
        return false;
    }
    params.func = swap.function;
    params.kern = nullptr;
    params.ctx = nullptr;
    params.kernelParams = swap.parameters;
    params.extra = swap.extra;
    return true;
}

// The program's own parameters of a kernel node. The driver's description of them is valid only until other parameters are set.
struct OwnParams {
    CUgraphNode node;
    CUDA_KERNEL_NODE_PARAMS params;
    std::vector<std::vector<uint8_t>> values;
    std::vector<void *> pointers;  // kernelParams or extra
    size_t size = 0;               // in `extra`

    OwnParams(CUgraphNode of, const CUDA_KERNEL_NODE_PARAMS &given, const std::vector<uint32_t> &sizes)
        : node(of), params(given) {
        const auto keep = [this](const void *from, size_t bytes) {
            auto begin = static_cast<const uint8_t *>(from);
            values.emplace_back(begin, begin + bytes);
            return values.back().data();
        };
        if (given.kernelParams) {
            for (size_t i = 0; i < sizes.size(); ++i)
                pointers.push_back(keep(given.kernelParams[i], sizes[i]));
            params.kernelParams = pointers.data();
            return;
        }
        const void *buffer = nullptr;
        for (void **e = given.extra; e && *e != CU_LAUNCH_PARAM_END; e += 2)
            if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = e[1];
            else if (*e == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *static_cast<size_t *>(e[1]);
        if (!buffer) return;
        pointers = {CU_LAUNCH_PARAM_BUFFER_POINTER, keep(buffer, size), CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                    CU_LAUNCH_PARAM_END};
        params.extra = pointers.data();
    }
    OwnParams(const OwnParams &) = delete;
    OwnParams &operator=(const OwnParams &) = delete;
};
using AllOwnParams = std::vector<std::unique_ptr<OwnParams>>;

// Puts a copy into a node of a graph. Returns whether it did; otherwise, the outcome says why. `own`: gets the node's parameters.
bool swap_node(const Exec &exec, KernelNode &k, uint32_t number, AllOwnParams *own) {
    k.outcome = outcome_of_original(exec, k);
    CUDA_KERNEL_NODE_PARAMS params{};
    if (!k.handle || driver.cuGraphKernelNodeGetParams_v2(k.handle, &params) != CUDA_SUCCESS) return false;
    const CUDA_KERNEL_NODE_PARAMS before = params;
    Swap swap;
    if (!swap_params(exec, k, number, params, swap)) return false;
    if (k.choice.copy->layout->patched) return true;  // it stays the program's kernel
    if (own) own->push_back(std::make_unique<OwnParams>(k.handle, before, k.choice.copy->layout->parameters));
    if (driver.cuGraphKernelNodeSetParams_v2(k.handle, &params) == CUDA_SUCCESS) return true;
    k.outcome = outcome_of(kCopyFailed);
    return false;
}

// Puts copies into a graph that belongs to the agent. Returns whether there is at least one. The number of the first kernel node is
// `first`. `own`: the graph is the program's; gets the parameters to put back.
bool swap_nodes(const Exec &exec, Walk &w, uint32_t first, AllOwnParams *own = nullptr) {
    bool any = false;
    for (KernelNode &k : w.kernels) any |= swap_node(exec, k, first++, own);
    for (KernelNode &k : w.bodies) any |= swap_node(exec, k, 0, own);  // no program there reads a number
    return any;
}

void originals(const Exec &exec, Walk &w) {
    for (KernelNode &k : w.kernels) k.outcome = outcome_of_original(exec, k);
    for (KernelNode &k : w.bodies) k.outcome = outcome_of_original(exec, k);
}

// The driver cannot clone graphs with conditional nodes. So this puts the copies into the program's graph, updates the executable graph
// from it, and puts the program's kernels back, all within a call that uses this graph. Returns whether copies run.
bool swap_in_place(const Exec &exec, CUgraphExec handle, CUgraph graph, Walk &w) {
    AllOwnParams own;
    CUgraphExecUpdateResultInfo info{};
    const bool any = swap_nodes(exec, w, 0, &own);
    const bool updated = any && driver.cuGraphExecUpdate_v2(handle, graph, &info) == CUDA_SUCCESS;
    for (const auto &before : own) driver.cuGraphKernelNodeSetParams_v2(before->node, &before->params);
    for (auto *nodes : {&w.kernels, &w.bodies})
        for (KernelNode &k : *nodes)
            if (!updated && k.outcome == kInstrumented) k.outcome = outcome_of_original(exec, k);
    return updated;
}

// Whether the user did not ask for the node's kernel. This is unknown until the tool has answered about the kernel's module.
bool is_unwanted(const KernelNode &k) {
    if (k.outcome != kNotMatched || agent.config.match_all) return false;
    std::lock_guard<std::mutex> hold(registry().lock);
    return k.function.kernel->module->answer != nullptr;
}

// Whether the number of executions of each matched kernel is known.
bool knows_executions(const Walk &w) {
    return w.whole && std::all_of(w.bodies.begin(), w.bodies.end(), [](const KernelNode &k) {
               return k.function.kernel && (k.outcome == kInstrumented || is_unwanted(k));
           });
}

CUdeviceptr take_cell(Context &context) {
    for (bool again = false;; again = true) {
        {
            std::lock_guard<std::mutex> hold(context.memory);
            if (!context.cells.empty()) {
                CUdeviceptr cell = context.cells.front();
                context.cells.pop_front();
                return cell;
            }
        }
        if (again) return 0;
        prepare_cells(context);
    }
}

// --- records ---

Record new_record(Kind kind, const Exec &exec) {
    Record r;
    r.kind = kind;
    r.id = other_id();
    r.thread = thread_id();
    r.call_ns = r.return_ns = now_ns();
    r.context = exec.context ? exec.context->serial : 0;
    return r;
}

template <typename Part>  // of a node or of a kernel
void fill(Part &part, const Exec &exec, const KernelNode &k, uint32_t number) {
    part.slot = k.slot;
    part.outcome = k.outcome;
    memcpy(part.grid, k.shape.grid, sizeof part.grid);
    memcpy(part.block, k.shape.block, sizeof part.block);
    part.shared = k.shape.shared;
    part.node = number;
    part.exec = exec.serial;
}

void log_node(const Exec &exec, uint32_t number) {
    const KernelNode &k = exec.walk.kernels[number];
    Record r = new_record(Kind::Node, exec);
    fill(r.node, exec, k, number);
    r.node.handle = reinterpret_cast<uint64_t>(k.handle);
    oplog.put(r);
}

void log_nodes(const Exec &exec) {
    if (!oplog.on()) return;
    for (uint32_t i = 0; i < exec.walk.kernels.size(); ++i) log_node(exec, i);
    for (const auto &e : exec.walk.edges) {
        Record r = new_record(Kind::Edge, exec);
        r.edge = {exec.serial, e.first, e.second};
        oplog.put(r);
    }
}

// Whether a path of dependencies leads from one kernel node to another.
bool leads(const std::vector<std::vector<uint32_t>> &after, uint32_t from, uint32_t to) {
    std::vector<uint32_t> open{from};
    std::vector<bool> seen(to + 1);
    while (!open.empty()) {
        const uint32_t at = open.back();
        open.pop_back();
        if (at == to) return true;
        for (uint32_t next : after[at])
            if (next <= to && !seen[next]) {
                seen[next] = true;
                open.push_back(next);
            }
    }
    return false;
}

// Makes the patches in the graph's kernels know the numbers of their nodes. Patches see only the kernel and its shape. So nodes that
// have these in common and do not run one after the other are not measured.
void number_nodes(Exec &exec) {
    Walk &w = exec.walk;
    exec.numbered = true;
    std::map<const Instance *, std::vector<uint32_t>> alike;
    for (uint32_t i = 0; i < w.kernels.size(); ++i) {
        const KernelNode &k = w.kernels[i];
        const bool measured = k.outcome == kInstrumented || k.outcome == outcome_of(kAlikeNodes);
        if (k.enabled && measured && k.choice.copy->layout->numbered) alike[k.choice.instance].push_back(i);
    }
    if (alike.empty()) return;
    std::vector<std::vector<uint32_t>> after(w.kernels.size());
    for (const auto &[from, to] : w.edges) after[from].push_back(to);
    std::vector<AlikeNodes> nodes;
    for (auto &[instance, numbers] : alike) {
        const KernelNode &first = w.kernels[numbers[0]];
        const bool in_body = std::any_of(w.bodies.begin(), w.bodies.end(), [&](const KernelNode &k) {
            return k.function.kernel == first.function.kernel &&
                   !memcmp(k.shape.grid, first.shape.grid, sizeof k.shape.grid) &&
                   !memcmp(k.shape.block, first.shape.block, sizeof k.shape.block);
        });
        bool apart = !in_body;
        if (numbers.size() > 1)
            apart = apart && !w.programmatic && driver.cuMemsetD32Async &&
                    instance->threads() <= UINT32_MAX / numbers.size();
        for (size_t i = 1; apart && i < numbers.size(); ++i) apart = leads(after, numbers[i - 1], numbers[i]);
        for (uint32_t number : numbers)
            w.kernels[number].outcome = apart ? uint32_t(kInstrumented) : outcome_of(kAlikeNodes);
        nodes.push_back({instance, apart ? numbers : std::vector<uint32_t>()});
    }
    if (write_graph(*exec.context, exec.record, exec.cell, nodes)) return;
    for (const auto &[instance, numbers] : alike)
        for (uint32_t number : numbers) w.kernels[number].outcome = outcome_of(kCopyFailed);
}

void forget_own(Exec &exec) {
    if (exec.own) driver.cuGraphDestroy(exec.own);
    exec.own = nullptr;
}

// Call this when the driver has updated a node that the walk does not know, perhaps in a child graph.
void updated_unseen(Exec &exec) {
    forget_own(exec);
    exec.walk.whole = false;
}

// Creates the event that completes when the last launch of copies has ended.
void make_event(Exec &exec) {
    if (exec.swapped && !exec.last &&
        driver.cuEventCreate(&exec.last, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        exec.last = nullptr;
}

// Puts the program's own kernels back. Call it with `exec.lock` held.
void put_back(Exec &exec, CUgraphExec handle) {
    if (!exec.swapped || !exec.own || !exec.context || exec.context->dead) return;
    Current current(*exec.context);
    CUgraphExecUpdateResultInfo info{};
    if (!current.ok() || driver.cuGraphExecUpdate_v2(handle, exec.own, &info) != CUDA_SUCCESS) return;
    exec.swapped = false;
    forget_own(exec);
}

// The program changed a kernel node's parameters. Applies them to the graph without copies, too.
void set_own(Exec &exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS &params) {
    CUgraphNode found = nullptr;
    if (exec.own && (driver.cuGraphNodeFindInClone(&found, node, exec.own) != CUDA_SUCCESS ||
                     driver.cuGraphKernelNodeSetParams_v2(found, &params) != CUDA_SUCCESS))
        forget_own(exec);
}

// The executable graph now runs the contents of `graph`. `again`: it was updated from that graph. Call it
// with `exec.lock` held.
void adopt(Exec &exec, CUgraphExec handle, CUgraph graph, bool again) {
    DriverScope scope;
    Walk own, cloned;
    walk(graph, exec.context, {}, 0, own);
    load_copies_for(exec, own.kernels);
    load_copies_for(exec, own.bodies);
    originals(exec, own);
    exec.swapped = false;
    bool wanted = exec.swaps && (std::any_of(own.kernels.begin(), own.kernels.end(), has_copies) ||
                                 std::any_of(own.bodies.begin(), own.bodies.end(), has_copies));
    CUgraph clone = nullptr;
    if (wanted && !exec.cell) exec.cell = take_cell(*exec.context);
    if (wanted && exec.cell && own.conditional) {
        exec.swapped = swap_in_place(exec, handle, graph, own);
    } else if (wanted && exec.cell && driver.cuGraphClone(&clone, graph) == CUDA_SUCCESS) {
        walk(clone, exec.context, {}, 0, cloned);
        CUgraphExecUpdateResultInfo info{};
        bool any = cloned.kernels.size() == own.kernels.size() && swap_nodes(exec, cloned, 0);
        if (any && driver.cuGraphExecUpdate_v2(handle, clone, &info) == CUDA_SUCCESS) {
            exec.swapped = true;
            // The program's node gets the number of its clone.
            std::unordered_map<CUgraphNode, uint32_t> index;
            for (const auto &node : own.index) {
                CUgraphNode found = nullptr;
                if (driver.cuGraphNodeFindInClone(&found, node.first, clone) != CUDA_SUCCESS) continue;
                auto it = cloned.index.find(found);
                if (it == cloned.index.end()) continue;
                index.insert({node.first, it->second});
                cloned.kernels[it->second].handle = node.first;
            }
            std::unordered_map<CUgraphNode, Part> children;
            for (const auto &node : own.children) {
                CUgraphNode found = nullptr;
                if (driver.cuGraphNodeFindInClone(&found, node.first, clone) != CUDA_SUCCESS) continue;
                auto it = cloned.children.find(found);
                if (it != cloned.children.end()) children.insert({node.first, it->second});
            }
            cloned.index.swap(index);
            cloned.children.swap(children);
            own = std::move(cloned);
        } else if (any) {
            for (size_t i = 0; i < own.kernels.size(); ++i)
                if (cloned.kernels[i].outcome != kInstrumented)
                    own.kernels[i].outcome = cloned.kernels[i].outcome;
        } else if (cloned.kernels.size() == own.kernels.size()) {
            for (size_t i = 0; i < own.kernels.size(); ++i)
                own.kernels[i].outcome = cloned.kernels[i].outcome;
        }
    }
    if (clone) driver.cuGraphDestroy(clone);
    forget_own(exec);
    if (exec.swapped && driver.cuGraphClone(&exec.own, graph) != CUDA_SUCCESS) exec.own = nullptr;
    if (again && own.kernels.size() == exec.walk.kernels.size()) {
        // The nodes of the source graph still identify the executable graph's nodes.
        for (const auto &node : exec.walk.index) own.index.insert(node);
        for (const auto &node : exec.walk.children) own.children.insert(node);
        for (size_t i = 0; i < own.kernels.size(); ++i) own.kernels[i].enabled = exec.walk.kernels[i].enabled;
    }
    exec.walk = std::move(own);
    make_event(exec);
    number_nodes(exec);
    log_nodes(exec);
}

void count_replay(const KernelNode &k, CUresult result) {
    auto add = [](std::atomic<uint64_t> &counter) { counter.fetch_add(1, std::memory_order_relaxed); };
    if (!k.function.kernel) return add(agent.control->unnamed);
    Slot &slot = *k.function.kernel->slot;
    add(slot.seen);
    if (k.outcome == kNotMatched) return;
    add(slot.number);
    if (k.outcome == kNotReady) return;
    if (result != CUDA_SUCCESS) return add(slot.reasons[kLaunchFailed]);
    if (k.outcome != kInstrumented) return add(slot.reasons[reason_of(k.outcome)]);
    count_launch(k.choice.function, *k.choice.copy, *k.choice.instance);
}

// Gives the kernels of the next launch their number: the first launch id minus the node's own.
void number_replay(Exec &exec, CUstream stream, uint32_t queue, uint64_t first) {
    DriverScope scope;
    // Launches of one executable graph run one after the other. But this write, in another stream, would not
    // wait for them.
    if (exec.last && exec.last_queue && exec.last_queue != queue)
        driver.cuStreamWaitEvent(stream, exec.last, 0);
    if (exec.record.counters)
        driver.cuMemsetD32Async(exec.record.at + exec.record.counters_at, 0, exec.record.counters, stream);
    if (driver.cuStreamWriteValue64_v2 &&
        driver.cuStreamWriteValue64_v2(stream, exec.cell, first, 0) == CUDA_SUCCESS)
        return;
    if (!driver.cuMemsetD32Async) return;
    driver.cuMemsetD32Async(exec.cell, static_cast<uint32_t>(first), 1, stream);
    driver.cuMemsetD32Async(exec.cell + 4, static_cast<uint32_t>(first >> 32), 1, stream);
}

}  // namespace

const Lifetime graph_lifetime = lifetime_of_attachment_state<all_execs>();

void gather_graphs(const Context &context, Leftovers &to) {
    std::vector<std::shared_ptr<Exec>> all;
    {
        std::lock_guard<std::mutex> hold(execs().lock);
        for (const auto &e : execs().all) all.push_back(e.second);
    }
    for (const auto &exec : all) {
        if (exec->context != &context) continue;
        // A thread that launches it may wait for a long time.
        std::unique_lock<std::recursive_mutex> hold(exec->lock, std::try_to_lock);
        if (!hold || exec->swapped) to.graphs = true;
        else if (exec->last) to.events.push_back(std::exchange(exec->last, nullptr));
    }
}

void graph_made(CUgraphExec handle, CUgraph graph, uint64_t flags) {
    auto exec = std::make_shared<Exec>();
    exec->context = registry().current();
    const Config &c = agent.config;
    const bool every = c.launches.first <= 1 && c.launches.second == UINT64_MAX && c.sample <= 1 &&
                       !c.budget &&                            // a graph is launched as a whole
                       (c.chosen_ranges.empty() || c.ranges);  // the log says which launches to leave out
    exec->swaps = c.graphs && every && exec->context && can_swap() &&
                  !(flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH);
    {
        std::lock_guard<std::mutex> hold(execs().lock);
        exec->serial = ++execs().serials;
    }
    {
        std::lock_guard<std::recursive_mutex> hold(exec->lock);
        exec->walk.whole = can_walk();
        if (can_walk()) adopt(*exec, handle, graph, false);
        if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
            exec->walk.whole = false;  // kernels may also launch it
    }
    std::lock_guard<std::mutex> hold(execs().lock);
    execs().all[handle] = exec;
}

void conditional_node_made(CUgraphNode node, const CUgraph *bodies, uint32_t count) {
    std::lock_guard<std::mutex> hold(execs().lock);
    execs().bodies[node].assign(bodies, bodies + count);
}

void graph_updated(CUgraphExec handle, CUgraph graph) {
    std::shared_ptr<Exec> exec = find(handle);
    if (!exec || !can_walk()) return;
    std::lock_guard<std::recursive_mutex> hold(exec->lock);
    if (agent.live) return adopt(*exec, handle, graph, true);
    DriverScope scope;
    forget_own(*exec);
    exec->swapped = false;  // the program's update put its own kernels everywhere
}

void kernel_node_set(CUgraphExec handle, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS &given) {
    std::shared_ptr<Exec> exec = find(handle);
    if (!exec) return;
    std::lock_guard<std::recursive_mutex> hold(exec->lock);
    auto it = exec->walk.index.find(node);
    DriverScope scope;
    if (it == exec->walk.index.end()) return updated_unseen(*exec);
    set_own(*exec, node, given);
    if (!agent.live) return;
    KernelNode now = describe(given, node, exec->context);
    now.enabled = exec->walk.kernels[it->second].enabled;
    load_copies_for(*exec, {now});
    now.outcome = outcome_of_original(*exec, now);
    CUDA_KERNEL_NODE_PARAMS params = given;
    Swap swap;
    if (driver.cuGraphExecKernelNodeSetParams_v2 && swap_params(*exec, now, it->second, params, swap)) {
        if (driver.cuGraphExecKernelNodeSetParams_v2(handle, node, &params) == CUDA_SUCCESS)
            exec->swapped = true;
        else now.outcome = outcome_of(kCopyFailed);
    }
    exec->walk.kernels[it->second] = now;
    exec->numbered = false;
    make_event(*exec);
    if (oplog.on()) log_node(*exec, it->second);
}

void child_node_set(CUgraphExec handle, CUgraphNode node, CUgraph child) {
    std::shared_ptr<Exec> exec = find(handle);
    if (!exec || !can_walk()) return;
    std::lock_guard<std::recursive_mutex> hold(exec->lock);
    auto it = exec->walk.children.find(node);
    DriverScope scope;
    if (it == exec->walk.children.end()) return updated_unseen(*exec);
    const Part part = it->second;
    forget_own(*exec);
    if (!agent.live) return;
    Walk own;
    walk(child, exec->context, {}, 0, own);
    if (own.conditional) exec->walk.whole = false;
    load_copies_for(*exec, own.kernels);
    originals(*exec, own);
    CUgraph clone = nullptr;
    if (exec->swaps && exec->cell && own.kernels.size() == part.count &&
        driver.cuGraphExecChildGraphNodeSetParams && driver.cuGraphClone(&clone, child) == CUDA_SUCCESS) {
        Walk cloned;
        walk(clone, exec->context, {}, 0, cloned);
        if (cloned.kernels.size() == part.count && swap_nodes(*exec, cloned, part.first) &&
            driver.cuGraphExecChildGraphNodeSetParams(handle, node, clone) == CUDA_SUCCESS) {
            own = std::move(cloned);
            exec->swapped = true;
            make_event(*exec);
        }
    }
    if (clone) driver.cuGraphDestroy(clone);
    exec->numbered = false;
    for (uint32_t i = 0; i < part.count && i < own.kernels.size(); ++i) {
        own.kernels[i].handle = nullptr;
        exec->walk.kernels[part.first + i] = own.kernels[i];
        if (oplog.on()) log_node(*exec, part.first + i);
    }
}

void node_enabled(CUgraphExec handle, CUgraphNode node, bool enabled) {
    std::shared_ptr<Exec> exec = find(handle);
    if (!exec) return;
    std::lock_guard<std::recursive_mutex> hold(exec->lock);
    auto it = exec->walk.index.find(node);
    DriverScope scope;
    if (!enabled) forget_own(*exec);  // an update may enable it again
    exec->numbered = false;
    if (it != exec->walk.index.end()) exec->walk.kernels[it->second].enabled = enabled;
}

std::shared_ptr<void> hold_exec(CUgraphExec handle) {
    std::shared_ptr<Exec> exec = find(handle);
    if (!exec) return nullptr;
    exec->lock.lock();
    return {exec.get(), [exec](void *) { exec->lock.unlock(); }};
}

void graph_changed(CUgraphExec handle) {
    std::shared_ptr<Exec> exec = find(handle);
    if (!exec) return;
    std::lock_guard<std::recursive_mutex> hold(exec->lock);
    DriverScope scope;
    forget_own(*exec);
}

void graphs_back(uint32_t wait_ms) {
    std::vector<std::pair<CUgraphExec, std::shared_ptr<Exec>>> all;
    {
        std::lock_guard<std::mutex> hold(execs().lock);
        all.assign(execs().all.begin(), execs().all.end());
    }
    for (const auto &e : all) {
        Exec &exec = *e.second;
        std::unique_lock<std::recursive_mutex> hold(exec.lock, std::defer_lock);
        for (uint32_t waited = 0; !hold.try_lock() && waited < wait_ms; ++waited) usleep(1000);
        if (hold && find(e.first)) put_back(exec, e.first);
    }
}

void graph_back(CUgraphExec handle) {
    std::shared_ptr<Exec> exec = find(handle);
    if (!exec) return;
    std::lock_guard<std::recursive_mutex> hold(exec->lock);
    put_back(*exec, handle);
}

void graph_gone(CUgraphExec handle) {
    std::shared_ptr<Exec> exec;
    {
        std::lock_guard<std::mutex> hold(execs().lock);
        auto it = execs().all.find(handle);
        if (it == execs().all.end()) return;
        exec = it->second;
        execs().all.erase(it);
    }
    std::lock_guard<std::recursive_mutex> hold(exec->lock);
    {
        DriverScope scope;
        forget_own(*exec);
    }
    // The last launch may still be reading its cell. So the cell is reused as late as possible.
    if (!exec->context || exec->context->dead) return;
    forget_graph(*exec->context, exec->record);
    if (exec->cell) {
        std::lock_guard<std::mutex> memory(exec->context->memory);
        exec->context->cells.push_back(exec->cell);
    }
    if (exec->last && driver.cuEventDestroy_v2) {
        DriverScope scope;
        driver.cuEventDestroy_v2(exec->last);
    }
}

static void run_host_program_for(const Exec &exec, const Operation &operation, uint64_t first) {
    uint64_t threads = 0;
    for (const KernelNode &k : exec.walk.kernels)
        threads += uint64_t(k.shape.grid[0]) * k.shape.grid[1] * k.shape.grid[2] * k.shape.block[0] *
                   k.shape.block[1] * k.shape.block[2];
    const Context *context = operation.queue.context;
    run_host_program({first, kWholeGraph, operation.record.stream, now_ns(), threads,
                      context ? static_cast<uint64_t>(context->device) : 0});
}

// Counts a launch of the graph and its kernels.
static void count_launch(Exec &exec, StreamRef where, Operation &operation, uint64_t first, CUresult result) {
    if (exec.last && exec.swapped && result == CUDA_SUCCESS)
        quietly([&] {
            DriverScope scope;
            if (driver.cuEventRecord(exec.last, where.handle()) == CUDA_SUCCESS)
                exec.last_queue = operation.queue.number;
        });
    ++exec.replays;
    uint32_t kernels = 0, instrumented = 0;
    for (const KernelNode &k : exec.walk.kernels)
        if (k.enabled) {
            count_replay(k, result);
            ++kernels;
            instrumented += k.outcome == kInstrumented && result == CUDA_SUCCESS;
        }
    for (const KernelNode &k : exec.walk.bodies)
        if (k.outcome != kInstrumented) count_replay(k, result);
    if (result == CUDA_SUCCESS &&
        std::any_of(exec.walk.bodies.begin(), exec.walk.bodies.end(),
                    [](const KernelNode &k) { return k.outcome == kInstrumented; })) {
        agent.bodies.fetch_add(1, std::memory_order_relaxed);
        ++instrumented;  // at least
    }
    if (instrumented) agent.launched(instrumented);
    operation.record.graph = {exec.serial, exec.replays, first, kernels, exec.walk.others, 0};
}

// Logs the kernels of a launch of the graph. `launch` is the launch's own record.
static void log_kernels(const Exec &exec, const Record &launch, uint64_t first) {
    Record node = launch;
    node.kind = Kind::Kernel;
    node.flags |= kGraphNode;
    for (uint32_t i = 0; i < exec.walk.kernels.size(); ++i) {
        const KernelNode &k = exec.walk.kernels[i];
        if (!k.enabled) continue;
        node.id = first + i;
        fill(node.kernel, exec, k, i);
        node.kernel.build = k.outcome == kInstrumented ? k.choice.copy->layout->build : 0;
        node.kernel.replay = exec.replays;
        oplog.put(node);
    }
}

CUresult launch_graph(const HookCall &hook, CUgraphExec handle, StreamRef where,
                      const std::function<CUresult()> &original) {
    std::shared_ptr<Exec> exec;
    quietly([&] { exec = find(handle); });
    Operation operation(Kind::Graph, where, 0);
    Record &r = operation.record;
    const bool captured = r.flags & kCaptured;
    std::unique_lock<std::recursive_mutex> hold;
    if (exec) hold = std::unique_lock<std::recursive_mutex>(exec->lock);
    uint64_t first = 0;
    if (exec) {
        if (!captured) first = take_ids(exec->walk.kernels.size());
        if (!captured && exec->swapped)
            quietly([&] {
                if (!exec->numbered) number_nodes(*exec);
                number_replay(*exec, where.handle(), operation.queue.number, first);
            });
    }
    if (agent.config.stacks) r.stack = host_stack();
    const OpenRanges ranges =
        agent.config.ranges ? open_ranges(agent.config.chosen_ranges) : OpenRanges{0, true};
    if (!ranges.chosen) r.flags |= kNotChosen;
    if (!captured && exec && host_program()) run_host_program_for(*exec, operation, first);
    operation.announce();
    operation.time();
    operation.called();
    CUresult result;
    {
        InDriver scope(exec && exec->swapped ? ThreadIn::DriverWithCopy : ThreadIn::Driver);
        PatchData data(exec && exec->swapped && !captured ? exec->record.data : 0);
        result = original();
    }
    operation.returned(result);
    if (!hook.keeps_records()) return result;
    if (!captured && result == CUDA_SUCCESS && (!exec || !knows_executions(exec->walk))) {
        agent.control->graphs.fetch_add(1, std::memory_order_relaxed);
        if (!exec && agent.late) agent.control->graphs_before.fetch_add(1, std::memory_order_relaxed);
    }
    launched_in(where);
    if (exec && !captured) count_launch(*exec, where, operation, first, result);
    r.graph.ranges = ranges.number;
    operation.log();
    if (oplog.on() && exec && !captured) log_kernels(*exec, r, first);
    return result;
}

CUfunction own_function(CUfunction function) {
    if (!function || registry().functions.find(function)) return function;
    Copy *copy = copy_with(function);
    return copy && copy->original ? copy->original : function;
}

}  // namespace gpubpf
