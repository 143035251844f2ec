/*
 * gpubpf_updates.h: counts how often each address of global memory is updated by atomic instructions, for each site, in maps of its own.
 * memory/updates.py reads them. Call gpu_match(address) while all lanes of the request run together, and gpu_count_updates last.
 */
#ifndef GPUBPF_UPDATES_H
#define GPUBPF_UPDATES_H

#include <gpubpf_traffic.h>

#define GPUBPF_UPDATED 16384                     /* addresses that are counted */

GPU_ARRAY(update_tags, u64, GPUBPF_UPDATED);     /* a number made from address, kernel and site; 0: the place is free */
GPU_ARRAY(update_sites, u64, GPUBPF_UPDATED);    /* the kernel's number << 32 | the site */
GPU_ARRAY(updates, u64, GPUBPF_UPDATED);         /* lanes */

/*
 * Counts a request's updates of each address. `together`: gpu_match of the address. Once there is no room for an address, its site is no
 * longer counted, because its numbers would be wrong. An entry is written only once, so a stale copy is either right or 0.
 */
static inline void gpu_count_updates(struct gpu_traffic *cell, u64 site, u64 address, gpu_mask together) {
    if (cell->uncounted_max || together & gpu_lanes_below())
        return;
    u64 place = gpu_kernel() << 32 | (u32)site;
    /* Addresses of atomics are even. Two of these sums are equal with a probability of 2^-64. */
    u64 tag = (address + place * 0x9e3779b97f4a7c15ull) | 1;
    u32 at = ((u32)tag ^ (u32)(tag >> 32)) * 0x9e3779b1u >> 18;
#pragma nounroll
    for (u32 turn = 0; turn < 16; turn++) {
        u64 *there = update_tags.lookup(&at), *count = updates.lookup(&at), *whose = update_sites.lookup(&at);
        if (!there || !count || !whose)
            return;
        u64 seen = *there;
        if (!seen) {
            seen = __sync_val_compare_and_swap(there, 0, tag);
            if (!seen) {
                *whose = place;
                seen = tag;
            }
        }
        if (seen == tag) {
            GPUBPF_COUNT(*count, gpu_popcount(together));
            return;
        }
        at = (at + 1) & (GPUBPF_UPDATED - 1);
    }
    gpu_max(&cell->uncounted_max, 1);
}

#endif
