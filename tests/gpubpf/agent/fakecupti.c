// A stand-in of CUPTI's library, with the records of cupti_activity.h (CUDA 13): what runs inside an external region is a kernel of 5,000 ns
// that begins 1,000 ns after the region does. It records if kernels or copies are enabled. As in CUPTI, a buffer stays with the library
// until it is flushed, and whoever has registered callbacks by then gets it.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COPY = 1, KERNEL = 10, EXTERNAL = 39, CUSTOM = 3, KINDS = 64 };

static void (*request)(uint8_t **, size_t *, size_t *);
static void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static uint64_t (*clock_of_client)(void);
static int enabled[KINDS], subscribed;
static struct { uint64_t id, start; } regions[64];
static uint32_t depth, calls;
static uint8_t *buffer;
static size_t size, used;

static uint64_t now(void) {
    struct timespec t;
    if (clock_of_client) return clock_of_client();
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

int cuptiSubscribe(void **subscriber, void *callback, void *data) {
    (void)callback, (void)data;
    if (subscribed) return 39;  // CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
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
    if (getenv("FAKECUPTI_TELLS")) fprintf(stderr, "enabled %u\n", kind);
    return kind >= KINDS || !(enabled[kind] = 1);
}

int cuptiActivityDisable(uint32_t kind) { return kind >= KINDS || (enabled[kind] = 0); }

int cuptiActivityPushExternalCorrelationId(uint32_t kind, uint64_t id) {
    regions[depth].id = id;
    regions[depth++].start = now() + 1000;
    return kind != CUSTOM;
}

// Writes an external correlation of 24 bytes, then a kernel of 160.
int cuptiActivityPopExternalCorrelationId(uint32_t kind, uint64_t *id) {
    uint32_t external = EXTERNAL, custom = CUSTOM, kernel = KERNEL, number = ++calls;
    uint64_t start = regions[--depth].start, end = start + 5000;
    size_t records = 0;
    *id = regions[depth].id;
    if (!enabled[KERNEL] && !enabled[COPY]) return kind != CUSTOM;
    if (buffer && used + 184 > size) complete(NULL, 0, buffer, size, used), buffer = NULL;
    if (!buffer) request(&buffer, &size, &records), used = 0;
    uint8_t *at = buffer + used;
    memset(at, 0, 184);
    memcpy(at, &external, 4);
    memcpy(at + 4, &custom, 4);
    memcpy(at + 8, id, 8);
    memcpy(at + 16, &number, 4);
    memcpy(at + 24, &kernel, 4);
    memcpy(at + 40, &start, 8);
    memcpy(at + 48, &end, 8);
    memcpy(at + 24 + 92, &number, 4);
    used += 184;
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
    if (buffer) complete(NULL, 0, buffer, size, used);
    buffer = NULL;
    return flags > 1;
}
