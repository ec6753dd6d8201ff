"""The specification of attention, and plain PyTorch baselines."""

from contextlib import nullcontext

import torch
from einops import repeat
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_versions.version import Request, Version

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def visible_keys(
    q_length: int,
    kv_length: int,
    causal: bool,
    kv_lengths: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Which keys each query sees: bool (batch or 1, 1, M, N)."""
    q_pos = torch.arange(q_length, device=device)[:, None]
    k_pos = torch.arange(kv_length, device=device)
    lengths = torch.tensor([kv_length], device=device) if kv_lengths is None else kv_lengths
    lengths = lengths.clamp(max=kv_length)[:, None, None, None]
    visible = (k_pos < lengths).expand(-1, 1, q_length, kv_length)
    return visible & (k_pos <= q_pos + (lengths - q_length)) if causal else visible


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention means; every version must agree with this function in fp64.

    For batch b, query head h and query i, with key head h' = h // (heads / kv_heads) and n =
    kv_lengths[b] (N if None):

        s_j = scale * <q[b, i, h], k[b, j, h']>              for the visible keys j
        o[b, i, h] = sum_j softmax(s)_j v[b, j, h']          lse[b, h, i] = log sum_j exp(s_j)

    Key j is visible if j < n and, when causal, j <= i + n - M: the last query sees the last key
    (bottom-right). A query that sees no key has o = 0 and lse = -inf. All arithmetic is in the
    dtype of the inputs: fp64 inputs make an oracle, bf16 inputs the plain PyTorch whose error the
    kernels may not exceed twofold. Differentiable. O(M N) memory.

    Args:
        q: (batch, M, heads, head_dim) in any float dtype.
        k: (batch, N, kv_heads, head_dim).
        v: (batch, N, kv_heads, head_dim).
        causal: whether a query sees only keys up to its own position.
        scale: factor on the scores; None means head_dim ** -0.5.
        kv_lengths: (batch,) integers, or None.
        num_splits: None or 1; keys are split from 'fa2' on.

    Returns:
        o: like q. lse: natural log, (batch, heads, M), fp32 or fp64.
    """
    del num_splits
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k, v = (repeat(x, "b n h d -> b n (h g) d", g=group) for x in (k, v))
    s = torch.einsum("bmhd,bnhd->bhmn", q * scale, k)
    visible = visible_keys(q.shape[1], k.shape[1], causal, kv_lengths, q.device)
    s = s.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(s.to(torch.promote_types(s.dtype, torch.float32)), dim=-1)
    # A row of -inf has no softmax: give it zeros, in the result and in every gradient.
    sees_nothing = ~visible.any(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(sees_nothing, 0.0), dim=-1).masked_fill(sees_nothing, 0.0)
    return torch.einsum("bhmn,bnhd->bmhd", p, v), lse


def attention_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, None]:
    """The same attention through torch's `scaled_dot_product_attention`: (o, None), as it returns
    no LSE.

    Its `is_causal` is top-left aligned and it knows no lengths, so both go through an explicit mask
    where they differ.
    """
    del num_splits
    q_length, kv_length = q.shape[1], k.shape[1]
    aligned = kv_lengths is None and (not causal or q_length in (1, kv_length))
    mask = None
    if not aligned:
        mask = visible_keys(q_length, kv_length, causal, kv_lengths, q.device)
    # cuDNN builds a plan for each key length, which takes far longer than attention itself: not for
    # a decoding loop, where every step has another one.
    decoding = q.is_cuda and q_length != kv_length
    with sdpa_kernel(WITHOUT_CUDNN) if decoding else nullcontext():
        o = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=aligned and causal and q_length == kv_length,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    if mask is not None:
        o = o.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return o.transpose(1, 2), None


def _no_splits(request: Request) -> str | None:
    if request.num_splits not in (None, 1):
        return f"num_splits={request.num_splits} is not possible; keys are split from 'fa2' on."
    return None


def _no_lse(request: Request) -> str | None:
    if request.return_lse:
        return "it does not return the LSE; use version='reference' or one of the kernels."
    return _no_splits(request)


REFERENCE = Version(
    name="reference",
    title="plain PyTorch",
    wasted="",
    idea="the specification: scores, softmax, weighted sum, all in memory",
    source="Vaswani et al. 2017, arXiv:1706.03762",
    forward=attention_reference,
    limits=_no_splits,
)
SDPA = Version(
    name="sdpa",
    title="torch SDPA",
    wasted="",
    idea="torch's scaled_dot_product_attention with the fastest backend it has",
    source="torch.nn.functional",
    forward=attention_sdpa,
    limits=_no_lse,
)
