"""Push a profile to an OpenTelemetry collector over OTLP (gRPC), by OpenTelemetry's own messages.

    push = ProfilePush("http://collector:4317")
    push.send(rows, ended_ns=time.time_ns(), duration_ns=10**9)
    push.close()

OpenTelemetry's signal for profiles is an alpha version (opentelemetry-proto, profiles/v1development), which may still change. The
messages are those of the installed package. Each process has a resource of its own, with two profiles: GPU time and launches.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from gpubpf import __version__
from gpubpf.errors import Error
from gpubpf.launches.frames import NATIVE, PYTHON
from gpubpf.launches.profile import StackRow
from gpubpf.launches.profile_files import frames_of
from gpubpf.show.table import printable

PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"  # what pip calls it
try:
    import grpc
    from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service
    from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2_grpc import (
        ProfilesServiceStub,
    )
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.profiles.v1development import profiles_pb2 as messages
    from opentelemetry.util.re import parse_env_headers
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"No module named '{PACKAGE}'", name=PACKAGE) from None

PATIENCE = 10.0  # seconds for the collector to answer
TYPES = (
    ("gpu_time", "nanoseconds", "gpu_ns"),
    ("launches", "count", "launches"),
)  # name, unit, value of a row
_KINDS = {NATIVE: "native", PYTHON: "cpython"}  # profile.frame.type of OpenTelemetry's semantic conventions
_Key = TypeVar("_Key", bound=Hashable)


class _Table(Generic[_Key]):
    """A table of the dictionary, in which each entry is there once. Entry 0 means: none."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        self._numbers: dict[_Key, int] = {}

    def number(self, key: _Key, entry: Any) -> int:
        """Return the index of an entry, which is added if it is new."""
        if key not in self._numbers:
            self._numbers[key] = len(self._entries)
            self._entries.append(entry)
        return self._numbers[key]


class Dictionary:
    """What the profiles of a request share: strings, functions, locations, stacks and attributes. whole: the message."""

    def __init__(self) -> None:
        self.whole = messages.ProfilesDictionary()
        for table, none in (
            (self.whole.mapping_table, messages.Mapping()),
            (self.whole.location_table, messages.Location()),
            (self.whole.function_table, messages.Function()),
            (self.whole.link_table, messages.Link()),
            (self.whole.attribute_table, messages.KeyValueAndUnit()),
            (self.whole.stack_table, messages.Stack()),
        ):
            table.append(none)
        self.whole.string_table.append("")
        self._strings: _Table[str] = _Table(self.whole.string_table)
        self._functions: _Table[tuple[str, str]] = _Table(self.whole.function_table)
        self._locations: _Table[tuple[Any, ...]] = _Table(self.whole.location_table)
        self._stacks: _Table[tuple[int, ...]] = _Table(self.whole.stack_table)
        self._attributes: _Table[tuple[str, str | int]] = _Table(self.whole.attribute_table)

    def string(self, text: str) -> int:
        shown = printable(text)
        return self._strings.number(shown, shown) if shown else 0

    def attribute(self, name: str, value: str | int) -> int:
        made = messages.KeyValueAndUnit(key_strindex=self.string(name), value=_value(value))
        return self._attributes.number((name, value), made)

    def stack(self, row: StackRow) -> int:
        """Return the index of the stack of a row, with the kernel as the innermost frame."""
        places = []
        for frame in frames_of(row):
            function = messages.Function(
                name_strindex=self.string(frame.name), filename_strindex=self.string(frame.file)
            )
            line = messages.Line(
                function_index=self._functions.number((frame.name, frame.file), function),
                line=frame.line or 0,
            )
            made = messages.Location(lines=[line])
            if kind := _KINDS.get(frame.kind):
                made.attribute_indices.append(self.attribute("profile.frame.type", kind))
            places.append(self._locations.number(tuple(frame), made))
        places.reverse()  # the innermost first
        return self._stacks.number(tuple(places), messages.Stack(location_indices=places))


def request(rows: Iterable[StackRow], ended_ns: int, duration_ns: int) -> Any:
    """Return the message for the collector.

    ended_ns: when the measurement ended, since 1970.
    duration_ns: how long it took.
    """
    dictionary = Dictionary()
    by_process: dict[int, list[StackRow]] = {}
    for row in rows:
        by_process.setdefault(row.process, []).append(row)
    made = service.ExportProfilesServiceRequest()
    for own in by_process.values():
        resource = made.resource_profiles.add()
        attributes: dict[str, str | int] = {
            "service.name": "gpubpf",
            "service.version": __version__,
            "host.name": socket.gethostname(),
            "process.pid": own[0].pid,
            "process.executable.name": printable(own[0].comm),
        }
        resource.resource.attributes.extend(
            KeyValue(key=name, value=_value(value)) for name, value in attributes.items()
        )
        scope = resource.scope_profiles.add()
        scope.scope.name, scope.scope.version = "gpubpf", __version__
        for name, unit, value in TYPES:
            profile = scope.profiles.add(
                time_unix_nano=ended_ns - duration_ns, duration_nano=duration_ns, profile_id=os.urandom(16)
            )
            profile.sample_type.type_strindex = dictionary.string(name)
            profile.sample_type.unit_strindex = dictionary.string(unit)
            for row in own:
                gpu = dictionary.attribute("gpubpf.gpu", row.gpu)
                profile.samples.add(
                    stack_index=dictionary.stack(row), values=[getattr(row, value)], attribute_indices=[gpu]
                )
    made.dictionary.CopyFrom(dictionary.whole)
    return made


def _value(value: str | int) -> Any:
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value)


class ProfilePush:
    """A connection to a collector.

    endpoint: http://HOST:PORT, or https:// for TLS. The variable OTEL_EXPORTER_OTLP_HEADERS applies.

    Raises Error if the installed messages are those of another version.
    """

    def __init__(self, endpoint: str) -> None:
        if not hasattr(messages.ProfilesDictionary(), "stack_table"):
            raise Error(f"--otlp needs newer messages for profiles; update the Python package {PACKAGE}")
        url = urlsplit(endpoint)
        target = f"{url.hostname if ':' not in str(url.hostname) else f'[{url.hostname}]'}:{url.port or 4317}"
        secure = url.scheme == "https"
        self._channel = (
            grpc.secure_channel(target, grpc.ssl_channel_credentials())
            if secure
            else grpc.insecure_channel(target)
        )
        self._headers = tuple(
            parse_env_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""), liberal=True).items()
        )

    def send(self, rows: Sequence[StackRow], ended_ns: int, duration_ns: int) -> str:
        """Push a profile; see `request`. Return why the collector did not take all of it; "" if it did."""
        if not rows:
            return ""
        stub = ProfilesServiceStub(self._channel)
        try:
            answer = stub.Export(
                request(rows, ended_ns, duration_ns), timeout=PATIENCE, metadata=self._headers
            )
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            return f"{code.name.lower().replace('_', ' ')}: {printable((details or '').split(chr(10))[0])}"
        rejected = answer.partial_success
        if rejected.rejected_profiles:
            return f"{rejected.rejected_profiles} profiles rejected: {printable(rejected.error_message)}"
        return ""

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
