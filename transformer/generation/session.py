"""A checkpoint, ready to answer: model, tokenizer, chat template and settings in one object."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flash_versions
from transformer.generation.chat import Message, Tokenizer, load_template, reads_variable
from transformer.generation.command import choose_device
from transformer.generation.engine import GREEDY, EngineOptions, check_prompt, generate
from transformer.generation.messages import encode_prompt
from transformer.generation.row import Completion
from transformer.generation.sampling import Sampling
from transformer.generation.stats import Statistics, size_text
from transformer.model.decoder import Config, Transformer, choose_attention
from transformer.model.exact import BLOCKS, attention_of
from transformer.model.kernels.host import say_simulated
from transformer.model.kernels.startup import warming_up
from transformer.model.weights import eos_token_ids, find_checkpoint, load_config, load_model

SIMULATED_PARAMETERS = 10_000_000  # models with more are tedious to simulate
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Session:
    """A loaded checkpoint and how to answer with it.

    Attributes:
        folder: where the checkpoint lies.
        notes: what the user may not expect, each a sentence.
        template: the chat template, None to use prompts as they are.
        attention: the name of the version that runs, never "auto".
        precision: that of attention, None: as the dtype says.
        engine: how the engine goes about it.
        thinking: what the template is told as enable_thinking, None: nothing.
    """

    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    template: str | None
    eos: tuple[int, ...]
    stop_strings: tuple[str, ...]
    sampling: Sampling
    max_tokens: int
    attention: str
    device: torch.device
    dtype: str
    precision: str | None
    notes: tuple[str, ...]
    engine: EngineOptions
    thinking: bool | None = None

    @classmethod
    def load(
        cls,
        checkpoint: str,
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int = 256,
        stop_strings: Sequence[str] = (),
        attention: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        precision: str | None = None,
        kernels: str = "auto",
        exact: bool = False,
        use_template: bool = True,
        engine: EngineOptions | None = None,
        thinking: bool | None = None,
    ) -> "Session":
        """Load a checkpoint, cheap checks first.

        Args:
            checkpoint: see `find_checkpoint`.
            sampling: how tokens are sampled.
            max_tokens: of each answer.
            stop_strings: texts that end an answer.
            attention: a name in flash_versions.VERSIONS or BASELINES, or "auto".
            device: "auto" (the first GPU, or else the CPU), "cpu", "cuda" or "cuda:N".
            dtype: a name in DTYPES, or "auto": float32 on the CPU without a precision, else
                bfloat16.
            precision: that of attention, as `flash_versions.attention` takes it: "fp8" quantises
                queries, keys and values of a 16-bit dtype, the whole cache in every step.
            kernels: of norms and products, see `Transformer`.
            exact: an answer's bits depend on its prompt only: kernels "exact", and attention that
                is batch-invariant.
            use_template: whether prompts go through the checkpoint's chat template.
            engine: how the engine goes about it; with measure_attention, reports are long.
            thinking: whether the model thinks before it answers, for a template that asks for
                enable_thinking; None leaves it to the template.

        Raises:
            OSError: there is no such checkpoint, or it has no tokenizer.
            ValueError: anything about it that cannot work, in one sentence.
        """
        if exact and kernels not in ("auto", "exact"):
            raise ValueError(f"kernels={kernels!r} are not exact; leave the option out")
        kernels, exact = "exact" if exact else kernels, exact or kernels == "exact"
        where, engine = choose_device(device), engine or EngineOptions()
        folder = find_checkpoint(checkpoint)
        config = load_config(folder)
        tokenizer = Tokenizer.load(folder)
        tokenizer.refuse_another(folder, config.vocab_size)
        template = load_template(folder) if use_template else None
        if thinking is not None and not (template and reads_variable(template, "enable_thinking")):
            what = f"the chat template of {checkpoint} does not ask" if template else "none is used"
            raise ValueError(
                "thinking is switched on or off by the enable_thinking of a chat template, and"
                f" {what}; leave the option out"
            )
        if dtype == "auto":
            dtype = "float32" if where.type == "cpu" and precision is None else "bfloat16"
        eos = eos_token_ids(folder, tokenizer.eos)
        for token in eos:
            if isinstance(token, bool) or not 0 <= token < tokenizer.vocab_size:
                raise ValueError(
                    f"{folder}: the end-of-sequence token {token} is not one of the tokenizer's,"
                    f" 0 to {tokenizer.vocab_size - 1}"
                )
        with warming_up(where, DTYPES[dtype]):
            paged = engine.page_size is not None
            version, notes = choose_attention(
                attention, config, where, DTYPES[dtype], precision, paged, exactly=exact
            )
            attend = attention_of(version, exact, precision=precision)
            model = load_model(folder, attend, where, DTYPES[dtype], kernels)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        is_simulated = where.type == "cpu" and version not in (*flash_versions.BASELINES, BLOCKS)
        if is_simulated:
            say_simulated()
        if is_simulated and parameters > SIMULATED_PARAMETERS:
            notes.append(
                f"{version} is simulated on the CPU, which is slow for a model of"
                f" {parameters / 1e6:.0f} million parameters"
                f"{_faster(config, precision, engine, exact)}"
            )
        if kernels == "fused" and where.type == "cpu":
            notes.append("the fused kernels are simulated: minutes for an answer, for reading")
        if use_template and template is None:
            notes.append("no chat template: the prompt is used as it is")
        return cls(
            folder.resolve(), model, tokenizer, template, eos, tuple(stop_strings), sampling,
            max_tokens, version, where, dtype, precision, tuple(notes), engine, thinking,
        )  # fmt: skip

    def encode(
        self, messages: Sequence[Message], name: str = "the prompt", tools: Any = None
    ) -> tuple[str, list]:
        """The text that the model sees, and its tokens; ValueError if it cannot be answered.

        Without a template, the text is the content of the first message. With one, `tools` are JSON
        schemas of functions that it describes to the model.
        """
        text, tokens = self._encode(messages, tools)
        check_prompt(self.model.config, tokens, name)
        return text, tokens

    def encode_latest(self, messages: Sequence[Message]) -> tuple[list[Message], str, list[int]]:
        """As `encode`, without the oldest turns of a conversation where there is no room for them.

        An answer gets room for --max-tokens or a quarter of the context, whichever is less. What
        stands before the first question, such as a system prompt, stays, and so does the newest
        turn if there is room for it. Of the others as many are forgotten as leave half of the
        context free: each time, the model has to read what is left again.

        Returns:
            The messages that are left, the text that the model sees, and its tokens.

        Raises:
            ValueError: the last question alone cannot be answered.
        """
        context = self.model.config.max_positions
        limit = context - min(self.max_tokens, context // 4)
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for dropped, dropped_to in enumerate(questions):
            left = [*messages[: questions[0]], *messages[dropped_to:]]
            text, tokens = self._encode(left)
            older = 0 < dropped < len(questions) - 2  # turns before the newest one are left
            if len(tokens) <= (context // 2 if older else limit):
                break
        check_prompt(self.model.config, tokens, "the question")
        return left, text, tokens

    def _encode(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, list[int]]:
        if self.template is None and tools:
            raise ValueError('"tools" need a chat template, and none is used')
        told = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return encode_prompt(self.tokenizer, self.template, messages, tools=tools, **told)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
        on_text: Callable[[int, str], None] | None = None,
        **options: Any,
    ) -> tuple[list[Completion], Statistics]:
        """Answer prompts; see engine.generate, also for further options."""
        return generate(
            self.model,
            self.tokenizer,
            prompts,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            generators=generators,
            eos=self.eos,
            stop_strings=self.stop_strings,
            on_text=on_text,
            engine=self.engine,
            **options,
        )

    def settings(self) -> tuple:
        """All that an answer depends on, beside the prompt and the seed.

        Weights are told apart by their place and the time at which they were written.
        """
        files = sorted(self.folder.glob("*.safetensors"))
        weights = (str(self.folder), [(file.name, file.stat().st_mtime_ns) for file in files])
        how = (self.stop_strings, self.sampling, self.max_tokens)
        settings = (self.template, self.thinking, self.eos, *how)
        rounding = (self.engine.prefill_chunk, self.engine.page_size, self.engine.prompt_lookup)
        kernels = (self.attention, self.model.kernels, self.precision)
        engine = (self.device.type, self.dtype, *kernels, *rounding)
        return (weights, *settings, *engine)

    def report(self, statistics: Statistics) -> str:
        """The measurements as lines of text."""
        precision = "" if self.precision is None else f" and {self.precision}"
        where = f"{self.attention} on {self.device} in {self.dtype}{precision}"
        simulated = self.attention not in (*flash_versions.BASELINES, BLOCKS)
        if simulated and self.device.type == "cpu":
            exact = self.model.kernels == "exact"
            where += "; its kernels are simulated: slow by design, for reading"
            where += _faster(self.model.config, self.precision, self.engine, exact)
        peak = statistics.peak_memory
        reused = f"; {statistics.reused_tokens} tokens of the turns before were kept"
        return (
            f"prompt      {statistics.prompt_tokens} tokens,"
            f" {statistics.prompt_rate:.1f} tokens/s{reused if statistics.reused_tokens else ''}\n"
            f"generation  {statistics.generated_tokens} tokens,"
            f" {statistics.generation_rate:.1f} tokens/s\n"
            f"memory      {f'{peak / 2**20:.0f} MiB peak' if peak else 'unknown'}\n"
            f"attention   {where}\n"
            + (self._details(statistics) if self.engine.measure_attention else "")
        )

    def _details(self, statistics: Statistics) -> str:
        """What --stats adds to the measurements."""
        share = statistics.attention_share
        attention = "" if share is None else f", {share:.0%} of it attention"
        cache = size_text(statistics.cache_bytes)
        gb_read = statistics.bytes_read / 1e9 / max(1, statistics.steps)
        drafts = f", {statistics.tokens_per_forward:.2f} tokens from each"
        return (
            f"first token {statistics.first_token_seconds * 1e3:.1f} ms\n"
            f"steps       {statistics.steps} of {statistics.step_seconds * 1e3:.2f} ms{attention}"
            f"{drafts if self.engine.prompt_lookup else ''}\n"
            f"batch       {statistics.rows} rows at once, {cache} of cache\n"
            f"bandwidth   {statistics.bandwidth / 1e9:.1f} GB/s: a step reads {gb_read:.3f} GB of"
            " weights and cache\n"
        )

    def remark(self, completion: Completion) -> str:
        """Why the answer is empty or incomplete, as a line of text; '' if it is neither."""
        if completion.finish_reason == "interrupted":
            return "note: interrupted\n"
        if completion.finish_reason == "stop" and not completion.text:
            return "note: the answer is empty\n"
        if completion.finish_reason != "length":
            return ""
        count = len(completion.tokens)
        if count == self.max_tokens:
            return f"note: stopped after {count} tokens (--max-tokens)\n"
        context = self.model.config.max_positions
        return f"note: stopped after {count} tokens: the model's context of {context} is full\n"


def _faster(config: Config, precision: str | None, engine: EngineOptions, exact: bool) -> str:
    """A hint at attention that is not simulated on a CPU; "" if the model can use none."""
    cpu, paged = torch.device("cpu"), engine.page_size is not None
    try:
        name, _ = choose_attention(
            "auto", config, cpu, torch.float32, precision, paged, simulated=False, exactly=exact
        )
    except ValueError:
        return ""
    return f"; --attention {name} is faster"
