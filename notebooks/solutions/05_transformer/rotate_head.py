"""Solution of `rotate_head` in 05_transformer."""

import torch


def rotate_head(x, position, theta):
    """x (n,) at a position, turned."""
    n = len(x)
    angle = position / theta ** (torch.arange(0, n, 2) / n)
    a, b = x[: n // 2], x[n // 2 :]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))


def wrong_pairs(x, position, theta):
    """Neighbours are paired, as in Meta's own checkpoints."""
    n = len(x)
    angle = position / theta ** (torch.arange(0, n, 2) / n)
    a, b = x[0::2], x[1::2]
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.stack(turned, dim=1).flatten()


def wrong_direction(x, position, theta):
    """The turn goes the other way."""
    return rotate_head(x, -position, theta)


def wrong_exponent(x, position, theta):
    """Pair i turns as if it were pair i / 2."""
    n = len(x)
    angle = position / theta ** (torch.arange(n // 2) / n)
    a, b = x[: n // 2], x[n // 2 :]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))
