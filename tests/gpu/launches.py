"""What tests on a GPU share: inputs, and launches again and again, alone or beside others."""

import pytest
import torch

from flash_versions.versions.tiles import wgmma

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not wgmma.available(torch.device("cuda")),
        reason="needs a Hopper GPU",
    ),
]


def qkv(M, N, heads, D, kv_heads=None, batch=1, dtype=torch.bfloat16, D_v=None):
    q = torch.randn(batch, M, heads, D, device="cuda", dtype=dtype)
    k = torch.randn(batch, N, kv_heads or heads, D, device="cuda", dtype=dtype)
    v = torch.randn(batch, N, kv_heads or heads, D_v or D, device="cuda", dtype=dtype)
    return q, k, v


def captured(run):
    """A graph of what `run` launches, and what it returned."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def differing(run, repeats, beside=lambda: None):
    """How many of these launches, 100 in one graph, differ from the first by a bit of a tensor
    that `run` returns; `beside` launches other work in front of the graphs.
    """
    first = run()
    different = torch.zeros((), dtype=torch.int64, device="cuda")

    def hundred():
        nonlocal different
        for _ in range(100):
            for x, y in zip(run(), first, strict=True):
                different += (x != y).any()

    graph, _ = captured(hundred)
    beside()
    for _ in range(repeats // 100):
        graph.replay()
    return int(different)


def differing_in_streams(runs, repeats):
    """How often each of these, in a stream beside those of the others, gave other bits than
    alone.
    """
    expected = [[x.clone() for x in run()] for run in runs]
    streams = [torch.cuda.Stream() for _ in runs]
    counts = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in runs]
    torch.cuda.synchronize()
    for _ in range(repeats):
        for stream, run, right, different in zip(streams, runs, expected, counts):
            with torch.cuda.stream(stream):
                for x, y in zip(run(), right, strict=True):
                    different += (x != y).any()
    torch.cuda.synchronize()
    return [int(different) for different in counts]
