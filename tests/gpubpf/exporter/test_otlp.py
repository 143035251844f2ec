"""What an OpenTelemetry collector gets from `gpubpf exporter --otlp`. The collector is a gRPC server of the official protobufs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpubpf_cuda import build
from gpubpf_exporter import PROGRAM, Program, exporting, get, until

pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as service
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from gpubpf.exporter.metrics import Family
from gpubpf.exporter.otlp import Push


class Collector(service.MetricsServiceServicer):
    """Keeps the requests that it gets. With `slow`, it answers none."""

    def __init__(self, port: int = 0, slow: bool = False) -> None:
        self.requests: list[Any] = []
        self.slow, self.ended = slow, threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        service.add_MetricsServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert self.port
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        if self.slow:
            self.ended.wait()
        return messages.ExportMetricsServiceResponse()

    def close(self) -> None:
        self.ended.set()
        self._server.stop(None).wait()

    def points(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """The points of a metric in the latest request, by attributes."""
        for metric in self.metrics() if self.requests else ():
            if metric.name == name:
                points = (metric.sum if metric.HasField("sum") else metric.gauge).data_points
                return {
                    frozenset((a.key, a.value.string_value) for a in point.attributes): point.as_double
                    or point.as_int
                    for point in points
                }
        return {}

    def metrics(self) -> list[Any]:
        (resource,) = self.requests[-1].resource_metrics
        (scope,) = resource.scope_metrics
        return list(scope.metrics)


@contextlib.contextmanager
def collecting(**how: Any) -> Iterator[Collector]:
    made = Collector(**how)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def port_without_a_server() -> Iterator[int]:
    """A port that nobody else gets, but a gRPC server of this user may listen on."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_the_collector_gets_what_a_scrape_gets(tmp_path: Path) -> None:
    program = Program(build(PROGRAM, tmp_path / "napping"))
    url = "http://127.0.0.1:{}"
    with collecting() as collector:
        words = ("-p", str(program.pid), "--sample", "1", "--otlp", url.format(collector.port))
        with exporting(*words) as exporter:
            exporter.noticed(f"attached to {program.pid} (napping)\n")
            program.launch(100)
            scraped = exporter.wait_for(100, "gpubpf_kernel_measured_launches_total", kernel="nap")

            def arrived() -> float | None:
                found = collector.points("gpubpf_kernel_measured_seconds")
                return next(
                    (v for labels, v in found.items() if ("kernel", "nap") in labels and v > 0.09), None
                )

            assert until(arrived, exporter.notices) == get(
                scraped, "gpubpf_kernel_measured_seconds_total", kernel="nap"
            )
            assert exporter.end() == 0
    program.end()
    names = {metric.name for metric in collector.metrics()}
    assert {name.removesuffix("_total") for name, _ in scraped} - {"gpubpf_otlp_pushes"} == names
    by_name = {metric.name: metric for metric in collector.metrics()}
    counter, gauge = by_name["gpubpf_kernel_launches"], by_name["gpubpf_exporter_memory_bytes"]
    assert counter.sum.is_monotonic
    assert counter.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert gauge.HasField("gauge") and gauge.unit == "By"
    resource = {
        a.key: a.value.string_value for a in collector.requests[-1].resource_metrics[0].resource.attributes
    }
    assert resource["service.name"] == "gpubpf" and resource["host.name"] == socket.gethostname()


class Pushing:
    """A push every few milliseconds of a counter that counts how often it was asked for."""

    def __init__(self, port: int) -> None:
        self.asked = 0
        self.notices: list[str] = []
        self.push = Push(f"http://127.0.0.1:{port}", 0.02, self._families, self.notices.append)

    def _families(self) -> list[Family]:
        self.asked += 1
        return [Family("asked", "counter", "Calls.", (), [((), self.asked)])]


@contextlib.contextmanager
def pushing(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pushing]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    made = Pushing(port)
    made.push.start()
    try:
        yield made
    finally:
        made.push.close()


def test_a_collector_that_is_away_and_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with port_without_a_server() as port, pushing(port, monkeypatch) as made:
        until(lambda: made.push.failed >= 3)
        assert made.push.pushed == 0 and made.asked <= made.push.failed + 1, "nothing waits to be sent"
        with collecting(port=port) as collector:
            until(lambda: made.push.pushed >= 2)
            assert len(collector.requests) >= 2
            (latest,) = collector.points("asked").values()
            assert latest > 3, "the counter has what happened while the collector was away"
            until(lambda: len(made.notices) >= 2)
    assert len(made.notices) >= 2
    assert "does not answer" in made.notices[0] and "answers again" in made.notices[1]


def test_a_collector_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes fail after their time, one after the other; the end does not wait for the collector."""
    with collecting(slow=True) as collector:
        with pushing(collector.port, monkeypatch) as made:
            until(lambda: made.push.failed >= 2)
            before = threading.active_count()
            until(lambda: made.push.failed >= 4)
            assert threading.active_count() <= before + 4, "the server has four threads"
            assert made.push.pushed == 0 and made.asked <= made.push.failed + 1
        until(lambda: not made.push._thread.is_alive())


def test_what_answers_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that speaks neither HTTP/2 nor gRPC: each push fails, and the next one tries again."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(bytes(range(256)) * 10)

        pool.submit(answer)
        with pushing(server.getsockname()[1], monkeypatch) as made:
            until(lambda: made.push.failed >= 3)
            assert made.push.pushed == 0
        server.shutdown(socket.SHUT_RDWR)
    assert len(made.notices) == 1 and "does not answer, or refuses metrics" in made.notices[0]


def test_families_of_the_push_itself() -> None:
    made = Pushing(1)
    made.push.pushed, made.push.failed = 3, 2
    (family,) = made.push.families()
    assert dict(family.samples) == {("ok",): 3, ("failed",): 2}
    made.push.close()  # also if it never started


@pytest.mark.parametrize("url", ["localhost:4317", "http://", "ftp://a:1", "http://a:b", "http://a:99999"])
def test_wrong_urls_are_refused(url: str) -> None:
    import argparse

    from gpubpf.exporter.command import parse_endpoint

    with pytest.raises(argparse.ArgumentTypeError, match="must be a URL"):
        parse_endpoint(url)
    assert parse_endpoint("https://[::1]:4317") == "https://[::1]:4317"
