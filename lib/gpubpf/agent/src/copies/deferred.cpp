#include "copies/deferred.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "attachment.h"
#include "driver/gpu_idle.h"

namespace gpubpf {

namespace {

using Clock = std::chrono::steady_clock;
// ms that the worker thread waits for a suitable moment before it does other work
constexpr uint32_t kPatience = 20;
constexpr int kOften = 10;  // ms between such attempts
// Launches are watched for kWatch, then not for a while: if a kernel never ends, watching is useless.
constexpr std::chrono::milliseconds kWatch{3000}, kLeastPause{1000}, kMostPause{8000};

struct Pending {
    Module *module;    // null: only the context is prepared
    Context *context;  // null: all contexts
    bool begun = false;
    bool operator==(const Pending &other) const {
        return module == other.module && context == other.context && begun == other.begun;
    }
};

struct State {
    std::mutex lock;  // guards the next member; never held across a driver call
    std::vector<Pending> later;
    // Only the worker thread uses this and the members below. `watching` exists while `later` is not empty.
    std::unique_ptr<Watching> watching;
    Clock::time_point watched{};  // start of the watch
    std::chrono::milliseconds pause = kLeastPause;
    Clock::time_point paused{};  // end of the pause
};

AttachmentState<State> state;

// Tells the tool that a module's copies are installed, or cannot be.
void send_ready(Module *module) {
    uint32_t request;
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        request = std::exchange(module->request, 0);
    }
    if (request) tell_tool(message::Ready{request});
}

}  // namespace

const Lifetime deferred_lifetime = lifetime_of_attachment_state<state>();

void stop_installing() {
    std::unique_ptr<Watching> over;  // destroyed without the lock held
    std::lock_guard<std::mutex> hold(state->lock);
    state->later.clear();
    over = std::move(state->watching);
}

void context_discovered(Context *context) { install_later(nullptr, context); }

void install_later(Module *module, Context *context) {
    {
        std::lock_guard<std::mutex> hold(state->lock);
        const Pending one{module, context};
        if (std::find(state->later.begin(), state->later.end(), one) == state->later.end())
            state->later.push_back(one);
    }
    agent.wake_to_install();
}

void take_ahead(Reader &r, int image) {
    message::Ahead sent;
    const bool complete = r.read(sent);
    auto *m = new Module;
    m->ahead = m->gone = true;
    m->answer_cc = sent.compute_capability;
    m->request = sent.request;
    if (complete) m->answer = checked_answer(std::move(sent.answer), image, agent.config.maps);
    if (!m->answer) return send_ready(m);
    {
        std::lock_guard<std::mutex> hold(registry().lock);
        registry().ahead.push_back(m);
    }
    install_later(m, nullptr);
}

int install_due_in() {
    std::lock_guard<std::mutex> hold(state->lock);
    if (state->later.empty()) return -1;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(state->paused - Clock::now()).count();
    return std::max(kOften, static_cast<int>(left));
}

void install_pending(Install install) {
    std::vector<Pending> work;
    {
        std::lock_guard<std::mutex> hold(state->lock);
        if (state->later.empty() || Clock::now() < state->paused) return;
        work = state->later;
        for (Pending &p : state->later) p.begun = true;  // entries that are added later need another attempt
    }
    if (!state->watching) {
        state->watching = std::make_unique<Watching>();
        state->watched = Clock::now();
    }
    const std::vector<Context *> contexts = registry().all_contexts();
    std::set<Context *> ready;
    for (Context *c : contexts) {
        bool wanted = false;
        for (const Pending &w : work) wanted = wanted || !w.context || w.context == c;
        if (wanted && is_usable(c) && agent.live && wait_is_short(*c, kPatience)) ready.insert(c);
    }
    std::unique_ptr<LaunchesHeld> held;
    if (!ready.empty()) {
        held = std::make_unique<LaunchesHeld>();
        const bool ask = held->none_under_way();
        for (auto it = ready.begin(); it != ready.end();)
            it = ask && held->nothing_runs(**it) ? std::next(it) : ready.erase(it);
        if (ready.empty()) held.reset();
        else held->begin_work();
        for (Context *c : ready) c->busy_until = 0;
    }
    std::vector<Pending> left;
    for (const Pending &w : work) {
        bool waits = false;
        for (Context *c : contexts) {
            if ((w.context && w.context != c) || !is_usable(c)) continue;
            if (!ready.count(c) || !held->more()) waits = true;
            else install(w.module, *c);
        }
        if (waits && agent.live) left.push_back(w);
    }
    held.reset();
    for (const Pending &w : work) {
        const auto same = [&](const Pending &l) { return l.module == w.module; };
        if (w.module && std::none_of(left.begin(), left.end(), same)) send_ready(w.module);
    }
    std::unique_ptr<Watching> over;
    {
        std::lock_guard<std::mutex> hold(state->lock);
        auto &later = state->later;
        later.erase(std::remove_if(later.begin(), later.end(), [](const Pending &p) { return p.begun; }),
                    later.end());
        for (const Pending &l : left)
            if (std::find(later.begin(), later.end(), l) == later.end()) later.push_back(l);
        if (state->later.empty()) {
            over = std::move(state->watching);
            state->pause = kLeastPause;
        } else if (Clock::now() - state->watched > kWatch) {
            over = std::move(state->watching);
            state->paused = Clock::now() + state->pause;
            state->pause = std::min(2 * state->pause, kMostPause);
        }
    }
}

}  // namespace gpubpf
