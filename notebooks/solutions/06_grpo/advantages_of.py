"""Solution of `advantages_of` in 06_grpo."""


def advantages_of(rewards):
    """rewards (groups, G) to advantages (groups, G)."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4)


def wrong_batch(rewards):
    """The mean of all groups together."""
    return (rewards - rewards.mean()) / (rewards.std(1, keepdim=True) + 1e-4)


def wrong_spread(rewards):
    """Without Bessel's correction."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True, correction=0) + 1e-4)


def wrong_floor(rewards):
    """Equal rewards give 0 / 0."""
    return (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
