"""transformers' Trainer with our attention, also under PEFT: every step as with SDPA."""

import functools

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate: make test-trainers")
import transformers

from tests.trainers.runs import (
    OURS,
    STEPS,
    Recorded,
    Steps,
    arguments,
    check,
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
def test_every_step_of_the_adapters_of_peft_is_that_of_sdpa(tmp_path, name):
    """The adapters begin at random: with PEFT's default, zeros, half of them had no gradient."""
    peft = pytest.importorskip("peft", reason="needs peft: make test-trainers")

    def run(implementation, dtype):
        config = peft.LoraConfig(
            r=2,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            lora_alpha=1,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        model = random_model(implementation, dtype)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False).to(dtype)
        steps = train(tmp_path, COLLATORS[name], implementation, dtype, model=model)
        assert all("lora_" in parameter for parameter in steps.gradients[0])
        assert len(steps.gradients[0]) == 2 * 2 * 4
        return steps

    check(run)
