"""The mistake that gives a wrong o or LSE: the fp64 oracle is asked for what each of some mistakes
would give, and the kernel's result is that, within its error budget.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from flash_versions.dispatch.request import Request
from flash_versions.versions.oracle.budget import assess_request, in_dtype, max_error, plain_pytorch
from flash_versions.versions.oracle.reference import forward_weighed, weighted_sum

BLOCKS = (16, 32, 64, 128)
OPTIONAL = ("softcap", "alibi_slopes", "sink", "kv_lengths", "kv_starts")


def find_mistake(name: str, found: torch.Tensor, request: Request) -> str | None:
    """The mistake that gives this o or LSE of a request, in words, or None."""
    exact = in_dtype(request, torch.float64)
    right = plain_pytorch(exact, None, None)[name]
    budget = assess_request({name: found}, request)[name].budget
    for words, change in mistakes(request).items():
        other = request._replace(**change)
        would_be = plain_pytorch(in_dtype(other, torch.float64), None, None)[name]
        if max_error(would_be, right) > budget and assess_request({name: found}, other)[name].ok:
            return words
    for block in BLOCKS if name == "o" else ():
        for keeps in ("acc", "l", "acc and l"):
            would_be = forward_weighed(exact, not_rescaled(block, keeps))[0]
            if max_error(found, would_be) <= budget < max_error(would_be, right):
                return (
                    f"{keeps}, what was summed before, is not rescaled when a block of {block} "
                    "keys has a larger maximum: multiply it by alpha = exp(old maximum - new "
                    "maximum)"
                )
    return None


def mistakes(request: Request) -> dict[str, dict[str, Any]]:
    """What a kernel may have computed in the place of a request: in words, and what is changed."""
    k, v, N, scale = request.k, request.v, request.k.shape[1], request.scale
    found: dict[str, dict[str, Any]] = {
        "the scores are not multiplied by request.scale": {"scale": 1.0},
        "the scores are multiplied by request.scale twice": {"scale": scale**2},
        "exp2 was taken of scores that are not multiplied by log2(e)": {
            "scale": scale * math.log(2)
        },
    }
    found |= {f"{x} is ignored": {x: None} for x in OPTIONAL if getattr(request, x) is not None}
    for side in ("right", "left"):
        bound = f"window_{side}"
        if (at := getattr(request, bound)) is not None:
            off = f"the mask is off by one on the {side}: a query sees one key"
            found[f"a query sees all keys on its {side}: there is no mask"] = {bound: None}
            found |= {f"{off} too many": {bound: at + 1}, f"{off} too few": {bound: at - 1}}
    if (right := request.window_right) is not None and request.kv_lengths is None:
        found["causal is aligned to the first query; the last query must see the last key"] = {
            "window_right": right + request.q.shape[1] - N
        }
    if request.has_intervals or not N:
        return found
    cycled = torch.arange(request.q.shape[2], device=k.device) % k.shape[2]
    found["query head h uses key head h % kv_heads; it is h // group"] = {
        "k": k[:, :, cycled],
        "v": v[:, :, cycled],
    }
    for n in sorted({1, *(N % block for block in BLOCKS)} - {0, N}):
        found[f"keys are missing at the end: {n}"] = {"k": k[:, :-n], "v": v[:, :-n]}
    for n in sorted({1, *(-N % block for block in BLOCKS)} - {0}):
        more = (0, 0, 0, 0, 0, n)
        found[f"keys past the end count with a score of 0 instead of -inf: {n}"] = {
            "k": pad(k, more),
            "v": pad(v, more),
        }
    return found


def not_rescaled(block: int, keeps: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What o is if a sum is not rescaled when the maximum grows: "acc", "l" or "acc and l"."""

    def weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = p[..., : v.shape[1]]
        if not p.shape[-1]:
            return weighted_sum(p, v)
        blocks = [x.amax(-1, keepdim=True).expand(x.shape) for x in p.split(block, -1)]
        largest = torch.cat(blocks, -1).cummax(-1).values.clamp(min=1e-300)
        last, old = p / largest[..., -1:], p / largest  # by the last maximum, by that of its time
        acc = torch.einsum("bhmn,bnhd->bmhd", old if "acc" in keeps else last, v)
        return acc / (old if "l" in keeps else last).sum(-1).clamp(min=1e-300).mT[..., None]

    return weigh
