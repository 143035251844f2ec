// A program whose files in /proc/PID are large. It says "ready" and waits for the end of its input.
//     large environ MEGABYTES                   an environment of that size, of pages that exist only once
//     large served FILE                         an environment and a command line that are pages of this file
//     large maps DIRECTORY DEPTH COUNT          so many mappings of a file in nested directories with names of 250 bytes
// With "-", it has no driver; else the last argument is the driver that it loads first, in which it then calls cuInit.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/prctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned long number(int field) {
    static char text[4096];
    FILE *file = fopen("/proc/self/stat", "r");
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    char *at = strrchr(text, ')') + 2;
    for (int i = 3; i < field; i++) at = strchr(at, ' ') + 1;
    return strtoul(at, 0, 10);
}

static int environ_of(size_t size, int file) {
    int flags = MAP_PRIVATE | MAP_NORESERVE | (file < 0 ? MAP_ANONYMOUS : 0);
    char *made = mmap(0, size, PROT_READ | PROT_WRITE, flags, file, 0);
    if (made == MAP_FAILED) return 1;
    if (file < 0) strcpy(made, "FIRST=1");
    struct prctl_mm_map map = {
        .start_code = number(26),
        .end_code = number(27),
        .start_stack = number(28),
        .start_data = number(45),
        .end_data = number(46),
        .start_brk = number(47),
        .brk = (unsigned long)sbrk(0),
        .arg_start = file < 0 ? number(48) : (unsigned long)made,
        .arg_end = file < 0 ? number(49) : (unsigned long)made + size,
        .env_start = (unsigned long)made,
        .env_end = (unsigned long)made + size,
        .exe_fd = -1,
    };
    return prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0) != 0;
}

static int maps_of(const char *directory, int depth, int count) {
    char name[251] = {0};
    memset(name, 'd', 250);
    if (chdir(directory) != 0) return 1;
    for (int i = 0; i < depth; i++)
        if (mkdir(name, 0700) != 0 || chdir(name) != 0) return 1;
    int file = open("file", O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, 4096) != 0) return 1;
    for (int i = 0; i < count; i++)  // of the same page, so that the kernel does not join them
        if (mmap(0, 4096, PROT_READ, MAP_PRIVATE, file, 0) == MAP_FAILED) return 1;
    return 0;
}

int main(int argc, char **argv) {
    const char *driver = argv[argc - 1];
    int (*init)(unsigned) = 0;
    if (strcmp(driver, "-") != 0) {
        void *library = dlopen(driver, RTLD_NOW);
        if (library == 0 || (init = (int (*)(unsigned))dlsym(library, "cuInit")) == 0) return 2;
    }
    int failed;
    if (strcmp(argv[1], "maps") == 0) failed = maps_of(argv[2], atoi(argv[3]), atoi(argv[4]));
    else if (strcmp(argv[1], "served") == 0) failed = environ_of(4096, open(argv[2], O_RDWR));
    else failed = environ_of((size_t)atoi(argv[2]) << 20, -1);
    if (failed) return perror(argv[1]), 3;
    if (init != 0) init(0);
    puts("ready");
    fflush(stdout);
    char c;
    return read(0, &c, 1) < 0;
}
