// Facts about a kernel, by its address: ROCr's loader has put the whole code object into device memory.
#pragma once

#include <cstdint>
#include <string>

namespace hipsim {

// Returns the demangled name of the kernel with this descriptor. Without a symbol, as in ROCr's own kernels, returns its
// address.
std::string kernel_name(uint64_t kernel_object);

// Returns the address of the kernel's first instruction, or 0 if there is no descriptor.
uint64_t kernel_entry(uint64_t kernel_object);

}  // namespace hipsim
