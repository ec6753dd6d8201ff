"""The deterministic backward on a Hopper GPU: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.deterministic --out FILE [--seconds 500]
        [--dims 128 ...] [--lengths 2048 ...]

A shape is 16384 tokens in sequences of one length, at one head_dim, full or causal, with one query
head for each key head, or, at 64, 128 and 256 dims, four. First, a process for each kind of shape
compiles its kernels, and checks a small batch: gradients have to be within the error budget. Then
each shape's deterministic gradients have to be the same to the bit in 20 launches, and its
contestants take turns, each as a CUDA graph with a cold L2 cache (flash_versions/bench/measure.py):
the backward of FA3 in any order and in order, FA2's kernels, and flash-attn-4, in any order
and in order, where it is installed.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from flash_versions.bench.document import new_document
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa2 import backward as portable
from flash_versions.versions.fa3.hopper.backward.config import default_config
from flash_versions.versions.oracle.budget import assess_request
from tests.benchmarks.attention.headdims_backward import Call
from tests.benchmarks.frame import call_all, in_time, keep, parser, share, time_all, wrong

DEVICE = "cuda"
SUITE = "deterministic backward"
TOKENS = 16384
LENGTHS = (2048, 8192, 512, 1024, 4096, 16384)  # the time may be up before the last
KINDS = [*product((128, 64, 256), (False, True), (1, 4))]  # head_dim, causal, group
KINDS += product((96, 160, 192), (False, True), (1,))
LAUNCHES = 20  # whose bits are compared
PROCESSES = min(len(KINDS), os.cpu_count() or 1)


def inputs(kind: int, length: int, batch: int) -> Call:
    """Random inputs; 2048 / head_dim query heads."""
    head_dim, causal, group = KINDS[kind]
    heads = 2048 // head_dim
    generator = torch.Generator(DEVICE).manual_seed(kind)
    given = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    of = (heads, heads // group, heads // group, heads)
    q, k, v, do = (torch.randn(batch, length, n, head_dim, **given) for n in of)
    return Call.of(make_request(q, k, v, causal=causal, deterministic=True), do)


def planned(given: Call, deterministic: bool) -> Callable:
    """A backward of FA3's kernel for Hopper."""
    given = given._replace(request=given.request._replace(deterministic=deterministic))
    return given.planned(default_config(given.request))


def in_portable_kernels(given: Call) -> Callable:
    """FA2's backward, which is deterministic, too."""
    return lambda: portable.backward(given.request, given.o, given.lse, None, given.do, None)[:3]


def flash_attn_4(q, k, v, **options):
    """flash-attn-4."""
    from flash_attn.cute import flash_attn_func

    found = flash_attn_func(q, k, v, **options)
    return found[0] if isinstance(found, tuple) else found


def check(kind: int) -> float:
    """The largest share of the budget that an error of a small batch takes.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    worst = 0.0
    for length in (1000, 2048):
        given = inputs(kind, length, 1)
        found = dict(zip(("dq", "dk", "dv"), planned(given, True)()))
        worst = max(worst, share(length, assess_request(found, given.request, given.do)))
    return worst


def same_bits(given: Call) -> bool:
    """Whether launches give the same gradients to the bit."""
    backward = planned(given, True)
    expected = backward()
    return all(torch.equal(x, y) for _ in range(LAUNCHES) for x, y in zip(backward(), expected))


def contestants(kind: int, length: int) -> list[tuple[dict, Callable]]:
    """(row, what prepares the call)."""
    head_dim, causal, group = KINDS[kind]
    given = inputs(kind, length, TOKENS // length)
    flops = 2.5 * 4 * TOKENS * length * (2048 // head_dim * head_dim) / (2 if causal else 1)
    about = {
        "suite": SUITE, "head_dim": head_dim, "causal": causal, "group": group, "S": length,
        "same_bits": same_bits(given), "flops": flops,
    }  # fmt: skip
    calls = {
        "fa3": partial(planned, given, False),
        "fa3 deterministic": partial(planned, given, True),
        "fa3 portable": partial(in_portable_kernels, given),
        "flash-attn-4": partial(given.peer, flash_attn_4),
        "flash-attn-4 deterministic": partial(given.peer, flash_attn_4, deterministic=True),
    }
    return [(about | {"version": name}, call) for name, call in calls.items()]


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=500, device=False)
    command.add_argument("--check", type=int, help="check this kind only, and do not measure")
    dims = [*dict.fromkeys(head_dim for head_dim, *_ in KINDS)]
    command.add_argument("--dims", type=int, nargs="+", choices=dims, default=dims)
    command.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS)
    arguments = command.parse_args()
    if arguments.check is not None:
        kind = arguments.check
        print(f"{KINDS[kind]}: within the budget, {check(kind):.2f} of it", flush=True)
        call_all(contestants(kind, LENGTHS[0]))  # so that all kernels are compiled
        return 0
    kinds = [i for i, (head_dim, *_) in enumerate(KINDS) if head_dim in arguments.dims]
    document = new_document(suite=SUITE, tokens=TOKENS)
    jobs = [("--check", kind) for kind in kinds]
    failed = document["failed"] = wrong("attention.deterministic", jobs, PROCESSES)
    for length, kind in in_time(product(arguments.lengths, kinds), arguments.seconds):
        rows = time_all(contestants(kind, length))
        failed += [] if rows[0]["same_bits"] else [f"{KINDS[kind]}, {length} does not repeat"]
        keep(document, arguments.out, rows)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
