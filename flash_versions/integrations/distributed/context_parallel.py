"""Context parallelism: attention over a sequence that is split over the ranks of a process group.

    # torchrun --nproc-per-node 8 train.py
    q, k, v = (shard(x, group) for x in (q, k, v))         # (batch, M / W, heads, head_dim)
    o = context_parallel_attention(q, k, v, causal=True, group=group)

Two ways to it. "ring": the keys go round, and parts are merged by their LSE (`ring.py`).
"all_to_all": for the time of the attention the heads are split in the place of the sequence.

    rank 0:  tokens 0..3, heads A B        all-to-all        tokens 0..7, head A
    rank 1:  tokens 4..7, heads A B      ------------->      tokens 0..7, head B

Each rank then runs an ordinary version on whole sequences, and a second all-to-all brings the
results back. All-to-all sends less over many ranks, has no partial results to merge and takes a
window, but nothing hides what it sends, and there are no more ranks than heads.
docs/use/context_parallel.md compares the two.

Source of all-to-all: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from flash_versions.dispatch.request import Request, Sides, make_request
from flash_versions.integrations.distributed.ring import Ring, RingAttention
from flash_versions.versions.api import attention, choose_version

Layout = Literal["zigzag", "contiguous"]
Method = Literal["ring", "all_to_all"]
LAYOUTS = ("zigzag", "contiguous")
METHODS = ("ring", "all_to_all")


@_disable_dynamo  # as torch.compiler.disable, but it does not import torch's compiler now
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sides | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    group: "dist.ProcessGroup | None" = None,
    method: Method = "ring",
    layout: Layout = "zigzag",
    version: str = "auto",
    return_lse: bool = False,
    check: bool = False,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` over a sequence of which each of the W ranks of a group holds 1 / W.

    Differentiable once in q, k and v, through o and through the LSE. Every rank has to make the
    call, with the same arguments on tensors of the same shapes, and so its backward. What is wrong
    with a rank's own arguments raises before anything is sent. That ranks differ is seen only with
    check=True; otherwise the other ranks wait for what does not come, until the group's timeout.

    Args:
        q: (batch, M / W, heads, head_dim), this rank's rows of the sequence, as `shard` gives them.
        k: (batch, N / W, kv_heads, head_dim). Causal: N = M.
        v: (batch, N / W, kv_heads, head_dim_v).
        causal: query i of the whole sequence sees its keys j <= i.
        scale: positive factor on the scores; None means head_dim ** -0.5.
        window: as in `attention`, counted in the whole sequence; "all_to_all" only.
        softcap: as in `attention`.
        batch_invariant: as in `attention`, of o and the LSE; "all_to_all" only, where a rank has
            whole sequences. A ring merges results of ranks, whose number would count.
        group: the ranks; None is the default group, or this process alone if there is none. With a
            DeviceMesh: `mesh["cp"].get_group()`.
        method: "ring" sends keys and values W - 1 times to a neighbour, while it computes.
            "all_to_all" sends q, k, v and o once, split by heads: W has to divide heads; key heads
            that W does not divide are sent to several ranks.
        layout: how the sequence is split, see `shard`. If it is "contiguous", a causal "ring" takes
            about twice as long: all wait for the last rank.
        version: as in `attention`, one that gives an LSE for "ring".
        return_lse: also return the log-sum-exp of the scores.
        check: compare shapes, dtypes and options of all ranks first, one small message and a
            synchronisation: if anything is wrong anywhere, every rank raises the same sentence.
        others: no other option of `attention` is possible; their names get a sentence.

    Returns:
        o: (batch, M / W, heads, head_dim_v) in q's dtype, of the same rows as q. With return_lse,
        (o, lse): lse fp32, natural log, (batch, heads, M / W).

    Raises:
        ValueError: an argument is malformed, does not suit the group, or is not supported.
    """
    group = find_group(group)
    options: dict[str, Any] = {
        "causal": causal,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "batch_invariant": batch_invariant,
    }
    settings: dict[str, Any] = {
        "method": method,
        "layout": layout,
        "version": version,
        "return_lse": return_lse,
    }
    try:
        request = checked_request(group, q, k, v, options, **settings, others=others)
    except ValueError as error:
        if check and group is not None:
            agree(group, {}, str(error))
        raise
    if check and group is not None:
        agree(group, settings | described(request))
    q, k, v = request.q, request.k, request.v
    if group is not None and method == "ring":
        chosen = choose_version(version, request)
        ring = Ring(chosen, group, layout, causal, request.scale, request.softcap)
        o, lse = RingAttention.apply(ring, q, k, v)
        return (o, lse) if return_lse else o
    if group is not None:
        q, k, v = (to_heads(x, group, layout) for x in (q, *replicated(k, v, group.size())))
    found = attention(q, k, v, **options, version=version, return_lse=return_lse)
    if group is None:
        return found
    if isinstance(found, torch.Tensor):
        return to_rows(found, group, layout)
    o, lse = found
    return to_rows(o, group, layout), to_rows(lse.mT, group, layout).mT


def shard(
    x: torch.Tensor,
    group: "dist.ProcessGroup | None" = None,
    layout: Layout = "zigzag",
    dim: int = 1,
) -> torch.Tensor:
    """This rank's piece of a tensor that all ranks have; differentiable, nothing is sent.

    "contiguous": rank r holds the r-th of W parts. "zigzag": the r-th and the (2W-1-r)-th of 2W
    chunks, so that all ranks have the same work under a causal mask. Whatever belongs to a token is
    split alike: its id, its label, its position (`shard(torch.arange(M), dim=0)`).

    Args:
        x: any tensor.
        group: as in `context_parallel_attention`.
        layout: "zigzag" or "contiguous".
        dim: the dimension of the sequence.

    Raises:
        ValueError: the length is not a multiple of W, or for "zigzag" of 2 W.
    """
    check_layout(layout)
    group = find_group(group)
    if group is None:
        return x
    parts = group.size() * (2 if layout == "zigzag" else 1)
    if x.shape[dim] % parts:
        raise ValueError(
            f"the sequence has length {x.shape[dim]}; layout={layout!r} on {group.size()} ranks "
            f"needs a multiple of {parts}: pad it."
        )
    return pieces(x, group.size(), layout, dim)[group.rank()]


def unshard(
    x: torch.Tensor,
    group: "dist.ProcessGroup | None" = None,
    layout: Layout = "zigzag",
    dim: int = 1,
) -> torch.Tensor:
    """The whole tensor on every rank, from the pieces that `shard` gave them.

    Raises:
        ValueError: an unknown layout, or a gradient is wanted: a loss is computed on pieces, and
            its gradients are summed over the ranks.
    """
    check_layout(layout)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x requires grad, and unshard has no gradient; call x.detach() first.")
    group = find_group(group)
    if group is None:
        return x
    gathered = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(gathered, x.contiguous(), group=group)
    return joined(gathered, layout, dim)


def pieces(x: torch.Tensor, size: int, layout: str, dim: int) -> list[torch.Tensor]:
    """What each rank holds of a tensor."""
    if layout == "contiguous":
        return list(x.chunk(size, dim))
    chunks = x.chunk(2 * size, dim)
    return [torch.cat((chunks[r], chunks[2 * size - 1 - r]), dim) for r in range(size)]


def joined(found: Sequence[torch.Tensor], layout: str, dim: int) -> torch.Tensor:
    """The inverse of `pieces`."""
    if layout == "contiguous":
        return torch.cat(tuple(found), dim)
    early, late = zip(*(x.chunk(2, dim) for x in found))
    return torch.cat((*early, *reversed(late)), dim)


class AllToAll(torch.autograd.Function):
    """x[r] of this rank goes to rank r, whose x[this rank] takes its place; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group):  # noqa: D102
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient):  # noqa: D102
        return AllToAll.apply(gradient, ctx.group), None


def to_heads(x: torch.Tensor, group: "dist.ProcessGroup", layout: str) -> torch.Tensor:
    """(batch, M / W, heads, dim), some rows, to (batch, M, heads / W, dim), some heads."""
    by_rank = x.unflatten(2, (group.size(), -1)).movedim(2, 0)
    return joined(AllToAll.apply(by_rank, group).unbind(), layout, 1)


def to_rows(x: torch.Tensor, group: "dist.ProcessGroup", layout: str) -> torch.Tensor:
    """The inverse of `to_heads`: (batch, M / W, heads, ...) from (batch, M, heads / W, ...)."""
    by_rank = torch.stack(pieces(x, group.size(), layout, 1))
    return AllToAll.apply(by_rank, group).movedim(0, 2).flatten(2, 3)


def replicated(k: torch.Tensor, v: torch.Tensor, size: int) -> list[torch.Tensor]:
    """k and v with each head repeated as often as it takes for W to divide them.

    There are then lcm(kv_heads, W) of them, and each rank receives those of its query heads, a
    multiple of both.
    """
    times = size // gcd(k.shape[2], size)
    return [x if times == 1 else x.repeat_interleave(times, 2) for x in (k, v)]


def find_group(group: "dist.ProcessGroup | None") -> "dist.ProcessGroup | None":
    """The group, by default that of all processes; None if there is nobody but this process.

    Raises:
        ValueError: it is no group, or not one of this process.
    """
    if not dist.is_available():
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the group; call it on the group's ranks only.")
    if group is None:
        group = dist.group.WORLD  # None before init_process_group
    elif not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group is a {type(group).__name__}; it must be a torch.distributed.ProcessGroup, such "
            f"as mesh.get_group() of a DeviceMesh with one dimension, or None."
        )
    return None if group is None or group.size() == 1 else group


def check_layout(layout: object) -> None:
    """Raise a ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; there are {', '.join(LAYOUTS)}.")


def checked_request(
    group: "dist.ProcessGroup | None",
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
    *,
    method: str,
    layout: str,
    version: str,
    return_lse: bool,
    others: dict[str, Any],
) -> Request:
    """Attention of this rank's rows to its own keys, the form in which arguments are checked.

    Raises:
        ValueError: see `context_parallel_attention`.
    """
    check_layout(layout)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; there are {', '.join(METHODS)}.")
    if others:
        raise ValueError(
            f"{next(iter(others))} is not possible over several ranks; causal, scale, softcap and, "
            f"with method='all_to_all', window and batch_invariant are."
        )
    ring = method == "ring"
    for name in ("window", "batch_invariant"):
        if ring and options[name] not in (None, False):
            raise ValueError(f"{name} is not possible with method='ring'; use 'all_to_all'.")
    request = make_request(q, k, v, **options, return_lse=return_lse)
    request = request._replace(return_lse=ring or return_lse)
    choose_version(version, request)
    if request.precision is not None:
        raise ValueError(
            f"q has dtype {q.dtype}; over several ranks float32, float16 and bfloat16 work."
        )
    if ring and options["causal"] and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} rows and k {k.shape[1]}; causal with method='ring' needs as many "
            f"queries as keys: use method='all_to_all'."
        )
    size = 1 if group is None else group.size()
    if not ring and q.shape[2] % size:
        raise ValueError(
            f"q has {q.shape[2]} heads; method='all_to_all' splits them over {size} ranks, which "
            f"must divide them: use method='ring'."
        )
    for name, x in (("q", q), ("k", k)):
        if layout == "zigzag" and size > 1 and x.shape[1] % 2:
            raise ValueError(
                f"{name} has {x.shape[1]} rows on this rank; layout='zigzag' gives every rank two "
                f"chunks of one length: split a sequence whose length is a multiple of {2 * size}."
            )
    return request


def described(request: Request) -> dict[str, Any]:
    """What has to be the same on all ranks, by name."""
    tensors = {"q": request.q, "k": request.k, "v": request.v}
    shapes = {name: f"{x.dtype} of shape {tuple(x.shape)}" for name, x in tensors.items()}
    names = ("scale", "window_left", "window_right", "softcap", "batch_invariant", "needs_grad")
    return shapes | {name: getattr(request, name) for name in names}


def agree(group: "dist.ProcessGroup", given: dict[str, Any], problem: str | None = None) -> None:
    """Raise the same ValueError on all ranks if one has a problem or was given something else."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (given, problem), group=group)
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise ValueError(f"rank {rank}: {problem}")
    first = everyone[0][0]
    for rank, (other, _) in enumerate(everyone):
        for name, value in other.items():
            if value != first[name]:
                raise ValueError(
                    f"{name} is {first[name]} on rank 0 and {value} on rank {rank}; it must be the "
                    f"same on all ranks."
                )
