// Programs of many kinds that a tool attaches to while they run: before KIND…. Each prints "ready" once it is under way, goes on until its
// standard input ends, and then says what it launched: "launches NAME N" for each kernel, "wrong N" for results that are not right.
//
//   runtime     kernels of the runtime, templates, __device__ and __constant__ variables, on two streams
//   module      cuModuleLoadData of a fatbin that lies in the program (of before_plain.cu)
//   library     cuLibraryLoadData of it: CUkernel and CUfunction handles, cooperative and Ex launches
//   contexts    the library in two contexts, and on two devices where there are
//   threads     eight threads launch from per-thread default streams
//   unload      modules loaded and unloaded, again and again, so that handles come again
//   persistent  beside kernels that end, one that runs until the end
//   capture     a capture that began before, of a stream of its own, and goes on; kernels in another stream meanwhile
//   busy        two streams in which there is always more to do
//   idle        waits for a line after a launch of each kernel, then launches a hundred at once
//   graphs      a graph that was instantiated before, and one that is captured again and again
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <poll.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                     \
  do {                                                                  \
    int result_ = int(call);                                            \
    if (result_) {                                                      \
      fprintf(stderr, "%s: %d, line %d\n", #call, result_, __LINE__);   \
      _exit(3);                                                         \
    }                                                                   \
  } while (0)

constexpr int N = 1000;

__device__ int calls = 0;
__constant__ float factor = 3;

__global__ void add(const float *a, const float *b, float *c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
  if (i == 0) atomicAdd(&calls, 1);
}

template <typename T>
__global__ void scale(T *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = T(i) * T(factor);
}

__global__ void long_one(int *x, int us) {
  for (int i = 0; i < us / 10; ++i) __nanosleep(10000);
  if (threadIdx.x == 0) atomicAdd(x, 1);
}

__global__ void until(volatile int *stop, volatile int *started) {
  *started = 1;
  while (!*stop) __nanosleep(1000);
}

// A fatbin where the compiler puts those that it makes itself.
__asm__(
    ".pushsection .nv_fatbin,\"a\"\n.balign 8\n.globl plain_image\n.hidden plain_image\nplain_image:\n"
    ".incbin \"plain.fatbin\"\n.balign 8\n.popsection\n");
extern "C" const char plain_image[];

namespace {

std::atomic<bool> over{false};
std::atomic<long> wrong{0};

// Whether to go on; waits a little.
bool more(int us = 500) {
  static std::atomic<int> turns{0};
  if (turns++ == 20) {
    puts("ready");
    fflush(stdout);
  }
  if (over) return false;
  pollfd in{0, POLLIN, 0};
  if (poll(&in, 1, 0) > 0) over = true;
  usleep(us);
  return !over;
}

void said(const char *name, long n) { printf("launches %s %ld\n", name, n); }

struct Memory {
  float *a, *b, *c;
  Memory() {
    std::vector<float> x(N), y(N);
    for (int i = 0; i < N; ++i) x[i] = float(i), y[i] = float(2 * i);
    CHECK(cudaMalloc(&a, N * 4));
    CHECK(cudaMalloc(&b, N * 4));
    CHECK(cudaMalloc(&c, N * 4));
    CHECK(cudaMemcpy(a, x.data(), N * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(b, y.data(), N * 4, cudaMemcpyHostToDevice));
  }
  void check(cudaStream_t stream = 0) {
    std::vector<float> z(N);
    CHECK(cudaMemcpyAsync(z.data(), c, N * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (int i = 0; i < N; ++i) wrong += z[i] != float(3 * i);
    CHECK(cudaMemsetAsync(c, 0, N * 4, stream));
    CHECK(cudaStreamSynchronize(stream));  // the next launch may be in another one
  }
};

void runtime() {
  Memory m;
  cudaStream_t streams[2];
  CHECK(cudaStreamCreate(&streams[0]));
  CHECK(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking));
  long n = 0;
  for (; more(); ++n) {
    cudaStream_t s = streams[n % 2];
    add<<<4, 256, 0, s>>>(m.a, m.b, m.c, N);
    m.check(s);
    scale<float><<<4, 256, 0, s>>>(m.c, N);
    m.check(s);
  }
  int counted = 0;
  CHECK(cudaMemcpyFromSymbol(&counted, calls, 4));
  wrong += counted != n;
  said("add", n);
  said("scale", n);
}

// What a launch of `add` takes, of the driver's memory.
struct Parameters {
  CUdeviceptr a = 0, b = 0, c = 0;
  int n = N;
  void *list[4] = {&a, &b, &c, &n};
  Parameters() {
    std::vector<float> x(N);
    for (int i = 0; i < N; ++i) x[i] = float(i);
    CHECK(cuMemAlloc(&a, N * 4));
    CHECK(cuMemAlloc(&b, N * 4));
    CHECK(cuMemAlloc(&c, N * 4));
    CHECK(cuMemcpyHtoD(a, x.data(), N * 4));
    for (float &v : x) v *= 2;
    CHECK(cuMemcpyHtoD(b, x.data(), N * 4));
  }
  void check() {
    std::vector<float> z(N);
    CHECK(cuMemcpyDtoH(z.data(), c, N * 4));
    for (int i = 0; i < N; ++i) wrong += z[i] != float(3 * i);
    CHECK(cuMemsetD8(c, 0, N * 4));
  }
};

void module() {
  CUmodule loaded;
  CUfunction f;
  CHECK(cudaFree(0));
  CHECK(cuModuleLoadData(&loaded, plain_image));
  CHECK(cuModuleGetFunction(&f, loaded, "plain_add"));
  Parameters p;
  long n = 0;
  for (; more(); ++n) {
    CHECK(cuLaunchKernel(f, 4, 1, 1, 256, 1, 1, 0, nullptr, p.list, nullptr));
    p.check();
  }
  said("plain_add", n);
}

void library() {
  CUlibrary loaded;
  CUkernel kernel;
  CUfunction f;
  CHECK(cudaFree(0));
  CHECK(cuLibraryLoadData(&loaded, plain_image, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CHECK(cuLibraryGetKernel(&kernel, loaded, "plain_add"));
  CHECK(cuKernelGetFunction(&f, kernel));
  Parameters p;
  long n = 0;
  for (; more(); ++n) {
    auto k = reinterpret_cast<CUfunction>(kernel);
    CUlaunchConfig config{4, 1, 1, 256, 1, 1, 0, nullptr, nullptr, 0};
    switch (n % 4) {
      case 0: CHECK(cuLaunchKernel(k, 4, 1, 1, 256, 1, 1, 0, nullptr, p.list, nullptr)); break;
      case 1: CHECK(cuLaunchKernel(f, 4, 1, 1, 256, 1, 1, 0, nullptr, p.list, nullptr)); break;
      case 2: CHECK(cuLaunchKernelEx(&config, k, p.list, nullptr)); break;
      case 3: CHECK(cuLaunchCooperativeKernel(f, 4, 1, 1, 256, 1, 1, 0, nullptr, p.list)); break;
    }
    p.check();
  }
  said("plain_add", n);
}

void contexts() {
  int devices = 0;
  CHECK(cuInit(0));
  CHECK(cuDeviceGetCount(&devices));
  CUlibrary loaded;
  CUkernel kernel;
  std::vector<CUcontext> all;
  std::vector<Parameters *> memory;
  for (int d = 0; d < devices; ++d)
    for (int i = 0; i < 2; ++i) {
      CUcontext c;
      CHECK(cuCtxCreate(&c, nullptr, 0, d));
      all.push_back(c);
      memory.push_back(new Parameters);
    }
  CHECK(cuLibraryLoadData(&loaded, plain_image, nullptr, nullptr, 0, nullptr, nullptr, 0));
  CHECK(cuLibraryGetKernel(&kernel, loaded, "plain_add"));
  long n = 0;
  for (; more(); ++n) {
    CHECK(cuCtxSetCurrent(all[n % all.size()]));
    Parameters &p = *memory[n % all.size()];
    CHECK(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 4, 1, 1, 256, 1, 1, 0, nullptr, p.list, nullptr));
    p.check();
  }
  said("plain_add", n);
}

void threads() {
  std::atomic<long> n{0};
  std::vector<std::thread> all;
  for (int t = 0; t < 8; ++t)
    all.emplace_back([&] {
      Memory m;
      for (; more(); ++n) {
        add<<<4, 256, 0, cudaStreamPerThread>>>(m.a, m.b, m.c, N);
        m.check(cudaStreamPerThread);
      }
    });
  for (std::thread &t : all) t.join();
  said("add", n);
}

void unload() {
  CHECK(cudaFree(0));
  Parameters p;
  long adds = 0, others = 0;
  CUmodule loaded = nullptr;
  CUfunction f = nullptr, g = nullptr;
  while (more()) {
    if ((adds + others) % 50 == 0) {  // which of the two the handles are of changes
      if (loaded) CHECK(cuModuleUnload(loaded));
      CHECK(cuModuleLoadData(&loaded, plain_image));
      bool turn = (adds + others) / 50 % 2;
      CHECK(cuModuleGetFunction(&f, loaded, turn ? "plain_add" : "other_add"));
      CHECK(cuModuleGetFunction(&g, loaded, turn ? "other_add" : "plain_add"));
      if (!turn) std::swap(f, g);
    }
    bool other = (adds + others) % 3 == 0;
    CHECK(cuLaunchKernel(other ? g : f, 4, 1, 1, 256, 1, 1, 0, nullptr, p.list, nullptr));
    ++(other ? others : adds);
    p.check();
  }
  said("plain_add", adds);
  said("other_add", others);
}

void persistent() {
  Memory m;
  int *host, *device;
  CHECK(cudaHostAlloc(&host, 8, cudaHostAllocMapped));
  host[0] = host[1] = 0;
  CHECK(cudaHostGetDevicePointer(&device, host, 0));
  cudaStream_t aside, other;
  CHECK(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  add<<<4, 256, 0, other>>>(m.a, m.b, m.c, N);  // loaded, before what never ends
  m.check(other);
  until<<<1, 1, 0, aside>>>(device, device + 1);
  while (!static_cast<volatile int *>(host)[1]) usleep(100);
  long n = 1;
  for (bool stopped = false; more(); ++n) {
    add<<<4, 256, 0, other>>>(m.a, m.b, m.c, N);
    m.check(other);
    if (!stopped && access(getenv("BEFORE_STOP"), F_OK) == 0) {
      static_cast<volatile int *>(host)[0] = 1;
      stopped = true;
    }
  }
  static_cast<volatile int *>(host)[0] = 1;
  CHECK(cudaDeviceSynchronize());
  said("add", n);
  said("until", 1);
}

void capture() {
  Memory m, own;
  cudaStream_t captured, other;
  CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  add<<<4, 256, 0, other>>>(m.a, m.b, m.c, N);
  m.check(other);
  CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeRelaxed));
  long n = 1, nodes = 0;
  bool ended = false;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  for (; more(); ++n) {
    add<<<4, 256, 0, other>>>(m.a, m.b, m.c, N);
    m.check(other);
    if (!ended && nodes < 5000) {
      add<<<4, 256, 0, captured>>>(own.a, own.b, own.c, N);
      ++nodes;
    }
    if (!ended && access(getenv("BEFORE_STOP"), F_OK) == 0) {
      CHECK(cudaStreamEndCapture(captured, &graph));
      CHECK(cudaGraphInstantiate(&exec, graph, 0));
      CHECK(cudaGraphLaunch(exec, other));
      n += nodes;
      own.check(other);
      ended = true;
    }
  }
  if (!ended) {
    CHECK(cudaStreamEndCapture(captured, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
  }
  said("add", n);
}

void busy() {
  constexpr int kAhead = 10;
  int *x;
  CHECK(cudaMalloc(&x, 4));
  CHECK(cudaMemset(x, 0, 4));
  cudaStream_t streams[2];
  cudaEvent_t behind[2][kAhead];
  for (int s = 0; s < 2; ++s) {
    CHECK(cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking));
    for (cudaEvent_t &e : behind[s]) CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  }
  long n = 0;
  for (long turn = 0; more(10); ++turn)
    for (int s = 0; s < 2; ++s, ++n) {
      cudaEvent_t e = behind[s][turn % kAhead];
      CHECK(cudaEventSynchronize(e));
      long_one<<<1, 32, 0, streams[s]>>>(x, 2000);
      CHECK(cudaEventRecord(e, streams[s]));
    }
  CHECK(cudaDeviceSynchronize());
  int counted = 0;
  CHECK(cudaMemcpy(&counted, x, 4, cudaMemcpyDeviceToHost));
  wrong += counted != n;
  said("long_one", n);
}

void idle() {
  Memory m;
  add<<<4, 256>>>(m.a, m.b, m.c, N);
  scale<float><<<4, 256>>>(m.c, N);
  CHECK(cudaDeviceSynchronize());
  puts("ready");
  fflush(stdout);
  while (getchar() != '\n') {}
  for (int i = 0; i < 100; ++i) add<<<4, 256>>>(m.a, m.b, m.c, N);
  m.check();
  while (getchar() != EOF) {}
  said("add", 101);
  said("scale", 1);
}

void graphs() {
  Memory m;
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  auto make = [&] {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    add<<<4, 256, 0, s>>>(m.a, m.b, m.c, N);
    CHECK(cudaStreamEndCapture(s, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
  };
  cudaGraphExec_t before = make();
  long n = 0;
  for (; more(); ++n) {
    CHECK(cudaGraphLaunch(before, s));
    m.check(s);
    cudaGraphExec_t now = make();
    CHECK(cudaGraphLaunch(now, s));
    m.check(s);
    CHECK(cudaGraphExecDestroy(now));
  }
  said("add", 2 * n);
}

}  // namespace

int main(int argc, char **argv) {
  std::string kind = argc > 1 ? argv[1] : "";
  if (kind == "runtime") runtime();
  else if (kind == "module") module();
  else if (kind == "library") library();
  else if (kind == "contexts") contexts();
  else if (kind == "threads") threads();
  else if (kind == "unload") unload();
  else if (kind == "persistent") persistent();
  else if (kind == "capture") capture();
  else if (kind == "busy") busy();
  else if (kind == "idle") idle();
  else if (kind == "graphs") graphs();
  else return 2;
  printf("wrong %ld\n", wrong.load());
  return wrong ? 1 : 0;
}
