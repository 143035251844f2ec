"""The options that the tools share, as values."""

from __future__ import annotations

import argparse

import pytest

from gpubpf.show import cli
from gpubpf.show.parsed import (
    DeviceOptions,
    KernelOptions,
    Options,
    OutputOptions,
    RingOptions,
    SamplingOptions,
    TargetOptions,
    ThreadOptions,
)


def options_of(words: list[str], complete: bool) -> Options:
    """Parse a command line. complete: the tool has all shared options."""
    made = cli.parser("tool", "text", "examples")
    cli.add_targets(made)
    if complete:
        cli.add_kernels(made)
        cli.add_threads(made)
        cli.add_host_filters(made)
        cli.add_sampling(made)
        cli.add_device(made)
        cli.add_rings(made)
        cli.add_output(made)
    return Options.of(cli.parse(made, words))


@pytest.mark.parametrize("complete", [False, True])
def test_the_defaults_are_those_of_the_parser(complete: bool) -> None:
    expected = Options(
        TargetOptions(pids=[], files=[]), KernelOptions([], ranges=[]), output=OutputOptions("tool")
    )
    assert options_of([], complete) == expected


def test_each_group_has_its_options() -> None:
    words = [
        "--kernel",
        "a*",
        "--launch",
        "2:3",
        "--sample",
        "4",
        "--no-graphs",
        "--block",
        "1",
        "--comm",
        "c",
        "-t",
        "5",
    ]
    words += [
        "--sample-warps",
        "1/8",
        "--seed",
        "9",
        "--device",
        "sim",
        "--map-memory",
        "1M",
        "--ring-size",
        "2M",
    ]
    words += ["--ring", "gpu", "--json", "-T", "-v", "-d", "1.5", "--no-ptx-options", "--", "app", "-x"]
    every = ThreadOptions().thread
    assert options_of(words, complete=True) == Options(
        TargetOptions(["app", "-x"], [], [], ptx_options=False, duration=1.5),
        KernelOptions(["a*"], (2, 3), 4, graphs=False, ranges=[]),
        ThreadOptions(((1, 1), *every[1:]), comm="c", tid=5),
        SamplingOptions(warps=8, seed=9),
        DeviceOptions("sim", map_memory=1 << 20),
        RingOptions(2 << 20, "gpu"),
        OutputOptions("tool", json=True, timestamps=True, verbose=True),
    )


@pytest.mark.parametrize(
    "given, cupti", [({}, False), ({"cupti": None}, None), ({"cupti": ""}, ""), ({"cupti": False}, False)]
)
def test_none_is_the_default_except_for_cupti(given: dict[str, object], cupti: object) -> None:
    args = argparse.Namespace(launch=None, sample=None, device=None, **given)
    assert Options.of(args) == Options(device=DeviceOptions(cupti=cupti))  # type: ignore[arg-type]
