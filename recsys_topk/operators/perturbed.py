"""Perturbed top-k: how often an item is among the k best when noise is added to the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import OperatorOptions, SoftSelection, TopKOperator, clamped
from recsys_topk.operators.score_scale import Tau
from recsys_topk.ops.dispatch import may_read, operation, refuse_second_derivative, under_transform
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.kth_pair import kth_values

NO_SECOND = (
    "the perturbed operator has no second derivative: its gradient is an estimate from random samples. Call backward "
    "without create_graph=True, or use a smooth operator such as lapsum or sigmoid"
)
NO_TRANSFORM = (
    "the perturbed operator draws random numbers and cannot run under torch.func (grad, vmap, jacrev). Call "
    "torch.autograd.grad instead, or use a deterministic operator such as lapsum or sigmoid"
)


class PerturbedTopK(TopKOperator):
    """Mean of hard top-k memberships under Gaussian noise of standard deviation tau.

    p = mean_s y_s, y_s the hard top k of x + tau z_s, z_s standard normal. Gradient: the unbiased estimator
    dp/dx = mean_s y_s z_s^T / tau of the smoothed map (Berthet et al. 2020), not the derivative of the finite mean.
    O(samples N) time, O(N) memory: the noise is drawn one sample at a time, and drawn again in the backward pass. In a
    cross-entropy the membership is clamped to [1e-6, 1 - 1e-6].

    Args:
        tau: Standard deviation of the noise.
        samples: Number of noise samples.
        seed: None = new noise in each call, controlled by `torch.manual_seed`; an int = the same noise in each call.
        options: See `TopKOperator`.

    Example:
        >>> p = PerturbedTopK(tau=0.5, samples=1000, seed=0)(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p
        >>> p.sum().round(decimals=3), bool((p[0, 0] > p[0, 2]) & (p[0, 2] > p[0, 1]) & (p[0, 1] > p[0, 3]))
        (tensor(2.), True)
    """

    name, cost = "perturbed", "n"
    equivariant = False
    tie_fair = False
    deterministic = False
    exact_gradient = False
    transformable = False
    paper = "Berthet et al. 2020, arXiv 2002.08676"

    def __init__(
        self, tau: Tau = 1.0, samples: int = 64, seed: int | None = None, **options: Unpack[OperatorOptions]
    ) -> None:
        super().__init__(tau, **options)
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ValueError(f"samples must be a positive int, got {samples!r}")
        self.samples = samples
        self.seed = seed

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        if under_transform():
            raise RuntimeError(NO_TRANSFORM)
        device = scores.device
        # The seed stays on the host for any device of the scores, because generators are seeded from the host.
        host = torch.device("cpu")
        seed = torch.randint(2**62, (1,), device=host) if self.seed is None else torch.tensor([self.seed], device=host)
        filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
        ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=device)
        # Scores are centred, because noise added to very large scores would be lost to rounding.
        x, _ = centred(filled, ks)
        p = _Membership.apply(x, ks, seed, self.samples, self.tau)  # type: ignore[no-untyped-call]
        inside = (p > 0.0) & (p < 1.0)
        safe = torch.where(inside, p, 0.5)
        log_p = torch.where(inside, safe.log(), torch.where(p > 0.0, 0.0, -math.inf))
        log_q = torch.where(inside, torch.log1p(-safe), torch.where(p > 0.0, -math.inf, 0.0))
        return SoftSelection(log_p, log_q, mask)

    def bounded(self, selection: SoftSelection) -> SoftSelection:
        """Clamp memberships of exactly 0 and 1."""
        return clamped(selection)

    def extra_repr(self) -> str:
        """Show the temperature and the number of samples."""
        return f"{super().extra_repr()}, samples={self.samples}"


class _Membership(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, filled: Tensor, k: Tensor, seed: Tensor, samples: int, tau: float) -> Tensor:
        ctx.save_for_backward(filled, k, seed)
        ctx.samples, ctx.tau = samples, tau
        return perturbed_mean(filled, k, seed, samples, tau)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        filled, k, seed = ctx.saved_tensors
        gradient = perturbed_gradient(filled.detach(), k, seed, grad.detach(), ctx.samples, ctx.tau)
        return refuse_second_derivative(NO_SECOND, gradient, filled, grad), None, None, None, None


def noised_topk(filled: Tensor, k: Tensor, noise: Tensor, tau: float) -> Tensor:
    """Return the hard top k of `filled` + tau `noise`, boolean (B, N): exactly k items; among ties the first ones.

    Ties occur in practice: two draws of float32 noise are equal about once in some million.

    Example:
        >>> x = torch.tensor([[2.0, 1.0, 0.0]])
        >>> noised_topk(x, torch.tensor([1]), torch.tensor([[0.0, 3.0, 0.0]]), tau=1.0)
        tensor([[False,  True, False]])
    """
    noised = torch.add(filled, noise, alpha=tau)
    kept, _ = kth_values(noised, k)
    chosen = noised >= kept
    if may_read(chosen) and int(chosen.count_nonzero()) == int(k.sum()):  # no list has more than k
        return chosen
    above, tied = noised > kept, noised == kept
    room = (k - above.sum(1)).unsqueeze(1)
    return above | (tied & (tied.cumsum(1) <= room))


def _noise(filled: Tensor, generator: torch.Generator, places: Tensor | None, width: int) -> Tensor:
    """Draw noise for the valid items only, so that masked items do not change the noise of the others."""
    drawn = torch.randn(len(filled), width, generator=generator, dtype=filled.dtype, device=filled.device)
    return drawn if places is None else drawn.gather(1, places)


def _start(filled: Tensor, seed: Tensor) -> tuple[torch.Generator, Tensor | None, int]:
    device = "cpu" if filled.is_meta else filled.device  # there is no generator on the meta device
    generator = torch.Generator(device=device).manual_seed(int(seed))
    valid = filled > -math.inf
    width = int(valid.sum(1).max()) if filled.numel() and may_read(filled) else filled.shape[1]
    full = may_read(filled) and width == filled.shape[1]
    return generator, None if full else (valid.cumsum(1) - 1).clamp_min(0), width


@operation(fake=lambda filled, *_: torch.empty_like(filled))
def perturbed_mean(filled: Tensor, k: Tensor, seed: Tensor, samples: int, tau: float) -> Tensor:
    """Return the mean of the memberships under noise, (B, N); `filled` is -inf where masked."""
    generator, places, width = _start(filled, seed)
    total = torch.zeros_like(filled)
    for _ in range(samples):
        total += noised_topk(filled, k, _noise(filled, generator, places, width), tau)
    return total / samples


@operation(fake=lambda filled, *_: torch.empty_like(filled))
def perturbed_gradient(filled: Tensor, k: Tensor, seed: Tensor, grad: Tensor, samples: int, tau: float) -> Tensor:
    """Return mean_s z_s <grad, y_s> / tau, (B, N), over the same noise as `perturbed_mean`.

    <grad, p> is subtracted from <grad, y_s> to reduce the variance. The noise has mean 0, so the estimate stays
    unbiased up to a factor 1 - 1/samples.
    """
    generator, places, width = _start(filled, seed)
    total, noises = torch.zeros_like(filled), torch.zeros_like(filled)
    inner = torch.zeros_like(filled[:, :1])
    for _ in range(samples):
        noise = _noise(filled, generator, places, width)
        along = torch.where(noised_topk(filled, k, noise, tau), grad, 0.0).sum(1, keepdim=True)
        total += noise * along
        noises += noise
        inner += along
    return (total - noises * (inner / samples)) / (samples * tau)
