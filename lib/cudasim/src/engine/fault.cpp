// Faults: those that generated code detects, and those that the processor detects (accesses to unmapped pages).

#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sys/mman.h>
#include <ucontext.h>

#include "engine/internal.h"

namespace cudasim {

thread_local Guard *current_guard = nullptr;

namespace {

struct sigaction previous[2];  // the application's actions for SIGSEGV and SIGBUS
std::mutex install_mutex;

void call_previous(const struct sigaction &old, int number, siginfo_t *info, void *context) {
    if (old.sa_flags & SA_SIGINFO) {
        old.sa_sigaction(number, info, context);
    } else if (old.sa_handler == SIG_IGN && info->si_code <= 0) {
        return;
    } else if (old.sa_handler == SIG_DFL || old.sa_handler == SIG_IGN) {
        signal(number, SIG_DFL);                // the access is repeated and then ends the process
        if (info->si_code <= 0) raise(number);  // a process sent the signal, so there is no access
    } else {
        old.sa_handler(number);
    }
}

void on_signal(int number, siginfo_t *info, void *context) {
    Guard *guard = current_guard;
    if (guard == nullptr || info->si_code <= 0) {  // not from generated code; si_code <= 0: sent by a process
        call_previous(previous[number == SIGBUS], number, info, context);
        return;
    }
    guard->code = CS_FAULT_ILLEGAL_ADDRESS;
    guard->address = reinterpret_cast<uint64_t>(info->si_addr);
    guard->size = 0;
    guard->access = 'r';
#ifdef __x86_64__
    const auto *machine = static_cast<const ucontext_t *>(context);
    if (machine->uc_mcontext.gregs[REG_ERR] & 2) guard->access = 'w';
#endif
    guard->what = nullptr;
    siglongjmp(guard->where, 1);
}

}  // namespace

void install_signal_handlers() {
    const int numbers[2] = {SIGSEGV, SIGBUS};
    for (int k = 0; k < 2; k++) {
        struct sigaction now;
        if (sigaction(numbers[k], nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) &&
            now.sa_sigaction == on_signal)
            continue;
        std::lock_guard<std::mutex> lock(install_mutex);
        struct sigaction ours = {};
        ours.sa_sigaction = on_signal;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&ours.sa_mask);
        if (sigaction(numbers[k], nullptr, &now) != 0) continue;
        if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_signal) continue;
        previous[k] = now;
        sigaction(numbers[k], &ours, nullptr);
    }
}

void raise_fault(cs_warp *w, int code, uint64_t address, uint32_t size, char access, const char *what) {
    Guard *guard = current_guard;
    guard->warp = w;
    guard->code = code;
    guard->address = address;
    guard->size = size;
    guard->access = access;
    guard->what = what;
    siglongjmp(guard->where, 1);
}

const Windows &windows() {
    static const Windows found = [] {
        const size_t size = uint64_t{kClusterWindow} + kWindow + kParameterWindow;
        void *base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        const auto at = base == MAP_FAILED ? 0x1000 : reinterpret_cast<uint64_t>(base);
        return Windows{at, at + kClusterWindow, at + kClusterWindow + kWindow};
    }();
    return found;
}

void describe(Fault &fault) {
    const char *what = "unspecified launch failure";
    switch (fault.code) {
        case CS_FAULT_ILLEGAL_ADDRESS: what = "illegal address"; break;
        case CS_FAULT_MISALIGNED: what = "misaligned address"; break;
        case CS_FAULT_ASSERT: what = "assertion failed"; break;
        case CS_FAULT_ILLEGAL_INSTRUCTION: what = "illegal instruction"; break;
        case CS_FAULT_INVALID_PC: what = "invalid program counter"; break;
        default: break;
    }
    std::string text = fault.message.empty() ? what : fault.message;
    char part[256];
    if (fault.access) {
        const char *verb = fault.access == 'w' ? "write" : fault.access == 'a' ? "atomic" : "read";
        if (fault.access_size)
            snprintf(part, sizeof part, ": %s of %u bytes at 0x%llx", verb, fault.access_size,
                     static_cast<unsigned long long>(fault.address));
        else
            snprintf(part, sizeof part, ": %s at 0x%llx", verb,
                     static_cast<unsigned long long>(fault.address));
        text += part;
    }
    text += " in " + fault.kernel;
    snprintf(part, sizeof part, ", block (%u,%u,%u) thread (%u,%u,%u)", fault.block[0], fault.block[1],
             fault.block[2], fault.thread[0], fault.thread[1], fault.thread[2]);
    text += part;
    if (fault.source_line) text += ", " + fault.file + ":" + std::to_string(fault.source_line);
    fault.message = text + (fault.patch_offset ? ", in a patch" : ", PTX line " + std::to_string(fault.line));
}

Buffer::~Buffer() {
    if (data_) munmap(data_, size_);
}

uint8_t *Buffer::reserve(size_t size) {
    if (size <= size_ && data_) return data_;
    if (data_) munmap(data_, size_);
    size_ = (size + 4095) / 4096 * 4096;
    if (size_ == 0) size_ = 4096;
    void *fresh =
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fresh == MAP_FAILED) {
        data_ = nullptr;
        size_ = 0;
        throw std::bad_alloc();
    }
    data_ = static_cast<uint8_t *>(fresh);
    return data_;
}

}  // namespace cudasim
