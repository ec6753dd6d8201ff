"""The exercise of 02_fa2: a missing correction."""

from collections.abc import Callable

import numpy as np

from lessons.practice.exercises import exercise


@exercise(
    "attend",
    "row_sum is corrected by alpha. Which other sum was computed with the old maximum?",
    "Correct acc before the new block is added to it: acc * alpha[:, None].",
)
def check_attend(attend: Callable[..., np.ndarray]) -> None:
    """Hold a loop over KV blocks against plain attention."""
    generator = np.random.default_rng(0)
    q, k, v = (generator.normal(size=(8, 4)) for _ in range(3))
    for which, keys, values, block in (
        ("one block", k, v, 8),
        ("blocks of 2 keys", k, v, 2),
        ("blocks of 1 key, large scores", 5 * k, v, 1),
        ("7 keys in blocks of 3", k[:7], v[:7], 3),
    ):
        with np.errstate(all="ignore"):
            found = np.asarray(attend(q.copy(), keys.copy(), values.copy(), block), dtype=float)
        scores = q @ keys.T / np.sqrt(q.shape[1])
        p = np.exp(scores - scores.max(1, keepdims=True))
        truth = p / p.sum(1, keepdims=True) @ values
        assert found.shape == truth.shape, (
            f"{which}: o has shape {found.shape}; it should be {truth.shape}."
        )
        wrong = ~np.isclose(found, truth, rtol=1e-4, atol=1e-5).all(1)
        row = int(wrong.argmax())
        assert not wrong.any(), (
            f"{which}: {wrong.sum()} of {len(wrong)} rows are wrong; row {row} is {found[row]} and "
            f"should be {truth[row]}."
        )
