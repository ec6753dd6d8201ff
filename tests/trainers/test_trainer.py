"""transformers' Trainer with our attention: every step as with SDPA."""

import functools

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate: make test-trainers")
import transformers

from flash_versions import attention
from tests.trainers.runs import (
    OURS,
    STEPS,
    Recorded,
    Steps,
    arguments,
    check,
    distance,
    random_model,
    random_rows,
)


class RecordedTrainer(Recorded, transformers.Trainer):
    pass


def pad_left(rows):
    """Pads come first, where a causal mask alone would let the tokens see them."""
    rows = [row["input_ids"] for row in rows]
    pads = [max(map(len, rows)) - len(row) for row in rows]
    return {
        "input_ids": torch.tensor([[0] * n + row for n, row in zip(pads, rows)]),
        "attention_mask": torch.tensor([[0] * n + [1] * len(row) for n, row in zip(pads, rows)]),
        "labels": torch.tensor([[-100] * n + row for n, row in zip(pads, rows)]),
    }


COLLATORS = {
    "padded": pad_left,
    "padding-free": transformers.DataCollatorWithFlattening(),
    "padding-free, cu_seqlens": transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True
    ),
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def train(folder, collate, implementation, dtype, model=None, **changes) -> Steps:
    return RecordedTrainer(
        model=model or random_model(implementation, dtype),
        args=arguments(folder, **changes),
        train_dataset=[{"input_ids": row} for row in random_rows(2 * STEPS)],
        data_collator=collate,
    ).run()


@pytest.mark.parametrize("name", COLLATORS)
def test_every_step_is_that_of_sdpa(tmp_path, name):
    check(functools.partial(train, tmp_path, COLLATORS[name]))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated")
def test_gradient_checkpointing(tmp_path):
    check(functools.partial(train, tmp_path, pad_left, gradient_checkpointing=True))


@pytest.mark.slow
def test_the_whole_model_compiled(tmp_path):
    def run(implementation, dtype):
        changes = COMPILED if implementation == OURS else {}
        return train(tmp_path, pad_left, implementation, dtype, **changes)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    check(run)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"


@pytest.mark.parametrize("name", COLLATORS)
def test_rows_that_see_more_than_they_should_are_found(tmp_path, name, monkeypatch):
    """Pads or other sequences are seen: the distance is far beyond any bound."""

    def careless(module, q, k, v, mask, scaling=None, **others):
        o = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, scale=scaling)
        return o, None

    right = train(tmp_path, COLLATORS[name], OURS, torch.float32, max_steps=1)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, OURS, careless)
    wrong = train(tmp_path, COLLATORS[name], OURS, torch.float32, max_steps=1)
    assert distance(wrong, right) > 1e-2
