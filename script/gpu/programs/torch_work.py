"""What PyTorch runs: its own kernels, machine code without PTX; and, compiled, Triton's.

torch_work.py eager | compiled                       a small model; prints the digest of what it computes
torch_work.py ones                                   torch.ones(1).cuda(), timed: "first MILLISECONDS"
torch_work.py add | matmul | replay [LAUNCHES]       one kernel of PyTorch's, one of cuBLAS's, some in a graph
torch_work.py decode-eager | decode-graph | decode-compiled TOKENS     a decode loop, timed as workloads.cu does it

Exit status 77: no GPU that PyTorch can use.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic results need

import torch


def digest(*tensors: torch.Tensor) -> None:
    value = hashlib.sha256()
    for tensor in tensors:
        value.update(tensor.detach().float().cpu().numpy().tobytes())
    print(f"digest {value.hexdigest()[:16]}")


def timed(step: Callable[[], object], count: int, rounds: int = 5) -> None:
    """Print "round HOST_US GPU_US" for each round but the first."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(rounds + 1):
        torch.cuda.synchronize()
        before = time.perf_counter()
        begin.record()
        for _ in range(count):
            step()
        end.record()
        torch.cuda.synchronize()
        host = 1e6 * (time.perf_counter() - before)
        if number:
            print(f"round {host / count:.4f} {1e3 * begin.elapsed_time(end) / count:.4f}")


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays the work as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Decoder(torch.nn.Module):
    """Decodes a token at a time through some layers, with a cache of earlier ones."""

    def __init__(self, width: int = 1024, layers: int = 4, past: int = 512) -> None:
        super().__init__()
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, **make) for _ in range(layers))
        self.into = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width, **make) for _ in range(layers))
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, width, **make) for _ in range(layers))
        self.heads = width // 64
        self.register_buffer("keys", torch.randn(layers, self.heads, past, 64, **make))
        self.register_buffer("values", torch.randn(layers, self.heads, past, 64, **make))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        for number, (norm, into, out) in enumerate(zip(self.norms, self.into, self.out, strict=True)):
            query, key, value = into(norm(token)).view(3, self.heads, 1, 64).unbind(0)
            keys = torch.cat([self.keys[number], key], dim=1)
            values = torch.cat([self.values[number], value], dim=1)
            weights = torch.softmax(query @ keys.transpose(1, 2) / 8, dim=-1)
            token = token + out((weights @ values).reshape(1, -1))
        return token


def model() -> None:
    """Run a small model forward and backward."""
    net = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 64)
    ).cuda()
    if sys.argv[1] == "compiled":
        run = torch.compile(net)
    else:
        run = net
    batch = torch.randn(128, 256, device="cuda")
    for _ in range(3):
        loss = torch.softmax(run(batch), dim=-1).square().sum()
        loss.backward()
    digest(loss, *(parameter.grad for parameter in net.parameters()))


def ones() -> None:
    """Print how long the first use of the GPU takes, and the digest of what it computes."""
    began = time.perf_counter()
    found = torch.ones(1).cuda()
    torch.cuda.synchronize()
    print(f"first {1e3 * (time.perf_counter() - began):.1f}")
    digest(found + found)  # a kernel of PyTorch's own


def main() -> int:
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU", file=sys.stderr)
        return 77
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    what, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    if what == "ones":
        ones()
    elif what in ("eager", "compiled"):
        model()
    elif what in ("add", "matmul", "replay"):
        a, b = (torch.randn(2048, 2048, device="cuda") for _ in range(2))
        step = {"add": lambda: a + b, "matmul": lambda: a @ b, "replay": lambda: torch.relu(a + b)}[what]
        timed(captured(step) if what == "replay" else step, count)
        digest(step())
    else:
        decoder, token = Decoder().eval(), torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)
        run = torch.compile(decoder) if what == "decode-compiled" else decoder
        with torch.no_grad():

            def step() -> torch.Tensor:
                return run(token)

            timed(captured(step) if what == "decode-graph" else step, count)
            digest(step())
    return 0


if __name__ == "__main__":
    sys.exit(main())
