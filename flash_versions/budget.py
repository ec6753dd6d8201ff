"""When is a result right? The error budget: no tolerance, but twice what plain PyTorch gets wrong.

    error(kernel)  <=  2 * error(plain PyTorch in the inputs' dtype)  +  rounding

with every error the largest one against the fp64 oracle. A tolerance that suits bf16 hides bugs in
fp32, and one that suits 64 keys fails at 64k. Plain PyTorch in the same dtype scales with both, so
its error is the yardstick. `rounding` is what even a perfect kernel may add on the same inputs:

* o: two roundings to the dtype at the size of o, half an ulp each: P is rounded before P V, o after
  it; and one of the fp32 accumulator at the size of its summands, which are as large as v. (With
  one key that outweighs all, plain PyTorch has P = 1 and no error; the kernels have P = 2^x with
  the rounding of x, which for huge scores is not small.)
* lse: four fp32 roundings at the size of the lse, since scores go to log2 units and back.

Source: the rule of the FlashAttention test suite (Dao-AILab/flash-attention, tests/), with an fp64
oracle in the place of fp32 and the rounding term derived instead of chosen.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch

from flash_versions.reference import attention_reference

HALF_ULP = 2.0**-24  # one fp32 rounding, relative


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
        return f"error {self.error:.2e}, {verdict} its budget of {self.budget:.2e}"


def max_error(result: torch.Tensor, oracle: torch.Tensor) -> float:
    """max |result - oracle|; equal infinities agree, NaN and every other infinity are infinitely
    wrong.
    """
    if result.shape != oracle.shape:
        raise ValueError(f"a result of shape {tuple(result.shape)} against {tuple(oracle.shape)}")
    if result.numel() == 0:
        return 0.0
    result = result.double()
    error = torch.where(result == oracle, 0.0, (result - oracle).abs())
    return torch.where(error.isnan(), torch.inf, error).max().item()


def finite_max(x: torch.Tensor) -> float:
    """The largest finite magnitude in x, 0 if there is none."""
    x = x.double().abs()
    return x[x.isfinite()].max().item() if x.isfinite().any() else 0.0


def assess(
    o: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
) -> dict[str, Accuracy]:
    """Hold a result of attention against its budget; shapes and arguments as in `attention`.

    Computes the oracle and the baseline with the full score matrix: O(M N) memory in fp64.

    Returns:
        {"o": Accuracy, "lse": Accuracy}, without "lse" if it is None.
    """
    plain = partial(attention_reference, causal=causal, scale=scale, kv_lengths=kv_lengths)
    with torch.no_grad():
        oracle_o, oracle_lse = plain(q.double(), k.double(), v.double())
        baseline_o, baseline_lse = plain(q, k, v)
        if not baseline_o.isfinite().all():  # 16-bit scores overflowed; the kernels' are fp32
            baseline_o, baseline_lse = plain(q.float(), k.float(), v.float())
    rounding = torch.finfo(o.dtype).eps * finite_max(oracle_o) + HALF_ULP * finite_max(v)
    found = {"o": Accuracy(max_error(o, oracle_o), max_error(baseline_o, oracle_o), rounding)}
    if lse is not None:
        found["lse"] = Accuracy(
            max_error(lse, oracle_lse),
            max_error(baseline_lse, oracle_lse),
            4 * HALF_ULP * finite_max(oracle_lse),
        )
    return found
