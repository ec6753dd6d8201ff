"""The GPU's clock and power while something is measured, from nvidia-smi."""

import statistics
import subprocess
import threading
import time
from typing import Self

import torch

PERIOD_MS = 100


class Telemetry:
    """Samples of one GPU, taken in the background between `with` and its end; without nvidia-smi
    there are none.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []  # seconds, MHz, watts
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        which = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        query = ["nvidia-smi", "-i", which, "--query-gpu=clocks.sm,power.draw"]
        form = ["--format=csv,noheader,nounits", "-lms", str(PERIOD_MS)]
        try:
            self.process = subprocess.Popen(query + form, stdout=subprocess.PIPE, text=True)
        except OSError:
            return self
        threading.Thread(target=self.read, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def read(self) -> None:
        """Keep what nvidia-smi prints until it ends."""
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.add(line)

    def add(self, line: str) -> None:
        """Keep one line, "1755, 633.20"; one without two numbers is a GPU that does not tell."""
        try:
            clock, watts = (float(field) for field in line.split(","))
        except ValueError:
            return
        self.samples.append((time.monotonic(), clock, watts))

    def since(self, began: float) -> dict[str, float]:
        """Medians of the samples since a time of `time.monotonic`; {} if there are none."""
        recent = [sample[1:] for sample in self.samples if sample[0] >= began]
        if not recent:
            return {}
        clocks, watts = zip(*recent)
        return {"sm_mhz": statistics.median(clocks), "watts": statistics.median(watts)}
