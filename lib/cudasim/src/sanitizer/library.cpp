// libsanitizer-public.so: the stand-in's exported functions. They are those of the embedded device's driver.
#include <dlfcn.h>

#include "sanitizer/entry_points.h"

using namespace cudasim::sanitizer;

namespace {

// Returns the functions of the driver; null if the process has another driver.
const entry::Table *table() {
    static const entry::Table *const found = []() -> const entry::Table * {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (driver == nullptr) return nullptr;
        const auto get = reinterpret_cast<const entry::Table *(*)()>(dlsym(driver, "cudasim_sanitizer"));
        return get != nullptr ? get() : nullptr;
    }();
    return found;
}

}  // namespace

#define X(name, parameters, arguments)                    \
    extern "C" Result sanitizer##name parameters {        \
        const entry::Table *functions = table();          \
        if (functions == nullptr) return kNotInitialized; \
        return functions->name arguments;                 \
    }
SANITIZER_ENTRY_POINTS(X)
#undef X
