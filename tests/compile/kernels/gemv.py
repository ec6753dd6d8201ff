"""The kernels of a decoding step and of log-probabilities for one architecture, a row for each. See
compiled.py.
"""

import re

import torch

from flash_versions.inspect.command import compiling
from transformer.model.kernels import logprobs, norm
from transformer.model.kernels.decode import embed, gemv, gemv_qkv, merge, sample

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 32, 8, 64, 2048, 8192


def empty(*shape: int) -> torch.Tensor:
    """What stands for a tensor of the device."""
    return torch.empty(shape, dtype=torch.bfloat16)


def step(overlap: bool) -> None:
    """All layers of one block of a model with a billion parameters, and the choice of a token."""
    x, options = empty(1, HIDDEN), {"overlap": overlap}
    weight = empty((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    of_x = gemv.Norm(empty(HIDDEN), 1e-5)
    of_heads = gemv.Norm(empty(HEAD_DIM), 1e-5)
    cache = empty(2, 1, 512, KV_HEADS, HEAD_DIM)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    lengths, table = torch.ones(1, dtype=torch.int32), empty(512, 2, 1, HEAD_DIM)
    embed.embed(tokens, empty(128256, HIDDEN), lengths, 512, **options)
    gemv_qkv.qkv(x, weight, None, cache, lengths, table, norm=of_x, **options)
    gemv_qkv.qkv(
        x, weight, None, cache, lengths, table, q_norm=of_heads, k_norm=of_heads, **options
    )
    up, down = empty(2 * INTERMEDIATE, HIDDEN), empty(HIDDEN, INTERMEDIATE)
    h = gemv.swiglu(x, up, norm=of_x, **options)
    gemv.linear(h, down, residual=x, **options)
    gemv_qkv.qkv(
        empty(1, 64), empty(len(weight), 64), None, cache, lengths, table, starts=lengths,
        q_norm=of_heads, k_norm=of_heads, exact=True, **options,
    )  # fmt: skip
    norm.rms_norm(x, of_x.weight, of_x.eps)
    o, lse = empty(4, 1, HEADS, HEAD_DIM), torch.zeros(4, HEADS, 1)
    merge.merge(o, lse, o.view(2, 2, HEADS, HEAD_DIM), lse.view(2, HEADS, 2))
    many = gemv_qkv.MANY_TOKENS
    gemv_qkv.qkv(
        empty(many, 64), empty(len(weight), 64), None, empty(2, many, 4, KV_HEADS, HEAD_DIM),
        torch.ones(many, dtype=torch.int32), table, q_norm=of_heads, k_norm=of_heads, **options,
    )  # fmt: skip
    logits = empty(1, 128256)
    sample.choose(logits, **options)
    token, banned = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(128256, dtype=torch.bool)
    record = sample.Record(token, torch.zeros(1, 1), token, token)
    draws = sample.Draws(torch.zeros(1, 8, dtype=torch.float64), token, 0.7)
    sample.sample_into(logits, record, draws, banned, **options)
    found = logprobs.logprobs_of(logits, token[0], 0.7, banned)
    logprobs.gradient_of(found[0], logits, token[0], found[2], 0.7, banned)


def rows(arch: str) -> list[dict]:
    """The rows of an architecture."""
    with compiling(arch) as found:
        step(overlap=arch == "sm_90")
    loads = r"\bld\.global\S*|cp\.async\.\S*global\S*.*, 0x10\b"
    return [
        {
            "kernel": kernel.kernel,
            "registers": kernel.registers,
            "stack": kernel.stack,
            "wide_loads": sum("v4" in x or "0x10" in x for x in re.findall(loads, kernel.ptx)),
            "bf16_fma": kernel.ptx.count("fma.rn.bf16"),
            "waits": kernel.ptx.count("griddepcontrol.wait"),
        }
        for kernel in found
    ]
