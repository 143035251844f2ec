"""The runner of suites from outside (script/conformance), on small suites made here."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

import gpubpf_cuda
import gpubpf_objects
from conformance import bpf, bpftime, build, copies, programs, ptx, run
from conformance.bpf_assembler import Unknown, assemble
from conformance.outcome import DIFFERENT, REFUSED, SAME, Outcome, table
from conformance.tools import APIS, Watched
from gpubpf.ebpf import bytecode as b
from gpubpf.ebpf import clang
from gpubpf.traced.device import LIBRARIES

needs_device = pytest.mark.skipif(
    not (LIBRARIES / "libcuda.so.1").exists(), reason="the embedded device is not built (script/setup)"
)

PROGRAMS = {
    "sum": "-- asm\nldxb %r0, [%r1+2] # a comment\nadd %r0, %r2\nexit\n-- mem\n01 02\n03 04 05\n-- result\n0x8\n",
    "wrong": "-- asm\nlddw %r0, 0x1ffffffff\nmov32 %r0, %r0\nexit\n-- result\n0x1\n",
    "refused": "-- asm\nmov %r0, %r6\nexit\n-- result\n0x0\n",
}


@needs_device
def test_ebpf_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "tests" / f"{name}.data").write_text(text)
    written = tmp_path / "outcomes"
    assert run.main(["bpf", "--from", str(tmp_path), "--jobs", "1", "--json", str(written)]) == 1
    found = {(o["program"], o["way"]): o for o in map(json.loads, written.read_text().splitlines())}
    for way in bpf.WAYS:
        assert found["sum", way]["verdict"] == SAME
        assert found["wrong", way]["verdict"] == DIFFERENT
        assert found["wrong", way]["reason"] == "r0 is 0xffffffff, expected 0x1"
        assert found["refused", way]["verdict"] == REFUSED
    assert "ptx                   2      1        1          1" in capsys.readouterr().out


def test_the_assembler() -> None:
    code = assemble(
        "again:\nlock fetch add32 [%r10-4], %r1\njslt32 %r1, -1, again\nlddw %r2, -1\nja exit\nexit\n"
    )
    assert [i.opcode for i in code] == [0xC3, 0xC6, b.LD_IMM64, 0, 0x05, 0x95]
    assert (code[0].offset, code[0].imm) == (-4, 1)
    assert (code[1].offset, code[1].imm) == (-2, -1)
    assert code[4].offset == 0
    for line in ("fly %r1, %r2", "mov %r1", "ja nowhere"):
        with pytest.raises(Unknown):
            assemble(line)


VICTIM = """
#include <unistd.h>
__global__ void touch(int *out) { out[threadIdx.x] = 1; }
int main() {
    int *out;
    cudaMalloc(&out, 4096);
    for (;;) {
        touch<<<1, 40>>>(out);
        cudaDeviceSynchronize();
        sleep(1);
    }
}
"""


def test_examples_of_bpftime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example of our own: forty accesses in each of three turns."""
    gpubpf_cuda.skip_without_cuda()
    if clang.find() is None:
        pytest.skip("needs clang")
    own = tmp_path / "example" / "gpu" / "mem_trace"
    own.mkdir(parents=True)
    (own / "vec_add.cu").write_text(VICTIM)
    program = """
    MAP(counter, GPU_ARRAY, u32, u64, 4);
    SEC("kprobe/__memcapture") int count(void *ctx) {
        u32 key = 0;
        u64 *value = bpf_map_lookup_elem(&counter, &key);
        if (value)
            __sync_fetch_and_add(value, 1);
        return 0;
    }
    """
    (own / "mem_trace.bpf.c").write_text(gpubpf_objects.HEAD + program)
    monkeypatch.setattr(bpftime, "BUILT", tmp_path / "built")
    monkeypatch.setattr(bpftime, "EXAMPLES", [one for one in bpftime.EXAMPLES if one.name == "mem_trace"])
    (found,) = bpftime.run(tmp_path, 1)
    assert found == Outcome("mem_trace", "gpurun", SAME, "", None, 3, 3)
    entries = [{"key": key, "value": 119 if key == 0 else 0} for key in range(4)]
    wrong = bpftime.Found.of([{"type": "map", "map": "counter", "kind": "array", "entries": entries}])
    reason = "counter: {0: 119, 1: 0, 2: 0, 3: 0}, expected {0: 120, 1: 0, 2: 0, 3: 0}"
    assert bpftime.compared(bpftime.EXAMPLES[0], wrong) == (DIFFERENT, reason)


def test_examples_that_cannot_be_built_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpubpf_cuda.skip_without_cuda()
    monkeypatch.setattr(bpftime, "BUILT", tmp_path / "built")
    monkeypatch.setattr(bpftime, "EXAMPLES", [one for one in bpftime.EXAMPLES if one.name == "mem_trace"])
    (found,) = bpftime.run(tmp_path, 1)
    assert found.verdict == REFUSED and ("error" in found.reason or "missing" in found.reason)


@needs_device
def test_kernels(tmp_path: Path) -> None:
    place = tmp_path / ptx.PLACE
    place.mkdir(parents=True)
    kernel = (
        ".version 6.5\n.target sm_30\n.address_size 64\n"
        ".visible .entry twice(.param .u64 given, .param .u64 result) {\n"
        ".reg .b64 %a, %b; .reg .b32 %x;\n"
        "ld.param.u64 %a, [given]; ld.param.u64 %b, [result];\n"
        "ld.global.u32 %x, [%a]; shl.b32 %x, %x, 1; st.global.u32 [%b], %x; ret; }\n"
    )
    (place / "twice.ptx").write_text(kernel)
    (place / "mod.rs").write_text(
        "// test_ptx!(gone, [1u32], [1u32]);\ntest_ptx!(twice, [0x15u32], [42u32]);\n"
    )
    (case,) = ptx.cases(tmp_path)
    assert ptx.alone(case) == Outcome("twice", "plain", SAME)
    assert ".target sm_70" in ptx.raised(case).ptx


def test_values_in_rust() -> None:
    assert ptx.array("-1i32, 3, 0x_10").tolist() == [-1, 3, 16]
    assert ptx.array("0b01_01u8").dtype == "u1"
    assert ptx.array("0.5, 12.9f32, std::f32::consts::PI / 2f32").dtype == "f4"
    assert ptx.array("half::f16::from_bits(0x3c00), half::f16::from_f32(-0.0)").tolist() == [1.0, 0.0]
    assert ptx.array("u64::max_value()").tolist() == [(1 << 64) - 1]
    assert ptx.array("0x0, f32::INFINITY").tolist() == [0.0, float("inf")]


def test_outputs_are_compared_without_what_was_measured() -> None:
    first = programs.comparable("sum 41\nGPU Time in seconds:\n0.125\nsum 42\nBandwidth = 1e3 GB/s")
    assert first == programs.comparable("sum 41\nGPU Time in seconds:\n0.25\nsum 42\nBandwidth = 2.5 GB/s")
    clocks = [programs.comparable(f"{n} ticks\nsum 1", "ticks$") for n in (1, 2)]
    assert clocks[0] == clocks[1] != programs.comparable("1 ticks\nsum 2", "ticks$")
    assert first != programs.comparable("sum 43\nGPU Time in seconds:\n0.125\nsum 42\nBandwidth = 1e3 GB/s")
    assert programs.comparable("time 0 ms, rate inf") == programs.comparable("time 2 ms, rate 1.5e-05")
    assert programs.comparable("a\nb") != programs.comparable("b\na")
    assert programs.comparable("a\nb", unordered=True) == programs.comparable("b\na", unordered=True)


def test_programs_are_executables_with_their_arguments(tmp_path: Path) -> None:
    for name, mode in (("app", 0o755), ("data", 0o644), ("library.so", 0o755)):
        (tmp_path / name).write_bytes(b"\x7fELF")
        (tmp_path / name).chmod(mode)
    (tmp_path / "app.args").write_text("-n 'two words'\n")
    assert list(programs.commands(tmp_path)) == [[str(tmp_path / "app"), "-n", "two words"]]


def test_some_of_the_programs_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_bytes(b"\x7fELF")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(programs, "outcomes", lambda name, *_, **__: [Outcome(name, "plain", SAME)])
    monkeypatch.setattr(
        programs, "ProcessPoolExecutor", ThreadPoolExecutor
    )  # processes do not see the lambda
    found = programs.run(tmp_path, 1, only=["t*"], done={"two"})
    assert [one.program for one in found] == ["three"]
    with pytest.raises(SystemExit):
        run.main(["bpf", "--resume", "--json", str(tmp_path / "file")])


def fake_compiler(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an `nvcc` into PATH that writes its arguments down and copies /bin/true, or fails with -Ifails."""
    compiler, calls = place / "bin" / "nvcc", place / "calls"
    compiler.parent.mkdir()
    compiler.write_text(
        "#!/bin/bash\n"
        'if [ "$1" = --version ]; then echo 13; exit; fi\n'
        f'echo "$*" >> "{calls}"\n'
        'case "$*" in *-Ifails*) echo "a.cu(1): error: no such header" >&2; exit 2 ;; esac\n'
        'while [ "$1" != -o ]; do shift; done; cp /bin/true "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    return calls


def small_suite(place: Path) -> build.Suite:
    """Return a list of two programs, whose checkout is `place`."""
    (place / "src" / "good").mkdir(parents=True)
    (place / "src" / "good" / "main.cu").write_text("#define N 1000\n")
    (place / "src" / "good" / "input").write_text("")
    (place / "src" / "bad").mkdir()
    (place / "src" / "bad" / "main.cu").write_text("")
    written = place / "list.toml"
    written.write_text(
        'url = "u"\ncommit = "c"\nwrong = "FAIL"\ndirectory = "src/*"\nflags = "-I$SUITE"\n[programs]\n'
        'good = { args = "-n \'1 2\' $SUITE/x", files = "in*", inputs = { made = "seq 3" }, '
        'smaller = { "N 1000" = "N 10" }, modules = { "a.fatbin" = "main.cu" } }\n'
        'bad = { flags = "-Ifails" }\n'
    )
    return build.suite(written)


def test_programs_of_a_list_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, calls = small_suite(tmp_path), fake_compiler(tmp_path, monkeypatch)
    good, bad = suite.programs
    place = tmp_path / "built"
    command = [str(place / "good" / "good"), "-n", "1 2", f"{tmp_path}/x"]
    assert build.built(good, tmp_path, "1", place) == (command, "")
    assert (place / "good" / "source" / "main.cu").read_text() == "#define N 10\n"
    assert (place / "good" / "input").resolve() == place / "good" / "source" / "input"
    assert (place / "good" / "made").read_text() == "1\n2\n3\n"
    first, second = calls.read_text().splitlines()
    assert first.startswith("-cudart shared") and f"-I{tmp_path}" in first and first.endswith("main.cu")
    assert second.endswith(f"-fatbin -o {place / 'good' / 'a.fatbin'} main.cu")
    assert build.built(bad, tmp_path, "1", place)[1] == "error: no such header"
    # What failed is tried again: a package that was missing may be there now.
    for version, times in (("1", 4), ("2", 7), (None, 10), (None, 13)):
        build.built(good, tmp_path, version, place)
        build.built(bad, tmp_path, "1", place)
        assert len(calls.read_text().splitlines()) == times
    build.built(good, tmp_path, "3", place)
    other = [*command[:-3], "-o"]  # other arguments need no other executable
    assert build.built(replace(good, args="-o"), tmp_path, "3", place) == (other, "")
    assert len(calls.read_text().splitlines()) == times + 2


def test_libraries_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = replace(small_suite(tmp_path).programs[0], modules={}, libraries="nvrtc")
    calls = fake_compiler(tmp_path, monkeypatch)
    monkeypatch.setattr(
        build.importlib.util,
        "find_spec",
        lambda name: Mock(submodule_search_locations=[str(tmp_path / name)]),
    )
    monkeypatch.setattr(build, "_cuda_headers", lambda: tmp_path / "targets" / "include")
    reason = build.built(good, tmp_path, "1", tmp_path / "built")[1]
    assert reason == "needs nvrtc (PyPI: nvidia-cuda-nvrtc)"
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    (lib / "libnvrtc.so.13").write_text("")
    assert build.built(good, tmp_path, "1", tmp_path / "built")[1] == ""
    (lib / "libnvrtc.so.13").unlink()
    toolkit = tmp_path / "nvvm" / "lib64"
    toolkit.mkdir(parents=True)
    (toolkit / "libnvrtc.so").write_text("")
    assert build.built(good, tmp_path, "2", tmp_path / "built")[1] == ""
    for call, place, file in zip(
        calls.read_text().splitlines(), (lib, toolkit), ("libnvrtc.so.13", "libnvrtc.so"), strict=True
    ):
        assert f"-I{place.parent}/include -L{place} -Xlinker -rpath={place}," in call
        assert call.endswith(f"-l:{file}")


def test_links_to_headers_of_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = replace(small_suite(tmp_path).programs[0], files="in* $CUDA/cccl/nv", smaller={})
    fake_compiler(tmp_path, monkeypatch)
    (tmp_path / "include" / "cccl" / "nv").mkdir(parents=True)
    monkeypatch.setattr(build, "_cuda_headers", lambda: tmp_path / "include")
    assert build.built(good, tmp_path, "1", tmp_path / "built")[1] == ""
    for name, target in (("input", "src/good/input"), ("nv", "include/cccl/nv")):
        assert (tmp_path / "built" / "good" / name).resolve() == tmp_path / target


def test_sizes_that_the_sources_do_not_have_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = small_suite(tmp_path).programs[0]
    fake_compiler(tmp_path, monkeypatch)
    other = replace(good, smaller={"N 1000": "N 1", "M 7": "M 1"})
    assert build.built(other, tmp_path, "1", tmp_path / "built")[1] == "the sources do not have: M 7"
    other = replace(good, sources="*.cpp", smaller={})
    assert build.built(other, tmp_path, "1", tmp_path / "built")[1] == "no *.cpp in src/good"


def test_words_of_a_list_are_replaced_before_those_of_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_suite(tmp_path)
    written = tmp_path / "list.toml"
    written.write_text(
        written.read_text().replace("[programs]", '[smaller]\n"define N" = "few N"\n[programs]')
    )
    good = build.suite(written).programs[0]
    fake_compiler(tmp_path, monkeypatch)
    assert build.built(good, tmp_path, "1", tmp_path / "built")[1] == ""
    assert (tmp_path / "built" / "good" / "source" / "main.cu").read_text() == "#few N 10\n"


def test_a_list_is_built_only_where_this_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = small_suite(tmp_path)
    fake_compiler(tmp_path, monkeypatch)
    found = list(programs.run_list(suite, tmp_path, tmp_path / "built", 1, build_only=True))
    assert found == [
        Outcome("good", "build", SAME),
        Outcome("bad", "build", REFUSED, "error: no such header"),
    ]
    assert list(programs.run_list(suite, tmp_path, tmp_path / "built", 1, ("b*",), True)) == found[1:]


def test_a_list_of_hip_programs_takes_lines_from_its_twin(tmp_path: Path) -> None:
    (tmp_path / "cuda.toml").write_text(
        'url = "u"\ncommit = "c"\nwrong = "FAIL"\ndirectory = "src/*-cuda"\nsources = "main.cu"\n[programs]\n'
        'a = { args = "1", flags = "-Xcompiler -fopenmp -use_fast_math -I$SUITE/b-cuda", smaller = { "N 9" = "N 1" } }\n'
        "b = { args = '2' }\nunwanted = {}\n"
    )
    (tmp_path / "hip.toml").write_text(
        'api = "hip"\ntwin = "cuda"\ndirectory = "src/*-hip"\nflags = "-I*-cuda"\nnames = "b a"\n'
        "[programs]\nb = { sources = 'c.cu' }\n"
    )
    suite = build.suite(tmp_path / "hip.toml")
    assert (suite.url, suite.commit, suite.wrong, suite.api) == ("u", "c", "FAIL", APIS["hip"])
    a, b = suite.programs
    assert (a.name, a.directory, a.sources, a.args) == ("a", "src/a-hip", "main.cu", "1")
    assert a.flags.split() == ["-Ia-cuda", "-fopenmp", "-ffast-math", "-I$SUITE/b-hip", "-I$SUITE/b-cuda"]
    assert a.smaller == {"N 9": "N 1"}
    assert (b.sources, b.args, b.flags.split()) == ("c.cu", "2", ["-Ib-cuda"])


def test_hip_programs_are_built_with_hipcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = small_suite(tmp_path).programs[0]
    calls = fake_compiler(tmp_path, monkeypatch)
    (tmp_path / "bin" / "nvcc").rename(tmp_path / "bin" / "hipcc")
    assert build.built(replace(good, modules={}), tmp_path, "1", tmp_path / "built", APIS["hip"])[1] == ""
    (call,) = calls.read_text().splitlines()
    assert call.startswith("--offload-arch=gfx906") and "cudart" not in call and "-Xlinker" not in call


def test_launches_of_hip_programs_are_compared_with_the_log_of_the_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "".join(
        f":3: : 1 us: 7 : [tid:0x1] {line}\n"
        for line in (
            "hipLaunchKernel ( 0x1, {1,1,1}, {64,1,1}, 0x2, 0, stream:<null> )",
            "ihipLaunchKernel: Returned hipSuccess : ",
            "hipLaunchKernel: Returned hipSuccess : ",
            "hipLaunchKernel: Returned hipErrorInvalidConfiguration : ",
            "hipModuleLaunchKernel: Returned hipSuccess : ",
            "hipExtLaunchKernel: Returned hipSuccess : ",
            "hipMalloc: Returned hipSuccess : ",
        )
    )

    def finished(command: list[str], *_: object) -> tuple[str, str, int]:
        assert ["-m", "hipsim.launcher"] in (command[1:3], command[5:7])
        return ("sum 3\n" if command[1] == "-m" else log), "", 0

    def under(tool: str, _command: list[str], *_: object) -> Watched:
        kernel = {"type": "kernel", "kernel": "k", "count": counted, "errors": 1}
        graph = {"type": "kernel", "kernel": "[hipGraphLaunch]", "count": 9, "errors": 0}
        return Watched("sum 3\n", "", 0, [kernel, graph, {"type": "summary", "lost": 0}], 1.0)

    monkeypatch.setattr(programs, "finished", finished)
    monkeypatch.setattr(programs, "under", under)
    hip = pickle.loads(pickle.dumps(APIS["hip"]))  # as in the processes that run programs
    for counted, verdict in ((4, SAME), (3, DIFFERENT)):
        app = [str(tmp_path / "app")]
        found = programs.outcomes("app", app, tools=("hipsnoop",), api=hip)
        assert [(o.way, o.verdict) for o in found] == [("plain", SAME), ("hipsnoop", verdict)]
        assert (found[1].launches, found[1].instrumented) == (counted - 1, None)
    assert found[1].reason.startswith("2 launches seen, 3 made")
    assert "hipsnoop: 2 launches counted" in table(found)


@pytest.mark.parametrize("name", run.LISTS)
def test_the_lists_can_be_read(name: str) -> None:
    suite = run.LISTS[name]
    assert len(suite.commit) == 40 and suite.programs
    assert re.compile(suite.wrong)
    for program in suite.programs:
        assert "*" not in program.directory and program.sources


def test_a_program_that_says_that_its_result_is_wrong_is_different(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho sum: 3\necho Test FAILED\n")
    program.chmod(0o755)
    (found,) = programs.outcomes("program", [str(program)], "FAIL")
    assert found == Outcome("program", "plain", DIFFERENT, "says that its result is wrong: Test FAILED")
    (found,) = programs.outcomes("program", [str(program)], "wrong", right="PASS")
    assert found == Outcome("program", "plain", DIFFERENT, "does not say that its result is right")


def test_a_program_whose_second_run_takes_too_long_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([("done\n", "", 0), ("", "", None)])
    monkeypatch.setattr(programs, "finished", lambda *_: next(runs))
    (found,) = programs.outcomes("program", ["/program"])
    assert found == Outcome(
        "program", "plain", REFUSED, f"too slow: takes longer than {programs.LIMIT:.0f} s alone"
    )


def test_builds_for_each_amd_gpu_have_their_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    monkeypatch.setattr(programs, "run_list", lambda *given: places.append(given[2]) or [])
    monkeypatch.setattr(run.shutil, "which", lambda _: "/bin/true")
    for suite in ("samples", "rocprim"):
        run.main([suite, "--from", str(tmp_path)])
    assert places == [build.BUILT / "samples", build.BUILT / "rocprim" / "gfx906"]


def test_programs_run_only_in_the_ways_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools: list[list[str]] = []
    monkeypatch.setattr(programs, "run", lambda _place, _jobs, ways, *_: tools.append(ways) or iter(()))
    for ways in ("alone", "launchlate,threadhist"):
        assert run.main(["programs", "--from", str(tmp_path), "--ways", ways]) == run.SKIPPED
    assert tools == [[], ["threadhist", "launchlate"]]
    with pytest.raises(SystemExit):
        run.main(["programs", "--from", str(tmp_path), "--ways", "plain"])


def test_without_nvcc_a_list_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.main(["polybench", "--from", str(tmp_path)]) == run.SKIPPED
    assert "skipped polybench: nvcc is missing" in capsys.readouterr().err


def test_a_suite_that_cannot_be_had_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(run.SOURCES, "bpf", (str(tmp_path / "nowhere"), "0" * 40))
    assert run.main(["bpf"]) == run.SKIPPED
    assert "skipped bpf: fatal: " in capsys.readouterr().err


def test_a_commit_is_checked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "origin"
    git = ["git", "-C", str(origin), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", str(origin)], check=True)
    (origin / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "1"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = run.checkout(str(origin), commit)
    assert (place / "file").read_text() == "1"
    (origin / ".git").rename(tmp_path / "moved")
    assert run.checkout(str(origin), commit) == place


def test_the_table_counts_by_way_and_by_reason() -> None:
    outcomes = [
        Outcome("a", "ptx", SAME),
        Outcome("b", "ptx", REFUSED, "too long"),
        Outcome("c", "ptx", REFUSED, "too long"),
        Outcome("d", "ptx", DIFFERENT, "r0 is 1"),
    ]
    lines = [" ".join(line.split()) for line in table(outcomes).splitlines()]
    assert lines[1] == "ptx 2 1 2 1"
    assert "2 ptx: too long" in lines and "d, ptx: r0 is 1" in lines


def test_the_table_says_how_many_launches_were_instrumented_and_how_much_longer_it_took() -> None:
    found = [
        Outcome("a", "plain", SAME, seconds=2.0),
        Outcome("a", "memtrace", SAME, seconds=5.0, launches=10, instrumented=10),
        Outcome("b", "plain", SAME, seconds=1.0),
        Outcome("b", "memtrace", SAME, seconds=9.0, launches=30, instrumented=30),
        Outcome("c", "memtrace", REFUSED, "no PTX", 7.0, 10, 0),
    ]
    lines = table(found).splitlines()
    assert "memtrace: 40 of 50 launches instrumented (80.0 %)" in lines
    assert "memtrace: 5.8 times as long as alone (median), at most 9 (b)" in lines


def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [Outcome("a", "plain", SAME), Outcome("b", "plain", SAME)]
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in before))
    asked = []

    def run_list(*given: object) -> list[Outcome]:
        asked.append(given[-2])  # before the tools
        return [Outcome("b", "plain", SAME), Outcome("c", "plain", REFUSED, "no")]

    monkeypatch.setattr(programs, "run_list", run_list)
    monkeypatch.setattr(run.shutil, "which", lambda _: "/bin/true")
    assert run.main(["samples", "--from", str(tmp_path), "--json", str(file), "--resume"]) == 0
    assert asked == [{"a"}]
    assert [json.loads(line)["program"] for line in file.read_text().splitlines()] == ["a", "b", "c"]
    assert capsys.readouterr().out.splitlines()[1].split() == ["plain", "2", "2", "1", "0"]


def test_an_interrupted_run_of_copies_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are done as a whole: the outcomes of the last one may be incomplete."""
    for name in ("one", "two", "three", "four"):
        (tmp_path / f"{name}.ptx").write_text("")
    before = [Outcome(f"{name}.ptx: k", way, SAME) for name in ("one", "two") for way in ("a", "b")]
    file = tmp_path / "outcomes.jsonl"
    file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in before))
    monkeypatch.setattr(
        copies, "outcomes", lambda folder, path: [Outcome(f"{path.relative_to(folder)}: k", "a", SAME)]
    )
    monkeypatch.setattr(copies, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(run.shutil, "which", lambda _: "/bin/true")
    words = ["copies", "--from", str(tmp_path), "--json", str(file), "--resume", "--only", "[ot]*"]
    assert run.main(words) == 0
    done = [json.loads(line)["program"] for line in file.read_text().splitlines()]
    assert done == ["one.ptx: k", "one.ptx: k", "three.ptx: k", "two.ptx: k"]


def test_every_nth_program_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_list(suite: build.Suite, *_: object) -> list[Outcome]:
        asked.extend(program.name for program in suite.programs)
        return [Outcome(suite.programs[0].name, "build", SAME)]

    monkeypatch.setattr(programs, "run_list", run_list)
    monkeypatch.setattr(run.shutil, "which", lambda _: "/bin/true")
    words = ["hecbench", "--from", str(tmp_path), "--only", "a*", "--only", "b*", "--every", "20"]
    assert run.main(words) == 0
    names = [one.name for one in run.LISTS["hecbench"].programs if one.name[0] in "ab"]
    assert asked == names[::20] and len(asked) > 1
    for words in (["hecbench", "--every", "0"], ["bpf", "--every", "2"]):
        with pytest.raises(SystemExit):
            run.main(words)


def test_kernels_in_wheels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A library with PTX for a newer GPU than the first one, a library without device code, and a wheel that is damaged."""
    text = ".version 8.7\n.target sm_120\n.address_size 64\n.visible .entry k() { ret; }\n"
    wheel = tmp_path / "made-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made/kernels.ptx", "//\n" * 10_000 + text)
        archive.writestr("made/plain.so", b"\x7fELF" + bytes(30_000))
    records = tmp_path / "records"
    assert run.main(["wheels", str(wheel), "--json", str(records)]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| made 1.0 | `kernels.ptx` | 1 | 0 | PTX for a newer GPU (sm_120) (1) | 1 | - |"
    ]
    assert json.loads(records.read_text())["reasons"]["12.0"] == {"": 1}
    wheel.write_bytes(b"no archive")
    assert run.main(["wheels", str(wheel)]) == 1
    assert capsys.readouterr() == ("", f"conformance: skipped {wheel}: File is not a zip file\n")
