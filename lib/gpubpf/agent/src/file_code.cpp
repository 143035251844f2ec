#include "file_code.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

namespace gpubpf {

FileCode::~FileCode() {
    for (const Mapping &mapping : mappings_)
        if (mapping.file >= 0) close(mapping.file);
}

FileCode::Mapping *FileCode::mapping_of(uintptr_t at) {
    for (Mapping &mapping : mappings_)
        if (mapping.start <= at && at < mapping.end) return &mapping;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return nullptr;
    Mapping found{0, 0, 0, -1};
    unsigned long file = 0;
    for (char line[4400]; fgets(line, sizeof line, maps);) {
        unsigned major, minor;
        unsigned long inode;
        int name = 0;
        Mapping mapping{0, 0, 0, -1};
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*4s %" SCNx64 " %x:%x %lu %n", &mapping.start,
                   &mapping.end, &mapping.offset, &major, &minor, &inode, &name) != 6)
            continue;
        if (found.end) {  // code that was changed before can have several mappings
            if (mapping.start != found.end || inode != file ||
                mapping.offset != found.offset + (mapping.start - found.start))
                break;
            found.end = mapping.end;
            continue;
        }
        if (at < mapping.start || at >= mapping.end) continue;
        found = mapping;
        file = inode;
        line[strcspn(line, "\n")] = 0;
        struct stat st;
        if (name && line[name] == '/') found.file = open(line + name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (found.file >= 0 && (fstat(found.file, &st) != 0 || st.st_ino != inode || !S_ISREG(st.st_mode))) {
            close(found.file);
            found.file = -1;
        }
        if (!inode) break;
    }
    fclose(maps);
    if (!found.end) return nullptr;
    mappings_.push_back(found);
    return &mappings_.back();
}

std::vector<uint8_t> FileCode::read(const uint8_t *at, size_t size) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    const Mapping *mapping = mapping_of(address);
    if (!mapping) return {};
    std::vector<uint8_t> code(std::min(size, static_cast<size_t>(mapping->end - address)));
    ssize_t n = -1;
    if (mapping->file >= 0)
        n = pread(mapping->file, code.data(), code.size(),
                  static_cast<off_t>(mapping->offset + (address - mapping->start)));
    if (n > 0) code.resize(static_cast<size_t>(n));
    else memcpy(code.data(), at, code.size());
    return code;
}

}  // namespace gpubpf
