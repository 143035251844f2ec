// Images that applications pass to the driver: PTX text, fat binaries, their wrappers, cubins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cudasim {

struct FatbinImage {
    bool ptx = false;     // else a cubin (SASS), or
    bool lto = false;     // intermediate code for link-time optimisation
    unsigned sm = 0;      // 75 for compute_75
    std::string options;  // ptxas options that nvcc recorded
    std::string name;     // source file, if recorded
    const uint8_t *payload = nullptr;
    size_t payload_size = 0;       // bytes in the file
    size_t uncompressed_size = 0;  // 0 when not compressed
    enum class Packing { none, lz4, zstd } packing = Packing::none;
};

enum class ImageKind { unknown, ptx, fatbin, elf };

// Returns the kind of an image, from its first bytes. A wrapper ({0x466243B1, …, data}) counts as a fat binary.
ImageKind image_kind(const void *image);

// Returns the images of a fat binary or of its wrapper. The sizes in its headers are checked against each other. If one
// does not fit, the list ends there, and `problem` says why.
std::vector<FatbinImage> fatbin_images(const void *image, std::string &problem);

// Decompresses an image. Returns false and sets `problem` if the payload is damaged.
bool unpack(const FatbinImage &image, std::string &out, std::string &problem);

struct ChosenPtx {
    std::string text;
    std::vector<std::string> more_texts;  // the other texts, if the module was linked from several
    std::string options;                  // of ptxas
    unsigned sm = 0;
    // Registers per thread of the module's kernels by name, from a cubin beside the PTX: the one that a driver would run on
    // this device, or else the one for the nearest architecture. Empty without a cubin.
    std::map<std::string, unsigned> registers;
    bool compiled = true;  // whether a driver would compile the PTX; false: it would run that cubin
};

// Chooses the PTX that a device of compute capability `cc` (90 for 9.0) runs. That is, in this order:
// - the PTX for the highest architecture that is not above the device;
// - unless `strict`, the PTX for the lowest architecture above it;
// - the PTX that the program's device code was linked from (nvcc -rdc=true);
// - the PTX of a cubin for the device (cubin.h).
// Returns a CUresult: 0, 209 (no image for this device) or 200 (damaged), and sets `problem`.
int choose_ptx(const void *image, unsigned cc, bool strict, ChosenPtx &chosen, std::string &problem);

// Returns the value of -maxrregcount in ptxas options; 0 if they do not set it.
unsigned max_registers(const std::string &options);

}  // namespace cudasim
