"""A checkpoint with random weights in the shape of Qwen2.5-0.5B, for speed and nothing else."""

import json
from dataclasses import replace

import torch

from transformer.model.config import Config
from transformer.model.decoder import Transformer
from transformer.model.rope import Rope
from transformer.model.weights import save_model
from transformer.training import byte_tokenizer

QWEN = Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, max_positions=32768, rope=Rope(theta=1e6), tied_embeddings=True,
    qkv_bias=True,
)  # fmt: skip
TINY = replace(
    QWEN,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    head_dim=16,
)


def write_checkpoint(folder, config, seed=0):
    """A checkpoint that `Policy.load` and transformers both read.

    Its tokenizer is that of bytes with a word for every other row of the embedding: no text is ever
    read as such a word, but sampled ones can be decoded.
    """
    torch.manual_seed(seed)
    save_model(Transformer(config), folder)
    files = byte_tokenizer.files()
    content = json.loads(files["tokenizer.json"])
    words = {f"w{i}": i for i in range(byte_tokenizer.VOCAB_SIZE, config.vocab_size)}
    content["model"]["vocab"] |= byte_tokenizer.SPECIAL_TOKENS | words
    for name, text in (files | {"tokenizer.json": json.dumps(content)}).items():
        (folder / name).write_text(text, encoding="utf-8")
