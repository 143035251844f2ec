// queues CODE HOW: a program without HIP, which gives a queue of ROCr's its packets itself. For each line of standard input, it runs the
// kernel of store.hip twenty times, checks each result, and prints "done". HOW it takes places in the queue: "add", "store" or "cas";
// "signal" as "add", but the dispatch itself has a signal.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>

#include <hsa/hsa.h>
#include <hsa/hsa_ext_amd.h>

#define OK(call)                                                   \
    do {                                                           \
        if ((call) != HSA_STATUS_SUCCESS) {                        \
            fprintf(stderr, "%d: %s\n", __LINE__, #call), exit(1); \
        }                                                          \
    } while (0)

static hsa_agent_t gpu;
static hsa_amd_memory_pool_t shared_pool, argument_pool;

static hsa_status_t on_pool(hsa_amd_memory_pool_t pool, void *) {
    uint32_t flags = 0;
    hsa_amd_segment_t segment;
    OK(hsa_amd_memory_pool_get_info(pool, HSA_AMD_MEMORY_POOL_INFO_SEGMENT, &segment));
    if (segment != HSA_AMD_SEGMENT_GLOBAL) return HSA_STATUS_SUCCESS;
    OK(hsa_amd_memory_pool_get_info(pool, HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS, &flags));
    if (flags & HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_KERNARG_INIT) argument_pool = pool;
    else if (flags & HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED) shared_pool = pool;
    return HSA_STATUS_SUCCESS;
}

static hsa_status_t on_agent(hsa_agent_t agent, void *) {
    hsa_device_type_t type;
    OK(hsa_agent_get_info(agent, HSA_AGENT_INFO_DEVICE, &type));
    if (type == HSA_DEVICE_TYPE_GPU) gpu = agent;
    else OK(hsa_amd_agent_iterate_memory_pools(agent, on_pool, nullptr));
    return HSA_STATUS_SUCCESS;
}

template <class T>
static T *allocate(hsa_amd_memory_pool_t pool, size_t size) {
    void *made = nullptr;
    OK(hsa_amd_memory_pool_allocate(pool, size, 0, &made));
    OK(hsa_amd_agents_allow_access(1, &gpu, nullptr, made));
    return static_cast<T *>(made);
}

static uint64_t take(hsa_queue_t *queue, const std::string &how) {
    uint64_t index = hsa_queue_load_write_index_relaxed(queue);
    if (how == "store") hsa_queue_store_write_index_relaxed(queue, index + 1);
    else if (how == "cas")
        while (hsa_queue_cas_write_index_acq_rel(queue, index, index + 1) != index)
            index = hsa_queue_load_write_index_relaxed(queue);
    else index = hsa_queue_add_write_index_acq_rel(queue, 1);
    while (index - hsa_queue_load_read_index_acquire(queue) >= queue->size) {
    }
    return index;
}

template <class Packet>
static Packet *at(hsa_queue_t *queue, uint64_t index) {
    return static_cast<Packet *>(queue->base_address) + (index & (queue->size - 1));
}

static uint16_t header(int type) {
    return static_cast<uint16_t>(type << HSA_PACKET_HEADER_TYPE | 1 << HSA_PACKET_HEADER_BARRIER |
                                 HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_ACQUIRE_FENCE_SCOPE |
                                 HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_RELEASE_FENCE_SCOPE);
}

int main(int, char **argv) {
    const std::string how = argv[2];
    OK(hsa_init());
    OK(hsa_iterate_agents(on_agent, nullptr));
    hsa_code_object_reader_t reader;
    hsa_executable_t executable;
    hsa_executable_symbol_t symbol;
    OK(hsa_code_object_reader_create_from_file(open(argv[1], O_RDONLY), &reader));
    OK(hsa_executable_create_alt(HSA_PROFILE_FULL, HSA_DEFAULT_FLOAT_ROUNDING_MODE_DEFAULT, nullptr, &executable));
    OK(hsa_executable_load_agent_code_object(executable, gpu, reader, nullptr, nullptr));
    OK(hsa_executable_freeze(executable, nullptr));
    OK(hsa_executable_get_symbol_by_name(executable, "store.kd", &gpu, &symbol));
    uint64_t kernel;
    uint32_t size;
    OK(hsa_executable_symbol_get_info(symbol, HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_OBJECT, &kernel));
    OK(hsa_executable_symbol_get_info(symbol, HSA_EXECUTABLE_SYMBOL_INFO_KERNEL_KERNARG_SEGMENT_SIZE, &size));
    hsa_queue_t *queue;
    OK(hsa_queue_create(gpu, 64, HSA_QUEUE_TYPE_MULTI, nullptr, nullptr, UINT32_MAX, UINT32_MAX, &queue));
    hsa_signal_t done;
    OK(hsa_signal_create(1, 0, nullptr, &done));
    int *data = allocate<int>(shared_pool, 64 * sizeof(int));
    char *arguments = allocate<char>(argument_pool, size);
    memset(arguments, 0, size);
    memcpy(arguments, &data, sizeof data);
    puts("ready");
    fflush(stdout);
    char line[16];
    for (int round = 0; fgets(line, sizeof line, stdin); ++round) {
        for (int k = 0; k < 20; ++k) {
            const int value = round * 1000 + k;
            memcpy(arguments + sizeof data, &value, sizeof value);
            hsa_signal_store_relaxed(done, 1);
            uint64_t index = take(queue, how);
            auto *packet = at<hsa_kernel_dispatch_packet_t>(queue, index);
            memset(reinterpret_cast<char *>(packet) + 4, 0, sizeof *packet - 4);
            packet->workgroup_size_x = packet->grid_size_x = 64;
            packet->workgroup_size_y = packet->workgroup_size_z = packet->grid_size_y = packet->grid_size_z = 1;
            packet->kernel_object = kernel;
            packet->kernarg_address = arguments;
            if (how == "signal") packet->completion_signal = done;
            __atomic_store_n(reinterpret_cast<uint32_t *>(packet), header(HSA_PACKET_TYPE_KERNEL_DISPATCH) | 1u << 16,
                             __ATOMIC_RELEASE);
            hsa_signal_store_relaxed(queue->doorbell_signal, static_cast<int64_t>(index));
            if (how != "signal") {
                index = take(queue, how);
                auto *barrier = at<hsa_barrier_and_packet_t>(queue, index);
                memset(reinterpret_cast<char *>(barrier) + 4, 0, sizeof *barrier - 4);
                barrier->completion_signal = done;
                __atomic_store_n(reinterpret_cast<uint32_t *>(barrier), header(HSA_PACKET_TYPE_BARRIER_AND),
                                 __ATOMIC_RELEASE);
                hsa_signal_store_relaxed(queue->doorbell_signal, static_cast<int64_t>(index));
            }
            while (hsa_signal_wait_acquire(done, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX, HSA_WAIT_STATE_BLOCKED) > 0) {
            }
            for (int i = 0; i < 64; ++i)
                if (data[i] != value + i) return fprintf(stderr, "wrong in round %d\n", round), 1;
        }
        puts("done");
        fflush(stdout);
    }
    OK(hsa_queue_destroy(queue));
    OK(hsa_shut_down());
}
