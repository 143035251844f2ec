// The connection to the tool; startup and shutdown.
//
// ROCr loads this library during its initialization and calls OnLoad, or the tool loads it into a running process and calls
// gpubpf_attach. If no tool answers, the process runs as if there were no agent.
#include "agent.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "log/host_program.h"
#include "log/stack.h"
#include "patch.h"
#include "shared_files.h"

// The name of the attached tool, for a second tool's error message; empty without a tool.
extern "C" {
__attribute__((visibility("default"))) char gpubpf_owner[gpubpf::kOwnerSize] = "";
}

namespace gpubpf {

static NeverDestroyed<Agent> storage;
Agent &agent = storage.value;

namespace {

constexpr auto kSilence = std::chrono::seconds(10);
constexpr auto kPatching = std::chrono::seconds(20);  // for the tool to write hooks
constexpr uint32_t kAtSignal = 1000;                  // ms that running kernels may take to finish
constexpr uint32_t kPatience = 5000;  // ms that running kernels may take before the agent detaches
constexpr useconds_t kStep = 1000;    // µs
constexpr int kLookAfter = 100;       // ms
// If the program goes on launching, the maps are read this often. Reading takes at most 1 % of the time.
constexpr auto kReadEvery = std::chrono::seconds(1);
constexpr int kReadShare = 100;

struct Connection {
    OwnedFile socket, wake;
    pid_t pid = 0;
    std::mutex sending;
    std::mutex lock;  // guards the members below
    std::condition_variable changed;
    std::map<uint32_t, std::shared_ptr<Question>> questions;
    uint32_t requests = 0, heard = 0;
    // Requests for a final reading, and completed ones. These are counters because a signal handler waits for them.
    std::atomic<uint32_t> finish_asked{0}, finish_done{0}, finish_wait_ms{0};
    std::atomic<bool> stopped{false};  // the tool requested the final reading; the agent detaches
    std::atomic<bool> starting{true};  // start() is running
    bool keeps_rocr = false;           // the agent keeps ROCr initialized until it detaches
};
// As in the CUDA agent (docs/attach.md, "The life of an agent").
enum class Phase { Idle, Live, Ending };
std::atomic<Phase> phase{Phase::Idle};
Connection *connection = nullptr;  // null only in phase Idle
uint64_t attachments = 0;
// Held while the service thread calls ROCr on its own, which it must not do once ROCr is shut down, or while the agent rests.
NeverDestroyed<std::timed_mutex> rocr_storage;
std::timed_mutex &using_rocr = rocr_storage.value;
std::atomic<bool> shut_down{false};
thread_local bool is_own_thread = false;

uint64_t instrumented() {
    uint64_t n = 0;
    for (uint32_t i = 0; i < kSlots; ++i) {
        if (i >= agent.control->used && i + 1 < kSlots) i = kSlots - 1;
        n += agent.control->slots[i].instrumented.load(std::memory_order_relaxed);
    }
    return n;
}

void tool_gone(Connection &c) {
    agent.live = false;
    agent.connected = false;
    std::lock_guard<std::mutex> hold(c.lock);
    for (auto &q : c.questions) q.second->done = true;
    c.questions.clear();
    c.changed.notify_all();
}

void answered(Connection &c, Reader &r, int image) {
    message::Sidecar sent;
    const bool complete = r.read(sent);
    const uint32_t id = sent.request;
    std::shared_ptr<const Answer> answer =
        complete ? checked_answer(std::move(sent.answer), image, agent.config.maps) : nullptr;
    std::shared_ptr<Question> question;
    bool late = false;
    {
        std::lock_guard<std::mutex> hold(c.lock);
        auto found = c.questions.find(id);
        if (found == c.questions.end()) return;
        question = found->second;
        c.questions.erase(found);
        question->answer = answer;
        question->done = true;
        late = question->abandoned;
        c.changed.notify_all();
    }
    if (!late) return;
    if (answer) {
        std::lock_guard<std::timed_mutex> hold(using_rocr);
        if (!agent.is_over()) install(*question->module, answer);
    }
    for (const auto &kernel : question->module->kernels) kernel.second->waits = false;
    tell_tool(message::Ready{id});
}

bool drain_if_possible(uint32_t sequence, uint32_t wait_ms, bool rings) {
    std::lock_guard<std::timed_mutex> hold(using_rocr);
    if (!agent.is_over()) return drain(sequence, wait_ms, rings);
    tell_tool(message::Drained{sequence, true});
    return true;
}

// Receives a message, and lets threads that wait for an answer know that the tool works. Returns false if there is no connection.
bool receive(Connection &c, Frame &frame) {
    if (!receive_frame(c.socket.number, frame)) return false;
    std::lock_guard<std::mutex> hold(c.lock);
    ++c.heard;
    c.changed.notify_all();
    return true;
}

void handle(Connection &c, Frame &frame) {
    Reader r(frame.payload);
    if (frame.type == Message::Sidecar) answered(c, r, frame.fd);
    if (frame.type == Message::Drain) {
        message::Drain sent;
        r.read(sent);
        if (sent.flags & kStop) {
            agent.live = false;
            phase = Phase::Ending;
        }
        drain_if_possible(sent.sequence, sent.wait_ms, sent.flags & kOnlyRings);
        c.stopped = sent.flags & kStop;
    }
    if (frame.fd >= 0) close(frame.fd);
}

// Gives back to ROCr what the attachment owns. Call with `using_rocr` held, when no thread launches copies any longer.
void release_all(uint32_t patience_ms) {
    leave_queues();
    give_back_timers();
    for (auto &gpu : agent.gpus) release(*gpu, patience_ms);
}

// Detaches, on the service thread.
void end(Connection *c) {
    phase = Phase::Ending;
    tool_gone(*c);
    while (c->starting) usleep(kStep);  // tool_gone() has ended any wait in start()
    release_signals(original_sigaction());
    take_out_of_tables();
    take_out([](const char *) { return false; });
    attachment = 0;
    wait_until_out();
    stop_state();
    agent.control->hooks.fetch_add(calls_not_told(), std::memory_order_relaxed);
    {
        std::lock_guard<std::timed_mutex> hold(using_rocr);
        if (!agent.is_over()) release_all(kPatience);
        if (!agent.is_over() && c->keeps_rocr) hsa.shut_down();
        for (OwnedFile *file : {&c->socket, &c->wake}) {
            if (!file->is_ours()) continue;
            if (file == &c->socket) shutdown(file->number, SHUT_RDWR);
            close(file->number);
        }
        end_state();
    }
    agent.gpus.clear();
    munmap(agent.control, sizeof(Control));
    agent.control = nullptr;
    agent.config = Config();
    agent.pumped = 0;
    gpubpf_owner[0] = '\0';
    connection = nullptr;
    delete c;
    phase = Phase::Idle;
}

// Readings that the tool did not ask for, because the maps do not survive the process.
struct Readings {
    uint64_t seen = 0, covered = 0;  // launches: at the last look, and before the last reading
    std::chrono::steady_clock::time_point looked{}, next{};

    // Reads the maps if the program has launched nothing for kLookAfter, or else every kReadEvery. Call it at least every kLookAfter.
    void read_in_between() {
        const auto now = std::chrono::steady_clock::now();
        if (!agent.live || agent.config.pump || agent.is_over() ||
            now - looked < std::chrono::milliseconds(kLookAfter))
            return;
        const uint64_t launches = instrumented();
        const bool quiet = launches == std::exchange(seen, launches);
        looked = now;
        if (launches == covered || now < (quiet ? next : next + kReadEvery)) return;
        if (read_complete_maps()) covered = launches;
        const auto end = std::chrono::steady_clock::now();
        next = end + kReadShare * (end - now);
    }
};

// Serves the tool until it exits or has received all that it requested. By then, the file descriptors may belong to the program.
void serve(Connection &c) {
    is_own_thread = true;
    Untimed untimed;
    prctl(PR_SET_NAME, "gpubpf-hsa");
    uint64_t read_up_to = 0, pumps = 0;  // launches; groups of `pump` launches
    Readings readings;
    for (uint32_t finished = 0; !c.stopped && c.socket.is_ours() && c.wake.is_ours();) {
        pollfd files[2] = {{c.socket.number, POLLIN, 0}, {c.wake.number, POLLIN, 0}};
        if (poll(files, 2, kLookAfter) < 0 && errno != EINTR) break;
        if (!c.socket.is_ours()) break;
        uint64_t n;
        if (files[1].revents & POLLIN && read(c.wake.number, &n, sizeof n) < 0 && errno != EAGAIN) break;
        if (files[0].revents) {
            Frame frame;
            bool received = false;
            quietly([&] {
                received = receive(c, frame);
                if (received) handle(c, frame);
            });
            if (!received) break;
        }
        quietly([&] {
            std::lock_guard<std::timed_mutex> hold(using_rocr);
            for (auto &gpu : agent.gpus)
                if (!agent.is_over()) enlarge(*gpu);
            const uint64_t due = agent.config.pump ? agent.pumped / agent.config.pump : 0;
            if (due != pumps && agent.live && !agent.is_over()) read_maps();
            pumps = due;
            readings.read_in_between();
            if (agent.running && !agent.is_over()) look_after_queues();
        });
        if (const uint32_t asked = c.finish_asked; asked != finished) {
            quietly([&] {
                const uint64_t now = instrumented();
                if (now != read_up_to && drain_if_possible(0, c.finish_wait_ms, false)) read_up_to = now;
            });
            c.finish_done = finished = asked;
        }
    }
    if (!c.socket.is_ours()) agent.control->cut = 1;
    tool_gone(c);
    c.finish_done = UINT32_MAX;
    quietly([&] { end(&c); });
}

bool start_thread(Connection &c) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const bool started =
        pthread_create(
            &thread, nullptr, [](void *p) -> void * { return serve(*static_cast<Connection *>(p)), nullptr; },
            &c) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (started) pthread_detach(thread);
    return started;
}

// --- startup and shutdown ---

// Waits a few seconds at most until the service thread no longer calls ROCr, and gives back what the agent owns.
void leave_rocr() {
    if (is_own_thread) {  // end() shuts ROCr down, and has given back everything else
        quietly(forget_intercepted_queues);
        return;
    }
    for (uint32_t waited = 0; phase == Phase::Ending && waited < kAtExit; ++waited) usleep(kStep);
    const bool entered = using_rocr.try_lock_for(std::chrono::milliseconds(kAtExit));
    if (entered && !agent.is_over())
        quietly([] {
            if (attachment) release_all(0);
            forget_intercepted_queues();
        });
    shut_down = true;
    if (entered) using_rocr.unlock();
}

// Ends the attachment, so that OnLoad can begin another one if the program initializes ROCr again.
void detach() {
    if (Visit visit; connection && connection->pid == getpid() && !is_own_thread) {
        connection->stopped = true;
        agent.wake();
    } else {
        return;
    }
    for (uint32_t waited = 0; phase != Phase::Idle && waited < kAtExit; ++waited) usleep(kStep);
}

// ROCr may be shut down after this, so the agent rests. Exit handlers that are older, and destructors, run later and may still
// launch. The maps are no longer read after launches of other threads.
void at_exit() {
    agent.exit_thread = thread_id();
    agent.finish(kAtExit, Reading::OnTheWay);
    agent.resting = true;
    if (using_rocr.try_lock_for(std::chrono::milliseconds(kAtExit))) using_rocr.unlock();
}

// A child process cannot use its parent's GPUs.
void in_forked_child() {
    agent.live = false;
    agent.connected = false;
    agent.resting = agent.ending = false;
    agent.exit_thread = 0;
    attachment = 0;
    abandon_state();
    if (!connection) return;
    for (OwnedFile *file : {&connection->socket, &connection->wake})
        if (file->is_ours()) close(file->number);
    connection = nullptr;
    phase = Phase::Idle;
    gpubpf_owner[0] = '\0';
    new (&using_rocr) std::timed_mutex;  // a thread of the parent may hold it
}

hsa_status on_pool(hsa_handle pool, void *data) {
    auto &gpu = *static_cast<Gpu *>(data);
    uint32_t segment = 0, flags = 0;
    bool may = false;
    if (hsa.amd_memory_pool_get_info(pool, HSA_POOL_SEGMENT, &segment) || segment != HSA_GLOBAL ||
        hsa.amd_memory_pool_get_info(pool, HSA_POOL_FLAGS, &flags) ||
        hsa.amd_memory_pool_get_info(pool, HSA_POOL_MAY_ALLOCATE, &may) || !may)
        return 0;
    if (flags & HSA_POOL_KERNARG && !gpu.argument_pool.handle) gpu.argument_pool = pool;
    if (flags & HSA_POOL_COARSE_GRAINED && !gpu.own_pool.handle) gpu.own_pool = pool;
    return 0;
}

// From CPUs, only the pool for kernel arguments is used. From each GPU, only the pool for its own memory.
void find_gpus() {
    std::vector<hsa_handle> agents;
    hsa.iterate_agents(
        [](hsa_handle one, void *data) {
            static_cast<std::vector<hsa_handle> *>(data)->push_back(one);
            return 0;
        },
        &agents);
    Gpu host{};
    for (hsa_handle one : agents) {
        uint32_t device = 0;
        if (hsa.agent_get_info(one, HSA_AGENT_DEVICE, &device)) continue;
        if (device == HSA_CPU && !host.argument_pool.handle)
            hsa.amd_agent_iterate_memory_pools(one, on_pool, &host);
        if (device != HSA_GPU) continue;
        auto gpu = std::make_unique<Gpu>();
        gpu->agent = one;
        gpu->number = static_cast<uint32_t>(agent.gpus.size());
        hsa.agent_get_info(one, HSA_AGENT_COMPUTE_UNITS, &gpu->compute_units);
        hsa.agent_get_info(one, HSA_AGENT_WAVE, &gpu->wave);
        hsa.amd_agent_iterate_memory_pools(one, on_pool, gpu.get());
        agent.gpus.push_back(std::move(gpu));
    }
    for (auto &gpu : agent.gpus) gpu->argument_pool = host.argument_pool;
}

bool send_stubs(const Connection &c) {
    const int stubs = make_stubs();
    return send_frame(c.socket.number, Message::Stubs, Writer(message::Stubs{stubs >= 0}).bytes, stubs);
}

// Opens the socket, the wake-up event and the control block, and says hello. Returns false on failure.
bool open_connection(Connection &c, const char *name) {
    c.pid = getpid();
    c.socket = OwnedFile(connect_to_tool(name));
    c.wake = OwnedFile(move_high(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
    const int control = memory_file("gpubpf-control", sizeof(Control));
    void *at = c.socket.number < 0 || c.wake.number < 0 || control < 0
                   ? MAP_FAILED
                   : mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, control, 0);
    bool told = false;
    if (at != MAP_FAILED) {
        agent.control = static_cast<Control *>(at);
        const Writer hello(message::Hello{kProtocolVersion,
                                          agent.running ? 0 : static_cast<uint32_t>(attachments),
                                          process_name(), Vendor::Amd});
        told = send_frame(c.socket.number, Message::Hello, hello.bytes, control) && send_stubs(c);
    }
    if (control >= 0) close(control);
    return told;
}

// Receives messages until `wanted` arrives. The service thread does not run yet, so this handles all other messages: a thread may
// load a module meanwhile and wait for the answer, because the hooks in ROCr's tables come before those in the code.
bool wait_for(Connection &c, Message wanted, std::chrono::milliseconds silence) {
    for (;;) {
        pollfd file{c.socket.number, POLLIN, 0};
        Frame frame;
        if (poll(&file, 1, static_cast<int>(silence.count())) <= 0 || !receive(c, frame)) return false;
        Reader r(frame.payload);
        const bool shared = frame.type != Message::Shared || take_shared(r, frame.fd);
        handle(c, frame);
        if (!shared) return false;
        if (frame.type == Message::Welcome) {
            close_stub_file();
            message::Welcome welcome;
            if (!parse_welcome(r, welcome) || !take_host_programs(welcome.config)) return false;
            number_process(welcome.process);
            memcpy(gpubpf_owner, welcome.owner.c_str(), welcome.owner.size() + 1);
            agent.config = std::move(welcome.config);
        }
        if (frame.type == wanted) return true;
    }
}

// Asks the tool to write the hooks while it keeps this process stopped.
bool put_in_hooks(const std::vector<Patch> &patches) {
    const int file = patch_file(patches);
    if (file < 0) return false;
    tell_tool(message::Patches{}, file);
    close(file);
    return wait_for(*connection, Message::Patched, kPatching);
}

void open_log() {
    if (!agent.config.log_records) return;
    const int file = oplog.open(agent.config.log_records, virtual_clock());
    if (file < 0) return;  // the tool reports the missing log
    tell_tool(message::Log{agent.config.log_records}, file);
    close(file);
}

// Whether ROCr is initialized. Only then can agents be listed.
bool is_initialized() {
    return hsa.iterate_agents([](hsa_handle, void *) { return 0; }, nullptr) == 0;
}

// Hooks HIP and libc functions. In a running process, the tool writes the jumps. Returns lines about functions that cannot be hooked,
// and in `failed` the reason if nothing is measured.
std::string hook_functions(bool work, bool allocations, std::string &failed) {
    std::string left_out;
    std::vector<Patch> patches;
    for (const HookTable &table : {ends_to_hook(), calls_to_hook(work, allocations)}) {
        const std::string lacks = agent.running ? prepare(table.hooks, table.count, left_out, patches)
                                                : install(table.hooks, table.count, left_out);
        const Hook &first = *table.hooks;
        if (!lacks.empty())
            left_out += std::string(first.lack) + ": " + first.name + ": its code cannot be changed\n";
    }
    if (!patches.empty() && !put_in_hooks(patches)) failed = "all: the tool did not put them in\n";
    return left_out;
}

// Installs all table replacements and hooks. Returns lines about functions that cannot be hooked.
std::string put_in_all(const hsa_tables &tables, std::string &failed) {
    agent.log_operations = oplog.on() && agent.config.stamps;
    const bool allocations = oplog.on() && agent.config.allocation_stacks;
    const bool work = agent.log_operations || host_program();
    put_in(tables, agent.running, agent.log_operations, allocations);
    if (agent.log_operations) hsa.amd_profiling_async_copy_enable(true);
    return hook_functions(work, allocations, failed);
}

// Returns the function tables if their version is known; otherwise empty ones.
hsa_tables known(const hsa_tables *tables) {
    if (tables && (hsa_functions_of(tables->core) <= HSA_CORE_LOAD ||
                   HSA_AMD_INTERCEPT(hsa_functions_of(tables->amd)) < 0))
        return {};
    return tables ? *tables : find_tables();
}

// `given`: the tables that ROCr passed to OnLoad; null: the process is running, with ROCr initialized.
AttachStatus start(const hsa_tables *given, const char *name) {
    if (!name || !hsa.find() || (!given && !is_initialized())) return AttachStatus::NoDriver;
    Phase idle = Phase::Idle;
    if (!phase.compare_exchange_strong(idle, Phase::Live))
        return idle == Phase::Live ? AttachStatus::InUse : AttachStatus::Ending;
    std::optional<Visit> visit(std::in_place);  // detach waits for this
    auto made = std::make_unique<Connection>();
    find_virtual_clock();
    Untimed untimed;
    shut_down = false;
    agent.resting = agent.ending = false;
    agent.exit_thread = 0;
    agent.running = !given;
    begin_state();
    bool welcome = open_connection(*made, name);
    if (welcome) {
        connection = made.get();
        agent.connected = true;
        welcome = wait_for(*made, Message::Welcome, kSilence / 2);
    }
    std::string failed, left_out;
    const hsa_tables tables = known(given);
    if (!tables.core) failed = "all: its version of ROCr is not known\n";
    if (agent.running && failed.empty()) made->keeps_rocr = hsa.init() == 0;
    if (agent.running && !made->keeps_rocr && failed.empty()) failed = "all: ROCr is being shut down\n";
    attachment = ++attachments;
    static const bool once = pthread_atfork(nullptr, nullptr, in_forked_child) == 0 && atexit(at_exit) == 0 &&
                             at_quick_exit(at_exit) == 0;
    (void)once;
    if (welcome && failed.empty()) {
        find_gpus();
        open_log();
        catch_signals();
        agent.live = true;
        left_out = put_in_all(tables, failed);
        if (agent.running) find_loaded();
        if (virtual_clock()) agent.control->started_ns = now_ns();
    }
    if (!welcome || !failed.empty()) agent.live = false;
    message::Hooked hooked{failed, left_out, {}};
    for (const auto &gpu : agent.gpus) hooked.numbers.push_back(gpu->wave);
    if (welcome) tell_tool(hooked);
    const bool live = agent.live;
    Connection *c = made.release();
    connection = c;
    if (!live && c->socket.number >= 0) shutdown(c->socket.number, SHUT_RDWR);  // there is nothing to measure
    const bool serves = agent.control && start_thread(*c);
    c->starting = false;
    visit.reset();
    if (!serves) end(c);
    return live && serves ? AttachStatus::Attached : AttachStatus::Failed;
}

}  // namespace

namespace {

// In the order of initialization (../src/lifetime.h).
// clang-format off: one in each line
const Lifetime *const kLifetimes[] = {
    &thread_lifetime,
    &patch_lifetime,
    &code_lifetime,
    &doorbell_lifetime,
    &log_lifetime,
    &shared_lifetime,
    &host_program_lifetime,
    &stack_lifetime,
    &allocation_lifetime,
    &operations_lifetime,
    &queue_lifetime,
    &allocations_lifetime,
    &hip_lifetime,
};
// clang-format on
constexpr size_t kLifetimeCount = sizeof kLifetimes / sizeof *kLifetimes;

}  // namespace

void begin_state() {
    for (const Lifetime *lifetime : kLifetimes)
        if (lifetime->begin) lifetime->begin();
}

void stop_state() noexcept {
    for (size_t i = kLifetimeCount; i-- > 0;)
        if (kLifetimes[i]->stop) kLifetimes[i]->stop();
}

void end_state() noexcept {
    for (size_t i = kLifetimeCount; i-- > 0;)
        if (kLifetimes[i]->end) kLifetimes[i]->end();
}

void abandon_state() {
    for (const Lifetime *lifetime : kLifetimes)
        if (lifetime->in_forked_child) lifetime->in_forked_child();
}

Control &control_block() { return *agent.control; }
bool is_connected() { return agent.connected; }
void read_before_signal_ends() { agent.finish(kAtSignal, Reading::Last); }

Gpu *Agent::gpu(hsa_handle wanted) const {
    for (auto &one : gpus)
        if (one->agent.handle == wanted.handle) return one.get();
    return nullptr;
}

void tell_tool(Message type, const Writer &writer, int file) {
    Connection *c = connection;
    if (!c || !agent.connected) return;
    std::lock_guard<std::mutex> hold(c->sending);
    if (c->socket.is_ours() && send_frame(c->socket.number, type, writer.bytes, file)) return;
    agent.live = false;
    agent.connected = false;
    if (c->socket.is_ours()) shutdown(c->socket.number, SHUT_RDWR);  // wakes the service thread
}

bool Agent::is_over() const { return shut_down || resting; }

namespace {

// Sends a question. Returns its id.
uint32_t put_question(Connection &c, const std::shared_ptr<Question> &question, const Gpu &gpu, int file,
                      uint64_t size) {
    uint32_t id;
    {
        std::lock_guard<std::mutex> hold(c.lock);
        c.questions[id = ++c.requests] = question;
    }
    tell_tool(message::Image{id, 0, gpu.number, size, 0, 0, 0}, file);
    return id;
}

}  // namespace

void Agent::ask_for_later(Module &module, const Gpu &gpu, int file, uint64_t size) {
    auto question = std::make_shared<Question>();
    question->module = &module;
    question->abandoned = true;
    put_question(*connection, question, gpu, file, size);
}

void Agent::instrument(Module &module, const Gpu &gpu, int file, uint64_t size) {
    Connection *c = connection;
    if (!c) return;
    auto question = std::make_shared<Question>();
    question->module = &module;
    const uint32_t id = put_question(*c, question, gpu, file, size);
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(config.image_wait_ms);
    std::unique_lock<std::mutex> hold(c->lock);
    if (!connected) c->questions.erase(id);
    while (!question->done && connected) {
        const auto now = std::chrono::steady_clock::now();
        const uint32_t heard = c->heard;
        const auto quiet = std::min(now + kSilence, until);
        const bool said =
            c->changed.wait_until(hold, quiet, [&] { return question->done || c->heard != heard; });
        if (!said || std::chrono::steady_clock::now() >= until) break;
    }
    question->abandoned = !question->done;
    hold.unlock();
    if (question->abandoned) return;
    if (question->answer) gpubpf::install(module, question->answer);
    tell_tool(message::Ready{id});
}

void Agent::wake() {
    const uint64_t one = 1;
    Connection *c = connection;
    if (c && c->wake.is_ours() && write(c->wake.number, &one, sizeof one) < 0) return;
}

void Agent::launched() {
    if (__builtin_expect(resting.load(std::memory_order_relaxed), 0) && exit_thread == thread_id() &&
        resting.exchange(false)) {
        atexit(at_exit);
        at_quick_exit(at_exit);
    }
    if (config.pump && pumped.fetch_add(1, std::memory_order_relaxed) % config.pump == config.pump - 1)
        wake();
}

void Agent::finish(uint32_t wait_ms, Reading reading) {
    Visit visit;
    Connection *c = attachment.load() ? connection : nullptr;
    if (!c || !connected || c->pid != getpid() || is_own_thread || !c->socket.is_ours() || !c->wake.is_ours())
        return;
    if (reading == Reading::Last) ending = true;
    c->finish_wait_ms = wait_ms;
    const uint32_t ticket = ++c->finish_asked;
    wake();
    const timespec pause{0, 100000};
    for (uint32_t waited = 0; c->finish_done < ticket && waited < (wait_ms + 3000) * 10; ++waited)
        nanosleep(&pause, nullptr);
}

}  // namespace gpubpf

// ROCr calls this before the program can create a queue, also if the program initializes it again after a shutdown. If it returns
// false, ROCr ignores the library.
extern "C" __attribute__((visibility("default"))) bool OnLoad(void *tables, uint64_t, uint64_t,
                                                              const char *const *) {
    using namespace gpubpf;
    const char *socket = secure_getenv(kSocketVariable);
    if (!socket || !tables) return false;
    AttachStatus status = AttachStatus::Failed;
    quietly([&] { status = start(static_cast<const hsa_tables *>(tables), socket); });
    return status == AttachStatus::Attached;
}

// ROCr calls this when it shuts down. It then reports signals that still exist.
extern "C" __attribute__((visibility("default"))) void OnUnload() {
    using namespace gpubpf;
    agent.finish(kAtExit, Reading::OnTheWay);
    agent.live = false;
    leave_rocr();
    detach();
}

// The tool calls this in a running program, on a new thread (attach/loading.py). `name` is as for GPUBPF_SOCKET. Returns an
// AttachStatus.
extern "C" __attribute__((visibility("default"))) int gpubpf_attach(const char *name) {
    using namespace gpubpf;
    AttachStatus status = AttachStatus::Failed;
    // The suffix marks a held process that starts to use ROCr (kStartingSuffix). HIP functions may be running there, too.
    constexpr size_t kLength = sizeof kStartingSuffix - 1;
    const size_t length = strlen(name);
    std::string socket;
    quietly([&] {
        const bool starts = length > kLength && strcmp(name + length - kLength, kStartingSuffix) == 0;
        socket.assign(name, starts ? length - kLength : length);
        status = start(nullptr, socket.c_str());
    });
    // In these cases the agent owns the socket.
    const bool began = status == AttachStatus::Attached || status == AttachStatus::Failed;
    const char *number = number_of_file(socket.c_str());
    if (!began && number) close(atoi(number));
    return static_cast<int>(status);
}
