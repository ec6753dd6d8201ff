"""A decoder-only transformer: Llama, Qwen, SmolLM, Mistral and Gemma from one set of parts.

    x = embedding(tokens)
    x = x + attention(norm(x))         in every layer
    x = x + feed_forward(norm(x))
    logits = head(norm(x))

The families differ only in switches of `Config`: biases (Qwen2), a norm on each query and key head
(Qwen3, Gemma 3), layers that see a window of the past only (Mistral, Gemma), each layer's rotary
embedding (scaled in Llama 3, two kinds in Gemma 3, none in some layers of SmolLM3), and Gemma's
norms behind the parts as well as before them. Parameters carry Hugging Face's names, so a
checkpoint loads without a table of renamings. Attention is handed in: the model computes queries,
keys and values as (batch, length, heads, head_dim) and calls what it was given; the key heads that
a group of query heads shares are never repeated in memory.

Each part is handed the norm before it: a norm and the projections that read it are one place in
the code, and can become one kernel.

Sources: Llama 3 (arXiv:2407.21783), Qwen3 (arXiv:2505.09388), Mistral (arXiv:2310.06825), Gemma 2
(arXiv:2408.00118), Gemma 3 (arXiv:2503.19786), RMSNorm (arXiv:1910.07467), rotary embedding
(arXiv:2104.09864), grouped queries (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), YaRN
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
from transformer.model import fused
from transformer.model.cache import KVCache, Span
from transformer.model.config import Config
from transformer.model.rope import Rope, rotary_table, rotate

INIT_STD = 0.02
KERNELS = ("auto", "torch", "fused")

# Cosine and sine of the positions of a forward's tokens, as `rotate` takes them; None: no turning.
Rotation = tuple[torch.Tensor, ...] | None

# Name in `Config` -> what the gate goes through.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """Divide by the root of the mean square over the last dimension, then scale by a weight.

    The quotient is computed in fp32 and rounded to the input's dtype before the weight is applied,
    as Hugging Face does: in bf16 the other order gives other bits.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        plus_one: Gemma's kind. The scale is 1 + weight, and only the product is rounded.
    """

    def __init__(self, size: int, eps: float, plus_one: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as x."""
        if self.plus_one:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            scale = 1 + self.weight.type_as(wide)
            return F.rms_norm(wide, x.shape[-1:], scale, self.eps).type_as(x)
        return self.weight.type_as(x) * F.rms_norm(x, x.shape[-1:], eps=self.eps)


class Attention(nn.Module):
    """Project to heads, rotate, attend, project back. `layer` is its place in the cache."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.options = config.attention_options(layer)
        q_size, kv_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        norm: Callable[[], nn.Module] = nn.Identity
        if config.qk_norm:
            norm = partial(RMSNorm, self.head_dim, config.norm_eps, config.norm_plus_one)
        self.q_norm, self.k_norm = norm(), norm()
        self.fused = False  # see `Transformer`

    def forward(
        self,
        x: torch.Tensor,
        norm: RMSNorm,
        rotation: Rotation,
        attend: Callable,
        span: Span | None,
    ) -> torch.Tensor:
        """(batch, length, hidden) to the same.

        Args:
            x: hidden states.
            norm: of x, before the projections.
            rotation: of the tokens' positions.
            attend: see `Transformer`.
            span: where keys and values go in the cache; None keeps none.
        """
        q, k, v = self.project(x, norm)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        stored: dict[str, torch.Tensor | None] = {"kv_lengths": None}
        if span is not None:
            k, v = span.append(self.layer, k, v)
            stored = span.options
        o = attend(q, k, v, causal=True, **stored, **self.options)
        o = rearrange(o, "b t h d -> b t (h d)")
        if self.fused and fused.plain(self.o_proj):
            return fused.product(self.o_proj, o)
        return self.o_proj(o)

    def project(self, x: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of the normed x: each (batch, length, its heads, head_dim)."""
        layers = fused.qkv_of(self)
        if self.fused and fused.plain(*layers):
            parts = fused.project(self, x, norm)
        else:
            h = norm(x)
            parts = [layer(h) for layer in layers]
        return tuple(rearrange(part, "b t (h d) -> b t h d", d=self.head_dim) for part in parts)


class FeedForward(nn.Module):
    """One projection, gated by another through silu or gelu, projected back."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.activation = ACTIVATIONS[config.activation]
        self.fused = False  # see `Transformer`

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """(batch, length, hidden) to the same; `norm` is that of x, before the projections."""
        if self.fused and fused.plain(self.gate_proj, self.up_proj, self.down_proj):
            return fused.product(self.down_proj, fused.feed_forward(self, x, norm))
        h = norm(x)
        return self.down_proj(self.activation(self.gate_proj(h)) * self.up_proj(h))


class Block(nn.Module):
    """One layer: tokens look at each other, then each is processed alone.

    What a part adds to x is normed once more where the layer has four norms. The name of the norm
    between the two parts then tells the side on which it stands.
    """

    def __init__(self, config: Config, layer: int):
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, config.norm_plus_one)
        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = norm()
        self.four_norms = config.four_norms
        if self.four_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()
        self.mlp = FeedForward(config)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, attend: Callable, span: Span | None
    ) -> torch.Tensor:
        """(batch, length, hidden) to the same; the other arguments are those of `Attention`."""
        added = self.self_attn(x, self.input_layernorm, rotation, attend, span)
        before_mlp = self.post_attention_layernorm
        if self.four_norms:
            added = self.post_attention_layernorm(added)
            before_mlp = self.pre_feedforward_layernorm
        x = x + added
        added = self.mlp(x, before_mlp)
        if self.four_norms:
            added = self.post_feedforward_layernorm(added)
        return x + added


class Decoder(nn.Module):
    """Everything up to the head: tokens to hidden states."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_plus_one)

    def forward(self, tokens: torch.Tensor, attend: Callable, span: Span | None) -> torch.Tensor:
        """(batch, length) tokens to normed hidden states (batch, length, hidden)."""
        c = self.config
        x = self.embed_tokens(tokens)
        if c.scaled_embeddings:  # by a number of x's dtype, filled in on the device
            x = x * x.new_full((), math.sqrt(c.hidden_size))
        positions = slice(tokens.shape[1]) if span is None else span.positions
        reach = tokens.shape[1] if span is None else span.capacity  # one table for a whole answer
        length = min(1 << (reach - 1).bit_length(), c.max_positions)  # few lengths, few tables
        rotations: dict[Rope | None, Rotation] = {None: None}
        for layer, block in enumerate(self.layers):
            rope = c.rope_of(layer)
            if rope not in rotations:  # one for all layers, or one of a few
                table = rotary_table(rope, c.head_dim, length, x.device, x.dtype)
                rotations[rope] = table[positions].unbind(-3)
            x = block(x, rotations[rope], attend, span)
        return self.norm(x)


class Transformer(nn.Module):
    """The language model: tokens to logits.

    Args:
        config: its shape.
        attention: callable (q, k, v, *, causal, kv_lengths, scale) -> o on tensors (batch, length,
            heads, head_dim), with the meaning of `flash_versions.attention`, which None stands for.
            Some models also ask for a window or a softcap: see `Config.attention_options`.
        kernels: what computes norms and products. "torch": torch's operations, one by one. "fused":
            kernels that fuse them (see `transformer.model.fused`), wherever there are some. "auto":
            these on a GPU for a decoding step; elsewhere torch's.

    Raises:
        ValueError: kernels has another value, or a model of this shape has no fused ones.
    """

    def __init__(
        self,
        config: Config,
        attention: Callable[..., torch.Tensor] | None = None,
        kernels: str = "auto",
    ):
        super().__init__()
        if kernels not in KERNELS:
            raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, not {kernels!r}")
        if kernels == "fused" and (reason := fused.unsupported(config)):
            raise ValueError(f"kernels='fused' does not work for this model: {reason}")
        self.config = config
        self.kernels = kernels
        self.attention = flash_versions.attention if attention is None else attention
        self.model = Decoder(config)
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()
        for block in fused.blocks_of(self):
            block.self_attn.fused = block.mlp.fused = kernels == "fused"

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
        if cache is not None and wanted is None and self._takes_few(tokens, cache, padding):
            return fused.forward(self, tokens, cache, last_only=last_only)
        span = None if cache is None else cache.reserve(tokens.shape[1], padding)
        x = self.model(tokens, self.attention, span)
        if last_only:
            x = x[:, -1:]
        if wanted is not None:
            x = x[wanted]
        tied, softcap = self.config.tied_embeddings, self.config.logits_softcap
        logits = F.linear(x, self.model.embed_tokens.weight) if tied else self.lm_head(x)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def _takes_few(
        self, tokens: torch.Tensor, cache: KVCache, padding: torch.Tensor | None
    ) -> bool:
        """Whether these tokens go through the fused forward of a decoding step."""
        asked = self.kernels == "fused" or (self.kernels == "auto" and tokens.is_cuda)
        return (
            asked
            and fused.unsupported(self.config) is None
            and fused.fits(self, tokens, cache, padding)
        )

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
