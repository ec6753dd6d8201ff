"""Checkpoints in Hugging Face's layout: config.json and safetensors, nothing that can run code.

A checkpoint is found by name: a shipped one, a folder, or one of the Hugging Face hub. Only what a
model here reads is downloaded (weights, JSON, the chat template), into the hub's own cache, which
transformers shares; without a network it is found there.

A checkpoint is checked against its config.json by the files' headers alone, before a weight is
read. The model is built without memory, and on a CPU the weights then stay mapped from the file
where they need no conversion: loading takes no second copy.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from transformer.model import exact
from transformer.model.decoder import Config, Transformer
from transformer.model.families.family import find_family
from transformer.model.families.layout import pack, unpack
from transformer.model.families.mxfp4 import with_dequantised
from transformer.model.files import read_json, replacing, writing

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/model
RUNS = "runs"  # where the commands write unless they are told otherwise: never looked up on the hub
# Folders that a recipe or the documentation begins with -> the command that makes them.
MADE_BY = {
    "runs/countdown-taught": "transformer.train --tasks countdown --patience 0.75 --steps 6000"
    " --batch-tokens 65536 --lr 3e-3 --out runs/countdown-taught",
    **{
        f"runs/{recipe}/final": f"transformer.grpo --recipe {recipe}"
        for recipe in ("sums", "countdown", "practice")
    },
}
DOWNLOADED = ("model*.safetensors", "*.json", "*.jinja")
LEFT = ("*/*",)  # folders hold the same weights for other programs

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TEXT_FILES = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")
ADAPTER = "adapter_config.json"
EMBEDDING = "model.embed_tokens.weight"

# Names of floating-point dtypes in safetensors headers. Others are quantized.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Constants that transformers stored before version 4.32; the config determines them.
OBSOLETE = "rotary_emb.inv_freq"


def find_checkpoint(model: str) -> Path:
    """The folder of a checkpoint.

    Args:
        model: the name of a shipped checkpoint, a folder in Hugging Face's layout, or owner/model
            on the Hugging Face hub, from where it is downloaded unless it was before. A name that
            begins with runs/ is always a folder.

    Raises:
        OSError: there is none, or it cannot be downloaded.
        ValueError: the folder is that of a run, which holds checkpoints.
    """
    shipped = {path.parent.name: path.parent for path in CHECKPOINTS.glob("*/config.json")}
    if model in shipped:
        return shipped[model]
    if model and Path(model).is_dir():
        _refuse_run(Path(model))
        return Path(model)
    if Path(model).parts[:1] == (RUNS,):
        run = Path(*Path(model).parts[:2])
        either = f"transformer.grpo --out {run} or python -m transformer.train --out {run}"
        makes = MADE_BY.get(Path(model).as_posix(), either)
        raise FileNotFoundError(
            f"there is no checkpoint folder {model}; python -m {makes} makes it"
        )
    if HUB_NAME.fullmatch(model):
        return _download(model)
    names = ", ".join(sorted(shipped)) or "none"
    raise FileNotFoundError(
        f"there is no checkpoint folder {model!r}; shipped by name: {names}; names on the Hugging"
        " Face hub are owner/model"
    )


def _refuse_run(folder: Path) -> None:
    """Point at the checkpoints of a run of transformer.grpo."""
    if not (folder / "metrics.jsonl").exists():
        return
    made = [x for name in ("final", "best") if (x := folder / name).is_dir()]
    where = f"its checkpoint is {made[0]}" if made else "it has no checkpoint yet"
    raise ValueError(f"{folder} is the folder of a run of transformer.grpo; {where}")


def _download(name: str) -> Path:
    """The folder of a checkpoint in the hub's cache; OSError: no network, access or model."""
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise OSError(
            f"there is no checkpoint folder {name}, and to download it from the Hugging Face hub"
            " huggingface_hub must be installed: pip install huggingface_hub"
        ) from error
    try:
        found = snapshot_download(name, allow_patterns=[*DOWNLOADED], ignore_patterns=[*LEFT])
    except errors.GatedRepoError as error:
        raise OSError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name} and log in with a"
            " token (hf auth login, or the variable HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise OSError(
            f"there is neither a checkpoint folder {name} nor such a model on the Hugging Face hub;"
            " a private one needs a token (hf auth login, or the variable HF_TOKEN)"
        ) from error
    except Exception as error:  # the client's own errors, and those of its HTTP library
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(
            f"{name} could not be downloaded from the Hugging Face hub and is not complete in its"
            f" cache, {constants.HF_HUB_CACHE} (HF_HOME moves it); a folder that holds the"
            f" checkpoint works without a network: {reason}"
        ) from error
    return Path(found)


def load_config(folder: str | Path) -> Config:
    """Read a checkpoint's config.json.

    Raises:
        OSError, ValueError: it is missing, or describes a model that is not supported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; a checkpoint is one, with a config.json")
    _refuse_adapter(folder)
    data = read_json(path := folder / CONFIG)
    try:
        return Config.from_hf(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _refuse_adapter(folder: Path) -> None:
    """Say that a folder holds an adapter of PEFT, if it holds no model beside it."""
    if not (folder / ADAPTER).exists() or any((folder / x).exists() for x in (WEIGHTS, INDEX)):
        return
    base = read_json(folder / ADAPTER).get("base_model_name_or_path") or "a model"
    raise ValueError(
        f"{folder} holds an adapter of {base}, which is no model by itself; merge the two with PEFT"
        " (merge_and_unload) and save the result, which loads here"
    )


def load_model(
    folder: str | Path,
    attention: Callable[..., Tensor] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    kernels: str = "auto",
) -> Transformer:
    """Load a checkpoint.

    Args:
        folder: config.json beside model.safetensors, or beside an index and its shards.
        attention: see `Transformer`.
        device: where the weights go.
        dtype: what they are converted to; None: the dtype in which the embedding is stored.
        kernels: see `Transformer`.

    Raises:
        OSError, ValueError: it is no such checkpoint, a file is missing or damaged, or the
            weights are not exactly those that config.json asks for.
    """
    folder = Path(folder)
    config, family = load_config(folder), find_family(read_json(folder / CONFIG))
    with torch.device("meta"):
        model = Transformer(config, attention, kernels)
    files = {name: file for file in _open_all(folder) for name in file.keys()}  # noqa: SIM118
    files = with_dequantised(files, device)
    weights = model.state_dict()
    layout = family.layout({name: list(tensor.shape) for name, tensor in weights.items()})
    _check_fit(folder, {name: stored.shape for name, stored in layout.items()}, files)
    if dtype is None:
        dtype = DTYPES[files[EMBEDDING].get_slice(EMBEDDING).get_dtype()]
    for name, stored in layout.items():
        unpack(weights, files[name].get_tensor(name).to(device, dtype), stored.pieces)
    model.load_state_dict(weights, assign=True)
    if kernels == "exact" and torch.device(device).type == "cpu":
        for x in model.modules():
            if isinstance(x, torch.nn.Linear | torch.nn.Embedding):  # which may be the head
                exact.check_products(*reversed(x.weight.shape))
    return model


def save_model(
    model: Transformer,
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    config: dict[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors, which `load_model` and transformers both read.

    Existing files are only replaced once both new ones are complete.

    Args:
        model: what to write.
        folder: made if it is not there.
        dtype: of the weights in the file.
        config: the content of config.json, that of the checkpoint that was trained on; None: see
            `Config.to_hf`.

    Raises:
        ValueError: the model needs a config, or a weight is not finite.
    """
    folder, config = Path(folder), model.config.to_hf() if config is None else config
    # Its weights may have been quantized, which these are not.
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    parameters = model.state_dict()
    layout = find_family(config).layout({n: list(x.shape) for n, x in parameters.items()})
    weights = {
        name: pack(parameters, stored).to("cpu", dtype).contiguous()
        for name, stored in layout.items()
    }
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(
                f"{name} has values that are NaN, or infinite in {dtype}, so nothing is saved in"
                f" {folder}; a smaller --lr helps"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "config.json") as json_file, replacing(folder / WEIGHTS) as file:
        json_file.write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, file, metadata={"format": "pt"})
        file.chmod(json_file.stat().st_mode)  # safetensors writes it for its owner alone


def save_trained(
    model: Transformer, source: Path, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a trained model with the config.json and the tokenizer's files of `source`, the
    checkpoint that it was trained on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in text_files(source):
        with writing(folder / path.name):
            # A copy would name its source if the disk is full.
            (folder / path.name).write_bytes(path.read_bytes())
    save_model(model, folder, dtype, read_json(source / CONFIG))


def text_files(folder: Path) -> list[Path]:
    """The files of a checkpoint by which it reads and writes text, those that are there."""
    others = (CONFIG, INDEX, ADAPTER)
    return [x for name in TEXT_FILES for x in folder.glob(name) if x.name not in others]


def eos_token_ids(folder: str | Path, own: int | None = None) -> tuple[int, ...]:
    """Every token that ends an answer, by any of a checkpoint's files; () if none names any.

    Args:
        folder: of the checkpoint: the ids of its generation_config.json come first, then those of
            its config.json.
        own: what the tokenizer calls its eos_token, which comes last.

    Raises:
        ValueError: one of these files is damaged.
    """
    found: list[int] = []
    for path in (Path(folder) / "generation_config.json", Path(folder) / "config.json"):
        ids = read_json(path, missing_ok=True).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(token) is int for token in ids):  # a bool is an int to isinstance
            raise ValueError(
                f"{path}: eos_token_id must be an integer or a list of integers, not {ids}"
            )
        found += ids
    return tuple(dict.fromkeys([*found, *([] if own is None else [own])]))


def _open_all(folder: Path) -> list[safe_open]:
    """Open the checkpoint's safetensors files; this reads and checks their headers."""
    opened = []
    for path in _weight_files(folder):
        if path.is_dir():
            raise ValueError(f"{path} is a folder; it should be a safetensors file")
        try:
            path.open("rb").close()  # safetensors calls one that may not be read a missing one
            opened.append(safe_open(path, framework="pt"))
        except FileNotFoundError as error:
            raise ValueError(f"{path}, named by {INDEX}, is missing") from error
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or no safetensors file ({error}); download it again"
            ) from error
    return opened


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map from weights to files")
        for shard in map(Path, shards.values()):  # by its name: in the hub's cache, files are links
            if shard.is_absolute() or ".." in shard.parts:
                raise ValueError(
                    f"{folder / INDEX} names '{shard}', which is outside the checkpoint's folder;"
                    " a shard must be inside it"
                )
        return [folder / shard for shard in sorted(set(shards.values()))]
    if pickles := [*folder.glob("pytorch_model*.bin"), *folder.glob("*.pth")]:
        raise ValueError(
            f"{folder} has its weights in {pickles[0].name}, a pickle, which can run any code when"
            f" loaded: convert it to {WEIGHTS}"
        )
    raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}")


def _check_fit(folder: Path, shapes: dict[str, list[int]], files: dict[str, safe_open]) -> None:
    """Refuse stored weights that are not exactly those of the model (name -> shape)."""
    missing = shapes.keys() - files.keys()
    unexpected = {
        name
        for name in files.keys() - shapes.keys()
        if not name.endswith(OBSOLETE) and not _is_tied_head(name, files)
    }
    unusable = set()
    for name in shapes.keys() & files.keys():
        stored = files[name].get_slice(name)
        if stored.get_shape() != shapes[name]:
            unusable.add(f"{name} is {stored.get_shape()} instead of {shapes[name]}")
        elif stored.get_dtype() not in DTYPES:
            unusable.add(f"{name} is {stored.get_dtype()} instead of one of {', '.join(DTYPES)}")
    kinds = {"missing": missing, "unexpected": unexpected, "unusable": unusable}
    if problems := [_count(kind, names) for kind, names in kinds.items() if names]:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {'; '.join(problems)}"
        )


def _is_tied_head(name: str, files: dict[str, safe_open]) -> bool:
    """Whether this is the head of a tied checkpoint that stores its embedding a second time."""
    return (
        name == "lm_head.weight"
        and EMBEDDING in files
        and torch.equal(files[name].get_tensor(name), files[EMBEDDING].get_tensor(EMBEDDING))
    )


def _count(kind: str, names: set[str]) -> str:
    """Such as "2 missing (a, b)"."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} {kind} ({', '.join(sorted(names)[:3])}{more})"
