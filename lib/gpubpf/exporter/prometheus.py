"""Serve metrics to Prometheus, with its own Python package.

with Server("127.0.0.1", 9696, families) as server:
    print(server.url)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpubpf.errors import Error
from gpubpf.exporter.metrics import Family

_MADE = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class _Collector:
    """What the registry asks for metrics, in the thread of each scrape."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            made: Any = _MADE[family.kind](family.name, family.about, labels=family.labels)
            for labels, value in family.samples:
                made.add_metric(labels, value)
            yield made


class Server:
    """A server of metrics over HTTP, as a context manager. Raises Error if it cannot listen.

    address: name or address of the interface.
    port: 0: any free port.
    families: return the metrics; called from other threads.
    """

    def __init__(self, address: str, port: int, families: Callable[[], Iterable[Family]]) -> None:
        registry = CollectorRegistry()
        registry.register(_Collector(families))
        try:
            started = start_http_server(port, address, registry)
        except OSError as error:
            raise Error(
                f"cannot listen on {_shown(address, port)}: {error.strerror or error};"
                " choose another address or port with --listen"
            ) from None
        self._server: Any = started[0]
        self._thread: threading.Thread = started[1]
        self.url = f"http://{_shown(address, self._server.server_address[1])}/metrics"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _shown(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
