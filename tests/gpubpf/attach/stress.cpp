// A program that a tracer must not disturb: each thread does something that a careless one breaks, and checks itself. It prints "ready",
// runs until a line comes on stdin, then prints how often each did it; exit status 1, with the reason, as soon as anything differs.
#include <atomic>
#include <cerrno>
#include <cfenv>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <immintrin.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdexcept>
#include <string>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

std::atomic<bool> over{false};

[[noreturn]] void fail(const char *what, long got) {
  dprintf(2, "%s: %ld (errno %d)\n", what, got, errno);
  _exit(1);
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

void rest() { usleep(500); }

// --- memory, libraries, exceptions ---

void allocate() {
  std::vector<std::string> held;
  for (int i = 0; i < 200; ++i) {
    held.emplace_back(static_cast<size_t>(rand() % 5000), static_cast<char>(i));
    if (held.size() > 50) held.erase(held.begin() + rand() % 50);
  }
  for (const std::string &s : held)
    for (char c : s)
      if (c != s[0]) fail("a string changed", c);
  free(malloc(1 << 20));  // mapped, and given back
  rest();
}

const char *library;

void load() {
  void *handle = dlopen(library, RTLD_NOW);
  if (!handle || !dlsym(handle, "entry")) fail("dlopen", 0);
  dlclose(handle);
  rest();
}

int thrown(int depth) {
  if (depth == 0) throw std::runtime_error("deep");
  return thrown(depth - 1) + 1;
}

void except() {
  for (int i = 0; i < 20; ++i) try {
      fail("no exception", thrown(20));
    } catch (const std::runtime_error &e) {
      if (strcmp(e.what(), "deep") != 0) fail("another exception", 0);
    }
  rest();
}

void make_thread() {
  std::atomic<int> n{0};
  std::thread([&] { ++n; }).join();
  if (n != 1) fail("a thread did not run", n);
  rest();
}

// --- waits that no signal interrupts ---

void wait_epoll() {
  static thread_local int ep = -1, files[2];
  if (ep < 0) {
    ep = epoll_create1(0);
    if (pipe(files) != 0) fail("pipe", 0);
    epoll_event e{};
    e.events = EPOLLIN;
    epoll_ctl(ep, EPOLL_CTL_ADD, files[0], &e);
  }
  static thread_local std::thread *writer = nullptr;
  if (!writer) {
    int to = files[1];
    writer = new std::thread([to] {
      while (!over) {
        usleep(3000);
        if (write(to, "x", 1) != 1) fail("write", 0);
      }
    });
    writer->detach();
  }
  epoll_event e;
  int n = epoll_wait(ep, &e, 1, -1);
  if (n != 1) fail("epoll_wait", n);
  char c;
  if (read(files[0], &c, 1) != 1) fail("read", 0);
}

void wait_epoll_bounded() {
  static thread_local int ep = epoll_create1(0);
  double began = now();
  epoll_event e;
  int n = epoll_wait(ep, &e, 1, 5);
  if (n != 0) fail("epoll_wait, bounded", n);
  if (now() - began < 0.004) fail("epoll_wait was short: us", static_cast<long>((now() - began) * 1e6));
}

void wait_poll() {
  double began = now();
  int n = poll(nullptr, 0, 5);
  if (n != 0) fail("poll", n);
  if (now() - began < 0.004) fail("poll was short", 0);
}

void wait_sleep() {
  double began = now();
  timespec t{0, 4000000}, left{};
  if (nanosleep(&t, &left) != 0) fail("nanosleep", left.tv_nsec);
  if (now() - began < 0.004) fail("nanosleep was short", 0);
}

void wait_receive() {
  static thread_local int pair[2] = {-1, -1};
  if (pair[0] < 0) {
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    timeval t{0, 5000};
    setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
  }
  char c;
  if (recv(pair[0], &c, 1, 0) != -1 || errno != EAGAIN) fail("recv", 0);
}

void wait_signal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGRTMIN + 5);
  timespec t{0, 5000000};
  if (sigtimedwait(&set, nullptr, &t) != -1 || errno != EAGAIN) fail("sigtimedwait", 0);
}

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
long turn = 0;

void wait_condition(long mine) {
  pthread_mutex_lock(&mutex);
  while (turn % 2 != mine && !over) pthread_cond_wait(&condition, &mutex);
  ++turn;
  pthread_cond_signal(&condition);
  pthread_mutex_unlock(&mutex);
  if (mine) rest();
}

void wait_semaphore() {
  static sem_t semaphore;
  static int made = sem_init(&semaphore, 0, 0);
  (void)made;
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  t.tv_nsec += 5000000;
  if (t.tv_nsec >= 1000000000) ++t.tv_sec, t.tv_nsec -= 1000000000;
  if (sem_timedwait(&semaphore, &t) != -1 || errno != ETIMEDOUT) fail("sem_timedwait", 0);
}

// --- signals ---

thread_local volatile long handled = 0;
std::atomic<long> sent[3], got[3];

void handler(int) { handled = handled + 1; }

struct Signalled {
  pthread_t thread;
  int files[2];
  std::atomic<bool> ready{false};
} signalled[3];

// SA_RESTART: read never gives EINTR. 1: without it, read gives EINTR only after a handler.
void interrupted(int which) {
  Signalled &s = signalled[which];
  if (!s.ready) {
    if (pipe(s.files) != 0) fail("pipe", 0);
    s.thread = pthread_self();
    s.ready = true;
  }
  static thread_local long before = 0;
  char c;
  ssize_t n = read(s.files[0], &c, 1);
  if (n == 1) return;
  if (n != -1 || errno != EINTR) fail("read", n);
  if (which == 0) fail("read was interrupted, with SA_RESTART", 0);
  if (handled == before) fail("read was interrupted, without a signal", 0);
  before = handled;
  ++got[1];
}

// A signal that is blocked but in ppoll: each one interrupts it.
void masked() {
  Signalled &s = signalled[2];
  static thread_local sigset_t open;
  if (!s.ready) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGWINCH);
    pthread_sigmask(SIG_BLOCK, &set, &open);
    sigdelset(&open, SIGWINCH);
    s.thread = pthread_self();
    s.ready = true;
  }
  const long before = handled;
  timespec t{20, 0};
  if (ppoll(nullptr, 0, &t, &open) != -1 || errno != EINTR) fail("ppoll", 0);
  if (handled != before + 1) fail("ppoll returned after so many signals", handled - before);
  got[2] = handled;
  sigset_t is;
  pthread_sigmask(SIG_BLOCK, nullptr, &is);
  if (!sigismember(&is, SIGWINCH) || sigismember(&is, SIGUSR1)) fail("the mask is another", 0);
}

void send() {
  static const int numbers[3] = {SIGUSR1, SIGUSR2, SIGWINCH};
  for (int i = 0; i < 3; ++i) {
    if (!signalled[i].ready) continue;
    if (i == 2 && sent[2] != got[2]) continue;  // one at a time
    pthread_kill(signalled[i].thread, numbers[i]);
    ++sent[i];
    if (i < 2 && sent[i] % 3 == 0 && write(signalled[i].files[1], "x", 1) != 1) fail("write", 0);
  }
  usleep(700);
}

// --- registers ---

struct Kept {
  uint64_t general[6], vector[16][4], out[6], vout[16][4];
};

// All that a system call, here one that waits, must leave as it is: callee-saved and argument registers, vector registers, the red zone.
void registers() {
  static thread_local Kept k;
  for (uint64_t &x : k.general) x = static_cast<uint64_t>(rand()) * 0x9E3779B97F4A7C15u;
  for (auto &v : k.vector)
    for (uint64_t &x : v) x = static_cast<uint64_t>(rand()) * 0x9E3779B97F4A7C15u;
  timespec t{0, 2000000};
  long result = SYS_nanosleep;
  uint64_t broken = 0;
  errno = 1234;
  asm volatile(
      "vmovdqu 48(%[k]), %%ymm0\n vmovdqu 80(%[k]), %%ymm1\n vmovdqu 112(%[k]), %%ymm2\n vmovdqu 144(%[k]), %%ymm3\n"
      "vmovdqu 176(%[k]), %%ymm4\n vmovdqu 208(%[k]), %%ymm5\n vmovdqu 240(%[k]), %%ymm6\n vmovdqu 272(%[k]), %%ymm7\n"
      "vmovdqu 304(%[k]), %%ymm8\n vmovdqu 336(%[k]), %%ymm9\n vmovdqu 368(%[k]), %%ymm10\n vmovdqu 400(%[k]), %%ymm11\n"
      "vmovdqu 432(%[k]), %%ymm12\n vmovdqu 464(%[k]), %%ymm13\n vmovdqu 496(%[k]), %%ymm14\n vmovdqu 528(%[k]), %%ymm15\n"
      "mov (%[k]), %%r12\n mov 8(%[k]), %%r13\n mov 16(%[k]), %%r14\n mov 24(%[k]), %%r15\n mov 32(%[k]), %%r8\n mov 40(%[k]), %%r9\n"
      "mov %%r12, -8(%%rsp)\n mov %%r13, -64(%%rsp)\n mov %%r14, -128(%%rsp)\n"
      "syscall\n"
      "cmp %%r12, -8(%%rsp)\n jne 1f\n cmp %%r13, -64(%%rsp)\n jne 1f\n cmp %%r14, -128(%%rsp)\n je 2f\n1: mov $1, %[broken]\n2:\n"
      "mov %%r12, 560(%[k])\n mov %%r13, 568(%[k])\n mov %%r14, 576(%[k])\n mov %%r15, 584(%[k])\n mov %%r8, 592(%[k])\n mov %%r9, 600(%[k])\n"
      "vmovdqu %%ymm0, 608(%[k])\n vmovdqu %%ymm1, 640(%[k])\n vmovdqu %%ymm2, 672(%[k])\n vmovdqu %%ymm3, 704(%[k])\n"
      "vmovdqu %%ymm4, 736(%[k])\n vmovdqu %%ymm5, 768(%[k])\n vmovdqu %%ymm6, 800(%[k])\n vmovdqu %%ymm7, 832(%[k])\n"
      "vmovdqu %%ymm8, 864(%[k])\n vmovdqu %%ymm9, 896(%[k])\n vmovdqu %%ymm10, 928(%[k])\n vmovdqu %%ymm11, 960(%[k])\n"
      "vmovdqu %%ymm12, 992(%[k])\n vmovdqu %%ymm13, 1024(%[k])\n vmovdqu %%ymm14, 1056(%[k])\n vmovdqu %%ymm15, 1088(%[k])\n"
      : "+a"(result), [broken] "+d"(broken)
      : [k] "b"(&k), "D"(&t), "S"(nullptr)
      : "rcx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6",
        "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
  if (result != 0) fail("a raw nanosleep", result);
  if (broken) fail("the red zone changed", 0);
  if (memcmp(k.general, k.out, sizeof k.general) != 0) fail("a register changed", 0);
  if (memcmp(k.vector, k.vout, sizeof k.vector) != 0) fail("a vector register changed", 0);
  if (errno != 1234) fail("errno changed", errno);
}

// Never in the kernel: rounding mode, x87 and vector registers.
void compute() {
  std::fesetround(FE_UPWARD);
  volatile double one = 1, third = one / 3;
  __m256d v = _mm256_set_pd(1, 2, 3, 4);
  long double x = 1.0L;
  for (int i = 0; i < 100000; ++i) {
    asm volatile("" : "+x"(v));
    asm volatile("" : "+t"(x));
    if (std::fegetround() != FE_UPWARD) fail("the rounding mode changed", std::fegetround());
  }
  double out[4];
  _mm256_storeu_pd(out, v);
  if (out[0] != 4 || out[1] != 3 || out[2] != 2 || out[3] != 1 || x != 1.0L || third * 3 <= 1.0) fail("a number changed", 0);
  rest();
}

struct Activity {
  const char *name;
  void (*once)();
  std::atomic<long> turns{0};
};

Activity activities[] = {
    {"allocate", allocate},
    {"load", load},
    {"except", except},
    {"make_thread", make_thread},
    {"epoll", wait_epoll},
    {"epoll_bounded", wait_epoll_bounded},
    {"poll", wait_poll},
    {"sleep", wait_sleep},
    {"receive", wait_receive},
    {"sigtimedwait", wait_signal},
    {"even", [] { wait_condition(0); }},
    {"odd", [] { wait_condition(1); }},
    {"semaphore", wait_semaphore},
    {"restarted", [] { interrupted(0); }},
    {"interrupted", [] { interrupted(1); }},
    {"masked", masked},
    {"send", send},
    {"registers", registers},
    {"compute", compute},
};

}  // namespace

int main(int argc, char **argv) {
  library = argv[1];
  struct sigaction a {};
  a.sa_handler = handler;
  a.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &a, nullptr);
  a.sa_flags = 0;
  sigaction(SIGUSR2, &a, nullptr);
  sigaction(SIGWINCH, &a, nullptr);
  for (Activity &activity : activities) {
    bool wanted = argc < 3;
    for (int i = 2; i < argc; ++i) wanted = wanted || strcmp(argv[i], activity.name) == 0;
    if (wanted)
      std::thread([&activity] {
        while (!over) {
          activity.once();
          ++activity.turns;
        }
      }).detach();
  }
  puts("ready");
  fflush(stdout);
  char line[16];
  if (read(0, line, sizeof line) < 0) fail("read of stdin", 0);
  for (Activity &activity : activities) printf("%s %ld\n", activity.name, activity.turns.load());
  printf("signals %ld %ld\n", sent[1].load(), got[2].load());
  fflush(stdout);
  _exit(0);
}
