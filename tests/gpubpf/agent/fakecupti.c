// A stand-in of CUPTI's library, with the records of cupti_activity.h (CUDA 13): what runs inside an external region is a kernel of 5,000 ns
// that begins 1,000 ns after the region does. It records if kernels or copies are enabled. As in CUPTI, a buffer stays with the library
// until it is flushed, and whoever has registered callbacks by then gets it.
// FAKECUPTI_RECORDS names a file that is made when kernels are enabled. FAKECUPTI has words that change it: "tells" (what it is asked to enable, and whether signals can come then), "mute" (delivers nothing),
// "swapped" (the kernel's record comes first), "apart" (each record has a buffer of its own), "old" (cannot enable single calls),
// "zero" (knows no times), "slow" (takes 3 s to enable kernels). FAILS: it does not record.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { COPY = 1, KERNEL = 10, EXTERNAL = 39, CUSTOM = 3, KINDS = 64 };

static void (*request)(uint8_t **, size_t *, size_t *);
static void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static uint64_t (*clock_of_client)(void);
static int enabled[KINDS], subscribed;
static struct { uint64_t id, start; } regions[64];
static uint32_t depth, calls;
static uint8_t *buffer;
static size_t size, used;

static int is(const char *word) { return getenv("FAKECUPTI") && strstr(getenv("FAKECUPTI"), word); }

static uint64_t now(void) {
    struct timespec t;
    if (clock_of_client) return clock_of_client();
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// The embedded device has either CUPTI or the Compute Sanitizer API. Returns whether it is free for CUPTI.
static int tell_driver(int subscribes) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    _Bool (*tell)(_Bool) = driver ? (_Bool (*)(_Bool))dlsym(driver, "cudasim_cupti") : NULL;
    return !tell || tell(subscribes);
}

int cuptiSubscribe(void **subscriber, void *callback, void *data) {
    (void)callback, (void)data;
    if (subscribed || !tell_driver(1)) return 39;  // CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
    subscribed = 1;
    *subscriber = &subscribed;
    return 0;
}

int cuptiActivityRegisterCallbacks(void *requested, void *completed) {
    request = requested;
    complete = completed;
    return 0;
}

int cuptiActivityRegisterTimestampCallback(uint64_t (*callback)(void)) {
    clock_of_client = callback;
    return 0;
}

int cuptiActivityEnable(uint32_t kind) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    if (is("tells")) fprintf(stderr, "enabled %u, signals %s\n", kind, sigismember(&blocked, SIGALRM) ? "blocked" : "come");
#ifdef FAILS
    return 15;
#endif
    if (kind == KERNEL && getenv("FAKECUPTI_RECORDS")) fclose(fopen(getenv("FAKECUPTI_RECORDS"), "w"));
    if (kind == KERNEL && is("slow")) sleep(3);
    return kind >= KINDS || !(enabled[kind] = 1);
}

static const char *const names[] = {NULL, "cuCtxSynchronize", "cuMemcpyHtoD_v2", "cuLaunchKernel"};

int cuptiGetCallbackName(uint32_t domain, uint32_t call, const char **name) {
    *name = call < 4 ? names[call] : NULL;
    return domain != 1 || !*name;
}

int cuptiActivityEnableDriverApi(uint32_t call, uint8_t enable) {
    if (is("tells") && enable) fprintf(stderr, "enabled %s\n", names[call]);
    return is("old");
}

int cuptiActivityDisable(uint32_t kind) { return kind >= KINDS || (enabled[kind] = 0); }

int cuptiActivityPushExternalCorrelationId(uint32_t kind, uint64_t id) {
    regions[depth].id = id;
    regions[depth++].start = now() + 1000;
    return kind != CUSTOM;
}

static void flush(void) {
    if (!buffer) return;
    complete(NULL, 0, buffer, size, used);
    buffer = NULL;
}

static void put(const uint8_t *record, size_t length) {
    size_t records = 0;
    if (buffer && (used + length > size || is("apart"))) flush();
    if (!buffer) request(&buffer, &size, &records), used = 0;
    memcpy(buffer + used, record, length);
    used += length;
}

// Writes an external correlation of 24 bytes and a kernel of 160.
int cuptiActivityPopExternalCorrelationId(uint32_t kind, uint64_t *id) {
    uint32_t external = EXTERNAL, custom = CUSTOM, kernel = KERNEL, number = ++calls;
    uint64_t start = regions[--depth].start, end = start + 5000;
    uint8_t correlation[24] = {0}, work[160] = {0};
    *id = regions[depth].id;
    if ((!enabled[KERNEL] && !enabled[COPY]) || is("mute")) return kind != CUSTOM;
    memcpy(correlation, &external, 4);
    memcpy(correlation + 4, &custom, 4);
    memcpy(correlation + 8, id, 8);
    memcpy(correlation + 16, &number, 4);
    memcpy(work, &kernel, 4);
    if (!is("zero")) memcpy(work + 16, &start, 8);
    if (!is("zero")) memcpy(work + 24, &end, 8);
    memcpy(work + 92, &number, 4);
    if (is("swapped")) put(work, sizeof work);
    put(correlation, sizeof correlation);
    if (!is("swapped")) put(work, sizeof work);
    return kind != CUSTOM;
}

int cuptiActivityGetNextRecord(uint8_t *from, size_t valid, uint8_t **record) {
    uint32_t kind = 0;
    if (!*record) return *record = from, 0;
    memcpy(&kind, *record, 4);
    *record += kind == EXTERNAL ? 24 : 160;
    return *record >= from + valid;
}

int cuptiActivityFlushAll(uint32_t flags) {
    flush();
    return flags > 1;
}

#ifdef NEWER
int cuptiNewer(void) { return 0; }
#endif
