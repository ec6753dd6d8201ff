"""When is a result right? The error budget: no tolerance, but twice what plain PyTorch gets wrong.

    error(kernel)  <=  2 * error(plain PyTorch in the inputs' dtype)  +  rounding

with every error the largest one against the fp64 oracle. A tolerance that suits bf16 hides bugs in
fp32, and one that suits 64 keys fails at 64k. Plain PyTorch in the same dtype scales with both, so
its error is the yardstick; for gradients that is autograd through it. `rounding` is what even a
perfect kernel may add on the same inputs, derived from the sizes of the oracle's tensors. With u =
2^-24, one fp32 rounding; t_i = scale |q_i| max_j |k_j|, the size of the products that a score sums
up; and r = u sqrt(head_dim), to which the roundings of such a sum add up if they are independent:

* o: two roundings to the dtype at the size of o, half an ulp each: P is rounded before P V, o after
  it. One u of the fp32 accumulator at the size of its summands, which are as large as v. One u of
  the scores, at the size of t or of the lse: it moves o by no more than the deviation of v under P.
  FA1 rounds o in every block, which is not counted: in fp32, hundreds of keys can exceed this.
* lse: one u at the size of t, four at that of the lse, as scores go to log2 units and back.
* dq, dk, dv, dsink: two roundings to the dtype at the size of the gradient: of dS or P before the
  product, of the gradient after it. At that size too, the error of P = exp(s - lse), which is
  computed anew: that of the lse, and r t.
  dv: one u at the size of its summands, P |dO|.
  dq, dk, dsink: the error of dP - delta, weighted with P |K|, P |Q|, P of the sink. For a
  query with one key, this difference is exactly 0 in plain PyTorch. A kernel computes delta =
  rowsum(dO o) by another sum than dP = dO V, which adds 2 r |dO o|. Its o was rounded twice; these
  errors are independent over the head dim and add two half ulps of |dO o|, as a root of squares.

In FP8 the oracle computes with the dequantised inputs, as the kernels do. Plain PyTorch has them in
fp32 and rounds P to V's 8 bits, scaled so that the largest P of a row is 2^8. Four terms are added
to those above for fp32 inputs; an ulp is one of 8 bits.

* o: the roundings of a kernel's P are others than those of plain PyTorch's, as the running maximum
  that it is scaled by is another. Half an ulp of each p |v|, as a root of squares over the keys.
  Below its smallest normal number P loses up to half the spacing there, and all that it is: the sum
  over these keys, and as a kernel keeps acc in units of the head's largest scale of V, P of a block
  is smaller by its share of that scale.
* o, lse: the tensor cores add 8-bit products, 32 at a time, with 13 bits behind the leading one of
  the largest: 2^-13 of the scores at the size of t, which moves o as one u does, and 2^-13 of the
  accumulator for each 32 keys, at the size of o. Only on a GPU.
* o, lse: on Hopper, scores of tensors that are quantised in the call are in fp16
  (`fa3/fp8/pairs.py`). A score that counts is within 8 of its LSE. S is rounded after every 32
  dims, each time by a 2^-11-th, as a root of squares, and the exponent, below 16, by 2^-8: each p
  on its own, as by the rounding to 8 bits. The scale is off by a 2^-11-th, and what blocks of other
  scales add by 2^-8, alike for the keys of a block: this moves o as u does. The LSE has both. A
  block of V counts at least a 2^-19-th of the head's largest, which moves o by no more.

Sources: the rule of the FlashAttention test suite (Dao-AILab/flash-attention, tests/), with an fp64
oracle in the place of fp32 and the rounding term derived instead of chosen. The square root: Higham
and Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis". The 13 bits: DeepSeek-V3
Technical Report 2024, arXiv:2412.19437, section 3.3.2.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flash_versions.dispatch.precision import BLOCK_KEYS, PORTABLE, Quantized, is_fp8
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.fp8.quantize import prepare
from flash_versions.versions.oracle.reference import (
    dequantized,
    forward,
    forward_fp8,
    forward_weighed,
    fp8_unit,
    weighted_sum,
)
from flash_versions.versions.tiles.wgmma import available

HALF_ULP = 2.0**-24  # one fp32 rounding, relative
FP8_SUM = 2.0**-13  # what a tensor core loses of a sum of 8-bit products, relative
FP8_SUMMANDS = 32  # of such a sum
FP16 = 2.0**-11  # what rounding to fp16 takes, relative
FP16_POWER = 2.0**-8  # and to a power of 2 with an exponent in fp16
FP16_SHARE = 2.0**-19  # of the largest scale of V that P has at least
FP16_REACH = 8.0  # scores this far below the LSE count no more
DIMS = {"o": 4, "lse": 3, "do": 4, "dlse": 3, "dq": 4, "dk": 4, "dv": 4, "dsink": 1}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Accuracy:
    """Largest errors against the fp64 oracle, of a result and of plain PyTorch in its dtype."""

    error: float
    baseline: float
    rounding: float

    @property
    def budget(self) -> float:
        """The largest error that is still right."""
        return 2 * self.baseline + self.rounding

    @property
    def ok(self) -> bool:
        """Whether the result is within its budget; NaN never is, nor anything if plain PyTorch
        overflowed: then there is no yardstick.
        """
        return math.isfinite(self.budget) and self.error <= self.budget

    def __str__(self) -> str:
        verdict = "within" if self.ok else "OVER"
        return (
            f"error {self.error:.2e}, {verdict} its budget of {self.budget:.2e} "
            f"(plain PyTorch: {self.baseline:.2e})"
        )


def compare(
    o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    dsink: torch.Tensor | None = None,
    **options: Any,
) -> dict[str, Accuracy]:
    """Is this attention right? Prints a verdict on every tensor given, from any kernel.

        o = my_attention(q, k, v, causal=True)
        o.backward(do)
        found = compare(o, q, k, v, causal=True, do=do, dq=q.grad, dk=k.grad, dv=v.grad)
        assert all(accuracy.ok for accuracy in found.values())

    Args:
        o: the output to judge, of the shape that `attention` gives it; so `lse`, if given.
        q: the inputs that it was computed from, in their dtype; so `k` and `v`.
        do: the gradient of o that was propagated back, and `dlse` that of the LSE or None. They
            are needed to judge the gradients `dq`, `dk`, `dv`, `dsink`.
        options: those of `attention`. With dropout, seed torch's generator as before the call.

    Returns:
        Accuracy by name. Takes the full score matrix: O(M N) memory in fp64.

    Raises:
        ValueError: an argument is malformed, or a shape is not what `attention` gives.
    """
    given = {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
    results = {name: x for name, x in given.items() if x is not None}
    request = make_request(q, k, v, **options)
    found = assess_request(results, request, do, dlse)
    for name, accuracy in found.items():
        sys.stdout.write(f"{name:5} {accuracy}\n")
    return found


def assess(
    o: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **options: Any,
) -> dict[str, Accuracy]:
    """`compare` of a forward pass, without a word: {"o": Accuracy, "lse": Accuracy}, without "lse"
    if it is None.
    """
    results = {"o": o} if lse is None else {"o": o, "lse": lse}
    return assess_request(results, make_request(q, k, v, **options))


def assess_request(
    results: Mapping[str, torch.Tensor],
    request: Request,
    do: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> dict[str, Accuracy]:
    """Hold results of a request, its dropout seed included, against their budgets.

    Args:
        results: any of "o", "lse", "dq", "dk", "dv", "dsink", by name.
        request: what they are the results of.
        do: the gradient of o that the gradients come from.
        dlse: the gradient of the LSE that they come from, or None.

    Raises:
        ValueError: a gradient without do, a shape that is not the request's, or a request that
            gathers 8-bit rows.
    """
    if request.gathers_fp8:
        raise ValueError(
            "packed or paged sequences in 8 bits have no budget; compare with attention_reference "
            "of q, k and v with their scales multiplied in."
        )
    gradients = [name for name in results if name not in ("o", "lse")]
    if do is None and gradients:
        raise ValueError(f"{gradients[0]} was given without do, the gradient of o that it is from.")
    do, dlse = (x if x is None else _four_dims(n, x) for n, x in (("do", do), ("dlse", dlse)))
    quantized = None
    exact = in_dtype(request, torch.float64)
    if request.precision is not None:
        if gradients:
            raise ValueError(f"{gradients[0]} was given, and attention in FP8 has no gradients.")
        quantized = prepare(request)
        exact = in_dtype(dequantized(request, quantized), torch.float64)
    oracle = plain_pytorch(exact, do, dlse)
    terms = fp32_rounding(exact, oracle, do, dlse, torch.finfo(request.q.dtype).eps)
    if quantized is not None:
        baseline = dict(zip(("o", "lse"), forward_fp8(request, quantized)))
        portable = any(getattr(request, name) is not None for name in PORTABLE)
        fp16_scores = not is_fp8(request.q) and available(request.q.device) and not portable
        terms = fp8_rounding(quantized, exact, oracle, terms, fp16_scores)
    else:
        baseline = plain_pytorch(request, do, dlse)
        if not all(x.isfinite().all() for name, x in baseline.items() if name != "lse"):
            # 16-bit scores overflowed; the kernels' are fp32.
            baseline = plain_pytorch(in_dtype(request, torch.float32), do, dlse)
    found = {}
    for name, given in results.items():
        result, right = _four_dims(name, given), oracle[name]
        if result.shape != right.shape:
            raise ValueError(
                f"{name} has shape {tuple(result.shape)}; of this request it is "
                f"{tuple(right.shape)}."
            )
        rounding = terms[name]
        if name != "lse":  # two of the dtype; none is smaller than the smallest normal number's
            kind = torch.finfo(result.dtype)
            rounding += kind.eps * max(finite_max(right), kind.tiny)
        found[name] = Accuracy(max_error(result, right), max_error(baseline[name], right), rounding)
    return found


def plain_pytorch(request: Request, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Tensors:
    """o and lse of the reference in the dtype of the request, and with do the gradients of what it
    is differentiable in, by name.
    """
    leaves = {n: x.detach().requires_grad_() for n, x in inputs_of(request).items()}
    with torch.set_grad_enabled(do is not None):
        o, lse, _ = forward(request._replace(**leaves))
    results = {"o": o.detach(), "lse": lse.detach()}
    if do is not None:
        dlse = torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
        gradients = torch.autograd.grad((o, lse), list(leaves.values()), (do.to(o.dtype), dlse))
        results |= {f"d{name}": x for name, x in zip(leaves, gradients)}
    return results


def fp32_rounding(
    exact: Request, oracle: Tensors, do: torch.Tensor | None, dlse: torch.Tensor | None, eps: float
) -> dict[str, float]:
    """The rounding terms but for the two of the result's own dtype; see the top of this file.

    exact is the request in fp64 and oracle its results; eps is that of the dtype of a kernel's o.
    """
    q, k, v, o = exact.q, exact.k, exact.v, oracle["o"]
    kept = 1 / (1 - exact.dropout_p)
    of_keys = exact._replace(v=k.abs(), dropout_p=0.0)
    scores = size_of_scores(exact)
    lse = oracle["lse"].abs().nan_to_num(posinf=0.0)
    of_scores, of_lse = HALF_ULP * finite_max(scores), 4 * HALF_ULP * finite_max(lse)
    moved = torch.maximum(scores, lse.mT)[..., None] * deviation_of_values(exact)
    terms = {"o": HALF_ULP * kept * (finite_max(v) + finite_max(moved)), "lse": of_scores + of_lse}
    if do is None:
        return terms
    # The error of dP - delta, for each query.
    summands = do.double() * o
    two_sums = 2 * HALF_ULP * math.sqrt(v.shape[3])
    error = two_sums * summands.abs().sum(-1) + eps * summands.norm(dim=-1)
    if dlse is not None:
        error = error + HALF_ULP * dlse.double().abs().mT
    terms["dq"] = exact.scale * finite_max(error[..., None] * forward(of_keys)[0])
    weighted = plain_pytorch(of_keys, error[..., None] * q.abs(), None)["dv"]
    terms["dk"] = exact.scale * finite_max(weighted)
    terms["dv"] = HALF_ULP * finite_max(plain_pytorch(exact, do.abs(), None)["dv"])
    if exact.sink is not None:
        # The LSE's gradient by the sink is the sink's probability.
        zero = torch.zeros_like(o)
        terms["dsink"] = finite_max(plain_pytorch(exact, zero, error.mT)["dsink"])
    of_p = math.sqrt(q.shape[3]) * of_scores + of_lse
    return terms | {n: x + of_p * finite_max(oracle[n]) for n, x in terms.items() if n[0] == "d"}


def size_of_scores(exact: Request) -> torch.Tensor:
    """The size of the products that a score sums up, t: (batch, M, heads)."""
    return exact.scale * exact.q.norm(dim=-1) * finite_max(exact.k.norm(dim=-1))


def deviation_of_values(exact: Request) -> torch.Tensor:
    """The deviation of v under the softmax of each query, of the shape of o."""
    v = torch.cat((exact.v, exact.v * exact.v), -1)
    mean, square = forward(exact._replace(v=v, dropout_p=0.0))[0].chunk(2, -1)
    return (square - mean * mean).clamp(min=0).sqrt()


def fp8_rounding(
    quantized: Quantized,
    exact: Request,
    oracle: Tensors,
    terms: dict[str, float],
    fp16_scores: bool,
) -> dict[str, float]:
    """The rounding terms of a request in FP8, from those of fp32; see the top of this file.

    exact is the request of the dequantised inputs in fp64, and oracle its results.
    """
    n = exact.k.shape[1]
    kind = torch.finfo(quantized.v.dtype)
    share = (quantized.v_scale / quantized.v_reference[..., None]).clamp(max=1).double()
    share = share.expand(-1, -1, -(-n // BLOCK_KEYS)).repeat_interleave(BLOCK_KEYS, 2)
    share = share[..., :n].mT[..., None]

    def lost(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What P loses, weighted with |v|; v is (|v| / share, share)."""
        unit = fp8_unit(p)
        p = p[..., : v.shape[1]] / unit * v[..., -1].mT[:, :, None]
        # `eps` of the smallest normal number is the spacing below it.
        small = torch.where(p < kind.tiny, p.clamp(max=kind.eps * kind.tiny / 2), 0.0)
        return weighted_sum(small * unit, v)

    def squares(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return weighted_sum(p * p, v * v)

    rounded = kind.eps / 2 * forward_weighed(exact, squares)[0].sqrt()
    with_share = exact._replace(v=torch.cat((exact.v.abs() / share, share), -1))
    errors = rounded + forward_weighed(with_share, lost)[0][..., :-1]
    found = {"o": terms["o"] + finite_max(errors), "lse": terms["lse"]}
    if exact.q.is_cuda:
        scores, sums = size_of_scores(exact), -(-n // FP8_SUMMANDS)
        moved = finite_max(scores[..., None] * deviation_of_values(exact))
        found["o"] += FP8_SUM * (moved + sums * finite_max(oracle["o"]))
        found["lse"] += FP8_SUM * finite_max(scores)
    if fp16_scores:
        scores = torch.where(oracle["lse"].isfinite(), oracle["lse"].abs(), 0.0).mT + FP16_REACH
        steps = -(-exact.q.shape[3] // FP8_SUMMANDS)
        error = (FP16 * math.sqrt(steps) * scores + FP16_POWER)[..., None]
        found["o"] += finite_max(error / (kind.eps / 2) * rounded)
        found["o"] += finite_max(error * deviation_of_values(exact))
        found["o"] += FP16_SHARE * finite_max(exact.v)
        found["lse"] += 2 * finite_max(error)
    return found


def inputs_of(request: Request) -> dict[str, Any]:
    """What a request can be differentiated in: q, k, v and the sink if it has one."""
    inputs = {name: getattr(request, name) for name in ("q", "k", "v", "sink")}
    return {name: x for name, x in inputs.items() if x is not None}


def in_dtype(request: Request, dtype: torch.dtype) -> Request:
    """The same request, dropout seed included, of inputs cast to a dtype."""
    return request._replace(**{n: x.detach().to(dtype) for n, x in inputs_of(request).items()})


def max_error(result: torch.Tensor, oracle: torch.Tensor) -> float:
    """max |result - oracle|; equal infinities agree, NaN and every other infinity are infinitely
    wrong.
    """
    if result.numel() == 0:
        return 0.0
    result = result.double()
    error = torch.where(result == oracle, 0.0, (result - oracle).abs())
    return torch.where(error.isnan(), torch.inf, error).max().item()


def finite_max(x: torch.Tensor) -> float:
    """The largest finite magnitude in x, 0 if there is none."""
    x = x.double().abs()
    return x[x.isfinite()].max().item() if x.isfinite().any() else 0.0


def _four_dims(name: str, x: torch.Tensor) -> torch.Tensor:
    """A user's tensor in the form of a request: packed ones have a leading dimension of 1."""
    return x[None] if x.dim() == DIMS[name] - 1 else x
