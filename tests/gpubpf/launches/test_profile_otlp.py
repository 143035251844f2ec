"""What an OpenTelemetry collector gets from gpuprofile --otlp. The collector is a gRPC server of the official protobufs."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2_grpc")
import grpc
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service

from gpubpf.agent.definitions import Vendor
from gpubpf.launches import profile_otlp
from gpubpf.launches.frames import PYTHON, Frame, Stack
from gpubpf.launches.profile import StackRow
from gpubpf.launches.profile_otlp import ProfilePush
from gpubpf_otlp import attributes_of, collecting, samples

MAIN, STEP = Frame("main", "/bin/app"), Frame("step", "train.py", 7, PYTHON)
HOSTILE = "app\x1b[31m"
ROWS = [
    StackRow(1, 11, "app", 0, Vendor.NVIDIA, None, "_Z5scalePf", Stack((MAIN, STEP), True), 5000, 3),
    StackRow(1, 11, "app", 1, Vendor.NVIDIA, None, "_Z5scalePf", Stack((MAIN, STEP), True), 70, 1),
    StackRow(2, 22, HOSTILE, 0, Vendor.AMD, 64, "_Z3addPf", Stack((MAIN,), False), 9, 2),
]


def send(port: int, rows: list[StackRow] = ROWS) -> str:
    push = ProfilePush(f"http://127.0.0.1:{port}")
    try:
        return push.send(rows, 2_000_000, 500_000)
    finally:
        push.close()


def profiles(request: Any) -> list[Any]:
    return [one for resource in request.resource_profiles for one in resource.scope_profiles[0].profiles]


def test_the_collector_gets_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    with collecting() as collector:
        assert send(collector.port) == ""
    [request] = collector.requests
    scale, add = ("main", "step", "scale"), ("[incomplete]", "main", "add")
    assert samples(request) == {
        (11, "gpu_time", 0, scale): 5000,
        (11, "gpu_time", 1, scale): 70,
        (11, "launches", 0, scale): 3,
        (11, "launches", 1, scale): 1,
        (22, "gpu_time", 0, add): 9,
        (22, "launches", 0, add): 2,
    }
    assert {(one.time_unix_nano, one.duration_nano) for one in profiles(request)} == {(1_500_000, 500_000)}
    assert len({one.profile_id for one in profiles(request)}) == 4
    attributes = attributes_of(request.resource_profiles[1])
    assert attributes["process.executable.name"] == r"app\x1b[31m"
    assert attributes["host.name"] == socket.gethostname() and attributes["service.name"] == "gpubpf"
    assert collector.headers[0]["api-key"] == "secret"


def test_the_dictionary_has_each_entry_once_and_none_first() -> None:
    words = profile_otlp.request(ROWS * 2, 1, 1).dictionary
    assert words.string_table[0] == "" and len({*words.string_table}) == len(words.string_table)
    tables = ("mapping", "location", "function", "link", "attribute", "stack")
    for table in (getattr(words, f"{name}_table") for name in tables):
        assert not table[0].ByteSize(), "entry 0 means: none"
        entries = [one.SerializeToString(deterministic=True) for one in table]
        assert len({*entries}) == len(entries)
    assert len(words.stack_table) == 3, "the stacks of one kernel on two GPUs are the same"
    lines = [line.line for place in words.location_table for line in place.lines]
    assert sorted(lines)[-1] == 7


def test_what_the_collector_refuses_is_one_line() -> None:
    with collecting(code=grpc.StatusCode.UNIMPLEMENTED) as collector:
        assert send(collector.port) == "unimplemented: no"
    answer = service.ExportProfilesServiceResponse()
    answer.partial_success.rejected_profiles = 2
    answer.partial_success.error_message = "too\x1b old"
    with collecting(answer=answer) as collector:
        assert send(collector.port) == r"2 profiles rejected: too\x1b old"
        assert send(collector.port, []) == "" and len(collector.requests) == 1, "nothing to push"


def test_a_collector_that_is_away() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        said = send(taken.getsockname()[1])
    assert said.startswith("unavailable: ") and "\n" not in said


def test_what_answers_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that speaks neither HTTP/2 nor gRPC."""
    monkeypatch.setattr(profile_otlp, "PATIENCE", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(bytes(range(256)) * 10)

        pool.submit(answer)
        try:
            said = send(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
    assert said and "\n" not in said
