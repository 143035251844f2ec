"""Kernels by Triton: an attention of one pass, and a softmax of rows.

triton_kernels.py                       each once; prints the digest of what they compute
triton_kernels.py softmax               the softmax alone, once, after what torch_work.py ones does
triton_kernels.py attention LAUNCHES    the attention, timed as workloads.cu does it
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from torch_work import digest, ones, timed


@triton.jit
def softmax(out, rows, width, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(rows + row * width + i, mask=i < width, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out + row * width + i, e / tl.sum(e, axis=0), mask=i < width)


@triton.jit
def attention(queries, keys, values, out, length, scale, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Attend with a block of queries to all keys, block by block; the running maximum keeps the exponentials small."""
    base = tl.program_id(1) * length * WIDTH
    rows, columns, lanes = (
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
        tl.arange(0, BLOCK),
        tl.arange(0, WIDTH),
    )
    q = tl.load(queries + base + rows[:, None] * WIDTH + lanes[None, :])
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, WIDTH), tl.float32)
    for begin in range(0, length, BLOCK):
        k = tl.load(keys + base + (begin + columns)[None, :] * WIDTH + lanes[:, None])
        v = tl.load(values + base + (begin + columns)[:, None] * WIDTH + lanes[None, :])
        scores = tl.dot(q, k) * scale
        higher = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(most - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        most = higher
    tl.store(out + base + rows[:, None] * WIDTH + lanes[None, :], (sums / total[:, None]).to(tl.float16))


def main() -> int:
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU", file=sys.stderr)
        return 77
    if sys.argv[1:] == ["softmax"]:
        ones()  # before anything else uses the GPU
    torch.manual_seed(0)
    rows = torch.randn(64, 1000, device="cuda")
    soft = torch.empty_like(rows)
    if sys.argv[1:] == ["softmax"]:
        softmax[(64,)](soft, rows, 1000, BLOCK=1024)
        digest(soft)
        return 0
    heads, length, width, block = 16, 4096 if len(sys.argv) > 1 else 256, 64, 64
    q, k, v = (torch.randn(heads, length, width, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.empty_like(q)

    def attend() -> None:
        attention[(length // block, heads)](q, k, v, out, length, width**-0.5, BLOCK=block, WIDTH=width)

    if len(sys.argv) > 1:
        timed(attend, int(sys.argv[2]))
        digest(out)
        return 0
    attend()
    softmax[(64,)](soft, rows, 1000, BLOCK=1024)
    right = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    close = torch.allclose(out, right, atol=1e-2) and torch.allclose(soft, torch.softmax(rows, 1), atol=1e-6)
    if not close:
        print("triton_kernels: wrong results", file=sys.stderr)
        return 1
    digest(out, soft)
    return 0


if __name__ == "__main__":
    sys.exit(main())
