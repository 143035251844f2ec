"""Properties of the C that the translator writes, and its command."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cudasim.translate import translate
from cudasim.translate.compiler import CompilerError, command, compile_c
from cudasim.translate.liveness import estimated_registers
from cudasim.translate.program import SPLIT_LINES, TranslatedModule
from cudasim.translate.scope import Register
from gpubpf.errors import PtxError
from gpubpf.ptx.parser import parse
from gpubpf_sass import need

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body: str, parameters: str = ".param .u64 p") -> str:
    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<4>;"
    return f"{HEAD}.visible .entry k({parameters}) {{\n{registers}\n{body}\nret; }}\n"


def loops(text: str) -> int:
    """Lane loops of the kernel."""
    return text.count("LANES")


def frame(text: str) -> str:
    found = re.search(r"struct frame \{(.*?)\} __attribute__", text)
    assert found is not None
    return found.group(1)


def test_registers_of_one_stretch_are_not_kept_in_memory() -> None:
    text = translate(
        kernel("mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 1; mul.lo.u32 %r3, %r2, %r2; mov.u32 %r4, %r3;")
    )
    assert "u32 none" in frame(text)
    assert loops(text) == 1


def test_registers_that_live_across_blocks_are_kept() -> None:
    text = translate(
        kernel(
            "mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 1; bar.sync 0; ld.param.u64 %rd1, [p]; st.global.u32 [%rd1], %r2;"
        )
    )
    assert "r_r2[32]" in frame(text)
    assert "r_rd1" not in frame(text)


def test_values_that_all_lanes_share_are_computed_once_for_the_warp() -> None:
    text = translate(
        kernel(
            "ld.param.u64 %rd1, [p]; mov.u32 %r1, %ctaid.x; mul.lo.u32 %r2, %r1, 7; mov.u32 %r3, %tid.x; bar.sync 0;\n"
            "add.u32 %r4, %r2, %r3; st.global.u32 [%rd1], %r4;"
        )
    )
    assert "u32 none" in frame(text)
    assert loops(text) == 1  # nothing is left to do before the barrier
    assert text.index("r_r2 = ") < text.index("LANES") < text.index("r_r3 = ")


def test_long_computations_are_not_repeated_at_each_use() -> None:
    step = "mul.lo.u32 %r{}, %r{}, 7; "
    steps = "mov.u32 %r1, %ctaid.x; " + "".join(step.format(k + 1, k) for k in range(1, 9))
    more = "".join(step.format(k + 1, k) for k in range(9, 40))
    body = "ld.param.u64 %rd1, [p]; .reg .b32 %r<64>; {} bar.sync 0; st.global.u32 [%rd1], %r{};"
    declared = "{{ {} }}"
    assert "u32 none" in frame(translate(kernel(declared.format(body.format(steps, 9)))))
    assert "[32]" in frame(translate(kernel(declared.format(body.format(steps + more, 40)))))


@pytest.mark.parametrize("redefined", ["@%p1 mov.u32 %r2, 3;", "add.u32 %r2, %r2, 1;"])
def test_registers_with_several_definitions_are_kept(redefined: str) -> None:
    body = "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, 2; {} bar.sync 0; "
    body += "ld.param.u64 %rd1, [p]; st.global.u32 [%rd1], %r2;"
    assert "r_r2[32]" in frame(translate(kernel(body.format(redefined))))


def test_a_branch_that_all_lanes_take_alike_needs_no_lanes() -> None:
    text = translate(
        kernel("mov.u32 %r1, %ctaid.x; setp.gt.u32 %p1, %r1, 3; @%p1 bra over; bar.sync 0; over: ret;")
    )
    assert loops(text) == 0
    assert "SPLIT" not in text


@pytest.mark.parametrize(
    ("body", "asked", "direct"),
    [
        ("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", 1, "cs_shuffle(w, mask, CS_OP_SHFL_BFLY, 3,"),
        (
            "mov.u32 %r3, -1; shfl.sync.up.b32 %r2, %r1, %r1, 31, %r3;",
            1,
            "cs_shuffle(w, mask, CS_OP_SHFL_UP, 2,",
        ),
        ("activemask.b32 %r3; match.all.sync.b32 %r2, %r1, %r3;", 0, "cs_match_all("),
        ("activemask.b32 %r3; setp.eq.u32 %p1, %r1, 0; vote.sync.any.pred %p2, %p1, %r3;", 0, "cs_vote("),
        ("activemask.b32 %r3; add.u32 %r3, %r3, 0; vote.sync.any.pred %p2, %p1, %r3;", 1, "collective("),
        ("activemask.b32 %r3; bar.sync 0; vote.sync.any.pred %p2, %p1, %r3;", 1, "collective("),
    ],
)
def test_collectives_ask_the_engine_only_if_lanes_may_be_missing(body: str, asked: int, direct: str) -> None:
    text = translate(kernel("mov.u32 %r1, %tid.x; " + body))
    assert text.count("api->collective(") + text.count("cs_meet(") == asked
    assert direct in text


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("ld.volatile.shared.u32 %r1, [s]; st.volatile.shared.u32 [s], %r1;", 2),
        ("st.shared.u32 [s], 1; ld.shared.u32 %r1, [s+4];", 2),
        ("ld.shared.u32 %r1, [s]; st.shared.u32 [s+4], %r1;", 2),
        ("ld.shared.u32 %r1, [s]; ld.shared.u32 %r2, [s+4]; add.u32 %r1, %r1, %r2;", 1),
    ],
)
def test_lanes_of_a_warp_see_each_others_stores_in_order(body: str, wanted: int) -> None:
    text = translate(kernel(".shared .align 4 .b8 s[64];\n" + body))
    assert loops(text) == wanted


def test_names_in_nested_scopes() -> None:
    text = translate(
        kernel(
            "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;\n"
            "{ .reg .b32 t; mov.u32 t, 1; @%p1 mov.u32 t, 3; bra L; L: mov.u32 %r1, t; }\n"
            "{ .reg .b64 t; mov.u64 t, 2; @%p1 mov.u64 t, 3; bra L; L: mov.u64 %rd1, t; }"
        )
    )
    assert "u32 r_t[32]" in frame(text) and "u64 r_t_1[32]" in frame(text)


@pytest.mark.parametrize(
    "body",
    [
        "mbarrier.init.b64 [s], 1;",
        "mbarrier.arrive.b64 _, [s];",
        "mbarrier.test_wait.b64 %p1, [s], %rd1;",
        "cp.async.mbarrier.arrive.noinc.b64 [s];",
        "st.async.mbarrier::complete_tx::bytes.b32 [s+8], %r1, [s];",
        "red.async.relaxed.cluster.mbarrier::complete_tx::bytes.inc.u32 [s+8], %r1, [s];",
        "st.bulk [s], %rd1, 0;",
        "st.bulk.weak [s], %rd1, 0;",
    ],
)
def test_the_name_of_a_shared_variable_is_an_address_in_shared_memory(body: str) -> None:
    newer = ".version 8.6\n.target sm_100\n.address_size 64\n"
    text = translate(kernel(".shared .align 8 .b8 s[64];\n" + body).replace(HEAD, newer))
    assert "at_shared" in text and "at_generic" not in text


def test_loops_that_may_wait_for_others_use_up_their_turn_sooner() -> None:
    body = "ld.param.u64 %rd1, [p]; again: {} setp.eq.u32 %p1, %r1, 0; @%p1 bra again;"
    spinning = translate(kernel(body.format("ld.acquire.gpu.global.u32 %r1, [%rd1];")))
    computing = translate(kernel(body.format("bar.warp.sync -1; ld.global.u32 %r1, [%rd1];")))
    assert re.search(r"BACK\(\d+, 16\)", spinning)
    assert re.search(r"BACK\(\d+, 1\)", computing)


@pytest.mark.parametrize(
    ("body", "one_after_another"),
    [
        ("ld.global.u32 %r2, [%rd1]; add.u32 %r3, %r3, %r2; st.global.u32 [%rd1], %r3;", True),
        ("@%p2 bra even; ld.shared.u32 %r3, [s]; even: add.u32 %r2, %r2, 1;", True),
        ("inner: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, %r1; @%p2 bra inner;", True),
        ("st.shared.u32 [s], %r1; add.u32 %r2, %r2, 1;", False),
        ("ld.shared.u32 %r2, [s+4]; add.u32 %r2, %r2, 1; @%p2 bra no; st.shared.u32 [s], %r2; no:", False),
        ("ld.u32 %r2, [%rd1]; st.u32 [%rd1], %r2;", False),
        ("ld.u32 %r2, [%rd1]; st.global.u32 [%rd1], %r2;", True),
        ("activemask.b32 %r2; add.u32 %r3, %r3, %r2;", False),
        ("ld.volatile.global.u32 %r2, [%rd1];", False),
        ("atom.global.add.u32 %r2, [%rd1], 1;", False),
        ("mov.u32 %r2, %clock;", False),
        ("bar.sync 0;", False),
        ("@%p2 exit;", True),
        ("@%p2 nanosleep.u32 1;", False),
        ("vote.sync.any.pred %p2, %p2, -1;", False),
    ],
)
def test_lanes_run_loops_one_after_another_if_they_need_not_meet(body: str, one_after_another: bool) -> None:
    loop = f"again: {body} add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, %r4; @%p1 bra again;"
    text = translate(kernel(f".shared .align 4 .b8 s[64]; mov.u32 %r1, 0; {loop}"))
    assert ("turns_ = 0" in text) == one_after_another


def test_functions_that_no_kernel_reaches_are_left_out() -> None:
    unknown = ".func unused() { tcgen05.shift.cta_group::1.down [0]; ret; }\n"
    text = translate(kernel("").replace(".visible", unknown + ".visible"))
    assert "fn_1(" in text and "fn_0(" not in text


def test_callees_come_before_their_callers() -> None:
    functions = ".func b() { ret; }\n.func a() { call b, (); ret; }\n"
    text = translate(kernel("call a, ();").replace(".visible", functions + ".visible"))
    entry = {m[1]: int(m[2]) for m in re.finditer(r'^\{"(\w+)", (\d+)u', text, re.M)}
    assert entry["b"] < entry["a"] < entry["k"]


def test_many_functions_translate_to_little_text() -> None:
    names = [f"f{k}" for k in range(60)]
    functions = "".join(
        f".func {n}() {{ {' '.join(f'call {m}, ();' for m in names[:k])} ret; }}\n"
        for k, n in enumerate(names)
    )
    text = translate(kernel("call f59, ();").replace(".visible", functions + ".visible"))
    assert len(text) < 2_000_000


def test_initial_values_and_addresses() -> None:
    text = translate(
        HEAD + ".func f() { ret; }\n"
        ".global .align 4 .u32 a[2][2] = {{1, 2}, {3}};\n"
        ".global .align 8 .u64 b[3] = {a, generic(a), f};\n"
        ".global .align 1 .b8 c[2] = {0xFF(a), 0xFF00(a)};\n.visible .entry k() { ret; }\n"
    )
    assert r"\001\000\000\000\002\000\000\000\003" in text
    assert "{8, 0xffffffffffffffffull, 0, 8, 0, 0, 0}" in text
    assert "{16, 0xffffffffffffffffull, 0, 8, 1, 0, 0}" in text
    assert "{1, 0xff00ull, 0, 1, 0, 0, 8}" in text


def test_a_kernel_that_calls_what_is_not_known_is_left_out_alone() -> None:
    functions = """.extern .func gone();
.func unknown() { tcgen05.shift.cta_group::1.down [0]; ret; }
.func through() { call unknown, (); ret; }
.visible .entry first() { call through, (); ret; }
.visible .entry second() { call gone, (); ret; }
"""
    program = TranslatedModule(parse(kernel("").replace(".visible", functions + ".visible", 1)))
    assert list(program.codes) == ["k"]
    assert program.refused["first"].startswith(
        "PTX line 5: the embedded device does not support tcgen05.shift"
    )
    assert program.refused["second"] == "PTX line 8: function gone is not defined in this module"


def test_kernels_whose_grids_count_clusters_are_refused() -> None:
    entry = ".visible .entry {}() .explicitcluster .reqnctapercluster 1, 2 {} {{ ret; }}\n"
    program = TranslatedModule(
        parse(HEAD + entry.format("one", "") + entry.format("two", ".blocksareclusters"))
    )
    assert list(program.codes) == ["one"]
    assert "does not support .blocksareclusters" in program.refused["two"]


def test_what_is_no_ptx_is_an_error() -> None:
    with pytest.raises(PtxError, match=r"PTX line 6: %r99 is not declared"):
        translate(kernel("mov.u32 %r99, 0;"))


@pytest.mark.parametrize(
    "text",
    [
        ".global .b8 a[4][99999999999] = {{1}, {2}};",
        ".shared .b8 a[99999999999];",
        ".visible .entry k() { .local .b8 a[99999999]; ret; }",
        ".visible .entry k(.param .b8 p[99999999999]) { ret; }",
        ".visible .entry k() { .reg .b99999999999 r; mov.b99999999999 r, 1; ret; }",
    ],
)
def test_sizes_that_no_device_has_are_errors(text: str) -> None:
    with pytest.raises(PtxError):
        translate(HEAD + text)


@pytest.mark.parametrize(
    "body",
    [
        "bar.red;",
        "shfl.sync;",
        "call;",
        "bra;",
        "st.global.b3 [%rd1], %r1;",
        "vote.sync.any %r1;",
        "brx.idx %r1;",
    ],
)
def test_instructions_without_their_operands_are_refused(body: str) -> None:
    assert "k" in TranslatedModule(parse(kernel(body))).refused


def test_a_module_with_32_bit_addresses_is_refused() -> None:
    with pytest.raises(PtxError, match=r"\.address_size 32"):
        translate(HEAD.replace("address_size 64", "address_size 32") + ".visible .entry k() { ret; }")


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("madc.hi.sat.s32 %r1, %r1, %r1, %r1;", "saturation with a carry"),
        ("mad.hi.sat.cc.s32 %r1, %r1, %r1, %r1;", "PTX has no such form"),
        ("add.sat.cc.s32 %r1, %r1, %r1;", "PTX has no such form"),
    ],
)
def test_saturation_with_a_carry_is_refused_by_name(form: str, reason: str) -> None:
    """ptxas makes different things of the first one, depending on -O, and refuses the others."""
    program = TranslatedModule(parse(kernel("add.cc.u32 %r2, %r2, %r3; " + form)))
    assert f"does not support {form.split()[0]}: {reason}" in str(program.refused["k"])


@pytest.mark.parametrize("form", ["ld %r1, [%rd1];", "st [%rd1], %r1;", "atom %r1, [%rd1], 1;"])
def test_an_access_without_a_type_is_refused_with_its_kernel_alone(form: str) -> None:
    head = ".version 8.0\n.target sm_80\n.address_size 64\n"
    bad = f".visible .entry bad() {{ .reg .b32 %r<2>; .reg .b64 %rd<2>; {form} ret; }}\n"
    program = TranslatedModule(parse(head + bad + ".visible .entry good() { ret; }\n"))
    assert set(program.refused) == {"bad"}


def test_large_modules_are_split_by_who_needs_what() -> None:
    functions = """.func both() { ret; }
.func own() { call both, (); ret; }
.visible .entry first() { call own, (); ret; }
.visible .entry second() { call both, (); ret; }
"""
    program = TranslatedModule(parse(HEAD + functions))
    image, *gathered = program.c_texts(split=0)
    assert "B0:" not in image and len(gathered) == 1
    _, *parts = program.c_texts(split=0, part=0)
    held = [set(re.findall(r"static int (fn_\d+)", part)) for part in parts]
    of = {name: f"fn_{program.indices[name]}" for name in program.codes}
    assert sorted(map(sorted, held)) == [[of["both"]], [of["own"], of["first"]], [of["second"]]]
    assert {of["both"], of["own"], of["first"]} == set().union(*(held[k] for k in program.parts["first"]))
    assert {of["both"], of["second"]} == set().union(*(held[k] for k in program.parts["second"]))


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDASIM_CC_COMPILER", "tcc -q")
    assert command() == ["tcc", "-q"]
    monkeypatch.delenv("CUDASIM_CC_COMPILER")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompilerError, match="install gcc"):
        command()


def test_ziglang_serves_where_there_is_no_other_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its linker finds the C library without a developer's package. Here gcc and ld play zig's parts."""
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").touch()
    zig = package / "zig"
    gcc, ld, path = shutil.which("gcc"), shutil.which("ld"), os.environ["PATH"]
    zig.write_text(
        f'#!/bin/sh\nexport PATH="{path}"\nwhat=$1 target=$2$3 plain=$4; shift\n[ $what = cc ] || exec {ld} "$@"\n'
        f'[ $target = -targetx86_64-linux-gnu ] && [ $plain = -fno-sanitize=undefined ] && shift 3 && exec {gcc} "$@"\n'
    )
    zig.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CUDASIM_CC_COMPILER", raising=False)
    text = '#include <math.h>\n__attribute__((visibility("default"))) double f(double x) { return fmod(x, 4); }\n'
    compile_c(text, str(tmp_path / "made.so"))
    rest = ctypes.CDLL(str(tmp_path / "made.so")).f
    rest.restype, rest.argtypes = ctypes.c_double, [ctypes.c_double]
    assert rest(7.0) == 3.0
    assert {path.name for path in tmp_path.iterdir()} == {"ziglang", "made.so"}
    with pytest.raises(CompilerError, match=r"^the C compiler failed: "):
        compile_c("int f(void) { return nowhere(); }\n", str(tmp_path / "made.so"))


@pytest.mark.parametrize(
    "text, cause",
    [
        ("int f(void) {\n return 1;\n}\nint g(void) {\n return nowhere;\n}\n", "error: .*nowhere"),
        ('#include "nowhere.h"\n', "error: .*nowhere.h"),
        ('__attribute__((visibility("hidden"))) extern int f(void); int g(void) { return f(); }\n', "ld: "),
    ],
)
def test_the_message_names_what_the_compiler_refused(text: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match=f"^the C compiler failed: .*{cause}"):
        compile_c(text, str(tmp_path / "out.so"))
    assert not list(tmp_path.iterdir())


def test_command(tmp_path: Path, repository: Path) -> None:
    source = tmp_path / "k.ptx"
    source.write_text(kernel("add.u32 %r1, %r1, 1;"))
    base = [sys.executable, "-m", "cudasim.translate"]
    environment = {**os.environ, "PYTHONPATH": str(repository / "lib")}
    output = tmp_path / "k.so"
    subprocess.run([*base, str(source), str(output)], env=environment, check=True)
    assert output.read_bytes()[:4] == b"\x7fELF"
    assert not list(tmp_path.glob("*.tmp"))
    source.write_text(kernel("bra nowhere;"))
    done = subprocess.run(
        [*base, str(source), str(output)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "PTX line 6: there is no label nowhere, in k\n"
    broken = {**environment, "CUDASIM_CC_COMPILER": "/bin/false"}
    source.write_text(kernel(""))
    done = subprocess.run(
        [*base, str(source), str(output)], env=broken, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stderr.startswith("the C compiler failed")


def test_code_of_large_modules_is_compiled_for_launches(tmp_path: Path, repository: Path) -> None:
    """Of many kernels, the one that is launched is compiled, with the function it shares; again in another process."""
    pytest.importorskip("numpy")
    adds = "add.u32 v, v, 1;" * 100 + "bar.sync 0;"  # a barrier ends a block, so that there are lines enough
    shared = ".func (.reg .b32 r) twice(.reg .b32 a) { add.u32 r, a, a; ret; }\n"
    kernels = "".join(
        f".visible .entry k{n}(.param .u64 p) {{ .reg .b32 v; .reg .b64 a; mov.u32 v, {n}; {adds * 5} "
        "call (v), twice, (v); ld.param.u64 a, [p]; st.global.u32 [a], v; ret; }\n"
        for n in range(12)
    )
    source = HEAD + shared + kernels
    assert sum(text.count("\n") for text in TranslatedModule(parse(source)).c_texts()) > SPLIT_LINES
    (tmp_path / "k.ptx").write_text(source)
    text = (
        "import sys, numpy\nfrom engine_device import Array, Device\n"
        f"device, a = Device(open({str(tmp_path / 'k.ptx')!r}).read()), Array(numpy.zeros(1, numpy.uint32))\n"
        "for n in sys.argv[1:]: device.launch('k' + n, 1, 1, a); print(a.host[0])\n"
    )
    path = os.pathsep.join([str(repository / "tests" / "support"), str(repository / "lib")])
    cache = tmp_path / "cache"
    environment = {**os.environ, "PYTHONPATH": path, "CUDASIM_CACHE": str(cache)}

    def run(*numbers: str) -> str:
        command = [sys.executable, "-c", text, *numbers]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert run("7", "7") == "1014\n1014\n"
    assert len(list(cache.glob("*.so"))) == 3  # the module, the kernel, the function with its neighbours
    assert run("7", "2") == "1014\n1004\n"
    assert len(list(cache.glob("*.so"))) == 4
    for part in cache.glob("*.*.*"):
        part.unlink()
    assert run("7") == "1014\n"  # made again
    assert len(list(cache.glob("*.so"))) == 3
    assert {file.suffix for file in cache.iterdir()} == {".so", ".c"}


def test_cache_is_private(tmp_path: Path, repository: Path) -> None:
    """The translation is kept in a directory that others cannot write to; one that they can is not used."""
    pytest.importorskip("numpy")
    text = (
        "import os, sys, time\nfrom engine_device import Device\n"
        f"begin = time.time(); Device({kernel('')!r}); print(time.time() - begin)\n"
    )
    path = os.pathsep.join([str(repository / "tests" / "support"), str(repository / "lib")])
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(home), "XDG_CACHE_HOME": str(cache)}
    environment.pop("CUDASIM_CACHE", None)

    def run() -> float:
        done = subprocess.run(
            [sys.executable, "-c", text], env=environment, check=True, capture_output=True, text=True
        )
        return float(done.stdout)

    cold = run()
    kept = cache / "gpubpf" / "cudasim"
    assert len(list(kept.iterdir())) == 1
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert run() < cold
    kept.chmod(0o777)
    run()
    assert len(list((home / ".cache" / "gpubpf" / "cudasim").iterdir())) == 1


def test_what_can_be_read_again_needs_no_register() -> None:
    """Parameters and special registers that are used late: a compiler reads them there. Sums are kept."""

    def registers(define: str) -> int:
        kept = "".join(define.format(n=n) for n in range(16))
        used = "".join(f"st.global.u64 [%a], %x{n};\n" for n in range(16))
        text = f""".version 8.0
.target sm_75
.address_size 64
.visible .entry k(.param .u64 p) {{
    .reg .b64 %a, %x<16>; .reg .b32 %t; .reg .pred %q;
    ld.param.u64 %a, [p]; mov.u32 %t, %tid.x;
{kept}
    setp.eq.u32 %q, %t, 0; @%q bra END;
    {used}
END: ret;
}}"""
        return estimated_registers(TranslatedModule(parse(text)).codes["k"].blocks)

    kept = registers("add.u64 %x{n}, %a, {n};\n")
    assert registers("ld.param.u64 %x{n}, [p];\n") == registers("mov.u64 %x{n}, {n};\n") < kept
    assert registers("mov.u64 %x{n}, %clock64;\n") == kept


def test_code_with_probes_is_compiled_at_a_lower_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    def compiler(arguments: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        seen.extend(a for a in arguments if a.startswith("-O"))
        return subprocess.CompletedProcess(arguments, 1, b"", b"no")

    texts = [translate(kernel(body)) for body in ("", "//gpubpf{\nmembar.gl;\n//gpubpf}")]
    monkeypatch.setattr(subprocess, "run", compiler)
    for text in texts:
        with pytest.raises(CompilerError):
            compile_c(text, str(tmp_path / "out.so"))
    assert seen == ["-O2", "-O1"]


@pytest.mark.parametrize(
    ("instruction", "accepted"),
    [
        ("st.global.u32 [c], %r1", False),
        ("st.u32 [c], %r1", False),
        ("st.const.u32 [c], %r1", False),
        ("st.const.u32 [%rd1], %r1", False),
        ("atom.add.u32 %r1, [c], 1", False),
        ("red.global.add.u32 [c], 1", False),
        ("ld.global.u32 %r1, [c]", False),
        ("ld.u32 %r1, [c]", False),
        ("ld.const.u32 %r1, [g]", False),
        ("ld.global.u32 %r1, [s]", False),
        ("st.shared.u32 [g], %r1", False),
        ("ld.const.u32 %r1, [c]", True),
        ("ld.u32 %r1, [g]", True),
        ("st.u32 [s], %r1", True),
        ("atom.shared::cta.add.u32 %r1, [s], 1", True),
        ("mov.u64 %rd1, c; st.global.u32 [%rd1], %r1", True),
        ("ld.global.u32 %r1, [p]", False),
        ("st.global.u32 [p], %r1", False),
        ("ld.u32 %r1, [p]", False),
        ("ld.param.u32 %r1, [s]", False),
        (".param .b32 q; ld.u32 %r1, [q]", False),
        ("ld.param::entry.u32 %r1, [p]", True),
        ("ldu.const.u32 %r1, [c]", False),
        ("ldu.shared.u32 %r1, [%rd1]", False),
        ("ldu.global.u32 %r1, [g]", True),
        ("atom.local.add.u32 %r1, [%rd1], 1", False),
    ],
)
def test_the_space_of_an_instruction_is_that_of_its_variable(
    instruction: str, accepted: bool, tmp_path: Path
) -> None:
    text = f""".version 8.3
.target sm_80
.address_size 64
.const .u32 c; .global .u32 g; .shared .u32 s;
.visible .entry k(.param .u32 p) {{ .reg .b32 %r<2>; .reg .b64 %rd<2>; {instruction}; ret; }}"""
    assert assembles(text, tmp_path) == accepted
    if accepted:
        TranslatedModule(parse(text))
    else:
        with pytest.raises(PtxError, match="State space"):
            TranslatedModule(parse(text))


@pytest.mark.parametrize(
    ("before", "body", "name"),
    [
        ("", ".reg .b32 a; .reg .b64 a;", "a"),
        ("", ".reg .b32 a; add.u32 a, a, a; .local .u32 a;", "a"),
        ("", ".reg .b32 a1; .reg .b64 a<5>;", "a1"),
        ("", ".reg .b64 a<5>; .reg .b32 a4;", "a4"),
        ("", ".reg .b64 a<5>; .reg .b32 a<9>;", "a0"),
        ("", ".reg .b32 a; a: ret;", "a"),
        ("", "a: ret; .shared .u32 a;", "a"),
        ("", "a: ret; a: ret;", "a"),
        ("", "{ .param .b32 q; .param .b32 q; }", "q"),
        ("", ".reg .b64 p;", "p"),
        (".shared .u32 a; .global .u32 a;", "", "a"),
        (".func a() { ret; } .func a() { ret; }", "", "a"),
        (".extern .global .u32 a[]; .visible .global .u32 a[2]; .func f(); .func f() { ret; }", "", ""),
        ("", ".reg .b64 a<5>; .reg .b32 a, a5; .reg .b32 a1<9>; { .reg .b32 a; a4: ret; }", ""),
    ],
)
def test_a_block_declares_a_name_once(before: str, body: str, name: str, tmp_path: Path) -> None:
    text = f""".version 8.0
.target sm_80
.address_size 64
{before}
.visible .entry k(.param .u32 p) {{ {body} ret; }}"""
    assert assembles(text, tmp_path) == (not name)
    if name:
        with pytest.raises(PtxError, match=rf"{name} is (declared|defined) twice"):
            TranslatedModule(parse(text))
    else:
        TranslatedModule(parse(text))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.param.u32 [p], %r1;", "Illegal to write to input parameter 'p'"),
        ("{ .local .u32 v; .global .u64 a = v; }", "the initialiser names v"),
        ("{ .reg .u32 v<2>; .global .u64 a = v1; }", "the initialiser names v1"),
    ],
)
def test_what_ptxas_refuses_of_parameters_and_initialisers(body: str, message: str, tmp_path: Path) -> None:
    text = f""".version 8.0
.target sm_80
.address_size 64
.global .u32 v, v1;
.visible .entry k(.param .u32 p) {{ .reg .b32 %r<2>; {body} ret; }}"""
    assert not assembles(text, tmp_path)
    with pytest.raises(PtxError, match=message):
        TranslatedModule(parse(text))


def assembles(text: str, directory: Path) -> bool:
    """Return whether ptxas accepts PTX."""
    (directory / "k.ptx").write_text(text)
    command = [need("ptxas"), "-arch=sm_80", "-o", directory / "k.cubin", directory / "k.ptx"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_values_that_live_within_a_block_count_as_registers() -> None:
    def registers(values: int) -> int:
        loads = "".join(f"ld.global.u32 %x{n}, [%a+{4 * n}];" for n in range(values))
        stores = "".join(f"st.global.u32 [%a+{4 * n}], %x{values - 1 - n};" for n in range(values))
        text = f""".version 8.0
.target sm_75
.address_size 64
.visible .entry k(.param .u64 p) {{ .reg .b64 %a; .reg .b32 %x<{values}>; ld.param.u64 %a, [p]; {loads} {stores} ret; }}"""
        return estimated_registers(TranslatedModule(parse(text)).codes["k"].blocks)

    assert registers(8) <= 16 and 96 <= registers(96) <= 112


def test_the_work_is_not_quadratic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is four times as long looks registers up about four times as often."""
    found = 0
    original = Register.__hash__

    def counted(register: Register) -> int:
        nonlocal found
        found += 1
        return original(register)

    def lookups(length: int) -> int:
        nonlocal found
        found = 0
        lines = [f"mov.u32 %k{n}, %ctaid.x; add.u32 %r1, %r1, %k{n};" for n in range(length)]
        translate(kernel(f".reg .b32 %k<{length}>; mov.u32 %r1, 0; " + " ".join(lines)))
        return found

    monkeypatch.setattr(Register, "__hash__", counted)
    assert lookups(400) < 5 * lookups(100)
