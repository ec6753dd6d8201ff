"""Is every launch right, beside others, for as long as one likes? Ends with 1 if one is not.

    python -m tests.benchmarks.attention.stress --out FILE [--minutes 10] [--launches 10000]

First 10,000 calls, forward and backward, whose bits have to stay the same beside other work; then a
thread for each of two streams, on two GPUs if they are there; then shapes drawn by lot, dense,
packed, in pages and masked, both passes, whose results have to be within the error budget.
"""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from flash_versions import attention, masks
from flash_versions.bench.document import new_document
from flash_versions.dispatch.autograd.call import known
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.benchmarks.harness import keep, parser

DIMS = 64, 64, 72, 96, 128, 128, 192, 256


def both(q, k, v, **options):
    """o and the gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, **options)
    do = torch.cos(o.detach())
    return o.detach(), do, torch.autograd.grad(o, leaves, do)


def same_bits(launches, device="cuda"):
    """How many of so many calls gave other bits than before, beside products in another stream."""
    beside, x = torch.cuda.Stream(device), torch.randn(2048, 2048, device=device)
    different = torch.zeros((), dtype=torch.int64, device=device)
    calls = [
        (torch.randn(3, 1, length, 8, D, device=device, dtype=torch.bfloat16), {"causal": True})
        for length, D in ((300, 64), (700, 128), (1500, 128))
    ]
    first = [both(*x, deterministic=True, **options) for x, options in calls]
    for n in range(launches // len(calls)):
        if n % 10 == 0:
            with torch.cuda.stream(beside):
                x = torch.tanh(x @ x)
        for (given, options), (o, _, gradients) in zip(calls, first):
            mine, _, theirs = both(*given, deterministic=True, **options)
            for a, b in zip((mine, *theirs), (o, *gradients)):
                different += (a != b).any()
    return int(different)


def in_threads(launches):
    """The same in two threads, each with a stream, or a GPU, of its own."""

    def work(n):
        device = torch.device("cuda", n % torch.cuda.device_count())
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            return same_bits(launches // 2, device)

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(work, range(2)))


def drawn(rng):
    """A call: (kind, q, k, v, options); packed tensors have three dimensions."""
    kind = rng.choice(["dense", "dense", "packed", "pages", "masks", "lengths"])
    D, group = rng.choice(DIMS), rng.choice([1, 2, 4])
    kv_heads, batch = rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 3])
    M = rng.choice([1, rng.randint(2, 300), rng.randint(64, 2000)])
    N = M if rng.random() < 0.5 else rng.randint(1, 2500)
    dtype = rng.choice([torch.bfloat16, torch.float16])

    def random(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype)

    options = {"causal": rng.random() < 0.6}
    if kind == "packed":
        cuts = sorted(rng.randint(0, M) for _ in range(rng.randint(0, 5)))
        options["cu_seqlens_q"] = torch.tensor([0, *cuts, M], dtype=torch.int32, device="cuda")
        shapes = (M, kv_heads * group, D), (M, kv_heads, D), (M, kv_heads, D)
        return kind, *[random(*shape) for shape in shapes], options
    q = random(batch, M, kv_heads * group, D)
    if kind == "pages":
        size, number = rng.choice([16, 64, 128]), rng.randint(1, 12)
        table = torch.randperm(batch * number, device="cuda").int().view(batch, number)
        lengths = torch.randint(1, size * number + 1, (batch,), device="cuda")
        options |= {"block_table": table, "kv_lengths": lengths}
        return kind, q, *[random(batch * number, size, kv_heads, D) for _ in range(2)], options
    if kind == "masks":
        N = M
        lengths = [M // 3, M - M // 3] if M > 2 else [M]
        options |= masks.documents(lengths, device="cuda")
    elif kind == "lengths":
        options["kv_lengths"] = torch.randint(0, N + 1, (batch,), device="cuda")
    elif rng.random() < 0.3:
        options |= rng.choice([{"window": (rng.randint(0, 300), 20)}, {"softcap": 20.0}])
    return kind, q, *[random(batch, N, kv_heads, D) for _ in range(2)], options


def by_lot(minutes, seed=0):
    """Calls drawn by lot for so many minutes: how many of each kind, and what was wrong."""
    rng, until, counts, wrong = random.Random(seed), time.monotonic() + 60 * minutes, {}, []
    while time.monotonic() < until:
        kind, q, k, v, options = drawn(rng)
        counts[kind] = counts.get(kind, 0) + 1
        about = kind, [*q.shape], [*k.shape], str(q.dtype), [*options]
        for _ in range(2):  # a new call, and one that came before
            try:
                exact, rows = options.copy(), (k, v)
                if kind == "pages":
                    table = exact.pop("block_table").long()
                    rows = [x[table].flatten(1, 2) for x in (k, v)]
                request = make_request(q, *rows, **exact)
                if kind == "pages":
                    found, do = {"o": attention(q, k, v, **options)}, None
                else:
                    o, do, gradients = both(q, k, v, **options)
                    found = {"o": o, **dict(zip(("dq", "dk", "dv"), gradients))}
                if kind == "packed":
                    found = {name: x.unsqueeze(0) for name, x in found.items()}
                    do = do.unsqueeze(0)
                accuracy = assess_request(found, request, do)
                bad = [f"{name}: {x}" for name, x in accuracy.items() if not x.ok]
            except Exception as error:
                bad = [f"{type(error).__name__}: {error}"[:300]]
            if bad:
                wrong.append((*about, bad))
                print(wrong[-1], flush=True)
    return counts, wrong


def main(arguments=None):
    """Run all, write JSON, and tell by the exit status whether all was right."""
    made = parser(__doc__, device=False)
    made.add_argument("--minutes", type=float, default=10)
    made.add_argument("--launches", type=int, default=10_000)
    options, document = made.parse_args(arguments), new_document()
    counts, wrong = by_lot(options.minutes)
    rows = [
        {"suite": "stress", "what": "bits", "different": same_bits(options.launches)},
        {"suite": "stress", "what": "threads", "different": in_threads(options.launches),
         "gpus": torch.cuda.device_count()},
        {"suite": "stress", "what": "by lot", "calls": counts, "wrong": wrong,
         "known": len(known)},
    ]  # fmt: skip
    keep(document, options.out, rows)
    sys.exit(any(row.get("different") or row.get("wrong") for row in rows))


if __name__ == "__main__":
    main()
