// An image that a program gives to the embedded device: PTX, a fatbin, its wrapper, or a cubin.
//
// The device does not know how long an image is. It must not leave the memory that is mapped, so none follows it.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "driver/cubin.h"
#include "driver/fatbin.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    constexpr size_t kRoom = 1 << 20,
                     kGuard = 4096;  // behind it is memory that is mapped, but cannot be read
    // Far from everything else.
    static auto *const memory = static_cast<uint8_t *>(
        mmap(reinterpret_cast<void *>(uintptr_t{0x200000000000}), kRoom + kGuard, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0));
    setenv("TRITON_CACHE_DIR", "/nonexistent", 1);
    if (memory == MAP_FAILED || mprotect(memory + kRoom, kGuard, PROT_NONE) != 0) abort();
    if (size + 16 > kRoom) return 0;
    // A program gives at least a terminated text, or a whole header.
    uint8_t *const image = memory + kRoom - size - 16;
    memcpy(image, data, size);
    memset(image + size, 0, 16);
    if (size >= 4 && memcmp(image, "\xB1\x43\x62\x46", 4) == 0) {  // a wrapper points to its fatbin
        if (size < 24) return 0;
        const uint8_t *const fatbin = image + 24;
        memcpy(image + 8, &fatbin, sizeof fatbin);
        // Its list is behind it. What is elsewhere may be the sanitizer's, so the list and what is in it lead into this memory.
        const auto start = reinterpret_cast<uintptr_t>(memory);
        uint64_t list, entry;
        memcpy(&list, image + 16, sizeof list);
        list = std::max<uint64_t>(list % (kRoom + kGuard), fatbin - memory);
        for (uint64_t at = list; at + sizeof entry <= kRoom; at += sizeof entry) {
            memcpy(&entry, memory + at, sizeof entry);
            if (entry != 0) entry = start + entry % (kRoom + kGuard);
            memcpy(memory + at, &entry, sizeof entry);
        }
        list += start;
        memcpy(image + 16, &list, sizeof list);
    }
    for (bool strict : {false, true}) {
        cudasim::ChosenPtx chosen;
        std::string problem;
        const int status = cudasim::choose_ptx(image, 90, strict, chosen, problem);
        if (status != 0 && problem.empty()) abort();
        cudasim::max_registers(chosen.options);
    }
    return 0;
}
