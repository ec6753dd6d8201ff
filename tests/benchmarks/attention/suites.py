"""Attention on a Hopper GPU, by suites: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.suites "dense, random" --out FILE [--only NAME ...]
    python -m tests.benchmarks.attention.suites "dense, random" --out FILE --seed 7

A suite has problems, by name. A problem has one or more groups of calls. First, processes side by
side compute a small version of each problem and hold the results of the versions against their
error budgets, then compile the kernels of the problem itself. A problem of which one result is
wrong is not timed. Then the calls of a group take turns, each as a CUDA graph with a cold L2 cache
(flash_versions/bench/measure.py).
"""

import math
import os
import random
import sys
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from itertools import product
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

from flash_versions import VERSIONS, masks  # noqa: E402
from flash_versions.bench import peers  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.measure import in_graphs  # noqa: E402
from flash_versions.bench.workers import answers, reason, work  # noqa: E402
from flash_versions.dispatch.autograd.call import run  # noqa: E402
from flash_versions.dispatch.request import Request, make_request  # noqa: E402
from flash_versions.lessons import LESSONS  # noqa: E402
from flash_versions.versions.fa3.hopper.backward import config as backward_config  # noqa: E402
from flash_versions.versions.fa3.hopper.decode import host as decode_by_tma  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from flash_versions.versions.oracle.checks import refuse_over, refuse_unless_finite  # noqa: E402
from tests.benchmarks.harness import in_time, keep, parser, passed  # noqa: E402

DEVICE = "cuda"
PROCESSES = min(14, os.cpu_count() or 1)
CHECK_SECONDS = 200  # of a problem
TOKENS, HIDDEN, HEADS = 32768, 2048, 16
FEW = 2000  # tokens of packed sequences that are checked
LONG = 4224  # keys of exact calls that are checked: more than one part of them
MEANS = (256, 512, 1024, 2048, 4096)  # of the lengths of packed sequences
PROMPT, ANSWERS = 2048, [256] * 16
WAYS = ("forward", "backward")
ROUNDS = 12


class Given(NamedTuple):
    """Inputs of a call, and the pairs of a query and a key that it sees, of all rows and heads."""

    request: Request
    do: torch.Tensor
    pairs: float

    def flops(self, way):
        """By FlashAttention's formula: two matrix products forward and five backward."""
        head_dim, head_dim_v = self.request.q.shape[3], self.request.v.shape[3]
        products = (3, 2) if way == "backward" else (1, 1)
        return 2 * self.pairs * (products[0] * head_dim + products[1] * head_dim_v)


@dataclass(frozen=True)
class Call:
    """A function of a request that returns o, which is timed forward or backward. If it is `ours`,
    its results have to be right.
    """

    row: dict
    function: object
    given: Given
    way: str
    ours: bool = True

    def prepare(self):
        """What is timed: it returns (o,), or (dq, dk, dv)."""
        request = self.given.request
        if self.way == "forward":
            return lambda: (self.function(request),)
        leaves = [x.detach().requires_grad_() for x in request[:3]]
        o = self.function(request._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
        do = self.given.do.view_as(o)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    def refuse_wrong(self):
        """Raise an ArithmeticError if a result is over its budget."""
        results = self.prepare()()
        names = ("o",) if self.way == "forward" else ("dq", "dk", "dv")
        request, do = self.given.request, self.given.do
        likes = (do,) if self.way == "forward" else request[:3]
        found = {name: x.view_as(like) for name, x, like in zip(names, results, likes)}
        refuse_over(assess_request(found, request, do))


def random_tensors(seed, queries, keys, kv_heads, dims, batch=1, heads=None):
    """q, k, v and the gradient of o; dims are those of q and of v; HEADS heads unless told."""
    heads = heads or HEADS
    generator = torch.Generator(DEVICE).manual_seed(seed)
    make = partial(torch.randn, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    (head_dim, head_dim_v), of_keys = dims, (batch, keys, kv_heads)
    q, do = (make(batch, queries, heads, n) for n in dims)
    return q, make(*of_keys, head_dim), make(*of_keys, head_dim_v), do


def inputs(tensors, pairs, **options):
    """The inputs of a call with these options; pairs are those of a row and head."""
    q, k, v, do = tensors
    return Given(make_request(q, k, v, **options), do, pairs * q.shape[0] * q.shape[2])


def packed(tensors, lengths, causal):
    """The rows of tensors as sequences of these lengths."""
    q, k, v, do = (x.flatten(0, 1) for x in tensors)
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    request = make_request(q, k, v, causal=causal, cu_seqlens_q=bounds)
    return Given(request, do[None], squares(lengths, causal) * q.shape[1])


def squares(lengths, causal):
    """Pairs of a query and a key of sequences that see themselves, or the half of it."""
    return sum(n * n for n in lengths) / (2 if causal else 1)


def version(name):
    """A version as a function of a request."""
    chosen = VERSIONS[name] if name in VERSIONS else LESSONS[name]
    return lambda request: run(chosen, request)[0]


def peer(function, **options):
    """Another library's function of q, k and v as one of a request."""
    return lambda r: function(r.q, r.k, r.v, causal=r.window_right == 0, **options)


def of_bounds(function, longest):
    """Likewise of packed sequences."""
    return lambda r: function(r.q[0], r.k[0], r.v[0], causal=r.window_right == 0,
                              bounds=r.cu_seqlens_q, longest=longest)  # fmt: skip


def torch_varlen(q, k, v, causal, bounds, longest):
    """torch.nn.attention.varlen, of as many key heads as query heads."""
    from torch.nn.attention.varlen import varlen_attn

    mask = {"is_causal": causal}  # of torch 2.10 and 2.11; later a window
    if "is_causal" not in signature(varlen_attn).parameters:
        mask = {"window_size": (-1, 0)} if causal else {}
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **mask)


CUDNN = peer(partial(peers.torch_backend, SDPBackend.CUDNN_ATTENTION))
FLASH = peer(peers.flash_attn_4)
OURS = {name: version(name) for name in ("fa3", "fa4")}
PORTABLE = version("fa2")  # the kernels that serve all GPUs


def calls(about, functions, given, ways=WAYS, ours=True):
    """A call of each function in each way; FA4's backward is FA3's."""
    return [
        Call(about | {"version": name, "pass": way, "flops": given.flops(way)}, x, given, way, ours)
        for name, x in functions.items()
        for way in ways
        if (name, way) != ("fa4", "backward")
    ]


def dense(name, small):
    """A shape that is drawn from its number: every head dim, group and mask comes up equally often.
    A causal mask has as many keys as queries, or more; torch aligns it at the top left, so cuDNN
    has none of these.
    """
    number, rng = int(name), random.Random(int(name))
    keys = round(math.exp(rng.uniform(math.log(500), math.log(20000))))
    queries = keys if rng.random() < 0.7 else rng.randint(500, keys)
    head_dim, group = (64, 96, 128, 192, 256)[number % 5], (1, 2, 4, 8)[number // 5 % 4]
    heads = max(group, HIDDEN // head_dim // group * group)
    batch, causal, equal = max(1, round(TOKENS / keys)), number % 2 > 0, queries == keys
    if small:  # the same remainders
        queries, keys = (n if n < 1024 else 512 + n % 512 for n in (queries, keys))
        batch, heads, keys = 1, group, queries if equal else queries + keys
    about = {
        "number": number, "batch": batch, "queries": queries, "keys": keys, "heads": heads,
        "group": group, "head_dim": head_dim, "causal": causal,
    }  # fmt: skip
    tensors = random_tensors(number, queries, keys, heads // group, (head_dim,) * 2, batch, heads)
    pairs = queries * keys - causal * queries * (queries - 1) // 2
    one = inputs(tensors, pairs, causal=causal)
    theirs = {"flash-attn-4": FLASH} | ({} if causal and not equal else {"cudnn": CUDNN})
    yield calls(about, OURS, one) + calls(about, theirs, one, ours=False)


def drawn_lengths(number, tokens):
    """Lengths, lognormal around a mean, that fill so many tokens."""
    rng, lengths = random.Random(number), []
    while sum(lengths) < tokens:
        length = max(1, round(rng.lognormvariate(0, 0.8) * MEANS[number % 5] / 1.377))  # of mean 1
        lengths.append(min(length, tokens - sum(lengths)))
    rng.shuffle(lengths)
    return lengths


def sequences(number, small):
    """Lengths, tensors and what a row says of packed sequences that are drawn from a number: every
    mean, head dim, mask and group comes up equally often.
    """
    lengths = drawn_lengths(number, FEW if small else TOKENS) + [0, 1, 333, 64] * small
    head_dim, group = (64, 128, 256)[number % 3], (1, 4)[number // 3 % 2]
    about = {
        "shape": number, "mean": MEANS[number % 5], "head_dim": head_dim, "heads": HEADS,
        "group": group, "causal": number % 4 > 0, "sequences": len(lengths),
    }  # fmt: skip
    total = sum(lengths)
    tensors = random_tensors(number, total, total, HEADS // group, (head_dim,) * 2)
    return lengths, tensors, about


def packed_sequences(name, small):
    """Packed sequences, and rows of one length, the mean, whose FLOPs are counted the same way."""
    lengths, tensors, about = sequences(int(name), small)
    mean, causal = about["mean"], about["causal"]
    one = packed(tensors, lengths, causal)
    rows = [x[0, : x.shape[1] // mean * mean].unflatten(0, (-1, mean)) for x in tensors]
    even = inputs(rows, squares([mean], causal), causal=causal)
    q, k, v, do = tensors
    k, v = (x.repeat_interleave(about["group"], 2) for x in (k, v))  # is not timed
    repeated, longest = packed((q, k, v, do), lengths, causal), max(lengths)
    found = calls(about, {**OURS, "portable": PORTABLE}, one)
    theirs = {"torch varlen_attn": of_bounds(torch_varlen, longest)}
    found += calls(about, theirs, repeated, ours=False)
    theirs = {"flash-attn-4": of_bounds(peers.flash_attn_4, longest)}
    found += calls(about, theirs, one, ours=False)
    yield found + calls(about | {"sequences": len(rows[0])}, {"dense": OURS["fa3"]}, even)


def asked_for(name, small):
    """Causal rows of 4096 tokens of one head dim: plain, and with one thing asked for."""
    head_dim = int(name)
    rows, length = (2, 300) if small else (8, 4096)
    tensors = random_tensors(head_dim, length, length, 4, (head_dim,) * 2, rows)
    lengths = torch.linspace(length // 4, length, rows).int().to(DEVICE)
    by_head = torch.rand(HEADS, device=DEVICE)
    found, about = [], {"head_dim": head_dim, "heads": HEADS, "group": 4}
    asked = {"kv_lengths": lengths, "sink": by_head, "alibi_slopes": by_head}
    for option in (None, *asked):
        # The last query sees the last key.
        of_rows = lengths.tolist() if option == "kv_lengths" else [length] * rows
        options = {} if option is None else {option: asked[option]}
        one = inputs(tensors, squares(of_rows, True) / rows, causal=True, **options)
        found += calls(about | {"asked": option}, {**OURS, "portable": PORTABLE}, one)
    yield found


def interval_masks(name, small):
    """Documents as an interval mask and as packed sequences, the shapes of `packed_sequences`; or
    answers that share a prompt, against rows that each have a copy of it. The lists of blocks are
    made in every call.
    """
    number = int(name)
    if number < 20:
        lengths, tensors, about = sequences(number, small)
        about |= {"mask": "documents"}
        other, form = packed(tensors, lengths, about["causal"]), "packed"
        options = masks.documents(lengths, causal=about["causal"], device=DEVICE)
        one = inputs(tensors, squares(lengths, about["causal"]), **options)
    else:
        batch, head_dim = [*product((1, 4), (64, 128))][number - 20]
        one, other = shared_prompt(number, head_dim, 4, batch, small)
        about, form = {
            "mask": "shared prompt", "shape": number, "head_dim": head_dim, "heads": HEADS,
            "group": 4, "causal": True, "sequences": batch * len(ANSWERS), "batch": batch,
        }, "copies"  # fmt: skip
    everybody = {**OURS, "fa2": PORTABLE}
    yield (calls(about | {"form": form}, OURS, other)
           + calls(about | {"form": "intervals"}, everybody, one))  # fmt: skip


def shared_prompt(seed, head_dim, kv_heads, batch, small):
    """Prompts that answers share, and rows for each answer with a copy of its prompt, with the same
    pairs counted.
    """
    prompt, answers = (500, [77] * 4) if small else (PROMPT, ANSWERS)
    make = partial(random_tensors, seed, kv_heads=kv_heads, dims=(head_dim,) * 2)
    tokens, row = prompt + sum(answers), prompt + answers[0]
    pairs = prompt**2 / 2 + sum(prompt * n + n * n / 2 for n in answers)
    options = masks.shared_prompt(prompt, answers, device=DEVICE)
    one = inputs(make(queries=tokens, keys=tokens, batch=batch), pairs, **options)
    copies = make(queries=row, keys=row, batch=batch * len(answers))
    return one, inputs(copies, pairs / len(answers), causal=True)


HEAD_DIMS = ("192", "192x128", "256", "96", "80", "160", "128", "64", "112", "224", "32", "128x96")
MASKED = [f"{dims} {mask}" for dims in HEAD_DIMS for mask in ("causal", "full")]


def every_head_dim(name, small, way, lengths):
    """Head dims of q and k, and of v, with a mask: as many heads as have HIDDEN dims together, and
    16384 tokens in rows of each length. A row of FA3's backward says its tiles.
    """
    text, mask = name.split()
    dims = tuple(map(int, text.split("x"))) * (1 if "x" in text else 2)
    causal, heads = mask == "causal", HIDDEN // max(dims)
    sizes = [(max(1, 16384 // n), n, n, heads, heads) for n in lengths]
    if small:  # whole tiles; ragged ends and groups
        sizes = [(1, 512, 512, 2, 2), (2, 333, 700, 4, 2)]
    for batch, queries, keys, heads, kv_heads in sizes:
        tensors = random_tensors(queries, queries, keys, kv_heads, dims, batch, heads)
        pairs = queries * keys / (2 if causal else 1)
        one = inputs(tensors, pairs, causal=causal)
        about = {"dims": dims, "causal": causal, "length": queries, "heads": heads, "name": ""}
        found = calls(about, {"cudnn": CUDNN, "flash-attn-4": FLASH}, one, (way,), ours=False)
        if way == "forward":
            yield found + calls(about, OURS, one, (way,))
            continue
        config = backward_config.default_config(one.request)
        row = about | asdict(config) | {"name": "default", "default": True}
        yield found + calls(row, {"fa3": OURS["fa3"]}, one, (way,))


def deterministic(name, small):
    """Gradients that are added up in order, and in any order, for one or four query heads to a key
    head; 16384 tokens in rows of each length.
    """
    head_dim, mask, group = name.split()
    head_dim, causal, group = int(head_dim), mask == "causal", int(group)
    heads = HIDDEN // head_dim
    for length in (1000,) if small else (2048, 8192, 512, 1024, 4096, 16384):
        batch = 1 if small else 16384 // length
        dims = (head_dim,) * 2
        tensors = random_tensors(length, length, length, heads // group, dims, batch, heads)
        one = inputs(tensors, squares([length], causal), causal=causal, deterministic=True)
        about = {"head_dim": head_dim, "causal": causal, "group": group, "S": length}
        ours = {
            "fa3": lambda request: OURS["fa3"](request._replace(deterministic=False)),
            "fa3 deterministic": OURS["fa3"],
            "fa3 portable": PORTABLE,
        }
        theirs = {
            "flash-attn-4": FLASH,
            "flash-attn-4 deterministic": peer(peers.flash_attn_4, deterministic=True),
        }
        yield (calls(about, ours, one, WAYS[1:])
               + calls(about, theirs, one, WAYS[1:], ours=False))  # fmt: skip


class Cache(NamedTuple):
    """A decoding step. `lengths` is "full" (all rows are, and the call is not told so), "equal" (it
    is told so), "uniform" (in S/4 .. S), or "one long" (one row is full, the others have S/16).
    """

    batch: int
    length: int
    lengths: str
    page: int | None
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    queries: int = 1

    def drawn(self):
        """The rows' lengths."""
        rng = random.Random(0)
        least, most = {
            "uniform": (self.length // 4, self.length),
            "one long": (self.length // 16, self.length // 16),
        }.get(self.lengths, (self.length, self.length))
        return [self.length, *(rng.randint(least, most) for _ in range(self.batch - 1))]

    def request(self):
        """The call, on the GPU."""
        sizes = self.queries, self.length, self.kv_heads, (self.head_dim,) * 2
        q, k, v, _ = random_tensors(0, *sizes, self.batch, self.heads)
        options = {"causal": True}
        if self.lengths != "full":
            options["kv_lengths"] = torch.tensor(self.drawn(), device=DEVICE).int()
        if self.page is not None:
            number = self.batch * self.length // self.page
            table = torch.randperm(number, device=DEVICE).int().view(self.batch, -1)
            k, v = (x.view(number, self.page, *x.shape[2:]) for x in (k, v))
            options["block_table"] = table
        return make_request(q, k, v, **options)


def caches():
    """The decoding steps by name: chosen ones, and some that are drawn, of at least 128k tokens."""
    found = {}
    for page, text in {
        None: "16x8k full uniform equal; 64x4k full uniform equal; 4x32k uniform equal;"
        " 128x1k uniform equal; 32x16k one_long; 1024x256 uniform; 1x128k uniform",
        64: "16x8k full uniform; 64x4k full uniform; 4x32k uniform; 128x1k uniform;"
        " 32x16k one_long",
        16: "16x8k full uniform; 64x4k full",
    }.items():
        for size, *kinds in map(str.split, text.split(";")):
            batch, length = (
                int(x[:-1]) * 1024 if x[-1] == "k" else int(x) for x in size.split("x")
            )
            for kind in (kind.replace("_", " ") for kind in kinds):
                what = f"{size} {f'pages of {page}' if page else 'rows'} {kind}"
                found[what] = Cache(batch, length, kind, page)
    found["D=64 16x8k rows uniform"] = Cache(16, 8192, "uniform", None, 64)
    found["D=64 16x8k pages of 64 full"] = Cache(16, 8192, "full", 64, 64)
    found["D=64 64x4k rows uniform"] = Cache(64, 4096, "uniform", None, 64)
    found["16x8k 32 key heads"] = Cache(16, 8192, "uniform", None, kv_heads=32)
    for number in range(6):
        rng = random.Random(number)
        batch = rng.choice((3, 7, 12, 24, 50, 100, 200))
        length = max(512, round(2 ** rng.uniform(17, 18.5) / batch / 256) * 256)
        kv_heads, group = rng.choice(((8, 4), (8, 1), (4, 8), (2, 4)))
        page, heads = rng.choice((None, 16, 32, 64, 128, 256)), kv_heads * group
        head_dim, queries = rng.choice((64, 128)), rng.choice((1, 1, 2))
        name = f"random {number}: {batch}x{length}, heads {heads}/{kv_heads}, page {page}"
        found[name] = Cache(batch, length, "uniform", page, head_dim, heads, kv_heads, queries)
    return found


class Copy(Call):
    """A copy of as many bytes as keys and values have."""

    def prepare(self):
        """A copy that reads and writes as many bytes together, by this function."""
        source = torch.zeros(self.row["bytes"] // 8, device=DEVICE, dtype=torch.int32)
        target = torch.empty_like(source)
        return lambda: (self.function(source, target),)


def decoding(name, small):
    """Decoding by FA2's kernels, by FA3's where it takes the request, and copies of as many bytes:
    the driver's, which is slow for some sizes, and a kernel's; the faster one counts.
    """
    cache = caches()[name]
    if small:
        cache = cache._replace(batch=min(cache.batch, 3), length=512)
    request = cache.request()
    moved = 2 * sum(cache.drawn()) * cache.kv_heads * cache.head_dim * request.k.element_size()
    about = {"name": name, **cache._asdict(), "bytes": moved}
    one = Given(request, torch.empty_like(request.q), 0)
    served = {"fa2": PORTABLE}
    if decode_by_tma.left_to_gathering(request) is None:
        served["fa3"] = lambda request: decode_by_tma.forward(request)[0]
    copies = {
        "copy": lambda source, target: target.copy_(source),
        "copy by a kernel": lambda source, target: torch.neg(source, out=target),
    }
    found = [Copy(about | {"version": x}, f, one, "forward", False) for x, f in copies.items()]
    yield found + [Call(about | {"version": x}, f, one, "forward") for x, f in served.items()]


PRICED = {  # decoding: batch, keys, lengths, page
    "fills": ((64, 4096, "uniform", None), (32, 8192, "full", None), (32, 8192, "uniform", 64)),
    "long": ((1, 32768, "full", None), (4, 32768, "uniform", 64), (1, 131072, "full", None)),
    "few": ((1, 8192, "full", None), (8, 4096, "uniform", None)),
}


def invariance(name, small):
    """What batch_invariant costs: causal calls of 16384 tokens with and without it, and torch's
    FlashAttention 2; gradients in a fixed order; or steps of decoding.
    """
    kind, head_dim = name.split()
    head_dim = int(head_dim)
    functions = {
        "fast": OURS["fa4"],
        "exact": lambda request: OURS["fa4"](request._replace(batch_invariant=True)),
    }
    if kind in PRICED:
        for batch, length, lengths, page in PRICED[kind]:
            if small:
                batch, length = min(batch, 2), LONG
            cache = Cache(batch, length, lengths, page, head_dim)
            request = cache.request()
            pairs = sum(cache.drawn()) * cache.heads
            one = Given(request, torch.empty_like(request.q), pairs)
            yield calls({"name": name, **cache._asdict()}, functions, one, WAYS[:1])
        return
    heads, dims, way = HIDDEN // head_dim, (head_dim,) * 2, WAYS[kind == "backward"]
    for length in (LONG,) if small else (2048, 4096, 8192, 16384):
        batch, heads = (1, 2) if small else (16384 // length, heads)
        tensors = random_tensors(length, length, length, heads, dims, batch, heads)
        one = inputs(tensors, squares([length], True), causal=True, deterministic=True)
        about = {"name": name, "head_dim": head_dim, "S": length}
        theirs = {"torch fa2": peer(partial(peers.torch_backend, SDPBackend.FLASH_ATTENTION))}
        found = calls(about, theirs, one, (way,), ours=False)
        yield found + calls(about, functions, one, (way,))


LESSON = {"fa1": "fa1", "fa2": "fa2", "fa3-hopper": "fa3", "fa4-hopper": "fa4"}  # in the engine


def lessons(name, small):
    """Lessons beside the versions that have the same steps and every option."""
    head_dim, mask = name.split()
    head_dim, causal, length = int(head_dim), mask == "causal", 512 if small else 8192
    heads, batch = (1, 1) if small else (HIDDEN // head_dim, TOKENS // length)
    tensors = random_tensors(head_dim, length, length, heads, (head_dim,) * 2, batch, heads)
    one = inputs(tensors, squares([length], causal), causal=causal)
    about = {"name": name, "head_dim": head_dim, "S": length, "causal": causal}
    names = [x for pair in LESSON.items() for x in (f"lesson-{pair[0]}", pair[1])]
    yield calls(about, {x: version(x) for x in names}, one, WAYS[:1])
    yield calls(about, {x: version(x) for x in names[:4]}, one, WAYS[1:])


NUMBERS = [*map(str, range(20))]
GROUPED = {4: (128, 64, 256), 1: (128, 64, 256, 96, 160, 192)}  # head dims by heads to a key head
KINDS = [f"{x} {y} {n}" for n in GROUPED for x in GROUPED[n] for y in ("full", "causal")]
BOTH = [x for x in MASKED if not x.startswith(("112", "224", "32 "))]
# Suite: the names of its problems, and (name, small) -> groups of calls.
SUITES = {
    "dense, random": (NUMBERS, dense),
    "packed, random": (NUMBERS, packed_sequences),
    "asked for": (["64", "128", "256"], asked_for),
    "interval masks": (["20", "21", "22", "23", *NUMBERS], interval_masks),
    "head dims": (MASKED[:-2], partial(every_head_dim, way="forward", lengths=(8192, 2048, 16384))),
    "head dims, backward": (
        BOTH, partial(every_head_dim, way="backward", lengths=(512, 8192, 1024, 2048, 4096, 16384))
    ),
    "deterministic backward": (KINDS, deterministic),
    "decode by TMA": ([*caches()], decoding),
    "lessons": ([f"{x} {y}" for x in (128, 64) for y in ("causal", "full")], lessons),
    "invariance": (
        [f"{kind} {n}" for kind in ("forward", "backward", *PRICED) for n in (128, 64)], invariance
    ),
}  # fmt: skip


def of_peers(rows):
    """Rows with their shares of the rate of the faster copy, and of the fast call."""
    for rate, key, peer in (("tb_per_s", "of_copy", "copy"), ("tflops", "of_fast", "fast")):
        rates = [row[rate] for row in rows if peer in row["version"] and rate in row]
        for row in rows:
            if rates and rate in row:
                row[key] = row[rate] / max(rates)
    return rows


def measure(suite, name):
    """The rows of a problem."""
    for group in SUITES[suite][1](name, False):
        made = [({"suite": suite} | x.row, x.prepare, refuse_unless_finite) for x in group]
        yield of_peers(in_graphs(made, ROUNDS))


def check(suite, name):
    """Hold a small version of the problem against the budget, and compile all kernels.

    Raises:
        ArithmeticError: a result is over its budget.
    """
    refused = []
    for small in (True, False):
        for call in (call for group in SUITES[suite][1](name, small) for call in group):
            try:
                call.refuse_wrong() if small and call.ours else call.prepare()()
            except Exception as error:
                if small and call.ours:
                    raise
                refused.append(reason(error))  # the row of the measurement says so, too
    call = None  # its memory is for the other processes
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # raises if a call has left the GPU unusable
        torch.cuda.empty_cache()
    return {"outcome": "passed", "refused": refused}


def failed_checks(suite, names, seconds):
    """The problems that are wrong, or that were not checked after so many seconds."""
    command, failed = ("tests.benchmarks.attention.suites", "--check"), []
    tasks = [(suite, name) for name in names]
    for (_, name), answer in answers(tasks, PROCESSES, command, CHECK_SECONDS, seconds):
        print(f"{name}: {answer}", flush=True)
        if answer["outcome"] != "passed":
            failed.append(name)
    return failed


def main():
    """Check and measure; the exit code is 1 if a check failed."""
    made = parser(__doc__, seconds=300, device=False)
    made.add_argument("suite", choices=SUITES)
    made.add_argument("--only", nargs="+", metavar="NAME", help="problems whose names contain one")
    made.add_argument("--seed", type=int, help="of 16 other shapes that are drawn by number")
    options = made.parse_args()
    names = SUITES[options.suite][0]
    if options.seed:
        names = [str(1000 * options.seed + i) for i in range(16)]
    if options.only:
        names = [x for x in names if any(part in (x, *x.split()) for part in options.only)]
    document = new_document(libraries=("flash-attn-4",) * peers.installed("flash_attn.cute"))
    document["failed"] = failed_checks(options.suite, names, options.seconds * 0.6 - passed())
    for name in in_time([x for x in names if x not in document["failed"]], options.seconds):
        for rows in measure(options.suite, name):
            keep(document, options.out, rows)
    return bool(document["failed"])


if __name__ == "__main__":
    sys.exit(work(check) if sys.argv[1:] == ["--check"] else main())
