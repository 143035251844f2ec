/* Included by device_runtime.h: the multiplications of tensor cores (PTX ISA 9.7.14), of a whole warp at a time.
 *
 * Registers are given as pointers to the values of 32 lanes. translate/tensor.py describes the fragments. Elements become f64, in which
 * products and nearly all sums of floating-point numbers, and all those of integers, are exact; the sum is rounded once, at the end. */
#ifndef CUDASIM_DEVICE_MATRIX_H
#define CUDASIM_DEVICE_MATRIX_H

enum { CS_FINITE = 1, CS_NEGATED = 2, CS_FROM_ZERO = 4 }; /* .satfinite; A × B is negated; C is ignored */
enum { /* CS_E3M2, CS_E2M3: in the lower bits of a byte; CS_E2M1: in bits 2 to 5 of a byte; CS_F4: e2m1, eight in a register */
       CS_F16,
       CS_BF16,
       CS_TF32,
       CS_F32,
       CS_E4M3,
       CS_E5M2,
       CS_E3M2,
       CS_E2M3,
       CS_E2M1,
       CS_S8,
       CS_U8,
       CS_S4,
       CS_U4,
       CS_F4,
       CS_S32
};
struct cs_scales {    /* of block scaling (9.7.14.3): `count` factors for each row of A and column of B */
    const u32 *a, *b; /* of 32 lanes */
    u32 byte_a, thread_a, byte_b, thread_b, count;
    int e4m3; /* flag: factors are ue4m3, else ue8m0 */
};
typedef f64 cs_columns __attribute__((vector_size(64))); /* a row of eight columns */

/* Writes the elements of a register, `step` apart, and returns their number. */
FN __attribute__((noinline)) u32 cs_unpack(f64 *to, u32 step, u32 x, u32 type) {
    switch (type) {
        case CS_F16:
            to[0] = f32_(f16_to_f32((u16)x));
            to[step] = f32_(f16_to_f32((u16)(x >> 16)));
            return 2;
        case CS_BF16:
            to[0] = f32_(x << 16);
            to[step] = f32_(x & 0xffff0000u);
            return 2;
        case CS_TF32: to[0] = f32_(x & ~0x1fffu); return 1;
        case CS_F32: to[0] = f32_(x); return 1;
        case CS_S32: to[0] = (s32)x; return 1;
        case CS_E4M3:
        case CS_E5M2:
            for (u32 i = 0; i < 4; i++)
                to[i * step] = f32_(f16_to_f32(fp8_to_f16(x >> 8 * i & 255, type == CS_E5M2)));
            return 4;
        case CS_E3M2:
        case CS_E2M3:
            for (u32 i = 0; i < 4; i++)
                to[i * step] = f32_(f16_to_f32(
                    tiny_to_f16(x >> 8 * i & 63, type == CS_E3M2 ? 3 : 2, type == CS_E3M2 ? 2 : 3)));
            return 4;
        case CS_E2M1:
            for (u32 i = 0; i < 4; i++)
                to[i * step] = f32_(f16_to_f32(tiny_to_f16(x >> (8 * i + 2) & 15, 2, 1)));
            return 4;
        case CS_F4:
            for (u32 i = 0; i < 8; i++) to[i * step] = f32_(f16_to_f32(tiny_to_f16(x >> 4 * i & 15, 2, 1)));
            return 8;
        case CS_S8:
            for (u32 i = 0; i < 4; i++) to[i * step] = (s8)(x >> 8 * i);
            return 4;
        case CS_U8:
            for (u32 i = 0; i < 4; i++) to[i * step] = (u8)(x >> 8 * i);
            return 4;
        default:
            for (u32 i = 0; i < 8; i++) {
                const u32 y = x >> 4 * i & 15;
                to[i * step] = type == CS_S4 && y > 7 ? (f64)y - 16 : y;
            }
            return 8;
    }
}
INL u32 cs_per_register(u32 type) {
    return type <= CS_BF16                                       ? 2
           : type == CS_TF32 || type == CS_F32 || type == CS_S32 ? 1
           : type < CS_S4                                        ? 4
                                                                 : 8;
}
/* Returns a sum as an element of D. */
INL u32 cs_result(f64 x, u32 type, int finite) {
    if (type == CS_F16) return f64_to_f16(x);
    if (type == CS_F32) return canon32(u32_((f32)x));
    if (finite) x = x > 0x7fffffff ? 0x7fffffff : x < -2147483648.0 ? -2147483648.0 : x;
    return (u32)(s64)x;
}
/* The place of element `i` of lane `l` in a fragment of C or D. */
INL u32 cs_row(u32 m, u32 l, u32 i) {
    return (l >> 2) + (m > 8 ? (i >> 1 & 1) * 8 : 0) + (m == 32 ? (i >> 2) * 16 : 0);
}
INL u32 cs_column(u32 m, u32 l, u32 i) {
    return (l & 3) * 2 + (i & 1) + (m == 32 ? 0 : m > 8 ? (i >> 2) * 8 : (i >> 1) * 8);
}
/* The row of A or the column of B in register `r`, and the first element of it along K. */
INL u32 cs_across(u32 k, u32 e, u32 halves, u32 l, u32 r) {
    const u32 per_tile = k / (4 * e) * halves;
    return (l >> 2) + r / per_tile * 8 * halves + r % per_tile % halves * 8;
}
INL u32 cs_along(u32 k, u32 e, u32 halves, u32 l, u32 r) {
    return (l & 3) * e + r % (k / (4 * e) * halves) / halves * 4 * e;
}

/* Finds the row of B that multiplies each element of a sparse A of 16 rows (9.7.14.6). Of 2 elements along K (tf32), 8 (of 4 bits) or 4,
 * a chunk, A has half. Four bits of metadata say which. Four lanes, from `first` of them on, have the metadata of two rows, 8 apart. A
 * register has four chunks of the lower row, then those of the higher; or eight chunks of one row, in turn, if elements are bytes or less. */
FN void cs_sparse_rows(u8 *to, const u32 *metadata, u32 first, u32 k, u32 type) {
    const u32 e = cs_per_register(type), kept = e == 1 ? 1 : e == 8 ? 4 : 2, in_register = e > 2 ? 8 : 4;
    for (u32 i = 0; i < 16 * k / 2; i++) {
        const u32 row = i / (k / 2), element = i % (k / 2) % kept, chunk = i % (k / 2) / kept;
        const u32 high = row / 8, at = chunk % in_register, nth = chunk / in_register;
        const u32 lane = row % 8 * 4 + first + (e > 2 ? nth * 2 + high : nth);
        const u32 bits = metadata[lane] >> 4 * (e > 2 ? at : high * 4 + at);
        const u32 place = e == 1   ? bits >> 1 & 1
                          : e == 8 ? (bits >> element / 2 * 2 & 3) * 2 + element % 2
                                   : bits >> element * 2 & 3;
        to[i] = (u8)(chunk * kept * 2 + place);
    }
}

INL f64 cs_scale(u32 x, int e4m3) {
    if (e4m3) return f32_(f16_to_f32(fp8_to_f16(x & 127, 0)));
    return x == 255 ? f64_(0x7ff8ull << 48) : f64_((u64)(1023 - 127 + x) << 52);
}
/* Multiplies A, of 16 rows, and B, of n columns, by their factors. Two lanes of each four have those of a row of A and of the row 8 further
 * on; one lane has those of a column of B. */
FN void cs_scale_blocks(f64 *a, f64 *b, const struct cs_scales *s, const u8 *rows, u32 n, u32 k) {
    const u32 columns = rows ? k / 2 : k;
    for (u32 i = 0; i < 16 * columns; i++) {
        const u32 row = i / columns, chunk = (rows ? rows[i] : i % columns) * s->count / k;
        a[i] *=
            cs_scale(s->a[row % 8 * 4 + s->thread_a * 2 + row / 8] >> 8 * (s->byte_a + chunk) & 255, s->e4m3);
    }
    for (u32 i = 0; i < k * n; i++)
        b[i] *=
            cs_scale(s->b[i % n * 4 + s->thread_b] >> 8 * (s->byte_b + i / n * s->count / k) & 255, s->e4m3);
}

/* `rows`: if A is sparse, what cs_sparse_rows found. A then has k / 2 columns. `scales`: 0 without block scaling. */
FN __attribute__((noinline)) void cs_mma(u32 (*d)[32], const void *const *ra, const void *const *rb,
                                         const void *const *rc, const u8 *rows, u32 m, u32 n, u32 k, u32 td,
                                         u32 ta, u32 tb, u32 tc, u32 flags, const struct cs_scales *scales) {
    f64 a[16 * 64], b[64 * 256] __attribute__((aligned(64))), sums[16 * 256] __attribute__((aligned(64)));
    const u32 ea = cs_per_register(ta), eb = cs_per_register(tb), halves = m > 8 ? 2 : 1;
    const u32 columns = rows ? k / 2 : k;
    for (u32 r = 0; r < m * columns / 32 / ea; r++)
        for (u32 l = 0; l < 32; l++)
            cs_unpack(
                a + cs_across(columns, ea, halves, l, r) * columns + cs_along(columns, ea, halves, l, r), 1,
                ((const u32 *)ra[r])[l], ta);
    for (u32 i = 0; i < m * columns && flags & CS_NEGATED; i++) a[i] = -a[i];
    for (u32 r = 0; r < n * k / 32 / eb; r++)
        for (u32 l = 0; l < 32; l++)
            cs_unpack(b + cs_along(k, eb, 1, l, r) * n + cs_across(k, eb, 1, l, r), n,
                      ((const u32 *)rb[r])[l], tb);
    if (scales) cs_scale_blocks(a, b, scales, rows, n, k);
    for (u32 i = 0; i < m * n / 32; i++)
        for (u32 l = 0; l < 32; l++) {
            f64 *const to = sums + cs_row(m, l, i) * n + cs_column(m, l, i);
            if (flags & CS_FROM_ZERO) *to = 0;
            else if (tc == CS_F16) *to = f32_(f16_to_f32((u16)(((const u32 *)rc[i / 2])[l] >> 16 * (i & 1))));
            else cs_unpack(to, 1, ((const u32 *)rc[i])[l], tc);
        }
    for (u32 row = 0; row < m; row++)
        for (u32 column = 0; column < n; column += 8) {
            cs_columns sum = *(const cs_columns *)(sums + row * n + column);
            for (u32 j = 0; j < columns; j++) {
                const u32 i = row * columns + j;
                sum += a[i] * *(const cs_columns *)(b + (rows ? rows[i] : j) * n + column);
            }
            *(cs_columns *)(sums + row * n + column) = sum;
        }
    for (u32 i = 0; i < m * n / 32; i++)
        for (u32 l = 0; l < 32; l++) {
            const u32 x = cs_result(sums[cs_row(m, l, i) * n + cs_column(m, l, i)], td, flags & CS_FINITE);
            if (td != CS_F16) d[i][l] = x;
            else if (i & 1) d[i / 2][l] |= x << 16;
            else d[i / 2][l] = x;
        }
}

/* As precise as fma (9.7.14.5.14). Sums are in the order of K. */
FN __attribute__((noinline)) void cs_mma_f64(W *w, u64 (*d)[32], const void *const *ra, const void *const *rb,
                                             const void *const *rc, u32 m, u32 n, u32 k, u32 mode) {
    f64 a[16 * 16], b[16 * 8];
    const u32 halves = m > 8 ? 2 : 1;
    for (u32 r = 0; r < m * k / 32; r++)
        for (u32 l = 0; l < 32; l++)
            a[cs_across(k, 1, halves, l, r) * k + cs_along(k, 1, halves, l, r)] = ((const f64 *)ra[r])[l];
    for (u32 r = 0; r < n * k / 32; r++)
        for (u32 l = 0; l < 32; l++) b[cs_along(k, 1, 1, l, r) * n + (l >> 2)] = ((const f64 *)rb[r])[l];
    for (u32 i = 0; i < m * n / 32; i++)
        for (u32 l = 0; l < 32; l++) {
            const u32 row = cs_row(m, l, i), column = cs_column(m, l, i);
            f64 sum = ((const f64 *)rc[i])[l];
            for (u32 j = 0; j < k; j++) {
                const f64 x = a[row * k + j], y = b[j * n + column];
                sum = mode == CS_ROUND_NEAREST ? __builtin_fma(x, y, sum)
                                               : w->api->round64(CS_F_FMA, mode, x, y, sum);
            }
            d[i][l] = u64_(sum);
        }
}

/* Single bits: multiplying is AND or XOR, adding counts ones. A register has 32 elements along K. */
FN __attribute__((noinline)) void cs_mma_b1(u32 (*d)[32], const void *const *ra, const void *const *rb,
                                            const void *const *rc, u32 m, u32 n, u32 k, int both, u32 flags) {
    const u32 halves = m > 8 ? 2 : 1;
    for (u32 i = 0; i < m * n / 32; i++)
        for (u32 l = 0; l < 32; l++) {
            const u32 row = cs_row(m, l, i), column = cs_column(m, l, i);
            u32 sum = flags & CS_FROM_ZERO ? 0 : ((const u32 *)rc[i])[l];
            for (u32 j = 0; j < k / 32; j++) {
                const u32 x = ((const u32 *)ra[j / 4 * halves + row / 8])[row % 8 * 4 + j % 4];
                const u32 y = ((const u32 *)rb[column / 8 * (k / 128) + j / 4])[column % 8 * 4 + j % 4];
                sum += (u32)__builtin_popcount(both ? x & y : x ^ y);
            }
            d[i][l] = sum;
        }
}

/* Gathers the fragment of a matrix in shared memory that a descriptor of wgmma describes (9.7.15.5.1.2): rows of A or columns of B from
 * `first` on. `turned`: neighbours along M or N are neighbours in memory. Otherwise, how 64 bytes along K (of B, if A is sparse) lie in a
 * swizzle of 32 bytes is not documented. */
FN __attribute__((noinline)) void cs_gather(W *w, u32 (*to)[32], u64 descriptor, u32 first, u32 registers,
                                            u32 k, u32 e, u32 halves, int turned) {
    static const u32 widths[] = {16, 128, 64, 32}, patterns[] = {0, 7, 3, 1};
    const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
    const u32 stride = (descriptor >> 32 & 0x3fff) << 4, swizzle = (u32)(descriptor >> 62);
    const u32 width = widths[swizzle], part = 4 / e;
    const int across_rows = swizzle == 3 && !turned && k * 4 / e > width, base_offset = descriptor >> 49 & 7;
    if (base_offset || across_rows) w->api->fault(w, CS_FAULT_ILLEGAL_INSTRUCTION, 0, 0, 0);
    for (u32 r = 0; r < registers; r++)
        for (u32 l = 0; l < 32; l++) {
            const u32 across = first + cs_across(k, e, halves, l, r), along = cs_along(k, e, halves, l, r);
            u32 x = 0;
            for (u32 i = 0; i < (turned ? e : 1); i++) {
                const u32 byte = turned ? across * 2 : along * 4 / e, j = along + i, size = turned ? part : 4;
                u32 at = start;
                if (!turned)
                    at += across / 8 * stride + across % 8 * width +
                          (swizzle ? byte : byte / 16 * leading + byte % 16);
                else if (!swizzle) at += byte / 16 * stride + byte % 16 + j % 8 * 16 + j / 8 * leading;
                else at += byte / width * leading + byte % width + j % 8 * width + j / 8 * stride;
                at ^= (at >> 7 & patterns[swizzle]) << 4;
                if (at + size > w->total_shared)
                    cs_access_fault(w, w->shared_window + w->shared_at, w->total_shared, at, size, 'r',
                                    w->at);
                x |= turned ? (u32)LD(u16, w->shared + at) << 16 * i : LD(u32, w->shared + at);
            }
            to[r][l] = x;
        }
}

/* mma.m8n8k4 of f16 (9.7.14.5.1): four multiplications, each by lanes 4 × q to 4 × q + 3 and those 16 higher. */
FN __attribute__((noinline)) void cs_mma_quads(u32 (*d)[32], const void *const *ra, const void *const *rb,
                                               const void *const *rc, int a_columns, int b_columns, u32 td,
                                               u32 tc) {
    for (u32 q = 0; q < 4; q++) {
        f64 a[8][4], b[4][8], sums[8][8];
        for (u32 h = 0; h < 8; h++) { /* lanes of the low group, then of the high group */
            const u32 l = q * 4 + (h & 3) + (h >> 2) * 16, high = h & 4;
            for (u32 i = 0; i < 4; i++) {
                const u16 x = (u16)(((const u32 *)ra[i / 2])[l] >> 16 * (i & 1));
                const u16 y = (u16)(((const u32 *)rb[i / 2])[l] >> 16 * (i & 1));
                *(a_columns ? &a[i + high][h & 3] : &a[h][i]) = f32_(f16_to_f32(x));
                *(b_columns ? &b[i][h] : &b[h & 3][i + high]) = f32_(f16_to_f32(y));
            }
        }
        for (u32 back = 0; back < 2; back++) { /* take C, then give D */
            for (u32 h = 0; h < 8; h++) {
                const u32 l = q * 4 + (h & 3) + (h >> 2) * 16, high = h & 4, type = back ? td : tc;
                for (u32 i = 0; i < 8; i++) {
                    f64 *const at = type == CS_F16
                                        ? &sums[h][i]
                                        : &sums[(l & 1) + (i & 2) + high][(i & 4) + (l & 2) + (i & 1)];
                    if (!back)
                        *at = type == CS_F16
                                  ? f32_(f16_to_f32((u16)(((const u32 *)rc[i / 2])[l] >> 16 * (i & 1))))
                                  : f32_(((const u32 *)rc[i])[l]);
                    else if (type != CS_F16) d[i][l] = cs_result(*at, type, 0);
                    else if (i & 1) d[i / 2][l] |= cs_result(*at, type, 0) << 16;
                    else d[i / 2][l] = cs_result(*at, type, 0);
                }
            }
            for (u32 row = 0; row < 8 && !back; row++)
                for (u32 column = 0; column < 8; column++)
                    for (u32 j = 0; j < 4; j++) sums[row][column] += a[row][j] * b[j][column];
        }
    }
}

#endif
