"""FlashAttention 3 in FP8, forward, on Hopper: the same kernel on 8-bit tensors.

`flash_versions/lessons/fa3_fp8.py` explains scales, the factor 2^8 of P, which is subtracted from
the LSE, and the transposed V. Here they are in `operands.py`, `scales.py` and `pairs.py`. Scores of
tensors that were quantised in the call have 16 bits, two in a register. Those of the caller's 8-bit
tensors have 32, as products of these may be larger than fp16's numbers.

Cost. The products take half the time, the exponentials as long as before: 512 cycles of the tensor
cores and 512 of the special function units for 64 rows and 128 keys at head_dim 128. Two consumers
keep neither unit busy all the time, so there are three where their tiles fill the SMs. With scores
of 16 bits they overlap S with P V; with 32 bits registers do not suffice for that above 64 dims
(`config.prefers_order_in_fp8`).

Source: Shah et al. 2024, "FlashAttention-3", section 3.3; scales for blocks and the rotation of Q
and K are in its text and not in its code.
"""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.precision import BLOCK_KEYS, BLOCK_ROWS, PORTABLE, Quantized
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import box_width
from flash_versions.versions.fa3.hopper import host as forward_hopper
from flash_versions.versions.fa3.hopper.config import HopperConfig, fp8_config
from flash_versions.versions.fp8.quantize import P_OFFSET
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.tma import describe_swizzled
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, available


def left_to_portable(request: Request) -> str | None:
    """Why a request is left to the portable kernel, as a sentence, or None."""
    if not available(request.q.device):
        return f"{request.q.device} is no Hopper GPU."
    for name in PORTABLE:
        if getattr(request, name) is not None:
            return f"{name} is left to the portable kernel."
    return None


def forward(
    request: Request, quantized: Quantized, config: HopperConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention of FP8 tensors and its LSE on a Hopper GPU, as `fa2.forward` has them.

    Args:
        request: what is asked for; of its q, k and v only shapes and dtype are read.
        quantized: Q, K and V, see `Quantized`.
        config: the schedule; None chooses by shape.

    Raises:
        ValueError: the configuration does not fit the request.
    """
    config = config or fp8_config(request)
    boxes = describe_inputs(request, quantized, config)
    per_block, scales = scales_of(request, quantized)
    constants = forward_hopper.all_constants(request, config, per_block, P_OFFSET)
    launcher = forward_hopper.launch_forward
    return forward_hopper.launch(launcher, request, config, constants, boxes, scales)


def describe_inputs(
    request: Request, quantized: Quantized, config: HopperConfig
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Q, K and V as boxes."""
    if config.heads > 1:
        raise ValueError("heads of one tile share no scale in FP8; use heads=1.")
    width, width_v = (box_width(x.shape[3]) for x in (request.q, request.v))
    return (
        describe_swizzled(quantized.q, WARPGROUP_ROWS.value, width),
        describe_swizzled(quantized.k, config.block_kv, width),
        describe_swizzled(quantized.v.transpose(1, 2), width_v, config.block_kv),
    )


def scales_of(request: Request, x: Quantized) -> tuple[bool, tuple[torch.Tensor, ...]]:
    """Whether any scale is of a block, and then all as if they were: (q_scale (batch, heads, blocks
    of queries), k_scale and v_scale (batch, kv_heads, blocks of keys)); otherwise all (batch,
    kv_heads, 1). Last v_reference. All contiguous.
    """
    q_scale, k_scale, v_scale = x.q_scale, x.k_scale, x.v_scale
    kv_heads = k_scale.shape[1]
    per_block = q_scale.shape[1] != kv_heads or any(
        scale.shape[2] > 1 for scale in (q_scale, k_scale, v_scale)
    )
    if per_block:
        if q_scale.shape[1] == kv_heads:
            q_scale = q_scale.repeat_interleave(request.group, 1)
        q_scale = q_scale.expand(-1, -1, cdiv(request.q.shape[1], BLOCK_ROWS))
        blocks = cdiv(request.k.shape[1], BLOCK_KEYS)
        k_scale, v_scale = (scale.expand(-1, -1, blocks) for scale in (k_scale, v_scale))
    scales = (q_scale, k_scale, v_scale, x.v_reference)
    return per_block, tuple(scale.contiguous() for scale in scales)
