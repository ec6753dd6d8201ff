"""Interval masks on a Hopper GPU: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.masks --out FILE [--seconds 300] [--only 3 7 ...]

Documents of random lengths, the shapes of packed.py: as an interval mask, against the same
documents as packed sequences. A prompt of 2048 tokens with 16 answers of 256, for one and for four
prompts: against 16 rows for each prompt that have a copy of it.

First, a process for each shape checks smaller draws of many masks: results and gradients have to be
within the error budget, and o and dv the same to the bit in a second call. Then the contestants
take turns, each as a CUDA graph with a cold L2 cache (flash_versions/bench/measure.py). The lists
of blocks are made in every call.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from flash_versions import attention, masks
from flash_versions.bench.document import new_document
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.benchmarks.attention.packed import HEADS, SHAPES, Shape, our_call
from tests.benchmarks.frame import call_all, in_time, keep, parser, share, time_all, wrong

SUITE = "interval masks"
PROMPT, ANSWERS = 2048, [256] * 16
PROMPTS = {SHAPES + i: (head_dim, batch) for i, (head_dim, batch) in enumerate(
    (head_dim, batch) for batch in (1, 4) for head_dim in (64, 128)
)}  # fmt: skip
KV_HEADS = 4  # of the prompts
PROCESSES = 10  # whose references in fp64 fit on an H200 together


def drawn_masks(shape: Shape) -> Iterator[tuple[int, dict]]:
    """(tokens, options): documents of the shape's kind, and masks of other kinds."""
    lengths = [*Shape.drawn(shape.number, 2000).lengths, 0, 1, 333, 64, 128]
    yield sum(lengths), masks.documents(lengths, causal=shape.causal, device="cuda")
    answers = lengths[: len(lengths) // 2 + 1]
    yield 700 + sum(answers), masks.shared_prompt(700, answers, device="cuda")
    n = 1000 + shape.number
    by_head = 1, HEADS // shape.group, n
    starts = torch.randint(n // 2, (n,), device="cuda")
    ends = torch.randint(n + 1, by_head, device="cuda")
    yield n, {"causal": shape.causal, "query_starts": starts, "query_ends": ends}


def check(shape: Shape) -> float:
    """The largest share of the budget that an error takes.

    Raises:
        AssertionError: an error is beyond the budget, or a result does not repeat.
    """
    worst = 0.0
    generator = torch.Generator("cuda").manual_seed(shape.number)
    torch.manual_seed(shape.number)
    for tokens, options in drawn_masks(shape):
        heads = (HEADS, HEADS // shape.group, HEADS // shape.group, HEADS)
        given = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
        *qkv, do = (torch.randn(1, tokens, h, shape.head_dim, **given) for h in heads)
        for version in ("fa3", "fa4"):
            leaves = [x.clone().requires_grad_() for x in qkv]
            call = partial(attention, *leaves, version=version, return_lse=True, **options)
            o, lse = call()
            found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do)))
            found |= {"o": o.detach(), "lse": lse.detach()}
            assessed = assess_request(found, make_request(*qkv, **options), do)
            worst = max(worst, share(version, assessed))
            again, _ = call()
            assert torch.equal(again, o), "o does not repeat"
            dv = torch.autograd.grad(again, leaves, do)[2]
            assert torch.equal(dv, found["dv"]), "dv does not repeat"
    return worst


def of_documents(number: int) -> Iterator[tuple[dict, Callable]]:
    """(row, what prepares the call) of each contestant for documents."""
    shape = Shape.drawn(number)
    *flat, bounds = shape.inputs(shape.lengths)
    whole = tuple(x[None] for x in flat)
    options = masks.documents(shape.lengths, causal=shape.causal, device="cuda")
    packed = {"causal": shape.causal, "cu_seqlens_q": bounds}
    about = {
        "mask": "documents", "shape": number, "mean": shape.mean, "head_dim": shape.head_dim,
        "heads": HEADS, "group": shape.group, "causal": shape.causal,
        "sequences": len(shape.lengths), "flops": shape.flops(shape.lengths),
    }  # fmt: skip
    yield from passes(about, "fa3", "packed", partial(our_call, "fa3", tuple(flat), packed))
    yield from passes(about, "fa4", "packed", partial(our_call, "fa4", tuple(flat), packed))
    yield from everybody(about, whole, options)


def of_prompt(number: int) -> Iterator[tuple[dict, Callable]]:
    """The same for answers that share their prompt."""
    head_dim, batch = PROMPTS[number]
    answer = ANSWERS[0]
    pairs = PROMPT * PROMPT / 2 + len(ANSWERS) * (PROMPT * answer + answer * answer / 2)
    about = {
        "mask": "shared prompt", "shape": number, "head_dim": head_dim, "heads": HEADS,
        "group": HEADS // KV_HEADS, "causal": True, "sequences": batch * len(ANSWERS),
        "batch": batch, "flops": 4 * pairs * head_dim * HEADS * batch,
    }  # fmt: skip

    def inputs(rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        given = {"device": "cuda", "dtype": torch.bfloat16}
        return tuple(torch.randn(rows, tokens, h, head_dim, **given) for h in heads)

    copies = inputs(batch * len(ANSWERS), PROMPT + answer)
    causal = {"causal": True}
    yield from passes(about, "fa3", "copies", partial(our_call, "fa3", copies, causal))
    yield from passes(about, "fa4", "copies", partial(our_call, "fa4", copies, causal))
    options = masks.shared_prompt(PROMPT, ANSWERS, device="cuda")
    yield from everybody(about, inputs(batch, PROMPT + sum(ANSWERS)), options)


def everybody(about: dict, inputs: tuple, options: dict) -> Iterator[tuple[dict, Callable]]:
    """Those who take the mask."""
    for version in ("fa3", "fa4", "fa2"):
        yield from passes(about, version, "intervals", partial(our_call, version, inputs, options))


def passes(
    about: dict, version: str, form: str, prepare: Callable
) -> Iterator[tuple[dict, Callable]]:
    """A forward, and a backward where it is a version's own."""
    for which in ("forward", "backward"):
        if (version, which) != ("fa4", "backward"):
            row = {"suite": SUITE, **about, "version": version, "form": form, "pass": which}
            row["flops"] *= 2.5 if which == "backward" else 1
            yield row, partial(prepare, which == "backward")


def contestants(number: int) -> list[tuple[dict, Callable]]:
    """All of a shape."""
    return list((of_prompt if number in PROMPTS else of_documents)(number))


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=300, device=False)
    command.add_argument("--check", type=int, help="check this shape only, and do not measure")
    command.add_argument("--only", type=int, nargs="+", default=[*PROMPTS, *range(SHAPES)])
    arguments = command.parse_args()
    if arguments.check is not None:
        number = arguments.check
        if number < SHAPES:
            print(f"within the budget, {check(Shape.drawn(number)):.2f} of it")
        call_all(contestants(number))  # so that all kernels are compiled side by side
        return 0
    jobs = [("--check", number) for number in arguments.only]
    document = new_document(suite=SUITE, prompt=PROMPT, answers=ANSWERS)
    document["failed"] = wrong("attention.masks", jobs, PROCESSES, seconds=240)
    for number in in_time(arguments.only, arguments.seconds):
        keep(document, arguments.out, time_all(contestants(number)))
    return bool(document["failed"])


if __name__ == "__main__":
    sys.exit(main())
