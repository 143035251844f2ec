// Checks a launch against the device's limits, and copies its parameters to one buffer.
#include "driver/driver.h"

#include <algorithm>
#include <string.h>

#include "config.h"
#include "error_text.h"

namespace cudasim::driver {
namespace {

CUresult gather_parameters(const cudasim::Kernel &kernel, void **parameters, void **extra,
                           std::vector<uint8_t> &parameter_buffer) {
    parameter_buffer.assign(kernel.parameter_bytes, 0);
    if (parameters != nullptr && extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (extra != nullptr) {
        const void *buffer = nullptr;
        size_t size = 0;
        for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
            if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = extra[i + 1];
            else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[i + 1] != nullptr)
                size = *static_cast<const size_t *>(extra[i + 1]);
            else return CUDA_ERROR_INVALID_VALUE;
        }
        if ((buffer == nullptr && size != 0) || size > parameter_buffer.size())
            return CUDA_ERROR_INVALID_VALUE;
        size_t needed =
            kernel.parameters.empty() ? 0 : kernel.parameters.back().offset + kernel.parameters.back().size;
        if (size < needed) return CUDA_ERROR_INVALID_VALUE;
        if (size != 0) memcpy(parameter_buffer.data(), buffer, size);
        return CUDA_SUCCESS;
    }
    if (kernel.parameters.empty()) return CUDA_SUCCESS;
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < kernel.parameters.size(); i++) {
        if (parameters[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
        const Parameter &parameter = kernel.parameters[i];
        if (parameter.size != 0)
            memcpy(parameter_buffer.data() + parameter.offset, parameters[i], parameter.size);
    }
    return CUDA_SUCCESS;
}

}  // namespace

Dim3 cluster_of(const CUlaunchAttributeValue &value) {
    return {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
}

int most_cluster_blocks(const Function &function) {
    constexpr int kPortable = 8, kMost = 16;  // on a Hopper GPU
    const int most = function.nonportable_cluster ? kMost : kPortable;
    const auto limit = static_cast<int>(function.kernel().max_cluster_rank);
    return limit ? std::min(most, limit) : most;
}

CUresult find_cluster(const Function &function, Dim3 asked, Dim3 &cluster) {
    const Dim3 required = {static_cast<unsigned>(function.required(0)),
                           static_cast<unsigned>(function.required(1)),
                           static_cast<unsigned>(function.required(2))};
    if (!(asked == kNoCluster) && !(required == kNoCluster) && !(asked == required))
        return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    cluster = asked == kNoCluster ? required : asked;
    if (cluster == kNoCluster)
        return function.kernel().explicit_cluster ? CUDA_ERROR_INVALID_CLUSTER_SIZE : CUDA_SUCCESS;
    const auto most = static_cast<unsigned>(most_cluster_blocks(function));
    if (cluster.x > most || cluster.y > most || cluster.z > most || cluster.count() > most ||
        cluster.count() == 0)
        return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    if (cluster.count() > 1 && config().cc_major < 9)
        return static_cast<CUresult>(unsupported("a cluster of several blocks below compute capability 9.0"));
    return CUDA_SUCCESS;
}

CUresult set_cluster(KernelLaunch &launch, Dim3 asked) {
    Dim3 cluster;
    if (CUresult status = find_cluster(*launch.function, asked, cluster)) return status;
    if (!(cluster == kNoCluster) &&
        (launch.grid.x % cluster.x != 0 || launch.grid.y % cluster.y != 0 || launch.grid.z % cluster.z != 0))
        return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    launch.asked_cluster = asked;
    launch.cluster = cluster;
    return CUDA_SUCCESS;
}

CUresult describe_launch(const void *handle, const std::shared_ptr<Context> &context, Dim3 grid, Dim3 block,
                         unsigned shared_bytes, bool cooperative, void **parameters, void **extra,
                         KernelLaunch &launch) {
    if (CUresult status = find_function(handle, context, launch.function)) return status;
    const Function &function = *launch.function;
    const cudasim::Kernel &kernel = function.kernel();
    TranslateError error;
    if (!function.image->prepare(function.index, error)) {
        if (!launch.function->refusal_logged.exchange(true))
            log_line("kernel %s cannot run: %s", kernel.name.c_str(), error.log.c_str());
        return static_cast<CUresult>(error.code);
    }
    if (grid.count() == 0 || block.count() == 0) return CUDA_ERROR_INVALID_VALUE;
    if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) return CUDA_ERROR_INVALID_VALUE;
    if (block.x > unsigned{kThreadsPerBlock} || block.y > unsigned{kThreadsPerBlock} || block.z > 64 ||
        block.count() > unsigned{kThreadsPerBlock})
        return CUDA_ERROR_INVALID_VALUE;
    if (kernel.reqntid[0] != 0 &&
        (block.x != kernel.reqntid[0] || block.y != kernel.reqntid[1] || block.z != kernel.reqntid[2]))
        return CUDA_ERROR_INVALID_VALUE;
    if (block.count() > static_cast<uint64_t>(max_threads(function))) return CUDA_ERROR_INVALID_VALUE;
    if (block.count() > static_cast<uint64_t>(most_threads_to_launch(function)))
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    size_t dynamic_limit = function.max_dynamic_shared >= 0 ? static_cast<size_t>(function.max_dynamic_shared)
                                                            : size_t{kSharedPerBlock};
    if (shared_bytes > dynamic_limit) return CUDA_ERROR_INVALID_VALUE;
    if (function.max_dynamic_shared < 0 && kernel.static_shared + shared_bytes > unsigned{kSharedPerBlock} &&
        shared_bytes != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (kernel.static_shared + shared_bytes > unsigned{kSharedPerBlockOptin}) return CUDA_ERROR_INVALID_VALUE;
    launch.grid = grid;
    if (CUresult status = set_cluster(launch, launch.asked_cluster)) return status;
    if (cooperative) {
        const Dim3 cluster = launch.cluster == kNoCluster ? Dim3{} : launch.cluster;
        const uint64_t fit =
            resident_clusters(function, static_cast<int>(block.count()), shared_bytes, cluster);
        if (grid.count() / cluster.count() > fit) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    }
    load_function(*launch.function, context);
    launch.module = function.module.lock();
    launch.handle = handle;
    launch.block = block;
    launch.shared_bytes = shared_bytes;
    launch.cooperative = cooperative;
    return gather_parameters(kernel, parameters, extra, launch.parameters);
}

}  // namespace cudasim::driver
