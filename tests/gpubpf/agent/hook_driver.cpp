// Hooks every function of the agent's table in a real driver library (without a GPU it only refuses), and calls through some.
#include <cstdio>
#include <cstring>
#include <dlfcn.h>

#include "../../../lib/gpubpf/agent/src/hooks.h"
#include "../../../lib/gpubpf/agent/src/patch.h"

static const char *const names[] = {
#define GPUBPF_HOOK(symbol) #symbol,
#include "../../../lib/gpubpf/agent/src/hooks_all.def"
};
constexpr size_t kCount = sizeof names / sizeof *names;

static gpubpf::Hook table[kCount];
static int calls;

static long replacement(long a, long b, long c, long d, long e, long f) {
  ++calls;
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  return 4711;
}

int main(int, char **argv) {
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) return printf("%s\n", dlerror()), 1;
  size_t found = 0;
  for (size_t i = 0; i < kCount; ++i) {
    bool libc = strcmp(names[i], "_exit") == 0 || strcmp(names[i], "_Exit") == 0;
    void *at = libc ? nullptr : dlsym(library, names[i]);
    table[i] = {names[i], reinterpret_cast<void *>(&replacement), at, at, strcmp(names[i], "sigaction") == 0};
    found += at != nullptr;
  }
  long before[kCount];
  auto call = [](void *f) { return reinterpret_cast<long (*)(long, long, long, long, long, long)>(f)(0, 0, 0, 0, 0, 0); };
  for (size_t i = 0; i < kCount; ++i) before[i] = table[i].target && strstr(names[i], "Launch") ? int(call(table[i].target)) : 0;
  std::string left_out, failed = gpubpf::install(table, kCount, left_out);
  if (!failed.empty()) return printf("%s", failed.c_str()), 1;
  using GetProcAddress = int (*)(const char *, void **, int, unsigned long, void *);
  auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  for (size_t i = 0; i < kCount; ++i) {
    if (!table[i].target) continue;
    if (call(table[i].target) != 4711) return printf("%s is not hooked\n", names[i]), 1;
    if (strstr(names[i], "Launch") && int(call(table[i].original)) != before[i]) return printf("%s is broken\n", names[i]), 1;
  }
  void *launch = nullptr;
  if (get && get("cuLaunchKernel", &launch, 13000, 1, nullptr) == 0 && launch && call(launch) != 4711)
    return printf("cuGetProcAddress leads past the hook\n"), 1;
  printf("%zu functions hooked\n", found);
  return 0;
}
