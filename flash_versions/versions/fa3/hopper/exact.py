"""The forward on Hopper with batch_invariant: two kernels, in which a row has the same bits."""

import torch

from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper import host
from flash_versions.versions.fa3.hopper.decode import host as decode
from flash_versions.versions.tiles import wgmma
from flash_versions.versions.tiles.tma import undescribable


def serves(request: Request) -> bool:
    """Whether these kernels compute a request. Only what all rows of a model share decides, so that
    no layout is left to others.
    """
    q, k, v = request.q, request.k, request.v
    known = wgmma.available(q.device) and q.dtype in host.SIXTEEN_BITS
    return known and max(q.shape[3], v.shape[3]) <= 256 and k.numel() > 0


def forward(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE of a request that this module `serves`."""
    if decode.left_to_gathering(request):
        request = in_rows(request)
    if not decode.left_to_gathering(request):
        return decode.forward(request)
    return host.forward(request)


def in_rows(request: Request) -> Request:
    """The request with keys in rows that boxes reach: pages, and what is laid out otherwise, are
    copied.
    """
    q, k, v = request.q, request.k, request.v
    table, cuts, lengths = request.block_table, request.cu_seqlens_k, request.kv_lengths
    if table is not None:
        # Behind a sequence's last page, entries may be anything.
        pages = table.clamp(0, k.shape[0] - 1).long()
        k, v = k[pages].flatten(1, 2), v[pages].flatten(1, 2)
        if cuts is not None:
            lengths = cuts.diff() if lengths is None else torch.minimum(cuts.diff(), lengths)
            lengths = lengths.contiguous()
        cuts = None
    given = (x.contiguous() if undescribable("x", x) else x for x in (q, k, v))
    q, k, v = (x if x.data_ptr() % 16 == 0 else x.clone() for x in given)
    made = request._replace(
        q=q, k=k, v=v, block_table=None, cu_seqlens_k=cuts, kv_lengths=lengths
    )  # fmt: skip
    if not made.is_ragged or host.kv_apart(made) is not None:
        return made
    k, v = k.contiguous(), v.contiguous()
    if k.shape[1] == 1:  # of a single row there is no distance to the next sequence
        if lengths is None:
            lengths = torch.ones(k.shape[0], dtype=torch.int32, device=k.device)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
    return made._replace(k=k, v=v, kv_lengths=lengths)
