#include "copies/image.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "wire.h"

namespace gpubpf {

namespace {

AttachmentState<Compiled> compiled;

constexpr uint32_t kWrapperMagic = 0x466243B1, kFatbinMagic = 0xBA55ED50;

constexpr uint32_t kLinkedWrapper = 2;  // version of a wrapper whose fatbin was linked from others
constexpr size_t kMostParts = 65536;    // fatbins of one device link

struct Wrapper {
    uint32_t magic, version;
    const void *data;
    const void *const *parts;  // version 2: the fatbins that it was linked from, and 0
};

struct FatbinHeader {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size;
};

uint64_t elf_size(const Elf64_Ehdr &e, const void *image) {
    const auto *base = static_cast<const char *>(image);
    uint64_t end = sizeof e;
    end = std::max<uint64_t>(end, e.e_shoff + uint64_t(e.e_shnum) * e.e_shentsize);
    end = std::max<uint64_t>(end, e.e_phoff + uint64_t(e.e_phnum) * e.e_phentsize);
    if (e.e_shentsize == sizeof(Elf64_Shdr) && e.e_shoff < kImageLimit)
        for (unsigned i = 0; i < e.e_shnum; ++i) {
            Elf64_Shdr s;
            memcpy(&s, base + e.e_shoff + i * sizeof s, sizeof s);
            if (s.sh_type != SHT_NOBITS) end = std::max<uint64_t>(end, s.sh_offset + s.sh_size);
        }
    return end;
}

// An image in a fatbin, as far as it is read here.
struct FatbinEntry {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t payload;
    uint32_t reserved[6];
    uint64_t flags;
};
static_assert(offsetof(FatbinEntry, flags) == 0x28);

constexpr uint16_t kElfEntry = 2;
constexpr uint64_t kPacked = 0x2000 | 0x8000;  // compressed with LZ4 or zstd

// Returns the cubin in a fatbin that has nothing else, and its size, else the image itself. A compressed cubin cannot be looked up.
const void *only_cubin(const void *image, uint64_t &size) {
    FatbinHeader h;
    FatbinEntry e;
    if (size < sizeof h + sizeof e) return image;
    memcpy(&h, image, sizeof h);
    const char *entry = static_cast<const char *>(image) + h.header_size;
    if (h.magic != kFatbinMagic || h.header_size > size - sizeof e) return image;
    memcpy(&e, entry, sizeof e);
    const uint64_t left = size - h.header_size;
    if (e.kind != kElfEntry || e.flags & kPacked || e.header_size > left ||
        e.payload != left - e.header_size || e.payload < sizeof(Elf64_Ehdr))
        return image;
    uint64_t cubin = 0;
    const void *begin = image_at(entry + e.header_size, cubin);
    if (cubin > e.payload) return image;
    size = cubin;
    return begin;
}

// Writes what nvcc -rdc=true registers as a file: a wrapper, the linked fatbin, and the fatbins it was linked from, which contain
// the PTX. Returns -1 for any other image.
int linked_image_file(const void *image, uint64_t &file_size) {
    Wrapper wrapper;
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    if (magic != kWrapperMagic) return -1;
    memcpy(&wrapper, image, sizeof wrapper);
    if (wrapper.version != kLinkedWrapper || !wrapper.data || !wrapper.parts || !wrapper.parts[0]) return -1;
    std::vector<const void *> fatbins{wrapper.data};
    for (size_t i = 0; wrapper.parts[i] && i < kMostParts; ++i) fatbins.push_back(wrapper.parts[i]);
    const int fd = memory_file("gpubpf-image", 0);
    const Wrapper head = {kWrapperMagic, kLinkedWrapper, nullptr, nullptr};
    bool good = fd >= 0 && write_all(fd, &head, sizeof head, 0);
    uint64_t size = sizeof head;
    for (const void *fatbin : fatbins) {
        FatbinHeader h;
        memcpy(&h, fatbin, sizeof h);
        const uint64_t bytes = h.header_size + h.size;
        good = good && h.magic == kFatbinMagic && bytes <= kImageLimit - size &&
               write_all(fd, fatbin, bytes, size);
        if (!good) break;
        size += bytes;
    }
    if (!good) {
        if (fd >= 0) close(fd);
        return -1;
    }
    file_size = size;
    return fd;
}

int image_file(const void *data, uint64_t size) {
    if (!size || size > kImageLimit) return -1;
    int fd = memory_file("gpubpf-image", 0);
    if (fd >= 0 && !write_all(fd, data, size, 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

}  // namespace

const Lifetime image_lifetime = lifetime_of_attachment_state<compiled>();

void remember_inputs(const void *cubin, uint64_t bytes, Inputs of) {
    compiled->remember(cubin, bytes, std::move(of));
}

bool inputs_of(const void *cubin, uint64_t bytes, Inputs &of) { return compiled->find(cubin, bytes, of); }

// The driver has just accepted the image, so its headers are valid.
const void *image_at(const void *image, uint64_t &size) {
    if (!image) return nullptr;
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    if (magic == kWrapperMagic) {
        Wrapper w;
        memcpy(&w, image, sizeof w);
        if (!w.data) return nullptr;
        image = w.data;
        memcpy(&magic, image, sizeof magic);
    }
    if (magic == kFatbinMagic) {
        FatbinHeader h;
        memcpy(&h, image, sizeof h);
        size = h.header_size + h.size;
    } else if (memcmp(image, ELFMAG, SELFMAG) == 0) {
        Elf64_Ehdr e;
        memcpy(&e, image, sizeof e);
        size = elf_size(e, image);
    } else {
        size = strnlen(static_cast<const char *>(image), kImageLimit);
    }
    return image;
}

// Writes what is known about the inputs of a cubin behind its image.
static void add_inputs(ImageFile &image, const void *begin) {
    Inputs of;
    if (image.file < 0 || !inputs_of(begin, image.size, of)) return;
    image.linked = of.count;
    image.lto = of.lto;
    const uint64_t bytes = of.text.size();
    if (bytes <= kImageLimit - image.size && write_all(image.file, of.text.data(), bytes, image.size))
        image.ptx = bytes;
}

ImageFile image_of(const void *image) {
    ImageFile made;
    const void *begin = image_at(image, made.size);
    if (!begin) return made;
    if ((made.file = linked_image_file(image, made.size)) >= 0) return made;
    begin = only_cubin(begin, made.size);
    made.file = image_file(begin, made.size);
    add_inputs(made, begin);
    return made;
}

// Copies the file: the tool accepts only files in memory, because reading those never waits.
ImageFile image_of_file(const char *path) {
    ImageFile made;
    const int file = move_high(open(path, O_RDONLY | O_CLOEXEC));
    struct stat st{};
    if (file >= 0 && fstat(file, &st) != 0) st.st_size = 0;
    made.size = static_cast<uint64_t>(std::max<off_t>(st.st_size, 0));
    const int fd = made.size && made.size <= kImageLimit ? memory_file("gpubpf-image", made.size) : -1;
    void *bytes = fd >= 0 ? mmap(nullptr, made.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (bytes != MAP_FAILED && read_all(file, bytes, made.size, 0)) {
        made.file = fd;
        add_inputs(made, bytes);
    } else if (fd >= 0) {
        close(fd);
    }
    if (bytes != MAP_FAILED) munmap(bytes, made.size);
    if (file >= 0) close(file);
    return made;
}

}  // namespace gpubpf
