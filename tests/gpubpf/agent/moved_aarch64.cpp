// Runs random A64 instructions at a place, and what move_instruction makes of them at another place: both must have the same effect. Also
// runs random first instructions and what undoes them. Argument: how many of each.
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sys/mman.h>

#include "machine/aarch64/instruction.h"
#include "machine/code.h"

using namespace gpubpf::machine;

struct State {
  uint64_t x[18];  // x9 tells which way control went, x10 is where it goes
  uint64_t flags, sp, link, frame;
  uint64_t v[8][2];
};

// Runs code with the registers of `state`, until it jumps to x10.
extern "C" void run_at(const void *code, State *state);
asm(R"(
.text
.p2align 4
.globl run_at
run_at:
  stp x29, x30, [sp, #-64]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  mov x19, x1
  mov x20, x0
  sub sp, sp, #64
  mov x21, sp
  ldr x0, [x19, #144]
  msr nzcv, x0
  add x0, x19, #176
  ld1 {v0.2d, v1.2d, v2.2d, v3.2d}, [x0], #64
  ld1 {v4.2d, v5.2d, v6.2d, v7.2d}, [x0]
  ldp x0, x1, [x19]
  ldp x2, x3, [x19, #16]
  ldp x4, x5, [x19, #32]
  ldp x6, x7, [x19, #48]
  ldp x8, x9, [x19, #64]
  ldp x11, x12, [x19, #88]
  ldp x13, x14, [x19, #104]
  ldp x15, x16, [x19, #120]
  ldr x17, [x19, #136]
  ldr x30, [x19, #160]
  adr x10, 1f
  br x20
1:
  str x30, [x19, #160]
  str x29, [x19, #168]
  stp x0, x1, [x19]
  stp x2, x3, [x19, #16]
  stp x4, x5, [x19, #32]
  stp x6, x7, [x19, #48]
  stp x8, x9, [x19, #64]
  stp x11, x12, [x19, #88]
  stp x13, x14, [x19, #104]
  stp x15, x16, [x19, #120]
  str x17, [x19, #136]
  mrs x0, nzcv
  str x0, [x19, #144]
  mov x0, sp
  sub x0, x0, x21
  str x0, [x19, #152]
  add x0, x19, #176
  st1 {v0.2d, v1.2d, v2.2d, v3.2d}, [x0], #64
  st1 {v4.2d, v5.2d, v6.2d, v7.2d}, [x0]
  add sp, x21, #64
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x29, x30, [sp], #64
  ret
)");

static std::mt19937_64 random_bits(7);
static sigjmp_buf unallocated;  // where to go after an instruction that does not exist
static constexpr size_t kArena = 16 << 20;

static uint8_t *mapped(uint8_t *wanted, size_t size) {
  void *at = mmap(wanted, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) exit(3);
  return static_cast<uint8_t *>(at);
}

static void put(uint8_t *at, std::initializer_list<uint32_t> code) {
  memcpy(at, code.begin(), code.size() * 4);
  __builtin___clear_cache(reinterpret_cast<char *>(at), reinterpret_cast<char *>(at) + code.size() * 4);
}

static State random_state() {
  State state;
  for (uint64_t &x : state.x) x = random_bits();
  state.flags = random_bits() & 0xF0000000;
  state.sp = state.frame = 0;
  state.link = random_bits() >> 18;  // an address, which can be signed
  for (auto &v : state.v) v[0] = random_bits(), v[1] = random_bits();
  return state;
}

static bool fails(const char *what, uint32_t code) { return printf("%s: %08x\n", what, code), true; }

constexpr uint32_t kHere = 0xD2800009, kThere = 0xD2800029, kBack = 0xD61F0140;  // mov x9, #0; mov x9, #1; br x10

// An instruction that depends on its own address, with small registers.
static uint32_t relative_code() {
  static constexpr uint32_t kinds[][2] = {{0x10000000, 0x60FFFFE0}, {0x90000000, 0x60FFFFE0}, {0x18000000, 0x44FFFFE0},
                                          {0xD8000000, 0x00FFFFFF}, {0x54000000, 0x00FFFFEF}, {0x34000000, 0x81FFFFE0},
                                          {0x36000000, 0x81FFFFE0}, {0x14000000, 0x800FFFFF}, {0x98000000, 0x00FFFFE0},
                                          {0x9C000000, 0x00FFFFE0}, {0x58000000, 0x00FFFFE0}};
  static constexpr uint32_t registers[] = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto &kind = kinds[random_bits() % (sizeof kinds / sizeof *kinds)];
  uint32_t code = kind[0] | (static_cast<uint32_t>(random_bits()) & kind[1]);
  if (kind[0] != 0xD8000000 && kind[0] != 0x54000000 && kind[0] != 0x14000000) code |= registers[random_bits() % 8];
  return code;
}

static bool moves_wrongly(uint8_t *arena, uint8_t *other) {
  uint8_t *const home = arena + kArena / 2 + random_bits() % 4096 * 4, *const away = other + random_bits() % 4096 * 4;
  const uint32_t code = relative_code();
  const Instruction found = decode(code);
  if (!found.relative || found.distance == 0 || (found.distance > -64 && found.distance < 64)) return false;
  const Step next = step(reinterpret_cast<const uint8_t *>(&code));
  put(home, {code, kHere, kBack});
  if (next.destination) put(home + found.distance, {kThere, kBack});
  const State before = random_state();
  State at_home = before, moved = before;
  run_at(home, &at_home);
  uint8_t *to = away;
  if (const char *why = move_instruction(reinterpret_cast<const uint8_t *>(&code), home, to))
    return (decode(code).kind != Instruction::kAddress || strcmp(why, "too far an operand") != 0) && fails(why, code);
  if (to > away + 4 + kMoreMoved) return fails("too long", code);
  put_jump(to, to, home + 4);
  __builtin___clear_cache(reinterpret_cast<char *>(away), reinterpret_cast<char *>(to) + 4);
  run_at(away, &moved);
  if (next.kind == Step::kCall) at_home.link = moved.link = 0;
  return memcmp(&at_home, &moved, sizeof moved) != 0 && fails("another effect", code);
}

// What a hook leaves in place and undoes must not be noticed: neither in an argument, nor on the stack, nor in the return address.
static bool undone_wrongly(uint8_t *place, uint32_t code, size_t &undone) {
  const auto *bytes = reinterpret_cast<const uint8_t *>(&code);
  const Prologue first = prologue_of(bytes);
  if (!first.length || (!first.undo_size && (code & 31) == 10)) return false;  // x10 is how it comes back
  memcpy(place, bytes, 4);
  memcpy(place + 4, first.undo, first.undo_size);
  put(place + 4 + first.undo_size, {kBack});
  __builtin___clear_cache(reinterpret_cast<char *>(place), reinterpret_cast<char *>(place) + 16);
  State before = random_state();
  State after = before;
  if (sigsetjmp(unallocated, 1)) return false;
  run_at(place, &after);
  ++undone;
  before.frame = after.frame;
  // An argument that the function overwrites without having read it.
  const bool to_register = first.undo_size == 0 && (code & 31) < 8;
  for (unsigned i = 0; i < 8; ++i)
    if (after.x[i] != before.x[i] && !(to_register && i == (code & 31))) return fails("an argument", code);
  return (after.sp || after.link != before.link || memcmp(after.v, before.v, sizeof after.v) != 0) && fails("a register", code);
}

int main(int, char **argv) {
  const long turns = atol(argv[1]);
  signal(SIGILL, [](int) { siglongjmp(unallocated, 1); });
  uint8_t *const arena = mapped(nullptr, kArena);
  for (size_t i = 0; i < kArena; i += 8) {
    const uint64_t value = random_bits();
    memcpy(arena + i, &value, 8);
  }
  uint8_t *const other = mapped(arena - (90 << 20), 1 << 20);
  for (long i = 0; i < turns; ++i)
    if (moves_wrongly(arena, other)) return 1;
  static constexpr uint32_t kFirst[] = {0xD503233F, 0xD503237F, 0xA9BF7BFD, 0xA9807BFD, 0xD10003FF, 0xF81F0FFE, 0xD503201F, 0xD503245F,
                                        0xFC1F0FE8, 0x6DBF23E9, 0x29BF03E1, 0xAD8003E0, 0x3C9F0FE0, 0xB81F0FE1};
  size_t undone = 0;
  for (long i = 0; i < turns; ++i) {
    uint32_t code = kFirst[random_bits() % (sizeof kFirst / sizeof *kFirst)];
    if (i % 2) code = (code & 0xFFC003FF) | (static_cast<uint32_t>(random_bits()) & 0x003FFC00 & (code >> 24 == 0xD5 ? 0 : ~0u));
    if (i % 3 == 0) code = static_cast<uint32_t>(random_bits());
    if (i % 3 == 0 && i % 2) code = (code & 0xE3FFFFFF) | 0x10000000;  // operations with constants
    if (undone_wrongly(other, code, undone)) return 1;
  }
  printf("%ld moved, %zu undone\n", turns, undone);
}
