// The host program: runs at each launch, in the launching thread (docs/timing.md, "Shared arrays and the host program").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "wire.h"

namespace gpubpf {

struct HostLaunch {  // `struct gpu_launch` of gpubpf.h
  uint64_t launch, kernel, stream, call_ns, threads, gpu;
};
constexpr uint64_t kWholeGraph = UINT64_MAX;  // as `kernel`: a graph is launched, `launch` is its first id

// Whether there is a host program: what it is called with need not be found out otherwise.
bool host_program();
// Runs it. Never throws; takes no lock.
void run_host_program(const HostLaunch &launch);

// A file with the stub that the tool may put a uprobe on, mapped here; -1: no memory. It stays open until marker_told().
int make_marker();
void marker_told();  // the tool has said Welcome: what it wanted to attach is attached

// The host programs' part of the Welcome. u32 mode: 0 there is none, 1 they run in the kernel, 2 in this process; then for 2 how many, and
// for each its code, the bytes of its parameters, and its arguments (u32 kind, u32 map, u64 value). Code is called with the address of
// an array of their values. False: malformed, or no memory.
enum class HostArgument : uint32_t {
  Context = 0,  // value: number of a field of HostLaunch
  MapBase = 1,  // map: number of one with a file shared with the tool
  Param = 2,    // value: offset in the parameter bytes that come with the code
  Helper = 3,   // value: number of a helper, as in bpf.h
};
bool take_host_program(Reader &reader);
void forget_host_program();  // in a forked child

}  // namespace gpubpf
