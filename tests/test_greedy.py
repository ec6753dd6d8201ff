"""The greedy choice against torch: the token, its log-probability, and logits that are broken."""

import math

import pytest
import torch

from transformer.decoding import Choice, Decoding
from transformer.kernels.greedy import CHUNK, Record, greedy, greedy_step
from transformer.sampling import Sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 37, CHUNK, 3 * CHUNK + 5])
def test_token_and_log_probability(device, dtype, size):
    """Of the logits as they are, whatever their dtype; ties go to the first."""
    logits = (4 * torch.randn(3, size)).to(device, dtype)
    logits[1, size // 2 :] = logits[1].max()
    tokens, logprobs = greedy(logits)
    exact = logits.double().log_softmax(-1)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    expected = exact.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


def test_rows_may_lie_apart_and_tokens_may_be_banned(device):
    """A whole chunk of -inf is no chunk; the last tokens of a batch are rows further apart."""
    logits = torch.randn(2, 3, 2 * CHUNK, device=device)
    logits[:, :, :CHUNK] = -math.inf
    tokens, logprobs = greedy(logits[:, -1])
    assert torch.equal(tokens, logits[:, -1].argmax(-1))
    assert logprobs.isfinite().all()


@pytest.mark.parametrize(
    "broken", [[math.nan], [math.inf], [math.inf, -math.inf], [math.nan, math.inf]]
)
@pytest.mark.parametrize("place", [0, CHUNK + 3])
def test_broken_logits_are_seen(device, broken, place):
    """In the score of their row and of no other."""
    logits = torch.randn(2, 2 * CHUNK, device=device)
    logits[1, place : place + len(broken)] = torch.tensor(broken, device=device)
    _, logprobs = greedy(logits)
    assert logprobs.isfinite().tolist() == [True, False]


def test_nothing_is_allowed(device):
    """All tokens banned: no token has a probability."""
    _, logprobs = greedy(torch.full((1, 5), -math.inf, device=device))
    assert not logprobs.isfinite().any()


def test_a_step_is_written_down(device):
    """As torch's operations of `Decoding` write it: what the next step reads, and each row's next
    column, wherever that is.
    """
    rows, columns = 3, 4
    logits = torch.randn(columns, rows, 2 * CHUNK)

    order = iter(logits[1:])
    decoding = Decoding(
        lambda *_, **__: next(order)[:, None],
        cache=None,
        logits=logits[0],
        rows=[None] * rows,
        choice=Choice(Sampling(temperature=0)),
        at_once=columns,
        numbers=None,
        seen=None,
        cuda_graph=False,
    )
    newest, tokens = torch.zeros(2, rows, columns, dtype=torch.int64, device=device)
    record = Record(
        newest[:, :1].contiguous(),
        tokens,
        torch.zeros(rows, columns, device=device),
        torch.zeros(rows, 1, dtype=torch.int64, device=device),
    )
    greedy_step(logits[0].to(device), record)
    for step in range(1, columns):
        decoding._step(1)
        greedy_step(logits[step].to(device), record)
        assert torch.equal(record.newest.cpu(), decoding.newest)
    assert torch.equal(record.tokens.cpu(), decoding._tokens)
    torch.testing.assert_close(record.scores.cpu(), decoding._scores, rtol=0, atol=1e-5)
    assert record.column.tolist() == [[columns]] * rows == decoding._column.tolist()

    record.column[1] = 1  # rows are independent
    before = record.tokens.clone()
    record.column[0] = record.column[2] = 0
    chosen, scores = greedy(logits[2].to(device))
    greedy_step(logits[2].to(device), record)
    before[[0, 1, 2], [0, 1, 0]] = chosen
    assert torch.equal(record.tokens, before) and torch.equal(record.scores[1, 1], scores[1])
    assert record.column.tolist() == [[1], [2], [1]]
