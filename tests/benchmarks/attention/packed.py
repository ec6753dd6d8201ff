"""Packed sequences of random lengths on a Hopper GPU: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.packed --out FILE [--seconds 200] [--only 3 7 ...]

A shape is drawn from its number: lengths are lognormal around a mean and fill 32768 tokens. First,
each shape's kernels compute a smaller draw of the same kind, with a sequence of NaN among the
others, and results and gradients of all others have to be within the error budget. Then its
contestants take turns, forward and backward, each as a CUDA graph with a cold L2 cache
(flash_versions/bench/measure.py): fa3 and fa4, FA2's portable kernels, which serve them elsewhere,
torch's varlen_attn and flash-attn-4 where they are installed, and for the rate fa3 on a
batch of equal rows as long as the mean, whose FLOPs are counted the same way.

Last, the same for a batch of rows with ends of their own (kv_lengths), a sink and ALiBi: fa3 and
fa4 against the portable kernels, and against fa3 without them.
"""

import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from subprocess import run
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from flash_versions import attention  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.measure import captured, reason, timed  # noqa: E402
from flash_versions.dispatch.request import Request, make_request  # noqa: E402
from flash_versions.versions.fa2 import backward, forward  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from tests.benchmarks.frame import keep, parser, passed  # noqa: E402

DEVICE = "cuda"
SUITE = "packed, random"
TOKENS = 32768
HEADS = 16
MEANS = (256, 512, 1024, 2048, 4096)
ROUNDS = 12
SHAPES = 20
WARM_UP_PROCESSES = 14
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
        head_dim, causal, group = (
            (64, 128, 256)[number % 3],
            number % 4 > 0,
            (1, 4)[number // 3 % 2],
        )
        return cls(number, mean, head_dim, group, causal, tuple(lengths))

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


def portable(request: Request, do: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """By FA2's portable kernels."""
    o, lse, _ = forward.forward(request)
    if do is None:
        return (o,)
    return backward.backward(request, o, lse, None, do, None)[:3]


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
        for name, accuracy in assess_request(results, exact, clean[3]).items():
            assert accuracy.ok, f"shape {shape.number}, {version}: {name}: {accuracy}"
            worst = max(worst, accuracy.error / accuracy.budget)
        again = torch.autograd.grad(
            attention(*leaves, causal=shape.causal, cu_seqlens_q=bounds, version=version),
            leaves,
            do,
        )
        assert torch.equal(again[2].nan_to_num(), found["dv"].nan_to_num()), "dv does not repeat"
    return worst


def contestants(shape: Shape) -> Iterator[tuple[str, str, tuple[int, ...], Callable]]:
    """(name, pass, lengths, what prepares the call)."""
    inputs = shape.inputs(shape.lengths)
    even = (shape.mean,) * (TOKENS // shape.mean)
    for name, lengths in (("fa3", shape.lengths), ("fa4", shape.lengths), ("dense", even)):
        dense = name == "dense"
        given = shape.inputs(lengths)
        yield name, "forward", lengths, partial(ours, shape, name, given, dense, False)
        if name != "fa4":
            yield name, "backward", lengths, partial(ours, shape, name, given, dense, True)
    yield (
        "portable",
        "forward",
        shape.lengths,
        partial(ours, shape, "portable", inputs, False, False),
    )
    yield (
        "portable",
        "backward",
        shape.lengths,
        partial(ours, shape, "portable", inputs, False, True),
    )
    for name, peer in (("torch varlen_attn", torch_varlen), ("flash-attn-4", flash_attn_4)):
        yield name, "forward", shape.lengths, partial(theirs, peer, shape, inputs, False)
        yield name, "backward", shape.lengths, partial(theirs, peer, shape, inputs, True)


def ours(shape, name, inputs, dense, is_backward):
    """A call of this package."""
    q, k, v, do, bounds = inputs
    options = {"causal": shape.causal}
    if dense:
        q, k, v, do = (x.unflatten(0, (-1, shape.mean)) for x in (q, k, v, do))
    else:
        options["cu_seqlens_q"] = bounds
    return our_call("fa3" if dense else name, (q, k, v, do), options, is_backward)


def our_call(name, inputs, options, is_backward):
    """A call of a version, or of FA2's portable kernels."""
    q, k, v, do = inputs
    if name == "portable":
        request = make_request(q, k, v, **options)
        if not is_backward:
            return lambda: portable(request, None)
        o, lse, _ = forward.forward(request)
        return lambda: backward.backward(request, o, lse, None, do.view_as(o), None)[:3]
    if not is_backward:
        return lambda: (attention(q, k, v, version=name, **options),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, version=name, **options)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


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
    if not is_backward:
        return lambda: (call(q, k, v),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = call(*leaves)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def measure(shape: Shape) -> list[dict]:
    """Rows of a shape's contestants."""
    found = []
    for name, which, lengths, prepare in contestants(shape):
        row = {
            "suite": SUITE, "shape": shape.number, "mean": shape.mean, "head_dim": shape.head_dim,
            "heads": HEADS, "group": shape.group, "causal": shape.causal,
            "sequences": len(lengths), "version": name, "pass": which,
            "flops": shape.flops(lengths) * (2.5 if which == "backward" else 1),
        }  # fmt: skip
        found.append((row, prepare))
    return time_all(found)


def time_all(contestants: list[tuple[dict, Callable]]) -> list[dict]:
    """The rows, with the times of what they prepare."""
    replays = {}
    for i, (row, prepare) in enumerate(contestants):
        try:
            replays[str(i)] = captured(prepare)[0]
        except Exception as error:  # whatever a library raises, the others are measured
            row["reason"] = reason(error)
    for i, times in timed(replays, ROUNDS).items():
        row, _ = contestants[int(i)]
        ms = statistics.median(times)
        row |= {"ms_p50": ms, "tflops": row["flops"] / ms / 1e9}
    return [row for row, _ in contestants]


def asked_call(name: str, asked: str | None, head_dim: int, is_backward: bool) -> Callable:
    """A call with one thing asked for, of 8 causal rows of 4096 tokens."""
    generator = torch.Generator(DEVICE).manual_seed(head_dim)
    given = {"generator": generator, "device": DEVICE, "dtype": torch.bfloat16}
    q, k, v, do = (torch.randn(8, 4096, heads, head_dim, **given) for heads in (16, 4, 4, 16))
    options: dict = {"causal": True}
    if asked == "kv_lengths":
        options[asked] = torch.linspace(1024, 4096, 8, device=DEVICE).int()
    elif asked is not None:
        options[asked] = torch.rand(16, device=DEVICE)
    return our_call(name, (q, k, v, do), options, is_backward)


def asked(head_dim: int) -> list[tuple[dict, Callable]]:
    """Contestants of all that can be asked for, at a head_dim."""
    contestants = []
    for option in (None, *ASKED):
        for name in ("fa3", "fa4", "portable"):
            for which in ("forward", "backward"):
                if (name, which) == ("fa4", "backward"):  # FA3's
                    continue
                seen = 8 * 4096 * 4096 / 2
                if option == "kv_lengths":  # the last query sees the last key
                    seen = sum(n * n / 2 for n in torch.linspace(1024, 4096, 8).int().tolist())
                flops = 4 * seen * head_dim * 16 * (2.5 if which == "backward" else 1)
                row = {
                    "suite": "asked for", "asked": option, "head_dim": head_dim, "heads": 16,
                    "group": 4, "version": name, "pass": which, "flops": flops,
                }  # fmt: skip
                is_backward = which == "backward"
                contestants.append((row, partial(asked_call, name, option, head_dim, is_backward)))
    return contestants


def warm_up(what: tuple[str, int]) -> str | None:
    """Compile a shape's kernels and check them, in a process of its own."""
    option, number = what
    command = [sys.executable, "-m", "tests.benchmarks.attention.packed", option, str(number)]
    done = run([*command, "--out", "none"], capture_output=True, text=True, timeout=150)
    print((done.stdout + done.stderr[-1500:]).strip() if done.returncode else done.stdout.strip())
    return None if done.returncode == 0 else f"{option} {number} failed"


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=200, device=False)
    command.add_argument("--check", type=int, help="check this shape only, and do not measure")
    command.add_argument("--only", type=int, nargs="+", default=range(SHAPES), help="shapes")
    command.add_argument("--warm", type=int, help="compile what is asked for at a head_dim")
    arguments = command.parse_args()
    if arguments.warm is not None:
        for _, prepare in asked(arguments.warm):
            prepare()()
        return 0
    if arguments.check is not None:
        shape = Shape.drawn(arguments.check)
        print(f"shape {shape.number}: within the budget, {check(shape):.2f} of it", flush=True)
        for *_, prepare in contestants(shape):  # so that all kernels are compiled side by side
            try:
                prepare()()
            except Exception as error:  # `measure` tells the reason
                print(reason(error))
        return 0
    with ThreadPoolExecutor(WARM_UP_PROCESSES) as pool:
        jobs = [("--warm", 256), ("--warm", 128), ("--warm", 64)]
        jobs += [("--check", number) for number in arguments.only]
        failed = [text for text in pool.map(warm_up, jobs) if text]
    print("\n".join(failed), flush=True)
    document = new_document(libraries=("flash-attn-4",), suite=SUITE, tokens=TOKENS)
    document["failed"] = failed
    for number in arguments.only:
        if passed() > arguments.seconds:
            print(f"the time is up before shape {number}", flush=True)
            break
        keep(document, arguments.out, measure(Shape.drawn(number)))
    for head_dim in (64, 128, 256):
        if passed() < arguments.seconds:
            keep(document, arguments.out, time_all(asked(head_dim)))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
