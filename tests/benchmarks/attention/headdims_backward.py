"""Backwards of every head dim on a Hopper GPU, against padded ones: checked, then timed; JSON.

    python -m tests.benchmarks.attention.headdims_backward --out FILE [--dims 192 192x128 ...]

For each head dim FA3's kernel as it chooses its tiles, and with head dims padded to a power of two
where that is another kernel. A process for each head dim and mask compiles them and checks them
within the error budget on small calls: ragged ends, two query heads to a key head, in any order and
in turns. A head dim of which one fails is not timed. Then they take turns with cuDNN and
flash-attn-4, each as a CUDA graph with a cold L2 cache (flash_versions/bench/measure.py). A
backward is all its kernels.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.fa3 import forward
from flash_versions.versions.fa3.hopper.backward import kernel
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig, default_config
from flash_versions.versions.oracle.budget import assess_request
from tests.benchmarks.attention.headdims import PEERS, SMALL, Shape, drawn, run
from tests.benchmarks.frame import prepared, share

SUITE = "head dims, backward"
# Of q and k, and of v; the most interesting first, as the time may be up before the last.
DIMS = [
    (192, 192), (64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (80, 80), (160, 160),
    (128, 96),
]  # fmt: skip
LENGTHS = (512, 8192, 1024, 2048, 4096, 16384)


class Call(NamedTuple):
    """What a backward is given."""

    request: Request
    o: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor

    @classmethod
    def of(cls, request: Request, do: torch.Tensor | None = None) -> "Call":
        """Of a request, with a random gradient if there is none."""
        request = in_vectors(request)
        o, lse, _ = forward.forward(request)
        return cls(request, o, lse, torch.randn_like(o) if do is None else do)

    def planned(self, config: BackwardConfig) -> Callable:
        """FA3's kernels for Hopper."""
        gradients = kernel.Gradients(self.request, config)
        rest = self.o, self.lse, None, self.do, None
        return lambda: gradients(self.request, *rest)[:3]

    def peer(self, function: Callable, **options) -> Callable:
        """A peer's backward, through autograd."""
        causal = self.request.window_right == 0
        return prepared(partial(function, causal=causal, **options), *self.request[:3], self.do)


def kernel_of(request: Request, config: BackwardConfig) -> tuple:
    """What tells kernels apart: a configuration with panels may have none to divide."""
    widths = tuple(config.widths(x.shape[3]) for x in (request.q, request.v))
    return widths, *(asdict(config) | {"panels": None}).values()


def candidates(request: Request) -> dict[str, BackwardConfig]:
    """Padded, with two slots of K and V where these fit, and a default that is another kernel."""
    dims = request.q.shape[3], request.v.shape[3]
    wide, default = max(dims) > 128, default_config(request)
    padded = BackwardConfig(block_kv=64 if wide else 128)
    if not wide and replace(padded, kv_stages=2).fits(*dims):
        padded = replace(padded, kv_stages=2)
    same = kernel_of(request, padded) == kernel_of(request, default)
    return {"padded": padded} | ({} if same else {"default": default})


def check(dims: tuple[int, int], causal: bool) -> float:
    """The largest share of the budget that an error takes on small calls; it compiles the peers,
    too.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    worst = 0.0
    whole, ragged = (1, SMALL, SMALL, 2, dims), (2, 333, 700, 4, dims, 2)
    for size, ordered in ((whole, False), (ragged, False), (ragged, True)):
        call = Call.of(make_request(*drawn(*size), causal=causal, deterministic=ordered))
        for name, config in candidates(call.request).items():
            found = {
                x: narrowed(gradient, like)
                for x, gradient, like in zip(
                    ("dq", "dk", "dv"), call.planned(config)(), call.request[:3]
                )
            }
            worst = max(worst, share(name, assess_request(found, call.request, call.do)))
    call = Call.of(make_request(*drawn(*whole), causal=causal))
    for function in PEERS.values():
        with suppress(Exception):  # `time_all` tells the reason
            call.peer(function)()
    return worst


def contestants(shape: Shape) -> list[tuple[dict, Callable]]:
    """(row, what prepares the call) of candidates and peers."""
    call = Call.of(make_request(*shape.inputs(), causal=shape.causal))
    head_dim, head_dim_v = shape.dims
    flops = shape.flops * (3 * head_dim + 2 * head_dim_v) / (head_dim + head_dim_v)
    about = {"suite": SUITE, **shape._asdict(), "heads": shape.heads, "flops": flops}
    found: list[tuple[dict, Callable]] = [
        (about | {"version": name, "name": ""}, partial(call.peer, function))
        for name, function in PEERS.items()
    ]
    named = candidates(call.request)
    for name, config in named.items():
        row = {"version": "fa3", "name": name, "default": name == [*named][-1], **asdict(config)}
        found.append((about | row, partial(call.planned, config)))
    return found


if __name__ == "__main__":
    sys.exit(run(__doc__, "headdims_backward", SUITE, (DIMS, LENGTHS), check, contestants))
