"""What memtrace must say of examples/memory.cu: its kernels' addresses, thread by thread, from its source, put through the model."""

from __future__ import annotations

import functools

import memory_model as model


def lines(of, *, warps=32):
    """Requests of 1,024 threads in a line: `of` has the address by the thread's number, or None."""
    return [[of(32 * warp + lane) for lane in range(32)] for warp in range(warps)]


def tiles(of):
    """Requests of 2 x 2 blocks of 32 x 32 threads, a warp for each row: `of` has the address by (block x, block y, x, y)."""
    return [[of(bx, by, x, y) for x in range(32)] for bx in range(2) for by in range(2) for y in range(32)]


def unit(op, width=4, first=0):
    return model.site(op, "global", width, lines(lambda t: first + width * t))


def strided(n):
    return [model.site("load", "global", 4, lines(lambda t: 4 * n * t)), unit("store")]


def reversed_bits(t):
    return int(f"{t:010b}"[::-1], 2)


def low_half(t):
    return 4 * t if t % 32 < 16 else None


def through_shared(width):
    return [
        model.site("load", "global", 4, tiles(lambda bx, by, x, y: 4 * ((32 * by + y) * 64 + 32 * bx + x))),
        model.site("store", "shared", 4, tiles(lambda bx, by, x, y: 4 * (width * y + x))),
        model.site("load", "shared", 4, tiles(lambda bx, by, x, y: 4 * (width * x + y))),
        model.site("store", "global", 4, tiles(lambda bx, by, x, y: 4 * ((32 * bx + y) * 64 + 32 * by + x))),
    ]


def first_four(block_of):
    """Requests in which the first four threads of each of 4 blocks take part."""
    return [[block_of(lane) if lane < 4 else None for lane in range(32)] for _ in range(4)]


def in_local(first):
    """16 stores and a load by each of 1,024 threads; `first` has the element that a thread begins with."""
    stores = [request for i in range(16) for request in lines(lambda t, i=i: 4 * ((first(t) + i) % 16))]
    return [
        unit("load"),
        model.site("store", "local", 4, stores),
        model.site("load", "local", 4, lines(lambda t: 4 * (first(t) % 16))),
        unit("store"),
    ]


@functools.cache
def answers():
    """Return the sites of each kernel in the order of its PTX, with no address but from the source."""
    return {
        "stride1": strided(1),
        "stride2": strided(2),
        "stride8": strided(8),
        "stride32": strided(32),
        "misaligned": [unit("load", first=4), unit("store")],
        "broadcast": [model.site("load", "global", 4, lines(lambda t: 0)), unit("store")],
        "readOnly": strided(1),
        "wide2": [unit("load", 8), unit("store", 8)],
        "wide4": [unit("load", 16), unit("store", 16)],
        "halfWarp": [model.site(op, "global", 4, lines(low_half)) for op in ("load", "store")],
        "predicated": [model.site(op, "global", 4, lines(low_half)) for op in ("load", "store")],
        "gather": [
            unit("load"),
            model.site("load", "global", 4, lines(lambda t: 4 * reversed_bits(t))),
            unit("store"),
        ],
        "transposeNaive": [
            through_shared(32)[0],
            model.site(
                "store", "global", 4, tiles(lambda bx, by, x, y: 4 * ((32 * bx + x) * 64 + 32 * by + y))
            ),
        ],
        "transposeShared": through_shared(32),
        "transposePadded": through_shared(33),
        "histogramGlobal": [unit("load"), model.site("atomic", "global", 4, lines(lambda t: 4 * (t % 8)))],
        "histogramShared": [
            model.site("store", "shared", 4, first_four(lambda t: 4 * t)),
            unit("load"),
            model.site("atomic", "shared", 4, lines(lambda t: 4 * (t % 4))),
            model.site("load", "shared", 4, first_four(lambda t: 4 * t)),
            model.site("atomic", "global", 4, first_four(lambda t: 4 * t)),
        ],
        "generic": [
            unit("load"),
            model.site("store", "shared", 4, lines(lambda t: 4 * (t % 256))),
            model.site("store", "shared", 4, lines(lambda t: 4 * (t % 256) + 1024)),
            model.site("load", "shared", 4, lines(lambda t: 8 * (t % 256))),
            unit("store"),
        ],
        "asynchronous": [
            model.site("async", "global", 4, lines(lambda t: 8 * t)),
            model.site("async", "shared", 4, lines(lambda t: 4 * (t % 256))),
            model.site("load", "shared", 4, lines(lambda t: 4 * (t % 256))),
            unit("store"),
        ],
        "localArray": in_local(lambda t: t // 256),
        "localScattered": in_local(lambda t: t % 256),
        "unused": strided(1),
    }
