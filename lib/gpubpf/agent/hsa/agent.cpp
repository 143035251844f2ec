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

namespace gpubpf {

static NeverDestroyed<Agent> storage;
Agent &agent = storage.value;
Functions hsa;
Originals originals;

namespace {

constexpr auto kSilence = std::chrono::seconds(10);
constexpr uint32_t kAtExit = 2000, kAtSignal = 1000;  // ms that running kernels get to finish

struct Connection {
    OwnedFile socket, wake;
    pid_t pid = 0;
    std::mutex sending;
    std::mutex lock;  // guards the members below
    std::condition_variable changed;
    std::map<uint32_t, std::shared_ptr<Question>> questions;
    uint32_t requests = 0, heard = 0;
    // Requests for the last reading, and those that are done: counters, because a signal handler waits for them.
    std::atomic<uint32_t> finish_asked{0}, finish_done{0}, finish_wait_ms{0};
    std::mutex using_rocr;   // held while the service thread calls ROCr on its own
    bool shut_down = false;  // guarded by using_rocr
};
Connection *connection = nullptr;  // never freed: threads may be using it while the process ends
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
    const uint32_t id = r.u32();
    std::shared_ptr<const Answer> answer = parse_answer(r, image, agent.config.maps);
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
    if (!late || !answer) return;
    std::lock_guard<std::mutex> hold(c.using_rocr);
    if (!c.shut_down) install(*question->module, answer);
}

bool drain_unless_shut_down(Connection &c, uint32_t sequence, uint32_t wait_ms, bool rings) {
    std::lock_guard<std::mutex> hold(c.using_rocr);
    if (!c.shut_down) return drain(sequence, wait_ms, rings);
    agent.send(Message::Drained, Writer().u32(sequence).u32(1));
    return true;
}

void handle(Connection &c, Frame &frame) {
    Reader r(frame.payload.data(), frame.payload.size());
    if (frame.type == Message::Sidecar) answered(c, r, frame.fd);
    if (frame.type == Message::Drain) {
        const uint32_t sequence = r.u32(), wait_ms = r.u32(), flags = r.u32();
        if (flags & kStop) agent.live = false;
        drain_unless_shut_down(c, sequence, wait_ms, flags & kOnlyRings);
    }
    if (frame.fd >= 0) close(frame.fd);
}

// Serves the tool until it has exited. The file descriptors may be the program's own by then.
void serve(Connection &c) {
    is_own_thread = true;
    prctl(PR_SET_NAME, "gpubpf-hsa");
    uint64_t read_up_to = 0, pumps = 0;  // launches; how often `pump` of them have begun
    for (uint32_t finished = 0; c.socket.is_ours() && c.wake.is_ours();) {
        pollfd files[2] = {{c.socket.number, POLLIN, 0}, {c.wake.number, POLLIN, 0}};
        if (poll(files, 2, -1) < 0 && errno != EINTR) break;
        if (!c.socket.is_ours()) break;
        uint64_t n;
        if (files[1].revents & POLLIN && read(c.wake.number, &n, sizeof n) < 0 && errno != EAGAIN) break;
        if (files[0].revents) {
            Frame frame;
            bool received = false;
            quietly([&] {
                if (!(received = receive_frame(c.socket.number, frame))) return;
                {
                    std::lock_guard<std::mutex> hold(c.lock);
                    ++c.heard;
                    c.changed.notify_all();
                }
                handle(c, frame);
            });
            if (!received) break;
        }
        quietly([&] {
            std::lock_guard<std::mutex> hold(c.using_rocr);
            for (auto &gpu : agent.gpus)
                if (!c.shut_down) enlarge(*gpu);
            const uint64_t due = agent.config.pump ? agent.pumped / agent.config.pump : 0;
            if (due != pumps && agent.live && !c.shut_down) read_maps();
            pumps = due;
        });
        if (const uint32_t asked = c.finish_asked; asked != finished) {
            quietly([&] {
                const uint64_t now = instrumented();
                if (now != read_up_to && drain_unless_shut_down(c, 0, c.finish_wait_ms, false))
                    read_up_to = now;
            });
            c.finish_done = finished = asked;
        }
    }
    if (!c.socket.is_ours()) agent.control->cut = 1;
    tool_gone(c);
    c.finish_done = UINT32_MAX;
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

// --- start and end ---

void at_exit() { agent.finish(kAtExit); }

// Handles signals whose default action would end the process: sends the measurements first.
void at_signal(int signal) {
    agent.finish(kAtSignal);
    raise(signal);  // the handler was reset, so the default action follows
}

void catch_signals() {
    for (int s : {SIGINT, SIGTERM, SIGHUP, SIGABRT}) {
        struct sigaction now{};
        if (sigaction(s, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) continue;
        now = {};
        now.sa_handler = at_signal;
        now.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER | SA_RESTART | SA_ONSTACK);
        sigaction(s, &now, nullptr);
    }
}

// The GPUs of its parent do not work in a child process.
void in_forked_child() {
    agent.live = false;
    agent.connected = false;
    abandon_state();
    if (!connection) return;
    for (OwnedFile *file : {&connection->socket, &connection->wake})
        if (file->is_ours()) close(file->number);
    connection = nullptr;
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

// Of a CPU's memory pools only the one for arguments counts, of a GPU's only the one for its own memory.
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
        hsa.amd_agent_iterate_memory_pools(one, on_pool, gpu.get());
        agent.gpus.push_back(std::move(gpu));
    }
    for (auto &gpu : agent.gpus) gpu->argument_pool = host.argument_pool;
}

bool send_stubs(const Connection &c) {
    const int stubs = make_stubs();
    return send_frame(c.socket.number, Message::Stubs, Writer().u32(stubs >= 0).bytes, stubs);
}

// Opens what the agent needs: socket, wake-up event, control block. Returns false if that fails.
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
        Writer hello;
        hello.u32(kProtocolVersion).u32(0).text(process_name()).u32(static_cast<uint32_t>(Vendor::Amd));
        told = send_frame(c.socket.number, Message::Hello, hello.bytes, control) && send_stubs(c);
    }
    if (control >= 0) close(control);
    return told;
}

// Receives messages until the tool's configuration has come. It sends messages while it works.
bool wait_for_welcome(Connection &c) {
    for (;;) {
        pollfd file{c.socket.number, POLLIN, 0};
        Frame frame;
        if (poll(&file, 1, 5000) <= 0 || !receive_frame(c.socket.number, frame)) return false;
        Reader r(frame.payload.data(), frame.payload.size());
        const bool shared = frame.type != Message::Shared || take_shared(r, frame.fd);
        if (frame.fd >= 0) close(frame.fd);
        if (!shared) return false;
        if (frame.type == Message::Welcome) {
            close_stub_file();
            if (!parse_welcome(r, agent.config) || !take_host_program(r) || !r.ok()) return false;
            number_process(agent.config.process);
            return true;
        }
    }
}

void open_log() {
    if (!agent.config.log_records) return;
    const int file = oplog.open(agent.config.log_records, virtual_clock());
    if (file < 0) return;  // the tool says that there is none
    agent.send(Message::Log, Writer().u64(agent.config.log_records), file);
    close(file);
}

template <class Function>
void replace(void *&entry, Function &original, Function ours) {
    original = reinterpret_cast<Function>(entry);
    entry = reinterpret_cast<void *>(ours);
}

// Makes the agent see all that the program gives its GPUs to do, if the tool wants that. Returns lines about functions that
// cannot be hooked.
std::string follow_operations(const hsa_tables &tables, int intercept) {
    agent.log_operations = oplog.on() && agent.config.stamps;
    if (!agent.log_operations && !host_program()) return "";
    if (agent.log_operations) {
        void **core = tables.core->functions, **amd = tables.amd->functions;
        replace(core[HSA_CORE_DESTROY_SIGNAL], originals.destroy_signal, on_destroy_signal);
        replace(amd[HSA_AMD_COPY], originals.copy, on_copy);
        if (HSA_AMD_HAS_ENGINES(intercept))
            replace(amd[HSA_AMD_COPY_BY_ENGINE], originals.copy_by_engine, on_copy_by_engine);
        if (const size_t box = HSA_AMD_COPY_BOX(intercept); box < hsa_functions_of(tables.amd))
            replace(amd[box], originals.copy_box, on_copy_box);
        hsa.amd_profiling_async_copy_enable(true);
    }
    return hook_hip();
}

bool start(const hsa_tables *tables, const char *name) {
    const int at = HSA_AMD_INTERCEPT(hsa_functions_of(tables->amd));
    if (hsa_functions_of(tables->core) <= HSA_CORE_LOAD || at < 0 || !hsa.find()) return false;
    auto made = std::make_unique<Connection>();
    find_virtual_clock();
    begin_state();
    if (!open_connection(*made, name) || !wait_for_welcome(*made)) {
        if (made->socket.number >= 0) close(made->socket.number);
        return false;
    }
    connection = made.release();
    attachment = 1;  // it never ends
    agent.connected = true;
    find_gpus();
    void **core = tables->core->functions, **amd = tables->amd->functions;
    originals.create_intercepted_queue = reinterpret_cast<hsa_create_queue>(amd[at]);
    originals.intercept = reinterpret_cast<hsa_intercept>(amd[at + 1]);
    replace(core[HSA_CORE_CREATE_QUEUE], originals.create_queue, on_create_queue);
    replace(core[HSA_CORE_FREEZE], originals.freeze, on_freeze);
    replace(core[HSA_CORE_DESTROY_EXECUTABLE], originals.destroy_executable, on_destroy_executable);
    replace(core[HSA_CORE_READER_OF_FILE], originals.reader_of_file, on_reader_of_file);
    replace(core[HSA_CORE_READER_OF_MEMORY], originals.reader_of_memory, on_reader_of_memory);
    replace(core[HSA_CORE_DESTROY_READER], originals.destroy_reader, on_destroy_reader);
    replace(core[HSA_CORE_LOAD], originals.load, on_load);
    open_log();
    const std::string left_out = follow_operations(*tables, at);
    if (virtual_clock()) agent.control->started_ns = now_ns();
    agent.live = true;
    agent.send(Message::Hooked, Writer().text("").text(left_out).u32(0));
    pthread_atfork(nullptr, nullptr, in_forked_child);
    catch_signals();
    atexit(at_exit);
    at_quick_exit(at_exit);
    if (!start_thread(*connection)) tool_gone(*connection);
    return true;
}

}  // namespace

bool Functions::find() {
    void *library = dlopen("libhsa-runtime64.so.1", RTLD_NOLOAD | RTLD_LAZY);
    bool all = library;
#define FIND(name) \
    if (all && !(name = reinterpret_cast<decltype(name)>(dlsym(library, "hsa_" #name)))) all = false
    FIND(iterate_agents);
    FIND(agent_get_info);
    FIND(memory_copy);
    FIND(executable_create_alt);
    FIND(executable_iterate_agent_symbols);
    FIND(executable_symbol_get_info);
    FIND(signal_destroy);
    FIND(signal_load_scacquire);
    FIND(signal_add_relaxed);
    FIND(amd_signal_create);
    FIND(amd_agent_iterate_memory_pools);
    FIND(amd_memory_pool_get_info);
    FIND(amd_memory_pool_allocate);
    FIND(amd_memory_pool_free);
    FIND(amd_agents_allow_access);
    FIND(amd_memory_fill);
    FIND(amd_memory_lock);
    FIND(amd_profiling_convert_tick_to_system_domain);
    FIND(signal_store_relaxed);
    FIND(amd_profiling_async_copy_enable);
    FIND(amd_profiling_set_profiler_enabled);
    FIND(amd_profiling_get_dispatch_time);
    FIND(amd_profiling_get_async_copy_time);
#undef FIND
    return all;
}

namespace {

// In the order in which they begin. The attachment ends with the process.
const Lifetime *const kLifetimes[] = {
    &thread_lifetime, &patch_lifetime,        &log_lifetime,
    &shared_lifetime, &host_program_lifetime, &stack_lifetime,
};

}  // namespace

void begin_state() {
    for (const Lifetime *lifetime : kLifetimes)
        if (lifetime->begin) lifetime->begin();
}

void abandon_state() {
    for (const Lifetime *lifetime : kLifetimes)
        if (lifetime->in_forked_child) lifetime->in_forked_child();
}

void tell_tool(Message type, const Writer &writer, int file) { agent.send(type, writer, file); }
Control &control_block() { return *agent.control; }

Gpu *Agent::gpu(hsa_handle wanted) const {
    for (auto &one : gpus)
        if (one->agent.handle == wanted.handle) return one.get();
    return nullptr;
}

void Agent::send(Message type, const Writer &writer, int file) {
    Connection *c = connection;
    if (!c || !connected) return;
    std::lock_guard<std::mutex> hold(c->sending);
    if (c->socket.is_ours() && send_frame(c->socket.number, type, writer.bytes, file)) return;
    live = false;
    connected = false;
    if (c->socket.is_ours()) shutdown(c->socket.number, SHUT_RDWR);  // wakes the service thread
}

std::shared_ptr<const Answer> Agent::ask(Module &module, const Gpu &gpu, int file, uint64_t size) {
    Connection *c = connection;
    if (!c) return nullptr;
    auto question = std::make_shared<Question>();
    question->module = &module;
    uint32_t id;
    {
        std::lock_guard<std::mutex> hold(c->lock);
        c->questions[id = ++c->requests] = question;
    }
    send(Message::Image, Writer().u32(id).u32(0).u32(gpu.number).u64(size).u32(0), file);
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
    return question->answer;
}

void Agent::wake() {
    const uint64_t one = 1;
    Connection *c = connection;
    if (c && c->wake.is_ours() && write(c->wake.number, &one, sizeof one) < 0) return;
}

void Agent::launched() {
    if (config.pump && pumped.fetch_add(1, std::memory_order_relaxed) % config.pump == config.pump - 1)
        wake();
}

void Agent::finish(uint32_t wait_ms) {
    Connection *c = connection;
    if (!c || !connected || c->pid != getpid() || is_own_thread || !c->socket.is_ours() || !c->wake.is_ours())
        return;
    live = false;  // nobody would read what later launches of other threads count
    c->finish_wait_ms = wait_ms;
    const uint32_t ticket = ++c->finish_asked;
    wake();
    const timespec pause{0, 100000};
    for (uint32_t waited = 0; c->finish_done < ticket && waited < (wait_ms + 3000) * 10; ++waited)
        nanosleep(&pause, nullptr);
}

}  // namespace gpubpf

// ROCr calls this before the program can make a queue. It ignores the library if the result is false: also
// when ROCr is initialized once more after it was shut down.
extern "C" __attribute__((visibility("default"))) bool OnLoad(void *tables, uint64_t, uint64_t,
                                                              const char *const *) {
    using namespace gpubpf;
    const char *socket = secure_getenv(kSocketVariable);
    if (!socket || !tables || originals.freeze) return false;
    bool started = false;
    quietly([&] { started = start(static_cast<const hsa_tables *>(tables), socket); });
    return started;
}

// ROCr calls this as it is shut down.
extern "C" __attribute__((visibility("default"))) void OnUnload() {
    using namespace gpubpf;
    agent.finish(kAtExit);
    Connection *c = connection;
    if (!c) return;
    std::lock_guard<std::mutex> hold(c->using_rocr);
    c->shut_down = true;
}
