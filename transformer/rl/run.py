"""A GRPO run on disk: its settings, what was measured, samples, and the state to go on from.

    RUN/config.json      the settings
    RUN/metrics.jsonl    a line for each step, and one for each evaluation
    RUN/samples.jsonl    a few completions of each evaluation, with their rewards
    RUN/curve.png        redrawn at every evaluation
    RUN/state.pt         what the next step depends on, while the run is unfinished
    RUN/best/            the checkpoint with the best held-out reward, ready for `generate`
    RUN/final/           that of the last step, or the mean of the last
    --save-rollouts      a line for each completion of training, in a file anywhere

All but these three logs are written under another name and renamed. A log may be longer than the
state knows of when the process is killed: it is cut to the length that the state names.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from transformer.model.files import parse_json, read_json, write_text, writing
from transformer.rl.recipes import Settings, flag
from transformer.training.parallel import (
    ALONE,
    World,
    read_state,
    refuse_another,
    undamaged,
    write_state,
)

STATE = "state.pt"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
ROLLOUTS = "rollouts"  # a name among the logs, not that of the file
CONFIG = "config.json"
FINAL = "final"
BEST = "best"
OWN = (CONFIG, METRICS, SAMPLES, STATE, FINAL, BEST, "curve.png")


class Run:
    """The folder of a run.

    Args:
        folder: made if it is not there.
        settings: of the run; an unfinished one in the folder must have the same.
        world: whose first rank writes; all of them read.

    Raises:
        ValueError: the folder holds something else, or a run with other settings.
    """

    def __init__(self, folder: Path, settings: Settings, world: World = ALONE) -> None:
        self.folder, self.settings, self.world = folder, settings, world
        self._state = folder / STATE
        self._logs = {name: folder / name for name in (METRICS, SAMPLES)}
        if settings.save_rollouts is not None:
            self._logs[ROLLOUTS] = Path(settings.save_rollouts)
        self._sizes = dict.fromkeys(self._logs, 0)
        if not world.main:
            return
        config = folder / CONFIG
        if config.exists():
            self._refuse_another(read_json(config))
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no run; use another --out")
        else:
            taken = [folder.resolve() / name for name in OWN]
            rollouts = self._logs.get(ROLLOUTS)
            if rollouts is not None and (rollouts.exists() or rollouts.resolve() in taken):
                raise ValueError(
                    f"--save-rollouts {rollouts} must be a new file, none of the run's"
                )
            folder.mkdir(parents=True, exist_ok=True)
            write_text(config, json.dumps(asdict(settings), indent=2) + "\n")
            if rollouts is not None:
                rollouts.parent.mkdir(parents=True, exist_ok=True)
                rollouts.touch()

    @property
    def finished(self) -> bool:
        """Whether the last step was taken and its checkpoint written."""
        return (self.folder / FINAL / "config.json").exists() and not self._state.exists()

    def _refuse_another(self, theirs: Mapping[str, Any]) -> None:
        names = [one.name for one in fields(Settings) if one.compare]
        ours = {flag(name): getattr(self.settings, name) for name in names}
        theirs = {**asdict(Settings()), **theirs}  # some settings may be newer than it
        refuse_another(f"{self.folder} holds a run", ours, {flag(x): y for x, y in theirs.items()})

    def log(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append lines to METRICS, SAMPLES or ROLLOUTS."""
        if not self.world.main:
            return
        lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records).encode()
        path = self._logs[name]
        with writing(path), path.open("ab") as file:
            file.write(lines)
        self._sizes[name] += len(lines)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state, replacing the one before it at once; all ranks call it together."""
        write_state(self._state, {**state, "sizes": self._sizes}, self.world)

    def load(self) -> dict[str, Any] | None:
        """The state to go on from, the logs cut to where it was taken; None at the beginning.

        Raises:
            ValueError: the file is damaged.
        """
        with undamaged(self._state, f"delete {self.folder}"):
            state = read_state(self._state)
            if state is not None:
                self._sizes = {name: int(state["sizes"][name]) for name in self._sizes}
        for name, path in self._logs.items() if self.world.main else ():
            if self._sizes[name] > (path.stat().st_size if path.exists() else 0):
                raise ValueError(f"{path} is damaged; delete {self.folder} to start again")
            if path.exists():
                os.truncate(path, self._sizes[name])
        return state

    def finish(self) -> None:
        """The state is needed no more."""
        if self.world.main:
            self._state.unlink(missing_ok=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics; a last one that a kill cut off is left out.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    path = folder / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run of transformer.grpo: it has no {METRICS}")
    lines = path.read_text(encoding="utf-8").split("\n")
    return [parse_json(x, f"{path}, line {i}") for i, x in enumerate(lines[:-1], start=1)]
