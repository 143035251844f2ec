// hostile MODE ARGUMENTS: a process of a user who wants to stop, blind or exhaust a tool that root runs.
//     hostile connect                    connects to each tool's socket again and again, and sends noise or nothing
//     hostile drivers DIRECTORY COUNT    maps so many files named libcuda.so.N
//     hostile stops LIBRARY              children that load a driver, and are stopped and continued all the time
//     hostile comes LIBRARY              children that load a driver, call cuInit and end
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void connect_to(const char *name) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    strncpy(to.sun_path + 1, name, sizeof to.sun_path - 2);
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (file < 0) return;
    if (connect(file, (struct sockaddr *)&to, 3 + strlen(name)) == 0 && rand() % 2) {
        char noise[256];
        for (size_t i = 0; i < sizeof noise; i++) noise[i] = (char)rand();
        send(file, noise, sizeof noise, MSG_NOSIGNAL);
    }
    close(file);
}

static void connects(void) {
    for (;;) {
        char line[512], *at;
        FILE *list = fopen("/proc/net/unix", "r");
        while (list && fgets(line, sizeof line, list))
            if ((at = strstr(line, "@gpubpf-")) != 0) {
                at[strcspn(at, "\n")] = 0;
                for (int i = 0; i < 200; i++) connect_to(at + 1);
            }
        if (list) fclose(list);
        usleep(1000);
    }
}

static int drivers(const char *directory, int count) {
    char path[4096];
    for (int i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/libcuda.so.%d", directory, i);
        int file = open(path, O_RDWR | O_CREAT, 0600);
        if (file < 0 || ftruncate(file, 4096) != 0) return 1;
        if (mmap(0, 4096, PROT_READ, MAP_PRIVATE, file, 0) == MAP_FAILED) return 1;
        close(file);
        unlink(path);
    }
    pause();
    return 0;
}

static void child(const char *library, int calls) {
    void *driver = dlopen(library, RTLD_NOW);
    int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : 0;
    if (calls && init) init(0);
    if (!calls) {
        usleep(100000);
        if (init) init(0);
        usleep(200000);
    }
    _exit(0);
}

static void stops(const char *library) {
    for (;;) {
        pid_t children[4];
        for (int i = 0; i < 4; i++)
            if ((children[i] = fork()) == 0) child(library, 0);
        for (int turn = 0; turn < 200; turn++)
            for (int i = 0; i < 4; i++) {
                kill(children[i], turn % 2 ? SIGCONT : SIGSTOP);
                usleep(500);
            }
        for (int i = 0; i < 4; i++) kill(children[i], SIGKILL), waitpid(children[i], 0, 0);
    }
}

static void comes(const char *library) {
    for (;;) {
        pid_t one = fork();
        if (one == 0) child(library, 1);
        waitpid(one, 0, 0);
        usleep(50000);
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "connect")) connects();
    if (argc > 3 && !strcmp(argv[1], "drivers")) return drivers(argv[2], atoi(argv[3]));
    if (argc > 2 && !strcmp(argv[1], "stops")) stops(argv[2]);
    if (argc > 2 && !strcmp(argv[1], "comes")) comes(argv[2]);
    return 2;
}
