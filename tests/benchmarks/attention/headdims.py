"""Forwards of every head dim on a Hopper GPU: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.headdims --out FILE [--dims 192 192x128 ...]

Processes compile FA3's and FA4's kernels for each head dim side by side, and check them within the
error budget on a small call that needs the same compiled kernel and on a ragged one. A head dim of
which one fails is not timed. Then they take turns with cuDNN and flash-attn-4, each as a CUDA graph
with a cold L2 cache (flash_versions/bench/measure.py). Shapes have 16384 tokens and heads for 2048
dims or a little less.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

from flash_versions.bench import peers  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.dispatch.autograd.compute import in_vectors, narrowed  # noqa: E402
from flash_versions.dispatch.request import Request, make_request  # noqa: E402
from flash_versions.versions.fa3.hopper import config as fa3_config  # noqa: E402
from flash_versions.versions.fa3.hopper import host as fa3_forward  # noqa: E402
from flash_versions.versions.fa4.hopper import config as fa4_config  # noqa: E402
from flash_versions.versions.fa4.hopper import host as fa4_forward  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from tests.benchmarks.frame import in_time, keep, parser, share, time_all, wrong  # noqa: E402

SUITE = "head dims"
# Of q and k, and of v; the most interesting first, as the time may be up before the last.
DIMS = [
    (192, 192), (192, 128), (256, 256), (96, 96), (80, 80), (160, 160), (128, 128), (64, 64),
    (112, 112), (224, 224), (32, 32),
]  # fmt: skip
LENGTHS = (8192, 2048, 16384)
TOKENS, HIDDEN = 16384, 2048
SMALL = 512  # rows of the checks: whole tiles, as in the measurement
PROCESSES = min(40, os.cpu_count() or 1)
PEERS = {
    "cudnn": partial(peers.torch_backend, SDPBackend.CUDNN_ATTENTION),
    "flash-attn-4": peers.flash_attn_4,
}
VERSIONS = {"fa3": (fa3_forward, fa3_config), "fa4": (fa4_forward, fa4_config)}


class Shape(NamedTuple):
    """What is measured: as many queries as keys and as many key heads as query heads."""

    dims: tuple[int, int]
    causal: bool
    length: int

    @property
    def heads(self) -> int:
        """Heads of a row of about HIDDEN dims."""
        return HIDDEN // max(self.dims)

    @property
    def flops(self) -> float:
        """Of a forward, by FlashAttention's formula."""
        batch = max(1, TOKENS // self.length)
        seen = self.length**2 / (2 if self.causal else 1)
        return 2 * batch * self.heads * seen * sum(self.dims)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v."""
        return drawn(max(1, TOKENS // self.length), self.length, self.length, self.heads, self.dims)


def drawn(batch: int, queries: int, keys: int, heads: int, dims: tuple[int, int], group: int = 1):
    """Random q, k and v on the GPU."""
    generator = torch.Generator("cuda").manual_seed(queries)
    given: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return (
        torch.randn(batch, queries, heads, dims[0], **given),
        torch.randn(batch, keys, heads // group, dims[0], **given),
        torch.randn(batch, keys, heads // group, dims[1], **given),
    )


def forward(version: str, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a version's kernel for Hopper, of a request that is `in_vectors`."""
    kernel, config = VERSIONS[version]
    return kernel.forward(request, config.default_config(request))[:2]


def check(dims: tuple[int, int], causal: bool) -> float:
    """The largest share of the budget that an error takes on a small call, and on one with ragged
    ends and two query heads to a key head; it compiles the peers, too.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    worst = 0.0
    for size in ((1, SMALL, SMALL, 2, dims), (2, 333, 700, 4, dims, 2)):
        request = in_vectors(make_request(*drawn(*size), causal=causal))
        for version in VERSIONS:
            o, lse = forward(version, request)
            found = {"o": narrowed(o, request.v), "lse": lse}
            worst = max(worst, share(version, assess_request(found, request)))
    for function in PEERS.values():
        with suppress(Exception):  # `time_all` tells the reason
            function(*drawn(1, SMALL, SMALL, 2, dims), causal=causal)
    return worst


def contestants(shape: Shape) -> list[tuple[dict, Callable]]:
    """(row, what prepares the call) of versions and peers."""
    q, k, v = shape.inputs()
    request = in_vectors(make_request(q, k, v, causal=shape.causal))
    about = {"suite": SUITE, **shape._asdict(), "heads": shape.heads, "flops": shape.flops}
    calls = {name: partial(peer, q, k, v, causal=shape.causal) for name, peer in PEERS.items()}
    calls |= {name: partial(forward, name, request) for name in VERSIONS}
    return [
        (about | {"version": name, "name": "default" if name in VERSIONS else ""},
         lambda call=call: lambda: (call(),))
        for name, call in calls.items()
    ]  # fmt: skip


def head_dims(text: str) -> tuple[int, int]:
    """(192, 128) of "192x128", (96, 96) of "96"."""
    head_dim, _, head_dim_v = text.partition("x")
    return int(head_dim), int(head_dim_v or head_dim)


def run(
    doc: str, module: str, suite: str, sizes: tuple, check: Callable, contestants: Callable
) -> int:
    """This command, and that of backwards: the exit code is 1 if a check failed.

    Args:
        doc: of the module.
        module: its name in tests.benchmarks.attention.
        suite: of the rows.
        sizes: head dims, and lengths.
        check: (dims, causal) -> the largest share of the budget.
        contestants: shape -> [(row, what prepares the call)].
    """
    command = parser(doc, seconds=500, device=False)
    command.add_argument("--dims", type=head_dims, nargs="+", default=sizes[0], help="192x128")
    command.add_argument("--lengths", type=int, nargs="+", default=sizes[1])
    command.add_argument("--check", choices=("full", "causal"), help="this only, of the first dims")
    arguments = command.parse_args()
    if arguments.check is not None:
        worst = check(arguments.dims[0], arguments.check == "causal")
        print(f"within the budget, {worst:.2f} of it", flush=True)
        return 0
    kinds = {
        ("--dims", f"{dims[0]}x{dims[1]}", "--check", mask): (dims, mask == "causal")
        for dims, mask in product(arguments.dims, ("causal", "full"))
    }
    failed = wrong(f"attention.{module}", kinds, PROCESSES, until=arguments.seconds * 0.6)
    document = new_document(suite=suite, tokens=TOKENS)
    document["failed"] = failed
    right = [kind for job, kind in kinds.items() if job not in failed]
    shapes = [Shape(*kind, length) for length, kind in product(arguments.lengths, right)]
    for shape in in_time(shapes, arguments.seconds):
        keep(document, arguments.out, time_all(contestants(shape)), ("suite", "flops", "heads"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(run(__doc__, "headdims", SUITE, (DIMS, LENGTHS), check, contestants))
