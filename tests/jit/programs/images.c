// images FILE…: loads each file in three ways, says the status and the error log of each, and launches the kernel `fill` of what
// was loaded: p[i] = i + 7.
#include "jit.h"

static void try(CUmodule module, const char *name) {
    CUfunction function;
    CUdeviceptr out = memory(4 * 32);
    void *parameters[] = {&out};
    CHECK(cuModuleGetFunction(&function, module, "fill"));
    launch(function, "fill", 1, 32, parameters);
    for (int i = 0; i < 32; i++)
        if (number_at(out, i) != i + 7) FAIL("%s: %d at %d", name, number_at(out, i), i);
    CHECK(cuMemFree(out));
}

int main(int argc, char **argv) {
    begin(argc, argv);
    while (another())
        for (int k = 1; k < argc && strcmp(argv[k], "--again"); k++) {
            CUmodule module;
            CUlibrary library;
            char log[2048] = "";
            CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_MAX_REGISTERS};
            void *values[] = {log, (void *)sizeof log, (void *)32};
            const char *name = strrchr(argv[k], '/') ? strrchr(argv[k], '/') + 1 : argv[k];
            CUresult file = cuModuleLoad(&module, argv[k]);
            if (file == CUDA_SUCCESS) {
                try(module, name);
                CHECK(cuModuleUnload(module));
            }
            FILE *from = fopen(argv[k], "rb");
            static char data[1 << 20];
            size_t size = from ? fread(data, 1, sizeof data - 1, from) : 0;
            if (!from || fclose(from)) FAIL("%s cannot be read", argv[k]);
            data[size] = 0;
            CUresult bytes = cuModuleLoadDataEx(&module, data, 3, options, values);
            if (bytes == CUDA_SUCCESS) {
                try(module, name);
                CHECK(cuModuleUnload(module));
            }
            CUresult whole = cuLibraryLoadData(&library, data, NULL, NULL, 0, NULL, NULL, 0);
            if (whole == CUDA_SUCCESS) {
                CHECK(cuLibraryGetModule(&module, library));
                try(module, name);
                CHECK(cuLibraryUnload(library));
            }
            if (file != bytes || bytes != whole) FAIL("%s gives %d, %d and %d", name, (int)file, (int)bytes, (int)whole);
            if ((size_t)values[1] != strlen(log)) FAIL("%s: the log has %zu bytes, not %zu", name, strlen(log), (size_t)values[1]);
            for (char *c = log; *c; c++) *c = *c == '\n' ? '|' : *c;
            printf("%s %d %s\n", name, (int)bytes, log);
        }
    return 0;
}
