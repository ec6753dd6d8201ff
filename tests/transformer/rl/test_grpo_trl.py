"""The GRPO loss, log-probabilities and advantages against TRL's GRPOTrainer: make test-trl.

`_compute_loss` is called on a stand-in for the trainer, for every variant on random tensors; then a
real trainer takes a few steps, and what passes through it is computed again with ours.
"""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from transformer.rl.loss import Loss, Totals, group_advantages, grpo_loss, length_mask
from transformer.training import byte_tokenizer
from transformer.training.logprobs import token_logprobs

trl = pytest.importorskip("trl", reason="needs trl: make test-trl")
if trl.__version__ != "1.16.0":
    pytest.skip(
        f"the formulas are those of trl 1.16.0, this is {trl.__version__}", allow_module_level=True
    )

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

ROWS, WIDTH, LIMIT = 8, 6, 11
LENGTHS = torch.tensor([6, 5, 1, 0, 3, 6, 2, 4])
KINDS = {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo", "bnpo": "dapo"}  # TRL's and ours
VARIANTS = list(
    itertools.product(
        KINDS,
        ("token", "sequence"),
        ((0.2, 0.28), (0.2, 0.2), (3e-4, 4e-4)),
        ((0.0, False), (0.04, False), (0.04, True)),
        (None, 1.2),
    )
)


def random_inputs(dtype, seed=0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def noise(scale):
        return scale * torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)

    old = -noise(1.5).abs()
    advantages = torch.tensor([1.3, -1.1, 0.4, 2.0, -0.6, 0.9, -2.0, 0.0], dtype=torch.float64)
    inputs = {
        "logprobs": old + noise(0.4),
        "old": old,
        "reference": old + noise(0.3),
        "sampler": old + noise(0.3),
        "advantages": advantages,
    }
    return {name: x.to(dtype) for name, x in inputs.items()}


def trl_loss(x, mask, kind, ratio, clip, kl, cap, *, tokens, micro_batches=1):
    """What `GRPOTrainer._compute_loss` makes of a micro-batch: loss, gradient, metrics."""
    logprobs = x["logprobs"].clone().requires_grad_()
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, logprobs.detach(), None),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=cap is not None,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=ratio,
        beta=kl[0],
        loss_type=kind,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=micro_batches,
        args=SimpleNamespace(
            steps_per_generation=micro_batches, delta=None, use_bias_correction_kl=kl[1]
        ),
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask.to(logprobs.dtype),
        "advantages": x["advantages"],
        "old_per_token_logps": x["old"],
        "ref_per_token_logps": x["reference"],
        "num_items_in_batch": torch.tensor(float(tokens), dtype=torch.float64),
    }
    if cap is not None:  # its mode "token_truncate"
        gap = (x["old"] - x["sampler"]) * mask
        inputs["importance_sampling_ratio"] = gap.exp().clamp(max=cap)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, trainer._metrics["train"]


def our_loss(x, mask, kind, ratio, clip, kl, cap, *, tokens):
    logprobs = x["logprobs"].clone().requires_grad_()
    loss, metrics = grpo_loss(
        logprobs,
        x["old"],
        x["advantages"],
        mask,
        Loss(ratio, KINDS[kind], *clip, *kl, cap),
        Totals(ROWS, tokens, LIMIT),
        reference=x["reference"],
        sampler=x["sampler"],
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, metrics.means()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradient_are_trls_for_every_variant(dtype, tolerance):
    mask = length_mask(LENGTHS, WIDTH)
    clipped = 0
    for seed, variant in itertools.product(range(3), VARIANTS):
        _, ratio, _, (beta, _), _ = variant
        x = random_inputs(dtype, seed)
        tokens = int(mask.sum())
        loss, gradient, metrics = our_loss(x, mask, *variant, tokens=tokens)
        their_loss, their_gradient, their_metrics = trl_loss(x, mask, *variant, tokens=tokens)
        assert abs(loss - their_loss) <= tolerance, variant
        assert (gradient - their_gradient).abs().max() <= tolerance, variant
        assert their_gradient.abs().max() > 1e-3, variant
        if beta:
            assert metrics["kl"] == pytest.approx(their_metrics["kl"][0], rel=1e-6)
        if (
            ratio == "token"
        ):  # TRL counts sequences where the ratio is a sequence's, we count tokens
            for ours, theirs in {"clipped_low": "low_mean", "clipped_high": "high_mean"}.items():
                assert metrics[ours] == pytest.approx(their_metrics[f"clip_ratio/{theirs}"][0])
                clipped += metrics[ours] > 0
    assert clipped > 100


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_trls_accumulated_micro_batches_are_our_batch(kind, micro_batches):
    mask = length_mask(LENGTHS, WIDTH)
    tokens = int(mask.sum())
    x = random_inputs(torch.float64)
    for ratio in ("token", "sequence"):
        variant = (kind, ratio, (0.2, 0.28), (0.04, True), 1.2)
        loss, gradient, _ = our_loss(x, mask, *variant, tokens=tokens)
        theirs = [
            trl_loss(
                {name: value[part] for name, value in x.items()},
                mask[part],
                *variant,
                tokens=tokens,
                micro_batches=micro_batches,
            )
            for part in torch.arange(ROWS).chunk(micro_batches)
        ]
        assert abs(loss - sum(part[0] for part in theirs)) <= 1e-12
        assert (gradient - torch.cat([part[1] for part in theirs])).abs().max() <= 1e-12


class Watched(GRPOTrainer):
    """A trainer that computes everything again with ours, and keeps the largest differences."""

    differences: dict[str, float]
    rewards: list[float]

    def differ(self, name, ours, theirs):
        difference = float((ours - theirs).detach().abs().max())
        self.differences[name] = max(self.differences.get(name, 0.0), difference)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        rewards = torch.tensor(self.rewards).view(-1, self.num_generations)
        advantages = group_advantages(rewards, self.scale_rewards)
        self.differ("advantages", advantages.flatten(), output["advantages"])
        return output

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        tokens, mask = inputs["completion_ids"], inputs["completion_mask"]
        width = tokens.shape[1]
        # From lengths: up to and including the first end of turn.
        ends = (tokens == byte_tokenizer.IM_END).int()
        lengths = torch.where(ends.any(1), ends.argmax(1) + 1, width)
        ours = length_mask(lengths, width)
        self.differ("mask", ours.int(), mask)

        whole = torch.cat([inputs["prompt_ids"], tokens], 1)
        attended = torch.cat([inputs["prompt_mask"], mask], 1)
        logits = model(whole, attention_mask=attended, use_cache=False).logits
        logprobs, entropy = token_logprobs(logits[:, -width - 1 : -1], tokens, self.temperature)
        with torch.no_grad():
            theirs, their_entropy, _ = self._get_per_token_logps_and_entropies(
                model, whole, attended, width, compute_entropy=True
            )
        self.differ("logprobs", logprobs[ours], theirs[ours])
        self.differ("entropy", entropy[ours], their_entropy[ours])

        counted = int(inputs["num_items_in_batch"])
        rows = len(tokens) * self.current_gradient_accumulation_steps
        old = inputs.get("old_per_token_logps")
        our_loss, metrics = grpo_loss(
            logprobs,
            logprobs if old is None else old,
            inputs["advantages"],
            ours,
            Loss(
                self.importance_sampling_level,
                self.loss_type,
                self.epsilon_low,
                self.epsilon_high,
                self.beta,
                self.args.use_bias_correction_kl,
            ),
            Totals(rows, counted, self.max_completion_length),
            reference=inputs.get("ref_per_token_logps"),
        )
        self.differ("loss", our_loss, loss)
        weights = list(model.parameters())
        pairs = zip(
            torch.autograd.grad(our_loss, weights),
            torch.autograd.grad(loss, weights, retain_graph=True),
        )
        largest = 0.0
        for mine, other in pairs:
            self.differ("gradient", mine, other)
            largest = max(largest, float(other.abs().max()))
        self.gradients.append(largest)
        self.ratios.append(metrics.means()["ratio_max"])
        return loss


@pytest.mark.parametrize(
    "kind, ratio, scale, kl",
    [
        ("dapo", "token", "group", (0.05, True)),
        ("grpo", "token", "batch", (0.05, False)),
        ("dr_grpo", "token", "none", (0.0, False)),
        ("grpo", "sequence", "group", (0.05, True)),
    ],
)
def test_a_real_trainers_steps_are_ours(tmp_path, kind, ratio, scale, kl):
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=byte_tokenizer.IM_END,
        pad_token_id=byte_tokenizer.PAD,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # so that some completions end by themselves
        model.model.embed_tokens.weight[byte_tokenizer.IM_END] *= 4
    model.save_pretrained(tmp_path)  # TRL loads the reference from the model's folder
    for name, text in byte_tokenizer.files().items():
        (tmp_path / name).write_text(text)

    def reward(completions, completion_ids, **_):
        trainer.rewards = [float(sum(ids) % 4) for ids in completion_ids]
        trainer.lengths += [len(ids) for ids in completion_ids]
        return trainer.rewards

    questions = ["1+1?", "what is 2 and 3", "say it"] * 8
    trainer = Watched(
        model=Qwen3ForCausalLM.from_pretrained(tmp_path),
        processing_class=AutoTokenizer.from_pretrained(tmp_path),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": q}] for q in questions]}
        ),
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            num_iterations=2,
            max_completion_length=12,
            temperature=0.9,
            beta=kl[0],
            use_bias_correction_kl=kl[1],
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type=kind,
            importance_sampling_level=ratio,
            scale_rewards=scale,
            learning_rate=3e-4,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
    )
    trainer.differences, trainer.gradients, trainer.ratios, trainer.lengths = {}, [], [], []
    trainer.train()
    assert len(trainer.gradients) == 8
    assert min(trainer.gradients) > 1e-3
    assert max(trainer.ratios) > 1.01, "the second epoch was on-policy"
    assert min(trainer.lengths) < 12
    limits = {
        "mask": 0,
        "advantages": 1e-6,
        "logprobs": 1e-5,
        "entropy": 1e-5,
        "loss": 1e-6,
        "gradient": 1e-6,
    }
    assert trainer.differences.keys() == limits.keys()
    for name, limit in limits.items():
        assert trainer.differences[name] <= limit, trainer.differences
