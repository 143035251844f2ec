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
