"""The checks, in the order in which they are shown. To add one, add a row."""

from __future__ import annotations

from gpubpf.check import amd, isolation, kernel, nvidia, profilers, resources, software
from gpubpf.check.finding import Check

CHECKS = (
    Check("python", "Python", software.python),
    Check("packages", "packages", software.packages),
    Check("optional-packages", "extra packages", software.optional),
    Check("libraries", "libraries", software.libraries),
    Check("nvidia-gpu", "NVIDIA GPU", nvidia.gpu),
    Check("nvidia-driver", "NVIDIA driver", nvidia.driver),
    Check("ptxas", "ptxas", nvidia.ptxas),
    Check("mig", "MIG", nvidia.mig),
    Check("confidential-computing", "confidential", nvidia.confidential),
    Check("mps", "MPS", nvidia.mps),
    Check("cudasim", "cudasim", nvidia.embedded_device),
    Check("amd-gpu", "AMD GPU", amd.gpu),
    Check("rocr", "ROCr", amd.rocr),
    Check("hipsim", "hipsim", amd.embedded_device),
    Check("kernel", "kernel", kernel.version),
    Check("bpf", "eBPF", kernel.bpf),
    Check("uprobes", "uprobes", kernel.uprobes),
    Check("tracefs", "tracefs", kernel.tracefs),
    Check("btf", "BTF", kernel.type_information),
    Check("compiler", "compiler", kernel.compiler),
    Check("kernel-headers", "kernel headers", kernel.headers),
    Check("ptrace", "ptrace", isolation.ptrace),
    Check("user-namespace", "user namespace", isolation.user_namespace),
    Check("pid-namespace", "PID namespace", isolation.pid_namespace),
    Check("hidepid", "hidepid", isolation.hidepid),
    Check("seccomp", "seccomp", isolation.seccomp),
    Check("no-new-privileges", "no_new_privs", isolation.no_new_privileges),
    Check("cgroups", "cgroups", isolation.cgroups),
    Check("container", "container", isolation.container),
    Check("profiler-variables", "variables", profilers.variables),
    Check("profilers", "profilers", profilers.running),
    Check("shared-memory", "shared memory", resources.shared_memory),
    Check("executable-files", "executable files", resources.executable),
    Check("temporary-files", "temporary files", resources.temporary),
    Check("cache", "cache", resources.caches),
    Check("open-files", "open files", resources.open_files),
    Check("locked-memory", "locked memory", resources.locked_memory),
)
