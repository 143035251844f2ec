// Hooks functions whose first instructions are of every kind that has to be moved, and calls them both ways.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../../lib/gpubpf/agent/src/patch.h"
#include "../../../lib/gpubpf/agent/src/machine/code.h"

// Each returns its argument and 1 more.
asm(R"(
.text
.p2align 4
.globl plain, landing, relative, branch, calling, padded, jumping, in_loop, framed, large, compared, nopped, saved, cleared, overwritten
plain:      push %rbp
            mov %rsp, %rbp
            lea 1(%rdi), %rax
            pop %rbp
            ret
.p2align 4
landing:    endbr64
            mov %rdi, %rax
            add $1, %rax
            ret
.p2align 4
relative:   mov one(%rip), %rax
            add %rdi, %rax
            ret
.p2align 4
branch:     test %rdi, %rdi
            js 1f
            lea 1(%rdi), %rax
            ret
1:          lea 1(%rdi), %rax
            ret
.p2align 4
calling:    call helper
            add $1, %rax
            ret
helper:     mov %rdi, %rax
            ret
.p2align 4
padded:     inc %rdi
            ret
.p2align 4
jumping:    jmp plain
.p2align 4
in_loop:    xor %eax, %eax
1:          inc %rax
            cmp %rdi, %rax
            jle 1b
            ret
.p2align 4
framed:     sub $24, %rsp
            mov %rdi, 8(%rsp)
            mov 8(%rsp), %rax
            add $1, %rax
            add $24, %rsp
            ret
.p2align 4
large:      sub $1000, %rsp
            lea 1(%rdi), %rax
            add $1000, %rsp
            ret
.p2align 4
compared:   cmpl $70000, many(%rip)
            jne 1f
            lea 1(%rdi), %rax
            ret
1:          ud2
.p2align 4
nopped:     .byte 0x0F, 0x1F, 0x44, 0, 0
            lea 1(%rdi), %rax
            ret
.p2align 4
saved:      push %r15
            xor %r15d, %r15d
            lea 1(%rdi, %r15), %rax
            pop %r15
            ret
.p2align 4
cleared:    xor %r8d, %r8d
            lea 1(%rdi, %r8), %rax
            ret
.p2align 4
overwritten: inc %rdi
            mov %rdi, %rax
            nop
            nop
            ret
.p2align 4
.data
one:        .quad 1
many:       .quad 70000
.text
)");

extern "C" {
long plain(long), landing(long), relative(long), branch(long), calling(long), padded(long), jumping(long), in_loop(long);
long framed(long), large(long), compared(long), nopped(long), saved(long), cleared(long), overwritten(long);
}

using gpubpf::Hook;

static int calls;
static Hook table[9], others[7];

template <int N>
static long replacement(long n) {
  ++calls;
  return reinterpret_cast<long (*)(long)>(table[N].original)(n) + 100;
}

template <int N>
static long other(long n) {
  return reinterpret_cast<long (*)(long)>(others[N].original)(n) + 100;
}

static void expect(const char *what, long found, long wanted) {
  if (found == wanted) return;
  printf("%s: %ld instead of %ld\n", what, found, wanted);
  exit(1);
}

int main() {
  using Function = long (*)(long);
  const Function functions[] = {plain, landing, relative, branch, calling, in_loop};
  const Function replacements[] = {replacement<0>, replacement<1>, replacement<2>, replacement<3>, replacement<4>, replacement<5>};
  for (int i = 0; i < 6; ++i)
    table[i] = {"f", reinterpret_cast<void *>(replacements[i]), reinterpret_cast<void *>(functions[i]),
                reinterpret_cast<void *>(functions[i])};
  // Another name of the first one; a jump to it; what is too short for a jump and followed by what is not padding.
  table[6] = {"same", reinterpret_cast<void *>(replacements[0]), nullptr, reinterpret_cast<void *>(functions[0])};
  table[7] = {"jumping", reinterpret_cast<void *>(replacements[0]), reinterpret_cast<void *>(jumping), reinterpret_cast<void *>(jumping)};
  std::string left_out, failed = gpubpf::install(table, 8, left_out);
  // in_loop jumps back into the bytes that a hook needs: refused, and untouched.
  expect(failed.c_str(), failed == "f: a jump into its first instructions\n", 1);
  for (int i = 0; i < 5; ++i) {
    expect("hooked", functions[i](7), 108);
    expect("original", reinterpret_cast<Function>(table[i].original)(7), 8);
  }
  expect("loop", in_loop(7), 8);
  expect("alias", reinterpret_cast<Function>(table[6].original)(7), 8);
  expect("jumping", jumping(7), 108);
  expect("calls", calls, 6);

  // The first instruction stays as it is, and what it did is undone: of these all but the last.
  const Function more[] = {framed, large, compared, nopped, saved, cleared, overwritten};
  const Function their[] = {other<0>, other<1>, other<2>, other<3>, other<4>, other<5>, other<6>};
  const size_t lengths[] = {4, 7, 10, 5, 2, 3, 0};
  unsigned char before[7][16];
  for (int i = 0; i < 7; ++i) {
    memcpy(before[i], reinterpret_cast<void *>(more[i]), 16);
    others[i] = {"o", reinterpret_cast<void *>(their[i]), nullptr, reinterpret_cast<void *>(more[i])};
    expect("length", static_cast<long>(gpubpf::machine::prologue_of(before[i]).length), static_cast<long>(lengths[i]));
  }
  // mov %rdi, -8(%r12) and xchg %r8, %rax are no store below the stack pointer, and no nop.
  const unsigned char store[16] = {0x49, 0x89, 0x7C, 0x24, 0xF8}, exchange[16] = {0x41, 0x90};
  expect("store", static_cast<long>(gpubpf::machine::prologue_of(store).length), 0);
  expect("exchange", static_cast<long>(gpubpf::machine::prologue_of(exchange).length), 0);
  failed = gpubpf::install(others, 7, left_out);
  expect(failed.c_str(), static_cast<long>(failed.size()), 0);
  for (int i = 0; i < 7; ++i) {
    const auto *now = reinterpret_cast<const unsigned char *>(more[i]);
    expect("the first instruction", memcmp(now, before[i], lengths[i]), 0);
    expect("the jump", now[lengths[i]], 0xE9);
    expect("hooked", more[i](7), 108);
    expect("original", reinterpret_cast<Function>(others[i].original)(7), 8);
  }
}
