/* Kernels as clang writes them into a program: handles, which are variables, and a constructor that registers them. */
#ifndef GPUBPF_TESTS_KERNELS_H
#define GPUBPF_TESTS_KERNELS_H

#include <stdlib.h>

#include "hip.h"

/* A kernel's handle is the address of `variable`, whose symbol is the kernel's mangled name. */
#define KERNEL(variable, mangled)                                                                                                      \
    static void variable##_stub(void) {}                                                                                               \
    extern const void *const variable __asm__(mangled);                                                                                \
    const void *const variable = (const void *)variable##_stub;

static const struct { char magic[24]; uint64_t entries; } fat_binary __attribute__((section(".hip_fatbin"), aligned(4096))) = {
    "__CLANG_OFFLOAD_BUNDLE__", 0};
static const struct { uint32_t magic, version; const void *binary, *unused; } fat_binary_wrapper
    __attribute__((section(".hipFatBinSegment"))) = {0x48495046, 1, &fat_binary, NULL};
static void **module_handle;

#define register_kernel(handle, name) \
    __hipRegisterFunction(module_handle, handle, (char *)name, name, (unsigned)-1, NULL, NULL, NULL, NULL, NULL)

static void unregister_module(void) {
    if (module_handle)
        __hipUnregisterFatBinary(module_handle);
    module_handle = NULL;
}

static inline void register_module(void) {
    if (!module_handle)
        module_handle = __hipRegisterFatBinary(&fat_binary_wrapper);
    atexit(unregister_module);
}

#endif
