"""LoRA by PEFT with our attention, under transformers' Trainer: every step as with SDPA."""

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate: make test-trainers")
peft = pytest.importorskip("peft", reason="needs peft: make test-trainers")

from tests.trainers.runs import check, random_model  # noqa: E402
from tests.trainers.test_trainer import COLLATORS, train  # noqa: E402


@pytest.mark.parametrize("name", COLLATORS)
def test_every_step_of_the_adapters_is_that_of_sdpa(tmp_path, name):
    """The adapters begin at random: with PEFT's default, zeros, half of them had no gradient."""

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
