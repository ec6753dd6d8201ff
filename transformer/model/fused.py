"""The model on the kernels of `transformer.model.kernels`: a decoding step, and many tokens.

A decoding step is one token of each row, or a few. The ordinary forward launches two dozen kernels
a layer, most of which touch a few kilobytes. Here, with one token, a layer is six, and four of them
do nothing but stream weights:

    embedding, lengths                        embed.embed, before the first layer
    norm, q k v, rotation, into the cache     gemv_qkv.qkv
    attention to the cache, its splits        the model's attention, two kernels
    o_proj, + x                               gemv.linear
    norm, gate and up, silu(gate) up          gemv.swiglu
    down_proj, + x                            gemv.linear

With more rows cuBLAS does the products, and a layer is about ten. Either way it computes what
`Transformer.forward` does, with fewer roundings: what stays inside a kernel stays in fp32. So in
bf16 the results differ in their last bits.

With kernels="exact" they do not: the norms, products and activations of a layer are those of
`Transformer.forward`, and a layer is about ten kernels, whatever the number of tokens.

Weights that are read together lie together: `joined` moves them once, in place, so the model's
parameters become parts of a larger tensor. There is no second copy and no state but theirs.

Many tokens, in a prefill, are work for the tensor cores, and the forward keeps the structure of the
model: `FusedProducts` computes the projections of its parts, the first ones with the norm inside
the product. That product needs weights with the norm's weight in them, which are kept beside the
model's own for as long as these do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from transformer.model import exact
from transformer.model.cache import BranchedKVCache, KVCache
from transformer.model.config import Config
from transformer.model.families.family import MULTIPLIERS
from transformer.model.kernels.decode.embed import embed
from transformer.model.kernels.decode.gemv import DTYPES, Norm, linear, swiglu
from transformer.model.kernels.decode.gemv_qkv import qkv
from transformer.model.kernels.gemm import gemm
from transformer.model.kernels.host import devices
from transformer.model.layers import Block, Decoder, FeedForward, MaybeNorm, Products, RMSNorm
from transformer.model.paged_cache import PagedKVCache
from transformer.model.rope import rotary_table

FEW_TOKENS = 256  # of all rows together, where rows have several: a prefill has more


class Model(Protocol):
    """What `forward` reads of a model: a `decoder.Transformer` has it."""

    config: Config
    model: Decoder
    attention: Callable[..., Tensor]
    kernels: str
    lm_head: nn.Linear


def unsupported(config: Config) -> str | None:
    """Why a model of this shape has no fused forward; None if it has one."""
    if config.norm_plus_one or config.four_norms or config.scaled_embeddings:
        return "Gemma's norms and embeddings are not fused"
    if config.norms_after:
        return "OLMo 2's norms are not fused"
    if any(getattr(config, name) != 1 for name in MULTIPLIERS):
        return "Granite's multipliers are not fused"
    if config.num_experts:
        return "mixtures of experts are not fused"
    if config.sinks or config.swiglu_limit is not None:
        return "gpt-oss's sinks and clamped silu are not fused"
    if config.activation != "silu":
        return f"the activation {config.activation} is not fused, only silu"
    if config.logits_softcap is not None:
        return "the softcap of the logits is not fused"
    for rope in config.ropes_at(1):
        if rope is None:
            return "layers without a rotary embedding are not fused"
        if rope.turned(config.head_dim) < config.head_dim:
            return "a rotary embedding of parts of heads is not fused"
    return None


def fits(model: Model, tokens: Tensor, cache: Any, padding: Tensor | None) -> bool:
    """Whether `forward` can take this step: one token of each row or few in all, no pads, plain
    weights, no gradient.
    """
    weight = model.model.embed_tokens.weight
    return (
        (tokens.shape[1] == 1 or tokens.numel() <= FEW_TOKENS)
        and type(cache) in (KVCache, BranchedKVCache, PagedKVCache)
        and padding is None
        and weight.dtype in DTYPES
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(weight.device.type)
        and not torch.compiler.is_compiling()
        and all(plain(*x.self_attn.qkv, *mlp_of(x).gate_up) for x in model.model.blocks)
    )


def mlp_of(block: Block) -> FeedForward:
    """The feed-forward of a layer; `unsupported` refuses experts."""
    assert isinstance(block.mlp, FeedForward)
    return block.mlp


def plain(*layers: nn.Module) -> bool:
    """Whether layers do what their weights say, all of which are here: no adapters, no shards."""
    return all(type(x) is nn.Linear and type(x.weight) is nn.Parameter for x in layers)


def norm_of(module: Any) -> Norm:
    """A model's norm as the kernels take it."""
    return Norm(module.weight, module.eps)


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of layers with the same input, one under the other, and so their biases.

    Views of memory that the layers' parameters share; parameters that do not share it yet are moved
    there.
    """
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return adjacent([layer.weight for layer in layers]), adjacent(biases) if biases else None


def adjacent(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters that differ in their first dimension at most, as parts of one tensor."""
    first = parameters[0]
    rows, end = 0, first.storage_offset()
    for parameter in parameters:
        follows = (
            parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and parameter.storage_offset() == end
            and parameter.is_contiguous()
        )
        if not follows:
            return moved_together(parameters)
        rows, end = rows + len(parameter), end + parameter.numel()
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def moved_together(parameters: Sequence[Tensor]) -> Tensor:
    """A tensor of all parameters, which become views of it."""
    # Not in inference mode, if they were not made in it: a later training step may need them too.
    with torch.inference_mode(parameters[0].is_inference()), torch.no_grad():
        whole = torch.cat([parameter.detach() for parameter in parameters])
        parts = whole.split([len(parameter) for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    return whole


def forward(
    model: Model, tokens: Tensor, cache: KVCache | PagedKVCache, *, last_only: bool = False
) -> Tensor:
    """As `Transformer.forward`, of a model whose shape is supported; no gradient."""
    config, decoder = model.config, model.model
    batch, length = tokens.shape
    span = cache.room(length)
    embedding = decoder.embed_tokens.weight
    device = embedding.device
    overlap = devices.launches_overlap(device)
    reach = min(1 << (span.capacity - 1).bit_length(), config.max_positions)
    head = embedding if config.tied_embeddings else model.lm_head.weight

    x = embed(tokens, embedding, cache.lengths, cache.capacity, overlap=overlap)
    exactly = model.kernels == "exact"
    for layer, block in enumerate(decoder.blocks):
        attention, mlp = block.self_attn, mlp_of(block)
        weight, bias = joined(attention.qkv)
        q = qkv(
            block.input_layernorm(x) if exactly else x,
            weight,
            bias,
            span.layers[layer],
            cache.lengths,
            rotary_table(cache.ropes[layer], config.head_dim, reach, device, x.dtype),
            block_table=span.block_table,
            starts=span.starts,
            norm=norm_of(block.input_layernorm),
            q_norm=norm_of(attention.q_norm) if config.qk_norm else None,
            k_norm=norm_of(attention.k_norm) if config.qk_norm else None,
            exact=exactly,
            overlap=overlap,
        )
        o = span.attend(model.attention, layer, q, *span.stored(layer), **attention.options)
        o = o.flatten(2).flatten(0, 1)
        gate_up, gate_up_bias = joined(mlp.gate_up)
        if exactly:
            x = exact.linear(o, attention.o_proj.weight, attention.o_proj.bias, x)
            h = exact.linear(block.post_attention_layernorm(x), gate_up, gate_up_bias)
            h = mlp.gated(*h.chunk(2, -1))
            x = exact.linear(h, mlp.down_proj.weight, mlp.down_proj.bias, x)
            continue
        x = linear(o, attention.o_proj.weight, attention.o_proj.bias, residual=x, overlap=overlap)
        h = swiglu(
            x, gate_up, gate_up_bias, norm=norm_of(block.post_attention_layernorm), overlap=overlap
        )
        x = linear(h, mlp.down_proj.weight, mlp.down_proj.bias, residual=x, overlap=overlap)
    x = x.unflatten(0, (batch, length))
    x = x[:, -1].contiguous() if last_only else x.flatten(0, 1)
    if exactly:
        logits = exact.linear(decoder.norm(x), head)
    else:
        logits = linear(x, head, norm=norm_of(decoder.norm), overlap=overlap)
    return logits.unflatten(0, (batch, -1))


# First layer -> what its folded weight depends on, and that weight.
_FOLDED: WeakKeyDictionary[nn.Module, tuple[tuple, Tensor]] = WeakKeyDictionary()


def folded(norm: RMSNorm, layers: Sequence[nn.Linear]) -> Tensor:
    """The weights of layers, one under the other, with the norm's weight in them; kept until one of
    them changes.
    """
    weight, _ = joined(layers)
    parameters = norm.weight, *(layer.weight for layer in layers)
    state = tuple((x.data_ptr(), x.is_inference() or x._version) for x in parameters)
    known = _FOLDED.get(layers[0])
    if known is None or known[0] != state:
        with torch.inference_mode(False), torch.no_grad():
            known = state, gemm.fold(norm.weight, weight)
        _FOLDED[layers[0]] = known
    return known[1]


class FusedProducts(Products):
    """A layer's norms and projections by our own kernels.

    Layers that are not `plain` are left to torch, and norms where a gradient is wanted.
    """

    def project(self, x: Tensor, norm: MaybeNorm, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """As in `Products`, with the norm inside one product."""
        if torch.is_grad_enabled() or not isinstance(norm, RMSNorm) or not plain(*layers):
            return super().project(x, norm, layers)
        found = gemm.linear(x, folded(norm, layers), joined(layers)[1], eps=norm.eps)
        return found.split([layer.out_features for layer in layers], -1)

    def gate(self, x: Tensor, norm: MaybeNorm, mlp: FeedForward) -> Tensor:
        """As in `Products`, with norm and silu inside the product."""
        other = mlp.gate_proj.bias is not None or not plain(*mlp.gate_up)
        if torch.is_grad_enabled() or not isinstance(norm, RMSNorm) or other:
            return super().gate(x, norm, mlp)
        return gemm.swiglu(x, *folded(norm, mlp.gate_up).chunk(2), eps=norm.eps)

    def last(self, x: Tensor, layer: nn.Linear, residual: Tensor | None = None) -> Tensor:
        """As in `Products`."""
        if not plain(layer):
            return super().last(x, layer, residual)
        return gemm.linear(x, layer.weight, layer.bias, residual=residual)
