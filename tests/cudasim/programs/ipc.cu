// Memory and events that two processes share. The first argument of the second process is its end of a socket.
#include "check.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

constexpr int kCount = 1000;

struct Message {
    cudaIpcMemHandle_t memory;
    cudaIpcEventHandle_t first, second;
};

__global__ void set(int *values, int factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < kCount) values[i] = factor * i;
}
__global__ void add(int *values, int amount) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < kCount) values[i] += amount;
}
__global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

void send(int socket, const void *bytes, size_t size) { REQUIRE(write(socket, bytes, size) == static_cast<ssize_t>(size)); }
void receive(int socket, void *bytes, size_t size) { REQUIRE(recv(socket, bytes, size, MSG_WAITALL) == static_cast<ssize_t>(size)); }
void tell(int socket) { send(socket, "x", 1); }
void await(int socket) {
    char c;
    receive(socket, &c, 1);
}

int second_process(int socket) {
    Message message;
    receive(socket, &message, sizeof message);
    int *values, *again;
    CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&values), message.memory, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&again), message.memory, cudaIpcMemLazyEnablePeerAccess));
    REQUIRE(values == again);
    CHECK(cudaIpcCloseMemHandle(again));
    cudaEvent_t first, second;
    CHECK(cudaIpcOpenEventHandle(&first, message.first));
    CHECK(cudaIpcOpenEventHandle(&second, message.second));
    // The first process recorded `first` behind its kernel. This stream waits for it, adds, and records `second`.
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamWaitEvent(stream, first, 0));
    add<<<8, 128, 0, stream>>>(values, 5);
    CHECK(cudaEventRecord(second, stream));
    tell(socket);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventQuery(first));
    // Damaged handles are errors.
    void *nothing;
    for (size_t at : {0, 8, 12, 16, 24, 32}) {
        cudaIpcMemHandle_t damaged = message.memory;
        reinterpret_cast<char *>(&damaged)[at] ^= 0x40;
        REQUIRE(cudaIpcOpenMemHandle(&nothing, damaged, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
        cudaGetLastError();
    }
    cudaIpcMemHandle_t other;
    memcpy(&other, &message.first, sizeof other);
    REQUIRE(cudaIpcOpenMemHandle(&nothing, other, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
    cudaGetLastError();
    FAILS(cudaIpcOpenMemHandle(&nothing, message.memory, 0), cudaErrorInvalidValue);
    int *mine;
    CHECK(cudaMalloc(&mine, 4));
    FAILS(cudaIpcCloseMemHandle(mine), cudaErrorInvalidValue);
    CHECK(cudaIpcCloseMemHandle(values));
    FAILS(cudaIpcCloseMemHandle(values), cudaErrorInvalidValue);
    CHECK(cudaEventDestroy(first));
    CHECK(cudaEventDestroy(second));
    return 0;
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
    int *values;
    Message message;
    CHECK(cudaMalloc(&values, kCount * sizeof(int)));
    std::vector<int> host(kCount, 7);
    CHECK(cudaMemcpy(values, host.data(), kCount * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaIpcGetMemHandle(&message.memory, values));
    CHECK(cudaMemcpy(host.data(), values, kCount * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : host) REQUIRE(value == 7);  // what was there before
    FAILS(cudaIpcGetMemHandle(&message.memory, values + 1), cudaErrorInvalidValue);
    CHECK(cudaIpcGetMemHandle(&message.memory, values));
    void *own;
    REQUIRE(cudaIpcOpenMemHandle(&own, message.memory, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
    cudaGetLastError();
    cudaEvent_t first, second, local;
    FAILS(cudaEventCreateWithFlags(&first, cudaEventInterprocess), cudaErrorInvalidValue);
    CHECK(cudaEventCreateWithFlags(&first, cudaEventInterprocess | cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&second, cudaEventInterprocess | cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&local, cudaEventDisableTiming));
    CHECK(cudaIpcGetEventHandle(&message.first, first));
    CHECK(cudaIpcGetEventHandle(&message.second, second));
    cudaIpcEventHandle_t none;
    REQUIRE(cudaIpcGetEventHandle(&none, local) != cudaSuccess);
    cudaGetLastError();
    CHECK(cudaEventQuery(first));  // never recorded
    spin<<<1, 1>>>(20000000);
    set<<<8, 128>>>(values, 3);
    CHECK(cudaEventRecord(first));
    send(sockets[0], &message, sizeof message);
    await(sockets[0]);  // `second` is recorded
    CHECK(cudaStreamWaitEvent(nullptr, second, 0));
    add<<<8, 128>>>(values, 100);
    CHECK(cudaMemcpy(host.data(), values, kCount * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < kCount; i++) REQUIRE(host[i] == 3 * i + 105);
    CHECK(cudaEventSynchronize(second));
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(cudaMemset(values, 0, kCount * sizeof(int)));
    CHECK(cudaMemcpy(host.data(), values, kCount * sizeof(int), cudaMemcpyDeviceToHost));
    for (int value : host) REQUIRE(value == 0);
    CHECK(cudaFree(values));
    puts("ipc ok");
    return 0;
}
