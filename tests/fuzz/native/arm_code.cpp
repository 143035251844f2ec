// The same as program_code, for aarch64: move the first instructions of a function elsewhere, and undo the first one.
#include <cstdlib>

#include "patch.cpp"

using namespace gpubpf;

static void check(bool good) {
    if (!good) abort();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    // As in prepare(): a function whose code is shorter than this is not hooked.
    std::vector<uint8_t> code(std::max(size, kEntrySize + kJumpSize), 0);
    std::copy_n(data, size, code.begin());
    code.resize(std::min(code.size(), kReadSize));
    const Step first = step(code.data());
    const Prologue prologue = prologue_of(code.data());
    check(first.length == 0 || first.length == kJumpSize);
    check(prologue.undo_size <= sizeof prologue.undo && (!prologue.length || prologue.length == first.length));
    check(landing_pad(code.data()) <= kLandingPadSize);
    alignas(16) static uint8_t trampoline[kTrampolineSize], *const end = trampoline + sizeof trampoline;
    for (size_t behind : {size_t(0), prologue.length}) {
        size_t moved = 0;
        if (!move(code.data(), code, behind + kJumpSize, trampoline + kEntrySize, end, moved))
            check(moved == behind + kJumpSize || step(code.data()).kind != Step::kPlain);
        returns_into(code, behind);
    }
    return 0;
}
