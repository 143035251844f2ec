#include "driver/fatbin.h"

#include "driver/cubin.h"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace cudasim {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kFatbinMagic = 0xba55ed50;
constexpr uint32_t kElfMagic = 0x464c457f;
constexpr size_t kFatbinHeader = 16;
constexpr size_t kMaxPrelinked = 65536;               // fat binaries of one device link
constexpr uint16_t kPtx = 1, kCubin = 2, kLto = 8;    // kinds of images
constexpr uint16_t kHiddenPtx = 0x5801;               // PTX that tools do not find (cudasim/hide.py)
constexpr size_t kImageHeader = 0x40;                 // the fields that every image header has
constexpr size_t kMaxUncompressed = size_t{1} << 31;  // a larger size means a damaged header
constexpr size_t kMaxCubin = size_t{1} << 28;         // a larger cubin is not read for its registers
constexpr uint32_t kPrelinkedWrapper = 2;             // version of a wrapper with a list of fat binaries
constexpr char kDeviceRuntime[] = "cuda_device_runtime_cu";  // in names of libcudadevrt.a
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;

template <class T>
T read(const uint8_t *at) {
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

std::string text_at(const uint8_t *header, size_t header_size, uint32_t offset, uint32_t size) {
    if (offset < kImageHeader || size == 0 || offset > header_size || size > header_size - offset) return {};
    const char *begin = reinterpret_cast<const char *>(header) + offset;
    return std::string(begin, strnlen(begin, size));
}

}  // namespace

ImageKind image_kind(const void *image) {
    if (image == nullptr) return ImageKind::unknown;
    const auto *bytes = static_cast<const uint8_t *>(image);
    // A PTX text may be shorter than four bytes, so check one byte at a time.
    for (size_t i = 0; i < 4; i++)
        if (bytes[i] == 0) return ImageKind::unknown;
    switch (read<uint32_t>(bytes)) {
        case kWrapperMagic:
        case kFatbinMagic: return ImageKind::fatbin;
        case kElfMagic: return ImageKind::elf;
        default: break;
    }
    return bytes[0] == '.' || bytes[0] == '/' || bytes[0] == ' ' || bytes[0] == '\n' || bytes[0] == '\t' ||
                   bytes[0] == '\r'
               ? ImageKind::ptx
               : ImageKind::unknown;
}

std::vector<FatbinImage> fatbin_images(const void *image, std::string &problem) {
    std::vector<FatbinImage> images;
    const auto *at = static_cast<const uint8_t *>(image);
    if (read<uint32_t>(at) == kWrapperMagic) {
        at = reinterpret_cast<const uint8_t *>(read<uint64_t>(at + 8));
        if (!is_readable(at, kFatbinHeader) || read<uint32_t>(at) != kFatbinMagic) {
            problem = "the fat binary wrapper does not point to a fat binary";
            return images;
        }
    }
    size_t header_size = read<uint16_t>(at + 6);
    uint64_t left = read<uint64_t>(at + 8);
    if (header_size < kFatbinHeader) {
        problem = "the fat binary's header is too short";
        return images;
    }
    at += header_size;
    while (left >= kImageHeader) {
        if (!is_readable(at, kImageHeader)) {
            problem = "the fat binary is truncated";
            break;
        }
        size_t image_header = read<uint32_t>(at + 0x04);
        uint64_t payload = read<uint64_t>(at + 0x08);
        if (image_header < kImageHeader || image_header > left || payload > left - image_header ||
            !is_readable(at, image_header + payload)) {
            problem = "an image is larger than its fat binary";
            break;
        }
        uint16_t kind = read<uint16_t>(at);
        FatbinImage found;
        found.ptx = kind == kPtx || kind == kHiddenPtx;
        found.lto = kind == kLto;
        found.sm = read<uint32_t>(at + 0x1c);
        found.payload = at + image_header;
        uint64_t flags = read<uint64_t>(at + 0x28);
        uint32_t compressed = read<uint32_t>(at + 0x10);
        found.payload_size = payload;
        if ((flags & (kLz4 | kZstd)) != 0) {
            found.packing = (flags & kZstd) != 0 ? FatbinImage::Packing::zstd : FatbinImage::Packing::lz4;
            found.payload_size = std::min<uint64_t>(compressed, payload);
            found.uncompressed_size = read<uint64_t>(at + 0x38);
        }
        found.name = text_at(at, image_header, read<uint32_t>(at + 0x20), read<uint32_t>(at + 0x24));
        if (image_header >= 0x48)
            found.options = text_at(at, image_header, read<uint32_t>(at + 0x40), read<uint32_t>(at + 0x44));
        if (found.ptx || kind == kCubin || kind == kLto) images.push_back(std::move(found));
        at += image_header + payload;
        left -= image_header + payload;
    }
    return images;
}

bool unpack(const FatbinImage &image, std::string &out, std::string &problem) {
    if (image.packing == FatbinImage::Packing::none) {
        out.assign(reinterpret_cast<const char *>(image.payload), image.payload_size);
        return true;
    }
    // Allocate no more than the payload can fill. The codecs compress by factors of at most 255 and 32,768.
    const size_t factor = image.packing == FatbinImage::Packing::zstd ? 32768 : 255;
    if (image.uncompressed_size == 0 || image.uncompressed_size > kMaxUncompressed ||
        (image.uncompressed_size - 1) / factor > image.payload_size) {
        problem = "a compressed image has an invalid size";
        return false;
    }
    out.resize(image.uncompressed_size);
    size_t got = 0;
    if (image.packing == FatbinImage::Packing::zstd) {
        got = ZSTD_decompress(out.data(), out.size(), image.payload, image.payload_size);
        if (ZSTD_isError(got)) got = 0;
    } else {
        int count = LZ4_decompress_safe(reinterpret_cast<const char *>(image.payload), out.data(),
                                        static_cast<int>(image.payload_size), static_cast<int>(out.size()));
        got = count < 0 ? 0 : static_cast<size_t>(count);
    }
    if (got == 0) {
        problem = "a compressed image is damaged";
        return false;
    }
    out.resize(got);
    return true;
}

namespace {

// Finds the PTX of a cubin for this device.
int ptx_of_cubin(const void *image, size_t limit, unsigned cc, ChosenPtx &chosen, std::string &problem) {
    const size_t size = cubin_size(image, limit);
    if (size == 0) {
        problem = "the image is an ELF file, but not a complete cubin";
        return 209;
    }
    const unsigned sm = cubin_sm(image);
    if (sm / 10 != cc / 10 || sm > cc) {
        problem = "the image is machine code (SASS) for sm_" + std::to_string(sm) +
                  ", which this device (compute capability " + std::to_string(cc / 10) + "." +
                  std::to_string(cc % 10) + ") does not run";
        return 209;
    }
    std::vector<std::string> texts = cubin_ptx(image, size);
    if (texts.empty()) {
        problem =
            "the image contains only machine code (SASS), and the embedded device runs PTX; build with "
            "-arch=compute_NN, -gencode code=compute_NN or -lineinfo";
        return 209;
    }
    chosen.text = std::move(texts[0]);
    chosen.more_texts.assign(std::make_move_iterator(texts.begin() + 1),
                             std::make_move_iterator(texts.end()));
    chosen.sm = sm;
    chosen.registers = cubin_registers(image, size);
    chosen.compiled = false;
    return 0;
}

// Returns the cubin of a fat binary that this device would run: the newest that is not above it.
const FatbinImage *cubin_for(const std::vector<FatbinImage> &images, unsigned cc) {
    const FatbinImage *best = nullptr;
    for (const FatbinImage &image : images)
        if (!image.ptx && !image.lto && image.sm / 10 == cc / 10 && image.sm <= cc &&
            (best == nullptr || image.sm > best->sm))
            best = &image;
    return best;
}

// Returns the cubin whose architecture is nearest to the device's.
const FatbinImage *nearest_cubin(const std::vector<FatbinImage> &images, unsigned cc) {
    const FatbinImage *best = nullptr;
    auto distance = [cc](const FatbinImage &image) {
        return std::max(image.sm, cc) - std::min(image.sm, cc);
    };
    for (const FatbinImage &image : images)
        if (!image.ptx && !image.lto && (best == nullptr || distance(image) < distance(*best))) best = &image;
    return best;
}

// Reads the registers of the kernels from a cubin beside the PTX. From a damaged cubin, reads none.
void read_registers(const std::vector<FatbinImage> &images, unsigned cc, ChosenPtx &chosen) {
    const FatbinImage *cubin = cubin_for(images, cc);
    const bool runs = cubin != nullptr;
    if (!runs) cubin = nearest_cubin(images, cc);
    if (cubin == nullptr || std::max(cubin->payload_size, cubin->uncompressed_size) > kMaxCubin) return;
    std::string payload, problem;
    if (!unpack(*cubin, payload, problem)) return;
    const size_t size = cubin_size(payload.data(), payload.size());
    if (size == 0) return;
    chosen.registers = cubin_registers(payload.data(), size);
    chosen.compiled = !runs;
}

bool has_lto(const std::vector<FatbinImage> &images) {
    return std::any_of(images.begin(), images.end(), [](const FatbinImage &image) { return image.lto; });
}

// Returns the PTX of a fat binary that a device runs: the newest that is not above it, else, unless `strict`, the oldest. Sets
// `above` if some PTX is above the device.
const FatbinImage *ptx_for(const std::vector<FatbinImage> &images, unsigned cc, bool strict, bool &above) {
    const FatbinImage *best = nullptr;
    for (const FatbinImage &candidate : images) {
        if (!candidate.ptx) continue;
        if (candidate.sm > cc) {
            above = true;
            if (strict) continue;
        }
        if (best == nullptr) {
            best = &candidate;
        } else if (candidate.sm <= cc ? best->sm > cc || candidate.sm > best->sm
                                      : best->sm > cc && candidate.sm < best->sm) {
            best = &candidate;
        }
    }
    return best;
}

// Returns the fat binaries that a program's device code was linked from (nvcc -rdc=true): a wrapper of version 2 points to a
// list that ends with 0.
std::vector<const void *> prelinked_fatbins(const void *image) {
    std::vector<const void *> found;
    const auto *wrapper = static_cast<const uint8_t *>(image);
    if (read<uint32_t>(wrapper) != kWrapperMagic || read<uint32_t>(wrapper + 4) != kPrelinkedWrapper)
        return found;
    const auto *at = reinterpret_cast<const uint8_t *>(read<uint64_t>(wrapper + 16));
    for (; at != nullptr && found.size() < kMaxPrelinked && is_readable(at, sizeof(void *));
         at += sizeof(void *)) {
        const auto *fatbin = read<const uint8_t *>(at);
        if (fatbin == nullptr) break;
        if (is_readable(fatbin, kFatbinHeader) && read<uint32_t>(fatbin) == kFatbinMagic)
            found.push_back(fatbin);
    }
    return found;
}

// Collects the PTX that a program's device code was linked from; no text if there is none. Returns a CUresult.
int ptx_of_prelinked(const std::vector<const void *> &fatbins, unsigned cc, bool strict, ChosenPtx &chosen,
                     bool &above, bool &lto, std::string &problem) {
    for (const void *fatbin : fatbins) {
        const std::vector<FatbinImage> images = fatbin_images(fatbin, problem);
        const FatbinImage *best = ptx_for(images, cc, strict, above);
        if (best == nullptr) {
            lto |= has_lto(images);
            continue;  // only kernels that need this part are refused
        }
        std::string text;
        if (!unpack(*best, text, problem)) return 200;
        text.resize(strnlen(text.data(), text.size()));
        // NVIDIA's code for launches from kernels, which nvcc adds. It uses entry points of the driver that are not public.
        if (text.find(kDeviceRuntime) != std::string::npos) continue;
        const unsigned limit = max_registers(best->options), others = max_registers(chosen.options);
        if (limit != 0 && (others == 0 || limit < others)) chosen.options = best->options;
        chosen.sm = std::max(chosen.sm, best->sm);
        if (chosen.text.empty()) chosen.text = std::move(text);
        else chosen.more_texts.push_back(std::move(text));
    }
    return 0;
}

}  // namespace

int choose_ptx(const void *image, unsigned cc, bool strict, ChosenPtx &chosen, std::string &problem) {
    switch (image_kind(image)) {
        case ImageKind::ptx: chosen.text = static_cast<const char *>(image); return 0;
        case ImageKind::elf: return ptx_of_cubin(image, SIZE_MAX, cc, chosen, problem);
        case ImageKind::unknown: problem = "the image is neither PTX nor a fat binary"; return 200;
        case ImageKind::fatbin: break;
    }
    std::vector<FatbinImage> images = fatbin_images(image, problem);
    bool above = false, lto = has_lto(images), damaged = images.empty();
    const FatbinImage *best = ptx_for(images, cc, strict, above);
    if (best == nullptr) {
        const std::vector<const void *> prelinked = prelinked_fatbins(image);
        if (int status = ptx_of_prelinked(prelinked, cc, strict, chosen, above, lto, problem)) return status;
        if (!chosen.text.empty()) {
            read_registers(images, cc, chosen);
            return 0;
        }
        // Without machine code, a wrapper has nothing but the list.
        damaged = damaged && prelinked.empty();
    }
    if (best == nullptr) {
        if (const FatbinImage *cubin = cubin_for(images, cc)) {
            std::string payload;
            if (!unpack(*cubin, payload, problem)) return 200;
            return ptx_of_cubin(payload.data(), payload.size(), cc, chosen, problem);
        }
        if (above)
            problem = "the image's PTX is for a newer architecture than this device (compute capability " +
                      std::to_string(cc / 10) + "." + std::to_string(cc % 10) + "); set CUDASIM_CC";
        else if (lto)
            problem =
                "the image contains link-time optimised code (-dlto) without PTX, and the embedded device "
                "runs PTX; "
                "build without -dlto";
        else if (!images.empty())
            problem =
                "the image contains only machine code (SASS), and the embedded device runs PTX; build with "
                "-arch=sm_NN (not -code=sm_NN)";
        else if (problem.empty()) problem = "the fat binary contains no image";
        return damaged && !problem.empty() ? 200 : 209;
    }
    if (!unpack(*best, chosen.text, problem)) return 200;
    chosen.text.resize(strnlen(chosen.text.data(), chosen.text.size()));
    chosen.options = best->options;
    chosen.sm = best->sm;
    read_registers(images, cc, chosen);
    return 0;
}

unsigned max_registers(const std::string &options) {
    for (const char *name : {"-maxrregcount", "--maxrregcount"}) {
        size_t at = options.find(name);
        if (at == std::string::npos) continue;
        at = options.find_first_of("0123456789", at);
        if (at != std::string::npos) return static_cast<unsigned>(strtoul(options.c_str() + at, nullptr, 10));
    }
    return 0;
}

}  // namespace cudasim
