// A program of HSA without HIP, as other runtimes are: a code object from a file, and packets by hand.
//
//   hsa_alone CODE_OBJECT [TIMES [NESTED]]
//
// It initializes ROCr, launches `seen` 10 times, destroys its queue right after the last kernel, and shuts ROCr down; TIMES times. With
// NESTED, each time consists of two calls of hsa_init and two of hsa_shut_down.
#include <fcntl.h>
#include <hsa/hsa.h>
#include <hsa/hsa_ext_amd.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(call)                                                               \
    do {                                                                       \
        hsa_status_t status = (call);                                          \
        if (status != HSA_STATUS_SUCCESS && status != HSA_STATUS_INFO_BREAK) { \
            printf("%s: 0x%x\n", #call, status);                               \
            exit(9);                                                           \
        }                                                                      \
    } while (0)

enum { LAUNCHES = 10, THREADS = 128, BLOCK = 64, SIZE = 4096 };

static hsa_agent_t gpu, cpu;
static hsa_amd_memory_pool_t arguments_pool;

static hsa_status_t on_agent(hsa_agent_t agent, void *data) {
    (void)data;
    hsa_device_type_t type;
    hsa_agent_get_info(agent, HSA_AGENT_INFO_DEVICE, &type);
    if (type == HSA_DEVICE_TYPE_GPU && !gpu.handle) gpu = agent;
    if (type == HSA_DEVICE_TYPE_CPU && !cpu.handle) cpu = agent;
    return HSA_STATUS_SUCCESS;
}

static hsa_status_t on_pool(hsa_amd_memory_pool_t pool, void *data) {
    (void)data;
    uint32_t flags = 0;
    hsa_amd_memory_pool_get_info(pool, HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS, &flags);
    if (flags & HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_KERNARG_INIT) arguments_pool = pool;
    return HSA_STATUS_SUCCESS;
}

static void *memory(void) {
    void *made;
    OK(hsa_amd_memory_pool_allocate(arguments_pool, SIZE, 0, &made));
    OK(hsa_amd_agents_allow_access(1, &gpu, NULL, made));
    return memset(made, 0, SIZE);
}

static void launch(hsa_queue_t *queue, uint64_t object, void *arguments, hsa_signal_t done) {
    uint64_t at = hsa_queue_load_write_index_relaxed(queue);
    hsa_kernel_dispatch_packet_t *packet =
        (hsa_kernel_dispatch_packet_t *)queue->base_address + (at & (queue->size - 1));
    memset((char *)packet + 4, 0, sizeof *packet - 4);
    packet->workgroup_size_x = BLOCK;
    packet->grid_size_x = THREADS;
    packet->workgroup_size_y = packet->workgroup_size_z = packet->grid_size_y = packet->grid_size_z = 1;
    packet->kernel_object = object;
    packet->kernarg_address = arguments;
    packet->completion_signal = done;
    uint32_t header = HSA_PACKET_TYPE_KERNEL_DISPATCH | 1 << HSA_PACKET_HEADER_BARRIER |
                      HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_ACQUIRE_FENCE_SCOPE |
                      HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_RELEASE_FENCE_SCOPE;
    __atomic_store_n((uint32_t *)packet, header | 1u << 16, __ATOMIC_RELEASE);
    hsa_queue_store_write_index_release(queue, at + 1);
    hsa_signal_store_relaxed(queue->doorbell_signal, (hsa_signal_value_t)at);
}

static int run(const char *file) {
    gpu.handle = cpu.handle = 0;
    OK(hsa_iterate_agents(on_agent, NULL));
    OK(hsa_amd_agent_iterate_memory_pools(cpu, on_pool, NULL));
    hsa_file_t code = open(file, O_RDONLY);
    hsa_code_object_reader_t reader;
    hsa_executable_t executable;
    hsa_executable_symbol_t symbol;
    uint64_t object;
    OK(hsa_code_object_reader_create_from_file(code, &reader));
    OK(hsa_executable_create_alt(HSA_PROFILE_FULL, HSA_DEFAULT_FLOAT_ROUNDING_MODE_DEFAULT, NULL,
                                 &executable));
    OK(hsa_executable_load_agent_code_object(executable, gpu, reader, NULL, NULL));
    OK(hsa_executable_freeze(executable, NULL));
    OK(hsa_executable_get_symbol_by_name(executable, "seen.kd", &gpu, &symbol));
    OK(hsa_executable_symbol_get_info(symbol, HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_OBJECT, &object));
    int *seen = memory(), counted = 0;
    void **arguments = memory();
    arguments[0] = seen;
    hsa_queue_t *queue;
    hsa_signal_t done;
    OK(hsa_queue_create(gpu, 64, HSA_QUEUE_TYPE_SINGLE, NULL, NULL, UINT32_MAX, UINT32_MAX, &queue));
    OK(hsa_signal_create(1, 0, NULL, &done));
    for (int i = 0; i < LAUNCHES; i++) {
        hsa_signal_store_relaxed(done, 1);
        launch(queue, object, arguments, done);
        while (
            hsa_signal_wait_scacquire(done, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX, HSA_WAIT_STATE_ACTIVE)) {
        }
    }
    OK(hsa_queue_destroy(queue));
    for (int i = 0; i < THREADS; i++) counted += seen[i];
    OK(hsa_signal_destroy(done));
    OK(hsa_executable_destroy(executable));
    OK(hsa_code_object_reader_destroy(reader));
    OK(hsa_amd_memory_pool_free(seen));
    OK(hsa_amd_memory_pool_free(arguments));
    close(code);
    return counted;
}

int main(int count, char **values) {
    int times = count > 2 ? atoi(values[2]) : 1, nested = count > 3 ? 2 : 1, counted = 0;
    for (int i = 0; i < times; i++) {
        for (int n = 0; n < nested; n++) OK(hsa_init());
        counted += run(values[1]);
        for (int n = 0; n < nested; n++) OK(hsa_shut_down());
    }
    printf("%d of %d\n", counted, times * LAUNCHES * THREADS);
}
