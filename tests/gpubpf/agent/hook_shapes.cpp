// Hooks functions whose first instructions are of every kind that has to be moved, and calls them both ways.
#include <cstdio>
#include <cstdlib>

#include "../../../lib/gpubpf/agent/src/hooks.h"
#include "../../../lib/gpubpf/agent/src/patch.h"

// Each returns its argument and 1 more.
asm(R"(
.text
.p2align 4
.globl plain, landing, relative, branch, calling, padded, jumping, in_loop
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
.data
one:        .quad 1
.text
)");

extern "C" {
long plain(long), landing(long), relative(long), branch(long), calling(long), padded(long), jumping(long), in_loop(long);
}

using gpubpf::Hook;

static int calls;
static Hook table[9];

template <int N>
static long replacement(long n) {
  ++calls;
  return reinterpret_cast<long (*)(long)>(table[N].original)(n) + 100;
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
}
