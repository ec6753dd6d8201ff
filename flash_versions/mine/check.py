"""`mine check`: a file's version on the cases of the equivalence suite, within the error budget."""

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_versions.dispatch.autograd.compute import run_backward, run_forward
from flash_versions.dispatch.request import Request, make_request
from flash_versions.dispatch.version import Version
from flash_versions.mine.explain import explain
from flash_versions.mine.guard import guarded_input, guarding
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.oracle.budget import assess_request, in_dtype, plain_pytorch
from flash_versions.versions.oracle.suite import CASES, DTYPES, Case

GUARDED = ("q", "k", "v", "kv_lengths", "alibi_slopes", "sink")


class Outcome(NamedTuple):
    """What became of a case: `refused` says why it was not tried, `faults` what is wrong."""

    case: Case
    dtype: torch.dtype
    refused: str | None
    faults: list[str]


def check(version: Version) -> Iterator[Outcome]:
    """Try the cases of the suite in turn, each in one of the dtypes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for i, case in enumerate(CASES):
        dtype = DTYPES[i % len(DTYPES)]
        torch.manual_seed(i)
        request = make_request(*case.inputs(dtype, device), **case.all_options(device))
        reason = version.unsupported(request)
        faults = [] if reason else find_faults(version, request, i % 2 == 1)
        yield Outcome(case, dtype, reason, faults)


def find_faults(version: Version, request: Request, of_lse: bool = False) -> list[str]:
    """What is wrong with a version's results of one call, in sentences; [] if they are right.

    With `of_lse`, the LSE has a gradient, too. The backward is tried if it is the file's own.
    """
    request = replaced(request, {name: x.detach() for name, x in tensors(request).items()})
    q, v = request.q, request.v
    own_backward = version.backward is not fa2_backward.backward
    do = dlse = None
    if own_backward:
        do = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(q.dtype)
        dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device) if of_lse else None
    try:
        results, faults = run(version, request, (do, dlse), float("nan"))
        if faults:
            return faults
        again, _ = run(version, request, (do, dlse), 0.0)
    except Exception as error:
        return [describe(error, Path(version.source))]
    oracle = plain_pytorch(in_dtype(request, torch.float64), do, dlse)
    for name, accuracy in assess_request(results, request, do, dlse).items():
        if not accuracy.ok:
            differs = not torch.equal(results[name].nan_to_num(), again[name].nan_to_num())
            differs |= not torch.equal(results[name].isnan(), again[name].isnan())
            faults += explain(name, results[name], request, oracle[name], accuracy, differs)
    if not faults and (filled := with_unseen_keys(request, float("nan"))) is not None:
        others, _ = run(version, filled, (do, dlse), float("nan"))
        faults = [
            f"{name} depends on keys behind kv_lengths, which may be NaN in a cache: load them "
            f"with a mask"
            for name, x in others.items()
            if x.isnan().any()
        ]
    return faults


def with_unseen_keys(request: Request, number: float) -> Request | None:
    """A request with this number in all keys and values behind kv_lengths; None if there are no
    such.
    """
    k, lengths = request.k, request.kv_lengths
    if lengths is None or request.cu_seqlens_k is not None or request.block_table is not None:
        return None
    row = torch.arange(k.shape[1], device=k.device)
    unseen = (row >= lengths.clamp(0, k.shape[1])[:, None])[..., None, None]
    return replaced(request, {x: getattr(request, x).masked_fill(unseen, number) for x in "kv"})


def tensors(request: Request) -> dict[str, torch.Tensor]:
    """The tensors of a request that a kernel reads, by name."""
    given: dict[str, Any] = request._asdict()
    return {name: given[name] for name in GUARDED if given[name] is not None}


def replaced(request: Request, by: dict[str, Any]) -> Request:
    """A request with other tensors."""
    return request._replace(**by)


def run(
    version: Version, request: Request, upstream: tuple, margin: float
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The results of a call by name, and what it wrote where it must not.

    Args:
        version: what computes.
        request: the call.
        upstream: the gradients of o and of the LSE, for the backward; None of o: forward only.
        margin: what is in the memory before and behind the inputs.
    """
    given = tensors(request)
    copies = {name: guarded_input(x, margin) for name, x in given.items()}
    guarded = replaced(request, copies)
    with guarding() as allocated:
        o, lse, _ = run_forward(version, guarded)
        results = {"o": o, "lse": lse}
        if upstream[0] is not None:
            gradients = run_backward(version, guarded, o, lse, None, *upstream)
            results |= {f"d{name}": x for name, x in zip("qkv", gradients[:3]) if x is not None}
        if o.is_cuda:
            torch.cuda.synchronize()
    names = {x.data_ptr(): name for name, x in results.items()}
    faults = []
    for one in allocated:
        if where := one.damage():
            shape = tuple(one.tensor.shape)
            name = names.get(one.tensor.data_ptr(), "a tensor")
            faults.append(
                f"a store into {name} of shape {shape} hits memory {where}: it needs a mask"
            )
    for name, x in given.items():
        if not torch.equal(copies[name].nan_to_num(), x.nan_to_num()):
            faults.append(f"{name} was changed; inputs must stay as they are")
    return results, faults


def describe(error: BaseException, path: Path) -> str:
    """An error in one line, with the last line of the file that it passed."""
    reasons, line = [error], None
    while (cause := reasons[-1].__cause__ or reasons[-1].__context__) is not None:
        reasons.append(cause)
    for one in reasons:
        for frame in traceback.extract_tb(one.__traceback__):
            if Path(frame.filename).resolve() == path.resolve():
                line = frame.lineno
    said = str(reasons[-1]).strip().splitlines() or [""]
    where = "" if line is None else f"line {line} of {path}: "
    return f"{where}{type(reasons[-1]).__name__}: {said[-1]}"
