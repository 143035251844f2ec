/* Included by translated code (C): lanes, memory accesses, and PTX arithmetic. Section numbers are those of the PTX
 * ISA. Values are bit patterns in unsigned integers; f32_() and u32_() reinterpret them. */
#ifndef CUDASIM_DEVICE_RUNTIME_H
#define CUDASIM_DEVICE_RUNTIME_H

#include "device_abi.h"
#include "device_collectives.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef unsigned __int128 u128;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef __int128 s128;
typedef float f32;
typedef double f64;
typedef struct cs_warp W;

#define INL static inline __attribute__((always_inline, unused))
#define FN static __attribute__((unused))
/* A function that translated code calls in many places, and that is compiled for speed however large that code is. */
#define OPTIMIZED static __attribute__((noinline, unused, optimize("O2")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* ---- lanes and control flow. `w`, `mask`, `next`, `pc`, `entry_`, `line_` and the others of
 * PLACES in render.py are variables of the generated function. */
/* The number in the module of the function's block N, and the line in the PTX text of the function's line N. */
#define AT(N) (entry_ + (N))
#define LINE(N) (line_ + (N))
#define LANES                                 \
    for (u32 m_ = mask; m_; m_ &= m_ - 1) {   \
        const u32 l = (u32)__builtin_ctz(m_); \
        (void)l;
#define END }
#define JUMP(T)                              \
    do {                                     \
        if (LIKELY(AT(T) < next)) goto B##T; \
        pc = AT(T);                          \
        goto park;                           \
    } while (0)
/* To the first block of another function, T in the module. */
#define LEAVE(T)                            \
    do {                                    \
        pc = (T);                           \
        if (LIKELY((T) < next)) goto leave; \
        goto park;                          \
    } while (0)
#define BACK(T, COST)                              \
    do {                                           \
        if (UNLIKELY((w->budget -= (COST)) < 0)) { \
            pc = AT(T);                            \
            goto yield;                            \
        }                                          \
        JUMP(T);                                   \
    } while (0)
/* The lanes H wait at the block HI. The other lanes go to a lower block first. */
#define SPLIT(H, HI)                                                            \
    do {                                                                        \
        const u32 h_ = (H);                                                     \
        for (u32 m_ = h_; m_; m_ &= m_ - 1) w->pcs[__builtin_ctz(m_)] = AT(HI); \
        mask &= ~h_;                                                            \
        if (AT(HI) < next) next = AT(HI);                                       \
    } while (0)

#define PROLOGUE(BLOCKS)                                                  \
    u32 mask = w->mask, pc = w->pc, next = w->next;                       \
    const struct cs_services *const api = w->api;                         \
    LOCALS;                                                               \
    (void)api;                                                            \
    goto dispatch;                                                        \
    park:                                                                 \
    for (u32 m_ = mask; m_; m_ &= m_ - 1) w->pcs[__builtin_ctz(m_)] = pc; \
    pick:                                                                 \
    mask = api->pick(w);                                                  \
    pc = w->pc;                                                           \
    next = w->next;                                                       \
    if (!mask) return CS_WAIT;                                            \
    if (pc < entry_ || pc >= AT(BLOCKS)) return CS_SWITCH;                \
    goto dispatch;                                                        \
    leave:                                                                \
    w->mask = mask;                                                       \
    w->pc = pc;                                                           \
    w->next = next;                                                       \
    return CS_SWITCH;                                                     \
    yield:                                                                \
    for (u32 m_ = mask; m_; m_ &= m_ - 1) w->pcs[__builtin_ctz(m_)] = pc; \
    return CS_YIELD;                                                      \
    dispatch:                                                             \
    (void)0

/* The virtual clock: N ns have passed for the lanes of the mask. */
INL void cs_tick(W *w, u32 mask, u64 n) {
    typedef u64 v4 __attribute__((vector_size(32)));
    if (mask == ~0u)
        for (u32 k = 0; k < 8; k++) ((v4 *)w->time)[k] += n;
    else
        for (u32 m = mask; m; m &= m - 1) w->time[__builtin_ctz(m)] += n;
}
#define TICK(N)              \
    do {                     \
        w->budget -= (N);    \
        cs_tick(w, mask, N); \
    } while (0)
/* Threads communicate in the order of their times: the lanes wait at block T until it is their turn. */
#define TURN(T)                                   \
    do {                                          \
        if (w->ordered) {                         \
            if (w->turn_lanes != mask) {          \
                cs_wait_for_turn(w, mask, AT(T)); \
                goto pick;                        \
            }                                     \
            w->turn_lanes = 0;                    \
        }                                         \
    } while (0)
INL void cs_wait_for_turn(W *w, u32 mask, u32 pc) {
    for (u32 m = mask; m; m &= m - 1) w->pcs[__builtin_ctz(m)] = pc;
    w->runnable &= ~mask;
    w->waiting_turn |= mask;
}

/* The lanes of the mask that called this function from the same place as lane l. */
INL u32 cs_same_caller(const u32 *ret, u32 mask, u32 l) {
    u32 found = 0;
    for (u32 k = 0; k < 32; k++) found |= (u32)(ret[k] == ret[l]) << k;
    return found & mask;
}
/* Whether all lanes of the mask called this function from one place. */
INL u32 cs_one_caller(const u32 *ret, u32 mask) {
    const u32 first = ret[__builtin_ctz(mask)];
    u32 different = 0;
    CS_EACH(mask, { different |= ret[l] ^ first; });
    return !different;
}
/* The lanes of the mask wait for the other members of a collective, unless all are here. given: 1 if b is given, plus 2 for c. */
FN __attribute__((noinline, cold)) int cs_meet(W *w, u32 mask, u32 op, u32 next_pc, u32 line, u32 given,
                                               u32 b, u32 c, u32 members) {
    CS_EACH(mask, {
        if (given & 1) w->cb[l] = b;
        if (given & 2) w->cc[l] = c;
        w->cm[l] = members;
    });
    w->line = line;
    w->elapsed = 0;
    return w->api->collective(w, mask, op, next_pc);
}
INL void cs_exit(W *w, u32 lanes) {
    w->exited |= lanes;
    w->runnable &= ~lanes;
}

/* ---- reinterpretation */
INL f32 f32_(u32 x) {
    f32 r;
    __builtin_memcpy(&r, &x, 4);
    return r;
}
INL u32 u32_(f32 x) {
    u32 r;
    __builtin_memcpy(&r, &x, 4);
    return r;
}
INL f64 f64_(u64 x) {
    f64 r;
    __builtin_memcpy(&r, &x, 8);
    return r;
}
INL u64 u64_(f64 x) {
    u64 r;
    __builtin_memcpy(&r, &x, 8);
    return r;
}

/* ---- memory. Access codes: 'r', 'w', 'a'. Each macro returns a host pointer, or does not return after a fault. */
/* Constants of a function are in locals, because the compiler must assume that any store changes *w. Accesses that may end
 * in a signal record where they are beforehand (CS_AT); other accesses pass it as an argument. */
#define LOCALS                                                            \
    u8 *const shared_ = w->shared, *const local_ = w->local;              \
    const u64 base_ = w->base, limit_ = w->limit;                         \
    const u32 shared_size_ = w->shared_size, local_size_ = w->local_size; \
    const u32 local_stride_ = w->local_stride;                            \
    const u64 shared_window_ = w->shared_window;                          \
    (void)shared_;                                                        \
    (void)local_;                                                         \
    (void)base_;                                                          \
    (void)limit_;                                                         \
    (void)shared_size_;                                                   \
    (void)local_size_;                                                    \
    (void)local_stride_;                                                  \
    (void)shared_window_
FN __attribute__((noinline, cold)) void cs_access_fault(W *w, u64 window, u64 size, u64 a, u32 n, u32 access,
                                                        u64 at) {
    w->at = at;
    w->api->fault(w, a >= size || a + n > size ? CS_FAULT_ILLEGAL_ADDRESS : CS_FAULT_MISALIGNED, window + a,
                  n, access);
}
/* What the other blocks of a cluster access, and faults: see cs_warp.shared_size. */
FN __attribute__((noinline, cold)) void *cs_shared_of_cluster(W *w, u64 a, u32 n, u32 access, u64 at) {
    const u64 own = a - w->shared_at;
    if (own < w->total_shared && own + n <= w->total_shared && !(a & (n - 1))) return w->shared + own;
    w->at = at;
    return w->api->cluster_shared(w, a, n, access);
}
/* The same address in the shared memory of the block with this rank. If no cluster can have it, accesses there are faults. */
INL u32 cs_map_to_rank(u64 a, u32 rank) {
    return ((u32)a & CS_SHARED_OFFSET) | (rank < CS_MOST_BLOCKS ? rank : CS_MOST_BLOCKS) << CS_RANK_SHIFT;
}
/* The same, but in the block of its pair (ranks 2n and 2n + 1) whose rank is even or odd as that of the address's block is. */
INL u32 cs_map_to_pair(u64 a, u32 rank) {
    return cs_map_to_rank(a, (rank & ~1u) | ((u32)a >> CS_RANK_SHIFT & 1));
}
#define at_global(w, a, n, access)                                                                         \
    ({                                                                                                     \
        const u64 a_ = (a);                                                                                \
        LIKELY(a_ - base_ < limit_ && !(a_ & ((n) - 1))) ? (void *)a_ : w->api->resolve(w, a_, n, access); \
    })
#define at_generic(w, a, n, access)                                                                  \
    ({                                                                                               \
        const u64 a_ = (a), s_ = a_ - shared_window_;                                                \
        LIKELY(a_ - base_ < limit_ && !(a_ & ((n) - 1)))        ? (void *)a_                         \
        : s_ < (shared_size_ & ~((n) - 1)) && !(s_ & ((n) - 1)) ? (void *)(shared_ + s_)             \
                                                                : w->api->resolve(w, a_, n, access); \
    })
#define at_shared(w, a, n, access, at)                                           \
    ({                                                                           \
        u64 a_ = (a);                                                            \
        if (UNLIKELY(a_ >= (shared_size_ & ~((n) - 1)) || (a_ & ((n) - 1))))     \
            a_ = (u64)cs_shared_of_cluster(w, a_, n, access, at) - (u64)shared_; \
        (void *)(shared_ + a_);                                                  \
    })
#define at_local(w, l, a, n, access, at)                                         \
    ({                                                                           \
        const u64 a_ = (a);                                                      \
        if (UNLIKELY(a_ >= (local_size_ & ~((n) - 1)) || (a_ & ((n) - 1))))      \
            cs_access_fault(w, w->local_window, local_size_, a_, n, access, at); \
        (void *)(local_ + (u64)(l) * local_stride_ + a_);                        \
    })
/* alloca: sizes are rounded up to 16 bytes, the largest alignment. */
FN u64 cs_alloca(W *w, u32 l, u64 size) {
    const u64 room = (u64)w->sp[l] - w->lsp[l] - w->stack_floor;
    if (size > room || (size + 15 & ~15ull) > room) w->api->fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0);
    return w->sp[l] -= (u32)(size + 15 & ~15ull);
}
FN void cs_stackrestore(W *w, u32 l, u64 sp) {
    if (sp > w->local_size || sp < w->sp[l] || sp & 15) w->api->fault(w, CS_FAULT_LAUNCH_FAILED, 0, 0, 0);
    w->sp[l] = (u32)sp;
}
#define LD(T, p) (*(const T *)(p))
#define ST(T, p, v) (*(T *)(p) = (T)(v))
#define LDV(T, p) __atomic_load_n((const T *)(p), __ATOMIC_ACQUIRE)
#define STV(T, p, v) __atomic_store_n((T *)(p), (T)(v), __ATOMIC_RELEASE)
#define STSC(T, p, v) __atomic_store_n((T *)(p), (T)(v), __ATOMIC_SEQ_CST)

/* ---- atomics: real ones, because blocks run in several host threads */
#define ATOM_CAS_LOOP(T, p, EXPR)                                                                   \
    ({                                                                                              \
        T *q_ = (T *)(p);                                                                           \
        T o_ = __atomic_load_n(q_, __ATOMIC_RELAXED), n_;                                           \
        do {                                                                                        \
            const T old = o_;                                                                       \
            n_ = (T)(EXPR);                                                                         \
        } while (!__atomic_compare_exchange_n(q_, &o_, n_, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)); \
        o_;                                                                                         \
    })
#define ATOM_ADD(T, p, v) __atomic_fetch_add((T *)(p), (T)(v), __ATOMIC_SEQ_CST)
#define ATOM_AND(T, p, v) __atomic_fetch_and((T *)(p), (T)(v), __ATOMIC_SEQ_CST)
#define ATOM_OR(T, p, v) __atomic_fetch_or((T *)(p), (T)(v), __ATOMIC_SEQ_CST)
#define ATOM_XOR(T, p, v) __atomic_fetch_xor((T *)(p), (T)(v), __ATOMIC_SEQ_CST)
#define ATOM_EXCH(T, p, v) __atomic_exchange_n((T *)(p), (T)(v), __ATOMIC_SEQ_CST)
#define ATOM_CAS(T, p, c, v)                                                                       \
    ({                                                                                             \
        T e_ = (T)(c);                                                                             \
        __atomic_compare_exchange_n((T *)(p), &e_, (T)(v), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        e_;                                                                                        \
    })
#ifdef __x86_64__
INL u128 cs_cas128(void *p, u128 c, u128 v) {
    u64 lo = (u64)c, hi = (u64)(c >> 64);
    __asm__ __volatile__("lock cmpxchg16b %0"
                         : "+m"(*(u128 *)p), "+a"(lo), "+d"(hi)
                         : "b"((u64)v), "c"((u64)(v >> 64))
                         : "cc", "memory");
    return (u128)hi << 64 | lo;
}
FN u128 cs_exch128(void *p, u128 v) {
    u128 old = *(u128 *)p, seen;
    while ((seen = cs_cas128(p, old, v)) != old) old = seen;
    return old;
}
#else
#define cs_cas128(p, c, v) ATOM_CAS(u128, p, c, v)
#define cs_exch128(p, v) ATOM_EXCH(u128, p, v)
#endif

/* ---- mbarrier objects (9.7.13.15). Bits 0–19: pending arrivals; 20–39: expected arrivals; 40–61: tx-count (pending bytes);
 * 63: phase. They need no atomics, because one host thread runs a whole cluster. */
#define MBAR_TX (0x3fffffull << 40)
INL void mbar_init(u64 *p, u32 count) { *p = count | (u64)count << 20; }
INL u64 mbar_advance(u64 x) { /* enters the next phase if the current one is complete */
    return x & (0xfffff | MBAR_TX) ? x : (x | (x >> 20 & 0xfffff)) ^ 1ull << 63;
}
INL u64 mbar_arrive(u64 *p, u32 count, u32 drop) {
    const u64 old = *p, x = old - ((u64)drop << 20);
    *p = mbar_advance((x & ~0xfffffull) | ((x & 0xfffff) - count & 0xfffff));
    return old;
}
INL void mbar_expect(u64 *p, u64 bytes) { *p = (*p & ~MBAR_TX) | (*p + (bytes << 40) & MBAR_TX); }
INL void mbar_complete(u64 *p, u64 bytes) {
    mbar_expect(p, 0 - bytes);
    *p = mbar_advance(*p);
}

/* ---- bulk copy: copies the bytes of 16 that the mask selects */
INL void cs_copy_masked(u8 *to, const u8 *from, u32 mask) {
    for (u32 k = 0; k < 16; k++)
        if (mask >> k & 1) to[k] = from[k];
}

/* ---- ldmatrix: element c of a matrix row, of 4, 6, 8 or 16 bits; the first element is in the lowest bits */
INL u32 cs_element(const u8 *row, u32 c, u32 bits) {
    const u32 at = c * bits, x = at < 120 ? row[at >> 3] | (u32)row[(at >> 3) + 1] << 8 : row[at >> 3];
    return x >> (at & 7) & ((1u << bits) - 1);
}

/* ---- integers */
#define MIN(T, a, b)                      \
    ({                                    \
        const T a_ = (T)(a), b_ = (T)(b); \
        a_ < b_ ? a_ : b_;                \
    })
#define MAX(T, a, b)                      \
    ({                                    \
        const T a_ = (T)(a), b_ = (T)(b); \
        a_ > b_ ? a_ : b_;                \
    })
INL u32 shl32(u32 a, u32 n) { return n > 31 ? 0 : a << n; }
INL u64 shl64(u64 a, u32 n) { return n > 63 ? 0 : a << n; }
INL u16 shl16(u16 a, u32 n) { return n > 15 ? 0 : (u16)(a << n); }
INL u32 shr_u32(u32 a, u32 n) { return n > 31 ? 0 : a >> n; }
INL u64 shr_u64(u64 a, u32 n) { return n > 63 ? 0 : a >> n; }
INL u16 shr_u16(u16 a, u32 n) { return n > 15 ? 0 : (u16)(a >> n); }
INL u32 shr_s32(u32 a, u32 n) { return (u32)((s32)a >> (n > 31 ? 31 : n)); }
INL u64 shr_s64(u64 a, u32 n) { return (u64)((s64)a >> (n > 63 ? 63 : n)); }
INL u16 shr_s16(u16 a, u32 n) { return (u16)((s16)a >> (n > 15 ? 15 : n)); }
INL u32 add_sat_s32(u32 a, u32 b) {
    s32 r;
    return __builtin_add_overflow((s32)a, (s32)b, &r) ? ((s32)a < 0 ? 0x80000000u : 0x7fffffffu) : (u32)r;
}
INL u32 sub_sat_s32(u32 a, u32 b) {
    s32 r;
    return __builtin_sub_overflow((s32)a, (s32)b, &r) ? ((s32)a < 0 ? 0x80000000u : 0x7fffffffu) : (u32)r;
}
INL s32 clamp_s32(s64 v) {
    return v > 2147483647ll ? 2147483647 : v < -2147483648ll ? (s32)-2147483648ll : (s32)v;
}
INL u32 divu32(u32 a, u32 b) { return b ? a / b : 0xffffffffu; }
INL u64 divu64(u64 a, u64 b) { return b ? a / b : ~0ull; }
INL u16 divu16(u16 a, u16 b) { return b ? (u16)(a / b) : 0xffff; }
INL u32 divs32(u32 a, u32 b) { return !b ? 0xffffffffu : b == ~0u ? 0u - a : (u32)((s32)a / (s32)b); }
INL u64 divs64(u64 a, u64 b) { return !b ? ~0ull : b == ~0ull ? 0ull - a : (u64)((s64)a / (s64)b); }
INL u16 divs16(u16 a, u16 b) { return !b ? 0xffff : (u16)((s32)(s16)a / (s16)b); }
INL u32 remu32(u32 a, u32 b) { return b ? a % b : a; }
INL u64 remu64(u64 a, u64 b) { return b ? a % b : a; }
INL u16 remu16(u16 a, u16 b) { return b ? (u16)(a % b) : a; }
INL u32 rems32(u32 a, u32 b) { return !b ? a : b == ~0u ? 0 : (u32)((s32)a % (s32)b); }
INL u64 rems64(u64 a, u64 b) { return !b ? a : b == ~0ull ? 0 : (u64)((s64)a % (s64)b); }
INL u16 rems16(u16 a, u16 b) { return !b ? a : (u16)((s32)(s16)a % (s16)b); }
INL u64 mulhi_u64(u64 a, u64 b) { return (u64)(((u128)a * b) >> 64); }
INL u64 mulhi_s64(u64 a, u64 b) { return (u64)(((s128)(s64)a * (s64)b) >> 64); }
INL u32 bfe_u32(u32 a, u32 p, u32 n) {
    p &= 255;
    n &= 255;
    if (!n || p > 31) return 0;
    a >>= p;
    return n > 31 ? a : a & ((1u << n) - 1);
}
INL u64 bfe_u64(u64 a, u32 p, u32 n) {
    p &= 255;
    n &= 255;
    if (!n || p > 63) return 0;
    a >>= p;
    return n > 63 ? a : a & ((1ull << n) - 1);
}
INL u32 bfe_s32(u32 a, u32 p, u32 n) { /* 9.7.1.19: bits beyond the msb are copies of the sign */
    p &= 255;
    n &= 255;
    if (!n) return 0;
    const u32 top = p + n - 1 > 31 ? 31 : p + n - 1;
    const u32 sign = (a >> top) & 1;
    u32 r = p > 31 ? 0 : a >> p;
    const u32 have = p > 31 ? 0 : top - p + 1;
    if (have < 32) r = (r & ((1u << have) - 1)) | (sign ? ~0u << have : 0);
    return r;
}
INL u64 bfe_s64(u64 a, u32 p, u32 n) {
    p &= 255;
    n &= 255;
    if (!n) return 0;
    const u32 top = p + n - 1 > 63 ? 63 : p + n - 1;
    const u64 sign = (a >> top) & 1;
    u64 r = p > 63 ? 0 : a >> p;
    const u32 have = p > 63 ? 0 : top - p + 1;
    if (have < 64) r = (r & ((1ull << have) - 1)) | (sign ? ~0ull << have : 0);
    return r;
}
INL u32 bfi32(u32 a, u32 b, u32 p, u32 n) {
    p &= 255;
    n &= 255;
    if (!n || p > 31) return b;
    const u32 k = (n > 31 ? ~0u : (1u << n) - 1) << p;
    return (b & ~k) | ((a << p) & k);
}
INL u64 bfi64(u64 a, u64 b, u32 p, u32 n) {
    p &= 255;
    n &= 255;
    if (!n || p > 63) return b;
    const u64 k = (n > 63 ? ~0ull : (1ull << n) - 1) << p;
    return (b & ~k) | ((a << p) & k);
}
INL u32 bmsk(u32 a, u32 b, u32 wrap) {
    if (wrap) {
        a &= 31;
        b &= 31;
    }
    if (a > 31) return 0;
    return (b > 31 ? ~0u : (1u << b) - 1) << a;
}
INL u32 brev32(u32 a) {
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(a);
}
INL u64 brev64(u64 a) { return (u64)brev32((u32)a) << 32 | brev32((u32)(a >> 32)); }
INL u32 clz32(u32 a) { return a ? (u32)__builtin_clz(a) : 32; }
INL u32 clz64(u64 a) { return a ? (u32)__builtin_clzll(a) : 64; }
INL u32 bfind_u32(u32 a, u32 amount) {
    return !a ? ~0u : amount ? (u32)__builtin_clz(a) : 31u - (u32)__builtin_clz(a);
}
INL u32 bfind_u64(u64 a, u32 amount) {
    return !a ? ~0u : amount ? (u32)__builtin_clzll(a) : 63u - (u32)__builtin_clzll(a);
}
INL u32 bfind_s32(u32 a, u32 amount) { return bfind_u32((s32)a < 0 ? ~a : a, amount); }
INL u32 bfind_s64(u64 a, u32 amount) { return bfind_u64((s64)a < 0 ? ~a : a, amount); }
FN u32 cs_fns(u32 m, u32 base, s32 n) { /* 9.7.1.20 */
    if (n == 0) return base < 32 && (m >> base & 1) ? base : ~0u;
    s32 p = (s32)base;
    const s32 step = n > 0 ? 1 : -1;
    u32 left = n > 0 ? (u32)n : 0u - (u32)n;
    for (; p >= 0 && p < 32; p += step)
        if ((m >> p & 1) && --left == 0) return (u32)p;
    return ~0u;
}
INL u32 prmt(u32 a, u32 b, u32 c) {
    const u64 v = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        const u32 s = c >> 4 * i & 15;
        u32 x = (u32)(v >> 8 * (s & 7)) & 255;
        if (s & 8) x = x & 128 ? 255 : 0;
        r |= x << 8 * i;
    }
    return r;
}
FN u32 prmt_mode(u32 a, u32 b, u32 c, int mode) { /* f4e b4e rc8 ecl ecr rc16 */
    const u64 v = (u64)b << 32 | a;
    const u32 n = c & 3;
    u32 r = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 k = 0;
        switch (mode) {
            case 0: k = n + i; break;
            case 1: k = (n - i) & 7; break;
            case 2: k = n; break;
            case 3: k = i > n ? i : n; break;
            case 4: k = i < n ? i : n; break;
            default: k = (n & 1) * 2 + (i & 1);
        }
        r |= ((u32)(v >> 8 * k) & 255) << 8 * i;
    }
    return r;
}
INL u32 lop3(u32 a, u32 b, u32 c, u32 t) {
    u32 r = 0;
    if (t & 1) r |= ~a & ~b & ~c;
    if (t & 2) r |= ~a & ~b & c;
    if (t & 4) r |= ~a & b & ~c;
    if (t & 8) r |= ~a & b & c;
    if (t & 16) r |= a & ~b & ~c;
    if (t & 32) r |= a & ~b & c;
    if (t & 64) r |= a & b & ~c;
    if (t & 128) r |= a & b & c;
    return r;
}
INL u32 shf_l(u32 a, u32 b, u32 n) { return n ? n > 31 ? a : b << n | a >> (32 - n) : b; }
INL u32 shf_r(u32 a, u32 b, u32 n) { return n ? n > 31 ? b : b << (32 - n) | a >> n : a; }
INL u32 szext_u(u32 a, u32 n) { return !n ? 0 : n > 31 ? a : a & ((1u << n) - 1); }
INL u32 szext_s(u32 a, u32 n) { return !n ? 0 : n > 31 ? a : (u32)((s32)(a << (32 - n)) >> (32 - n)); }
INL u32 mul24(s64 p, u32 hi) { return hi ? (u32)(p >> 16) : (u32)p; }
INL s32 byte_of(u32 a, int i, int sign) {
    const u32 x = a >> 8 * i & 255;
    return sign ? (s8)x : (s32)x;
}
INL u32 dp4a(u32 a, u32 b, u32 c, int sa, int sb) {
    for (int i = 0; i < 4; i++) c += (u32)(byte_of(a, i, sa) * byte_of(b, i, sb));
    return c;
}
INL u32 dp2a(u32 a, u32 b, u32 c, int sa, int sb, int hi) {
    for (int i = 0; i < 2; i++) {
        const u32 x = a >> 16 * i & 0xffff;
        c += (u32)((sa ? (s32)(s16)x : (s32)x) * byte_of(b, 2 * hi + i, sb));
    }
    return c;
}

/* ---- f32, f64 */
INL u32 ftz(u32 a) { return a & 0x7f800000u ? a : a & 0x80000000u; }
INL u32 sat32(u32 a) {
    const f32 x = f32_(a);
    return x > 0.0f ? x < 1.0f ? a : 0x3f800000u : 0;
} /* NaN: 0 */
INL u64 sat64(u64 a) {
    const f64 x = f64_(a);
    return x > 0.0 ? x < 1.0 ? a : 0x3ff0000000000000ull : 0;
}
INL int nan32(u32 a) { return (a & 0x7fffffffu) > 0x7f800000u; }
INL int nan64(u64 a) { return (a & ~(1ull << 63)) > 0x7ff0000000000000ull; }
INL u32 canon32(u32 a) { return nan32(a) ? 0x7fffffffu : a; }
INL u32 fadd32(u32 a, u32 b) { return u32_(f32_(a) + f32_(b)); }
INL u32 fsub32(u32 a, u32 b) { return u32_(f32_(a) - f32_(b)); }
INL u32 fmul32(u32 a, u32 b) { return u32_(f32_(a) * f32_(b)); }
INL u32 fdiv32(u32 a, u32 b) { return u32_(f32_(a) / f32_(b)); }
INL u32 ffma32(u32 a, u32 b, u32 c) { return u32_(__builtin_fmaf(f32_(a), f32_(b), f32_(c))); }
INL u64 fadd64(u64 a, u64 b) { return u64_(f64_(a) + f64_(b)); }
INL u64 fsub64(u64 a, u64 b) { return u64_(f64_(a) - f64_(b)); }
INL u64 fmul64(u64 a, u64 b) { return u64_(f64_(a) * f64_(b)); }
INL u64 fdiv64(u64 a, u64 b) { return u64_(f64_(a) / f64_(b)); }
INL u64 ffma64(u64 a, u64 b, u64 c) { return u64_(__builtin_fma(f64_(a), f64_(b), f64_(c))); }
INL u32 fmin32(u32 a, u32 b) {
    if (nan32(a)) return canon32(b);
    if (nan32(b)) return a;
    const f32 x = f32_(a), y = f32_(b);
    return x < y ? a : y < x ? b : a | (b & 0x80000000u);
}
INL u32 fmax32(u32 a, u32 b) {
    if (nan32(a)) return canon32(b);
    if (nan32(b)) return a;
    const f32 x = f32_(a), y = f32_(b);
    return x > y ? a : y > x ? b : a & (b | 0x7fffffffu);
}
INL u64 fmin64(u64 a, u64 b) {
    if (nan64(a)) return nan64(b) ? 0x7fffffffffffffffull : b;
    if (nan64(b)) return a;
    const f64 x = f64_(a), y = f64_(b);
    return x < y ? a : y < x ? b : a | (b & 1ull << 63);
}
INL u64 fmax64(u64 a, u64 b) {
    if (nan64(a)) return nan64(b) ? 0x7fffffffffffffffull : b;
    if (nan64(b)) return a;
    const f64 x = f64_(a), y = f64_(b);
    return x > y ? a : y > x ? b : a & (b | ~(1ull << 63));
}
INL u32 nanprop32(u32 r, u32 a, u32 b) { return nan32(a) || nan32(b) ? 0x7fffffffu : r; }
INL u32 xorsign32(u32 r, u32 a, u32 b) { return nan32(r) ? r : (r & 0x7fffffffu) | ((a ^ b) & 0x80000000u); }
INL u32 copysign32(u32 a, u32 b) { return (a & 0x80000000u) | (b & 0x7fffffffu); } /* sign of a, value of b */
INL u64 copysign64(u64 a, u64 b) { return (a & 1ull << 63) | (b & ~(1ull << 63)); }
INL u32 testp32(u32 a, int k) {
    const u32 m = a & 0x7fffffffu; /* finite infinite number notanumber normal subnormal */
    switch (k) {
        case 0: return m < 0x7f800000u;
        case 1: return m == 0x7f800000u;
        case 2: return m <= 0x7f800000u;
        case 3: return m > 0x7f800000u;
        case 4: return m < 0x7f800000u && m >= 0x00800000u;
        default: return m && m < 0x00800000u;
    }
}
INL u32 testp64(u64 a, int k) {
    const u64 m = a & ~(1ull << 63), inf = 0x7ff0000000000000ull, tiny = 1ull << 52;
    switch (k) {
        case 0: return m < inf;
        case 1: return m == inf;
        case 2: return m <= inf;
        case 3: return m > inf;
        case 4: return m < inf && m >= tiny;
        default: return m && m < tiny;
    }
}
extern float sinf(float), cosf(float), exp2f(float), log2f(float), tanhf(float), sqrtf(float),
    roundevenf(float);
extern double exp2(double), sqrt(double), roundeven(double);
INL u32 frcp32(u32 a) { return u32_(1.0f / f32_(a)); }
INL u64 frcp64(u64 a) { return u64_(1.0 / f64_(a)); }
INL u32 fsqrt32(u32 a) { return u32_(__builtin_sqrtf(f32_(a))); }
INL u64 fsqrt64(u64 a) { return u64_(__builtin_sqrt(f64_(a))); }
INL u32 frsqrt32(u32 a) { return u32_((f32)(1.0 / __builtin_sqrt((f64)f32_(a)))); }
INL u64 frsqrt64(u64 a) { return u64_((f64)(1.0L / __builtin_sqrtl(f64_(a)))); }
/* div.approx (9.7.3.8): the reciprocal of a divisor above 2^126 is 0. */
INL u32 fdiv_approx32(u32 a, u32 b) {
    const u32 size = b & 0x7fffffffu;
    if (size > 0x7e800000u && size < 0x7f800000u) return fmul32(a, b & 0x80000000u);
    return fdiv32(a, b);
}
/* rcp.approx.ftz.f64, rsqrt.approx.ftz.f64 (9.7.3.14): the upper 32 bits of the operand and of the result. */
INL u64 high64(u64 a) {
    if (nan64(a)) return 0x7fffffff00000000ull;
    return a & 0x7ff0000000000000ull ? a >> 32 << 32 : a & 1ull << 63;
}

/* ---- float → integer (9.7.9.22): saturates. NaN becomes 0, or 1 << (width - 1) if one of the types has 64 bits. */
INL f64 round_i(f64 x, int mode) {
#ifdef __SSE4_1__
    switch (mode) {
        case CS_ROUND_NEAREST: {
            f64 r;
            __asm__("roundsd $0, %1, %0" : "=x"(r) : "x"(x));
            return r;
        }
#else
    switch (mode) {
        case CS_ROUND_NEAREST: return roundeven(x);
#endif
        case CS_ROUND_DOWN: return __builtin_floor(x);
        case CS_ROUND_UP: return __builtin_ceil(x);
        default: return __builtin_trunc(x);
    }
}
INL u64 to_s(f64 x, int mode, int width, int wide) {
    if (x != x) return wide || width == 64 ? 1ull << (width - 1) : 0;
    x = round_i(x, mode);
    const f64 top = (f64)(1ull << (width - 1));
    if (x >= top) return (1ull << (width - 1)) - 1;
    if (x < -top) return 1ull << (width - 1);
    return (u64)(s64)x;
}
INL u64 to_u(f64 x, int mode, int width, int wide) {
    if (x != x) return wide || width == 64 ? 1ull << (width - 1) : 0;
    x = round_i(x, mode);
    if (x <= 0) return 0;
    if (x >= 2.0 * (f64)(1ull << (width - 1))) return width == 64 ? ~0ull : (1ull << width) - 1;
    return (u64)x;
}

/* ---- f16, bf16: arithmetic in f32, which has enough bits for correct rounding; fma in f64, of bf16 rounded to odd */
INL u32 f16_to_f32(u16 h) {
#if defined(__F16C__) && !__has_builtin(__builtin_ia32_vcvtph2ps) /* clang 22 */
    _Float16 x;
    __builtin_memcpy(&x, &h, sizeof x);
    return u32_((f32)x);
#elif defined(__F16C__)
    typedef f32 v4 __attribute__((vector_size(16)));
    typedef short v8 __attribute__((vector_size(16)));
    v8 x = {(short)h, 0, 0, 0, 0, 0, 0, 0};
    v4 r = (v4)__builtin_ia32_vcvtph2ps((__typeof__(x))x);
    return u32_(r[0]);
#else
    const u32 s = (u32)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return s | 0x7f800000u | m << 13;
    if (e) return s | (e + 112) << 23 | m << 13;
    return s | u32_((f32)m * 5.9604644775390625e-08f);
#endif
}
/* Rounds a double to a binary format with `eb` exponent bits and `mb` mantissa bits. */
FN u32 cs_narrow(f64 x, int eb, int mb, int mode) {
    const u64 b = u64_(x);
    const u32 neg = (u32)(b >> 63), sign = neg << (eb + mb);
    const u32 inf = ((1u << eb) - 1) << mb;
    const int bias = (1 << (eb - 1)) - 1;
    const int e = (int)(b >> 52 & 2047) - 1023;
    u64 m = b & ((1ull << 52) - 1);
    if (e == 1024) return m ? (1u << (eb + mb)) - 1 : sign | inf; /* NaN: 0x7fff */
    if (!(b << 1)) return sign;
    m |= 1ull << 52;
    int drop = 52 - mb;
    int exp = e + bias;
    if (e == -1023) return mode == CS_ROUND_UP && !neg ? 1 : mode == CS_ROUND_DOWN && neg ? sign | 1 : sign;
    if (exp < 1) {
        drop += 1 - exp;
        exp = 0;
    }
    u64 q, rest, half;
    if (drop > 63) {
        q = 0;
        rest = 1;
        half = 2;
    } else {
        q = m >> drop;
        rest = m & ((1ull << drop) - 1);
        half = 1ull << (drop - 1);
    }
    int up = 0;
    switch (mode) {
        case CS_ROUND_NEAREST: up = rest > half || (rest == half && (q & 1)); break;
        case CS_ROUND_UP: up = rest && !neg; break;
        case CS_ROUND_DOWN: up = rest && neg; break;
        default: break;
    }
    q += (u64)up;
    u64 r = exp ? ((u64)exp << mb) + (q - (1ull << mb)) : q;
    if (r >= inf) {
        const int big =
            mode == CS_ROUND_NEAREST || (mode == CS_ROUND_UP && !neg) || (mode == CS_ROUND_DOWN && neg);
        r = big ? inf : inf - 1;
    }
    return sign | (u32)r;
}
INL u16 f32_to_f16(u32 a) {
#ifdef __F16C__
    typedef f32 v4 __attribute__((vector_size(16)));
    typedef short v8 __attribute__((vector_size(16)));
    if (nan32(a)) return 0x7fff;
    v4 x = {f32_(a), 0, 0, 0};
    v8 r = (v8)__builtin_ia32_vcvtps2ph(x, 0);
    return (u16)r[0];
#else
    return (u16)cs_narrow(f32_(a), 5, 10, CS_ROUND_NEAREST);
#endif
}
INL u16 f64_to_f16(f64 a) { return (u16)cs_narrow(a, 5, 10, CS_ROUND_NEAREST); }
/* 8-bit floats (cvt with .satfinite): e5m2 is the upper half of an f16; e4m3 has no infinity, and one NaN. */
FN u32 f32_to_fp8(u32 a, int e5, int relu) {
    const f64 x = f32_(a), size = __builtin_fabs(x), most = e5 ? 57344 : 448;
    const u32 sign = a >> 24 & 128;
    const int bias = e5 ? 15 : 7, fraction = e5 ? 2 : 3;
    if (x != x) return 127;
    if (relu && sign) return 0;
    if (size >= most) return sign | (e5 ? 123 : 126);
    int exponent = (int)(a >> 23 & 255) - 127;
    if (exponent < 1 - bias) exponent = 1 - bias;
    const u32 q = (u32)__builtin_rint(
        __builtin_ldexp(size, fraction - exponent)); /* a carry into the exponent is correct */
    return sign | (((u32)(exponent + bias - 1) << fraction) + q);
}
FN u16 fp8_to_f16(u32 x, int e5) {
    const u32 sign = (x & 128) << 8, rest = x & 127;
    if (e5) return rest > 124 ? 0x7fff : (u16)(x << 8);
    if (rest == 127) return 0x7fff;
    if (rest >= 8) return (u16)(sign | ((rest << 7) + (8 << 10)));
    return f32_to_f16((sign << 16) | u32_((f32)rest / 512));
}
/* Floats of 6 or 4 bits, in the lower bits of a byte: e3m2, e2m3 or e2m1 (`e` and `m`). They have no infinity and no NaN. */
FN u32 f32_to_tiny(u32 a, int e, int m, int relu) {
    const f64 x = f32_(a), size = __builtin_fabs(x);
    const u32 sign = a >> 31 << (e + m), most = (1u << (e + m)) - 1;
    const int bias = (1 << (e - 1)) - 1;
    if (x != x) return most;
    if (relu && sign) return 0;
    if (size >= ((2 << m) - 1) * f64_((u64)(1023 + (1 << e) - 1 - bias - m) << 52)) return sign | most;
    int exponent = (int)(a >> 23 & 255) - 127;
    if (exponent < 1 - bias) exponent = 1 - bias;
    const f64 units = size * f64_((u64)(1023 + m - exponent) << 52);
    return sign | (((u32)(exponent + bias - 1) << m) + (u32)__builtin_rint(units));
}
FN u16 tiny_to_f16(u32 x, int e, int m) {
    const u32 exponent = x >> m & ((1u << e) - 1), rest = x & ((1u << m) - 1);
    const u32 units = exponent ? (rest | 1u << m) << (exponent - 1) : rest;
    const int least = 2 - (1 << (e - 1)) - m; /* the exponent of a unit */
    return f32_to_f16((x >> (e + m) & 1) << 31 | u32_((f32)(units * f64_((u64)(1023 + least) << 52))));
}
/* Exponents of 8 bits (ue8m0): the sign is lost, and 255 is a NaN. */
INL u32 f32_to_e8m0(u32 a, int up, int finite) {
    const u32 size = a & 0x7fffffff;
    if (nan32(a)) return 255;
    const u32 exponent = (size >> 23) + (up && size & 0x7fffff && size > 0x400000);
    return finite && exponent == 255 ? 254 : exponent;
}
INL u16 e8m0_to_bf16(u32 x) { return x == 255 ? 0x7fff : x ? (u16)(x << 7) : 0x40; }
INL u32 bf16_to_f32(u16 h) { return (u32)h << 16; }
INL u16 f32_to_bf16(u32 a) { return nan32(a) ? 0x7fff : (u16)((a + 0x7fff + (a >> 16 & 1)) >> 16); }
/* `half` is added before the lower 13 bits are cut off. */
INL u32 f32_to_tf32(u32 a, u32 half, int finite, int relu) {
    const u32 sign = a & 0x80000000u, most = sign | 0x7f7fe000u;
    if (nan32(a)) return 0x7fffffffu;
    if (relu && sign) return 0;
    const u32 r = (a & 0x7f800000u) == 0x7f800000u ? a : (a + half) & ~0x1fffu;
    return finite && (r & 0x7fffffffu) >= 0x7f800000u ? most : r;
}
INL u16 hftz(u16 a) { return a & 0x7c00 ? a : a & 0x8000; }
INL u16 bftz(u16 a) { return a & 0x7f80 ? a : a & 0x8000; }
INL int hnan(u16 a) { return (a & 0x7fff) > 0x7c00; }
INL int bnan(u16 a) { return (a & 0x7fff) > 0x7f80; }
INL u16 hsat(u16 a) { return hnan(a) || a & 0x8000 ? 0 : a > 0x3c00 ? 0x3c00 : a; }
INL u16 hrelu(u16 a) { return hnan(a) ? 0x7fff : a & 0x8000 ? 0 : a; }
INL u16 brelu(u16 a) { return bnan(a) ? 0x7fff : a & 0x8000 ? 0 : a; }
INL u16 hfinite(u16 a) { return (a & 0x7fff) == 0x7c00 ? a - 1 : a; }
INL u16 bfinite(u16 a) { return (a & 0x7fff) == 0x7f80 ? a - 1 : a; }
INL u16 bsat(u16 a) { return bnan(a) || a & 0x8000 ? 0 : a > 0x3f80 ? 0x3f80 : a; }
/* clang-format off */
#define HALF2(NAME, UP, DOWN) \
    INL u16 NAME##add(u16 a, u16 b) { return DOWN(fadd32(UP(a), UP(b))); } \
    INL u16 NAME##sub(u16 a, u16 b) { return DOWN(fsub32(UP(a), UP(b))); } \
    INL u16 NAME##mul(u16 a, u16 b) { return DOWN(fmul32(UP(a), UP(b))); } \
    INL u16 NAME##min(u16 a, u16 b) { return DOWN(fmin32(UP(a), UP(b))); } \
    INL u16 NAME##max(u16 a, u16 b) { return DOWN(fmax32(UP(a), UP(b))); } \
    INL u16 NAME##minnan(u16 a, u16 b) { return DOWN(nanprop32(fmin32(UP(a), UP(b)), UP(a), UP(b))); } \
    INL u16 NAME##maxnan(u16 a, u16 b) { return DOWN(nanprop32(fmax32(UP(a), UP(b)), UP(a), UP(b))); }
/* clang-format on */
HALF2(h, f16_to_f32, f32_to_f16)
HALF2(b, bf16_to_f32, f32_to_bf16)
INL u16 hfma(u16 a, u16 b, u16 c) {
    return f64_to_f16((f64)f32_(f16_to_f32(a)) * f32_(f16_to_f32(b)) + f32_(f16_to_f32(c)));
}
/* The product of two bf16 is exact in f64, but its sum with a third, which may be far smaller, is not. Rounding the sum to odd keeps
   it on its side of the halfway points of bf16, and of bf16 numbers. */
INL u16 bfma_round(u16 a, u16 b, u16 c, int mode) {
    const f64 p = (f64)f32_(bf16_to_f32(a)) * f32_(bf16_to_f32(b)), x = f32_(bf16_to_f32(c)), s = p + x;
    const f64 y = s - p, error = (p - (s - y)) + (x - y);
    u64 odd = u64_(s);
    if ((error > 0 || error < 0) && !(odd & 1)) odd += (error > 0) == (s > 0) ? 1 : -1;
    /* The sum is -0, unless both are +0. */
    if (mode == CS_ROUND_DOWN && s == 0 && (u64_(p) | u64_(x)) >> 63) return 0x8000;
    return (u16)cs_narrow(f64_(odd), 8, 7, mode);
}
INL u16 bfma(u16 a, u16 b, u16 c) { return bfma_round(a, b, c, CS_ROUND_NEAREST); }
INL u16 hxorsign(u16 r, u16 a, u16 b) { return hnan(r) ? r : (u16)((r & 0x7fff) | ((a ^ b) & 0x8000)); }
INL u16 bxorsign(u16 r, u16 a, u16 b) { return bnan(r) ? r : (u16)((r & 0x7fff) | ((a ^ b) & 0x8000)); }
/* PTX names no bits of the NaN with which tensor copies fill what is outside a tensor. These are a GPU's, with either sign. */
INL int is_oob(u16 a) { return (a & 0x7fff) == CS_OOB_NAN; }
INL u16 lo16(u32 a) { return (u16)a; }
INL u16 hi16(u32 a) { return (u16)(a >> 16); }
INL u32 pack16(u32 lo, u32 hi) { return (lo & 0xffff) | hi << 16; }

#include "device_matrix.h"

#endif
