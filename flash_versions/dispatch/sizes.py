"""Tile sizes: how many queries and keys a program works on at once, and with how many warps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from flash_versions.dispatch.device import UNLIMITED, devices
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
        memory; if none does, the smallest.
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
def box_width(head_dim: int) -> int:
    """The tile width for a head dimension in kernels whose tiles TMA copies: at least 32."""
    return max(32, padded_head_dim(head_dim))


@cache
def panel_widths(head_dim: int) -> tuple[int, ...]:
    """The tile widths for a head dimension in kernels that can divide it into two panels: powers of
    two, a single one at least 32; of two, the first at least 64, the second at least 16 and smaller
    than the first. One panel if two would be as wide: 64 + 64 for 112 dims are 128.
    """
    padded = box_width(head_dim)
    first = padded // 2
    second = padded_head_dim(head_dim - first)
    return (first, second) if first >= 64 and second < first else (padded,)


class Needs(NamedTuple):
    """What a kernel has at hand while blocks stream past a tile of rows, which stays.

    Attributes:
        accumulators: fp32 tiles in registers, with a number for each row and dim.
        scores: fp32 tiles in registers, with a number for each row and each place of the block.
        resident: tiles of rows in shared memory. Of every block there are two more.
        stages: of the software pipeline, if its blocks fit.
    """

    accumulators: float
    scores: float
    resident: int
    stages: int


ONE_OUTPUT = Needs(accumulators=1, scores=1, resident=1, stages=3)
# FA1's: a product and the O that it is added to. Half of the product is gone before all is there.
TWO_OUTPUTS = Needs(accumulators=1.5, scores=1, resident=1, stages=3)
# S and dP; Q and dO stay.
QUERY_GRADIENT = Needs(accumulators=1, scores=2, resident=2, stages=2)
# S, dP and, in 16 bits, P; K and V stay.
KEY_GRADIENTS = Needs(accumulators=2, scores=2.5, resident=2, stages=2)

# Major compute capabilities whose tensor cores read tiles from shared memory (wgmma, tcgen05), and
# the rows that it takes. Elsewhere (mma.sync) tiles go through registers.
READ_SHARED_MEMORY = (9, 10)
ROWS_READ = 64
HOPPER = (9,)  # where the times were measured

# Rows and warps, the most desirable first.
SHAPES = ((128, 4), (128, 8), (64, 4), (64, 8), (32, 8), (16, 8))
# Of a thread, for accumulators and scores together. The rest of 255 is for addresses, for what
# belongs to rows, and for operands, unless they are read from shared memory.
REGISTERS = 128
REGISTERS_READING = 160
# Numbers of an accumulator that a thread has at least: with fewer, mma.sync has two warps compute
# the same.
SHARE = 32
RESERVED = 1536  # bytes of shared memory for what belongs to rows, and what the GPU takes


def tile_for(needs: Needs, rows: int, request: Request) -> LaunchConfig:
    """The tile of `rows` rows or fewer in the place of block_q, and the block in that of block_kv.

    It is the first one whose numbers fit the registers and whose operands fit the shared memory.
    Nothing was timed for it, see docs/understand/measuring.md.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    capability, limit, _ = devices[q.device]
    # What happens to the scores takes registers, too.
    plain = request.softcap is None and request.alibi_slopes is None and request.dropout_p == 0
    scores = needs.scores + (0 if plain else 1)

    def reads_shared(tall: int) -> bool:
        return capability[0] in READ_SHARED_MEMORY and tall >= ROWS_READ

    def shared_bytes(config: LaunchConfig) -> int:
        tall, block = config.block_q, config.block_kv
        # The block in use takes memory only where it is not in registers.
        blocks = config.num_stages - (0 if reads_shared(tall) else 1)
        tiles = (needs.resident * tall + 2 * blocks * block) * head_dim
        # P, where warps divide the columns, or dS where products read it.
        exchanged = tall < 16 * config.num_warps or (needs.scores > 1 and reads_shared(tall))
        return (tiles + exchanged * tall * block) * max(2, q.element_size()) + RESERVED

    for block in (64, 32, 16):
        for tall, warps in SHAPES:
            numbers = tall * (needs.accumulators * head_dim + scores * block) / (32 * warps)
            room = REGISTERS_READING if reads_shared(tall) else REGISTERS
            alone = warps == 4 or reads_shared(tall) or tall * head_dim >= SHARE * 32 * warps
            config = LaunchConfig(tall, block, warps, num_stages=2)
            if tall <= rows and numbers <= room and alone and shared_bytes(config) <= limit:
                deep = replace(config, num_stages=needs.stages)
                # The registers allow two programs of four warps at the same time. A third of the
                # memory is better used as L1 cache than for another stage.
                return deep if 8 // warps * shared_bytes(deep) <= 2 / 3 * limit else config
    return LaunchConfig(16, 16, num_warps=8, num_stages=1)


def default_config(
    rows: int,
    request: Request,
    measured: Mapping[int, LaunchConfig],
    needs: Needs = ONE_OUTPUT,
    alike: tuple[int, ...] = HOPPER,
) -> LaunchConfig:
    """Tile sizes for `rows` query rows in the dtype, head dims and device of a request.

    Args:
        rows: query rows that one program could work on.
        request: what is to be computed.
        measured: the fastest configuration on an H200 by head_dim, for 16-bit types; used where no
            dimension is padding.
        needs: of the kernel; decides elsewhere.
        alike: major compute capabilities on which `measured` is used.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    limit = devices[q.device].shared_memory
    block_q = min(128, max(16, 1 << (rows - 1).bit_length()))
    if q.dtype == torch.float32:  # exact products run on the ordinary FP units and need registers
        config = LaunchConfig(min(block_q, 64 if head_dim <= 64 else 32), 32, 8, 2)
    elif block_q < 64:
        config = LaunchConfig(block_q, 64, num_warps=4, num_stages=3)
    elif timed(request, measured, alike):
        return measured[head_dim]
    else:
        return tile_for(needs, block_q, request)
    # 8-bit tiles are multiplied in 16 bits.
    return config.fitted(head_dim, max(2, q.element_size()), limit)


def timed(
    request: Request, measured: Mapping[int, LaunchConfig], alike: tuple[int, ...] = HOPPER
) -> bool:
    """Whether `measured` holds for a request: 16 bits, one head_dim that is in it, and a GPU whose
    generation is in `alike`.
    """
    q, v = request.q, request.v
    if devices[q.device].capability[0] not in alike or q.element_size() != 2:
        return False
    return q.shape[3] == v.shape[3] in measured


def backward_config(
    request: Request, measured: Mapping[int, LaunchConfig], needs: Needs
) -> LaunchConfig:
    """Tile sizes of the portable backward kernels; arguments as in `default_config`. For dK and dV,
    block_kv is the tile and block_q what streams past; for dQ the other way round.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    if devices[q.device].shared_memory == UNLIMITED:
        return LaunchConfig(64, 64, num_warps=4, num_stages=1)
    if q.dtype == torch.float32:
        block = 32 if head_dim <= 128 else 16
        return LaunchConfig(block, block, num_warps=8, num_stages=1)
    plain = request.softcap is None and request.alibi_slopes is None and request.dropout_p == 0
    if plain and timed(request, measured):
        return measured[head_dim]
    config = tile_for(needs, 128, request)
    if needs is KEY_GRADIENTS:
        return replace(config, block_q=config.block_kv, block_kv=config.block_q)
    return config
