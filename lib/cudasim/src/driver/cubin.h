// Cubins: ELF files with machine code (e_machine 190). This device runs PTX, so it needs the PTX that a cubin was compiled from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cudasim {

// Returns whether all `size` bytes at `address` can be read. Sizes and addresses in damaged images may lead anywhere.
bool is_readable(const uint8_t *address, uint64_t size);

// Returns the size of a cubin in bytes, from its headers. Returns 0 if it is damaged, not completely mapped, or larger than
// `limit`.
size_t cubin_size(const void *image, size_t limit = SIZE_MAX);

// Returns the architecture of a cubin: 90 for sm_90.
unsigned cubin_sm(const void *image);

// Returns the PTX texts that a cubin of `size` bytes was compiled from, or nothing if they are not known. Several texts mean
// that the cubin was linked from several. The first of these sources is used:
// - what cuLinkComplete of this driver put into the cubin;
// - the texts that ptxas stores with -lineinfo or -G, in sections .nv_debug_ptx_txt and .nv_debug_ptx_txt.N;
// - the PTX file beside an identical cubin in Triton's cache ($TRITON_CACHE_DIR, $TRITON_HOME/.triton/cache,
//   ~/.triton/cache).
std::vector<std::string> cubin_ptx(const void *image, size_t size);

// Returns the registers per thread of the functions in a cubin of `size` bytes (EIATTR_REGCOUNT), by name.
std::map<std::string, unsigned> cubin_registers(const void *image, size_t size);

// Makes the result of cuLinkComplete: a cubin for `sm` with the kernels' names and their PTX, but without machine code.
std::string make_cubin(const std::string &ptx, const std::vector<std::string> &kernels, unsigned sm);

}  // namespace cudasim
