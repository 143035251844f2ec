#include "signals.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

#include "this_agent.h"

namespace gpubpf {

namespace {

// Those whose default action does not end the process, or that no handler can catch.
constexpr int kNotEnding[] = {SIGKILL, SIGSTOP, SIGCHLD, SIGCONT, SIGTSTP,
                              SIGTTIN, SIGTTOU, SIGURG,  SIGWINCH};

bool ends_process(int signal) {
    const bool plain =
        signal >= 1 && signal <= SIGSYS;  // the C library uses those between SIGSYS and SIGRTMIN
    return (plain || (signal >= SIGRTMIN && signal <= SIGRTMAX)) &&
           std::find(std::begin(kNotEnding), std::end(kNotEnding), signal) == std::end(kNotEnding);
}

// The signal is blocked until this returns, and its default action is restored. So the second one arrives when this returns.
void at_signal(int signal, siginfo_t *info, void *) {
    const int error = errno;
    read_before_signal_ends();
    if (syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), signal, info) != 0) raise(signal);
    errno = error;
}

struct sigaction caught() {
    struct sigaction ours{};
    ours.sa_sigaction = at_signal;
    ours.sa_flags = static_cast<int>(SA_SIGINFO | SA_RESETHAND | SA_RESTART | SA_ONSTACK);
    sigfillset(&ours.sa_mask);  // the first signal ends the process, as it would alone
    return ours;
}

bool is_default(const struct sigaction &action) {
    return !(action.sa_flags & SA_SIGINFO) && action.sa_handler == SIG_DFL;
}

bool is_ours(const struct sigaction &action) {
    return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == at_signal;
}

}  // namespace

void catch_signals() {
    const struct sigaction ours = caught();
    for (int s = 1; s <= SIGRTMAX; ++s) {
        struct sigaction now{};
        if (ends_process(s) && sigaction(s, nullptr, &now) == 0 && is_default(now))
            sigaction(s, &ours, nullptr);
    }
}

void release_signals(SignalAction original) {
    for (int s = 1; s <= SIGRTMAX; ++s) {
        struct sigaction now{};
        if (!ends_process(s) || original(s, nullptr, &now) != 0 || !is_ours(now)) continue;
        now = {};
        now.sa_handler = SIG_DFL;
        original(s, &now, nullptr);
    }
}

int program_sigaction(SignalAction original, int signal, const struct sigaction *act, struct sigaction *old) {
    const struct sigaction ours = caught();
    const bool ends = act && is_default(*act) && ends_process(signal) && is_connected();
    const int r = original(signal, ends ? &ours : act, old);
    if (r == 0 && old && is_ours(*old)) {
        memset(old, 0, sizeof *old);
        old->sa_handler = SIG_DFL;
    }
    return r;
}

}  // namespace gpubpf
