// libc functions that end the program without running exit handlers, and sigaction. The agent sends the measurements first.
#include <dlfcn.h>

#include "agent.h"

namespace gpubpf {

namespace {

void hook_exit(int status);
void hook_exit_of_c(int status);
int hook_execve(const char *path, char *const *arguments, char *const *environment);
int hook_execveat(int folder, const char *path, char *const *arguments, char *const *environment, int flags);
int hook_fexecve(int file, char *const *arguments, char *const *environment);
int hook_sigaction(int signal, const struct sigaction *act, struct sigaction *old);

enum End { kExit, kExitOfC, kExecve, kExecveat, kFexecve, kSigaction };
#define END(name, hook) {name, reinterpret_cast<void *>(&hook), nullptr, nullptr, kLacksExit}
Hook end_hooks[] = {
    END("_exit", hook_exit),        END("_Exit", hook_exit_of_c), END("execve", hook_execve),
    END("execveat", hook_execveat), END("fexecve", hook_fexecve), END("sigaction", hook_sigaction),
};
#undef END

template <class Function>
Function *original(End end, Function &) {
    return reinterpret_cast<Function *>(end_hooks[end].original);
}

// exit() calls this, too, once the exit handlers have run.
void hook_exit(int status) {
    agent.finish(kAtExit, Reading::Last);
    original(kExit, hook_exit)(status);
}

void hook_exit_of_c(int status) {
    agent.finish(kAtExit, Reading::Last);
    original(kExitOfC, hook_exit_of_c)(status);
}

// If these succeed, the process runs another program. A child of vfork() calls them in the memory of its parent.

int hook_execve(const char *path, char *const *arguments, char *const *environment) {
    agent.finish(kAtExit, Reading::OnTheWay);
    return original(kExecve, hook_execve)(path, arguments, environment);
}

int hook_execveat(int folder, const char *path, char *const *arguments, char *const *environment, int flags) {
    agent.finish(kAtExit, Reading::OnTheWay);
    return original(kExecveat, hook_execveat)(folder, path, arguments, environment, flags);
}

int hook_fexecve(int file, char *const *arguments, char *const *environment) {
    agent.finish(kAtExit, Reading::OnTheWay);
    return original(kFexecve, hook_fexecve)(file, arguments, environment);
}

int hook_sigaction(int signal, const struct sigaction *act, struct sigaction *old) {
    return program_sigaction(original(kSigaction, hook_sigaction), signal, act, old);
}

}  // namespace

HookTable ends_to_hook() {
    for (Hook &hook : end_hooks) hook.target = dlsym(RTLD_DEFAULT, hook.name);
    return {end_hooks, sizeof end_hooks / sizeof *end_hooks};
}

SignalAction original_sigaction() {
    const auto hooked = original(kSigaction, hook_sigaction);
    return hooked ? hooked : sigaction;
}

}  // namespace gpubpf
