// Libraries that the agent loads for their functions.
#pragma once

#include <algorithm>
#include <dlfcn.h>
#include <string>

namespace gpubpf {

// Looks up functions of a library.
class FunctionsOf {
  public:
    explicit FunctionsOf(void *library) : library_(library) {}
    template <class Function>
    FunctionsOf &get(Function &function, const char *name) {
        function = reinterpret_cast<Function>(dlsym(library_, name));
        all_ = all_ && function;
        return *this;
    }
    bool all() const { return all_; }  // whether the library has all of them

  private:
    void *library_;
    bool all_ = true;
};

// Passes the paths of a list that colons separate to `use`, until it returns true. Returns whether it did.
template <class Use>
bool any_path(const std::string &paths, const Use &use) {
    for (size_t at = 0, end; at < paths.size(); at = end + 1) {
        end = std::min(paths.find(':', at), paths.size());
        if (use(paths.substr(at, end - at))) return true;
    }
    return false;
}

}  // namespace gpubpf
