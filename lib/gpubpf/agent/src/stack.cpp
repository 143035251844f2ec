#include "stack.h"

#include <cstdlib>
#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>
#include <mutex>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <unwind.h>

#include "agent.h"
#include "wire.h"

namespace gpubpf {

namespace {

constexpr size_t kDeepest = 64;       // frames
constexpr size_t kMostStacks = 65536;  // of a process

struct Frames {
  uintptr_t at[kDeepest];
  size_t count = 0;
};

// Bounds of the agent's own code.
struct Extent {
  uintptr_t first = 0, last = 0;
};

Extent own_extent() {
  static const Extent extent = [] {
    Extent found;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
          auto here = reinterpret_cast<uintptr_t>(&own_extent);
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto &p = info->dlpi_phdr[i];
            uintptr_t first = info->dlpi_addr + p.p_vaddr;
            if (p.p_type != PT_LOAD || here < first || here >= first + p.p_memsz) continue;
            *static_cast<Extent *>(to) = {first, first + p.p_memsz};
            return 1;
          }
          return 0;
        },
        &found);
    return found;
  }();
  return extent;
}

_Unwind_Reason_Code frame(_Unwind_Context *context, void *to) {
  auto *frames = static_cast<Frames *>(to);
  int before = 0;  // the address is that of the instruction itself, not of the one after a call
  uintptr_t at = _Unwind_GetIPInfo(context, &before);
  if (!at) return _URC_END_OF_STACK;
  if (!before) --at;
  const Extent own = own_extent();
  if (!frames->count && at >= own.first && at < own.last) return _URC_NO_REASON;
  frames->at[frames->count++] = at;
  return frames->count == kDeepest ? _URC_END_OF_STACK : _URC_NO_REASON;
}

uint64_t hash_of(const Frames &f) {
  uint64_t h = f.count;
  for (size_t i = 0; i < f.count; ++i) h = (h ^ f.at[i]) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
  return h;
}

void tell(uint32_t number, const Frames &f) {
  Writer w;
  w.u32(number).u32(static_cast<uint32_t>(f.count));
  for (size_t i = 0; i < f.count; ++i) {
    Dl_info info{};
    std::string file, symbol;
    uint64_t offset = 0;
    link_map *map = nullptr;
    if (dladdr1(reinterpret_cast<void *>(f.at[i]), &info, reinterpret_cast<void **>(&map), RTLD_DL_LINKMAP) && info.dli_fname) {
      file = info.dli_fname;
      if (map && !map->l_name[0]) {  // the program itself goes by the name that it was called with
        char path[4096];
        ssize_t n = readlink("/proc/self/exe", path, sizeof path);
        if (n > 0) file.assign(path, static_cast<size_t>(n));
      }
      offset = f.at[i] - (map ? map->l_addr : 0);
      if (info.dli_sname) {
        int status = 0;
        char *plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
        symbol = plain ? plain : info.dli_sname;
        free(plain);
      }
    }
    w.u64(f.at[i]).u64(offset).text(file).text(symbol);
  }
  agent.send(Message::Stack, w);
}

struct Known {
  std::mutex lock;
  std::unordered_map<uint64_t, uint32_t> stacks;  // by hash of their addresses
  pid_t of = 0;                                   // a forked child tells its own

};

}  // namespace

uint32_t host_stack() noexcept {
  uint32_t number = 0;
  quietly([&] {
    static auto *known = new Known;
    Frames frames;
    _Unwind_Backtrace(frame, &frames);
    if (!frames.count) return;
    uint64_t hash = hash_of(frames);
    {
      std::lock_guard<std::mutex> hold(known->lock);
      if (known->of != getpid()) known->stacks.clear();
      known->of = getpid();
      auto it = known->stacks.find(hash);
      if (it != known->stacks.end()) {
        number = it->second;
        return;
      }
      if (known->stacks.size() >= kMostStacks) return;
      number = static_cast<uint32_t>(known->stacks.size()) + 1;
      known->stacks.emplace(hash, number);
    }
    tell(number, frames);
  });
  return number;
}

}  // namespace gpubpf
