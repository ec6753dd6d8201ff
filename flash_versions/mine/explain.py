"""Why is a result wrong? The wrong elements, and the mistake that gives the same numbers.

A mistake is tried by asking the fp64 oracle for what it would give: if the kernel's result is that,
within its error budget, the mistake is found.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from flash_versions.dispatch.request import Request
from flash_versions.mine.guard import never_stored
from flash_versions.versions.oracle.budget import (
    Accuracy,
    assess_request,
    in_dtype,
    max_error,
    plain_pytorch,
)

INDICES = {"o": ("batch", "query", "head", "dim"), "lse": ("batch", "head", "query")}
OF_GRADIENT = ("batch", "row", "head", "dim")
BLOCKS = (16, 32, 64, 128)
OPTIONAL = ("softcap", "alibi_slopes", "sink", "kv_lengths", "kv_starts")


def mistakes(request: Request) -> Iterator[tuple[str, Request]]:
    """What a kernel may have computed in the place of a request, and how it is said."""
    q, k, v = request.q, request.k, request.v
    M, N, heads, kv_heads = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    yield "the scores are not multiplied by request.scale", request._replace(scale=1.0)
    yield (
        "the scores are multiplied by request.scale twice",
        request._replace(scale=request.scale**2),
    )
    yield (
        "exp2 was taken of scores that are not multiplied by log2(e)",
        request._replace(scale=request.scale * math.log(2)),
    )
    if request.window_right is not None:
        yield "a query sees keys behind its own", request._replace(window_right=None)
        if request.kv_lengths is None and request.window_left is None and M != N:
            yield (
                "causal is aligned to the first query; the last query must see the last key",
                request._replace(window_right=M - N),
            )
    if request.window_left is not None:
        yield "the left side of window is ignored", request._replace(window_left=None)
    for option in OPTIONAL:
        if getattr(request, option) is not None:
            without: dict[str, Any] = {option: None}
            yield f"{option} is ignored", request._replace(**without)
    if request.group > 1:
        cycled = torch.arange(heads, device=q.device) % kv_heads
        yield (
            "query head h uses key head h % kv_heads; it is h // group",
            request._replace(k=k[:, :, cycled], v=v[:, :, cycled]),
        )
    if request.window_left is None and request.window_right is None and not request.dropout_p:
        for block in BLOCKS:
            if (rest := N % block) and rest < N and request.kv_lengths is None:
                yield (
                    f"the last {rest} keys are missing: they fill no whole block of {block}",
                    request._replace(k=k[:, :-rest], v=v[:, :-rest]),
                )
            if rest and request.kv_lengths is None:
                more = (0, 0, 0, 0, 0, block - rest)
                yield (
                    f"keys past the end count with a score of 0, up to a block of {block}; their "
                    "scores must be -inf",
                    request._replace(k=pad(k, more), v=pad(v, more)),
                )


def find_mistake(
    name: str, result: torch.Tensor, request: Request, right: torch.Tensor, accuracy: Accuracy
) -> str | None:
    """The mistake that gives this o or lse, in words, or None."""
    budget = accuracy.budget
    if name == "lse" and max_error(result, right / math.log(2)) <= budget:
        return "the LSE is in base 2; multiply it by ln 2"
    for words, other in mistakes(request):
        if other.k.shape[1] == 0:
            continue
        found = plain_pytorch(in_dtype(other, torch.float64), None, None)[name]
        if max_error(found, right) > budget and assess_request({name: result}, other)[name].ok:
            return words
    return None


def without_keys(request: Request) -> torch.Tensor:
    """Which queries see no key: booleans (batch, heads, M)."""
    return plain_pytorch(in_dtype(request, torch.float64), None, None)["lse"] == -math.inf


def ranges(indices: torch.Tensor) -> str:
    """Sorted numbers as "0-3, 7"."""
    found: list[list[int]] = []
    for i in indices.tolist():
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    texts = [f"{a}-{b}" if a != b else str(a) for a, b in found]
    return ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")


def places(wrong: torch.Tensor, name: str) -> str:
    """The numbers along each axis at which something is wrong."""
    found = []
    for i, axis in enumerate(INDICES.get(name, OF_GRADIENT)):
        others = [j for j in range(wrong.dim()) if j != i]
        if wrong.shape[i] > 1:
            found.append(f"{axis} {ranges(wrong.any(others).nonzero().flatten())}")
    return ", ".join(found) or "the only one"


def explain(
    name: str,
    result: torch.Tensor,
    request: Request,
    right: torch.Tensor,
    accuracy: Accuracy,
    reads_past_the_end: bool,
) -> list[str]:
    """Sentences about a wrong result.

    Args:
        name: o, lse, dq, dk or dv.
        result: what the kernel gave, in guarded memory.
        request: the call.
        right: what the fp64 oracle gives.
        accuracy: the error and its budget.
        reads_past_the_end: whether other memory behind the inputs gives another result.
    """
    exact = result.double()
    error = torch.where(exact == right, 0.0, (exact - right).abs()).nan_to_num(nan=math.inf)
    wrong = error > accuracy.budget
    worst = torch.unravel_index(error.argmax(), error.shape)
    place = ", ".join(str(int(i)) for i in worst)
    said = [
        f"{name}: {accuracy}",
        f"{name}[{place}] is {exact[worst].item():.6g}, and {right[worst].item():.6g} is right; "
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong: {places(wrong, name)}",
    ]
    empty = torch.zeros_like(wrong)
    if name in INDICES:
        of_queries = without_keys(request)
        empty = (of_queries if name == "lse" else of_queries.mT[..., None]).expand_as(wrong)
    count = int((never_stored(result) & wrong).sum())
    if count:
        said.append(
            f"{count} elements of {name} were never stored: is the grid large enough, and does the "
            "mask of the store leave rows out?"
        )
    elif reads_past_the_end:
        said.append(
            "the result depends on memory outside of q, k and v: a load has no mask there, or a "
            "wrong address, or what it loads is used without a mask"
        )
    elif bool((wrong == (wrong & empty)).all()):
        said.append(
            f"only queries that see no key are wrong; their {name} must be "
            f"{'0' if name == 'o' else '-inf'} (-inf minus -inf is NaN, and 0 / 0)"
        )
    elif name in INDICES and (mistake := find_mistake(name, result, request, right, accuracy)):
        said.append(f"exactly this mistake gives these numbers: {mistake}")
    elif name in ("dq", "dk") and max_error(exact * request.scale, right) <= accuracy.budget:
        said.append(f"{name} is not multiplied by request.scale")
    return said
