"""What has to be right before it is timed.

Attention is held against its error budget (budget.py); what quantises, against the rounding of its
format; a copy, against its source.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from flash_versions.dispatch.precision import BLOCK_ROWS, Fp8, Quantized
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fp8.quantize import dequantize, key_order
from flash_versions.versions.oracle.budget import Accuracy, assess, assess_request

CHECKED_QUERIES = 128  # the oracle needs the score matrix: check the last rows, which see most keys
FP32_SLACK = 1 + 2.0**-10  # for what is computed in fp32 on the way, many times

Tensors = tuple[torch.Tensor, ...]


def check(results: Tensors, length: int, causal: bool, q, k, v, do) -> None:
    """Refuse to time a wrong kernel: of the first sequence, the last queries of a forward, or the
    first key head of a backward, against the budget.

    Raises:
        ArithmeticError: a result is over its budget, or not finite.
    """
    refuse_unless_finite(results)

    def first(x, heads=None):
        return x.flatten(0, 1)[None, :length, :heads]

    if len(results) == 1 and q.shape[1] == 1:  # decoding: one query on all keys
        refuse_over(assess(results[0][:1], None, q[:1], k[:1], v[:1], causal=causal))
    elif len(results) == 1:
        last = slice(max(0, min(length, q.shape[1]) - CHECKED_QUERIES), None)
        o, q = first(results[0])[:, last], first(q)[:, last]
        refuse_over(assess(o, None, q, first(k), first(v), causal=causal))
    else:
        group = q.shape[2] // k.shape[2]
        request = make_request(first(q, group), first(k, 1), first(v, 1), causal=causal)
        names = {"dq": group, "dk": 1, "dv": 1}
        gradients = {name: first(x, names[name]) for name, x in zip(names, results)}
        refuse_over(assess_request(gradients, request, first(do, group)))


def check_fp8(o: torch.Tensor, causal: bool, scale: float, given: tuple) -> None:
    """`check` of a forward in FP8, whose budget is that of what its inputs stand for.

    Args:
        o: (batch, M, heads, head_dim).
        causal: the mask.
        scale: of the scores.
        given: what the kernel took: (request, Quantized), or q, k, v in FP8 with scales of 1.

    Raises:
        ArithmeticError: the last queries of the first sequence are over their budget, or any result
            is not finite.
    """
    refuse_unless_finite((o,))
    if isinstance(given[-1], Quantized):
        (q, k, v), descales = in_8_bits(given[-1])
    else:
        (q, k, v), descales = given, {}
    # A block of queries that share a scale stays whole.
    start = max(0, q.shape[1] - CHECKED_QUERIES) // BLOCK_ROWS * BLOCK_ROWS
    descales = {name: x[:1] for name, x in descales.items()}
    if descales and descales["q_descale"].dim() == 3:
        descales["q_descale"] = descales["q_descale"][..., start // BLOCK_ROWS :]
    request = make_request(q[:1, start:], k[:1], v[:1], causal=causal, scale=scale, **descales)
    refuse_over(assess_request({"o": o[:1, start:]}, request))


def in_8_bits(x: Quantized) -> tuple[Tensors, dict[str, Any]]:
    """q, k, v in FP8 as `attention` takes them, V's keys in their order again, and the descales."""
    n, kv_heads = x.k.shape[1:3]
    positions = key_order(x.v.shape[3]).argsort().to(x.v.device)
    v = x.v.view(torch.int8)[..., positions[:n]].permute(0, 3, 1, 2).contiguous().view(x.v.dtype)
    descales: dict[str, Any] = {}
    for name, scale in (("q", x.q_scale), ("k", x.k_scale), ("v", x.v_scale)):
        by_head = scale.shape[1:] == (kv_heads, 1)
        descales[f"{name}_descale"] = scale[..., 0] if by_head else scale
    return (x.q, x.k, v), descales


def is_quantized(how: Fp8, results: Tensors, q, k, v) -> None:
    """Whether `quantize` rounded once: V element by element, q and k, which may be rotated, by the
    scores of the last queries, whose error is at most |dq| |k| + |q| |dk| + |dq| |dk|.

    Raises:
        ArithmeticError: they are not what the inputs were.
    """
    x = Quantized(*results)
    found = dequantize(x)
    largest = [scale.amax() for scale in (x.q_scale, x.k_scale, x.v_scale)]
    kind = torch.finfo(how.dtype)
    half_ulp, half_step = kind.eps / 2, kind.smallest_normal * kind.eps / 2
    error = (found[2] - v.float()).abs()
    if not (error <= (half_ulp * v.float().abs() + half_step * largest[2]) * FP32_SLACK).all():
        raise ArithmeticError(f"wrong output: v is off by up to {error.max():.2e}")
    group = q.shape[2] // k.shape[2]
    rows = slice(max(0, q.shape[1] - CHECKED_QUERIES), None)
    (q, k), (q8, k8) = (
        (
            a[:1, rows].float().transpose(1, 2),
            b[:1].float().transpose(1, 2).repeat_interleave(group, 1),
        )
        for a, b in ((q, k), found[:2])
    )
    norms = [a.norm(dim=-1, keepdim=True) for a in (q, k)]
    dq, dk = (
        half_ulp * norm + half_step * scale * math.sqrt(q8.shape[3])
        for norm, scale in zip(norms, largest)
    )
    bound = dq * norms[1].mT + norms[0] * dk.mT + dq * dk.mT
    error = (q8 @ k8.mT - q @ k.mT).abs()
    if not (error <= bound * FP32_SLACK).all():
        raise ArithmeticError(f"wrong output: scores are off by up to {error.max():.2e}")


def is_copied(results: Tensors, q, k, v) -> None:
    """Whether a copy of q, k and v, one after another, is one.

    Raises:
        ArithmeticError: it is not.
    """
    if not torch.equal(results[0], torch.cat([x.flatten() for x in (q, k, v)])):
        raise ArithmeticError("wrong output: not what was copied")


def refuse_unless_finite(results: Tensors) -> None:
    """Raise an ArithmeticError if anything is infinite or NaN."""
    if not all(x.float().isfinite().all() for x in results):
        raise ArithmeticError("wrong output: not finite")


def refuse_over(found: Mapping[str, Accuracy]) -> None:
    """Raise an ArithmeticError that says what is over its budget."""
    for name, accuracy in found.items():
        if not accuracy.ok:
            raise ArithmeticError(f"wrong output: {name}: {accuracy}")
