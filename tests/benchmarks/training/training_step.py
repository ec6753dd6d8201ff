"""A step of training a whole model: our attention against torch's, with and without torch.compile;
writes JSON.

    python -m tests.benchmarks.training.training_step --out FILE        # on a GPU: three lengths
    python -m tests.benchmarks.training.training_step --out FILE --device cpu --tiny

A Llama of 1.1 billion weights in bf16 learns the same random tokens from the same weights with each
contestant, 16,384 tokens in a step: forward, loss, backward, and torch's fused AdamW. "compiled" is
torch.compile(model), which fuses everything but the attention. Contestants run one after the
other; "ours compiled" runs once more at the end, so that a drift shows. A time is that of a step
between two waits for the device, the median of `--steps` of them; compilation and the first steps
are not counted. The losses are kept, and differ by rounding.
"""

import statistics
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from flash_versions import attention
from flash_versions.bench.document import new_document
from tests.benchmarks.harness import attempt, forget_peak, keep, now, parser, peak_gib
from tests.benchmarks.transformer.generate_speed import LLAMA_1B, random_model
from tests.helpers.models.random_checkpoint import TINY
from transformer.model.decoder import choose_attention

SUITE = "training step"
MODEL = replace(LLAMA_1B, vocab_size=32768, tied_embeddings=False)
TOKENS, LENGTHS = 16384, (2048, 8192, 16384)
WARM_UP = 3
# Name: the version of attention ("auto": the newest of ours), whether the model is compiled.
CONTESTANTS = {
    "ours compiled": ("auto", True),
    "sdpa compiled": ("sdpa", True),
    "ours": ("auto", False),
    "sdpa": ("sdpa", False),
    "ours compiled, again": ("auto", True),
}


def operations(model, length):
    """Floating-point operations for a token: 6 for each weight but the embedding's, which is looked
    up, and 3 times those of the causal attention's forward.
    """
    c = model.config
    weights = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    attending = c.num_layers * 2 * c.num_heads * c.head_dim * length  # 4 x half of the scores
    return 6 * weights + 3 * attending


def measure(name, config, length, steps, device, dtype):
    """The fields of a contestant's row at a length."""
    asked, compiled = CONTESTANTS[name]
    rows = max(1, TOKENS // length)
    torch._dynamo.reset()
    torch.manual_seed(0)
    version, _ = choose_attention(asked, config, device, dtype)
    model = random_model(config, partial(attention, version=version), device, dtype, "torch")
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(config.vocab_size, (rows, length + 1), device=device)
    seconds, losses = [], []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            forget_peak(device)
        began = now(device)
        logits = forward(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(now(device) - began)
        losses.append(loss.detach())
    median = statistics.median(seconds[WARM_UP:])
    rate = rows * length / median
    return {
        "rows": rows,
        "attention": version,
        "seconds": median,
        "times": seconds[WARM_UP:],
        "warm_up_seconds": sum(seconds[:WARM_UP]),
        "tokens_per_second": rate,
        "tflops": rate * operations(model, length) / 1e12,
        "peak_gib": peak_gib(device),
        "losses": [round(loss.item(), 5) for loss in losses],
    }


def main():
    """Measure; the file is written again after each row."""
    add = (made := parser(__doc__, seconds=400.0)).add_argument
    add("--length", nargs="*", type=int, default=LENGTHS, help="tokens of a row (2048 8192 16384)")
    add("--contestant", nargs="*", choices=CONTESTANTS, default=tuple(CONTESTANTS))
    add("--steps", type=int, default=10, help="timed steps of a contestant (10)")
    add("--tiny", action="store_true", help="a small model, to try the command")
    args = made.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = TINY if args.tiny else MODEL
    protocol = {"method": "wall clock of a step, median", "rounds": args.steps, "warm_up": WARM_UP}
    document = new_document(device.type, protocol=protocol)
    for length, name in product(args.length, args.contestant):
        row = {"suite": SUITE, "contestant": name, "length": length, "steps": args.steps}
        timed = partial(measure, name, config, length, args.steps, device, dtype)
        row = attempt(row, timed, args.seconds)
        keep(document, args.out, [row], hidden=("suite", "times", "losses"))


if __name__ == "__main__":
    main()
