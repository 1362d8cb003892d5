"""The rules of every metric of lists."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recsys_topk.metrics.mean import ListMean


def check_metric(make: Callable[[], ListMean]) -> None:
    """Check a metric against the rules for all metrics.

    Masked items and the order of the items have no effect, batches may be split, a list without items is no NaN and
    changes nothing if it is skipped, the right order is not worse than its opposite, and a copy keeps the state.

    Args:
        make: A function without arguments that returns a new metric.

    Example:
        >>> from recsys_topk.metrics import RecallAt
        >>> check_metric(lambda: RecallAt(k=3, m=4))
    """
    generator = torch.Generator().manual_seed(0)
    # One to a few positives in 30 items, so that even a metric of the first ten is not the same for all orders.
    labels = torch.randint(1, 4, (8, 30), generator=generator) * (torch.rand(8, 30, generator=generator) < 0.05).float()
    labels[:, 0], mask = 4.0, torch.rand(8, 30, generator=generator) < 0.8
    mask[:, :2], order = True, torch.randperm(30, generator=generator)
    scores = torch.randn(8, 30, generator=generator)

    def measured(*parts: Sequence[Tensor]) -> ListMean:
        metric = make()
        for x, y, m in parts:
            inputs: Any = [x] * len(getattr(metric, "quotas", (0,))) if metric.whole_cascade else x
            metric.update(inputs, y, m)
        return metric

    whole = measured((scores, labels, mask))
    value, empty = float(whole.compute()), torch.zeros(1, 30)
    lone = measured((scores, labels, mask), (empty, empty, empty.bool()))
    other = {
        "masked items change the value": measured(
            (scores.masked_fill(~mask, 9.0), labels.masked_fill(~mask, 9.0), mask)
        ),
        "the order of the items changes the value": measured((scores[:, order], labels[:, order], mask[:, order])),
        "two batches differ from one": measured(
            *([x[part] for x in (scores, labels, mask)] for part in (slice(3), slice(3, 8)))
        ),
        "a copy has another value": copy.deepcopy(whole),
        **({"a skipped list changes the value": lone} if int(lone.skipped) > int(whole.skipped) else {}),
    }
    for fault, metric in other.items():
        assert math.isclose(float(metric.compute()), value, rel_tol=1e-5), f"metric {whole.name}: {fault}"
    assert math.isfinite(float(lone.compute())), f"metric {whole.name}: a list without items gives NaN"
    best, worst = (float(measured((sign * labels, labels, mask)).compute()) for sign in (1, -1))
    sign = {True: 1, False: -1, None: 0}[whole.higher_is_better]
    assert sign * best >= sign * worst, f"metric {whole.name}: the opposite of the right order is better than it"
