"""The command, in a repository of one function."""

import json

import pytest

from tests.mutants import __main__ as mutants

TESTS = """
import subprocess, sys
def test_child():
    subprocess.check_call([sys.executable, "-c", "import code_of; assert code_of.A().two() == 2"])
def test_broken():
    import code_of
    assert code_of.A().two() > 2
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / "tests/mutants").mkdir(parents=True)
    (tmp_path / "code_of.py").write_text("class A:\n    def two(self):\n        return 1 + 1\n")
    (tmp_path / "tests/test_code.py").write_text(TESTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # to load them takes longest
    about = '[[mutant]]\nname="{}"\nfile="code_of.py"\nfunction="A.two"\nold="{}"\nnew="{}"\n'
    about += 'tests=["tests", "-k", "{}"]\n'
    written = tmp_path / "tests/mutants/mutants.toml"
    return lambda *bugs: written.write_text("".join(about.format(*x) for x in bugs))


def test_verdicts(repository, tmp_path, capsys):
    repository(
        ("seen", "1 + 1", "1 - 1", "child"), ("same", "1 + 1", "2 * 1", "child"),
        ("endless", "return", "while True: 1 +", "child"), ("unfair", "1 + 1", "1", "broken"),
    )  # fmt: skip
    command = ["--jobs", "2", "--out", str(tmp_path / "out.json")]
    assert mutants.main([*command, "--limit", "1", "endless"]) == 0
    assert mutants.main(command) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert {name: (x["verdict"], x["by"]) for name, x in found.items()} == {
        "seen": ("found", "tests/test_code.py::test_child"), "same": ("SURVIVED", ""),
        "endless": ("timed out", ""),
        "unfair": ("fails without it", "tests/test_code.py::test_broken"),
    }  # fmt: skip
    assert "found 2 of 4" in capsys.readouterr().out
    assert mutants.main(command) == 1  # from what was kept
    assert capsys.readouterr().out.startswith("found 2 of 4")


@pytest.mark.parametrize("old, times", [("1 + 2", 0), ("1", 2)])
def test_a_bug_that_does_not_fit_is_named(old, times, repository, capsys):
    repository(("stale", old, "3", ""))
    assert mutants.main([]) == 1
    expected = f"'stale' cannot be planted: A.two of code_of.py has '{old}' {times} times\n"
    assert capsys.readouterr().out == expected
