"""Write memory accesses as lines: JSON, CSV, or a table for a terminal. A sink of access_log.AccessLog."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpubpf import names
from gpubpf.agent.definitions import NUMBER_MASK
from gpubpf.ebpf.bytecode import KINDS, SPACES
from gpubpf.memory.access_log import CHUNK, quotient_and_remainder
from gpubpf.records.fields import BLOCK, KERNEL, OWNER, STAMP, THREAD
from gpubpf.records.kernel_shapes import KernelShape
from gpubpf.show import bulk_text, table
from gpubpf.show.bulk_text import Hex, Words
from gpubpf.show.fields import Field, Fields, values_of
from gpubpf.show.output import csv_cells
from gpubpf.show.owner_columns import OwnerColumns

if TYPE_CHECKING:
    from gpubpf.memory.access_log import Accesses, Array, SiteLabels
    from gpubpf.show.output import Output

WHERE_WIDTH = 11  # characters of the column WHERE
MORE = 40  # maximum characters that a wide terminal adds to a column
ACCESS = Fields(
    "access",
    "With -e, one for each access.",
    (
        *OWNER,
        KERNEL,
        Field("ts_ns", "ns?", f"{STAMP.meaning}; null if not known", when="with -T"),
        Field("launch", "integer", "unique in this measurement"),
        Field("site", "integer", "the number of the instruction"),
        Field("op", "|".join(KINDS)),
        Field("space", "|".join(SPACES)),
        Field(
            "address", "hex", "in shared and local memory, the offset in the memory of the block or thread"
        ),
        Field("width", "integer", "bytes per lane"),
        BLOCK,
        THREAD,
        Field("sm", "integer", "the multiprocessor"),
        Field("source", "string?", "file.cu:12, or null"),
        Field("ptx_line", "integer?"),
    ),
    csv="pid comm gpu kernel launch site op space address width block thread sm where",
    csv_fields=(Field("where", "string"),),
)


class AccessPrinter:
    """Writes every access as it arrives. `form`: "json", "csv" or "text". `timed`: with times. `width`: of the terminal, columns."""

    def __init__(
        self,
        out: Output,
        form: str,
        timed: bool = False,
        owners: OwnerColumns | None = None,
        width: int = table.WIDTH,
    ) -> None:
        self._out, self._form, self._timed = out, form, timed
        self._more = max(0, width - table.WIDTH)
        self._owners = OwnerColumns() if owners is None else owners
        self._header = ""
        self._kernels = names.Labels(ascii=True)
        self._threads: dict[KernelShape, list[bytes]] = {}  # index of each thread
        if form == "csv":
            out.write(("ts_ns," if timed else "") + ",".join(ACCESS.columns) + "\n")

    def __call__(self, accesses: Accesses, where: SiteLabels, times: Array | None) -> None:
        if not len(accesses) or self._out.closed:
            return
        {"json": self._json, "csv": self._csv, "text": self._text}[self._form](accesses, where, times)

    def _json(self, accesses: Accesses, where: SiteLabels, times: Array | None) -> None:
        known = values_of((*OWNER, KERNEL), accesses.place)
        if self._timed and times is None:
            known["ts_ns"] = None
        texts = ACCESS.json_texts(known, *(("ts_ns",) if times is not None else ()))
        sites = where.codes(accesses.site)
        columns = [
            *([] if times is None else [times]),
            *_program_columns(accesses),
            Words(_encoded(map(json.dumps, where.sources)), sites),
            Words(_encoded(map(json.dumps, where.lines)), sites),
        ]
        self._out.write(bulk_text.joined(texts, columns))

    def _csv(self, accesses: Accesses, where: SiteLabels, times: Array | None) -> None:
        texts = ACCESS.csv_texts(values_of((*OWNER, KERNEL), accesses.place))
        columns = [
            *_program_columns(accesses),
            Words(_encoded(csv_cells((text,)) for text in where.texts), where.codes(accesses.site)),
        ]
        if times is not None:
            columns.insert(0, times)
            texts[:1] = [b"", b"," + texts[0]]
        elif self._timed:
            texts[0] = b"," + texts[0]
        self._out.write(bulk_text.joined(texts, columns))

    def _text(self, accesses: Accesses, where: SiteLabels, times: Array | None) -> None:
        place, shape = accesses.place, accesses.place.shape
        owners = self._owners.see([place])
        widths = _text_widths(owners, self._more)
        header = _text_header(owners, widths, self._timed)
        if header != self._header:  # print it again if columns were added
            self._out.write(header)
        self._header = header
        if place not in self._threads:
            self._threads[place] = [shape.thread_index(number).encode() for number in range(shape.block_size)]
        threads = self._threads[place]
        for at in range(0, len(accesses), CHUNK):
            one = slice(at, at + CHUNK)
            block, own = quotient_and_remainder(accesses.thread[one], shape.block_size)
            blocks, of = np.unique(block, return_inverse=True)
            columns: dict[str, bulk_text.Column] = {
                "LAUNCH": accesses.launch[one] & np.uint64(NUMBER_MASK),
                "BLOCK": Words([shape.block_index(number).encode() for number in blocks.tolist()], of),
                "THREAD": Words(threads, own),
                "OP": Words(_encoded(KINDS), accesses.kind[one]),
                "SPACE": Words(_encoded(SPACES), accesses.space[one]),
                "ADDRESS": Hex(accesses.address[one]),
                "WIDTH": accesses.width[one],
            }
            before = owners.columns(place, len(own))
            if self._timed:
                unknown = Words([b"?"], np.zeros(len(own), np.intp))
                before.insert(0, (unknown if times is None else times[one], 16))
            named = {
                "KERNEL": (
                    lambda width: [self._kernels.label(place.mangled, width).encode()],
                    np.zeros(len(own), np.intp),
                ),
                "WHERE": (lambda width: _cut(where.texts, width), where.codes(accesses.site[one])),
            }
            made = _lines(before, columns, named, widths)
            if (too_long := made.index(b"\n") + 1 - len(header)) > 0:  # numbers exceed their columns
                made = _lines(before, columns, named, _narrowed(widths, too_long))
            self._out.write(made)


def _text_widths(owners: OwnerColumns, more: int) -> dict[str, int]:
    """Return the width of each column of the table; negative widths align left. `more`: the terminal's columns beyond 80.

    Columns for process and GPU replace others, so that lines fit the terminal. WHERE still identifies the kernel.
    """
    widths = {
        "LAUNCH": 6,
        "KERNEL": -10 - min(more // 2, MORE),
        "BLOCK": 7,
        "THREAD": 7,
        "OP": -6,
        "SPACE": -6,
        "ADDRESS": 14,
        "WIDTH": 5,
        "WHERE": -WHERE_WIDTH - min(more - more // 2, MORE),
    }
    left_out = {"KERNEL", "WIDTH"} if owners.processes else set()
    if owners.gpus:
        left_out |= {"LAUNCH"} if owners.processes else {"WIDTH"}
    return {name: width for name, width in widths.items() if name not in left_out}


def _lines(
    before: Sequence[tuple[bulk_text.Column, int]],
    columns: dict[str, bulk_text.Column],
    named: Mapping[str, tuple[Callable[[int], Sequence[bytes]], Array]],
    widths: dict[str, int],
) -> bytes:
    """Return lines with the columns `before` and those in `widths`. `named`: columns whose texts depend on their width."""
    for name in named.keys() & widths.keys():
        texts, codes = named[name]
        columns[name] = Words(texts(-widths[name]), codes)
    return bulk_text.aligned([*before, *((columns[name], width) for name, width in widths.items())])


def _narrowed(widths: dict[str, int], by: int) -> dict[str, int]:
    """Return the widths with the columns of names narrower by `by` characters in total, if possible."""
    made = dict(widths)
    for name in ("KERNEL", "WHERE"):
        if name in made:
            less = min(by, max(-made[name] - table.LEAST // 2, 0))
            made[name], by = made[name] + less, by - less
    return made


def _text_header(owners: OwnerColumns, widths: dict[str, int], timed: bool) -> str:
    heads = (f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in widths.items())
    return (f"{'TIME (ns)':>16} " if timed else "") + owners.header + " ".join(heads) + "\n"


def _program_columns(accesses: Accesses) -> list[bulk_text.Column]:
    """Return the columns of JSON and CSV lines, from the launch to the multiprocessor."""
    return [
        accesses.launch,
        accesses.site,
        Words(_encoded(KINDS), accesses.kind),
        Words(_encoded(SPACES), accesses.space),
        Hex(accesses.address),
        accesses.width,
        *accesses.coordinates(),
        accesses.sm,
    ]


def _encoded(texts: Iterable[str]) -> Sequence[bytes]:
    return [text.encode() for text in texts]


def _cut(texts: Iterable[str], width: int) -> list[bytes]:
    """Cut labels at the beginning: the end of the file name and the line number matter more."""
    texts = (text.replace("PTX line ", "PTX:") for text in texts)
    cut = (text if len(text) <= width else ".." + text[-(width - 2) :] for text in texts)
    return [text.encode("ascii", "replace") for text in cut]
