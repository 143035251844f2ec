// A library for the agent alone. The loader uses a loaded library for every later one with the same DT_SONAME.
// So a program that loads another version of the library would get the agent's.
#pragma once

#include <string>
#include <vector>

namespace gpubpf {

// Changes DT_SONAME in the bytes of a library. Returns false if the file has an unexpected format.
bool rename_library(std::vector<char> &bytes) noexcept;

// Loads a copy of the library at `path` under another DT_SONAME. Returns a handle of dlopen, or null.
void *load_private_copy(const std::string &path);

}  // namespace gpubpf
