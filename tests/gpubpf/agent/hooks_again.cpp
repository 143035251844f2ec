// Hooks that are put in, while nobody is there, and taken out while threads call the functions all the time; again and again.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sched.h>
#include <string>

#include "../../../lib/gpubpf/agent/src/patch.h"

// Functions whose first instructions lie over a word's end in every way that a compiler lets them.
#ifdef __aarch64__
#define BODY " mov x9, x0\n add x9, x9, #1\n add x0, x9, x9, lsl #1\n ret\n"
#else
#define BODY " mov %rdi, %rax\n add $1, %rax\n imul $3, %rax, %rax\n ret\n"
#endif
#define FUNCTION(name, padding)                                                                                                    \
  extern "C" long name(long x);                                                                                                    \
  asm(".text\n.balign 16\n.skip " #padding ", 0xCC\n.globl " #name "\n" #name ":\n" BODY)
FUNCTION(f0, 16);
FUNCTION(f4, 4);
FUNCTION(f8, 8);
FUNCTION(f12, 12);

static long replaced(long x) { return -x; }

static gpubpf::Hook table[4] = {
    {"f0", reinterpret_cast<void *>(replaced), nullptr, reinterpret_cast<void *>(f0)},
    {"f4", reinterpret_cast<void *>(replaced), nullptr, reinterpret_cast<void *>(f4)},
    {"f8", reinterpret_cast<void *>(replaced), nullptr, reinterpret_cast<void *>(f8)},
    {"f12", reinterpret_cast<void *>(replaced), nullptr, reinterpret_cast<void *>(f12)},
};
static std::atomic<bool> over{false};
static std::atomic<long> wrong{0}, calls[2];

constexpr int kThreads = 3;
static std::atomic<bool> paused{false};
static std::atomic<int> standing{0};

static void *call(void *) {
  while (!over) {
    if (paused) {
      ++standing;
      while (paused) sched_yield();
      --standing;
    }
    for (gpubpf::Hook &h : table) {
      const long got = reinterpret_cast<long (*)(long)>(h.target)(5);
      if (got != 18 && got != -5) ++wrong;
      ++calls[got == 18];
    }
  }
  return nullptr;
}

// What is hooked where threads run, others see to that they stand.
static bool install_again() {
  std::string left_out;
  while (standing) sched_yield();
  paused = true;
  while (standing < kThreads) sched_yield();
  const bool good = gpubpf::install(table, 4, left_out).empty();
  paused = false;
  return good;
}

static bool is_kept(const char *name) { return strcmp(name, "f4") == 0; }
static bool none(const char *) { return false; }

static int check(bool good, const char *what) { return good ? 0 : (printf("%s\n", what), 1); }

int main() {
  char before[4][16], after[16];
  for (int i = 0; i < 4; ++i) memcpy(before[i], table[i].target, 16);
  auto unchanged = [&](int i) { return memcmp(before[i], memcpy(after, table[i].target, 16), 16) == 0; };
  std::string left_out;
  if (!gpubpf::install(table, 4, left_out).empty()) return check(false, "install");
  void *const original = table[0].original;
  pthread_t threads[kThreads];
  for (pthread_t &t : threads) pthread_create(&t, nullptr, call, nullptr);
  int bad = 0;
  for (int round = 0; round < 300 && !bad; ++round) {
    bad += check(f0(5) == -5 && f4(5) == -5 && f8(5) == -5 && f12(5) == -5, "not hooked");
    gpubpf::take_out(is_kept);
    bad += check(f0(5) == 18 && f4(5) == -5 && f8(5) == 18 && f12(5) == 18, "taken out, but for one");
    bad += check(unchanged(0) && !unchanged(1) && unchanged(2), "code");
    gpubpf::take_out_rest(none);
    bad += check(f4(5) == 18 && unchanged(1), "the rest");
    bad += check(reinterpret_cast<long (*)(long)>(table[3].original)(5) == 18, "an original");
    bad += check(install_again(), "install again");
    gpubpf::take_out_rest(none);
    bad += check(f4(5) == -5, "the rest is wanted again");
    bad += check(table[0].original == original, "another slot");
  }
  gpubpf::take_out(none);
  over = true;
  for (pthread_t &t : threads) pthread_join(t, nullptr);
  bad += check(!wrong, "a call went wrong") + check(calls[0] && calls[1], "no calls");
  if (!bad) printf("hooked and not, again and again\n");
  return bad;
}
