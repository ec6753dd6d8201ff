"""`mine check`: a file's version on the cases of the equivalence suite, within the error budget.

Kernels are simulated and watched (see `flash_versions.checker`). Where there is a GPU, the results
there are compared, too.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_versions.checker.compiler import refusal
from flash_versions.checker.observe import copied, sentence_of
from flash_versions.dispatch.autograd.compute import run_backward, run_forward
from flash_versions.dispatch.request import Request, make_request
from flash_versions.dispatch.version import EXPLICIT, Version
from flash_versions.mine.explain import Found, explain, repair
from flash_versions.simulator.checking import Watch
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.from_file import load_version
from flash_versions.versions.oracle.budget import assess_request, in_dtype, plain_pytorch
from flash_versions.versions.oracle.suite import CASES, DTYPES, Case

Upstream = tuple[torch.Tensor | None, torch.Tensor | None]  # gradients of o and of the LSE
Results = dict[str, torch.Tensor]


class Outcome(NamedTuple):
    """What became of a case: `refused` says why it was not tried, `faults` what is wrong."""

    case: Case
    dtype: torch.dtype
    refused: str | None
    faults: list[str]


def check(version: Version) -> Iterator[Outcome]:
    """Try the cases of the suite in turn, each in one of the dtypes."""
    searches = True  # for a repair, in the first case that is wrong
    for i, case in enumerate(CASES):
        dtype = DTYPES[i % len(DTYPES)]
        torch.manual_seed(i)
        request = make_request(*case.inputs(dtype, "cpu"), **case.all_options("cpu"))
        reason = version.unsupported(request)
        faults = [] if reason else find_faults(version, request, i % 2 == 1, searches)
        searches &= not faults
        yield Outcome(case, dtype, reason, faults)


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
    `searches`, a change of the file is sought after which the call is right.
    """
    request = replaced(request, torch.Tensor.detach)
    upstream: Upstream = None, None
    if version.backward is not fa2_backward.backward:
        batch, M, heads, _ = request.q.shape
        do = torch.randn(batch, M, heads, request.v.shape[3]).to(request.q.dtype)
        upstream = do, torch.randn(batch, heads, M) if of_lse else None
    try:
        results, watch = run(version, request, upstream)
        for name, x in watch.inputs.items():
            if not same(x, given(request)[name]):
                return [f"{name} was changed; inputs must stay as they are"]
        oracle = plain_pytorch(in_dtype(request, torch.float64), *upstream)
        faults = []
        for name, accuracy in assess_request(results, request, *upstream).items():
            if not accuracy.ok:
                found = Found(name, results[name], oracle[name], accuracy, request, watch)
                faults += explain(found, version.source, partial(run, version, request, upstream))
        if faults and searches:
            faults += repair(version.source, partial(is_right, request=request, upstream=upstream))
        if not faults and (filled := with_unseen_keys(request)) is not None:
            for name, x in run(version, filled, upstream)[0].items():
                if x.isnan().any():
                    faults.append(
                        f"{name} depends on keys behind kv_lengths, which may be NaN in a cache: "
                        "load them with a mask"
                    )
        if not faults and torch.cuda.is_available():
            faults = on_gpu(version, request, upstream)
    except Exception as error:
        return [sentence_of(error, version.source)]
    return faults


def run(version: Version, request: Request, upstream: Upstream) -> tuple[Results, Watch]:
    """The results of a call by name, and the `Watch` of what its kernels did on copies."""
    copy = replaced(request, copied)
    watch = Watch(given(copy))
    with watch.watching():
        o, lse, _ = run_forward(version, copy)
        results: Results = {"o": o, "lse": lse}
        if upstream[0] is not None:
            gradients = run_backward(version, copy, o, lse, None, *upstream)
            results |= {f"d{name}": x for name, x in zip("qkv", gradients[:3]) if x is not None}
    return results, watch


def is_right(file: Path, request: Request, upstream: Upstream) -> bool:
    """Whether a version in a file gives the right results of a call."""
    try:
        results, _ = run(load_version(file), request, upstream)
    except Exception:  # a change need not be a version
        return False
    finally:
        EXPLICIT.pop(str(file), None)
    return all(x.ok for x in assess_request(results, request, *upstream).values())


def on_gpu(version: Version, request: Request, upstream: Upstream) -> list[str]:
    """What is wrong with the numbers that a GPU gives."""
    there = replaced(request, torch.Tensor.cuda)
    do, dlse = (x if x is None else x.cuda() for x in upstream)
    results, _ = run(version, there, (do, dlse))
    found = assess_request(results, there, do, dlse)
    return [f"{x} on the GPU, though not simulated: {y}" for x, y in found.items() if not y.ok]


def with_unseen_keys(request: Request) -> Request | None:
    """A request with NaN in all keys and values behind kv_lengths; None if there are no such."""
    k, lengths = request.k, request.kv_lengths
    if lengths is None or request.cu_seqlens_k is not None or request.block_table is not None:
        return None
    unseen = (torch.arange(k.shape[1]) >= lengths.clamp(0, k.shape[1])[:, None])[..., None, None]
    return replaced(request, lambda x: x.masked_fill(unseen, float("nan")), "kv")


def given(request: Request) -> dict[str, torch.Tensor]:
    """The tensors of a request by name."""
    return {name: x for name, x in request._asdict().items() if torch.is_tensor(x)}


def replaced(request: Request, by: Any, names: Any = None) -> Request:
    """A request with its tensors, or those of these names, changed by a function."""
    return request._replace(**{x: by(y) for x, y in given(request).items() if x in (names or x)})


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(x, y) or torch.allclose(x, y, 0, 0, equal_nan=True)
