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

const Registry &registry() {
    static const Registry *all = [] {
        auto *made = new Registry;
        add_scalar(*made);
        add_gws(*made);
        const char *chosen = std::getenv("HIPSIM_VECTORS");
        std::string_view wanted = chosen ? chosen : "";
        auto at_most = [&](std::string_view level) { return wanted.empty() || wanted == level; };
        bool has_avx2 = false, has_avx512 = false;
#ifdef __x86_64__
        has_avx2 =
            __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                     __builtin_cpu_supports("avx512cd");
#endif
        if (has_avx512 && at_most("avx512")) avx512::add_vector(*made);
        else if (has_avx2 && at_most("avx2")) avx2::add_vector(*made);
        else plain::add_vector(*made);
        return made;
    }();
    return *all;
}

}  // namespace hipsim
