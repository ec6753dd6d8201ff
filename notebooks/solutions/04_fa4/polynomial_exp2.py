"""2^x without an exponential: a polynomial, and an addition to the exponent's bits."""

import torch


def polynomial_exp2(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """2^x of fp32 x up to 127; 0 from -127 on. coefficients are c_d .. c_1 of 1 + c_1 f + ..."""
    x = x.clamp(min=-127.0)
    n = torch.round(x)
    f = x - n
    p = torch.full_like(f, coefficients[0])
    for c in (*coefficients[1:], 1.0):
        p = p * f + c
    return (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def wrong_rounds_down(x, coefficients):
    """f is then in 0 .. 1, and the polynomial was fitted to -1/2 .. 1/2."""
    x = x.clamp(min=-127.0)
    n = torch.floor(x)
    f, p = x - n, torch.full_like(x, coefficients[0])
    for c in (*coefficients[1:], 1.0):
        p = p * f + c
    return (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def wrong_without_the_exponent(x, coefficients):
    """Only 2^f."""
    f = x - torch.round(x)
    p = torch.full_like(f, coefficients[0])
    for c in (*coefficients[1:], 1.0):
        p = p * f + c
    return p


def wrong_without_the_clamp(x, coefficients):
    """Below -127 the exponent's bits run into the sign."""
    n = torch.round(x)
    bits = polynomial_exp2(x - n, coefficients).view(torch.int32) + (n.to(torch.int32) << 23)
    return bits.view(torch.float32)


def wrong_calls_the_exponential(x, coefficients):
    """Right, and no polynomial."""
    return torch.exp2(x)
