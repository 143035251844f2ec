// Hooks functions for aarch64 whose first instructions are of every kind that has to be moved, and calls them both ways.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine/code.h"
#include "patch.h"

// Each returns its argument and 1 more.
asm(R"(
.text
.arch armv8.5-a
.globl plain, landing, signed, page, near, literal, half, vector, zero, bit, condition, framed, calling, short, jumping
.globl leaving, system, looping, trapping
.p2align 4
plain:      stp x29, x30, [sp, #-16]!
            mov x29, sp
            add x0, x0, #1
            ldp x29, x30, [sp], #16
            ret
.p2align 4
landing:    bti c
            add x0, x0, #1
            ret
.p2align 4
signed:     paciasp
            stp x29, x30, [sp, #-32]!
            add x0, x0, #1
            ldp x29, x30, [sp], #32
            retaa
.p2align 4
page:       adrp x9, one
            ldr x9, [x9, #:lo12:one]
            add x0, x0, x9
            ret
.p2align 4
near:       adr x9, constant
            ldr x9, [x9]
            add x0, x0, x9
            ret
.p2align 4
literal:    ldr x9, constant
            add x0, x0, x9
            ret
.p2align 4
half:       ldrsw x1, constant
            add x0, x0, x1
            ret
.p2align 4
vector:     ldr d0, constant
            fmov x9, d0
            add x0, x0, x9
            ret
.p2align 4
zero:       cbz x0, 1f
            add x0, x0, #1
            ret
1:          mov x0, #1
            ret
.p2align 4
bit:        tbnz x0, #63, 1f
            add x0, x0, #1
            ret
1:          mov x0, #0
            ret
.p2align 4
condition:  cmp x0, #0
            b.lt 1f
            add x0, x0, #1
            ret
1:          mov x0, #0
            ret
.p2align 4
framed:     sub sp, sp, #32
            str x0, [sp, #8]
            ldr x0, [sp, #8]
            add x0, x0, #1
            add sp, sp, #32
            ret
.p2align 4
calling:    mov x9, x30
            bl helper
            add x0, x0, #1
            ret x9
.p2align 4
helper:     ret
.p2align 4
short:      add x0, x0, #1
            ret
.p2align 4
jumping:    b plain
.p2align 4
leaving:    ret
.p2align 4
system:     svc #0
            ret
.p2align 4
looping:    mov x9, #0
1:          add x9, x9, #1
            cmp x9, x0
            b.le 1b
            mov x0, x9
            ret
.p2align 4
trapping:   brk #1
.p2align 3
constant:   .quad 1
.data
one:        .quad 1
.text
)");

extern "C" {
long plain(long), landing(long) asm("landing"), calling(long), jumping(long), leaving(long), system_call(long) asm("system");
long signed_one(long) asm("signed"), page(long), near(long), literal(long), half(long), vector(long), zero(long), bit(long);
long condition(long), framed(long), short_one(long) asm("short"), looping(long), trapping(long);
}

using Function = long (*)(long);
using gpubpf::Hook;

constexpr int kGood = 15;
static const Function good[kGood] = {plain, landing, signed_one, page, near, literal, half, vector, zero, bit, condition, framed, calling, short_one, jumping};
static Hook table[kGood];
static int calls;

template <int N>
static long replacement(long n) {
  ++calls;
  return reinterpret_cast<Function>(table[N].original)(n) + 100;
}

template <int N>
static void fill(Function *into) {
  if constexpr (N < kGood) into[N] = replacement<N>, fill<N + 1>(into);
}

static void expect(int index, const char *what, long found, long wanted) {
  if (found == wanted) return;
  printf("%d: %s: %ld instead of %ld\n", index, what, found, wanted);
  exit(1);
}

static std::string refusal(Function function, Function replaced) {
  Hook hook{"f", reinterpret_cast<void *>(replaced), nullptr, reinterpret_cast<void *>(function)};
  std::string left_out;
  return gpubpf::install(&hook, 1, left_out);
}

int main() {
  Function replacements[kGood];
  fill<0>(replacements);
  unsigned char before[kGood][16];
  for (int i = 0; i < kGood; ++i) {
    memcpy(before[i], reinterpret_cast<void *>(good[i]), 16);
    table[i] = {"f", reinterpret_cast<void *>(replacements[i]), nullptr, reinterpret_cast<void *>(good[i])};
  }
  std::string left_out;
  for (int turn = 0; turn < 3; ++turn) {
    const std::string failed = gpubpf::install(table, kGood, left_out);
    if (!failed.empty()) return printf("%s", failed.c_str()), 1;
    calls = 0;
    for (int i = 0; i < kGood; ++i) {
      expect(i, "hooked", good[i](7), 108);
      if (table[i].original) expect(i, "original", reinterpret_cast<Function>(table[i].original)(7), 8);
      int changed = 0;
      for (int word = 0; word < 16; word += 4) changed += memcmp(before[i] + word, reinterpret_cast<char *>(good[i]) + word, 4) != 0;
      expect(i, "changed instructions", changed, table[i].original != nullptr);  // jumping leads to plain, which is hooked
    }
    expect(0, "calls", calls, kGood);
    expect(0, "originals", table[kGood - 1].original == nullptr, 1);
    gpubpf::take_out([](const char *) { return false; });
    for (int i = 0; i < kGood; ++i) {
      expect(i, "unchanged", memcmp(before[i], reinterpret_cast<void *>(good[i]), 16), 0);
      expect(i, "not hooked", good[i](7), 8);
      expect(i, "not hooked, not taken", good[i](0), 1);
    }
  }
  // A loop back to the second instruction: the hook takes the first one's place.
  expect(0, "a loop", refusal(looping, replacements[0]).empty(), 1);
  expect(0, "looping", looping(7), 108);  // table[0] is plain's
  expect(0, "a return", refusal(leaving, replacements[0]).empty(), 1);
  expect(0, "a system call", refusal(system_call, replacements[0]) == "f: an instruction that cannot be moved\n", 1);
  expect(0, "a breakpoint", refusal(trapping, replacements[0]) == "f: a breakpoint: another tool traces this process\n", 1);
  printf("hooked\n");
}
