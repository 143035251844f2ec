/*
 * A stand-in for librocprofiler-sdk.so.1: the part of it that its headers and documents say and lib/gpubpf/calls/rocprofiler/agent.c uses,
 * declared here once more. Dispatches are told of as the documents say: when they are enqueued in the thread that does it, before and
 * after, and when they have ended in a thread of the library; what a callback leaves in its user data at the first is there at the last.
 *
 * STANDIN_SDK_VERSION: its version, by default 10100. STANDIN_SDK_STATUS: what asking for a service gives.
 * STANDIN_SDK_WORKERS: threads that tell of ends, by default 1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

typedef struct { uint64_t handle; } context_id;
typedef union { uint64_t value; void *ptr; } user_data;
typedef struct { uint64_t internal; user_data external; uint64_t ancestor; } correlation_id;
typedef struct { uint32_t x, y, z; } dim3;
typedef struct {
    context_id context;
    uint64_t thread;
    correlation_id correlation;
    uint32_t kind;
    int32_t operation;
    uint32_t phase;
    void *payload;
} tracing_record;
typedef struct {
    uint64_t size, agent, queue, kernel, dispatch;
    uint32_t private_segment, group_segment;
    dim3 workgroup, grid;
    uint8_t reserved[56];
} dispatch_info;
typedef struct { uint64_t size, start, end; dispatch_info info; int32_t pipe; } dispatch_data;
typedef struct {
    uint64_t size, kernel, code_object;
    const char *name;
    uint64_t object;
    uint32_t segments[4], registers[3];
    int64_t entry;
    uint64_t address;
} symbol_data;
typedef struct { uint64_t size, id; uint32_t type, numbers[60]; } agent_data;
typedef struct { size_t size; const char *name; const uint32_t handle; } client_id;
typedef struct {
    size_t size;
    int (*initialize)(void (*)(client_id), void *);
    void (*finalize)(void *);
    void *data;
} configure_result;
typedef configure_result *(*configure_function)(uint32_t, const char *, uint32_t, client_id *);
typedef void (*tracing_callback)(tracing_record, user_data *, void *);

struct service { tracing_callback callback; void *data; int started; };
struct pending { struct work work; dispatch_data data; user_data user; tracing_record record; struct pending *next; };

static struct service services[2][16]; /* of contexts 1 and 2, by kind */
static int contexts, configuring, configured;
static configure_result tool;
static struct table original;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct pending *pending;
static unsigned under_way;
static uint64_t dispatches, correlations;
static pid_t owner;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static struct service *service(int kind) {
    for (int i = 0; i < contexts && i < 2; i++)
        if (services[i][kind].callback && services[i][15].started)
            return &services[i][kind];
    return NULL;
}

static void *tell_ends(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct pending **first = &pending;
        for (struct pending **at = &pending; *at; at = &(*at)->next)
            if ((*at)->work.end_ns < (*first)->work.end_ns)
                first = at;
        struct pending *one = *first;
        if (!one) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        *first = one->next;
        pthread_mutex_unlock(&lock);
        while (now_ns() < one->work.end_ns)
            usleep(50);
        struct service *wanted = service(12);
        one->data.start = one->work.start_ns;
        one->data.end = one->work.end_ns;
        one->record.operation = 2;
        one->record.phase = 0;
        one->record.payload = &one->data;
        if (wanted)
            wanted->callback(one->record, &one->user, wanted->data);
        free(one);
        pthread_mutex_lock(&lock);
        under_way--;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static void submit(struct work *work) {
    struct service *wanted = service(12);
    if (!wanted) {
        original.submit(work);
        return;
    }
    struct pending *one = calloc(1, sizeof *one);
    one->data = (dispatch_data){.size = sizeof one->data, .pipe = -1};
    one->data.info = (dispatch_info){
        .size = offsetof(dispatch_info, reserved), .agent = work->agent, .queue = work->queue, .kernel = work->kernel,
        .dispatch = __atomic_add_fetch(&dispatches, 1, __ATOMIC_RELAXED), .group_segment = work->shared,
        .workgroup = {work->block[0], work->block[1], work->block[2]}, .grid = {work->grid[0], work->grid[1], work->grid[2]}};
    one->record = (tracing_record){.context = {2}, .thread = syscall(SYS_gettid), .kind = 12, .operation = 1, .phase = 1};
    one->record.correlation.internal = __atomic_add_fetch(&correlations, 1, __ATOMIC_RELAXED);
    dispatch_data copy = one->data;
    one->record.payload = &copy;
    wanted->callback(one->record, &one->user, wanted->data);
    original.submit(work);
    user_data user = one->user;
    one->record.phase = 2;
    wanted->callback(one->record, &user, wanted->data);
    one->work = *work;
    if (getpid() != owner) { /* forked: no thread is here that would tell of ends, and one may have held the lock */
        free(one);
        return;
    }
    pthread_mutex_lock(&lock);
    one->next = pending;
    pending = one;
    under_way++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void loaded(uint64_t kernel, const char *name) {
    struct service *wanted = service(10);
    char symbol[8192]; /* as in code objects */
    snprintf(symbol, sizeof symbol, "%s.kd", name);
    symbol_data data = {.size = sizeof data, .kernel = kernel, .code_object = 1, .name = symbol};
    tracing_record record = {.context = {1}, .thread = syscall(SYS_gettid), .kind = 10, .operation = 2, .phase = 1, .payload = &data};
    user_data user = {0};
    if (wanted)
        wanted->callback(record, &user, wanted->data);
    original.loaded(kernel, name);
}

static void finalize_client(client_id client) { (void)client; }

static void finish(void) { /* as the real one waits for what is under way */
    if (getpid() != owner)
        return;
    pthread_mutex_lock(&lock);
    while (under_way)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    if (tool.finalize)
        tool.finalize(tool.data);
}

int rocprofiler_force_configure(configure_function configure) {
    if (configured)
        return 17;
    configured = configuring = 1;
    owner = getpid();
    setenv("ROCPROFILER_REGISTER_FORCE_LOAD", "1", 1);
    client_id client = {.size = sizeof client, .handle = 1};
    const char *version = getenv("STANDIN_SDK_VERSION");
    const char *level = getenv("ROCPROFILER_LOG_LEVEL");
    configure_result *result = configure(version ? atoi(version) : 10100, "stand-in", 0, &client);
    if (result) {
        tool = *result;
        if (!level || strcmp(level, "error"))
            fprintf(stderr, "initialized tool configure for %s\n", client.name ? client.name : "?");
        tool.initialize(finalize_client, tool.data);
    }
    configuring = 0;
    const char *workers = getenv("STANDIN_SDK_WORKERS");
    for (int i = 0; result && i < (workers ? atoi(workers) : 1); i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, tell_ends, NULL);
        pthread_detach(thread);
    }
    atexit(finish);
    return 0;
}

int rocprofiler_create_context(context_id *context) {
    if (!configuring || contexts == 2 || context->handle)
        return 1;
    context->handle = ++contexts;
    return 0;
}

int rocprofiler_start_context(context_id context) {
    services[context.handle - 1][15].started = 1;
    return 0;
}

int rocprofiler_configure_callback_tracing_service(context_id context, uint32_t kind, const int32_t *operations, size_t count,
                                                   tracing_callback callback, void *data) {
    const char *status = getenv("STANDIN_SDK_STATUS");
    if (status)
        return atoi(status);
    if (!configuring || operations || count || kind >= 15)
        return 1;
    services[context.handle - 1][kind] = (struct service){.callback = callback, .data = data};
    return 0;
}

int rocprofiler_query_available_agents(int version, int (*callback)(int, const void **, size_t, void *), size_t size, void *data) {
    static agent_data agents[] = {
        {.size = sizeof(agent_data), .id = 900, .type = 1}, {.size = sizeof(agent_data), .id = 901, .type = 2},
        {.size = sizeof(agent_data), .id = 902, .type = 2}};
    const void *pointers[] = {&agents[0], &agents[1], &agents[2]};
    return version == 1 && size <= sizeof(agent_data) ? callback(version, pointers, 3, data) : 1;
}

int rocprofiler_set_api_table(const char *name, uint64_t version, uint64_t instance, void **tables, uint64_t count) {
    (void)version, (void)instance;
    if (strcmp(name, "hsa") || count != 1)
        return 0;
    struct table *table = tables[0];
    original = *table;
    table->submit = submit;
    table->loaded = loaded;
    return 0;
}
