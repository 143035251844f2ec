// Subscription and callbacks.
#include "sanitizer/subscriber.h"

#include <algorithm>
#include <condition_variable>

#include "driver/context.h"
#include "driver/cubin.h"
#include "driver/graph.h"
#include "sanitizer/entry_points.h"

namespace cudasim::sanitizer {

using driver::tables;

std::atomic<bool> subscribed{false};

namespace {

struct Subscriber {
    CallbackFunction function = nullptr;
    void *userdata = nullptr;
    std::atomic<bool> enabled[kDomains][kCallbacks] = {};
    std::mutex mutex;  // guards the members below
    std::condition_variable changed;
    int running = 0;     // callbacks of all threads
    bool cupti = false;  // whether CUPTI has a subscriber
};

Subscriber &subscriber() {
    static auto *const instance = new Subscriber();
    return *instance;
}
const auto kSubscriber = reinterpret_cast<SubscriberHandle>(&subscribed);

thread_local int depth;                                     // of nested callbacks
thread_local std::vector<driver::KernelLaunch *> launches;  // in progress
std::atomic<uint64_t> next_grid{1};
std::atomic<uint32_t> next_graph_launch{1};

bool is_subscriber(SubscriberHandle handle) { return active() && handle == kSubscriber; }

// Returns the number of callbacks of a domain, and one more, as SANITIZER_CBID_…_SIZE.
uint32_t callbacks_of(uint32_t domain) { return domain == 0 || domain >= kDomains ? 0 : kCallbacks; }

CUcontext context_handle(const driver::Context &context) { return static_cast<CUcontext>(context.handle); }

LaunchData describe(const driver::Context &context, const driver::Stream &stream,
                    const driver::KernelLaunch &launch) {
    LaunchData data{};
    data.context = context_handle(context);
    data.stream = static_cast<CUstream>(stream.handle);
    data.hStream = handle_of(stream);
    data.module = launch.module ? static_cast<CUmodule>(launch.module->handle) : nullptr;
    data.function = static_cast<CUfunction>(launch.function->handle);
    data.functionName = launch.function->kernel().name.c_str();
    data.gridDim_x = launch.grid.x;
    data.gridDim_y = launch.grid.y;
    data.gridDim_z = launch.grid.z;
    data.blockDim_x = launch.block.x;
    data.blockDim_y = launch.block.y;
    data.blockDim_z = launch.block.z;
    data.clusterDim_x = launch.cluster.x;
    data.clusterDim_y = launch.cluster.y;
    data.clusterDim_z = launch.cluster.z;
    data.gridId = next_grid++;
    data.device = context.device;
    return data;
}

LaunchHandle launch_handle(driver::KernelLaunch &launch) { return reinterpret_cast<LaunchHandle>(&launch); }

}  // namespace

bool wants(uint32_t domain, uint32_t callback) {
    return active() && subscriber().enabled[domain][callback].load(std::memory_order_relaxed);
}

void call(uint32_t domain, uint32_t callback, const void *data) {
    if (!wants(domain, callback)) return;
    Subscriber &self = subscriber();
    CallbackFunction function;
    void *userdata;
    {
        std::lock_guard lock(self.mutex);
        if (!active()) return;
        function = self.function;
        userdata = self.userdata;
        self.running++;
    }
    depth++;
    function(userdata, domain, callback, data);
    depth--;
    std::lock_guard lock(self.mutex);
    self.running--;
    self.changed.notify_all();
}

uint64_t missing_data() { return config().hostile ? 0xdeadbeefdeadbeefu : 0; }

StreamHandle handle_of(const driver::Stream &stream) {
    return reinterpret_cast<StreamHandle>(const_cast<driver::Stream *>(&stream));
}

std::shared_ptr<driver::Stream> find_stream(StreamHandle handle, std::shared_ptr<driver::Context> &context) {
    if (handle == nullptr) {
        context = driver::current_context_or_null();
        return context ? context->legacy : nullptr;
    }
    for (const std::shared_ptr<driver::Context> &candidate : tables().contexts.all()) {
        context = candidate;
        std::lock_guard lock(candidate->mutex);
        if (handle_of(*candidate->legacy) == handle) return candidate->legacy;
        for (const std::shared_ptr<driver::Stream> &stream : candidate->streams)
            if (handle_of(*stream) == handle) return stream;
        for (const auto &[thread, stream] : candidate->per_thread)
            if (handle_of(*stream) == handle) return stream;
    }
    context = nullptr;
    return nullptr;
}

bool set_launch_data(LaunchHandle handle, uint64_t data) {
    for (driver::KernelLaunch *launch : launches) {
        if (launch_handle(*launch) != handle) continue;
        launch->userdata = data;
        return true;
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------- hooks

void initialised() { call(kResource, kInitFinished, nullptr); }

void context_changed(ResourceCallback callback, const driver::Context &context) {
    const ResourceContextData data{context_handle(context), nullptr, context.device};
    call(kResource, callback, &data);
}

void stream_changed(ResourceCallback callback, const driver::Context &context, const driver::Stream &stream) {
    const ResourceStreamData data{context_handle(context), nullptr, static_cast<CUstream>(stream.handle),
                                  handle_of(stream)};
    call(kResource, callback, &data);
}

static void module_changed(ResourceCallback callback, const driver::Module &module) {
    const std::shared_ptr<driver::Context> context = module.context.lock();
    if (!context || !wants(kResource, callback)) return;
    std::vector<std::string> kernels;
    for (const Kernel &kernel : module.image->kernels()) kernels.push_back(kernel.name);
    const std::string cubin = make_cubin("", kernels, static_cast<unsigned>(config().compute_capability()));
    ResourceModuleData data{};
    data.context = context_handle(*context);
    data.module = static_cast<CUmodule>(module.handle);
    data.cubinSize = cubin.size();
    data.pCubin = cubin.data();
    if (const std::shared_ptr<driver::Library> library = module.library.lock())
        data.library = static_cast<CUlibrary>(library->handle);
    call(kResource, callback, &data);
}

void module_loaded(const std::shared_ptr<driver::Module> &module) {
    ModuleState &state = *module->sanitizer;
    if (state.quiet) return;
    std::call_once(state.announced, [&] {
        module_changed(kModuleLoaded, *module);
        for (const std::shared_ptr<driver::Function> &function : module->functions)
            if (function->loaded) function_loaded(*function);
    });
}

void module_unloading(const std::shared_ptr<driver::Module> &module) {
    module_changed(kModuleUnloadStarting, *module);
}

void function_loaded(const driver::Function &function) {
    const std::shared_ptr<driver::Module> module = function.module.lock();
    const std::shared_ptr<driver::Context> context = module ? module->context.lock() : nullptr;
    if (!context) return;
    const auto handle = static_cast<CUfunction>(function.handle);
    const ResourceFunctionsLazyLoadedData data{context_handle(*context),
                                               static_cast<CUmodule>(module->handle), &handle, 1};
    call(kResource, kFunctionsLazyLoaded, &data);
    if (module->sanitizer->patched_now) call(kResource, kFunctionsLazyPatched, &data);
}

void synchronized(const driver::Context &context, const driver::Stream *stream) {
    SynchronizeData data{};
    data.context = context_handle(context);
    if (stream != nullptr) {
        data.stream = static_cast<CUstream>(stream->handle);
        data.hStream = handle_of(*stream);
    }
    call(kSynchronize, stream != nullptr ? kStreamSynchronized : kContextSynchronized, &data);
}

void graph_exec_changed(GraphsCallback callback, CUgraph graph, CUgraphExec exec) {
    GraphExecData data{};
    data.graph = graph;
    data.graphExec = exec;
    call(kGraphs, callback, &data);
}

// The data of a function counts for launches that begin after it was set.
static void use_function_data(driver::KernelLaunch &launch) {
    if (!launch.userdata && launch.function->has_userdata) launch.userdata = launch.function->userdata;
}

Launch::Launch(const std::shared_ptr<driver::Context> &context, const std::shared_ptr<driver::Stream> &stream,
               driver::KernelLaunch &launch)
    : data_(describe(*context, *stream, launch)) {
    data_.hLaunch = launch_handle(launch);
    launches.push_back(&launch);
    call(kLaunch, kLaunchBegin, &data_);
    call(kLaunch, kLaunchAfterSyscallSetup, &data_);
    launches.pop_back();
    use_function_data(launch);
}

Launch::~Launch() { call(kLaunch, kLaunchEnd, &data_); }

GraphLaunch::GraphLaunch(const std::shared_ptr<driver::Context> &context,
                         const std::shared_ptr<driver::Stream> &stream, CUgraphExec exec,
                         driver::Graph &graph, bool upload)
    : context_(context), stream_(stream), id_(next_graph_launch++) {
    data_.context = context_handle(*context);
    data_.stream = static_cast<CUstream>(stream->handle);
    data_.hStream = handle_of(*stream);
    data_.graphExec = exec;
    data_.isGraphUpload = upload;
    call(kGraphs, kGraphLaunchBegin, &data_);
    visit(graph);
    if (!upload) set_data(graph);
}

GraphLaunch::~GraphLaunch() {
    for (const GraphNodeLaunchData &node : nodes_) call(kGraphs, kNodeLaunchEnd, &node);
    call(kGraphs, kGraphLaunchEnd, &data_);
}

void GraphLaunch::visit(driver::Graph &graph) {
    for (const std::shared_ptr<driver::GraphNode> &node : graph.nodes) {
        if (!node->enabled) continue;
        driver::Operation &operation = node->operation;
        for (const std::shared_ptr<driver::Graph> &child : operation.children) visit(*child);
        if (!operation.children.empty()) continue;
        const driver::GraphNode *shown = node.get();
        while (shown->handle == nullptr && shown->original) shown = shown->original.get();
        GraphNodeLaunchData data{};
        data.graphExec = data_.graphExec;
        data.launchId = id_;
        data.node = static_cast<CUgraphNode>(shown->handle);
        data.nodeType = operation.type;
        data.isGraphUpload = data_.isGraphUpload;
        driver::KernelLaunch scratch;  // an upload changes nothing
        driver::KernelLaunch &launch = data_.isGraphUpload ? scratch : operation.kernel;
        if (operation.type == CU_GRAPH_NODE_TYPE_KERNEL && operation.kernel.module) {
            if (data_.isGraphUpload) scratch = operation.kernel;
            launch.userdata.reset();
            data.launchData = describe(*context_, *stream_, launch);
            data.launchData.hLaunch = launch_handle(launch);
            data.launchData.apiContext = data_.context;
            data.launchData.apiStream = data_.stream;
            data.launchData.hApiStream = data_.hStream;
        }
        launches.push_back(&launch);
        call(kGraphs, kNodeLaunchBegin, &data);
        launches.pop_back();
        if (launch.userdata) last_ = launch.userdata;
        data.launchData.hLaunch = nullptr;
        nodes_.push_back(data);
    }
}

// On an H100, all nodes of a graph launch got the data that was set last.
void GraphLaunch::set_data(driver::Graph &graph) {
    for (const std::shared_ptr<driver::GraphNode> &node : graph.nodes) {
        for (const std::shared_ptr<driver::Graph> &child : node->operation.children) set_data(*child);
        if (node->operation.type != CU_GRAPH_NODE_TYPE_KERNEL) continue;
        if (config().hostile && last_) node->operation.kernel.userdata = last_;
        use_function_data(node->operation.kernel);
    }
}

}  // namespace cudasim::sanitizer

// ---------------------------------------------------------------------------------------------------- entry points

using namespace cudasim;
using namespace cudasim::sanitizer;

namespace cudasim::sanitizer::entry {

Result Subscribe(SubscriberHandle *handle, CallbackFunction function, void *userdata) {
    if (handle == nullptr || function == nullptr) return kInvalidParameter;
    Subscriber &self = subscriber();
    std::lock_guard lock(self.mutex);
    if (active() || self.cupti) return kMaxLimitReached;
    self.function = function;
    self.userdata = userdata;
    for (auto &domain : self.enabled)
        for (std::atomic<bool> &callback : domain) callback = false;
    subscribed = true;
    *handle = kSubscriber;
    return kSuccess;
}

Result Unsubscribe(SubscriberHandle handle) {
    if (!is_subscriber(handle)) return kInvalidParameter;
    Subscriber &self = subscriber();
    std::unique_lock lock(self.mutex);
    subscribed = false;
    self.changed.wait(lock, [&] { return self.running <= depth; });
    return kSuccess;
}

Result GetCallbackState(uint32_t *enabled, SubscriberHandle handle, uint32_t domain, uint32_t callback) {
    if (enabled == nullptr || !is_subscriber(handle)) return kInvalidParameter;
    if (callbacks_of(domain) == 0) return kInvalidDomain;
    if (callback >= callbacks_of(domain)) return kInvalidCallback;
    *enabled = subscriber().enabled[domain][callback];
    return kSuccess;
}

Result EnableCallback(uint32_t enable, SubscriberHandle handle, uint32_t domain, uint32_t callback) {
    if (!is_subscriber(handle)) return kInvalidParameter;
    if (callbacks_of(domain) == 0) return kInvalidDomain;
    if (domain < kResource)
        return kSuccess;  // calls of the driver and of the runtime: there are no callbacks
    if (callback == 0 || callback >= callbacks_of(domain)) return kInvalidCallback;
    subscriber().enabled[domain][callback] = enable != 0;
    return kSuccess;
}

Result EnableDomain(uint32_t enable, SubscriberHandle handle, uint32_t domain) {
    if (!is_subscriber(handle)) return kInvalidParameter;
    if (callbacks_of(domain) == 0) return kInvalidDomain;
    for (uint32_t k = 1; k < callbacks_of(domain); k++) subscriber().enabled[domain][k] = enable != 0;
    return kSuccess;
}

Result EnableAllDomains(uint32_t enable, SubscriberHandle handle) {
    for (uint32_t domain = 1; domain < kDomains; domain++)
        if (Result result = EnableDomain(enable, handle, domain)) return result;
    return kSuccess;
}

Result IsInsideRecursiveCallback(uint32_t *inside) {
    if (inside == nullptr) return kInvalidParameter;
    *inside = depth > 1;
    return kSuccess;
}

Result GetResultString(Result result, const char **text) {
    static const std::map<uint32_t, const char *> texts = {
        {kSuccess, "no error"},
        {kInvalidParameter, "a parameter is invalid"},
        {kInvalidDevice, "the device is not a CUDA device"},
        {kInvalidContext, "the context is null or invalid"},
        {kInvalidDomain, "the domain ID is invalid"},
        {kInvalidCallback, "the callback ID is invalid"},
        {kInvalidOperation, "the operation is not possible now"},
        {kOutOfMemory, "out of memory"},
        {kNotImplemented, "the function is not implemented"},
        {kMaxLimitReached, "the limit is reached"},
        {kNotReady, "the object is not ready"},
        {kNotCompatible, "the operation does not fit the object's state"},
        {kNotInitialized, "there is no connection to the CUDA driver"},
        {kNotSupported, "the operation is not supported on this system"},
        {kNotInDeviceMemory, "the address is not in device memory"},
        {kUnknown, "an unknown error"},
    };
    const auto found = texts.find(result);
    if (text == nullptr || found == texts.end()) return kInvalidParameter;
    *text = found->second;
    return kSuccess;
}

}  // namespace cudasim::sanitizer::entry

// A stand-in of CUPTI calls this when it gets or loses a subscriber: both need the same debugging interface of the driver. Returns
// false if it is taken.
extern "C" bool cudasim_cupti(bool subscribes);
extern "C" bool cudasim_cupti(bool subscribes) {
    Subscriber &self = subscriber();
    std::lock_guard lock(self.mutex);
    if (subscribes && active()) return false;
    self.cupti = subscribes;
    return true;
}
