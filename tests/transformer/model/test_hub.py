"""Names of the hub: what is downloaded, what is said when it cannot be. No test needs a network."""

from pathlib import Path

import pytest

from transformer.model.weights import find_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
NAME = "somebody/some-model-0.5B"

# File of a repository -> whether it is needed.
REPOSITORY = {
    "config.json": True,
    "tokenizer.json": True,
    "chat_template.jinja": True,
    "model.safetensors": True,
    "model.safetensors.index.json": True,
    "model-00001-of-00002.safetensors": True,
    "consolidated.safetensors": False,  # Mistral's: the same weights once more
    "pytorch_model.bin": False,
    "modeling_own.py": False,
    "original/params.json": False,
    "onnx/model.safetensors": False,
}


@pytest.fixture
def download(monkeypatch):
    """Let the hub's client do something else; returns the list of its calls."""

    def replace(result):
        calls = []

        def snapshot_download(*args, **kwargs):
            calls.append((args, kwargs))
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return replace


def test_a_folder_is_itself_and_asks_nobody(tmp_path, monkeypatch, download):
    calls = download("elsewhere")
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(NAME) == Path(NAME)
    assert find_checkpoint(str(tmp_path)) == tmp_path
    assert calls == []


def test_a_name_is_downloaded(tmp_path, download):
    calls = download(str(tmp_path))
    assert find_checkpoint(NAME) == tmp_path
    [(names, options)] = calls
    assert names == (NAME,)
    chosen = huggingface_hub.utils.filter_repo_objects(list(REPOSITORY), **options)
    assert set(chosen) == {file for file, needed in REPOSITORY.items() if needed}


@pytest.mark.parametrize("name", ["", "chatt", "./a/b", "/a/b", "a/b/c", "a b/c", "../b", "a/"])
def test_what_is_no_name_is_not_asked_for(download, name):
    calls = download("elsewhere")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint folder .* are owner/model"):
        find_checkpoint(name)
    assert calls == []


def test_the_folder_of_a_run_points_at_its_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="run of transformer.grpo; it has no checkpoint yet$"):
        find_checkpoint(str(tmp_path))
    for name in ("best", "final"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError) as refused:
            find_checkpoint(str(tmp_path))
        assert str(refused.value).endswith(f"; its checkpoint is {tmp_path / name}")
    assert find_checkpoint(str(tmp_path / "final")) == tmp_path / "final"


@pytest.mark.parametrize(
    "kind, sentence",
    [
        ("GatedRepoError", f"{NAME} is gated: accept its terms at https://huggingface.co/{NAME}"),
        ("RepositoryNotFoundError", f"neither a checkpoint folder {NAME} nor such a model on the"),
    ],
)
def test_errors_of_the_hub_say_what_helps(download, kind, sentence):
    kind = getattr(huggingface_hub.errors, kind)
    download(kind.__new__(kind, "401 Client Error"))  # whatever HTTP library the client uses
    with pytest.raises(OSError, match=sentence) as refused:
        find_checkpoint(NAME)
    assert "\n" not in str(refused.value)


def test_offline_the_cache_answers(tmp_path, monkeypatch):
    """The layout of the hub's cache is documented, and other programs fill it as well."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=f"^{NAME} could not be downloaded.*{tmp_path}"):
        find_checkpoint(NAME)
    cached = tmp_path / f"models--{NAME.replace('/', '--')}"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    assert find_checkpoint(NAME) == snapshot
