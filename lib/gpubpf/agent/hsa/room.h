/*
 * room.h: free space in a queue whose packets pass through an interceptor. For C and C++.
 *
 * The program sees a ROCr queue that always looks empty, because its packets are passed on at once. So the program does not wait when
 * the GPU's queue is full. ROCr should wait, but before 6.0 it reorders packets instead, or aborts in a failed assertion. So the
 * interceptor waits where the program would have waited. Markers show how far the GPU is: a marker waits for nothing, and when it
 * completes, the GPU has taken all earlier packets from the queue.
 *
 * ROCr calls an interceptor with the queue's lock held, so this code needs no lock. ROCr's signal thread may be blocked while an
 * interceptor waits.
 */
#pragma once
/* clang-format off */

#include <string.h>

#include "hsa.h"

struct room {
    hsa_handle ahead;                   /* a signal: the number of markers not reached yet; {0}: unknown, never wait */
    uint64_t size;                      /* the size of the GPU's queue, in packets */
    uint64_t since;                     /* packets since the last marker */
};

enum { ROOM_MARKERS = 8, ROOM_MOST = 64 }; /* markers in a full queue; most packets inserted at once */

static inline int64_t *room_ahead(const struct room *room) {
    return &((hsa_signal *)room->ahead.handle)->value;
}

/* Return whether `packets` packets and a marker fit. */
static inline int room_fits(const struct room *room, uint64_t packets) {
    const uint64_t part = room->size / ROOM_MARKERS + ROOM_MOST;
    uint64_t ahead = room->ahead.handle ? (uint64_t)__atomic_load_n(room_ahead(room), __ATOMIC_ACQUIRE) : 0;
    return !ahead || room->since + packets + ahead * part + 2 <= room->size;
}

/* Count inserted packets. Return the number of packets to add after them: 1 if `behind` is now a marker, or 0. */
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
