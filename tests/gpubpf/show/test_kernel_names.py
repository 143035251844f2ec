"""Kernel names that are too long for their column keep what tells them apart."""

from __future__ import annotations

import random

import pytest

from gpubpf import names
from gpubpf.show import table
from gpubpf.show.kernel_names import fitted, told_apart
from gpubpf_properties import generated

GEMM = "void cutlass::gemm<float, {}, cutlass::Layout<2, 4>, true>(cutlass::Params, float*)"


def shown(texts: list[str], width: int) -> list[str]:
    return list(fitted(texts, width).values())


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (90, [GEMM.format(64), GEMM.format(128)]),
        (82, [GEMM.format(64)[5:], GEMM.format(128)[5:]]),
        (60, [f"cutlass::gemm<float, {n}, cutlass::Layout<2, 4>, true>" for n in (64, 128)]),
        (20, ["cutlass::gemm<64>", "cutlass::gemm<128>"]),
        (10, ["gemm<64>", "gemm<128>"]),
        (8, ["gemm<64>", "gem...8>"]),
    ],
)
def test_what_all_share_goes_first(width: int, expected: list[str]) -> None:
    assert shown([GEMM.format(64), GEMM.format(128)], width) == expected


DISTANCES = "void ns::computePairwiseDistances<{}, {}, Layout>(float const*, int)"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (35, ["computePairwiseDistances<float, 8>", "computePairwiseDistances<float, 16>"]),
        (26, ["computeP...ances<float, 8>", "computeP...nces<float, 16>"]),
        (16, ["com...<float, 8>", "co...<float, 16>"]),
    ],
)
def test_a_long_name_is_cut_before_its_arguments(width: int, expected: list[str]) -> None:
    some = [DISTANCES.format(*arguments) for arguments in (("float", 8), ("float", 16), ("double", 8))]
    found = shown(some, width)
    assert found[:2] == expected and len(set(found)) == 3 and found[2].endswith("<double, 8>")


def test_cut_names_differ_in_front_of_equal_arguments() -> None:
    some = [f"layer_norm_{way}_kernel<{kind}, 128>" for way in ("fwd", "bwd") for kind in ("half", "int")]
    assert shown(some, 18) == [
        *("laye...fw...<half>", "laye...fwd...<int>"),
        *("laye...bw...<half>", "laye...bwd...<int>"),
    ]


def test_arguments_that_others_make_unnecessary_go() -> None:
    some = [f"gemm<Tile<{n}, 128>, Warp<{n}, 64>, {n}, {kind}>" for n in (8, 16) for kind in ("half", "int")]
    assert shown(some, 14) == ["gemm<8, half>", "gemm<8, int>", "gemm<16, half>", "gemm<16, int>"]


def test_long_arguments_lose_their_middle() -> None:
    some = [f"void pairwise<raft::{name}, 4>(int)" for name in ("L2ExpandedDistance", "CosineDistanceOp")]
    assert shown(some, 28) == ["pairwise<L2ExpandedDistance>", "pairwise<CosineDistanceOp>"]
    assert shown(some, 18) == ["pairwise<L2E...ce>", "pairwise<Cos...Op>"]


def test_overloads_keep_their_parameters() -> None:
    assert shown(["void f<4>(int*, int)", "void f<4>(float*, int)"], 16) == ["f(int*, int)", "f(float*, int)"]


def test_a_name_that_fits_stays_as_it_is() -> None:
    assert shown(["void f(int)", "void g<float, 4>(float*, float*)"], 11) == ["void f(int)", "g<float, 4>"]


def test_a_return_type_that_depends_on_an_argument() -> None:
    assert shown(["std::enable_if<((sizeof (int))>(2)), void>::type a::v1::gt<int>(int*)"], 12) == [
        "a::v1::gt"
    ]


def test_lambda_functions_keep_where_they_are() -> None:
    assert shown(["main::{lambda(int)#1}::operator()", "main::{lambda(int)#2}::operator()"], 33) == [
        "main::{lambda(int)#1}::operator()",
        "main::{lambda(int)#2}::operator()",
    ]


def test_the_node_of_a_graph_stays() -> None:
    assert shown(["1.2 void fill<float>(float)", "1.3 void fill<float>(float)"], 10) == [
        "1.2 fill",
        "1.3 fill",
    ]


def test_long_names_show_where_they_differ() -> None:
    some = [
        f"triton_red_fused_native_layer_norm_{what}_backward_tanh_add_0" for what in ("mul", "sum", "relu")
    ]
    assert shown(some, 24) == [
        "triton_r...mul_backwa...",
        "triton_r...sum_backwa...",
        "triton_r...relu_backw...",
    ]


def test_a_hash_tells_apart_what_a_column_cannot_hold() -> None:
    some = ["".join("ab"[n >> bit & 1] * 7 for bit in range(5)) for n in range(32)]
    labels = fitted(some, 12)
    assert len(set(labels.values())) == 32 and max(map(len, labels.values())) <= 12
    assert any("#" in label for label in labels.values())
    assert labels == fitted(some[::-1], 12)  # the order does not matter: labels of all reports are the same


def test_equal_names_of_two_files_end_with_a_hash() -> None:
    files = [f"_ZN36_GLOBAL__N__c239a62e_4_n_cu_0240802{n}4anonEPi" for n in (1, 2)]
    labels = names.labels(files)
    assert len(set(labels.values())) == 2
    for label in labels.values():
        assert label.startswith("(anonymous namespace)::anon(int*) #")
    narrow = names.labels(files, 12)
    assert len(set(narrow.values())) == 2
    assert all(label.startswith("anon #") and len(label) <= 12 for label in narrow.values())
    assert [label.partition(" ")[0] for label in names.labels(["_Z1fPi"], full=True).values()] == ["f(int*)"]


def test_control_characters_do_not_make_names_equal() -> None:
    assert len(set(names.labels(["a\n", "a\\n"]).values())) == 2


def test_told_apart_leaves_different_labels_alone() -> None:
    assert told_apart({"x": "a", "y": "b"}) == {"x": "a", "y": "b"}


def test_a_column_of_a_table_keeps_kernels_apart() -> None:
    kernels = [GEMM.format(n).replace("Layout<2, 4>", "Layout" * 12) for n in (64, 128)]
    lines = table.within([{"KERNEL": kernel, "N": "1"} for kernel in kernels], left=("KERNEL",))
    assert lines == ["KERNEL              N", "cutlass::gemm<64>   1", "cutlass::gemm<128>  1"]


def a_type(rng: random.Random, depth: int = 0) -> str:
    kind = rng.choice(
        ("int", "float", "bool", "4", "-1", "128", "(4>2)", "f(int)", "int (*)(int)", "A::B", "list")
    )
    if kind == "list" and depth < 3:
        return f"L<{', '.join(a_type(rng, depth + 1) for _ in range(rng.randrange(4)))}>"
    return kind if kind != "list" else "char"


def a_kernel(rng: random.Random) -> str:
    spaces = rng.choice(
        ("", "ns::", "ns::Outer<int>::", "(anonymous namespace)::", "a::very_long_namespace::")
    )
    name = rng.choice(
        ("f", "g", "gemm", "operator()", "a_rather_long_name_of_a_kernel_" + rng.choice("123") * 9)
    )
    arguments = [a_type(rng) for _ in range(rng.randrange(5))]
    template = f"<{', '.join(arguments)}>" if arguments else ""
    parameters = f"({', '.join(a_type(rng) for _ in range(rng.randrange(4)))})"
    returned = rng.choice(
        ("void ", "void ", "", "std::enable_if<(4>2), void>::type ", "1.2 void ", "decltype(x) ")
    )
    full = f"{returned if template else ''}{spaces}{name}{template}{parameters}"
    return rng.choice(
        (full, full, full, f"{spaces}{name}", f"{full} [clone .{rng.randrange(9)}]", f"{full} #3f")
    )


def anything(rng: random.Random) -> str:
    return "".join(rng.choice("ab#. <>(){}[],:") for _ in range(rng.randrange(1, 40)))


def test_many_names_in_the_narrowest_column() -> None:
    """Hashes of two and three digits are the same for some of them."""
    some = [f"{'ab'[number % 2]}{'x' * 20}{number}{'y' * 9}" for number in range(400)]
    labels = fitted(some, table.LEAST)
    assert len(set(labels.values())) == len(some)
    assert max(map(len, labels.values())) == table.LEAST
    assert any(label[-5] == "#" for label in labels.values())


@generated(150)
def test_different_names_look_different(rng: random.Random) -> None:
    make = rng.choice((a_kernel, a_kernel, anything))
    some = sorted({make(rng) for _ in range(rng.choice((1, 2, 5, 40, 200)))})
    width = rng.choice((table.LEAST, 10, 12, 16, 20, 40, 56, 80))
    labels = fitted(some, width)
    assert list(labels) == some
    assert len(set(labels.values())) == len(some)
    assert all(0 < len(label) <= width for label in labels.values())
    assert fitted(labels.values(), width) == {label: label for label in labels.values()}
