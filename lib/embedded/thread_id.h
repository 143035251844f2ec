// The kernel's number of the calling thread. glibc has gettid() since 2.30; the libraries also run with 2.28.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace embedded {

inline pid_t thread_id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

}  // namespace embedded
