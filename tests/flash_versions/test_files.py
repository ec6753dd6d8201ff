"""Files that are written whole or not at all, and what is no file."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from flash_versions.dispatch import verified
from flash_versions.files import write
from transformer.model.files import write_text


@pytest.fixture(params=[write, write_text])
def writing(request):
    """What writes a text by a temporary file."""
    return request.param


def test_a_file_is_replaced_or_left_as_it_is(writing, tmp_path):
    path = tmp_path / "file"
    for text in ("first", "second"):
        writing(path, text)
        assert path.read_text() == text
    path.chmod(0o600)
    writing(path, text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # nobody else may read it now, either
    with pytest.raises(UnicodeEncodeError):
        writing(path, "half \ud800")
    assert path.read_text() == "second" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_leads_to_is_replaced(there, writing, tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(Path("folder") / "target")
    writing(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert os.listdir(tmp_path / "folder") == ["target"]


def test_a_pipe_is_written_to(writing, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    writing(pipe, "text")
    reader.join(10)
    assert found == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_device_is_written_to(writing, full_device):
    with pytest.raises(OSError, match="No space left"):
        writing(full_device, "text")
    assert stat.S_ISCHR(full_device.stat().st_mode)
    assert os.listdir(full_device.parent) == [full_device.name]


def test_a_folder_and_a_link_to_itself_are_left_as_they_are(writing, tmp_path):
    with pytest.raises(IsADirectoryError):
        writing(tmp_path, "text")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="Too many levels of symbolic links: '.*loop'"):
        writing(loop, "text")
    assert os.listdir(tmp_path) == ["loop"] and loop.is_symlink()


def test_what_was_verified_is_written_where_a_link_leads(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verified, "conditions", dict)
    verified.path().parent.mkdir()
    verified.path().symlink_to(tmp_path / "elsewhere.json")
    verified.record("kernel")
    assert verified.path().is_symlink()
    assert json.loads((tmp_path / "elsewhere.json").read_text()) == [{"kernel": "kernel"}]
