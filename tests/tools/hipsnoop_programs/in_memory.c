/* in_memory LIBRARY: loads a copy of a HIP library that is in no file system, and waits for its probes before each of ten calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int copy = memfd_create("libamdhip64.so.6", 0), file = open(argv[argc - 1], O_RDONLY);
    struct stat state;
    char path[64];
    void *library, *memory;
    int (*allocate)(void **, size_t);

    fstat(file, &state);
    if (sendfile(copy, file, NULL, state.st_size) != state.st_size)
        return 1;
    sprintf(path, "/proc/self/fd/%d", copy);
    library = dlopen(path, RTLD_NOW);
    if (!library)
        return puts(dlerror()), 1;
    *(void **)&allocate = dlsym(library, "hipMalloc");
    for (int i = 0; i < 10; i++) {
        usleep(200000);
        allocate(&memory, 4);
    }
    puts("done");
}
