"""`mine check`: a file's version on the cases of the equivalence suite, within the error budget.

Kernels are simulated and watched (see `flash_versions.checker`). Where there is a GPU, the results
there are compared, too.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from flash_versions.checker.case import FACTORS, Case, Function, Results
from flash_versions.checker.observe import Fault, called, refusal
from flash_versions.dispatch.autograd.compute import run_backward, run_forward
from flash_versions.dispatch.request import Request, make_request
from flash_versions.dispatch.version import EXPLICIT, Version
from flash_versions.lessons import code_of
from flash_versions.mine.mistakes import BLOCKS, find_mistake
from flash_versions.simulator.checking import Watch
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.from_file import load_version
from flash_versions.versions.oracle import suite
from flash_versions.versions.oracle.budget import Accuracy, assess_request, in_dtype, plain_pytorch

SHARED = 0.25  # of the right cases may have what all wrong ones have
# What `new` writes.
START = f'''"""Attention of mine, from the lesson `fa2`. Change what you like, and check it.

python -m flash_versions.mine check    is it right? A wrong result is explained

FEATURES says what `forward` can do: any of causal, window, softcap, alibi_slopes, sink, dropout_p,
kv_lengths, cu_seqlens, kv_starts, block_table, query_intervals, grouped_heads (fewer key heads than
query heads), head_dim_v (values wider or narrower than keys), num_splits and precision (FP8).
Others are refused. A `backward(request, o, lse, do, dlse)` that returns dq, dk, dv may follow.
Without one, training uses that of FA2, which is right only for the scores that the request
describes.
"""
{code_of("fa2")}'''


class Outcome(NamedTuple):
    """What is wrong with a case; None if it was not tried, as it needs what is not declared."""

    case: suite.Case
    dtype: torch.dtype
    faults: list[str] | None


def check(version: Version) -> Iterator[Outcome]:
    """Try the cases of the suite in turn, each in one of the dtypes. In the first that is wrong, a
    repair is sought.
    """
    searches = True
    for i, case in enumerate(suite.CASES):
        dtype = suite.DTYPES[i % len(suite.DTYPES)]
        torch.manual_seed(i)
        request = make_request(*case.inputs(dtype, "cpu"), **case.all_options("cpu"))
        faults = None
        if version.unsupported(request) is None:
            faults = find_faults(version, request, i % 2 == 1, searches)
            searches &= not faults
        yield Outcome(case, dtype, faults)


def properties(outcome: Outcome) -> dict[str, bool]:
    """What a case may have in common with others, and whether it is so."""
    x = outcome.case
    found = {
        "more queries than keys under a causal mask: queries that see no key": (
            x.causal and x.M > x.N
        ),
        "grouped heads": x.heads != x.kv_heads,
        "kv_lengths": x.kv_lengths is not None,
        "kv_starts": x.kv_starts is not None,
        "a causal mask with as many queries as keys": x.causal and x.M == x.N,
        "a causal mask": x.causal,
        "no causal mask": not x.causal,
        "more than one sequence": x.batch > 1,
        "a head_dim that is no power of two": x.head_dim & (x.head_dim - 1) > 0,
        "a 16-bit dtype": outcome.dtype != torch.float32,
        "float32": outcome.dtype == torch.float32,
        "a scale of their own": "scale" in x.options,
    }
    found |= {f"more than {n} keys: several blocks of {n}": n < x.N for n in BLOCKS}
    found |= {f"more than {n} queries: several blocks of {n}": n < x.M for n in BLOCKS}
    return found | {f"a number of keys that {n} does not divide": x.N % n > 0 for n in BLOCKS}


def common_property(wrong: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """A sentence about the property that best tells wrong cases from right ones: all wrong ones
    have it, and few of the right ones. None if there is no such property.
    """
    those, others = [properties(x) for x in wrong], [properties(x) for x in right]
    shared = [words for words in those[0] if all(x[words] for x in those)]
    count = {words: sum(x[words] for x in others) for words in shared}
    best = min(shared, key=lambda words: count[words], default="")
    if not best or count[best] >= len(right) * SHARED:
        return None
    return (
        f"All {len(wrong)} wrong cases, and {count[best]} of {len(right)} right ones, have {best}."
    )


def last_word(version: Version) -> str | None:
    """Why Triton's compiler refuses the kernels of a small call, or None: it does not."""
    q = torch.randn(1, 64, 2, 64, dtype=torch.bfloat16)
    request = make_request(q, q, q)
    return version.unsupported(request) or refusal(version.forward, (request,), version.source)


def find_faults(
    version: Version, request: Request, of_lse: bool = False, searches: bool = True
) -> list[str]:
    """What is wrong with a version's results of one call, in sentences; [] if they are right.

    With `of_lse`, the LSE has a gradient, too. The backward is tried if it is the file's own. With
    `searches`, lines of the file that `new` writes are tried in the place of the version's.
    """
    call = Call(request, version.backward is not fa2_backward.backward, of_lse)
    return call.explained(call.run_by(version), version.source, START if searches else "")


class Call(Case):
    """A call of `attention`, and of its backward.

    Attributes:
        upstream: the gradients of o and of the LSE, or None.
    """

    computes = True

    def __init__(self, request: Request, with_backward: bool, of_lse: bool) -> None:
        tensors = {name: x for name, x in request._asdict().items() if torch.is_tensor(x)}
        self.inputs: dict[str, Any] = {name: x.detach() for name, x in tensors.items()}
        self.request = request = request._replace(**self.inputs)
        batch, M, heads, _ = request.q.shape
        do = torch.randn(batch, M, heads, request.v.shape[3]).to(request.q.dtype)
        dlse = torch.randn(batch, heads, M) if of_lse else None
        self.upstream = (do, dlse) if with_backward else (None, None)
        self.truth = plain_pytorch(in_dtype(request, torch.float64), *self.upstream)
        self.factors = FACTORS | {"1 / request.scale": 1 / (request.scale or math.inf)}

    def load(self, file: str) -> Function:
        """See `Case`."""
        try:
            return self.run_by(load_version(file))
        finally:
            EXPLICIT.pop(file, None)

    def run_by(self, version: Version) -> Function:
        """A function of the request's tensors that gives a version's results."""

        def run(*tensors: torch.Tensor) -> Results:
            given: dict[str, Any] = dict(zip(self.inputs, tensors))
            request = self.request._replace(**given)
            do, dlse = (x if x is None else x.to(request.q.device) for x in self.upstream)
            o, lse, _ = run_forward(version, request)
            results = {"o": o, "lse": lse}
            if do is not None:
                gradients = run_backward(version, request, o, lse, None, do, dlse)
                results |= {f"d{x}": y for x, y in zip("qkv", gradients[:3]) if y is not None}
            return results

        return run

    def assess(self, results: Results) -> dict[str, Accuracy]:
        """See `Case`."""
        return assess_request(results, self.request, *self.upstream)

    def mistake(self, name: str, found: torch.Tensor, wrong: torch.Tensor) -> str | None:
        """See `Case`."""
        if name not in ("o", "lse"):
            return None
        empty = self.truth["lse"] == -math.inf
        if not (wrong & ~(empty if name == "lse" else empty.mT[..., None])).any():
            return (
                f"only queries that see no key are wrong; their {name} must be "
                f"{'0' if name == 'o' else '-inf'} (-inf minus -inf is NaN, and 0 / 0)"
            )
        mistake = find_mistake(name, found, self.request)
        return mistake and f"exactly this mistake gives these numbers: {mistake}"

    def check(self, function: Function, file: str) -> tuple[Results, Watch]:
        """See `Case`. Also with NaN in keys that no query sees, and on a GPU if there is one."""
        found = super().check(function, file)
        further = dict[str, dict[str, Any]]()
        if (lengths := self.request.kv_lengths) is not None:
            N = self.request.k.shape[1]
            unseen = (torch.arange(N) >= lengths.clamp(0, N)[:, None])[..., None, None]
            filled = {x: self.inputs[x].masked_fill(unseen, math.nan) for x in "kv"}
            words = (
                "depends on keys behind kv_lengths, which may be NaN in a cache; mask their load"
            )
            further[words] = {**self.inputs, **filled}
        if torch.cuda.is_available():
            there = {name: x.cuda() for name, x in self.inputs.items()}
            further["is wrong on the GPU, though not simulated"] = there
        for words, inputs in further.items():
            results, _ = called(function, inputs, file, self.computes)
            for name, accuracy in self.assess({x: y.cpu() for x, y in results.items()}).items():
                if not accuracy.ok:
                    raise Fault(f"{name} {words}: {accuracy}")
        return found
