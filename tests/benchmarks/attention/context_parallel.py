"""Attention over one long sequence on all GPUs against one of them; writes JSON.

    torchrun --nproc-per-node 2 -m tests.benchmarks.attention.context_parallel --out FILE

First, at a moderate length, o, the LSE and the gradients are held against their error budgets.
Then rank 0 alone ("1 GPU", while the others wait at a barrier), "ring" and "all_to_all" take turns
on the same inputs: a forward, and a forward with its backward. A time is that of the slowest rank,
between two waits for its GPU after a barrier; the ratio is that of the medians, 1 GPU over many.
At the full length the last queries of each forward are held against their budget, and gradients
must be finite; what is wrong has a `reason` in the place of a time. `--device cpu --length 256`
runs the same under gloo, to try the command.
"""

import os
import statistics
from dataclasses import asdict
from functools import partial
from itertools import product

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink is not what is measured

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from flash_versions import attention, context_parallel_attention  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.suites import BACKWARD_FLOPS, Shape  # noqa: E402
from flash_versions.dispatch.request import make_request  # noqa: E402
from flash_versions.integrations.distributed.context_parallel import METHODS, shard, unshard  # noqa: E402
from flash_versions.versions.api import choose_version  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from flash_versions.versions.oracle.checks import check, refuse_over, refuse_unless_finite  # noqa: E402
from tests.benchmarks.harness import keep, now, parser, passed  # noqa: E402
from transformer.training.parallel import connected, own_device  # noqa: E402

MODERATE = 2048  # rows, of which the oracle takes the full score matrix
ALONE = "1 GPU"
SUITES = {"forward": "context parallel", "both": "context parallel backward"}


def same_inputs(shape, device, dtype):
    """q, k, v, do of rank 0 on all ranks."""
    torch.manual_seed(0)
    heads = (shape.H, shape.Hkv, shape.Hkv, shape.H)
    tensors = [torch.randn(shape.B, shape.M, h, shape.D, device=device, dtype=dtype) for h in heads]
    for x in tensors:
        dist.broadcast(x, 0)
    return tensors


def forward(run, q, k, v, do):
    """(o,)."""
    return (run(q, k, v),)


def differentiated(run, q, k, v, do):
    """(o, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = run(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def refuse_all_wrong(shape, device, dtype, version):
    """Raise an ArithmeticError on all ranks if anything is over its budget."""
    q, k, v, do = same_inputs(shape, device, dtype)
    request, options = make_request(q, k, v, causal=shape.causal), {"check": True}
    options |= {"causal": shape.causal, "version": version, "return_lse": True}
    for method in METHODS:
        leaves = [shard(x).requires_grad_() for x in (q, k, v)]
        o, lse = context_parallel_attention(*leaves, method=method, **options)
        gradients = torch.autograd.grad(o, leaves, shard(do))
        found = {"o": unshard(o.detach()), "lse": unshard(lse.detach(), dim=2)}
        found |= {name: unshard(x) for name, x in zip(("dq", "dk", "dv"), gradients)}
        refuse_over(assess_request(found, request, do))


def wrong(world, results, q, k, v, causal, alone):
    """What is wrong with results, or None; of the first key head, as the oracle is in fp64."""
    why, group = None, q.shape[2] // k.shape[2]
    o = results and (results[0] if alone else unshard(results[0]))
    if world.main:
        try:
            refuse_unless_finite(results)
            heads = q[:, :, :group], k[:, :, :1], v[:, :, :1]
            check((o[:, :, :group],), q.shape[1], causal, *heads, None)
        except ArithmeticError as error:
            why = str(error)
    return world.gather(why)[0]


def elapsed(world, call):
    """(milliseconds of the slowest rank, results) of a call; None for a rank that only waits."""
    now(world.device)
    dist.barrier()
    began = now(world.device)
    results = None if call is None else call()
    ms = 0.0 if call is None else (now(world.device) - began) * 1e3
    return world.total(ms, dist.ReduceOp.MAX), results


def measure(world, shape, dtype, version, rounds, seconds):
    """Rows of a shape: for each pass, each contestant."""
    inputs = same_inputs(shape, world.device, dtype)
    mine = [shard(x) for x in inputs]
    q, k, v, _ = inputs
    chosen = choose_version(version, make_request(q, k, v, causal=shape.causal)).name
    options = {"causal": shape.causal, "version": version}
    runs = {ALONE: partial(attention, **options)}
    runs |= {name: partial(context_parallel_attention, method=name, **options) for name in METHODS}
    rows = []
    for way, suite in SUITES.items():
        compute = differentiated if way == "both" else forward
        calls = {
            name: partial(compute, run, *(inputs if name == ALONE else mine))
            for name, run in runs.items()
        }
        if not world.main:
            calls[ALONE] = None
        flops = shape.flops() * (1 + BACKWARD_FLOPS if way == "both" else 1)
        times, reasons = {name: [] for name in calls}, {}
        for number in range(rounds + 1):  # the first one warms up
            if world.gather(number > 1 and passed() > seconds)[0]:
                break
            for name, call in calls.items():
                if name in reasons:
                    continue
                ms, results = elapsed(world, call)
                if number:
                    times[name].append(ms)
                elif reason := wrong(world, results, q, k, v, shape.causal, name == ALONE):
                    reasons[name] = reason
                del results
        for name, spent in times.items():
            about = {key: x for key, x in asdict(shape).items() if key != "dtype"}
            row = {"suite": suite, **about, "version": name, "kernels": chosen}
            row["gpus"] = 1 if name == ALONE else world.size
            if name in reasons:
                row["reason"] = reasons[name]
            else:
                middle = statistics.median(spent)
                row |= {"ms_p50": middle, "ms_all": spent, "tflops": flops / middle / 1e9}
                if name != ALONE and ALONE not in reasons:
                    row["ratio"] = statistics.median(times[ALONE]) / middle
            rows.append(row)
    return rows


def main():
    """Check and measure."""
    add = (made := parser(__doc__, seconds=75.0)).add_argument
    add("--length", type=int, default=2**17, help="rows of the whole sequence")
    add("--version", default="auto", help="which kernels")
    add("--rounds", type=int, default=3, help="how often each is timed")
    args = made.parse_args()
    on_gpu = args.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    heads, head_dim = ([(16, 16), (32, 8)], 128) if on_gpu else ([(2, 2), (4, 2)], 16)
    protocol = {
        "method": "contestants in turns after a barrier, slowest rank, median",
        "rounds": args.rounds,
        "layout": "zigzag",
        "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"],
    }
    with connected(own_device(args.device)) as world:
        document = new_document(args.device, gpus=world.size, protocol=protocol)
        for causal, (h, kv_heads) in product((True, False), heads):
            length = min(args.length, MODERATE)
            shape = Shape(1, h, kv_heads, length, length, head_dim, causal)
            refuse_all_wrong(shape, world.device, dtype, args.version)
        for (h, kv_heads), causal in product(heads, (True, False)):
            shape = Shape(1, h, kv_heads, args.length, args.length, head_dim, causal)
            rows = measure(world, shape, dtype, args.version, args.rounds, args.seconds)
            if world.main:
                keep(document, args.out, rows)


if __name__ == "__main__":
    main()
