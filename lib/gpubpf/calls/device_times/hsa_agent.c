/*
 * libgpubpf-hsa.so: reports to the tool that started the program when each kernel dispatch started and ended on an AMD GPU.
 *
 * ROCr loads the libraries that HSA_TOOLS_LIB names, and passes its tables of functions to `OnLoad`. This library puts functions of its
 * own in place of three of them. A queue of the program becomes one whose packets pass `on_packets` on their way to the GPU. There each
 * kernel dispatch gets a completion signal of ours. When the kernel has ended, ROCr's thread for signals calls `on_end`, which writes
 * the times down, and hands them and the completion on to the signal that the program had given. Names of kernels come from executables
 * as they are frozen.
 *
 * This library has no thread of its own, keeps no file open, and does nothing in forked child processes.
 * Tested with AMD's ROCr 5.2 on hipsim, not on AMD hardware.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hsa.h"
#include "ring.h"
#include "room.h"

#define EXPORTED __attribute__((visibility("default")))
#define BATCH (ROOM_MOST / 2 - 1)       /* packets that are changed at once; ROCr passes them singly */
#define ROOM_PAUSE_US 50
#define BUCKETS 4096
#define MOST_PENDING 1024               /* the kernel's driver has 4096 events for the signals of a process */
#define ENDING_US 100                   /* a thread writes an end within this time, unless it is not scheduled */
#define ENDING_TRIES 5000
#define LEAVING_US 100                  /* the GPU reaches our packets, and ROCr's thread our ends, within this time */
#define LEAVING_TRIES 10000

enum { ENDED, RUNNING, ENDING };        /* of a dispatch; ENDING: a thread is writing its end */

/* A dispatch from its packet to its end. It is used again, and its three signals with it. */
struct pending {
    struct ring_dispatch dispatch;
    hsa_handle agent, own, programs;    /* the signal that the packet has, and the one that it had */
    hsa_handle handed;                  /* becomes 0 once the program's signal has been told */
    hsa_handle passed;                  /* becomes 0 once a barrier has seen that; before, neither may be used again */
    int state;                          /* ENDED, RUNNING or ENDING */
    struct pending *next;               /* in `pool` */
    struct pending *older;              /* in `every` */
};
struct queue {                          /* never freed: a dispatch may outlive its queue */
    hsa_handle agent;
    const hsa_queue *handle;            /* NULL: destroyed */
    uint64_t id;
    struct room room;
    struct queue *older;                /* in `queues` */
};
struct kernel {                         /* never freed: a program may still launch it while its executable is destroyed */
    uint64_t object, number;            /* address of its descriptor; its number in the ring, never the same for two kernels */
    struct kernel *next;
};

/* Functions that the library exports; their symbols are these names after "hsa_". */
typedef struct {
    hsa_status (*system_get_info)(int what, void *);
    hsa_status (*iterate_agents)(hsa_status (*)(hsa_handle agent, void *), void *);
    hsa_status (*agent_get_info)(hsa_handle agent, int what, void *);
    hsa_status (*executable_iterate_agent_symbols)(hsa_handle executable, hsa_handle agent,
                                                   hsa_status (*)(hsa_handle executable, hsa_handle agent, hsa_handle symbol, void *), void *);
    hsa_status (*executable_symbol_get_info)(hsa_handle symbol, int what, void *);
    hsa_status (*signal_create)(int64_t value, uint32_t count, const hsa_handle *consumers, hsa_handle *);
    hsa_status (*signal_destroy)(hsa_handle signal);
    void (*signal_store_relaxed)(hsa_handle signal, int64_t value);
    void (*signal_subtract_screlease)(hsa_handle signal, int64_t value);
    hsa_status (*amd_signal_async_handler)(hsa_handle signal, int condition, int64_t value, _Bool (*)(int64_t value, void *), void *);
    hsa_status (*amd_profiling_set_profiler_enabled)(hsa_queue *, int);
    hsa_status (*amd_profiling_get_dispatch_time)(hsa_handle agent, hsa_handle signal, uint64_t times[2]);
} hsa_functions;

static hsa_functions hsa;
static hsa_create_queue create_queue, create_intercepted_queue;
static hsa_status (*destroy_queue)(hsa_queue *queue);
static hsa_intercept intercept;
static hsa_freeze freeze;
static uint64_t frequency;              /* of ROCr's clock, which is CLOCK_BOOTTIME on Linux */
static hsa_handle gpus[RING_GPUS];
static uint32_t gpu_count;
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pending *pool, *every;
static struct queue *queues;            /* those that pass their packets to us */
static uint32_t pending_count;
static bool unloaded;                   /* ROCr has been shut down, and its signals are gone */
static pthread_rwlock_t kernels_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct kernel *kernels[BUCKETS];
static uint64_t kernel_count;

/* --- names of kernels --- */

static struct kernel **bucket(uint64_t object) {
    return &kernels[(object >> 6) % BUCKETS];
}

static uint64_t number_of(uint64_t object) {
    uint64_t number = 0;
    pthread_rwlock_rdlock(&kernels_lock);
    for (struct kernel *kernel = *bucket(object); kernel && !number; kernel = kernel->next)
        if (kernel->object == object)
            number = kernel->number;
    pthread_rwlock_unlock(&kernels_lock);
    return number;
}

static void add_kernel(uint64_t object, const char *name) {
    struct kernel *kernel = malloc(sizeof *kernel);
    if (!kernel)
        return;
    pthread_rwlock_wrlock(&kernels_lock);
    *kernel = (struct kernel){.object = object, .number = ++kernel_count, .next = *bucket(object)};
    *bucket(object) = kernel; /* before an older one at the same address, whose executable is gone */
    pthread_rwlock_unlock(&kernels_lock);
    ring_name(kernel->number, name);
}

static hsa_status on_symbol(hsa_handle executable, hsa_handle agent, hsa_handle symbol, void *data) {
    (void)executable, (void)agent, (void)data;
    uint32_t type = 0, length = 0;
    uint64_t object = 0;
    if (hsa.executable_symbol_get_info(symbol, HSA_SYMBOL_TYPE, &type) || type != HSA_KERNEL ||
        hsa.executable_symbol_get_info(symbol, HSA_SYMBOL_NAME_LENGTH, &length) ||
        hsa.executable_symbol_get_info(symbol, HSA_SYMBOL_KERNEL_OBJECT, &object))
        return 0;
    char *name = calloc(1, (size_t)length + 1);
    if (name && !hsa.executable_symbol_get_info(symbol, HSA_SYMBOL_NAME, name))
        add_kernel(object, name);
    free(name);
    return 0;
}

static hsa_status on_freeze(hsa_handle executable, const char *options) {
    hsa_status status = freeze(executable, options);
    for (uint32_t gpu = 0; !status && ring_here() && gpu < gpu_count; gpu++)
        hsa.executable_iterate_agent_symbols(executable, gpus[gpu], on_symbol, NULL);
    return status;
}

/* --- dispatches --- */

static int64_t value_of(hsa_handle signal) {
    return __atomic_load_n(&((const hsa_signal *)signal.handle)->value, __ATOMIC_ACQUIRE);
}

static struct pending *take_pending(void) {
    pthread_mutex_lock(&pool_lock);
    struct pending **at = &pool, *found;
    if (unloaded) {
        pthread_mutex_unlock(&pool_lock);
        return NULL;
    }
    while (*at && value_of((*at)->passed) > 0)
        at = &(*at)->next;
    found = *at;
    if (found)
        *at = found->next;
    else if (pending_count < MOST_PENDING && (found = calloc(1, sizeof *found))) {
        if (hsa.signal_create(1, 0, NULL, &found->own) || hsa.signal_create(1, 0, NULL, &found->handed) ||
            hsa.signal_create(0, 0, NULL, &found->passed)) {
            free(found);
            found = NULL;
        } else {
            pending_count++;
            found->older = every;
            every = found;
        }
    }
    pthread_mutex_unlock(&pool_lock);
    if (found) {
        hsa.signal_store_relaxed(found->own, 1);
        hsa.signal_store_relaxed(found->handed, 1);
    }
    return found;
}

static void put_pending(struct pending *pending) {
    pthread_mutex_lock(&pool_lock);
    pending->next = pool;
    pool = pending;
    pthread_mutex_unlock(&pool_lock);
}

/* Write a dispatch that has ended, and tell the program. Nothing happens if another thread does that. */
static void end(struct pending *pending) {
    int running = RUNNING;
    if (!__atomic_compare_exchange_n(&pending->state, &running, ENDING, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    const hsa_signal *own = (const hsa_signal *)pending->own.handle;
    uint64_t times[2] = {0, 0};
    if (!hsa.amd_profiling_get_dispatch_time(pending->agent, pending->own, times) && ring_here()) {
        pending->dispatch.start_ns = (uint64_t)((unsigned __int128)times[0] * 1000000000u / frequency);
        pending->dispatch.end_ns = (uint64_t)((unsigned __int128)times[1] * 1000000000u / frequency);
        ring_put(&pending->dispatch); /* first: the program may end once it is told */
    }
    if (pending->programs.handle) {
        hsa_signal *programs = (hsa_signal *)pending->programs.handle;
        programs->start = own->start;
        programs->end = own->end;
        hsa.signal_subtract_screlease(pending->programs, 1);
    }
    hsa.signal_store_relaxed(pending->handed, 0);
    __atomic_store_n(&pending->state, ENDED, __ATOMIC_RELEASE);
}

/* Called in ROCr's thread for signals. Returns that it need not be called again. */
static bool on_end(int64_t value, void *data) {
    (void)value;
    end(data);
    put_pending(data);
    return false;
}

/* Write the dispatches that have ended, which ROCr's thread may not have seen yet: when a queue is full, and at the end. */
static void write_ended(void) {
    pthread_mutex_lock(&pool_lock);
    if (!ring_here() || unloaded) {
        pthread_mutex_unlock(&pool_lock);
        return;
    }
    for (struct pending *pending = every; pending; pending = pending->older)
        if (__atomic_load_n(&pending->state, __ATOMIC_ACQUIRE) == RUNNING && value_of(pending->own) < 1)
            end(pending);
    pthread_mutex_unlock(&pool_lock);
}

/* Do so as the program exits, or as ROCr is shut down, and wait for what ROCr's thread is writing. */
static void finish(void) {
    write_ended();
    pthread_mutex_lock(&pool_lock);
    int tries = ring_here() && !unloaded ? ENDING_TRIES : 0;
    for (struct pending *pending = every; pending && tries > 0; pending = pending->older)
        while (__atomic_load_n(&pending->state, __ATOMIC_ACQUIRE) == ENDING && tries-- > 0)
            usleep(ENDING_US);
    pthread_mutex_unlock(&pool_lock);
}

/* Give a dispatch a signal of ours, unless there is none to be had. Return whether a barrier has to follow it: packets behind it must
   not complete before the program's signal is told, and a barrier of the program would. `barrier` is that packet. */
static bool follow(hsa_packet *packet, hsa_packet *barrier, const struct queue *queue, uint64_t index) {
    uint64_t now = ring_enqueued(); /* counted without a signal, too: its end is then missing */
    struct pending *pending = take_pending();
    if (!pending)
        return false;
    pending->agent = queue->agent;
    pending->programs = packet->completion;
    pending->dispatch = (struct ring_dispatch){
        .enqueued_ns = now,
        .queue = queue->id,
        .kernel = number_of(packet->kernel),
        .dispatch = index,
        .tid = (uint32_t)syscall(SYS_gettid),
        .gpu = ring_gpu(queue->agent.handle),
        .shared = packet->shared,
        .scratch = packet->scratch,
    };
    for (int axis = 0; axis < 3; axis++) {
        pending->dispatch.grid[axis] = packet->grid[axis];
        pending->dispatch.block[axis] = packet->block[axis];
    }
    __atomic_store_n(&pending->state, RUNNING, __ATOMIC_RELEASE);
    if (hsa.amd_signal_async_handler(pending->own, HSA_LESS, 1, on_end, pending)) {
        pending->state = ENDED;
        put_pending(pending);
        return false;
    }
    packet->completion = pending->own;
    if (!pending->programs.handle)
        return false;
    hsa.signal_store_relaxed(pending->passed, 1);
    memset(barrier, 0, sizeof *barrier);
    barrier->header = HSA_BARRIER;
    barrier->completion = pending->passed;
    memcpy((char *)barrier + 8, &pending->handed, sizeof pending->handed); /* dep_signal[0] */
    return true;
}

/* Called in the thread that puts packets into a queue. */
static void on_packets(const void *data, uint64_t count, uint64_t index, void *user, hsa_writer write) {
    const hsa_packet *packets = data;
    struct queue *queue = user;
    hsa_packet changed[2 * BATCH + 1];
    for (uint64_t at = 0; at < count;) {
        uint64_t made = 0, end = count - at > BATCH ? at + BATCH : count;
        while (!room_fits(&queue->room, 2 * (end - at))) {
            write_ended(); /* packets in the queue may wait for that, and ROCr's thread for this queue */
            usleep(ROOM_PAUSE_US);
        }
        for (; at < end; at++) {
            hsa_packet *packet = &changed[made++];
            *packet = packets[at];
            if ((packet->header & 0xff) == HSA_KERNEL_DISPATCH && ring_here())
                made += follow(packet, packet + 1, queue, index + at);
        }
        made += room_take(&queue->room, made, &changed[made]);
        write(changed, made);
    }
}

static hsa_status on_create_queue(hsa_handle agent, uint32_t size, uint32_t type, hsa_queue_error error, void *data, uint32_t scratch,
                                  uint32_t shared, hsa_queue **made) {
    struct queue *queue = ring_here() ? calloc(1, sizeof *queue) : NULL;
    /* Twice the size, if the GPU has such queues: a dispatch may become two packets. */
    if (!queue || !made || (create_intercepted_queue(agent, 2 * size, type, error, data, scratch, shared, made) &&
                            create_intercepted_queue(agent, size, type, error, data, scratch, shared, made))) {
        free(queue);
        return create_queue(agent, size, type, error, data, scratch, shared, made);
    }
    queue->agent = agent;
    queue->id = (*made)->id;
    queue->room.size = (*made)->size;
    if (hsa.signal_create(0, 0, NULL, &queue->room.ahead))
        queue->room.ahead.handle = 0;
    queue->handle = *made;
    pthread_mutex_lock(&pool_lock);
    queue->older = queues;
    queues = queue;
    pthread_mutex_unlock(&pool_lock);
    intercept(*made, on_packets, queue);
    hsa.amd_profiling_set_profiler_enabled(*made, 1);
    return 0;
}

/* Return whether the GPU has reached all barriers of ours in a queue. Call with the lock held. */
static bool has_passed(const struct queue *queue) {
    for (struct pending *pending = every; pending; pending = pending->older)
        if (pending->dispatch.queue == queue->id && value_of(pending->passed) > 0)
            return false;
    return true;
}

/* Return whether ROCr's thread has nothing more to do for dispatches that have ended. Call with the lock held. */
static bool is_quiet(void) {
    uint32_t waiting = 0, running = 0;
    for (struct pending *pending = pool; pending; pending = pending->next)
        waiting++;
    for (struct pending *pending = every; pending; pending = pending->older)
        running += __atomic_load_n(&pending->state, __ATOMIC_ACQUIRE) == RUNNING;
    return waiting + running >= pending_count;
}

static void destroy(hsa_handle *signal) {
    if (signal->handle)
        hsa.signal_destroy(*signal);
    signal->handle = 0;
}

/* The GPU must reach our barrier behind the last dispatch first: nobody else waits for it. */
static hsa_status on_destroy_queue(hsa_queue *handle) {
    if (!ring_here())
        return destroy_queue(handle);
    pthread_mutex_lock(&pool_lock);
    struct queue *queue = queues;
    while (queue && queue->handle != handle)
        queue = queue->older;
    for (int tries = LEAVING_TRIES; queue && tries > 0 && !has_passed(queue); tries--) {
        pthread_mutex_unlock(&pool_lock);
        write_ended();
        usleep(LEAVING_US);
        pthread_mutex_lock(&pool_lock);
    }
    pthread_mutex_unlock(&pool_lock);
    hsa_status status = destroy_queue(handle);
    if (!queue || status)
        return status;
    pthread_mutex_lock(&pool_lock);
    queue->handle = NULL;
    destroy(&queue->room.ahead);
    pthread_mutex_unlock(&pool_lock);
    return 0;
}

/* Destroy our signals, except those that the GPU may still change. */
static void destroy_signals(void) {
    pthread_mutex_lock(&pool_lock);
    for (int tries = LEAVING_TRIES; tries > 0 && !is_quiet(); tries--) {
        pthread_mutex_unlock(&pool_lock);
        usleep(LEAVING_US);
        pthread_mutex_lock(&pool_lock);
    }
    for (struct pending *pending = pool; pending; pending = pending->next) {
        if (value_of(pending->passed) > 0)
            continue;
        destroy(&pending->own);
        destroy(&pending->handed);
        destroy(&pending->passed);
    }
    for (struct queue *queue = queues; queue; queue = queue->older)
        destroy(&queue->room.ahead);
    unloaded = true;
    pthread_mutex_unlock(&pool_lock);
}

/* --- start --- */

static hsa_status on_agent(hsa_handle agent, void *data) {
    (void)data;
    uint32_t device = 0;
    if (!hsa.agent_get_info(agent, HSA_AGENT_DEVICE, &device) && device == HSA_GPU && gpu_count < RING_GPUS) {
        gpus[gpu_count++] = agent;
        ring_add_gpu(agent.handle);
    }
    return 0;
}

static bool find(void *library, const char *name, void *function) {
    char symbol[96];
    snprintf(symbol, sizeof symbol, "hsa_%s", name);
    *(void **)function = dlsym(library, symbol);
    return *(void **)function != NULL;
}

static bool find_hsa(void) {
    void *library = dlopen("libhsa-runtime64.so.1", RTLD_NOLOAD | RTLD_LAZY);
#define FIND(name) find(library, #name, &hsa.name)
    return library && FIND(system_get_info) && FIND(iterate_agents) && FIND(agent_get_info) && FIND(executable_iterate_agent_symbols) &&
           FIND(executable_symbol_get_info) && FIND(signal_create) && FIND(signal_destroy) && FIND(signal_store_relaxed) && FIND(signal_subtract_screlease) &&
           FIND(amd_signal_async_handler) && FIND(amd_profiling_set_profiler_enabled) && FIND(amd_profiling_get_dispatch_time);
#undef FIND
}

/* Forget what belonged to ROCr before it was shut down. What the GPU may still have changed then stays in memory. */
static void forget(void) {
    pthread_mutex_lock(&pool_lock);
    while (every) {
        struct pending *older = every->older;
        if (!every->own.handle)
            free(every);
        every = older;
    }
    pool = NULL;
    queues = NULL;
    pending_count = 0;
    gpu_count = 0;
    ring_forget_gpus();
    unloaded = false;
    pthread_mutex_unlock(&pool_lock);
}

/* `again`: ROCr has been shut down since this library started. */
static uint32_t start(hsa_tables *tables, bool again) {
    const int at = HSA_AMD_INTERCEPT(hsa_functions_of(tables->amd));
    if (hsa_functions_of(tables->core) <= HSA_CORE_FREEZE || at < 0 || !find_hsa() || hsa.system_get_info(HSA_TIMESTAMP_FREQUENCY, &frequency) ||
        !frequency)
        return AGENT_VERSION;
    if (again)
        forget();
    else if (!ring_create() || atexit(finish))
        return AGENT_NO_MEMORY;
    hsa.iterate_agents(on_agent, NULL);
    void **core = tables->core->functions, **amd = tables->amd->functions;
    create_intercepted_queue = (hsa_create_queue)amd[at];
    intercept = (hsa_intercept)amd[at + 1];
    create_queue = (hsa_create_queue)core[HSA_CORE_CREATE_QUEUE];
    freeze = (hsa_freeze)core[HSA_CORE_FREEZE];
    core[HSA_CORE_CREATE_QUEUE] = (void *)on_create_queue;
    core[HSA_CORE_FREEZE] = (void *)on_freeze;
    *(void **)&destroy_queue = core[HSA_CORE_DESTROY_QUEUE];
    core[HSA_CORE_DESTROY_QUEUE] = (void *)on_destroy_queue;
    return AGENT_STARTED;
}

/* Called by ROCr before the program can make a queue, also when ROCr is initialized again after it was shut down. It ignores the library
   if the result is false. */
EXPORTED bool OnLoad(void *tables, uint64_t version, uint64_t failed, const char *const *names) {
    (void)version, (void)failed, (void)names;
    const char *socket = secure_getenv(SOCKET);
    if (!socket || !tables)
        return false;
    if (create_queue)
        return ring_here() && start(tables, true) == AGENT_STARTED;
    hello.state = start(tables, false);
    if (!ring_tell(socket) && hello.state == AGENT_STARTED)
        ring_stop(); /* nobody reads */
    return hello.state == AGENT_STARTED;
}

/* Called by ROCr as it is shut down. */
EXPORTED void OnUnload(void) {
    finish();
    destroy_signals();
}
