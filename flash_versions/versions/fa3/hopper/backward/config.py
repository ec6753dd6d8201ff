"""The switches of FA3's backward for Hopper, and how they are set."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

from flash_versions.dispatch.device import H200_SHARED_MEMORY, devices
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import panel_widths
from flash_versions.versions.fa3.hopper.config import OTHER_BYTES, are_alike, has_short_wave
from flash_versions.versions.tiles.rows import cdiv

HALVES_DIMS = 320  # of tiles of dK and dV together: of 64 keys, 160 registers of a thread
PAIR_DIMS = 384  # 192 registers of a thread
MOST_SLOTS = 3  # of Q: with 128 keys, and neither halves nor a pair, each has a named barrier
DQ_WIDTH = 32  # dims of dQ in a product, with 128 keys above head_dim 128
L2_BYTES = 32 << 20  # of the cache that a section of heads may fill
# As long as so many steps a tile takes beside them: until K and V are there, dK and dV stored.
STEPS_BESIDE = 3
STEPS_TO_ADD = 1  # of a part: to leave its sums, and now and then to add all
HEAVY_SHARE = 0.3  # of the heaviest tile's steps that a tile has under intervals
WORTH_MORE = 0.95  # of the time of fewer parts
MOST_PARTS = 8
TAIL = 4  # programs that share a tile of a short last wave (docs/understand/log.md)
# Q, dO and dQ of running programs: 49.5 MiB fit in an H200's L2 cache.
CACHED_BYTES = 50 << 20
UNCACHED = 1.2  # times as long a step takes if they are more
# Tiles for each SM, of all key heads: up to so many, tiles of 64 keys are divided, and under
# intervals the heaviest tiles of all heads come first.
FEW_WAVES = 4
FEW_CAUSAL_WAVES = 2  # programs for each SM, up to which they do so under a causal mask
# Heads of a section in turns; without a mask, short heads may be more. More were slower at head_dim
# 64, or under a causal mask at 128 (docs/understand/log.md).
MOST_ALTERNATING = 4


@cache
def tile_widths(head_dim: int, panels: bool, by_halves: bool = False) -> tuple[int, ...]:
    """The tile widths for a head dimension, at least 64: then half of dQ has whole groups of 32
    columns (`rows.in_order`). If `by_halves`, a second panel is at least as wide as dQ's parts.
    """
    first, *second = panel_widths(head_dim)
    if not second:
        return (max(first, 64),)
    least = DQ_WIDTH if by_halves else 0
    return (first, max(second[0], least)) if panels else (2 * first,)


@dataclass(frozen=True)
class BackwardConfig:
    """The switches of the kernel.

    Attributes:
        block_kv: keys of a tile. 128: each of two consumers has 64. 64, for a head_dim of more than
            128: each has all of them and half of the dims (`wider/wide.py`).
        block_q: queries of a step.
        stages: slots of the pipelines of Q and of dO; with block_kv=64 two of Q and one of dO. A
            pair has one of dO, too.
        kv_stages: slots of K and V, with 128 keys and neither halves nor a pair: with two, the next
            tile's are loaded during this one.
        early: issue S of the next step in this one, and dP before the exponentials, with 128 keys
            and neither halves nor a pair. That takes registers: without it S, then P, are gone when
            dP comes, and P is kept in 16 bits.
        held: have V and K in registers, as left operands, and compute dQ in one product, not two:
            S, dP and dQ read less of shared memory. For head_dim up to 64.
        panels: divide head dims of at most three quarters of a power of two into two panels, such
            as 192 = 128 + 64 (`panels.py`), with 128 keys; otherwise they are padded to the power
            of two.
        halves: have 128 keys above head_dim 128, too, and compute S and dP of half of a block's
            queries at a time (`wider/halves.py`). For HALVES_DIMS of q and v together, such as 192
            and 128 in panels, and a head_dim of q of more than 64.
        parts: divide the query heads of each key head over so many programs (`split_groups.py`).
        tail: programs that share the blocks of queries of each tile of the last wave (`pair` only).
        pair: have 128 keys above head_dim 128, too, and two warpgroups that do everything
            (`wider/pair.py`). For PAIR_DIMS of q and v together.
    """

    block_kv: int = 128
    block_q: int = 64
    stages: int = 2
    kv_stages: int = 1
    early: bool = False
    held: bool = False
    panels: bool = False
    halves: bool = False
    parts: int = 1
    tail: int = 1
    pair: bool = False

    def __post_init__(self) -> None:
        if self.block_kv not in (64, 128):
            raise ValueError(f"block_kv={self.block_kv} is not possible; 64 and 128 are.")
        if self.block_q not in (64, 128):
            raise ValueError(f"block_q={self.block_q} is not possible; 64 and 128 are.")
        beside = self.block_kv, self.block_q, self.early, self.held
        if self.by_halves and beside != (128, 64, False, False):
            name = "halves fit" if self.halves else "pair fits"
            raise ValueError(f"{name} block_kv=128 and block_q=64, and neither early nor held.")
        if self.halves and self.pair:
            raise ValueError("use either halves or pair.")
        if self.block_kv == 64 and (self.panels or self.early or self.held):
            raise ValueError("panels, early and held fit block_kv=128.")
        if self.kv_stages not in (1, 2):
            raise ValueError(f"kv_stages={self.kv_stages} is not possible; 1 and 2 are.")
        if self.kv_stages == 2 and (self.block_kv == 64 or self.by_halves):
            raise ValueError("kv_stages=2 fits block_kv=128, with neither halves nor a pair.")
        if self.block_kv == 64 and self.stages != 2:
            raise ValueError(f"stages={self.stages} does not fit block_kv=64; use 2.")
        if self.stages < 2:  # for an early S; gradients of halves leave by two slots
            raise ValueError(f"stages={self.stages} must be at least 2.")
        if self.stages > MOST_SLOTS:
            raise ValueError(f"stages={self.stages} must be at most {MOST_SLOTS}.")

    @cached_property
    def by_halves(self) -> bool:
        """Whether S and dP are computed for half of a block's queries at a time."""
        return self.halves or self.pair

    @cached_property
    def kind(self) -> str:
        """How a program's warps divide the work: narrow (`kernel.py`) up to head_dim 128, above it
        halves, pair or wide, as in `wider`.
        """
        if self.block_kv == 64:
            return "wide"
        return "halves" if self.halves else "pair" if self.pair else "narrow"

    def check(self, request: Request) -> None:
        """Refuse a request that the configuration does not fit."""
        head_dim = max(request.q.shape[3], request.v.shape[3])
        if request.group % self.parts:
            raise ValueError(
                f"parts={self.parts} must divide the {request.group} heads of a group."
            )
        alike = self.pair and self.parts == 1 and are_alike(request)
        alike = alike and not request.is_deterministic
        if self.tail != 1 and not (self.tail > 1 and alike):
            raise ValueError(f"tail={self.tail} is for tiles of a pair, whole and alike.")
        if self.by_halves:
            if not self.has_room(request.q.shape[3], request.v.shape[3]):
                most = f"{HALVES_DIMS} of halves" if self.halves else f"{PAIR_DIMS} of a pair"
                raise ValueError(f"tiles of q and v are wider than the {most}.")
            if self.halves and request.q.shape[3] <= 64:  # loads come with the third part of dQ
                raise ValueError(
                    f"halves do not fit head_dim {request.q.shape[3]} of q; use them above 64."
                )
        elif (head_dim > 128) != (self.block_kv == 64):
            raise ValueError(
                f"block_kv={self.block_kv} does not fit head_dim {head_dim}; use 128 up to "
                f"head_dim 128, and above it 64, or 128 with halves or a pair."
            )
        if self.held and head_dim > 64:
            raise ValueError(f"held does not fit head_dim {head_dim}; use it up to 64.")

    def widths(self, head_dim: int) -> tuple[int, ...]:
        """`tile_widths`."""
        return tile_widths(head_dim, self.panels, self.by_halves)

    def dq_width(self, head_dim: int) -> int:
        """Dims of dQ that are computed at a time and leave as a box; of two panels, those of the
        first one.
        """
        if self.by_halves:
            return DQ_WIDTH
        first, *second = self.widths(head_dim)
        if self.block_kv == 64:
            return first // 4
        return first if self.held or second else first // 2

    def has_room(self, head_dim: int, head_dim_v: int) -> bool:
        """Whether registers suffice, with halves or a pair; else `check` says for which dims."""
        dims = (sum(self.widths(x)) for x in (head_dim, head_dim_v))
        most = HALVES_DIMS if self.halves else PAIR_DIMS
        return not self.by_halves or sum(dims) <= most

    def shared_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Shared memory of the tiles of 16-bit numbers, of P and dS, and of dQ in fp32."""
        widths, widths_v = (self.widths(x) for x in (head_dim, head_dim_v))
        width, width_v = sum(widths), sum(widths_v)
        do_stages, scores, dq = self.stages, 2, 2 * width
        if self.block_kv == 64:
            do_stages, scores, dq = 1, 4, width // 2
        if self.halves:
            dq = 2 * DQ_WIDTH
        if self.pair:  # one slot of dO and of dS, four tiles of dQ
            do_stages, scores, dq = 1, 1, 4 * DQ_WIDTH
        queries = self.stages * width + do_stages * width_v + scores * self.block_kv + 2 * dq
        keys = self.kv_stages * (width + width_v)
        return 2 * (self.block_kv * keys + self.block_q * queries)

    def fits(self, head_dim: int, head_dim_v: int) -> bool:
        """Whether the tiles fit, and with them LSE, delta and barriers, and registers suffice."""
        if not self.has_room(head_dim, head_dim_v):
            return False
        return self.shared_bytes(head_dim, head_dim_v) + OTHER_BYTES <= H200_SHARED_MEMORY

    def padded_length(self, length: int) -> int:
        """Queries in whole steps."""
        return cdiv(length, self.block_q) * self.block_q


def default_config(request: Request) -> BackwardConfig:
    """The configuration for a request."""
    parts, tail = choose_sharing(request)
    return replace(config_of_dims(request), parts=parts, tail=tail)


def config_of_dims(request: Request) -> BackwardConfig:
    """The configuration but for its parts."""
    return config_of(request.q.shape[3], request.v.shape[3], request.softcap is not None)


@cache
def config_of(head_dim: int, head_dim_v: int, capped: bool) -> BackwardConfig:
    """The configuration for these dims. Above head_dim 128: halves where registers and shared
    memory suffice, else a pair, else 64 keys. Above 64, early gains nothing; above 80, a third
    slot. Two slots of K and V wherever they fit.
    """
    dims = head_dim, head_dim_v
    if max(dims) > 128:
        halves = BackwardConfig(panels=True, halves=True)
        pair = BackwardConfig(panels=True, pair=True)
        config = next((x for x in (halves, pair) if x.fits(*dims)), BackwardConfig(block_kv=64))
    elif max(dims) > 64:
        config = BackwardConfig(panels=True, stages=3 if max(dims) <= 80 else 2)
    else:  # With softcap both P and its slope wait for dP: held operands would spill.
        config = BackwardConfig(stages=3, early=True, held=not capped)
    if config.block_kv == 128 and not config.by_halves:
        deeper = replace(config, kv_stages=2)
        config = deeper if deeper.fits(*dims) else config
    return config


def tiles_of_keys(request: Request, block_kv: int) -> int:
    """Tiles of the keys of all sequences: of ragged ones, for as many as a plan has lines."""
    batch, kv_length = request.k.shape[:2]
    if request.is_ragged:
        return batch * kv_length // block_kv + request.batch
    return cdiv(kv_length, block_kv) * batch


def shared_tiles(request: Request, config: BackwardConfig) -> int:
    """The tiles that programs share, of all key heads: all, as `parts`, or as `tail` the last."""
    tiles = tiles_of_keys(request, config.block_kv) * request.k.shape[2]
    return tiles if config.tail == 1 else tiles % devices[request.q.device].num_sms


def choose_sharing(request: Request) -> tuple[int, int]:
    """(parts, tail) by default."""
    config = config_of_dims(request)
    parts = choose_parts(request, config)
    if not config.pair or parts > 1 or request.is_deterministic:
        return parts, 1
    tiles, blocks = shared_tiles(request, config), cdiv(request.q.shape[1], config.block_q)
    return parts, TAIL if has_short_wave(request, tiles, blocks) else 1


def choose_parts(request: Request, config: BackwardConfig) -> int:
    """How many programs share the query heads of a key head: the fewest of which no other number
    is expected to be much faster. Times are in steps, of one block of queries and a tile of keys.

    Unless all tiles weigh the same, the heaviest ones come first. Then the time is that of the
    heaviest one, or all that there is to do divided by the SMs. In turns the heaviest ones come
    last, when the others are nearly done: then it is the sum of both. What tiles weigh under
    intervals the host does not know: HEAVY_SHARE is that of a prompt with answers.

    Programs whose tiles weigh unlike do not walk over heads in step: what they have under way is Q,
    dO and dQ of all heads that a program walks over. With fewer heads that fits in the L2 cache.
    With tiles of 64 keys that gained nothing in most calls, so they are divided in small grids only
    (docs/understand/log.md).
    """
    kv_heads, group = request.k.shape[2], request.group
    if group == 1:
        return 1
    tiles, queries = tiles_of_keys(request, config.block_kv), request.q.shape[1]
    if request.cu_seqlens_q is not None:  # most of the work is in sequences longer than the mean
        queries, tiles = 2 * queries // request.batch, tiles - request.batch // 2
    longest = cdiv(queries, config.block_q) * group
    alike = not (request.is_ragged or request.has_intervals or request.window_right is not None)
    usual: float = longest
    if request.has_intervals:
        usual = longest * HEAVY_SHARE
    elif request.window_right is not None:
        usual = longest / 2
    sms = devices[request.q.device].num_sms
    if config.block_kv == 64 and tiles * kv_heads > FEW_WAVES * sms:
        return 1
    under_way = min(sms, tiles * kv_heads) * config.block_kv * bytes_of_row(request)

    def time(parts: int) -> float:
        programs = tiles * kv_heads * parts
        beside = STEPS_BESIDE + (STEPS_TO_ADD if parts > 1 else 0)
        if alike:
            return cdiv(programs, sms) * (longest / parts + beside)
        step = UNCACHED if under_way * (group / parts) > CACHED_BYTES else 1.0
        heaviest = longest / parts * step + beside
        mean = programs * (usual / parts * step + beside) / sms
        return heaviest + mean if request.is_deterministic else max(heaviest, mean)

    best = 1
    for parts in range(2, min(group, MOST_PARTS) + 1):
        if group % parts == 0 and time(parts) < WORTH_MORE * time(best):
            best = parts
    return best


def heads_of_section(request: Request, config: BackwardConfig) -> int:
    """Key heads, of all sequences, between which consecutive programs alternate, where the parts of
    a divided head count as heads: as many as have Q, dO and an fp32 dQ that fit in the L2 cache.
    Without a causal mask, where tiles weigh the same, one. Under a causal mask or causal intervals,
    with groups and few tiles: all heads, so that the heaviest tiles start first.

    In turns, not all tiles of a head may start at once: at most MOST_ALTERNATING heads, or
    `short_heads` if those are more, and no more than fit in the cache. Under a causal mask in half
    of it, and the parts of one head need not alternate: of few long heads, those of one part fill
    the cache. With a bound on the left they have to: a head's first tiles, too, may see few queries
    then, and are the first part's alone, which waits for tiles of the others (`turns`).
    """
    heads = request.k.shape[0] * request.k.shape[2]
    if request.is_deterministic:
        fitting = heads_in_cache(request)
        most = min(max(MOST_ALTERNATING, short_heads(request, config)), heads)
        if request.window_right is None:
            return min(fitting, most) * config.parts
        if request.window_left is None:
            return max(1, min(fitting // 2, most))
        return max(1, min(fitting // (2 * config.parts), most)) * config.parts
    if request.window_right is None:
        return config.parts
    if request.group > 1:
        programs = tiles_of_keys(request, config.block_kv) * request.k.shape[2]
        sms = devices[request.q.device].num_sms
        few = programs * config.parts <= FEW_CAUSAL_WAVES * sms
        if request.has_intervals:
            few = programs <= FEW_WAVES * sms
        if few:
            return heads * config.parts
    return min(heads_in_cache(request), heads) * config.parts


def short_heads(request: Request, config: BackwardConfig) -> int:
    """How many key heads the SMs hold with all of their tiles; 0 with a mask, intervals or ragged
    lengths.

    The first tiles of so many heads are done at the same time, and if as many alternate, the tiles
    that begin next are first ones, too. If fewer do, they are several of one head, which wait for
    one another.
    """
    if request.is_ragged or request.has_intervals:
        return 0
    if request.window_left is not None or request.window_right is not None:
        return 0
    tiles = cdiv(request.k.shape[1], config.block_kv) * config.parts
    return devices[request.q.device].num_sms // tiles


def heads_in_cache(request: Request) -> int:
    """Key heads that have Q, dO and an fp32 dQ of their groups in the L2 cache, at least one."""
    length = request.q.shape[1]
    if request.cu_seqlens_q is not None and request.is_deterministic:  # of a sequence, on average
        length = cdiv(length, request.batch)
    return max(1, L2_BYTES // (length * request.group * bytes_of_row(request)))


def bytes_of_row(request: Request) -> int:
    """What a row of a query head takes of Q, dO and the fp32 sum of dQ."""
    head_dim, head_dim_v = request.q.shape[3], request.v.shape[3]
    return head_dim * (4 + request.q.element_size()) + head_dim_v * request.v.element_size()
