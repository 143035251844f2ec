#include "prologue.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "patch.h"

namespace gpubpf {

namespace {

// Registers that hold no argument, or whose old value nobody has read when the function's first instruction writes them.
constexpr unsigned kScratch = 1 << 0 | 1 << 10 | 1 << 11;  // rax, r10, r11
constexpr unsigned kCallerSaved =
    kScratch | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9;  // and rcx, rdx, rsi, rdi, r8, r9

bool in(unsigned registers, unsigned number) { return registers >> number & 1; }

}  // namespace

Prologue prologue_of(const uint8_t *code) {
    Prologue found;
    const Decoded d = decode(code);
    if (!d.length || d.kind != Decoded::kPlain) return found;
    const uint8_t *p = code;
    bool wide = false, nop_prefix = false;
    unsigned r = 0, b = 0;  // REX
    while (*p == 0x66) ++p, nop_prefix = true;
    if ((*p & 0xF0) == 0x40) {
        wide = *p & 8;
        r = *p & 4 ? 8 : 0;
        b = *p & 1 ? 8 : 0;
        ++p;
    }
    const uint8_t op = *p, modrm = p[1], mod = modrm >> 6;
    const unsigned reg = (modrm >> 3 & 7) | r, rm = (modrm & 7) | b;
    bool ok = op == 0x90 || (op == 0x0F && modrm == 0x1F);  // nop
    if (!ok && nop_prefix) return found;
    if (op >= 0x50 && op <= 0x57 && ((op & 7) | b) != 4) {  // push
        if (b) found.undo[found.undo_size++] = 0x41;
        found.undo[found.undo_size++] = static_cast<uint8_t>(op + 8);
        ok = true;
    } else if (wide && (op == 0x83 || op == 0x81) && modrm == 0xEC && !b) {  // sub N, %rsp
        int32_t n;
        if (op == 0x83) n = static_cast<int8_t>(p[2]);
        else memcpy(&n, p + 2, 4);
        static constexpr uint8_t kLea[4] = {0x48, 0x8D, 0xA4, 0x24};  // lea N(%rsp), %rsp
        memcpy(found.undo, kLea, 4);
        memcpy(found.undo + 4, &n, 4);
        found.undo_size = 8;
        ok = true;
    } else if (op >= 0xB8 && op <= 0xBF) {  // mov N, register
        ok = in(kCallerSaved, (op & 7) | b);
    } else if (op == 0x31 || op == 0x33) {  // xor of a register with itself
        ok = mod == 3 && reg == rm && in(kCallerSaved, reg);
    } else if (op == 0x8B || op == 0x8D) {  // mov, lea to a register
        ok = in(kScratch, reg) || (op == 0x8B && mod == 3 && in(kCallerSaved, reg));
    } else if (op == 0x89) {  // mov from a register: to another, or to what lies below the stack
        ok = mod == 3 ? in(kCallerSaved, rm)
                      : mod == 1 && (modrm & 7) == 4 && p[2] == 0x24 && static_cast<int8_t>(p[3]) <= -8;
    } else if (op == 0x84 || op == 0x85 || (op >= 0x38 && op <= 0x3D)) {  // test, cmp
        ok = true;
    } else if ((op == 0x80 || op == 0x81 || op == 0x83) && (modrm >> 3 & 7) == 7) {  // cmp with a number
        ok = true;
    } else if ((op == 0xF6 || op == 0xF7) && (modrm >> 3 & 7) == 0) {  // test with a number
        ok = true;
    }
    if (ok) found.length = d.length;
    return found;
}

FileCode::~FileCode() {
    for (const Part &part : parts_)
        if (part.file >= 0) close(part.file);
}

FileCode::Part *FileCode::part_of(uintptr_t at) {
    for (Part &part : parts_)
        if (part.start <= at && at < part.end) return &part;
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return nullptr;
    Part found{0, 0, 0, -1};
    unsigned long file = 0;
    for (char line[4400]; fgets(line, sizeof line, maps);) {
        unsigned major, minor;
        unsigned long inode;
        int name = 0;
        Part part{0, 0, 0, -1};
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*4s %" SCNx64 " %x:%x %lu %n", &part.start, &part.end,
                   &part.offset, &major, &minor, &inode, &name) != 6)
            continue;
        if (found.end) {  // code that was changed once may be mapped in several pieces
            if (part.start != found.end || inode != file ||
                part.offset != found.offset + (part.start - found.start))
                break;
            found.end = part.end;
            continue;
        }
        if (at < part.start || at >= part.end) continue;
        found = part;
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
    parts_.push_back(found);
    return &parts_.back();
}

std::vector<uint8_t> FileCode::read(const uint8_t *at, size_t size) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    const Part *part = part_of(address);
    if (!part) return {};
    std::vector<uint8_t> code(std::min(size, static_cast<size_t>(part->end - address)));
    ssize_t n = -1;
    if (part->file >= 0)
        n = pread(part->file, code.data(), code.size(),
                  static_cast<off_t>(part->offset + (address - part->start)));
    if (n > 0) code.resize(static_cast<size_t>(n));
    else memcpy(code.data(), at, code.size());
    return code;
}

}  // namespace gpubpf
