"""The beginning of a step against torch: embeddings, and lengths that do not pass the capacity."""

import pytest
import torch
import torch.nn.functional as F

from transformer.model.kernels.decode.embed import embed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "new", "width"), [(1, 1, 64), (3, 1, 37), (2, 4, 48)])
def test_rows_and_lengths(device, dtype, batch, new, width):
    """The rows bit for bit, also of tokens that lie apart; rows that are full stay full."""
    embedding = torch.randn(50, width).to(device, dtype)
    tokens = torch.randint(50, (batch, 2 * new)).to(device)[:, ::2]
    lengths = torch.tensor([5, 20, 18], dtype=torch.int32, device=device)[:batch]
    expected = (lengths + new).clamp(max=20)
    x = embed(tokens, embedding, lengths, 20)
    assert torch.equal(x, F.embedding(tokens, embedding).flatten(0, 1))
    assert torch.equal(lengths, expected)


def test_a_token_that_does_not_exist_is_seen(device):
    """And reads nobody's memory."""
    embedding, lengths = torch.randn(5, 8, device=device), torch.zeros(3, dtype=torch.int32)
    tokens = torch.tensor([[-1], [4], [5]], device=device)
    x = embed(tokens, embedding, lengths.to(device), 9)
    assert x.isfinite().all(1).tolist() == [False, True, False]
