"""The gradient of a sink: a key whose value is 0, so its dP is 0 and its dS = P * (0 - delta).

Each program adds up one head in a fixed order, so equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.rows import Rows, View, load_row_values

BLOCK = 4096  # rows that a program loads at once


@triton.jit(do_not_specialize=["batches", "length"])
def sink_kernel(dsink, sink, lse, delta, batches, length, BLOCK: tl.constexpr):
    """dsink = -sum(exp(sink - LSE) * delta) over all queries of a head, a program for each head."""
    head = tl.program_id(0)
    logit = tl.load(sink + head).to(tl.float32)
    blocks = tl.cdiv(length, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(batches * blocks):
        rows = Rows(tl.cast(step // blocks, tl.int64), head, 0, length)
        index = step % blocks * BLOCK + tl.arange(0, BLOCK)
        row_lse = load_row_values(lse, rows, index, float("-inf"))
        p_delta = tl.exp(logit - row_lse) * load_row_values(delta, rows, index, 0.0)
        total += tl.where(row_lse == float("-inf"), 0.0, p_delta)  # of no sequence: it has no sink
    tl.store(dsink + head, -tl.sum(total, 0))


launch_sink = Launcher(sink_kernel)


def sink_gradient(
    sink: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor | None:
    """dsink (heads,) in the sink's dtype, None without one; lse and delta are (batch, heads, M)."""
    if sink is None:
        return None
    dsink = torch.empty_like(sink)
    batch, heads, length = lse.shape
    launch_sink(
        (heads,),
        (dsink, sink, View.of_rows(lse), View.of_rows(delta), batch, length),
        {"BLOCK": BLOCK},
        num_warps=8,
    )
    return dsink
