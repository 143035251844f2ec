// A stand-in for NVIDIA's management library: two GPUs with known values. The second one has MIG, and lacks what GPUs with MIG lack.
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory;
typedef struct {
    unsigned gpu, memory;
} Utilization;
typedef struct {
    unsigned version;
    int sensor, temperature;
} Temperature;
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;
enum { kSuccess = 0, kInvalid = 2, kNotSupported = 3, kNotFound = 6, kTooSmall = 7 };
static char gpus[2], instance;
static int second(const void *device) { return device != &gpus[0]; }
int nvmlInit_v2(void) { return kSuccess; }
int nvmlShutdown(void) { return kSuccess; }
const char *nvmlErrorString(int code) { return code == kNotSupported ? "Not Supported" : "Another error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &gpus[index];
    return kSuccess;
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
    snprintf(name, size, device == &instance ? "NVIDIA Test MIG 1g" : "NVIDIA Test %d", second(device));
    return kSuccess;
}
int nvmlDeviceGetUUID(void *device, char *id, unsigned size) {
    snprintf(id, size, device == &instance ? "MIG-0" : "GPU-%d", second(device));
    return kSuccess;
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *rates) {
    rates->gpu = 95, rates->memory = 40;
    return second(device) ? kNotSupported : kSuccess;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *memory) {
    memory->total = 80ull << 30, memory->used = device == &instance ? 1ull << 30 : 40ull << 30;
    memory->free = memory->total - memory->used, memory->reserved = 0;
    return kSuccess;
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *clock) {
    *clock = type == 1 ? 1980 : 7;
    return kSuccess;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *power) {
    *power = 512345;
    return second(device) ? kNotSupported : kSuccess;
}
#ifndef OLD
int nvmlDeviceGetTemperatureV(void *device, Temperature *temperature) {
    temperature->temperature = 61;
    return kSuccess;
}
#endif
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) {
    *now = *later = second(device);
    return kSuccess;
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    *count = 7;
    return kSuccess;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **found) {
    *found = &instance;
    return index == 2 ? kSuccess : kNotFound;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *processes) {
    const unsigned there = second(device) ? 0 : 2, room = *count;
    *count = there;
    if (room < there) return kTooSmall;
    if (!there) return kSuccess;
    processes[0].pid = 1234, processes[0].used = 3ull << 30;
    processes[1].pid = 77, processes[1].used = ~0ull;
    return kSuccess;
}
