"""The switches of FA3's kernel for Hopper, and how they are set."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from flash_versions.dispatch.device import H200_SHARED_MEMORY, devices
from flash_versions.dispatch.precision import is_fp8
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import panel_widths
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.triton_compat import MOST_DIMS_BESIDE_128_KEYS
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

# Rows that a consumer of three gets done while one of two does a row; the second number under a
# causal mask over up to SHORT keys, which leaves less of higher tiles (docs/understand/log.md).
THREE_TO_TWO = 1.16, 1.04  # at head_dim 64, all overlapping
THREE_IN_ORDER_TO_TWO = 1.05, 0.98  # from 65 to 96 dims, the three in order
FP8_THREE_IN_ORDER_TO_TWO = 1.07, 1.0  # in FP8 from 65 to 128 dims, the three in order
FP16_SCORES_THREE_TO_TWO = 1.12, 1.0  # in FP8 up to 128 dims with scores in fp16, all overlapping
SHORT = 4096
OTHER_BYTES = 3 * 1024  # what a program has in shared memory beside tiles, at most
INTERVAL_BYTES = 1024  # of the keys in a third slot of K
LEAST_SHARED = 16  # blocks of a tile that programs share


@dataclass(frozen=True)
class HopperConfig:
    """The switches of the kernel; each is a constant at one place in it.

    Attributes:
        consumers: warpgroups that compute, 64 query rows each; 2 or 3.
        block_kv: keys of a tile.
        stages: slots of the pipelines of K and V.
        q_stages: buffers for a consumer's Q. With 2 the next tile's Q is loaded during this tile.
        o_columns: columns of a consumer's buffer for O, 64 or 128; a wider O leaves in parts, one
            after the other. Of two panels none is wider than the first.
        overlap: issue S of the next block before the softmax of this one.
        ping_pong: consumers take turns at the tensor cores.
        late_wait: wait for P V after the softmax, as the paper does; ptxas would move this wait to
            before the softmax. Without overlap it changes nothing.
        scheduler: "grid", "static" or "dynamic", see `tile_scheduler.Scheduler`.
        heads: query heads of a group that share a tile, a power of two. A tile then has fewer
            queries, all of which see nearly the same keys: a causal mask hides less of its blocks,
            and few queries fill it. Not for FP8 and ALiBi, which have numbers for each head.
        tail: programs that share the keys of each tile of the last wave, of persistent programs.
    """

    consumers: int = 2
    block_kv: int = 128
    stages: int = 2
    q_stages: int = 2
    o_columns: int = 128
    overlap: bool = True
    ping_pong: bool = True
    late_wait: bool = False
    scheduler: str = "static"
    heads: int = 1
    tail: int = 1

    def __post_init__(self) -> None:
        if self.consumers not in (2, 3):
            raise ValueError(f"consumers={self.consumers} is not possible; 2 and 3 are.")
        if self.block_kv not in (64, 128):
            raise ValueError(f"block_kv={self.block_kv} is not possible; 64 and 128 are.")
        if self.o_columns not in (64, 128):
            raise ValueError(f"o_columns={self.o_columns} is not possible; 64 and 128 are.")
        if self.stages < 1 or self.q_stages < 1:
            raise ValueError(
                f"stages={self.stages} and q_stages={self.q_stages} must be at least 1."
            )
        if self.late_wait and self.overlap and self.stages == 1:
            raise ValueError(
                "late_wait with stages=1 would wait for a K that waits for this V; use stages=2."
            )
        if self.heads not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f"heads={self.heads} is not possible; powers of two up to 32 are.")
        if self.scheduler not in ("grid", "static", "dynamic"):
            raise ValueError(f"scheduler={self.scheduler!r} is not grid, static or dynamic.")

    @cached_property
    def block_q(self) -> int:
        """Rows of a tile."""
        return self.consumers * WARPGROUP_ROWS.value

    @cached_property
    def queries(self) -> int:
        """Queries of a tile: each has a row for every head of it."""
        return self.consumers * WARPGROUP_ROWS.value // self.heads

    def q_box(self, width: int) -> tuple[int, int, int]:
        """A consumer's part of Q and O: queries, columns and heads of a box."""
        return WARPGROUP_ROWS.value // self.heads, width, self.heads

    def shared_bytes(self, width: int, width_v: int) -> int:
        """Shared memory of the tiles of 16-bit numbers, in bytes; width and width_v are the columns
        of Q and K, and of V and O.
        """
        q_and_o = self.block_q * (self.q_stages * width + min(self.o_columns, width_v))
        k_and_v = self.block_kv * self.stages * (width + width_v)
        return 2 * (q_and_o + k_and_v)

    def fits(self, width: int, width_v: int, other: int = OTHER_BYTES) -> bool:
        """Whether the tiles fit, and barriers and the intervals of keys with them."""
        return self.shared_bytes(width, width_v) + other <= H200_SHARED_MEMORY


def default_config(request: Request) -> HopperConfig:
    """The fastest configuration that was found on an H200 (docs/understand/log.md). With
    batch_invariant, blocks of keys depend on the head dims only.
    """
    if not request.batch_invariant and prefers_order(request):
        scheduler = "static" if request.window_right is None else "dynamic"
        return HopperConfig(
            3, stages=3, q_stages=1, o_columns=64, overlap=False, ping_pong=False,
            scheduler=scheduler, heads=heads_of_tile(request)
        )  # fmt: skip
    return replace(overlapping_config(request), tail=2 if shares_tail(request) else 1)


def overlapping_config(request: Request) -> HopperConfig:
    """The fastest one with S of the next block in flight."""
    return replace(config_of_one_head(request), heads=heads_of_tile(request))


def prefers_order(request: Request) -> bool:
    """Whether three consumers that wait for each product are faster than two that overlap theirs.

    From 65 to 96 dims, products take less time than the way from S to P: the maximum, then the
    exponentials. With three consumers the tensor cores find work in two others meanwhile, but their
    registers do not suffice for S and P of two blocks beside O. Tiles of 192 rows have to fill the
    SMs as well.
    """
    between = all(64 < x.shape[3] <= 96 for x in (request.q, request.v))
    if not between or not is_plain(request):
        return False
    return not fills_better(request, THREE_IN_ORDER_TO_TWO, heads_of_tile(request))


def is_plain(request: Request) -> bool:
    """Whether nothing but a causal mask takes registers, and all sequences are alike."""
    plain = request.softcap is None and request.alibi_slopes is None and request.sink is None
    bounded = request.window_left is not None or request.window_right not in (None, 0)
    return plain and not (bounded or request.is_ragged or request.has_intervals)


def are_alike(request: Request) -> bool:
    """Whether all tiles take the same time, and no bits are promised beside other calls'."""
    plain = is_plain(request) and request.window_right is None
    return plain and request.precision is None and not request.batch_invariant


def has_short_wave(request: Request, tiles: int, blocks: int) -> bool:
    """Whether programs should share the tiles of the last wave, of so many blocks each: it fills at
    most half of the SMs, behind full ones (docs/understand/log.md).
    """
    sms = devices[request.q.device].num_sms
    last = tiles % sms if tiles > sms else 0
    return 0 < last <= sms // 2 and blocks >= LEAST_SHARED and are_alike(request)


def shares_tail(request: Request) -> bool:
    """Whether two programs share each tile of the forward's last wave: up to head_dim 64."""
    if max(request.q.shape[3], request.v.shape[3]) > 64 or request.num_splits is not None:
        return False
    rows = (2 if prefers_two_consumers(request) else 3) * WARPGROUP_ROWS.value
    batch, queries, heads, _ = request.q.shape
    together = heads_of_tile(request)
    tiles = cdiv(queries, rows // together) * (heads // together) * batch
    return has_short_wave(request, tiles, cdiv(request.k.shape[1], 128))


def heads_of_tile(request: Request) -> int:
    """How many query heads share a tile: of a group as many as the largest power of two that
    divides it. Ends of sequences and a mask then cut fewer tiles, few queries fill one, and
    neighbouring tiles read the same keys (docs/understand/log.md). A slope of ALiBi belongs to one
    head, and so do the scales of FP8, which has `fp8_config`.
    """
    return 1 if request.alibi_slopes is not None else min(request.group & -request.group, 32)


def config_of_one_head(request: Request) -> HopperConfig:
    """`default_config` for tiles of one head."""
    causal = request.window_right is not None
    head_dim, head_dim_v = request.q.shape[3], request.v.shape[3]
    uneven = causal or request.is_ragged or request.has_intervals
    scheduler = "dynamic" if uneven else "static"
    if max(head_dim, head_dim_v) > 128:
        widths = panel_widths(head_dim), panel_widths(head_dim_v)
        with_intervals = request.has_intervals or request.batch_invariant
        return wide_config(*widths, scheduler, OTHER_BYTES + with_intervals * INTERVAL_BYTES)
    if max(head_dim, head_dim_v) > 96:
        return HopperConfig(scheduler=scheduler)
    if max(head_dim, head_dim_v) > 64:
        return HopperConfig(stages=3, scheduler=scheduler)
    if prefers_two_consumers(request):
        return HopperConfig(2, stages=3, ping_pong=not causal, scheduler=scheduler)
    return HopperConfig(3, stages=3, scheduler=scheduler)


def wide_config(
    widths: tuple[int, ...], widths_v: tuple[int, ...], scheduler: str, other: int
) -> HopperConfig:
    """The largest tiles above head_dim 128, where shared memory and registers are short; with three
    slots of K, a program has so many other bytes.

    Slots of K and V come before a wider buffer for O and a second Q. Tiles have 128 keys if two
    slots of K and V fit and O leaves registers for so many scores; otherwise they have 64 keys, in
    a third slot if it fits. Products with 128 keys and 192 dims take so much longer than the
    softmax that consumers need no turns at the tensor cores.
    """
    width, width_v = sum(widths), sum(widths_v)
    small = HopperConfig(q_stages=1, block_kv=64, scheduler=scheduler)
    tiles = [replace(small, stages=3), small]
    if width_v <= MOST_DIMS_BESIDE_128_KEYS:
        tiles = [replace(small, block_kv=128, ping_pong=width < 192), *tiles]
    for tile, columns in product(tiles, (128, 64)):
        config = replace(tile, o_columns=columns)
        if config.fits(width, width_v, other if tile.stages == 3 else OTHER_BYTES):
            return config
    raise AssertionError("64 keys in two slots fit beside every Q")


def fp8_config(request: Request) -> HopperConfig:
    """`default_config` in FP8."""
    if prefers_order_in_fp8(request):
        scheduler = "static" if request.window_right is None else "dynamic"
        return HopperConfig(
            3, stages=3, q_stages=1, overlap=False, ping_pong=False, scheduler=scheduler
        )
    return overlapping_fp8_config(request)


def has_fp16_scores(request: Request) -> bool:
    """Whether scores in FP8 have 16 bits (`fp8/pairs.py`): not of the caller's 8-bit tensors, whose
    products fp16 may not hold.
    """
    return not is_fp8(request.q)


def prefers_order_in_fp8(request: Request) -> bool:
    """`prefers_order` in FP8 with scores of 32 bits, where products take half of their time. At
    head_dim 64 the other configuration has tiles of 192 rows, too.
    """
    head_dim = max(request.q.shape[3], request.v.shape[3])
    if head_dim > 128 or not is_plain(request) or has_fp16_scores(request):
        return False
    causal = request.window_right is not None
    if head_dim <= 64:
        return causal
    return not fills_better(request, FP8_THREE_IN_ORDER_TO_TWO, 1)


def overlapping_fp8_config(request: Request) -> HopperConfig:
    """`overlapping_config` in FP8."""
    causal = request.window_right is not None
    scheduler = "dynamic" if causal else "static"
    head_dim = max(request.q.shape[3], request.v.shape[3])
    if head_dim > 128:
        return HopperConfig(q_stages=1, scheduler=scheduler)
    config = HopperConfig(stages=3, ping_pong=False, scheduler=scheduler)
    if not has_fp16_scores(request):
        return replace(config, consumers=2 if head_dim > 64 else 3)
    if fills_better(request, FP16_SCORES_THREE_TO_TWO, 1):
        return config
    return replace(config, consumers=3, q_stages=1)


def prefers_two_consumers(request: Request) -> bool:
    """Whether tiles of 128 rows beat those of 192 at head_dim 64.

    Three consumers keep the tensor cores busier. But fewer tiles may fill the SMs worse.
    """
    q = request.q
    if request.has_intervals:  # more blocks are cut of higher tiles
        return True
    if request.cu_seqlens_q is not None:  # lengths are on the GPU; the mean is known
        return q.shape[1] <= 1024 * request.batch
    return fills_better(request, THREE_TO_TWO, heads_of_tile(request))


def fills_better(request: Request, three_to_two: tuple[float, float], heads: int) -> bool:
    """Whether tiles of two consumers fill the SMs so much better than tiles of three that they are
    faster, although three get so many rows done while two do a row; the second number holds under
    a causal mask over up to SHORT keys. So many heads share a tile.
    """
    q = request.q
    masked = request.window_right is not None and request.k.shape[1] <= SHORT
    programs, lines = devices[q.device].num_sms, q.shape[2] // heads * q.shape[0]
    two, three = (
        consumers * cdiv(cdiv(q.shape[1], consumers * 64 // heads) * lines, programs)
        for consumers in (2, 3)
    )
    return two * three_to_two[masked] < three
