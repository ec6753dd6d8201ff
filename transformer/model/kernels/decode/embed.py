"""The beginning of a step: embeddings of the newest tokens, and room for them in the cache.

Each is a launch of a few bytes, and torch needs one to look up, one to clamp and one to add. Here
they are one kernel, which also starts before the kernel before is done (see `gemv`).
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.dispatch.device import devices
from transformer.model.kernels.decode.gemv import overlapping


@triton.jit(do_not_specialize=["new", "capacity"])
def embed_kernel(
    tokens, embedding, x, lengths, new, vocabulary, capacity,
    K: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for one token; the first of each row advances the row's length."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    token = tl.load(tokens + program)
    k = tl.arange(0, PADDED)
    last = tl.where((token >= 0) & (token < vocabulary), K, 0)  # nothing is read for an unknown one
    row = tl.load(embedding + token * K + k, mask=k < last, other=float("nan"))
    tl.store(x + program.to(tl.int64) * K + k, row, mask=k < K)
    if program % new == 0:
        length = tl.load(lengths + program // new)
        tl.store(lengths + program // new, tl.minimum(length, capacity - new) + new)


def embed(
    tokens: Tensor, embedding: Tensor, lengths: Tensor, capacity: int, *, overlap: bool = False
) -> Tensor:
    """Look tokens up, and advance the lengths by them. No gradient.

    Args:
        tokens: (batch, new) int64. One that the embedding does not have becomes NaN.
        embedding: (vocabulary, K) contiguous.
        lengths: (batch,) int32, the tokens stored in each row; changed in place.
        capacity: no length passes it: a row that is full counts its last slots again.
        overlap: start before the kernel before is done (compute capability 9.0 and later).

    Returns:
        (batch new, K), in the embedding's dtype.

    Raises:
        ValueError: no kernels run on this device.
    """
    if reason := devices.limits(embedding.device, "the model"):
        raise ValueError(reason)
    tokens = tokens.contiguous()
    vocabulary, width = embedding.shape
    x = embedding.new_empty(tokens.numel(), width)
    with devices.on_device(x):
        embed_kernel[(len(x),)](
            tokens,
            embedding,
            x,
            lengths,
            tokens.shape[1],
            vocabulary,
            capacity,
            K=width,
            PADDED=triton.next_power_of_2(width),
            num_warps=4,
            **overlapping(overlap),
        )
    return x
