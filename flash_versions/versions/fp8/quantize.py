"""Queries, keys and values in 8 bits: scales, the rotation of Q and K, the transposed V.

An e4m3 number has three bits after the leading one and reaches from 2^-9 to 448, so a tensor is
divided by a scale first: value = fp8 * scale, scale = largest magnitude / limit. The limit of V is
448. That of Q and K is smaller, as sums of their products have to fit in fp16
(`largest_factor`): kernels may have scores in 16 bits then. How many values share a scale is a
choice (`Fp8.scales`): all of a tensor, those of a head, those of a block of 64 queries or 128 keys.
e4m3 is a floating-point format: what is 100 times smaller than the largest value is rounded no
worse than that one; only below a 28000th of it in V, and a 960th in Q and K of 128 dims, do bits
begin to go. So the granularity of the scales matters less than one would think;
docs/understand/fp8.md has the figures.

What helps is to spread outliers over the head before they are rounded: incoherent processing
(`Fp8.hadamard`). With the orthogonal matrix R = diag(signs) @ H / sqrt(dim), signs fixed and
random, H Hadamard's matrix, (q R) . (k R) = q . k; and every dimension of q R holds a little of all
dimensions of q.

The tensor core multiplies 8-bit operands only if the dimension that a product sums over is the
contiguous one. For P V these are the keys, so V is transposed; and its keys change places inside
groups of 16, so that the scores of a thread are its operand P without a shuffle (`key_order`).

Sources. Shah et al. 2024, "FlashAttention-3", section 3.3: block quantisation, incoherent
processing and the transposed V. Ashkboos et al. 2024, "QuaRot", arXiv:2404.00456, for the rotation.
"""

from functools import cache, partial

import torch

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.precision import BLOCK_KEYS, BLOCK_ROWS, Fp8, Quantized, is_fp8
from flash_versions.dispatch.request import Request
from flash_versions.versions.fp8.kernels import TILE, launch_quantize, launch_transpose
from flash_versions.versions.tiles.rows import View, cdiv

KEY_GROUP = 16  # keys that V has in another order
P_OFFSET = 8.0  # log2 of what the kernels multiply P by: its 2^8 is below e4m3's 448
LARGEST_SCORE = 32752.0  # half of fp16's largest number
VALUES_PER_THREAD = 64  # of a tile: 8 requests of 16 bytes


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    how: Fp8 = Fp8(),  # noqa: B008  (frozen)
    kv_lengths: torch.Tensor | None = None,
) -> Quantized:
    """Quantise the inputs of attention.

    A scale is the largest finite magnitude / limit, 1 where that is below 2^-100. The limit of V is
    448 (57344 for e5m2), that of Q and K `largest_factor`. Infinities become the limit, NaN stays.
    With blocks, one launch reads each input once; other scales are only known after a first pass.

    Args:
        q: (batch, M, heads, head_dim), fp16, bf16 or fp32, any strides but the last, which is 1.
        k: (batch, N, kv_heads, head_dim).
        v: (batch, N, kv_heads, head_dim_v).
        how: granularity of the scales, rotation, format.
        kv_lengths: (batch,) integers: keys and values of sequence b from row kv_lengths[b] on are
            not looked at, and written as 0. Clamped to 0 .. N.

    Raises:
        ValueError: the rotation does not exist for this head_dim, the GPU has no FP8, or a last
            stride is not 1.
    """
    head_dim = q.shape[3]
    if how.hadamard and (head_dim & (head_dim - 1) or not 16 <= head_dim <= 256):
        raise ValueError(
            f"q has head_dim {head_dim}; hadamard=True needs a power of two from 16 to 256."
        )
    if q.is_cuda and (capability := devices[q.device].capability) < (8, 9):
        major, minor = capability
        raise ValueError(f"compute capability {major}.{minor} has no FP8; 8.9 (Ada) or later has.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last one must be 1.")
    kv_lengths = None if kv_lengths is None else kv_lengths.contiguous()
    batch, m, heads, _ = q.shape
    n, kv_heads = k.shape[1:3]
    wide = cdiv(head_dim, 16) * 16
    q8 = q.new_empty((batch, heads, m, wide), dtype=how.dtype).transpose(1, 2)
    k8 = k.new_empty((batch, kv_heads, n, wide), dtype=how.dtype).transpose(1, 2)
    v8 = _new_values(v, how.dtype)
    blocks = cdiv(m, BLOCK_ROWS), cdiv(n, BLOCK_KEYS)
    found = [
        q.new_empty((batch, h, number), dtype=torch.float32)
        for h, number in ((heads, blocks[0]), (kv_heads, blocks[1]), (kv_heads, blocks[1]))
    ]
    launch = partial(_launch, (q, k, v), kv_lengths, how)
    if how.scales == "block":
        reference = found[0].new_zeros((batch, kv_heads))
        launch(found, (q8, k8, v8), reference)
        return Quantized(q8, k8, v8, found[0], found[1], found[2], reference)
    launch(found)
    found[0] = found[0].unflatten(1, (kv_heads, -1)).flatten(2)
    scales = [_shared(x, (0, 1, 2) if how.scales == "tensor" else (2,)) for x in found]
    scales = [x.expand(batch, kv_heads, 1) for x in scales]
    per_tile = [x.expand(-1, -1, number) for x, number in zip(scales, (*blocks, blocks[1]))]
    launch(per_tile, (q8, k8, v8))
    return Quantized(q8, k8, v8, scales[0], scales[1], scales[2], scales[2][..., 0])


def transpose_values(v8: torch.Tensor, kv_lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Values that are FP8 already, (batch, N, kv_heads, dim), in the form of `Quantized.v`; those
    from row kv_lengths[b] on become 0.
    """
    batch, n, kv_heads, _ = v8.shape
    out = _new_values(v8, v8.dtype)
    tiles = cdiv(n, TILE.value)
    x, y = v8.view(torch.int8), out.view(torch.int8)
    if batch * tiles == 0:
        return out
    with devices.on_device(v8):
        launch_transpose(
            (batch * kv_heads * tiles,),
            (View.of(x), _view_of_values(y), kv_lengths, n, kv_heads, tiles),
            {},
            num_warps=_num_warps(View.of(x), False),
        )
    return out


def dequantize(x: Quantized) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) in fp32, (batch, length, heads, dim), that an FP8 kernel computes attention of: q
    and k with zeros up to D16, and rotated if they were.
    """
    n = x.k.shape[1]
    q = x.q.float() * _per_row(x.q_scale, x.q, BLOCK_ROWS)
    k = x.k.float() * _per_row(x.k_scale, x.k, BLOCK_KEYS)
    order = key_order(x.v.shape[3]).to(x.v.device)
    v = torch.empty_like(x.v, dtype=torch.float32)
    v[..., order] = x.v.float()
    v = v.permute(0, 3, 1, 2)[:, :n]
    return q, k, v * _per_row(x.v_scale, v, BLOCK_KEYS)


@cache
def largest_factor(dtype: torch.dtype, head_dim: int) -> float:
    """The largest 8-bit number L with head_dim L^2 at most half of fp16's largest number. The
    largest magnitude of Q and of K becomes L: fp16 then holds every score, and the difference of
    any two.
    """
    numbers = torch.arange(256).to(torch.uint8).view(dtype).float()
    return numbers[head_dim * numbers * numbers <= LARGEST_SCORE].max().item()


@cache
def key_order(n16: int) -> torch.Tensor:
    """Which key lies at each position of `Quantized.v`: 16i + 8h + 2l + j at 16i + 4l + 2h + j,
    with h < 2, l < 4, j < 2.
    """
    return torch.arange(n16).unflatten(0, (-1, 2, 4, 2)).transpose(1, 2).flatten()


def prepare(request: Request) -> Quantized:
    """What the FP8 kernels compute a request from: its 16-bit tensors, quantised as its precision
    says, or its 8-bit ones as they are, with its descales.
    """
    q, k, v = request.q, request.k, request.v
    if not is_fp8(q):
        how = Fp8.parse(request.precision or "fp8")
        return quantize(q, k, v, how, request.kv_lengths)
    batch, n, kv_heads, _ = k.shape
    head_shape = (batch, kv_heads)
    v_scale = used = _three_dims(request.v_descale, head_shape, q.device)
    if request.kv_lengths is not None and v_scale.shape[2] > 1:
        # A block behind the last key may have any scale.
        first = torch.arange(v_scale.shape[2], device=q.device) * BLOCK_KEYS
        used = v_scale.where(first < request.kv_lengths[:, None, None], 0.0)
    return Quantized(
        _widened(q),
        _widened(k),
        transpose_values(v, request.kv_lengths),
        _three_dims(request.q_descale, head_shape, q.device),
        _three_dims(request.k_descale, head_shape, q.device),
        v_scale,
        used.amax(-1) if n else v_scale.new_ones(head_shape),
    )


def _launch(
    inputs: tuple[torch.Tensor, ...],
    kv_lengths: torch.Tensor | None,
    how: Fp8,
    scales: list[torch.Tensor],
    outputs: tuple[torch.Tensor, ...] | None = None,
    reference: torch.Tensor | None = None,
) -> None:
    """Launch `quantize_kernel` over all tiles of q, k and v. Without outputs, or with a reference,
    it measures the scales.
    """
    q, k, v = inputs
    (batch, m, heads, _), (n, kv_heads) = q.shape, k.shape[1:3]
    q_tiles, kv_tiles = cdiv(m, TILE.value), cdiv(n, TILE.value)
    programs = batch * (heads * q_tiles + 2 * kv_heads * kv_tiles)
    if programs == 0:
        return
    views = tuple(View.of(x) for x in inputs)
    written: tuple[View | None, ...] = (None, None, None)
    if outputs is not None:
        written = (View.of(outputs[0]), View.of(outputs[1]), _view_of_values(outputs[2]))
    largest = None if reference is None else reference.view(torch.int32)
    measure = outputs is None or reference is not None
    with devices.on_device(q):
        launch_quantize(
            (programs,),
            (
                views, written, tuple(View.of_rows(x) for x in scales), largest, kv_lengths, m, n,
                heads, kv_heads, q_tiles, kv_tiles, batch
            ),
            {
                "GROUP": 1 if measure else heads // kv_heads,
                "BLOCK_ROWS": BLOCK_ROWS,
                "BLOCK_KEYS": BLOCK_KEYS,
                "HADAMARD": how.hadamard,
                "MEASURE": measure,
                "WRITE": outputs is not None,
                "FACTOR_LIMIT": largest_factor(how.dtype, q.shape[3]),
                "LIMIT": torch.finfo(how.dtype).max,
            },
            num_warps=max(_num_warps(view, how.hadamard) for view in views),
        )  # fmt: skip


def _num_warps(view: View, hadamard: bool) -> int:
    """Warps of a program. With more than 8, the rotation spills registers."""
    warps = max(4, TILE.value * view.PADDED.value // (32 * VALUES_PER_THREAD))
    return min(warps, 8) if hadamard else warps


def _new_values(v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    batch, n, kv_heads, head_dim = v.shape
    n16 = cdiv(n, KEY_GROUP) * KEY_GROUP
    return v.new_empty((batch, kv_heads, head_dim, n16), dtype=dtype)


def _view_of_values(v8: torch.Tensor) -> View:
    """(batch, kv_heads, dim, keys) as a kernel receives it: its rows are dims."""
    return View(v8, *v8.stride()[:3])


def _shared(scale: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest of the scales along some dimensions, which stay as 1; 1 if all are of zeros."""
    if scale.numel() == 0:
        return scale.new_ones([1 if d in dims else size for d, size in enumerate(scale.shape)])
    largest = scale.amax(dims, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def _per_row(scale: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
    """Scales of x (batch, length, heads, dim) as (batch, length, heads, 1)."""
    length, heads = x.shape[1:3]
    if scale.shape[2] == 1:
        scale = scale.expand(-1, -1, length)
    else:
        scale = scale.repeat_interleave(block, 2)[..., :length]
    scale = scale.repeat_interleave(heads // scale.shape[1], 1)
    return scale.transpose(1, 2)[..., None]


def _three_dims(
    descale: torch.Tensor | None, head_shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """A descale of a request as fp32 (batch, heads, 1 or blocks)."""
    if descale is None:
        return torch.ones((), device=device).expand(*head_shape, 1)
    descale = descale.float()
    if descale.dim() == 3:
        return descale
    return (descale[..., None] if descale.dim() == 2 else descale).expand(*head_shape, 1)


def _widened(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension padded to a multiple of 16 by zeros; x itself if it is one."""
    missing = -x.shape[3] % 16
    if missing == 0:
        return x
    return torch.nn.functional.pad(x.view(torch.int8), (0, missing)).view(x.dtype)
