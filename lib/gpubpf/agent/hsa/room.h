/*
 * room.h: room in a queue whose packets pass an interceptor. For C and C++.
 *
 * The program sees a queue of ROCr's that is always empty, since its packets go on at once. So it does not wait when the GPU's queue is
 * full. ROCr should, but before 6.0 it reorders packets then, or ends the program by a failed assertion. So the interceptor waits, where
 * the program would have waited without it: markers tell how far the GPU is. Such a packet waits for nothing; when it is done, the GPU
 * has taken all packets before it from the queue.
 *
 * ROCr calls an interceptor with the queue's lock held, so nothing here needs another one, and ROCr's thread for signals may stand still
 * while an interceptor waits.
 */
#pragma once
/* clang-format off */

#include <string.h>

#include "hsa.h"

struct room {
    hsa_handle ahead;                   /* a signal: how many markers the GPU has not reached; {0}: unknown, and nothing waits */
    uint64_t size;                      /* of the GPU's queue, in packets */
    uint64_t since;                     /* packets since the last marker */
};

enum { ROOM_MARKERS = 8, ROOM_MOST = 64 }; /* markers in a full queue; the most packets that are put in at once */

static inline int64_t *room_ahead(const struct room *room) {
    return &((hsa_signal *)room->ahead.handle)->value;
}

/* Whether `packets` and a marker fit. */
static inline int room_fits(const struct room *room, uint64_t packets) {
    const uint64_t part = room->size / ROOM_MARKERS + ROOM_MOST;
    uint64_t ahead = room->ahead.handle ? (uint64_t)__atomic_load_n(room_ahead(room), __ATOMIC_ACQUIRE) : 0;
    return !ahead || room->since + packets + ahead * part + 2 <= room->size;
}

/* Count packets that are put in. Return how many packets follow them: 1 if `behind` is now a marker, or 0. */
static inline uint64_t room_take(struct room *room, uint64_t packets, hsa_packet *behind) {
    room->since += packets;
    if (!room->ahead.handle || room->since < room->size / ROOM_MARKERS)
        return 0;
    room->since = 0;
    __atomic_fetch_add(room_ahead(room), 1, __ATOMIC_ACQ_REL);
    memset(behind, 0, sizeof *behind);
    behind->header = HSA_MARKER;
    behind->completion = room->ahead;
    return 1;
}
