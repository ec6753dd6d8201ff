"""The host's time for a call, ours and others' in one process, as models make calls; writes JSON.

    python -m tests.benchmarks.attention.host --out FILE [--only calls lengths compiled]

"calls": of a problem too small to matter, called while the GPU keeps up: the median of several
means over many calls, dense and packed ones together. torch's attention runs as it chooses itself,
with FlashAttention 2 only, and with cuDNN only. And of layers: attention's forward and backward in
eager mode, one after the other without a pause, of which the larger of the host's and the GPU's
time passes. "lengths": a call whose length never came before, all kernels compiled, and the same
lengths again; the GPU is idle when each begins. "compiled": calls in a row in one function of
torch.compile. Contestants take turns. `--device cpu` runs small ones, to try the command.
"""

import random
import statistics
from functools import partial
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_versions import attention
from flash_versions.bench.document import new_document
from flash_versions.bench.measure import host_time
from flash_versions.bench.peers import flash_attn_4
from flash_versions.bench.workers import reason
from tests.benchmarks.harness import in_time, keep, now, parser

ROUNDS, CALLS = 75, 40  # short turns: all get the same share of what else the host does
# (batch, length, heads, head_dim), of dense calls and packed ones, whether the GPU is waited for
PROBLEMS = [
    ((2, 64, 8, 64), (False, True), False),
    *((shape, (False,), True) for shape in ((4, 512, 8, 64), (8, 1024, 12, 64), (2, 512, 16, 128))),
]
HEADS, DIM = 8, 128  # of lengths and compiled calls, in a batch of one
LENGTHS, NEW, WARM, TIMES = (200, 3000), 60, 200, 4
HELD = 2 << 30  # bytes that torch has from the GPU before lengths are timed, as in training
IN_A_ROW, ROW_LENGTH, COMPILED_ROUNDS = 12, 512, 40


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


def chosen(packed):
    """The contestants but for the single versions. torch's own choice is cuDNN, which plans for
    60 ms where a length is new.
    """
    skipped = ("fa2", "fa3", "fa4", "torch")
    return {name: x for name, x in contestants(packed).items() if name not in skipped}


def summary(us):
    """The fields of times in microseconds."""
    return {"us": statistics.median(us), "least": min(us), "most": max(us)}


def rows_in_turns(calls, rounds, warm_up=1):
    """Rows with the times of calls, (row, torch's backend, mean microseconds of the call), all in
    turns; with a reason in the place of times if it is not installed, or cannot do it.
    """
    rows, timed = [dict(row) for row, _, _ in calls], {}
    for number, (_, backend, mean) in enumerate(calls):

        def alone(backend=backend, mean=mean):
            allow(backend or None)
            return mean()

        try:
            for _ in range(warm_up):  # compiled, and recorded
                alone()
            timed[number] = alone
        except Exception as error:  # whatever it is, the others are measured
            rows[number]["reason"] = reason(error)
    us = {number: [] for number in timed}
    for number, call in [*timed.items()] * rounds:
        us[number].append(call())
    for number, found in us.items():
        rows[number] |= summary(found)
    allow(None)
    return rows


def calls_of(function, heads_first, shape, packed, device):
    """What is timed, by name."""
    (batch, length, *rest), bounds = shape, None
    if packed:
        shape = batch * length, *rest
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    if heads_first:
        inputs = [x.transpose(1, 2) for x in inputs]
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    do = torch.randn_like(inputs[0])
    return {
        "forward": partial(function, *inputs, bounds),
        "forward and backward": lambda: torch.autograd.grad(function(*leaves, bounds), leaves, do),
    }


def call_rows(device, shape, kinds, wait):
    """A row for each contestant and call, dense and packed (`kinds`)."""
    about = {"suite": "host", "shape": shape, "measured": "host and GPU" if wait else "host"}
    calls = []
    for packed in kinds:
        for name, (function, backend) in contestants(packed).items():
            for what, call in calls_of(function, backend != "", shape, packed, device).items():
                row = about | {"packed": packed, "what": what, "contestant": name}
                calls.append((row, backend, partial(host_time, call, CALLS, wait)))
    return rows_in_turns(calls, ROUNDS)


def length_rows(device, packed):
    """A row for each contestant, call, and number of times that its lengths came before."""
    new, warm, bounds_of = (NEW, WARM, LENGTHS) if device == "cuda" else (2, 2, (20, 60))
    lengths = random.Random(packed).sample(range(*bounds_of), new + warm)
    about = {"suite": "lengths", "packed": packed, "measured": "host"}
    found, rows, here = {}, [], chosen(packed)

    def given(length):
        shape, bounds = (1, length, HEADS, DIM), None
        if packed:
            cuts, shape = [0, length // 7, length // 3, length // 2, length], (length, HEADS, DIM)
            bounds = torch.tensor(cuts, dtype=torch.int32, device=device)
        q, k, v, do = torch.randn((4, *shape), device=device, dtype=torch.bfloat16)
        return [x.requires_grad_() for x in (q, k, v)], do, bounds

    def call(name, inputs, do, bounds, came):
        function, backend = here[name]
        allow(backend or None)
        if backend:  # torch's, with the heads first
            inputs, do = [x.transpose(1, 2) for x in inputs], do.transpose(1, 2)
        start = now(device)
        with torch.no_grad():
            function(*inputs, bounds)
        middle = perf_counter()
        begin = now(device)
        torch.autograd.grad(function(*inputs, bounds), inputs, do)
        both = perf_counter() - begin
        for what, seconds in (("forward", middle - start), ("forward and backward", both)):
            found.setdefault((name, what, came), []).append(seconds * 1e6)

    made = [given(length) for length in lengths]
    torch.empty(HELD if device == "cuda" else 1, dtype=torch.uint8, device=device)
    for name in list(here):
        try:
            for x in made[:warm]:
                call(name, *x, None)
        except Exception as error:  # what is not installed, or cannot do it
            rows.append({**about, "contestant": name, "reason": reason(error)})
            del here[name]
    for came in range(TIMES):
        for x in made[warm:]:
            for name in here:
                call(name, *x, came)
    for (name, what, came), us in found.items():
        if came is not None:
            row = {**about, "contestant": name, "what": what, "came_before": came}
            rows.append(row | summary(us))
    allow(None)
    return rows


def compiled_rows(device):
    """A row for each contestant: one call of IN_A_ROW in a compiled function."""
    length, rounds = (ROW_LENGTH, COMPILED_ROUNDS) if device == "cuda" else (32, 1)
    shape, calls = (1, length, HEADS, DIM), []
    for name, (function, backend) in chosen(False).items():
        if name == "flash-attn-4":  # torch.compile breaks at it
            continue

        def in_a_row(q, k, v, bounds, function=function):
            for _ in range(IN_A_ROW):
                q = function(q, k, v, bounds)
            return q

        compiled = torch.compile(in_a_row, fullgraph=True)
        for what, call in calls_of(compiled, backend != "", shape, False, device).items():
            row = {"suite": "compiled calls", "shape": shape, "measured": "host", "what": what}
            mean = lambda call=call: host_time(call, 3) / IN_A_ROW  # noqa: E731
            calls.append((row | {"contestant": name}, backend, mean))
    return rows_in_turns(calls, rounds, warm_up=5)


PARTS = {
    "calls": [partial(call_rows, shape=x, kinds=y, wait=z) for x, y, z in PROBLEMS],
    "lengths": [partial(length_rows, packed=packed) for packed in (False, True)],
    "compiled": [compiled_rows],
}


def main():
    """Measure, and write after each part."""
    made = parser(__doc__, seconds=400)
    made.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    options = made.parse_args()
    document = new_document(options.device)
    for part in in_time([x for name in options.only for x in PARTS[name]], options.seconds):
        keep(document, options.out, part(options.device))


if __name__ == "__main__":
    main()
