// The GPUs for which this process's program has code.
#pragma once

#include <set>
#include <string>

namespace hipsim {

// The GPUs in the fat binaries of the program's file, such as "gfx90a:xnack+". Empty if there are none, or if the file cannot be read:
// the code may be in a library.
std::set<std::string> gpus_of_program();

}  // namespace hipsim
