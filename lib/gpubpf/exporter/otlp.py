"""Push metrics to an OpenTelemetry collector over OTLP (gRPC), with OpenTelemetry's own Python packages.

push = Push("http://collector:4317", 10.0, families, note)
push.start()
push.close()

Each push has the latest counts of all series, since the exporter's start. So nothing waits to be sent, however long the collector does
not answer, and a push that fails only makes the curves coarser.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from gpubpf import __version__
from gpubpf.exporter.metrics import Family

try:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Metric,
        MetricExportResult,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ModuleNotFoundError:
    package = "opentelemetry-exporter-otlp-proto-grpc"  # what pip calls it
    raise ModuleNotFoundError(f"No module named '{package}'", name=package) from None

_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}  # by the end of a metric's name; UCUM
_CLOSE_WAIT = 1.0  # seconds for a push that is under way when the exporter ends


class Push:
    """Pushes metrics in a thread of its own.

    endpoint: http://HOST:PORT, or https:// for TLS. Environment variables of OpenTelemetry, such as OTEL_EXPORTER_OTLP_HEADERS, apply.
    every: seconds between pushes.
    families: return the metrics; called from the thread.
    note: gets a notice when pushes begin to fail, and when they succeed again.
    """

    def __init__(
        self,
        endpoint: str,
        every: float,
        families: Callable[[], Iterable[Family]],
        note: Callable[[str], None],
    ) -> None:
        log = logging.getLogger("opentelemetry")
        log.addHandler(logging.NullHandler())  # it would print a line for each attempt
        log.propagate = False
        self._endpoint, self._every, self._get, self._note = endpoint, every, families, note
        self._exporter = OTLPMetricExporter(endpoint=endpoint)
        self._resource = Resource.create(
            {"service.name": "gpubpf", "service.version": __version__, "host.name": socket.gethostname()}
        )
        self._started = time.time_ns()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpubpf-otlp", daemon=True)
        self.pushed = self.failed = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the pushes. Wait a moment for one that is under way."""
        self._ending.set()
        self._exporter.shutdown(timeout_millis=0)
        if self._thread.ident is not None:  # it was started
            self._thread.join(_CLOSE_WAIT)

    def families(self) -> Iterator[Family]:
        """Yield the metrics about the pushes themselves."""
        samples = [(("ok",), self.pushed), (("failed",), self.failed)]
        yield Family(
            "gpubpf_otlp_pushes", "counter", "Pushes to the OpenTelemetry collector.", ("result",), samples
        )

    def _run(self) -> None:
        failing = False
        while not self._ending.wait(self._every):
            result = self._exporter.export(self._data())
            ok = result is MetricExportResult.SUCCESS
            self.pushed += ok
            self.failed += not ok
            if ok == failing and not self._ending.is_set():
                again = (
                    "answers again" if ok else "does not answer, or refuses metrics; the exporter tries again"
                )
                self._note(f"the OpenTelemetry collector at {self._endpoint} {again}")
            failing = not ok

    def _data(self) -> MetricsData:
        now = time.time_ns()
        metrics = [_metric(family, self._started, now) for family in self._get() if family.samples]
        scope = ScopeMetrics(InstrumentationScope("gpubpf", __version__), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])


def _metric(family: Family, started: int, now: int) -> Metric:
    points = [
        NumberDataPoint(dict(zip(family.labels, labels, strict=True)), started, now, value)
        for labels, value in family.samples
    ]
    unit = _UNITS.get(family.name.rpartition("_")[2], "1")
    data: Sum | Gauge = Gauge(points)
    if family.kind == "counter":
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return Metric(family.name, family.about, unit, data)
