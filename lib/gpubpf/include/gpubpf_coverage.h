/*
 * gpubpf_coverage.h: marks the bytes of memory that were touched, in maps of its own. memory/coverage.py reads them, and docs/memory.md
 * describes the method. Call gpu_add_covered in place of gpu_add_request of gpubpf_traffic.h, and gpu_cover_bulk for copies of any size.
 */
#ifndef GPUBPF_COVERAGE_H
#define GPUBPF_COVERAGE_H

#include <gpubpf_traffic.h>

#define GPUBPF_PAGE_BITS 16
#define GPUBPF_PAGES (1 << GPUBPF_PAGE_BITS)     /* in the table, each with 4096 granules */
#define GPUBPF_PROBES 32                         /* places where a page can be */
#define GPUBPF_COPY_PAGES 5                      /* pages that are marked for one bulk copy */

/*
 * Each byte counts if `exact` is set. PTX aligns accesses, so granules of GPUBPF_WORD bytes are exact for accesses of such widths. The
 * others have pages of their own, whose granules are bytes (narrow pages). AMD GPUs access any address, and have narrow pages only.
 */
#define GPUBPF_WORD_SHIFT 2
#define GPUBPF_WORD (1 << GPUBPF_WORD_SHIFT)
#define GPUBPF_NARROW (1 << 8)                   /* in a tag */
struct gpu_grain {
    u64 shift, word;                /* log2 of the bytes of a granule; bytes of a word of 64 granules, minus 1 */
    u64 kernels;                    /* ~0 to keep kernels apart; otherwise 0 */
    u64 exact;                      /* ~0 if each byte counts; otherwise 0 */
};
struct gpu_page {
    u64 tag;                        /* page << 32 | (epoch + 1) << 9 | GPUBPF_NARROW | page >> 32; 0: there is no page at this place */
    u64 owner;                      /* the kernel's number + 1, in programs that keep kernels apart */
    u64 bits[128];                  /* a bit for each granule: 64 words for reads, then 64 for writes */
};
GPU_ARRAY(touched, struct gpu_page, GPUBPF_PAGES);
GPU_ARRAY(missed, u64, 1024);                    /* a bit for each 2 MB, modulo 128 GB: there was no place for some page of it */
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

/* Whether there is no place for some page of the area of an address. */
static inline int gpubpf_is_missed(u64 address) {
    u64 *area = gpubpf_area_of(address);
    return !area || *area >> (address >> 21 & 63) & 1;
}

/* Epochs have 22 bits, and addresses 52: no GPU has more. */
static inline u32 gpubpf_epoch(void) { return ((u32)gpu_epoch() + 1) << 9; }

static inline u32 gpubpf_narrow(struct gpu_grain *grain, struct gpu_request *request) {
    u64 some = GPU_LANES > 32 ? 1 : request->width & (GPUBPF_WORD - 1);
    return some && (request->bytes || grain->exact) ? GPUBPF_NARROW : 0;
}
static inline u32 gpubpf_shift(struct gpu_grain *grain, struct gpu_request *request) {
    return gpubpf_narrow(grain, request) ? 0 : request->bytes ? GPUBPF_WORD_SHIFT : grain->shift & 31;
}
/* The bytes of a word of 64 granules, minus 1. */
static inline u32 gpubpf_word(struct gpu_grain *grain, struct gpu_request *request) {
    return gpubpf_narrow(grain, request) ? 63 : request->bytes ? 64 * GPUBPF_WORD - 1 : grain->word;
}

/* The tag of a page in the table. */
static inline u64 gpubpf_tag_of(u64 page, u32 narrow) { return page << 32 | (gpubpf_epoch() | narrow | (u32)(page >> 32)); }

/*
 * The first choice of a place for a page: neighbours have neighbouring places, so that the pages of an array never compete with each
 * other. Behind it, the pages of other epochs, kernels and arrays compete by chance. `owner`: number of the kernel + 1, or 0.
 */
static inline u32 gpubpf_home_of(u64 page, u32 narrow, u32 owner) {
    u32 apart = (u32)gpu_epoch() * 0x9e37u + owner * 0x85ebu;    /* the same in the whole launch: computed once */
    return ((u32)page + apart + (narrow ? 0x4f1bu : 0)) & (GPUBPF_PAGES - 1);
}
/* The second choice; the places behind it are the next ones. */
static inline u32 gpubpf_next_of(u64 page, u32 home) {
    u32 mixed = ((u32)page ^ home << 16) * 0x85ebca6bu;
    asm("" : "+r"(mixed));
    return mixed >> (32 - GPUBPF_PAGE_BITS);
}
static inline u32 gpubpf_owner(struct gpu_grain *grain, int by_kernel) {
    return by_kernel ? (gpu_kernel() + 1) & grain->kernels : 0;
}
/*
 * The granule of an address within its word of 64, the place of the word in bytes from the first one of its page, and the page. Each takes
 * one shift, by a constant if `bytes` is set.
 */
static inline u32 gpubpf_bit_of(struct gpu_grain *grain, struct gpu_request *request) {
    return (u32)(request->address >> gpubpf_shift(grain, request)) & 63;
}
static inline u32 gpubpf_word_of(struct gpu_grain *grain, struct gpu_request *request) {
    return (u32)(request->address >> (gpubpf_shift(grain, request) + 3)) & 0x1f8;
}
static inline u64 gpubpf_page_of(struct gpu_grain *grain, struct gpu_request *request) {
    return request->address >> (gpubpf_shift(grain, request) + 12);
}

/*
 * The place of the page of an address; GPUBPF_PAGES if there is no room. Entries never change, so a stale copy is either
 * right or 0.
 */
static inline u32 gpubpf_place_of(struct gpu_grain *grain, u64 page, u32 narrow, u64 address, int by_kernel, u32 probes) {
    u64 wanted = gpubpf_tag_of(page, narrow);
    u32 kernel = gpubpf_owner(grain, by_kernel), place = gpubpf_home_of(page, narrow, kernel);
#pragma nounroll
    for (u32 turn = 0; turn < probes; turn++) {
        struct gpu_page *there = touched.lookup(&place);
        if (!there)
            break;
        u64 *cell = &there->tag, *owner = &there->owner, whose = by_kernel ? *owner : kernel;
        if (by_kernel && whose != kernel && !whose)
            whose = __sync_val_compare_and_swap(owner, 0, kernel) ?: kernel;
        u64 seen = whose == kernel ? *cell : ~0ull;
        if (!seen)                               /* first the owner, then the page: so no lane waits for another lane's second step */
            seen = __sync_val_compare_and_swap(cell, 0, wanted) ?: wanted;
        if (seen == wanted)
            return place;
        if (!turn && gpubpf_is_missed(address))  /* do not search if there was no place for another page of this area */
            break;
        place = turn ? (place + 1) & (GPUBPF_PAGES - 1) : gpubpf_next_of(page, place);
    }
    return GPUBPF_PAGES;
}

/* A word for reads, or for writes. */
static inline u64 *gpubpf_read_at(struct gpu_page *page, u32 word) { return (u64 *)((char *)page->bits + word); }
static inline u64 *gpubpf_written_at(struct gpu_page *page, u32 word) { return (u64 *)((char *)(page->bits + 64) + word); }

static inline void gpubpf_set_bits(u64 *word, u64 mask) {
    if (mask & ~*word)                           /* most granules were touched before */
        __sync_fetch_and_or(word, mask);
}

/* The granules that a lane and those after it in its row touch, in the word of 64 granules where the lane's access begins. */
static inline u64 gpubpf_granules(struct gpu_grain *fine, struct gpu_request *request, u32 bytes) {
    u32 shift = gpubpf_shift(fine, request);
    u32 within = request->bytes ? 0 : request->address & ((1u << shift) - 1);    /* bytes of the first granule before the access */
    u32 more = (within + bytes - 1) >> shift;
    u32 left = more < 63 ? 63 - more : 0;        /* granules of a word */
    return ~0ull >> left << gpubpf_bit_of(fine, request);
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
    if (!request->row || (request->ahead && gpubpf_bit_of(fine, request)) || !width)
        return;
    u32 narrow = gpubpf_narrow(fine, request), owner = gpubpf_owner(fine, by_kernel);
    u64 mask = gpubpf_granules(fine, request, width * (request->row - request->ahead));
    u64 number = gpubpf_page_of(fine, request), wanted = gpubpf_tag_of(number, narrow);
    u32 place = gpubpf_home_of(number, narrow, owner), word = gpubpf_word_of(fine, request);
    struct gpu_page *page = touched.lookup(&place);
    if (!page)
        return;
    u64 missing = effect & GPU_READS ? ~*gpubpf_read_at(page, word) : 0;
    missing = mask & (missing | (effect & GPU_WRITES ? ~*gpubpf_written_at(page, word) : 0));
    if (page->tag == wanted && (!by_kernel || page->owner == owner) && !missing)
        return;                                  /* the usual case: at the first choice of a place, and marked before */
    place = gpubpf_place_of(fine, number, narrow, address, by_kernel, GPUBPF_PROBES);
    page = touched.lookup(&place);
    if (place >= GPUBPF_PAGES || !page)
        return gpubpf_miss(address);
    if (effect & GPU_READS)
        gpubpf_set_bits(gpubpf_read_at(page, word), mask);
    if (effect & GPU_WRITES)
        gpubpf_set_bits(gpubpf_written_at(page, word), mask);
}

#if GPU_LANES > 32
/* If this lane's access ends in the next word of 64 granules, marks what it and the lanes after it touch from there on. `lanes`: how many
 * these are. */
static inline void gpubpf_cover_rest(struct gpu_request *request, struct gpu_grain *fine, u32 lanes, u64 effect, int by_kernel) {
    u64 word = gpubpf_word(fine, request);
    u32 width = request->width, room = word + 1 - (request->address & word);
    if (!lanes || width <= room)
        return;
    struct gpu_request rest = {request->address + room, width * lanes - room};
    rest.bytes = request->bytes;
    rest.row = 1;
    gpu_cover(&rest, effect, by_kernel);
}
#else
#define gpubpf_cover_rest(_request, _fine, _lanes, _effect, _by_kernel)  /* accesses are aligned, so none ends in another word */
#endif

/*
 * Whether the first choice of a place has the page where a lane's access begins (`away` is 0), and which granules of the word of 64 there
 * were not touched before, as the effect needs it. Independent loads find this out.
 */
struct gpubpf_spot { u64 away, missing; };

static inline struct gpubpf_spot gpubpf_spot_of(struct gpu_grain *fine, struct gpu_request *request, u64 effect, int by_kernel) {
    u64 page = gpubpf_page_of(fine, request);
    u32 narrow = gpubpf_narrow(fine, request), owner = gpubpf_owner(fine, by_kernel);
    u32 place = gpubpf_home_of(page, narrow, owner), word = gpubpf_word_of(fine, request);
    struct gpu_page *there = touched.lookup(&place);
    struct gpubpf_spot spot = {1, 0};
    if (!there)                                  /* never, and the verifier wants it */
        return spot;
    u64 *written = gpubpf_written_at(there, word), *own = effect & GPU_READS ? gpubpf_read_at(there, word) : written;
    u64 tag = there->tag;                        /* compared in halves, which takes fewer instructions */
    spot.away = ((u32)tag ^ (gpubpf_epoch() | narrow | (u32)(page >> 32))) | ((u32)(tag >> 32) ^ (u32)page);
    spot.missing = ~*own;
    if (by_kernel)
        spot.away |= there->owner ^ owner;
    if (effect == (GPU_READS | GPU_WRITES))
        spot.missing |= ~*written;
    return spot;
}

/*
 * Whether some lane has granules to mark, of lanes that have some or do not find the page. Where the table had no room, nothing is to be
 * marked: the report calls all of the area unknown. `missing`: granules of a lane that were not touched before, if the page is there.
 */
static inline int gpubpf_is_open(struct gpu_request *request, struct gpubpf_spot spot, u64 missing) {
    int lost = gpubpf_is_missed(request->address);
    return gpu_any(spot.away ? !lost : !!missing);
}

/*
 * The same if each byte counts, with only the lane's own granules in `missing`. These lie in one half of a word, because accesses are
 * aligned: so this takes fewer instructions.
 */
static inline struct gpubpf_spot gpubpf_own_spot(struct gpu_grain *fine, struct gpu_request *request, u64 effect, int by_kernel) {
    u64 page = gpubpf_page_of(fine, request), tag;
    u32 narrow = gpubpf_narrow(fine, request), owner = gpubpf_owner(fine, by_kernel), shift = gpubpf_shift(fine, request);
    u32 place = gpubpf_home_of(page, narrow, owner), half = (u32)(request->address >> (shift + 3)) & 0x1fc;
    u32 own = (1u << (((u32)request->width + (1u << shift) - 1) >> shift)) - 1;
    struct gpu_page *there = touched.lookup(&place);
    struct gpubpf_spot spot = {1, 0};
    if (!there)                                  /* never, and the verifier wants it */
        return spot;
    u32 *read = (u32 *)((char *)there->bits + half), *written = (u32 *)((char *)(there->bits + 64) + half);
    u32 seen = effect & GPU_READS ? *read : *written;
    if (effect == (GPU_READS | GPU_WRITES))
        seen &= *written;
    tag = there->tag;
    spot.away = ((u32)tag ^ (gpubpf_epoch() | narrow | (u32)(page >> 32))) | ((u32)(tag >> 32) ^ (u32)page);
    spot.missing = ~seen >> ((u32)(request->address >> shift) & 31) & own;
    if (by_kernel)
        spot.away |= there->owner ^ owner;
    return spot;
}

/* Whether a lane has granules to mark: each lane finds out whether it touched its own bytes before. For GPUs where GPUBPF_BRANCHES. */
static inline int gpubpf_has_more(struct gpu_grain *fine, struct gpu_request *request, u64 effect, int by_kernel) {
    struct gpubpf_spot spot;
    if (request->bytes) {
        spot = gpubpf_own_spot(fine, request, effect, by_kernel);
    } else {
        spot = gpubpf_spot_of(fine, request, effect, by_kernel);
        spot.missing &= gpubpf_granules(fine, request, request->width);
    }
    return gpu_any(spot.away | spot.missing) && gpubpf_is_open(request, spot, spot.missing);
}

/* Marks what a usual request touches, where the first choice of a place has the page. One lane marks each word of 64 granules. */
static inline void gpubpf_mark_usual(struct gpu_request *request, struct gpu_grain *fine, u64 missing, u64 effect, int by_kernel) {
    if (gpubpf_bit_of(fine, request) && gpu_lane())
        return;                                  /* another lane marks it */
    u64 mask = gpubpf_granules(fine, request, (u32)request->width * (GPUBPF_LANES - gpu_lane()));
    u32 narrow = gpubpf_narrow(fine, request), word = gpubpf_word_of(fine, request);
    u32 place = gpubpf_home_of(gpubpf_page_of(fine, request), narrow, gpubpf_owner(fine, by_kernel));
    struct gpu_page *there = touched.lookup(&place);
    if (!there || !(mask & missing))
        return;
    if (effect & GPU_READS)
        __sync_fetch_and_or(gpubpf_read_at(there, word), mask);
    if (effect & GPU_WRITES)
        __sync_fetch_and_or(gpubpf_written_at(there, word), mask);
}

/* Adds a usual request to the cell of its site, and marks what it touches. */
static inline int gpubpf_add_usual_covered(struct gpu_traffic *cell, struct gpu_request *request, struct gpu_grain *fine,
                                           struct gpubpf_spot spot, u64 effect, int by_kernel) {
    gpu_add_usual(cell, request);                /* here before the rest, so that the compiler does not merge the two */
    gpubpf_cover_rest(request, fine, GPUBPF_LANES - gpu_lane(), effect, by_kernel);
    if (!(spot.away | spot.missing))
        return 0;
    request->row = GPUBPF_LANES;
    request->ahead = gpu_lane();
    if (spot.away)
        gpu_cover(request, effect, by_kernel);
    else
        gpubpf_mark_usual(request, fine, spot.missing, effect, by_kernel);
    return 0;
}

/*
 * Like gpu_add_request, for a request in global memory, and also marks what the request touches. For copies of more
 * than 16 bytes by a lane, call gpu_cover_bulk. Nearly always, the page is at its first choice of a place, and all bits of the word are
 * set already. Usual requests and broadcasts find this out first. Each of them asks for itself, which saves a branch.
 */
static inline int gpu_add_covered(struct gpu_traffic *cell, struct gpu_request *request, u64 effect, int by_kernel) {
    int key = 0, asks = GPUBPF_BRANCHES && !request->varies && !request->updates, broadcast = 0;
    struct gpu_grain *fine = grain.lookup(&key);
    if (!fine)
        return 0;
    if (gpubpf_is_plain(request) && gpu_is_usual(request)) {
        if (request->varies)
            request->width = GPUBPF_COPY;
        struct gpubpf_spot spot = gpubpf_spot_of(fine, request, effect, by_kernel);
        if (GPUBPF_BRANCHES && !gpu_any(spot.away | spot.missing))
            return gpu_add_usual(cell, request);
        if (GPUBPF_BRANCHES && !gpu_any(spot.away)) {
            gpu_add_usual(cell, request);
            gpubpf_mark_usual(request, fine, spot.missing, effect, by_kernel);
            return 0;
        }
        if (GPUBPF_BRANCHES && !gpubpf_is_open(request, spot, spot.missing))
            return gpu_add_usual(cell, request);
        gpu_seldom();
        return gpubpf_add_usual_covered(cell, request, fine, spot, effect, by_kernel);
    }
    if (asks && (broadcast = gpu_uniform(request->address))) {
        struct gpubpf_spot spot = gpubpf_spot_of(fine, request, effect, by_kernel);
        if (!gpu_any(spot.away | spot.missing) || !gpubpf_is_open(request, spot, spot.missing))
            return gpubpf_add_broadcast(cell, request);
    }
    gpu_seldom();
    int open = !asks || broadcast || gpubpf_has_more(fine, request, effect, by_kernel);
    request->follow = open;
    request->row = 1;
    if (broadcast)
        gpubpf_add_broadcast(cell, request);
    else
        gpubpf_add(cell, 0, request, asks);
    if (open && (!request->varies || request->width <= 16)) {
        gpu_cover(request, effect, by_kernel);
        gpubpf_cover_rest(request, fine, request->row - request->ahead, effect, by_kernel);
    }
    return 0;
}

/*
 * Marks what a request in global memory touches, and adds nothing: of an access that another one stands for. Each lane finds out whether
 * it touched its own bytes before.
 */
static inline int gpu_mark(struct gpu_request *request, u64 effect, int by_kernel) {
    int key = 0;
    struct gpu_grain *fine = grain.lookup(&key);
    if (!fine)
        return 0;
    if (GPUBPF_BRANCHES && !gpubpf_has_more(fine, request, effect, by_kernel))
        return 0;
    gpu_seldom();
    request->row = 1;
    if (gpu_is_usual(request)) {
        request->row = GPUBPF_LANES;
        request->ahead = gpu_lane();
    }
    gpu_cover(request, effect, by_kernel);
    gpubpf_cover_rest(request, fine, request->row - request->ahead, effect, by_kernel);
    return 0;
}

/* Marks a copy of many bytes: page by page, word by word. Its bytes are a multiple of 16, and so is its address. */
static inline void gpu_cover_bulk(u64 address, u64 bytes, u64 effect) {
    int key = 0;
    struct gpu_grain *fine = grain.lookup(&key);
    if (!fine)
        return;
    u32 side = (~effect & GPU_READS) << 6;
    u64 next = address >> fine->shift, end = (address + bytes - 1) >> fine->shift;
#pragma nounroll
    for (u32 turn = 0; turn < GPUBPF_COPY_PAGES && next <= end; turn++) {
        u64 page = next & ~4095ull, last = page + 4095 < end ? page + 4095 : end;
        u32 place = gpubpf_place_of(fine, page >> 12, 0, page << fine->shift, 1, 8);
        u32 word = next >> 6 & 63, until = last >> 6 & 63;
        u64 mask = ~0ull << (next & 63);
        if (place >= GPUBPF_PAGES)
            gpubpf_miss(page << fine->shift);
        struct gpu_page *there = touched.lookup(&place);
#pragma nounroll
        for (u32 turn = 0; turn < 64 && there && place < GPUBPF_PAGES; turn++) {
            u64 *own = &there->bits[side + (word & 63)], *written = &there->bits[64 + (word & 63)];
            if (word == until)
                mask &= ~0ull >> (63 - (last & 63));
            __sync_fetch_and_or(own, mask);
            if (effect == (GPU_READS | GPU_WRITES))
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
