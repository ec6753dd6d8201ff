"""The host's time for a call, ours and others' in one process; and small layers, host and GPU.

    python -m tests.benchmarks.attention.host --out FILE [--seconds 100]

Host times are of a problem too small to matter, called while the GPU keeps up: the median of
several means over many calls, contestants in turns, dense and packed ones together. torch's
attention runs twice, as it chooses itself and with cuDNN only. A layer is attention's forward and
backward in eager mode as a model calls them, one after the other without a pause: what passes is
the larger of the host's and the GPU's time.
"""

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


def only_cudnn(only: bool) -> None:
    """Whether torch's attention may use cuDNN only."""
    torch.backends.cuda.enable_flash_sdp(not only)
    torch.backends.cuda.enable_mem_efficient_sdp(not only)
    torch.backends.cuda.enable_math_sdp(not only)


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
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=64, max_seqlen_k=64,
            causal=True
        )  # fmt: skip
    return o[0] if isinstance(o, tuple) else o


def ours(q, k, v, bounds, version: str):
    """A version, dense or packed."""
    return attention(q, k, v, causal=True, version=version, cu_seqlens_q=bounds)


def contestants(packed: bool) -> dict[str, tuple[Callable, bool, bool | None]]:
    """By name: a function of q, k, v and bounds; whether heads come first; which torch backend."""
    found: dict = {name: (partial(ours, version=name), False, None) for name in OURS}
    found["flash-attn-4"] = flash_attn_4, False, None
    if not packed:
        found["torch"] = torch_attention, True, False
        found["torch, cuDNN"] = torch_attention, True, True
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
    made: dict[tuple[bool, str, str], tuple[Callable, bool | None]] = {}
    about, rows = {"suite": SUITE, "shape": shape}, []
    for packed in kinds:
        for name, (function, heads_first, backend) in contestants(packed).items():
            for what, call in calls_of(function, heads_first, shape, packed).items():
                try:
                    only_cudnn(bool(backend))
                    for _ in range(6):
                        call()
                    now("cuda")
                    made[packed, name, what] = call, backend
                except Exception as error:  # what is not installed, or cannot do it
                    found = {"packed": packed, "what": what, "contestant": name}
                    rows.append({**about, **found, "reason": reason(error)})
    times: dict = {key: [] for key in made}
    for _ in range(ROUNDS):
        for key, (call, backend) in made.items():
            only_cudnn(bool(backend))
            times[key].append(mean_us(call, CALLS, wait))
    only_cudnn(False)
    for (packed, name, what), found in times.items():
        rows.append(
            {
                **about, "packed": packed, "what": what, "contestant": name,
                "measured": "host and GPU" if wait else "host", "us": statistics.median(found),
                "least": min(found), "most": max(found),
            }
        )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write after each problem."""
    options = parser(__doc__, seconds=100, device=False).parse_args(arguments)
    document = new_document()
    problems: list = [(SMALL, (False, True), False), *((x, (False,), True) for x in LAYERS)]
    for problem in problems:
        if passed() > options.seconds:
            break
        keep(document, options.out, rows_of(*problem))


if __name__ == "__main__":
    main()
