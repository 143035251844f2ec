// Copies twice, then uses a library that uses CUPTI: the one that it is linked to (LINKED), or the one that its argument names. Then it
// copies three times more, once while that library records. Exits with 0 if all calls succeed and the records are those of the library.
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>

#ifdef MENTIONED
const char *mentioned = MENTIONED;
#endif

int user_begin(void), user_end(void);

int main(int count, char **arguments) {
    static char data[4096];
    CUdevice device;
    CUcontext context;
    CUdeviceptr memory;
#ifdef LINKED
    int (*begin)(void) = user_begin, (*end)(void) = user_end;
#else
    int (*begin)(void) = NULL, (*end)(void) = NULL;
#endif
    int failed = cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) ||
                 cuCtxSetCurrent(context) || cuMemAlloc(&memory, sizeof data);
    for (int i = 0; i < 2; ++i) failed = failed || cuMemcpyHtoD(memory, data, sizeof data);
    if (count > 1) {
        void *library = dlopen(arguments[1], RTLD_NOW);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 3;
        begin = (int (*)(void))dlsym(library, "user_begin");
        end = (int (*)(void))dlsym(library, "user_end");
    }
    failed = failed || (begin && begin()) || cuMemcpyHtoD(memory, data, sizeof data) || (end && end());
    for (int i = 0; i < 2; ++i) failed = failed || cuMemcpyHtoD(memory, data, sizeof data);
    return failed;
}
