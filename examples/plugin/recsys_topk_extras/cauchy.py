"""DFTopK with the Cauchy distribution, whose gradient decreases with a power of the distance, not exponentially."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from recsys_topk.operators import SoftSelection, TopKOperator
from recsys_topk.ops.selection.kth_pair import kth_pair


class Cauchy(TopKOperator):
    """p_i = 1/2 + arctan((x_i - theta) / tau) / pi, theta midway between the k-th score and the next."""

    name: ClassVar[str] = "cauchy"
    cost: ClassVar[str] = "n"
    sums_to_k: ClassVar[bool] = False
    paper: ClassVar[str] = "an example"

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        kept, cut = kth_pair(scores, k, mask)
        z = (scores - 0.5 * (kept + cut)) / self.tau
        # 1/2 + arctan(z)/pi = arctan2(1, -z)/pi, which does not cancel for z far below 0.
        one = torch.ones_like(z)
        return SoftSelection(torch.log(torch.atan2(one, -z) / math.pi), torch.log(torch.atan2(one, z) / math.pi), mask)
