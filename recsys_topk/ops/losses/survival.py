"""The membership of surviving every stage of a cascade, from the memberships of its stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.numerics import log1mexp


def survival_logs(log_p: Sequence[Tensor], log_q: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log prod_m p_m and log(1 - prod_m p_m), the shape of each input.

    The complement is accumulated as q = a + b (1 - a), in logarithms. It stays accurate if every q_m is tiny.

    Args:
        log_p: log p_m of each stage.
        log_q: log(1 - p_m) of each stage.

    Example:
        >>> half = torch.tensor([0.5]).log()
        >>> [x.exp() for x in survival_logs([half, half], [half, half])]
        [tensor([0.2500]), tensor([0.7500])]
    """
    survived = torch.stack(list(log_p)).sum(0)
    floor = torch.finfo(survived.dtype).min / 4  # logaddexp of two infinities has no gradient
    failed = log_q[0].clamp_min(floor)
    for other in log_q[1:]:
        failed = torch.logaddexp(failed, other.clamp_min(floor) + log1mexp(failed))
    return survived, failed
