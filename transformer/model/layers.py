"""The parts of a decoder: norm, attention, feed-forward, the layer of both, the stack of layers.

Parameters carry Hugging Face's names, so a checkpoint loads without a table of renamings. Each part
is handed the norm before it: a norm and the projections that read it are one place in the code, and
can become one kernel. What computes them is handed in as `Products`, as attention is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from transformer.model import exact
from transformer.model.cache import Span
from transformer.model.config import Config
from transformer.model.experts import MixtureOfExperts
from transformer.model.families.keys import SWIGLU_ALPHA
from transformer.model.kernels.norm import norm_reference
from transformer.model.rope import Rope, rotary_table, rotate

# Cosine and sine of the positions of a forward's tokens, as `rotate` takes them; None: no turning.
Rotation = tuple[Tensor, ...] | None

# Name in `Config` -> what the gate goes through.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gated_by(config: Config, exactly: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """How gate and up become what `down_proj` reads; exactly: see `exact`."""
    activation, limit = ACTIVATIONS[config.activation], config.swiglu_limit
    sigmoid = exact.sigmoid if exactly else torch.sigmoid
    if limit is None and exactly:
        return exact.swiglu if config.activation == "silu" else exact.geglu
    if limit is None:
        return lambda gate, up: activation(gate) * up

    def clamped(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * sigmoid(SWIGLU_ALPHA * gate)).type_as(up)

    return clamped


class RMSNorm(nn.Module):
    """Divide by the root of the mean square over the last dimension, then scale by a weight.

    The quotient is computed in fp32 and rounded to the input's dtype before the weight is applied,
    as Hugging Face does: in bf16 the other order gives other bits.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        plus_one: Gemma's kind. The scale is 1 + weight, and only the product is rounded.
        rounded_last: only the product is rounded, as in OLMo 2.

    Attributes:
        exact: whether the norm of a row does not depend on the others, see `exact`.
    """

    def __init__(self, size: int, eps: float, plus_one: bool = False, rounded_last: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))
        self.eps = eps
        self.plus_one = plus_one
        self.rounded_last = plus_one or rounded_last
        self.exact = False

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        by = exact.norm if self.exact else norm_reference
        return by(x, self.weight, self.eps, self.plus_one, self.rounded_last)


MaybeNorm = RMSNorm | nn.Identity  # of what a part reads; OLMo 2 has none there


def norm_of(config: Config, size: int) -> RMSNorm:
    """A norm of a model's kind."""
    return RMSNorm(size, config.norm_eps, config.norm_plus_one, config.norms_after)


class Products:
    """What a layer's norms and projections are computed by: torch's operations, one by one."""

    def project(self, x: Tensor, norm: MaybeNorm, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """What each layer makes of the normed x, (batch, length, its outputs)."""
        h = norm(x)
        return [self.last(h, layer) for layer in layers]

    def gate(self, x: Tensor, norm: MaybeNorm, mlp: FeedForward) -> Tensor:
        """activation(gate) * up of the normed x, (batch, length, intermediate)."""
        gate, up = self.project(x, norm, mlp.gate_up)
        return mlp.gated(gate, up)

    def last(self, x: Tensor, layer: nn.Linear, residual: Tensor | None = None) -> Tensor:
        """What the layer makes of x (..., its inputs), plus the residual."""
        return layer(x) if residual is None else residual + layer(x)


class ExactProducts(Products):
    """The same with sums whose order the weights' shape decides, see `exact`.

    Where a gradient is wanted on a GPU, layers that read the same are one product: half as many
    launches from Python, for which training waits.
    """

    def together(self, x: Tensor, norm: MaybeNorm, layers: Sequence[nn.Linear]) -> Tensor:
        """What the layers make of the normed x, side by side."""
        weights: list[Tensor] = [layer.weight for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        return exact.linear(norm(x), torch.cat(weights), torch.cat(biases) if biases else None)

    def project(self, x: Tensor, norm: MaybeNorm, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """As in `Products`."""
        if not (torch.is_grad_enabled() and exact.by_kernels(x)):
            return super().project(x, norm, layers)
        return self.together(x, norm, layers).split([layer.out_features for layer in layers], -1)

    def gate(self, x: Tensor, norm: MaybeNorm, mlp: FeedForward) -> Tensor:
        """As in `Products`."""
        if not (torch.is_grad_enabled() and exact.by_kernels(x) and mlp.gated is exact.swiglu):
            return super().gate(x, norm, mlp)
        return exact.swiglu(self.together(x, norm, mlp.gate_up))

    def last(self, x: Tensor, layer: nn.Linear, residual: Tensor | None = None) -> Tensor:
        """As in `Products`."""
        return exact.linear(x, layer.weight, layer.bias, residual)


TORCH, EXACT = Products(), ExactProducts()


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
        self.whole = config.qk_norm_of_all_heads
        self.q_norm: MaybeNorm = nn.Identity()
        self.k_norm: MaybeNorm = nn.Identity()
        if config.qk_norm or self.whole:
            q_size, kv_size = (q_size, kv_size) if self.whole else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = norm_of(config, q_size), norm_of(config, kv_size)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None

    @property
    def qkv(self) -> tuple[nn.Linear, ...]:
        """The projections that read the hidden states."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(
        self,
        x: Tensor,
        norm: MaybeNorm,
        rotation: Rotation,
        attend: Callable,
        span: Span | None,
        products: Products = TORCH,
        residual: Tensor | None = None,
    ) -> Tensor:
        """(batch, length, hidden) to the same.

        Args:
            x: hidden states.
            norm: of x, before the projections.
            rotation: of the tokens' positions.
            attend: see `Transformer`.
            span: where keys and values go in the cache; None keeps none.
            products: what computes the projections.
            residual: is added.
        """
        q, k, v = products.project(x, norm, self.qkv)
        if self.whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (rearrange(p, "b t (h d) -> b t h d", d=self.head_dim) for p in (q, k, v))
        if not self.whole:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        options = self.options if self.sinks is None else {**self.options, "sink": self.sinks}
        if span is None:
            o = attend(q, k, v, causal=True, kv_lengths=None, **options)
        else:
            o = span.attend(attend, self.layer, q, *span.append(self.layer, k, v), **options)
        o = rearrange(o, "b t h d -> b t (h d)")
        return products.last(o, self.o_proj, residual)


class FeedForward(nn.Module):
    """One projection, gated by another through silu or gelu, projected back."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.gated = gated_by(config)

    @property
    def gate_up(self) -> tuple[nn.Linear, ...]:
        """The projections that read the hidden states."""
        return self.gate_proj, self.up_proj

    def forward(
        self, x: Tensor, norm: MaybeNorm, products: Products = TORCH, residual: Tensor | None = None
    ) -> Tensor:
        """(batch, length, hidden) to the same; `norm` is that of x, before the projections. The
        residual is added.
        """
        return products.last(products.gate(x, norm, self), self.down_proj, residual)


class Block(nn.Module):
    """One layer: tokens look at each other, then each is processed alone.

    Where the layer has four norms, what a part adds to x is normed once more; where it has norms
    after the parts, only then. The name of the norm between the two parts then tells the side on
    which it is.
    """

    def __init__(self, config: Config, layer: int):
        super().__init__()
        norm = partial(norm_of, config, config.hidden_size)
        before: Callable[[], MaybeNorm] = nn.Identity if config.norms_after else norm
        self.input_layernorm = before()
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = norm()
        self.normed_after = config.four_norms or config.norms_after
        if self.normed_after:
            self.pre_feedforward_layernorm = before()
            self.post_feedforward_layernorm = norm()
        dense = not config.num_experts or layer in config.dense_layers
        self.mlp = FeedForward(config) if dense else MixtureOfExperts(config, gated_by(config))
        self.multiplier = config.residual_multiplier

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attend: Callable,
        span: Span | None,
        products: Products = TORCH,
    ) -> Tensor:
        """(batch, length, hidden) to the same; the other arguments are those of `Attention`."""
        given = (self.input_layernorm, rotation, attend, span, products)
        if not self.normed_after and self.multiplier == 1:
            x = self.self_attn(x, *given, x)
            return self.mlp(x, self.post_attention_layernorm, products, x)
        added = self.self_attn(x, *given)
        before_mlp: MaybeNorm = self.post_attention_layernorm
        if self.normed_after:
            added = self.post_attention_layernorm(added)
            before_mlp = self.pre_feedforward_layernorm
        x = x + self.scaled(added)
        added = self.mlp(x, before_mlp, products)
        if self.normed_after:
            added = self.post_feedforward_layernorm(added)
        return x + self.scaled(added)

    def scaled(self, added: Tensor) -> Tensor:
        """What a part adds, times Granite's multiplier."""
        return added if self.multiplier == 1 else added * self.multiplier


class Decoder(nn.Module):
    """Everything up to the head: tokens to hidden states."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        if (memory := torch.empty(size)).is_meta:
            # Drawing normal numbers for no memory would import torch's compiler: seconds.
            self.embed_tokens = nn.Embedding.from_pretrained(memory, freeze=False)
        else:
            self.embed_tokens = nn.Embedding(*size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = norm_of(config, config.hidden_size)

    @property
    def blocks(self) -> list[Block]:
        """The layers, with their type."""
        return cast("list[Block]", list(self.layers))

    def forward(
        self,
        tokens: Tensor,
        attend: Callable,
        span: Span | None,
        products: Products = TORCH,
        positions: Tensor | None = None,
    ) -> Tensor:
        """(batch, length) tokens to normed hidden states (batch, length, hidden). Without a span,
        positions are 0, 1, ..., if none are given.
        """
        c = self.config
        x = self.embed_tokens(tokens)
        if c.scaled_embeddings:  # by a number of x's dtype, filled in on the device
            x = x * x.new_full((), math.sqrt(c.hidden_size))
        if c.embedding_multiplier != 1:
            x = x * c.embedding_multiplier
        places: slice | Tensor = slice(tokens.shape[1]) if positions is None else positions
        places = places if span is None else span.positions
        reach = tokens.shape[1] if span is None else span.capacity  # one table for a whole answer
        length = min(1 << (reach - 1).bit_length(), c.max_positions)  # few lengths, few tables
        rotations: dict[Rope | None, Rotation] = {None: None}
        for rope, block in zip(c.ropes_at(reach), self.layers, strict=True):
            if rope not in rotations:  # one for all layers, or one of a few
                table = rotary_table(rope, c.head_dim, length, x.device, x.dtype)
                rotations[rope] = table[places].unbind(-3)
            x = block(x, rotations[rope], attend, span, products)
        return self.norm(x)
