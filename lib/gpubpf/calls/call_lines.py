"""A line for each call or dispatch, as text, JSON or CSV."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

from gpubpf.calls.call_fields import CALL
from gpubpf.calls.records import HEX, SHAPES, map_distinct
from gpubpf.record import Record
from gpubpf.show import cli, table
from gpubpf.show.table import us, with_unit

if TYPE_CHECKING:
    from gpubpf.calls.records import CallGroup

_HANDLE = re.compile(r"0x[0-9a-f]{4,}([0-9a-f]{4})\b")
LEAST_NAME = 12  # minimum columns of a function's name in a line that is too long


class CallColumns(Record):
    """The columns of lines for calls.

    origin_ns: the CLOCK_BOOTTIME that is shown as 0.
    several: the calls come from several processes.
    clock_ns: how far CLOCK_REALTIME is ahead of CLOCK_BOOTTIME, to show the time of day; None: show the time since
        `origin_ns`.
    whole: never cut names, however long a line gets.
    cut: shortens the name of a kernel to a number of columns.
    """

    origin_ns: int
    several: bool
    clock_ns: int | None = None
    whole: bool = False
    cut: Callable[[str, int], str] = table.fit

    @property
    def header(self) -> str:
        when = f"{'TIME':<15}" if self.clock_ns is not None else f"{'TIME s':>10}"
        who = f"{'PID':>7} {'COMM':<8}" if self.several else f"{'TID':>7}"
        return f"{when} {who} {'LAT us':>7} {'OFF-CPU':>7}  CALL"

    def when(self, ns: int) -> str:
        """Return the cell for a time on CLOCK_BOOTTIME."""
        if self.clock_ns is None:
            return f"{(ns - self.origin_ns) / 1e9:>10.6f}"
        seconds, rest = divmod(ns + self.clock_ns, 1_000_000_000)
        return f"{_clock(seconds)}.{rest // 1000:06}"

    def who(self, pid: int, comm: str, tid: int | str) -> str:
        """Return the cells for the process, or for the thread if there is only one process."""
        return f"{pid:>7} {table.fit(comm, 8):<8}" if self.several else f"{tid:>7}"


@lru_cache(maxsize=8)
def _clock(seconds: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def text_lines(group: CallGroup, columns: CallColumns) -> list[str]:
    """Return a line of text for each call."""
    fields = group.fields
    threads = list(zip(fields["pid"], fields["comm"], fields["tid"], strict=True))
    values = (
        map(columns.when, fields["ts_ns"]),
        map_distinct(lambda thread: cli.printable(columns.who(*thread)), threads),
        map(us, fields["lat_ns"]),
        [us(ns) if ns else "-" for ns in fields["off_cpu_ns"]],
    )
    text, more = _call_format(group)
    made = list(map(f"%s %s %7s %7s  {text}\n".__mod__, zip(*values, *more, strict=True)))
    if not columns.whole and max(map(len, made), default=0) > table.WIDTH + 1:
        api = str(fields["api"])
        kernels = map_distinct(cli.printable, fields["kernel"]) if "kernel" in fields else repeat("")
        for place, (text, kernel) in enumerate(zip(call_texts(group), kernels, strict=False)):
            if (too_long := len(made[place]) - 1 - table.WIDTH) > 0:
                start = made[place][: -1 - len(text)]
                made[place] = f"{start}{_shorter(text, api, kernel, too_long, columns.cut)}\n"
    return made


def _shorter(text: str, api: str, kernel: str, too_long: int, cut: Callable[[str, int], str]) -> str:
    """Shorten a text of `call_texts` by `too_long` columns: keep four digits of handles, then cut names in the
    middle, the kernel's first.

    Return the text unchanged if that is not enough. A kernel's address is never cut.
    """
    rest = _HANDLE.sub(r"..\1", text[len(api) + len(kernel) + bool(kernel) :])
    too_long -= len(text) - len(api) - len(kernel) - bool(kernel) - len(rest)
    short = kernel if kernel.startswith("0x") else _cut(kernel, too_long, table.LEAST, cut)
    name = _cut(api, too_long - len(kernel) + len(short), LEAST_NAME)
    made = f"{name} {short}{rest}" if kernel else name + rest
    return made if len(api) + len(kernel) - len(name) - len(short) >= too_long else text


def _cut(name: str, too_long: int, least: int, cut: Callable[[str, int], str] = table.fit) -> str:
    return cut(name, max(len(name) - too_long, least)) if too_long > 0 else name


def dispatch_line(record: Mapping[str, Any], columns: CallColumns) -> str:
    """Return a line of text for a kernel that ran: when it started, and how long it ran."""
    gpu, kernel = f"GPU {record['gpu']}:", cli.printable(record["kernel"])
    text = f"{gpu} {kernel}<<<{dimensions(record['grid'])}, {dimensions(record['block_dim'])}>>>"
    if "latency_ns" in record:
        text += f" {with_unit(record['latency_ns'])} after its call"
    when = columns.when(record["ts_ns"])
    who = columns.who(record["pid"], record["comm"], record.get("tid", "-"))
    start = f"{when} {who} {us(record['exec_ns']):>7} {'-':>7}  "
    too_long = len(start) + len(text) - table.WIDTH
    return start + (
        text if columns.whole or too_long <= 0 else _shorter(text, gpu, kernel, too_long, columns.cut)
    )


def call_texts(group: CallGroup) -> Iterable[str]:
    """Return a description of each call: hipMemcpyAsync 4,096 B h2d, stream 0x1234 = hipErrorInvalidValue."""
    text, columns = _call_format(group)
    return map(text.__mod__, zip(*columns, strict=True)) if columns else [text] * len(group.positions)


def _call_format(group: CallGroup) -> tuple[str, list[list[Any]]]:
    """Return the format string of `call_texts`, and a column of values for each of its conversions."""
    fields = group.fields
    text, columns = str(fields["api"]), []
    if "kernel" in fields:
        text += " %s"
        columns.append(map_distinct(cli.printable, fields["kernel"]))
        if "grid" in fields:
            text += "<<<%s, %s"
            columns += [map_distinct(dimensions, list(zip(*fields[key], strict=True))) for key in SHAPES]
            if fields.get("shared_bytes", (0,))[0]:  # in one group, either all values are 0 or none is
                text += ", %d"
                columns.append(fields["shared_bytes"])
            text += ">>>"
    more = []
    if "bytes" in fields:
        more.append("%s B" + (" %s" if "copy" in fields else ""))
        columns.append(map_distinct("{:,}".format, fields["bytes"]))
        columns += [fields["copy"]] if "copy" in fields else []
    if fields.get("stream", (0,))[0]:
        more.append("stream %#x")
        columns.append(fields["stream"])
    text += f" {', '.join(more)}" if more else ""
    if "out" in fields:
        text += " -> %#x"
        columns.append(fields["out"])
    if "error" in fields:
        text += " = %s"
        columns.append(fields["error"])
    return text, columns


def dimensions(size: Sequence[int]) -> str:
    """Format grid or block dimensions: ``8x2`` for [8, 2, 1]."""
    used = list(size)
    while len(used) > 1 and used[-1] == 1:
        used.pop()
    return "x".join(map(str, used))


def json_lines(group: CallGroup) -> Iterator[str]:
    """Return a line of JSON for each call."""
    text, columns = '{"type":"call"', []
    for name, values in group.fields.items():
        text += f',"{name}":'
        if name == "api":
            text += json.dumps(values)
        elif name in HEX:
            text += '"%#x"'
            columns.append(values)
        elif name in SHAPES:
            text += "[%d,%d,%d]"
            columns += values
        elif name == "spent_ns":
            text += "{" + ",".join(f'"{key}":%d' for key in values) + "}"
            columns += values.values()
        else:
            text += "%s"
            columns.append(map_distinct(json.dumps, values) if isinstance(values[0], str) else values)
    return map((text + "}\n").__mod__, zip(*columns, strict=True))


def csv_lines(group: CallGroup) -> Iterator[str]:
    """Return a line of CSV for each call. Cells that do not apply are empty."""
    parts, columns = [], []
    for name in CALL.columns:
        values = group.fields.get(name)
        if values is None or name == "api":
            parts.append(values or "")
        elif name in SHAPES:
            parts.append("%dx%dx%d")
            columns += values
        else:
            parts.append("%#x" if name in HEX else "%s")
            texts = isinstance(values[0], str)
            columns.append(map_distinct(lambda text: cli.csv_cells((text,)), values) if texts else values)
    return map((",".join(parts) + "\n").__mod__, zip(*columns, strict=True))
