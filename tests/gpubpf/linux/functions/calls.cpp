// Waits for a line, then makes known numbers of calls.
#include <cstdio>
#include <cstring>
#include <exception>

extern "C" int versioned(int), chosen(int), other(int);
int old(int);
__asm__(".symver _Z3oldi,versioned@LIB_1");
namespace ns {
int f(int);
int f(double);
template <class T> T g(T);
struct A {
    int n;
    A operator+(const A &b) const;
};
int throws(int);
}

int main() {
    int caught = 0;
    char line[8], from[64] = "abc", to[64];
    void *(*volatile copy)(void *, const void *, size_t) = memcpy;
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        for (int i = 0; i < 1000; i++) copy(to, from, 64);
        for (int i = 0; i < 3; i++) versioned(i);
        for (int i = 0; i < 5; i++) old(i);
        for (int i = 0; i < 7; i++) chosen(i);
        for (int i = 0; i < 11; i++) ns::f(i);
        for (int i = 0; i < 13; i++) ns::f(1.5);
        for (int i = 0; i < 17; i++) ns::g<int>(i);
        for (int i = 0; i < 19; i++) ns::g<long>(i);
        for (int i = 0; i < 23; i++) ns::A{1} + ns::A{2};
        for (int i = 0; i < 29; i++) other(i);
        for (int i = 0; i < 5; i++) {
            try {
                ns::throws(i);
            } catch (const std::exception &) {
                caught++;
            }
        }
        printf("%d\n", caught);
        fflush(stdout);
    }
}
