"""Training on several GPUs against one: the same results, and how much faster; writes JSON.

    python -m tests.benchmarks.training.parallel --gpus 2 4 --out FILE

It starts everything in processes of its own, under torchrun where there are several. First what
must be equal, in float32: GRPO and supervised training on the most processes, the same interrupted
on them and taken up again on one; and the commands must end. Then what should be fast: steps of
GRPO and of supervised training, for a random model in the shape of Qwen2.5-0.5B and for the shipped
one, which is so small that the host sets its pace. Each with the same global batch on every number
of GPUs, and GRPO of the random model also with as many problems for each GPU ("per GPU").

A time is that of the slowest rank, medians of steps after a first one; a ratio is that of tokens
per second, over one GPU's. Where there are GPUs for it, several sizes are timed at the same time.
What fails has a `reason` in the place of figures, and does not keep the rest from being measured.
The file is written again after each part that is done, so that a run that is ended loses nothing.
`--device cpu --tiny` runs the same under gloo, to try the command.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink is not what is measured

import torch  # noqa: E402

from flash_versions.bench.document import new_document, save  # noqa: E402
from tests.benchmarks.frame import parser, passed  # noqa: E402
from tests.benchmarks.training.parallel_worker import EQUAL, FAST, GROWING, QWEN, TINY  # noqa: E402
from transformer.model.decoder import Transformer  # noqa: E402
from transformer.model.weights import save_model  # noqa: E402
from transformer.training import byte_tokenizer  # noqa: E402

WORKER = ("-m", "tests.benchmarks.training.parallel_worker")
SPEED, CHECKS = "processes", "processes checks"
LIMIT = 100.0  # seconds without another part that is done, until whoever is in it has failed
# What float32 and another order of sums may differ by, as a share. Gradients agree well; a weight
# whose gradient is little more than rounding moves by Adam's whole step, in either direction.
METRICS_AGREE, WEIGHTS_AGREE = 1e-3, 1e-2
COMPARED = ("reward", "length", "entropy", "gradient_norm", "loss")


def torchrun(size, *command):
    """A command line on so many processes; one is a plain process."""
    command = [*map(str, command)]
    if size == 1:
        return [sys.executable, *command]
    # An address, since the name of a machine without a network may not be known to itself.
    where = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={size}")
    return [sys.executable, "-m", "torch.distributed.run", *where, *command]


def finished(command, log, seconds, gpus=None, poll=lambda: False):
    """Run a command on GPUs of these numbers; what is wrong with how it ended, or None.

    Args:
        seconds: () -> how many are left; asked again each time that something is done.
        poll: whether something more is done.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    given, began = seconds(), time.monotonic()
    while process.poll() is None:
        if poll():
            given, began = seconds(), time.monotonic()
        if time.monotonic() - began > given:
            process.terminate()  # torchrun then ends the ranks
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return f"did not end within {given:.0f} s"
        time.sleep(0.1)
    return f"ended with code {process.returncode}" if process.returncode else None


class Session:
    """The starts of one measurement."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder

    def say(self, text):
        print(f"{passed():5.0f} s  {text}", flush=True)

    def left(self):
        return min(LIMIT, self.args.seconds - passed())

    def start(self, command, log, gpus=None, poll=lambda: False):
        """`finished`, and the end of what a command that failed said."""
        if self.left() < 5:
            return "no time was left"
        reason = finished(command, log, self.left, gpus, poll)
        if reason:
            self.say(f"{log.stem} {reason}:\n" + "\n".join(log.read_text().splitlines()[-80:]))
        return reason

    def run(self, names, size, gpus=None, done=lambda *result: None):
        """{name: what rank 0 found, or a reason}, of ranks that are started again if one fails;
        calls done(name, size, that) as soon as it is there.
        """
        found, missing = {}, list(names)

        def keep(result):
            name = missing.pop(0)
            found[name] = result
            self.say(f"{name}, {size}: {result.get('reason', 'done')}")
            done(name, size, result)

        def collect():
            """Keep what ranks have left; whether there was anything."""
            before = len(missing)
            while missing and (path := self.folder / f"{missing[0]} {size}.pt").exists():
                keep(torch.load(path))
            return len(missing) < before

        while missing:
            log = self.folder / f"{missing[0]} {size}.log"
            sizes = "tiny" if self.args.tiny else "full"
            command = torchrun(size, *WORKER, self.folder, self.args.device, sizes, *missing)
            reason = self.start(command, log, gpus, collect)
            collect()
            if missing:
                path = self.folder / f"{missing[0]} {size} reason"
                reason = path.read_text() if path.exists() else reason
                keep({"reason": reason or "left no results"})
        return found

    def times(self, sizes, done):
        """Measure what should be fast, as many sizes at once as fit; `done` is that of `run`."""
        waiting = sorted(sizes)
        with ThreadPoolExecutor() as at_once:
            while waiting:
                free, started = list(range(self.args.available)), []
                while waiting and (not started or waiting[0] <= len(free)):
                    size = waiting.pop(0)
                    gpus, free = free[:size], free[size:]
                    names = [x for x in self.args.what if size > 1 or x not in GROWING]
                    gpus = gpus if self.args.device == "cuda" else None
                    started.append(at_once.submit(self.run, names, size, gpus, done))
                for result in started:
                    result.result()

    def commands(self):
        """Rows of the two commands on two processes: that they end well and leave a model."""
        end = ("--device", self.args.device)
        grpo = ("--steps=2", "--prompts=4", "--max-tokens=96", "--eval-every=1")
        train = ("--steps=20", "--batch-tokens=2048", "--eval-every=10", "--workers=1")
        lines = {"transformer.grpo": grpo, "transformer.train": train}
        files = {"transformer.grpo": "final", "transformer.train": "."}
        for name, options in lines.items():
            out = self.folder / name
            options += ("--eval-problems=4", "--save-every=1", f"--out={out}", *end)
            began = time.monotonic()
            reason = self.start(torchrun(2, "-m", name, *options), self.folder / f"{name}.log")
            if reason is None and not (out / files[name] / "model.safetensors").exists():
                reason = "left no model"
            row = {"suite": CHECKS, "what": name, "processes": "2"}
            yield row | ({"reason": reason} if reason else {"seconds": time.monotonic() - began})


def difference(found, reference, start):
    """The norm of what differs in the weights, as a share of how far they moved."""

    def norm(x, y):
        return sum((x[name].double() - y[name].double()).square().sum() for name in y).sqrt()

    return (norm(found, reference) / norm(reference, start)).item()


def largest(numbers):
    """Of some numbers; NaN if any is."""
    return torch.tensor([*numbers], dtype=torch.float64).max().item()


def equality(what, size, many, one):
    """Rows: several processes against one, and one that went on from several against one."""
    yield compared(what, f"{size}", many, one, "")
    yield compared(what, f"{size}, then 1", one, one, "resumed ")


def compared(what, processes, found, one, prefix):
    """A row: how much metrics and weights differ from those of one process."""
    row = {"suite": CHECKS, "what": what, "processes": processes}
    for side in (found, one):
        if "reason" in side:
            return row | {"reason": side["reason"]}
    if f"{prefix}weights" not in found:
        return row | {"reason": "there was nothing to go on from"}
    row["metrics"] = {
        name: largest(abs(x[name] - y[name]) / max(abs(y[name]), 1e-3) for x, y in pairs)
        for pairs in [list(zip(found[f"{prefix}metrics"], one["metrics"], strict=True))]
        for name in COMPARED
        if name in pairs[0][0]
    }
    row["weights"] = difference(found[f"{prefix}weights"], one["weights"], one["start"])
    row["gap"] = largest(x.get("gap_max", 0.0) for x in found[f"{prefix}metrics"])
    worst = largest(row["metrics"].values())
    if not (worst <= METRICS_AGREE and row["weights"] <= WEIGHTS_AGREE):
        row["reason"] = (
            f"metrics differ by {worst:.2g}, where rounding may {METRICS_AGREE}, and weights by"
            f" {row['weights']:.2g} of their change, where it may {WEIGHTS_AGREE}"
        )
    return row


def speed(what, found):
    """Rows: one GPU, and each number of several with the ratio to it, if one was measured."""
    one = found.get(1, {"reason": "not yet measured"})
    for gpus, measured in sorted(found.items()):
        row = {"suite": SPEED, "what": what, "gpus": gpus, **measured}
        if gpus > 1 and "reason" not in one and "reason" not in measured:
            rates = [name for name in measured if name.endswith("tokens_per_second")]
            row |= {f"{x.split('_')[0]}_ratio": measured[x] / one[x] for x in rates}
        yield row


def random_model(folder, config, device):
    """A checkpoint that can be trained, though it knows nothing."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(config)
    save_model(model, folder)
    for name, content in byte_tokenizer.files().items():
        (folder / name).write_text(content, encoding="utf-8")


def measure(args, folder):
    """Everything; the file is written again after each part."""
    session = Session(args, folder)
    protocol = {
        "method": "the same global batch, but for the rows that say per GPU; slowest rank,"
        " median of steps after a first one",
        "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"],
    }
    document = new_document(args.device, gpus=max(args.gpus), protocol=protocol)
    checks, found, one_at_a_time = [], {name: {} for name in args.what}, Lock()

    def keep(rows):
        for row in rows:
            checks.append(row)
            print(json.dumps(row), flush=True)
        write()

    def write():
        timed = [row for name in args.what for row in speed(name, found[name])]
        document["rows"] = checks + timed
        save(document, args.out)

    def done(name, size, result):
        with one_at_a_time:
            found[name][size] = result
            for also in [x for x, same in GROWING.items() if same == name and size == 1]:
                if also in found:
                    found[also][1] = result
            write()

    most = max(args.gpus)
    random_model(folder / "random", TINY if args.tiny else QWEN, args.device)
    if args.part != SPEED:
        with ThreadPoolExecutor() as at_once:  # nothing is timed yet
            commands = at_once.submit(lambda: [*session.commands()])
            many, one = (session.run(EQUAL, size) for size in (most, 1))
        for name in EQUAL:
            keep(equality(name.removesuffix(" equal"), most, many[name], one[name]))
        keep(commands.result())
    if args.part == CHECKS:
        return
    session.times({1, *args.gpus}, done)
    for row in document["rows"][len(checks) :]:
        print(json.dumps(row), flush=True)
    session.say(f"wrote {args.out}")


def main():
    add = (made := parser(__doc__, seconds=230.0)).add_argument
    add("--gpus", type=int, nargs="+", default=[2], help="beside one (2)")
    add("--part", choices=(CHECKS, SPEED), help="only this")
    add("--what", nargs="+", choices=FAST, default=[*FAST], help="time only this")
    add("--tiny", action="store_true", help="sizes for a CPU")
    args = made.parse_args()
    args.available = torch.cuda.device_count() if args.device == "cuda" else 1
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
