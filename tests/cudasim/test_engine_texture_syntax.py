"""Which forms of texture fetches and queries exist: the device takes none that ptxas refuses, and names why it refuses others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from cudasim.translate.program import TranslatedModule
from engine_forms import HEAD, kernel, legal
from gpubpf.ptx.parser import parse

# The elements of the operands for coordinates, derivatives and offsets. Vectors of three elements have a fourth.
GEOMETRIES = {
    "1d": (1, 1, 1), "2d": (2, 2, 2), "3d": (4, 4, 4), "a1d": (2, 1, 1), "a2d": (4, 2, 2), "cube": (4, 4, 0), "acube": (4, 4, 0),
    "2dms": (4, 2, 0), "a2dms": (4, 2, 0),
}  # fmt: skip
DESTINATIONS = {
    "v4.s32": (32, 4), "v4.f32": (32, 4), "v4.f16": (16, 4), "v2.f16x2": (32, 2),
}  # fmt: skip
QUERIES = (
    "width height depth channel_data_type channel_order normalized_coords array_size num_mipmap_levels num_samples"
    " filter_mode addr_mode_0 force_unnormalized_coords"
).split()
DEPTH = "%x32_8"  # that is compared


def vector(width: int, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%x{width}_{k}" for k in range(first, first + count)) + "}"


def fetches() -> Iterator[str]:
    for (geometry, counts), (t, destination), coordinate in itertools.product(
        GEOMETRIES.items(), DESTINATIONS.items(), ("s32", "f32")
    ):
        to, place = vector(*destination), f"[%x64_1, {vector(32, counts[0])}]"
        slope, offset = vector(32, counts[1], 4), vector(32, counts[2], 4)
        for operation, given in (
            ("tex", ""), ("tex.base", ""), ("tex.level", ", %x32_5"), ("tex.grad", f", {slope}, {slope}"),
        ):  # fmt: skip
            name = f"{operation}.{geometry}.{t}.{coordinate}"
            yield f"{name} {to}, {place}{given};"
            yield f"{name} {to}|%x0_1, {place}{given};"
            yield f"{name} {to}, {place}{given}, {DEPTH};"
            if counts[2]:
                yield f"{name} {to}, {place}{given}, {offset};"
                yield f"{name} {to}, {place}{given}, {offset}, {DEPTH};"
        for component in "ra":
            name = f"tld4.{component}.{geometry}.{t}.{coordinate}"
            yield from (f"{name} {to}, {place}{given};" for given in ("", f", {DEPTH}", f", {offset}"))


def queries() -> Iterator[str]:
    for query in QUERIES:
        yield f"txq.{query}.b32 %x32_0, [%x64_1];"
        yield f"suq.{query}.b32 %x32_0, [%x64_1];"
        yield f"txq.level.{query}.b32 %x32_0, [%x64_1], %x32_1;"


def why(form: str) -> str:
    """Return why the device refuses a form that PTX has; "" if the device runs it."""
    name = form.split()[0].split(".")
    if name[0] in ("txq", "suq"):
        known = {"width", "height", "depth", "array_size", "num_mipmap_levels"}
        return "" if known.intersection(name) else "the answer depends on the source language"
    if {"2dms", "a2dms"}.intersection(name):
        return "no function of CUDA creates a texture with several samples for each texel"
    if name[0] == "tld4" and {"cube", "acube"}.intersection(name):
        return "four texels of a cubemap may be on several faces"
    return "CUDA's textures have no function that compares depths" if DEPTH in form else ""


def test_the_forms(tmp_path: Path) -> None:
    forms = [*fetches(), *queries()]
    module = TranslatedModule(parse(HEAD + "".join(kernel(f"k{n}", form) for n, form in enumerate(forms))))
    refused = {form: module.refused.get(f"k{n}", "") for n, form in enumerate(forms)}
    of_ptxas = set(legal(tmp_path, forms))
    assert len(forms) - 200 > len(of_ptxas) > 600
    assert [form for form, reason in refused.items() if form not in of_ptxas and not reason] == []
    for form in of_ptxas:
        assert refused[form].endswith(f": {why(form)}") if why(form) else not refused[form], form
