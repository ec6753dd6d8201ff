"""Pairs of calls in which a sequence must have the same bits: alone, and among others.

The number of a pair is SEED * PAIRS + its number of this seed.

A pair computes a sequence in a batch of its own, whole, and once more as serving and training meet
it: with neighbours of other lengths, packed, padded on the left or on the right, in pages, behind a
shared prefix, in chunks, or one query at a time. Every element of o, of the LSE and of the
gradients is compared bit by bit.
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch

from flash_versions import attention
from flash_versions.dispatch.device import H200_SHARED_MEMORY, Properties, devices
from flash_versions.versions.fa3.hopper import totals
from flash_versions.versions.masks import documents

LAYOUTS = "rows", "packed", "left", "right", "pages", "documents"
PARTS = "whole", "chunk", "decode"
HEADS = (1, 1), (2, 2), (4, 2), (4, 1), (6, 2), (8, 1)  # of queries, of keys
HEAD_DIMS = (16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)
WINDOWS: tuple[tuple[int | None, int | None], ...] = ((20, 0), (150, 0), (30, 20), (None, 9))
DTYPES = "bfloat16", "float16", "float32"
SETTINGS = 32  # on a GPU: kernels are compiled for each, and trials share them
LONGEST, SMALL_LONGEST = 2600, (150, 150, 150, 400)
SMALL_SPLITS = {256: 128}  # short sequences have several, too
HOPPER = Properties((9, 0), H200_SHARED_MEMORY, num_sms=2)  # that is simulated for "fa3"
PAIRS = 2**20  # of a seed


@dataclass(frozen=True)
class Pair:
    """A pair of calls.

    Attributes:
        number: also the seed of its inputs.
        layout: how the sequence lies among others.
        part: which of its queries the second call has.
        length: of the sequence.
        others: lengths of the other sequences.
        place: of the sequence among them.
        begin: the first query of the second call.
        end: behind its last one.
        page: keys of a page.
        shared: whether all sequences begin with the same pages.
    """

    number: int
    layout: str
    part: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi: bool
    sink: bool
    length: int
    others: tuple[int, ...]
    place: int
    begin: int
    end: int
    page: int
    shared: bool
    backward: bool

    def __str__(self) -> str:
        given = asdict(self).items()
        return ", ".join(f"{name}={value}" for name, value in given if value not in (None, False))


def draw(number: int, small: bool) -> Pair:
    """The pair of this number; small: short enough to be simulated."""
    rng = Random(number)
    setting = rng if small else Random(f"setting {number % SETTINGS} of {number // PAIRS}")
    heads, kv_heads = setting.choice(HEADS[:5] if small else HEADS)
    head_dim, head_dim_v = setting.choice(HEAD_DIMS[:4] if small else HEAD_DIMS)
    dtype = setting.choice(DTYPES) if small or setting.random() < 0.3 else "bfloat16"
    window = setting.choice(WINDOWS) if setting.random() < 0.3 else None
    causal = window[1] == 0 if window else setting.random() < 0.8
    softcap = 5.0 if setting.random() < 0.1 else None
    alibi, sink = setting.random() < 0.1, setting.random() < 0.2
    longest = rng.choice(SMALL_LONGEST if small else (300, LONGEST, LONGEST))
    if not small and rng.random() < 0.1:
        longest = 4 * LONGEST
    length = rng.randint(1, longest)
    others = tuple(rng.randint(1, longest) for _ in range(rng.randint(0, 2 if small else 5)))
    layout, part = rng.choice(LAYOUTS), rng.choice(PARTS)
    if layout == "documents":
        window, part, causal = None, "whole", True
    begin, end = 0, length
    if part == "chunk":
        begin = rng.randrange(length)
        end = rng.randint(begin + 1, length) if causal else length
    elif part == "decode":
        begin = rng.randrange(length) if causal else length - 1
        end = begin + 1
    return Pair(
        number, layout, part, dtype, heads, kv_heads, head_dim, head_dim_v, causal, window,
        softcap, alibi, sink, length, others, rng.randint(0, len(others)), begin, end,
        rng.choice((16, 48, 64, 128, 256)), rng.random() < 0.5,
        part == "whole" and layout != "pages" and rng.random() < 0.3
    )  # fmt: skip


class Inputs:
    """The tensors of a pair: the sequence's own, and what is made for its neighbours."""

    def __init__(self, pair: Pair, device: str) -> None:
        self.pair, self.device = pair, device
        self.generator = torch.Generator(device).manual_seed(pair.number)
        heads, kv_heads = pair.heads, pair.kv_heads
        self.q, self.do = self.new(pair.length, heads, False), self.new(pair.length, heads, True)
        self.k, self.v = (
            self.new(pair.length, kv_heads, False),
            self.new(pair.length, kv_heads, True),
        )
        self.options: dict[str, Any] = {
            "causal": pair.causal, "window": pair.window, "softcap": pair.softcap
        }  # fmt: skip
        about: Any = {"generator": self.generator, "device": device}
        if pair.alibi:
            self.options["alibi_slopes"] = torch.rand(heads, **about)
        if pair.sink:
            self.options["sink"] = torch.randn(heads, **about)

    def new(self, rows: int, heads: int, of_v: bool) -> torch.Tensor:
        """Rows of random numbers (rows, heads, dim)."""
        dim = self.pair.head_dim_v if of_v else self.pair.head_dim
        shape, dtype = (rows, heads, dim), getattr(torch, self.pair.dtype)
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def like(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Rows of random numbers in the shape of others."""
        return self.new(rows, x.shape[1], x.shape[2] != self.pair.head_dim)

    def padded(self, x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
        """x between random rows: what is there is nobody's."""
        return torch.cat((self.like(x, before), x, self.like(x, behind)))


def among_others(inputs: Inputs) -> tuple[dict[str, Any], Any, Any]:
    """The second call of a pair: (its arguments, which rows of its queries are the sequence's, and
    which of its keys), as indices of (batch, row) or of packed rows.
    """
    pair = inputs.pair
    keys = pair.end if pair.causal else pair.length
    q, do = inputs.q[pair.begin : pair.end], inputs.do[pair.begin : pair.end]
    k, v = inputs.k[:keys], inputs.v[:keys]
    lengths = [*pair.others]
    lengths.insert(pair.place, keys)
    layout, longest, here = pair.layout, max(lengths), pair.place
    options = dict(inputs.options)

    def integers(x: list[int]) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32, device=inputs.device)

    def stacked(x: torch.Tensor, rows: int, first: int = 0) -> torch.Tensor:
        """A batch of so many rows, with x from row `first` on."""
        batch = [inputs.like(x, rows) for _ in lengths]
        batch[here] = inputs.padded(x, first, rows - first - len(x))
        return torch.stack(batch)

    def joined(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return torch.cat([x if b == here else inputs.like(x, n) for b, n in enumerate(rows)])

    places: Any
    whole = slice(None)
    if layout == "rows":
        given = [stacked(x, len(x)) for x in (q, do, k, v)]
        places = (here, whole), (here, whole)
    elif layout == "left":
        extra = pair.page % 7
        rows = longest + extra
        of_q = rows if pair.causal and pair.part == "whole" else len(q)
        given = [stacked(x, of_q, of_q - len(q)) for x in (q, do)]
        given += [stacked(x, rows, rows - keys) for x in (k, v)]
        options["kv_starts"] = integers([rows - n for n in lengths])
        places = (here, slice(of_q - len(q), None)), (here, slice(rows - keys, None))
    elif layout == "right":
        given = [stacked(x, len(q)) for x in (q, do)] + [stacked(x, longest) for x in (k, v)]
        options["kv_lengths"] = integers(lengths)
        places = (here, whole), (here, slice(keys))
    elif layout == "documents":
        lengths = [keys, *pair.others]
        here = 0
        given = [joined(x, lengths)[None] for x in (q, do, k, v)]
        options |= documents(integers(lengths), causal=True)
        places = (0, slice(keys)), (0, slice(keys))
    else:
        # A neighbour may decode while the sequence is prefilled.
        queries = [1 + n * (b % 2) // 2 for b, n in enumerate(lengths)]
        queries[here] = len(q)
        cut = integers([0, *queries]).cumsum(0, dtype=torch.int32)
        given = [joined(x, queries) for x in (q, do)] + [joined(x, lengths) for x in (k, v)]
        options["cu_seqlens_q"] = cut
        options["cu_seqlens_k"] = integers([0, *lengths]).cumsum(0, dtype=torch.int32)
        first, first_key = sum(queries[:here]), sum(lengths[:here])
        places = slice(first, first + len(q)), slice(first_key, first_key + keys)
        if layout == "pages":
            pages = -(-longest // pair.page)
            table = torch.randperm(
                len(lengths) * pages, generator=inputs.generator, device=inputs.device
            ).view(len(lengths), pages).int()  # fmt: skip
            if pair.shared:
                common = min(lengths) // pair.page
                table[:, :common] = table[here, :common].clone()
            options["block_table"] = table
            for i, x in ((2, k), (3, v)):
                in_pages = inputs.padded(x, 0, pages * pair.page - keys)
                stored = inputs.like(x, len(lengths) * pages * pair.page)
                stored = stored.unflatten(0, (-1, pair.page))
                stored[table[here].long()] = in_pages.unflatten(0, (-1, pair.page))
                given[i] = stored
            if len(set(queries)) == 1:  # a plain batch of queries, as in decoding
                del options["cu_seqlens_q"]
                given[:2] = [x.unflatten(0, (len(lengths), -1)) for x in given[:2]]
                places = (here, whole), places[1]
    return {**dict(zip(("q", "do", "k", "v"), given)), **options}, *places


def results(
    version: str, arguments: dict[str, Any], rows: Any, keys: Any, backward: bool
) -> dict[str, torch.Tensor]:
    """What a version computes of a sequence: o, LSE (row, heads) and, if asked for, gradients."""
    given = dict(arguments)
    do = given.pop("do")
    leaves = [given.pop(name).requires_grad_(backward) for name in "qkv"]
    o, lse = attention(
        *leaves, version=version, return_lse=True, batch_invariant=True, deterministic=True, **given
    )
    lse = lse.transpose(-1, -2)
    found = {"o": o[rows], "lse": lse[rows]}
    if backward:
        dq, dk, dv = torch.autograd.grad(o, leaves, do)
        found |= {"dq": dq[rows], "dk": dk[keys], "dv": dv[keys]}
    return {name: x.detach() for name, x in found.items()}


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements are not the same bits."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def compare(version: str, pair: Pair, device: str) -> dict[str, Any]:
    """How many elements of a pair were compared and how many differ, by result."""
    inputs = Inputs(pair, device)
    tensors = {"q": inputs.q, "do": inputs.do, "k": inputs.k, "v": inputs.v}
    alone = {name: x[None] for name, x in tensors.items()} | inputs.options
    part = 0, slice(pair.begin, pair.end)
    wanted = results(version, alone, part, (0, slice(None)), pair.backward)
    arguments, rows, keys = among_others(inputs)
    found = results(version, arguments, rows, keys, pair.backward)
    return {
        "elements": sum(x.numel() for x in wanted.values()),
        "differ": {name: differing_bits(x, found[name]) for name, x in wanted.items()},
    }


def outcome(small: bool, version: str, number: int) -> dict[str, Any]:
    """`compare` of the pair of this number, with an outcome."""
    if small:
        totals.SPLIT_KEYS = SMALL_SPLITS
    simulated = devices.assume(HOPPER) if small and version == "fa3" else nullcontext()
    with simulated:
        found = compare(version, draw(number, small), "cpu" if small else "cuda")
    if differ := {name: n for name, n in found["differ"].items() if n}:
        return {**found, "outcome": "failed", "why": f"bits differ: {differ}"}
    return {**found, "outcome": "passed"}
