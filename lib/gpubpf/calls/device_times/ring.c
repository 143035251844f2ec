/* ring.c: the memory that an agent shares with the tool, and its greeting. Nothing here blocks or keeps a file open. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "../src/peer.h"
#include "ring.h"

struct hello hello = {.magic = RING_MAGIC};
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

bool ring_create(void) {
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

bool ring_here(void) {
    return header && !forked && !__atomic_load_n(&header->stopped, __ATOMIC_RELAXED);
}

void ring_stop(void) {
    __atomic_store_n(&header->stopped, 1, __ATOMIC_RELAXED);
}

void ring_add_gpu(uint64_t gpu) {
    uint32_t at = __atomic_load_n(&header->gpus, __ATOMIC_RELAXED); /* once: the tool's user can write to the memory */
    if (at < RING_GPUS) {
        header->gpu[at] = gpu;
        __atomic_store_n(&header->gpus, at + 1, __ATOMIC_RELAXED);
    }
}

void ring_forget_gpus(void) {
    header->gpus = 0;
}

uint32_t ring_gpu(uint64_t gpu) {
    uint32_t gpus = __atomic_load_n(&header->gpus, __ATOMIC_RELAXED);
    for (uint32_t at = 0; at < gpus && at < RING_GPUS; at++)
        if (header->gpu[at] == gpu)
            return at;
    return UINT32_MAX;
}

void ring_name(uint64_t kernel, const char *text) {
    size_t length = strnlen(text, UINT16_MAX), size = sizeof(struct ring_name) + ((length + 7) & ~(size_t)7);
    uint64_t at = __atomic_load_n(&header->names, __ATOMIC_RELAXED);
    do {
        if (at > RING_NAMES - size) {
            __atomic_fetch_add(&header->names_lost, 1, __ATOMIC_RELAXED);
            return;
        }
    } while (!__atomic_compare_exchange_n(&header->names, &at, at + size, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    struct ring_name *name = (struct ring_name *)(names + at);
    name->kernel = kernel;
    name->length = (uint32_t)length;
    memcpy(name + 1, text, length);
    __atomic_store_n(&name->done, 1, __ATOMIC_RELEASE);
}

uint64_t ring_enqueued(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    __atomic_fetch_add(&header->enqueued, 1, __ATOMIC_RELAXED);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void ring_put(const struct ring_dispatch *dispatch) {
    uint64_t number = __atomic_fetch_add(&header->written, 1, __ATOMIC_RELAXED);
    struct ring_dispatch *slot = &slots[number % RING_SLOTS];
    const size_t first = sizeof slot->number;
    __atomic_store_n(&slot->number, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy((char *)slot + first, (const char *)dispatch + first, sizeof *slot - first);
    __atomic_store_n(&slot->number, number + 1, __ATOMIC_RELEASE);
}

static bool send_hello(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    if (length + 1 > sizeof address.sun_path)
        return false;
    memcpy(address.sun_path + 1, name, length);
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (file < 0)
        return false;
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
    bool sent = !connect(file, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) &&
                is_own_user_or_root(file) && sendmsg(file, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof hello;
    close(file);
    return sent;
}

bool ring_tell(const char *name) {
    bool told = send_hello(name);
    if (memory_file >= 0)
        close(memory_file);
    memory_file = -1;
    return told;
}
