"""A decoder-only transformer: Llama, Qwen2 and Qwen3 from one set of parts.

    x = embedding(tokens)
    x = x + attention(norm(x))         in every layer
    x = x + feed_forward(norm(x))
    logits = head(norm(x))

The families differ only in switches of `Config`: biases (Qwen2), a norm on each query and key head
(Qwen3), the scaling of the rotary embedding (Llama 3, YaRN). Parameters carry Hugging Face's names,
so a checkpoint loads without a table of renamings. Attention is handed in: the model computes
queries, keys and values as (batch, length, heads, head_dim) and calls what it was given; the key
heads that a group of query heads shares are never repeated in memory.

Sources: Llama 3 (arXiv:2407.21783), Qwen3 (arXiv:2505.09388), RMSNorm (arXiv:1910.07467), rotary
embedding (arXiv:2104.09864), grouped queries (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), YaRN
(arXiv:2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

import flash_versions
from transformer.cache import KVCache, Span
from transformer.config import Config
from transformer.rope import rotary_table, rotate

INIT_STD = 0.02

# Cosine and sine of the positions of a forward's tokens, as `rotate` takes them.
Rotation = tuple[torch.Tensor, ...]


class RMSNorm(nn.Module):
    """Divide by the root of the mean square over the last dimension, then scale by a weight.

    The quotient is computed in fp32 and rounded to the input's dtype before the weight is applied,
    as Hugging Face does: in bf16 the other order gives other bits.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as x."""
        return self.weight.type_as(x) * F.rms_norm(x, x.shape[-1:], eps=self.eps)


class Attention(nn.Module):
    """Project to heads, rotate, attend, project back. `layer` is its place in the cache."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        norm = partial(RMSNorm, self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(
        self, x: torch.Tensor, rotation: Rotation, attend: Callable, span: Span | None
    ) -> torch.Tensor:
        """(batch, length, hidden) to the same.

        Args:
            x: hidden states.
            rotation: of the tokens' positions.
            attend: see `Transformer`.
            span: where keys and values go in the cache; None keeps none.
        """
        q, k, v = (
            rearrange(project(x), "b t (h d) -> b t h d", d=self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), *rotation), rotate(self.k_norm(k), *rotation)
        kv_lengths = None
        if span is not None:
            k, v = span.append(self.layer, k, v)
            kv_lengths = span.kv_lengths
        o = attend(q, k, v, causal=True, scale=self.head_dim**-0.5, kv_lengths=kv_lengths)
        return self.o_proj(rearrange(o, "b t h d -> b t (h d)"))


class FeedForward(nn.Module):
    """SwiGLU: one projection, gated by another through silu, projected back."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, hidden) to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: tokens look at each other, then each is processed alone."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, attend: Callable, span: Span | None
    ) -> torch.Tensor:
        """(batch, length, hidden) to the same; the other arguments are those of `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend, span)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything up to the head: tokens to hidden states."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, tokens: torch.Tensor, attend: Callable, span: Span | None) -> torch.Tensor:
        """(batch, length) tokens to normed hidden states (batch, length, hidden)."""
        x = self.embed_tokens(tokens)
        positions = slice(tokens.shape[1]) if span is None else span.positions
        c = self.config
        reach = tokens.shape[1] if span is None else span.capacity  # one table for a whole answer
        length = min(1 << (reach - 1).bit_length(), c.max_positions)  # few lengths, few tables
        table = rotary_table(c.rope, c.head_dim, length, x.device, x.dtype)
        rotation = table[positions].unbind(-3)
        for block in self.layers:
            x = block(x, rotation, attend, span)
        return self.norm(x)


class Transformer(nn.Module):
    """The language model: tokens to logits.

    Args:
        config: its shape.
        attention: callable (q, k, v, *, causal, scale, kv_lengths) -> o on tensors (batch, length,
            heads, head_dim), with the meaning of `flash_versions.attention`, which None stands for.
    """

    def __init__(self, config: Config, attention: Callable[..., torch.Tensor] | None = None):
        super().__init__()
        self.config = config
        self.attention = flash_versions.attention if attention is None else attention
        self.model = Decoder(config)
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def forward(
        self,
        tokens: torch.Tensor,
        cache: KVCache | None = None,
        padding: torch.Tensor | None = None,
        last_only: bool = False,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the token after each token.

        Args:
            tokens: (batch, length) int64.
            cache: what came before the tokens; they are added to it. None: nothing came before.
            padding: (batch,) int64, how many tokens on the left of each row are pads: nothing sees
                them, their own logits mean nothing. None: no pads. Needs a cache.
            last_only: compute the logits of the last token only.
            wanted: (batch, length) bool, compute the logits of these tokens only: with a large
                vocabulary, logits take more memory than all else.

        Returns:
            (batch, length, vocab_size), (batch, 1, vocab_size) or (wanted tokens, vocab_size), in
            the dtype of the weights.

        Raises:
            ValueError: more tokens than the context or the cache holds, or arguments that do not
                fit each other or the model.
        """
        self._check(tokens, cache, padding)
        if wanted is not None and (wanted.shape, wanted.dtype) != (tokens.shape, torch.bool):
            raise ValueError(
                f"wanted must be bool {tuple(tokens.shape)} like the tokens, not {wanted.dtype}"
                f" {tuple(wanted.shape)}"
            )
        span = None if cache is None else cache.reserve(tokens.shape[1], padding)
        x = self.model(tokens, self.attention, span)
        if last_only:
            x = x[:, -1:]
        if wanted is not None:
            x = x[wanted]
        if self.config.tied_embeddings:
            return F.linear(x, self.model.embed_tokens.weight)
        return self.lm_head(x)

    def _check(
        self, tokens: torch.Tensor, cache: KVCache | None, padding: torch.Tensor | None
    ) -> None:
        """Refuse what does not fit. Only shapes: reading values would wait for the device."""
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype != torch.int64:
            raise ValueError(
                "tokens must be int64 (batch, length) and not empty,"
                f" not {tokens.dtype} {tuple(tokens.shape)}"
            )
        batch, length = tokens.shape
        if length > self.config.max_positions:
            raise ValueError(
                f"{length} tokens are more than the model's context of {self.config.max_positions}"
            )
        if cache is None and padding is not None:
            raise ValueError("padding needs a cache; without one, pad on the right instead")
        if cache is not None and len(cache.lengths) != batch:
            raise ValueError(f"tokens have {batch} rows but the cache has {len(cache.lengths)}")
        if padding is not None and padding.shape != (batch,):
            raise ValueError(f"padding must be ({batch},), not {tuple(padding.shape)}")
        device = self.model.embed_tokens.weight.device
        lengths = None if cache is None else cache.lengths
        for name, tensor in {"tokens": tokens, "padding": padding, "cache": lengths}.items():
            if tensor is not None and tensor.device != device:
                raise ValueError(f"the model is on {device} but the {name} on {tensor.device}")

    def _initialise(self) -> None:
        """GPT-2's scheme: the more layers add to the residual stream, the less each adds."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=residual_std if into_residual else INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
