/* What the stand-ins for ROCm's libraries share: the table of functions that the runtime goes through, and hands to register. */
#pragma once

#include <stdint.h>

struct work { /* a kernel that is given to a queue */
    uint64_t queue, agent, kernel;
    uint32_t grid[3], block[3]; /* the grid in work-items */
    uint32_t shared;
    uint64_t start_ns, end_ns; /* when it will run, CLOCK_BOOTTIME */
};

struct table {
    void (*submit)(struct work *);
    void (*loaded)(uint64_t kernel, const char *name);
};

int rocprofiler_register_library_api_table(const char *name, void *import, uint32_t version, void **tables, uint64_t count, uint64_t *id);
