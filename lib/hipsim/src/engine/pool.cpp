#include "engine/pool.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <sched.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace hipsim {

struct Pool::Shared::State {
    Job *job;
    unsigned wanted;   // threads that may still join
    unsigned working;  // threads that have joined
};

namespace {

struct Threads {
    std::mutex mutex;
    std::condition_variable called, left;
    std::vector<void *> jobs;  // of type State
    unsigned started = 0, idle = 0;
    pid_t process = 0;
};

// Never destroyed: the threads outlive the globals. A forked process starts with a new object, because it has no threads.
Threads &threads() {
    static Threads *all = new Threads;
    if (all->process != getpid()) {
        if (all->process) all = new Threads;
        all->process = getpid();
    }
    return *all;
}

}  // namespace

unsigned Pool::cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return unsigned(std::max(1, CPU_COUNT(&set)));
    return std::max(1u, std::thread::hardware_concurrency());
}

Pool::Shared::Shared(Job &job, unsigned helpers) {
    if (helpers == 0) return;
    Threads &all = threads();
    std::lock_guard lock(all.mutex);
    state_ = new State{&job, helpers, 0};
    all.jobs.push_back(state_);
    while (all.started < 2 * helpers && all.idle < helpers) {
        try {
            std::thread([&all] {
                std::unique_lock own(all.mutex);
                while (true) {
                    auto wants = [](void *at) { return static_cast<State *>(at)->wanted > 0; };
                    auto found = std::find_if(all.jobs.begin(), all.jobs.end(), wants);
                    if (found == all.jobs.end()) {
                        all.called.wait(own);
                        continue;
                    }
                    State *state = static_cast<State *>(*found);
                    --state->wanted;
                    ++state->working;
                    --all.idle;
                    own.unlock();
                    state->job->work();
                    own.lock();
                    ++all.idle;
                    --state->working;
                    all.left.notify_all();
                }
            }).detach();
        } catch (const std::exception &) {
            break;  // fewer helpers
        }
        ++all.started;
        ++all.idle;
    }
    all.called.notify_all();
}

void Pool::Shared::end() {
    if (!state_) return;
    Threads &all = threads();
    std::unique_lock lock(all.mutex);
    all.jobs.erase(std::find(all.jobs.begin(), all.jobs.end(), static_cast<void *>(state_)));
    all.left.wait(lock, [&] { return state_->working == 0; });
    delete state_;
    state_ = nullptr;
}

}  // namespace hipsim
