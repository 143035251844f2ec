#include "copies/link.h"

#include <algorithm>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <map>
#include <mutex>
#include <string>
#include <unistd.h>

#include "attachment.h"
#include "compilers.h"
#include "copies/image.h"

namespace gpubpf {

namespace {

struct Links {
    std::mutex lock;  // guards the next member
    std::map<CUlinkState, Inputs> open;
};

AttachmentState<Links> all;

// The embedded device watches compilers itself, because it runs the PTX of cubins, and passes their output on to the agent. In its tests,
// the agent may watch instead, and passes the output on to the device.
using Tell = void (*)(const void *cubin, size_t bytes, const char *ptx, size_t ptx_bytes, unsigned count,
                      unsigned texts, unsigned lto);
using Watch = int (*)(Tell);
Tell tell_device = nullptr;

// Returns the size of a cubin by its own headers, as image_at() does: programs pass it on with more zeros at its end, or fewer.
size_t own_size(const void *cubin, size_t bytes) {
    uint64_t size = bytes;
    if (bytes >= sizeof(Elf64_Ehdr) && memcmp(cubin, ELFMAG, SELFMAG) == 0) image_at(cubin, size);
    return std::min<uint64_t>(size, bytes);
}

void remember(const void *cubin, size_t bytes, const Inputs &of) {
    Visit visit;  // the state exists at least as long
    if (attachment.load()) quietly([&] { remember_inputs(cubin, own_size(cubin, bytes), of); });
}

void device_compiled(const void *cubin, size_t bytes, const char *ptx, size_t ptx_bytes, unsigned count,
                     unsigned texts, unsigned lto) {
    quietly([&] {
        Inputs of;
        of.count = count;
        of.texts = texts;
        of.lto = lto;
        of.text.assign(ptx, ptx_bytes);
        remember(cubin, bytes, of);
    });
}

const CompilerUser kUser{
    [] { return attachment.load() != 0; },
    [](const void *cubin, size_t bytes, const Inputs &of) {
        if (tell_device)
            tell_device(cubin, bytes, of.text.data(), of.text.size(), of.count, of.texts, of.lto);
        remember(cubin, bytes, of);
    },
    [](const void *cubin, size_t bytes, Inputs &of) {
        Visit visit;
        bool known = false;
        if (attachment.load()) quietly([&] { known = inputs_of(cubin, own_size(cubin, bytes), of); });
        return known;
    },
};

void give(CUlinkState link, const Inputs &input) {
    std::lock_guard<std::mutex> hold(all->lock);
    auto it = all->open.find(link);
    if (it != all->open.end()) it->second.add(input);  // else linking began before the attachment
}

}  // namespace

const Lifetime link_lifetime{[] { all.begin(); }, nullptr, [] { all.end(); }, compilers_in_forked_child};

bool watches_compilers(void *driver) {
    const auto watch = reinterpret_cast<Watch>(dlsym(driver, "cudasim_watch_compilers"));
    if (watch && watch(device_compiled)) return false;
    tell_device = reinterpret_cast<Tell>(dlsym(driver, "cudasim_compiled"));
    find_compilers(kUser, kLacksCompilers);
    return true;
}

void link_began(CUlinkState link) {
    std::lock_guard<std::mutex> hold(all->lock);
    all->open[link] = Inputs();
}

void link_given(CUlinkState link, CUjitInputType type, const void *data, size_t bytes) {
    Inputs input;
    if (type == CU_JIT_INPUT_PTX) input.add_ptx(static_cast<const char *>(data), bytes);
    else if (type != CU_JIT_INPUT_CUBIN || !inputs_of(data, own_size(data, bytes), input)) input.add_other();
    give(link, input);
}

void link_given_file(CUlinkState link, CUjitInputType type, const char *path) {
    Inputs input;
    if (type == CU_JIT_INPUT_PTX || type == CU_JIT_INPUT_CUBIN) {
        std::string content;
        const ImageFile image = image_of_file(path);
        if (image.file >= 0) {
            content.resize(image.size);
            if (!read_all(image.file, &content[0], image.size, 0)) content.clear();
            close(image.file);
        }
        link_given(link, type, content.data(), content.size());
    } else {
        input.add_other();
        give(link, input);
    }
}

void link_made(CUlinkState link, const void *image) {
    uint64_t bytes = 0;
    const void *begin = image_at(image, bytes);
    if (!begin || !bytes) return;
    Inputs of;
    {
        std::lock_guard<std::mutex> hold(all->lock);
        auto it = all->open.find(link);
        if (it == all->open.end()) return;
        of = it->second;
    }
    remember_inputs(begin, bytes, of);
}

void link_ended(CUlinkState link) {
    std::lock_guard<std::mutex> hold(all->lock);
    all->open.erase(link);
}

}  // namespace gpubpf
