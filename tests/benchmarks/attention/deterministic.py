"""The deterministic backward on a Hopper GPU: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.deterministic --out FILE [--seconds 500]
        [--dims 128 ...] [--lengths 2048 ...]

A shape is 16384 tokens in sequences of one length, at one head_dim, full or causal, with one query
head for each key head, or, at 64, 128 and 256 dims, four. First, a process for each kind of shape
compiles its kernels, and checks a small batch: gradients have to be within the error budget. Then
each shape's deterministic gradients have to be the same to the bit in 20 launches, and its
contestants take turns, each as a CUDA graph with a cold L2 cache (flash_versions/bench/measure.py):
the backward of FA3 in any order, in order, in order with another section of heads that alternate,
FA2's portable kernels, and flash-attn-4, in any order and in order, where it is installed.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from subprocess import run
from typing import NamedTuple

import torch

from flash_versions.bench.document import new_document
from flash_versions.bench.measure import reason
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.fa2 import backward as portable
from flash_versions.versions.fa3 import forward
from flash_versions.versions.fa3.hopper.backward import host, kernel
from flash_versions.versions.fa3.hopper.backward.config import default_config, heads_of_section
from flash_versions.versions.oracle.budget import assess_request
from tests.benchmarks.attention.packed import time_all
from tests.benchmarks.frame import keep, parser, passed

DEVICE = "cuda"
SUITE = "deterministic backward"
TOKENS = 16384
LENGTHS = (2048, 8192, 512, 1024, 4096, 16384)  # the time may be up before the last
KINDS = [*product((128, 64, 256), (False, True), (1, 4))]  # head_dim, causal, group
KINDS += product((96, 160, 192), (False, True), (1,))
SECTIONS = (1, 4, 16)  # beside the usual
LAUNCHES = 20  # whose bits are compared
WARM_UP_PROCESSES = min(len(KINDS), os.cpu_count() or 1)


class Inputs(NamedTuple):
    """What a backward is given."""

    request: Request
    o: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor


def inputs(kind: int, length: int, batch: int, deterministic: bool = True) -> Inputs:
    """Random inputs; 2048 / head_dim query heads."""
    head_dim, causal, group = KINDS[kind]
    heads = 2048 // head_dim
    generator = torch.Generator(DEVICE).manual_seed(kind)
    given = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    of = (heads, heads // group, heads // group, heads)
    q, k, v, do = (torch.randn(batch, length, n, head_dim, **given) for n in of)
    request = make_request(q, k, v, causal=causal, deterministic=deterministic)
    o, lse, _ = forward.forward(request)
    return Inputs(request, o, lse, do)


def planned(given: Inputs, deterministic: bool, section: int | None = None) -> Callable:
    """A backward of FA3's kernel for Hopper; section: heads that alternate, if not the usual."""
    request = given.request._replace(deterministic=deterministic)
    plan = host.make_plan(request, replace(default_config(request), section=section))
    assert plan.constants["ORDERED"] == deterministic
    rest = given.o, given.lse, None, given.do, None
    return lambda: kernel.launch(plan, request, *rest)[:3]


def usual_section(request: Request) -> int:
    """Heads that alternate by default; the parts of one count as heads."""
    return heads_of_section(request, default_config(request))


def in_portable_kernels(given: Inputs) -> Callable:
    """FA2's portable backward, which is deterministic, too."""
    return lambda: portable.backward(given.request, given.o, given.lse, None, given.do, None)[:3]


def flash_attn_4(given: Inputs, deterministic: bool) -> Callable:
    """flash-attn-4."""
    from flash_attn.cute import flash_attn_func

    request = given.request
    leaves = [x.detach().requires_grad_() for x in request[:3]]
    causal = request.window_right == 0
    found = flash_attn_func(*leaves, causal=causal, deterministic=deterministic)
    o = found[0] if isinstance(found, tuple) else found
    return lambda: torch.autograd.grad(o, leaves, given.do, retain_graph=True)


def check(kind: int) -> float:
    """The largest share of the budget that an error of a small batch takes.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    worst = 0.0
    for length in (1000, 2048):
        given = inputs(kind, length, 1)
        found = dict(zip(("dq", "dk", "dv"), planned(given, True)()))
        for name, accuracy in assess_request(found, given.request, given.do).items():
            assert accuracy.ok, f"{KINDS[kind]}, {length}: {name}: {accuracy}"
            worst = max(worst, accuracy.error / accuracy.budget)
    return worst


def same_bits(given: Inputs) -> bool:
    """Whether launches give the same gradients to the bit."""
    backward = planned(given, True)
    expected = backward()
    return all(
        torch.equal(x, y) for _ in range(LAUNCHES) for x, y in zip(backward(), expected)
    )  # fmt: skip


def contestants(kind: int, length: int) -> Iterator[tuple[str, Callable]]:
    """(name, what prepares the call)."""
    given = inputs(kind, length, TOKENS // length)
    request = given.request
    yield "fa3", partial(planned, given, False)
    yield "fa3 deterministic", partial(planned, given, True)
    heads, parts = request.k.shape[0] * request.k.shape[2], default_config(request).parts
    for section in SECTIONS:
        if section <= heads and section * parts != usual_section(request):
            name = f"fa3 deterministic, section {section}"
            yield name, partial(planned, given, True, section)
    yield "fa3 portable", partial(in_portable_kernels, given)
    yield "flash-attn-4", partial(flash_attn_4, given, False)
    yield "flash-attn-4 deterministic", partial(flash_attn_4, given, True)


def measure(kind: int, length: int) -> list[dict]:
    """Rows of a shape's contestants."""
    head_dim, causal, group = KINDS[kind]
    given = inputs(kind, length, TOKENS // length)
    flops = 2.5 * 4 * TOKENS * length * (2048 // head_dim * head_dim) / (2 if causal else 1)
    repeats = same_bits(given)
    print(f"{KINDS[kind]}, {length}: {'the same bits' if repeats else 'OTHER BITS'}", flush=True)
    about = {
        "suite": SUITE, "head_dim": head_dim, "causal": causal, "group": group, "S": length,
        "same_bits": repeats, "flops": flops, "section": usual_section(given.request),
    }  # fmt: skip
    return time_all([(about | {"version": n}, call) for n, call in contestants(kind, length)])


def warm_up(kind: int) -> str | None:
    """Compile a kind's kernels and check them, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.attention.deterministic"]
    command += ["--check", str(kind), "--out", "none"]
    done = run(command, capture_output=True, text=True, timeout=200)
    print((done.stdout + done.stderr[-1500:]).strip() if done.returncode else done.stdout.strip())
    return None if done.returncode == 0 else f"{KINDS[kind]} failed"


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
        for _, prepare in contestants(kind, LENGTHS[0]):  # so that all kernels are compiled
            try:
                prepare()()
            except Exception as error:  # `measure` tells the reason
                print(reason(error))
        return 0
    kinds = [i for i, (head_dim, *_) in enumerate(KINDS) if head_dim in arguments.dims]
    with ThreadPoolExecutor(WARM_UP_PROCESSES) as pool:
        failed = [text for text in pool.map(warm_up, kinds) if text]
    print("\n".join(failed), flush=True)
    document = new_document(suite=SUITE, tokens=TOKENS)
    document["failed"] = failed
    for length, kind in product(arguments.lengths, kinds):
        if passed() > arguments.seconds:
            print(f"the time is up before {KINDS[kind]}, {length}", flush=True)
            break
        rows = measure(kind, length)
        failed += [] if rows[0]["same_bits"] else [f"{KINDS[kind]}, {length} does not repeat"]
        keep(document, arguments.out, rows)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
