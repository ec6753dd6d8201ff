r"""Generation by `transformer.generation.engine` against transformers' `generate`, on the same
weights; JSON.

    python -m tests.benchmarks.transformer.generate_speed --out FILE  # on a GPU: four shapes
    python -m tests.benchmarks.transformer.generate_speed --out FILE --device cpu  # shipped model
    python -m tests.benchmarks.transformer.generate_speed --out FILE --add \
        --case llama-3.1-8b --batch 1 64

The contestants:

    ours                   `transformer.generation.engine.generate`
    torch compiled         a step written with torch alone, as gpt-fast has it: `torch_decoder`
    transformers compiled  `generate(cache_implementation="static")`, whose steps run under
                           torch.compile in mode "reduce-overhead", which records CUDA graphs
    transformers           `generate` as it is called by default: each operation launched by Python

The shipped model is read from its files. The other models have random weights in the shapes of real
models. Every contestant answers the same prompts of one length, greedily, and no token ends an
answer. Compilation ends before the clock starts. A whole call is timed, from prompts on the host to
tokens on the host:

    first_token_ms     a call for one token: the prefill
    tokens_per_second  a call for `tokens` tokens, with everything in it. Both `ours` and
                       `transformers compiled` record CUDA graphs in it
    ms_per_step        the difference between calls for `tokens` and for `steps` more, per step
    bound_ms           bytes of the weights and of the cache that a step reads, at a copy's
                       bandwidth, which is measured first; `share` is bound_ms / ms_per_step

JSON is written after each contestant. A contestant that fails, or for which no time is left, has a
`reason`. With `--add`, rows that FILE already has and that are not measured again stay in it, with
the date and the commit of their own measurement.
"""

import os
import statistics
from dataclasses import replace
from functools import partial
from itertools import product

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

import flash_versions  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.measure import copy_bandwidth  # noqa: E402
from tests.benchmarks.harness import attempt, earlier, forget_peak, keep, now, parser, peak_gib  # noqa: E402
from tests.benchmarks.transformer.torch_decoder import torch_compiled  # noqa: E402
from tests.helpers.models.random_checkpoint import QWEN  # noqa: E402
from transformer.generation.engine import generate  # noqa: E402
from transformer.model.config import Config  # noqa: E402
from transformer.model.decoder import Transformer, choose_attention  # noqa: E402
from transformer.model.rope import ROPE_TYPES, Rope  # noqa: E402
from transformer.model.weights import find_checkpoint, load_config, load_model  # noqa: E402

SUITE = "generate"
PLACE = ("case", "batch", "prompt", "contestant")  # what tells rows apart
LLAMA_1B = Config(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
    num_kv_heads=8, head_dim=64, max_positions=131072, norm_eps=1e-5,
    rope=Rope(5e5, "llama3", 32.0, 8192), tied_embeddings=True,
)  # fmt: skip
LLAMA_8B = replace(
    LLAMA_1B, hidden_size=4096, intermediate_size=14336, num_layers=32, head_dim=128,
    rope=Rope(5e5, "llama3", 8.0, 8192), tied_embeddings=False,
)  # fmt: skip
SHAPES = {"qwen2.5-0.5b": QWEN, "llama-3.2-1b": LLAMA_1B, "llama-3.1-8b": LLAMA_8B}
SHIPPED = "shipped"
COMPILED, EAGER, ALONE = "transformers compiled", "transformers", "torch compiled"
ROUNDS = {"ours": 3, ALONE: 3, COMPILED: 3, EAGER: 2}  # of every call; the order of the contestants
# More steps drown the noise of recording a graph and of the host. An eager step takes long.
STEPS = {"ours": 512, ALONE: 256, COMPILED: 256, EAGER: 128}


class NoText:
    """A tokenizer for tokens that nobody reads."""

    def decode(self, tokens):
        return ""


def random_model(config, attention, device, dtype, kernels):
    """Random weights, built where they run: `Transformer` initialises on the CPU, in fp32."""
    with torch.device("meta"):
        model = Transformer(config, attention, kernels)
    model = model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02)
    return model


def as_transformers(model, device, dtype):
    """The same weights, not a copy, in transformers' model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = model.config.rope
    described = replace(model.config, rope=Rope(rope.theta)).to_hf()
    if rope.type != "default":
        parameters = {name: getattr(rope, name) for name in ROPE_TYPES[rope.type]}
        described["rope_scaling"] = {"rope_type": rope.type, **parameters}
    config = AutoConfig.for_model(described.pop("model_type"), **described)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    weights = dict(model.state_dict())
    if model.config.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights, assign=True)
    rotary = theirs.model.rotary_emb  # not among the weights
    theirs.model.rotary_emb = type(rotary)(config).to(device)
    return theirs.eval()


def ours(model, prompts):
    """A function of a number of tokens that answers all prompts by that many."""

    def call(tokens):
        completions, _ = generate(model, NoText(), prompts, max_tokens=tokens)
        return [completion.tokens for completion in completions]

    return call


def transformers(model, prompts, **options):
    """The same through transformers' `generate`, which gets the options as well."""
    weight = model.model.embed_tokens.weight
    theirs = as_transformers(model, weight.device, weight.dtype)

    def call(tokens):
        batch = torch.tensor(prompts, device=weight.device)
        found = theirs.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=False, min_new_tokens=tokens,
            max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, **options,
        )  # fmt: skip
        return found[:, batch.shape[1] :].tolist()

    return call


def transformers_compiled(model, prompts):
    """The same with a static cache, steps compiled for exactly this batch."""
    from transformers import CompileConfig

    torch._dynamo.reset()  # or the shapes of the batch before would make this one's dynamic
    compile_config = CompileConfig(mode="reduce-overhead")
    compile_config._compile_all_devices = True  # a CPU, too, where a test runs this
    return transformers(
        model, prompts, cache_implementation="static", compile_config=compile_config
    )


CALLS = {"ours": ours, ALONE: torch_compiled, COMPILED: transformers_compiled, EAGER: transformers}


def warm_up(call, contestant, lengths):
    """Compile everything that the timed calls for these numbers of tokens use.

    A compiled step has the length of its longest static cache, so the longest call goes first: a
    cache that grew later would compile the step again.
    """
    for tokens in sorted(lengths, reverse=True) if contestant in (ALONE, COMPILED) else (20,):
        call(tokens)


def seconds_of(call, tokens, rounds, device):
    """The median time of a call, and what it returned."""
    spent = []
    for _ in range(rounds):
        began = now(device)
        found = call(tokens)
        spent.append(now(device) - began)
    return statistics.median(spent), found


def bytes_per_step(model, batch, length):
    """What a step reads: every weight but an embedding that is only looked up, and the cache."""
    c, embedding = model.config, model.model.embed_tokens.weight
    weights = sum(p.nbytes for p in model.parameters())
    weights -= 0 if c.tied_embeddings else embedding.nbytes
    numbers = 2 * c.num_layers * batch * length * c.num_kv_heads * c.head_dim
    return weights, numbers * embedding.itemsize


def turns(args, config):
    """(rows, tokens of each prompt, contestant): all batches with the first prompt, one row with
    the others. The others than ours, which take long to run or to compile, answer 1 and 64 rows of
    the first prompt only.
    """
    first = args.prompt[0]
    for prompt in args.prompt:
        for batch, contestant in product(args.batch if prompt == first else (1,), args.contestant):
            short = contestant == "ours" or (prompt == first and batch in (1, 64))
            if short and prompt + args.tokens + min(STEPS.values()) <= config.max_positions:
                yield batch, prompt, contestant


def measure(contestant, model, batch, prompt, tokens, bandwidth):
    """The fields of a contestant's row."""
    device, c = model.model.embed_tokens.weight.device, model.config
    numbers = torch.Generator().manual_seed(0)
    prompts = torch.randint(c.vocab_size, (batch, prompt), generator=numbers).tolist()
    steps, rounds = min(STEPS[contestant], c.max_positions - prompt - tokens), ROUNDS[contestant]
    try:
        call = CALLS[contestant](model, prompts)
        began = now(device)
        warm_up(call, contestant, (1, tokens, tokens + steps))
        warm_up_seconds = now(device) - began
        forget_peak(device)
        first, _ = seconds_of(call, 1, rounds, device)
        whole, found = seconds_of(call, tokens, rounds, device)
        longer, _ = seconds_of(call, tokens + steps, rounds, device)
    finally:
        if contestant in (ALONE, COMPILED):
            torch._dynamo.reset()  # frees the graphs' memory, which the next contestant may need
    if longer <= whole:
        raise RuntimeError(f"{steps} more steps took no time: the host was busy")
    step = (longer - whole) / steps
    weights, cached = bytes_per_step(model, batch, prompt + tokens + steps // 2)
    bound = (weights + cached) / bandwidth
    return {
        "steps": steps, "warm_up_seconds": warm_up_seconds, "first_token_ms": first * 1e3,
        "seconds": whole, "tokens_per_second": batch * tokens / whole, "ms_per_step": step * 1e3,
        "weight_bytes": weights, "cache_bytes": cached, "bound_ms": bound * 1e3,
        "share": bound / step, "peak_gib": peak_gib(device), "said": found[0][:24],
    }  # fmt: skip


def build(case, args, device, dtype):
    """The model of a case, and the attention that runs."""
    folder = find_checkpoint("reinforced") if case == SHIPPED else None
    config = load_config(folder) if folder else SHAPES[case]
    version, _ = choose_attention(args.attention, config, device, dtype)
    attend = partial(flash_versions.attention, version=version)
    if folder:
        return load_model(folder, attend, device, dtype, "auto"), version
    return random_model(config, attend, device, dtype, "auto"), version


def main():
    """Measure; the file is written again after each row."""
    add = (made := parser(__doc__, seconds=190.0, add=True)).add_argument
    add("--case", nargs="*", choices=(SHIPPED, *SHAPES), help="only these")
    add("--contestant", nargs="*", choices=ROUNDS, default=tuple(ROUNDS))
    add("--batch", nargs="*", type=int, default=(1, 8, 64), help="rows (1 8 64)")
    prompts = "tokens of each prompt, after the first with one row only (512 4096 16384)"
    add("--prompt", nargs="*", type=int, default=(512, 4096, 16384), help=prompts)
    add("--tokens", type=int, default=64, help="tokens of each answer (64)")
    add("--attention", help="a version of attention (auto; on a CPU sdpa)")
    args = made.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the command has it
    args.attention = args.attention or ("sdpa" if device.type == "cpu" else "auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth = copy_bandwidth(10, device.type) * 1e12
    protocol = {
        "method": "whole calls, greedy; the median of rounds",
        "rounds": ROUNDS,
        "compiled": 'cache_implementation="static", torch.compile in mode "reduce-overhead"',
        "torch compiled": 'static cache, torch.compile in mode "reduce-overhead", as in gpt-fast',
        "copy_bytes_per_second": bandwidth,
        **{name: getattr(args, name) for name in ("attention", "prompt", "tokens")},
    }
    document = new_document(device.type, ("transformers",), protocol=protocol)
    document["rows"] = earlier(args)
    print(f"copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    for case in args.case or ((SHIPPED, *SHAPES) if device.type == "cuda" else (SHIPPED,)):
        model, version = build(case, args, device, dtype)
        for batch, prompt, contestant in turns(args, model.config):
            row = {"suite": SUITE, "case": case, "contestant": contestant, "batch": batch}
            row |= {"prompt": prompt, "tokens": args.tokens}
            row |= {"attention": version} if contestant == "ours" else {}
            timed = partial(measure, contestant, model, batch, prompt, args.tokens, bandwidth)
            keep(document, args.out, [attempt(row, timed, args.seconds)], place=PLACE)
        del model, timed


if __name__ == "__main__":
    main()
