// A program that does its worst to whoever measures it: `hostile KIND`. It prints "ready", launches kernels until a line comes on stdin,
// and does what KIND says as soon as an agent is in it. At the end it says whether it did.
#define _GNU_SOURCE
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry NAME(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";

static CUcontext context;
static volatile int over, done;
static char **arguments;

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}

static void *work(void *a) {
  CUdeviceptr out;
  CUmodule m;
  CUfunction f;
  char ptx[8000], name[6000] = "fresh";
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  if (strcmp(a, "names") == 0) {  // endless ones
    memset(name, 'n', 5000);
    name[5000] = 0;
  }
  while (!over) {
    const char *at = strstr(text, "NAME");
    unsigned before = 0, after = 0;
    void *parameters[] = {&out};
    snprintf(ptx, sizeof ptx, "%.*s%s%s", (int)(at - text), text, name, at + 4);
    check(cuModuleLoadData(&m, ptx), "cuModuleLoadData");
    check(cuModuleGetFunction(&f, m, name), "cuModuleGetFunction");
    check(cuMemcpyDtoH(&before, out, 4), "cuMemcpyDtoH");
    for (int i = 0; i < 5; ++i) check(cuLaunchKernel(f, 4, 1, 1, 32, 1, 1, 0, 0, parameters, 0), "cuLaunchKernel");
    check(cuCtxSynchronize(), "cuCtxSynchronize");
    check(cuMemcpyDtoH(&after, out, 4), "cuMemcpyDtoH");
    if (after - before != 5 * 128) {
      dprintf(2, "%u additions, not 640\n", after - before);
      _exit(1);
    }
    check(cuModuleUnload(m), "cuModuleUnload");
    usleep(10000);
  }
  return 0;
}

// Calls `act` for each mapping of the agent, with its permissions; how many there are.
static int agents(void (*act)(char *start, size_t size, const char *permissions)) {
  FILE *maps = fopen("/proc/self/maps", "r");
  unsigned long start[64], end[64];
  char line[4400], permissions[64][5];
  int n = 0;
  while (maps && n < 64 && fgets(line, sizeof line, maps))
    if (strstr(line, "gpubpf-agent") && sscanf(line, "%lx-%lx %4s", &start[n], &end[n], permissions[n]) == 3) ++n;
  if (maps) fclose(maps);
  for (int i = 0; act && i < n; ++i) act((char *)start[i], end[i] - start[i], permissions[i]);
  return n;
}

static void unmap(char *start, size_t size, const char *permissions) {
  (void)permissions;
  munmap(start, size);
}
static void protect(char *start, size_t size, const char *permissions) {
  if (permissions[2] == 'x') mprotect(start, size, PROT_NONE);
}
static void overwrite(char *start, size_t size, const char *permissions) {
  if (permissions[1] == 'w') memset(start, 0x41, size);
}

static void handler(int number) { (void)number; }

// A child stops the agent's threads for good, as a debugger would.
static void freeze(void) {
  char path[64], name[32];
  pid_t parent = getpid(), tids[64];
  int n = 0;
  for (pid_t tid = parent; tid < parent + 4000 && n < 64; ++tid) {
    snprintf(path, sizeof path, "/proc/%d/task/%d/comm", parent, tid);
    int file = open(path, O_RDONLY);
    if (file < 0) continue;
    ssize_t length = read(file, name, sizeof name - 1);
    close(file);
    if (length > 5 && strncmp(name, "gpubpf", 6) == 0) tids[n++] = tid;
  }
  prctl(PR_SET_PTRACER, -1, 0, 0, 0);
  int pipes[2];
  if (pipe(pipes) != 0) return;
  if (fork() == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int i = 0; i < n; ++i)
      if (ptrace(PTRACE_SEIZE, tids[i], 0, 0) == 0) ptrace(PTRACE_INTERRUPT, tids[i], 0, 0);
    if (write(pipes[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char c;
  if (read(pipes[0], &c, 1) != 1) _exit(4);
}

// Much of what an agent would like is forbidden, in all threads: memory that can be written and executed, too.
static void filter(void) {
  static const int forbidden[] = {SYS_membarrier, SYS_memfd_create, SYS_sendmsg, SYS_rt_sigaction, SYS_shutdown};
  enum { N = sizeof forbidden / sizeof *forbidden };
  struct sock_filter code[2 * N + 6];
  unsigned short n = 0;
  code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
  for (int i = 0; i < N; ++i) {
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)forbidden[i], 0, 1);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
  }
  code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 3);
  code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2]));
  code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PROT_READ | PROT_WRITE | PROT_EXEC, 0, 1);
  code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
  code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  struct sock_fprog program = {n, code};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0) _exit(5);
}

// Whoever makes a socket pair ends the process.
static void filter_deadly(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socketpair, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0) _exit(5);
}

static void act(const char *kind) {
  if (strcmp(kind, "close") == 0) {
    for (int file = 3; file < 1024; ++file) close(file);
  } else if (strcmp(kind, "shutdown") == 0) {
    for (int file = 3; file < 1024; ++file) shutdown(file, SHUT_RDWR);
  } else if (strcmp(kind, "babble") == 0) {  // in the agent's place
    char noise[4096];
    for (size_t i = 0; i < sizeof noise; ++i) noise[i] = (char)rand();
    for (int file = 3; file < 1024; ++file) send(file, noise, sizeof noise, MSG_DONTWAIT | MSG_NOSIGNAL);
  } else if (strcmp(kind, "shrink") == 0) {  // memory that the tool looks into
    for (int file = 3; file < 1024; ++file)
      if (ftruncate(file, 0) != 0) continue;
  } else if (strcmp(kind, "unmap") == 0) {
    agents(unmap);
  } else if (strcmp(kind, "protect") == 0) {
    agents(protect);
  } else if (strcmp(kind, "overwrite") == 0) {
    agents(overwrite);
  } else if (strcmp(kind, "setuid") == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(6);
  } else if (strcmp(kind, "undumpable") == 0) {
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  } else if (strcmp(kind, "seccomp") == 0) {
    filter();
  } else if (strcmp(kind, "freeze") == 0) {
    freeze();
  } else if (strcmp(kind, "exec") == 0) {
    execv("/proc/self/exe", arguments);
  } else if (strcmp(kind, "exit") == 0) {
    _exit(0);
  } else if (strcmp(kind, "kill") == 0) {
    kill(getpid(), SIGKILL);
  }
}

static void *wait_for_agent(void *kind) {
  while (agents(0) == 0) usleep(1000);
  const char *delay = getenv("DELAY");
  usleep(delay ? atoi(delay) : 300000);
  act(kind);
  done = 1;
  return 0;
}

int main(int argc, char **argv) {
  char *kind = argc > 1 ? argv[1] : "nothing";
  pthread_t threads[2], other;
  CUdevice device;
  arguments = argv;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  if (strcmp(kind, "signals") == 0) {
    sigset_t all;
    for (int i = 1; i < 65; ++i) signal(i, handler);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, 0);
  }
  if (strcmp(kind, "names") == 0) prctl(PR_SET_NAME, "\033]0;x\a\033[31m\n", 0, 0, 0);
  if (strcmp(kind, "strict") == 0) {
    puts("ready");
    fflush(stdout);
    prctl(PR_SET_SECCOMP, 1, 0, 0, 0);
    for (;;) continue;
  }
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], 0, work, kind);
  pthread_create(&other, 0, wait_for_agent, kind);
  usleep(100000);
  if (strcmp(kind, "deadly") == 0) filter_deadly();
  puts("ready");
  fflush(stdout);
  if (strcmp(kind, "vfork") == 0)
    for (int i = 0; i < 400; ++i) {
      pid_t child = vfork();
      if (child == 0) {
        execl("/bin/true", "true", (char *)0);
        _exit(0);
      }
      waitpid(child, 0, 0);
    }
  char line[16];
  while (read(0, line, sizeof line) < 0 && errno == EINTR) continue;
  over = 1;
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
  printf("%s\n", done ? "did it" : "did not");
  fflush(stdout);
  _exit(0);
}
