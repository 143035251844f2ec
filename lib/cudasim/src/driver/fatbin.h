// Images as applications hand them to the driver: PTX text, fat binaries, their wrappers, cubins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cudasim {

struct FatbinImage {
    bool ptx = false;     // else an ELF (SASS)
    unsigned sm = 0;      // 75 for compute_75
    std::string options;  // of ptxas, as nvcc recorded them
    std::string name;     // source file, if recorded
    const uint8_t *payload = nullptr;
    size_t payload_size = 0;       // bytes in the file
    size_t uncompressed_size = 0;  // 0 when not compressed
    enum class Packing { none, lz4, zstd } packing = Packing::none;
};

enum class ImageKind { unknown, ptx, fatbin, elf };

// What `image` is, judged by its first bytes. A wrapper ({0x466243B1, …, data}) counts as a fat binary.
ImageKind image_kind(const void *image);

// The images of a fat binary or of its wrapper. Sizes come from the binary's own headers and are checked against
// each other; what does not fit ends the list, and `problem` says why.
std::vector<FatbinImage> fatbin_images(const void *image, std::string &problem);

// Unpacked text or bytes; false and `problem` when the payload is damaged.
bool unpack(const FatbinImage &image, std::string &out, std::string &problem);

struct ChosenPtx {
    std::string text;               // as PTX, without the padding
    std::vector<std::string> more;  // of a cubin that was linked from several texts: the others
    std::string options;            // of ptxas
    unsigned sm = 0;
};

// The PTX that a device of capability `cc` (90 for 9.0) runs: that for the highest architecture not above the device,
// else, unless `strict`, the lowest above, else what the machine code for the device was made of (cubin.h). Returns a CUresult (0, 209 no image for this device, 200 damaged).
int choose_ptx(const void *image, unsigned cc, bool strict, ChosenPtx &chosen, std::string &problem);

// The number behind -maxrregcount in ptxas options; 0 if there is none.
unsigned max_registers(const std::string &options);

}  // namespace cudasim
