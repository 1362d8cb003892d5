"""Multi-layer perceptrons whose first layer is applied to the parts of a concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.stages.join_relu import join_relu
from recsys_topk.ops.stages.pooled_dot import gather
from recsys_topk.processes import processes, total

Activation = Literal["relu", "prelu"]
Initialisation = Literal["default", "he"]


class BatchNorm(nn.BatchNorm1d):
    """Batch norm with statistics over the rows of all processes that share a batch (`recsys_topk.processes`).

    Unlike `torch.nn.SyncBatchNorm` it works on a CPU, and if a process has no rows. The forward pass and the backward
    pass each sum 2 D + 1 numbers over processes.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalise (rows, D). The statistics use the rows where `mask` is True; None = all rows."""
        if not self.training or (mask is None and processes() == 1):
            return super().forward(x)
        wide = x.double() if mask is None else torch.where(mask[:, None], x.double(), 0.0)
        number = wide.new_full((1,), len(x)) if mask is None else mask.sum().double().view(1)
        sums = total(torch.cat([wide.sum(0), wide.square().sum(0), number]))
        rows = sums[-1].detach().clamp_min(1.0)
        mean = sums[: self.num_features] / rows
        variance = sums[self.num_features : -1] / rows - mean.square()
        with torch.no_grad():
            unbiased = variance * (rows / (rows - 1.0).clamp_min(1.0))
            for running, statistic in ((self.running_mean, mean), (self.running_var, unbiased)):
                assert running is not None
                running.lerp_(statistic.to(running.dtype), self.momentum or 0.0)
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        scale = torch.rsqrt(variance.clamp_min(0.0) + self.eps) * self.weight
        return x * scale.to(x.dtype) + (self.bias - mean * scale).to(x.dtype)


class MLP(nn.Module):
    """Linear layers with an activation between them. The first layer can be applied to each input part separately.

    A linear map of a concatenation [a, b, ...] is a sum of linear maps W_a a + W_b b + ...: `project` applies the
    columns of the first layer that belong to one part, and `rest` computes everything after the sum. A part shared by
    many rows (the request, a pool item) is thus multiplied once instead of once per row.

    Args:
        inputs: Width of each part of the input.
        widths: Widths of the layers; the last one is the output.
        activation: ``"relu"`` or ``"prelu"``.
        batch_norm: Share of the running averages that is kept at each step (0.999 keeps 99.9 %); None = no batch norm.
        initialisation: ``"default"`` (PyTorch's) or ``"he"`` (He et al. 2015).
        dropout: Dropout after each activation.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        widths: Sequence[int],
        activation: Activation = "relu",
        batch_norm: float | None = None,
        initialisation: Initialisation = "default",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not widths:
            raise ValueError("an MLP needs at least one layer; got widths=[]")
        self.inputs = list(inputs)
        self.normalised = batch_norm is not None
        self.first = nn.Linear(sum(inputs), widths[0])
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            if batch_norm is not None:
                layers.append(BatchNorm(before, momentum=1.0 - batch_norm))
            layers.append(nn.ReLU(inplace=True) if activation == "relu" else nn.PReLU(before))
            if dropout:
                layers.append(nn.Dropout(dropout))
            layers.append(nn.Linear(before, after))
        self.tail = nn.Sequential(*layers)
        if initialisation == "he":
            for layer in (self.first, *self.tail):
                if isinstance(layer, nn.Linear):
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                    nn.init.zeros_(layer.bias)

    @property
    def last(self) -> nn.Linear:
        """The output layer."""
        layers = [self.first, *self.tail]
        output = layers[-1]
        assert isinstance(output, nn.Linear)
        return output

    def project(self, part: int, x: Tensor) -> Tensor:
        """Return the contribution of part number `part` to the first layer's output, without the bias."""
        start = sum(self.inputs[:part])
        return x @ self.first.weight[:, start : start + self.inputs[part]].t()

    def rest(self, summed: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output, given the sum of all projections.

        Args:
            summed: (..., first width).
            mask: Boolean (...), True = a real row. In training with batch norm the other rows are excluded from the
                statistics and have output 0. In all other cases they are computed like real rows.
        """
        if mask is None or not self.normalised or not self.training:
            flat: Tensor = self.tail(summed.flatten(0, -2) + self.first.bias)
            return flat.view(*summed.shape[:-1], -1)
        if not may_read(mask):  # the number of real rows is not known on the host, so all rows are computed
            x, valid = summed.flatten(0, -2) + self.first.bias, mask.flatten()
            for layer in self.tail:
                x = layer(x, valid) if isinstance(layer, BatchNorm) else layer(x)
            return torch.where(mask[..., None], x.view(*summed.shape[:-1], -1), 0.0)
        real: Tensor = self.tail(summed[mask] + self.first.bias)
        return real.new_zeros(*summed.shape[:-1], real.shape[-1]).masked_scatter(mask[..., None], real)

    def joined(self, own: Tensor | None, requests: Tensor, items: Tensor, candidates: Tensor, mask: Tensor) -> Tensor:
        """Return the output for lists of pool items, (B, N, last width), given the projections of the parts.

        Args:
            own: Projection of features of the candidate in its list, (B, N, first width), overwritten; None = none.
            requests: Projection of the requests, (B, first width).
            items: Projection of the pool items, (M, first width).
            candidates: Rows of the pool, (B, N).
            mask: Boolean (B, N), as in `rest`.
        """
        if self.tail and isinstance(self.tail[0], nn.ReLU):
            hidden: Tensor = self.tail[1:](join_relu(own, requests + self.first.bias, items, candidates))
            return hidden.view(*candidates.shape, -1)
        summed = gather(items, candidates) + requests[:, None]
        return self.rest(summed if own is None else summed + own, mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply all layers to a concatenated input (..., sum of inputs); `mask` as in `rest`."""
        return self.rest(x @ self.first.weight.t(), mask)
