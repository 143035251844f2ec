"""A collector for OpenTelemetry's profiles: a gRPC server of the official protobufs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service
from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2_grpc as stubs


class Collector(stubs.ProfilesServiceServicer):
    """Keeps the requests that it gets. answer: what it answers; code: how it fails instead."""

    def __init__(self, answer: Any = None, code: Any = None) -> None:
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.answer, self.code = answer or service.ExportProfilesServiceResponse(), code
        self._server = grpc.server(ThreadPoolExecutor(2))
        stubs.add_ProfilesServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.headers.append(dict(context.invocation_metadata()))
        if self.code:
            context.abort(self.code, "no\nprofiles\x1b")
        return self.answer

    def close(self) -> None:
        self._server.stop(None).wait()


@contextlib.contextmanager
def collecting(**how: Any) -> Iterator[Collector]:
    made = Collector(**how)
    try:
        yield made
    finally:
        made.close()


def value(of: Any) -> str | int:
    return str(of.string_value) if of.HasField("string_value") else int(of.int_value)


def attributes_of(resource: Any) -> dict[str, str | int]:
    """Return the attributes of a resource."""
    return {one.key: value(one.value) for one in resource.resource.attributes}


def samples(request: Any) -> dict[tuple[int, str, int, tuple[str, ...]], int]:
    """The values by process, type, GPU and stack, outermost frame first."""
    words = request.dictionary
    found = {}
    for resource in request.resource_profiles:
        attributes = attributes_of(resource)
        for profile in resource.scope_profiles[0].profiles:
            kind = words.string_table[profile.sample_type.type_strindex]
            for sample in profile.samples:
                [gpu] = [words.attribute_table[at] for at in sample.attribute_indices]
                assert words.string_table[gpu.key_strindex] == "gpubpf.gpu"
                frames = []
                for place in words.stack_table[sample.stack_index].location_indices:
                    [line] = words.location_table[place].lines
                    function = words.function_table[line.function_index]
                    frames.append(words.string_table[function.name_strindex])
                key = int(attributes["process.pid"]), kind, int(value(gpu.value)), tuple(reversed(frames))
                assert key not in found
                [found[key]] = sample.values
    return found
