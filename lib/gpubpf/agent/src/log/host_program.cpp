#include "log/host_program.h"

#include <atomic>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <memory>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "log/log.h"
#include "machine/cpu.h"
#include "shared_files.h"
#include "this_agent.h"
#include "thread.h"

namespace gpubpf {

namespace {

// The kernel optimizes a uprobe on a five-byte nop. On x86-64, the stub therefore starts with the nop, without an endbr64.
constexpr uint64_t kStubFile = 4096;
constexpr uint32_t kArguments = 64;

struct Program {
    std::atomic<const Program *> next{nullptr};
    void (*code)(const uint64_t *arguments) = nullptr;
    uint32_t count = 0;
    uint64_t arguments[kArguments] = {};  // constant arguments
    uint8_t fields[kArguments] = {};      // for other arguments: 1 + the number of the context field
    std::vector<uint8_t> parameters;
    size_t size = 0;  // size of the code

    ~Program() {
        if (code) munmap(reinterpret_cast<void *>(code), size);
    }
};

const uint8_t *stubs = nullptr;
int stub_file = -1;
ino_t stub_inode = 0;
struct Point {
    std::atomic<bool> in_kernel{false};
    std::atomic<const Program *> programs{
        nullptr};  // freed on detach, because another thread may be running one
};
Point points[kHostPoints];
Point &at(HostPoint point) { return points[static_cast<uint32_t>(point)]; }

// --- the kernel's helpers, for programs that run in this process; called as in the kernel ---

NeverDestroyed<std::vector<uint64_t>> cgroups_storage;
auto &cgroups = cgroups_storage.value;  // the process's cgroups, from the root to its own

// Returns the ids of the process's cgroups. A cgroup's id is the inode of its directory.
std::vector<uint64_t> find_cgroups() {
    std::vector<uint64_t> found;
    char line[4096] = {};
    int fd = move_high(open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC));
    if (fd < 0) return found;
    ssize_t n = read(fd, line, sizeof line - 1);
    close(fd);
    const char *own = n > 0 ? strstr(line, "0::/") : nullptr;  // in the unified hierarchy
    if (!own) return found;
    const std::string path(own + 3, strcspn(own + 3, "\n"));
    struct stat st;
    std::string at = "/sys/fs/cgroup";
    if (stat((at + "/cgroup.controllers").c_str(), &st) != 0) at += "/unified";
    for (size_t from = 0; from != std::string::npos && stat(at.c_str(), &st) == 0;) {
        found.push_back(st.st_ino);
        if (path.size() <= from + 1) break;
        size_t to = path.find('/', from + 1);
        at += path.substr(from, to == std::string::npos ? to : to - from);
        from = to == std::string::npos ? path.size() : to;
    }
    return found;
}

uint64_t ktime(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) { return now_ns(); }

uint64_t boot_time(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    timespec t;
    if (virtual_clock() || clock_gettime(CLOCK_BOOTTIME, &t) != 0) return now_ns();
    return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

uint64_t random32(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    uint64_t none = 0;
    uint64_t &state = thread_cache(CacheSlot::Random, none);
    if (!state) state = (now_ns() ^ (static_cast<uint64_t>(syscall(SYS_gettid)) << 32)) | 1;
    state ^= state << 13;  // xorshift64 (G. Marsaglia, 2003)
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(state >> 16);
}

uint64_t processor(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    int n = sched_getcpu();
    return n < 0 ? 0 : static_cast<uint64_t>(n);
}

uint64_t numa_node(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    unsigned node = 0;
    syscall(SYS_getcpu, nullptr, &node, nullptr);
    return node;
}

uint64_t pid_tgid(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    return static_cast<uint64_t>(process_id()) << 32 | thread_id();
}

uint64_t uid_gid(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    return static_cast<uint64_t>(getgid()) << 32 | getuid();
}

uint64_t comm(uint64_t to, uint64_t size, uint64_t, uint64_t, uint64_t) {
    char name[16] = {};
    auto *buffer = reinterpret_cast<char *>(to);
    memset(buffer, 0, size);  // also if it fails, as in the kernel
    if (prctl(PR_GET_NAME, name) != 0) return static_cast<uint64_t>(-22);
    memcpy(buffer, name, size < sizeof name ? size : sizeof name);
    if (size) buffer[size - 1] = '\0';
    return 0;
}

uint64_t cgroup_id(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
    return cgroups.empty() ? 0 : cgroups.back();
}

uint64_t ancestor(uint64_t level, uint64_t, uint64_t, uint64_t, uint64_t) {
    const auto n = static_cast<int32_t>(level);
    return n < 0 || static_cast<size_t>(n) >= cgroups.size() ? 0 : cgroups[static_cast<size_t>(n)];
}

using Helper = uint64_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

Helper helper(uint64_t number) {  // numbers: include/uapi/linux/bpf.h
    switch (number) {
        case 5:    // ktime_get_ns
        case 160:  // ktime_get_coarse_ns
            return ktime;
        case 7: return random32;
        case 8: return processor;
        case 14: return pid_tgid;
        case 15: return uid_gid;
        case 16: return comm;
        case 42: return numa_node;
        case 80: return cgroup_id;
        case 123: return ancestor;
        case 125: return boot_time;
        default: return nullptr;
    }
}

void *executable(const std::vector<uint8_t> &code) {
    int fd = memory_file("gpubpf-host", code.size());
    void *at = MAP_FAILED;
    if (fd >= 0 && write_all(fd, code.data(), code.size(), 0))
        at = mmap(nullptr, code.size(), PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
    if (fd >= 0) close(fd);
    return at == MAP_FAILED ? nullptr : at;
}

// Returns null if the program is not valid or memory is short.
std::unique_ptr<Program> make_program(const message::HostCode &sent, size_t fields) {
    if (sent.code.empty() || sent.arguments.size() > kArguments) return nullptr;
    auto made = std::make_unique<Program>();
    made->parameters = sent.parameters;
    made->count = static_cast<uint32_t>(sent.arguments.size());
    for (uint32_t i = 0; i < made->count; ++i) {
        const auto &[kind, map, value] = sent.arguments[i];
        uint64_t &argument = made->arguments[i];
        switch (kind) {
            case HostArgument::Context:
                if (value >= fields) return nullptr;
                made->fields[i] = static_cast<uint8_t>(value + 1);
                continue;
            case HostArgument::MapBase: argument = reinterpret_cast<uint64_t>(shared_array(map)); break;
            case HostArgument::Param:
                if (value < made->parameters.size())
                    argument = reinterpret_cast<uint64_t>(made->parameters.data()) + value;
                break;
            case HostArgument::Helper: argument = reinterpret_cast<uint64_t>(helper(value)); break;
        }
        if (!argument) return nullptr;
    }
    made->code = reinterpret_cast<void (*)(const uint64_t *)>(executable(sent.code));
    made->size = sent.code.size();
    return made->code ? std::move(made) : nullptr;
}

constexpr size_t kFields[kHostPoints] = {sizeof(HostLaunch) / 8, sizeof(HostOperation) / 8};

bool any(const Point &point) {
    return point.in_kernel.load(std::memory_order_relaxed) ||
           point.programs.load(std::memory_order_acquire) != nullptr;
}

void run(const Point &point, const uint64_t *fields) {
    for (const Program *p = point.programs.load(std::memory_order_acquire); p;
         p = p->next.load(std::memory_order_relaxed)) {
        uint64_t arguments[kArguments];
        for (uint32_t i = 0; i < p->count; ++i)
            arguments[i] = p->fields[i] ? fields[p->fields[i] - 1] : p->arguments[i];
        p->code(arguments);
    }
}

// Runs the programs at a point. `context` is their context, which consists of u64 fields.
template <typename Context>
void run_at(HostPoint where, uint64_t stub, const Context &context) {
    uint64_t fields[8] = {};
    static_assert(sizeof context <= sizeof fields);
    memcpy(fields, &context, sizeof context);
    const Point &point = at(where);
    if (point.in_kernel.load(std::memory_order_relaxed)) machine::call_stub(stubs + stub, fields);
    run(point, fields);
}

}  // namespace

bool host_program() { return any(at(HostPoint::Launch)); }
bool operation_program() { return any(at(HostPoint::Operation)); }

void run_host_program(const HostLaunch &launch) { run_at(HostPoint::Launch, 0, launch); }

void run_operation_program(const HostOperation &operation) {
    run_at(HostPoint::Operation, kOperationStub, operation);
}

int make_stubs() {
    int fd = memory_file("gpubpf-stubs", kStubFile);
    struct stat st;
    if (fd < 0) return -1;
    // Seals it, so that the tool recognizes it as the agent's.
    if (write_all(fd, machine::kStub, machine::kStubSize, 0) &&
        write_all(fd, machine::kStub, machine::kStubSize, kOperationStub) && fstat(fd, &st) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) == 0) {
        // The mapping is private because a probe in a shared mapping is never hit.
        void *at = mmap(nullptr, kStubFile, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
        if (at != MAP_FAILED) {
            stubs = static_cast<const uint8_t *>(at);
            stub_file = fd;
            stub_inode = st.st_ino;
            return fd;
        }
    }
    close(fd);
    return -1;
}

void close_stub_file() {
    struct stat st;  // the program may have closed the file and reused its number
    if (stub_file >= 0 && fstat(stub_file, &st) == 0 && st.st_ino == stub_inode) close(stub_file);
    stub_file = -1;
}

bool take_host_programs(const message::AgentConfig &config) {
    for (HostPoint point : config.host_points) {
        if (static_cast<uint32_t>(point) >= kHostPoints) return false;
        at(point).in_kernel = stubs != nullptr;
    }
    if (config.host.empty()) return true;
    std::vector<std::unique_ptr<Program>> made[kHostPoints];
    for (const message::HostCode &sent : config.host) {
        const auto point = static_cast<uint32_t>(sent.point);
        if (point >= kHostPoints) return false;
        made[point].push_back(make_program(sent, kFields[point]));
        if (!made[point].back()) return false;
    }
    cgroups = find_cgroups();
    for (size_t i = 0; i < kHostPoints; ++i) {
        const Program *first = nullptr;
        for (; !made[i].empty(); made[i].pop_back()) {
            made[i].back()->next = first;
            first = made[i].back().release();
        }
        points[i].programs.store(first, std::memory_order_release);
    }
    return true;
}

namespace {

void abandon_programs() {
    for (Point &point : points) {
        point.in_kernel = false;
        point.programs = nullptr;
    }
    stubs = nullptr;
    stub_file = -1;
}

void free_programs() {
    for (Point &point : points)
        for (const Program *p = point.programs.load(); p;) {
            const Program *next = p->next.load();
            delete p;
            p = next;
        }
    close_stub_file();
    if (stubs) munmap(const_cast<uint8_t *>(stubs), kStubFile);
    abandon_programs();
    std::vector<uint64_t>().swap(cgroups);
}

}  // namespace

const Lifetime host_program_lifetime{nullptr, nullptr, free_programs, abandon_programs};

}  // namespace gpubpf
