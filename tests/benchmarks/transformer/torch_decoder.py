"""Generation as gpt-fast does it: a step written with torch's operations alone, and compiled.

    python -m tests.benchmarks.transformer.generate_speed --contestant "torch compiled" ...

A static cache of keys and values, one product for q, k and v, attention by torch's operations over
the whole cache under a mask, the greedy token chosen inside the step, and torch.compile in mode
"reduce-overhead", which makes one CUDA graph of it. The prompt goes through the same code,
uncompiled. Weights are those of our model.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer.model.decoder import Transformer
from transformer.model.layers import Attention
from transformer.model.rope import rotary_table, rotate


class CachedAttention(nn.Module):
    """A layer's attention over a cache.

    Args:
        part: whose weights these are; q, k and v are copied side by side.
        config: of the model.
        rows: of the batch.
        capacity: tokens of a row that the cache holds.
    """

    def __init__(self, part: Attention, config, rows: int, capacity: int):
        super().__init__()
        self.part, self.head_dim = part, config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.weight = nn.Parameter(torch.cat([x.weight for x in part.qkv]))
        biases = [x.bias for x in part.qkv if x.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases)) if biases else None
        size = rows, config.num_kv_heads, capacity, config.head_dim
        for name in ("keys", "values"):
            self.register_buffer(name, self.weight.new_zeros(size))

    def forward(self, x, positions, mask, cos, sin):
        """Normed x (rows, new, hidden) to what is added to the residual stream."""
        qkv = F.linear(x, self.weight, self.bias).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads, dim=2)
        q, k = (rotate(y, cos, sin) for y in (self.part.q_norm(q), self.part.k_norm(k)))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        group = self.heads[0] // self.heads[1]
        keys, values = (y.repeat_interleave(group, 1) for y in (self.keys, self.values))
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.part.o_proj(o.transpose(1, 2).flatten(2))


class TorchDecoder(nn.Module):
    """Tokens to the greedy next ones, with a cache.

    Args:
        model: whose weights these are.
        rows: of the batch.
        capacity: tokens of a row, prompt and answer.

    Raises:
        ValueError: the model has parts that this class does not know.
    """

    def __init__(self, model: Transformer, rows: int, capacity: int):
        super().__init__()
        c, self.capacity = model.config, capacity
        layers = range(c.num_layers)
        plain = {"scale": c.head_dim**-0.5}
        if (
            c.norms_after or c.four_norms or c.num_experts or c.sinks or c.qk_norm_of_all_heads
            or c.layer_ropes or c.scaled_embeddings or c.logits_softcap is not None
            or (c.embedding_multiplier, c.residual_multiplier, c.logits_scaling) != (1, 1, 1)
            or any(c.attention_options(layer) != plain for layer in layers)
        ):  # fmt: skip
            raise ValueError("this model has more than a Llama or a Qwen; the step has not")
        self.model, weight = model.model, model.model.embed_tokens.weight
        self.head = weight if c.tied_embeddings else model.lm_head.weight
        self.attentions = nn.ModuleList(
            CachedAttention(block.self_attn, c, rows, capacity) for block in self.model.blocks
        )
        table = rotary_table(c.rope, c.head_dim, capacity, weight.device, weight.dtype)
        self.register_buffer("table", table)
        mask = torch.ones(capacity, capacity, dtype=torch.bool, device=weight.device)
        self.register_buffer("mask", mask.tril())
        self.step = torch.compile(self.forward, mode="reduce-overhead", fullgraph=True)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens (rows, 1) after those (rows, new) at these positions (new,)."""
        x = self.model.embed_tokens(tokens)
        mask, (cos, sin) = self.mask[positions], self.table[positions].unbind(1)
        for block, attention in zip(self.model.blocks, self.attentions):
            x = x + attention(block.input_layernorm(x), positions, mask, cos, sin)
            x = x + block.mlp(x, block.post_attention_layernorm)
        return F.linear(self.model.norm(x[:, -1:]), self.head).argmax(-1)

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        """The next tokens (rows, tokens) of prompts (rows, length)."""
        length = prompts.shape[1]
        newest = self(prompts, torch.arange(length, device=prompts.device))
        found, position = [newest], torch.full((1,), length, device=prompts.device)
        with sdpa_kernel(SDPBackend.MATH):  # which torch.compile turns into kernels of its own
            for _ in range(tokens - 1):
                newest = self.step(newest, position).clone()  # a graph writes to the same memory
                found.append(newest)
                position += 1
        return torch.cat(found, dim=1)


def torch_compiled(model: Transformer, prompts: list[list[int]]):
    """A function of a number of tokens that answers all prompts by that many. The first call
    decides the size of the cache, so it has to be the longest.
    """
    torch._dynamo.reset()
    batch = torch.tensor(prompts, device=model.model.embed_tokens.weight.device)
    made: list[TorchDecoder] = []

    def call(tokens: int) -> list[list[int]]:
        if not made:
            made.append(TorchDecoder(model, *batch.shape[:1], batch.shape[1] + tokens))
        return made[0].generate(batch, tokens).tolist()

    return call
