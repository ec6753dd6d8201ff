"""Checkpoints of the Hugging Face hub: a name in, a folder out.

Only what a model here reads is downloaded: weights as safetensors, JSON, the chat template. Files
that can run code when they are loaded are left where they are. What was downloaded stays in the
hub's own cache, which transformers shares; without a network it is found there.
"""

import re
from pathlib import Path

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/model
ALLOWED = ("model*.safetensors", "*.json", "*.jinja")
IGNORED = ("*/*",)  # folders hold the same weights for other programs


class DownloadError(OSError):
    """A checkpoint can be had neither from the hub nor from its cache."""


def resolve(name: str) -> Path:
    """The folder of a checkpoint.

    Args:
        name: a folder, or the name of a model on the hub, such as Qwen/Qwen2.5-0.5B-Instruct, which
            is downloaded unless it is in the cache. A folder of that name comes first.

    Raises:
        FileNotFoundError: neither a folder nor a possible name.
        DownloadError: no network, no access or no such model, in one sentence.
    """
    if name and Path(name).is_dir():
        return Path(name)
    if not NAME.fullmatch(name):
        raise FileNotFoundError(
            f"there is no checkpoint folder {name!r}; names on the Hugging Face hub are owner/model"
        )
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise DownloadError(
            f"there is no checkpoint folder {name}, and to download it from the Hugging Face hub"
            " huggingface_hub must be installed: pip install huggingface_hub"
        ) from error
    try:
        found = snapshot_download(name, allow_patterns=[*ALLOWED], ignore_patterns=[*IGNORED])
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name} and log in with a"
            " token (hf auth login, or the variable HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"there is neither a checkpoint folder {name} nor such a model on the Hugging Face hub;"
            " a private one needs a token (hf auth login, or the variable HF_TOKEN)"
        ) from error
    except Exception as error:  # the client's own errors, and those of its HTTP library
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DownloadError(
            f"{name} could not be downloaded from the Hugging Face hub and is not complete in its"
            f" cache, {constants.HF_HUB_CACHE} (HF_HOME moves it); a folder that holds the"
            f" checkpoint works without a network: {reason}"
        ) from error
    return Path(found)
