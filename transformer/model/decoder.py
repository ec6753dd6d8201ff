"""A decoder-only transformer: Llama, Qwen, Mistral, Gemma and others from one set of parts.

    x = embedding(tokens)
    x = x + attention(norm(x))         in every layer
    x = x + feed_forward(norm(x))
    logits = head(norm(x))

The families differ only in switches of `Config`: biases (Qwen2), a norm on each query and key head
(Qwen3, Gemma 3), layers that see a window of the past only (Mistral, Gemma), each layer's rotary
embedding (scaled in Llama 3, two kinds in Gemma 3, none in some layers of SmolLM3), norms behind
the parts (OLMo 2) or on both sides of them (Gemma), multipliers (Granite), experts of which each
token takes some in place of the feed-forward (Mixtral), and sinks (gpt-oss). Parameters carry
Hugging Face's names, so a checkpoint loads without a table of renamings. Attention is handed in:
the model computes queries, keys and values as (batch, length, heads, head_dim) and calls what it
was given; the key heads that a group of query heads shares are never repeated in memory. `layers`
holds the parts.

Sources: Llama 3 (arXiv:2407.21783), Qwen3 (arXiv:2505.09388), Mistral (arXiv:2310.06825), Gemma 2
(arXiv:2408.00118), Gemma 3 (arXiv:2503.19786), RMSNorm (arXiv:1910.07467), rotary embedding
(arXiv:2104.09864), grouped queries (arXiv:2305.13245), SwiGLU (arXiv:2002.05202), YaRN
(arXiv:2309.00071), OLMo 2 (arXiv:2501.00656), Granite's multipliers (IBM, Granite 3.0, 2024),
Mixtral (arXiv:2401.04088), gpt-oss (arXiv:2508.10925), Phi-3 (arXiv:2404.14219).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_versions
from transformer.model import exact, fused
from transformer.model.cache import KVCache
from transformer.model.config import Config
from transformer.model.experts import Experts, in_one_product
from transformer.model.kernels.host import choose_version, make_request
from transformer.model.layers import EXACT, TORCH, Decoder, FeedForward, RMSNorm, gated_by
from transformer.model.paged_cache import PagedKVCache

INIT_STD = 0.02
KERNELS = ("auto", "torch", "fused", "exact")


class Branches(NamedTuple):
    """How a row of tokens is a prompt with continuations, each of which sees the prompt and itself.

    Attributes:
        positions: (batch, length) int64, of each token in its text.
        ends: (batch, length) integers: no token from this place in the row on sees the token.
    """

    positions: Tensor
    ends: Tensor


class Transformer(nn.Module):
    """The language model: tokens to logits.

    Args:
        config: its shape.
        attention: callable (q, k, v, *, causal, kv_lengths, scale) -> o on tensors (batch, length,
            heads, head_dim), with the meaning of `flash_versions.attention`, which None stands for.
            Some models also ask for a window or a softcap: see `Config.attention_options`.
        kernels: what computes norms and products. "torch": torch's operations, one by one. "fused":
            kernels that fuse them (see `transformer.model.fused`), wherever there are some. "auto":
            these on a GPU for a decoding step; elsewhere torch's. "exact": the bits of a token's
            logits depend on the tokens before it only, see `transformer.model.exact`; the attention
            has to be batch-invariant (`exact.attention_of`).

    Raises:
        ValueError: kernels has another value, a model of this shape has no fused ones, or this
            machine no exact ones.
    """

    def __init__(
        self, config: Config, attention: Callable[..., Tensor] | None = None, kernels: str = "auto"
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
        self.products = fused.FusedProducts() if kernels == "fused" else TORCH
        if kernels == "exact":
            self._make_exact()

    def _make_exact(self) -> None:
        self.products = EXACT
        for module in self.modules():
            if isinstance(module, RMSNorm | Experts):
                module.exact = True
            if isinstance(module, FeedForward | Experts):
                module.gated = gated_by(self.config, exactly=True)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | PagedKVCache | None = None,
        padding: Tensor | None = None,
        last_only: bool = False,
        wanted: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """Logits of the token after each token.

        Args:
            tokens: (batch, length) int64.
            cache: what came before the tokens; they are added to it. None: nothing came before.
            padding: (batch,) int64, how many tokens on the left of each row are pads: nothing sees
                them, their own logits mean nothing. None: no pads. Needs a cache.
            last_only: compute the logits of the last token only.
            wanted: (batch, length) bool, compute the logits of these tokens only: with a large
                vocabulary, logits take more memory than all else.
            branches: of rows that are a prompt with several continuations; not with a cache.

        Returns:
            (batch, length, vocab_size), (batch, 1, vocab_size) or (wanted tokens, vocab_size), in
            the dtype of the weights.

        Raises:
            ValueError: more tokens than the context or the cache holds, or arguments that do not
                fit each other or the model.
        """
        self._check(tokens, cache, padding, branches)
        if wanted is not None and (wanted.shape, wanted.dtype) != (tokens.shape, torch.bool):
            raise ValueError(
                f"wanted must be bool {tuple(tokens.shape)} like the tokens, not {wanted.dtype}"
                f" {tuple(wanted.shape)}"
            )
        if cache is not None and wanted is None and self._takes_few(tokens, cache, padding):
            return fused.forward(self, tokens, cache, last_only=last_only)
        span = None if cache is None else cache.reserve(tokens.shape[1], padding)
        attend, positions = self.attention, None
        if branches is not None:
            attend, positions = partial(attend, query_ends=branches.ends), branches.positions
        x = self.model(tokens, attend, span, self.products, positions)
        if last_only:
            x = x[:, -1:]
        if wanted is not None:
            x = x[wanted]
        softcap, exactly = self.config.logits_softcap, self.kernels == "exact"
        if self.config.tied_embeddings:
            logits = (exact.linear if exactly else F.linear)(x, self.model.embed_tokens.weight)
        else:
            logits = (EXACT if exactly else TORCH).last(x, self.lm_head)
        if self.config.logits_scaling != 1:
            logits = logits / self.config.logits_scaling
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    @property
    def waits_for_device(self) -> bool:
        """Whether a forward on a GPU reads values back from it, which a CUDA graph cannot."""
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        if self.kernels == "exact" and experts:
            return True
        return not all(
            in_one_product(x.gate_up_proj) and in_one_product(x.down_proj) for x in experts
        )

    def _takes_few(
        self, tokens: Tensor, cache: KVCache | PagedKVCache, padding: Tensor | None
    ) -> bool:
        """Whether these tokens go through the fused forward of a decoding step."""
        on_gpu = self.kernels in ("auto", "exact") and exact.by_kernels(tokens)
        asked = self.kernels == "fused" or on_gpu
        return (
            asked
            and fused.unsupported(self.config) is None
            and fused.fits(self, tokens, cache, padding)
        )

    def _check(
        self,
        tokens: Tensor,
        cache: KVCache | PagedKVCache | None,
        padding: Tensor | None,
        branches: Branches | None,
    ) -> None:
        """Refuse what does not fit. Only shapes: reading values would wait for the device."""
        if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype != torch.int64:
            raise ValueError(
                "tokens must be int64 (batch, length) and not empty,"
                f" not {tokens.dtype} {tuple(tokens.shape)}"
            )
        batch, length = tokens.shape
        if branches is not None and cache is not None:
            raise ValueError("branches and a cache exclude each other: leave one of them out")
        if branches is not None and {x.shape for x in branches} != {tokens.shape}:
            raise ValueError(f"branches must have positions and ends of shape {(batch, length)}")
        if length > self.config.max_positions and branches is None:
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
        """GPT-2's scheme: the more layers add to the residual stream, the less each adds. Weights
        without memory, which a checkpoint will replace, get no numbers.
        """
        if self.model.embed_tokens.weight.is_meta:
            return
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=residual_std if into_residual else INIT_STD)
            if isinstance(module, Experts):
                nn.init.normal_(module.gate_up_proj, std=INIT_STD)
                nn.init.normal_(module.down_proj, std=residual_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def choose_attention(
    name: str,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    precision: str | None = None,
    paged: bool = False,
    simulated: bool = True,
    exactly: bool = False,
    shared: bool = False,
) -> tuple[str, list[str]]:
    """The version that will run in all layers of a model, and notes on the choice.

    Where no kernel runs (on the CPU of a machine with a GPU, on a GPU that is too old), or is not
    to be simulated, "auto" is torch's own attention, or where that knows too little, PyTorch
    written out.

    Args:
        name: of a version or a baseline, a file of yours such as "mine.py", or "auto".
        config: of the model; it says what each layer asks of attention.
        device, dtype: the model's.
        precision: that of attention.
        paged: whether keys and values lie in pages.
        simulated: whether "auto" may be a version that is simulated, as all are on a CPU.
        exactly: whether it has to be batch-invariant.
        shared: whether sequences with a shared prompt are one, by an interval mask.

    Raises:
        ValueError: it cannot run, in one sentence.
        OSError: there is no such file.
    """
    plain = device.type == "cpu" and precision is None
    if exactly and plain and (name == exact.BLOCKS or (name == "auto" and not simulated)):
        return exact.BLOCKS, []
    if exactly and name in flash_versions.BASELINES:
        raise ValueError(
            f"attention {name!r} is not exact: its sums follow the shape of the batch; use 'auto'"
        )
    if name.endswith(".py"):
        flash_versions.load_version(name)
    # What each kind of layer asks for in a decoding step, as a small request.
    q = torch.zeros(1, 1, config.num_heads, config.head_dim, device=device, dtype=dtype)
    k = q[:, :, : config.num_kv_heads]  # also a page of one token
    common: dict[str, Any] = {
        "causal": True,
        "kv_lengths": torch.ones(1, dtype=torch.int32, device=device),
        "block_table": torch.zeros(1, 1, dtype=torch.int32, device=device) if paged else None,
        "precision": precision,
        "sink": q[0, 0, :, 0].contiguous() if config.sinks else None,
        "batch_invariant": exactly,
    }
    if shared:
        common |= {"query_ends": common.pop("kv_lengths")}
    kinds = {str(x): x for x in map(config.attention_options, range(config.num_layers))}
    requests = [make_request(q, k, k, **common, **options) for options in kinds.values()]
    names = [*reversed(flash_versions.VERSIONS)] if name == "auto" else [name]
    if name == "auto" and device.type == "cpu" and not simulated:
        names = []
    refused = None
    for version in names:
        try:
            return {choose_version(version, request).name for request in requests}.pop(), []
        except ValueError as error:
            refused = refused or error
    if refused is not None and (name != "auto" or precision is not None):
        raise refused
    baselines = (("sdpa", "torch's own"), ("reference", "PyTorch written out"))
    for version, what in baselines if not exactly else ():
        if version == "reference" and device.type == "cuda":
            break  # it waits for the device, which a captured step cannot
        try:
            for request in requests:
                choose_version(version, request)
        except ValueError as error:
            refused = refused or error
            continue
        return version, [f"attention is {version}, {what}: {refused}"] if refused else []
    assert refused is not None
    raise refused
