"""The switches of the Hopper kernel in hopper.py, and how they are set."""

from dataclasses import dataclass, replace
from functools import lru_cache

from flash_versions.versions.tiles.rows import cdiv

CONSUMERS = 2
BLOCK_K = 64  # columns of A and B in a slot: 128 bytes, the widest swizzle
CHAIN = 2  # slots whose products are in flight together, behind a norm


@dataclass(frozen=True)
class GemmConfig:
    """The switches of the kernel. Its tiles have to fit the 226 KiB of shared memory that a program
    has for them.

    Attributes:
        rows: of a consumer's part of a tile; 64 or 128.
        columns: of a tile; 64, 128 or 256. An accumulator of 64 x 256 or 128 x 128 takes half of a
            consumer's registers, and none can be larger.
        stages: slots of the pipeline.
        group: rows of tiles that are walked down before the next column of tiles, so that what is
            computed at one time shares A and B in the L2 cache.
        ping_pong: each consumer computes tiles of its own, and they take turns.
        epilogue_columns: of a sub-tile.
        buffers: for sub-tiles, of each consumer.
    """

    rows: int = 128
    columns: int = 128
    stages: int = 6
    group: int = 8
    ping_pong: bool = True
    epilogue_columns: int = 32
    buffers: int = 2

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(
                f"stages={self.stages} is not possible: a slot is given back while the next is "
                "multiplied; 2 or more are."
            )

    @property
    def readers(self) -> int:
        """Consumers that compute one tile, and so read the same slots of the pipeline."""
        return 1 if self.ping_pong else CONSUMERS

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.rows * self.readers


# Behind a norm, the fastest that was found on an H200; both consumers compute a tile, 64 rows each.
NORM = GemmConfig(rows=64, columns=256, stages=4, ping_pong=False, epilogue_columns=64)


@lru_cache(maxsize=1024)  # one for each length that comes, which is arithmetic only
def default_config(
    rows: int, columns: int, num_sms: int, residual: bool = False, swiglu: bool = False
) -> GemmConfig:
    """The fastest configuration that was found on an H200.

    With many tiles both consumers work on one of 128 x 256, for which A and B are read least: on a
    cool GPU, with its clock high, that wins; on a hot one it is behind tiles by turns by a few per
    cent. Of a SwiGLU a tile has 256 rows of 128 columns of gate and of up. With fewer tiles than
    num_sms, tiles of 128 x 128 by turns, and smaller ones where more than half of the
    num_sms would have none.

    Args:
        rows, columns: of the product; with SwiGLU, the columns of gate and up together.
        num_sms: of the GPU.
        residual: whether one is added; it needs more buffers, to be on its way early.
        swiglu: whether there are gate and up.
    """
    together = GemmConfig(
        stages=3 if residual else 4, ping_pong=False, buffers=4 if residual else 2
    )
    if swiglu and cdiv(rows, 256) * cdiv(columns, 128) >= num_sms:
        return together
    if not swiglu and cdiv(rows, 128) * cdiv(columns, 256) > num_sms:
        return replace(together, rows=64, columns=256, epilogue_columns=64)
    sizes = [(128, 128, 5 if residual else 6), (64, 128, 8), (64, 64, 12)]
    enough = (s for s in sizes if 2 * cdiv(rows, s[0]) * cdiv(columns, s[1]) > num_sms)
    high, wide, stages = next(enough, sizes[-1])
    return GemmConfig(rows=high, columns=wide, stages=stages, buffers=4 if residual else 2)
