// Calls the functions of hsakmt.h as ROCr does, without ROCr. Each check is one argument; none runs all but the last.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#include <hsakmt.h>
#include <amd_hsa_queue.h>
#include <amd_hsa_signal.h>
#include <hsa.h>
#include <hsa_ext_amd.h>

extern "C" HSAKMT_STATUS hsaKmtAvailableMemory(HSAuint32 node, HSAuint64 *bytes);  // in newer headers

#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition)) {                                              \
            fprintf(stderr, "thunk.cpp:%d: %s\n", __LINE__, #condition); \
            _exit(1);                                                    \
        }                                                                \
    } while (0)
#define OK(call) CHECK((call) == HSAKMT_STATUS_SUCCESS)

static void sleep_ms(long ms) {
    timespec time{ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, nullptr);
}

template <typename Condition>
static void eventually(Condition condition) {
    for (int i = 0; i < 20000; i++) {
        if (condition()) return;
        sleep_ms(1);
    }
    CHECK(!"what was waited for did not happen in 20 s");
}

static void *host_memory(uint64_t size, bool mapped = true) {
    HsaMemFlags flags{};
    flags.ui32.HostAccess = 1;
    void *address = nullptr;
    OK(hsaKmtAllocMemory(0, size, flags, &address));
    if (mapped) OK(hsaKmtMapMemoryToGPU(address, size, nullptr));
    return address;
}

static void *device_memory(uint64_t size, uint32_t node = 1) {
    HsaMemFlags flags{};
    flags.ui32.NonPaged = flags.ui32.NoSubstitute = flags.ui32.HostAccess = 1;
    HsaMemMapFlags how{};
    void *address = nullptr;
    // Hostile mode lets an allocation fail now and then, but never twice in a row.
    if (hsaKmtAllocMemory(node, size, flags, &address) != HSAKMT_STATUS_SUCCESS)
        OK(hsaKmtAllocMemory(node, size, flags, &address));
    OK(hsaKmtMapMemoryToGPUNodes(address, size, nullptr, how, 1, &node));
    return address;
}

static HsaEvent *make_event(bool manual = false, HSA_EVENTTYPE type = HSA_EVENTTYPE_SIGNAL) {
    HsaEventDescriptor descriptor{};
    descriptor.EventType = type;
    HsaEvent *event = nullptr;
    OK(hsaKmtCreateEvent(&descriptor, manual, false, &event));
    return event;
}

static amd_signal_t *make_signal(int64_t value, HsaEvent *event = nullptr) {
    static char *next = static_cast<char *>(host_memory(64 * 4096));
    auto *signal = reinterpret_cast<amd_signal_t *>(next);
    next += sizeof(amd_signal_t);
    memset(signal, 0, sizeof(*signal));
    signal->kind = AMD_SIGNAL_KIND_USER;
    signal->value = value;
    if (event != nullptr) {
        signal->event_id = event->EventId;
        signal->event_mailbox_ptr = event->EventData.HWData2;
    }
    return signal;
}

static hsa_signal_t handle(amd_signal_t *signal) { return {reinterpret_cast<uint64_t>(signal)}; }
static int64_t value(const amd_signal_t *signal) { return __atomic_load_n(&signal->value, __ATOMIC_ACQUIRE); }

union Packet {
    uint16_t header;
    hsa_kernel_dispatch_packet_t dispatch;
    hsa_barrier_and_packet_t barrier;
    hsa_barrier_or_packet_t barrier_or;
    hsa_agent_dispatch_packet_t agent;
    hsa_amd_barrier_value_packet_t barrier_value;
};

struct AqlQueue {
    amd_queue_t *structure;
    Packet *ring;
    uint64_t size;
    HsaQueueResource resource{};

    explicit AqlQueue(uint64_t packets = 64, uint32_t node = 1) : size(packets) {
        structure = static_cast<amd_queue_t *>(host_memory(4096));
        memset(static_cast<void *>(structure), 0, sizeof(*structure));
        ring = static_cast<Packet *>(host_memory(packets * 64));
        for (uint64_t i = 0; i < packets; i++) ring[i].header = HSA_PACKET_TYPE_INVALID;
        structure->queue_inactive_signal = handle(make_signal(0));
        resource.Queue_read_ptr_aql = const_cast<uint64_t *>(&structure->read_dispatch_id);
        resource.Queue_write_ptr_aql = const_cast<uint64_t *>(&structure->write_dispatch_id);
        OK(hsaKmtCreateQueue(node, HSA_QUEUE_COMPUTE_AQL, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, packets * 64,
                             nullptr, &resource));
    }
    uint64_t reserve() { return __atomic_fetch_add(&structure->write_dispatch_id, 1, __ATOMIC_ACQ_REL); }
    void write(uint64_t index, Packet packet, uint16_t header) {
        Packet &slot = ring[index % size];
        packet.header = HSA_PACKET_TYPE_INVALID;
        slot = packet;
        __atomic_store_n(&slot.header, header, __ATOMIC_RELEASE);
    }
    void ring_doorbell(uint64_t index) {
        __atomic_store_n(resource.Queue_DoorBell_aql, index, __ATOMIC_RELEASE);
    }
    uint64_t submit(const Packet &packet, uint16_t type) {
        uint64_t index = reserve();
        eventually([&] { return index - read() < size; });
        write(index, packet, type);
        ring_doorbell(index);
        return index;
    }
    uint64_t read() const { return __atomic_load_n(&structure->read_dispatch_id, __ATOMIC_ACQUIRE); }
    int64_t error() const {
        return value(reinterpret_cast<amd_signal_t *>(structure->queue_inactive_signal.handle));
    }
};

// --- what newer versions of ROCr ask for before they use a device -----------------------------------------------

extern "C" HSAKMT_STATUS hsaKmtGetAMDGPUDeviceHandle(HSAuint32, void **);
extern "C" int amdgpu_query_gpu_info(void *, void *);

static void newer() {
    void *first, *second, *none;
    OK(hsaKmtGetAMDGPUDeviceHandle(1, &first));
    OK(hsaKmtGetAMDGPUDeviceHandle(2, &second));
    CHECK(first != second);
    CHECK(hsaKmtGetAMDGPUDeviceHandle(0, &none) == HSAKMT_STATUS_INVALID_NODE_UNIT);
    CHECK(hsaKmtGetAMDGPUDeviceHandle(3, &none) == HSAKMT_STATUS_INVALID_NODE_UNIT);
    CHECK(hsaKmtGetAMDGPUDeviceHandle(1, nullptr) == HSAKMT_STATUS_INVALID_PARAMETER);
    std::vector<uint32_t> info(1024);  // longer than struct amdgpu_gpu_info
    CHECK(amdgpu_query_gpu_info(first, info.data()) == 0 && info[18] == 1000000);  // gpu_counter_freq, in kHz
    int elsewhere;
    CHECK(amdgpu_query_gpu_info(&elsewhere, info.data()) != 0);  // no libdrm here
    HsaNodeProperties node;
    OK(hsaKmtGetNodeProperties(2, &node));
    uint32_t last[3];  // NumXcc, KFDGpuID, FamilyID of newer headers
    memcpy(last, &node.SGPRSizePerCU + 1, sizeof last);
    CHECK(last[0] == 1 && last[1] == 2 && last[2] == 141);
}

// --- events -----------------------------------------------------------------------------------------------------

static void events() {
    HsaEvent *event = make_event();
    CHECK(event->EventId > 0 && event->EventData.HWData2 != 0);
    CHECK(hsaKmtWaitOnEvent(event, 0) == HSAKMT_STATUS_WAIT_TIMEOUT);
    OK(hsaKmtSetEvent(event));
    OK(hsaKmtWaitOnEvent(event, 0));                                   // stays set: nobody waited
    CHECK(hsaKmtWaitOnEvent(event, 1) == HSAKMT_STATUS_WAIT_TIMEOUT);  // and resets itself
    OK(hsaKmtSetEvent(event));
    OK(hsaKmtResetEvent(event));
    CHECK(hsaKmtWaitOnEvent(event, 1) == HSAKMT_STATUS_WAIT_TIMEOUT);

    HsaEvent *manual = make_event(true);
    OK(hsaKmtSetEvent(manual));
    OK(hsaKmtWaitOnEvent(manual, 0));
    OK(hsaKmtWaitOnEvent(manual, 0));

    // One set wakes all that wait, and an event that somebody waited for does not stay set. On a busy machine a thread
    // may come to wait only after the set; then all are let go, and it is tried again.
    bool together = false;
    for (int attempt = 0; attempt < 20 && !together; attempt++) {
        std::atomic<int> woken{0};
        std::vector<std::thread> threads;
        for (int i = 0; i < 5; i++)
            threads.emplace_back([&] {
                OK(hsaKmtWaitOnEvent(event, HSA_EVENTTIMEOUT_INFINITE));
                woken++;
            });
        sleep_ms(100);
        OK(hsaKmtSetEvent(event));
        for (int waited = 0; waited < 1000 && woken < 5; waited++) sleep_ms(1);
        together = woken == 5;
        while (woken < 5) {
            OK(hsaKmtSetEvent(event));
            sleep_ms(1);
        }
        for (std::thread &thread : threads) thread.join();
        if (!together) OK(hsaKmtResetEvent(event));
    }
    CHECK(together);
    CHECK(hsaKmtWaitOnEvent(event, 1) == HSAKMT_STATUS_WAIT_TIMEOUT);
    CHECK(hsaKmtWaitOnEvent(event, 0xfffffffe) == HSAKMT_STATUS_WAIT_TIMEOUT);  // ROCr looks again

    HsaEvent *both[2] = {event, make_event()};
    OK(hsaKmtSetEvent(both[1]));
    OK(hsaKmtWaitOnMultipleEvents(both, 2, false, 0));
    std::thread later([&] {
        sleep_ms(20);
        hsaKmtSetEvent(both[0]);
        sleep_ms(20);
        hsaKmtSetEvent(both[1]);
    });
    OK(hsaKmtWaitOnMultipleEvents(both, 2, true, HSA_EVENTTIMEOUT_INFINITE));
    later.join();

    // An event that is destroyed does not leave its waiter behind.
    std::thread waiter(
        [&] { CHECK(hsaKmtWaitOnEvent(both[1], HSA_EVENTTIMEOUT_INFINITE) == HSAKMT_STATUS_ERROR); });
    sleep_ms(50);
    OK(hsaKmtDestroyEvent(both[1]));
    waiter.join();
    CHECK(hsaKmtDestroyEvent(both[1]) == HSAKMT_STATUS_INVALID_HANDLE);
    CHECK(hsaKmtSetEvent(nullptr) == HSAKMT_STATUS_INVALID_HANDLE);
    CHECK(hsaKmtWaitOnEvent(nullptr, 0) == HSAKMT_STATUS_INVALID_HANDLE);
    CHECK(hsaKmtWaitOnMultipleEvents(nullptr, 1, false, 0) == HSAKMT_STATUS_INVALID_HANDLE);

    // As many as KFD has.
    std::vector<HsaEvent *> many;
    HsaEventDescriptor descriptor{};
    for (HsaEvent *next = nullptr;
         hsaKmtCreateEvent(&descriptor, false, false, &next) == HSAKMT_STATUS_SUCCESS;)
        many.push_back(next);
    CHECK(many.size() > 4000 && many.size() < 4096);
    for (HsaEvent *one : many) OK(hsaKmtDestroyEvent(one));
}

// --- SDMA -------------------------------------------------------------------------------------------------------

struct SdmaQueue {
    uint32_t *ring;
    uint64_t bytes = 1 << 16, index = 0;
    HsaQueueResource resource{};
    SdmaQueue() : ring(static_cast<uint32_t *>(host_memory(1 << 16))) {
        OK(hsaKmtCreateQueue(1, HSA_QUEUE_SDMA, 100, HSA_QUEUE_PRIORITY_MAXIMUM, ring, bytes, nullptr,
                             &resource));
        CHECK(*resource.Queue_write_ptr_aql == 0 && *resource.Queue_read_ptr_aql == 0);
    }
    void put(const std::vector<uint32_t> &words) {
        for (uint32_t word : words) {
            ring[index % bytes / 4] = word;
            index += 4;
        }
    }
    void go() {
        __atomic_store_n(resource.Queue_write_ptr_aql, index, __ATOMIC_RELEASE);
        __atomic_store_n(resource.Queue_DoorBell_aql, index, __ATOMIC_RELEASE);
    }
    void finish() {
        go();
        eventually([&] { return __atomic_load_n(resource.Queue_read_ptr_aql, __ATOMIC_ACQUIRE) == index; });
    }
};

static uint32_t low(const volatile void *address) {
    return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address));
}
static uint32_t high(const volatile void *address) {
    return static_cast<uint32_t>(reinterpret_cast<uint64_t>(address) >> 32);
}

// --- memory -----------------------------------------------------------------------------------------------------

static void memory() {
    HsaSystemProperties system{};
    OK(hsaKmtAcquireSystemProperties(&system));
    CHECK(system.NumNodes == 3);  // HIPSIM_DEVICES=2
    HsaNodeProperties node{};
    OK(hsaKmtGetNodeProperties(1, &node));
    CHECK(node.NumFComputeCores > 0 && node.EngineId.ui32.Major == 9 && node.NumIOLinks == 2);
    CHECK(hsaKmtGetNodeProperties(3, &node) == HSAKMT_STATUS_INVALID_NODE_UNIT);

    HSAuint64 before, during, after;
    OK(hsaKmtAvailableMemory(1, &before));
    auto *memory = static_cast<char *>(device_memory(4 << 20));
    OK(hsaKmtAvailableMemory(1, &during));
    CHECK(before - during == 4 << 20);
    memory[0] = memory[(4 << 20) - 1] = 7;
    HsaPointerInfo info{};
    OK(hsaKmtQueryPointerInfo(memory + 12345, &info));
    CHECK(info.Type == HSA_POINTER_ALLOCATED && info.CPUAddress == memory && info.SizeInBytes == 4 << 20 &&
          info.Node == 1);
    CHECK(info.NMappedNodes == 1 && info.MappedNodes[0] == 1);
    CHECK(hsaKmtQueryPointerInfo(memory + (4 << 20), &info) != HSAKMT_STATUS_SUCCESS &&
          info.Type == HSA_POINTER_UNKNOWN);
    OK(hsaKmtSetMemoryUserData(memory, &node));
    OK(hsaKmtQueryPointerInfo(memory, &info));
    CHECK(info.UserData == &node);
    CHECK(hsaKmtFreeMemory(memory + 4096, 4096) != HSAKMT_STATUS_SUCCESS);
    OK(hsaKmtFreeMemory(memory, 4 << 20));
    CHECK(hsaKmtFreeMemory(memory, 4 << 20) != HSAKMT_STATUS_SUCCESS);  // twice
    CHECK(hsaKmtFreeMemory(nullptr, 4096) != HSAKMT_STATUS_SUCCESS);
    OK(hsaKmtAvailableMemory(1, &after));
    CHECK(after == before);

    HsaMemFlags flags{};
    flags.ui32.NonPaged = flags.ui32.HostAccess = 1;
    void *address = nullptr;
    CHECK(hsaKmtAllocMemory(1, before + 4096, flags, &address) == HSAKMT_STATUS_NO_MEMORY);
    CHECK(hsaKmtAllocMemory(1, 100, flags, &address) == HSAKMT_STATUS_INVALID_PARAMETER);
    CHECK(hsaKmtAllocMemory(1, 0, flags, &address) == HSAKMT_STATUS_INVALID_PARAMETER);
    CHECK(hsaKmtAllocMemory(9, 4096, flags, &address) == HSAKMT_STATUS_INVALID_NODE_UNIT);
    CHECK(hsaKmtAllocMemory(1, ~uint64_t{4095}, flags, &address) == HSAKMT_STATUS_NO_MEMORY);

    // The program's own memory, registered twice: two lives.
    auto *own = static_cast<char *>(aligned_alloc(4096, 8 << 12));
    flags.Value = 0;
    flags.ui32.HostAccess = 1;
    OK(hsaKmtRegisterMemoryWithFlags(own + 100, 5000, flags));
    OK(hsaKmtRegisterMemoryWithFlags(own + 100, 5000, flags));
    OK(hsaKmtQueryPointerInfo(own + 100 + 4999, &info));
    CHECK(info.Type == HSA_POINTER_REGISTERED_USER && info.CPUAddress == own + 100 &&
          info.SizeInBytes == 5000);
    CHECK(hsaKmtQueryPointerInfo(own + 99, &info) != HSAKMT_STATUS_SUCCESS);
    // The device has an address of its own for it, by which it is found, too.
    HSAuint64 there = 0;
    OK(hsaKmtMapMemoryToGPU(own + 100, 5000, &there));
    CHECK(there != 0 && there != reinterpret_cast<uint64_t>(own + 100));
    OK(hsaKmtQueryPointerInfo(reinterpret_cast<void *>(there + 7), &info));
    CHECK(info.CPUAddress == own + 100 && info.GPUAddress == there && info.NMappedNodes == 2);
    SdmaQueue queue;
    own[100 + 4000] = 'x';
    auto *copy = static_cast<char *>(device_memory(4096));
    auto *alias = reinterpret_cast<void *>(there + 4000);
    queue.put({1, 1 - 1, 0, low(alias), high(alias), low(copy), high(copy)});
    queue.finish();
    CHECK(copy[0] == 'x');
    OK(hsaKmtDeregisterMemory(own + 100));
    OK(hsaKmtQueryPointerInfo(own + 100, &info));
    OK(hsaKmtDeregisterMemory(own + 100));
    CHECK(hsaKmtDeregisterMemory(own + 100) == HSAKMT_STATUS_MEMORY_NOT_REGISTERED);

    // Each allocation ends at memory that nobody has.
    char *first = static_cast<char *>(device_memory(8192)),
         *second = static_cast<char *>(device_memory(8192));
    CHECK(first + 8192 != second && second + 8192 != first);
    // Scratch is address space: 4 GiB of it.
    flags.Value = 0;
    flags.ui32.Scratch = flags.ui32.HostAccess = 1;
    OK(hsaKmtAllocMemory(1, uint64_t{4} << 30, flags, &address));
    OK(hsaKmtFreeMemory(address, uint64_t{4} << 30));
}

// --- copies --------------------------------------------------------------------------------------------------

static void copies() {
    SdmaQueue queue;
    auto *from = static_cast<uint8_t *>(host_memory(1 << 20)),
         *to = static_cast<uint8_t *>(device_memory(1 << 20));
    for (int i = 0; i < 1 << 20; i++) from[i] = static_cast<uint8_t>(i * 7 + i / 251);

    // Linear, with odd sizes and addresses, and the bytes around untouched.
    queue.put({1, 12345 - 1, 0, low(from + 3), high(from + 3), low(to + 5), high(to + 5)});
    queue.finish();
    CHECK(memcmp(to + 5, from + 3, 12345) == 0 && to[4] == 0 && to[5 + 12345] == 0);

    // ROCr 6.1 copies more than 4 MiB at once on newer GPUs.
    constexpr size_t large = (5 << 20) + 3;
    auto *many = static_cast<uint8_t *>(device_memory(6 << 20));
    auto *all = static_cast<uint8_t *>(host_memory(6 << 20));
    for (size_t i = 0; i < large; i++) all[i] = static_cast<uint8_t>(i * 5 + i / 253);
    queue.put({1, large - 1, 0, low(all), high(all), low(many), high(many)});
    queue.finish();
    CHECK(memcmp(many, all, large) == 0 && many[large] == 0);

    // A window of 5 x 3 x 2 elements of 4 bytes, at (1, 2, 0) in the source and (0, 1, 1) in the target.
    memset(to, 0, 1 << 20);
    auto *source = reinterpret_cast<uint32_t *>(from), *target = reinterpret_cast<uint32_t *>(to);
    queue.put({1 | 4 << 8 | 2u << 29, low(from), high(from), 1 | 2 << 16, 0 | (10 - 1) << 13, 100 - 1,
               low(to), high(to), 0 | 1 << 16, 1 | (8 - 1) << 13, 64 - 1, (5 - 1) | (3 - 1) << 16, 2 - 1});
    queue.finish();
    int copied = 0;
    for (int z = 0; z < 2; z++)
        for (int y = 0; y < 3; y++)
            for (int x = 0; x < 5; x++, copied++)
                CHECK(target[x + (1 + y) * 8 + (1 + z) * 64] == source[1 + x + (2 + y) * 10 + z * 100]);
    int set = 0;
    for (int i = 0; i < 1 << 18; i++) set += target[i] != 0;
    CHECK(set == copied);

    // Fill, write, fence, and NOPs of one and of four words.
    queue.put({11 | 2u << 30, low(to), high(to), 0xabcd1234, (100 - 1) * 4});
    queue.put({0, 0 | 3 << 16, 9, 9, 9});
    queue.put({2, low(to + 4096), high(to + 4096), 2 - 1, 11, 22});
    queue.put({5, low(to + 8192), high(to + 8192), 77});
    queue.finish();
    for (int i = 0; i < 100; i++) CHECK(target[i] == 0xabcd1234);
    CHECK(target[1024] == 11 && target[1025] == 22 && target[1026] == 0 && target[2048] == 77);

    // What ROCr appends to a copy: wait for a signal, timestamps, decrement, mailbox, interrupt.
    HsaEvent *event = make_event();
    amd_signal_t *before = make_signal(1), *done = make_signal(5, event);
    queue.put(
        {8 | 3 << 28 | 1u << 31, low(&before->value), high(&before->value), 0, 0xffffffff, 4 | 0xfff << 16});
    queue.put({13 | 2 << 8, low(&done->start_ts), high(&done->start_ts)});
    queue.put({8, 0, 0x80000000, 0, 0, 0});  // flush of the host's data path
    queue.put({1, 1024 - 1, 0, low(from), high(from), low(to), high(to)});
    queue.put({13 | 2 << 8, low(&done->end_ts), high(&done->end_ts)});
    queue.put({10 | 47u << 25, low(&done->value), high(&done->value), 0xffffffff, 0xffffffff, 0, 0, 0});
    auto *mailbox = reinterpret_cast<void *>(event->EventData.HWData2);
    queue.put({5, low(mailbox), high(mailbox), event->EventId});
    queue.put({6, event->EventId});
    queue.go();
    sleep_ms(30);
    CHECK(value(done) == 5 && to[0] == 0x34);
    __atomic_store_n(&before->value, 0, __ATOMIC_RELEASE);
    OK(hsaKmtWaitOnEvent(event, 20000));
    CHECK(value(done) == 4 && memcmp(to, from, 1024) == 0);
    CHECK(done->start_ts > 0 && done->end_ts >= done->start_ts);

    // The ring wraps; indices do not.
    for (int round = 0; round < 20000; round++) {
        if (queue.bytes - queue.index % queue.bytes < 28) {
            while (queue.index % queue.bytes != 0) queue.put({0});
        }
        from[0] = static_cast<uint8_t>(round);
        queue.put({1, 64 - 1, 0, low(from), high(from), low(to), high(to)});
        if (round % 100 == 99) {
            queue.finish();
            CHECK(to[0] == from[0]);
        }
    }
    CHECK(queue.index > queue.bytes * 4);
    OK(hsaKmtDestroyQueue(queue.resource.QueueId));
    CHECK(hsaKmtDestroyQueue(queue.resource.QueueId) != HSAKMT_STATUS_SUCCESS);
}

// --- AQL --------------------------------------------------------------------------------------------------------

static uint16_t type(int number) { return static_cast<uint16_t>(number << HSA_PACKET_HEADER_TYPE); }

static void barriers() {
    AqlQueue queue(64), other(64);
    HsaEvent *event = make_event();
    amd_signal_t *done = make_signal(1, event), *a = make_signal(1), *b = make_signal(1), *c = make_signal(1);

    Packet packet{};
    packet.barrier.completion_signal = handle(done);
    queue.submit(packet, type(HSA_PACKET_TYPE_BARRIER_AND));  // depends on nothing
    OK(hsaKmtWaitOnEvent(event, 20000));
    eventually([&] { return value(done) == 0; });
    CHECK(queue.read() == 1 && queue.ring[0].header == type(HSA_PACKET_TYPE_INVALID));
    CHECK(done->start_ts > 0 && done->end_ts >= done->start_ts);

    // and: waits for both. Another queue goes on meanwhile.
    packet.barrier.dep_signal[0] = handle(a);
    packet.barrier.dep_signal[4] = handle(b);
    packet.barrier.completion_signal = handle(c);
    queue.submit(packet, type(HSA_PACKET_TYPE_BARRIER_AND));
    Packet empty{};
    other.submit(empty, type(HSA_PACKET_TYPE_BARRIER_OR));
    eventually([&] { return other.read() == 1; });
    __atomic_store_n(&a->value, 0, __ATOMIC_RELEASE);
    sleep_ms(20);
    CHECK(value(c) == 1 && queue.read() == 1);
    __atomic_store_n(&b->value, 0, __ATOMIC_RELEASE);
    eventually([&] { return value(c) == 0; });
    CHECK(queue.read() == 2);

    // or: one is enough.
    a->value = b->value = c->value = 1;
    queue.submit(packet, type(HSA_PACKET_TYPE_BARRIER_OR));
    sleep_ms(20);
    CHECK(value(c) == 1);
    __atomic_store_n(&b->value, 0, __ATOMIC_RELEASE);
    eventually([&] { return value(c) == 0; });

    // barrier-value: (value & mask) condition reference.
    struct {
        uint32_t condition;
        int64_t closed, open;
    } cases[] = {{HSA_SIGNAL_CONDITION_EQ, 0x10, 0xf5},
                 {HSA_SIGNAL_CONDITION_NE, 0x05, 0x06},
                 {HSA_SIGNAL_CONDITION_LT, 0x06, 0x13},
                 {HSA_SIGNAL_CONDITION_GTE, 0x14, 0x05}};
    for (auto &one : cases) {
        a->value = one.closed;
        c->value = 1;
        Packet wait{};
        wait.barrier_value.header.AmdFormat = HSA_AMD_PACKET_TYPE_BARRIER_VALUE;
        wait.barrier_value.signal = handle(a);
        wait.barrier_value.mask = 0xf;
        wait.barrier_value.value = 5;
        wait.barrier_value.cond = one.condition;
        wait.barrier_value.completion_signal = handle(c);
        queue.submit(wait, type(HSA_PACKET_TYPE_VENDOR_SPECIFIC));
        sleep_ms(5);
        CHECK(value(c) == 1);
        __atomic_store_n(&a->value, one.open, __ATOMIC_RELEASE);
        eventually([&] { return value(c) == 0; });
    }

    // PM4 that flushes caches.
    Packet pm4{};
    pm4.barrier_value.header.AmdFormat = 1;
    uint64_t index = queue.submit(pm4, type(HSA_PACKET_TYPE_VENDOR_SPECIFIC));
    eventually([&] { return queue.read() == index + 1; });

    // Many packets, several rounds, by four threads whose doorbells come in any order.
    amd_signal_t *count = make_signal(4000);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&] {
            for (int i = 0; i < 1000; i++) {
                Packet one{};
                one.barrier.completion_signal = handle(count);
                queue.submit(one, type(HSA_PACKET_TYPE_BARRIER_AND));
            }
        });
    for (std::thread &thread : threads) thread.join();
    eventually([&] { return value(count) == 0; });

    // A packet that is not written yet holds up those behind it.
    uint64_t late = queue.reserve();
    amd_signal_t *behind = make_signal(1);
    Packet last{};
    last.barrier.completion_signal = handle(behind);
    queue.submit(last, type(HSA_PACKET_TYPE_BARRIER_AND));
    sleep_ms(20);
    CHECK(value(behind) == 1 && queue.read() == late);
    queue.write(late, empty, type(HSA_PACKET_TYPE_BARRIER_AND));
    queue.ring_doorbell(late);
    eventually([&] { return value(behind) == 0; });

    // A suspended queue takes no packets.
    OK(hsaKmtUpdateQueue(queue.resource.QueueId, 0, HSA_QUEUE_PRIORITY_NORMAL, queue.ring, 64 * 64, nullptr));
    behind->value = 1;
    queue.submit(last, type(HSA_PACKET_TYPE_BARRIER_AND));
    sleep_ms(20);
    CHECK(value(behind) == 1);
    OK(hsaKmtUpdateQueue(queue.resource.QueueId, 100, HSA_QUEUE_PRIORITY_NORMAL, queue.ring, 64 * 64,
                         nullptr));
    eventually([&] { return value(behind) == 0; });

    uint32_t mask[1] = {0xff};
    OK(hsaKmtSetQueueCUMask(queue.resource.QueueId, 32, mask));
    CHECK(hsaKmtSetQueueCUMask(queue.resource.QueueId, 31, mask) == HSAKMT_STATUS_INVALID_PARAMETER);

    // A queue can be destroyed while a barrier waits.
    a->value = 1;
    packet.barrier.completion_signal = handle(c);
    queue.submit(packet, type(HSA_PACKET_TYPE_BARRIER_AND));
    sleep_ms(10);
    OK(hsaKmtDestroyQueue(queue.resource.QueueId));
}

// Packets that cannot be processed: the queue stops, and its inactive signal tells why.
static void bad_packets() {
    auto fails = [](const Packet &packet, uint16_t header, int64_t code) {
        AqlQueue queue(64);
        queue.submit(packet, header);
        eventually([&] { return queue.error() != 0; });
        CHECK(queue.error() == code);
        Packet empty{};
        queue.submit(empty, type(HSA_PACKET_TYPE_BARRIER_AND));
        sleep_ms(5);
        CHECK(queue.read() == 0);
        OK(hsaKmtDestroyQueue(queue.resource.QueueId));
    };
    Packet packet{};
    fails(packet, type(HSA_PACKET_TYPE_AGENT_DISPATCH), 32);
    fails(packet, type(77), 32);
    packet.barrier_value.header.AmdFormat = 9;
    fails(packet, type(HSA_PACKET_TYPE_VENDOR_SPECIFIC), 256);

    memset(static_cast<void *>(&packet), 0, sizeof(packet));
    auto &kernel = packet.dispatch;
    fails(packet, type(HSA_PACKET_TYPE_KERNEL_DISPATCH), 2);  // no dimensions
    kernel.setup = 3;
    kernel.grid_size_x = kernel.grid_size_y = kernel.grid_size_z = 64;
    fails(packet, type(HSA_PACKET_TYPE_KERNEL_DISPATCH), 2);  // no workgroup
    kernel.workgroup_size_x = 64;
    kernel.workgroup_size_y = 64;
    kernel.workgroup_size_z = 1;
    fails(packet, type(HSA_PACKET_TYPE_KERNEL_DISPATCH), 64);
    kernel.workgroup_size_y = 1;
    kernel.group_segment_size = 65537;
    fails(packet, type(HSA_PACKET_TYPE_KERNEL_DISPATCH), 4);
    kernel.group_segment_size = 0;
    fails(packet, type(HSA_PACKET_TYPE_KERNEL_DISPATCH), 8);  // no code
    kernel.kernel_object = 0x123400;
    fails(packet, type(HSA_PACKET_TYPE_KERNEL_DISPATCH), 8);

    AqlQueue queue(64);
    HsaQueueResource resource{};
    uint64_t read = 0, write = 0;
    resource.Queue_read_ptr_aql = &read;
    resource.Queue_write_ptr_aql = &write;
    auto create = [&](uint32_t node, HSA_QUEUE_TYPE type, void *ring, uint64_t bytes) {
        return hsaKmtCreateQueue(node, type, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, bytes, nullptr, &resource);
    };
    CHECK(create(0, HSA_QUEUE_COMPUTE_AQL, queue.ring, 4096) == HSAKMT_STATUS_INVALID_NODE_UNIT);
    CHECK(create(1, HSA_QUEUE_COMPUTE_AQL, queue.ring, 4095) == HSAKMT_STATUS_INVALID_PARAMETER);
    CHECK(create(1, HSA_QUEUE_COMPUTE_AQL, &read, 4096) == HSAKMT_STATUS_INVALID_PARAMETER);
    CHECK(create(1, HSA_QUEUE_COMPUTE_AQL, queue.ring, 4096) == HSAKMT_STATUS_INVALID_PARAMETER);  // not the device's
    resource.Queue_read_ptr_aql = reinterpret_cast<uint64_t *>(0x1000);
    resource.Queue_write_ptr_aql = reinterpret_cast<uint64_t *>(0x2000);
    CHECK(create(1, HSA_QUEUE_COMPUTE_AQL, queue.ring, 4096) == HSAKMT_STATUS_INVALID_PARAMETER);
    CHECK(create(1, HSA_QUEUE_MULTIMEDIA_DECODE, queue.ring, 4096) == HSAKMT_STATUS_NOT_SUPPORTED);
    CHECK(hsaKmtUpdateQueue(12345, 0, HSA_QUEUE_PRIORITY_NORMAL, nullptr, 0, nullptr) !=
          HSAKMT_STATUS_SUCCESS);
}

// A copy from memory that the device does not have is a memory fault: the event tells node, page and reason.
static void faults() {
    HsaEvent *event = make_event(true, HSA_EVENTTYPE_MEMORY);
    SdmaQueue queue;
    auto *to = static_cast<uint8_t *>(device_memory(8192));
    auto *from = static_cast<uint8_t *>(host_memory(4096, false)) + 100;
    queue.put({1, 64 - 1, 0, low(from), high(from), low(to), high(to)});
    queue.go();
    OK(hsaKmtWaitOnEvent(event, 20000));
    const HsaMemoryAccessFault &fault = event->EventData.EventData.MemoryAccessFault;
    CHECK(fault.Flags == HSA_EVENTID_MEMORY_FATAL_PROCESS && fault.NodeId == 1);
    CHECK(fault.VirtualAddress == (reinterpret_cast<uint64_t>(from) & ~uint64_t{4095}));
    CHECK(fault.Failure.NotPresent == 1 && fault.Failure.ReadOnly == 0);
    CHECK(*queue.resource.Queue_read_ptr_aql == 0);
}

// Another process maps the memory and changes it.
static void shared() {
    int channel[2], back[2];
    CHECK(pipe(channel) == 0 && pipe(back) == 0);
    pid_t child = fork();  // before the device is used, as with any GPU
    if (child == 0) {
        HsaSharedMemoryHandle handle;
        CHECK(read(channel[0], &handle, sizeof(handle)) == sizeof(handle));
        void *address;
        HSAuint64 size;
        OK(hsaKmtRegisterSharedHandle(&handle, &address, &size));
        CHECK(size == 2 << 20);
        auto *words = static_cast<uint32_t *>(address);
        CHECK(words[5] == 55);
        words[6] = 66;
        HsaPointerInfo info{};
        OK(hsaKmtQueryPointerInfo(address, &info));
        CHECK(info.Type == HSA_POINTER_REGISTERED_SHARED);
        OK(hsaKmtMapMemoryToGPU(address, size, nullptr));
        OK(hsaKmtUnmapMemoryToGPU(address));
        OK(hsaKmtDeregisterMemory(address));
        handle[3]++;
        CHECK(hsaKmtRegisterSharedHandle(&handle, &address, &size) != HSAKMT_STATUS_SUCCESS);
        handle[3]--;
        // Handles whose check is right, but which name another file of the process: a pipe, and a file that is shorter.
        int other = memfd_create("hipsim device memory", 0);
        CHECK(ftruncate(other, 4096) == 0);
        for (int file : {channel[0], other}) {
            uint32_t words[8];
            memcpy(words, &handle, sizeof words);
            words[1] = uint32_t(getpid());
            words[7] ^= words[2] * 5 ^ uint32_t(file) * 5 ^ handle[1] * 3 ^ words[1] * 3;
            words[2] = uint32_t(file);
            HsaSharedMemoryHandle wild;
            memcpy(&wild, words, sizeof wild);
            CHECK(hsaKmtRegisterSharedHandle(&wild, &address, &size) == HSAKMT_STATUS_INVALID_PARAMETER);
        }
        CHECK(write(back[1], "x", 1) == 1);
        _exit(0);
    }
    device_memory(4096);
    auto *words = static_cast<uint32_t *>(device_memory(2 << 20));
    words[5] = 55;
    HsaSharedMemoryHandle handle;
    CHECK(hsaKmtShareMemory(words, 4096, &handle) != HSAKMT_STATUS_SUCCESS);
    OK(hsaKmtShareMemory(words, 2 << 20, &handle));
    CHECK(write(channel[1], &handle, sizeof(handle)) == sizeof(handle));
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(words[6] == 66);
}

// Memory that is freed while copies run: no crash, and the copies that find it gone are faults.
static void freed() {
    HsaEvent *event = make_event(true, HSA_EVENTTYPE_MEMORY);
    SdmaQueue queue;
    auto *to = static_cast<uint8_t *>(device_memory(4 << 20)),
         *from = static_cast<uint8_t *>(device_memory(4 << 20));
    for (int i = 0; i < 2000; i++) queue.put({1, (4 << 20) - 1, 0, low(from), high(from), low(to), high(to)});
    queue.go();
    sleep_ms(2);
    OK(hsaKmtFreeMemory(from, 4 << 20));
    OK(hsaKmtWaitOnEvent(event, 60000));
}

int main(int count, char **arguments) {
    std::map<std::string, std::function<void()>> checks = {
        {"events", events},           {"memory", memory}, {"copies", copies}, {"barriers", barriers},
        {"bad_packets", bad_packets}, {"faults", faults}, {"shared", shared}, {"freed", freed}, {"newer", newer}};
    CHECK(count == 2 && checks.count(arguments[1]) == 1);
    if (std::string(arguments[1]) != "shared") OK(hsaKmtOpenKFD());
    checks[arguments[1]]();
    puts("ok");
}
