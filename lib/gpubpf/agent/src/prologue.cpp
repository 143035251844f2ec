#include "prologue.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "instruction.h"

namespace gpubpf {

namespace {

// Sets of registers, by number. Scratch registers hold no argument.
constexpr unsigned kScratch = 1 << 0 | 1 << 10 | 1 << 11;  // rax, r10, r11
// A function whose first instruction overwrites an argument register does not use that argument.
constexpr unsigned kCallerSaved =
    kScratch | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9;  // and rcx, rdx, rsi, rdi, r8, r9

bool in(unsigned registers, unsigned number) { return registers >> number & 1; }

}  // namespace

Prologue prologue_of(const uint8_t *code) {
    Prologue found;
    const Instruction first = decode(code);
    if (!first.length || first.kind != Instruction::kPlain) return found;
    const uint8_t op = first.opcode, *p = first.operands, modrm = *p, mod = modrm >> 6;
    const unsigned b = first.rex & 1 ? 8 : 0;  // extends ModRM's last field, or the register in the opcode
    if (first.map == Instruction::kTwoByte) {
        if (op == 0x1F) found.length = first.length;  // nop
        return found;
    }
    if (first.map != Instruction::kOneByte) return found;
    if (op == 0x90 && !b) {  // nop
        found.length = first.length;
        return found;
    }
    if (first.has_prefix) return found;

    const unsigned reg = (modrm >> 3 & 7) | (first.rex & 4 ? 8 : 0), rm = (modrm & 7) | b;
    const bool wide = first.rex & 8;
    bool ok = false;
    if (op >= 0x50 && op <= 0x57 && ((op & 7) | b) != 4) {  // push, but not of rsp
        if (b) found.undo[found.undo_size++] = 0x41;
        found.undo[found.undo_size++] = static_cast<uint8_t>(op + 8);  // pop
        ok = true;
    } else if (wide && (op == 0x83 || op == 0x81) && modrm == 0xEC && !b) {  // sub N, %rsp
        int32_t n;
        if (op == 0x83) n = static_cast<int8_t>(p[1]);
        else memcpy(&n, p + 1, 4);
        static constexpr uint8_t kLea[4] = {0x48, 0x8D, 0xA4, 0x24};  // lea N(%rsp), %rsp
        memcpy(found.undo, kLea, 4);
        memcpy(found.undo + 4, &n, 4);
        found.undo_size = 8;
        ok = true;
    } else if (op >= 0xB8 && op <= 0xBF) {  // mov N, register
        ok = in(kCallerSaved, (op & 7) | b);
    } else if (op == 0x31 || op == 0x33) {  // xor of a register with itself
        ok = mod == 3 && reg == rm && in(kCallerSaved, reg);
    } else if (op == 0x8B || op == 0x8D) {  // mov or lea to a register
        ok = in(kScratch, reg) || (op == 0x8B && mod == 3 && in(kCallerSaved, reg));
    } else if (op == 0x89) {  // mov from a register to another one, or to memory below the stack pointer
        const bool to_stack = mod == 1 && (modrm & 7) == 4 && p[1] == 0x24 && !(first.rex & 3);
        ok = mod == 3 ? in(kCallerSaved, rm) : to_stack && static_cast<int8_t>(p[2]) <= -8;
    } else if (op == 0x84 || op == 0x85 || (op >= 0x38 && op <= 0x3D)) {  // test, cmp
        ok = true;
    } else if ((op == 0x80 || op == 0x81 || op == 0x83) && (modrm >> 3 & 7) == 7) {  // cmp with a number
        ok = true;
    } else if ((op == 0xF6 || op == 0xF7) && (modrm >> 3 & 7) == 0) {  // test with a number
        ok = true;
    }
    if (ok) found.length = first.length;
    return found;
}

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
