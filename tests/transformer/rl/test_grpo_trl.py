"""The GRPO loss, log-probabilities and advantages against TRL's GRPOTrainer: make test-trl.

`_compute_loss` is called on a stand-in for the trainer, for every variant on random tensors; then a
real trainer takes a few steps, and what passes through it is computed again with ours.
"""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.transformer.rl.test_grpo_loss import Rows, random_rows
from transformer.rl.loss import Loss, Totals

trl = pytest.importorskip("trl", reason="needs trl: make test-trl")
if trl.__version__ != "1.16.0":
    pytest.skip(
        f"the formulas are those of trl 1.16.0, this is {trl.__version__}", allow_module_level=True
    )

from trl import GRPOTrainer  # noqa: E402

LENGTHS, LIMIT = [6, 5, 1, 0, 3, 6, 2, 4], 11
KINDS = {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo"}  # TRL's and ours
KINDS |= {"bnpo": "dapo", "cispo": "dapo"}
VARIANTS = list(
    itertools.product(
        KINDS,
        ("token", "sequence"),
        ((0.2, 0.28), (0.2, 0.2), (3e-4, 4e-4)),
        (0.0, 0.04),
        (None, 1.2),
    )
)


def random_inputs(dtype, seed=0) -> Rows:
    """Without the holes outside of the mask, which TRL multiplies by 0."""
    x = random_rows(LENGTHS, seed, dtype)
    x.advantages = torch.tensor([1.3, -1.1, 0.4, 2.0, -0.6, 0.9, -2.0, 0.0], dtype=dtype)
    for name in ("logprobs", "old", "reference", "sampler"):
        setattr(x, name, getattr(x, name).masked_fill(~x.mask, 0))
    return x


def trl_loss(x: Rows, kind, ratio, clip, beta, cap, *, tokens, micro_batches=1):
    """What `GRPOTrainer._compute_loss` makes of a micro-batch: loss, gradient, metrics."""
    logprobs = x.logprobs.clone().requires_grad_()
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
        beta=beta,
        loss_type=kind,
        epsilon_low=clip[0],
        epsilon_high=1 + clip[1] if kind == "cispo" else clip[1],
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=micro_batches,
        args=SimpleNamespace(
            steps_per_generation=micro_batches, delta=None, use_bias_correction_kl=False
        ),
    )
    ids = torch.zeros(x.mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": x.mask.to(logprobs.dtype),
        "advantages": x.advantages,
        "old_per_token_logps": x.old,
        "ref_per_token_logps": x.reference,
        "num_items_in_batch": torch.tensor(float(tokens), dtype=torch.float64),
    }
    if cap is not None:  # its mode "token_truncate"
        gap = x.old - x.sampler
        inputs["importance_sampling_ratio"] = gap.exp().clamp(max=cap)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, trainer._metrics["train"]


def our_loss(x: Rows, kind, ratio, clip, beta, cap):
    policy_loss = "ppo"
    if kind == "cispo":  # TRL has no lower bound
        clip, policy_loss = (1.0, clip[1]), kind
    tokens = int(x.mask.sum())
    loss = Loss(ratio, KINDS[kind], *clip, beta, cap, policy_loss)
    value, gradient, metrics = x.loss(loss, Totals(len(x.mask), tokens, LIMIT))
    return value, gradient, metrics.means(), tokens


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradient_are_trls_for_every_variant(dtype, tolerance):
    clipped = 0
    for seed, variant in itertools.product(range(3), VARIANTS):
        kind, ratio, _, beta, _ = variant
        x = random_inputs(dtype, seed)
        loss, gradient, metrics, tokens = our_loss(x, *variant)
        their_loss, their_gradient, their_metrics = trl_loss(x, *variant, tokens=tokens)
        assert abs(loss - their_loss) <= tolerance, variant
        assert (gradient - their_gradient).abs().max() <= tolerance, variant
        assert their_gradient.abs().max() > 1e-3, variant
        if beta:
            assert metrics["kl"] == pytest.approx(their_metrics["kl"][0], rel=1e-6)
        # TRL counts sequences where the ratio is a sequence's, we count tokens.
        if ratio == "token" and kind != "cispo":
            for ours, theirs in {"clipped_low": "low_mean", "clipped_high": "high_mean"}.items():
                assert metrics[ours] == pytest.approx(their_metrics[f"clip_ratio/{theirs}"][0])
                clipped += metrics[ours] > 0
    assert clipped > 100


@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_trls_accumulated_micro_batches_are_our_batch(kind, micro_batches):
    x = random_inputs(torch.float64)
    for ratio in ("token", "sequence"):
        variant = (kind, ratio, (0.2, 0.28), 0.04, 1.2)
        loss, gradient, _, tokens = our_loss(x, *variant)
        theirs = [
            trl_loss(x.part(part), *variant, tokens=tokens, micro_batches=micro_batches)
            for part in torch.arange(len(LENGTHS)).chunk(micro_batches)
        ]
        assert abs(loss - sum(part[0] for part in theirs)) <= 1e-12
        assert (gradient - torch.cat([part[1] for part in theirs])).abs().max() <= 1e-12
