"""The command: its options, what it refuses, what a run leaves, learning."""

import json
import re
from random import Random

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.models.tiny_grpo import TINY, evaluated, make_trainer, options
from transformer import grpo
from transformer.model.files import only_writer
from transformer.model.weights import load_model
from transformer.rl import curves
from transformer.rl.groups import groups_of
from transformer.rl.recipes import RECIPES, Settings, check_task, find_task, flag
from transformer.rl.run import Run, read_metrics

# --- options


def test_options_reach_the_settings():
    given = {
        "importance_cap": ("2.5", 2.5),
        "dynamic_sampling": (None, True),
        "scale": ("none", "none"),
        "eval_k": ("1 4", [1, 4]),
        "prompts": ("3", 3),
        "lr": ("1e-5", 1e-5),
        "task": ("countdown", "countdown"),
    }
    argv = " ".join(f"{flag(name)} {text or ''}" for name, (text, _) in given.items()).split()
    _, settings = grpo.parse(argv)
    assert settings == Settings(**{name: value for name, (_, value) in given.items()})
    assert grpo.parse(["--no-stop-on-collapse"])[1] == Settings(stop_on_collapse=False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_settings_that_options_change(recipe):
    _, settings = grpo.parse(["--recipe", recipe])
    assert settings == Settings(**RECIPES[recipe])
    _, changed = grpo.parse(["--recipe", recipe, "--lr", "1e-6"])
    assert changed == Settings(**{**RECIPES[recipe], "lr": 1e-6})
    find_task(settings.task)


# --- what is refused, before a step is taken


HERE, OWN = "tests.helpers.models.tiny_grpo", "tests.helpers.models.own_tasks"
REFUSED = {
    "--group 1": "--group must be at least 2, got 1",
    "--save-every 0": "--save-every must be at least 1, got 0",
    "--temperature 0": "--temperature must be positive, got 0.0: greedy rollouts would",
    "--temperature 1e39": "temperature must be 0 (greedy) or between 0.0001 and 1e+30, got 1e+39",
    "--replay 1.5": "--replay is a share of the problems, 0 to 1, got 1.5",
    "--average 1.5": "--average is a share of the steps, 0 to 1, got 1.5",
    "--lr 0": "--lr must be above 0, at most 1e+30, got 0.0",
    "--reward-seconds nan": "--reward-seconds must be above 0, at most 1e+30, got nan",
    "--clip-low 0": "clip_low must be above 0",
    "--reduce mean": "invalid choice: 'mean'",
    "--eval-k 1 3": "--eval-k must be between 1 and --eval-samples, 2, got 3",
    "--eval-k 0": "--eval-k must be between 1 and --eval-samples, 2, got 0",
    "--save-rollouts /dev/null": "--save-rollouts /dev/null must be a new file, none of the run's",
    "--dtype int8": "--dtype int8 is unknown",
    "--attention fa9": "fa9",
    "--prompts many": "invalid int value: 'many'",
    "--recipe none": "invalid choice: 'none'",
    "--nonsense": "unrecognized arguments: --nonsense",
    "--model /no/such": "/no/such",
    "--task chess": "no task is called 'chess'; there are sums, mix, ",
    "--task no.such:Thing": "there is no task no.such:Thing: No module named 'no'",
    f"--task {HERE}:Thing": f"there is no task {HERE}:Thing: ",
    "--task ..x:Thing": "there is no task ..x:Thing: ",
    f"--task {HERE}:Picky": f"there is no task {HERE}:Picky: ",
    "--task random:Random": "random:Random is no transformer.tasks.task.Task",
    f"--task {HERE}:Nameless": "has no name: give the class one, such as name = ",
    f"--task {HERE}:Raises": "task 'raises' raised KeyError('no such word'), for the",
    f"--task {HERE}:Nan": "task 'nan' returned nan (float), which is no finite number, for the",
    f"--task {HERE}:Nothing": "task 'nothing' returned None (NoneType), which is no finite number",
    f"--task {HERE}:Long": "tokens, which leaves no room for an answer in the model",
    f"--task {HERE}:Hungry": "the memory is full; a smaller --micro-batch needs less",
    f"--task {OWN}:Number": "answer() for 'twice 3?' must return a string, got 6; str()",
    f"--task {OWN}:Essay": "task 'essay': answer() for 'twice 3?' is 'mmm",
    f"--task {OWN}:Wrong": "does not accept its own demonstration '<think></think><answer>6",
    f"--task {OWN}:Formless": "form refuses it",
    f"--task {OWN}:Groupless": "task 'groupless': form '6' has no group (?P<answer>...)",
    f"--task {OWN}:Mute": "task 'mute': question() must return a string, got 3",
    f"--task {OWN}:Few": "no problem for evaluation: of 10000 that it drew, none is held out",
    "--reward number": "--reward needs --data; a task of your own has a method `reward`",
    "--eval-data x.jsonl": "--eval-data needs --data",
    "--data {problems} --task sums": "--data and the task sums are two kinds of problems",
    "--data {problems} --reward nosuch": "no reward is called 'nosuch'",
    "--data {problems} --eval-data nosuch.jsonl": "nosuch.jsonl: No such file or directory",
    "--exact --lora-rank 2": "--exact is not possible with --lora-rank",
    "--exact --attention sdpa": "attention 'sdpa' is not exact",
    "--group-layout tree": "invalid choice: 'tree'",
    "--group-layout shared --attention sdpa": "version 'sdpa'",
    "plot": "required: RUN",
    "plot /no/such": "/no/such holds no run of transformer.grpo",
}


@pytest.mark.parametrize("given", REFUSED)
def test_wrong_requests_are_one_sentence(grpo_command, tempted, tmp_path, given):
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"prompt": "1?", "answer": "1"}\n{"prompt": "2?", "answer": "2"}\n')
    arguments = given.format(problems=problems).split()
    if "plot" not in given:
        arguments += ["--out", tmp_path / "run"]
        if "--recipe" not in given:
            ours = options(tempted, steps=2)
            ours = [x for x in ours if "--data" not in given or not x.startswith("--task")]
            arguments = [*ours, *arguments]
    code, err = grpo_command(*arguments)
    *progress, sentence = err.strip().split("\n")
    assert code == 2
    assert sentence.startswith("error: ") and REFUSED[given] in sentence
    assert all("step" in line for line in progress)
    assert HERE in given or not (tmp_path / "run").exists()  # some tasks fail when first asked
    assert not (tmp_path / "run" / "final").exists()
    if (metrics := tmp_path / "run" / "metrics.jsonl").exists():
        assert '"step"' not in metrics.read_text()


def test_a_folder_that_is_no_run_is_left_alone(grpo_command, tempted, tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    code, err = grpo_command(*options(tempted), "--out", tmp_path)
    assert code == 2
    assert err == f"error: {tmp_path} is not empty and holds no run; use another --out\n"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    code, err = grpo_command(*options(tempted), "--out", tmp_path / "thesis.txt")
    assert (code, err) == (2, f"error: {tmp_path / 'thesis.txt'}: Not a directory\n")


def test_a_finished_run_says_so_and_is_left_alone(grpo_command, tempted, finished_run):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in finished_run.iterdir())
    arguments = [*options(tempted, steps=3, eval_every=2), "--out", finished_run]
    found = grpo_command(*arguments)
    assert found == (0, f"{finished_run} is finished: {finished_run / 'curve.png'}\n")
    code, err = grpo_command(*arguments, "--lr", "1")
    assert code == 2
    assert err == (
        f"error: {finished_run} holds a run with another --lr (0.003, now 1.0); repeat its command"
        " or use another --out\n"
    )
    assert sorted((path.name, path.stat().st_mtime_ns) for path in finished_run.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["cut", "noise", "empty", "log", "best", "optimizer", "pool", "mean"]
)
def test_a_damaged_state_is_one_sentence(grpo_command, tempted, tmp_path, damage):
    arguments = [*options(tempted, steps=4, eval_every=0, lr=1e-3), "--out", tmp_path / "run"]
    trainer = make_trainer(tempted, steps=4, eval_every=0, lr=1e-3)
    run = Run(tmp_path / "run", trainer.settings)
    trainer.learn(trainer.roll_out().rollouts)
    run.log("metrics.jsonl", {"step": 1})
    run.save({**trainer.state(), "best": 0.0, "extent": 0.0, "seconds": 0.0})
    state = tmp_path / "run" / "state.pt"
    content = state.read_bytes()
    if damage == "log":
        (tmp_path / "run" / "metrics.jsonl").write_text("")
    elif damage in ("best", "optimizer", "pool", "mean"):
        parts = torch.load(state)
        torch.save({name: parts[name] for name in parts if name != damage}, state)
        assert len(parts) > len(torch.load(state))
    else:
        kept = {"cut": content[: len(content) // 2], "noise": b"\0" * 1000, "empty": b""}
        state.write_bytes(kept[damage])
    code, err = grpo_command(*arguments)
    sentence = err.strip().split("\n")[-1]
    assert code == 2, err
    assert sentence.startswith("error: ") and "damaged; delete" in sentence
    if damage != "log":  # nothing else has been touched: a copy of the state may exist
        state.write_bytes(content)
        assert grpo_command(*arguments)[0] == 0
        assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


# --- what a run leaves


def test_the_record_of_a_run(finished_run, tempted):
    assert json.loads((finished_run / "config.json").read_text())["model"] == str(tempted)
    lines = read_metrics(finished_run)
    kinds = [line.get("step", f"evaluation {line.get('evaluation')}") for line in lines]
    assert kinds == ["evaluation 0", 1, 2, "evaluation 2", 3, "evaluation 3"]
    steps = [line for line in lines if "step" in line]
    for line in steps:
        assert line.keys() >= {"reward", "accuracy", "form", "length", "entropy", "skipped"}
        assert line.keys() >= {"clipped_low", "clipped_high", "gap_max", "tokens_per_second"}
        assert 0 <= line["gap_max"] < 1e-4
        assert line["drawn"] == TINY["prompts"] * TINY["group"]
        assert line["replayed"] == 0
    samples = [
        json.loads(line) for line in (finished_run / "samples.jsonl").read_text().splitlines()
    ]
    assert [sample["step"] for sample in samples] == [0] * 3 + [2] * 3 + [3] * 3
    assert all(sample["question"].startswith("?") for sample in samples)
    names = {path.name for path in finished_run.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "samples.jsonl", "curve.png", "best", "final"}


def test_all_rollouts_are_in_a_file(grpo_command, tempted, tmp_path):
    """Also those of groups that are passed over; only of them all rewards are equal."""
    path, size = tmp_path / "deep" / "rollouts.jsonl", TINY["group"]
    changes = {"task": f"{HERE}:Seldom", "save_rollouts": path, "scale": "rloo", "steps": 2}
    argv = [*options(tempted, **changes), "--dynamic-sampling", "--out", tmp_path / "run"]
    assert grpo_command(*argv)[0] == 0
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in read_metrics(tmp_path / "run") if "step" in line]
    assert [x["step"] for x in lines] == [s["step"] for s in steps for _ in range(int(s["drawn"]))]
    groups = groups_of(lines, size)
    for group in groups:
        rewards = [one["reward"] for one in group]
        for one in group:
            others = (sum(rewards) - one["reward"]) / (size - 1)
            assert one["advantage"] == pytest.approx(one["reward"] - others, rel=1e-5, abs=1e-9)
            assert one["problem"] == group[0]["problem"] and f"\n{one['problem']}<" in one["prompt"]
            assert one["tokens"] == len(one["completion"]) + (not one["truncated"])
            assert one["reward"] in (0, one["completion"].count("a")) or one["truncated"]
    for step in steps:
        found = [x for g in groups if len({x["reward"] for x in g}) > 1 for x in g]
        found = [x for x in found if x["step"] == step["step"]]
        assert len(found) == size * TINY["prompts"] < step["drawn"]
        for key, name in {"reward": "reward", "length": "tokens", "truncated": "truncated"}.items():
            assert step[key] == pytest.approx(sum(x[name] for x in found) / len(found), rel=1e-5)
    assert grpo_command(*argv[:-1], tmp_path / "other")[0] == 2 and path.read_text() == text


@pytest.fixture
def drawn(monkeypatch) -> list[int]:
    """How many lines of metrics there were whenever the curve was to be drawn."""
    counts: list[int] = []

    def draw(folders, path):
        [folder] = folders
        assert path == folder / "curve.png"
        counts.append(len(read_metrics(folder)))

    monkeypatch.setattr(curves, "draw", draw)
    return counts


@pytest.mark.parametrize("average", [0.0, 1.0])
def test_the_best_checkpoint_is_kept(tempted, tmp_path, monkeypatch, drawn, average):
    """Accuracy rises, falls by less than a collapse, and rises less. What is kept is the policy, or
    the mean of all steps until then.
    """
    scores = iter([0.2, 0.3, 0.6, 0.5, 0.55])
    trainer = make_trainer(tempted, steps=4, eval_every=1, average=average)
    weights = []

    def evaluate():
        weights.append(trainer.policy.model.lm_head.weight.detach().clone())
        return evaluated(next(scores)), []

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    grpo.train(trainer, Run(tmp_path / "run", trainer.settings))
    for name, step in {"best": 2, "final": 4}.items():
        found = load_model(tmp_path / "run" / name).lm_head.weight
        expected = weights[step]
        if average:
            expected = torch.stack(weights[1 : step + 1]).mean(0)
        assert torch.equal(found, expected.bfloat16()), name
    assert drawn == [1, 3, 5, 7, 9], "the curve is drawn again at every evaluation"


@pytest.mark.parametrize(
    "rewards, extent, options",
    [
        ([0.6, 0.39, 0.3], 1, {}),
        ([0.6, 0.39, 0.3], 1, {"stop_on_collapse": False}),
        ([-60, -81, -90], 100, {}),
        ([-60, -79, -79], 100, {}),
        ([5, 4.9, 4.8], 0.0, {}),
    ],
)
def test_a_collapse_stops_the_run(tempted, tmp_path, monkeypatch, drawn, rewards, extent, options):
    """It is measured in the rewards of the task, by the largest range that there was."""
    trainer = make_trainer(tempted, steps=2, eval_every=1, **options)
    scores = zip(rewards, (0, extent, 0))
    monkeypatch.setattr(trainer, "evaluate", lambda: (evaluated(*next(scores)), []))
    run = Run(tmp_path / "run", trainer.settings)
    if options or rewards[1] == -79:
        grpo.train(trainer, run)
        assert run.finished
    else:
        sentence = f"fell from {rewards[0]} to {rewards[1]}: the policy is coll.*--lr"
        with pytest.raises(ValueError, match=sentence):
            grpo.train(trainer, run)
        assert trainer.step == 1
        assert not (tmp_path / "run" / "final").exists()
    assert (tmp_path / "run" / "best" / "model.safetensors").exists()


def test_the_best_is_that_of_the_tasks_own_reward(grpo_command, tempted, tmp_path):
    """Whose answers are never right: what was found by their share was always the latest."""
    changes = {"task": "tests.helpers.models.tiny_grpo:Fewer", "steps": 2, "eval_every": 1}
    code, err = grpo_command(*options(tempted, **changes), "--out", tmp_path / "run")
    assert code == 0, err
    found = [x for x in read_metrics(tmp_path / "run") if "evaluation" in x]
    x = f"{found[0]['reward']:.3g}"
    assert {one["sampled"] for one in found} == {0.0}
    assert all(one["reward"] < 0 < one["reward_range"] for one in found)
    assert f"held-out: greedy 0.0%  sampled 0.0%  pass@2 0.0%  form 0.0%  reward {x}" in err
    weights = {
        name: load_model(tmp_path / "run" / name).lm_head.weight for name in ("best", "final")
    }
    best = max(found, key=lambda one: (one["reward"], one["evaluation"]))
    assert torch.equal(*weights.values()) == (best is found[-1])


def test_the_documented_tasks_are_accepted():
    page = (ROOT / "docs/learn/grpo.md").read_text()
    names: dict = {}
    for lines in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(lines, names)
    for name in ("Double", "BoxedDouble"):
        check_task(names[name]())
    task = names["BoxedDouble"]()  # with a form of its own
    assert task.question(Random(0), 3).endswith(r"\boxed{answer}.")
    assert task.marks(r"So it is \boxed{6}.", 3) == (1, 1)
    assert task.marks(r"So it is \boxed{7}.", 3) == (0, 1)
    assert task.marks("So it is 6.", 3) == (0, 0)


def test_two_processes_do_not_write_one_run(grpo_command, tempted, tmp_path):
    arguments = [*options(tempted, steps=2), "--out", tmp_path / "run"]
    with only_writer(tmp_path / "run"):
        code, err = grpo_command(*arguments)
        assert (code, [*(tmp_path / "run").iterdir()]) == (2, [])
    assert f"another process is writing to {tmp_path / 'run'}; wait for it or use" in err
    assert not (tmp_path / "run").exists()  # who made it and wrote nothing removes it
    assert grpo_command(*arguments)[0] == 0


# --- learning


@pytest.mark.slow
def test_the_sloppy_model_learns_to_add(grpo_command, tmp_path):
    """By 16 steps of 48 completions."""
    changes = {"seed": 2, "prompts": 6, "steps": 16, "lr": 5e-4, "max_tokens": 64}
    changes |= {"eval_every": 16, "eval_problems": 128, "eval_samples": 2}
    arguments = [f"{flag(name)}={value}" for name, value in changes.items()]
    arguments += ["--recipe=sums", "--device=cpu", "--no-stop-on-collapse"]
    code, err = grpo_command(*arguments, "--out", tmp_path)
    assert code == 0, err
    before, after = (line["sampled"] for line in read_metrics(tmp_path) if "evaluation" in line)
    assert after > before + 0.3  # by this seed 0.54
