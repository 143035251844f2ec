// Signals whose default action ends the process. The agent reads the maps first, and the signal then ends the process as it
// would alone: in the same thread, at the same instruction, with the same siginfo.
#pragma once

#include <csignal>

namespace gpubpf {

using SignalAction = int (*)(int, const struct sigaction *, struct sigaction *);

// Those with the default action, or with a handler that SA_RESETHAND removes.
void catch_signals();
void release_signals(SignalAction original);
// The program's call of sigaction. Hides the agent's handlers: programs install their own where they see the default action. If the
// program restores the default action, also by SA_RESETHAND, the agent catches the signal again. `original`: not hooked.
int program_sigaction(SignalAction original, int signal, const struct sigaction *act, struct sigaction *old);

}  // namespace gpubpf
