"""The tools on programs whose kernels call virtual functions, or by pointers: the same results, exact counts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import gpubpf_cuda
import gpubpf_specs

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = gpubpf_cuda.needs_cuda

# Object i of 192 is a Square, a Circle, or (with i % 3 == 2) a Pair of both, whose functions call those of its parts.
APP = r"""
#include <cstdio>
struct Shape {
    float size;
    __device__ Shape(float size) : size(size) {}
    __device__ virtual float area(float more) const = 0;
    __device__ virtual void grow(float by) { size *= by; }
    __device__ virtual ~Shape() {}
};
struct Square : Shape {
    __device__ Square(float size) : Shape(size) {}
    __device__ float area(float more) const override { return size * size + more; }
};
struct Circle : Shape {
    float *log;
    __device__ Circle(float size, float *log) : Shape(size), log(log) {}
    __device__ float area(float more) const override {
        log[0] = size;
        return 3 * size * size - more;
    }
    __device__ void grow(float by) override { size += by; }
};
struct Pair : Shape {
    Shape *left, *right;
    __device__ Pair(Shape *left, Shape *right) : Shape(0), left(left), right(right) {}
    __device__ float area(float more) const override { return left->area(more) + right->area(more); }
    __device__ void grow(float by) override { left->grow(by), right->grow(by); }
    __device__ ~Pair() { delete left, delete right; }
};
__global__ void build(Shape **shapes, float *log) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float size = i;
    if (i % 3 == 0) shapes[i] = new Square(size);
    else if (i % 3 == 1) shapes[i] = new Circle(size, log + i);
    else shapes[i] = new Pair(new Square(size), new Circle(size, log + i));
}
__global__ void use(Shape **shapes, float *areas) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    shapes[i]->grow(2);
    areas[i] = shapes[i]->area(1);
}
__global__ void drop(Shape **shapes) { delete shapes[blockIdx.x * blockDim.x + threadIdx.x]; }
int main() {
    Shape **shapes;
    float *areas, *log;
    cudaMalloc(&shapes, 192 * sizeof *shapes);
    cudaMallocManaged(&areas, 192 * sizeof *areas);
    cudaMallocManaged(&log, 192 * sizeof *log);
    cudaMemset(log, 0, 192 * sizeof *log);
    build<<<2, 96>>>(shapes, log);
    use<<<2, 96>>>(shapes, areas);
    drop<<<2, 96>>>(shapes);
    if (cudaDeviceSynchronize()) return 9;
    for (int i = 0; i < 192; i++) {
        float twice = 2.f * i, more = i + 2.f, square = twice * twice + 1, circle = 3 * more * more - 1;
        if (areas[i] != (i % 3 == 0 ? square : i % 3 == 1 ? circle : square + circle)) return 1;
        if (log[i] != (i % 3 ? more : 0)) return 2;
    }
    puts("right");
    return 7;
}
"""


# Each kernel calls one of three functions, by a pointer from a local array, a choice, a constant array, or a variable that the host
# changes. `by_array` and `by_choice` use functions that are in no table.
POINTERS = r"""
#include <cstdio>
#include <utility>
typedef int (*Function)(int, int);
__device__ __noinline__ int add(int a, int b) { return a + b; }
__device__ __noinline__ int sub(int a, int b) { return a - b; }
__device__ __noinline__ int mul(int a, int b) { return a * b; }
struct Pair { int first, second; };
typedef Pair (*Paired)(Pair);
__device__ __noinline__ Pair twice(Pair p) { return {2 * p.first, 2 * p.second}; }
__device__ __noinline__ Pair swapped(Pair p) { return {p.second, p.first}; }
__device__ __noinline__ Pair summed(Pair p) { return {p.first + p.second, 0}; }
__device__ Function table[] = {add, sub, mul};
__global__ void by_constant(int *out, int i) {
    static const Function constant[] = {add, sub, mul};
    out[threadIdx.x] = constant[(threadIdx.x + i) % 3](threadIdx.x, i);
}
__global__ void by_variable(int *out, int i) { out[threadIdx.x] = table[threadIdx.x % 3](threadIdx.x, i); }
__global__ void by_array(int *out, int i) {
    Paired local[] = {twice, swapped, summed};
    Pair made = local[(threadIdx.x + i) % 3]({int(threadIdx.x), i});
    out[threadIdx.x] = 100 * made.first + made.second;
}
__global__ void by_choice(int *out, int i) {
    Paired chosen = threadIdx.x > i ? twice : swapped;
    Pair made = chosen({int(threadIdx.x), i});
    out[threadIdx.x] = 100 * made.first + made.second;
}
int wanted(int which, int a, int b) { return which == 0 ? a + b : which == 1 ? a - b : a * b; }
int main() {
    int *out;
    if (cudaMallocManaged(&out, 64 * sizeof *out)) return 9;
    by_constant<<<1, 64>>>(out, 5);
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++) if (out[t] != wanted((t + 5) % 3, t, 5)) return 1;
    Function read[3];
    cudaMemcpyFromSymbol(read, table, sizeof read);
    std::swap(read[0], read[2]);
    cudaMemcpyToSymbol(table, read, sizeof read);
    by_variable<<<1, 64>>>(out, 5);
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++) if (out[t] != wanted(2 - t % 3, t, 5)) return 2;
    by_array<<<1, 64>>>(out, 5);
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++)
        if (out[t] != ((t + 5) % 3 == 0 ? 200 * t + 10 : (t + 5) % 3 == 1 ? 500 + t : 100 * (t + 5))) return 3;
    by_choice<<<1, 64>>>(out, 20);
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++) if (out[t] != (t > 20 ? 200 * t + 40 : 2000 + t)) return 4;
    puts("right");
    return 7;
}
"""


# The functions are only in variables that the program can change. A kernel swaps two entries, and the host two others.
CHANGED = r"""
#include <cstdio>
#include <unistd.h>
#include <utility>
typedef int (*Function)(int, int);
__device__ __noinline__ int add(int a, int b) { return a + b; }
__device__ __noinline__ int sub(int a, int b) { return a - b; }
__device__ __noinline__ int mul(int a, int b) { return a * b; }
__device__ __noinline__ int less(int a, int b) { return a < b; }
__device__ Function table[] = {add, sub, mul};
__constant__ Function constant[] = {mul, add};
static __device__ const Function hidden[] = {sub, mul};
__device__ Function more[] = {sub, less};
struct Named { const char *name; Function function; };
__device__ Named named[] = {{"less", less}, {"add", add}};
__device__ Function one = less;
__global__ void use(int *out, Function given, int i) {
    int t = threadIdx.x;
    int sum = table[(t + i) % 3](t, 7) + 2 * constant[t % 2](t, 7) + 3 * hidden[t % 2](t, 7);
    out[t] = sum + 5 * more[t % 2](t, 7) + 7 * named[t % 2].function(t, 7) + 11 * given(t, 7);
}
__global__ void swap() {
    Function first = table[0];
    table[0] = table[1];
    table[1] = first;
}
int wanted(int which, int a, int b) {
    return which == 0 ? a + b : which == 1 ? a - b : which == 2 ? a * b : a < b;
}
int wrong(const int *out, const int *table, int i) {
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++) {
        int sum = wanted(table[(t + i) % 3], t, 7) + 2 * wanted(t % 2 ? 0 : 2, t, 7);
        sum += 3 * wanted(t % 2 ? 2 : 1, t, 7) + 5 * wanted(t % 2 ? 3 : 1, t, 7);
        if (out[t] != sum + 7 * wanted(t % 2 ? 0 : 3, t, 7) + 11 * wanted(3, t, 7)) return 1;
    }
    return 0;
}
int main(int arguments, char **) {
    int *out;
    if (cudaMallocManaged(&out, 64 * sizeof *out)) return 9;
    Function read[3], given;
    cudaMemcpyFromSymbol(&given, one, sizeof given);
    cudaMemcpyFromSymbol(read, table, sizeof read);
    std::swap(read[0], read[2]);
    cudaMemcpyToSymbol(table, read, sizeof read);
    int now[] = {2, 1, 0};
    for (int i = 0; i < (arguments > 1 ? 1000000 : 4); i++) {
        use<<<1, 64>>>(out, given, i);
        if (int why = wrong(out, now, i)) return why;
        swap<<<1, 1>>>();
        std::swap(now[0], now[1]);
        if (arguments > 1) puts("launched"), fflush(stdout), usleep(10000);
    }
    puts("right");
    return 7;
}
"""


# Functions get the addresses of others: as arguments, in a struct, and through a recursive call. None is in a variable.
CALLBACKS = r"""
#include <cstdio>
typedef int (*Function)(int, int);
__device__ __noinline__ int add(int a, int b) { return a + b; }
__device__ __noinline__ int mul(int a, int b) { return a * b; }
__device__ __noinline__ int less(int a, int b) { return a < b; }
__device__ __noinline__ int fold(Function f, const int *data, int n, int start) {
    for (int i = 0; i < n; i++) start = f(start, data[i]);
    return start;
}
struct Functor { Function f; int by; };
__device__ __noinline__ int applied(Functor functor, int x) { return functor.f(x, functor.by); }
__device__ __noinline__ int count(Function before, const int *data, int n) {  // of the elements before 3
    return n == 0 ? 0 : before(data[0], 3) + count(before, data + 1, n - 1);
}
__global__ void use(int *out) {
    int t = threadIdx.x, data[8];
    for (int i = 0; i < 8; i++) data[(i + t) % 8] = i;
    int folded = fold(t % 2 ? add : mul, data, 8, 1) + applied({t % 4 ? add : mul, 3}, t);
    out[t] = 1000 * folded + count(less, data, 8);
}
int main() {
    int *out;
    if (cudaMallocManaged(&out, 64 * sizeof *out)) return 9;
    use<<<1, 64>>>(out);
    if (cudaDeviceSynchronize()) return 8;
    for (int t = 0; t < 64; t++)
        if (out[t] != 1000 * ((t % 2 ? 29 : 0) + (t % 4 ? t + 3 : 3 * t)) + 3) return 1;
    puts("right");
    return 7;
}
"""


@pytest.fixture(scope="module", params=["", "-rdc=true"], ids=["one text", "linked"])
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-lineinfo", "-arch=sm_80", *([request.param] if request.param else [])]
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("virtual") / "app", *flags)


def measured(tool: str, app: Path, tmp_path: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "out"
    options = ["--device", "sim", "--json", "-o", str(out)]
    command = [sys.executable, str(REPOSITORY / f"tools/{tool}.py"), *options, *arguments, "--", str(app)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (7, "right\n"), done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[-1]["launches_instrumented"] == records[-1]["launches_matched"] > 0, records[-1]
    assert not records[-1]["not_instrumented"] and not records[-1].get("lost")
    return records


def calls(names: Iterable[str], records: list[dict]) -> Counter[str]:
    """By function: the lanes that called it."""
    found: Counter[str] = Counter()
    for record in records:
        if record["type"] == "count":
            found[next(name for name in names if name in record["spec"])] += record["threads"]
    return found


@pytest.mark.every(2)
def test_each_function_is_counted(app: Path, tmp_path: Path) -> None:
    names = ("Square::area", "Circle::area", "Pair::area", "Shape::grow", "Circle::grow", "Pair::grow")
    threads = calls(names, measured("gpucount", app, tmp_path, *(f"func:use:*{name}*" for name in names)))
    assert threads == dict(zip(names, (128, 128, 64, 128, 128, 64), strict=True))


@pytest.mark.every(2)
def test_work_inside_the_functions_is_counted(app: Path, tmp_path: Path) -> None:
    records = measured("threadhist", app, tmp_path, "--kernel", "use*", "--work", "stores")
    work = {
        96 * record["block"][0] + record["thread"][0]: record["work"]
        for record in records
        if record["type"] == "thread"
    }
    # `areas`, then the size of each part, and what a Circle logs.
    assert work == {i: 1 + (1, 2, 3)[i % 3] for i in range(192)}


@pytest.mark.every(8)
@pytest.mark.parametrize("tool", ["kernelretsnoop", "launchlate", "memtrace"])
def test_other_tools(tool: str, app: Path, tmp_path: Path) -> None:
    records = measured(tool, app, tmp_path)
    if tool == "memtrace":
        logged = [
            r for r in records if r["type"] == "site" and r["op"] == "store" and r["kernel"].startswith("use")
        ]
        assert sum(r["accesses"] for r in logged) == 192 + 128 + 128 + 128
    if tool == "kernelretsnoop":
        assert {r["exits"] for r in records if r["type"] == "kernel"} == {192}


TIMED = APP.replace(
    "use<<<2, 96>>>(shapes, areas);",
    """cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    cudaEventRecord(begin);
    use<<<2, 96>>>(shapes, areas);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    printf("%.0f ns\\n", ms * 1e6);""",
)


@pytest.mark.every(4)
def test_the_comparisons_take_no_time_on_the_virtual_clock(tmp_path: Path) -> None:
    app = gpubpf_cuda.build(TIMED, tmp_path / "app", "-arch=sm_80")
    printed = set()
    tool = [
        REPOSITORY / "tools/kernelretsnoop.py",
        "--device",
        "sim",
        "--clock",
        "virtual",
        "-o",
        "/dev/null",
    ]
    for command in (["-m", "cudasim", "--clock", "virtual"], tool):
        done = subprocess.run(
            [sys.executable, *command, "--", app], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 7 and " ns\nright\n" in done.stdout, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1


@pytest.mark.every(8)
def test_sampled_blocks(app: Path, tmp_path: Path) -> None:
    measured("memtrace", app, tmp_path, "--sample-blocks", "1/2")


@pytest.fixture(scope="module", params=["", "-rdc=true"], ids=["one text", "linked"])
def pointers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-lineinfo", "-arch=sm_80", *([request.param] if request.param else [])]
    return gpubpf_cuda.build(POINTERS, tmp_path_factory.mktemp("pointers") / "app", *flags)


@pytest.mark.every(2)
def test_functions_that_are_called_by_pointers(pointers: Path, tmp_path: Path) -> None:
    names = ("add", "sub", "mul", "twice", "swapped", "summed")
    records = measured("gpucount", pointers, tmp_path, *(f"func:*:*{name}*" for name in names))
    assert records[-1]["launches_instrumented"] == 4
    called = {
        "add": sum((t + 5) % 3 == 0 for t in range(64)) + sum(t % 3 == 2 for t in range(64)),
        "sub": sum((t + 5) % 3 == 1 for t in range(64)) + sum(t % 3 == 1 for t in range(64)),
        "mul": sum((t + 5) % 3 == 2 for t in range(64)) + sum(t % 3 == 0 for t in range(64)),
        "twice": sum((t + 5) % 3 == 0 for t in range(64)) + 43,
        "swapped": sum((t + 5) % 3 == 1 for t in range(64)) + 21,
        "summed": sum((t + 5) % 3 == 2 for t in range(64)),
    }
    assert calls(names, records) == called


@pytest.mark.every(8)
@pytest.mark.parametrize("tool", ["threadhist", "kernelretsnoop", "launchlate", "memtrace"])
def test_other_tools_with_pointers(tool: str, pointers: Path, tmp_path: Path) -> None:
    assert measured(tool, pointers, tmp_path)[-1]["launches_instrumented"] == 4


@pytest.fixture(scope="module", params=["", "-rdc=true"], ids=["one text", "linked"])
def changed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-lineinfo", "-arch=sm_80", *([request.param] if request.param else [])]
    return gpubpf_cuda.build(CHANGED, tmp_path_factory.mktemp("changed") / "app", *flags)


@pytest.mark.every(2)
def test_functions_in_tables_that_the_program_changes(changed: Path, tmp_path: Path) -> None:
    names = ("add", "sub", "mul", "less")
    records = measured("gpucount", changed, tmp_path, *(f"func:use:*{name}*" for name in names))
    table, called = [2, 1, 0], Counter[str]()
    for i in range(4):
        called.update(names[table[(t + i) % 3]] for t in range(64))
        table[:2] = table[1], table[0]
        # `constant`, `hidden`, `more` and `named` call two functions in 32 lanes each, and `given` one in all.
        called += Counter({"add": 2 * 32, "sub": 2 * 32, "mul": 2 * 32, "less": 2 * 32 + 64})
    assert calls(names, records) == called


@pytest.mark.every(8)
@pytest.mark.parametrize("tool", ["threadhist", "kernelretsnoop", "launchlate", "memtrace"])
def test_other_tools_with_tables_that_the_program_changes(tool: str, changed: Path, tmp_path: Path) -> None:
    assert measured(tool, changed, tmp_path)[-1]["launches_instrumented"] == 8


@pytest.mark.every(2)
def test_tables_that_a_running_program_may_have_changed(changed: Path, tmp_path: Path) -> None:
    """Kernels that call through them run the original. Others are measured."""
    out = tmp_path / "out"
    reason = "indirect call; the program may have changed "
    command = [sys.executable, "-m", "cudasim.launcher", "--", str(changed), "again"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"launched\n"
        threading.Thread(target=program.stdout.read, daemon=True).start()
        options = ("--device", "sim", "-p", str(program.pid))
        listed = gpubpf_specs.run("threadhist", *options, "--list", "--json")
        for seconds in ("1", "5", "25"):  # making the copies takes long on a busy machine
            done = gpubpf_specs.run("threadhist", *options, "--json", "-o", out, "-d", seconds)
            assert done.returncode == 0 and program.poll() is None, done.stderr
            end = json.loads(out.read_text().splitlines()[-1])
            if end["launches_instrumented"] > 0:
                break
        program.kill()
    assert listed.returncode == 0, listed.stderr
    kernels = {k["kernel"]: k["reason"] for k in map(json.loads, listed.stdout.splitlines())}
    assert kernels["swap"] is None and kernels["use"].startswith(reason)
    whys = set(end["not_instrumented"]) - {"before ready"}
    assert len(whys) == 1 and whys.pop().startswith(reason)
    assert end["launches_instrumented"] > 0


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "flag", ["-lineinfo", *(pytest.param(f, marks=pytest.mark.every(4)) for f in ("-rdc=true", "-G"))]
)
def test_callbacks(flag: str, tmp_path: Path) -> None:
    app = gpubpf_cuda.build(CALLBACKS, tmp_path / "app", "-arch=sm_80", flag)
    names = ("add", "mul", "less")
    records = measured("gpucount", app, tmp_path, *(f"func:use:*{name}*" for name in names))
    assert calls(names, records) == {"add": 32 * 8 + 48, "mul": 32 * 8 + 16, "less": 64 * 8}
