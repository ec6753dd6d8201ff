"""Masks that are intervals: documents, a shared prompt, trees, prefixes, chunks, FlashMask's form.

Each function returns options of `attention`, for as many queries as keys if it says nothing else:

    o = attention(q, k, v, **masks.documents([300, 512, 212], device="cuda"))
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypedDict

import torch

from flash_versions.dispatch.request import PLANS

Counts = torch.Tensor | Sequence[int]
Device = torch.device | str | None


class MaskOptions(TypedDict, total=False):
    """The options of `attention` that make a mask."""

    causal: bool
    query_starts: torch.Tensor
    query_ends: torch.Tensor


class Plans(dict):
    """What is kept with the tensors of one mask. A copy of them, or a file, gets none of it."""

    def __deepcopy__(self, memo: dict) -> "Plans":
        """None yet."""
        return Plans()

    def __reduce__(self) -> tuple:
        """As what torch.load takes."""
        return OrderedDict, ()


def documents(lengths: Counts, *, causal: bool = True, device: Device = None) -> MaskOptions:
    """Documents one behind the other, none of which sees another.

    Args:
        lengths: of the documents, in order; their sum is the number of queries and keys.
        causal: whether a query sees only keys up to its own.
        device: of the tensors; None: that of the lengths.

    Raises:
        ValueError: lengths are not one row of integers.
    """
    lengths = _integers("lengths", lengths, device)
    ends = lengths.cumsum(0)
    options: MaskOptions = {"causal": causal, "query_ends": ends.repeat_interleave(lengths)}
    if not causal:
        options["query_starts"] = (ends - lengths).repeat_interleave(lengths)
    return options


def shared_prompt(prompt: int, answers: Counts, *, device: Device = None) -> MaskOptions:
    """One prompt with several answers behind it: each sees the prompt and itself, so the prompt is
    computed once. Position embeddings of each answer go on from the end of the prompt.

    Args:
        prompt: its number of tokens.
        answers: the number of tokens of each answer, in order.
        device: of the tensors; None: that of the answers.

    Raises:
        ValueError: the prompt is shorter than 0, or answers are not one row of integers.
    """
    if prompt < 0:
        raise ValueError(f"prompt={prompt} must be at least 0.")
    answers = _integers("answers", answers, device)
    ends = (prompt + answers.cumsum(0)).repeat_interleave(answers)
    whole = torch.full((prompt,), prompt, device=ends.device) + answers.sum()
    return {"causal": True, "query_ends": torch.cat((whole, ends))}


def tree(parents: Sequence[int], *, device: Device = None) -> MaskOptions:
    """A tree of tokens, such as drafts that are verified together: each sees itself and those it
    descends from.

    Args:
        parents: of each token, the place of its parent, or -1. A token comes right behind its
            parent, or behind a brother with all that descends from him (depth first).
        device: of the tensors; None: torch's default.

    Raises:
        ValueError: tokens are in another order.
    """
    ends = [0] * len(parents)
    path: list[int] = []  # from the root to the last token
    for i, parent in enumerate([*parents, -1]):  # one root more, to end the last tree
        while path and path[-1] != parent:
            ends[path.pop()] = i
        if parent != -1 and not path:
            raise ValueError(
                f"parents[{i}]={parent} is not the token before it nor one that this descends "
                f"from; put tokens in depth-first order."
            )
        path.append(i)
    return {"causal": True, "query_ends": torch.tensor(ends, dtype=torch.int64, device=device)}


def prefix(length: int, total: int, *, device: Device = None) -> MaskOptions:
    """The first `length` of `total` tokens see each other, the others what is before them.

    Raises:
        ValueError: the length is not from 0 to the total.
    """
    if not 0 <= length <= total:
        raise ValueError(f"length={length} must lie from 0 to total={total}.")
    place = torch.arange(total, device=device)
    return {"query_starts": torch.where(place < length, 0, place)}


def chunks(
    length: int,
    size: int,
    *,
    queries: int | None = None,
    causal: bool = True,
    device: Device = None,
) -> MaskOptions:
    """Chunks of so many keys: the query at position p sees only keys j with j // size = p // size,
    as in Llama 4.

    Args:
        length: the number of keys.
        size: of a chunk; the last one may be shorter.
        queries: their number, if there are not as many as keys. The last one is at the position of
            the last key.
        causal: whether a query sees only keys up to its own.
        device: of the tensors; None: torch's default.

    Raises:
        ValueError: the size is below 1.
    """
    if size < 1:
        raise ValueError(f"size={size} must be at least 1.")
    queries = length if queries is None else queries
    starts = torch.arange(length, device=device) // size * size + queries - length
    options: MaskOptions = {"causal": causal, "query_ends": (starts + size).clamp(0, queries)}
    if not causal:
        options["query_starts"] = starts.clamp(0, queries)
    return options


def from_flashmask(startend_row_indices: torch.Tensor, *, causal: bool) -> MaskOptions:
    """What FlashMask's `startend_row_indices` means, (batch, heads, N, 1, 2 or 4) integers, for N
    queries, where it leaves each key one interval of queries. Four columns, and two with causal,
    are read on the host.

    Args:
        startend_row_indices: for each key, the first row that is masked below the diagonal; with
            causal and two columns, also the end of these rows; else the end of the rows that are
            masked above it; four columns have start and end of both. heads are 1 or the key heads.
        causal: as it was given to FlashMask.

    Raises:
        ValueError: another shape, or rows are seen again below masked ones.
    """
    x = startend_row_indices
    columns = (1, 2) if causal else (2, 4)
    if x.dim() != 4 or x.shape[3] not in columns:
        raise ValueError(
            f"startend_row_indices has shape {tuple(x.shape)}; it must be (batch, heads, N, "
            f"{columns[0]} or {columns[1]}) with causal={causal}."
        )
    if x.shape[1] == 1:
        x = x[:, 0]
    rows, last = x.shape[-2], x.shape[-1]
    again = (causal and last == 2) or last == 4
    if again and bool((x[..., 1] < rows).any() or (last == 4 and (x[..., 2] > 0).any())):
        raise ValueError(
            "startend_row_indices masks rows between others that see a key; an interval cannot."
        )
    options: MaskOptions = {"causal": causal, "query_ends": x[..., 0].contiguous()}
    if not causal:
        options["query_starts"] = x[..., -1].contiguous()
    return options


def plan_mask(options: MaskOptions) -> MaskOptions:
    """The same mask, whose lists of blocks are made once: by the first call with a shape in each
    stream, for all calls that follow, such as those of a model's other layers, and their backward.

        mask = masks.plan_mask(masks.documents(lengths, device="cuda"))
        for layer in layers: ... attention(q, k, v, **mask)

    A plan lives as long as the mask. One that is changed in place by torch's operations is planned
    anew; changes that torch does not count (through .data, NumPy, a graph's replay or a kernel of
    your own) are not seen, so call this function again after them. Compiled calls (torch.compile)
    and captured graphs make lists of their own.

    Args:
        options: of any function here, or options of `attention` with query_starts or query_ends.

    Raises:
        ValueError: there is neither of them, or options is no dictionary.
    """
    if not isinstance(options, dict):
        raise ValueError(
            f"options is a {type(options).__name__}; it must be the dictionary that a function of "
            f"masks returns."
        )
    if "query_starts" not in options and "query_ends" not in options:
        raise ValueError(f"options has {', '.join(options) or 'nothing'}; query_ends is missing.")
    plans = Plans()
    planned = options.copy()
    if "query_starts" in options:
        planned["query_starts"] = _with_plans(options["query_starts"], plans)
    if "query_ends" in options:
        planned["query_ends"] = _with_plans(options["query_ends"], plans)
    return planned


def _with_plans(x: torch.Tensor, plans: Plans) -> torch.Tensor:
    """The same numbers as a tensor of its own, so that the caller's stays as it is. A tensor of
    torch.inference_mode does not count its changes, so it is copied to one that does.
    """
    with torch.inference_mode(False):
        x = x.clone() if x.is_inference() else x.view_as(x)
    setattr(x, PLANS, plans)
    return x


def _integers(name: str, x: Counts, device: Device) -> torch.Tensor:
    x = torch.as_tensor(x, device=device)
    if x.dim() != 1 or (x.numel() and (x.is_floating_point() or x.dtype == torch.bool)):
        raise ValueError(f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; give integers.")
    return x.long()
