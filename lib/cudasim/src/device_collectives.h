/* Shuffles, votes and matches (PTX ISA 9.7.9.6, 9.7.13) of lanes that have all arrived. Included by translated code, where the
 * operation is a constant, and by the engine. Operands are in w->ca, cb and cc; results go to w->cr and cp. */
#ifndef CUDASIM_DEVICE_COLLECTIVES_H
#define CUDASIM_DEVICE_COLLECTIVES_H

#include "device_abi.h"

#define CS_INLINE static inline __attribute__((always_inline, unused))
/* Lanes of a full warp are a loop that compilers turn into vector instructions. */
#define CS_EACH(LANES, STATEMENT)                                                                    \
    do {                                                                                             \
        if ((LANES) == ~0u) {                                                                        \
            for (uint32_t l = 0; l < 32; l++) STATEMENT                                              \
        } else {                                                                                     \
            for (uint32_t m_ = (LANES), l; m_ && (l = (uint32_t)__builtin_ctz(m_), 1); m_ &= m_ - 1) \
                STATEMENT                                                                            \
        }                                                                                            \
    } while (0)

CS_INLINE void cs_give(struct cs_warp *w, uint32_t lanes, uint32_t result) {
    CS_EACH(lanes, { w->cr[l] = result; });
}

/* The vote of the lanes in `ones`. */
CS_INLINE void cs_vote(struct cs_warp *w, uint32_t lanes, uint32_t op, uint32_t ones) {
    const uint32_t ballot = ones & lanes;
    cs_give(w, lanes,
            op == CS_OP_VOTE_ALL   ? ballot == lanes
            : op == CS_OP_VOTE_ANY ? ballot != 0
            : op == CS_OP_VOTE_UNI ? ballot == lanes || ballot == 0
                                   : ballot);
}

CS_INLINE void cs_match_all(struct cs_warp *w, uint32_t lanes) {
    const uint64_t first = w->ca[__builtin_ctz(lanes)];
    uint64_t different = 0;
    CS_EACH(lanes, { different |= w->ca[l] ^ first; });
    const uint32_t same = !different;
    CS_EACH(lanes, {
        w->cr[l] = same ? lanes : 0;
        w->cp[l] = (uint8_t)same;
    });
}

/* fixed: 1 if b is given here and not in w->cb, plus 2 if c is given here. */
CS_INLINE void cs_shuffle(struct cs_warp *w, uint32_t lanes, uint32_t op, uint32_t fixed, uint32_t given_b,
                          uint32_t given_c) {
    CS_EACH(lanes, {
        const uint32_t b = (fixed & 1 ? given_b : (uint32_t)w->cb[l]) & 31;
        const uint32_t c = fixed & 2 ? given_c : (uint32_t)w->cc[l];
        const uint32_t segment = c >> 8 & 31;
        const uint32_t most = (l & segment) | (c & ~segment & 31);
        uint32_t j;
        if (op == CS_OP_SHFL_UP) j = l - b;
        else if (op == CS_OP_SHFL_DOWN) j = l + b;
        else if (op == CS_OP_SHFL_BFLY) j = l ^ b;
        else j = (l & segment) | (b & ~segment & 31);
        const uint32_t inside = op == CS_OP_SHFL_UP ? (int32_t)j >= (int32_t)most : j <= most;
        if (!inside) j = l;
        w->cp[l] = (uint8_t)inside;
        w->cr[l] = w->ca[lanes >> j & 1 ? j : l];
    });
}

#endif
