// Launches with clusters on a device that has none, by its compute capability.
#include "check.h"

__global__ void empty() {}

int main() {
    int value = -1;
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, 0));
    REQUIRE(value == 0);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1, 1, 1};
    cudaLaunchConfig_t config = {4, 32, 0, nullptr, &attribute, 1};
    CHECK(cudaLaunchKernelEx(&config, empty));
    attribute.val.clusterDim = {2, 1, 1};
    FAILS(cudaLaunchKernelEx(&config, empty), cudaErrorNotSupported);
    FAILS(cudaOccupancyMaxActiveClusters(&value, empty, &config), cudaErrorNotSupported);
    CHECK(cudaDeviceSynchronize());
    printf("no_clusters ok\n");
}
