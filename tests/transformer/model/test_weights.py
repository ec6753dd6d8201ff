"""Checkpoints: what is read, what is written, and what is said about a damaged one.

Those that transformers makes are in test_families.py.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.family_checkpoints import attention
from tests.transformer.model import test_model
from transformer.model import weights
from transformer.model.weights import eos_token_ids, load_model, save_model

# --- saving


def make_model(**changes):
    config = replace(test_model.CONFIG, vocab_size=512, hidden_size=64, **changes)
    return test_model.make_model(config, attention, torch.float32)


def test_a_loaded_model_can_be_changed_and_saved_where_it_came_from(tmp_path):
    """Its weights are mapped from the file that is replaced."""
    save_model(make_model(), tmp_path, dtype=torch.float32)
    model = load_model(tmp_path, attention)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(model, tmp_path, dtype=torch.float32)
    reloaded = load_model(tmp_path, attention).state_dict()
    assert all(torch.equal(reloaded[name], tensor) for name, tensor in expected.items())


def test_a_failed_save_changes_nothing(tmp_path, monkeypatch):
    save_model(make_model(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half_written(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(weights, "save_file", half_written)
    with pytest.raises(OSError, match="no space left"):
        save_model(make_model(num_layers=1), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[3] = value
    with pytest.raises(ValueError, match="model.norm.weight has values that are NaN, or infin"):
        save_model(model, tmp_path / "out", torch.float16)
    assert not (tmp_path / "out").exists()


def test_a_trained_model_gets_the_files_of_its_checkpoint(tmp_path):
    """Also one that is no text; not the index of weights that lay apart, nor an adapter's config,
    whose weights transformers would look for. Others can read all files, and we can replace them.
    """
    save_model(make_model(), tmp_path / "source")
    files = {"tokenizer.model": b"\xff\x00", "added_tokens.json": b"{}"}
    others = (weights.INDEX, weights.ADAPTER, "notes.txt")
    for name, content in {**files, **dict.fromkeys(others, b"{}")}.items():
        (tmp_path / "source" / name).write_bytes(content)
        (tmp_path / "source" / name).chmod(0o444)
    (tmp_path / "new").touch()
    weights.save_trained(make_model(), tmp_path / "source", tmp_path / "out")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found.keys() == files.keys() | {"config.json", weights.WEIGHTS}
    assert files.items() <= found.items()


# --- damaged and foreign checkpoints


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint, to be damaged: two shards and their index."""
    save_model(make_model(), tmp_path, dtype=torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for shard, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, tmp_path / shard)
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def _edit_json(name, **changes):
    def edit(folder):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**data, **changes}))

    return edit


def _write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def _truncate(folder):
    content = (folder / "two.safetensors").read_bytes()
    (folder / "two.safetensors").write_bytes(content[:-100])


def _link_to_itself(folder):  # as one that may not be read: safetensors calls either missing
    (folder / "two.safetensors").unlink()
    (folder / "two.safetensors").symlink_to("two.safetensors")


def _edit_tensors(changes):
    """Others in the place of some; None removes one."""

    def edit(folder):
        path = folder / "two.safetensors"
        tensors = {**load_file(path), **changes}
        save_file({name: x for name, x in tensors.items() if x is not None}, path)

    return edit


def _replace_weights(name):
    def edit(folder):
        for path in (*folder.glob("*.safetensors"), folder / weights.INDEX):
            path.unlink()
        (folder / name).write_bytes(b"")

    return edit


def _leave_an_adapter(folder):
    _replace_weights("adapter_model.safetensors")(folder)
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/model"}')


NORM = "model.norm.weight"

DAMAGES = {
    "no folder": (shutil.rmtree, "is not a folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no file .*config.json"),
    "config no json": (_write("config.json", b"{'a': 1}"), "config.json is not valid JSON"),
    "an adapter": (_leave_an_adapter, "holds an adapter of owner/model, which is no model by its"),
    "architecture": (
        _edit_json("config.json", architectures=["GPT2LMHeadModel"]),
        "config.json: architecture GPT2LMHeadModel is not supported; known are LlamaForCausalLM",
    ),
    "truncated": (_truncate, "two.safetensors is truncated or no safetensors file"),
    "shard missing": (
        lambda folder: (folder / "two.safetensors").unlink(),
        "two.safetensors, named by model.safetensors.index.json, is missing",
    ),
    "shard that cannot be opened": (_link_to_itself, "Too many levels of symbolic links"),
    "shard outside": (
        _edit_json(weights.INDEX, weight_map={NORM: "../outside.safetensors"}),
        f"{weights.INDEX} names '../outside.safetensors', which is outside the checkpoint's folder",
    ),
    "nothing": (_replace_weights("README.md"), "has neither model.safetensors nor"),
    "pickle": (_replace_weights("pytorch_model.bin"), "pytorch_model.bin, a pickle, which can run"),
    "missing": (_edit_tensors({NORM: None}), rf"1 missing \({NORM}\)"),
    "unexpected": (
        _edit_tensors({f"extra.{i}": torch.ones(1) for i in range(5)}),
        r"5 unexpected \(extra.0, extra.1, extra.2, ...\)",
    ),
    "another head": (
        _edit_tensors({"lm_head.weight": torch.ones(512, 64)}),
        r"1 unexpected \(lm_head.weight\)",
    ),
    "shape": (
        _edit_tensors({NORM: torch.ones(63)}),
        rf"1 unusable \({NORM} is \[63\] instead of \[64\]\)",
    ),
}


@pytest.mark.parametrize("damage, sentence", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(folder, damage, sentence):
    load_model(folder, attention)
    damage(folder)
    with pytest.raises((ValueError, OSError), match=sentence) as refused:
        load_model(folder, attention)
    assert "\n" not in str(refused.value)


def test_harmless_extras_are_accepted(folder):
    """A tied head that is stored again, and the rotary frequencies of old checkpoints."""
    expected = load_model(folder, attention).state_dict()
    embedding = expected["model.embed_tokens.weight"]
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extras = {"lm_head.weight": embedding.clone(), frequencies: torch.ones(16)}
    _edit_tensors(extras)(folder)
    loaded = load_model(folder, attention).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "generation, config, own, expected",
    [
        ({"eos_token_id": [3, 7]}, {"eos_token_id": 5}, None, (3, 7, 5)),
        ({"eos_token_id": 0}, {"eos_token_id": [5, 0]}, None, (0, 5)),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 1}, 9, (7, 9, 1)),
        (None, {"eos_token_id": None}, 9, (9,)),
        (None, None, None, ()),
    ],
)
def test_eos_token_ids(tmp_path, generation, config, own, expected):
    for name, data in (("generation_config.json", generation), ("config.json", config)):
        if data is not None:
            (tmp_path / name).write_text(json.dumps(data))
    assert eos_token_ids(tmp_path, own) == expected


@pytest.mark.parametrize("given", ["</s>", True, [2, False]], ids=str)
def test_eos_token_ids_must_be_integers(tmp_path, given):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(ValueError, match="eos_token_id must be an integer or a list of int"):
        eos_token_ids(tmp_path)
