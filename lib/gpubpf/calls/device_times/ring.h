/*
 * ring.h: what an agent and the tool share: the agent's greeting, and memory for dispatches and names of kernels.
 * dispatches.py defines the same layouts. Little-endian, x86-64.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define SOCKET "GPUBPF_DISPATCHES"      /* variable with the name of the tool's socket, an abstract one */

#define RING_SLOTS 32768u               /* dispatches that the ring holds until the tool reads them */
#define RING_HEADER 4096u
#define RING_NAMES (16u << 20)          /* bytes, allocated when used */
#define RING_GPUS 64u
#define RING_MAGIC 0x3144504247505547ull /* "GUPGBPD1" */

enum { AGENT_STARTED = 1, AGENT_NO_SDK, AGENT_OTHER_TOOL, AGENT_VERSION, AGENT_REFUSED, AGENT_NO_MEMORY };

struct hello {                          /* one for each process; the memory's file follows if the agent started */
    uint64_t magic;
    uint32_t state, status, version, pid; /* AGENT_…; rocprofiler's status; its version, 10203 for 1.2.3; PID in its own namespace */
    char comm[16];                      /* with a line feed; empty if unknown */
};

struct ring_header {
    uint64_t magic;
    uint64_t enqueued;                  /* dispatches that were enqueued */
    uint64_t written;                   /* dispatches that ended, including those whose slot is being written */
    uint64_t names, names_lost;         /* bytes used; names that did not fit */
    uint32_t stopped, gpus;             /* the tool has stopped reading; number of GPUs */
    uint64_t gpu[RING_GPUS];            /* their IDs, in the runtime's order */
};
_Static_assert(sizeof(struct ring_header) <= RING_HEADER, "fits");

struct ring_dispatch {                  /* slot N modulo RING_SLOTS holds dispatch N */
    uint64_t number;                    /* N + 1, written last; 0 while it is written */
    uint64_t start_ns, end_ns;          /* CLOCK_BOOTTIME */
    uint64_t enqueued_ns;               /* when the launching thread enqueued it; 0: unknown */
    uint64_t queue, kernel, correlation, dispatch;
    uint32_t tid, gpu;                  /* the thread, in the process's PID namespace; index in `gpu`, or ~0 */
    uint32_t grid[3], block[3];         /* the grid in work-items */
    uint32_t shared, scratch;           /* bytes */
};
_Static_assert(sizeof(struct ring_dispatch) == 104, "the same as in dispatches.py");

struct ring_name {                      /* followed by the name without NUL, padded to a multiple of 8 bytes */
    uint64_t kernel;
    uint32_t length, done;              /* `done` is written last */
};

/* --- for agents: ring.c --- */

extern struct hello hello;              /* the agent sets state, status and version */

/* Map memory from a file that cannot shrink, which the tool reads. Return false if that fails, such as for the program's limits. */
bool ring_create(void);
/* Send the greeting and the memory's file to the tool. Return false if it cannot take the message at once. */
bool ring_tell(const char *socket);
/* Return whether dispatches are to be written. Not in a child of the process, and not once the tool has stopped reading. */
bool ring_here(void);
void ring_stop(void);
void ring_add_gpu(uint64_t gpu);
/* Forget all GPUs: the runtime starts again, and gives them other numbers. */
void ring_forget_gpus(void);
/* Return the number of a GPU that was added, or ~0. */
uint32_t ring_gpu(uint64_t gpu);
void ring_name(uint64_t kernel, const char *name);
/* Count a dispatch that is being enqueued, and return the time. */
uint64_t ring_enqueued(void);
/* Write a dispatch that has ended; `number` is set here. */
void ring_put(const struct ring_dispatch *dispatch);
