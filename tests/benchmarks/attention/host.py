"""The host's time for a call, ours and others' in one process; and small layers, host and GPU.

    python -m tests.benchmarks.attention.host --out FILE [--seconds 100]

Host times are of a problem too small to matter, called while the GPU keeps up: the median of
several means over many calls, contestants in turns, dense and packed ones together. torch's
attention runs as it chooses itself, with FlashAttention 2 only, and with cuDNN only. A layer is
attention's forward and backward in eager mode as a model calls them, one after the other without a
pause: what passes is the larger of the host's and the GPU's time.

"lengths" are calls whose lengths never came before, all kernels compiled, and the same calls again:
the GPU is idle when each begins. "compiled" are twelve calls in a row in one function of
torch.compile.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_versions import attention
from flash_versions.bench.document import new_document
from tests.benchmarks.frame import keep, now, parser, passed, reason

SUITE = "host"
ROUNDS, CALLS = 75, 40  # short turns: all get the same share of what else the host does
SMALL = (2, 64, 8, 64)  # batch, length, heads, head_dim
LAYERS = ((4, 512, 8, 64), (8, 1024, 12, 64), (2, 512, 16, 128))
OURS = ("fa2", "fa3", "fa4", "auto")
LENGTHS = (200, 3000)  # of "lengths": 1 x 8 heads of 128 dims; packed, the total of four sequences
HEADS, DIM = 8, 128
NEW, TIMES = 60, 4  # lengths, and how many times each comes
IN_A_ROW = 12  # calls in one compiled function


def allow(backend: str | None) -> None:
    """Let torch's attention use one backend, "cudnn" or "flash", or with None all."""
    torch.backends.cuda.enable_cudnn_sdp(backend in (None, "cudnn"))
    torch.backends.cuda.enable_flash_sdp(backend in (None, "flash"))
    torch.backends.cuda.enable_mem_efficient_sdp(backend is None)
    torch.backends.cuda.enable_math_sdp(backend is None)


def torch_attention(q, k, v, bounds):
    """torch's attention, of tensors whose heads come first."""
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_attn_4(q, k, v, bounds):
    """flash-attn-4, dense or packed."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if bounds is None:
        o = flash_attn_func(q, k, v, causal=True)
    else:
        o = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=q.shape[0],
            max_seqlen_k=k.shape[0], causal=True
        )  # fmt: skip
    return o[0] if isinstance(o, tuple) else o


def ours(q, k, v, bounds, version: str):
    """A version, dense or packed."""
    return attention(q, k, v, causal=True, version=version, cu_seqlens_q=bounds)


def contestants(packed: bool) -> dict[str, tuple[Callable, bool, str | None]]:
    """By name: a function of q, k, v and bounds; whether heads come first; which torch backend."""
    found: dict = {name: (partial(ours, version=name), False, None) for name in OURS}
    found["flash-attn-4"] = flash_attn_4, False, None
    if not packed:
        found["torch"] = torch_attention, True, None
        found["torch, flash"] = torch_attention, True, "flash"
        found["torch, cuDNN"] = torch_attention, True, "cudnn"
    return found


def calls_of(function, heads_first: bool, shape: tuple, packed: bool) -> dict[str, Callable]:
    """What is timed, by name."""
    batch, length, heads, dim = shape
    bounds = None
    if packed:
        shape = batch * length, heads, dim
        bounds = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if heads_first:
        leaves = [x.transpose(1, 2) for x in leaves]
    inputs = [x.clone(memory_format=torch.preserve_format) for x in leaves]
    for x in leaves:
        x.requires_grad_()
    do = torch.randn_like(inputs[0])

    def both():
        torch.autograd.grad(function(*leaves, bounds), leaves, do)

    return {"forward": partial(function, *inputs, bounds), "forward and backward": both}


def mean_us(call: Callable, calls: int, wait: bool) -> float:
    """Mean microseconds of a call; with wait until the GPU is done, too."""
    now("cuda")
    start = time.perf_counter()
    for _ in range(calls):
        call()
    end = now("cuda") if wait else time.perf_counter()
    now("cuda")
    return (end - start) / calls * 1e6


def rows_of(shape: tuple, kinds: tuple[bool, ...], wait: bool) -> list[dict]:
    """A row for each contestant and call, dense and packed (`kinds`), all in turns."""
    made: dict[tuple[bool, str, str], tuple[Callable, str | None]] = {}
    about, rows = {"suite": SUITE, "shape": shape}, []
    for packed in kinds:
        for name, (function, heads_first, backend) in contestants(packed).items():
            for what, call in calls_of(function, heads_first, shape, packed).items():
                try:
                    allow(backend)
                    for _ in range(10):  # ours is recorded when it came often
                        call()
                    now("cuda")
                    made[packed, name, what] = call, backend
                except Exception as error:  # what is not installed, or cannot do it
                    found = {"packed": packed, "what": what, "contestant": name}
                    rows.append({**about, **found, "reason": reason(error)})
    times: dict = {key: [] for key in made}
    for _ in range(ROUNDS):
        for key, (call, backend) in made.items():
            allow(backend)
            times[key].append(mean_us(call, CALLS, wait))
    allow(None)
    for (packed, name, what), found in times.items():
        rows.append(
            {
                **about, "packed": packed, "what": what, "contestant": name,
                "measured": "host and GPU" if wait else "host", "us": statistics.median(found),
                "least": min(found), "most": max(found),
            }
        )  # fmt: skip
    return rows


def of_lengths(lengths: list[int], packed: bool) -> list[tuple]:
    """(q, k, v, bounds, do) for each length."""
    found = []
    for length in lengths:
        bounds = None
        shape: tuple = (1, length, HEADS, DIM)
        if packed:
            shape = length, HEADS, DIM
            cuts = [0, length // 7, length // 3, length // 2, length]
            bounds = torch.tensor(cuts, dtype=torch.int32, device="cuda")
        q, k, v, do = torch.randn((4, *shape), device="cuda", dtype=torch.bfloat16)
        found.append((*[x.requires_grad_() for x in (q, k, v)], bounds, do))
    return found


def lengths_rows(packed: bool, calls: int = NEW, times: int = TIMES) -> list[dict]:
    """A row for each contestant, call, and number of times that its lengths came before."""
    rng = random.Random(packed)
    lengths = rng.sample(range(*LENGTHS), calls + 40)
    lengths[:10] = [x // 16 * 16 for x in lengths[:10]]
    lengths[10:14] = [x // 128 * 128 for x in lengths[10:14]]
    made = of_lengths(lengths, packed)
    fresh = made[40:]  # the first ones compile all kernels
    chosen = contestants(packed)
    for name in ("fa2", "fa3", "fa4"):
        del chosen[name]
    chosen.pop("torch", None)  # it takes cuDNN, and plans for 60 ms, where a length is new
    about = {"suite": "lengths", "packed": packed, "measured": "host"}
    found: dict[tuple, list[float]] = {}

    def timed(name: str, function: Callable, heads_first: bool, given: tuple, came: int) -> None:
        q, k, v, bounds, do = given
        inputs = [x.transpose(1, 2) if heads_first else x for x in (q, k, v)]
        do = do.transpose(1, 2) if heads_first else do
        now("cuda")
        start = time.perf_counter()
        with torch.no_grad():
            function(*inputs, bounds)
        middle = time.perf_counter()
        now("cuda")
        begin = time.perf_counter()
        torch.autograd.grad(function(*inputs, bounds), inputs, do)
        end = time.perf_counter()
        if came >= 0:
            found.setdefault((name, "forward", came), []).append((middle - start) * 1e6)
            whole = (end - begin) * 1e6
            found.setdefault((name, "forward and backward", came), []).append(whole)

    rows = []
    for name, (function, heads_first, backend) in list(chosen.items()):
        try:
            allow(backend)
            for given in made[:40]:
                timed(name, function, heads_first, given, -1)
        except Exception as error:  # what is not installed, or cannot do it
            rows.append({**about, "contestant": name, "reason": reason(error)})
            del chosen[name]
    for came in range(times):
        for given in fresh:
            for name, (function, heads_first, backend) in chosen.items():
                allow(backend)
                timed(name, function, heads_first, given, came)
    allow(None)
    for (name, what, came), us in found.items():
        rows.append(
            {
                **about, "contestant": name, "what": what, "came_before": came,
                "us": statistics.median(us), "least": min(us), "most": max(us),
            }
        )  # fmt: skip
    return rows


def compiled_rows(shape: tuple = (1, 512, HEADS, DIM), turns: int = 40) -> list[dict]:
    """A row for each contestant: microseconds of one call of IN_A_ROW in a compiled function."""
    rows, made = [], {}
    about = {"suite": "compiled calls", "shape": shape, "measured": "host"}
    for name, (function, heads_first, backend) in contestants(False).items():
        if name in ("fa2", "fa3", "fa4", "flash-attn-4"):
            continue

        def in_a_row(q, k, v, function=function):
            for _ in range(IN_A_ROW):
                q = function(q, k, v, None)
            return q

        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        do = torch.randn_like(inputs[0])
        if heads_first:
            inputs, do = [x.transpose(1, 2) for x in inputs], do.transpose(1, 2)
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch._dynamo.reset()
        compiled = torch.compile(in_a_row, fullgraph=True)
        grad = partial(lambda f, x, y: torch.autograd.grad(f(*x), x, y), compiled, leaves, do)
        for what, call in {
            "forward": partial(compiled, *inputs), "forward and backward": grad
        }.items():  # fmt: skip
            try:
                allow(backend)
                for _ in range(5):
                    call()
                made[name, what] = call, backend
            except Exception as error:
                rows.append({**about, "contestant": name, "what": what, "reason": reason(error)})
    times: dict = {key: [] for key in made}
    for _ in range(turns):
        for key, (call, backend) in made.items():
            allow(backend)
            times[key].append(mean_us(call, 3, False) / IN_A_ROW)
    allow(None)
    for (name, what), us in times.items():
        found = {"contestant": name, "what": what, "us": statistics.median(us)}
        rows.append({**about, **found, "least": min(us), "most": max(us)})
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write after each problem."""
    made = parser(__doc__, seconds=100, device=False)
    made.add_argument("--only", choices=("problems", "lengths", "compiled"))
    options = made.parse_args(arguments)
    document = new_document()
    if options.only in (None, "lengths"):
        for packed in (False, True):
            keep(document, options.out, lengths_rows(packed))
    if options.only in (None, "compiled"):
        keep(document, options.out, compiled_rows())
    if options.only in ("lengths", "compiled"):
        return
    problems: list = [(SMALL, (False, True), False), *((x, (False,), True) for x in LAYERS)]
    for problem in problems:
        if passed() > options.seconds:
            break
        keep(document, options.out, rows_of(*problem))


if __name__ == "__main__":
    main()
