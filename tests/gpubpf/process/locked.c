// A process whose list of mappings and memory cannot be read: one of its threads waits in mmap(2), with the lock of the address space,
// for a page that another thread has asked for. The page comes from a FUSE server of its own user namespace, which never answers.
//     locked FILE DEVICE [LIBRARY]
// It mounts the file system at FILE, with DEVICE, a copy of /dev/fuse. It prints the process ID of the server, with which all ends, and
// the address of a page that is being mapped. With LIBRARY, the thread waits in execve(2) instead, with the lock that ptrace(2) takes,
// and the process then calls cuInit of this driver.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

static void answer(int device, uint64_t unique, int error, const void *data, size_t size) {
    char out[256];
    struct fuse_out_header head = {sizeof head + size, error, unique};
    memcpy(out, &head, sizeof head);
    memcpy(out + sizeof head, data, size);
    if (write(device, out, head.len) < 0) perror("answer");
}

static volatile int *asked;  // a page was asked for; shared with the server

static void serve(int device) {
    static char request[1 << 20];
    struct fuse_init_out begun = {.major = 7, .minor = 31, .max_readahead = 4096, .max_write = 4096};
    struct fuse_attr_out file = {60, 0, 0, {.ino = 1, .size = 1 << 20, .mode = S_IFREG | 0755, .nlink = 1}};
    struct fuse_open_out open = {
        .fh = 1, .open_flags = FOPEN_DIRECT_IO};  // so that mmap waits for pages that are being read
    while (read(device, request, sizeof request) > 0 || errno == EINTR) {
        struct fuse_in_header *in = (void *)request;
        if (in->opcode == FUSE_INIT) answer(device, in->unique, 0, &begun, sizeof begun);
        else if (in->opcode == FUSE_GETATTR) answer(device, in->unique, 0, &file, sizeof file);
        else if (in->opcode == FUSE_OPEN) answer(device, in->unique, 0, &open, sizeof open);
        else if (in->opcode == FUSE_READ) *asked = 1;
        else if (in->opcode != FUSE_INTERRUPT && in->opcode != FUSE_FORGET)
            answer(device, in->unique, -ENOSYS, 0, 0);
    }
    _exit(0);
}

static volatile char *page;
static int file;

static void *reads(void *unused) { return page[0] ? unused : 0; }

static volatile int mapper;  // thread ID

static void *maps(void *unused) {
    mapper = gettid();
    return mmap((void *)(page + 4096), 4096, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0);
}

static void *executes(void *path) {
    char *arguments[] = {path, 0};
    return (void *)(long)execve(path, arguments, arguments + 1);
}

// Returns whether a thread waits in the kernel, uninterruptibly.
static int waits(int thread) {
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    int from = open(path, O_RDONLY);
    if (read(from, text, sizeof text - 1) < 0) perror("stat");
    close(from);
    char *name_end = strrchr(text, ')');
    return name_end && name_end[2] == 'D';
}

static int put(const char *path, const char *text) {
    int to = open(path, O_WRONLY);
    int failed = to < 0 || write(to, text, strlen(text)) < 0;
    close(to);
    return failed;
}

int main(int argc, char **argv) {
    char text[64];
    int user = getuid(), group = getgid();
    close(open(argv[1], O_RDWR | O_CREAT, 0600));
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0 || put("/proc/self/setgroups", "deny"))
        return perror("unshare"), 1;
    snprintf(text, sizeof text, "0 %d 1", user);
    if (put("/proc/self/uid_map", text)) return perror("uid_map"), 1;
    snprintf(text, sizeof text, "0 %d 1", group);
    if (put("/proc/self/gid_map", text)) return perror("gid_map"), 1;
    int device = open(argv[2], O_RDWR);
    snprintf(text, sizeof text, "fd=%d,rootmode=100000,user_id=0,group_id=0", device);
    if (device < 0 || mount("served", argv[1], "fuse", MS_NOSUID | MS_NODEV, text) != 0)
        return perror("mount"), 1;
    asked = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    // When the server ends, nobody has the device open, and the kernel lets all threads continue.
    pid_t server = fork();
    if (server == 0) serve(device);
    close(device);
    struct stat state;
    if ((file = open(argv[1], O_RDONLY)) < 0 || fstat(file, &state) != 0) return perror("open"), 1;
    page = mmap(0, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mmap((void *)page, 4096, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0);
    void *driver = argc > 3 ? dlopen(argv[3], RTLD_NOW) : 0;
    int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : 0;
    pthread_t threads[2];
    pthread_create(&threads[0], 0, init ? executes : reads, argv[1]);
    while (!*asked) usleep(1000);
    int length = snprintf(text, sizeof text, "%d %lu\n", server, (unsigned long)page + 4096);
    if (init == 0) {
        // Before Linux 6.4, each page fault takes the lock, so this thread must not touch a page for the first time from here on.
        waits(getpid());
        pthread_create(&threads[1], 0, maps, 0);
        while (!mapper || !waits(mapper)) usleep(1000);
    }
    if (write(1, text, length) < 0) perror("write");
    if (init != 0) init(0);
    for (;;) pause();
}
