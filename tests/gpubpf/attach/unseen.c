// unseen CONTEXT LAUNCHES: loads a module, and creates a context before if CONTEXT is 1, by the embedded device's private table, so that no
// hook of an exported function sees it. NVIDIA's runtime up to 11.8 loads modules in such a way. Launches a kernel of it, and of a module that
// was loaded as others are, and prints what they added.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *unseen_text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry unseen(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";
static const char *seen_text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry seen(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1000;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  printf("%s: error %d\n", what, (int)r);
  exit(1);
}

int main(int argc, char **argv) {
  const struct {
    CUresult (*load_module)(CUmodule *, const void *image);
    CUresult (*create_context)(CUcontext *, CUdevice);
  } *table;
  CUuuid id;
  CUdevice device;
  CUcontext first, second;
  CUmodule m;
  CUfunction unseen, seen;
  CUdeviceptr out;
  unsigned found = 0;
  if (argc < 3) return 2;
  memcpy(&id, "cudasim private.", sizeof id);
  check(cuInit(0), "cuInit");
  check(cuGetExportTable((const void **)&table, &id), "cuGetExportTable");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuCtxCreate(&first, NULL, 0, device), "cuCtxCreate");
  if (atoi(argv[1])) check(table->create_context(&second, device), "create_context");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  check(cuMemsetD32(out, 0, 1), "cuMemsetD32");
  check(table->load_module(&m, unseen_text), "load_module");
  check(cuModuleGetFunction(&unseen, m, "unseen"), "cuModuleGetFunction");
  check(cuModuleLoadData(&m, seen_text), "cuModuleLoadData");
  check(cuModuleGetFunction(&seen, m, "seen"), "cuModuleGetFunction");
  void *parameters[] = {&out};
  for (int i = 0; i < atoi(argv[2]); ++i) {
    check(cuLaunchKernel(unseen, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, 0), "cuLaunchKernel");
    check(cuLaunchKernel(seen, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, 0), "cuLaunchKernel");
  }
  check(cuMemcpyDtoH(&found, out, 4), "cuMemcpyDtoH");
  printf("%u\n", found);
  return 0;
}
