"""FlashAttention 4, backward, portable: FA3's kernels, with exponentials on two units.

What FA3 wasted. Both kernels recompute P = 2^(S - LSE), so that a backward computes two
exponentials for every score where a forward computes one. Meanwhile the multiply-add units idle.

What changes. A polynomial computes a share of these exponentials (`exp2.py`), as in the forward;
`eighths` sets the share. The LSE is known, so a backward has no maximum, no reference and nothing
to rescale, and the polynomial is the only one of the forward's two tricks that applies. P is
rounded to 16 bits for dV as in the forward, and dS for dQ and dK, which covers the polynomial's
error.

    P^T = 2^(S^T - LSE)   [exp unit]        now:    P^T = 2^(S^T - LSE)   [exp unit | multiply-add]

Everything else is FA3's, kernels included: they take 2^x as a parameter.

Cost. A polynomial takes 8 instructions in place of one that keeps the exponential unit busy for 8
cycles of a warp. A backward has five products for each exponential (or in two kernels seven for
two) and a forward has two, so there is less to gain than in the forward. The polynomial is off
where it does not pay in the forward.

Source. Zadouri et al. 2026, "FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for
Asymmetric Hardware Scaling", arXiv:2603.05451, which was written for Blackwell.
"""

from typing import Any, NamedTuple

import torch
import triton

from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import (
    KEY_GRADIENTS,
    QUERY_GRADIENT,
    LaunchConfig,
    backward_config,
)
from flash_versions.versions.fa3 import backward as exact
from flash_versions.versions.fa3.backward import MEASURED_KV, MEASURED_Q
from flash_versions.versions.fa4.exp2 import mixed_exp2
from flash_versions.versions.fa4.forward import SHARED_OUT, check_rule, choose_rule, constants_of


class Share(NamedTuple):
    """How many exponentials are polynomials, and of which degree; see `mixed_exp2`."""

    EIGHTHS: Any
    DEGREE: Any


@triton.jit
def exp2(x, share):
    """2^x, a share of it by the polynomial."""
    return mixed_exp2(x, share.EIGHTHS, share.DEGREE)


def check_share(
    request: Request, kv_config: LaunchConfig, q_config: LaunchConfig, eighths: int
) -> None:
    """Refuse what the kernels cannot do; ValueError with a sentence."""
    check_rule(request, q_config, 0.0, eighths)
    if eighths and request.dropout_p > 0:
        raise ValueError(
            f"eighths={eighths} is not possible with dropout_p={request.dropout_p}, whose random "
            f"numbers occupy the same units; use eighths=0."
        )
    if eighths % 8 and kv_config.block_q % SHARED_OUT:
        raise ValueError(
            f"eighths={eighths} with block_q={kv_config.block_q} for dK and dV is not possible; 0 "
            f"and 8 are, or a block_q that is a multiple of {SHARED_OUT}."
        )


def backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    kv_config: LaunchConfig | None = None,
    q_config: LaunchConfig | None = None,
    eighths: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of attention, of a request that is not `fa3.backward.left_to_gathering`.

    Args:
        request: as o, lse, statistics, do, dlse and the configurations, see FA3's.
        eighths: of the exponentials that are polynomials, 0 to 8; None: as in the forward, see
            `choose_rule`, and 0 with dropout, whose random numbers occupy the same units.

    Raises:
        ValueError: eighths is out of range, or does not suit the dtype or the tiles.

    Returns:
        dq, dk, dv, dsink as FA3's.
    """
    kv_config = kv_config or backward_config(request, MEASURED_KV, KEY_GRADIENTS)
    q_config = q_config or backward_config(request, MEASURED_Q, QUERY_GRADIENT)
    if eighths is None:
        _, eighths = choose_rule(request, q_config) if request.dropout_p == 0 else (0.0, 0)
    check_share(request, kv_config, q_config, eighths)
    given = request, o, lse, statistics, do, dlse, kv_config, q_config
    if not eighths:
        return exact.backward(*given)
    _, constant, degree = constants_of(0.0, eighths, request.q.dtype)
    return exact.backward(*given, function=exp2, share=Share(constant, degree))
