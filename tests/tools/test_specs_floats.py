"""gpucount, gpudist and gputrace at `float` and `instruction`: what a program with known numbers computes, and from what."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import gpubpf_cuda
import gpubpf_specs

pytestmark = gpubpf_specs.needs_all

# 2 blocks of 64 threads. The comments are marks for `source`. Each kernel's first number is the thread's, so thread 0 divides 0 by 0.
APP = r"""
#include <cstdio>
#include <cuda_fp16.h>
struct Out { float floats[128]; double doubles[128]; __half2 pairs[128]; };
__global__ void softmax(Out *out) {
    int i = blockIdx.x * 64 + threadIdx.x;
    float x = __int2float_rn(i - 40) + 40.0f;                    // converted
    out->floats[i] = __fdiv_rn(x, __fmul_rn(x, 4.0f));           // divided
    double wide = x;                                             // widened
    if (i % 32 < 5) wide = __dsqrt_rn(__dadd_rn(wide, -64.0));   // rooted
    out->doubles[i] = wide;
}
__global__ void halves(Out *out) {
    int i = blockIdx.x * 64 + threadIdx.x;
    __half2 x = __halves2half2(__ushort_as_half(i == 9 ? 0x7e00 : 0x7800), __ushort_as_half(0x3c00));
    out->pairs[i] = __hadd2(x, x);                               // pairs
    out->floats[i] = __fmaf_rn(__int_as_float(i << 23), 2.0f, -0.0f);  // fused
}
int main() {
    static Out found;
    Out *out;
    cudaMalloc(&out, sizeof found);
    softmax<<<2, 64>>>(out);
    cudaMemcpy(&found, out, sizeof found, cudaMemcpyDeviceToHost);
    bool right = found.floats[1] == 0.25f && found.floats[0] != found.floats[0] && found.doubles[100] == 6;
    halves<<<2, 64>>>(out);
    cudaMemcpy(&found, out, sizeof found, cudaMemcpyDeviceToHost);
    puts(right && found.floats[127] != 0 ? "right" : "wrong");
}
"""
THREADS = range(128)
ROOTED = [i for i in THREADS if i % 32 < 5]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("floats") / "floats", "-lineinfo", "-arch=sm_80")


def line_of(mark: str) -> str:
    """Return the source line with this mark, as the tools show it."""
    (number,) = (n for n, line in enumerate(APP.split("\n"), 1) if line.endswith(f"// {mark}"))
    return f"floats.cu:{number}"


def measured(tool: str, out: Path, app: Path, *arguments: str) -> list[dict]:
    """Return the JSON records of a measurement, in which the program is undisturbed and nothing is lost."""
    done = gpubpf_specs.run(tool, *arguments, "--json", "-o", out, "--", app)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    found = [json.loads(line, parse_constant=pytest.fail) for line in out.read_text().splitlines()]
    assert (found[-1]["lost"], found[-1]["not_probed"]) == (0, {})
    return found


@pytest.mark.every(2)
def test_counts(app: Path, tmp_path: Path) -> None:
    right = {
        "float:softmax:div": {"softmax": (4, 128)},
        "float:softmax:*.f64": {"softmax": (12, 128 + 40)},  # cvt, and in 5 lanes of each warp add and sqrt
        "float:* (isnan(value))": {"softmax": (1 + 2, 1 + 10), "halves": (1, 1)},
        "float:* (isinf(value))": {"halves": (4, 127)},  # the half that is not NaN is 2 * 32768
        "float:* (isnan(value) && isnan(operand0))": {
            "halves": (1, 1),  # 9 was NaN before
        },
        "float:* (operation == GPU_FLOAT_CVT && operand_type == GPU_S32)": {"softmax": (4, 128)},
        "float:halves (operands == 3)": {"halves": (4, 128)},
        "instruction:softmax:sqrt": {"softmax": (4, 20)},
    }
    found: dict = {}
    for one in measured("gpucount", tmp_path / "out", app, *right):
        if one["type"] == "count" and one["count"]:
            found.setdefault(one["spec"], {})[one["kernel"]] = (one["count"], one["threads"])
    assert found == right


def test_distributions(app: Path, tmp_path: Path) -> None:
    bits = np.arange(128, dtype=np.float32).view(np.uint32)
    labels = {
        "float:softmax:mul:u32:operand0#operands": {None: {str(one): 1 for one in bits}},
        "float:softmax:cvt.rn.f32.s32:s32:operand0, source#numbers": {
            line_of("converted"): {str(i - 40): 1 for i in THREADS}
        },
    }
    found: dict = {}
    for one in measured("gpudist", tmp_path / "out", app, "-C", *labels):
        if one["type"] == "dist":
            found.setdefault(one["label"], {})[one["key"]] = one["values"]
    assert found == {spec.rpartition("#")[2]: values for spec, values in labels.items()}


def test_events(app: Path, tmp_path: Path) -> None:
    found = measured(
        *("gputrace", tmp_path / "out", app),
        'float:softmax* (isnan(value)) "NaN at %s, thread %u: %g of %g and %g", source, gthread, value, operand0, operand1',
        'float:*:cvt "%g from %d, %g", value, operand0, operand0',
        'float:halves:*x2 "%g", value',
    )
    events: dict = {}
    for event in found:
        if event["type"] == "event":
            thread = event["block"][0] * 64 + event["thread"][0]
            events.setdefault((event["spec"], event["source"]), {})[thread] = event
    nans = {source: rows for (spec, source), rows in events.items() if "isnan" in spec}
    assert set(nans) == {line_of("divided"), line_of("rooted")}
    assert [event["text"] for event in nans[line_of("divided")].values()] == [
        f"NaN at {line_of('divided')}, thread 0: nan of 0 and 0"
    ]
    roots = nans[line_of("rooted")]  # of negative numbers, the 10 that are below 64
    assert {i: event["args"][2:4] for i, event in roots.items()} == {
        i: ["nan", i - 64.0] for i in ROOTED if i < 64
    }
    converted = events["float:*:cvt", line_of("converted")]
    assert {i: event["args"] for i, event in converted.items()} == {
        i: [i - 40.0, i - 40, i - 40.0] for i in THREADS
    }
    widened = events["float:*:cvt", line_of("widened")]
    assert {i: event["args"][::2] for i, event in widened.items()} == {i: [i, i] for i in THREADS}
    pairs = events["float:halves:*x2", line_of("pairs")]
    assert {i: event["args"] for i, event in pairs.items()} == {
        i: ["nan" if i == 9 else "inf"] for i in THREADS
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "float:* (old)",
            "constants: GPU_FLOAT_ADD … GPU_FLOAT_MMA, GPU_B8 … GPU_PRED; texts: kernel, source; functions",
        ),
        ("float:* (operand4)", "values: value, operand0"),
        ("instruction:* (operation)", "instruction has no 'operation'"),
        ("float:* (isnan(low))", "isnan() takes a value alone; write isnan(value) or isnan(operand0)"),
        ("float:* (value > 0.5)", "0.5 is a floating-point number; float has only integers"),
    ],
)
def test_what_is_wrong_is_said(spec: str, message: str) -> None:
    done = gpubpf_specs.run("gpucount", spec, "--", "true")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
