#include <atomic>
#include <pthread.h>

#include "thunk/forked.h"

namespace hipsim {
namespace {

std::atomic<bool> opened = false, in_child = false;

[[gnu::constructor]] void watch() {
    pthread_atfork(nullptr, nullptr, [] { in_child = opened.load(); });
}

}  // namespace

bool forked() { return in_child; }
void note_opened() { opened = true; }

}  // namespace hipsim
