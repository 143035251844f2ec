/*
 * hsa.h: the parts of ROCr's interface (libhsa-runtime64.so.1) that hsa_agent.c uses, declared here so that the build does not need ROCm.
 *
 * They follow the published headers hsa.h, hsa_ext_amd.h, hsa_api_trace.h and amd_hsa_signal.h, of ROCr 5.2 to 6.2. A table of functions
 * says how long it is. Most of them only grow at their ends, so positions stay.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int hsa_status;                 /* 0 is success */
typedef struct { uint64_t handle; } hsa_handle; /* of an agent, an executable, a symbol or a signal */

enum { HSA_TIMESTAMP_FREQUENCY = 3 };   /* hsa_system_info_t */
enum { HSA_AGENT_DEVICE = 17, HSA_GPU = 1 };
enum { HSA_SYMBOL_TYPE = 0, HSA_SYMBOL_NAME_LENGTH = 1, HSA_SYMBOL_NAME = 2, HSA_SYMBOL_KERNEL_OBJECT = 22, HSA_KERNEL = 1 };
enum { HSA_LESS = 2 };                  /* hsa_signal_condition_t */
enum { HSA_KERNEL_DISPATCH = 2 };       /* hsa_packet_type_t */
enum { HSA_FIRST_MAJOR = 1, HSA_LAST_MAJOR = 2 }; /* versions of every table */

typedef struct {
    uint32_t type, features;
    void *base;
    hsa_handle doorbell;
    uint32_t size, reserved;
    uint64_t id;
} hsa_queue;

typedef struct {                        /* hsa_kernel_dispatch_packet_t; other packets have 64 bytes and a header, too */
    uint16_t header, setup, block[3], reserved;
    uint32_t grid[3];                   /* in work-items */
    uint32_t scratch, shared;
    uint64_t kernel, arguments, reserved2;
    hsa_handle completion;
} hsa_packet;
_Static_assert(sizeof(hsa_packet) == 64 && offsetof(hsa_packet, completion) == 56, "as published");

typedef struct {                        /* amd_signal_t, to which the handle of a signal points */
    int64_t kind, value;
    uint64_t mailbox;
    uint32_t event, reserved;
    uint64_t start, end;                /* in ticks of the GPU */
} hsa_signal;
_Static_assert(offsetof(hsa_signal, start) == 32, "as published");

typedef void (*hsa_queue_error)(hsa_status, hsa_queue *, void *);
typedef hsa_status (*hsa_create_queue)(hsa_handle agent, uint32_t size, uint32_t type, hsa_queue_error, void *data, uint32_t scratch,
                                       uint32_t shared, hsa_queue **);
typedef void (*hsa_writer)(const void *packets, uint64_t count);
typedef void (*hsa_on_packets)(const void *packets, uint64_t count, uint64_t index, void *data, hsa_writer);
typedef hsa_status (*hsa_intercept)(hsa_queue *, hsa_on_packets, void *data);
typedef hsa_status (*hsa_freeze)(hsa_handle executable, const char *options);

typedef struct {                        /* the beginning of each table */
    uint32_t major, size, step, reserved; /* size in bytes; of the root, another number */
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
    HSA_CORE_FREEZE = 86,
};
/*
 * The index of hsa_amd_queue_intercept_create, which hsa_amd_queue_intercept_register follows, in the AMD table with so many functions; -1 if
 * unknown. ROCr 5.6 put two functions before them, without another version. ROCr 5.5 has 51 functions, and 5.6 has 55.
 */
#define HSA_AMD_INTERCEPT(functions) ((functions) < 37 ? -1 : (functions) <= 51 ? 35 : (functions) >= 55 ? 37 : -1)

/* Functions that the library exports; their symbols are these names after "hsa_". */
typedef struct {
    hsa_status (*system_get_info)(int what, void *);
    hsa_status (*iterate_agents)(hsa_status (*)(hsa_handle agent, void *), void *);
    hsa_status (*agent_get_info)(hsa_handle agent, int what, void *);
    hsa_status (*executable_iterate_agent_symbols)(hsa_handle executable, hsa_handle agent,
                                                   hsa_status (*)(hsa_handle executable, hsa_handle agent, hsa_handle symbol, void *), void *);
    hsa_status (*executable_symbol_get_info)(hsa_handle symbol, int what, void *);
    hsa_status (*signal_create)(int64_t value, uint32_t count, const hsa_handle *consumers, hsa_handle *);
    void (*signal_store_relaxed)(hsa_handle signal, int64_t value);
    void (*signal_subtract_screlease)(hsa_handle signal, int64_t value);
    hsa_status (*amd_signal_async_handler)(hsa_handle signal, int condition, int64_t value, _Bool (*)(int64_t value, void *), void *);
    hsa_status (*amd_profiling_set_profiler_enabled)(hsa_queue *, int);
    hsa_status (*amd_profiling_get_dispatch_time)(hsa_handle agent, hsa_handle signal, uint64_t times[2]);
} hsa_functions;
