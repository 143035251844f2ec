/* A libcuda.so.1 with nothing behind it: enough entry points for the agent to be tested without a device, and quick enough to
 * measure what a hook costs.
 *
 * An image is text: a line "FAKE", then one kernel name a line. Device memory is host memory. A launch of a kernel of an image
 * whose first line is "FAKE instrumented OFFSET" reads the launch block (the parameter after OFFSET others) and adds 1 to the
 * first u64 of each thread in the thread array whose base and capacity are at 8 and 16. fake_launches() counts every launch. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

struct function { char name[256]; int instrumented, parameters; };
struct module { struct function functions[64]; int count; };
struct context { int device; };

static struct context primary;
static _Thread_local struct context *current;
static atomic_ulong launches, instrumented_launches;
EXPORT unsigned long fake_launches(void) { return launches; }
EXPORT unsigned long fake_instrumented(void) { return instrumented_launches; }
static pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT CUresult cuInit(unsigned flags) {
  static atomic_int once;
  (void)flags;
  if (atomic_exchange(&once, 1)) return CUDA_SUCCESS;
  const char *path = getenv("CUDA_INJECTION64_PATH");
  void *library = path ? dlopen(path, RTLD_NOW) : NULL;
  if (path && !library) fprintf(stderr, "%s\n", dlerror());
  int (*initialize)(void) = library ? (int (*)(void))dlsym(library, "InitializeInjection") : NULL;
  if (initialize) initialize();
  return CUDA_SUCCESS;
}

/* Too short for a jump, and another function follows. */
#define TINY(name) \
  __asm__(".globl " name "\n.type " name ", @function\n" name ": xor %eax, %eax\n ret\n xor %eax, %eax\n ret\n .skip 64, 0x90\n");
#ifdef TINY_LAUNCH_GRID
TINY("cuLaunchGrid")
#endif
#ifdef TINY_WAIT_VALUE
TINY("cuStreamWaitValue32_v2")
#endif

EXPORT CUresult cuDeviceGet(CUdevice *d, int n) { *d = n; return n ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  const char *many = getenv("FAKE_MULTIPROCESSORS");
  (void)d;
  *v = a == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : a == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? (many ? atoi(many) : 4) : 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxCreate_v2(CUcontext *c, unsigned f, CUdevice d) {
  (void)f;
  current = malloc(sizeof *current);
  current->device = d;
  *c = (CUcontext)current;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxDestroy_v2(CUcontext c) {
  if ((CUcontext)current == c) current = NULL;
  ((struct context *)c)->device = -1; /* gone */
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { (void)d; *c = (CUcontext)&primary; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { (void)d; return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice d) { (void)d; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(CUcontext c) { current = (struct context *)c; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)current; return CUDA_SUCCESS; }
static _Thread_local struct context *stack[16];
static _Thread_local int depth;
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext c) {
  if (((struct context *)c)->device < 0) abort();
  stack[depth++] = current; current = (struct context *)c; return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *c) { *c = (CUcontext)current; current = stack[--depth]; return CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { *p = (CUdeviceptr)aligned_alloc(256, (n + 255) / 256 * 256); return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY; }
EXPORT CUresult cuMemFree_v2(CUdeviceptr p) { free((void *)p); return CUDA_SUCCESS; }
/* Addresses alone: nobody reads there. */
EXPORT CUresult cuMemMap(CUdeviceptr p, size_t n, size_t at, CUmemGenericAllocationHandle h, unsigned long long flags) {
  if (flags || at || !n) return CUDA_ERROR_INVALID_VALUE;
  return h ? CUDA_SUCCESS : p ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t n) { return p && n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle h, unsigned flags) {
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  memcpy(p, h.reserved, sizeof *p);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *p, CUmemoryPool pool, CUmemPoolPtrExportData *data) {
  if (!pool) return CUDA_ERROR_INVALID_VALUE;
  memcpy(p, data->reserved, sizeof *p);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *h, CUdeviceptr p) { memcpy(h->reserved, &p, sizeof p); return CUDA_SUCCESS; }
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t n, CUmemcpyAttributes *how, size_t *first, size_t hows, CUstream s) {
  (void)to, (void)from, (void)sizes, (void)how, (void)first, (void)hows, (void)s;
  return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *b, size_t *n, CUdeviceptr p) { *b = p; *n = 12345; return CUDA_SUCCESS; }
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr p) { return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuMemGetInfo_v2(size_t *f, size_t *t) {
  const char *size = getenv("FAKE_MEMORY");
  *f = *t = size ? strtoul(size, NULL, 10) : (size_t)1 << 32;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s) { (void)s; memset((void *)p, v, n); return CUDA_SUCCESS; }
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *h, size_t n, CUstream s) { (void)s; memcpy((void *)d, h, n); return CUDA_SUCCESS; }
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, CUstream s) { (void)s; memcpy(h, (void *)d, n); return CUDA_SUCCESS; }
EXPORT CUresult cuStreamCreate(CUstream *s, unsigned f) { (void)f; *s = (CUstream)malloc(8); return CUDA_SUCCESS; }
EXPORT CUresult cuStreamQuery(CUstream s) { (void)s; return CUDA_SUCCESS; }
static atomic_int capturing, invalidated;
EXPORT CUresult cuStreamBeginCapture_v2(CUstream s, CUstreamCaptureMode m) { (void)s; (void)m; capturing = 1; invalidated = 0; return CUDA_SUCCESS; }
EXPORT CUresult cuStreamEndCapture(CUstream s, CUgraph *g) { (void)s; *g = NULL; capturing = 0; return invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS; }
EXPORT CUresult cuCtxSynchronize(void) {
  invalidated = (int)capturing;
  return capturing ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}
EXPORT CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *v) { (void)s; *v = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }

EXPORT CUresult cuModuleLoadData(CUmodule *m, const void *image) {
  struct module *made = calloc(1, sizeof *made);
  const char *p = image;
  int parameters = 0;
  int instrumented = sscanf(p, "FAKE instrumented %d", &parameters) == 1;
  if (strncmp(p, "FAKE", 4)) { free(made); return CUDA_ERROR_INVALID_IMAGE; }
  p = strchr(p, '\n');
  while (p && p[1] && made->count < 64) {
    struct function *f = &made->functions[made->count++];
    sscanf(p + 1, "%255[^\n]", f->name);
    f->instrumented = instrumented;
    f->parameters = parameters;
    p = strchr(p + 1, '\n');
  }
  *m = (CUmodule)made;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *o, void **v) {
  (void)n; (void)o; (void)v;
  return cuModuleLoadData(m, image);
}
EXPORT CUresult cuModuleUnload(CUmodule m) { free(m); return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  struct module *module = (struct module *)m;
  for (int i = 0; i < module->count; ++i)
    if (!strcmp(module->functions[i].name, name)) return *f = (CUfunction)&module->functions[i], CUDA_SUCCESS;
  return CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *n, CUmodule m, const char *name) { (void)p; (void)n; (void)m; (void)name; return CUDA_ERROR_NOT_FOUND; }
/* A library is a module here, and a CUkernel a CUfunction. */
EXPORT CUresult cuLibraryLoadData(CUlibrary *l, const void *c, CUjit_option *j, void **jv, unsigned nj, CUlibraryOption *o, void **v, unsigned n) {
  (void)j; (void)jv; (void)nj; (void)o; (void)v; (void)n;
  return cuModuleLoadData((CUmodule *)l, c);
}
EXPORT CUresult cuLibraryUnload(CUlibrary l) { free(l); return CUDA_SUCCESS; }
EXPORT CUresult cuLibraryGetKernel(CUkernel *k, CUlibrary l, const char *name) { return cuModuleGetFunction((CUfunction *)k, (CUmodule)l, name); }
EXPORT CUresult cuKernelGetFunction(CUfunction *f, CUkernel k) { *f = (CUfunction)k; return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { (void)f; (void)a; (void)v; return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int t, size_t s) {
  (void)t; (void)s;
  const char *copies = getenv("FAKE_OCCUPANCY");  /* of instrumented functions */
  *n = getenv("FAKE_NO_ROOM") ? 0 : ((struct function *)f)->instrumented && copies ? atoi(copies) : 8;
  return CUDA_SUCCESS;
}

static CUresult run(CUfunction f, unsigned long threads, void **parameters) {
  struct function *function = (struct function *)f;
  const char *refused = function->instrumented ? getenv("FAKE_REFUSE_COPY") : NULL; /* a CUresult */
  if (refused) return (CUresult)atoi(refused);
  atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed);
  while (threads == 7) pause(); /* the call can only be left */
  if (!function->instrumented) return CUDA_SUCCESS;
  atomic_fetch_add_explicit(&instrumented_launches, 1, memory_order_relaxed);
  unsigned long *block = parameters[function->parameters];
  unsigned long *array = (unsigned long *)block[2];
  unsigned long room = block[3] & 0xffffffff; /* of an array by site: sites */
  pthread_mutex_lock(&device_lock);
  for (unsigned long t = 0; t < threads && t < room; ++t) array[t]++;
  pthread_mutex_unlock(&device_lock);
  return CUDA_SUCCESS;
}
#define SHAPE unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream
#define THREADS ((unsigned long)gx * gy * gz * bx * by * bz)
EXPORT CUresult cuLaunchKernel(CUfunction f, SHAPE, void **p, void **extra) { (void)shared; (void)stream; if (p && extra) return CUDA_ERROR_INVALID_VALUE; return run(f, THREADS, p); }
EXPORT CUresult cuLaunchKernel_ptsz(CUfunction f, SHAPE, void **p, void **extra) { (void)shared; (void)stream; (void)extra; return run(f, THREADS, p); }
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, SHAPE, void **p) { (void)shared; (void)stream; return run(f, THREADS, p); }
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **extra) {
  (void)extra;
  return run(f, (unsigned long)c->gridDimX * c->gridDimY * c->gridDimZ * c->blockDimX * c->blockDimY * c->blockDimZ, p);
}
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **p, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *r) {
  char symbol[128];
  (void)version;
  snprintf(symbol, sizeof symbol, "%s%s", name, flags == 2 ? "_ptsz" : "");
  *p = dlsym(RTLD_DEFAULT, symbol);
  if (r) *r = *p ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return CUDA_SUCCESS;
}
