/* A library whose calls take long for a known reason each; scenes.c makes them. */
#include "scenes.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PART = 1 << 20 };

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static int rest(const char *ms)
{
    struct timespec t = {atoi(ms) / 1000, atoi(ms) % 1000 * 1000000l};
    return nanosleep(&t, 0);
}

static int wait_for_nobody(const char *ms)
{
    struct timespec t = {atoi(ms) / 1000, atoi(ms) % 1000 * 1000000l};
    int word = 0;
    return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &t, 0, 0) == -1 && errno == ETIMEDOUT ? 0 : -1;
}

/* Computes, for a time of the CPU's. */
static int compute(const char *ms)
{
    uint64_t end = cpu_ns() + atoi(ms) * 1000000ull;
    while (cpu_ns() < end)
        ;
    return 0;
}

static int read_past_the_cache(const char *path)
{
    int file = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    struct stat st;
    void *buffer = 0;
    int failed = file < 0 || fstat(file, &st) || posix_memalign(&buffer, PAGE, PART);
    for (off_t at = 0; !failed && at < st.st_size; at += PART)
        failed = pread(file, buffer, PART, at) < 0;
    free(buffer);
    close(file);
    return failed ? -1 : 0;
}

/* Pages of a file that are in no cache, one by one. */
static int touch_a_file(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (file < 0 || fstat(file, &st) || posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED))
        return -1;
    volatile char *at = mmap(0, st.st_size, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED || madvise((void *)at, st.st_size, MADV_RANDOM))
        return -1;
    for (off_t i = 0; i < st.st_size; i += 16 * PAGE)
        (void)at[i];
    return munmap((void *)at, st.st_size);
}

/* Through the cache: where memory is short, what was read before has to go. */
static int read_through_the_cache(const char *path)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    char *buffer = malloc(PART);
    int failed = file < 0 || !buffer;
    for (ssize_t n = 1; !failed && n > 0; failed = n < 0)
        n = read(file, buffer, PART);
    free(buffer);
    close(file);
    return failed ? -1 : 0;
}

/* Memory that nobody used before, in MB. */
static int touch_memory(const char *size)
{
    size_t bytes = (size_t)atoi(size) << 20;
    volatile char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || madvise((void *)at, bytes, MADV_NOHUGEPAGE))
        return -1;
    for (size_t i = 0; i < bytes; i += PAGE)
        at[i] = 1;
    return munmap((void *)at, bytes);
}

/* Sends a byte over a connection, file 3, and waits for one. */
static int ask(void)
{
    char byte = 1;
    return send(3, &byte, 1, 0) == 1 && recv(3, &byte, 1, 0) == 1 ? 0 : -1;
}

static int work(const char *what, const char *argument)
{
    if (!strcmp(what, "nothing"))
        return 0;
    if (!strcmp(what, "sleep"))
        return rest(argument);
    if (!strcmp(what, "futex"))
        return wait_for_nobody(argument);
    if (!strcmp(what, "compute"))
        return compute(argument);
    if (!strcmp(what, "disk"))
        return read_past_the_cache(argument);
    if (!strcmp(what, "mapped"))
        return touch_a_file(argument);
    if (!strcmp(what, "cached"))
        return read_through_the_cache(argument);
    if (!strcmp(what, "memory"))
        return touch_memory(argument);
    if (!strcmp(what, "ask"))
        return ask();
    errno = EINVAL;
    return -1;
}

int scene_work(const char *what, const char *argument)
{
    return work(what, argument);
}

int scene_plainly(const char *what, const char *argument)
{
    return work(what, argument);
}

int scene_launch(void)
{
    return 0;
}
