"""Compile the kernels of a decoding step and of log-probabilities for one architecture; print a
JSON row for each.

    TRITON_INTERPRET=0 python tests/compile/compile_gemv.py sm_90

A process of its own, because compiling and interpreting cannot share one.
"""

import json
import re
import sys
from unittest import mock

import torch

from flash_versions.inspect.command import compiling
from flash_versions.inspect.compiled import Compiled, CompileOnly
from transformer.model.kernels import logprobs
from transformer.model.kernels.decode import (
    embed,
)
from transformer.model.kernels.decode import (
    gemv as skinny,
)
from transformer.model.kernels.decode import (
    gemv_qkv as skinny_qkv,
)
from transformer.model.kernels.decode import (
    sample as choose,
)

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 32, 8, 64, 2048, 8192
KERNELS = {
    embed: ("embed_kernel",),
    skinny: ("linear_kernel", "swiglu_kernel"),
    skinny_qkv: ("qkv_kernel", "place_kernel"),
    choose: ("chunk_kernel", "likeliest_kernel", "draw_kernel"),
    logprobs: ("forward_kernel", "backward_kernel"),
}


def empty(*shape: int) -> torch.Tensor:
    """What stands for a tensor of the device."""
    return torch.empty(shape, dtype=torch.bfloat16)


def step(overlap: bool) -> None:
    """All layers of one block of a model with a billion parameters, and the choice of a token."""
    x, options = empty(1, HIDDEN), {"overlap": overlap}
    weight = empty((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    norm = skinny.Norm(empty(HIDDEN), 1e-5)
    of_heads = skinny.Norm(empty(HEAD_DIM), 1e-5)
    cache = empty(2, 1, 512, KV_HEADS, HEAD_DIM)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    lengths, table = torch.ones(1, dtype=torch.int32), empty(512, 2, 1, HEAD_DIM)
    embed.embed(tokens, empty(128256, HIDDEN), lengths, 512, **options)
    skinny_qkv.qkv(x, weight, None, cache, lengths, table, norm=norm, **options)
    skinny_qkv.qkv(
        x, weight, None, cache, lengths, table, q_norm=of_heads, k_norm=of_heads, **options
    )
    up, down = empty(2 * INTERMEDIATE, HIDDEN), empty(HIDDEN, INTERMEDIATE)
    h = skinny.swiglu(x, up, norm=norm, **options)
    skinny.linear(h, down, residual=x, **options)
    many = skinny_qkv.MANY_TOKENS
    skinny_qkv.qkv(
        empty(many, 64),
        empty(len(weight), 64),
        None,
        empty(2, many, 4, KV_HEADS, HEAD_DIM),
        torch.ones(many, dtype=torch.int32),
        table,
        q_norm=of_heads,
        k_norm=of_heads,
        **options,
    )
    logits = empty(1, 128256)
    choose.likeliest(logits, **options)
    token, banned = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(128256, dtype=torch.bool)
    record = choose.Record(token, torch.zeros(1, 1), token, token)
    draws = choose.Draws(torch.zeros(1, 8, dtype=torch.float64), token, 0.7)
    choose.choose(logits, record, draws, banned, **options)
    found = logprobs.logprobs_of(logits, token[0], 0.7, banned)
    logprobs.gradient_of(found[0], logits, token[0], found[2], 0.7, banned)


def main(arch: str) -> None:
    """Print the rows."""
    rows = []

    def keep(kernel, code) -> None:
        compiled = Compiled(kernel.__name__, kernel.__module__, arch, code)
        loads = re.findall(r"\bld\.global\S*|cp\.async\.\S*global\S*.*, 0x10\b", compiled.ptx)
        rows.append(
            {
                "kernel": compiled.kernel,
                "registers": compiled.registers,
                "stack": compiled.stack,
                "shared": compiled.shared,
                "wide_loads": sum("v4" in load or "0x10" in load for load in loads),
                "waits": compiled.ptx.count("griddepcontrol.wait"),
            }
        )

    with compiling(arch):
        for module, names in KERNELS.items():
            for name in names:
                setattr(module, name, CompileOnly(getattr(module, name), keep))
        # Tensors on the CPU are let through only where kernels are interpreted.
        nothing = mock.Mock()
        with (
            mock.patch.object(skinny, "check", nothing),
            mock.patch.object(embed, "check_device", nothing),
            mock.patch.object(skinny_qkv, "check", nothing),
        ):
            step(overlap=arch == "sm_90")
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
