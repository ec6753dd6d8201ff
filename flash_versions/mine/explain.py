"""Why is a result wrong? The wrong elements, and the mistake that gives the same numbers.

A mistake is tried by asking the fp64 oracle for what it would give: if the kernel's result is that,
within its error budget, the mistake is found. A change of the file after which the call is right is
its repair.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from flash_versions.checker.edits import by_itself, first_right
from flash_versions.dispatch.request import Request
from flash_versions.simulator.checking import Watch
from flash_versions.simulator.origins import origin_of
from flash_versions.versions.oracle.budget import (
    Accuracy,
    assess_request,
    in_dtype,
    max_error,
    plain_pytorch,
)
from flash_versions.versions.oracle.reference import forward_weighed

INDICES = {"o": ("batch", "query", "head", "dim"), "lse": ("batch", "head", "query")}
OF_GRADIENT = ("batch", "row", "head", "dim")
BLOCKS = (16, 32, 64, 128)
SECONDS = 3.0  # for the search of a repair
OPTIONAL = ("softcap", "alibi_slopes", "sink", "kv_lengths", "kv_starts")
SCALES = {
    "the scores are not multiplied by request.scale": lambda scale: 1.0,
    "the scores are multiplied by request.scale twice": lambda scale: scale**2,
    "exp2 was taken of scores that are not multiplied by log2(e)": lambda x: x * math.log(2),
}


class Found(NamedTuple):
    """A wrong result: its name, what the kernel gave, and what the fp64 oracle gives."""

    name: str
    result: torch.Tensor
    right: torch.Tensor
    accuracy: Accuracy
    request: Request
    watch: Watch


def mistakes(request: Request) -> Iterator[tuple[str, Request]]:
    """What a kernel may have computed in the place of a request, and how it is said."""
    q, k, v, N = request.q, request.k, request.v, request.k.shape[1]
    left, right, changed = request.window_left, request.window_right, request._replace
    for words, scale in SCALES.items():
        yield words, changed(scale=scale(request.scale))
    if right is not None:
        yield "a query sees keys behind its own", changed(window_right=None)
        for by, words in ((1, "one key too many"), (-1, "one key too few")):
            yield f"the mask is off by one: a query sees {words}", changed(window_right=right + by)
        if request.kv_lengths is None and left is None and q.shape[1] != N:
            yield (
                "causal is aligned to the first query; the last query must see the last key",
                changed(window_right=q.shape[1] - N),
            )
    if left is not None:
        yield "the left side of window is ignored", changed(window_left=None)
        for by, words in ((1, "one key too many"), (-1, "one key too few")):
            yield f"the window's left side is off by one: {words}", changed(window_left=left + by)
    for option in OPTIONAL:
        if getattr(request, option) is not None:
            without: dict[str, Any] = {option: None}
            yield f"{option} is ignored", changed(**without)
    if request.group > 1:
        cycled = torch.arange(q.shape[2], device=q.device) % k.shape[2]
        yield (
            "query head h uses key head h % kv_heads; it is h // group",
            changed(k=k[:, :, cycled], v=v[:, :, cycled]),
        )
    if left is not None or right is not None or request.dropout_p or request.kv_lengths is not None:
        return
    yield "the mask is off by one: the last key is left out", changed(k=k[:, :-1], v=v[:, :-1])
    for block in (1, *BLOCKS):
        if (rest := N % block) and rest < N:
            yield (
                f"the last {rest} keys are missing: they fill no whole block of {block}",
                changed(k=k[:, :-rest], v=v[:, :-rest]),
            )
        if rest or block == 1:
            more = (0, 0, 0, 0, 0, block - rest)
            yield (
                f"{block - rest} keys past the end count with a score of 0, up to a block of "
                f"{block}; their scores must be -inf, by a mask",
                changed(k=pad(k, more), v=pad(v, more)),
            )


def not_rescaled(block: int, keeps: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What o is if a sum is not rescaled when the maximum grows: "acc", "l" or "acc and l"."""

    def weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = p[..., : v.shape[1]]
        blocks = [x.amax(-1, keepdim=True).expand(x.shape) for x in p.split(block, -1)]
        largest = torch.cat(blocks, -1).cummax(-1).values.clamp(min=1e-300)
        last, old = p / largest[..., -1:], p / largest  # by the last maximum, by that of its time
        acc = torch.einsum("bhmn,bnhd->bmhd", old if "acc" in keeps else last, v)
        return acc / (old if "l" in keeps else last).sum(-1).clamp(min=1e-300).mT[..., None]

    return weigh


def find_mistake(found: Found) -> str | None:
    """The mistake that gives this o or lse, in words, or None."""
    name, result, right, accuracy, request, _ = found
    if name == "lse" and max_error(result, right / math.log(2)) <= accuracy.budget:
        return "the LSE is in base 2; multiply it by ln 2"
    for words, other in mistakes(request):
        if other.k.shape[1] > 0:
            would_be = plain_pytorch(in_dtype(other, torch.float64), None, None)[name]
            differs = max_error(would_be, right) > accuracy.budget
            if differs and assess_request({name: result}, other)[name].ok:
                return words
    exact = in_dtype(request, torch.float64)
    for block in BLOCKS if name == "o" else ():
        for keeps in ("acc", "l", "acc and l"):
            would_be, _ = forward_weighed(exact, not_rescaled(block, keeps))
            if max_error(result, would_be) <= accuracy.budget < max_error(would_be, right):
                return (
                    f"{keeps}, what was summed before, is not rescaled when a block of {block} "
                    "keys "
                    "has a larger maximum: multiply it by alpha = exp(old maximum - new maximum)"
                )
    return None


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


def explain(found: Found, file: str, again: Callable[[], Any]) -> list[str]:
    """Sentences about a wrong result.

    Args:
        found: the result.
        file: the version's.
        again: gives the results once more, and what happened.
    """
    name, result, right, accuracy, request, watch = found
    exact = result.double()
    error = torch.where(exact == right, 0.0, (exact - right).abs()).nan_to_num(nan=math.inf)
    wrong = error > accuracy.budget
    worst = torch.unravel_index(error.argmax(), error.shape)
    value = exact[worst].item()
    said = [
        f"{name}: {accuracy}",
        f"{name}[{', '.join(str(int(i)) for i in worst)}] is {value:.6g}, and "
        f"{right[worst].item():.6g} is right; {int(wrong.sum())} of {wrong.numel()} elements are "
        f"wrong: {places(wrong, name)}",
    ]
    empty = torch.zeros_like(wrong)
    if name in INDICES:
        of_queries = plain_pytorch(in_dtype(request, torch.float64), None, None)["lse"] == -math.inf
        empty = (of_queries if name == "lse" else of_queries.mT[..., None]).expand_as(wrong)
    if count := int((watch.never("written", result) & wrong).sum()):
        return [
            *said,
            f"{count} elements of {name} were never stored: is the grid large enough, and does the "
            "mask of the store leave rows out?",
        ]
    if bool((wrong == (wrong & empty)).all()):
        said.append(
            f"only queries that see no key are wrong; their {name} must be "
            f"{'0' if name == 'o' else '-inf'} (-inf minus -inf is NaN, and 0 / 0)"
        )
    elif name in INDICES and (mistake := find_mistake(found)):
        said.append(f"exactly this mistake gives these numbers: {mistake}")
    elif name in ("dq", "dk") and max_error(exact * request.scale, right) <= accuracy.budget:
        said.append(f"{name} is not multiplied by request.scale")
    if not math.isfinite(value) and (
        origin := origin_of(lambda: again()[0][name][worst].item(), str(Path(file)), value)
    ):
        said.append(origin)
    return said


def repair(file: str, is_right: Callable[[Path], bool]) -> list[str]:
    """A change of a file after which a call is right, in a sentence or in none."""
    edits = by_itself(Path(file).read_text())
    found = first_right(edits, is_right, process_time() + SECONDS)
    return [x.said() for x in found or ()]
