"""Quantising in plain torch, for tests of what FP8 kernels do with the result: Triton's interpreter
takes longer for it than they for everything else.
"""

import torch

from flash_versions.dispatch.precision import BLOCK_KEYS, BLOCK_ROWS, Fp8, Quantized
from flash_versions.versions.fp8 import quantize
from flash_versions.versions.fp8.quantize import key_order
from tests.flash_versions.versions.fp8.test_quantize import (
    expected_bits,
    expected_scales,
    limit_of_factors,
)


def prepare(request):
    """`quantize.prepare`, in plain torch unless inputs are rotated, have 8 bits or need padding."""
    q, k, v = request.q, request.k, request.v
    how = Fp8.parse(request.precision)
    if how.hadamard or q.dtype.itemsize == 1 or q.shape[3] % 16:
        return quantize.prepare(request)
    scales, found = [], []
    factor = limit_of_factors(how.dtype, q.shape[3])
    limits = factor, factor, torch.finfo(how.dtype).max
    for x, size, limit in zip((q, k, v), (BLOCK_ROWS, BLOCK_KEYS, BLOCK_KEYS), limits):
        group = 1 if how.scales == "block" else x.shape[2] // k.shape[2]
        largest = expected_scales(x, size, how, limit, group)
        scales.append(torch.where(largest > 0, largest, 1.0))
        found.append(expected_bits(x, scales[-1], size, how.dtype, limit))
    of_heads = largest.amax(-1) if how.scales == "block" else scales[2][..., 0]
    q8, k8, v8 = found
    v8 = torch.nn.functional.pad(v8, (0, 0, 0, 0, 0, -v8.shape[1] % 16))
    v8 = v8[:, key_order(v8.shape[1])].permute(0, 2, 3, 1).contiguous()
    return Quantized(*(x.view(how.dtype) for x in (q8, k8, v8)), *scales, of_heads)
