"""The captured steps of the shipped models' training, with a graph that computes anew."""

from types import SimpleNamespace

import torch

from tests.benchmarks.tests.test_training import TINY
from tests.benchmarks.training import train_shipped
from transformer.training.corpus import ChatBatch, Teacher
from transformer.training.run import Recipe, Training

RECIPE = Recipe(Teacher(), 0, 20, 2048, 1e-2, model=TINY)
BATCHES = RECIPE.corpus()[0]


class Replayed(train_shipped.Captured):
    """On the CPU, a replay is the update once more, from and to the same places."""

    def capture(self, tokens, targets):
        loss, norm = torch.zeros(()), torch.zeros(())

        def replay():
            for place, value in zip((loss, norm), self.update(tokens, targets)):
                place.copy_(value)

        return SimpleNamespace(replay=replay), loss, norm


def test_captured_steps_learn_what_plain_ones_do(tmp_path):
    """Rows of padding, the learning rate of each step, and each batch in the place of the last."""
    runs = [
        kind(RECIPE, tmp_path / kind.__name__, torch.device("cpu")) for kind in (Training, Replayed)
    ]
    batches = [batch for batch in BATCHES for _ in range(2)][:20]
    for batch in batches:
        (loss, norm), (own_loss, own_norm) = (run.learn(batch) for run in runs)
        torch.testing.assert_close(own_loss, loss, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own_norm, norm, rtol=1e-3, atol=1e-5)
    assert runs[1].graphs
    for own, plain in zip(runs[1].model.parameters(), runs[0].model.parameters(), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-3, atol=1e-4)


def test_a_batch_has_as_many_rows_as_fit():
    """The rows that are added are padding, of which nothing is learned."""
    whole = max(BATCHES, key=lambda batch: len(batch.tokens))
    batch = ChatBatch(whole.tokens[:1], whole.learned[:1])
    tokens, targets = train_shipped.full(batch, 2048)
    assert len(tokens) == len(targets) == 2048 // tokens.shape[1] > 1
    assert (tokens[:1].numpy() == batch.tokens).all() and (targets[0] >= 0).any()
    assert (tokens[1:] == train_shipped.byte_tokenizer.PAD).all()
    assert (targets[1:] == train_shipped.IGNORED).all()
