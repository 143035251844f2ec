/* A library with functions of several symbol versions: old@V1 and new@@V2 of one name, an alias, one that nobody exports. */
#define _GNU_SOURCE
#include <time.h>

int first_v1(int a) { return a + 1000; }
int first_v2(int a) { return a + 1; }
__asm__(".symver first_v1, snoop_first@V1");
__asm__(".symver first_v2, snoop_first@@V2");

long snoop_second(long a, long b, long c, long d, long e, long f, long g) { return a + b + c + d + e + f + g; }
int snoop_again(int depth) { return depth ? 1 + snoop_again(depth - 1) : 0; }
void snoop_sleep(int us) {
    struct timespec t = {0, us * 1000L};
    nanosleep(&t, 0);
}
int snoop_fails(void) { return 101; }
int snoop_other(int a) __attribute__((alias("first_v2")));
int snoop_pushes(int a) {
    __asm__ volatile("" ::: "rbx");
    return a + 1;
}
