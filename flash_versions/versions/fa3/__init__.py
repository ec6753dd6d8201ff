"""FlashAttention 3: asynchronous copies and products, in a grid that stays on the GPU."""

from collections.abc import Callable
from functools import partial

import torch

from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import (
    Backward,
    Forward,
    ForwardQuantized,
    Version,
    kernel_limits,
)
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.fa3 import ablation, forward
from flash_versions.versions.fa3.fp8 import forward as forward_fp8
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa3.hopper import exact
from flash_versions.versions.fa3.hopper import host as forward_hopper
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.decode import host as decode_hopper
from flash_versions.versions.fp8.quantize import prepare
from flash_versions.versions.tiles.tma import undescribable


def choose_forward(request: Request) -> Forward:
    """The kernel for a request: FA3's for Hopper, its portable one, or FA2's."""
    if request.precision is not None:
        return choose_fp8(request, forward_quantized)
    return choose_among(request, lambda request: forward_hopper.forward, choose_portable)


def choose_among(
    request: Request, hopper: Callable[[Request], Forward], portable: Callable[[Request], Forward]
) -> Forward:
    """The forward for a request that is not in FP8, asked in this order: FA2's for what boxes do
    not reach and for decoding, which waits for memory, unless the kernel for decoding on Hopper is
    faster; the one for Hopper; the portable one.
    """
    if request.batch_invariant:
        return exact.forward if exact.serves(request) else fa2_forward.forward
    if forward.left_to_gathering(request):
        return decode_hopper.forward if decode_hopper.serves(request) else fa2_forward.forward
    return portable(request) if forward_hopper.left_to_portable(request) else hopper(request)


def choose_portable(request: Request) -> Forward:
    """The portable kernel for a plain call; FA2's for one with options."""
    return fa2_forward.forward if forward.left_for_options(request) else forward.forward


def choose_backward(request: Request) -> Backward:
    """The gradients: by the kernel for Hopper, or FA2's."""
    if request.batch_invariant or gradients_left(request):
        return fa2_backward.backward
    return backward_hopper.backward


def gradients_left(request: Request) -> str | None:
    """Why a request's gradients are left to FA2's kernels, as a sentence, or None: the reasons of
    the forward but for the splits, which a backward does not have.
    """
    reason = forward.left_to_gathering(request, splits=False)
    return reason or backward_hopper.left_to_portable(request)


def choose_fp8(request: Request, kernel: ForwardQuantized) -> Forward:
    """What computes a request in FP8: this kernel, or FA2's for rows that boxes do not reach, which
    multiplies 8-bit numbers in 16 bits.
    """
    return fa2_forward.forward if request.gathers_fp8 else partial(serve_fp8, kernel=kernel)


def serve_fp8(
    request: Request, kernel: ForwardQuantized
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward in FP8, of tensors of either kind, by a kernel for quantised ones."""
    if request.k.shape[1] == 0:  # nothing to quantise
        exact = request._replace(precision=None, q_descale=None, k_descale=None, v_descale=None)
        q, k, v = (x.to(request.out_dtype) for x in (request.q, request.k, request.v))
        return fa2_forward.forward(exact._replace(q=q, k=k, v=v))
    quantized = prepare(request)
    q, k = (
        x if undescribable(name, x) is None else x.clone(memory_format=torch.contiguous_format)
        for name, x in (("q", quantized.q), ("k", quantized.k))
    )
    return kernel(request, quantized._replace(q=q, k=k))


def forward_quantized(
    request: Request, quantized: Quantized
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward of quantised tensors, by the first kernel that is made for a request."""
    if forward_fp8_hopper.left_to_portable(request):
        return forward_fp8.forward(request, quantized)
    return forward_fp8_hopper.forward(request, quantized)


def limits(request: Request) -> str | None:
    """What FA3 cannot serve."""
    if request.precision is not None:
        return forward_fp8.limits(request)
    return kernel_limits(request)


VERSION = Version(
    name="fa3",
    title="FlashAttention 3",
    wasted="tensor cores that wait for loads and for the softmax",
    idea="asynchronous copies and products: some warps only load, others compute in turns",
    source="Shah et al. 2024, arXiv:2407.08608",
    forward=lambda request: choose_forward(request)(request),
    limits=limits,
    backward=lambda request, *given: choose_backward(request)(request, *given),
    variants=ablation.VARIANTS,
    forward_quantized=forward_quantized,
    inexact=None,
    fp8_variants=ablation.FP8_VARIANTS,
)
