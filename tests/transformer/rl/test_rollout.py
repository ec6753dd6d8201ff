"""Rollouts: the sampler and the trainer see the same tokens, the same mask, the same probabilities.

Each of these tests fails with a bug that public implementations of GRPO have had.
"""

import json
import math
import shutil
from dataclasses import replace
from random import Random

import pytest
import torch

from tests.helpers.models.tiny_grpo import CPU, LETTERS, SLOPPY, Count, Fewer
from transformer.generation.engine import Completion, generate
from transformer.generation.sampling import Sampling, row_generators
from transformer.rl.groups import groups_of
from transformer.rl.practice import Mix
from transformer.rl.rollout import Policy, Rollout, collate, completion_logprobs, judged, roll_out
from transformer.tasks.problems import Problems
from transformer.tasks.skills import Add
from transformer.tasks.task import Problem, worked
from transformer.training import byte_tokenizer

END, PAD = byte_tokenizer.IM_END, byte_tokenizer.PAD


@pytest.fixture(scope="module")
def policy(tempted) -> Policy:
    return Policy.load(tempted, "sdpa", CPU)


@pytest.fixture(scope="module")
def sloppy() -> Policy:
    return Policy.load(SLOPPY, "sdpa", CPU)


def problems_of(task, count, seed=0):
    rng = Random(seed)
    return [task.sample(rng) for _ in range(count)]


def rolled(policy, problems, samples=4, temperature=1.0, max_tokens=12, **options):
    sampling = Sampling(temperature=temperature)
    return roll_out(
        policy, policy.model, problems, samples, max_tokens=max_tokens, sampling=sampling, **options
    )


def trained_logprobs(policy, rollouts, temperature=1.0):
    """(B, T) log-probabilities and entropies by the trainer's forward pass, and the batch."""
    batch = collate(rollouts, CPU)
    with torch.no_grad():
        return *completion_logprobs(policy.model, batch, policy.banned, temperature), batch


# --- one distribution


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_trainer_and_transformers_agree(sloppy, temperature):
    """Ragged prompts, a prefill that groups share, completions of different lengths, row by row
    against transformers without any padding.
    """
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(SLOPPY, dtype=torch.float32).eval()
    problems = [*problems_of(Add(3), 2), *problems_of(Mix(), 2, seed=4)]
    rollouts = rolled(sloppy, problems, 3, temperature, max_tokens=48)
    assert len({len(r.prompt) for r in rollouts}) > 1
    assert len({len(r.completion.tokens) for r in rollouts}) > 3
    logprobs, entropy, batch = trained_logprobs(sloppy, rollouts, temperature)
    for row, rollout in enumerate(rollouts):
        answer = rollout.completion.tokens
        with torch.no_grad():
            logits = oracle(torch.tensor([rollout.prompt + answer])).logits[0].double()
        logits[:, list(sloppy.banned)] = -math.inf
        scores = (logits[len(rollout.prompt) - 1 : -1] / temperature).log_softmax(-1)
        expected = scores[torch.arange(len(answer)), answer].float()
        sampler, trainer = batch.sampler[row, : len(answer)], logprobs[row, : len(answer)]
        torch.testing.assert_close(sampler, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(trainer, expected, rtol=0, atol=1e-4)
        spread = -(scores.exp() * scores.nan_to_num(neginf=0)).sum(-1).float()
        torch.testing.assert_close(entropy[row, : len(answer)], spread, rtol=0, atol=1e-4)


# --- what may be said


def test_pads_and_reserved_tokens_are_neither_sampled_nor_learned(policy):
    prompts = [policy.encode(problem) for problem in problems_of(Count(), 8)]
    options = {"max_tokens": 12, "sampling": Sampling(), "generators": row_generators(0, 8)}
    free, _ = generate(policy.model, policy.tokenizer, prompts, **options)
    said = [token for completion in free for token in completion.tokens]
    assert sum(token in policy.banned for token in said) > len(said) / 3, "nothing tempts it"
    rollouts = rolled(policy, problems_of(Count(), 8))
    said = [token for rollout in rollouts for token in rollout.completion.tokens]
    assert not {*said} & {*policy.banned}
    assert {*said} >= {*LETTERS, END}
    logprobs, _, batch = trained_logprobs(policy, rollouts)
    torch.testing.assert_close(logprobs, batch.sampler, rtol=0, atol=1e-5)
    parameter = policy.model.lm_head.weight
    loss, _ = completion_logprobs(policy.model, batch, policy.banned, 1.0)
    [gradient] = torch.autograd.grad(loss.sum(), parameter)
    assert (gradient[list(policy.banned)] == 0).all()
    assert (gradient[list(LETTERS)] != 0).any(1).all()


def test_a_message_that_the_template_leaves_out_is_named(policy):
    deaf = replace(policy, template="{% for m in messages if m.role == 'user' %}?{% endfor %}")
    with pytest.raises(ValueError, match="leaves out the user's message 'Hi'"):
        deaf.encode(Problem(Count(), (0, 0), "Hi"))


def test_what_is_banned(policy, tempted, tmp_path):
    names = {policy.tokenizer.decode([token]) for token in policy.banned}
    assert names == {"<|endoftext|>", *byte_tokenizer.RESERVED}
    assert policy.eos == (END,)

    # A token that ends a completion has to be said, be it the pad, too.
    both = shutil.copytree(tempted, tmp_path / "both")
    change_json(both / "generation_config.json", eos_token_id=[END, PAD])
    assert PAD not in Policy.load(both, "sdpa", CPU).banned

    # Rows of the embedding that no token belongs to.
    fewer = shutil.copytree(tempted, tmp_path / "fewer")
    path = fewer / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < 270]
    path.write_text(json.dumps(content))
    assert Policy.load(fewer, "sdpa", CPU).banned == policy.banned


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- which tokens count


def by_hand(prompt: list[int], tokens: list[int], reward: float = 0.0, reason: str = "stop"):
    completion = Completion(len(prompt), tokens, "", reason, [-1.0 - t for t in tokens])
    return Rollout(Problem(Count(), (0, 0), "?"), prompt, completion, reward, 0.0, 0.0)


def test_masks_are_made_from_lengths():
    """Neither the id that fills the rows, 0, nor the pad's, nor an end within a row matters."""
    rows = [([7, 8, 9], [0, PAD, 0, END]), ([0], [END]), ([PAD, 0], [5, 0])]
    batch = collate([by_hand(*row) for row in rows], CPU)
    assert batch.mask.tolist() == [[True] * len(t) + [False] * (4 - len(t)) for _, t in rows]
    assert batch.targets.tolist() == [token for _, tokens in rows for token in tokens]
    assert batch.tokens.shape == batch.wanted.shape >= (3, 7)
    for row, (prompt, tokens) in enumerate(rows):
        whole = prompt + tokens
        assert batch.tokens[row, : len(whole)].tolist() == whole
        positions = batch.wanted[row].nonzero().flatten().tolist()
        assert [whole[position + 1] for position in positions] == tokens
        assert positions[0] == len(prompt) - 1
        assert batch.sampler[row, : len(tokens)].tolist() == [-1.0 - t for t in tokens]


# --- groups


def test_a_completion_does_not_depend_on_its_batch(policy):
    problems = problems_of(Count(), 5)
    together = rolled(policy, problems, seed=3, first=40)
    split = rolled(policy, problems[:2], seed=3, first=40)
    split += rolled(policy, problems[2:], seed=3, first=40 + 2 * 4)
    assert [r.completion.tokens for r in split] == [r.completion.tokens for r in together]
    for one, other in zip(split, together):
        assert one.completion.logprobs == pytest.approx(other.completion.logprobs, abs=1e-5)
        assert (one.prompt, one.reward) == (other.prompt, other.reward)
    for changed in ({"seed": 4, "first": 40}, {"seed": 3, "first": 41}):
        others = rolled(policy, problems, **changed)
        assert [r.completion.tokens for r in others] != [r.completion.tokens for r in together]


def test_groups_stand_in_the_order_of_their_problems(policy):
    """Equal prompts, too, are groups of their own, with draws of their own."""
    one, other = problems_of(Count(), 2, seed=1)
    assert one.question != other.question
    rollouts = rolled(policy, [one, other, one], 3)
    assert [r.problem for r in rollouts] == [one] * 3 + [other] * 3 + [one] * 3
    texts = [r.completion.text for r in rollouts]
    assert texts[:3] != texts[6:] and len(set(texts)) > 5
    for rollout in rollouts:
        assert rollout.prompt == policy.encode(rollout.problem)


# --- judging


def punished(completion, problem):
    return 1.0 if "a" in completion else -1.0


def told(completion, problem, cut_off):
    return -2.0 if cut_off else 1.0


def of_file(reward):
    given = [(f"line {i}", {"prompt": "?" * (i + 1), "answer": "a"}) for i in range(6)]
    return Problems("a.jsonl", given, reward=reward)


@pytest.mark.parametrize("task", [Count(), Fewer(), of_file(f"{__name__}:punished")])
def test_what_was_cut_off_earns_no_more_than_the_worst_that_ended(policy, task):
    """Also where rewards are below zero; alone among its kind, it earns what its text does."""
    rollouts = rolled(policy, problems_of(task, 32), max_tokens=5)
    assert {r.truncated for r in rollouts} == {True, False}
    capped = 0
    for group in groups_of(rollouts, 4):
        ended = [r.reward for r in group if not r.truncated]
        for r in group:
            said = r.problem.reward(r.completion.text)
            assert r.reward == min([said, *ended] if r.truncated else [said])
            assert not r.truncated or (r.answer, r.form) == (0, 0)
            capped += r.reward < said
    assert capped


def test_what_was_cut_off_is_never_right(policy):
    """Neither for a verifier nor for a task whose reward is the answer's: the text may say it."""
    for task, text in ((of_file("exact"), "a"), (Add(1), worked("", "2"))):
        problem = task.problem(0) if isinstance(task, Problems) else Problem(task, (1, 1), "1+1?")
        ended = judged(problem, [0], Completion(1, [1], text, "stop", []))
        cut = judged(problem, [0], Completion(1, [1], text, "length", []))
        assert (ended.reward, ended.answer) == (1, 1)
        assert (cut.reward, cut.answer) == (0, 0)
        assert cut.parts == dict.fromkeys(ended.parts, 0)


def test_a_function_that_wants_to_know_is_told_of_the_cut(policy):
    rollouts = rolled(policy, problems_of(of_file(f"{__name__}:told"), 8), max_tokens=5)
    assert {(r.truncated, r.reward) for r in rollouts} == {(True, -2), (False, 1)}
    assert {r.parts[f"{__name__}:told"] for r in rollouts} == {-2, 1}
