"""Dense attention of random shapes on a Hopper GPU: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.dense --out FILE [--seconds 300] [--only 3 7 ...]

A shape is drawn from its number: 500 to 20000 keys, as many queries or fewer, head dims from 64 to
256, 1 to 8 query heads to a key head, with a causal mask or without. In processes of their own,
side by side, the kernels of a shape are compiled, and its versions checked within the error budget
on a call with shorter lengths of the same remainders. A shape that fails is not timed. Then fa3,
fa4, cuDNN and flash-attn-4 take turns, forward and backward, each as a CUDA graph with a cold L2
cache (flash_versions/bench/measure.py). torch aligns a causal mask of unequal lengths at the top
left, so cuDNN has none of these.
"""

import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from flash_versions import attention, compare  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from tests.benchmarks.attention.headdims import PEERS, drawn  # noqa: E402
from tests.benchmarks.frame import (  # noqa: E402
    call_all,
    in_time,
    keep,
    parser,
    prepared,
    reason,
    share,
    time_all,
    wrong,
)

SUITE = "dense, random"
SHAPES = 20
SHORTEST, LONGEST = 500, 20000
TOKENS, HIDDEN = 32768, 2048  # of a call, about
HEAD_DIMS = (64, 96, 128, 192, 256)
GROUPS = (1, 2, 4, 8)
PROCESSES = min(40, os.cpu_count() or 1)


class Shape(NamedTuple):
    """A call of attention."""

    number: int
    batch: int
    queries: int
    keys: int
    heads: int
    group: int
    head_dim: int
    causal: bool

    @classmethod
    def drawn(cls, number: int) -> "Shape":
        """The shape of a number: every head dim, group and mask comes up equally often. A causal
        mask has as many keys as queries, or more.
        """
        rng = random.Random(number)
        keys = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        queries = keys if rng.random() < 0.7 else rng.randint(SHORTEST, keys)
        head_dim, group = HEAD_DIMS[number % 5], GROUPS[number // 5 % 4]
        heads = max(group, HIDDEN // head_dim // group * group)
        batch = max(1, round(TOKENS / max(queries, keys)))
        return cls(number, batch, queries, keys, heads, group, head_dim, number % 2 > 0)

    @property
    def short(self) -> "Shape":
        """A call of the same kind that a check can afford."""
        cut = {x: n if n < 1024 else 512 + n % 512 for x, n in self._asdict().items()}
        keys = cut["keys"] if self.keys == self.queries else cut["keys"] + cut["queries"]
        return self._replace(batch=1, queries=cut["queries"], keys=keys, heads=self.group)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        if not self.causal:
            return self.queries * self.keys
        return self.queries * self.keys - self.queries * (self.queries - 1) // 2

    @property
    def flops(self) -> int:
        """Of a forward."""
        return 4 * self.batch * self.heads * self.pairs * self.head_dim

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v."""
        dims = self.head_dim, self.head_dim
        return drawn(self.batch, self.queries, self.keys, self.heads, dims, self.group)


def check(shape: Shape) -> float:
    """The largest share of the budget that an error takes, of the shape's short call.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    worst = 0.0
    q, k, v = (x.requires_grad_() for x in shape.short.inputs())
    for version in ("fa3", "fa4"):
        o = attention(q, k, v, causal=shape.causal, version=version)
        do = torch.randn_like(o)
        found = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, (q, k, v), do)))
        assessed = compare(o, q, k, v, causal=shape.causal, do=do, **found)
        worst = max(worst, share(version, assessed))
    return worst


def contestants(shape: Shape) -> Iterator[tuple[dict, Callable]]:
    """(row, what prepares the call)."""
    versions = {x: partial(attention, version=x) for x in ("fa3", "fa4")}
    for which in ("forward", "backward"):
        for name, function in (versions | PEERS).items():
            if name == "cudnn" and shape.causal and shape.queries < shape.keys:
                continue
            if which == "backward" and name == "fa4":  # FA3's
                continue
            flops = shape.flops * (2.5 if which == "backward" else 1)
            row = {"suite": SUITE, **shape._asdict(), "version": name, "pass": which}
            row["flops"] = flops
            yield row, partial(call, shape, function, which == "backward")


def call(shape: Shape, function: Callable, is_backward: bool) -> Callable:
    """A forward or a backward of a function."""
    q, k, v = shape.inputs()
    do = q.new_empty(*q.shape[:3], v.shape[3]).normal_() if is_backward else None
    return prepared(partial(function, causal=shape.causal), q, k, v, do)


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=300, device=False)
    command.add_argument("--check", type=int, help="check this shape only, and do not measure")
    command.add_argument("--only", type=int, nargs="+", default=range(SHAPES), help="shapes")
    arguments = command.parse_args()
    if arguments.check is not None:
        shape = Shape.drawn(arguments.check)
        print(f"within the budget, {check(shape):.2f} of it", flush=True)
        call_all(contestants(shape))  # so that all kernels are compiled side by side
        return 0
    jobs = [("--check", number) for number in arguments.only]
    document = new_document(libraries=("flash-attn-4",), suite=SUITE, shapes=len(jobs))
    document["failed"] = [x for _, x in wrong("attention.dense", jobs, PROCESSES)]
    right = [x for x in arguments.only if x not in document["failed"]]
    for number in in_time(right, arguments.seconds):
        try:
            rows = time_all(list(contestants(Shape.drawn(number))))
        except torch.OutOfMemoryError as error:
            print(f"shape {number}: {reason(error)}", flush=True)
            continue
        keep(document, arguments.out, rows, hidden=("suite", "flops"))
    return bool(document["failed"])


if __name__ == "__main__":
    sys.exit(main())
