"""The choice of tokens against torch: token, log-probability, draws, and logits that are broken."""

import math

import pytest
import torch

from transformer.generation.decoding import Decoding, SampleOptions
from transformer.generation.sampling import Sampling, draw_from
from transformer.model.kernels.decode.sample import CHUNK, Draws, Record, choose, sample_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 37, CHUNK, 3 * CHUNK + 5])
def test_token_and_log_probability(device, dtype, size):
    """Of the logits as they are, whatever their dtype; ties go to the first."""
    logits = (4 * torch.randn(3, size)).to(device, dtype)
    logits[1, size // 2 :] = logits[1].max()
    tokens, logprobs = choose(logits)
    exact = logits.double().log_softmax(-1)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    expected = exact.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "size, temperature", [(1, 1.0), (37, 1.0), (CHUNK, 0.7), (3 * CHUNK + 5, 1.5)]
)
def test_a_draw_inverts_the_cumulative_distribution(device, dtype, size, temperature):
    """The number lies between the cumulative probabilities before and after the drawn token, up to
    rounding of fp32 exponentials; the score is the token's log-probability.
    """
    rows = 64
    logits = (3 * torch.randn(rows, size)).to(device, dtype)
    uniform = torch.rand(rows, dtype=torch.float64, device=device)
    uniform[0], uniform[1] = 0, 1 - 2**-53
    banned = torch.rand(size, device=device) < 0.3 if size > 1 else None
    tokens, logprobs = choose(logits, Draws(uniform[:, None], None, temperature), banned)
    scaled = logits.double() / temperature
    if banned is not None:
        scaled[:, banned] = -math.inf
    probabilities = scaled.softmax(-1)
    after = probabilities.cumsum(-1).gather(1, tokens[:, None])[:, 0]
    own = probabilities.gather(1, tokens[:, None])[:, 0]
    assert (own > 0).all() and (own.log() - logprobs.double()).abs().max() < 2e-6
    rounding = 1e-6
    assert (uniform < after + rounding).all() and (uniform >= after - own - rounding).all()


def test_what_has_no_probability_is_never_drawn(device):
    """Also not where rounding would have it: a chunk, a beginning and an end of -inf."""
    logits = torch.zeros(3, 3 * CHUNK, device=device)
    logits[:, :CHUNK] = logits[:, CHUNK : CHUNK + 7] = logits[:, -CHUNK - 5 :] = -math.inf
    uniform = torch.tensor([0, 0.5, 1 - 2**-53], dtype=torch.float64, device=device)
    tokens, logprobs = choose(logits, Draws(uniform[:, None]))
    allowed = range(CHUNK + 7, 2 * CHUNK - 5)
    assert tokens.tolist() == [allowed[0], allowed[len(allowed) // 2], allowed[-1]]
    torch.testing.assert_close(logprobs.exp(), torch.full_like(logprobs, 1 / len(allowed)))


def test_unlikely_tokens_are_drawn_as_often_as_they_should_be(device):
    """Fifty thousand tokens that share 1 % of the probability, behind one that has the rest:
    a running sum in fp32 would be wrong by dozens of them.
    """
    size = 50_000
    logits = torch.zeros(1, size, device=device)
    logits[0, 0] = math.log(99 * (size - 1))
    shares = torch.linspace(0.02, 0.98, 33, dtype=torch.float64, device=device)
    rows, numbers = logits.expand(33, -1).contiguous(), 0.99 + 0.01 * shares
    for tokens in (choose(rows, Draws(numbers[:, None]))[0], draw_from(rows.softmax(-1), numbers)):
        assert (tokens - shares * (size - 1)).abs().max() < 2


def chosen(logits, number, banned=None):
    """The likeliest token, or the one that a number draws."""
    if number is None:
        return choose(logits, None, banned)
    numbers = torch.full((len(logits), 1), number, dtype=torch.float64, device=logits.device)
    return choose(logits, Draws(numbers), banned)


@pytest.mark.parametrize("number", [None, 0.3])
def test_rows_may_lie_apart_and_tokens_may_be_banned(device, number):
    """A whole chunk of -inf is no chunk; the last tokens of a batch are rows further apart."""
    logits = torch.randn(2, 3, 2 * CHUNK, device=device)
    banned = torch.arange(2 * CHUNK, device=device) < CHUNK
    allowed = logits.masked_fill(banned, -math.inf)
    expected = chosen(allowed[:, -1].contiguous(), number)
    assert number is not None or torch.equal(expected[0], allowed[:, -1].argmax(-1))
    for rows, out in ((allowed[:, -1], None), (logits[:, -1], banned)):
        found = chosen(rows, number, out)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-6)
        assert found[1].isfinite().all()


@pytest.mark.parametrize(
    "broken", [[math.nan], [math.inf], [math.inf, -math.inf], [math.nan, math.inf]]
)
@pytest.mark.parametrize("place", [0, CHUNK + 3])
def test_broken_logits_are_seen(device, broken, place):
    """In the score of their row and of no other."""
    logits = torch.randn(2, 2 * CHUNK, device=device)
    logits[1, place : place + len(broken)] = torch.tensor(broken, device=device)
    for number in (None, 0, 0.5, 1 - 2**-53):
        tokens, logprobs = chosen(logits, number)
        assert logprobs.isfinite().tolist() == [True, False]
        assert tokens.min() >= 0 and tokens.max() < logits.shape[1]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.8)], ids=str)
def test_steps_are_written_down(device, sampling):
    """As torch's operations of `Decoding` write them: what the next step reads, each row's next
    column, wherever that is, and each row's next number.
    """
    rows, columns = 3, 4
    logits = torch.randn(columns, rows, 2 * CHUNK)
    numbers = None if sampling.greedy else torch.rand(rows, columns - 1, dtype=torch.float64)
    banned = range(0, 2 * CHUNK, 3)

    order = iter(logits[1:])
    given = None, logits[0], [None] * rows, SampleOptions(sampling, banned)
    how = {"at_once": columns, "numbers": numbers, "seen": None, "cuda_graph": False}
    decoding = Decoding(lambda *_, **__: next(order)[:, None], *given, **how)
    newest, tokens = torch.zeros(2, rows, columns, dtype=torch.int64, device=device)
    record = Record(
        tokens,
        torch.zeros(rows, columns, device=device),
        newest[:, :1].contiguous(),
        torch.zeros(rows, 1, dtype=torch.int64, device=device),
    )
    draws = None
    if numbers is not None:
        draws = Draws(numbers.to(device), torch.zeros_like(record.column), sampling.temperature)
    out = torch.zeros(2 * CHUNK, dtype=torch.bool, device=device)
    out[::3] = True
    for step in range(columns):
        if step:
            decoding._step(1)
        sample_into(logits[step].to(device), record, draws, out)
        assert torch.equal(record.newest.cpu(), decoding.newest)
    assert torch.equal(record.tokens.cpu(), decoding._tokens) and (tokens % 3 > 0).all()
    torch.testing.assert_close(record.scores.cpu(), decoding._scores, rtol=0, atol=1e-5)
    assert record.column.tolist() == [[columns]] * rows == decoding._column.tolist()
    if draws is not None:  # the last number serves for steps in vain
        assert draws.drawn.tolist() == [[columns - 2]] * rows == decoding._drawn.tolist()
