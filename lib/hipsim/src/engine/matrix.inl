// Matrix products of CDNA2: D = A × B + C for one or more blocks, always with all 64 lanes, whatever EXEC says.
//
// AMD documents where each element is (the "AMD Matrix Instruction Calculator"), and that products of halves and of bf16
// have no denormals on MI200. The order of the sums and their rounding are those that the authors of "MMA-Sim" (arXiv
// 2511.10909; github.com/microsoft/MMA-Sim) found by comparison with hardware. For f32 and f64, the sum is a chain of
// fused multiplications and additions in the order of k. Halves and bf16 are multiplied and added in pairs, and the sum
// of two or four products is added to C. Each step is rounded to single precision, to the nearest even.

// A value that is denormal or zero becomes +0.
inline float flush_to_zero(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }
inline float matrix_half(uint32_t bits) { return (bits & 0x7C00) ? half_to_float(uint16_t(bits)) : 0.0f; }
inline float matrix_bf16(uint32_t bits) { return flush_to_zero(std::bit_cast<float>(bits << 16)); }

// The kinds of products. `factors` of A or B are in `words` registers of a lane. add() adds the products of a row of A,
// `depth` factors, and of the columns of B to a row of sums.
struct SingleProduct {
    using Factor = float;
    using Sum = float;
    static constexpr unsigned factors = 1, words = 1;
    static Factor factor(const uint32_t (*v)[lanes], unsigned lane, unsigned) {
        return std::bit_cast<float>(v[0][lane]);
    }
    template <unsigned depth, unsigned size>
    static void add(Sum *sum, const Factor *a, const Factor (*b)[size]) {
        for (unsigned k = 0; k < depth; ++k)
            for (unsigned j = 0; j < size; ++j) sum[j] = std::fma(a[k], b[k][j], sum[j]);
    }
};

struct DoubleProduct {
    using Factor = double;
    using Sum = double;
    static constexpr unsigned factors = 1, words = 2;
    static Factor factor(const uint32_t (*v)[lanes], unsigned lane, unsigned) {
        return std::bit_cast<double>(v[0][lane] | uint64_t(v[1][lane]) << 32);
    }
    template <unsigned depth, unsigned size>
    static void add(Sum *sum, const Factor *a, const Factor (*b)[size]) {
        for (unsigned k = 0; k < depth; ++k)
            for (unsigned j = 0; j < size; ++j) sum[j] = std::fma(a[k], b[k][j], sum[j]);
    }
};

struct ByteProduct {
    using Factor = int32_t;
    using Sum = uint32_t;
    static constexpr unsigned factors = 4, words = 1;
    static Factor factor(const uint32_t (*v)[lanes], unsigned lane, unsigned n) {
        return int8_t(v[0][lane] >> (8 * n));
    }
    template <unsigned depth, unsigned size>
    static void add(Sum *sum, const Factor *a, const Factor (*b)[size]) {
        for (unsigned k = 0; k < depth; ++k)
            for (unsigned j = 0; j < size; ++j) sum[j] += uint32_t(a[k] * b[k][j]);
    }
};

// 16-bit factors, of which `together` products are summed before they are added to C.
template <bool brain, unsigned together>
struct ShortProduct {
    using Factor = float;
    using Sum = float;
    static constexpr unsigned factors = together, words = together / 2;
    static Factor factor(const uint32_t (*v)[lanes], unsigned lane, unsigned n) {
        uint32_t bits = v[n / 2][lane] >> (16 * (n % 2)) & 0xFFFF;
        return brain ? matrix_bf16(bits) : matrix_half(bits);
    }
    template <unsigned depth, unsigned size>
    static void add(Sum *sum, const Factor *a, const Factor (*b)[size]) {
        for (unsigned j = 0; j < size; ++j) {
            float total = flush_to_zero(sum[j]);
            for (unsigned k = 0; k < depth; k += together) {
                float pairs[together / 2];
                for (unsigned n = 0; n < together / 2; ++n)
                    pairs[n] = flush(flush(a[k + 2 * n] * b[k + 2 * n][j]) +
                                     flush(a[k + 2 * n + 1] * b[k + 2 * n + 1][j]));
                total = flush(total + (together == 4 ? flush(pairs[0] + pairs[together / 4]) : pairs[0]));
            }
            sum[j] = total;
        }
    }
};

// The lane whose value of B replaces another lane's.
inline unsigned lane_of_b(unsigned lane, unsigned pattern) {
    switch (pattern) {
        case 0: return lane;
        case 1:
        case 2: return lane % 32 + 32 * (pattern - 1);
        case 3: return (lane + 16) % 64;
        default: return lane % 16 + 16 * (pattern - 4);
    }
}

template <class P, unsigned size, unsigned depth, unsigned blocks>
void matrix_product(Wave &w, const Op &op) {
    using Factor = typename P::Factor;
    using Sum = typename P::Sum;
    constexpr unsigned words = sizeof(Sum) / 4;
    const isa::Instruction &i = op.i;
    if (w.round32 || w.round64)
        return w.fault(Fault::illegal_instruction, op, op.address,
                       "a matrix product whose rounding is not to the nearest even");
    static_assert(size * depth * blocks == lanes * P::factors);

    alignas(64) Factor a[blocks][size][depth], b[blocks][depth][size];
    for (unsigned l = 0; l < lanes; ++l) {
        unsigned from = lane_of_b(l, i.blgp);
        unsigned row = l % size, block = l / size % blocks, k = l / (size * blocks) * P::factors;
        for (unsigned n = 0; n < P::factors; ++n) {
            a[block][row][k + n] = P::factor(w.v + op.src[0].index, l, n);
            b[block][k + n][row] = P::factor(w.v + op.src[1].index, from, n);
        }
    }

    // C and D: rows of `size` lanes. `height` rows are in consecutive registers; other lanes hold the next rows.
    constexpr unsigned height = words == 1 ? 4 : 1, beside = lanes / size;
    constexpr unsigned rows = size * size * blocks / lanes;  // of a whole wave
    constexpr unsigned in_register =
        size * size >= lanes * height ? 1 : lanes * height / (size * size);  // blocks
    alignas(64) uint32_t result[rows * words][lanes];
    if (op.src[2].kind == Source::vgpr) {
        std::memcpy(result, w.v[op.src[2].index], sizeof result);
    } else {
        for (unsigned n = 0; n < rows * words; ++n)
            for (uint32_t &word : result[n]) word = uint32_t(op.src[2].value >> (32 * (n % words)));
    }
    for (unsigned block = 0; block < blocks; ++block) {
        unsigned block_of_a = (block >> i.cbsz << i.cbsz) + i.abid;
        for (unsigned row = 0; row < size; ++row) {
            unsigned place = block * (size * size / lanes) + row / (height * beside) * height + row % height;
            unsigned first = block % in_register * size + row / height % beside * in_register * size;
            alignas(64) Sum sum[size];
            for (unsigned j = 0; j < size; ++j) sum[j] = data_of<Sum>(result + place * words, first + j);
            P::template add<depth, size>(sum, a[block_of_a][row], b[block]);
            for (unsigned j = 0; j < size; ++j) set_data<Sum>(result + place * words, first + j, sum[j]);
        }
    }
    std::memcpy(w.v[op.dst], result, sizeof result);
}

struct MatrixAdder {
    Registry &registry;

    // A shape of a kind of product; `depth` is that of one block of all lanes.
    template <class P, unsigned size, unsigned depth, unsigned blocks>
    void product(const char *result, const char *type, Type sum) {
        add_product(registry, result, type, size, depth, blocks, sum,
                    &matrix_product<P, size, depth, blocks>);
    }
    template <class P>
    void products(const char *result, const char *type, Type sum) {
        product<P, 32, P::factors, 2>(result, type, sum);
        product<P, 16, P::factors, 4>(result, type, sum);
        product<P, 4, P::factors, 16>(result, type, sum);
        product<P, 32, 2 * P::factors, 1>(result, type, sum);
        product<P, 16, 4 * P::factors, 1>(result, type, sum);
    }
};

inline void add_matrix(Registry &registry) {
    MatrixAdder a{registry};
    a.products<SingleProduct>("f32", "f32", Type::f32);
    a.products<ShortProduct<false, 4>>("f32", "f16", Type::f32);
    a.products<ShortProduct<true, 2>>("f32", "bf16", Type::f32);
    a.products<ShortProduct<true, 4>>("f32", "bf16_1k", Type::f32);
    a.products<ByteProduct>("i32", "i8", Type::b32);
    a.product<DoubleProduct, 16, 4, 1>("f64", "f64", Type::f64);
    a.product<DoubleProduct, 4, 4, 4>("f64", "f64", Type::f64);
}
