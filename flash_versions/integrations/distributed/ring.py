"""Ring attention: each rank keeps its queries, and the keys go round.

A sequence is split over the W ranks of a process group. In step t, rank r attends with its queries
to the keys and values of rank r - t, and at the same time passes them on to rank r + 1 and receives
those of rank r - t - 1: a step costs the slower of the two, no rank ever holds more than two blocks
of keys, and after W steps every query has met every key.

    forward     for t in 0 .. W-1:  start sending the block (K, V) to r+1, receiving the next
                                    o_t, lse_t = attention(Q_r, block)
                                    o, lse = merge(o, lse, o_t, lse_t)
                                    wait for the next block

What a step adds to o is merged by its LSE (`merge.py`, the algebra of FA2's split-KV). In the
backward nothing has to be merged: P = exp(S - LSE) with the LSE over *all* keys and delta =
rowsum(dO * O) with the final O are those of one device, whatever block S is of. So a version's own
backward, given the final O and LSE, returns what this block of keys contributes, and contributions
add up:

    backward    for t in 0 .. W-1:  start sending the block (K, V) to r+1, receiving the next
                                    dq_t, dk_t, dv_t = backward(Q_r, block, o, lse, dO)
                                    dQ += dq_t
                                    wait for (dK, dV) of this block: what r-1, r-2, ... added
                                    add dk_t, dv_t; start sending them to r+1
                                    wait for the next block

(dK, dV) travel one step behind their block and come home with the last step. Partial results are in
the dtype of the inputs, as the kernels write them; their sums and merged outputs are in fp32. The
order of all sums is fixed: the same bits in every run.

Causal masks. If rank r held the r-th part of the sequence, rank 0 would see one block and rank W-1
all W, and everybody would wait for rank W-1. In the zig-zag layout the sequence is cut into 2W
chunks and rank r holds chunks r and 2W-1-r, an early and a late one. Then in every step but the
first (its own block, under the ordinary causal mask) each rank computes the same half of a block:
of an earlier rank's keys, all queries see the early chunk and none the late one; of a later rank's
keys, the late queries see all and the early ones none.

Sources: Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889.
Balanced causal work: Brandon et al. 2023, "Striped Attention", arXiv:2311.09431; the zig-zag form
is that of Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2) and of ring-flash-attention.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from flash_versions.dispatch.autograd import compute
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import Version
from flash_versions.integrations.distributed.merge import merge_attention_states

KEYS, GRADIENTS = 0, 1  # tags of what goes round
Block = tuple[torch.Tensor, torch.Tensor]  # (K, V), or their gradients


class Part(NamedTuple):
    """Which of a rank's queries attend to which keys of a block, under a causal mask or to all."""

    queries: slice
    keys: slice
    causal: bool


def part(rank: int, source: int, length: int, causal: bool, layout: str) -> Part | None:
    """What `rank` computes when it holds the keys of rank `source`; None for nothing.

    Args:
        rank: whose queries.
        source: whose keys.
        length: rows that each rank holds, of queries as of keys if causal.
        causal: the mask of the whole sequence.
        layout: "zigzag" or "contiguous", how the sequence was split.
    """
    everything = slice(None)
    if not causal:
        return Part(everything, everything, False)
    if source == rank:
        return Part(everything, everything, True)
    if layout == "contiguous":
        return Part(everything, everything, False) if source < rank else None
    early, late = slice(length // 2), slice(length // 2, None)
    if source < rank:
        return Part(everything, early, False)
    return Part(late, everything, False)


@dataclass(frozen=True)
class Ring:
    """A call of ring attention, but for its tensors.

    Attributes:
        version: which kernels compute the parts.
        group: the process group, each rank of which holds a piece of the sequence.
        layout: how it is split.
    """

    version: Version
    group: "dist.ProcessGroup"
    layout: str
    causal: bool
    scale: float
    softcap: float | None

    @property
    def size(self) -> int:
        """The number of ranks, W."""
        return self.group.size()

    def part(self, step: int, length: int) -> Part | None:
        """What this rank computes in a step, of `length` rows."""
        rank = self.group.rank()
        return part(rank, (rank - step) % self.size, length, self.causal, self.layout)

    def request(self, here: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Request:
        """Attention of a part of this rank's queries and of the block of keys that is here."""
        return Request(
            q[:, here.queries],
            k[:, here.keys],
            v[:, here.keys],
            scale=self.scale,
            window_right=0 if here.causal else None,
            softcap=self.softcap,
            return_lse=True,
        )

    def pass_on(self, flat: torch.Tensor, tag: int) -> "Transfer":
        """Start sending a tensor to the next rank and receiving one like it from the one before."""
        rank, arriving = self.group.rank(), torch.empty_like(flat)
        ends = ((dist.isend, flat, rank + 1), (dist.irecv, arriving, rank - 1))
        operations = [
            dist.P2POp(operation, x, group=self.group, tag=tag, group_peer=peer % self.size)
            for operation, x, peer in ends
        ]
        return Transfer(flat, arriving, dist.batch_isend_irecv(operations))


class Transfer(NamedTuple):
    """A tensor on its way to the next rank, and another one from the rank before."""

    leaving: torch.Tensor
    arriving: torch.Tensor
    works: "list[dist.Work]"

    def wait(self) -> torch.Tensor:
        """What arrived. On a GPU the stream waits and the host does not."""
        for work in self.works:
            work.wait()
        return self.arriving


class RingAttention(torch.autograd.Function):
    """(o, lse) of the whole sequence for the queries of this rank; see the top of this file."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, q, k, v):  # noqa: D102
        ctx.set_materialize_grads(False)
        o, lse = ring_forward(ring, q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dlse):  # noqa: D102
        q, k, v, o, lse = ctx.saved_tensors
        return None, *ring_backward(ctx.ring, q, k, v, o, lse, do, dlse)


def ring_forward(
    ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse): o (batch, M / W, heads, head_dim_v) in q's dtype, lse (batch, heads, M / W)."""
    flat = flattened(k, v)
    o = lse = q.new_empty(0)  # until step 0, a rank's own keys: it has all of its queries
    for step in range(ring.size):
        transfer = ring.pass_on(flat, KEYS) if step + 1 < ring.size else None
        if (here := ring.part(step, q.shape[1])) is not None:
            request = ring.request(here, q, *like(flat, k, v))
            o_part, lse_part, _ = compute.run_forward(ring.version, request)
            o_part = o_part.to(wide(q.dtype))
            if step == 0:
                o, lse = o_part, lse_part
            else:
                rows = here.queries
                o[:, rows], lse[..., rows] = merge_attention_states(
                    o[:, rows], lse[..., rows], o_part, lse_part
                )
        if transfer is not None:
            flat = transfer.wait()
    return o.to(q.dtype), lse


def ring_backward(
    ring: Ring,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of what this rank holds, in the dtype of the inputs."""
    flat = flattened(k, v)
    dq = torch.zeros_like(q, dtype=wide(q.dtype))
    sums = torch.zeros_like(flat, dtype=wide(q.dtype))
    travelling = None
    for step in range(ring.size):
        transfer = ring.pass_on(flat, KEYS) if step + 1 < ring.size else None
        here = ring.part(step, q.shape[1])
        found: list[torch.Tensor] = []
        if here is not None:
            rows = here.queries
            dq_part, *found = part_backward(
                ring.version,
                ring.request(here, q, *like(flat, k, v)),
                o[:, rows],
                lse[..., rows],
                None if do is None else do[:, rows],
                None if dlse is None else dlse[..., rows],
            )
            dq[:, rows] += dq_part
        if travelling is not None:
            sums = travelling.wait()
        if here is not None:
            for total, x in zip(like(sums, k, v), found):
                total[:, here.keys] += x
        travelling = ring.pass_on(sums, GRADIENTS)
        if transfer is not None:
            flat = transfer.wait()
    assert travelling is not None
    dk, dv = like(travelling.wait(), k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def part_backward(
    version: Version,
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) by way of the keys of the request only.

    Args:
        version: whose kernels.
        request: some queries, and some of the keys that they see.
        o: the result of these queries over all their keys.
        lse: its LSE.
        do: gradient of o, or None.
        dlse: gradient of the LSE, or None.
    """
    if version.backward is None:
        return plain_backward(version, request, o, lse, do, dlse)
    statistics = None
    if version.num_statistics:  # FA1 divides exp(S - m) by l; from an LSE, m is the LSE and l is 1
        statistics = torch.stack((lse, torch.ones_like(lse)))
    dq, dk, dv, _ = compute.run_backward(version, request, o, lse, statistics, do, dlse)
    return dq, dk, dv


def plain_backward(
    version: Version,
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`part_backward` of a version without one, by autograd through its forward.

    o = sum_t w_t o_t with w_t = exp(lse_t - lse) gives the gradients of what is merged: do_t = w_t
    do and dlse_t = w_t (rowsum(do * (o_t - o)) + dlse).
    """
    leaves = [x.detach().requires_grad_() for x in (request.q, request.k, request.v)]
    q, k, v = leaves
    with torch.enable_grad():
        o_part, lse_part, _ = version.forward(request._replace(q=q, k=k, v=v))
    assert lse_part is not None
    weight = torch.exp(lse_part.detach() - lse)
    do = torch.zeros_like(o) if do is None else do
    by_weight = (do * (o_part.detach() - o)).sum(-1).mT
    if dlse is not None:
        by_weight = by_weight + dlse
    do_part = (weight.mT[..., None] * do).to(o_part.dtype)
    dlse_part = (weight * by_weight).to(lse_part.dtype)
    dq, dk, dv = torch.autograd.grad((o_part, lse_part), leaves, (do_part, dlse_part))
    return dq, dk, dv


def flattened(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values as one message."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def like(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Block:
    """The two tensors of a message, of the shapes of k and v: views of it."""
    first, second = flat.split((k.numel(), v.numel()))
    return first.view(k.shape), second.view(v.shape)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results are summed in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
