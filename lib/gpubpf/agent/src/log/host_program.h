// Host programs: they run at each launch, or at each other operation, in the thread that calls the driver
// (docs/timing.md, "Shared arrays and host programs").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lifetime.h"
#include "wire.h"

namespace gpubpf {

constexpr uint64_t kWholeGraph = UINT64_MAX;  // as `kernel`: a graph launch; `launch` is its first id

// Whether there are host programs. If not, their arguments need not be computed.
bool host_program();       // at launches
bool operation_program();  // at operations
// Run the host programs. They never throw, and take no lock. The structures are `struct gpu_launch` and
// `struct gpu_operation` in gpubpf.h.
void run_host_program(const HostLaunch &launch);
void run_operation_program(const HostOperation &operation);

// Creates and maps a file with the stubs that the tool may put a uprobe on. Returns -1 if memory is short.
// The file stays open until close_stub_file().
int make_stubs();
void close_stub_file();  // call this after the Welcome: the tool has attached its probes

// Takes the host programs from the Welcome. Returns false if they are not valid or memory is short.
bool take_host_programs(const message::AgentConfig &config);
extern const Lifetime host_program_lifetime;

}  // namespace gpubpf
