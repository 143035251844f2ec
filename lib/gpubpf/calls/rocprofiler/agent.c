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
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "ring.h"
#include "sdk.h"

#define SOCKET "GPUBPF_DISPATCHES"      /* variable with the name of the tool's socket, an abstract one */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local bool starting;
static sdk_functions sdk;
static const void *caller;              /* an address in librocprofiler-register */
static struct hello hello = {.magic = RING_MAGIC};
static bool forked;                     /* this process is a child: the ring is its parent's */
static int memory_file = -1;            /* open only while starting */
static struct ring_header *header;
static struct ring_dispatch *slots;
static char *names;

static size_t ring_bytes(void) {
    return RING_HEADER + RING_SLOTS * sizeof(struct ring_dispatch) + RING_NAMES;
}

static void on_fork(void) {
    forked = true;
}

static bool here(void) {
    return !forked && !__atomic_load_n(&header->stopped, __ATOMIC_RELAXED);
}

static void on_symbol(sdk_record record, sdk_user_data *user, void *data) {
    (void)user, (void)data;
    const sdk_kernel_symbol *symbol = record.payload;
    if (record.kind != SDK_CODE_OBJECT || record.operation != SDK_KERNEL_SYMBOL || record.phase != SDK_PHASE_ENTER || !symbol ||
        symbol->size < sizeof *symbol || !symbol->name || !here())
        return;
    size_t length = strnlen(symbol->name, UINT16_MAX), size = sizeof(struct ring_name) + ((length + 7) & ~(size_t)7);
    uint64_t at = __atomic_load_n(&header->names, __ATOMIC_RELAXED);
    do {
        if (at + size > RING_NAMES) {
            __atomic_fetch_add(&header->names_lost, 1, __ATOMIC_RELAXED);
            return;
        }
    } while (!__atomic_compare_exchange_n(&header->names, &at, at + size, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    struct ring_name *name = (struct ring_name *)(names + at);
    name->kernel = symbol->kernel;
    name->length = (uint32_t)length;
    memcpy(name + 1, symbol->name, length);
    __atomic_store_n(&name->done, 1, __ATOMIC_RELEASE);
}

static uint32_t gpu_of(uint64_t agent) {
    for (uint32_t gpu = 0; gpu < header->gpus; gpu++)
        if (header->gpu[gpu] == agent)
            return gpu;
    return UINT32_MAX;
}

static void on_complete(const sdk_record *record, uint64_t enqueued_ns) {
    const sdk_dispatch *dispatch = record->payload;
    uint64_t number = __atomic_fetch_add(&header->written, 1, __ATOMIC_RELAXED);
    struct ring_dispatch *slot = &slots[number % RING_SLOTS];
    __atomic_store_n(&slot->number, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    slot->start_ns = dispatch->start_ns;
    slot->end_ns = dispatch->end_ns;
    slot->enqueued_ns = enqueued_ns;
    slot->queue = dispatch->info.queue;
    slot->kernel = dispatch->info.kernel;
    slot->correlation = record->correlation.internal;
    slot->dispatch = dispatch->info.dispatch;
    slot->tid = (uint32_t)record->thread;
    slot->gpu = gpu_of(dispatch->info.agent);
    memcpy(slot->grid, dispatch->info.grid, sizeof slot->grid);
    memcpy(slot->block, dispatch->info.block, sizeof slot->block);
    slot->shared = dispatch->info.shared;
    slot->scratch = dispatch->info.scratch;
    __atomic_store_n(&slot->number, number + 1, __ATOMIC_RELEASE);
}

/* Called in the launching thread when it enqueues a kernel, and in a thread of the runtime when the kernel has ended. The SDK passes the
   value of `user` from the first call to the second: the time of enqueuing, from which the tool finds the call. */
static void on_dispatch(sdk_record record, sdk_user_data *user, void *data) {
    (void)data;
    const sdk_dispatch *dispatch = record.payload;
    if (record.kind != SDK_KERNEL_DISPATCH || !dispatch || dispatch->size < sizeof *dispatch || !user || !here())
        return;
    if (record.operation == SDK_ENQUEUE && record.phase == SDK_PHASE_ENTER) {
        struct timespec now;
        clock_gettime(CLOCK_BOOTTIME, &now);
        user->value = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        __atomic_fetch_add(&header->enqueued, 1, __ATOMIC_RELAXED);
    } else if (record.operation == SDK_COMPLETE) {
        on_complete(&record, user->value);
    }
}

static sdk_status on_agents(int version, const void **agents, size_t count, void *data) {
    (void)data;
    for (size_t i = 0; version == SDK_AGENT_VERSION && i < count && header->gpus < RING_GPUS; i++) {
        const sdk_agent *agent = agents[i];
        if (agent->type == SDK_AGENT_GPU)
            header->gpu[header->gpus++] = agent->id;
    }
    return 0;
}

/* Map memory from a file that cannot shrink, which the tool reads. Return false if that fails, such as for the program's limits. */
static bool take_memory(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur < ring_bytes()) /* a larger file would raise SIGXFSZ, which ends the program */
        return false;
    memory_file = memfd_create("gpubpf-dispatches", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memory_file < 0)
        return false;
    void *memory = MAP_FAILED;
    if (!ftruncate(memory_file, (off_t)ring_bytes()) && !fcntl(memory_file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        memory = mmap(NULL, ring_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory_file, 0);
    if (memory == MAP_FAILED)
        return false;
    header = memory;
    slots = (struct ring_dispatch *)((char *)memory + RING_HEADER);
    names = (char *)(slots + RING_SLOTS);
    header->magic = RING_MAGIC;
    return !pthread_atfork(NULL, NULL, on_fork);
}

static int initialize(sdk_finalize_client finalize, void *data) {
    (void)finalize, (void)data;
    sdk_context symbols = {0}, dispatches = {0};
    if (!take_memory()) {
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
        header->stopped = 1;
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

/* Send the greeting and the memory's file to the tool, unless it cannot take the message at once. */
static void tell(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    if (length + 1 > sizeof address.sun_path)
        return;
    memcpy(address.sun_path + 1, name, length);
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (file < 0)
        return;
    hello.pid = (uint32_t)getpid();
    int own = open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
    if (own >= 0) {
        if (read(own, hello.comm, sizeof hello.comm - 1) < 0) /* then the tool reads the name itself */
            hello.comm[0] = 0;
        close(own);
    }
    struct iovec text = {.iov_base = &hello, .iov_len = sizeof hello};
    union { char bytes[CMSG_SPACE(sizeof(int))]; struct cmsghdr alignment; } control = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &text, .msg_iovlen = 1};
    if (hello.state == AGENT_STARTED) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        *rights = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
        memcpy(CMSG_DATA(rights), &memory_file, sizeof(int));
    }
    if (!connect(file, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)))
        sendmsg(file, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(file);
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
    tell(name);
    if (memory_file >= 0)
        close(memory_file);
    memory_file = -1;
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
