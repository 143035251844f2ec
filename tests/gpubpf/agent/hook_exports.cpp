// Hooks each function of a library whose names are on standard input, without calling any, and takes the hooks out again. The code must
// then be that of the file. Prints how many functions were hooked, and the reasons why others were not.
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "file_code.h"
#include "patch.h"

static long replacement() { return 4711; }

int main(int, char **argv) {
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) return printf("%s\n", dlerror()), 1;
  std::set<std::string> names;
  for (char line[4096]; fgets(line, sizeof line, stdin);) names.insert(std::string(line, strcspn(line, "\n")));
  std::vector<gpubpf::Hook> hooks;
  for (const std::string &name : names)
    if (void *at = dlsym(library, name.c_str())) hooks.push_back({name.c_str(), reinterpret_cast<void *>(&replacement), nullptr, at});
  gpubpf::FileCode file;
  const auto changed = [&] {
    size_t found = 0;
    for (const gpubpf::Hook &hook : hooks) {
      const auto *at = static_cast<const uint8_t *>(hook.target);
      const std::vector<uint8_t> code = file.read(at, 32);
      found += memcmp(code.data(), at, code.size()) != 0;
    }
    return found;
  };
  size_t good = 0;
  for (int turn = 0; turn < 2; ++turn) {
    if (changed()) return printf("changed before turn %d\n", turn), 1;
    std::string left_out;
    const std::string failed = gpubpf::install(hooks.data(), hooks.size(), left_out);
    std::map<std::string, int> reasons;
    for (size_t at = 0; at < failed.size(); at = failed.find('\n', at) + 1) {
      const size_t reason = failed.find(": ", at) + 2;
      ++reasons[failed.substr(reason, failed.find('\n', at) - reason)];
    }
    good = hooks.size();
    for (const auto &[reason, count] : reasons) {
      good -= static_cast<size_t>(count);
      if (!turn) printf("%d: %s\n", count, reason.c_str());
    }
    if (!changed()) return printf("nothing is hooked\n"), 1;
    gpubpf::take_out([](const char *) { return false; });
  }
  if (changed()) return printf("changed in the end\n"), 1;
  printf("%zu of %zu hooked\n", good, hooks.size());
}
