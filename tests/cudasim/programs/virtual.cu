// Virtual memory management: physical memory is mapped side by side, twice, and through a file descriptor.
#include "check.h"

#include <cuda.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#define DRIVER(call)                                                             \
    do {                                                                         \
        CUresult status_ = (call);                                               \
        if (status_ != CUDA_SUCCESS) {                                           \
            printf("%s:%d: %s gives %d\n", __FILE__, __LINE__, #call, status_);  \
            exit(2);                                                             \
        }                                                                        \
    } while (0)
#define REFUSED(call) REQUIRE((call) == CUDA_ERROR_INVALID_VALUE)

__global__ void count(int *cells, size_t length) {
    size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
    if (i < length) cells[i] += static_cast<int>(i);
}

int main(int argc, char **) {
    CHECK(cudaFree(nullptr));
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemAccessDesc access = {};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    size_t unit = 0, before = 0, now = 0, total = 0;
    CHECK(cudaMemGetInfo(&before, &total));
    DRIVER(cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUdeviceptr both, alias;
    DRIVER(cuMemAddressReserve(&both, 2 * unit, 4 * unit, 0, 0));
    DRIVER(cuMemAddressReserve(&alias, unit, 0, 0, 0));
    REQUIRE(both % (4 * unit) == 0);
    REFUSED(cuMemcpyHtoD(both, &unit, sizeof unit));
    CUmemGenericAllocationHandle first, second;
    DRIVER(cuMemCreate(&first, unit, &properties, 0));
    DRIVER(cuMemCreate(&second, unit, &properties, 0));
    CHECK(cudaMemGetInfo(&now, &total));
    REQUIRE(before - now == 2 * unit);
    REFUSED(cuMemMap(both + unit, 2 * unit, 0, first, 0));
    DRIVER(cuMemMap(both, unit, 0, first, 0));
    DRIVER(cuMemMap(both + unit, unit, 0, second, 0));
    REFUSED(cuMemMap(both, unit, 0, second, 0));
    REFUSED(cuMemcpyHtoD(both, &unit, sizeof unit));  // no access yet
    DRIVER(cuMemSetAccess(both, 2 * unit, &access, 1));
    if (argc > 1) {  // a fault
        DRIVER(cuMemUnmap(both + unit, unit));
        count<<<unit / 4 / 256 + 1, 256>>>(reinterpret_cast<int *>(both), unit / 4 + 1);
        printf("sync: %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
        return 0;
    }

    // a copy, a memset and a kernel over both
    const size_t length = 2 * unit / 4;
    std::vector<int> cells(length);
    auto *memory = reinterpret_cast<int *>(both);
    DRIVER(cuMemsetD32(both, 5, length));
    count<<<length / 256, 256>>>(memory, length);
    CHECK(cudaMemcpy(cells.data(), memory, 2 * unit, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < length; i++) REQUIRE(cells[i] == static_cast<int>(5 + i));
    REFUSED(cuMemFree(both));
    REFUSED(cuMemAddressFree(both, 2 * unit));

    // the same memory at another address, from the handle of an address, after its first handle is gone
    DRIVER(cuMemRelease(second));
    REFUSED(cuMemRelease(second));
    DRIVER(cuMemRetainAllocationHandle(&second, memory + unit / 4 + 7));
    CUmemAllocationProp found;
    DRIVER(cuMemGetAllocationPropertiesFromHandle(&found, second));
    REQUIRE(found.location.type == CU_MEM_LOCATION_TYPE_DEVICE && found.location.id == 0);
    int file = -1;
    CUmemGenericAllocationHandle imported;
    DRIVER(cuMemExportToShareableHandle(&file, second, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    DRIVER(cuMemImportFromShareableHandle(&imported, reinterpret_cast<void *>(intptr_t{file}),
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(file);
    DRIVER(cuMemMap(alias, unit, 0, imported, 0));
    unsigned long long flags = 9;
    DRIVER(cuMemGetAccess(&flags, &access.location, alias));
    REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_NONE);
    DRIVER(cuMemSetAccess(alias, unit, &access, 1));
    count<<<1, 32>>>(reinterpret_cast<int *>(alias), 32);
    CHECK(cudaMemcpy(cells.data(), memory + unit / 4, 32 * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 32; i++) REQUIRE(cells[i] == static_cast<int>(5 + unit / 4) + 2 * i);

    REFUSED(cuMemUnmap(both, unit + unit / 2));
    DRIVER(cuMemUnmap(both, 2 * unit));
    DRIVER(cuMemUnmap(alias, unit));
    DRIVER(cuMemRelease(first));
    DRIVER(cuMemRelease(second));
    DRIVER(cuMemRelease(imported));
    DRIVER(cuMemAddressFree(both, 2 * unit));
    DRIVER(cuMemAddressFree(alias, unit));
    CHECK(cudaMemGetInfo(&now, &total));
    REQUIRE(before == now);
    puts("virtual ok");
    return 0;
}
