// The beginning of a function that the agent hooks: decode its instructions, and move them elsewhere.
#include <cstdlib>

#include "machine/x86_64/instruction.h"
#include "patch.cpp"

using namespace gpubpf;
using namespace gpubpf::machine;

static void check(bool good) {
    if (!good) abort();
}

// An instruction is its own bytes, whatever follows them. 15 readable bytes are enough.
static void check_decoder(const uint8_t *data, size_t size) {
    std::vector<uint8_t> code(kMostRead, 0x90);
    std::copy_n(data, std::min(size, code.size()), code.begin());
    const Instruction first = decode(code.data());
    check(first.length <= code.size());
    if (!first.length) return;
    check(first.displacement_at + 4 * (first.displacement_at != 0) <= first.length);
    check(first.distance_at + first.distance_size <= first.length);
    for (uint8_t other : {0x00, 0xCC, 0xFF}) {
        std::fill(code.begin() + static_cast<ptrdiff_t>(first.length), code.end(), other);
        const Instruction again = decode(code.data());
        check(again.length == first.length && again.kind == first.kind);
    }
    const Prologue prologue = prologue_of(code.data());
    check(prologue.undo_size <= sizeof prologue.undo &&
          (!prologue.length || prologue.length == first.length));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    check_decoder(data, size);
    // As in prepare(): a function whose code is shorter than this is not hooked.
    std::vector<uint8_t> code(std::max(size, kEntrySize + kJumpSize), 0xCC);
    std::copy_n(data, size, code.begin());
    code.resize(std::min(code.size(), kReadSize));
    static uint8_t trampoline[kTrampolineSize], *const end = trampoline + sizeof trampoline;
    for (size_t behind : {size_t(0), prologue_of(code.data()).length}) {
        size_t moved = 0;
        const size_t span = behind + kJumpSize;
        if (!move(code.data(), code, span, trampoline + kEntrySize, end, moved))
            check(moved <= code.size() && (moved >= span || decode(code.data()).length));
        jumps_into(code, span);
    }
    return 0;
}
