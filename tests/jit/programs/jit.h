// For programs that make their kernels at run time, in C on the driver API. Each checks its own results, and says for every round
// how often it launched what: "round 0 {"fill": 5}". With --again there are two rounds; before the second the program says
// "ready", and waits for a line on standard input: then somebody may be attached.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))
#define CHECK(call) expect(call, CUDA_SUCCESS, #call, __LINE__)
#define EXPECT(status, call) expect(call, status, #call, __LINE__)
#define MUST(condition) ((condition) ? (void)0 : FAIL("line %d: %s is not so", __LINE__, #condition))

static inline void expect(CUresult got, CUresult wanted, const char *call, int line) {
    if (got != wanted) FAIL("line %d: %s gives %d, not %d", line, call, (int)got, (int)wanted);
}

static int rounds_ = 1, round_ = -1;
static struct { const char *name; int count; } counts_[16];

static inline CUcontext begin(int argc, char **argv) {
    CUcontext context;
    if (argc > 1 && !strcmp(argv[argc - 1], "--again")) rounds_ = 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    return context;
}

// `while (another())` around what a program does: tells of the round before, waits where that is asked for.
static inline int another(void) {
    char line[64];
    if (round_ >= 0) {
        printf("round %d {", round_);
        for (int i = 0; i < 16 && counts_[i].count; i++) printf("%s\"%s\": %d", i ? ", " : "", counts_[i].name, counts_[i].count);
        printf("}\n");
        memset(counts_, 0, sizeof counts_);
    }
    if (++round_ == rounds_) return 0;
    if (round_ == 0) return 1;
    printf("ready\n");
    return fgets(line, sizeof line, stdin) != NULL;
}

static inline void launch(CUfunction function, const char *name, unsigned grid, unsigned block, void **parameters) {
    int i = 0;
    CHECK(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, NULL, parameters, NULL));
    while (counts_[i].count && strcmp(counts_[i].name, name)) i++;
    counts_[i].name = name;
    counts_[i].count++;
}

static inline CUdeviceptr memory(size_t bytes) {
    CUdeviceptr made;
    CHECK(cuMemAlloc(&made, bytes));
    CHECK(cuMemsetD8(made, 0, bytes));
    return made;
}

static inline int number_at(CUdeviceptr address, size_t index) {
    int value;
    CHECK(cuMemcpyDtoH(&value, address + 4 * index, sizeof value));
    return value;
}

#define HEAD ".version 7.0\n.target sm_70\n.address_size 64\n"
