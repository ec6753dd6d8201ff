"""GRPO whose sampler and trainer agree to the bit, and groups that are one sequence."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

import flash_versions
from tests.helpers.models.tiny_grpo import CPU, make_trainer
from tests.transformer.model.test_exact import tiny
from tests.transformer.rl.test_rollout import by_hand
from transformer.generation.batch import prefill
from transformer.model.cache import BranchedKVCache, KVCache
from transformer.model.decoder import Branches
from transformer.model.exact import attention_of
from transformer.model.kernels.decode.merge import merge
from transformer.rl.rollout import (
    SPLIT,
    UNIT,
    collate,
    collate_shared,
    completion_logprobs,
    next_start,
)

ZERO = ("gap", "gap_max", "sampler_kl")


def said(prompt, *answers):
    """The rollouts of a group with these answers."""
    return [by_hand(prompt, answer) for answer in answers]


def drawn(seed, groups=3, longest=40, answer=20):
    """Groups of random prompts with random answers."""
    rng = Random(seed)

    def tokens(count):
        return [rng.randrange(101) for _ in range(count)]

    return [
        one
        for _ in range(groups)
        for one in said(
            tokens(rng.randint(1, longest)),
            *(tokens(rng.randint(1, answer)) for _ in range(rng.randint(1, 4))),
        )
    ]


# --- exact


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16", "checkpointing": True},
        {"group_layout": "shared", "temperature": 0.7},
        {"dtype": "bfloat16", "group_layout": "shared", "epochs": 2, "micro_batch": 5},
        {"beta": 0.1, "micro_batch": 3, "mask_truncated": True},
    ],
    ids=str,
)
def test_an_exact_run_has_no_gap(tempted, changes):
    trainer = make_trainer(tempted, exact=True, **changes)
    learned = 0
    for _ in range(4):
        measured = trainer.learn(trainer.roll_out().rollouts)
        learned += measured["learned"]
        assert [measured[name] for name in ZERO] == [0.0, 0.0, 0.0]
    assert learned > 20


@pytest.mark.parametrize("gap", [1e-6, float("nan")])
def test_a_gap_ends_an_exact_run(gap, tempted):
    trainer = make_trainer(tempted, exact=True)
    rollouts = trainer.roll_out().rollouts
    first = next(r for r in rollouts if r.reward != rollouts[0].reward)
    first.completion.logprobs[0] += gap
    with pytest.raises(ValueError, match="more than 0 with --exact"):
        trainer.learn(rollouts)


# --- a group as one sequence


@pytest.mark.parametrize("exact", [False, True])
def test_log_probabilities_are_those_of_rows(exact):
    model, banned = tiny("exact" if exact else "torch"), (3, 7)
    for seed in range(8):
        rollouts = drawn(seed, longest=300 if seed % 2 else 40)
        rows, shared = collate(rollouts, CPU), collate_shared(rollouts, CPU, exact)
        big = replace(model.config, max_positions=4096)
        model.config = model.model.config = big
        ours, theirs = (completion_logprobs(model, x, banned, 0.8) for x in (shared, rows))
        assert shared.mask.equal(rows.mask) and shared.sampler.equal(rows.sampler)
        if exact:
            assert ours[0].equal(theirs[0]) and ours[1].equal(theirs[1])
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_kernels_see_branches_as_rows():
    """Those of FA2, simulated: a branch behind a prompt of more than a block."""
    model, rollouts = tiny(attention=attention_of("fa2", True)), said([7] * 140, [1] * 9, [2] * 5)
    model.config = model.model.config = replace(model.config, max_positions=4096)
    batches = (collate_shared(rollouts, CPU, exact=True), collate(rollouts, CPU))
    ours, theirs = (completion_logprobs(model, batch, (), 1.0)[0] for batch in batches)
    assert batches[0].tokens.shape[0] == 1 and ours.equal(theirs)


def test_gradients_are_those_of_rows_in_fp64():
    """Twice the distance of fp32 rows from fp64 rows is allowed, as to the kernels."""

    def attend(q, k, v, **options):
        return flash_versions.attention_reference(q, k, v, **options)[0]

    rollouts = drawn(5, groups=4)
    weights = torch.randn(len(rollouts), 1)

    def gradient(dtype, put):
        model = tiny("torch", attend, dtype).requires_grad_(True)
        logprobs, _ = completion_logprobs(model, put(rollouts, CPU), (), 1.0)
        loss = (logprobs * weights.to(dtype)).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    oracle = gradient(torch.float64, collate)
    for ours, plain, right in zip(
        gradient(torch.float32, collate_shared), gradient(torch.float32, collate), oracle
    ):
        budget = 2 * (plain - right).abs().max() + 1e-6 * right.abs().max()
        assert (ours - right).abs().max() <= budget


def test_a_group_is_one_row_and_a_long_prompt_is_there_once():
    rollouts = said([*range(50)], [1] * 10, [2] * 5, [3] * 7) + said([9], [4])
    batch = collate_shared(rollouts, CPU)
    assert batch.tokens.shape == (2, 80)  # 49 and 10 + 5 + 7, rounded up
    assert batch.branches.positions[0, 49:59].tolist() == [*range(49, 59)]
    assert batch.branches.positions[0, 59:64].tolist() == [*range(49, 54)]
    assert batch.targets.tolist() == [1] * 10 + [2] * 5 + [3] * 7 + [4]


def test_exact_branches_divide_their_keys_as_rows_do():
    """Into blocks and splits: for each branch, keys that are together in one are in the other."""
    rng = Random(0)
    for _ in range(300):
        prompt = rng.choice((rng.randint(1, 300), rng.randint(1900, 2300), rng.randint(4000, 4200)))
        first, end = (prompt - 1) // UNIT * UNIT, 0
        row = []
        for _ in range(rng.randint(1, 12)):
            length = prompt - first + rng.randint(0, rng.choice((60, 700, 2500)))
            start = next_start(end, first, length, UNIT, True) if row else first
            if start is None:
                row, start = [], first
            row.append((start, start + length))
            end = start + length
            alone = [*range(first + length)]
            slots = [*range(first), *range(start, end)]
            for size in (64, UNIT, SPLIT):
                cuts = [[a // size != b // size for a, b in pairwise(x)] for x in (alone, slots)]
                assert cuts[0] == cuts[1]


def test_layers_with_a_window_are_refused(tempted, monkeypatch):
    from transformer.rl import trainer

    config = replace(trainer.load_config(tempted), layer_windows=(4, None))
    monkeypatch.setattr(trainer, "load_config", lambda folder: config)
    with pytest.raises(ValueError, match="--group-layout shared is not possible"):
        make_trainer(tempted, group_layout="shared")


def test_branches_that_do_not_fit_are_refused():
    model, tokens = tiny(), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="branches must have positions and ends of shape"):
        model(tokens, branches=Branches(tokens, tokens[:, 1:]))
    with pytest.raises(ValueError, match="branches and a cache exclude each other"):
        model(tokens, KVCache(model.config, 1, 8), branches=Branches(tokens, tokens))


# --- rollouts of a shared prompt


def attend_by(version):
    def attend(q, k, v, **options):
        return flash_versions.attention(q, k, v, version=version, **options)

    return attend


OTHER = {"qk_norm": False, "qkv_bias": True}


@pytest.mark.parametrize(
    ("kernels", "version", "changes"),
    [("torch", "reference", {"sinks": True}), ("fused", "fa2", {}), ("fused", "fa2", OTHER)],
    ids=str,
)
@torch.no_grad()  # for which there is a fused forward
def test_a_shared_cache_is_one_for_each_row(kernels, version, changes):
    model = tiny(kernels, attend_by(version), **changes)
    prompts = KVCache(model.config, 2, 40)
    prefill(model, prompts, [[1, 2, 3, 4, 5, 6, 7], [9, 8]], 100)
    copies = prompts.repeat(3)
    shared = BranchedKVCache(model.config, prompts, 3, 20)
    for fixed, count in ((False, 1), (False, 2), (True, 1), (True, 2)):
        if fixed:
            copies.fix(), shared.fix()
        tokens = torch.randint(101, (6, count))
        ours, theirs = (model(tokens, cache) for cache in (shared, copies))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert shared.nbytes + prompts.nbytes < copies.nbytes


def test_merged_parts_are_those_of_torch():
    torch.manual_seed(0)
    o, prefix = torch.randn(2, 6, 2, 4, 20)
    lse, lse_prefix = torch.randn(2, 6, 4, 2) * 4
    lse[0], lse_prefix[:3, 1], lse[1, 1] = -torch.inf, -torch.inf, -torch.inf
    expected, _ = flash_versions.merge_attention_states(o, lse, prefix, lse_prefix)
    of_groups = lse_prefix.unflatten(0, (2, 3)).transpose(1, 2).flatten(2)
    merge(o, lse, prefix.view(2, 6, 4, 20), of_groups)
    torch.testing.assert_close(o, expected)
