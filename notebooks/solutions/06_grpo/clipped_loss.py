"""Solution of `clipped_loss` in 06_grpo."""

import math


def clipped_loss(logprob, old, advantage, low=0.2, high=0.28):
    """Loss of a token: logprob now, old when it was sampled."""
    r = math.exp(logprob - old)
    clipped = min(max(r, 1 - low), 1 + high)
    return -min(r * advantage, clipped * advantage)


def wrong_clip_only(logprob, old, advantage, low=0.2, high=0.28):
    """Without the minimum, going too far the wrong way is not pushed back."""
    r = math.exp(logprob - old)
    return -min(max(r, 1 - low), 1 + high) * advantage


def wrong_sign(logprob, old, advantage, low=0.2, high=0.28):
    """What should grow is made smaller."""
    return -clipped_loss(logprob, old, advantage, low, high)


def wrong_bound(logprob, old, advantage, low=0.2, high=0.28):
    """The lower bound on both sides."""
    return clipped_loss(logprob, old, advantage, low, low)
