/*
 * gpubpf_coverage.h: which bytes of memory were touched, in maps that are part of it; coverage.py reads them, and docs/memory.md
 * tells how it goes. Use gpu_cover for what a request of gpubpf_traffic.h touches, gpu_cover_bulk for a copy of any size.
 */
#ifndef GPUBPF_COVERAGE_H
#define GPUBPF_COVERAGE_H

#include <gpubpf_traffic.h>

#define GPUBPF_PAGES 16384                       /* of the table, each of 4096 granules */
#define GPUBPF_PROBES 32                         /* places at which a page may be */
#define GPUBPF_COPY_PAGES 5                      /* that one bulk copy is followed into */

struct gpu_page { u64 words[128]; };             /* a bit for each granule: 64 words of what was read, 64 of what was written */
struct gpu_grain {
    u64 shift, word, page;          /* bytes of a granule, as a shift; of a word of 64, less 1; of a page, as a shift */
    u64 kernels;                    /* ~0 where kernels are kept apart; else 0 */
};
GPU_ARRAY(pages, u64, GPUBPF_PAGES);             /* what is where: page << 32 | 1 << 31 | epoch << 9 | page >> 32; 0: nothing */
GPU_ARRAY(owners, u32, GPUBPF_PAGES);            /* of programs that keep kernels apart: the kernel's number + 1 */
GPU_ARRAY(touched, struct gpu_page, GPUBPF_PAGES);
GPU_ARRAY(missed, u64, 1024);                    /* a bit for each 2 MB, modulo 128 GB: something of it found no room */
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

/* The place of an address's page, GPUBPF_PAGES where there is no room. What is there stays: a stale copy of it is right, or 0. */
static inline u32 gpubpf_place_of(struct gpu_grain *grain, u64 address, int by_kernel, u32 probes) {
    u64 page = address >> grain->page, epoch = (gpu_epoch() << 9 & 0x7ffffe00) | 0x80000000;
    u64 wanted = page << 32 | epoch | (page >> 32 & 511);
    u32 kernel = by_kernel ? (gpu_kernel() + 1) & grain->kernels : 0;
    u32 place = ((u32)page * 0x9e3779b1u + (u32)epoch * 0x85ebca77u + kernel * 0xc2b2ae3du) >> 18;
#pragma nounroll
    for (u32 turn = 0; turn < probes; turn++) {
        u64 *cell = pages.lookup(&place);
        u32 *owner = by_kernel ? owners.lookup(&place) : 0;
        if (!cell || (by_kernel && !owner))
            break;
        u64 seen = *cell;
        if (seen == wanted && (!by_kernel || *owner == kernel))
            return place;
        if (!seen) {
            seen = __sync_val_compare_and_swap(cell, 0, wanted);
            if (!seen && by_kernel)
                *owner = kernel;
            if (!seen || (seen == wanted && (!by_kernel || *owner == kernel)))
                return place;
        }
        if (!turn) {                             /* where something is missed already, do not search in vain */
            u64 *area = gpubpf_area_of(address);
            if (!area || *area >> (address >> 21 & 63) & 1)
                break;
        }
        place = (place + 1) & (GPUBPF_PAGES - 1);
    }
    return GPUBPF_PAGES;
}

static inline void gpubpf_set_bits(u64 *word, u64 mask) {
    if ((*word & mask) != mask)                  /* most were touched before */
        __sync_fetch_and_or(word, mask);
}

/*
 * Marks what a lane touches. Of lanes in a row, which `run` of the request tells, one marks each word of 64 granules for all; where
 * that is 1, each its own. `effect`: the context's. `by_kernel`, a constant: keep kernels apart where `grain` says so.
 */
static inline void gpu_cover(struct gpu_request *request, u64 effect, int by_kernel) {
    int key = 0;
    u64 address = request->address;
    u32 width = request->width, run = request->run;
    struct gpu_grain *fine = grain.lookup(&key);
    if (!fine || !run || !width || (run & GPU_BEGUN && address & fine->word))
        return;
    u32 start = address & fine->word, first = start >> fine->shift;
    u32 last = (start + width * (run & 63) - 1) >> fine->shift, word = address >> (fine->page - 6);
    u64 mask = (2ull << (last < 63 ? last : 63)) - (1ull << first);
    u32 place = gpubpf_place_of(fine, address, by_kernel, GPUBPF_PROBES);
    struct gpu_page *own = place < GPUBPF_PAGES ? touched.lookup(&place) : 0;
    if (!own)
        return gpubpf_miss(address);
    asm("" : "+r"(word));                        /* or the compiler drops the masks, which the verifier needs */
    if (effect & GPU_READS)
        gpubpf_set_bits(&own->words[word & 63], mask);
    if (effect & GPU_WRITES)
        gpubpf_set_bits(&own->words[(word & 63) + 64], mask);
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
        struct gpu_page *own = place < GPUBPF_PAGES ? touched.lookup(&place) : 0;
        u32 word = next >> 6 & 63, until = last >> 6 & 63;
        u64 mask = ~0ull << (next & 63);
        if (!own)
            gpubpf_miss(page << fine->shift);
#pragma nounroll
        for (u32 turn = 0; turn < 64 && own; turn++) {
            if (word == until)
                mask &= ~0ull >> (63 - (last & 63));
            __sync_fetch_and_or(&own->words[(word + side) & 127], mask);
            if (effect == (GPU_READS | GPU_WRITES))
                __sync_fetch_and_or(&own->words[(word + 64) & 127], mask);
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
