/*
 * gpubpf_coverage.h: marks the bytes of memory that were touched, in maps of its own. memory/coverage.py reads them, and docs/memory.md
 * describes the method. Call gpu_add_covered in place of gpu_add_request of gpubpf_traffic.h, and gpu_cover_bulk for copies of any size.
 */
#ifndef GPUBPF_COVERAGE_H
#define GPUBPF_COVERAGE_H

#include <gpubpf_traffic.h>

#define GPUBPF_PAGES 16384                       /* of the table, each of 4096 granules */
#define GPUBPF_PROBES 32                         /* places that a page can be at */
#define GPUBPF_COPY_PAGES 5                      /* pages that are marked for one bulk copy */

struct gpu_grain {
    u64 shift, word;                /* log2 of the bytes of a granule; bytes of a word of 64 granules, minus 1 */
    u64 kernels;                    /* ~0 to keep kernels apart; otherwise 0 */
};
GPU_ARRAY(pages, u64, GPUBPF_PAGES);             /* the page at each place: page << 32 | 1 << 31 | epoch << 9 | page >> 32; 0: none */
GPU_ARRAY(owners, u64, GPUBPF_PAGES);            /* the kernel's number + 1, in programs that keep kernels apart */
GPU_ARRAY(touched, u64, 128 * GPUBPF_PAGES);     /* a bit for each granule: for each page 64 words for reads, 64 for writes */
GPU_ARRAY(missed, u64, 1024);                    /* a bit for each 2 MB, modulo 128 GB: some page of it found no place */
GPU_PARAM(grain, struct gpu_grain);

static inline u64 *gpubpf_area_of(u64 address) {
    int at = (u32)(address >> 27) & 1023;
    return missed.lookup(&at);
}

static inline void gpubpf_miss(u64 address) {
    u64 *area = gpubpf_area_of(address), bit = 1ull << (address >> 21 & 63);
    if (area && !(*area & bit))
        __sync_fetch_and_or(area, bit);
}

static inline u32 gpubpf_epoch(void) { return (gpu_epoch() << 9 & 0x7ffffe00) | 0x80000000; }

/* The entry of a page in the table, and its first choice of a place. `owner`: number of the kernel + 1, or 0. */
static inline u64 gpubpf_tag_of(u64 page) { return page << 32 | gpubpf_epoch() | (page >> 32 & 511); }
static inline u32 gpubpf_home_of(u64 page, u32 owner) {
    u32 mixed = (u32)page * 0x9e3779b1u + gpubpf_epoch() * 0x85ebca77u + owner * 0xc2b2ae3du;
    asm("" : "+r"(mixed));                       /* otherwise this becomes a 64-bit multiplication */
    return mixed >> 18;
}
static inline u32 gpubpf_owner(struct gpu_grain *grain, int by_kernel) {
    return by_kernel ? (gpu_kernel() + 1) & grain->kernels : 0;
}

/* The place of an address's page; GPUBPF_PAGES if there is no room. Entries never change, so a stale copy is right, or 0. */
static inline u32 gpubpf_place_of(struct gpu_grain *grain, u64 address, int by_kernel, u32 probes) {
    u64 page = address >> (grain->shift & 63) >> 12, wanted = gpubpf_tag_of(page);
    u32 kernel = gpubpf_owner(grain, by_kernel), place = gpubpf_home_of(page, kernel);
#pragma nounroll
    for (u32 turn = 0; turn < probes; turn++) {
        u64 *cell = pages.lookup(&place);
        u64 *owner = by_kernel ? owners.lookup(&place) : 0;
        if (!cell || (by_kernel && !owner))
            break;
        u64 whose = by_kernel ? *owner : kernel;
        if (by_kernel && whose != kernel && !whose)
            whose = __sync_val_compare_and_swap(owner, 0, kernel) ?: kernel;
        u64 seen = whose == kernel ? *cell : ~0ull;
        if (!seen)                               /* first the owner, then the page: no lane has to wait for another one's second step */
            seen = __sync_val_compare_and_swap(cell, 0, wanted) ?: wanted;
        if (seen == wanted)
            return place;
        if (!turn) {                             /* do not search if another page of this area already found no place */
            u64 *area = gpubpf_area_of(address);
            if (!area || *area >> (address >> 21 & 63) & 1)
                break;
        }
        place = (place + 1) & (GPUBPF_PAGES - 1);
    }
    return GPUBPF_PAGES;
}

static inline void gpubpf_set_bits(u64 *word, u64 mask) {
    if (mask & ~*word)                           /* most granules were touched before */
        __sync_fetch_and_or(word, mask);
}

/* The granules that a lane and those after it in its row touch, in the word of 64 granules where the lane's access begins. */
static inline u64 gpubpf_granules(struct gpu_grain *fine, u64 address, u32 bytes) {
    u32 start = address & fine->word, last = (start + bytes - 1) >> (fine->shift & 31);
    return (2ull << (last < 63 ? last : 63)) - (1ull << (address >> (fine->shift & 63) & 63));
}

/*
 * Marks what a lane touches. If lanes are in a row, as the request says, one of them marks each word of 64 granules for all. If `row` is
 * 1, each lane marks its own. `effect`: the context's. `by_kernel`: a constant, whether to keep kernels apart if `grain` says so.
 */
static inline void gpu_cover(struct gpu_request *request, u64 effect, int by_kernel) {
    int key = 0;
    u64 address = request->address;
    u32 width = request->width;
    struct gpu_grain *fine = grain.lookup(&key);
    if (!fine)
        return;
    u64 granule = address >> (fine->shift & 63);
    if (!request->row || (request->ahead && granule & 63) || !width)
        return;
    u64 mask = gpubpf_granules(fine, address, width * (request->row - request->ahead));
    u32 place = gpubpf_place_of(fine, address, by_kernel, GPUBPF_PROBES), at = place << 7 | (granule >> 6 & 63), other = at + 64;
    u64 *reads = touched.lookup(&at), *writes = touched.lookup(&other);
    if (place >= GPUBPF_PAGES || !reads || !writes)
        return gpubpf_miss(address);
    if (effect & GPU_READS)
        gpubpf_set_bits(reads, mask);
    if (effect & GPU_WRITES)
        gpubpf_set_bits(writes, mask);
}

/*
 * Marks what a usual request touches, if its page is at its first choice of a place. Otherwise it returns 0, and the caller must call
 * gpu_cover. Nearly always, the page is there and all bits are set already: this is found out by independent loads and one branch.
 */
static inline int gpu_cover_usual(struct gpu_request *request, u64 effect, int by_kernel) {
    int key = 0;
    struct gpu_grain *fine = grain.lookup(&key);
    if (!fine)
        return 1;
    u64 granule = request->address >> (fine->shift & 63), page = granule >> 12;
    if (granule & 63 && gpu_lane())
        return 1;                                /* another lane marks it */
    u32 owner = gpubpf_owner(fine, by_kernel), place = gpubpf_home_of(page, owner), word = granule >> 6 & 63;
    u32 at = place << 7 | (~effect & GPU_READS) << 6 | word, other = at + 64;
    u64 *cell = pages.lookup(&place), *own = touched.lookup(&at), *written = touched.lookup(&other);
    u64 *kernel = by_kernel ? owners.lookup(&place) : 0;
    if (!cell || !own || (by_kernel && !kernel))
        return 0;
    int both = effect == (GPU_READS | GPU_WRITES) && written;
    u64 away = *cell ^ gpubpf_tag_of(page), missing = ~*own;
    if (by_kernel)
        away |= *kernel ^ owner;
    if (both)
        missing |= ~*written;
    if (!(away | missing))
        return 1;
    if (away)
        return 0;
    u64 mask = gpubpf_granules(fine, request->address, (u32)request->width * (GPUBPF_LANES - gpu_lane()));
    if (mask & missing) {
        __sync_fetch_and_or(own, mask);
        if (both)
            __sync_fetch_and_or(written, mask);
    }
    return 1;
}

/*
 * Like gpu_add_request, for a request in global memory, and also marks what the request touches. Copies of more than 32 bytes by a lane
 * are left to gpu_cover_bulk.
 */
static inline int gpu_add_covered(struct gpu_traffic *cell, struct gpu_request *request, u64 effect, int by_kernel) {
    request->follow = request->row = 1;
    if (!request->varies && gpu_is_usual(request)) {
        gpu_add_usual(cell, request);
        if (gpu_cover_usual(request, effect, by_kernel))
            return 0;
    } else {
        gpubpf_add(cell, 0, request);
    }
    if (!request->varies || request->width <= 32)
        gpu_cover(request, effect, by_kernel);
    return 0;
}

/* Marks a copy of many bytes: page by page, word by word. */
static inline void gpu_cover_bulk(u64 address, u64 bytes, u64 effect) {
    int key = 0;
    struct gpu_grain *fine = grain.lookup(&key);
    if (!fine)
        return;
    u32 side = effect & GPU_READS ? 0 : 64;
    u64 next = address >> fine->shift, end = (address + bytes - 1) >> fine->shift;
#pragma nounroll
    for (u32 turn = 0; turn < GPUBPF_COPY_PAGES && next <= end; turn++) {
        u64 page = next & ~4095ull, last = page + 4095 < end ? page + 4095 : end;
        u32 place = gpubpf_place_of(fine, page << fine->shift, 1, 8);
        u32 word = next >> 6 & 63, until = last >> 6 & 63;
        u64 mask = ~0ull << (next & 63);
        if (place >= GPUBPF_PAGES)
            gpubpf_miss(page << fine->shift);
#pragma nounroll
        for (u32 turn = 0; turn < 64 && place < GPUBPF_PAGES; turn++) {
            u32 at = place << 7 | (word + side), other = at + 64;
            u64 *own = touched.lookup(&at), *written = touched.lookup(&other);
            if (word == until)
                mask &= ~0ull >> (63 - (last & 63));
            if (own)
                __sync_fetch_and_or(own, mask);
            if (written && effect == (GPU_READS | GPU_WRITES))
                __sync_fetch_and_or(written, mask);
            if (word == until)
                break;
            mask = ~0ull;
            word++;
        }
        next = page + 4096;
    }
    if (next <= end) {
        gpubpf_miss(next << fine->shift);
        gpubpf_miss(end << fine->shift);
    }
}

#endif
