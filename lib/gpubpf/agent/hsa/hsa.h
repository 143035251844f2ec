/*
 * hsa.h: the parts of ROCr's interface (libhsa-runtime64.so.1) used by this agent and by calls/device_times/hsa_agent.c. They are
 * declared here so that the build does not need ROCm. For C and C++.
 *
 * The declarations follow the published headers hsa.h, hsa_ext_amd.h, hsa_api_trace.h and amd_hsa_signal.h of ROCr 5.2 to 6.2. Each
 * function table states its size. Most tables only grow at the end, so indices stay valid.
 */
#pragma once
/* clang-format off */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define HSA_CHECK(...) static_assert(__VA_ARGS__)
#else
#define HSA_CHECK(...) _Static_assert(__VA_ARGS__)
#endif

typedef int hsa_status;                 /* 0 is success */
typedef struct { uint64_t handle; } hsa_handle; /* an agent, executable, symbol, signal or other object */

enum { HSA_TIMESTAMP_FREQUENCY = 3 };   /* hsa_system_info_t */
enum { HSA_AGENT_PROFILE = 4, HSA_AGENT_WAVE = 6, HSA_AGENT_DEVICE = 17, HSA_AGENT_COMPUTE_UNITS = 0xA002, HSA_CPU = 0, HSA_GPU = 1 };
enum {                                  /* hsa_executable_symbol_info_t; the last two are for variables */
    HSA_SYMBOL_TYPE = 0,
    HSA_SYMBOL_NAME_LENGTH = 1,
    HSA_SYMBOL_NAME = 2,
    HSA_SYMBOL_KERNARG_SIZE = 11,
    HSA_SYMBOL_KERNEL_OBJECT = 22,
    HSA_SYMBOL_SIZE = 9,
    HSA_SYMBOL_ADDRESS = 21,
};
enum { HSA_VARIABLE = 0, HSA_KERNEL = 1 };
enum { HSA_LESS = 2 };                  /* hsa_signal_condition_t */
enum { HSA_KERNEL_DISPATCH = 2, HSA_BARRIER_AND = 3, HSA_BARRIER_OR = 5 }; /* hsa_packet_type_t */
enum { HSA_BARRIER = 0x1503 };          /* header: barrier-and with the barrier bit, system scopes */
enum { HSA_MARKER = 0x3 };              /* header: barrier-and without the barrier bit and fences */
enum { HSA_DEPENDENCY = 8 };            /* offset of the first of the five signals that a barrier waits for */
enum { HSA_INVALID = 1 };               /* header of a packet that is not written yet or already processed */
enum { HSA_QUEUE_SINGLE = 1 };          /* hsa_queue_type_t: a single producer thread */
enum { HSA_DOORBELL = -1 };             /* amd_signal_kind_t */
enum { HSA_EXECUTABLE_STATE = 2, HSA_FROZEN = 1 };
enum { HSA_POOL_SEGMENT = 0, HSA_POOL_FLAGS = 1, HSA_POOL_MAY_ALLOCATE = 5, HSA_GLOBAL = 0 };
enum { HSA_POOL_KERNARG = 1, HSA_POOL_COARSE_GRAINED = 4 };
enum { HSA_SIGNAL_GPU_ONLY = 1 };       /* the signal raises no interrupts; the host may read it */
enum { HSA_FIRST_MAJOR = 1, HSA_LAST_MAJOR = 2 }; /* versions of every table */

typedef struct {
    uint32_t type, features;
    void *base;
    hsa_handle doorbell;
    uint32_t size, reserved;
    uint64_t id;
} hsa_queue;

typedef struct {                        /* hsa_kernel_dispatch_packet_t; other packets also have 64 bytes and a header */
    uint16_t header, setup, block[3], reserved;
    uint32_t grid[3];                   /* in work-items */
    uint32_t scratch, shared;
    uint64_t kernel, arguments, reserved2;
    hsa_handle completion;
} hsa_packet;
HSA_CHECK(sizeof(hsa_packet) == 64 && offsetof(hsa_packet, completion) == 56, "as published");

typedef struct {                        /* amd_signal_t, the target of a signal handle */
    int64_t kind, value;
    uint64_t mailbox;
    uint32_t event, reserved;
    uint64_t start, end;                /* in ticks of the GPU */
    hsa_queue *queue;                   /* of a doorbell */
} hsa_signal;
HSA_CHECK(offsetof(hsa_signal, start) == 32 && offsetof(hsa_signal, queue) == 48, "as published");

/*
 * hsa_ven_amd_loader_1_03_pfn_t, the loader extension. Functions that an older version lacks are null.
 */
enum { HSA_EXTENSION_LOADER = 0x201 };
typedef hsa_status (*hsa_on_loaded)(hsa_handle executable, hsa_handle loaded, void *data);
typedef hsa_status (*hsa_on_executable)(hsa_handle executable, void *data);
typedef struct {
    void *host_address, *segments, *executable;
    hsa_status (*iterate_loaded)(hsa_handle executable, hsa_on_loaded, void *data);
    hsa_status (*loaded_get_info)(hsa_handle loaded, int what, void *value);
    void *reader_of_part;
    hsa_status (*iterate_executables)(hsa_on_executable, void *data);
} hsa_loader;
enum { HSA_LOADED_AGENT = 3, HSA_LOADED_MEMORY = 5, HSA_LOADED_MEMORY_SIZE = 6, HSA_LOADED_DELTA = 8 };

typedef struct {                        /* hsa_amd_pointer_info_t; later versions have more */
    uint32_t size;
    int type;
    void *agent_base, *host_base;
    size_t bytes;
    void *data;
    hsa_handle owner;
} hsa_pointer;
enum { HSA_POINTER_UNKNOWN = 0 };

typedef struct {                        /* hsa_pitched_ptr_t */
    void *base;
    size_t pitch, slice;
} hsa_box;
enum { HSA_TO_GPU = 1, HSA_FROM_GPU = 2 }; /* bits of hsa_amd_copy_direction_t */

typedef void (*hsa_queue_error)(hsa_status, hsa_queue *, void *);
typedef hsa_status (*hsa_create_queue)(hsa_handle agent, uint32_t size, uint32_t type, hsa_queue_error, void *data, uint32_t scratch,
                                       uint32_t shared, hsa_queue **);
typedef void (*hsa_writer)(const void *packets, uint64_t count);
typedef void (*hsa_on_packets)(const void *packets, uint64_t count, uint64_t index, void *data, hsa_writer);
typedef hsa_status (*hsa_intercept)(hsa_queue *, hsa_on_packets, void *data);
typedef hsa_status (*hsa_freeze)(hsa_handle executable, const char *options);
typedef hsa_status (*hsa_copy)(void *to, hsa_handle at, const void *from, hsa_handle of, size_t size, uint32_t count,
                               const hsa_handle *signals, hsa_handle completion);
typedef hsa_status (*hsa_copy_by_engine)(void *to, hsa_handle at, const void *from, hsa_handle of, size_t size, uint32_t count,
                                         const hsa_handle *signals, hsa_handle completion, int engine, bool force);
typedef hsa_status (*hsa_copy_box)(const hsa_box *to, const uint32_t *to_offset, const hsa_box *from, const uint32_t *from_offset,
                                   const uint32_t *extent, hsa_handle by, int direction, uint32_t count, const hsa_handle *signals,
                                   hsa_handle completion);

typedef struct {                        /* the header of each table */
    uint32_t major, size, step, reserved; /* size in bytes; the root table's has another meaning */
} hsa_version;
typedef struct {
    hsa_version version;
    void *functions[];
} hsa_table;
typedef struct {
    hsa_version version;
    hsa_table *core, *amd;
} hsa_tables;

enum {                                  /* index in `functions` */
    HSA_CORE_CREATE_QUEUE = 7,
    HSA_CORE_DESTROY_QUEUE = 9,
    HSA_CORE_ADD_WRITE_INDEX = 21,      /* hsa_queue_add_write_index_scacq_screl; _scacquire, _relaxed and _screlease follow */
    HSA_CORE_ALLOCATE = 33,             /* hsa_memory_allocate; hsa_memory_free follows */
    HSA_CORE_DESTROY_SIGNAL = 38,
    HSA_CORE_STORE_RELAXED = 41,        /* hsa_signal_store_relaxed; _screlease follows */
    HSA_CORE_DESTROY_EXECUTABLE = 84,
    HSA_CORE_FREEZE = 86,
    HSA_CORE_READER_OF_FILE = 115,
    HSA_CORE_READER_OF_MEMORY = 116,
    HSA_CORE_DESTROY_READER = 117,
    HSA_CORE_LOAD = 120,                /* hsa_executable_load_agent_code_object */
};
enum { HSA_TABLE_ENTRY = offsetof(hsa_table, functions) };
/*
 * The index of hsa_amd_queue_intercept_create in an AMD table with `functions` entries; -1 if unknown.
 * hsa_amd_queue_intercept_register follows it. ROCr 5.6 inserted two functions before them without a version change. ROCr 5.5 has 51
 * functions, and 5.6 has 55.
 */
#define HSA_AMD_INTERCEPT(functions) ((functions) < 37 ? -1 : (functions) <= 51 ? 35 : (functions) >= 55 ? 37 : -1)

enum { HSA_AMD_ALLOCATE = 13 };         /* hsa_amd_memory_pool_allocate; hsa_amd_memory_pool_free follows */
#define HSA_AMD_LOCK(intercept) ((intercept) - 15)         /* hsa_amd_memory_lock; hsa_amd_memory_unlock follows */
#define HSA_AMD_LOCK_TO_POOL(intercept) ((intercept) + 5)
enum { HSA_AMD_COPY = 15, HSA_AMD_COPY_BY_ENGINE = 16 }; /* index in the AMD table */
#define HSA_AMD_HAS_ENGINES(intercept) ((intercept) == 37) /* the second one exists since ROCr 5.6 */
#define HSA_AMD_COPY_BOX(intercept) ((intercept) + 3) /* hsa_amd_memory_async_copy_rect */

/* Return the number of functions in a table; 0 if its version is unknown. */
static inline size_t hsa_functions_of(const hsa_table *table) {
    if (!table || table->version.major < HSA_FIRST_MAJOR || table->version.major > HSA_LAST_MAJOR || table->version.size < sizeof(hsa_table))
        return 0;
    return (table->version.size - sizeof(hsa_table)) / sizeof(void *);
}
