// compilers LIBNVRTC [linked]: threads compile cubins with an NVRTC that is opened after cuInit, in two turns; between them it is closed.
// What NVRTC returns stays the same with hooks: statuses, errno, sizes. A forked child compiles, too. `linked`: opened before cuInit.
#include "jit.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4 };

typedef void *nvrtcProgram;
static struct {
    int (*nvrtcCreateProgram)(nvrtcProgram *, const char *, const char *, int, const char **, const char **);
    int (*nvrtcCompileProgram)(nvrtcProgram, int, const char **);
    int (*nvrtcGetCUBINSize)(nvrtcProgram, size_t *);
    int (*nvrtcGetCUBIN)(nvrtcProgram, char *);
    int (*nvrtcDestroyProgram)(nvrtcProgram *);
} nvrtc;

static void *open_nvrtc(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) FAIL("%s", dlerror());
#define FIND(name) MUST((nvrtc.name = dlsym(library, #name)) != NULL)
    FIND(nvrtcCreateProgram);
    FIND(nvrtcCompileProgram);
    FIND(nvrtcGetCUBINSize);
    FIND(nvrtcGetCUBIN);
    FIND(nvrtcDestroyProgram);
    return library;
}

static struct { char name[32]; void *cubin; } made[THREADS];

static void *compile(void *argument) {
    const int k = (int)(size_t)argument;
    static const char *options[] = {"-arch=sm_90"};
    char source[256];
    nvrtcProgram program;
    size_t size = 0;
    snprintf(made[k].name, sizeof made[k].name, "fill%d", k);
    snprintf(source, sizeof source, "extern \"C\" __global__ void fill%d(int *p) { p[threadIdx.x] = %d + threadIdx.x; }", k, k);
    MUST(nvrtc.nvrtcCreateProgram(&program, source, "a.cu", 0, NULL, NULL) == 0);
    MUST(nvrtc.nvrtcCompileProgram(program, 1, options) == 0);
    MUST(nvrtc.nvrtcGetCUBINSize(program, &size) == 0 && size > 100);
    made[k].cubin = malloc(size);
    errno = 77;
    MUST(nvrtc.nvrtcGetCUBIN(program, made[k].cubin) == 0 && errno == 77);
    MUST(nvrtc.nvrtcGetCUBIN(program, NULL) == 3 && nvrtc.nvrtcGetCUBIN(NULL, made[k].cubin) == 4);
    MUST(nvrtc.nvrtcDestroyProgram(&program) == 0 && !program);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) FAIL("usage: compilers LIBNVRTC [linked] [--again]");
    void *library = argc > 2 && !strcmp(argv[2], "linked") ? open_nvrtc(argv[1]) : NULL;
    begin(argc, argv);
    CUdeviceptr out = memory(4 * 32);
    void *parameters[] = {&out};
    while (another())
        for (int turn = 0; turn < 2; turn++) {
            if (!library) library = open_nvrtc(argv[1]);
            pthread_t threads[THREADS];
            for (int k = 0; k < THREADS; k++) MUST(!pthread_create(&threads[k], NULL, compile, (void *)(size_t)k));
            for (int k = 0; k < THREADS; k++) pthread_join(threads[k], NULL);
            const pid_t child = fork();
            if (!child) {
                compile((void *)0);
                _exit(0);
            }
            int status = 1;
            MUST(waitpid(child, &status, 0) == child && status == 0);
            for (int k = 0; k < THREADS; k++) {
                CUmodule module;
                CUfunction function;
                CHECK(cuModuleLoadData(&module, made[k].cubin));
                free(made[k].cubin);
                CHECK(cuModuleGetFunction(&function, module, made[k].name));
                launch(function, made[k].name, 1, 32, parameters);
                for (int i = 0; i < 32; i++) MUST(number_at(out, i) == k + i);
                CHECK(cuModuleUnload(module));
            }
            MUST(!dlclose(library));
            library = NULL;
        }
    return 0;
}
