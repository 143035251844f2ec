"""nansnoop from its command line to its exit status, on ten kernels with numbers that were planted at known places."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpubpf_cuda
import gpubpf_specs
import hipsim_device

pytestmark = gpubpf_cuda.needs_cuda

# Each kernel is launched three times, in this order, on 2 blocks of (32, 2) threads. In one of the launches, the thread `bad` computes
# a number that the mark of its line names.
APP = r"""
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <unistd.h>
#define KERNEL(name) __global__ void name(void *out, int bad)
#define ME (blockIdx.x * 64 + threadIdx.y * 32 + threadIdx.x)
#define PLANT(planted, other) (ME == bad ? (planted) : (other))
__device__ __noinline__ float root(float x) { return __fsqrt_rn(x); }                          // root
KERNEL(quotient) { ((float *)out)[ME] = __fdiv_rn(PLANT(0.0f, 1.0f), PLANT(0.0f, 2.0f)); }     // quotient
KERNEL(rooted) { ((float *)out)[ME] = root(PLANT(-4.0f, 4.0f)); }
KERNEL(infinite) { ((float *)out)[ME] = __frcp_rn(PLANT(-0.0f, 2.0f)); }                       // infinite
KERNEL(twice) { ((double *)out)[ME] = __dmul_rn(PLANT(-1.5e308, 1.0), 2.0); }                  // twice
KERNEL(doubles) { ((double *)out)[ME] = __dadd_rn(PLANT(INFINITY, 1.0), PLANT(-INFINITY, 1.0)); }  // doubles
KERNEL(half1) { ((half *)out)[ME] = __hmul(__ushort_as_half(PLANT(0x7c00, 0x3c00)), __ushort_as_half(PLANT(0, 0x3c00))); }  // half1
KERNEL(half2s) {
    half2 x = __halves2half2(__ushort_as_half(0x3c00), __ushort_as_half(PLANT(0x7bff, 0x4000)));
    ((half2 *)out)[ME] = __hadd2(x, x);                                                        // half2s
}
KERNEL(brain) {
    __nv_bfloat16 x = __ushort_as_bfloat16(PLANT(0x7f80, 0x3f80)), y = __ushort_as_bfloat16(PLANT(0xff80, 0x3f80));
    ((__nv_bfloat16 *)out)[ME] = __hfma(x, __ushort_as_bfloat16(0x3f80), y);                   // brain
}
KERNEL(tensor) {
    unsigned a = PLANT(0x7e00, 0x3c00), one = 0x3c003c00;
    float c[4] = {1, 1, 1, 1};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %5, %5}, {%5, %5}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a), "r"(one));        // tensor
    for (int i = 0; i < 4; i++) ((float *)out)[4 * ME + i] = c[i];
}
KERNEL(wide) {
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> x;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> y;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> z;
    wmma::fill_fragment(x, half(1.0f)), wmma::fill_fragment(y, half(1.0f)), wmma::fill_fragment(z, 0.0f);
    float planted = __int_as_float(PLANT(0x7fc00000, 0));
    for (int i = 0; i < z.num_elements; i++) z.x[i] = planted;
    wmma::mma_sync(z, x, y, z);                                                                // wide
    wmma::store_matrix_sync((float *)out + ME / 32 * 256, z, 16, wmma::mem_row_major);
}
KERNEL(tiny) { ((float *)out)[ME] = __fmul_rn(PLANT(1e-38f, 1.0f), 0.125f); }                  // tiny
KERNEL(clean) { ((float *)out)[ME] = __fmul_rn(ME, 0.5f); }
KERNEL(summed) { atomicAdd((float *)out + 5000, 1.0f); }
int main(int argc, char **argv) {
    void *out;
    cudaMalloc(&out, 65536);
    void (*kernels[])(void *, int) = {quotient, rooted, infinite, twice, doubles,
                                        half1, half2s, brain, tensor, wide, tiny, clean, summed};
    for (int round = 0; round < 3; round++)
        for (int k = 0; k < 13; k++) {
            if (argc > 2 && k < 11) continue;  // without numbers to find
            kernels[k]<<<2, dim3(32, 2)>>>(out, round == k % 3 && k < 11 ? 37 + 7 * k : -1);
            if (cudaDeviceSynchronize()) return 99;
        }
    puts("done");
    fflush(stdout);
    for (; argc > 3; cudaDeviceSynchronize(), usleep(20000)) quotient<<<2, dim3(32, 2)>>>(out, 70);
    return atoi(argv[1]);
}
"""
KERNELS = ["quotient", "rooted", "infinite", "twice", "doubles", "half1", "half2s", "brain", "tensor", "wide", "tiny"]  # fmt: skip
KINDS = {"infinite": "inf", "twice": "overflow", "half2s": "overflow", "tiny": "denormal"}
VALUES = {"infinite": "-inf", "twice": "-inf", "half2s": "inf", "tiny": "1.25e-39"}
OPERANDS = {
    "quotient": ["0", "0"],
    "rooted": ["-4"],
    "infinite": ["-0"],
    "twice": ["-1.5e+308", "2"],
    "doubles": ["inf", "-inf"],
    "half1": ["inf", "0"],
    "half2s": ["65504", "65504"],
    "brain": ["inf", "1", "-inf"],
    "tensor": [],
    "wide": [],
    "tiny": ["1e-38", "0.125"],
}
EVERY = ("--kinds", "nan,inf,overflow,denormal")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("nans") / "nans", "-lineinfo", "-arch=sm_90")


def line_of(mark: str) -> str:
    (number,) = (n for n, line in enumerate(APP.split("\n"), 1) if line.endswith(f"// {mark}"))
    return f"nans.cu:{number}"


def index(thread: int) -> tuple[list[int], list[int]]:
    """Return block and thread of a thread of the grid."""
    return [thread // 64, 0, 0], [thread % 32, thread // 32 % 2, 0]


def nansnoop(
    app: Path, *arguments: str | Path, status: int = 0, rest: str = ""
) -> subprocess.CompletedProcess[str]:
    done = gpubpf_specs.run("nansnoop", *arguments, "--", app, str(status), *([rest] if rest else []))
    assert done.stdout.startswith("done\n") or "done\n" in done.stdout, done.stderr
    return done


def records(app: Path, out: Path, *arguments: str) -> list[dict]:
    done = nansnoop(app, *arguments, "--json", "-o", out)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    return [json.loads(line, parse_constant=pytest.fail) for line in out.read_text().splitlines()]


def test_line_thread_and_launch_of_planted_numbers_are_exact(app: Path, tmp_path: Path) -> None:
    *found, summary = records(app, tmp_path / "out", *EVERY)
    found = [one for one in found if one["type"] == "nan"]
    firsts = [one["first"] for one in found]
    assert None not in firsts and [one["launch"] for one in firsts] == sorted(one["launch"] for one in firsts)
    assert sorted(one["kernel"] for one in found) == sorted(
        [*KERNELS, "wide"]
    )  # its result has two parts of 16 bytes
    for one in found:
        name = one["kernel"]
        number = KERNELS.index(name)
        bad = 37 + 7 * number
        lanes, lane = 1, bad
        if name == "tensor":  # a row of the result is in four lanes
            lanes, lane = 4, bad // 4 * 4
        block, thread = index(lane)
        assert (one["kind"], one["count"]) == (KINDS.get(name, "nan"), lanes), one
        mark = "root" if name == "rooted" else name
        assert one["source"] == line_of(mark), one
        first = one["first"]
        assert (first["launch"], first["block"], first["thread"]) == (
            13 * (number % 3) + number + 1,
            block,
            thread,
        )
        assert (first["value"], first["operands"]) == (VALUES.get(name, "nan"), OPERANDS[name]), one
        assert first["element"] == (1 if name == "half2s" else 0)
    assert (summary["lost"], summary["not_probed"]) == (0, {"atom.add.f32": 1})


def test_an_overflow_is_an_infinity_unless_it_is_asked_for(app: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [one["kind"] for one in records(app, out, "--kernel", "twice")[:-1] if one["type"] == "nan"] == [
        "inf"
    ]
    of_kind = {one["kernel"] for one in records(app, out, "--kinds", "overflow") if one["type"] == "nan"}
    assert of_kind == {"twice", "half2s"}


def test_stores_see_what_is_written(app: Path, tmp_path: Path) -> None:
    *found, summary = records(app, tmp_path / "out", "--stores", "--kinds", "nan,inf,denormal")
    found = [one for one in found if one["type"] == "nan"]
    assert {one["kernel"] for one in found} == {*KERNELS} - {"wide"}
    assert all(one["op"].startswith("st.global") and one["first"]["operands"] == [] for one in found)
    tensor = [one for one in found if one["kernel"] == "tensor"]
    assert [one["first"]["thread"] for one in tensor] == [index((37 + 7 * 8) // 4 * 4)[1]] * 2
    assert list(summary["not_probed"]) == ["wmma.store"] and summary["not_looked_at"] == {}


def test_the_exit_status_says_whether_any_was_found(app: Path) -> None:
    done = nansnoop(app, "--check")
    assert done.returncode == 1
    assert f"NaN first at {line_of('quotient')} in quotient: launch 1, block 0, thread (5,1,0)" in done.stdout
    assert "  div.rn.f32(0, 0) = nan\n" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    assert nansnoop(app, "--check", status=7).returncode == 7  # the program's own
    clean = nansnoop(app, "--check", rest="clean")
    assert clean.returncode == 0 and "no NaN or infinity was found\n" in clean.stdout
    nothing = nansnoop(app, "--launch", "100")
    assert "no launch was measured\n" in nothing.stdout and "was found" not in nothing.stdout
    assert nansnoop(app, "--check", "--kernel", "quotient", "--thread", "6").returncode == 0
    assert nansnoop(app, "--check", "--kinds", "denormal", "--kernel", "quotient").returncode == 0


@pytest.mark.may_come_too_late
def test_intervals_add_up_in_a_running_process(app: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    nansnoop(app, "--kernel", "quotient")  # compiled from here on
    command = [sys.executable, "-m", "cudasim.launcher", "--", app, "0", "clean", "on"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"done\n"
        options = ("0.4", "3", "--kernel", "quotient", "--json", "-o", out)
        done = gpubpf_specs.run("nansnoop", *options, "-p", str(program.pid))
        program.kill()
    assert done.returncode == 0, done.stderr
    *found, summary = (json.loads(line) for line in out.read_text().splitlines())
    found = [one for one in found if one["type"] == "nan"]
    assert sum(one["count"] for one in found) == summary["launches_instrumented"] > 1
    first = found[0]["first"]
    assert all(one["first"] == first for one in found) and (first["block"], first["thread"]) == index(70)


@pytest.mark.parametrize(
    "options", [("--sample-blocks", "1/2"), ("--sample-warps", "1/2", "--stores"), ("--budget", "50")]
)
def test_what_is_not_measured_is_not_counted(app: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    *found, summary = records(app, tmp_path / "out", *options)
    found = [one for one in found if one["type"] == "nan"]
    assert len(found) <= 11 and summary["lost"] == 0 and ("sampling" in summary or "budget" in summary)
    for one in found:
        lane = 37 + 7 * KERNELS.index(one["kernel"])
        lane = lane // 4 * 4 if one["kernel"] == "tensor" else lane
        assert one["first"]["block"] == index(lane)[0] and one["first"]["thread"] == index(lane)[1]


def test_a_hip_kernel_is_left_out_with_a_notice() -> None:
    hipsim_device.libraries()
    done = gpubpf_specs.run("nansnoop", "--", hipsim_device.program("vectoradd"), "100")
    assert done.returncode == 0 and "100 sums are right\n" in done.stdout
    assert (
        "nansnoop: note: kernels of AMD GPUs have no probes at float yet, which nansnoop needs\n"
        in done.stderr
    )


def test_csv_has_a_row_for_each_instruction(app: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    nansnoop(app, "--csv", "-o", out)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert rows[0]["kernel"] == "quotient" and len(rows) == 11
    assert {
        (row["block_x"], row["thread_x"], row["thread_y"]) for row in rows if row["kernel"] == "brain"
    } == {("1", "22", "0")}


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("--kinds", "nans"), "there is no kind 'nans'; use some of: nan, inf, overflow, denormal"),
        (("--kinds", ""), "there is no kind ''; use some of: nan, inf, overflow, denormal"),
        (
            ("--stores", "--kinds", "overflow"),
            "--stores does not see how a number was computed; leave out --stores, or overflow",
        ),
    ],
)
def test_wrong_options_get_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = gpubpf_specs.run("nansnoop", *arguments, "--", "true")
    assert done.returncode == 2 and complaint in " ".join(done.stderr.split())


# Five kernels, with one kind of arithmetic each. The comments say what is planted where.
FIVE = r"""
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
__global__ void halves(const float *x, __half *out, int bad) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    __half a = __float2half(i == bad ? x[1] : x[0]);
    a = __hmul(a, a);                                 // inf: 60000 squared
    __half b = __hsub(a, a);                          // nan: inf - inf
    out[i] = b;
}
__global__ void bfloats(const float *x, __nv_bfloat16 *out, int bad) {
    int i = threadIdx.y * blockDim.x + threadIdx.x;
    __nv_bfloat16 a = __float2bfloat16(i == bad ? x[2] : x[0]), zero = __float2bfloat16(x[3]);
    a = __hfma(a, a, a);                              // inf: 3e38 squared
    out[i] = __hmul(a, zero);                         // nan: inf * 0
}
__global__ void doubles(const double *x, double *out, int bad) {
    int i = blockIdx.y * gridDim.x * blockDim.x + blockIdx.x * blockDim.x + threadIdx.x;
    double a = i >= bad ? x[1] : x[0];
    out[i] = sqrt(a);                                 // nan: of a negative number
}
__global__ void matrices(const unsigned *bits, float *out) {
    int lane = threadIdx.x, row = lane / 4;
    unsigned a[4] = {0, 0, 0, 0}, b[2] = {bits[0], bits[0]};
    if (row == 3) a[0] = bits[1];                     // an infinity in row 3, of A; B is 0
    float d[4] = {0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 4; i++) out[4 * lane + i] = d[i];
}
__global__ void late(const float *x, float *out) {   // one lane in each turn, the last lane first
    float value = 1;
#pragma unroll 1
    for (int turn = 0; turn < 32; turn++)
        if (threadIdx.x == 31 - turn)
            value = __fdiv_rn(x[3], x[3] * turn);     // nan: 0 / 0
    out[threadIdx.x] = value;
}
int main() {
    float f[4] = {1, 60000, 3e38f, 0};
    double d[2] = {2, -2};
    unsigned h[2] = {0, 0x7c00};
    float *x; double *y; unsigned *z; void *out;
    cudaMalloc(&x, sizeof f); cudaMalloc(&y, sizeof d); cudaMalloc(&z, sizeof h); cudaMalloc(&out, 1 << 16);
    cudaMemcpy(x, f, sizeof f, cudaMemcpyHostToDevice);
    cudaMemcpy(y, d, sizeof d, cudaMemcpyHostToDevice);
    cudaMemcpy(z, h, sizeof h, cudaMemcpyHostToDevice);
    halves<<<4, 64>>>(x, (__half *)out, -1);
    halves<<<4, 64>>>(x, (__half *)out, 3 * 64 + 37);
    bfloats<<<1, dim3(8, 8)>>>(x, (__nv_bfloat16 *)out, 5 * 8 + 6);
    doubles<<<dim3(2, 3), 32>>>(y, (double *)out, 2 * 64 + 32 + 9);
    matrices<<<1, 32>>>(z, (float *)out);
    late<<<1, 32>>>(x, (float *)out);
    if (cudaDeviceSynchronize()) return 1;
    puts("done");
}
"""
# Kernel, kind, what the line begins with: threads; launch, block and thread of the first.
PLANTED_IN_FIVE = {
    ("halves", "inf", "a = __hmul"): (1, 2, [3, 0, 0], [37, 0, 0]),
    ("halves", "nan", "__half b ="): (1, 2, [3, 0, 0], [37, 0, 0]),
    ("bfloats", "inf", "a = __hfma"): (1, 3, [0, 0, 0], [6, 5, 0]),
    ("bfloats", "nan", "out[i] = __hmul"): (1, 3, [0, 0, 0], [6, 5, 0]),
    ("doubles", "nan", "out[i] = sqrt"): (2 * 32 * 3 - 169, 4, [1, 2, 0], [9, 0, 0]),
    ("matrices", "nan", ': "+f"(d[0])'): (4, 5, [0, 0, 0], [12, 0, 0]),
    ("late", "nan", "value = __fdiv_rn"): (32, 6, [0, 0, 0], [31, 0, 0]),
}


def test_five_kinds_of_arithmetic(tmp_path: Path) -> None:
    program = gpubpf_cuda.build(FIVE, tmp_path / "five", "-lineinfo", "-arch=sm_80")
    lines = FIVE.splitlines()
    found = {}
    for one in records(program, tmp_path / "out"):
        if one["type"] == "nan":
            text = lines[int(one["source"].rpartition(":")[2]) - 1].strip()
            (planted,) = (
                key
                for key in PLANTED_IN_FIVE
                if key[:2] == (one["kernel"], one["kind"]) and text.startswith(key[2])
            )
            first = one["first"]
            found[planted] = one["count"], first["launch"], first["block"], first["thread"]
    assert found == PLANTED_IN_FIVE
    assert list(found) == list(PLANTED_IN_FIVE)  # in the order of the first numbers
