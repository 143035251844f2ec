// A library with functions that users name in several ways: overloads, versions, and one that is chosen at run time.
#include <cstdlib>
#include <stdexcept>

extern "C" {
int old_way(int x) { return x + 1; }
int new_way(int x) { return x + 2; }
static int by_one(int x) { asm volatile(""); return x + 1; }
static int by_two(int x) { asm volatile(""); return x + 2; }
static int (*choose(void))(int) { return getenv("NONE") ? by_one : by_two; }
int chosen(int x) __attribute__((ifunc("choose")));
int other(int x) { asm volatile(""); return x; }
}
__asm__(".symver old_way,versioned@LIB_1");
__asm__(".symver new_way,versioned@@LIB_2");

namespace ns {
__attribute__((noinline)) int f(int x) { asm volatile(""); return x; }
__attribute__((noinline)) int f(double x) { asm volatile(""); return int(x); }
template <class T> __attribute__((noinline)) T g(T x) { asm volatile(""); return x; }
template int g<int>(int);
template long g<long>(long);
struct A {
    int n;
    A operator+(const A &b) const;
};
__attribute__((noinline)) A A::operator+(const A &b) const { asm volatile(""); return A{n + b.n}; }
__attribute__((noinline)) int throws(int x) { if (x > 2) throw std::runtime_error("x"); return other(x) + 1; }
}
