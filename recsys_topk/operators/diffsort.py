"""DiffSort: the mass of an item in the k best outputs of a relaxed sorting network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import OperatorOptions, SoftSelection, TopKOperator
from recsys_topk.operators.score_scale import Tau
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import apply, is_float32, operation, through_reference, wants_graph
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.kth_pair import kth_values

Network = Literal["odd_even", "bitonic"]
Distribution = Literal["cauchy", "logistic", "logistic_phi", "gaussian", "reciprocal", "optimal"]

PHI = 0.25

LONGEST = {"bitonic": 4096, "odd_even": 512}  # wires of the compiled loop
_LISTS = Loop("recsys_topk.ops.backends.compiled.networks:network_lists")


class DiffSort(TopKOperator):
    """Top-k mass of a sorting network with relaxed conditional swaps.

    A comparator on (a, b) puts alpha a + (1 - alpha) b on the lower wire and the remainder on the upper wire, with
    alpha = F((b - a) / tau), F a distribution function (Cauchy by default). The relaxed values enter the next layer.
    The indicator of the k best outputs is propagated back through the layers, so no n x n matrix is needed: O(n) per
    layer, n layers for ``odd_even`` and log^2 n for ``bitonic``. p and 1 - p are computed in two separate passes, so
    neither is a difference.

    The result depends on the order of the items, and equal scores may get different memberships, because the network
    compares wires by position. Masked items do not enter the network: a list with m valid items uses the network for m
    wires.

    Args:
        tau: Temperature, the inverse of the network's steepness.
        network: ``"bitonic"`` (log^2 n layers) or ``"odd_even"`` (n layers).
        distribution: ``"cauchy"``, ``"logistic"``, ``"logistic_phi"`` (the gap d enters as d / |d|^0.25),
            ``"gaussian"``, ``"reciprocal"`` or ``"optimal"`` (the last two keep the network monotonic, see the paper).
        options: See `TopKOperator`.

    Example:
        >>> DiffSort(tau=0.1)(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[0.9740, 0.0490, 0.9510, 0.0260]])
    """

    name, cost = "diffsort", "n log^2 n"
    equivariant = False
    tie_fair = False
    paper = "Petersen et al. 2022, arXiv 2203.09630"

    def __init__(
        self,
        tau: Tau = 1.0,
        network: Network = "bitonic",
        distribution: Distribution = "cauchy",
        **options: Unpack[OperatorOptions],
    ) -> None:
        super().__init__(tau, **options)
        if network not in ("odd_even", "bitonic"):
            raise ValueError(f"network must be 'odd_even' or 'bitonic', got {network!r}")
        if distribution not in _SHARES:
            raise ValueError(f"distribution must be one of {', '.join(_SHARES)}, got {distribution!r}")
        self.network: Network = network
        self.distribution: Distribution = distribution

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        rows, n = scores.shape
        wires = _Wires.of(scores, mask, 1 << (n - 1).bit_length() if self.network == "bitonic" else n, self.network)
        # Scores are centred at the (k+1)-th: the network mixes values, and mixtures of large scores lose precision.
        _, cut = kth_values(scores.detach() if is_full(mask) else fill_masked(scores.detach(), mask, -math.inf), k)
        x = scores.new_zeros(rows, wires.width).scatter(1, wires.place, scores - cut)
        p, q = network_masses(x, wires, k, self.network, self.distribution, self.tau)
        tiny = torch.finfo(scores.dtype).tiny
        log_p, log_q = p.clamp_min(tiny).log(), q.clamp_min(tiny).log()
        return SoftSelection(log_p.gather(1, wires.place), log_q.gather(1, wires.place), mask)

    def extra_repr(self) -> str:
        """Show the temperature, the network and the distribution."""
        return f"{super().extra_repr()}, network={self.network!r}, distribution={self.distribution!r}"


def _optimal(v: Tensor) -> Tensor:
    far = 1.0 / (16.0 * v.abs().clamp_min(0.25))
    return torch.where(v.abs() <= 0.25, v + 0.5, torch.where(v > 0, 1.0 - far, far))


_SHARES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "cauchy": lambda gap, tau: torch.atan(gap / tau) / math.pi + 0.5,
    "logistic": lambda gap, tau: torch.sigmoid(gap / tau),
    "logistic_phi": lambda gap, tau: torch.sigmoid(gap / ((gap.abs() + 1e-10) ** PHI * tau)),
    "gaussian": lambda gap, tau: torch.special.ndtr(gap / tau),
    "reciprocal": lambda gap, tau: 0.5 * (gap / (2.0 * tau + gap.abs()) + 1.0),
    "optimal": lambda gap, tau: _optimal(gap / tau),
}


class _Wires(NamedTuple):
    """Where the items of each list enter the network: list b uses wires start_b to stop_b - 1."""

    width: int
    place: Tensor
    start: Tensor
    stop: Tensor
    whole: bool

    @staticmethod
    def of(scores: Tensor, mask: Tensor, width: int, network: Network) -> _Wires:
        """Place the valid items of each list on adjacent wires, in order, and masked items on the remaining wires."""
        n = scores.shape[1]
        if is_full(mask):
            place = torch.arange(width - n, width, device=scores.device).expand_as(scores)
            ends = torch.full((scores.shape[0], 1), width, device=scores.device)
            return _Wires(width, place, ends - n, ends, width == n)
        count = count_true(mask)[:, None]
        # The bitonic network of a list has the next power of two of wires; its items use the last ones.
        stop = 1 << torch.ceil(torch.log2(count.double())).long() if network == "bitonic" else count
        start = stop - count
        inside = start + mask.cumsum(1) - 1
        outside = (~mask).cumsum(1) - 1
        outside = torch.where(outside < start, outside, outside + count)
        return _Wires(width, torch.where(mask, inside, outside), start, stop, False)


class _Layer(NamedTuple):
    """Comparators that run in parallel: their lower and upper wires and directions (1 or -1), (P,) each.

    Only lists with more than `above` wires have this layer.
    """

    low: Tensor
    high: Tensor
    direction: Tensor
    above: int

    def mix(self, x: Tensor, alpha: Tensor) -> Tensor:
        """Return the wires after the comparators, which leave a part `alpha` of each value where it is."""
        a, b = x.index_select(1, self.low), x.index_select(1, self.high)
        x = x.index_copy(1, self.low, alpha * a + (1.0 - alpha) * b)
        return x.index_copy(1, self.high, (1.0 - alpha) * a + alpha * b)


def _layers(width: int, network: Network, device: torch.device) -> Iterator[_Layer]:
    """Yield the layers of a network, first to last."""
    wires = torch.arange(width, device=device)
    if network == "odd_even":
        for t in range(width):
            low = wires[t % 2 : width - 1 : 2]
            if len(low):  # with two wires, the second layer has no comparators
                yield _Layer(low, low + 1, torch.ones_like(low), t)
        return
    for block in range(width.bit_length() - 1):
        for distance in (1 << step for step in range(block, -1, -1)):
            low, high = (part.flatten() for part in wires.reshape(-1, 2, distance).unbind(1))
            yield _Layer(low, high, 1 - 2 * ((low >> (block + 1)) % 2), 1 << block)


@operation
def network_masses(
    x: Tensor, wires: _Wires, k: int | Tensor, network: Network, distribution: Distribution, tau: float
) -> tuple[Tensor, Tensor]:
    """Return the mass of each wire in the k best outputs of the network, and in the others, (B, width) each.

    Args:
        x: Values of the wires, (B, width).
        wires: Which wires the lists use.
        k: One int, or one int per list, (B,).
        network: The network.
        distribution: The distribution function.
        tau: Temperature.
    """
    layers, alphas = list(_layers(wires.width, network, x.device)), []
    for layer in layers:
        gap = (x.index_select(1, layer.high) - x.index_select(1, layer.low)) * layer.direction
        alpha = _SHARES[distribution](gap, tau)
        if not wires.whole:  # a list uses only the comparators that its own number of wires needs
            inside = (layer.low >= wires.start) & (layer.high < wires.stop) & (layer.above < wires.stop)
            alpha = torch.where(inside, alpha, 1.0)
        alphas.append(alpha)
        x = layer.mix(x, alpha)
    best = torch.arange(wires.width, device=x.device) >= _first_best(wires, k)
    p, q = best.to(x.dtype), (~best).to(x.dtype)
    for layer, alpha in zip(reversed(layers), reversed(alphas), strict=True):
        p, q = layer.mix(p, alpha), layer.mix(q, alpha)
    return p, q


def _first_best(wires: _Wires, k: int | Tensor) -> Tensor:
    return wires.stop - (k[:, None] if isinstance(k, Tensor) else k)


@lru_cache(8)
def _comparators(width: int, network: Network) -> Tensor:
    """Return all comparators in order, (C, 4) int32: lower and upper wire, direction, wires that a list must exceed."""
    layers = _layers(width, network, torch.device("cpu"))
    found = [torch.stack((*layer[:3], torch.full_like(layer.low, layer.above)), 1) for layer in layers]
    return torch.cat(found).int() if found else torch.empty(0, 4, dtype=torch.int32)


def _serves(
    x: Tensor, wires: _Wires, k: int | Tensor, network: Network, distribution: Distribution, tau: float
) -> bool:
    # A buffer holds four vectors of 16 lists per comparator.
    return is_float32(x) and x.numel() > 0 and distribution == "cauchy" and wires.width <= LONGEST[network]


@network_masses.backend("numba", _serves)
def _numba(
    x: Tensor, wires: _Wires, k: int | Tensor, network: Network, distribution: Distribution, tau: float
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = apply(_Network, x, wires, k, network, tau)
    return found


def _run(
    x: Tensor, wires: _Wires, k: int | Tensor, network: Network, tau: float, grads: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    lists, width = x.shape
    groups, table = -(-len(x) // WIDTH), _comparators(width, network)
    whole = torch.cat((wires.start, wires.stop, _first_best(wires, k).expand_as(wires.stop)), 1)
    bounds = torch.zeros(groups * WIDTH, 3, dtype=torch.int32)
    bounds[:lists] = whole
    bounds = bounds.view(groups, WIDTH, 3).mT.contiguous()
    buffers = torch.empty(number_of_parts(groups), 3 * width + 4 * len(table), WIDTH)
    outputs = torch.empty(2, lists, width)
    given = (groups, lists, width, len(table), table, x.detach().contiguous(), bounds, 1.0 / tau)
    run_parts(_LISTS, groups, *given, *grads, buffers, outputs[0], outputs[1], outputs[0])
    return outputs[0], outputs[1]


class _Network(torch.autograd.Function):
    """The backward runs the network again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wires: _Wires, k: int | Tensor, network: Network, tau: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.rest = (wires, k, network, tau)
        return _run(x, wires, k, network, tau, (None, None))

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, grad_q: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        wires, k, network, tau = ctx.rest
        if wants_graph():
            through = through_reference(
                lambda x: network_masses.reference(x, wires, k, network, "cauchy", tau), [x], [grad_p, grad_q]
            )
            return through[0], None, None, None, None
        gradient = _run(x, wires, k, network, tau, (grad_p.contiguous(), grad_q.contiguous()))[0]
        return gradient, None, None, None, None
