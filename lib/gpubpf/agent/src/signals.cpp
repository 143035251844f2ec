#include "signals.h"

#include <algorithm>
#include <atomic>
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

using Handler = void (*)(int, siginfo_t *, void *);

bool is_handled_by(const struct sigaction &action, Handler handler) {
    return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == handler;
}

struct sigaction default_action() {
    struct sigaction made{};
    made.sa_handler = SIG_DFL;
    return made;
}

// A handler of the program with SA_RESETHAND: the kernel restores the default action before it calls the handler, so the agent
// would not see the signal's next arrival. at_one_shot takes the handler's place. Each part is read and written by itself, since a
// signal may arrive at any time.
struct OneShot {
    std::atomic<Handler> handler;
    std::atomic<bool> takes_info;  // SA_SIGINFO
};
OneShot one_shots[_NSIG];

void at_one_shot(int signal, siginfo_t *info, void *context) {
    const struct sigaction next = is_connected() ? caught() : default_action();
    sigaction(signal, &next, nullptr);
    one_shots[signal].handler.load()(signal, info, context);
}

struct sigaction one_shot_for(int signal, const struct sigaction &program) {
    one_shots[signal].handler = program.sa_sigaction;  // a union with sa_handler
    one_shots[signal].takes_info = (program.sa_flags & SA_SIGINFO) != 0;
    struct sigaction made = program;
    made.sa_sigaction = at_one_shot;
    made.sa_flags = static_cast<int>((made.sa_flags & ~SA_RESETHAND) | SA_SIGINFO);
    return made;
}

bool is_ours(const struct sigaction &action) {
    return is_handled_by(action, at_signal) || is_handled_by(action, at_one_shot);
}

// The action that the agent sets where `action` is wanted.
struct sigaction replaced(int signal, const struct sigaction &action) {
    if (is_ours(action)) return action;
    if (is_default(action)) return caught();
    if ((action.sa_flags & SA_RESETHAND) && action.sa_handler != SIG_IGN) return one_shot_for(signal, action);
    return action;
}

// The action that the program had set where `action` is found. `one_shot`: of `one_shots` at that time.
struct sigaction programs(const struct sigaction &action, Handler one_shot, bool takes_info) {
    if (is_handled_by(action, at_signal)) return default_action();
    if (!is_handled_by(action, at_one_shot)) return action;
    struct sigaction made = action;
    made.sa_sigaction = one_shot;
    made.sa_flags = static_cast<int>(made.sa_flags | SA_RESETHAND);
    if (!takes_info) made.sa_flags &= ~SA_SIGINFO;
    return made;
}

}  // namespace

void catch_signals() {
    for (int s = 1; s <= SIGRTMAX; ++s) {
        struct sigaction now{};
        if (!ends_process(s) || sigaction(s, nullptr, &now) != 0) continue;
        const struct sigaction next = replaced(s, now);
        if (memcmp(&next, &now, sizeof now) != 0) sigaction(s, &next, nullptr);
    }
}

void release_signals(SignalAction original) {
    for (int s = 1; s <= SIGRTMAX; ++s) {
        struct sigaction now{};
        if (!ends_process(s) || original(s, nullptr, &now) != 0 || !is_ours(now)) continue;
        const struct sigaction program = programs(now, one_shots[s].handler, one_shots[s].takes_info);
        original(s, &program, nullptr);
    }
}

int program_sigaction(SignalAction original, int signal, const struct sigaction *act, struct sigaction *old) {
    if (!ends_process(signal)) return original(signal, act, old);
    const Handler one_shot = one_shots[signal].handler;
    const bool takes_info = one_shots[signal].takes_info;
    struct sigaction next{};
    if (act) next = is_connected() ? replaced(signal, *act) : *act;
    const int r = original(signal, act ? &next : nullptr, old);
    if (r == 0 && old) *old = programs(*old, one_shot, takes_info);
    return r;
}

}  // namespace gpubpf
