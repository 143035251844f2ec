// The scalar unit: SALU, branches, scalar memory, messages.

#include "engine/registry.h"
#include "engine/program.h"

#include <bit>
#include <climits>
#include <string>
#include <type_traits>

namespace hipsim {
namespace {

using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

template <class T>
T get(const Wave &w, const Op &op, unsigned n) {
    const Source &s = op.src[n];
    u64 value;
    if (s.kind == Source::constant) value = s.value;
    else if (s.kind == Source::sgpr) value = sizeof(T) == 8 ? w.pair(s.index) : w.s[s.index];
    else value = w.scalar(op.i.src[n], sizeof(T) / 4);
    return T(value);
}

template <class T>
void set(Wave &w, unsigned n, T value) {
    if constexpr (sizeof(T) == 8) w.set_pair(n, u64(value));
    else w.s[n] = u32(value);
}

// D, A and B are u32, i32, u64 or i64; F takes the wave last, for SCC.
template <class F, class D, class A>
struct One {
    static void run(Wave &w, const Op &op) { set<D>(w, op.dst, D(F{}(get<A>(w, op, 0), w))); }
};
template <class F, class D, class A, class B>
struct Two {
    static void run(Wave &w, const Op &op) {
        set<D>(w, op.dst, D(F{}(get<A>(w, op, 0), get<B>(w, op, 1), w)));
    }
};
template <class F, class A, class B>
struct Comparison {
    static void run(Wave &w, const Op &op) { w.scc = F{}(get<A>(w, op, 0), get<B>(w, op, 1)); }
};
// SOPK: the destination is the first source.
template <class F>
struct Immediate {
    static void run(Wave &w, const Op &op) { F{}(w, w.s[op.dst], i32(op.i.simm)); }
};
template <class F, bool writes_source, class T>
struct SaveExec {  // F(source, EXEC) becomes EXEC; the destination gets the old one, or the new one
    static void run(Wave &w, const Op &op) {
        T source = get<T>(w, op, 0), exec = T(w.pair(isa::exec)), result = F{}(source, exec);
        set<T>(w, isa::exec, result);
        set<T>(w, op.dst, writes_source ? result : exec);
        w.scc = result != 0;
    }
};

template <class T>
constexpr Type type_of = sizeof(T) == 4        ? Type::b32
                         : std::is_signed_v<T> ? Type::i64
                                               : Type::b64;

struct Adder {
    Registry &registry;
    template <class D, class A, class F>
    void one(const char *name, F) {
        registry[name] = {&One<F, D, A>::run, nullptr, type_of<D>, {type_of<A>}};
    }
    template <class D, class A, class B, class F>
    void two(const char *name, F) {
        registry[name] = {&Two<F, D, A, B>::run, nullptr, type_of<D>, {type_of<A>, type_of<B>}};
    }
    template <class A, class F, class B = A>
    void compare(const char *name, F) {
        registry[name] = {&Comparison<F, A, B>::run, nullptr, Type::none, {type_of<A>, type_of<B>}};
    }
    template <class F>
    void immediate(const char *name, F) {
        registry[name] = {&Immediate<F>::run, nullptr, Type::b32, {}};
    }
    // For EXEC as a pair, and as one register of a wave of 32.
    template <bool writes_source = false, class F>
    void save_exec(const std::string &name, F) {
        registry[intern(name + "_b64")] = {
            &SaveExec<F, writes_source, u64>::run, nullptr, Type::b64, {Type::b64}};
        registry[intern(name + "_b32")] = {
            &SaveExec<F, writes_source, u32>::run, nullptr, Type::b32, {Type::b32}};
    }
    void custom(const char *name, Handler handler, Type dst = Type::none, Type a = Type::none,
                Type b = Type::none) {
        registry[name] = {handler, nullptr, dst, {a, b}};
    }
};

template <class T>
T with_scc(Wave &w, T value) {
    w.scc = value != 0;
    return value;
}

template <class T>
T field(T value, u32 control) {
    constexpr unsigned bits = 8 * sizeof(T);
    unsigned offset = control & (bits - 1), width = control >> 16 & 0x7F;
    if (width == 0) return 0;
    T shifted = value >> offset;
    if (width + offset >= bits) return shifted;
    return T(std::make_unsigned_t<T>(shifted) << (bits - width)) >> (bits - width);
}

template <class T>
T reversed(T x) {
    T result = 0;
    for (unsigned n = 0; n < 8 * sizeof(T); ++n) result = result << 1 | (x >> n & 1);
    return result;
}
template <class T>
T whole_quads(T x) {
    T quad = (x | x >> 1 | x >> 2 | x >> 3) & T(0x1111111111111111);
    return T(quad * 15);
}
template <class T>
T quad_mask(T x) {
    T result = 0;
    for (unsigned n = 0; n < 2 * sizeof(T); ++n) result |= T((x >> (4 * n) & 15) != 0) << n;
    return result;
}
template <class T>
i32 sign_bits_before(T x) {  // the number of bits after the sign bit that equal it; −1: all
    using U = std::make_unsigned_t<T>;
    U flipped = U(x < 0 ? ~x : x);
    return flipped ? i32(std::countl_zero(flipped)) : -1;
}
template <class T>
i32 first_one(T x) {
    return x ? i32(std::countr_zero(x)) : -1;
}

void add_arithmetic(Adder &a) {
    a.two<u32, u32, u32>("s_add_u32", [](u32 x, u32 y, Wave &w) {
        u32 r = x + y;
        w.scc = r < x;
        return r;
    });
    a.two<u32, u32, u32>("s_sub_u32", [](u32 x, u32 y, Wave &w) {
        w.scc = x < y;
        return x - y;
    });
    a.two<u32, i32, i32>("s_add_i32", [](i32 x, i32 y, Wave &w) {
        i32 r;
        w.scc = __builtin_add_overflow(x, y, &r);
        return r;
    });
    a.two<u32, i32, i32>("s_sub_i32", [](i32 x, i32 y, Wave &w) {
        i32 r;
        w.scc = __builtin_sub_overflow(x, y, &r);
        return r;
    });
    a.two<u32, u32, u32>("s_addc_u32", [](u32 x, u32 y, Wave &w) {
        u64 r = u64{x} + y + w.scc;
        w.scc = r >> 32;
        return u32(r);
    });
    a.two<u32, u32, u32>("s_subb_u32", [](u32 x, u32 y, Wave &w) {
        u64 r = u64{x} - y - w.scc;
        w.scc = r >> 63;
        return u32(r);
    });
    a.two<u32, i32, i32>("s_min_i32", [](i32 x, i32 y, Wave &w) {
        w.scc = x < y;
        return x < y ? x : y;
    });
    a.two<u32, u32, u32>("s_min_u32", [](u32 x, u32 y, Wave &w) {
        w.scc = x < y;
        return x < y ? x : y;
    });
    a.two<u32, i32, i32>("s_max_i32", [](i32 x, i32 y, Wave &w) {
        w.scc = x > y;
        return x > y ? x : y;
    });
    a.two<u32, u32, u32>("s_max_u32", [](u32 x, u32 y, Wave &w) {
        w.scc = x > y;
        return x > y ? x : y;
    });
    a.two<u32, u32, u32>("s_mul_i32", [](u32 x, u32 y, Wave &) { return x * y; });
    a.two<u32, u32, u32>("s_mul_hi_u32", [](u32 x, u32 y, Wave &) { return u32(u64{x} * y >> 32); });
    a.two<u32, i32, i32>("s_mul_hi_i32", [](i32 x, i32 y, Wave &) { return u32(i64{x} * y >> 32); });
    a.two<u32, i32, i32>("s_absdiff_i32", [](i32 x, i32 y, Wave &w) {
        u32 difference = u32(x) - u32(y);
        return with_scc(w, i32(difference) < 0 ? 0 - difference : difference);
    });
    auto shift_add = [](auto by) {
        return [](u32 x, u32 y, Wave &w) {
            u64 r = (u64{x} << decltype(by)::value) + y;
            w.scc = r >> 32;
            return u32(r);
        };
    };
    a.two<u32, u32, u32>("s_lshl1_add_u32", shift_add(std::integral_constant<int, 1>{}));
    a.two<u32, u32, u32>("s_lshl2_add_u32", shift_add(std::integral_constant<int, 2>{}));
    a.two<u32, u32, u32>("s_lshl3_add_u32", shift_add(std::integral_constant<int, 3>{}));
    a.two<u32, u32, u32>("s_lshl4_add_u32", shift_add(std::integral_constant<int, 4>{}));
    a.one<u32, i32>("s_abs_i32", [](i32 x, Wave &w) { return with_scc(w, x < 0 ? 0 - u32(x) : u32(x)); });
    a.one<u32, u32>("s_sext_i32_i8", [](u32 x, Wave &) { return u32(i32(int8_t(x))); });
    a.one<u32, u32>("s_sext_i32_i16", [](u32 x, Wave &) { return u32(i32(int16_t(x))); });

    a.immediate("s_movk_i32", [](Wave &, u32 &d, i32 k) { d = u32(k); });
    a.immediate("s_cmovk_i32", [](Wave &w, u32 &d, i32 k) {
        if (w.scc) d = u32(k);
    });
    a.immediate("s_addk_i32", [](Wave &w, u32 &d, i32 k) {
        i32 r;
        w.scc = __builtin_add_overflow(i32(d), k, &r);
        d = u32(r);
    });
    a.immediate("s_mulk_i32", [](Wave &, u32 &d, i32 k) { d *= u32(k); });
}

// The number of SGPRs before VCC and the named registers.
unsigned sgprs(const Op &op) {
    return op.i.set->family == isa::Family::gfx9 ? unsigned{isa::flat_scratch} : unsigned{isa::vcc};
}

template <class T>
void add_logic(Adder &a, const std::string &type) {
    auto name = [&](const char *stem) { return intern(std::string("s_") + stem + type); };
    a.two<T, T, T>(name("and"), [](T x, T y, Wave &w) { return with_scc<T>(w, x & y); });
    a.two<T, T, T>(name("or"), [](T x, T y, Wave &w) { return with_scc<T>(w, x | y); });
    a.two<T, T, T>(name("xor"), [](T x, T y, Wave &w) { return with_scc<T>(w, x ^ y); });
    a.two<T, T, T>(name("andn2"), [](T x, T y, Wave &w) { return with_scc<T>(w, x & ~y); });
    a.two<T, T, T>(name("orn2"), [](T x, T y, Wave &w) { return with_scc<T>(w, x | ~y); });
    a.two<T, T, T>(name("nand"), [](T x, T y, Wave &w) { return with_scc<T>(w, ~(x & y)); });
    a.two<T, T, T>(name("nor"), [](T x, T y, Wave &w) { return with_scc<T>(w, ~(x | y)); });
    a.two<T, T, T>(name("xnor"), [](T x, T y, Wave &w) { return with_scc<T>(w, ~(x ^ y)); });
    a.two<T, T, T>(name("cselect"), [](T x, T y, Wave &w) { return w.scc ? x : y; });
    constexpr u32 mask = 8 * sizeof(T) - 1;
    a.two<T, T, u32>(name("lshl"), [](T x, u32 y, Wave &w) { return with_scc<T>(w, x << (y & mask)); });
    a.two<T, T, u32>(name("lshr"), [](T x, u32 y, Wave &w) { return with_scc<T>(w, x >> (y & mask)); });
    a.two<T, u32, u32>(name("bfm"),
                       [](u32 x, u32 y, Wave &) { return ((T(1) << (x & mask)) - 1) << (y & mask); });
    a.one<T, T>(name("mov"), [](T x, Wave &) { return x; });
    a.one<T, T>(name("not"), [](T x, Wave &w) { return with_scc<T>(w, ~x); });
    a.one<T, T>(name("brev"), [](T x, Wave &) { return reversed(x); });
    a.one<T, T>(name("wqm"), [](T x, Wave &w) { return with_scc<T>(w, whole_quads(x)); });
    a.one<T, T>(name("quadmask"), [](T x, Wave &w) { return with_scc<T>(w, quad_mask(x)); });
    auto counting = [&](const char *stem) { return intern(std::string("s_") + stem + "_i32" + type); };
    a.one<u32, T>(counting("bcnt0"),
                  [](T x, Wave &w) { return with_scc<u32>(w, u32(std::popcount(T(~x)))); });
    a.one<u32, T>(counting("bcnt1"), [](T x, Wave &w) { return with_scc<u32>(w, u32(std::popcount(x))); });
    a.one<u32, T>(counting("ff0"), [](T x, Wave &) { return u32(first_one(T(~x))); });
    a.one<u32, T>(counting("ff1"), [](T x, Wave &) { return u32(first_one(x)); });
    a.one<u32, T>(counting("flbit"), [](T x, Wave &) { return x ? u32(std::countl_zero(x)) : ~0u; });
    auto bit0 = [](T x, u32 y) { return !(x >> (y & mask) & 1); };
    auto bit1 = [](T x, u32 y) { return bool(x >> (y & mask) & 1); };
    a.compare<T, decltype(bit0), u32>(name("bitcmp0"), bit0);
    a.compare<T, decltype(bit1), u32>(name("bitcmp1"), bit1);
    a.custom(
        name("cmov"),
        [](Wave &w, const Op &op) {
            if (w.scc) set<T>(w, op.dst, get<T>(w, op, 0));
        },
        type_of<T>, type_of<T>);
    a.custom(
        name("bitset0"),
        [](Wave &w, const Op &op) {
            T old = T(sizeof(T) == 8 ? w.pair(op.dst) : w.s[op.dst]);
            set<T>(w, op.dst, old & ~(T(1) << (get<u32>(w, op, 0) & mask)));
        },
        type_of<T>, Type::b32);
    a.custom(
        name("bitset1"),
        [](Wave &w, const Op &op) {
            T old = T(sizeof(T) == 8 ? w.pair(op.dst) : w.s[op.dst]);
            set<T>(w, op.dst, old | T(1) << (get<u32>(w, op, 0) & mask));
        },
        type_of<T>, Type::b32);
    // M0 is added to the number of a register.
    a.custom(
        name("movrels"),
        [](Wave &w, const Op &op) {
            unsigned from = op.i.src[0] + w.s[isa::m0];
            if (from + sizeof(T) / 4 > sgprs(op))
                return w.fault(Fault::illegal_instruction, op, op.address, "an SGPR beyond the last");
            set<T>(w, op.dst, T(sizeof(T) == 8 ? w.pair(from) : w.s[from]));
        },
        type_of<T>, type_of<T>);
    a.custom(
        name("movreld"),
        [](Wave &w, const Op &op) {
            unsigned to = op.dst + w.s[isa::m0];
            if (to + sizeof(T) / 4 > sgprs(op))
                return w.fault(Fault::illegal_instruction, op, op.address, "an SGPR beyond the last");
            set<T>(w, to, get<T>(w, op, 0));
        },
        type_of<T>, type_of<T>);
}

void add_bits(Adder &a) {
    add_logic<u32>(a, "_b32");
    add_logic<u64>(a, "_b64");
    a.two<u32, i32, u32>("s_ashr_i32",
                         [](i32 x, u32 y, Wave &w) { return with_scc<u32>(w, u32(x >> (y & 31))); });
    a.two<u64, i64, u32>("s_ashr_i64",
                         [](i64 x, u32 y, Wave &w) { return with_scc<u64>(w, u64(x >> (y & 63))); });
    a.two<u32, u32, u32>("s_bfe_u32", [](u32 x, u32 y, Wave &w) { return with_scc(w, field(x, y)); });
    a.two<u32, i32, u32>("s_bfe_i32", [](i32 x, u32 y, Wave &w) { return with_scc(w, field(x, y)); });
    a.two<u64, u64, u32>("s_bfe_u64", [](u64 x, u32 y, Wave &w) { return with_scc(w, field(x, y)); });
    a.two<u64, i64, u32>("s_bfe_i64", [](i64 x, u32 y, Wave &w) { return with_scc(w, field(x, y)); });
    a.two<u32, u32, u32>("s_pack_ll_b32_b16", [](u32 x, u32 y, Wave &) { return (x & 0xFFFF) | y << 16; });
    a.two<u32, u32, u32>("s_pack_lh_b32_b16",
                         [](u32 x, u32 y, Wave &) { return (x & 0xFFFF) | (y & 0xFFFF0000); });
    a.two<u32, u32, u32>("s_pack_hh_b32_b16",
                         [](u32 x, u32 y, Wave &) { return x >> 16 | (y & 0xFFFF0000); });
    a.one<u32, i32>("s_flbit_i32", [](i32 x, Wave &) { return u32(sign_bits_before(x)); });
    a.one<u32, i64>("s_flbit_i32_i64", [](i64 x, Wave &) { return u32(sign_bits_before(x)); });
    a.one<u64, u32>("s_bitreplicate_b64_b32", [](u32 x, Wave &) {
        u64 r = 0;
        for (unsigned n = 0; n < 32; ++n) r |= u64{x >> n & 1} * 3 << (2 * n);
        return r;
    });
    a.save_exec("s_and_saveexec", [](auto s, auto e) { return s & e; });
    a.save_exec("s_or_saveexec", [](auto s, auto e) { return s | e; });
    a.save_exec("s_xor_saveexec", [](auto s, auto e) { return s ^ e; });
    a.save_exec("s_andn2_saveexec", [](auto s, auto e) { return s & ~e; });
    a.save_exec("s_orn2_saveexec", [](auto s, auto e) { return s | ~e; });
    a.save_exec("s_nand_saveexec", [](auto s, auto e) { return ~(s & e); });
    a.save_exec("s_nor_saveexec", [](auto s, auto e) { return ~(s | e); });
    a.save_exec("s_xnor_saveexec", [](auto s, auto e) { return ~(s ^ e); });
    a.save_exec("s_andn1_saveexec", [](auto s, auto e) { return ~s & e; });
    a.save_exec("s_orn1_saveexec", [](auto s, auto e) { return ~s | e; });
    a.save_exec<true>("s_andn1_wrexec", [](auto s, auto e) { return ~s & e; });
    a.save_exec<true>("s_andn2_wrexec", [](auto s, auto e) { return s & ~e; });
}

void add_comparisons(Adder &a) {
    a.compare<i32>("s_cmp_eq_i32", [](i32 x, i32 y) { return x == y; });
    a.compare<i32>("s_cmp_lg_i32", [](i32 x, i32 y) { return x != y; });
    a.compare<i32>("s_cmp_gt_i32", [](i32 x, i32 y) { return x > y; });
    a.compare<i32>("s_cmp_ge_i32", [](i32 x, i32 y) { return x >= y; });
    a.compare<i32>("s_cmp_lt_i32", [](i32 x, i32 y) { return x < y; });
    a.compare<i32>("s_cmp_le_i32", [](i32 x, i32 y) { return x <= y; });
    a.compare<u32>("s_cmp_eq_u32", [](u32 x, u32 y) { return x == y; });
    a.compare<u32>("s_cmp_lg_u32", [](u32 x, u32 y) { return x != y; });
    a.compare<u32>("s_cmp_gt_u32", [](u32 x, u32 y) { return x > y; });
    a.compare<u32>("s_cmp_ge_u32", [](u32 x, u32 y) { return x >= y; });
    a.compare<u32>("s_cmp_lt_u32", [](u32 x, u32 y) { return x < y; });
    a.compare<u32>("s_cmp_le_u32", [](u32 x, u32 y) { return x <= y; });
    a.compare<u64>("s_cmp_eq_u64", [](u64 x, u64 y) { return x == y; });
    a.compare<u64>("s_cmp_lg_u64", [](u64 x, u64 y) { return x != y; });
    a.immediate("s_cmpk_eq_i32", [](Wave &w, u32 &d, i32 k) { w.scc = i32(d) == k; });
    a.immediate("s_cmpk_lg_i32", [](Wave &w, u32 &d, i32 k) { w.scc = i32(d) != k; });
    a.immediate("s_cmpk_gt_i32", [](Wave &w, u32 &d, i32 k) { w.scc = i32(d) > k; });
    a.immediate("s_cmpk_ge_i32", [](Wave &w, u32 &d, i32 k) { w.scc = i32(d) >= k; });
    a.immediate("s_cmpk_lt_i32", [](Wave &w, u32 &d, i32 k) { w.scc = i32(d) < k; });
    a.immediate("s_cmpk_le_i32", [](Wave &w, u32 &d, i32 k) { w.scc = i32(d) <= k; });
    a.immediate("s_cmpk_eq_u32", [](Wave &w, u32 &d, i32 k) { w.scc = d == u32(uint16_t(k)); });
    a.immediate("s_cmpk_lg_u32", [](Wave &w, u32 &d, i32 k) { w.scc = d != u32(uint16_t(k)); });
    a.immediate("s_cmpk_gt_u32", [](Wave &w, u32 &d, i32 k) { w.scc = d > u32(uint16_t(k)); });
    a.immediate("s_cmpk_ge_u32", [](Wave &w, u32 &d, i32 k) { w.scc = d >= u32(uint16_t(k)); });
    a.immediate("s_cmpk_lt_u32", [](Wave &w, u32 &d, i32 k) { w.scc = d < u32(uint16_t(k)); });
    a.immediate("s_cmpk_le_u32", [](Wave &w, u32 &d, i32 k) { w.scc = d <= u32(uint16_t(k)); });
}

// Jumps to a computed address. The instruction caches the last one.
void jump(Wave &w, const Op &op, u64 address) {
    const Op *target = __atomic_load_n(&op.target, __ATOMIC_ACQUIRE);
    if (!target || target->address != address) {
        std::string why;
        target = w.program->find(address, why);
        if (!target) return w.fault(Fault::illegal_instruction, op, address, why);
        __atomic_store_n(&op.target, target, __ATOMIC_RELEASE);
    }
    w.next = target;
}

template <class Condition>
void branch_if(Wave &w, const Op &op) {
    if (Condition{}(w)) w.next = op.target;
}

void nothing(Wave &, const Op &) {}

void add_branches(Adder &a) {
    a.custom("s_branch", [](Wave &w, const Op &op) { w.next = op.target; });
    a.custom("s_cbranch_scc0", branch_if<decltype([](const Wave &w) { return !w.scc; })>);
    a.custom("s_cbranch_scc1", branch_if<decltype([](const Wave &w) { return w.scc; })>);
    a.custom("s_cbranch_vccz", branch_if<decltype([](const Wave &w) { return w.vcc() == 0; })>);
    a.custom("s_cbranch_vccnz", branch_if<decltype([](const Wave &w) { return w.vcc() != 0; })>);
    a.custom("s_cbranch_execz", branch_if<decltype([](const Wave &w) { return w.exec() == 0; })>);
    a.custom("s_cbranch_execnz", branch_if<decltype([](const Wave &w) { return w.exec() != 0; })>);
    // There is no debugger, so these branches are never taken.
    for (const char *name : {"s_cbranch_cdbgsys", "s_cbranch_cdbguser", "s_cbranch_cdbgsys_or_user",
                             "s_cbranch_cdbgsys_and_user"})
        a.custom(name, nothing);
    a.custom("s_getpc_b64", [](Wave &w, const Op &op) { w.set_pair(op.dst, op.address + 4); }, Type::b64);
    a.custom(
        "s_setpc_b64", [](Wave &w, const Op &op) { jump(w, op, get<u64>(w, op, 0)); }, Type::none, Type::b64);
    a.custom(
        "s_swappc_b64",
        [](Wave &w, const Op &op) {
            u64 target = get<u64>(w, op, 0);
            w.set_pair(op.dst, op.address + 4);
            jump(w, op, target);
        },
        Type::b64, Type::b64);
    a.custom(
        "s_call_b64",
        [](Wave &w, const Op &op) {
            w.set_pair(op.dst, op.address + 4);
            w.next = op.target;
        },
        Type::b64);
}

void add_control(Adder &a) {
    a.custom("s_endpgm", [](Wave &w, const Op &) {
        if (w.paused) {
            w.resume();
            ++w.time;
        }
        w.state = State::ended;
        w.stop();
    });
    a.custom("s_nop", [](Wave &w, const Op &op) {
        const auto operand = static_cast<uint16_t>(op.i.simm);
        if (operand == untimed_begin) w.pause(1, 0);
        else if (operand == untimed_before) w.pause(1, 1);
        else if (operand == untimed_exit) w.pause(2, 1);
        else if (operand == untimed_end) w.resume();
    });
    a.custom("s_barrier", [](Wave &w, const Op &) {
        w.state = State::barrier;
        w.stop();
    });
    a.custom("s_sleep", [](Wave &w, const Op &op) {
        w.yielded = true;
        w.stop();
        w.time += 64 * u64(op.i.simm & 0x7F);
    });
    a.custom("s_sendmsg", [](Wave &w, const Op &op) {
        if ((op.i.simm & 15) == 1) return w.group->services->interrupt(w.s[isa::m0]);
        w.fault(Fault::illegal_instruction, op, op.address, "message " + std::to_string(op.i.simm & 15));
    });
    a.custom("s_trap", [](Wave &w, const Op &op) {
        if ((op.i.simm & 0xFF) == 3) return;  // a breakpoint without a debugger
        bool aborts = (op.i.simm & 0xFF) == 2;
        w.fault(Fault::trap, op, op.address,
                aborts ? "trap 2, as of abort() or a failed assertion"
                       : "trap " + std::to_string(op.i.simm & 0xFF));
    });
    for (const char *name :
         {"s_wakeup", "s_waitcnt", "s_setprio", "s_icache_inv", "s_incperflevel", "s_decperflevel",
          "s_ttracedata", "s_dcache_inv", "s_dcache_wb", "s_dcache_inv_vol", "s_dcache_wb_vol"})
        a.custom(name, nothing);
    a.custom(
        "s_set_gpr_idx_on",
        [](Wave &w, const Op &op) {
            w.index_mode = op.i.src[1] & 15;
            w.s[isa::m0] = (w.s[isa::m0] & ~0xF0FFu) | (get<u32>(w, op, 0) & 0xFF) | u32{w.index_mode} << 12;
            w.stop();
        },
        Type::none, Type::b32);
    a.custom("s_set_gpr_idx_off", [](Wave &w, const Op &) {
        w.index_mode = 0;
        w.stop();
    });
    a.custom("s_set_gpr_idx_mode", [](Wave &w, const Op &op) {
        w.index_mode = op.i.simm & 15;
        w.s[isa::m0] = (w.s[isa::m0] & ~0xF000u) | u32{w.index_mode} << 12;
        w.stop();
    });
    a.custom(
        "s_set_gpr_idx_idx",
        [](Wave &w, const Op &op) { w.s[isa::m0] = (w.s[isa::m0] & ~0xFFu) | (get<u32>(w, op, 0) & 0xFF); },
        Type::none, Type::b32);
}

// Hardware registers, by the number in s_getreg and s_setreg.
enum Register : unsigned {
    mode = 1,
    status = 2,
    trap_status = 3,
    hw_id = 4,
    gpr_alloc = 5,
    lds_alloc = 6,
    ib_status = 7,
    memory_bases = 15,
    // of GFX10
    flat_scratch_low = 20,
    flat_scratch_high = 21,
    hw_id1 = 23,
    hw_id2 = 24,
    shader_cycles = 29
};

u64 clock_of(const Wave &w) {
    const Group &g = *w.group;
    return g.target->virtual_clock ? g.launch->start_ns + w.now() : g.services->counter();
}

// The compute unit of a wave. Workgroups are assigned to units in turn.
u32 unit(const Wave &w) { return w.group->number % std::max(1u, w.group->target->compute_units); }

u32 read_register(const Wave &w, unsigned number) {
    switch (number) {
        case mode: return w.mode;
        case status: return u32{w.scc} | u32{w.exec() == 0} << 9 | u32{w.vcc() == 0} << 10 | 1u << 16;
        case trap_status: return w.trap_status;
        case hw_id: return (w.index & 15) | (unit(w) & 15) << 8 | (unit(w) >> 4 & 7) << 12;
        case gpr_alloc: return (w.vgprs / 4 - 1) << 8;
        case lds_alloc: return (w.group->lds_bytes + 511) / 512 << 12;
        case memory_bases:
            return u32(w.group->target->private_base >> 48) | u32(w.group->target->shared_base >> 48) << 16;
        case flat_scratch_low: return w.flat_scratch[0];
        case flat_scratch_high: return w.flat_scratch[1];
        case hw_id1: return (w.index & 31) | (unit(w) / 2 & 15) << 10 | (unit(w) / 32 & 3) << 18;
        case shader_cycles: return u32(clock_of(w)) & 0xFFFFF;
        default: return 0;
    }
}

struct Part {  // of a hardware register, from the immediate
    unsigned number, offset, width;
    explicit Part(const Op &op)
        : number(op.i.simm & 63), offset(op.i.simm >> 6 & 31), width((uint16_t(op.i.simm) >> 11) + 1u) {}
    u32 mask() const { return width >= 32 ? ~0u : (1u << width) - 1; }
};

void set_register(Wave &w, const Op &op, u32 value) {
    Part part(op);
    u32 old = read_register(w, part.number), place = part.mask() << part.offset;
    u32 result = (old & ~place) | (value << part.offset & place);
    switch (part.number) {
        case mode:
            if (result & mode_fp16_overflow)
                return w.fault(Fault::illegal_instruction, op, op.address, "FP16_OVFL is not supported");
            w.set_mode(result);
            break;
        case flat_scratch_low: w.flat_scratch[0] = result; break;
        case flat_scratch_high: w.flat_scratch[1] = result; break;
        default: w.trap_status = result; break;
    }
}

void add_registers(Adder &a) {
    a.custom(
        "s_getreg_b32",
        [](Wave &w, const Op &op) {
            Part part(op);
            w.s[op.dst] = read_register(w, part.number) >> part.offset & part.mask();
        },
        Type::b32);
    a.custom("s_setreg_b32", [](Wave &w, const Op &op) { set_register(w, op, w.s[op.dst]); }, Type::b32);
    a.custom("s_setreg_imm32_b32", [](Wave &w, const Op &op) { set_register(w, op, op.i.literal); });
}

u64 scalar_offset(const Wave &w, const isa::Instruction &i) {
    u64 offset = u64(i64{i.offset});
    if (i.has_soffset) offset += w.scalar(i.soffset, 1);
    return offset;
}

template <unsigned words>
void load(Wave &w, const Op &op) {
    u64 address = (w.pair(op.i.src[0]) + scalar_offset(w, op.i)) & ~u64{3};
    if (w.allow(op, address, 4 * words, false)) std::memcpy(w.s + op.dst, host(address), 4 * words);
}

template <unsigned words>
void store(Wave &w, const Op &op) {
    u64 address = (w.pair(op.i.src[0]) + scalar_offset(w, op.i)) & ~u64{3};
    if (w.allow(op, address, 4 * words, true)) std::memcpy(host(address), w.s + op.dst, 4 * words);
}

// The address of word n of a scalar buffer access; 0: outside the buffer.
u64 buffer_word(const Wave &w, const isa::Instruction &i, unsigned n) {
    const u32 *descriptor = w.s + i.src[0];
    u64 base = descriptor[0] | u64{descriptor[1] & 0xFFFF} << 32;
    u64 stride = descriptor[1] >> 16 & 0x3FFF, bytes = descriptor[2] * (stride ? stride : 1);
    u64 offset = (u32(scalar_offset(w, i)) & ~3u) + 4 * n;
    return offset + 4 <= bytes ? (base & ~u64{3}) + offset : 0;
}

template <unsigned words>
void buffer_load(Wave &w, const Op &op) {
    u32 loaded[words];
    for (unsigned n = 0; n < words; ++n) {
        u64 address = buffer_word(w, op.i, n);
        if (address && !w.allow(op, address, 4, false)) return;
        loaded[n] = 0;
        if (address) std::memcpy(&loaded[n], host(address), 4);
    }
    std::memcpy(w.s + op.dst, loaded, sizeof loaded);
}

template <unsigned words>
void buffer_store(Wave &w, const Op &op) {
    for (unsigned n = 0; n < words; ++n) {
        u64 address = buffer_word(w, op.i, n);
        if (!address) continue;
        if (!w.allow(op, address, 4, true)) return;
        std::memcpy(host(address), w.s + op.dst + n, 4);
    }
}

void read_clock(Wave &w, const Op &op) { w.set_pair(op.dst, clock_of(w)); }

void add_memory(Adder &a) {
    a.custom("s_load_dword", load<1>, Type::b32);
    a.custom("s_load_dwordx2", load<2>, Type::b64);
    a.custom("s_load_dwordx4", load<4>, Type::b64);
    a.custom("s_load_dwordx8", load<8>, Type::b64);
    a.custom("s_load_dwordx16", load<16>, Type::b64);
    a.custom("s_store_dword", store<1>, Type::b32);
    a.custom("s_store_dwordx2", store<2>, Type::b64);
    a.custom("s_store_dwordx4", store<4>, Type::b64);
    a.custom("s_buffer_load_dword", buffer_load<1>, Type::b32);
    a.custom("s_buffer_load_dwordx2", buffer_load<2>, Type::b64);
    a.custom("s_buffer_load_dwordx4", buffer_load<4>, Type::b64);
    a.custom("s_buffer_load_dwordx8", buffer_load<8>, Type::b64);
    a.custom("s_buffer_load_dwordx16", buffer_load<16>, Type::b64);
    a.custom("s_buffer_store_dword", buffer_store<1>, Type::b32);
    a.custom("s_buffer_store_dwordx2", buffer_store<2>, Type::b64);
    a.custom("s_buffer_store_dwordx4", buffer_store<4>, Type::b64);
    a.custom("s_memtime", read_clock, Type::b64);
    a.custom("s_memrealtime", read_clock, Type::b64);
}

void add_gfx10(Adder &a) {
    // These have no effect: loads and stores end before the next instruction, and instructions are in the host's memory.
    for (const char *name : {"s_clause", "s_inst_prefetch", "s_wait_idle", "s_waitcnt_depctr",
                             "s_waitcnt_expcnt", "s_waitcnt_lgkmcnt", "s_waitcnt_vmcnt", "s_waitcnt_vscnt",
                             "s_version", "s_ttracedata_imm", "s_gl1_inv"})
        a.custom(name, nothing);
    a.custom("s_round_mode",
             [](Wave &w, const Op &op) { w.set_mode((w.mode & ~15u) | (u32(op.i.simm) & 15)); });
    a.custom("s_denorm_mode",
             [](Wave &w, const Op &op) { w.set_mode((w.mode & ~0xF0u) | (u32(op.i.simm) & 15) << 4); });
    a.custom(
        "s_movrelsd_2_b32",
        [](Wave &w, const Op &op) {
            unsigned from = op.i.src[0] + (w.s[isa::m0] & 0x3FF), to = op.dst + (w.s[isa::m0] >> 16 & 0x3FF);
            if (from >= sgprs(op) || to >= sgprs(op))
                return w.fault(Fault::illegal_instruction, op, op.address, "an SGPR beyond the last");
            w.s[to] = w.s[from];
        },
        Type::b32, Type::b32);
}

}  // namespace

void add_scalar(Registry &registry) {
    Adder adder{registry};
    add_arithmetic(adder);
    add_bits(adder);
    add_comparisons(adder);
    add_branches(adder);
    add_control(adder);
    add_registers(adder);
    add_memory(adder);
    add_gfx10(adder);
}

}  // namespace hipsim
