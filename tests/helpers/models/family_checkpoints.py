"""Checkpoints with random weights as transformers writes them, of every family.

Heads are as large as real ones (64, 128, 256) in models that are tiny elsewhere. Windows, softcaps
and original contexts are small, so that texts of a few dozen tokens feel them, and weights are
large, so that scores reach the softcap.
"""

import functools

import torch

import flash_versions

attention = functools.partial(flash_versions.attention, version="reference")

# Written out in PyTorch, in any dtype.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def rope(theta, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # far less than the lengths below: the scaling bites
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
WINDOW = 11
LONGROPE_BEGINS = 64


def longrope(head_dim, turned=1.0):
    """Phi-3's; pairs turn up to three times slower in texts longer than LONGROPE_BEGINS."""
    pairs = int(head_dim * turned) // 2
    factors = {
        "short_factor": [1 + pair / pairs / 4 for pair in range(pairs)],
        "long_factor": [1 + 2 * pair / pairs for pair in range(pairs)],
        "partial_rotary_factor": turned,
        "original_max_position_embeddings": LONGROPE_BEGINS,
    }
    keys = rope(1e4, rope_type="longrope", **factors)
    return {**keys, "original_max_position_embeddings": LONGROPE_BEGINS}


TIED = {"tie_word_embeddings": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
SLIDING = {"sliding_window": WINDOW}
WINDOWS = {"use_sliding_window": True, **SLIDING}
QWEN_WINDOWS = {**WINDOWS, "max_window_layers": 2}
PHI = {"hidden_size": 256, "initializer_range": 0.08}  # head_dim is 64, as in `longrope(64)`
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
ONE_HEAD = {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
GEMMA = {
    **ONE_HEAD,
    **SLIDING,
    "query_pre_attn_scalar": 100,
}  # neither the head dim nor the default
SMOLLM = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}
GRANITE = {  # the multiplier of attention is neither 1 nor the root of head_dim
    "head_dim": 16, "embedding_multiplier": 3.0, "attention_multiplier": 0.4,
    "residual_multiplier": 0.7, "logits_scaling": 8.0,
}  # fmt: skip
GPT_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 1.5}


def ropes(full, sliding):
    """Those of the layers that see everything, and of the others."""
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


OLMO_FULL = {**YARN, "attention_factor": 1.2, "rope_theta": 5e5}
GEMMA_FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


def capped(attention, final):
    return {"attn_logit_softcapping": attention, "final_logit_softcapping": final}


# name -> (class of transformers, what differs from SIZES)
CHECKPOINTS = {
    "llama 2": ("Llama", {"head_dim": 128, "num_key_value_heads": 4}),
    "llama 3.2": ("Llama", {"head_dim": 64, **TIED, **rope(5e5, **LLAMA3)}),
    "llama with biases": ("Llama", BIASES),
    "llama, linear": ("Llama", rope(1e4, rope_type="linear", factor=3.0)),
    "smollm 2": ("Llama", {**SMOLLM, **TIED, **rope(1e5)}),
    "smollm 3": ("SmolLM3", {"head_dim": 128, **rope(5e6)}),
    "smollm 3, windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 0, 1], **WINDOWS, "tie_word_embeddings": False, **BIASES},
    ),
    "qwen 2.5": ("Qwen2", {**TIED, **rope(1e6)}),
    "qwen 2.5, windows": ("Qwen2", {**QWEN_WINDOWS, **rope(1e6)}),
    "qwen 3": ("Qwen3", {"head_dim": 128, **rope(1e6)}),
    "qwen 3, windows": ("Qwen3", {"head_dim": 64, **QWEN_WINDOWS, **rope(1e6)}),
    "qwen 3, yarn": ("Qwen3", {"head_dim": 32, **rope(1e6, **YARN)}),
    "qwen 3, dynamic": (
        "Qwen3",
        {"head_dim": 32, "max_position_embeddings": 64, **rope(1e4, **DYNAMIC)},
    ),
    "phi 3": ("Phi3", {"hidden_size": 128, **SLIDING}),
    "phi 3, longrope": ("Phi3", {**PHI, **longrope(64)}),
    "phi 4 mini": ("Phi3", {**PHI, **TIED, **longrope(64, 0.75)}),
    "mistral": ("Mistral", {"head_dim": 128, **SLIDING}),
    "mistral, no window": ("Mistral", {"head_dim": 128, "sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, **SLIDING}),
    "qwen 3 moe": ("Qwen3Moe", {**QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen 3 moe, mixed": (
        "Qwen3Moe",
        {**QWEN_EXPERTS, "mlp_only_layers": [1], **WINDOWS, "attention_bias": True},
    ),
    "granite": ("Granite", {**GRANITE, **BIASES, **TIED}),
    "olmo 2": ("Olmo2", {"rope_theta": 5e5, "attention_bias": True}),
    "olmo 3": (
        "Olmo3",
        {**SLIDING, **ropes(OLMO_FULL, {"rope_type": "default", "rope_theta": 5e5})},
    ),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 64, **GPT_EXPERTS, **SLIDING, **rope(1.5e5, **YARN, truncate=False)},
    ),
    "gemma": ("Gemma", ONE_HEAD),
    "gemma 2": ("Gemma2", {**GEMMA, **capped(4.0, 1.5)}),
    "gemma 2, no softcaps": ("Gemma2", {**GEMMA, **capped(None, None), "attention_bias": True}),
    "gemma 3": (  # one full layer in six
        "Gemma3",
        {**GEMMA, "num_hidden_layers": 7}
        | ropes(GEMMA_FULL, {"rope_type": "default", "rope_theta": 1e4}),
    ),
}

# Those of which parts alone differ from another one.
VARIANTS = {
    "llama with biases", "llama, linear", "smollm 3, windows", "qwen 3, yarn",
    "qwen 3 moe, mixed", "mistral, no window", "gemma 2, no softcaps",
}  # fmt: skip
FAMILIES = [name for name in CHECKPOINTS if name not in VARIANTS]


def make_checkpoint(name, folder):
    """Write a sharded checkpoint; returns the model of transformers that is in it."""
    import transformers

    family, differs = CHECKPOINTS[name]
    torch.manual_seed(0)
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**{**SIZES, **differs}, **EAGER)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if family == "GptOss":  # the only limit that earlier releases of transformers 5 know
        config.swiglu_limit = model.model.layers[0].mlp.experts.limit
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a missing one
                parameter.add_(0.1 * torch.randn_like(parameter))
        if family.startswith("Olmo"):  # else what the layers add, which is normed, hides the token
            model.model.embed_tokens.weight.mul_(10)
        if family.startswith(("Gemma", "Granite")):  # else each token says itself
            model.model.embed_tokens.weight.mul_(0.1)
    model.save_pretrained(folder, max_shard_size="200KB")
    return model


def as_transformers_4(data):
    """The config.json that transformers 4 wrote for the same model."""
    ropes = data.pop("rope_parameters")
    if "sliding_attention" in ropes:
        data["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    data["rope_theta"] = ropes.pop("rope_theta")
    data["rope_scaling"] = None if ropes["rope_type"] == "default" else ropes
    data["torch_dtype"] = data.pop("dtype")
    if data["model_type"].startswith("gemma"):  # these named no layers
        data.pop("layer_types", None)
        data.pop("_sliding_window_pattern", None)
    return data


class Numbers:
    """A tokenizer whose texts are lists of tokens."""

    def decode(self, tokens):
        return "".join(f"{token} " for token in tokens)


def make_tokens(length, batch=2):
    return torch.randint(512, (batch, length), generator=torch.Generator().manual_seed(length))


def greedy_answers(theirs, prompts, count, **options):
    """What transformers says to prompts side by side, padded on the left."""
    pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    found = theirs.generate(
        torch.tensor([[0] * n + prompt for n, prompt in zip(pads, prompts)]),
        attention_mask=torch.tensor([[0] * n + [1] * len(p) for n, p in zip(pads, prompts)]),
        do_sample=False,
        max_new_tokens=count,
        **options,
    )
    return found[:, max(map(len, prompts)) :].tolist()


@torch.no_grad()
def assert_same_logits(ours, theirs, lengths=(1, 17, 140)):
    """To 1e-5 of the largest logit: by as much, two orders of the same sums differ in fp32."""
    for length in lengths:
        tokens = make_tokens(length)
        expected = theirs(tokens).logits
        limit = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=limit)
