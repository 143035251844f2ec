// Whether memory can be read, without a fault if it cannot.
#pragma once

#include <cerrno>
#include <cstdint>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpubpf {

// The kernel reads the signal set before it rejects the invalid operation.
inline bool is_readable(const uintptr_t *at) {
    constexpr int kNothing = -1;
    static_assert(sizeof *at == 8);
    return syscall(SYS_rt_sigprocmask, kNothing, at, nullptr, sizeof *at) == 0 || errno != EFAULT;
}

}  // namespace gpubpf
