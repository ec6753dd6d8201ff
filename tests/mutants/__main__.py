"""Plants the bugs of mutants.toml, one at a time, and says which test of `make test` finds each.

    python -m tests.mutants --jobs 2 --out mutants.json cache resume

runs those whose name or file has one of these words; without words, all. A bug is planted in a copy
of the repository, which is first in PYTHONPATH, so processes that tests start see it, too.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.helpers import ROOT

PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "_build", "_made", "shared", "runs", "dist")
WHOLE = ("tests", "-n", "auto", "--maxprocesses", "8", "--dist", "loadgroup")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", re.MULTILINE)


def planted(bug: dict) -> str:
    """The text of the bug's file with the bug; ValueError if its piece is not there once."""
    text = (ROOT / bug["file"]).read_text()
    found, lines = [ast.parse(text)], text.splitlines(keepends=True)
    for name in bug["function"].split("."):
        kinds, inside = (ast.FunctionDef, ast.ClassDef), found and ast.walk(found[0])
        found = [x for x in inside if isinstance(x, kinds) and x.name == name]
    place = slice(found[0].lineno - 1, found[0].end_lineno) if found else slice(0)
    body = "".join(lines[place])
    if (times := body.count(bug["old"])) != 1:
        raise ValueError(f"{bug['function']} of {bug['file']} has {bug['old']!r} {times} times")
    lines[place] = body.replace(bug["old"], bug["new"])
    compile("".join(lines), bug["file"], "exec")
    return "".join(lines)


class Runner:
    """Bugs that are tried side by side, each in a copy of the repository."""

    def __init__(self, args: argparse.Namespace, bugs: list[dict], results: dict) -> None:
        self.args, self.todo, self.results = args, deque(bugs), results
        self.end, self.running = time.monotonic() + args.seconds, {}

    def test(self, tests: Sequence[str], folder: Path) -> tuple[str, str]:
        """Whether the tests "passed", "failed" or "timed out", and the test that failed."""
        paths = {"PYTHONPATH": str(folder / "tree"), "TMPDIR": str(folder)}
        with open(folder / "said", "w") as said:
            self.running[folder] = process = subprocess.Popen(
                (*PYTEST, "-m", "not (slow or wide)", *tests), stdout=said, stderr=said,
                cwd=folder / "tree", env=os.environ | paths | {"CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )  # fmt: skip
            try:
                left = min(self.args.limit, max(self.end - time.monotonic(), 0))
                verdict = "failed" if process.wait(left) else "passed"
            except subprocess.TimeoutExpired:
                verdict = "timed out"
            stop(self.running.pop(folder))
        failed = FAILED.search((folder / "said").read_text(errors="replace"))
        return verdict, failed[1] if failed else ""

    def one(self, bug: dict, folder: Path) -> tuple[str, str]:
        """What became of a bug, and in which test."""
        tests = WHOLE if self.args.whole else bug["tests"]
        if self.args.check:
            return self.test(tests, folder)
        (folder / "tree" / bug["file"]).write_text(planted(bug))
        verdict, by = self.test(tests, folder)
        shutil.copy2(ROOT / bug["file"], folder / "tree" / bug["file"])  # and its time, for .pyc
        if verdict == "failed":  # a test that fails without the bug, too, has not found it
            again, _ = self.test([by] if by else tests, folder)
            verdict = "found" if again == "passed" else "fails without it"
        return "SURVIVED" if verdict == "passed" else verdict, by

    def work(self, _) -> None:
        """Take bugs until none is left or the time is over."""
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT)
            while self.todo:
                with suppress(IndexError):
                    bug, began = self.todo.popleft(), time.monotonic()
                    verdict, by = self.one(bug, folder)
                    if time.monotonic() > self.end:
                        return
                    spent = round(time.monotonic() - began)
                    self.results[bug["name"]] = {"verdict": verdict, "by": by, "seconds": spent}
                    print(f"{verdict:16} {spent:4} s  {bug['name']}  {by}", flush=True)
                    if self.args.out:
                        (folder / "new").write_text(json.dumps(dict(self.results), indent=1))
                        shutil.move(folder / "new", self.args.out)


def stop(process: subprocess.Popen) -> None:
    """End a process and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(given: list[str] | None = None) -> int:
    """The command; 1 if a bug cannot be planted, or tests fail without one."""
    parser = argparse.ArgumentParser("python -m tests.mutants")
    parser.add_argument("words", nargs="*", help="of names and files; none: all bugs")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds for the tests of a bug")
    parser.add_argument("--seconds", type=float, default=1e6, help="for all bugs")
    parser.add_argument("--out", type=Path, help="JSON of verdicts; bugs in it are not tried again")
    parser.add_argument("--whole", action="store_true", help="all of `make test` for each bug")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    parser.add_argument("--check", action="store_true", help="run the tests without a bug")
    args = parser.parse_args(given)
    bugs = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text())["mutant"]
    bugs = [x for x in bugs if any(y in f"{x['name']} {x['file']}" for y in args.words or [""])]
    stale = []
    for bug in bugs:
        try:
            planted(bug)
        except (ValueError, OSError, SyntaxError) as error:
            stale.append(f"{bug['name']!r} cannot be planted: {error}")
    if args.list or stale:
        print(*stale or [f"{x['name']}: {x['function']} of {x['file']}" for x in bugs], sep="\n")
        return bool(stale)
    results = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    runner = Runner(args, [x for x in bugs if x["name"] not in results], results)
    pool = ThreadPoolExecutor(args.jobs)
    try:
        list(pool.map(runner.work, range(args.jobs)))
    finally:  # of an interrupt, too
        runner.end = 0
        for process in [*runner.running.values()]:
            stop(process)
        pool.shutdown()
        counts = Counter(results[x["name"]]["verdict"] for x in bugs if x["name"] in results)
        print(f"found {counts['found'] + counts['timed out']} of {len(bugs)}: {dict(counts)}")
    return bool(counts["fails without it"] or counts["failed"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
