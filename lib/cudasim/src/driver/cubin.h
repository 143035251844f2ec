// Cubins: ELF files of machine code (e_machine 190). This device runs PTX: what it takes of a cubin is the PTX that it was made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cudasim {

// Bytes from the ELF header at `image` to the end of what its headers name; 0 where it is damaged, not all of it is mapped, or it is
// longer than `most`.
size_t cubin_size(const void *image, size_t most = SIZE_MAX);

// Its architecture: 90 for sm_90.
unsigned cubin_sm(const void *image);

// The PTX texts that a cubin of `size` bytes was made of, from one of these, in order; none: nothing tells.
// - what cuLinkComplete of this driver put into it;
// - the texts that ptxas keeps with -lineinfo or -G, in sections .nv_debug_ptx_txt and .nv_debug_ptx_txt.N: several where several
//   were linked;
// - the file beside it in Triton's cache ($TRITON_CACHE_DIR, $TRITON_HOME/.triton/cache, ~/.triton/cache), where that holds the
//   very same cubin.
std::vector<std::string> cubin_ptx(const void *image, size_t size);

// What cuLinkComplete gives: a cubin for `sm` with no machine code in it, but the kernels' names and the PTX that they are.
std::string make_cubin(const std::string &ptx, const std::vector<std::string> &kernels, unsigned sm);

}  // namespace cudasim
