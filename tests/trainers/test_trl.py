"""TRL's trainers with our attention: every step as with SDPA."""

import pytest
import torch

trl = pytest.importorskip("trl", reason="needs trl: make test-trainers")
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.trainers.runs import (  # noqa: E402
    EPS,
    LENGTH,
    OURS,
    STEPS,
    Recorded,
    arguments,
    check,
    distance,
    random_model,
    random_rows,
)
from transformer.model.weights import find_checkpoint  # noqa: E402
from transformer.training import byte_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(find_checkpoint("sloppy"))


class RecordedSFT(Recorded, trl.SFTTrainer):
    pass


class RecordedGRPO(Recorded, trl.GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.written.append(output["completion_ids"])
        return output


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padding-free"])
def test_every_step_of_sft_is_that_of_sdpa(tmp_path, tokenizer, packing):
    def run(implementation, dtype):
        trainer = RecordedSFT(
            model=random_model(implementation, dtype),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"input_ids": random_rows(4 * STEPS)}),
            args=arguments(
                tmp_path,
                trl.SFTConfig,
                packing=packing,
                padding_free=not packing,
                max_length=2 * LENGTH if packing else None,
                gradient_checkpointing=False,
                per_device_train_batch_size=1 if packing else 2,
            ),
        )
        batch = next(iter(trainer.get_train_dataloader()))
        assert (batch["position_ids"] == 0).sum() > 1, "a row has one sequence only"
        return trainer.run()

    check(run)


def test_every_step_of_grpo_is_that_of_sdpa(tmp_path, tokenizer):
    """Sampled tokens are the same, so that both trainers go the same way. There is no run in fp64,
    which would draw other tokens: ours may differ from SDPA by 32 roundings.
    """

    def run(implementation):
        trainer = RecordedGRPO(
            model=random_model(implementation, vocabulary=byte_tokenizer.VOCAB_SIZE),
            processing_class=tokenizer,
            reward_funcs=lambda completion_ids, **_: [float(sum(x) % 5) for x in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": ["1+1?", "two and three", "say"] * 4}),
            args=arguments(
                tmp_path,
                trl.GRPOConfig,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=6,
                gradient_checkpointing=False,
                loss_type="grpo",
            ),
        )
        trainer.written = []
        steps = trainer.run()
        return steps, trainer.written

    (plain, expected), (ours, found) = run("sdpa"), run(OURS)
    assert len(found) == len(expected) == STEPS
    assert all(torch.equal(x, y) for x, y in zip(found, expected))
    for gradients in plain.gradients:
        assert max(g.abs().max() for g in gradients.values()) > 1e-3, "nothing was learned"
    assert distance(ours, plain) <= 32 * EPS
