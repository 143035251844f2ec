/*
 * ring.h: what the agent and the tool share: a message when the agent has begun, and memory for dispatches and names of kernels.
 * dispatches.py has the same layouts. Little-endian, x86-64.
 */
#pragma once

#include <stdint.h>

#define RING_SLOTS 32768u               /* dispatches that the tool may be behind */
#define RING_HEADER 4096u
#define RING_NAMES (16u << 20)          /* bytes, taken as they are used */
#define RING_GPUS 64u
#define RING_MAGIC 0x3144504247505547ull /* "GUPGBPD1" */

enum { AGENT_STARTED = 1, AGENT_NO_SDK, AGENT_OTHER_TOOL, AGENT_VERSION, AGENT_REFUSED, AGENT_NO_MEMORY };

struct hello {                          /* one for each process, with the memory's file behind it where it started */
    uint64_t magic;
    uint32_t state, status, version, pid; /* AGENT_…; rocprofiler's status; its version, 10203 for 1.2.3; in its own PID namespace */
    char comm[16];                      /* and a line feed, or nothing */
};

struct ring_header {
    uint64_t magic;
    uint64_t enqueued;                  /* dispatches given to the GPU */
    uint64_t written;                   /* dispatches that ended and have, or will have, a slot */
    uint64_t names, names_lost;         /* bytes taken; names without room */
    uint32_t stopped, gpus;             /* the tool wants no more; how many GPUs there are */
    uint64_t gpu[RING_GPUS];            /* their ids, in the order of the runtime */
};
_Static_assert(sizeof(struct ring_header) <= RING_HEADER, "fits");

struct ring_dispatch {                  /* slot N modulo RING_SLOTS holds dispatch N */
    uint64_t number;                    /* N + 1, written last; 0 while it is written */
    uint64_t start_ns, end_ns;          /* CLOCK_BOOTTIME */
    uint64_t enqueued_ns;               /* when the launching thread gave it to the GPU; 0: not known */
    uint64_t queue, kernel, correlation, dispatch;
    uint32_t tid, gpu;                  /* the thread, in the process's PID namespace; place in `gpu`, or ~0 */
    uint32_t grid[3], block[3];         /* the grid in work-items */
    uint32_t shared, scratch;           /* bytes */
};
_Static_assert(sizeof(struct ring_dispatch) == 104, "as dispatches.py has it");

struct ring_name {                      /* behind it the name, without NUL, up to a multiple of 8 bytes */
    uint64_t kernel;
    uint32_t length, done;              /* `done` is written last */
};
