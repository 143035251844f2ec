/*
 * gpubpf_traffic.h: adds up the memory traffic of each site of a kernel: requests, pattern, sectors, banks, contention. Each warp works
 * these out itself. docs/memory.md defines them, and memory/traffic.py reads the cells. memtrace uses this header, and other tools can:
 * attach this program with b.attach_gpu_access(fn_name="on_access", kinds=("load", "store", "atomic"), spaces=("global", "const")):
 *
 *     GPU_SITE_ARRAY(global_cells, struct gpu_traffic);
 *
 *     int on_access(struct gpu_access *ctx) {
 *         int site = ctx->site;
 *         struct gpu_traffic *cell = global_cells.lookup(&site);
 *         struct gpu_request request = {ctx->address, ctx->width, ctx->active};
 *         return cell ? gpu_add_request(cell, &request) : 0;
 *     }
 *
 * All lanes that make a request call the function together. Flags must be constants, so that a program has only the code it needs.
 */
#ifndef GPUBPF_TRAFFIC_H
#define GPUBPF_TRAFFIC_H

#include <gpubpf.h>

/* SHIFTED: like UNIT, but it does not begin at a sector. */
enum gpu_pattern { GPU_UNIT, GPU_SHIFTED, GPU_BROADCAST, GPU_STRIDED, GPU_GATHER, GPU_SINGLE, GPU_PART };

/*
 * The traffic of a site. A request is one execution by a warp. What follows from the number of requests and the width is not added up
 * here: see traffic.py.
 */
struct gpu_traffic {
    u64 requests[2 * GPU_PART];     /* by all lanes, or by one lane; from GPU_PART on: by other numbers of lanes, with widths that
                                       vary (but for usual copies of GPUBPF_COPY bytes), in local memory at several offsets, or with a pattern in each row of the block; on AMD
                                       GPUs also where an access has bytes of two sectors */
    u64 accesses, least;            /* from GPU_PART on: lanes, least possible number of sectors */
    u64 sectors;                    /* from GPU_PART on, and of STRIDED and GATHER */
    u64 bytes;                      /* if the width varies; in shared memory of one lane, from GPU_PART on, and of large copies */
    u64 steps, squares;             /* of STRIDED: sum of the distances in bytes from lane to lane, and of their squares */
    u64 longest_max, shortest_max;  /* of STRIDED: the longest distance; ~ of the shortest */
    u64 gaps;                       /* from GPU_PART on: requests with idle lanes between those that make them */
    u64 contention_max;             /* most lanes at one address, from GPU_PART on and of GATHER */
    u64 addresses;                  /* distinct addresses of a request, from GPU_PART on and of STRIDED and GATHER, with `updates` */
    u64 uncounted_max;              /* 1: gpubpf_updates.h had no room for some addresses */
};
struct gpu_shared_traffic {         /* of shared memory */
    struct gpu_traffic cell;
    u64 phases, ways;               /* from GPU_PART on; from GPU_PART on, and of STRIDED and GATHER */
    u64 ways_max;
};

struct gpu_unaddressed_traffic {          /* of textures, surfaces, tensors and tensor memory, whose addresses are unknown */
    u64 requests, accesses;
};

/* A lane's part of a request. */
struct gpu_request {
    u64 address, width;
    gpu_mask active;                /* of the lanes that make it; 0: all lanes that run this */
    int varies;                     /* flag: the width may differ between lanes, and exceed 16 bytes (copies) */
    int local;                      /* flag: in local memory */
    int follow;                     /* flag: find out which lanes are side by side, for `row` and `ahead` */
    int updates;                    /* flag: count distinct addresses */
    int bytes;                      /* flag: a granule (gpubpf_coverage.h) is a byte, whatever the parameter says */
    int keeps;                      /* flag: keep what this lane would add, for gpu_add_again, instead of adding it */
    u32 row, ahead;                 /* lanes in this lane's row, 0 if another lane has the same address; lanes before it */
    u32 place, sectors, accesses, phases, ways, gaps;    /* with `keeps`: 1 + the index in `requests`, or 0; the fields of the cell */
    s32 step;                       /* with `keeps`, of STRIDED: the distance in bytes */
};

#if GPU_LANES > 32
/* AMD GPUs: sectors of 64 bytes, waves of 32 or 64 lanes, accesses of 12 bytes, and at any address. */
#define GPUBPF_SECTOR_BITS 6
#define GPUBPF_LANES gpu_warp_size()
#define GPUBPF_FULL (~0ull >> (64 - gpu_warp_size() & 63))
#define GPUBPF_IS_SHORT(_width) (gpu_warp_size() * (u32)(_width) < 64)    /* all lanes together access less than a sector */
#define GPUBPF_IS_MULTIPLE(_bytes, _width) ((_width) == 12 ? !((_bytes) % 12) : !((_bytes) & ((_width) - 1)))
#define GPUBPF_WORD_BITS(_width) ((_width) > 8 ? 4 : gpu_log2((_width) | 4))
#define GPUBPF_ROW_BITS(_shift) 2
#define GPUBPF_ANY(_lanes) gpu_popcount((_lanes) & -(_lanes))    /* not a comparison, of which the verifier would follow both ways */
#define GPUBPF_BRANCHES 0                        /* one lane's branch costs a wave both ways */
#define GPUBPF_CROSSING(_address, _width) gpu_ballot(((_address) & 63) + (_width) > 64)  /* lanes with bytes of two sectors */
#else
#define GPUBPF_SECTOR_BITS 5
#define GPUBPF_LANES 32
#define GPUBPF_FULL 0xffffffffu
#define GPUBPF_IS_SHORT(_width) 0
#define GPUBPF_IS_MULTIPLE(_bytes, _width) (!((_bytes) & ((_width) - 1)))
#define GPUBPF_WORD_BITS(_width) gpu_log2((_width) | 4)
#define GPUBPF_ROW_BITS(_shift) (_shift)
#define GPUBPF_ANY(_lanes) ((0 - (u64)(_lanes)) >> 63)
#define GPUBPF_BRANCHES 1
#define GPUBPF_CROSSING(_address, _width) 0
#endif
#define GPUBPF_SECTOR (1 << GPUBPF_SECTOR_BITS)
#define GPUBPF_COPY 16                           /* bytes of a copy that counts as an access of a known width; traffic.py: SMALL_COPY */
#define GPUBPF_LANE (gpu_lane() & (GPU_LANES - 1))
#define GPUBPF_BELOW(_lane) (((gpu_mask)1 << (_lane)) - 1)
#define GPUBPF_COUNT(_place, _more) __sync_fetch_and_add(&(_place), _more)
/* The same for a field of `cell`, of `banked`, or for one of the requests: `request` says whether to keep the number instead. */
#define GPUBPF_ADD_TO(_of, _field, _more)            \
    do {                                             \
        if (request->keeps)                          \
            request->_field += (_more);              \
        else                                         \
            GPUBPF_COUNT((_of)->_field, _more);      \
    } while (0)
#define GPUBPF_ADD(_field, _more) GPUBPF_ADD_TO(cell, _field, _more)
#define GPUBPF_ADD_KNOWN(_field, _more)              /* of accesses, if the width is known */ \
    do {                                             \
        if (!request->keeps)                         \
            GPUBPF_COUNT(cell->_field, _more);       \
    } while (0)
#define GPUBPF_ADD_REQUEST(_pattern)                 \
    do {                                             \
        if (request->keeps)                          \
            request->place = 1 + (_pattern);         \
        else                                         \
            GPUBPF_COUNT(cell->requests[_pattern], 1); \
    } while (0)

/*
 * x / y for a y that divides x, both of 32 bits: x times the inverse of y's odd part modulo 2^32. A division takes twice as many
 * instructions.
 */
static inline s64 gpubpf_quotient(s32 x, u32 y) {
    u32 zeros = gpu_log2(y & -y), odd = y >> (zeros & 31), inverse = 3 * odd ^ 2;    /* the last 5 bits are right, then 10, 20, 40 */
    inverse *= 2 - odd * inverse;
    inverse *= 2 - odd * inverse;
    inverse *= 2 - odd * inverse;
    return (s32)((x >> (zeros & 31)) * inverse);
}

static inline u64 gpubpf_length(s64 step) { return step < 0 ? -step : step; }

static inline void gpubpf_raise(u64 *most, u64 value) {
    if (value > *most)
        gpu_max(most, value);
}

/*
 * Adds, for each phase, the most words in one bank. The lanes of a phase access 128 bytes together, in words of 1 << shift bytes. Returns
 * the lanes of `before` that are in this lane's phase.
 */
static inline gpu_mask gpubpf_add_ways(struct gpu_shared_traffic *banked, struct gpu_request *request, u32 shift, gpu_mask before) {
    u32 lane = GPUBPF_LANE, together = 128 >> (shift & 7), phase = lane << shift >> 7;
    gpu_mask phase_lanes = (gpu_mask)((1ull << together) - 1) << (phase * together & (GPU_LANES - 1));
    u64 word = request->address >> shift;
    gpu_mask words = gpu_ballot(!(gpu_match(word << 3 | phase) & before));  /* one lane for each word */
    u64 ways = gpu_popcount(gpu_match((word & (together - 1)) << 3 | phase) & words), most = 0;

    for (u32 least = 1; least <= 32; least++) {
        u64 such = gpu_ballot(ways >= least);
        if (!such)
            break;
        most += GPUBPF_ANY(such & phase_lanes);
    }
    gpubpf_raise(&banked->ways_max, ways);
    if (!(before & phase_lanes))
        GPUBPF_ADD_TO(banked, ways, most);
    return before & phase_lanes;
}

/* Adds the distance from lane to lane of a STRIDED request. */
static inline void gpubpf_add_step(struct gpu_traffic *cell, struct gpu_request *request, s64 step) {
    if (request->keeps) {
        request->step = step;
    } else {
        GPUBPF_COUNT(cell->steps, step);
        GPUBPF_COUNT(cell->squares, step * step);
    }
    gpubpf_raise(&cell->longest_max, gpubpf_length(step));
    gpubpf_raise(&cell->shortest_max, ~gpubpf_length(step));
}

/* Adds a copy of many bytes by each lane. */
static inline int gpubpf_add_bulk(struct gpu_traffic *cell, struct gpu_shared_traffic *banked, u64 address, u64 width) {
    gpu_mask active = gpu_active();
    u32 lanes = gpu_popcount(active);
    u64 last = address + width - 1;
    GPUBPF_COUNT(cell->sectors, (last >> GPUBPF_SECTOR_BITS) - (address >> GPUBPF_SECTOR_BITS) + 1);
    GPUBPF_COUNT(cell->least, (width + GPUBPF_SECTOR - 1) >> GPUBPF_SECTOR_BITS);
    GPUBPF_COUNT(cell->bytes, width);
    GPUBPF_COUNT(cell->accesses, 1);
    if (banked) {
        GPUBPF_COUNT(banked->phases, 1);
        GPUBPF_COUNT(banked->ways, 1);
    }
    if (!(active & GPUBPF_BELOW(GPUBPF_LANE)))
        GPUBPF_COUNT(cell->requests[GPU_PART + (lanes == 1 ? GPU_SINGLE : GPU_GATHER)], 1);
    return 0;
}

/* Whether all lanes that are here access the same number of bytes: copies of 16 bytes, which are usual, or no copies. */
static inline int gpubpf_is_plain(struct gpu_request *request) {
    return !request->varies || (GPUBPF_BRANCHES && !gpu_any(request->width != GPUBPF_COPY));
}

/* Whether all lanes make the request, each where the lane before ends: the usual request. Not for local memory. */
static inline int gpu_is_usual(struct gpu_request *request) {
    u64 start = request->address - gpu_lane() * (u32)request->width;
    if (GPUBPF_IS_SHORT(request->width))
        return 0;                                /* then the number of sectors is not known */
    return gpu_uniform(start);
}

/* Adds such a request to the cell of its site. */
static inline int gpu_add_usual(struct gpu_traffic *cell, struct gpu_request *request) {
    if (gpu_first(GPUBPF_FULL)) {                /* with gpu_lane(), ptxas would see that all lanes add at one address */
        int shifted = request->address & (GPUBPF_SECTOR - 1);
        if (!GPUBPF_BRANCHES) {
            GPUBPF_ADD_REQUEST(shifted ? GPU_SHIFTED : GPU_UNIT);
        } else if (shifted) {
            GPUBPF_ADD_REQUEST(GPU_SHIFTED);
            asm volatile("");                    /* keeps the compiler from making one addition of the two */
        } else {
            GPUBPF_ADD_REQUEST(GPU_UNIT);
            asm volatile("");
        }
    }
    return 0;
}

/*
 * The step of lanes that are neighbours in a row of the block (x), if it is the same for all of them although rows are not at one step:
 * the distance in bytes, of at most 31 bits, + 1 << 32; otherwise 0. Rows must have 8 lanes or more, on average.
 */
static inline u64 gpubpf_step_in_rows(u64 address, u64 width, gpu_mask active) {
    u64 x, y, z;
    bpf_get_thread_idx(&x, &y, &z);
    gpu_mask left = gpu_ballot(x) & active & active << 1;
    if (GPUBPF_BRANCHES && left == (gpu_mask)(GPUBPF_FULL << 1) && active == GPUBPF_FULL)
        return 0;                                /* all lanes are in one row, and have no step together */
    u32 lane = GPUBPF_LANE, second = gpu_log2(left & -left);
    s64 away = address - gpu_shuffle(address, lane - 1), step = gpu_shuffle(away, second);
    gpu_mask same = gpu_ballot(away == step);
    u32 neighbours = gpu_popcount(left);
    int found = left && !(left & ~same) && neighbours >= 7 * (gpu_popcount(active) - neighbours) && step == (s32)step &&
                GPUBPF_IS_MULTIPLE((u32)gpubpf_length(step), width);
    return found ? (u32)step | 1ull << 32 : 0;
}

#if GPU_LANES > 32
/*
 * The number of distinct sectors if some lanes access two neighbouring ones. Of these, one has an even number and one an odd number, so
 * it counts distinct even sectors, then distinct odd ones.
 */
static inline u32 gpubpf_count_both(u64 sector, int crosses, gpu_mask before) {
    u32 found = 0;
#pragma unroll
    for (u32 odd = 0; odd < 2; odd++) {
        u64 other = (sector ^ odd) & 1;
        int has = !other || crosses;
        found += gpu_popcount(gpu_ballot(has && !(gpu_match(has ? sector + other : ~0ull) & before)));
    }
    return found;
}
#endif

/* Adds a request of all lanes at one address. */
static inline int gpubpf_add_broadcast(struct gpu_traffic *cell, struct gpu_request *request) {
    if (request->follow)
        request->row = !GPUBPF_LANE;
    if (gpu_first(GPUBPF_FULL))
        GPUBPF_ADD_REQUEST(GPU_BROADCAST);
    return 0;
}

/* Adds a request of all lanes, each `step` bytes behind the one before: a multiple of the width, in shared memory of a bank. */
static inline int gpubpf_add_strided(struct gpu_traffic *cell, struct gpu_shared_traffic *banked, struct gpu_request *request, s64 step) {
    u64 address = request->address, last = address + step * (GPUBPF_LANES - 1);
    u32 one = gpubpf_length(step), sectors = GPUBPF_LANES, bit = one & -one, ways = bit < 128 ? bit : 128;
    if (!gpu_first(GPUBPF_FULL))
        return 0;
    if (one < GPUBPF_SECTOR)                     /* then no sector between the first and the last one is left out */
        sectors = gpubpf_length((s64)(last >> GPUBPF_SECTOR_BITS) - (s64)(address >> GPUBPF_SECTOR_BITS)) + 1;
    GPUBPF_ADD_REQUEST(GPU_STRIDED);
    GPUBPF_ADD(sectors, sectors);
    gpubpf_add_step(cell, request, step);
    if (request->updates)
        GPUBPF_ADD_KNOWN(addresses, GPUBPF_LANES);
    if (banked) {                                /* the lowest bit of the step says how many lanes meet in a bank */
        gpubpf_raise(&banked->ways_max, ways >> (GPUBPF_WORD_BITS(request->width) & 7));
        GPUBPF_ADD_TO(banked, ways, ways * GPUBPF_LANES >> 7);
    }
    return 0;
}

/*
 * Adds a request of all lanes in two rows of a block of 16 threads (x), which are usual in tiles of 16 x 16: each row at one address, or
 * each lane where the one before ends. `away`: bytes from lane 0; `step`: from lane 0 to lane 1. Returns 0, and adds nothing, if the
 * request is another one, or rows overlap. For GPUs where GPUBPF_BRANCHES.
 */
static inline int gpubpf_add_two_rows(struct gpu_traffic *cell, struct gpu_shared_traffic *banked, struct gpu_request *request,
                                      s64 away, s64 step) {
    u64 x, y, z;
    bpf_get_thread_idx(&x, &y, &z);
    if (gpu_ballot(x) != 0xfffefffe)
        return 0;
    u32 width = request->width, column = gpu_lane() & 15, shift = GPUBPF_WORD_BITS(width);
    s64 gap = (s32)gpu_shuffle(away, 16);        /* from a row to the next */
    if (gpu_any(away != step * (s32)column + (gpu_lane() & 16 ? gap : 0)))
        return 0;
    u32 apart = gpubpf_length(gap), size = step ? 16 * width : 1;
    if ((step && step != width) || (gap && apart < size + GPUBPF_SECTOR - 1) || (banked && (width < 4 || apart & (width - 1))))
        return 0;
    int begins = !column || (step && (request->address & (GPUBPF_SECTOR - 1)) < width);    /* a sector */
    u32 sectors = gpu_popcount(gpu_ballot(begins) & (gap ? GPUBPF_FULL : 0xffff));
    if (request->follow) {
        request->row = step ? 16 : !column;
        request->ahead = column;
    }
    if (!gpu_first(GPUBPF_FULL))
        return 1;
    if (step) {
        GPUBPF_ADD_REQUEST(GPU_PART + GPU_UNIT);
        asm volatile("");                        /* keeps the compiler from making one addition of the two */
    } else {
        GPUBPF_ADD_REQUEST(GPU_PART + GPU_BROADCAST);
        asm volatile("");
    }
    GPUBPF_ADD(sectors, sectors);
    GPUBPF_ADD(accesses, GPUBPF_LANES);
    GPUBPF_ADD_KNOWN(least, width);
    gpubpf_raise(&cell->contention_max, !step ? 16 : gap ? 1 : 2);
    if (request->updates)
        GPUBPF_ADD_KNOWN(addresses, !step ? 2 : gap ? GPUBPF_LANES : 16);
    if (banked) {                                /* up to 4 bytes, a phase has both rows, and they meet unless they are half of the banks apart */
        u32 phases = 1 << ((shift & 7) - 2), banks = apart >> 2 & 31;
        u32 ways = shift == 2 && gap && (step ? banks != 16 : !banks) ? 2 : 1;
        gpubpf_raise(&banked->ways_max, ways);
        GPUBPF_ADD_TO(banked, phases, phases);
        GPUBPF_ADD_TO(banked, ways, ways * phases);
    }
    return 1;
}

/*
 * Adds a request of some lanes side by side, each of which begins where the one before ends, outside local memory. The width is 4 to 32
 * bytes. For GPUs where GPUBPF_BRANCHES.
 */
static inline int gpubpf_add_part(struct gpu_traffic *cell, struct gpu_shared_traffic *banked, struct gpu_request *request,
                                  gpu_mask active, u32 lowest) {
    u64 address = request->address;
    u32 lanes = gpu_popcount(active), asked = lanes * (u32)request->width, bits = 7 - GPUBPF_WORD_BITS(request->width);
    if (request->follow) {
        request->row = lanes;
        request->ahead = GPUBPF_LANE - lowest;
    }
    if (!gpu_first(active))
        return 0;
    GPUBPF_ADD_REQUEST(GPU_PART + GPU_UNIT);
    GPUBPF_ADD(sectors, ((address + asked - 1) >> GPUBPF_SECTOR_BITS) - (address >> GPUBPF_SECTOR_BITS) + 1);
    GPUBPF_ADD(accesses, lanes);
    GPUBPF_ADD_KNOWN(least, (asked + GPUBPF_SECTOR - 1) >> GPUBPF_SECTOR_BITS);
    if (request->updates)
        GPUBPF_ADD_KNOWN(addresses, lanes);
    if (banked) {                                /* the words of a phase are in different banks */
        u32 phases = ((lowest + lanes - 1) >> (bits & 7)) - (lowest >> (bits & 7)) + 1;
        gpubpf_raise(&banked->ways_max, 1);
        GPUBPF_ADD_TO(banked, phases, phases);
        GPUBPF_ADD_TO(banked, ways, phases);
        GPUBPF_ADD_KNOWN(bytes, asked);
    }
    return 0;
}

/* Adds a request of any kind. `no_broadcast`: a constant, whether it is known to be no broadcast. */
static inline int gpubpf_add(struct gpu_traffic *cell, struct gpu_shared_traffic *banked, struct gpu_request *request, int no_broadcast) {
    u64 address = request->address, width = request->width;
    u32 lane = GPUBPF_LANE;
    int varies = request->varies, local = request->local, bulk = (varies || banked) && width > 16, asks = !no_broadcast && !varies;

    if (GPUBPF_BRANCHES && asks && !bulk && gpu_uniform(address))    /* first, which saves ptxas two registers */
        return gpubpf_add_broadcast(cell, request);
    gpu_mask active = request->active ?: gpu_active(), before = active & GPUBPF_BELOW(lane);
    u32 lanes = gpu_popcount(active);
    if (bulk)
        return gpubpf_add_bulk(cell, banked, address, width);
    if (varies || (GPUBPF_BRANCHES && banked)) { /* lanes with more bytes have left */
        active &= gpu_active();
        before &= active;
        lanes = gpu_popcount(active);
    }
    if (varies && request->follow && gpu_is_usual(request) && gpu_uniform(width)) {
        request->row = GPUBPF_LANES;
        request->ahead = lane;
    }
    gpu_mask crossing = local ? 0 : GPUBPF_CROSSING(address, width) & active;
    int all = active == GPUBPF_FULL;
    if (!GPUBPF_BRANCHES && asks && !crossing && gpu_uniform(address))    /* earlier, the verifier has more cases */
        return gpubpf_add_broadcast(cell, request);
    if (lanes == 1 && !varies && !crossing) {
        if (!GPUBPF_BRANCHES || gpu_first(active)) {         /* ptxas would add up over the lanes */
            GPUBPF_ADD_REQUEST(GPU_SINGLE);
            if (GPUBPF_BRANCHES && banked)       /* st.bulk may store 8 or 16 bytes */
                GPUBPF_ADD_KNOWN(bytes, width);
        }
        return 0;
    }
    s64 step;                                    /* bytes from any lane to the next */
    int linear;
    if (GPUBPF_BRANCHES && all) {                /* usual, and needs no division */
        s64 away = address - gpu_shuffle(address, 0);
        step = (s32)gpu_shuffle(away, 1);
        linear = !gpu_any(away != step * (s32)lane);
        if (!linear && !varies && !local && gpubpf_add_two_rows(cell, banked, request, away, step))
            return 0;
    } else {
        gpu_mask others = active & (active - 1);
        u32 lowest = gpu_log2(active & -active);
        u32 apart = gpu_log2(others & -others) - lowest;     /* lanes from the lowest lane to the next */
        s64 away = address - gpu_shuffle(address, lowest);
        int plain = GPUBPF_BRANCHES && !varies && !local && width >= 4 && width <= GPUBPF_SECTOR;
        if (plain && !(active & (active + (active & -active))) && !gpu_any(away != (u32)width * (lane - lowest)))
            return gpubpf_add_part(cell, banked, request, active, lowest);
        s64 next = gpu_shuffle(away, lowest + apart);
        step = gpubpf_quotient(next, apart);
        linear = next == (s32)next && !gpu_any(away != step * (s32)(lane - lowest));
    }
    linear = linear && GPUBPF_IS_MULTIPLE((u32)gpubpf_length(step), width);
    if (all && linear && !varies && !local && !crossing && !GPUBPF_IS_SHORT(width) && (!banked || !(step & 3)))
        return gpubpf_add_strided(cell, banked, request, step);
    u32 shift = GPUBPF_WORD_BITS(width), asked = lanes * width;
    gpu_mask earlier = banked ? gpubpf_add_ways(banked, request, shift, before) : 0;    /* first: later, the verifier has more cases */
    u64 in_rows = linear || varies || local || lanes == 1 ? 0 : gpubpf_step_in_rows(address, width, active);
    if (in_rows)
        step = (s32)in_rows;
    int regular = linear || in_rows, part = varies || local || !all || in_rows || crossing || GPUBPF_IS_SHORT(width);
    if (request->follow && linear && !varies && !step)
        request->row = !before;
    if (request->follow && linear && !varies && step == width && !(active & (active + (active & -active)))) {
        request->row = lanes;
        request->ahead = gpu_popcount(before);
    }
    u32 pattern = lanes == 1 ? GPU_SINGLE : !regular ? GPU_GATHER : step == width ? GPU_UNIT : step ? GPU_STRIDED : GPU_BROADCAST;
    u64 sector = local ? address >> GPUBPF_ROW_BITS(shift) << 2 | lane >> (GPUBPF_SECTOR_BITS - 2) : address >> GPUBPF_SECTOR_BITS;
    u32 sectors = gpu_popcount(gpu_ballot(!(gpu_match(sector) & before)));
#if GPU_LANES > 32
    if (crossing)
        sectors = gpubpf_count_both(sector, crossing >> lane & 1, before);
#endif

    if (varies)
        for (int bit = asked = 0; bit < 5; bit++)
            asked += gpu_popcount(gpu_ballot(width >> bit & 1)) << bit;
    u32 addresses = linear && !step ? 1 : lanes;
    if (!linear) {
        gpu_mask together = gpu_match(address);
        gpubpf_raise(&cell->contention_max, gpu_popcount(together));
        if (request->updates)
            addresses = gpu_popcount(gpu_ballot(!(together & before)));
    } else if (pattern == GPU_BROADCAST) {
        gpubpf_raise(&cell->contention_max, lanes);
    }
    if (banked && part && !earlier)
        GPUBPF_ADD_TO(banked, phases, 1);
    if (!gpu_first(active))
        return 0;                                /* the lowest lane adds for all */
    u32 place = part ? GPU_PART + pattern : pattern;
    asm("" : "+r"(place));                       /* otherwise the compiler drops the mask below, which the verifier needs */
    GPUBPF_ADD_REQUEST(place & 15);
    GPUBPF_ADD(sectors, local ? sectors * (((u32)width + 3) >> 2) : sectors);
    if (pattern == GPU_STRIDED)
        gpubpf_add_step(cell, request, step);
    if (part) {
        GPUBPF_ADD(accesses, lanes);
        GPUBPF_ADD_KNOWN(least, (asked + GPUBPF_SECTOR - 1) >> GPUBPF_SECTOR_BITS);
        if (active & (active + (active & -active)))
            GPUBPF_ADD(gaps, 1);
    }
    if (request->updates)
        GPUBPF_ADD_KNOWN(addresses, addresses);
    if (varies || (GPUBPF_BRANCHES && banked && part))
        GPUBPF_ADD_KNOWN(bytes, asked);
    return 0;
}

/*
 * Keeps what this lane would add to the cell for this request (gpu_keep), and adds nothing but maxima. `keeps` must be set. The width is at
 * most 16 bytes, the same in all lanes. `gpu_add_again` adds it.
 */
#if GPU_LANES > 32                               /* the accesses of AMD GPUs are not deferred */
static inline int gpu_keep_request(struct gpu_traffic *cell, struct gpu_request *request) { return 0; }
static inline int gpu_keep_shared_request(struct gpu_shared_traffic *cell, struct gpu_request *request) { return 0; }
#else
static inline int gpubpf_keep(struct gpu_request *request) {
    u32 low = request->place | request->sectors << 5 | request->accesses << 11 | request->phases << 17 | request->ways << 20;
    gpu_keep(low | request->gaps << 26 | (u64)(u32)request->step << 32);
    return 0;
}

static inline int gpu_keep_request(struct gpu_traffic *cell, struct gpu_request *request) {
    if (gpu_is_usual(request))
        gpu_add_usual(cell, request);
    else
        gpubpf_add(cell, 0, request, 0);
    return gpubpf_keep(request);
}

static inline int gpu_keep_shared_request(struct gpu_shared_traffic *cell, struct gpu_request *request) {
    if (gpu_is_usual(request))
        gpu_add_usual(&cell->cell, request);
    else
        gpubpf_add(&cell->cell, cell, request, 0);
    return gpubpf_keep(request);
}

#endif

/* Adds what a lane kept for one request (gpu_keep) to the cell, for `count` requests. banked: also the cell, in shared memory; else 0. */
static inline int gpu_add_again(struct gpu_traffic *cell, struct gpu_shared_traffic *banked, u64 kept, u64 width, u64 count) {
    u32 place = kept & 31, low = kept, accesses = low >> 11 & 63;
    s64 step = (s64)kept >> 32;
    if (place)
        GPUBPF_COUNT(cell->requests[(place - 1) & 15], count);
    if (!(kept >> 5))
        return 0;
    if (low >> 5 & 63)
        GPUBPF_COUNT(cell->sectors, (low >> 5 & 63) * count);
    if (accesses) {
        GPUBPF_COUNT(cell->accesses, accesses * count);
        GPUBPF_COUNT(cell->least, ((accesses * (u32)width + GPUBPF_SECTOR - 1) >> GPUBPF_SECTOR_BITS) * count);
    }
    if (low >> 26)
        GPUBPF_COUNT(cell->gaps, count);
    if (step) {
        GPUBPF_COUNT(cell->steps, step * count);
        GPUBPF_COUNT(cell->squares, step * step * count);
    }
    if (banked && low >> 17 & 7)
        GPUBPF_COUNT(banked->phases, (low >> 17 & 7) * count);
    if (banked && low >> 20 & 63)
        GPUBPF_COUNT(banked->ways, (low >> 20 & 63) * count);
    return 0;
}

/* Adds a request of a texture, surface, tensor or tensor memory by these lanes; 0: all lanes that run this. Returns 0. */
static inline int gpu_add_unaddressed_request(struct gpu_unaddressed_traffic *cell, gpu_mask lanes) {
    gpu_mask active = lanes ?: gpu_active();
    if (gpu_first(active)) {
        GPUBPF_COUNT(cell->requests, 1);
        GPUBPF_COUNT(cell->accesses, gpu_popcount(active));
    }
    return 0;
}

/* Adds a request in global, constant or local memory to the cell of its site. Returns 0. */
static inline int gpu_add_request(struct gpu_traffic *cell, struct gpu_request *request) {
    int asks = GPUBPF_BRANCHES && !request->varies && !request->local && !request->updates;
    if (!request->local && gpubpf_is_plain(request) && gpu_is_usual(request))
        return gpu_add_usual(cell, request);
    if (asks && gpu_uniform(request->address))   /* nearly as usual, and worth no call */
        return gpubpf_add_broadcast(cell, request);
    gpu_seldom();
    return gpubpf_add(cell, 0, request, asks);
}

/* The same, for shared memory. */
static inline int gpu_add_shared_request(struct gpu_shared_traffic *cell, struct gpu_request *request) {
    int plain = request->width <= 16, asks = GPUBPF_BRANCHES && plain && !request->updates;
    if (plain && gpu_is_usual(request))
        return gpu_add_usual(&cell->cell, request);
    if (asks && gpu_uniform(request->address))
        return gpubpf_add_broadcast(&cell->cell, request);
    gpu_seldom();
    return gpubpf_add(&cell->cell, cell, request, asks);
}

#endif
