// Launches a kernel three times, says "ready", and at each line on stdin three times again; at the end of it does what its arguments say:
// "exec PROGRAM ARG…": becomes that one; "spawn PROGRAM ARG…": starts it and waits for the end of it; "fork": leaves a child that
// sleeps; "end": just ends.
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *text =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry again(.param .u64 out) {\n"
    " .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n"
    " ld.param.u64 %rd1, [out];\n cvta.to.global.u64 %rd1, %rd1;\n mov.u32 %r1, 1;\n"
    " red.global.add.u32 [%rd1], %r1;\n ret;\n}\n";

static void check(CUresult r, const char *what) {
  if (r == CUDA_SUCCESS) return;
  dprintf(2, "%s: error %d\n", what, (int)r);
  _exit(1);
}

static void work(CUdeviceptr out) {
  CUmodule m;
  CUfunction f;
  void *parameters[] = {&out};
  check(cuModuleLoadData(&m, text), "cuModuleLoadData");
  check(cuModuleGetFunction(&f, m, "again"), "cuModuleGetFunction");
  for (int i = 0; i < 3; ++i) check(cuLaunchKernel(f, 2, 1, 1, 32, 1, 1, 0, 0, parameters, 0), "cuLaunchKernel");
  check(cuCtxSynchronize(), "cuCtxSynchronize");
  check(cuModuleUnload(m), "cuModuleUnload");
}

int main(int argc, char **argv) {
  CUdevice device;
  CUcontext context;
  CUdeviceptr out;
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  check(cuMemAlloc(&out, 4), "cuMemAlloc");
  char line[16];
  do {
    work(out);
    puts("ready");
    fflush(stdout);
  } while (fgets(line, sizeof line, stdin));
  if (argc < 2 || !strcmp(argv[1], "end")) return 0;
  if (!strcmp(argv[1], "exec")) execv(argv[2], argv + 2);
  const pid_t child = fork();
  if (child == 0) {
    if (!strcmp(argv[1], "spawn")) execv(argv[2], argv + 2);
    sleep(5);
    _exit(0);
  }
  waitpid(child, 0, 0);
  return 0;
}
