/*
 * sdk.h: the parts of rocprofiler-sdk 1.x that the agent uses, declared here so that the build does not need ROCm.
 *
 * They follow the published headers of rocprofiler-sdk 1.0 to 1.3 (fwd.h, callback_tracing.h, registration.h, context.h, agent.h). Structs
 * end after the last member in use: those that the library passes begin with their size in bytes, which may be larger than here.
 * Not tested on AMD hardware.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { SDK_MAJOR = 1 };                 /* records that are passed by value may differ in other versions */

typedef int sdk_status;                 /* 0 is success */
typedef struct { uint64_t handle; } sdk_context;
typedef union { uint64_t value; void *pointer; } sdk_user_data;

enum {                                  /* rocprofiler_callback_tracing_kind_t */
    SDK_CODE_OBJECT = 10,
    SDK_KERNEL_DISPATCH = 12,
};
enum { SDK_KERNEL_SYMBOL = 2 };         /* rocprofiler_code_object_operation_t */
enum { SDK_ENQUEUE = 1, SDK_COMPLETE = 2 }; /* rocprofiler_kernel_dispatch_operation_t */
enum { SDK_PHASE_NONE = 0, SDK_PHASE_ENTER = 1 }; /* rocprofiler_callback_phase_t; a load is an "enter" */
enum { SDK_AGENT_VERSION = 1, SDK_AGENT_GPU = 2 };

typedef struct {                        /* rocprofiler_callback_tracing_record_t, by value */
    sdk_context context;
    uint64_t thread;                    /* gettid(2) in the process */
    struct { uint64_t internal, external, ancestor; } correlation;
    int32_t kind, operation, phase;
    void *payload;
} sdk_record;
_Static_assert(sizeof(sdk_record) == 64 && offsetof(sdk_record, payload) == 56, "as published");

typedef struct {                        /* rocprofiler_callback_tracing_code_object_kernel_symbol_register_data_t */
    uint64_t size, kernel, code_object;
    const char *name;
} sdk_kernel_symbol;

typedef struct {                        /* rocprofiler_callback_tracing_kernel_dispatch_data_t */
    uint64_t size, start_ns, end_ns;    /* CLOCK_BOOTTIME */
    struct {                            /* rocprofiler_kernel_dispatch_info_t */
        uint64_t size, agent, queue, kernel, dispatch;
        uint32_t scratch, shared;
        uint32_t block[3], grid[3];     /* the grid in work-items */
    } info;
} sdk_dispatch;
_Static_assert(sizeof(sdk_dispatch) == 96 && offsetof(sdk_dispatch, info.block) == 72, "as published");

typedef struct {                        /* rocprofiler_agent_v0_t */
    uint64_t size, id;
    int32_t type;
} sdk_agent;

typedef struct {                        /* rocprofiler_client_id_t */
    size_t size;
    const char *name;
    uint32_t handle;
} sdk_client;

typedef void (*sdk_finalize_client)(sdk_client);
typedef struct {                        /* rocprofiler_tool_configure_result_t */
    size_t size;
    int (*initialize)(sdk_finalize_client, void *);
    void (*finalize)(void *);
    void *data;
} sdk_tool;

typedef sdk_tool *(*sdk_configure)(uint32_t version, const char *runtime, uint32_t priority, sdk_client *);
typedef void (*sdk_callback)(sdk_record, sdk_user_data *, void *);
typedef sdk_status (*sdk_agents)(int version, const void **agents, size_t count, void *);

/* The SDK's functions, whose symbols are these names after "rocprofiler_". */
typedef struct {
    sdk_status (*force_configure)(sdk_configure);
    sdk_status (*create_context)(sdk_context *);
    sdk_status (*start_context)(sdk_context);
    sdk_status (*configure_callback_tracing_service)(sdk_context, int kind, const int32_t *operations, size_t count, sdk_callback, void *);
    sdk_status (*query_available_agents)(int version, sdk_agents, size_t size, void *);
    int (*set_api_table)(const char *name, uint64_t version, uint64_t instance, void **tables, uint64_t count);
} sdk_functions;
