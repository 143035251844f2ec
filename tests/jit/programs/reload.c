// reload N [release|reset]: N times a module from PTX, in turn as a module and as a library, of two texts whose kernels have one name and do
// different things; __device__ and __constant__ variables set by the host; unloaded each time, so that handles come again. At the end
// the context is left to the exit, or released, or reset.
#include "jit.h"

#define KERNEL(DOES) HEAD \
    ".visible .global .align 4 .u32 total = 5;\n" \
    ".visible .const .align 4 .u32 factors[2];\n" \
    ".visible .entry step(.param .u64 p, .param .u32 n)\n{\n .reg .b64 %rd<4>;\n .reg .b32 %r<8>;\n .reg .pred %q;\n" \
    " ld.param.u64 %rd1, [p];\n ld.param.u32 %r1, [n];\n mov.u32 %r2, %tid.x;\n setp.ge.u32 %q, %r2, %r1;\n @%q bra DONE;\n" \
    " ld.const.u32 %r3, [factors+4];\n mul.lo.u32 %r4, %r2, %r3;\n atom.global.add.u32 %r5, [total], 1;\n" DOES \
    " mul.wide.u32 %rd2, %r2, 4;\n add.u64 %rd1, %rd1, %rd2;\n st.global.u32 [%rd1], %r4;\nDONE:\n ret;\n}\n"

static const char *const texts[] = {KERNEL(" add.u32 %r4, %r4, 1;\n"), KERNEL(" sub.u32 %r4, %r4, 1;\n")};

int main(int argc, char **argv) {
    begin(argc, argv);
    int n = argc > 1 ? atoi(argv[1]) : 4, threads = 20;
    CUdeviceptr out = memory(4 * 32);
    void *parameters[] = {&out, &threads};
    void *last = NULL;
    int again = 0;
    while (another()) {
        for (int i = 0; i < n; i++) {
            CUmodule module = NULL;
            CUlibrary library = NULL;
            CUfunction function;
            CUkernel kernel;
            CUdeviceptr total, factors;
            size_t bytes;
            char *image = strdup(texts[i % 2]);
            int factor[] = {0, i + 2};
            if (i / 2 % 2) {
                CHECK(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
                CHECK(cuLibraryGetKernel(&kernel, library, "step"));
                CHECK(cuLibraryGetGlobal(&total, NULL, library, "total"));
                CHECK(cuLibraryGetGlobal(&factors, &bytes, library, "factors"));
                function = (CUfunction)kernel;
            } else {
                CHECK(cuModuleLoadDataEx(&module, image, 0, NULL, NULL));
                CHECK(cuModuleGetFunction(&function, module, "step"));
                CHECK(cuModuleGetGlobal(&total, NULL, module, "total"));
                CHECK(cuModuleGetGlobal(&factors, &bytes, module, "factors"));
            }
            memset(image, 'x', strlen(image));
            free(image);
            MUST(bytes == 8 && number_at(total, 0) == 5);
            CHECK(cuMemcpyHtoD(factors, factor, sizeof factor));
            for (int k = 0; k < 2; k++) launch(function, "step", 1, 32, parameters);
            MUST(number_at(total, 0) == 5 + 2 * threads);
            for (int k = 0; k < threads; k++) MUST(number_at(out, k) == k * (i + 2) + (i % 2 ? -1 : 1));
            again += (void *)function == last;
            last = (void *)function;
            if (library) CHECK(cuLibraryUnload(library));
            else CHECK(cuModuleUnload(module));
        }
    }
    if (argc > 2 && !strcmp(argv[2], "release")) CHECK(cuDevicePrimaryCtxRelease(0));
    if (argc > 2 && !strcmp(argv[2], "reset")) CHECK(cuDevicePrimaryCtxReset(0));
    printf("%d handles came again\n", again);
    return 0;
}
