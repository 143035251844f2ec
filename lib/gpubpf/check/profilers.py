"""Other profilers: in the environment of the programs that tools start, and running beside them."""

from __future__ import annotations

from gpubpf.calls import device_times
from gpubpf.check.finding import LIMITED, Finding, ok
from gpubpf.check.machine import Machine
from gpubpf.traced import command

# Prefixes of the environment variables that keep the agent from using CUPTI. They are the same as in
# agent/src/log/other_profilers.cpp; a test compares them.
CUPTI_VARIABLES = (
    "NSYS_", "NV_NSIGHT_", "NV_COMPUTE_PROFILER", "NV_TPS_", "CUPTI_", "NVTX_INJECTION", "ROCP_", "LD_AUDIT=",
)  # fmt: skip
# Names of processes. Linux keeps the first 15 characters of a name.
PROGRAMS = {
    "nv-hostengine": "DCGM",
    "dcgm-exporter": "DCGM",
    "nsys": "Nsight Systems",
    "nsys-launcher": "Nsight Systems",
    "ncu": "Nsight Compute",
    "compute-sanitizer": "Compute Sanitizer",
    "cuda-gdb": "cuda-gdb",
    "rocgdb": "rocgdb",
    "rocprof": "rocprof",
    "rocprofv2": "rocprof",
    "rocprofv3": "rocprof",
}
_COMM = 15  # characters
# Profilers that only read counters of the whole GPU.
_BESIDE = frozenset({"DCGM"})


def variables(machine: Machine) -> Finding:
    """Variables with which a program loads another profiler."""
    environment = machine.environment
    if why := command.other_tool(environment):
        what, _, action = why.partition("; ")
        return Finding(LIMITED, what, "every tool refuses COMMAND", f"{action}: unset CUDA_INJECTION64_PATH")
    found: list[str] = []
    consequences: list[str] = []
    cupti = [name for name in environment if f"{name}=".startswith(CUPTI_VARIABLES)]
    if cupti:
        found += cupti
        consequences.append("launchlate does not use CUPTI, but timing events")
    if amd := [name for name in device_times.HSA.others if environment.get(name)]:
        found += amd
        consequences.append("hipsnoop has no times of kernels")
    if environment.get("LD_PRELOAD"):
        found.append("LD_PRELOAD")
        consequences.append("every program that a tool starts loads these libraries, too")
    if not found:
        return ok("no profiler is configured")
    names = ", ".join(dict.fromkeys(found))
    verb = "is" if len(set(found)) == 1 else "are"
    action = f"unset {' '.join(dict.fromkeys(found))}"
    return Finding(LIMITED, f"{names} {verb} set", "; ".join(consequences), action, needed=False)


def running(machine: Machine) -> Finding:
    """Running profilers and debuggers of GPU programs."""
    short = {name[:_COMM]: program for name, program in PROGRAMS.items()}
    found = sorted({short[name] for name in machine.commands() if name in short})
    tracing = [name for name in found if name not in _BESIDE]
    if not found:
        return ok("none seen")
    value = f"{', '.join(found)} {'runs' if len(found) == 1 else 'run'}"
    if not tracing:
        return ok(f"{value}, beside the tools")
    why = "a process that one of them has started or traces may be refused, or measured with it"
    return Finding(LIMITED, value, why, "end them, or name other processes", needed=False)
