r"""A step of other libraries' trainers with our attention, against torch's; writes JSON.

    python -m tests.benchmarks.training.trainers --out FILE                     # on a GPU
    python -m tests.benchmarks.training.trainers --out FILE --device cpu --tiny
    torchrun --nproc-per-node 2 -m tests.benchmarks.training.trainers --out FILE --add \
        --integration "Trainer, FSDP2"

Needs the extra `trainers`. A random Llama of 0.4 billion weights in bf16 is trained as each
integration's users train: by transformers' Trainer on rows padded to the longest, without padding,
under torch.compile, and with gradient checkpointing; with PEFT's LoRA; by TRL's SFTTrainer on
packed rows and by its GRPOTrainer. FSDP2 is for several GPUs: torchrun starts a process for each,
and the first one writes. Only `attn_implementation` differs. Rows have random lengths,
the same for both. A time is that of a step between two waits for the device, the median of
`--steps`.
"""

import os
import statistics
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from flash_versions.bench.document import new_document
from flash_versions.integrations import hf
from tests.benchmarks.harness import attempt, earlier, forget_peak, keep, now, parser, peak_gib
from transformer.training import byte_tokenizer

SUITE = "trainers"
LIBRARIES = ("transformers", "trl", "peft", "accelerate")
OURS = "fv_auto"
CONTESTANTS = (OURS, "sdpa")
WARM_UP = 3
PROCESSES = int(os.environ.get("WORLD_SIZE", "0"))  # that torchrun has started
FIRST = os.environ.get("RANK", "0") == "0"
ROWS = 8  # in a step
LENGTH = 4096  # of the longest rows
SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


class Timed(transformers.TrainerCallback):
    """Notes when each step begins and ends, once the device is done."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.losses = device, [], []
        self.began = 0.0

    def on_step_begin(self, args, state, control, **_: Any) -> None:
        """Before a step."""
        if len(self.seconds) == WARM_UP:
            forget_peak(self.device)
        self.began = now(self.device)

    def on_step_end(self, args, state, control, **_: Any) -> None:
        """Behind it."""
        self.seconds.append(now(self.device) - self.began)

    def on_log(self, args, state, control, logs=None, **_: Any) -> None:
        """The loss that the trainer reports."""
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


class Bench:
    """One measurement's sizes and folders.

    Attributes:
        tokens: of the rows' lengths, the longest.
        steps: with those of the warm-up.
    """

    def __init__(self, args: Any, folder: Path) -> None:
        self.device, self.folder = args.device, folder
        self.sizes = TINY if args.tiny else SIZES
        self.tokens = 48 if args.tiny else LENGTH
        self.steps = WARM_UP + args.steps
        for name, text in byte_tokenizer.files().items():
            (folder / name).write_text(text)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def model(self, attention: str) -> transformers.PreTrainedModel:
        """The same weights for every contestant."""
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=byte_tokenizer.VOCAB_SIZE, max_position_embeddings=2 * self.tokens,
            pad_token_id=0, attn_implementation=attention, **self.sizes
        )  # fmt: skip
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return transformers.LlamaForCausalLM(config).to(self.device, dtype)

    def lengths(self, rows: int) -> list[int]:
        """From an eighth of the longest to that, the same in every call."""
        g = torch.Generator().manual_seed(0)
        return torch.randint(self.tokens // 8, self.tokens + 1, (rows,), generator=g).tolist()

    def rows(self, lengths: list[int]) -> list[list[int]]:
        """Random tokens."""
        g = torch.Generator().manual_seed(1)
        return [torch.randint(3, 256, (n,), generator=g).tolist() for n in lengths]

    def arguments(self, kind: type = transformers.TrainingArguments, **changes: Any) -> Any:
        """A trainer's arguments: AdamW, no clipping, nothing written."""
        given = {
            "output_dir": str(self.folder / "out"), "max_steps": self.steps,
            "per_device_train_batch_size": ROWS, "learning_rate": 1e-5, "max_grad_norm": 0.0,
            "optim": "adamw_torch", "use_cpu": self.device == "cpu", "bf16": False,
            "gradient_checkpointing": False, "report_to": [], "save_strategy": "no",
            "logging_steps": 1, "disable_tqdm": True, "seed": 0,
        }  # fmt: skip
        return kind(**{**given, **changes})

    def trainer(self, model: Any, collate: Any, **changes: Any) -> Any:
        """transformers' own; the same rows in every step, half as many if they are `equal`."""
        lengths = self.lengths(ROWS) * max(PROCESSES, 1)
        if collate is equal:
            lengths = [self.tokens] * (ROWS // 2)
            changes["per_device_train_batch_size"] = ROWS // 2
        rows = self.rows(lengths) * self.steps
        return transformers.Trainer(
            model=model, args=self.arguments(**changes), data_collator=collate,
            train_dataset=[{"input_ids": row} for row in rows],
        )  # fmt: skip


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows padded on the right to the longest."""
    rows = [row["input_ids"] for row in rows]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def equal(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows that are all as long, without a mask."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def lora(bench: Bench, model: Any) -> Any:
    """PEFT's LoRA of all projections of attention, rows padded to the longest."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = peft.LoraConfig(r=16, target_modules=names, task_type="CAUSAL_LM")
    return bench.trainer(peft.get_peft_model(model, config), pad)


def sharded(bench: Bench, model: Any) -> Any:
    """transformers' Trainer, no padding, weights divided over GPUs by accelerate's FSDP2."""
    if not PROCESSES or bench.device == "cpu":
        raise RuntimeError("accelerate's FSDP2 takes GPUs, and processes that torchrun has started")
    layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    collate = transformers.DataCollatorWithFlattening()
    trainer = bench.trainer(model, collate, fsdp=True, fsdp_config=layers)
    assert trainer.accelerator.is_fsdp2
    return trainer


def packed_sft(bench: Bench, model: Any) -> Any:
    """TRL's SFTTrainer, which packs rows into as many tokens as the longest has."""
    import datasets
    import trl

    rows = bench.rows([n // 4 for n in bench.lengths(8 * ROWS)])
    return trl.SFTTrainer(
        model=model, processing_class=bench.tokenizer,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows * bench.steps}),
        args=bench.arguments(trl.SFTConfig, packing=True, max_length=bench.tokens,
                             per_device_train_batch_size=ROWS // 2),
    )  # fmt: skip


def grpo(bench: Bench, model: Any) -> Any:
    """TRL's GRPOTrainer: 4 prompts with 8 answers each, of as many tokens as are allowed."""
    import datasets
    import trl

    prompts = ["say " + "ab" * (bench.tokens // 16)] * 4 * bench.steps
    return trl.GRPOTrainer(
        model=model, processing_class=bench.tokenizer,
        reward_funcs=lambda completion_ids, **_: [float(sum(x) % 5) for x in completion_ids],
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        args=bench.arguments(trl.GRPOConfig, per_device_train_batch_size=32, num_generations=8,
                             max_completion_length=bench.tokens // 32),
    )  # fmt: skip


INTEGRATIONS = {
    "Trainer, padded rows": lambda x, model: x.trainer(model, pad),
    "Trainer, padding-free": lambda x, model: x.trainer(
        model, transformers.DataCollatorWithFlattening()
    ),
    "Trainer, torch.compile": lambda x, model: x.trainer(model, equal, torch_compile=True),
    "Trainer, gradient checkpointing": lambda x, model: x.trainer(
        model, equal, gradient_checkpointing=True
    ),
    "Trainer, FSDP2": sharded,
    "PEFT LoRA, padded rows": lora,
    "TRL SFTTrainer, packed": packed_sft,
    "TRL GRPOTrainer": grpo,
}


def measure(integration: str, attention: str, args: Any) -> dict:
    """The fields of a contestant's row."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        trainer = INTEGRATIONS[integration](bench, bench.model(attention))
        timed = Timed(args.device)
        trainer.add_callback(timed)
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()
    seconds = timed.seconds[WARM_UP:]
    return {
        "seconds": statistics.median(seconds),
        "times": seconds,
        "peak_gib": peak_gib(args.device),
        "losses": [round(float(x), 4) for x in timed.losses],
    }


def main() -> None:
    """Measure; the file is written again after each row."""
    add = (made := parser(__doc__, seconds=300.0, add=True)).add_argument
    add("--integration", nargs="*", choices=INTEGRATIONS, default=tuple(INTEGRATIONS))
    add("--steps", type=int, default=7, help="timed steps of a contestant (7)")
    add("--tiny", action="store_true", help="a small model and short rows, to try the command")
    args = made.parse_args()
    if PROCESSES and args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    hf.register()
    transformers.logging.set_verbosity_error()
    protocol = {"method": "wall clock of a step, median", "rounds": args.steps, "warm_up": WARM_UP}
    document = new_document(args.device, LIBRARIES, protocol=protocol)
    document["rows"] = earlier(args)
    for integration, attention in product(args.integration, CONTESTANTS):
        row = {"suite": SUITE, "integration": integration, "contestant": attention}
        row |= {"processes": PROCESSES} if PROCESSES else {}
        row = attempt(row, partial(measure, integration, attention, args), args.seconds)
        if FIRST:
            place = ("integration", "contestant")
            keep(document, args.out, [row], hidden=("suite", "times"), place=place)


if __name__ == "__main__":
    main()
