"""The host's time for a call, ours and others' in one process; and small layers, host and GPU.

    python -m tests.benchmarks.attention.host --out FILE [--seconds 100]

Host times are of a problem too small to matter, called while the GPU keeps up: the median of
several means over many calls, contestants in turns, dense and packed ones together. torch's
attention runs as it chooses itself, with FlashAttention 2 only, and with cuDNN only. A layer is
attention's forward and backward in eager mode as a model calls them, one after the other without a
pause: what passes is the larger of the host's and the GPU's time.
"""

import statistics
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_versions import attention
from flash_versions.bench.document import new_document
from flash_versions.bench.measure import host_time, reason
from flash_versions.bench.peers import flash_attn_4
from tests.benchmarks.harness import in_time, in_turns, keep, parser

ROUNDS, CALLS = 75, 40  # short turns: all get the same share of what else the host does
# (batch, length, heads, head_dim), of dense calls and packed ones, whether the GPU is waited for
PROBLEMS = [
    ((2, 64, 8, 64), (False, True), False),
    *((shape, (False,), True) for shape in ((4, 512, 8, 64), (8, 1024, 12, 64), (2, 512, 16, 128))),
]


def allow(backend):
    """Let torch's attention use one backend, "cudnn" or "flash", or with None all."""
    torch.backends.cuda.enable_cudnn_sdp(backend in (None, "cudnn"))
    torch.backends.cuda.enable_flash_sdp(backend in (None, "flash"))
    torch.backends.cuda.enable_mem_efficient_sdp(backend is None)
    torch.backends.cuda.enable_math_sdp(backend is None)


def contestants(packed):
    """By name: a function of q, k, v and bounds; which of torch's backends, "" for none of them."""
    found = {}
    for name in ("fa2", "fa3", "fa4", "auto"):
        found[name] = lambda q, k, v, bounds, name=name: attention(
            q, k, v, causal=True, version=name, cu_seqlens_q=bounds
        ), ""  # fmt: skip
    found["flash-attn-4"] = lambda q, k, v, bounds: flash_attn_4(q, k, v, True, bounds, len(q)), ""
    for name, backend in {"torch": None, "torch, flash": "flash", "torch, cuDNN": "cudnn"}.items():
        if not packed:
            found[name] = lambda q, k, v, _: scaled_dot_product_attention(
                q, k, v, is_causal=True
            ), backend  # fmt: skip
    return found


def calls_of(function, heads_first, shape, packed):
    """What is timed, by name."""
    (batch, length, *rest), bounds = shape, None
    if packed:
        shape = batch * length, *rest
        bounds = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if heads_first:
        inputs = [x.transpose(1, 2) for x in inputs]
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    do = torch.randn_like(inputs[0])
    return {
        "forward": partial(function, *inputs, bounds),
        "forward and backward": lambda: torch.autograd.grad(function(*leaves, bounds), leaves, do),
    }


def rows_of(shape, kinds, wait):
    """A row for each contestant and call, dense and packed (`kinds`), all in turns."""
    rows, timed = [], {}

    def mean(call, backend):
        allow(backend or None)
        return host_time(call, CALLS, wait)

    for packed in kinds:
        for name, (function, backend) in contestants(packed).items():
            for what, call in calls_of(function, backend != "", shape, packed).items():
                row = {"suite": "host", "shape": shape, "packed": packed, "what": what}
                rows.append(row | {"contestant": name})
                try:
                    mean(call, backend)  # compiled, and recorded
                    timed[len(rows) - 1] = partial(mean, call, backend)
                except Exception as error:  # what is not installed, or cannot do it
                    rows[-1]["reason"] = reason(error)
    for number, us in in_turns(timed, ROUNDS).items():
        rows[number] |= {"measured": "host and GPU" if wait else "host"}
        rows[number] |= {"us": statistics.median(us), "least": min(us), "most": max(us)}
    allow(None)
    return rows


def main():
    """Measure, and write after each problem."""
    options = parser(__doc__, seconds=100, device=False).parse_args()
    document = new_document()
    for problem in in_time(PROBLEMS, options.seconds):
        keep(document, options.out, rows_of(*problem))


if __name__ == "__main__":
    main()
