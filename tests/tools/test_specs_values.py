"""gpucount, gpudist and gputrace with `value` and `old`: what a program with known values loads, stores and adds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpubpf_cuda
import gpubpf_specs

pytestmark = gpubpf_specs.needs_all

# 2 blocks of 64 threads. The comments are marks for `source`; argument n is NaN, and f infinite. nvcc stores signed numbers as
# unsigned ones, so those that are signed are in PTX.
APP = r"""
#include <cmath>
#include <cstdio>
struct Out {
    float floats[128], copies[128]; double doubles[128]; float4 vectors[128];
    signed char bytes[128]; unsigned short shorts[128], halves[128]; int words[128]; unsigned long long longs[128];
    int sum, counter, order[128], least; float total; signed char small[128]; int negative[128];
};
__global__ void values(Out *out, volatile float *in, float n, float f) {
    int i = blockIdx.x * 64 + threadIdx.x;
    out->floats[i] = i == 37 ? n : i == 70 ? f : i == 71 ? -f : i * -0.25f;  // floats
    out->doubles[i] = i % 32 == 3 ? (double)n : i / 8.0;                     // doubles
    out->vectors[i] = make_float4(i, 0.5f, i == 99 ? n : 1.f, i == 5 ? f : 1e38f);  // vectors
    out->bytes[i] = -i;                                                      // bytes
    out->shorts[i] = 65535 - i;                                              // shorts
    out->words[i] = 5 - i;                                                   // words
    out->longs[i] = ~0ull - i;                                               // longs
    out->halves[i] = i == 8 ? 0x7e01 : i == 9 ? 0xfc00 : 0x3c00;             // halves
    out->copies[i] = in[i];                                                  // loads
    atomicAdd(&out->sum, -i);                                                // unused
    out->order[i] = atomicAdd(&out->counter, 3);                             // used
    atomicAdd(&out->total, 1.5f);                                            // total
    atomicMin(&out->least, 5 - i);                                           // least
    asm("st.global.s8 [%0], %1;" :: "l"(&out->small[i]), "r"(-i));           // small
    asm("st.global.s32 [%0], %1;" :: "l"(&out->negative[i]), "r"(10 - i));   // negative
}
int main() {
    static Out found;
    float in[128], *copy;
    Out *out;
    for (int i = 0; i < 128; i++) in[i] = i == 100 ? NAN : i - 64;
    cudaMalloc(&out, sizeof found);
    cudaMalloc(&copy, sizeof in);
    cudaMemset(out, 0, sizeof found);
    cudaMemcpy(copy, in, sizeof in, cudaMemcpyHostToDevice);
    values<<<2, 64>>>(out, copy, NAN, INFINITY);
    cudaMemcpy(&found, out, sizeof found, cudaMemcpyDeviceToHost);
    bool right = found.counter == 384 && found.sum == -8128 && found.copies[3] == -61 && found.least == -122 && found.small[3] == -3;
    puts(right ? "right" : "wrong");
}
"""
THREADS = range(128)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpubpf_cuda.build(APP, tmp_path_factory.mktemp("values") / "values", "-lineinfo")


def line_of(mark: str) -> str:
    """Return the source line with this mark, as the tools show it."""
    (number,) = (n for n, line in enumerate(APP.split("\n"), 1) if line.endswith(f"// {mark}"))
    return f"values.cu:{number}"


def measured(tool: str, out: Path, app: Path, *arguments: str) -> list[dict]:
    """Return the JSON records of a measurement, in which the program is undisturbed and nothing is lost."""
    done = gpubpf_specs.run(tool, *arguments, "--json", "-o", out, "--", app)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    found = [json.loads(line, parse_constant=pytest.fail) for line in out.read_text().splitlines()]
    assert (found[-1]["lost"], found[-1]["not_probed"]) == (0, {})
    return found


def thread(event: dict) -> int:
    """Return the number of an event's thread in the grid."""
    return event["block"][0] * 64 + event["thread"][0]


@pytest.mark.every(2)
def test_counts(app: Path, tmp_path: Path) -> None:
    right = {
        "store:* (isnan(value) && width == 4)": 2,  # floats and loads; the words below 0 are no NaN
        "store:* (isnan(value) && width == 8)": 4,  # doubles; the longs are all ones above
        "store:* (isnan(value) && width == 16)": 1,
        "store:* (isinf(value) && width == 16)": 1,
        "store:* (width == 1 && value < 0)": 127,  # small; bytes are unsigned
        "store:* (width == 1 && value << 56 >> 56 < 0)": 2 * 127,
        "store:* (width == 4 && value < 0)": 117,  # negative
        "store:* (width == 8 && value < 0)": 128,  # longs from 2**63 on are negative
        "store:* (width == 8 && value + 0u > 0xffffffffffffff80)": 127,
        "load:* (isnan(value))": 1,
        "load:* (value >> 31)": 64,
        "load:*": 128,
        "atomic:*": 512,
        "atomic:* (effect & GPU_RETURNS)": 128,
        "atomic:* (effect & GPU_RETURNS && old == 0)": 1,
        "atomic:* (old == 0)": 1 + 3 * 128,
        "atomic:* (old > 3 * 100)": 27,
        "atomic:* (value < 0)": 122,  # least
        "atomic:* (isnan(old) || isinf(old))": 0,
        "store:* (type == GPU_S8)": 128,  # small
        "store:* (width == 16 && low >> 32 == 0x3f000000 && high & 0x7fffffff)": 128,  # 0.5f is the second element
        "atomic:* (type == GPU_F32 && (effect & GPU_WRITES) && low == 0x3fc00000)": 128,  # total
        "atomic:* (old_low == old && effect & GPU_RETURNS)": 128,
    }
    found = measured("gpucount", tmp_path / "out", app, *right)
    assert {one["spec"]: one["threads"] for one in found if one["type"] == "count"} == right


def test_distributions(app: Path, tmp_path: Path) -> None:
    labels = {
        "atomic:* (effect & GPU_RETURNS):u32:old#old": {str(3 * i): 1 for i in THREADS},
        "store:* (width == 1):s16:value, source#bytes": {
            line_of("bytes"): {str(-i & 0xFF): 1 for i in THREADS},
            line_of("small"): {str(-i): 1 for i in THREADS},
        },
        "store:* (width == 4 && value < 0):s32:value#negative": {str(10 - i): 1 for i in range(11, 128)},
        "load:*:u8:isnan(value)#nan": {"0": 127, "1": 1},
    }
    found: dict = {}
    for one in measured("gpudist", tmp_path / "out", app, "-C", *labels):
        if one["type"] == "dist":
            found.setdefault(one["label"], {})[one["key"]] = one["values"]
    right = {spec.rpartition("#")[2]: values for spec, values in labels.items()}
    assert found.pop("bytes") == right.pop("bytes")
    assert found == {label: {None: values} for label, values in right.items()}


def test_events(app: Path, tmp_path: Path) -> None:
    """By source line and thread: the value as an integer, and as a floating-point number."""
    found = measured(
        *(
            "gputrace",
            tmp_path / "out",
            app,
            'store:* "%d %.2f", value, value',
            'load:* "%g %x", value, value',
        ),
        *(
            'atomic:* "%f %d %s", old, value, source',
            'store:* (isnan(value)) "NaN at %s, thread %u", source, gthread',
        ),
    )
    events: dict = {}
    for event in found:
        if event["type"] == "event":
            assert thread(event) not in events.setdefault((event["spec"], event["source"]), {})
            events[event["spec"], event["source"]][thread(event)] = event

    def of(mark: str, point: str = "store:*", of_args: str = "args") -> list:
        return [event[of_args] for _, event in sorted(events[point, line_of(mark)].items())]

    special = {37: "nan", 70: "inf", 71: "-inf"}
    floats = [special.get(i, i * -0.25) for i in THREADS]
    assert [args[1] for args in of("floats")] == floats
    assert of("floats", of_args="text")[4:6] == [f"{0xBF800000} -1.00", f"{0xBFA00000} -1.25"]
    assert of("floats", of_args="text")[71] == f"{0xFF800000} -inf"
    assert [args[1] for args in of("doubles")] == ["nan" if i % 32 == 3 else i / 8 for i in THREADS]
    assert of("doubles")[8][0] == 0x3FF0000000000000
    assert [args[1] for args in of("vectors")] == [float(i) for i in THREADS]  # of the first element
    assert of("bytes") == [[-i & 0xFF, float(-i & 0xFF)] for i in THREADS]
    assert of("small") == [[-i, float(-i)] for i in THREADS]
    assert [args[0] for args in of("shorts")] == [65535 - i for i in THREADS]
    assert [args[1] for args in of("halves")][7:10] == [1.0, "nan", "-inf"]
    assert of("words") == [[5 - i & 0xFFFFFFFF, float(5 - i & 0xFFFFFFFF)] for i in THREADS]
    assert of("negative") == [[10 - i, float(10 - i)] for i in THREADS]
    assert of("longs") == [[-1 - i, float(2**64 - 1 - i)] for i in THREADS]
    assert [args[0] for args in of("loads", "load:*")] == ["nan" if i == 100 else i - 64.0 for i in THREADS]
    assert of("loads", "load:*", "text")[65] == "1 3f800000"
    assert sorted(args[0] for args in of("used", "atomic:*")) == [3.0 * i for i in THREADS]
    assert of("unused", "atomic:*")[1] == [0.0, 0xFFFFFFFF, line_of("unused")]  # nothing is given back
    assert of("least", "atomic:*")[7][1] == -2

    def seen(mark: str) -> set[int]:
        return set(events.pop(("store:* (isnan(value))", line_of(mark)), ()))

    assert (
        events["store:* (isnan(value))", line_of("vectors")][99]["text"]
        == f"NaN at {line_of('vectors')}, thread 99"
    )
    assert (seen("floats"), seen("doubles"), seen("vectors")) == ({37}, {3, 35, 67, 99}, {99})
    assert (seen("halves"), seen("bytes"), seen("loads")) == ({8}, set(), {100})


def test_text(app: Path) -> None:
    """What is shown for people, and what `isinf` finds in floats, vectors and halves."""
    done = gpubpf_specs.run(
        *("gputrace", 'store:* (isinf(value) && width != 8) "%+08.3f|%e|%d", value, value, width', "--", app)
    )
    assert done.returncode == 0, done.stderr
    shown = {tuple(line.split(maxsplit=4)[2:]) for line in done.stdout.splitlines() if " values " in line}
    assert shown == {
        ("1", "6", "+inf|inf|4"),
        ("1", "7", "-inf|-inf|4"),
        ("0", "5", "+005.000|5.000000e+00|16"),  # its last element is infinite
        ("0", "9", "-inf|-inf|2"),
    }


@pytest.mark.parametrize("spec", ["store:* (width)", "load:*:u32:width", 'atomic:* "%u", width'])
def test_values_cost_nothing_where_none_is_used(spec: str) -> None:
    tool = "gputrace" if '"' in spec else "gpudist" if "u32" in spec else "gpucount"
    kind = ("-C",) if tool == "gpudist" else ()
    plain = gpubpf_specs.run(tool, "--ebpf", *kind, spec).stdout
    assert "struct gpu_access *ctx" in plain and "gpu_element" not in plain
    used = gpubpf_specs.run(tool, "--ebpf", *kind, spec.replace("width", "value")).stdout
    assert "struct gpu_value *ctx" in used and "gpu_access" not in used and "ctx_high" not in used


HALVES = r"""
#include <cmath>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
__global__ void halves(__nv_bfloat16 *a, __half *h, __nv_bfloat162 *pairs, float *f, unsigned short *s) {
    int i = threadIdx.x;
    a[i] = __float2bfloat16(f[i]);            // bf16
    h[i] = __float2half(f[i] * 2);            // half
    pairs[i] = pairs[i] + pairs[i + 1];       // pairs
    s[i] = s[i] + 0x7e01;                     // integers
    f[i] = __bfloat162float(a[i ^ 1]);
}
int main() {
    char *memory;
    float in[32];
    for (int i = 0; i < 32; i++) in[i] = i == 5 ? INFINITY : i == 6 ? NAN : i + 0.5f;
    cudaMalloc(&memory, 8192);
    cudaMemset(memory, 0, 8192);
    cudaMemcpy(memory + 4096, in, sizeof in, cudaMemcpyHostToDevice);
    halves<<<1, 32>>>((__nv_bfloat16 *)memory, (__half *)(memory + 1024), (__nv_bfloat162 *)(memory + 2048),
                      (float *)(memory + 4096), (unsigned short *)(memory + 6144));
    puts(cudaDeviceSynchronize() ? "wrong" : "right");
}
"""


@pytest.mark.every(4)
def test_halves_that_are_stored_as_integers(tmp_path: Path) -> None:
    """nvcc stores all of them as u16 or u32: what computes them shows what they are. (Below sm_80, it computes bf16 with integers.)"""
    app = gpubpf_cuda.build(HALVES, tmp_path / "halves", "-lineinfo", "-arch=sm_80")
    spec = 'store:*:global (lane > 3 && lane < 7) "%g %u%u %s", value, isnan(value), isinf(value), source'
    found: dict[str, set[str]] = {}
    for event in measured("gputrace", tmp_path / "out", app, spec):
        if event["type"] == "event":
            text, _, source = event["text"].rpartition(" ")
            found.setdefault(
                HALVES.split("\n")[int(source.partition(":")[2]) - 1].rpartition("// ")[2], set()
            ).add(text)
    assert found["bf16"] == {"4.5 00", "inf 01", "nan 10"}
    assert found["half"] == {"9 00", "inf 01", "nan 10"}
    assert found["pairs"] == {"0 00"} and found["integers"] == {"32257 00"}
    kinds = {
        f"store:* (type == GPU_{kind})": count for kind, count in {"BF16": 64, "F16": 32, "U16": 32}.items()
    }
    counted = measured("gpucount", tmp_path / "counts", app, *kinds)
    assert {one["spec"]: one["threads"] for one in counted if one["type"] == "count"} == kinds
