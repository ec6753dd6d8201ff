"""Rotary position embedding: queries and keys turn with their position, pair by pair.

The angle between a query and a key then depends on their distance only (arXiv:2104.09864). A model
trained on short texts has never seen its slow pairs turn far; the scaling types slow them down for
longer contexts: all pairs alike (linear), or only those that turn rarely, with a ramp in between
(Llama 3, arXiv:2407.21783; YaRN, arXiv:2309.00071). Two types slow them down in longer texts only:
dynamic by the length of the text, longrope by a factor of each pair (arXiv:2402.13753).

Formulas and their order of rounding are those of Hugging Face's transformers.
"""

import functools
import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

# Type of a value in a config.json -> how a message calls it.
KINDS = {bool: "true or false", int: "an integer", str: "a text", list: "a list", dict: "an object"}

# Type of rotary embedding -> the parameters that it cannot do without.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
ORIGINAL = "original_max_position_embeddings"
BY_LENGTH = ("dynamic", "longrope")  # types whose frequencies depend on the length of the text
BY_PAIR = ("short_factor", "long_factor")  # parameters that are a number for each pair


def read_key(data: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    """The value of a key of a config.json; the default where it is missing or null.

    Raises:
        ValueError: a value of another kind (see KINDS).
    """
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{key} must be {KINDS[kind]}, not {reprlib.repr(value)}")
    return value


def is_positive(value: Any) -> bool:
    """Whether this is a positive number that fp32 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    limits = torch.finfo(torch.float32)
    return limits.tiny <= value <= limits.max


@dataclass(frozen=True)
class Rope:
    """How fast each pair of a head's dimensions turns. Parameters have Hugging Face's names.

    Attributes:
        theta: the slowest pair turns about theta times slower than the fastest.
        type: a key of ROPE_TYPES.
        factor: slow pairs turn this many times slower than without scaling.
        original_max_position_embeddings: the context of the first training; llama3, yarn, dynamic
            and longrope.
        low_freq_factor: pairs that turn less often in that context are slowed down fully; llama3.
        high_freq_factor: pairs that turn more often are left alone; llama3.
        beta_fast: pairs that turn more often are left alone; yarn.
        beta_slow: pairs that turn less often are slowed down fully; yarn.
        attention_factor: multiplies queries and keys; None lets `magnitude` compute it; yarn and
            longrope.
        mscale: see `magnitude`; yarn.
        mscale_all_dim: see `magnitude`; yarn.
        truncate: whether yarn's ramp begins and ends at whole pairs.
        partial_rotary_factor: the share of a head's dimensions that turns, the first ones.
        short_factor: by how much each pair turns slower; longrope.
        long_factor: the same in texts that are longer than the original context; longrope.

    Raises:
        ValueError: an unknown type, or a parameter out of range.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self):
        if not isinstance(self.type, str) or self.type not in ROPE_TYPES:
            raise ValueError(
                f"rope type {self.type!r} is not supported; known are {', '.join(ROPE_TYPES)}"
            )
        if not isinstance(self.truncate, bool):
            raise ValueError(f"rope parameter truncate must be true or false, not {self.truncate}")
        needed = ("theta", "beta_fast", "beta_slow", *ROPE_TYPES[self.type])
        for name, value in asdict(self).items():
            if name in BY_PAIR:
                if type(value) is not tuple or not all(map(is_positive, value)):
                    raise ValueError(f"rope parameter {name} must be a list of positive numbers")
                continue
            if name in ("type", "truncate") or (name not in needed and value in (None, 0)):
                continue
            if not is_positive(value):
                key = "rope_theta" if name == "theta" else name
                raise ValueError(f"rope parameter {key} must be a positive number, not {value!r}")
        if self.type == "yarn" and self.theta < 2:  # the ramp's ends are logarithms to this base
            raise ValueError(f"rope_theta must be at least 2 for yarn, not {self.theta}")
        if self.partial_rotary_factor > 1:
            raise ValueError(
                f"partial_rotary_factor must be at most 1, not {self.partial_rotary_factor}"
            )
        if self.type == "longrope" and self.original_max_position_embeddings < 2:
            raise ValueError(f"rope parameter {ORIGINAL} must be at least 2 for longrope")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope parameter high_freq_factor ({self.high_freq_factor}) must exceed"
                f" low_freq_factor ({self.low_freq_factor})"
            )

    @classmethod
    def from_hf(
        cls,
        data: dict[str, Any],
        types: Mapping[str, str] | None = None,
        original: int | None = None,
    ) -> "Rope":
        """Read a config.json: transformers 5's `rope_parameters`, or 4's `rope_scaling`.

        Args:
            data: the content of config.json.
            types: what its names of types mean; None: they are those of ROPE_TYPES.
            original: the context of the first training; None: it is among the parameters.

        Raises:
            ValueError: a parameter that is missing, or that would change the result and is unknown.
        """
        given = read_key(data, "rope_scaling", dict, {}) or read_key(
            data, "rope_parameters", dict, {}
        )
        given = {name: value for name, value in given.items() if value is not None}
        theta = given.pop("rope_theta", data.get("rope_theta"))
        older_name = read_key(given, "type", str, "default")
        rope_type = read_key(given, "rope_type", str, older_name)
        if types is not None and rope_type not in types:
            raise ValueError(
                f"rope type {rope_type!r} is not supported here; known are {', '.join(types)}"
            )
        rope_type = rope_type if types is None else types[rope_type]
        given = {name: given[name] for name in given.keys() - {"type", "rope_type"}}
        if data.get("partial_rotary_factor") is not None:
            given.setdefault("partial_rotary_factor", data["partial_rotary_factor"])
        required = ROPE_TYPES.get(rope_type, ())
        context = data["max_position_embeddings"]
        if rope_type == "dynamic" and given.setdefault(ORIGINAL, context) != context:
            raise ValueError(f"{ORIGINAL} of rope type 'dynamic' is max_position_embeddings")
        if ORIGINAL in required:
            given[ORIGINAL] = given.get(ORIGINAL, context) if original is None else original
        if rope_type == "longrope" and is_positive(given[ORIGINAL]):
            given.setdefault("factor", context / given[ORIGINAL])
        for name in given.keys() & BY_PAIR:
            given[name] = tuple(read_key(given, name, list, ()))
        known = {field.name for field in fields(cls)[2:]} & given.keys()  # but theta and type
        parameters = {name: given[name] for name in known}
        rope = cls(cls.theta if theta is None else theta, rope_type, **parameters)
        if missing := [name for name in required if name not in given]:
            raise ValueError(f"rope type {rope_type!r} needs the parameter {missing[0]}")
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"rope parameter {unknown[0]!r} is not supported")
        return rope

    def context(self, longest: int) -> int:
        """The tokens that a model has positions for, by those that config.json names: dynamic lets
        texts be longer than that by its factor.
        """
        return max(longest, int(longest * self.factor)) if self.type == "dynamic" else longest

    def turned(self, head_dim: int) -> int:
        """How many of a head's dimensions turn.

        Raises:
            ValueError: an odd number, or not as many pairs as the parameters have numbers.
        """
        dim = int(head_dim * self.partial_rotary_factor)
        if dim < 2 or dim % 2:
            raise ValueError(f"{dim} of {head_dim} dimensions of a head cannot turn in pairs")
        for name in BY_PAIR if self.type == "longrope" else ():
            if (given := len(getattr(self, name))) != dim // 2:
                raise ValueError(f"rope parameter {name} has {given} numbers for {dim // 2} pairs")
        return dim

    def for_length(self, length: int, head_dim: int) -> "Rope":
        """How pairs turn in texts of up to so many tokens: always the same, but by BY_LENGTH."""
        if self.type not in BY_LENGTH or length <= self.original_max_position_embeddings:
            return self
        if self.type == "longrope":
            return replace(self, short_factor=self.long_factor)
        excess = (
            torch.tensor(length, device="cpu") * self.factor / self.original_max_position_embeddings
        )
        dim = self.turned(head_dim)
        stretched = (excess - (self.factor - 1)) ** (dim / max(dim - 2, 1))  # 2: it turns by 1
        return replace(self, theta=(self.theta * stretched).item())

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair that turns: (turned / 2,) fp32."""
        dim = self.turned(head_dim)
        exponents = torch.arange(0, dim, 2).float() / dim
        if self.type == "longrope":
            return 1.0 / (torch.tensor(self.short_factor) * self.theta**exponents)
        frequency = 1.0 / self.theta**exponents
        match self.type:
            case "linear":
                return frequency / self.factor
            case "llama3":
                kept = self._kept_by_llama3(frequency)
            case "yarn":
                kept = self._kept_by_yarn(dim)
            case _:
                return frequency
        return (1 - kept) * frequency / self.factor + kept * frequency

    def magnitude(self) -> float:
        """What cosine and sine are multiplied by: a softmax temperature, or 1."""
        if self.type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.type == "longrope":
            longer = math.log(max(self.factor, 1.0))
            return math.sqrt(1 + longer / math.log(self.original_max_position_embeddings))

        def stretch(strength: float) -> float:
            return 0.1 * strength * math.log(max(self.factor, 1.0)) + 1.0

        if self.mscale and self.mscale_all_dim:
            return stretch(self.mscale) / stretch(self.mscale_all_dim)
        return stretch(1.0)

    def _kept_by_llama3(self, frequency: Tensor) -> Tensor:
        """Share of each pair's frequency to keep, by its turns in the original context."""
        turns = self.original_max_position_embeddings / (2 * math.pi / frequency)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return kept.clamp(0, 1)

    def _kept_by_yarn(self, dim: int) -> Tensor:
        """The same, linear in the pair's index instead of in its turns."""

        def pair_that_turns(turns: float) -> float:
            wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return dim * math.log(wavelength) / (2 * math.log(self.theta))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first or 0.001  # a ramp without width is a step
        return 1 - ((torch.arange(dim // 2) - first) / width).clamp(0, 1)


@functools.lru_cache(maxsize=8)
def rotary_table(
    rope: Rope, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Cosine and sine of positions 0, 1, ...: (positions, 2, 1, turned); recent ones are kept.

    A longer table begins with the bits of a shorter one, so the length is the caller's choice. Both
    halves of a head share their angles. The sine of the first half is negated here, so that
    `rotate` need not. Angles are fp32, whatever the dtype.
    """
    with torch.inference_mode(False), torch.no_grad():  # a later training step may need it too
        frequencies = rope.frequencies(head_dim).to(device)
        angles = torch.arange(positions, device=device)[:, None].float() * frequencies
        cos, sin = angles.cos() * rope.magnitude(), angles.sin() * rope.magnitude()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        return table.to(dtype)[:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + turned / 2]) by its angle; dims from `turned` on stay.

    This half-split pairing is Hugging Face's; Meta's own checkpoints pair neighbours instead.

    Args:
        x: (batch, length, heads, head_dim).
        cos: (length, 1, turned) or (batch, length, 1, turned), from `rotary_table`.
        sin: the same, with the first half negated.
    """
    if (turned := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)
    halves_swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return (x * cos + halves_swapped * sin).type_as(x)  # autocast mixes bf16 x with an fp32 table
