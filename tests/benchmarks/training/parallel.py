"""Training on several GPUs against one; writes JSON.

    python -m tests.benchmarks.training.parallel --gpus 2 4 --out FILE

Steps of GRPO and of supervised training, for a random model in the shape of Qwen2.5-0.5B and for
the shipped one, which is so small that the host sets its pace. Each with the same global batch on
every number of GPUs, and GRPO of the random model also with as many problems for each GPU ("per
GPU"). Each part is started in processes of its own, under torchrun where there are several.

A time is that of the slowest rank, medians of steps after a first one; a ratio is that of tokens
per second, over one GPU's. What fails has a `reason` in the place of figures, and does not keep the
rest from being measured. The file is written again after each part. `--device cpu --tiny` runs the
same under gloo, to try the command.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink is not what is measured

import torch  # noqa: E402

from flash_versions.bench.document import new_document, save  # noqa: E402
from tests.benchmarks.frame import parser, passed  # noqa: E402
from tests.benchmarks.training.parallel_worker import FAST, GROWING, QWEN, TINY  # noqa: E402
from transformer.model.decoder import Transformer  # noqa: E402
from transformer.model.weights import save_model  # noqa: E402
from transformer.training import byte_tokenizer  # noqa: E402

WORKER = ("-m", "tests.benchmarks.training.parallel_worker")


def torchrun(size, *command):
    """A command line on so many processes; one is a plain process."""
    if size == 1:
        return [sys.executable, *command]
    # An address, since the name of a machine without a network may not be known to itself.
    where = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={size}")
    return [sys.executable, "-m", "torch.distributed.run", *where, *command]


def run(name, size, args, folder):
    """What rank 0 found of a part on so many processes, or a reason."""
    if (left := args.seconds - passed()) < 5:
        return {"reason": "no time was left"}
    file, log = folder / f"{name} {size}.pt", folder / f"{name} {size}.log"
    sizes = "tiny" if args.tiny else "full"
    command = torchrun(size, *WORKER, str(file), args.device, sizes, name)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends the ranks
            process.wait()
            return {"reason": f"did not end within {left:.0f} s"}
    if process.returncode == 0:
        return torch.load(file)
    print("\n".join(log.read_text().splitlines()[-80:]), flush=True)
    return {"reason": f"ended with code {process.returncode}"}


def speed(what, found):
    """Rows: one GPU, and each number of several with the ratio to it, if one was measured."""
    one = found.get(1, {"reason": "not yet measured"})
    for gpus, measured in sorted(found.items()):
        row = {"suite": "processes", "what": what, "gpus": gpus, **measured}
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
    protocol = {
        "method": "the same global batch, but for the rows that say per GPU; slowest rank,"
        " median of steps after a first one",
        "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"],
    }
    document = new_document(args.device, gpus=max(args.gpus), protocol=protocol)
    random_model(folder / "random", TINY if args.tiny else QWEN, args.device)
    found = {name: {} for name in args.what}
    for size in sorted({1, *args.gpus}):
        for name in args.what:
            same = GROWING.get(name) if size == 1 else None
            result = found.get(same, {}).get(1) or run(same or name, size, args, folder)
            found[name][size] = result
            print(f"{name}, {size}: {json.dumps(result)}", flush=True)
            document["rows"] = [row for name in args.what for row in speed(name, found[name])]
            save(document, args.out)


def main():
    add = (made := parser(__doc__, seconds=600.0)).add_argument
    add("--gpus", type=int, nargs="+", default=[2], help="beside one (2)")
    add("--what", nargs="+", choices=FAST, default=[*FAST], help="time only this")
    add("--tiny", action="store_true", help="sizes for a CPU")
    args = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
