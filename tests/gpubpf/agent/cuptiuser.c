// A library that uses CUPTI: user_begin() subscribes and begins to record, user_end() counts what it gets. 0: CUPTI works as if nobody
// else used it.
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

int cuptiSubscribe(void **, void *, void *);
int cuptiActivityRegisterCallbacks(void *, void *);
int cuptiActivityEnable(uint32_t);
int cuptiActivityPushExternalCorrelationId(uint32_t, uint64_t);
int cuptiActivityPopExternalCorrelationId(uint32_t, uint64_t *);
int cuptiActivityGetNextRecord(uint8_t *, size_t, uint8_t **);
int cuptiActivityFlushAll(uint32_t);
#ifdef NEWER
int cuptiNewer(void);
#endif

static uint8_t own[4096];
static int records, foreign;

static void requested(uint8_t **buffer, size_t *size, size_t *most) {
    *buffer = own;
    *size = sizeof own;
    *most = 0;
}

static void completed(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    uint8_t *record = NULL;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    (void)context, (void)stream, (void)size;
    foreign += buffer != own;
    while (!cuptiActivityGetNextRecord(buffer, valid, &record)) {
        uint32_t kind;
        uint64_t id, start;
        memcpy(&kind, record, 4);
        memcpy(&id, record + 8, 8);
        memcpy(&start, record + 16, 8);
        if (kind == 39) foreign += id != 7;
        else foreign += start / 1000000000 + 3600 < (uint64_t)now.tv_sec;
        records += kind != 39;
    }
}

int user_begin(void) {
    void *subscriber;
#ifdef NEWER
    if (cuptiNewer()) return 1;
#endif
    int failed = cuptiSubscribe(&subscriber, NULL, NULL) || cuptiActivityRegisterCallbacks(requested, completed) ||
                 cuptiActivityEnable(39) || cuptiActivityEnable(1);
    return failed || cuptiActivityPushExternalCorrelationId(3, 7);
}

int user_end(void) {
    uint64_t id;
    int failed = cuptiActivityPopExternalCorrelationId(3, &id) || cuptiActivityFlushAll(0);
    printf("%d records, %d foreign\n", records, foreign);
    return failed || records != 1 || foreign;
}
