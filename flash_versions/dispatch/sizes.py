"""Tile sizes: how many queries and keys a program works on at once, and with how many warps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from flash_versions.dispatch.device import H200_SHARED_MEMORY, UNLIMITED, devices
from flash_versions.dispatch.request import Request


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes and compiler options of one kernel launch."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def fitted(self, head_dim: int, itemsize: int, limit: int) -> "LaunchConfig":
        """This configuration, or the next smaller one whose tiles fit `limit` bytes of shared
        memory.
        """
        config = self
        while config.shared_bytes(head_dim, itemsize) > limit:
            if config.num_stages > 2:
                config = replace(config, num_stages=config.num_stages - 1)
            elif config.block_kv > 32:
                config = replace(config, block_kv=config.block_kv // 2)
            elif config.block_q > 16:
                config = replace(config, block_q=config.block_q // 2)
            else:
                config = replace(config, num_stages=1)
                break
        return config

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of a program in bytes: a Q tile, and `num_stages` tiles of K and of V."""
        return (self.block_q + 2 * self.num_stages * self.block_kv) * head_dim * itemsize


def padded_head_dim(head_dim: int) -> int:
    """The tile width for a head dimension: a power of two, and at least the 16 that a tensor core
    multiplies.
    """
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def panel_widths(head_dim: int) -> tuple[int, ...]:
    """The tile widths for a head dimension in kernels that can divide it into two panels: powers of
    two, the first at least 64, the second at least 16 and smaller than the first.

    One panel if two would be as wide: 64 + 64 for 112 dims are 128.
    """
    padded = max(64, padded_head_dim(head_dim))
    first = padded // 2
    second = padded_head_dim(head_dim - first)
    return (first, second) if first >= 64 and second < first else (padded,)


def default_config(
    rows: int, request: Request, measured: Mapping[int, LaunchConfig]
) -> LaunchConfig:
    """Tile sizes for `rows` query rows in the dtype, head dims and device of a request.

    Args:
        rows: query rows that one program could work on.
        request: what is to be computed.
        measured: the fastest configuration on an H200 by head_dim, for 16-bit types; used where a
            program has as much shared memory as there and no dimension is padding. Elsewhere: what
            spills nothing.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    limit = devices[q.device].shared_memory
    as_measured = H200_SHARED_MEMORY <= limit < UNLIMITED and q.element_size() == 2
    block_q = min(128, max(16, 1 << (rows - 1).bit_length()))
    if q.dtype == torch.float32:  # exact products run on the ordinary FP units and need registers
        config = LaunchConfig(min(block_q, 64 if head_dim <= 64 else 32), 32, 8, 2)
    elif block_q < 64:
        config = LaunchConfig(block_q, 64, num_warps=4, num_stages=3)
    elif as_measured and q.shape[3] == v.shape[3] in measured:
        config = measured[head_dim]
    elif head_dim > 128:
        config = LaunchConfig(64, 64, num_warps=8, num_stages=2)
    else:
        config = LaunchConfig(block_q, 64, num_warps=8 if block_q == 128 else 4, num_stages=2)
    # 8-bit tiles are multiplied in 16 bits.
    return config.fitted(head_dim, max(2, q.element_size()), limit)


def backward_config(request: Request, measured: Mapping[int, LaunchConfig]) -> LaunchConfig:
    """Tile sizes of the portable backward kernels; arguments as in `default_config`.

    Elsewhere than on an H200: two tiles stay and two stream past, `num_stages` deep, in the shared
    memory that there is.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    limit = devices[q.device].shared_memory
    if limit == UNLIMITED:
        return LaunchConfig(64, 64, num_warps=4, num_stages=1)
    if q.dtype == torch.float32:
        block = 32 if head_dim <= 128 else 16
        return LaunchConfig(block, block, num_warps=8, num_stages=1)
    # What happens to the scores takes registers, too.
    plain = request.softcap is None and request.alibi_slopes is None and request.dropout_p == 0
    hopper = devices[q.device].capability == (9, 0)
    if plain and hopper and q.shape[3] == v.shape[3] in measured:
        return measured[head_dim]
    block = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    return LaunchConfig(block, block, 8, num_stages=2 if limit > 150_000 else 1)
