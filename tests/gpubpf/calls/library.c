/* A library with functions of every kind that is counted: nested, ending in each other, calling back, giving something. */
#define _GNU_SOURCE
#include <stdint.h>
#include <time.h>

struct shape {
    unsigned x, y, z;
};
struct config {
    struct shape grid, block;
    unsigned shared;
    void *stream;
};

int calls_quick(int status) {
    __asm__ volatile("" ::: "rbx");
    return status;
}
int calls_launch(void *kernel, struct shape grid, struct shape block, void **arguments, long shared, void *stream) {
    __asm__ volatile("" ::: "rbx");
    return 0;
}
/* The same, which nobody watches. */
int calls_unwatched(void *kernel, struct shape grid, struct shape block, void **arguments, long shared, void *stream) {
    __asm__ volatile("" ::: "rbx");
    return 0;
}
int calls_launch_by(struct config *config, void *kernel) {
    __asm__ volatile("" ::: "rbx");
    return 0;
}
int calls_launch_from(void **kernel) {
    __asm__ volatile("" ::: "rbx");
    return 0;
}
int calls_outer(int times) {
    int failed = 0;
    for (int i = 0; i < times; i++) failed |= calls_quick(0);
    return failed;
}
int calls_ends_in_quick(int status) { return calls_quick(status); }
int calls_back(void (*back)(void *), void *with) {
    __asm__ volatile("" ::: "rbx");
    back(with);
    __asm__ volatile("" ::: "memory");
    return 0;
}
int calls_gives(uintptr_t *out, long bytes) {
    __asm__ volatile("" ::: "rbx");
    *out = 0x1234567890;
    return 0;
}
int calls_query(int status) {
    __asm__ volatile("" ::: "rbx");
    return status;
}
const char *calls_text(int number) {
    __asm__ volatile("" ::: "rbx");
    return "text";
}
int calls_sleep(int us) {
    struct timespec t = {us / 1000000, us % 1000000 * 1000L};
    nanosleep(&t, 0);
    return 0;
}
