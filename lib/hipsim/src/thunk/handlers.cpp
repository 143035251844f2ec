#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <utility>

#include "embedded/thread_id.h"
#include "thunk/clock.h"
#include "thunk/handlers.h"
#include "thunk/queues.h"
#include "thunk/threads.h"

namespace hipsim {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstLook{1}, kLongestLook{8};  // at what the threads do
constexpr uint64_t kSubmission =
    1'000'000;  // ns of CPU time within which HIP has submitted work; it takes some us
constexpr uint64_t kPolling =
    1'000'000;  // ns of CPU time in which ROCr's thread looks at all signals many times
constexpr uint64_t kSpin = 300'000'000;  // ns of CPU time without a call: HIP waits by spinning
constexpr milliseconds kSilence{
    2000};  // without a call of the runtime: the program waits in a way that is unknown

thread_local bool serving = false;  // this thread runs the functions

struct Function {
    Request request;
    std::function<void()> function;
    uint64_t used = 0;  // CPU time of the requesting thread when this function was first due
};

struct Handlers {
    std::mutex mutex;
    std::condition_variable wake;
    std::multimap<uint64_t, Function> by_time;
    bool running = false;
    std::atomic<uint64_t> earliest{UINT64_MAX};  // time of a function
    std::atomic<uint64_t> activity{0};
    std::atomic<uint32_t> working{0};  // host threads
    std::mutex waiting_mutex;
    std::map<int, std::function<bool()>> waiting;  // by thread: whether its wait is over
    std::set<int> rocr;                            // threads of ROCr that look for signals that have changed
};

Handlers &handlers() {
    static Handlers *const instance = new Handlers;
    return *instance;
}

// Returns the first bytes of a file; none if it cannot be read.
std::string content(const std::string &path) {
    std::string text(512, '\0');
    int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, text.data(), text.size());
    if (file >= 0) close(file);
    text.resize(size < 0 ? 0 : static_cast<size_t>(size));
    return text;
}

// What a thread does that is not the calling one.
enum class Doing { runs, sleeps, waits_for_another };

Doing doing(int thread) {
    std::string folder = "/proc/self/task/" + std::to_string(thread);
    std::string text = content(folder + "/syscall");
    if (text.empty()) {  // it has ended, or Linux was built without this file
        std::string status = content(folder + "/stat");
        size_t name = status.rfind(')');
        return name == std::string::npos || status.compare(name, 3, ") S") == 0 ? Doing::sleeps : Doing::runs;
    }
    long number = 0;
    unsigned long a, b, c, timeout;
    int found = sscanf(text.c_str(), "%ld 0x%lx 0x%lx 0x%lx 0x%lx", &number, &a, &b, &c, &timeout);
    if (found < 1) return Doing::runs;
    return number == SYS_futex && found == 5 && timeout == 0 ? Doing::waits_for_another : Doing::sleeps;
}

// Returns the CPU time that a clock shows, in ns; UINT64_MAX if its thread has ended.
uint64_t cpu_time(clockid_t clock) {
    timespec time{};
    if (clock_gettime(clock, &time) != 0) return UINT64_MAX;
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

// The clock of another thread, as pthread_getcpuclockid() makes it.
clockid_t clock_of(int thread) { return static_cast<clockid_t>(~static_cast<unsigned>(thread) << 3 | 6); }

// Whether no thread of the program can go on by itself. ROCr's own thread may poll signals all the time; `polled` has its CPU time at
// the first look since something happened. A thread that has launched or waited for work may sleep for a time that
// it chose, and then go on.
bool all_wait(std::map<int, uint64_t> &polled) {
    Handlers &all = handlers();
    if (all.working != 0) return false;
    DIR *folder = opendir("/proc/self/task");
    if (folder == nullptr) return false;
    bool every = true;
    for (const dirent *entry = readdir(folder); every && entry != nullptr; entry = readdir(folder)) {
        int thread = atoi(entry->d_name);
        if (thread == 0 || thread == embedded::thread_id()) continue;
        {
            std::lock_guard lock(all.waiting_mutex);
            auto found = all.waiting.find(thread);
            if (found != all.waiting.end()) {
                every = !found->second();
                continue;
            }
            if (all.rocr.contains(thread)) {
                const uint64_t used = cpu_time(clock_of(thread));
                const uint64_t first = polled.try_emplace(thread, used).first->second;
                every = used - first > kPolling || doing(thread) != Doing::runs;
                continue;
            }
        }
        Doing what = doing(thread);
        every = what == Doing::waits_for_another || (what == Doing::sleeps && !has_time(thread));
    }
    closedir(folder);
    return every;
}

// Whether the requesting thread has submitted the work and gone on.
bool is_settled(Function &function) {
    const Request &request = function.request;
    if (request.by->count > request.count || doing(request.by->thread) != Doing::runs) return true;
    uint64_t used = cpu_time(clock_of(request.by->thread));
    if (function.used == 0) function.used = used;
    return used - function.used > kSubmission || used == UINT64_MAX;
}

enum class Turn { later, now, all_sleep };

// What the thread that runs the functions has seen of the host threads.
class Look {
  public:
    // Returns whether a function may run whose time no host thread has reached.
    Turn turn();
    // A function has run.
    void ran() {
        pause = kFirstLook;
        waited_ = false;
    }
    milliseconds pause = kFirstLook;

  private:
    uint64_t activity_ = 0, used_ = 0;  // CPU time of the process until the last call, or work of the device
    std::chrono::steady_clock::time_point active_ = std::chrono::steady_clock::now();
    bool waited_ = false;             // all threads did, when it looked before
    std::map<int, uint64_t> polled_;  // CPU time of ROCr's threads at the first look since then
};

Turn Look::turn() {
    Handlers &all = handlers();
    auto now = std::chrono::steady_clock::now();
    uint64_t used = cpu_time(CLOCK_PROCESS_CPUTIME_ID);
    bool idle = queues_wait();
    if (uint64_t seen = all.activity; seen != activity_ || !idle) {
        activity_ = seen;
        active_ = now;
        used_ = used;
        polled_.clear();
    }
    bool waits = idle && all_wait(polled_), again = waits && waited_;
    waited_ = waits;
    pause = waits ? kFirstLook : std::min(pause * 2, kLongestLook);
    if (activity_ != all.activity) return Turn::later;
    if (again) return Turn::all_sleep;
    bool silent = (now - active_ > kSilence || used - used_ > kSpin) && all.working == 0 && queues_wait();
    return silent ? Turn::now : Turn::later;
}

[[noreturn]] void serve() {
    Handlers &all = handlers();
    std::unique_lock lock(all.mutex);
    serving = true;
    Look look;
    for (;;) {
        all.earliest = all.by_time.empty() ? UINT64_MAX : all.by_time.begin()->first;
        if (all.by_time.empty()) {
            all.wake.wait(lock);
            look = {};
            continue;
        }
        auto first = all.by_time.begin();
        const uint64_t time = first->first;
        Turn turn = Turn::later;
        if (time <= latest_host_time()) {
            look.pause = kFirstLook;
            if (is_settled(first->second)) turn = Turn::now;
        } else {
            lock.unlock();
            turn = look.turn();
            lock.lock();
            first = all.by_time.begin();
            if (first == all.by_time.end() || first->first != time) continue;
        }
        if (turn == Turn::later) {
            all.wake.wait_for(lock, look.pause);
            continue;
        }
        auto function = std::move(first->second.function);
        all.by_time.erase(first);
        lock.unlock();
        if (turn == Turn::all_sleep) advance_all_hosts(time);
        {
            WorkerTime worker(time);
            function();
        }
        look.ran();
        lock.lock();
    }
}

}  // namespace

const std::shared_ptr<HostCalls> &host_calls() {
    static thread_local std::shared_ptr<HostCalls> calls = std::make_shared<HostCalls>(embedded::thread_id());
    return calls;
}

Request request() { return {host_calls(), host_calls()->count}; }

void run_at(uint64_t time, const Request &request, std::function<void()> function) {
    Handlers &all = handlers();
    std::lock_guard lock(all.mutex);
    all.by_time.emplace(time, Function{request, std::move(function), 0});
    all.earliest = all.by_time.begin()->first;
    if (!all.running) {
        all.running = true;
        start_thread("hipsim handlers", serve).detach();
    }
    all.wake.notify_one();
}

void forget_functions() {
    Handlers &all = handlers();
    std::lock_guard lock(all.mutex);
    all.by_time.clear();
}

void wake_handlers() {
    if (handlers().earliest <= latest_host_time()) handlers().wake.notify_one();
}

void note_activity() {
    if (serving) return;
    host_calls()->count.fetch_add(1, std::memory_order_relaxed);
    handlers().activity.fetch_add(1, std::memory_order_relaxed);
    wake_handlers();
}

void note_thread_of_rocr() {
    std::lock_guard lock(handlers().waiting_mutex);
    handlers().rocr.insert(embedded::thread_id());
}

void begin_work() { ++handlers().working; }

void end_work() { --handlers().working; }

Waits::Waits(std::function<bool()> over) {
    std::lock_guard lock(handlers().waiting_mutex);
    handlers().waiting[embedded::thread_id()] = std::move(over);
}

Waits::~Waits() {
    std::lock_guard lock(handlers().waiting_mutex);
    handlers().waiting.erase(embedded::thread_id());
}

}  // namespace hipsim
