"""Quantising in plain torch: what `quantize` has to give, and, in tests of what FP8 kernels do with
it, in its place: the simulator takes longer for it than they for everything else.
"""

import torch

from flash_versions.dispatch.precision import BLOCK_KEYS, BLOCK_ROWS, Fp8, Quantized
from flash_versions.versions.fp8 import quantize

E5M2 = torch.float8_e5m2


def blocks(x, size):
    """(batch, length, heads, dim) -> (batch, heads, blocks, size * dim), zeros behind the end."""
    length = x.shape[1]
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -length % size))
    return x.transpose(1, 2).unflatten(2, (-1, size)).flatten(3)


def limit_of_factors(dtype, dim):
    """What the largest number of Q and K becomes: the largest of a type of which dim products of
    two are no more than half of fp16's largest number.
    """
    bits = torch.arange(0x7C if dtype == E5M2 else 0x7F)  # positive and finite
    numbers = bits.to(torch.uint8).view(dtype).double()
    return max(x for x in numbers.tolist() if dim * x * x <= 65504 / 2)


def expected_scales(x, size, how, limit, group=1):
    largest = blocks(x, size).abs().amax(-1)
    if how.scales == "head":
        largest = largest.unflatten(1, (-1, group)).flatten(2).amax(-1, keepdim=True)
    elif how.scales == "tensor":
        largest = largest.amax().expand(x.shape[0], x.shape[2] // group, 1)
    # By a tensor: on a GPU, torch divides by a number by multiplying with its reciprocal.
    return largest / torch.full_like(largest, limit)


def expected_bits(x, scale, size, dtype, limit):
    """The 8-bit tensor in the layout of x, as bytes."""
    per_row = scale if scale.shape[2] == 1 else scale.repeat_interleave(size, 2)
    per_row = per_row.expand(-1, -1, x.shape[1]) if scale.shape[2] == 1 else per_row
    per_row = per_row[..., : x.shape[1]].repeat_interleave(x.shape[2] // scale.shape[1], 1)
    divided = x.float() * (1.0 / per_row.transpose(1, 2)[..., None])
    return divided.clamp(-limit, limit).to(dtype).view(torch.uint8)


def transposed(v8):
    """Values as bytes (batch, n, kv_heads, dim) as `Quantized.v` has them: key 16i + 8h + 2l + j at
    16i + 4l + 2h + j, and zeros behind the last one.
    """
    v8 = torch.nn.functional.pad(v8, (0, 0, 0, 0, 0, -v8.shape[1] % 16))
    place = torch.arange(v8.shape[1], device=v8.device)
    key = place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    return v8[:, key].permute(0, 2, 3, 1).contiguous()


def expected(q, k, v, how):
    """What `quantize` gives without a rotation, bit by bit."""
    scales, found = [], []
    factor = limit_of_factors(how.dtype, q.shape[3])
    limits = factor, factor, torch.finfo(how.dtype).max
    for x, size, limit in zip((q, k, v), (BLOCK_ROWS, BLOCK_KEYS, BLOCK_KEYS), limits):
        group = 1 if how.scales == "block" else x.shape[2] // k.shape[2]
        largest = expected_scales(x, size, how, limit, group)
        scales.append(torch.where(largest > 0, largest, 1.0))
        found.append(expected_bits(x, scales[-1], size, how.dtype, limit))
    of_heads = largest.amax(-1) if how.scales == "block" else scales[2][..., 0]
    q8, k8 = (torch.nn.functional.pad(x, (0, -x.shape[3] % 16)) for x in found[:2])
    given = (x.view(how.dtype) for x in (q8, k8, transposed(found[2])))
    return Quantized(*given, *scales, of_heads)


def prepare(request):
    """`quantize.prepare`, in plain torch unless inputs are rotated or have 8 bits."""
    how = Fp8.parse(request.precision)
    if how.hadamard or request.q.dtype.itemsize == 1:
        return quantize.prepare(request)
    return expected(request.q, request.k, request.v, how)
