// Inline hooks: a jump written over the first instructions of a function, and those instructions moved elsewhere, where they can
// still be called.
//
// Inside the first cuInit no other thread is in a function that is being hooked: the jumps are written at once. Where threads run, the jumps are a
// list that the tool puts in while all of them stand (patching.py). The agent takes them out itself, since that can be done in one store for
// each. The moved instructions stay, and serve the next attachment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpubpf {

struct Hook;

// Bytes of code to be changed, as the tool reads them.
struct Patch {
    uint64_t at;
    uint8_t before[8], after[8];
    uint64_t size;  // of these, how many count
};

// Puts `count` replacements onto their targets; `original` is written before the jump. Gives the names of those that do not work,
// with the reason, one in each line; optional ones in `left_out`.
std::string install(Hook *hooks, size_t count, std::string &left_out);
// The same for a process whose threads run: all is ready but the jumps, which `patches` has.
std::string prepare(Hook *hooks, size_t count, std::string &left_out, std::vector<Patch> &patches);
// At the end: calls come to the driver's own code again, but for functions that `keep` says of, which still lead to their replacements. One
// store for each: threads may be anywhere.
void take_out(bool (*keep)(const char *name));
void take_out_rest(
    bool (*keep)(const char *name));  // the same later: where another attachment has its hooks now, they stay
void barrier_in_all_threads();  // what was stored before is seen by every thread; code that was written, too
void forget_patching();         // in a forked child: what is in its code is known, nobody else holds the lock
// The list in a file that nobody can change any more, or -1.
int patch_file(const std::vector<Patch> &patches);

// An x86-64 instruction as far as moving it elsewhere needs. `length` 0: not known.
struct Decoded {
    enum Kind { kPlain, kCall, kJump, kBranch, kEnd, kFixed };  // kFixed: cannot be moved
    size_t length = 0;
    Kind kind = kPlain;
    size_t rip_at = 0;       // offset of a displacement that counts from the instruction's end; 0: none
    size_t relative_at = 0;  // of the distance of a call, jump or branch,
    size_t relative_size = 0;
    uint8_t condition = 0;  // of a branch
};
Decoded decode(const uint8_t *code);

}  // namespace gpubpf
