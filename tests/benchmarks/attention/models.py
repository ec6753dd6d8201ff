"""Calls as models make them: lengths that never came, and compiled calls; writes JSON.

    python -m tests.benchmarks.attention.models --out FILE [--only lengths compiled]

"lengths": a call whose length never came before, all kernels compiled, and the same lengths again;
the GPU is idle when each begins. "compiled": calls in a row in one function of torch.compile. Both
are times of the host. Contestants take turns. `--device cpu` runs small ones, to try the command.
"""

import random
import statistics
from functools import partial
from time import perf_counter

import torch

from flash_versions.bench.document import new_document
from flash_versions.bench.measure import host_time, reason
from tests.benchmarks.attention.host import allow, contestants
from tests.benchmarks.harness import in_turns, keep, now, parser

HEADS, DIM = 8, 128  # of lengths and compiled calls, in a batch of one
LENGTHS, NEW, WARM, TIMES = (200, 3000), 60, 40, 4
IN_A_ROW, ROW_LENGTH = 12, 512
PARTS = "lengths", "compiled"


def chosen(packed):
    """The contestants but for the single versions. torch's own choice is cuDNN, which plans for
    60 ms where a length is new.
    """
    skipped = ("fa2", "fa3", "fa4", "torch")
    return {name: x for name, x in contestants(packed).items() if name not in skipped}


def summary(us):
    """The fields of times in microseconds."""
    return {"us": statistics.median(us), "least": min(us), "most": max(us)}


def lengths_rows(device, packed):
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
    return rows


def compiled_rows(device):
    """A row for each contestant: one call of IN_A_ROW in a compiled function."""
    length, turns = (ROW_LENGTH, 40) if device == "cuda" else (32, 1)
    shape, rows, timed = (1, length, HEADS, DIM), [], {}

    def mean(call, backend):
        allow(backend or None)
        return host_time(call, 3) / IN_A_ROW

    for name, (function, backend) in chosen(False).items():
        if name == "flash-attn-4":  # torch.compile breaks at it
            continue

        def in_a_row(q, k, v, function=function):
            for _ in range(IN_A_ROW):
                q = function(q, k, v, None)
            return q

        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
        *inputs, do = [x.transpose(1, 2) if backend else x for x in inputs]
        leaves = [x.detach().requires_grad_() for x in inputs]
        compiled = torch.compile(in_a_row, fullgraph=True)
        both = partial(lambda f, x, do: torch.autograd.grad(f(*x), x, do), compiled, leaves, do)
        calls = {"forward": partial(compiled, *inputs), "forward and backward": both}
        for what, call in calls.items():
            row = {"suite": "compiled calls", "shape": shape, "measured": "host", "what": what}
            rows.append(row | {"contestant": name})
            try:
                for _ in range(5):
                    mean(call, backend)
                timed[len(rows) - 1] = partial(mean, call, backend)
            except Exception as error:
                rows[-1]["reason"] = reason(error)
    for number, us in in_turns(timed, turns).items():
        rows[number] |= summary(us)
    return rows


def main(arguments=None):
    """Measure, and write after each part."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = made.parse_args(arguments)
    only, device, document = options.only, options.device, new_document(device=options.device)
    if "lengths" in only:
        for packed in (False, True):
            keep(document, options.out, lengths_rows(device, packed))
    if "compiled" in only:
        keep(document, options.out, compiled_rows(device))
    allow(None)


if __name__ == "__main__":
    main()
