// Host programs: they run at each launch, or at each other operation, in the thread that calls the driver (docs/timing.md, "Shared arrays
// and host programs").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lifetime.h"
#include "wire.h"

namespace gpubpf {

struct HostLaunch {  // `struct gpu_launch` of gpubpf.h
    uint64_t launch, kernel, stream, call_ns, threads, gpu;
};
constexpr uint64_t kWholeGraph = UINT64_MAX;  // as `kernel`: a graph is launched, `launch` is its first id

struct HostOperation {  // `struct gpu_operation`
    uint64_t id, kind, stream, call_ns, bytes, destination, source, gpu;
};

// Whether there are host programs: what they are called with need not be found out otherwise.
bool host_program();       // at launches
bool operation_program();  // at operations
// Run them. Never throw; take no lock.
void run_host_program(const HostLaunch &launch);
void run_operation_program(const HostOperation &operation);

// A file with the stubs that the tool may put a uprobe on, mapped here; -1: no memory. It stays open until marker_told().
int make_marker();
void marker_told();  // the tool has said Welcome: what it wanted to attach is attached

// The host programs' part of the Welcome. u32 mode: 0 there is none, 1 they run in the kernel, 2 in this process. For 1, u32 the points
// that have programs, a bit for each; for 2 how many, and for each u32 its point, its code, the bytes of its parameters, and its arguments
// (u32 kind, u32 map, u64 value). Code is called with the address of an array of their values. False: malformed, or no memory.
bool take_host_program(Reader &reader);
extern const Lifetime host_program_lifetime;

}  // namespace gpubpf
