// Vector instructions that only GFX10 has, and GFX10's names for those that both have.

using MoveWord = decltype([](uint32_t x) { return x; });

// v_movrels, v_movreld and v_movrelsd: M0 is added to the number of the source, of the destination, or of both. With
// `two`, M0 has a number for each.
template <bool from, bool to, bool two>
bool relative(Wave &w, const Op &op, Op &moved) {
    moved = op;
    uint32_t m0 = w.s[isa::m0], source = two ? m0 & 0x3FF : m0, destination = two ? m0 >> 16 & 0x3FF : m0;
    if (from) source += op.src[0].index;
    if (to) destination += op.dst;
    if ((from && source >= w.vgprs) || (to && destination >= w.vgprs)) {
        w.fault(Fault::illegal_instruction, op, op.address, "a VGPR beyond the last");
        return false;
    }
    if (from) moved.src[0].index = uint16_t(source);
    if (to) moved.dst = uint16_t(destination);
    return true;
}

template <bool from, bool to, bool two>
void move_relative(Wave &w, const Op &op) {
    Op moved;
    if (relative<from, to, two>(w, op, moved)) Valu<MoveWord, U32, U32>::run(w, moved);
}

inline void swap_relative(Wave &w, const Op &op) {
    Op moved;
    if (relative<true, true, true>(w, op, moved)) swap_registers(w, moved);
}

// Each lane reads a lane of its row, or of the row beside it; 4 bits of the scalar sources name it. op_sel holds FI and
// BOUND_CTRL of DPP, which say what happens if the lane that is read is inactive.
template <bool other_row>
void permute_row(Wave &w, const Op &op) {
    alignas(64) uint32_t words[lanes], selected[2][lanes], result[lanes];
    raw(w, op, 0, 0, 1, words);
    for (unsigned n = 0; n < 2; ++n) raw(w, op, n + 1, 0, 1, selected[n]);
    bool fetch_inactive = op.i.op_sel & 1, zero = op.i.op_sel & 2;
    uint64_t exec = w.exec(), written = 0, readable = fetch_inactive ? w.existing : exec;
    for (unsigned l = 0; l < w.count; ++l) {
        unsigned row = l & ~15u, from = selected[l >> 3 & 1][0] >> (4 * (l & 7)) & 15;
        from += other_row ? row ^ 16 : row;
        bool valid = readable >> from & 1;
        result[l] = valid ? words[from] : 0;
        if (valid || zero) written |= uint64_t{1} << l;
    }
    for (unsigned l = w.count; l < lanes; ++l) result[l] = 0;
    merge(w, w.v[op.dst], result, written & exec);
}

// One word for each lane of the wave, consecutive in memory.
inline bool lane_words(Wave &w, const Op &op, bool write, uint64_t *address) {
    uint64_t base = op.i.saddr != 0x7F ? w.pair(op.i.saddr) : 0;
    for (unsigned l = 0; l < lanes; ++l) address[l] = base + uint64_t(int64_t(op.i.offset)) + 4 * l;
    if (!check(w, op, address, w.exec(), 4, write)) return false;
    for (unsigned l = 0; l < lanes; ++l) address[l] &= ~registered_bit;
    return true;
}

inline void load_lane_words(Wave &w, const Op &op) {
    uint64_t address[lanes];
    if (!lane_words(w, op, false, address)) return;
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        w.v[op.i.vdst][l] = get<uint32_t>(reinterpret_cast<const uint8_t *>(address[l]));
    }
}

inline void store_lane_words(Wave &w, const Op &op) {
    uint64_t address[lanes];
    if (!lane_words(w, op, true, address)) return;
    for (uint64_t rest = w.exec(); rest; rest &= rest - 1) {
        unsigned l = unsigned(std::countr_zero(rest));
        put(reinterpret_cast<uint8_t *>(address[l]), w.v[op.i.data[0]][l]);
    }
}

template <class F>
void add_float_atomics(MemoryAdder &a) {
    a.atomics<F, 2>("fcmpswap", "", "",
                    [](F old, F data, F compared) { return old == compared ? data : old; });
    a.atomics<F>("fmin", "", "", [](F old, F data, F) { return minimum(old, data, true); });
    a.atomics<F>("fmax", "", "", [](F old, F data, F) { return maximum(old, data, true); });
}

// Call it after adding GFX9's instructions, some of which get another name.
inline void add_gfx10(Adder &a) {
    using f32 = float;
    using f64 = double;
    using u32 = uint32_t;
    const std::pair<const char *, const char *> names[] = {
        {"v_add_nc_u32", "v_add_u32"},        {"v_sub_nc_u32", "v_sub_u32"},
        {"v_subrev_nc_u32", "v_subrev_u32"},  {"v_add_nc_i32", "v_add_i32"},
        {"v_sub_nc_i32", "v_sub_i32"},        {"v_add_nc_u16", "v_add_u16"},
        {"v_sub_nc_u16", "v_sub_u16"},        {"v_add_nc_i16", "v_add_i16"},
        {"v_sub_nc_i16", "v_sub_i16"},        {"v_add_co_ci_u32", "v_addc_co_u32"},
        {"v_sub_co_ci_u32", "v_subb_co_u32"}, {"v_subrev_co_ci_u32", "v_subbrev_co_u32"},
    };
    for (auto [name, of_gfx9] : names) add(a.registry, {name}, Semantics(a.registry.at(of_gfx9)));

    a.op<U32, U32, U32, U32>("v_xor3_b32", [](u32 x, u32 y, u32 z) { return x ^ y ^ z; });
    auto fused = [](f32 x, f32 y, f32 z) { return std::fma(x, y, z); };
    a.op<F32, F32, F32, F32>("v_fmamk_f32", fused);
    a.op<F32, F32, F32, F32>("v_fmaak_f32", fused);
    // The product of 0 and anything is 0.
    auto legacy = [](f32 x, f32 y, f32 z) { return x == 0 || y == 0 ? 0.0f + z : std::fma(x, y, z); };
    a.op<F32, F32, F32, F32>("v_fma_legacy_f32", legacy);
    a.op<F32, F32, F32, F32>("v_fmac_legacy_f32", legacy).accumulates = true;
    using W = Wide16;
    auto fused_half = [](f64 x, f64 y, f64 z) { return std::fma(x, y, z); };
    a.op<W, W, W, W>("v_fmamk_f16", fused_half);
    a.op<W, W, W, W>("v_fmaak_f16", fused_half);
    a.op<W, W, W, W>("v_fmac_f16", fused_half).accumulates = true;

    a.custom("v_movrels_b32", move_relative<true, false, false>, Type::b32, Type::b32);
    a.custom("v_movreld_b32", move_relative<false, true, false>, Type::b32, Type::b32);
    a.custom("v_movrelsd_b32", move_relative<true, true, false>, Type::b32, Type::b32);
    a.custom("v_movrelsd_2_b32", move_relative<true, true, true>, Type::b32, Type::b32);
    a.custom("v_swaprel_b32", swap_relative, Type::b32, Type::b32);
    a.custom("v_permlane16_b32", permute_row<false>, Type::b32, Type::b32, Type::b32, Type::b32).own_op_sel =
        true;
    a.custom("v_permlanex16_b32", permute_row<true>, Type::b32, Type::b32, Type::b32, Type::b32).own_op_sel =
        true;
    a.custom("v_pipeflush", nothing, Type::none);

    MemoryAdder memory{a.registry};
    memory.atomics<u32>("csub", "", "", [](u32 old, u32 data, u32) { return old < data ? 0 : old - data; });
    add_float_atomics<f32>(memory);
    add_float_atomics<f64>(memory);
    memory.add("global_load_dword_addtid", load_lane_words);
    memory.add("global_store_dword_addtid", store_lane_words);
    for (const char *name : {"buffer_gl0_inv", "buffer_gl1_inv"}) memory.add(name, nothing);
}
