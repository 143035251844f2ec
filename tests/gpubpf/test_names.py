"""Names as users write them, from names as compilers write them."""

from __future__ import annotations

import string
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpubpf import names

SHORT = {
    "_Z9vectorAddPKfS0_Pfi": "vectorAdd",
    "_ZN2ns5scaleIfEEvPT_S1_i": "ns::scale",
    "vectorAdd": "vectorAdd",
    "_ZN36_GLOBAL__N__c239a62e_4_n_cu_024080215anontIiEEvPT_": "(anonymous namespace)::anont",
    "_ZN36_GLOBAL__N__c239a62e_4_n_cu_024080214anonEPi": "(anonymous namespace)::anon",
    "_ZN1a2v12auILi5ELb1EEEvPi": "a::v1::au",
    "_ZN1a2v12gtIiEENSt9enable_ifIXgtstT_Li2EEvE4typeEPS3_": "a::v1::gt",
    "_ZN1a2v15applyIZ4mainEUlPiE_EEvT_S2_": "a::v1::apply",
    "_Z2ttI3BoxiEvT_IT0_EPi": "tt",
    "triton_poi_fused_add_0": "triton_poi_fused_add_0",
    "add_kernel_0d1d2d3de": "add_kernel_0d1d2d3de",
    "_ZN8__main__3addB2v1B96cw51cXTLSUwv1sDUaKthaYF4ADEPdd": None,  # numba: anything, but no error
    "_RNvCs1234_7mycrate3foo": "_RNvCs1234_7mycrate3foo",
    "_ZN4core3fmt3num52_$LT$impl$u20$core..fmt..Debug$u20$for$u20$i32$GT$3fmt17h0123456789abcdefE": None,
    "_Z": "_Z",
    "_Zweird\udcff": "_Zweird\udcff",
}


@pytest.mark.parametrize("mangled", SHORT)
def test_demangle(mangled: str) -> None:
    name = names.demangle(mangled)
    assert name.mangled == mangled and name.short
    if SHORT[mangled] is not None:
        assert name.short == SHORT[mangled]


@pytest.mark.parametrize(
    "mangled, full",
    [
        ("__nv_static_25__36cc2ce6_4_v_cu_1cad6548__Z6hiddenPi", "hidden(int*)"),
        (
            "__nv_static_32__bc9dad68_11_language_cu_weights__ZN6shapes43_GLOBAL__N__bc9dad68_11_language_cu_weights5applyEPi",
            "shapes::(anonymous namespace)::apply(int*)",
        ),
        ("__nv_static_25__36cc2ce6_4_v_cu_1cad6548_plain", "plain"),
        ("_ZL6hiddenPi.intern.91a9f1f0af28ab7e", "hidden(int*)"),
        ("_ZL6hiddenPi__static__91a9f1f0af28ab7e", "hidden(int*)"),
        *(
            (name, name)
            for name in ("__nv_static_99__short__Z6hiddenPi", "__nv_static_5_", "__nv_static_3_abc_")
        ),
    ],
)
def test_static_names_of_code_that_is_linked_on_the_device(mangled: str, full: str) -> None:
    name = names.demangle(mangled)
    assert (name.mangled, name.full, name.short) == (mangled, full, full.partition("(int")[0])


def test_the_files_of_static_names() -> None:
    assert names.file_of_static("__nv_static_25__36cc2ce6_4_v_cu_1cad6548__Z6hiddenPi") == "v.cu"
    name = "__nv_static_32__bc9dad68_11_language_cu_weights__ZN6shapes5applyEPi"
    assert names.file_of_static(name) == "language.cu"
    for other in ("weights", "__nv_static_5_", "__nv_static_25__36cc2ce6_4_"):
        assert names.file_of_static(other) == ""


@pytest.mark.parametrize(
    "full, short",
    [
        ("void foo<int>(float*)", "foo"),
        ("void ns::Outer<int>::Inner<float, ns::T<int> >::run<4>(int)", "ns::Outer::Inner::run"),
        ("unsigned long long foo<int>(int)", "foo"),
        ("main::{lambda(int)#1}::operator()(int) const", "main::{lambda(int)#1}::operator()"),
        ("void launch<main::{lambda(int)#1}>(main::{lambda(int)#1})", "launch"),
        ("{unnamed type#1}::f(int)", "{unnamed type#1}::f"),
        ("bool operator< <int>(A<int> const&, A<int> const&)", "operator<"),
        ("bool ns::operator<(ns::A const&, ns::A const&)", "ns::operator<"),
        ("ns::A::operator()(int) const", "ns::A::operator()"),
        ("std::ostream& ns::operator<< <int>(std::ostream&, int)", "ns::operator<<"),
        ("A::operator->() const", "A::operator->"),
        ("A::operator->*(int) const", "A::operator->*"),
        ("A::operator[](int)", "A::operator[]"),
        ("A::operator new[](unsigned long)", "A::operator new[]"),
        ("A::operator int() const", "A::operator int"),
        ("A::operator std::vector<int>() const", "A::operator std::vector"),
        ("A::operator unsigned long const*()", "A::operator unsigned long const*"),
        ('operator"" _km(long double)', 'operator"" _km'),
        ("auto A::operator<=><int>(A const&)", "A::operator<=>"),
        ("decltype ((fp+fp0)) add<int>(int, int)", "add"),
        ("decltype((fp)->x) ns::get<A>(A*)", "ns::get"),
        ("int (*choose<int>(float))(double)", "choose"),
        ("void f<(4>2)>(int)", "f"),
        ("void f<&(A::operator>(A const&))>(int)", "f"),
        ("void f<std::function<int (int)> >(int)", "f"),
        ("foo[abi:cxx11](int)", "foo"),
        ("foo(int) [clone .isra.0]", "foo"),
        ("my_operator(int)", "my_operator"),
        ("operators(int)", "operators"),
        (
            "(anonymous namespace)::A<(anonymous namespace)::B>::f((anonymous namespace)::B)",
            "(anonymous namespace)::A::f",
        ),
        ("vtable for ns::A", "ns::A"),
        ("f", "f"),
        ("", ""),
    ],
)
def test_shorten(full: str, short: str) -> None:
    assert names.shorten(full) == short


@pytest.mark.parametrize(
    "text", ["f<", "f(", "f{", "operator", "<", ">", "(", "a<b<c", "f<(>", "((((", "} ] )", " ", "operator<"]
)
def test_shorten_stands_anything(text: str) -> None:
    assert isinstance(names.shorten(text), str)


def test_matches() -> None:
    assert names.matches(["vec*"], "_Z9vectorAddPKfS0_Pfi")
    assert names.matches(["x", "ns::*"], "_ZN2ns5scaleIfEEvPT_S1_i")
    assert names.matches(["_ZN2ns5scaleIfEEvPT_S1_i"], "_ZN2ns5scaleIfEEvPT_S1_i")
    assert not names.matches(["scale"], "_ZN2ns5scaleIfEEvPT_S1_i")
    assert not names.matches(["VEC*"], "_Z9vectorAddPKfS0_Pfi")
    assert not names.matches(["_ZN2*"], "_ZN2ns5scaleIfEEvPT_S1_i")
    assert not names.matches([], "f")


def doubled(times: int) -> str:
    """f(A<A<…>, A<…>>): its demangled form doubles with each turn."""
    digits = string.digits + string.ascii_uppercase
    return "_Z1f1AIiiE" + "".join(f"S_IS{digits[i]}_S{digits[i]}_E" for i in range(times))


def test_a_name_that_stands_for_gigabytes_is_left_as_it_is() -> None:
    bomb = doubled(30)
    assert len(bomb) < 350
    start = time.monotonic()
    assert names.demangle(bomb).short == bomb
    assert time.monotonic() - start < 100


def test_complicated_names_before_and_after_one_that_is_too_much() -> None:
    many = [f"_ZN2ns{len(n)}{n}" + "IiEEvT_" + "S1_" * 40 for n in ("alpha", "beta")]
    found = names.demangle_all(
        [many[0], doubled(31), many[1], "_Z9vectorAddPKfS0_Pfi", "_Z1f" + "S_" * 40 + "\n"]
    )
    assert [name.short for name in found][:4] == ["ns::alpha", doubled(31), "ns::beta", "vectorAdd"]
    assert [name.mangled for name in found][:3:2] == many


def test_the_helper_serves_many_threads_and_quickly() -> None:
    many = [f"_ZN2ns5k{i:04}" + "IiEEvT_" + "S1_" * 40 for i in range(400)]
    names.demangle(many[0])
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        shorts = [name.short for name in pool.map(names.demangle, many)]
    assert shorts == [f"ns::k{i:04}" for i in range(400)]
    assert time.monotonic() - start < 20


def test_the_helper_takes_no_module_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "threading", "gpubpf"):
        (tmp_path / f"{name}.py").write_text("open('taken', 'w')\n")
    monkeypatch.chdir(tmp_path)
    helper = names._Helper()
    assert helper.demangle("_ZN2ns5scaleIfEEvPT_S1_i") == "void ns::scale<float>(float*, float, int)"
    helper._stop()
    assert not (tmp_path / "taken").exists()


def test_without_libstdcxx_cxxfilt_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cxxfilt")
    monkeypatch.setattr(names, "_cxa_demangle", lambda: None)
    assert names._cxxfilt("_ZN2ns5scaleIfEEvPT_S1_i") == "void ns::scale<float>(float*, float, int)"
    assert names._cxxfilt("_Z") == "_Z"


def test_labels_of_kernels_that_come_one_by_one() -> None:
    found = names.Labels(ascii=True)
    assert found.label("_Z4fillIfEvT_", 12) == "fill"
    assert found.label("_Z4fillIiEvT_", 12) == "fill<int>"
    assert found.label("_Z4fillIfEvT_") == "fill<float>(float)"
    assert found.label("h\u00f6he", 12) == "h\\xf6he"
    assert found.cut("h\\xf6he", 6) == "h\\...e" and found.cut("another", 6) == "an...r"


def test_labels_tell_kernels_of_one_name_apart():
    assert names.labels(["_Z4fillIfEvT_", "_Z4fillIiEvT_", "_Z4copyPf"]) == {
        "_Z4fillIfEvT_": "fill<float>(float)",
        "_Z4fillIiEvT_": "fill<int>(int)",
        "_Z4copyPf": "copy",
    }
