"""Packed sequences of random lengths on a Hopper GPU: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.packed --out FILE [--seconds 200] [--only 3 7 ...]

A shape is drawn from its number: lengths are lognormal around a mean and fill 32768 tokens. First,
each shape's kernels compute a smaller draw of the same kind, with a sequence of NaN among the
others, and results and gradients of all others have to be within the error budget. Then its
contestants take turns, forward and backward, each as a CUDA graph with a cold L2 cache
(flash_versions/bench/measure.py): fa3 and fa4, FA2's portable kernels, torch's varlen_attn and
flash-attn-4 where they are installed, and for the rate fa3 on a batch of equal rows as long as the
mean, whose FLOPs are counted the same way.

Last, the same for a batch of rows with ends of their own (kv_lengths), a sink and ALiBi: fa3 and
fa4 against the portable kernels, and against fa3 without them.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from itertools import product
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from flash_versions import attention  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.dispatch.request import make_request  # noqa: E402
from flash_versions.versions.fa2 import backward, forward  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from tests.benchmarks.frame import call_all, in_time, keep, parser, prepared, share, time_all, wrong  # noqa: E402

DEVICE = "cuda"
SUITE = "packed, random"
TOKENS = 32768
HEADS = 16
MEANS = (256, 512, 1024, 2048, 4096)
SHAPES = 20
PROCESSES = 14
NAMES = ("fa3", "fa4", "portable")
ASKED = ("kv_lengths", "sink", "alibi_slopes")


class Shape(NamedTuple):
    """Packed sequences."""

    number: int
    mean: int
    head_dim: int
    group: int
    causal: bool
    lengths: tuple[int, ...]

    @classmethod
    def drawn(cls, number: int, tokens: int = TOKENS) -> "Shape":
        """The shape of a number: every mean, head_dim, mask and group comes up equally often."""
        rng = random.Random(number)
        mean = MEANS[number % 5]
        lengths: list[int] = []
        while sum(lengths) < tokens:
            length = max(1, round(rng.lognormvariate(0, 0.8) * mean / 1.377))  # of mean 1
            lengths.append(min(length, tokens - sum(lengths)))
        rng.shuffle(lengths)
        head_dim, group = (64, 128, 256)[number % 3], (1, 4)[number // 3 % 2]
        return cls(number, mean, head_dim, group, number % 4 > 0, tuple(lengths))

    def flops(self, lengths: tuple[int, ...]) -> float:
        """Of a forward, by FlashAttention's formula."""
        seen = sum(n * n for n in lengths) / (2 if self.causal else 1)
        return 4 * seen * self.head_dim * HEADS

    def inputs(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """(q, k, v, do, cu_seqlens) on the GPU."""
        generator = torch.Generator(DEVICE).manual_seed(self.number)
        heads = (HEADS, HEADS // self.group, HEADS // self.group, HEADS)
        given = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
        tensors = [torch.randn(sum(lengths), h, self.head_dim, **given) for h in heads]
        bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        return *tensors, bounds


def check(shape: Shape) -> float:
    """The largest share of the budget that an error takes, of a small draw of the shape.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    lengths = (*Shape.drawn(shape.number, 3000).lengths, 0, 1, 333, 64, 128)
    q, k, v, do, bounds = shape.inputs(lengths)
    poisoned = len(lengths) // 2
    rows = slice(int(bounds[poisoned]), int(bounds[poisoned + 1]))
    others = [n for i, n in enumerate(lengths) if i != poisoned]
    clean = [torch.cat((x[: rows.start], x[rows.stop :])) for x in (q, k, v, do)]
    for x in (q, k, v, do):
        x[rows] = float("nan")
    cu_seqlens = torch.tensor([0, *others], device=DEVICE).cumsum(0).int()
    exact = make_request(*clean[:3], causal=shape.causal, cu_seqlens_q=cu_seqlens)
    worst = 0.0
    for version in ("fa3", "fa4"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = attention(
            *leaves, causal=shape.causal, cu_seqlens_q=bounds, return_lse=True, version=version
        )
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do)), o=o.detach())
        results = {name: torch.cat((x[: rows.start], x[rows.stop :])) for name, x in found.items()}
        worst = max(worst, share(version, assess_request(results, exact, clean[3])))
        again = torch.autograd.grad(
            attention(*leaves, causal=shape.causal, cu_seqlens_q=bounds, version=version),
            leaves,
            do,
        )
        assert torch.equal(again[2].nan_to_num(), found["dv"].nan_to_num()), "dv does not repeat"
    return worst


def contestants(shape: Shape) -> Iterator[tuple[dict, Callable]]:
    """(row, what prepares the call)."""
    inputs = shape.inputs(shape.lengths)
    even = (shape.mean,) * (TOKENS // shape.mean)
    rows = tuple(x.unflatten(0, (-1, shape.mean)) for x in shape.inputs(even)[:4])
    packed = {"causal": shape.causal, "cu_seqlens_q": inputs[4]}
    calls: dict[str, Callable] = {
        "fa3": partial(our_call, "fa3", inputs[:4], packed),
        "fa4": partial(our_call, "fa4", inputs[:4], packed),
        "dense": partial(our_call, "fa3", rows, {"causal": shape.causal}),
        "portable": partial(our_call, "portable", inputs[:4], packed),
        "torch varlen_attn": partial(theirs, torch_varlen, shape, inputs),
        "flash-attn-4": partial(theirs, flash_attn_4, shape, inputs),
    }
    for name, prepare in calls.items():
        lengths = even if name == "dense" else shape.lengths
        for which in ("forward",) if name == "fa4" else ("forward", "backward"):  # FA3's
            row = {
                "suite": SUITE, "shape": shape.number, "mean": shape.mean,
                "head_dim": shape.head_dim, "heads": HEADS, "group": shape.group,
                "causal": shape.causal, "sequences": len(lengths), "version": name, "pass": which,
                "flops": shape.flops(lengths) * (2.5 if which == "backward" else 1),
            }  # fmt: skip
            yield row, partial(prepare, which == "backward")


def our_call(name, inputs, options, is_backward):
    """A call of a version, or of FA2's portable kernels."""
    q, k, v, do = inputs
    if name == "portable":
        request = make_request(q, k, v, **options)
        if not is_backward:
            return lambda: forward.forward(request)[:1]
        o, lse, _ = forward.forward(request)
        return lambda: backward.backward(request, o, lse, None, do.view_as(o), None)[:3]
    function = partial(attention, version=name, **options)
    return prepared(function, q, k, v, do if is_backward else None)


def torch_varlen(q, k, v, bounds, longest, causal):
    """torch.nn.attention.varlen; key heads are repeated beforehand."""
    from torch.nn.attention.varlen import varlen_attn

    mask = {"is_causal": causal}  # of torch 2.10 and 2.11; later a window
    if "is_causal" not in signature(varlen_attn).parameters:
        mask = {"window_size": (-1, 0)} if causal else {}
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **mask)


def flash_attn_4(q, k, v, bounds, longest, causal):
    """flash-attn-4."""
    from flash_attn.cute import flash_attn_varlen_func

    ragged = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    ragged |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    found = flash_attn_varlen_func(q, k, v, causal=causal, **ragged)
    return found[0] if isinstance(found, tuple) else found


def theirs(peer, shape, inputs, is_backward):
    """A call of another library."""
    q, k, v, do, bounds = inputs
    if peer is torch_varlen:
        k, v = (x.repeat_interleave(shape.group, 1) for x in (k, v))
    call = partial(peer, bounds=bounds, longest=max(shape.lengths), causal=shape.causal)
    return prepared(call, q, k, v, do if is_backward else None)


def asked_call(name: str, option: str | None, head_dim: int, is_backward: bool) -> Callable:
    """A call with one thing asked for, of 8 causal rows of 4096 tokens."""
    generator = torch.Generator(DEVICE).manual_seed(head_dim)
    given = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    inputs = [torch.randn(8, 4096, heads, head_dim, **given) for heads in (16, 4, 4, 16)]
    options: dict = {"causal": True}
    if option == "kv_lengths":
        options[option] = torch.linspace(1024, 4096, 8, device=DEVICE).int()
    elif option is not None:
        options[option] = torch.rand(16, device=DEVICE)
    return our_call(name, inputs, options, is_backward)


def asked(head_dim: int) -> Iterator[tuple[dict, Callable]]:
    """Contestants of all that can be asked for, at a head_dim."""
    for option, name, which in product((None, *ASKED), NAMES, ("forward", "backward")):
        if (name, which) == ("fa4", "backward"):  # FA3's
            continue
        seen = 8 * 4096 * 4096 / 2
        if option == "kv_lengths":  # the last query sees the last key
            seen = sum(n * n / 2 for n in torch.linspace(1024, 4096, 8).int().tolist())
        row = {
            "suite": "asked for", "asked": option, "head_dim": head_dim, "heads": 16, "group": 4,
            "version": name, "pass": which,
            "flops": 4 * seen * head_dim * 16 * (2.5 if which == "backward" else 1),
        }  # fmt: skip
        yield row, partial(asked_call, name, option, head_dim, which == "backward")


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=200, device=False)
    command.add_argument("--check", type=int, help="check this shape only, and do not measure")
    command.add_argument("--only", type=int, nargs="+", default=range(SHAPES), help="shapes")
    command.add_argument("--warm", type=int, help="compile what is asked for at a head_dim")
    arguments = command.parse_args()
    if arguments.warm is not None:
        call_all(asked(arguments.warm))
        return 0
    if arguments.check is not None:
        shape = Shape.drawn(arguments.check)
        print(f"within the budget, {check(shape):.2f} of it", flush=True)
        call_all(contestants(shape))  # so that all kernels are compiled side by side
        return 0
    jobs = [("--warm", 256), ("--warm", 128), ("--warm", 64)]
    jobs += [("--check", number) for number in arguments.only]
    failed = wrong("attention.packed", jobs, PROCESSES)
    document = new_document(libraries=("flash-attn-4",), suite=SUITE, tokens=TOKENS)
    document["failed"] = failed
    for number in in_time(arguments.only, arguments.seconds):
        keep(document, arguments.out, time_all(list(contestants(Shape.drawn(number)))))
    for head_dim in in_time((64, 128, 256), arguments.seconds):
        keep(document, arguments.out, time_all(list(asked(head_dim))))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
