"""Serve metrics to Prometheus, with its own Python package.

with Server("127.0.0.1", 9696, families) as server:
    print(server.url)
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpubpf.errors import Error
from gpubpf.exporter.metrics import Family

_MADE = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
PATIENCE = 10.0  # seconds for a client to send its request, or to take the answer


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


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that went away."""


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each scrape."""


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
            family, _, _, _, bound = socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            made = type("Server", (_ThreadingServer,), {"address_family": family})
            self._server: WSGIServer = made(bound[:2], _Handler)
        except OSError as error:
            raise Error(
                f"cannot listen on {_shown(address, port)}: {error.strerror or error};"
                " choose another address or port with --listen"
            ) from None
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="gpubpf-http", daemon=True)
        self._thread.start()
        self.url = f"http://{_shown(address, self._server.server_address[1])}/metrics"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _shown(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
