// Hooks every function of the agent's table in a real driver library (without a GPU it only refuses), calls through some, and takes
// the hooks out again, twice. Then what cuGetProcAddress returns has to be among the hooked functions.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

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

static long call(void *f) { return reinterpret_cast<long (*)(long, long, long, long, long, long)>(f)(0, 0, 0, 0, 0, 0); }

// Bytes of a library's code that are not those of its file; -1 if it is not mapped.
static long changed(const char *path) {
  long found = -1;
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[4352], file[4097];
  while (fgets(line, sizeof line, maps)) {
    unsigned long start, end, offset;
    if (sscanf(line, "%lx-%lx r-xp %lx %*s %*s %4096[^\n]", &start, &end, &offset, file) != 4 || strcmp(file, path) != 0) continue;
    std::vector<unsigned char> bytes(end - start);
    int fd = open(path, O_RDONLY);
    const ssize_t size = pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    close(fd);
    found = std::max(found, 0L);
    const auto *code = reinterpret_cast<const unsigned char *>(start);
    for (ssize_t i = 0; i < size; ++i) found += code[i] != bytes[static_cast<size_t>(i)];
  }
  fclose(maps);
  return found;
}

static bool hooked(const void *address) {
  return std::any_of(table, table + kCount, [&](const gpubpf::Hook &h) { return h.target == address; });
}

static std::string without(std::string name, std::initializer_list<const char *> ends) {
  for (const std::string end : ends)
    if (name.size() > end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0) return name.substr(0, name.size() - end.size());
  return name;
}

// Ask for each hooked function, of each version of CUDA. An answer has to be a hooked function, or a form of it before a hooked one
// (cuMemAlloc before cuMemAlloc_v2): a program of CUDA 3.1. Return the number of answers, 0 if one is neither.
static size_t look_up(void *library) {
  std::set<std::string> asked;
  for (const char *name : names)
    if (strncmp(name, "cu", 2) == 0) asked.insert(without(without(name, {"_ptsz", "_ptds"}), {"_v2", "_v3", "_v4"}));
  using Get = int (*)(const char *, void **, int, unsigned long, void *);  // the form before _v2 has no last parameter
  size_t answers = 0;
  for (const char *get_name : {"cuGetProcAddress", "cuGetProcAddress_v2"})
    for (const std::string &name : asked)
      for (int version : {2000, 3010, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 7050, 8000, 9000, 9010, 9020, 10000, 10010, 10020,
                          11000, 11010, 11020, 11030, 11040, 11050, 11060, 11070, 11080, 12000, 12010, 12020, 12030, 12040, 12050, 12060,
                          12080, 12090, 13000, 13010, 13020, 13050})
        for (unsigned long flags : {0, 1, 2}) {
          auto get = reinterpret_cast<Get>(dlsym(library, get_name));
          void *address = nullptr;
          int status = 0;
          if (!get || get(name.c_str(), &address, version, flags, &status) != 0 || !address) continue;
          ++answers;
          bool known = hooked(address);
          for (const char *number : {"", "_v2", "_v3"})
            for (const char *stream : {"", "_ptsz", "_ptds"}) {
              const char *next = *number ? (number[2] == '2' ? "_v3" : "_v4") : "_v2";
              known = known || (dlsym(library, (name + number + stream).c_str()) == address &&
                                std::count(names, names + kCount, name + next + stream));
            }
          if (!known) return printf("%s(%s, %d, %lu) is not hooked\n", get_name, name.c_str(), version, flags), 0;
        }
  return answers;
}

int main(int, char **argv) {
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) return printf("%s\n", dlerror()), 1;
  size_t found = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const bool ends = strcmp(names[i], "_exit") == 0 || strcmp(names[i], "_Exit") == 0;
    void *at = ends ? nullptr : dlsym(library, names[i]);
    table[i] = {names[i], reinterpret_cast<void *>(&replacement), at, at};
    found += at != nullptr;
  }
  long before[kCount];
  for (size_t i = 0; i < kCount; ++i) before[i] = table[i].target && strstr(names[i], "Launch") ? int(call(table[i].target)) : 0;
  for (int turn = 0; turn < 2; ++turn) {
    if (long bytes = changed(argv[1])) return printf("%ld bytes are changed before turn %d\n", bytes, turn), 1;
    std::string left_out, failed = gpubpf::install(table, kCount, left_out);
    if (!failed.empty() || !left_out.empty()) return printf("%s%s", failed.c_str(), left_out.c_str()), 1;
    if (changed(argv[1]) <= 0) return printf("no code is changed\n"), 1;
    for (size_t i = 0; i < kCount; ++i) {
      if (!table[i].target) continue;
      if (call(table[i].target) != 4711) return printf("%s is not hooked\n", names[i]), 1;
      if (strstr(names[i], "Launch") && int(call(table[i].original)) != before[i]) return printf("%s is broken\n", names[i]), 1;
    }
    gpubpf::take_out([](const char *) { return false; });
    for (size_t i = 0; i < kCount; ++i)
      if (strstr(names[i], "Launch") && table[i].target && int(call(table[i].target)) != before[i])
        return printf("%s is still hooked\n", names[i]), 1;
  }
  if (long bytes = changed(argv[1])) return printf("%ld bytes are changed in the end\n", bytes), 1;
  const size_t answers = look_up(library);
  if (!answers) return printf("cuGetProcAddress leads past the hooks\n"), 1;
  printf("%zu functions hooked, %zu answers of cuGetProcAddress\n", found, answers);
  return 0;
}
