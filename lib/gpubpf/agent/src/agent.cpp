// Startup, service thread, shutdown.
//
// The driver loads this library inside the first cuInit and calls InitializeInjection. Every wait of the
// agent has a timeout. If no tool answers, the process runs as if there were no agent.
#include "attachment.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <optional>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <unwind.h>

#include "compilers.h"
#include "copies/drain.h"
#include "copies/graph.h"
#include "copies/link.h"
#include "copies/patches.h"
#include "copies/deferred.h"
#include "copies/preexisting.h"
#include "copies/shared.h"
#include "copies/sidecar.h"
#include "driver/current.h"
#include "driver/gpu_idle.h"
#include "driver/leftovers.h"
#include "hooks.h"
#include "log/allocation.h"
#include "log/clock.h"
#include "log/cupti.h"
#include "log/other_profilers.h"
#include "log/log.h"
#include "log/host_program.h"
#include "log/operation.h"
#include "log/stack.h"
#include "log/stamp.h"
#include "patch.h"
#include "shared_files.h"
#include "signals.h"

// The name of the attached tool, for a second tool's error message; empty without a tool.
extern "C" {
__attribute__((visibility("default"))) char gpubpf_owner[gpubpf::kOwnerSize] = "";
}

namespace gpubpf {

Agent agent;

namespace {

constexpr int kClockEvery = 1000;  // ms
constexpr uint32_t kAtSignal =
    1000;  // ms that running kernels may take to finish before a signal ends the process
// The maps are read once the program has launched nothing for kQuiet, or else every kReadEvery. Reading takes at most 1 % of the time.
constexpr std::chrono::milliseconds kQuiet{100}, kReadEvery{1000};
constexpr int kReadShare = 100;
constexpr uint32_t kSwapping = 200;  // ms to wait for launches that are being replaced
constexpr useconds_t kStep = 1000;   // µs
// ms that the hooks stay while one of the agent's own driver calls waits
constexpr int kPatience = 5000;

// The state of one connection, and so of one attachment. If a forked child attaches again, it gets its own
// state and leaves the old one untouched.
struct Connection {
    uint64_t number = 0;  // number of the attachment
    OwnedFile socket, wake;
    pid_t pid = 0;
    std::mutex sending;
    std::mutex lock;  // guards the members below
    std::condition_variable changed;
    std::map<uint32_t, std::shared_ptr<Question>> questions;
    uint32_t requests = 0;
    bool welcome = false, patched = false, gone = false;
    bool over = false;  // the measurement has ended: start() must no longer begin it
    // These are counters, because a signal handler waits for them.
    std::atomic<uint32_t> finish_asked{0}, finish_done{0}, finish_wait_ms{0};
    std::atomic<bool> pools_wanted{false}, reading_wanted{false}, report_wanted{false},
        kernel_records_wanted{false}, installing{false}, calibrating{false};
    std::atomic<uint64_t> finished_at{0};  // launches that the last complete drain covered
    std::atomic<bool> finished{false};     // there was a complete drain
    // For readings that the tool did not ask for. Only the service thread uses the first two.
    uint64_t seen_launches = 0;
    std::chrono::steady_clock::time_point looked{};
    std::atomic<uint64_t> read_launches{0};  // launches that the last one covered
    std::atomic<bool> keeping{false};        // one is under way
    std::atomic<std::chrono::steady_clock::time_point> next_reading{};
    std::atomic<bool> stopped{false};  // everything was read at the tool's request; the agent detaches
    std::atomic<bool> starting{true};  // start() is running and may still install hooks

    // Work that may wait for the driver runs on a separate thread, so that the service thread notices at once
    // when the tool exits.
    std::mutex jobs_lock;
    std::condition_variable jobs_changed;
    std::deque<std::function<void()>> jobs;
    std::atomic<bool> working{false}, worked{false};  // running a job; the thread has finished
    pthread_t worker{};
    bool has_worker = false;
    // `always`: also while the agent rests. Such a job itself checks whether it may call the driver.
    void submit(std::function<void()> job, bool always = false) {
        std::lock_guard<std::mutex> hold(jobs_lock);
        if (agent.resting && !always) return;
        jobs.push_back(std::move(job));
        jobs_changed.notify_one();
    }
};

// The state of the process (docs/attach.md, "The life of an agent"). `Ending` starts when the measurement
// ends.
enum class Phase { Idle, Live, Ending };
std::atomic<Phase> phase{Phase::Idle};
Connection *connection = nullptr;  // null only in phase Idle
thread_local bool is_own_thread = false;

bool has_files(const Connection &c) {
    bool has = c.socket.is_ours() && c.wake.is_ours();
    if (!has) agent.control->cut = 1;
    return has;
}

bool wake_up(Connection &c) {
    uint64_t one = 1;
    return has_files(c) && write(c.wake.number, &one, sizeof one) == sizeof one;
}

uint64_t instrumented() {
    uint64_t n = 0;
    uint32_t used = std::min(agent.control->used.load() + 1, kSlots);
    for (uint32_t i = 0; i < used; ++i)
        n += agent.control->slots[i].instrumented.load(std::memory_order_relaxed);
    return n + agent.control->slots[kSlots - 1].instrumented.load(std::memory_order_relaxed);
}

// Returns a number that rises with each launch of copies by the host.
uint64_t launches_of_copies() { return instrumented() - agent.executions.load() + agent.bodies.load(); }

// Whether anything was launched or logged since the last complete drain.
bool to_finish(const Connection &c) {
    return launches_of_copies() != c.finished_at || (oplog.on() && !c.finished);
}

// Stops instrumenting launches, for good: start() may still run, on another thread. `patches`: kernels have patches, so launches
// are instrumented until stop_sanitizer() has removed them.
void end_measuring(Connection &c, bool patches = false) {
    std::lock_guard<std::mutex> hold(c.lock);
    c.over = true;
    if (!patches) agent.live = false;
}

void tool_gone(Connection &c) {
    end_measuring(c);
    agent.connected = false;
    std::map<uint32_t, std::shared_ptr<Question>> open;
    {
        std::lock_guard<std::mutex> hold(c.lock);
        c.gone = true;
        open.swap(c.questions);
    }
    c.changed.notify_all();
    for (auto &q : open) {
        std::lock_guard<std::mutex> hold(q.second->lock);
        q.second->done = true;
        q.second->changed.notify_all();
    }
}

void answered(Connection &c, Reader &r, int image) {
    message::Sidecar sent;
    const bool complete = r.read(sent);
    const uint32_t id = sent.request;
    std::shared_ptr<const Answer> answer =
        complete ? checked_answer(std::move(sent.answer), image, agent.config.maps) : nullptr;
    std::shared_ptr<Question> question;
    {
        std::lock_guard<std::mutex> hold(c.lock);
        auto it = c.questions.find(id);
        if (it == c.questions.end()) return;
        question = it->second;
        c.questions.erase(it);
    }
    if (answer) {
        std::lock_guard<std::mutex> hold(registry().lock);
        Module *module = question->module;
        if (question->type == Message::PatchTable) {
            // The thread that asked uses it.
        } else if (question->type == Message::Kernel) {
            if (!answer->kernels.empty()) module->further.push_back(answer);
        } else {
            // A kernel that was ambiguous may no longer be.
            if (module->answer)
                for (const Layout &l : answer->kernels) registry().kernel(module, l.name)->refused = false;
            module->answer = answer;
            module->request = id;
            module->later_request = id;
            module->later.insert(answer->later.begin(), answer->later.end());
            for (const std::string &name : answer->later)
                if (auto known = module->kernels.find(name); known != module->kernels.end())
                    known->second->later = true;
        }
    }
    bool late;
    {
        std::lock_guard<std::mutex> hold(question->lock);
        question->answer = answer;
        question->done = true;
        late = question->abandoned;
        question->changed.notify_all();
    }
    if (late && answer && question->type != Message::PatchTable)
        install_later(question->module, question->module->context);
    if (answer && question->type != Message::Kernel && question->type != Message::PatchTable)
        found_answered(question->module);
}

void handle(Connection &c, Frame &frame) {
    Reader r(frame.payload);
    switch (frame.type) {
        case Message::Shared:
            if (!agent.live && !take_shared(r, frame.fd)) c.gone = true;
            break;
        case Message::Consumed:
            c.submit([payload = std::move(frame.payload)] {
                Reader consumed(payload);
                take_consumed(consumed);
            });
            break;
        case Message::Welcome: {
            message::Welcome welcome;
            const bool ok = parse_welcome(r, welcome) && take_host_programs(welcome.config);
            number_process(welcome.process);
            memcpy(gpubpf_owner, welcome.owner.c_str(), welcome.owner.size() + 1);
            agent.config = std::move(welcome.config);
            std::lock_guard<std::mutex> hold(c.lock);
            c.welcome = true;
            c.gone = c.gone || !ok;
            c.changed.notify_all();
            break;
        }
        case Message::Patched: {
            std::lock_guard<std::mutex> hold(c.lock);
            c.patched = true;
            c.changed.notify_all();
            break;
        }
        case Message::Sidecar: answered(c, r, frame.fd); break;
        case Message::Ahead: take_ahead(r, frame.fd); break;
        case Message::Drain: {
            message::Drain sent;
            r.read(sent);
            const uint32_t sequence = sent.sequence, wait_ms = sent.wait_ms, flags = sent.flags;
            if (agent.live && virtual_clock()) agent.control->ended_ns = last_ns();
            if (flags & kStop) {
                end_measuring(c, has_patches());
                phase = Phase::Ending;
            }
            const auto job = [&c, sequence, wait_ms, flags] {
                const bool may_read = !agent.resting || to_finish(c);
                if (flags & kStop && may_read) stop_sanitizer();
                if (flags & kStop) agent.live = false;
                if (flags & kStop && may_read) {
                    wait_until_copies_are_launched(std::max(kSwapping, wait_ms / 2));
                    graphs_back(kSwapping);
                }
                uint64_t now = launches_of_copies();
                if (may_read) drain(sequence, wait_ms, flags & kOnlyRings);
                else tell_tool(message::Drained{sequence, true});
                if (!(flags & kStop)) return;
                c.finished_at = now;  // later launches were not requested
                c.finished = true;
                c.stopped = true;
                wake_up(c);
            };
            c.submit(job, true);
            break;
        }
        default: break;
    }
    if (frame.fd >= 0) close(frame.fd);
}

// Runs jobs until it gets an empty one.
void work(Connection *c) {
    is_own_thread = true;
    prctl(PR_SET_NAME, "gpubpf-work");
    for (std::function<void()> job;;) {
        {
            std::unique_lock<std::mutex> hold(c->jobs_lock);
            c->jobs_changed.wait(hold, [&] { return !c->jobs.empty(); });
            job = std::move(c->jobs.front());
            c->jobs.pop_front();
            c->working = true;
        }
        if (!job) break;
        quietly(job);
        job = nullptr;
        c->working = false;
    }
    if (!agent.resting)
        quietly([&] {
            stop_installing();
            stop_sanitizer();
            release_driver_objects(c->number);
        });
    c->working = false;
    c->worked = true;
}

bool start_thread(pthread_t &thread, void *(*run)(void *), void *argument) {
    SignalsBlocked blocked;
    return pthread_create(&thread, nullptr, run, argument) == 0;
}

// Detaches. Runs on the service thread, when the tool has exited or has received everything that it
// requested.
void end(Connection *c) {
    phase = Phase::Ending;
    tool_gone(*c);
    while (c->starting) usleep(kStep);  // tool_gone() has ended any wait in start()
    if (c->has_worker) {
        {
            std::lock_guard<std::mutex> hold(c->jobs_lock);
            c->jobs.clear();
            c->jobs.push_back(nullptr);
            c->jobs_changed.notify_one();
        }
        for (int waited = 0; !c->worked && waited < kPatience; ++waited) usleep(kStep);
    }
    const auto original = reinterpret_cast<SignalAction>(hooks[kHook_sigaction].original);
    release_signals(original ? original : sigaction);
    take_out(serves_leftovers);
    if (c->has_worker) pthread_join(c->worker, nullptr);
    take_out_rest(serves_leftovers);  // for objects that were released since the first call
    end_cupti_records();
    attachment = 0;
    wait_until_out();
    stop_state();
    agent.control->hooks.fetch_add(calls_not_told(), std::memory_order_relaxed);
    if (has_files(*c)) {
        shutdown(c->socket.number, SHUT_RDWR);
        close(c->socket.number);
        close(c->wake.number);
    }
    end_state();
    munmap(agent.control, sizeof(Control));
    agent.control = nullptr;
    agent.config = Config();
    agent.pumped = 0;
    gpubpf_owner[0] = '\0';
    connection = nullptr;
    delete c;
    phase = Phase::Idle;
}

// Asks the worker thread to calibrate the clocks, unless it already does so.
void submit_calibration(Connection *c) {
    if (c->calibrating.exchange(true)) return;
    c->submit([c] {
        quietly(calibrate_all);
        c->calibrating = false;
    });
}

void install_now(Module *module, Context &context) {
    if (module) return load_sidecar(module, &context, false);
    context_ready(&context, false);
    enlarge_pool(context);
    context.met_until = 0;
}

// Gives the worker thread the work that hooks have requested and, if it is `due`, the installation of copies.
void submit_wanted(Connection *c, bool due) {
    if (c->pools_wanted.exchange(false)) c->submit(enlarge_pools);
    if (c->report_wanted.exchange(false)) c->submit(report_preexisting);
    if (c->kernel_records_wanted.exchange(false)) c->submit([] { quietly(record_kernels); });
    if (due && !c->installing.exchange(true))
        c->submit([c] {
            quietly([] { install_pending(install_now); });
            c->installing = false;
        });
    if (c->reading_wanted)
        c->submit([c] {
            c->reading_wanted = false;  // the next read covers launches from here on
            if (agent.live) read_maps();
        });
}

// Gives the worker thread the final drain requested by request number `asked`.
void submit_finish(Connection *c, uint32_t asked) {
    const auto job = [c, asked] {
        quietly([&] {
            wait_until_copies_are_launched(kSwapping);
            uint64_t now = launches_of_copies();
            if (to_finish(*c) && drain(0, c->finish_wait_ms.load(), false)) {
                c->finished_at = now;
                c->finished = true;
            }
        });
        c->finish_done = asked;
    };
    c->submit(job, true);
}

// Reads the maps now and then, because they do not survive the process. Call it at least every kQuiet.
void read_in_between(Connection *c) {
    using Clock = std::chrono::steady_clock;
    const auto now = Clock::now();
    if (!agent.live || agent.config.pump || agent.resting || now - c->looked < kQuiet) return;
    const uint64_t launches = launches_of_copies();
    const bool quiet = launches == std::exchange(c->seen_launches, launches);
    c->looked = now;
    const auto due = c->next_reading.load();
    if (launches == c->read_launches || c->keeping || now < (quiet ? due : due + kReadEvery)) return;
    c->keeping = true;
    c->submit([c, launches] {
        const auto begin = Clock::now();
        quietly([&] {
            if (read_complete_maps()) c->read_launches = launches;
        });
        const auto end = Clock::now();
        c->next_reading = end + kReadShare * (end - begin);
        c->keeping = false;
    });
}

// Receives one message. Returns false if the tool has exited, or if memory is short.
bool receive_message(Connection &c) {
    Frame frame;
    bool received = false;
    quietly([&] {
        if (!receive_frame(c.socket.number, frame)) return;
        ++agent.heard;
        handle(c, frame);
        received = true;
    });
    return received;
}

void serve(Connection *c) {
    is_own_thread = true;
    prctl(PR_SET_NAME, "gpubpf");
    c->has_worker = start_thread(
        c->worker, [](void *p) -> void * { return work(static_cast<Connection *>(p)), nullptr; }, c);
    uint32_t finishing = 0;
    auto calibrated = std::chrono::steady_clock::now();
    while (c->has_worker && !c->stopped) {
        pollfd fds[2] = {{c->socket.number, POLLIN, 0}, {c->wake.number, POLLIN, 0}};
        const bool clocks = agent.live && oplog.on() && !virtual_clock();
        const int waits = install_due_in(), most = agent.live ? int(kQuiet.count()) : -1;
        if (poll(fds, 2, waits < 0 || (most > 0 && waits > most) ? most : waits) < 0 && errno != EINTR) break;
        quietly([&] { read_in_between(c); });
        if (clocks &&
            std::chrono::steady_clock::now() - calibrated >= std::chrono::milliseconds(kClockEvery - 10)) {
            calibrated = std::chrono::steady_clock::now();
            quietly([&] { submit_calibration(c); });
        }
        if (!has_files(*c)) break;
        if (fds[1].revents & POLLIN) {
            uint64_t n;
            if (read(c->wake.number, &n, sizeof n) < 0 && errno != EAGAIN) break;
        }
        if (fds[0].revents && !receive_message(*c)) break;
        const uint32_t asked = c->finish_asked.load();
        bool submitted = asked == finishing;
        quietly([&] {
            submit_wanted(c, waits >= 0);
            if (submitted) return;
            submit_finish(c, asked);
            submitted = true;
        });
        if (!submitted) c->finish_done = asked;
        finishing = asked;
    }
    tool_gone(*c);
    c->finish_done = UINT32_MAX;
    end(c);
}

// The driver may shut down after this, so the agent's threads no longer call it: the agent rests. Exit handlers that are older,
// and destructors, run later and may still launch (resume). The maps are no longer read after launches of other threads.
void at_exit() {
    agent.exit_thread = thread_id();
    agent.finish(kAtExit, Reading::OnTheWay);
    abandon_leftovers();
    Visit visit;
    Connection *c = attachment.load() ? connection : nullptr;
    if (!c || c->pid != getpid()) return;
    {
        std::lock_guard<std::mutex> hold(c->jobs_lock);
        agent.resting = true;
        c->jobs.clear();
    }
    for (int i = 0; c->working && i < int(kAtExit); ++i) usleep(kStep);
}

void in_forked_child() {
    agent.live = false;
    agent.connected = false;
    agent.resting = agent.ending = false;
    agent.exit_thread = 0;
    attachment = 0;
    abandon_state();
    if (connection && connection->socket.is_ours()) close(connection->socket.number);
    if (connection && connection->wake.is_ours()) close(connection->wake.number);
    connection = nullptr;
    phase = Phase::Idle;
    gpubpf_owner[0] = '\0';
}

constexpr char kNoFile[] =
    "all: it can make no files in memory (ulimit -n limits their number, ulimit -f their size)\n";

// Asks the tool to install the hooks while it keeps this process stopped. Returns why that failed, or "".
std::string install_running(Connection *c, bool compilers, std::string &left_out) {
    std::vector<Patch> patches;
    std::string failed = prepare(hooks, hook_count(), left_out, patches);
    if (compilers) failed += prepare(compiler_hooks(), compiler_hook_count(), left_out, patches);
    if (!failed.empty() || patches.empty()) return failed;
    int file = patch_file(patches);
    if (file < 0) return kNoFile;
    tell_tool(message::Patches{}, file);
    close(file);
    std::unique_lock<std::mutex> hold(c->lock);
    c->changed.wait_for(hold, std::chrono::seconds(20), [&] { return c->patched || c->gone; });
    return c->patched ? "" : "all: the tool did not put them in\n";
}

// Opens the socket, the wake-up event and the control block of an attachment. On failure, tells the tool,
// closes everything and returns false.
bool open_connection(Connection &c, const char *name) {
    c.pid = getpid();
    c.socket = OwnedFile(connect_to_tool(name));
    if (c.socket.number < 0) return false;
    c.wake = OwnedFile(move_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
    agent.control_fd = memory_file("gpubpf-control", sizeof(Control));
    void *control = c.wake.number < 0 ? MAP_FAILED
                                      : mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED,
                                             agent.control_fd, 0);
    if (control != MAP_FAILED) {
        agent.control = static_cast<Control *>(control);
        return true;
    }
    send_frame(c.socket.number, Message::Hooked, Writer(message::Hooked{kNoFile, "", {}}).bytes, -1);
    for (int file : {c.socket.number, c.wake.number, agent.control_fd})
        if (file >= 0) close(file);
    return false;
}

// Sends the first messages, with the control block and the stubs.
void say_hello() {
    int version = 0;  // 12080 for CUDA 12.8
    if (driver.cuDriverGetVersion) driver.cuDriverGetVersion(&version);
    tell_tool(
        message::Hello{kProtocolVersion, static_cast<uint32_t>(version), process_name(), Vendor::Nvidia},
        agent.control_fd);
    close(agent.control_fd);
    const int stubs = make_stubs();
    tell_tool(message::Stubs{stubs >= 0}, stubs);
}

// Waits for the tool's configuration. Returns false if the tool is silent or takes too long. The tool sends
// messages while it works.
bool wait_for_welcome(Connection &c) {
    constexpr auto kSilence = std::chrono::seconds(5), kLongest = std::chrono::seconds(30);
    const auto until = std::chrono::steady_clock::now() + kLongest;
    std::unique_lock<std::mutex> hold(c.lock);
    for (uint32_t heard = agent.heard - 1; !c.welcome && !c.gone && heard != agent.heard;) {
        if (std::chrono::steady_clock::now() >= until) break;
        heard = agent.heard;
        c.changed.wait_for(hold, kSilence, [&] { return c.welcome || c.gone; });
    }
    close_stub_file();
    if (!c.welcome) shutdown(c.socket.number, SHUT_RDWR);
    return c.welcome && !c.gone;
}

// Returns why there is no log, or "".
std::string open_log() {
    if (!agent.config.log_records) return "";
    const int log = oplog.open(agent.config.log_records, virtual_clock());
    if (log < 0) return kNoFile;
    tell_tool(message::Log{agent.config.log_records}, log);
    close(log);
    return "";
}

// Tells the tool which functions could not be hooked, and which GPUs the program already uses.
void report_hooks(const std::string &failed, const std::string &left_out) {
    std::vector<uint32_t> capabilities;
    if (agent.live && agent.late) quietly([&] { capabilities = meet_primary_contexts(); });
    tell_tool(message::Hooked{failed, left_out, capabilities});
}

// Returns where CUPTI's library may be, after kCuptiAutomatic if the user did not request it. "": do not use
// CUPTI.
std::string cupti_wanted() {
    const char *wanted = getenv(kCuptiVariable);
    if (!wanted || !agent.config.stamps) return "";
    const bool automatic = strncmp(wanted, kCuptiAutomatic, sizeof kCuptiAutomatic - 1) == 0;
    return automatic && !cupti_is_free() ? "" : wanted;
}

struct Starting {
    explicit Starting(Connection &c) : connection(c) {}
    ~Starting() { connection.starting = false; }
    Starting(const Starting &) = delete;
    Starting &operator=(const Starting &) = delete;
    Connection &connection;
};

// Running: the program's threads may be inside the driver's functions, so the tool installs the hooks.
enum class How { FirstInit, Running };

AttachStatus start(const char *name, How how) {
    void *library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    if (!library) return AttachStatus::NoDriver;
    Phase idle = Phase::Idle;
    if (!phase.compare_exchange_strong(idle, Phase::Live))
        return idle == Phase::Live ? AttachStatus::InUse : AttachStatus::Ending;
    std::optional<Visit> visit(std::in_place);  // detach waits for this
    auto connected = std::make_unique<Connection>();
    if (!name || !driver.find(library) || !open_connection(*connected, name)) {
        phase = Phase::Idle;
        return AttachStatus::Failed;
    }
    Connection *c = connected.release();
    std::optional<Starting> starting(std::in_place, *c);
    find_clock(library);
    if (virtual_clock()) agent.control->started_ns = now_ns();
    find_hook_targets(library);
    agent.late = how == How::Running;
    begin_state();
    static uint64_t attachments = 0;
    c->number = ++attachments;
    agent.resting = agent.ending = false;
    agent.exit_thread = 0;
    agent.heard = 0;
    agent.silent = UINT32_MAX;
    connection = c;
    agent.connected = true;
    attachment = c->number;
    static const bool once = pthread_atfork(nullptr, nullptr, in_forked_child) == 0;
    (void)once;
    catch_signals();
    say_hello();
    pthread_t service;
    if (!start_thread(
            service, [](void *p) -> void * { return serve(static_cast<Connection *>(p)), nullptr; }, c)) {
        starting.reset();
        visit.reset();
        end(c);
        return AttachStatus::Failed;
    }
    pthread_detach(service);
    if (!wait_for_welcome(*c)) return AttachStatus::Failed;
    std::string left_out, failed = open_log();
    const std::string cupti = failed.empty() && how == How::FirstInit ? cupti_wanted() : "";
    const bool automatic = cupti.compare(0, sizeof kCuptiAutomatic - 1, kCuptiAutomatic) == 0;
    choose_hooks(agent.config.log_records != 0 || operation_program(), automatic);
    if (failed.empty()) {
        const bool compilers = watches_compilers(library);
        if (how == How::Running) failed = install_running(c, compilers, left_out);
        else failed = install(hooks, hook_count(), left_out);
        if (how != How::Running && compilers)
            failed += install(compiler_hooks(), compiler_hook_count(), left_out);
    }
    if (automatic) {
        if (is_in(kHook_dlopen) && is_in(kHook_dlmopen))
            start_cupti(cupti.substr(sizeof kCuptiAutomatic - 1), true);
    } else if (!cupti.empty()) {
        if (std::string why = start_cupti(cupti, false); !why.empty())
            left_out += std::string(kLacksCupti) + ": " + why + "\n";
    }
    if (const char *sanitizer = how == How::FirstInit ? getenv(kSanitizerVariable) : nullptr;
        sanitizer && failed.empty())
        if (std::string why = start_sanitizer(sanitizer); !why.empty())
            left_out += std::string(kLacksSanitizer) + ": " + why + "\n";
    {
        std::lock_guard<std::mutex> hold(c->lock);
        hooks_are_in();
        // end() takes the hooks out, and the tool counts the process as not reached.
        if (failed.empty() && c->over) return AttachStatus::Failed;
        agent.live = failed.empty();
    }
    report_hooks(failed, left_out);
    if (!agent.live) shutdown(c->socket.number, SHUT_RDWR);  // there is nothing to measure
    return agent.live ? AttachStatus::Attached : AttachStatus::Failed;
}

}  // namespace

bool is_agents_thread() { return is_own_thread; }
Control &control_block() { return *agent.control; }
bool is_connected() { return agent.connected; }
void read_before_signal_ends() { agent.finish(kAtSignal, Reading::Last); }
const void *driver_code() { return reinterpret_cast<const void *>(driver.cuCtxGetCurrent); }

void tell_tool(Message type, const Writer &writer, int file) {
    Connection *c = connection;
    if (!c || !agent.connected) return;
    std::lock_guard<std::mutex> hold(c->sending);
    if (agent.connected && !has_files(*c)) {
        agent.live = false;
        agent.connected = false;
    } else if (agent.connected && !send_frame(c->socket.number, type, writer.bytes, file)) {
        agent.live = false;
        agent.connected = false;
        shutdown(c->socket.number, SHUT_RDWR);  // the service thread notices and wakes the waiters
    }
}

uint32_t Agent::begin_question(const std::shared_ptr<Question> &question) {
    Connection *c = connection;
    if (!c) return 0;
    std::lock_guard<std::mutex> hold(c->lock);
    if (c->gone || !connected) return 0;
    c->questions[++c->requests] = question;
    return c->requests;
}

void Agent::give_up(Question &question) {
    std::lock_guard<std::mutex> hold(question.lock);
    question.done = true;
    question.changed.notify_all();
}

void Agent::finish(uint32_t wait_ms, Reading reading) {
    Visit visit;
    Connection *c = attachment.load() ? connection : nullptr;
    if (!c || !connected || !control || c->pid != getpid() || is_own_thread) return;
    if (reading == Reading::Last) ending = true;
    if (virtual_clock()) control->ended_ns = last_ns();
    if (!to_finish(*c)) return;
    c->finish_wait_ms = wait_ms;
    uint32_t ticket = c->finish_asked.fetch_add(1) + 1;
    if (!wake_up(*c)) return;
    timespec pause{0, 100000};
    for (uint32_t waited = 0; c->finish_done.load() < ticket && waited < (wait_ms + 3000) * 10; ++waited)
        nanosleep(&pause, nullptr);
}

void Agent::watch_exit() {
    static std::atomic<bool> once{false};
    if (once.exchange(true)) return;
    atexit(at_exit);
    at_quick_exit(at_exit);
}

void Agent::resume() {
    if (exit_thread != thread_id() || !resting.exchange(false)) return;
    atexit(at_exit);
    at_quick_exit(at_exit);
}

void Agent::wake_for_pools() {
    Connection *c = connection;
    if (!c) return;
    c->pools_wanted = true;
    quietly([c] { wake_up(*c); });
}

void Agent::wake_to_report() {
    Connection *c = connection;
    if (!c || c->report_wanted.exchange(true)) return;
    quietly([c] { wake_up(*c); });
}

void Agent::wake_to_record_kernels() {
    Connection *c = connection;
    if (!c) return;
    c->kernel_records_wanted = true;
    quietly([c] { wake_up(*c); });
}

void Agent::wake_to_install() {
    if (Connection *c = connection) quietly([c] { wake_up(*c); });
}

void Agent::wake_for_reading() {
    Connection *c = connection;
    if (!c || c->reading_wanted.exchange(true)) return;
    quietly([c] { wake_up(*c); });
}

}  // namespace gpubpf

// The driver calls this inside cuInit (CUDA_INJECTION64_PATH). Nothing here may make the application fail.
extern "C" __attribute__((visibility("default"))) int InitializeInjection(void) {
    // A thread that is cancelled inside the driver is unwound through the agent's frames by another copy of
    // libgcc. The agent's copy then aborts unless it is initialized. Its first use initializes it.
    _Unwind_Backtrace([](_Unwind_Context *, void *) { return _URC_END_OF_STACK; }, nullptr);
    try {
        gpubpf::start(getenv(gpubpf::kSocketVariable), gpubpf::How::FirstInit);
    } catch (...) {
    }
    return 1;
}

// The tool calls this in a running program, on a new thread (attach/loading.py). `name` is as for
// GPUBPF_SOCKET, with kStartingSuffix if the process is inside its first cuInit. Returns an AttachStatus.
extern "C" __attribute__((visibility("default"))) int gpubpf_attach(const char *name) {
    _Unwind_Backtrace([](_Unwind_Context *, void *) { return _URC_END_OF_STACK; }, nullptr);
    try {
        std::string socket = name;
        using namespace gpubpf;
        constexpr size_t kLength = sizeof kStartingSuffix - 1;
        const bool starting =
            socket.size() > kLength && socket.compare(socket.size() - kLength, kLength, kStartingSuffix) == 0;
        if (starting) socket.resize(socket.size() - kLength);
        const AttachStatus status = start(socket.c_str(), starting ? How::FirstInit : How::Running);
        // In these cases the agent owns the socket.
        const bool began = status == AttachStatus::Attached || status == AttachStatus::Failed;
        const char *number = number_of_file(socket.c_str());
        if (!began && number) close(atoi(number));
        return static_cast<int>(status);
    } catch (...) {
        return static_cast<int>(gpubpf::AttachStatus::Failed);
    }
}
