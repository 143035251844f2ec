// Memory pools that two processes share, as NVIDIA's sample streamOrderedAllocationIPC does: the descriptors of the pools pass
// through a UNIX socket. The first argument of the second process is its end of the socket.
#include "check.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <vector>

constexpr int kPools = 2, kCount = 1000;

struct Message {
    cudaMemPoolPtrExportData pointers[kPools], neighbour;
    cudaIpcEventHandle_t allocated[kPools], freed[kPools];
};

__global__ void set(int *values, int factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < kCount) values[i] = factor * i;
}
__global__ void add(int *values, int amount) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < kCount) values[i] += amount;
}

void send(int socket, const void *bytes, size_t size) { REQUIRE(write(socket, bytes, size) == static_cast<ssize_t>(size)); }
void receive(int socket, void *bytes, size_t size) { REQUIRE(recv(socket, bytes, size, MSG_WAITALL) == static_cast<ssize_t>(size)); }

void send_descriptor(int socket, int descriptor) {
    char byte = 'd', control[CMSG_SPACE(sizeof(int))] = {};
    iovec part = {&byte, 1};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
    REQUIRE(sendmsg(socket, &message, 0) == 1);
}

int receive_descriptor(int socket) {
    char byte, control[CMSG_SPACE(sizeof(int))] = {};
    iovec part = {&byte, 1};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    REQUIRE(recvmsg(socket, &message, 0) == 1);
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    return descriptor;
}

cudaMemPool_t create(cudaMemAllocationHandleType handles, size_t most = 0) {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.handleTypes = handles;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.maxSize = most;
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    return pool;
}

void *as_handle(int descriptor) { return reinterpret_cast<void *>(static_cast<uintptr_t>(descriptor)); }

cudaError_t import_pool(cudaMemPool_t *pool, int descriptor) {
    return cudaMemPoolImportFromShareableHandle(pool, as_handle(descriptor), cudaMemHandleTypePosixFileDescriptor, 0);
}

uint64_t attribute(cudaMemPool_t pool, cudaMemPoolAttr which) {
    uint64_t value;
    CHECK(cudaMemPoolGetAttribute(pool, which, &value));
    return value;
}

int second_process(int socket) {
    cudaMemPool_t pools[kPools];
    for (cudaMemPool_t &pool : pools) {
        const int descriptor = receive_descriptor(socket);
        CHECK(import_pool(&pool, descriptor));
        close(descriptor);
    }
    Message message;
    receive(socket, &message, sizeof message);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    void *nothing;
    FAILS(cudaMallocFromPoolAsync(&nothing, 4, pools[0], stream), cudaErrorInvalidValue);  // it is imported
    FAILS(cudaDeviceSetMemPool(0, pools[0]), cudaErrorInvalidValue);
    // The data of another pool's pointer, and damaged data.
    FAILS(cudaMemPoolImportPointer(&nothing, pools[0], &message.pointers[1]), cudaErrorInvalidValue);
    for (size_t at : {0, 8, 16, 22, 24, 30, 39, 47}) {
        cudaMemPoolPtrExportData damaged = message.pointers[0];
        damaged.reserved[at] ^= 0x40;
        FAILS(cudaMemPoolImportPointer(&nothing, pools[0], &damaged), cudaErrorInvalidValue);
    }
    for (int k = 0; k < kPools; k++) {
        int *values;
        CHECK(cudaMemPoolImportPointer(reinterpret_cast<void **>(&values), pools[k], &message.pointers[k]));
        cudaPointerAttributes attributes;
        CHECK(cudaPointerGetAttributes(&attributes, values));
        REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
        REQUIRE(attribute(pools[k], cudaMemPoolAttrUsedMemCurrent) == kCount * sizeof(int));
        cudaMemPoolPtrExportData again;
        FAILS(cudaMemPoolExportPointer(&again, values), cudaErrorInvalidValue);
        cudaEvent_t allocated, freed;
        CHECK(cudaIpcOpenEventHandle(&allocated, message.allocated[k]));
        CHECK(cudaIpcOpenEventHandle(&freed, message.freed[k]));
        CHECK(cudaStreamWaitEvent(stream, allocated, 0));
        add<<<8, 128, 0, stream>>>(values, 5 + k);
        if (k == 0) CHECK(cudaFreeAsync(values, stream));
        CHECK(cudaEventRecord(freed, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (k == 1) CHECK(cudaFree(values));
        REQUIRE(attribute(pools[k], cudaMemPoolAttrUsedMemCurrent) == 0);
        FAILS(cudaFree(values), cudaErrorInvalidValue);
    }
    // A second allocation of the first pool has its own memory.
    int *neighbour, value;
    CHECK(cudaMemPoolImportPointer(reinterpret_cast<void **>(&neighbour), pools[0], &message.neighbour));
    CHECK(cudaMemcpy(&value, neighbour, sizeof value, cudaMemcpyDeviceToHost));
    REQUIRE(value == 77);
    CHECK(cudaFree(neighbour));
    for (cudaMemPool_t pool : pools) CHECK(cudaMemPoolDestroy(pool));
    send(socket, "x", 1);
    return 0;
}

void one_process() {
    cudaMemPool_t own = create(cudaMemHandleTypeNone, 1000), shared = create(cudaMemHandleTypePosixFileDescriptor), normal;
    int descriptor = -1;
    const auto type = cudaMemHandleTypePosixFileDescriptor;
    FAILS(cudaMemPoolExportToShareableHandle(&descriptor, own, type, 0), cudaErrorInvalidValue);
    CHECK(cudaDeviceGetDefaultMemPool(&normal, 0));
    FAILS(cudaMemPoolExportToShareableHandle(&descriptor, normal, type, 0), cudaErrorInvalidValue);
    FAILS(cudaMemPoolExportToShareableHandle(&descriptor, shared, cudaMemHandleTypeWin32, 0), cudaErrorInvalidValue);
    FAILS(cudaMemPoolExportToShareableHandle(&descriptor, shared, type, 1), cudaErrorInvalidValue);
    cudaMemPool_t imported;
    FAILS(import_pool(&imported, -1), cudaErrorInvalidValue);
    FAILS(import_pool(&imported, 0), cudaErrorInvalidValue);  // not the file of a pool
    // The largest size of a pool, and what is in use. cudaFree gives memory back, too.
    void *first, *second;
    CHECK(cudaMallocFromPoolAsync(&first, 600, own, nullptr));
    FAILS(cudaMallocFromPoolAsync(&second, 401, own, nullptr), cudaErrorMemoryAllocation);
    CHECK(cudaMallocFromPoolAsync(&second, 400, own, nullptr));
    REQUIRE(attribute(own, cudaMemPoolAttrUsedMemCurrent) == 1000);
    cudaMemPoolPtrExportData data;
    FAILS(cudaMemPoolExportPointer(&data, first), cudaErrorInvalidValue);
    CHECK(cudaFree(first));
    CHECK(cudaFreeAsync(second, nullptr));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(attribute(own, cudaMemPoolAttrUsedMemCurrent) == 0 && attribute(own, cudaMemPoolAttrUsedMemHigh) == 1000);
    uint64_t value = 1;
    FAILS(cudaMemPoolSetAttribute(own, cudaMemPoolAttrUsedMemHigh, &value), cudaErrorInvalidValue);
    value = 0;
    CHECK(cudaMemPoolSetAttribute(own, cudaMemPoolAttrUsedMemHigh, &value));
    REQUIRE(attribute(own, cudaMemPoolAttrUsedMemHigh) == 0);
    // A destroyed pool keeps its allocations.
    int *left, read = 0;
    CHECK(cudaMallocFromPoolAsync(reinterpret_cast<void **>(&left), kCount * sizeof(int), shared, nullptr));
    CHECK(cudaMemPoolDestroy(shared));
    set<<<8, 128>>>(left, 4);
    CHECK(cudaMemcpy(&read, left + 9, sizeof read, cudaMemcpyDeviceToHost));
    REQUIRE(read == 36);
    CHECK(cudaFree(left));
    // Freed memory of a shareable pool is used again.
    shared = create(cudaMemHandleTypePosixFileDescriptor);
    for (int k = 0; k < 3; k++) {
        CHECK(cudaMallocFromPoolAsync(&first, 8 << 20, shared, nullptr));
        CHECK(cudaMemsetAsync(first, k, 1 << 20));
        CHECK(cudaFreeAsync(first, nullptr));
        CHECK(cudaDeviceSynchronize());
    }
    CHECK(cudaMemPoolExportToShareableHandle(&descriptor, shared, type, 0));
    REQUIRE(lseek(descriptor, 0, SEEK_END) < 2 * (8 << 20));
    close(descriptor);
    // Access by devices. Here there is one device.
    cudaMemLocation here = {cudaMemLocationTypeDevice, {0}}, none = {cudaMemLocationTypeDevice, {7}};
    cudaMemAccessFlags flags;
    CHECK(cudaMemPoolGetAccess(&flags, own, &here));
    REQUIRE(flags == cudaMemAccessFlagsProtReadWrite);
    FAILS(cudaMemPoolGetAccess(&flags, own, &none), cudaErrorInvalidValue);
    cudaMemAccessDesc access = {here, cudaMemAccessFlagsProtReadWrite};
    CHECK(cudaMemPoolSetAccess(own, &access, 1));
    access.flags = cudaMemAccessFlagsProtNone;
    FAILS(cudaMemPoolSetAccess(own, &access, 1), cudaErrorInvalidValue);
    access = {none, cudaMemAccessFlagsProtReadWrite};
    FAILS(cudaMemPoolSetAccess(own, &access, 1), cudaErrorInvalidValue);
    // The current pool by location.
    cudaMemPool_t found;
    CHECK(cudaMemGetDefaultMemPool(&found, &here, cudaMemAllocationTypePinned));
    REQUIRE(found == normal);
    CHECK(cudaMemSetMemPool(&here, cudaMemAllocationTypePinned, own));
    CHECK(cudaDeviceGetMemPool(&found, 0));
    REQUIRE(found == own);
    CHECK(cudaMemGetMemPool(&found, &here, cudaMemAllocationTypePinned));
    REQUIRE(found == own);
    CHECK(cudaMemPoolDestroy(own));
    CHECK(cudaMemPoolDestroy(shared));
}

int main(int count, char **arguments) {
    if (count > 1) return second_process(atoi(arguments[1]));
    int sockets[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    const pid_t child = fork();  // before CUDA is used
    if (child == 0) {
        close(sockets[0]);
        const std::string number = std::to_string(sockets[1]);
        execl("/proc/self/exe", arguments[0], number.c_str(), nullptr);
        _exit(127);
    }
    close(sockets[1]);
    int handles = 0;
    CHECK(cudaDeviceGetAttribute(&handles, cudaDevAttrMemoryPoolSupportedHandleTypes, 0));
    REQUIRE((handles & cudaMemHandleTypePosixFileDescriptor) != 0);
    cudaMemPool_t pools[kPools];
    for (cudaMemPool_t &pool : pools) {
        pool = create(cudaMemHandleTypePosixFileDescriptor);
        int descriptor = -1;
        CHECK(cudaMemPoolExportToShareableHandle(&descriptor, pool, cudaMemHandleTypePosixFileDescriptor, 0));
        send_descriptor(sockets[0], descriptor);
        close(descriptor);
    }
    // The memory is allocated after the pools were exported.
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Message message;
    int *values[kPools], *neighbour;
    cudaEvent_t allocated[kPools], freed[kPools];
    const int mark = 77;
    CHECK(cudaMallocFromPoolAsync(reinterpret_cast<void **>(&neighbour), sizeof(int), pools[0], stream));
    CHECK(cudaMemcpyAsync(neighbour, &mark, sizeof(int), cudaMemcpyHostToDevice, stream));
    CHECK(cudaMemPoolExportPointer(&message.neighbour, neighbour));
    for (int k = 0; k < kPools; k++) {
        CHECK(cudaMallocFromPoolAsync(reinterpret_cast<void **>(&values[k]), kCount * sizeof(int), pools[k], stream));
        CHECK(cudaMemPoolExportPointer(&message.pointers[k], values[k]));
        CHECK(cudaEventCreateWithFlags(&allocated[k], cudaEventInterprocess | cudaEventDisableTiming));
        CHECK(cudaEventCreateWithFlags(&freed[k], cudaEventInterprocess | cudaEventDisableTiming));
        set<<<8, 128, 0, stream>>>(values[k], 3 + k);
        CHECK(cudaEventRecord(allocated[k], stream));
        CHECK(cudaIpcGetEventHandle(&message.allocated[k], allocated[k]));
        CHECK(cudaIpcGetEventHandle(&message.freed[k], freed[k]));
    }
    send(sockets[0], &message, sizeof message);
    char done;
    receive(sockets[0], &done, 1);
    std::vector<int> host(kCount);
    for (int k = 0; k < kPools; k++) {
        CHECK(cudaStreamWaitEvent(stream, freed[k], 0));
        CHECK(cudaMemcpyAsync(host.data(), values[k], kCount * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaFreeAsync(values[k], stream));
        CHECK(cudaStreamSynchronize(stream));
        for (int i = 0; i < kCount; i++) REQUIRE(host[i] == (3 + k) * i + 5 + k);
    }
    CHECK(cudaFreeAsync(neighbour, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (cudaMemPool_t pool : pools) {
        REQUIRE(attribute(pool, cudaMemPoolAttrUsedMemCurrent) == 0);
        CHECK(cudaMemPoolDestroy(pool));
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    one_process();
    puts("pools ok");
    return 0;
}
