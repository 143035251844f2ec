// link FILE.ptx: two PTX texts joined by cuLink*, the second from a file that this program writes; logs; what goes wrong.
#include "jit.h"

// fill(p): p[i] = twice(i) + own(i), where both texts have a function `own` and a table of their own.
static const char first[] = HEAD
    ".extern .func (.param .b32 r) twice(.param .b32 a);\n"
    ".global .align 4 .u32 table[2] = {1, 2};\n"
    ".func (.param .b32 r) own(.param .b32 a)\n{\n .reg .b32 %r<4>;\n ld.param.b32 %r1, [a];\n ld.global.u32 %r2, [table+4];\n"
    " add.u32 %r1, %r1, %r2;\n st.param.b32 [r], %r1;\n ret;\n}\n"
    ".visible .entry fill(.param .u64 p)\n{\n .reg .b64 %rd<4>;\n .reg .b32 %r<5>;\n ld.param.u64 %rd1, [p];\n"
    " mov.u32 %r1, %tid.x;\n"
    " {\n .param .b32 a0;\n .param .b32 r0;\n st.param.b32 [a0], %r1;\n call (r0), twice, (a0);\n ld.param.b32 %r2, [r0];\n }\n"
    " {\n .param .b32 a0;\n .param .b32 r0;\n st.param.b32 [a0], %r1;\n call (r0), own, (a0);\n ld.param.b32 %r3, [r0];\n }\n"
    " add.u32 %r2, %r2, %r3;\n mul.wide.u32 %rd2, %r1, 4;\n add.u64 %rd1, %rd1, %rd2;\n st.global.u32 [%rd1], %r2;\n ret;\n}\n";
static const char second[] = HEAD
    ".global .align 4 .u32 table[2] = {7, 9};\n"
    ".func (.param .b32 r) own(.param .b32 a)\n{\n .reg .b32 %r<4>;\n ld.param.b32 %r1, [a];\n add.u32 %r1, %r1, %r1;\n"
    " st.param.b32 [r], %r1;\n ret;\n}\n"
    ".visible .func (.param .b32 r) twice(.param .b32 a)\n{\n .reg .b32 %r<4>;\n ld.param.b32 %r1, [a];\n"
    " {\n .param .b32 a0;\n .param .b32 r0;\n st.param.b32 [a0], %r1;\n call (r0), own, (a0);\n ld.param.b32 %r2, [r0];\n }\n"
    " st.param.b32 [r], %r2;\n ret;\n}\n";

static char errors[512], infos[512];
static CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_INFO_LOG_BUFFER,
                                 CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_LOG_VERBOSE, CU_JIT_WALL_TIME};
static void *values[6];

static CUlinkState start(void) {
    CUlinkState link;
    void *fresh[] = {errors, (void *)sizeof errors, infos, (void *)sizeof infos, (void *)1, NULL};
    memcpy(values, fresh, sizeof values);
    memset(errors, 0, sizeof errors);
    memset(infos, 0, sizeof infos);
    CHECK(cuLinkCreate(6, options, values, &link));
    return link;
}

static void add(CUlinkState link, const char *text, const char *name, CUresult wanted) {
    char *copy = strdup(text);
    EXPECT(wanted, cuLinkAddData(link, CU_JIT_INPUT_PTX, copy, strlen(copy) + 1, name, 0, NULL, NULL));
    memset(copy, 'x', strlen(copy));  // the link has its own
    free(copy);
}

int main(int argc, char **argv) {
    begin(argc, argv);
    if (argc < 2) FAIL("usage: link FILE.ptx [--again]");
    FILE *file = fopen(argv[1], "w");
    if (!file || fputs(second, file) < 0 || fclose(file)) FAIL("%s cannot be written", argv[1]);
    CUdeviceptr out = memory(4 * 32);
    void *parameters[] = {&out}, *image;
    size_t size;
    CUlinkState link;
    while (another()) {
        // A module, from an image that is gone when its kernel runs.
        link = start();
        add(link, first, "first.ptx", CUDA_SUCCESS);
        CHECK(cuLinkAddFile(link, CU_JIT_INPUT_PTX, argv[1], 0, NULL, NULL));
        CHECK(cuLinkComplete(link, &image, &size));
        MUST(size > 100 && !memcmp(image, "\177ELF", 4) && strstr(infos, "fill") && !*errors);
        MUST((size_t)values[3] == strlen(infos) && values[1] == NULL && values[5] != NULL);
        CUmodule module;
        CUfunction function;
        CHECK(cuModuleLoadData(&module, image));
        CHECK(cuLinkDestroy(link));
        EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLinkDestroy(link));
        CHECK(cuModuleGetFunction(&function, module, "fill"));
        EXPECT(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&function, module, "twice"));
        for (int i = 0; i < 3; i++) launch(function, "fill", 1, 32, parameters);
        for (int i = 0; i < 32; i++) MUST(number_at(out, i) == 2 * i + i + 2);
        CHECK(cuModuleUnload(module));

        // A library, of one text alone.
        CUlibrary library;
        CUkernel kernel;
        link = start();
        add(link, HEAD ".visible .entry one(.param .u64 p)\n{\n .reg .b64 %rd<2>;\n ld.param.u64 %rd1, [p];\n"
                       " st.global.u32 [%rd1], 1;\n ret;\n}\n", NULL, CUDA_SUCCESS);
        CHECK(cuLinkComplete(link, &image, &size));
        CHECK(cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0));
        CHECK(cuLinkDestroy(link));
        CHECK(cuLibraryGetKernel(&kernel, library, "one"));
        for (int i = 0; i < 2; i++) launch((CUfunction)kernel, "one", 1, 1, parameters);
        MUST(number_at(out, 0) == 1);
        CHECK(cuLibraryUnload(library));
    }
    // What does not compile is said where it is added; what is missing, or there twice, when the link is completed.
    link = start();
    add(link, HEAD ".visible .entry bad()\n{\n st.global.u32 st [], 1;\n}\n", "bad.ptx", CUDA_ERROR_INVALID_PTX);
    MUST(strstr(errors, "ptxas application ptx input, line 6; error") && (size_t)values[1] == strlen(errors));
    CHECK(cuLinkDestroy(link));
    link = start();
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLinkComplete(link, &image, &size));
    add(link, first, "first.ptx", CUDA_SUCCESS);
    EXPECT(CUDA_ERROR_UNKNOWN, cuLinkComplete(link, &image, &size));
    MUST(strstr(errors, "Undefined reference to 'twice' in 'first.ptx'"));
    add(link, second, "second.ptx", CUDA_SUCCESS);
    add(link, second, "third.ptx", CUDA_SUCCESS);
    EXPECT(CUDA_ERROR_UNKNOWN, cuLinkComplete(link, &image, &size));
    MUST(strstr(errors, "Multiple definition of 'twice' in 'third.ptx'"));
    EXPECT(CUDA_ERROR_FILE_NOT_FOUND, cuLinkAddFile(link, CU_JIT_INPUT_PTX, "/", 0, NULL, NULL));
    CHECK(cuLinkDestroy(link));
    return 0;
}
