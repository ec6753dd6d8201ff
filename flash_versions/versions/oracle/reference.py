"""The specification of attention, and plain PyTorch baselines."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from einops import repeat
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import INTERVALS, Request, make_request
from flash_versions.dispatch.version import Version, fp8_limits
from flash_versions.versions.fp8.quantize import P_OFFSET, dequantize, prepare

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_starts", "block_table")
LOW_32_BITS = 2**32 - 1
FP8_PEAK = 2.0**P_OFFSET  # what the largest P of a row is scaled to before it is rounded to 8 bits
# From p (batch, heads, m, n), where a sink may be one column more, and v (batch, n, heads, dim): o.
Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention means; every version must agree with this function in fp64.

    For query i of m and key j of n of one sequence, and for query head h with its key head
    h // (heads / kv_heads):

        s_ij = scale * <q_i, k_j>
        s_ij = softcap * tanh(s_ij / softcap)                      with a softcap
        s_ij = s_ij - alibi_slopes[h] * |i + n - m - j|            with ALiBi
        s_ij = -inf              unless i + n - m - left <= j <= i + n - m + right, the window
        s_ij = -inf              unless query_starts[j] <= i < query_ends[j], the interval of key j
        lse_i = log(sum_j exp(s_ij) + exp(sink[h]))                the last term only with a sink
        p_ij = exp(s_ij - lse_i)
        p_ij = 0 if dropped, else p_ij / (1 - dropout_p)           with dropout
        o_i = sum_j p_ij v_j

    Causal is right = 0: the last query sees the last key (bottom-right aligned), whatever m and n.
    A query that sees no key has o = 0 and lse = -inf, or lse = sink[h]; its gradients are zero.

    Which rows are a sequence's: those of its batch row, or with cu_seqlens_q and cu_seqlens_k rows
    cu_seqlens[b] .. cu_seqlens[b+1] - 1 of the packed tensor; with a block_table, the slots of its
    pages one after another. kv_lengths[b] ends its keys and kv_starts[b] begins them, counted in
    these slots: n is the number of keys in between, and key 0 the first of them. A packed query
    that belongs to no sequence has o = 0 and lse = -inf.

    Dropped is (b, h, i, j) if the first output word of Philox4x32-10 with the key (low, high 32
    bits of the seed) and the counter (i, j, b * heads + h, 0) is below round(dropout_p * 2^32).

    All arithmetic is in the dtype of the inputs: fp64 inputs make an oracle, bf16 inputs the plain
    PyTorch whose error the kernels may not exceed twofold. In FP8 it is fp32 on the dequantised
    inputs, with 8-bit p; of packed or paged sequences p is not rounded. Differentiable in q, k, v
    and sink, but for FP8. O(m n) memory.

    Args:
        q: (batch, M, heads, head_dim) in any float dtype, or packed (total_q, heads, head_dim).
        k: (batch, N, kv_heads, head_dim), packed, or pages (pages, page_size, kv_heads, head_dim).
        v: like k, with a head_dim_v of its own.
        options: those of `attention`, except for `version` and `return_lse`.

    Returns:
        o: like q with head_dim_v. lse: natural log, fp32 or fp64, (batch, heads, M) or (heads,
        total_q).

    Raises:
        ValueError: an argument is malformed.
    """
    o, lse, _ = forward(make_request(q, k, v, **options))
    return (o, lse) if q.dim() == 4 else (o[0], lse[0])


def forward(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
    """`attention_reference` of a Request: (o, lse, None)."""
    if request.precision is None:
        return *forward_weighed(request, weighted_sum), None
    if request.gathers_fp8:
        q, k, v = (x.float() for x in (request.q, request.k, request.v))
        exact = request._replace(q=q, k=k, v=v, precision=None)
        o, lse = forward_weighed(exact, weighted_sum)
        return o.to(request.out_dtype), lse, None
    o, lse = forward_fp8(request, prepare(request))
    return o, lse, None


def forward_fp8(request: Request, quantized: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a request in FP8, whose inputs were quantised to this."""
    dtype = quantized.v.dtype

    def weigh(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        unit = fp8_unit(p)
        return weighted_sum((p / unit).to(dtype).to(p.dtype) * unit, v)

    o, lse = forward_weighed(dequantized(request, quantized), weigh)
    return o.to(request.out_dtype), lse


def dequantized(request: Request, quantized: Quantized) -> Request:
    """What a request in FP8 asks for once its inputs are quantised: one of fp32 inputs."""
    q, k, v = (x.contiguous() for x in dequantize(quantized))
    exact = request._replace(precision=None, q_descale=None, k_descale=None, v_descale=None)
    return exact._replace(q=q, k=k, v=v)


def fp8_unit(p: torch.Tensor) -> torch.Tensor:
    """What p (batch, heads, m, n) is divided by before it is rounded to 8 bits: (batch, heads, m,
    1).
    """
    peak = torch.nn.functional.pad(p, (0, 1)).amax(-1, keepdim=True)  # 0 where there is no key
    return peak.clamp(min=torch.finfo(p.dtype).tiny) / FP8_PEAK


def weighted_sum(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The o of attention."""
    return torch.einsum("bhmn,bnhd->bmhd", p[..., : v.shape[1]], v)


def forward_weighed(request: Request, weigh: Weigh) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of a request, with another function of p and v in the place of their product."""
    q, k, v = request.q, request.k, request.v
    if all(getattr(request, name) is None for name in SEQUENCES):
        return attend(q, k, v, request, weigh)
    nothing = sum(x[:0].sum() for x in (q, k, v))  # 0, so that no sequence at all has gradients
    o = q.new_zeros((*q.shape[:3], v.shape[3])) + nothing
    lse = torch.full_like(q[..., 0].mT, float("-inf"), dtype=at_least_fp32(q.dtype)) + nothing
    for b, slots in enumerate(key_slots(request)):
        row, queries = b, slice(None)
        if request.cu_seqlens_q is not None:
            row, queries = 0, slice(*request.cu_seqlens_q[b : b + 2].tolist())
        keys, values = (keys_of(request, x, b, slots)[None] for x in (k, v))
        own = q[row, queries][None]
        own = descaled(own, request.q_descale, b)
        keys = descaled(keys, request.k_descale, b)
        values = descaled(values, request.v_descale, b)
        found = attend(own, keys, values, request, weigh, first=b)
        o[row, queries], lse[row, :, queries] = found[0][0], found[1][0]
    return o, lse


def descaled(x: torch.Tensor, descale: torch.Tensor | None, b: int) -> torch.Tensor:
    """Sequence b with its scales multiplied in: x (1, length, heads, dim)."""
    if descale is None:
        return x
    if descale.dim() == 2:
        descale = descale[b].repeat_interleave(x.shape[2] // descale.shape[1])[:, None]
    return x * descale.to(x.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: Request,
    weigh: Weigh,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of whole sequences of one length each: q (batch, m, heads, head_dim), k and v
    (batch, n, kv_heads, dim); they are the request's sequences `first`, `first` + 1, ...
    """
    batch, m, heads, _ = q.shape
    n = k.shape[1]
    k, v = (repeat(x, "b n h d -> b n (h g) d", g=request.group) for x in (k, v))
    s = torch.einsum("bmhd,bnhd->bhmn", q * request.scale, k)
    if request.softcap is not None:
        s = request.softcap * torch.tanh(s / request.softcap)
    i, j = torch.arange(m, device=q.device)[:, None], torch.arange(n, device=q.device)
    behind = i + n - m - j  # how far the key lies behind the query
    if request.alibi_slopes is not None:
        slopes = request.alibi_slopes.to(s.dtype)
        if slopes.dim() == 2:
            slopes = slopes[first : first + batch]
        s = s - slopes[..., None, None] * behind.abs()
    visible = torch.ones_like(behind, dtype=torch.bool)
    if request.window_left is not None:
        visible = visible & (behind <= request.window_left)
    if request.window_right is not None:
        visible = visible & (behind >= -request.window_right)
    if request.query_starts is not None:
        visible = visible & (i >= of_each_head(request.query_starts, request))
    if request.query_ends is not None:
        visible = visible & (i < of_each_head(request.query_ends, request))
    s = s.masked_fill(~visible, float("-inf"))
    # A row of -inf has no softmax: give it zeros, in the result and in every gradient.
    empty = ~visible.any(-1, keepdim=True)
    if request.sink is not None:
        sink = request.sink.to(s.dtype)[:, None, None].expand(batch, -1, m, 1)
        s = torch.cat((s, sink), -1)
        empty = empty & (sink == float("-inf"))
    s = s.masked_fill(empty, 0.0)
    lse = torch.logsumexp(s.to(at_least_fp32(s.dtype)), dim=-1)
    p = torch.softmax(s, dim=-1).masked_fill(empty, 0.0)
    if request.dropout_p > 0:
        keep = dropout_keep(request, first, batch, m, n)
        p = p[..., :n].masked_fill(~keep, 0.0) / (1 - request.dropout_p)
    return weigh(p, v), lse.masked_fill(empty[..., 0], float("-inf"))


def of_each_head(x: torch.Tensor, request: Request) -> torch.Tensor:
    """Numbers of keys (batch, kv_heads, n) for scores: (batch, heads, 1, n)."""
    return repeat(x, "b h n -> b (h g) 1 n", g=request.group)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 if that is the dtype."""
    return torch.promote_types(dtype, torch.float32)


def key_slots(request: Request) -> list[slice]:
    """Which of its slots hold the keys of each sequence."""
    ends = [request.max_kv_length] * request.batch
    if request.cu_seqlens_k is not None:
        ends = request.cu_seqlens_k.diff().tolist()
    if request.kv_lengths is not None:
        ends = [max(0, min(x, end)) for x, end in zip(request.kv_lengths.tolist(), ends)]
    if request.kv_starts is None:
        return [slice(0, end) for end in ends]
    return [slice(max(0, x), end) for x, end in zip(request.kv_starts.tolist(), ends)]


def keys_of(request: Request, x: torch.Tensor, b: int, slots: slice) -> torch.Tensor:
    """Sequence b in the keys or values x: (n, kv_heads, dim)."""
    if request.block_table is not None:
        pages = request.block_table[b, : -(-slots.stop // x.shape[1])]
        return x[pages.long()].flatten(0, 1)[slots]
    if request.cu_seqlens_k is not None:
        return x[0, slice(*request.cu_seqlens_k[b : b + 2].tolist())][slots]
    return x[b, slots]


def dropout_keep(request: Request, first: int, batch: int, m: int, n: int) -> torch.Tensor:
    """Which entries of P dropout keeps in the sequences from `first` on: bool (batch, heads, m,
    n).
    """
    assert request.dropout_seed is not None
    seed, heads = int(request.dropout_seed.item()), request.q.shape[2]
    head = np.arange(first * heads, (first + batch) * heads).reshape(batch, heads, 1, 1)
    counter = (np.arange(m)[:, None], np.arange(n), head, 0)
    word = philox((seed & LOW_32_BITS, seed >> 32 & LOW_32_BITS), counter)[0]
    return torch.from_numpy(word >= round(request.dropout_p * 2**32)).to(request.q.device)


def philox(key: tuple[int, int], counter: tuple[Any, Any, Any, Any]) -> list[np.ndarray]:
    """Philox4x32-10: four random 32-bit words (as uint64) for each counter, four arrays of words
    that broadcast.

    Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
    """
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    half, low = np.uint64(32), np.uint64(LOW_32_BITS)
    for r in range(10):
        k0, k1 = (
            np.uint64(word + r * weyl & LOW_32_BITS)
            for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85))
        )
        a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (b >> half) ^ x1 ^ k0, b & low, (a >> half) ^ x3 ^ k1, a & low
    return [x0, x1, x2, x3]


def sdpa_forward(request: Request) -> tuple[torch.Tensor, None, None]:
    """The same attention through torch's `scaled_dot_product_attention`: (o, None, None), as it
    returns no LSE.

    Its `is_causal` is top-left aligned and it knows no window and no lengths, so these go through
    an explicit mask where they differ.
    """
    q, k, v = (x.transpose(1, 2) for x in (request.q, request.k, request.v))
    m, n = q.shape[2], k.shape[2]
    causal = request.window_right == 0
    bounded = request.window_left is not None or request.window_right not in (None, 0)
    mask = nothing = None
    if bounded or request.kv_lengths is not None or (causal and m not in (1, n)):
        mask = visible_keys(request)
        # What torch's kernels make of a row without a key, and of its gradient, is their own.
        nothing = ~mask.any(-1, keepdim=True)
        mask = mask | nothing
    # cuDNN builds a plan for each key length, which takes far longer than attention itself: not for
    # a decoding loop, where every step has another one.
    decoding = q.is_cuda and m != n
    with sdpa_kernel(WITHOUT_CUDNN) if decoding else nullcontext():
        o = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and causal and m == n,
            scale=request.scale,
            enable_gqa=request.group != 1,
        )
    if nothing is not None:
        o = o.masked_fill(nothing, 0.0)
    return o.transpose(1, 2), None, None


def visible_keys(request: Request) -> torch.Tensor:
    """Which keys each query sees, without a look at the lengths: bool (batch or 1, 1, M, N)."""
    q, m, n = request.q, request.q.shape[1], request.k.shape[1]
    lengths = torch.full((1,), n, device=q.device)
    if request.kv_lengths is not None:
        lengths = request.kv_lengths.clamp(0, n)
    lengths = lengths[:, None, None, None]
    key = torch.arange(n, device=q.device)
    behind = torch.arange(m, device=q.device)[:, None] + lengths - m - key
    visible = (key < lengths).expand(behind.shape)
    if request.window_left is not None:
        visible = visible & (behind <= request.window_left)
    if request.window_right is not None:
        visible = visible & (behind >= -request.window_right)
    return visible


def _limits(request: Request) -> str | None:
    if request.precision is not None and (reason := fp8_limits(request)):
        return reason
    return _no_splits(request)


def _no_splits(request: Request) -> str | None:
    if request.num_splits not in (None, 1):
        return f"num_splits={request.num_splits} is not possible; keys are split from 'fa2' on."
    return None


def _no_more_than_sdpa(request: Request) -> str | None:
    if request.precision is not None:
        return f"precision={request.precision!r} is not possible; use version='fa3' or 'reference'."
    if request.return_lse:
        return "it does not return the LSE; use version='reference' or one of the kernels."
    if request.dropout_p > 0:
        return "dropout_p draws another mask here; use version='reference' or one of the kernels."
    others = ("softcap", "alibi_slopes", "sink", *INTERVALS, *SEQUENCES)
    for name in others:
        if name != "kv_lengths" and getattr(request, name) is not None:
            return f"{name} is not possible; use version='reference' or one of the kernels."
    return _no_splits(request)


REFERENCE = Version(
    name="reference",
    title="plain PyTorch",
    wasted="",
    idea="the specification: scores, softmax, weighted sum, all in memory",
    source="Vaswani et al. 2017, arXiv:1706.03762",
    forward=forward,
    limits=_limits,
)
SDPA = Version(
    name="sdpa",
    title="torch SDPA",
    wasted="",
    idea="torch's scaled_dot_product_attention with the fastest backend it has",
    source="torch.nn.functional",
    forward=sdpa_forward,
    limits=_no_more_than_sdpa,
)
