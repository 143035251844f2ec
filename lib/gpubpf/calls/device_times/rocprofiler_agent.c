/*
 * libgpubpf-rocprofiler.so: reports to the tool that started the program when each kernel dispatch started and ended on an AMD GPU.
 *
 * ROCm's runtimes pass their function tables to librocprofiler-register. It loads the library that ROCPROFILER_REGISTER_LIBRARY names
 * and passes the tables to `rocprofiler_set_api_table` there. That library is this one, in front of librocprofiler-sdk: it loads the
 * SDK, asks it for dispatches, and passes the tables on. Without the SDK the program continues as if the variable were not set;
 * librocprofiler-register itself would end the program.
 *
 * This library has no thread of its own, keeps no file open, never blocks, and does nothing in forked child processes.
 * Not tested on AMD hardware.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ring.h"
#include "sdk.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local bool starting;
static sdk_functions sdk;
static const void *caller;              /* an address in librocprofiler-register */

static void on_symbol(sdk_record record, sdk_user_data *user, void *data) {
    (void)user, (void)data;
    const sdk_kernel_symbol *symbol = record.payload;
    if (record.kind != SDK_CODE_OBJECT || record.operation != SDK_KERNEL_SYMBOL || record.phase != SDK_PHASE_ENTER || !symbol ||
        symbol->size < sizeof *symbol || !symbol->name || !ring_here())
        return;
    ring_name(symbol->kernel, symbol->name);
}

static void on_complete(const sdk_record *record, uint64_t enqueued_ns) {
    const sdk_dispatch *dispatch = record->payload;
    struct ring_dispatch ended = {
        .start_ns = dispatch->start_ns,
        .end_ns = dispatch->end_ns,
        .enqueued_ns = enqueued_ns,
        .queue = dispatch->info.queue,
        .kernel = dispatch->info.kernel,
        .correlation = record->correlation.internal,
        .dispatch = dispatch->info.dispatch,
        .tid = (uint32_t)record->thread,
        .gpu = ring_gpu(dispatch->info.agent),
        .shared = dispatch->info.shared,
        .scratch = dispatch->info.scratch,
    };
    memcpy(ended.grid, dispatch->info.grid, sizeof ended.grid);
    memcpy(ended.block, dispatch->info.block, sizeof ended.block);
    ring_put(&ended);
}

/* Called in the launching thread when it enqueues a kernel, and in a thread of the runtime when the kernel has ended. The SDK passes the
   value of `user` from the first call to the second: the time of enqueuing, from which the tool finds the call. */
static void on_dispatch(sdk_record record, sdk_user_data *user, void *data) {
    (void)data;
    const sdk_dispatch *dispatch = record.payload;
    if (record.kind != SDK_KERNEL_DISPATCH || !dispatch || dispatch->size < sizeof *dispatch || !user || !ring_here())
        return;
    if (record.operation == SDK_ENQUEUE && record.phase == SDK_PHASE_ENTER) {
        user->value = ring_enqueued();
    } else if (record.operation == SDK_COMPLETE) {
        on_complete(&record, user->value);
    }
}

static sdk_status on_agents(int version, const void **agents, size_t count, void *data) {
    (void)data;
    for (size_t i = 0; version == SDK_AGENT_VERSION && i < count; i++) {
        const sdk_agent *agent = agents[i];
        if (agent->type == SDK_AGENT_GPU)
            ring_add_gpu(agent->id);
    }
    return 0;
}

static int initialize(sdk_finalize_client finalize, void *data) {
    (void)finalize, (void)data;
    sdk_context symbols = {0}, dispatches = {0};
    if (!ring_create()) {
        hello.state = AGENT_NO_MEMORY;
        return -1;
    }
    sdk.query_available_agents(SDK_AGENT_VERSION, on_agents, sizeof(sdk_agent), NULL);
    sdk_status status = sdk.create_context(&symbols);
    status = status ? status : sdk.configure_callback_tracing_service(symbols, SDK_CODE_OBJECT, NULL, 0, on_symbol, NULL);
    status = status ? status : sdk.create_context(&dispatches);
    status = status ? status : sdk.configure_callback_tracing_service(dispatches, SDK_KERNEL_DISPATCH, NULL, 0, on_dispatch, NULL);
    status = status ? status : sdk.start_context(symbols);
    status = status ? status : sdk.start_context(dispatches);
    hello.state = status ? AGENT_REFUSED : AGENT_STARTED;
    hello.status = (uint32_t)status;
    if (status) /* a context may have started */
        ring_stop();
    return status ? -1 : 0;
}

static void finalize(void *data) {
    (void)data;
}

static sdk_tool *configure(uint32_t version, const char *runtime, uint32_t priority, sdk_client *client) {
    (void)runtime, (void)priority;
    static sdk_tool tool = {.size = sizeof tool, .initialize = initialize, .finalize = finalize};
    hello.version = version;
    if (version / 10000 != SDK_MAJOR) {
        hello.state = AGENT_VERSION;
        return NULL;
    }
    client->name = "gpubpf";
    return &tool;
}

/* Use the SDK that is loaded already, or the one in the caller's directory. The loader might find that of another ROCm. */
static void *load_sdk(void) {
    static const char *const known[] = {"librocprofiler-sdk.so.1", "librocprofiler-sdk.so"};
    char path[PATH_MAX];
    Dl_info info;
    const char *slash = NULL;
    void *found = NULL;
    if (dladdr(__atomic_load_n(&caller, __ATOMIC_RELAXED), &info) && info.dli_fname)
        slash = strrchr(info.dli_fname, '/');
    for (int i = 0; !found && i < 2; i++)
        found = dlopen(known[i], RTLD_NOLOAD | RTLD_LAZY);
    for (int i = 0; !found && slash && i < 2; i++)
        if (snprintf(path, sizeof path, "%.*s/%s", (int)(slash - info.dli_fname), info.dli_fname, known[i]) < (int)sizeof path)
            found = dlopen(path, RTLD_GLOBAL | RTLD_LAZY);
    return found;
}

static bool find(void *library, const char *name, void *function) {
    char symbol[96];
    snprintf(symbol, sizeof symbol, "rocprofiler_%s", name);
    *(void **)function = dlsym(library, symbol);
    return *(void **)function != NULL;
}

static bool find_sdk(void) {
    void *library = load_sdk();
    if (!library)
        return false;
#define FIND(name) find(library, #name, &sdk.name)
    if (FIND(force_configure) && FIND(create_context) && FIND(start_context) && FIND(configure_callback_tracing_service) &&
        FIND(query_available_agents) && FIND(set_api_table))
        return true;
#undef FIND
    memset(&sdk, 0, sizeof sdk);
    return false;
}

static void start(void) {
    const char *name = secure_getenv(SOCKET);
    const char *others = getenv("ROCP_TOOL_LIBRARIES");
    if (!name)
        return;
    starting = true;
    bool other = (others && *others) || dlsym(RTLD_DEFAULT, "rocprofiler_configure");
    if (!find_sdk()) {
        hello.state = AGENT_NO_SDK;
    } else if (other) { /* with two clients it would get fewer records than alone */
        hello.state = AGENT_OTHER_TOOL;
    } else {
        sdk_status status = sdk.force_configure(configure);
        if (!hello.state) { /* it did not call `configure` */
            hello.state = AGENT_REFUSED;
            hello.status = (uint32_t)status;
        }
    }
    ring_tell(name);
    starting = false;
}

/* Called by librocprofiler-register with each table. The runtime takes a result other than 0 for an error. */
__attribute__((visibility("default"))) int rocprofiler_set_api_table(const char *name, uint64_t version, uint64_t instance, void **tables,
                                                                     uint64_t count) {
    if (!starting) { /* while starting, rocprofiler-sdk asks for the tables itself */
        __atomic_store_n(&caller, __builtin_return_address(0), __ATOMIC_RELAXED);
        pthread_once(&once, start);
    }
    return sdk.set_api_table ? sdk.set_api_table(name, version, instance, tables, count) : 0;
}
