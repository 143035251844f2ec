// A stand-in of CUPTI's library, with the records of cupti_activity.h (CUDA 13): what runs inside an external region is a kernel of 5,000 ns
// that begins 1,000 ns after the region does.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void (*request)(uint8_t **, size_t *, size_t *);
static void (*complete)(void *, uint32_t, uint8_t *, size_t, size_t);
static uint64_t (*now)(void);
static struct { uint64_t id, start; } calls[4096];
static uint32_t count, sent;

int cuptiActivityRegisterCallbacks(void *requested, void *completed) {
    request = requested;
    complete = completed;
    return 0;
}

int cuptiActivityRegisterTimestampCallback(uint64_t (*callback)(void)) {
    now = callback;
    return 0;
}

int cuptiActivityEnable(uint32_t kind) { return kind == 0; }

int cuptiActivityPushExternalCorrelationId(uint32_t kind, uint64_t id) {
    calls[count].id = id;
    calls[count++].start = now() + 1000;
    return kind != 3;
}

int cuptiActivityPopExternalCorrelationId(uint32_t kind, uint64_t *id) {
    *id = calls[count - 1].id;
    return kind != 3;
}

// An external correlation of 24 bytes, then a kernel of 160.
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, uint8_t **record) {
    uint32_t kind = 0;
    if (!*record) return *record = buffer, 0;
    memcpy(&kind, *record, 4);
    *record += kind == 39 ? 24 : 160;
    return *record >= buffer + valid;
}

int cuptiActivityFlushAll(uint32_t flags) {
    for (; sent < count; sent++) {
        uint8_t *buffer = NULL;
        size_t size = 0, records = 0;
        uint32_t external = 39, custom = 3, kernel = 10, number = sent + 1;
        uint64_t end = calls[sent].start + 5000;
        request(&buffer, &size, &records);
        memset(buffer, 0, 184);
        memcpy(buffer, &external, 4);
        memcpy(buffer + 4, &custom, 4);
        memcpy(buffer + 8, &calls[sent].id, 8);
        memcpy(buffer + 16, &number, 4);
        memcpy(buffer + 24, &kernel, 4);
        memcpy(buffer + 40, &calls[sent].start, 8);
        memcpy(buffer + 48, &end, 8);
        memcpy(buffer + 24 + 92, &number, 4);
        complete(NULL, 0, buffer, size, 184);
    }
    return flags != 0;
}
