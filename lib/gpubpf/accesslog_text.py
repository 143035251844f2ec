"""Memory accesses as lines: JSON, CSV, or a table for a terminal. A sink of accesslog.AccessLog."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpubpf import cli, names, output, table
from gpubpf.accesslog import CHUNK, divided
from gpubpf.bytecode import KINDS, SPACES
from gpubpf.output import Hex, Words
from gpubpf.places import COUNT, Place

if TYPE_CHECKING:
    from gpubpf.accesslog import Accesses, Array, Where
    from gpubpf.cli import Output

WHERE = 11  # columns for the place in the source
CSV_HEADER = "pid,comm,gpu,kernel,launch,site,op,space,address,width,block_x,block_y,block_z,thread_x,thread_y,thread_z,sm,where\n"
TEXT_HEADER = (
    f"{'LAUNCH':>6} {'KERNEL':10} {'BLOCK':>7} {'THREAD':>7} {'OP':6} {'SPACE':6} {'ADDRESS':>14} {'WIDTH':>5} "
    f"{'WHERE':{WHERE}}\n"
)


class Printer:
    """Writes every access as it comes: `form` is json, csv or text. `timed`: with times."""

    def __init__(self, out: Output, form: str, timed: bool = False) -> None:
        self._out, self._form, self._timed = out, form, timed
        self._began = False
        self._labels: dict[Place, tuple[bytes, list[bytes]]] = {}  # kernel; threads of a block

    def __call__(self, accesses: Accesses, where: Where, times: Array | None) -> None:
        if not len(accesses) or self._out.closed:
            return
        {"json": self._json, "csv": self._csv, "text": self._text}[self._form](accesses, where, times)
        self._began = True

    def _json(self, accesses: Accesses, where: Where, times: Array | None) -> None:
        place = accesses.place
        common = {
            "pid": place.pid,
            "comm": place.comm,
            "gpu": place.gpu,
            "kernel": names.demangle(place.mangled).short,
        }
        head = json.dumps({"type": "access", **common}, separators=(",", ":"))[:-1].encode()
        stamp = b',"ts_ns":' if self._timed else b""
        unknown = b"null" if self._timed else b""
        texts = [b',"site":', b',"op":"', b'","space":"', b'","address":"0x', b'","width":']
        texts += [b',"block":[', b",", b",", b'],"thread":[', b",", b",", b'],"sm":']
        texts += [b',"source":', b',"ptx_line":', b"}\n"]
        sites = where.codes(accesses.site)
        columns = [
            *_columns(accesses),
            Words(_encoded(map(json.dumps, where.sources)), sites),
            Words(_encoded(map(json.dumps, where.lines)), sites),
        ]
        if times is None:
            texts.insert(0, head + stamp + unknown + b',"launch":')
        else:
            texts[:0] = [head + stamp, b',"launch":']
            columns.insert(0, times)
        self._out.write(output.joined(texts, columns))

    def _csv(self, accesses: Accesses, where: Where, times: Array | None) -> None:
        place = accesses.place
        if not self._began:
            self._out.write(("ts_ns," if self._timed else "") + CSV_HEADER)
        kernel = names.demangle(place.mangled).short
        head = cli.csv_cells((place.pid, place.comm, place.gpu, kernel)).encode() + b","
        texts = [b",", b",", b",", b",0x", *[b","] * 9, b"\n"]
        places = _encoded(cli.csv_cells((text,)) for text in where.texts)
        columns = [*_columns(accesses), Words(places, where.codes(accesses.site))]
        if times is None:
            texts.insert(0, (b"," if self._timed else b"") + head)
        else:
            texts[:0] = [b"", b"," + head]
            columns.insert(0, times)
        self._out.write(output.joined(texts, columns))

    def _text(self, accesses: Accesses, where: Where, times: Array | None) -> None:
        place, shape = accesses.place, accesses.place.shape
        if not self._began:
            self._out.write((f"{'TIME (ns)':>16} " if self._timed else "") + TEXT_HEADER)
        if place not in self._labels:
            name = names.demangle(place.mangled).short
            name = name if len(name) <= 10 else name.rsplit("::", 1)[-1]
            kernel = table.fit(cli.printable(name), 10).encode("ascii", "replace")
            threads = [shape.thread_index(number).encode() for number in range(shape.block_size)]
            self._labels[place] = kernel, threads
        kernel, threads = self._labels[place]
        for at in range(0, len(accesses), CHUNK):
            one = slice(at, at + CHUNK)
            block, own = divided(accesses.thread[one], shape.block_size)
            blocks, of = np.unique(block, return_inverse=True)
            columns: list[tuple[output.Column, int]] = [
                (accesses.launch[one] & np.uint64(COUNT), 6),
                (Words([kernel], np.zeros(len(own), np.intp)), -10),
                (Words([shape.block_index(number).encode() for number in blocks.tolist()], of), 7),
                (Words(threads, own), 7),
                (Words(_encoded(KINDS), accesses.kind[one]), -6),
                (Words(_encoded(SPACES), accesses.space[one]), -6),
                (Hex(accesses.address[one]), 14),
                (accesses.width[one], 5),
            ]
            if self._timed:
                unknown = Words([b"?"], np.zeros(len(own), np.intp))
                columns.insert(0, (unknown if times is None else times[one], 16))
            texts = [_tail(text, WHERE).encode("ascii", "replace") for text in where.texts]
            columns.append((Words(texts, where.codes(accesses.site[one])), -WHERE))
            self._out.write(output.aligned(columns))


def _columns(accesses: Accesses) -> list[output.Column]:
    """What a line for programs has of an access, from the launch to the multiprocessor."""
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


def _tail(text: str, width: int) -> str:
    """The end of a file's name and the line tell more than its beginning."""
    text = text.replace("PTX line ", "PTX:")
    return text if len(text) <= width else ".." + text[-(width - 2) :]
