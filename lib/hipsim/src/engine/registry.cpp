#include "engine/registry.h"

#include <cstdlib>
#include <deque>
#include <string>

namespace hipsim {

const char *intern(const std::string &name) {
    static auto *names =
        new std::deque<std::string>;  // never destroyed: waves may run while the process exits
    return names->emplace_back(name).c_str();
}

Semantics &add(Registry &registry, std::initializer_list<std::string_view> parts,
               const Semantics &semantics) {
    std::string name;
    for (std::string_view part : parts) name += part;
    return registry[intern(name)] = semantics;
}

void add_atomic(Registry &registry, const Atomic &atomic) {
    auto put = [&](std::initializer_list<std::string_view> parts, Handler handler) {
        if (handler) add(registry, parts, {handler, nullptr, Type::none, {}});
    };
    std::string bits = std::to_string(atomic.bits);
    if (!atomic.memory.empty())
        for (const char *prefix : {"flat_atomic_", "global_atomic_", "buffer_atomic_"})
            put({prefix, atomic.memory, atomic.bits == 64 ? "_x2" : ""}, atomic.in_memory);
    if (atomic.lds.empty()) return;
    put({"ds_", atomic.lds, "_", atomic.type, bits}, atomic.in_lds);
    put({"ds_", atomic.lds, "_rtn_", atomic.type, bits}, atomic.returns_from_lds);
    put({"ds_", atomic.lds, "_src2_", atomic.type, bits}, atomic.src2);
}

void add_everywhere(Registry &registry, std::string_view name, Handler handler) {
    for (const char *prefix : {"flat_", "global_", "scratch_", "buffer_"})
        add(registry, {prefix, name}, {handler, nullptr, Type::none, {}});
}

void add_comparison(Registry &registry, std::string_view operation, std::string_view type,
                    const Semantics &semantics, Handler writes_exec) {
    add(registry, {"v_cmp_", operation, "_", type}, semantics);
    add(registry, {"v_cmpx_", operation, "_", type}, semantics).run = writes_exec;
}

void add_product(Registry &registry, std::string_view result, std::string_view type, unsigned size,
                 unsigned depth, unsigned blocks, Type sum, Handler handler) {
    std::string side = std::to_string(size), shape = side + "x" + side + "x" + std::to_string(depth);
    Semantics &entry = add(registry, {"v_mfma_", result, "_", shape, type},
                           {handler, nullptr, sum, {Type::b32, Type::b32, sum}});
    entry.blocks = uint8_t(blocks);
}

// All families share the instructions that have the same name.
const Registry &registry(isa::Family) {
    static const Registry *all = [] {
        auto *made = new Registry;
        add_scalar(*made);
        add_gws(*made);
        const char *chosen = std::getenv("HIPSIM_VECTORS");
        std::string_view wanted = chosen ? chosen : "";
        bool has_avx2 = false;
#ifdef __x86_64__
        has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
#endif
        if (has_avx2 && wanted != "plain") avx2::add_vector(*made);
        else plain::add_vector(*made);
        return made;
    }();
    return *all;
}

}  // namespace hipsim
