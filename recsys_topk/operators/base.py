"""The interface of all top-k operators: a function from scores and k to the soft membership of the top k."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypedDict, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from recsys_topk.checks import check_finite, check_fractional_k, check_k, check_lists, check_positive
from recsys_topk.numerics import SLACK, at_least_float32, float32_island, full_mask, is_full
from recsys_topk.operators.score_scale import BATCHES, Tau, squared_deviations, updated_scale
from recsys_topk.ops.dispatch import is_eager, may_read
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.membership import CLAMP, Law, membership_logs
from recsys_topk.registry import Registry
from recsys_topk.spec import Recorded


@dataclass(frozen=True)
class SoftSelection:
    """Soft membership p of the top k, stored as log p and log(1 - p), each computed stably.

    The class stores two logarithms instead of one probability for three reasons: a probability can be mistaken for a
    logit, the joint survival of several stages is a sum of `log_p`, and log(1 - p) cannot be computed from a p that was
    rounded to 1.

    Attributes:
        log_p: Logarithm of the membership, (B, N); -inf where masked.
        log_q: Logarithm of one minus the membership, (B, N); 0 where masked.
        mask: Boolean (B, N), True = a real item.
    """

    log_p: Tensor
    log_q: Tensor
    mask: Tensor

    @property
    def p(self) -> Tensor:
        """Membership as a probability, (B, N); 0 where masked."""
        return self.log_p.exp()


def clamped(selection: SoftSelection) -> SoftSelection:
    """Return the memberships clamped to [1e-6, 1 - 1e-6]. The gradient of clamped memberships is 0.

    Example:
        >>> certain = torch.tensor([[0.0, -math.inf]])
        >>> clamped(SoftSelection(certain, certain.flip(1), torch.tensor([[True, True]]))).log_p.exp()
        tensor([[1.0000e+00, 1.0000e-06]])
    """
    low, high = math.log(CLAMP), math.log1p(-CLAMP)
    return SoftSelection(selection.log_p.clamp(low, high), selection.log_q.clamp(low, high), selection.mask)


registry: Registry[TopKOperator]


class OperatorOptions(TypedDict, total=False):
    """Options of every operator; see `TopKOperator`. A subclass takes ``**options: Unpack[OperatorOptions]``."""

    validate: bool


class TopKOperator(Recorded, nn.Module, ABC):
    """Base class of all operators: checks, float32 arithmetic, masks and one k per list.

    A subclass sets the class attributes below and implements `select`. The base class does the rest: it computes half
    precision in float32 with autocast off, replaces masked scores by 0 (so that NaN and infinity cannot leak), and
    handles lists with k = 0 or k >= their number of valid items exactly, with zero gradient.

    Class attributes:
        name: Registry name.
        cost: Time for one list: ``"n"``, ``"n log n"``, ``"k n"`` or ``"n^2"``.
        sums_to_k: The membership of a list sums to k: abs(sum of p - k) <= 8 N eps, with eps of the dtype, for scores
            of any size and offset.
        equivariant: Permuting the items permutes the membership.
        tie_fair: Equal scores get equal membership and gradient.
        deterministic: The same input gives the same output.
        exact_gradient: The gradient is the derivative of the value (checked by finite differences).
        fractional_k: k may be fractional: a float, or a floating tensor (B,). The membership sums to it.
        takes_item_weights: Items may have weights (see `select_weighted`).
        scales_with_tau: The membership of c x at c tau is that of x at tau, so that ``tau="auto"`` is supported.
        transformable: `torch.func.grad`, `vmap` and `jacrev` work; False for operators that draw random numbers.
        paper: Reference.
        loss_defaults: Defaults of the loss of the same name (see `recsys_topk.losses.from_operator`) that differ from
            those of the operator.
        loss_leaves_out: Arguments of the operator that the loss does not have.

    Args:
        tau: Temperature; smaller is closer to the hard top k. It has the unit of the scores. ``"auto"`` = the standard
            deviation of the scores within their lists, over the first 10 training batches (calls with scores that
            require a gradient). It is then fixed, and stored in the state dict. In these batches, lists influence each
            other and the host reads a value from the device.
        validate: Raise on NaN or infinity among valid scores. Off by default, because the check reads the tensor.
    """

    name: ClassVar[str]
    cost: ClassVar[str]
    sums_to_k: ClassVar[bool] = True
    equivariant: ClassVar[bool] = True
    tie_fair: ClassVar[bool] = True
    deterministic: ClassVar[bool] = True
    exact_gradient: ClassVar[bool] = True
    fractional_k: ClassVar[bool] = False
    takes_item_weights: ClassVar[bool] = False
    scales_with_tau: ClassVar[bool] = True
    transformable: ClassVar[bool] = True
    paper: ClassVar[str] = ""
    loss_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    loss_leaves_out: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tau: Tau = 1.0, *, validate: bool = False) -> None:
        super().__init__()
        if tau == "auto" and not self.scales_with_tau:
            raise ValueError(f"the {self.name!r} operator does not support tau='auto'; pass a number")
        self.tau = 1.0 if tau == "auto" else check_positive("tau", tau)
        self.validate = validate
        self.measures_tau = tau == "auto"  # until the temperature is fixed
        self.tau_state: Tensor | None
        self.register_buffer("tau_state", torch.zeros(2) if tau == "auto" else None)

    def observe(self, scores: Tensor, spread: Tensor) -> None:
        """Set the temperature from the spread of the scores. To be called while `measures_tau`.

        Args:
            scores: The scores of a batch, any shape.
            spread: (2,), see `squared_deviations`.
        """
        assert self.tau_state is not None
        if not is_eager():
            raise RuntimeError(
                f"tau='auto' is measured on {BATCHES} training batches in eager mode; use the loss or operator on them "
                f"before torch.compile or torch.func, or pass a number as tau"
            )
        store = self.training and torch.is_grad_enabled() and scores.requires_grad
        self._set_tau(updated_scale(self.tau_state, spread, store))

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.tau_state is not None:
            self._set_tau(updated_scale(self.tau_state, torch.zeros(2), store=False))

    def _set_tau(self, scale: tuple[float | None, bool]) -> None:
        tau, fixed = scale
        self.tau, self.measures_tau = self.tau if tau is None else tau, not fixed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if {"select", "bounded"} & cls.__dict__.keys() and "law" not in cls.__dict__:
            cls.law = TopKOperator.law  # type: ignore[method-assign]  # the inherited law is not that of a new `select`
            cls.takes_item_weights = cls.__dict__.get("takes_item_weights", False)
        if "name" in cls.__dict__:
            registry.register(cls.name, cls)
        elif not hasattr(cls, "name"):
            cls.name = cls.__name__  # for messages; only classes that set `name` are registered

    def law(self) -> Law | None:
        """Return the law of the fused kernel that computes the cross-entropy of `select`; None = no such kernel."""
        return None

    @abstractmethod
    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """Compute the membership. The base class calls it with clean input.

        Args:
            scores: (B, N), float32 or float64, N >= 2; 0 where masked.
            k: One int, or an int64 tensor (B,), with 1 <= k < number of valid items in every list. With `fractional_k`
                also a tensor (B,) of the dtype of scores, with 0 < k < number of valid items.
            mask: Boolean (B, N). `recsys_topk.numerics.is_full(mask)` is True if nothing is masked.
        """

    def select_weighted(self, scores: Tensor, k: Tensor, mask: Tensor, weights: Tensor) -> SoftSelection:
        """Compute the membership of weighted items, by the operator's law. Called as `select` is.

        An item of weight w counts as w copies: for operators that sum to k, sum_i w_i p_i = k.

        Args:
            scores: (B, N), float32 or float64, N >= 2; 0 where masked.
            k: (B,), the dtype of scores, 0 < k < sum of the weights.
            mask: Boolean (B, N).
            weights: (B, N), the dtype of scores; positive, and 0 where masked.
        """
        law = self.law()
        assert law is not None
        return SoftSelection(*membership_logs(scores, k, mask, law, item_weights=weights), mask)

    def bounded(self, selection: SoftSelection) -> SoftSelection:
        """Return the selection for a cross-entropy, in which log 0 must not occur.

        By default this is the selection itself. Operators with memberships of exactly 0 or 1 return `clamped` ones.
        """
        return selection

    @final  # type: ignore[misc]  # nn.Module declares forward as a writable attribute
    def forward(
        self, scores: Tensor, k: float | Tensor, mask: Tensor | None = None, *, item_weights: Tensor | None = None
    ) -> SoftSelection:
        """Return the soft membership of the top k of each list.

        Args:
            scores: (B, N), any floating dtype.
            k: One int, or one int per list, (B,). It is capped at the number of valid items. An operator with
                `fractional_k` also accepts one float, or one float per list.
            mask: Boolean (B, N), True = a real item; None = all items are real.
            item_weights: (B, N), not negative, a constant for the gradient: an item of weight 2 counts as two copies,
                one of weight 0 is masked. k is compared with the sum of the weights, and may be fractional.

        Returns:
            The selection, in float32 (float64 for float64 scores).
        """
        check_lists(scores, mask, item_weights=item_weights)
        weighted = item_weights is not None
        if weighted and not self.takes_item_weights:
            raise ValueError(f"the {self.name!r} operator does not support item_weights; use dftopk, sigmoid or lapsum")
        fractional = self.fractional_k or weighted
        k = (check_fractional_k if fractional else check_k)(k, scores, read=self.validate or may_read(scores))
        if self.validate:
            check_finite(scores, full_mask(scores) if mask is None else mask)
        with float32_island(scores.device.type):
            x = at_least_float32(scores)
            if self.measures_tau:
                self.observe(x, squared_deviations(x, mask))
            if item_weights is not None:
                return self.weighted_membership(x, k, mask, item_weights)
            return self.membership(x, k, mask)

    def weighted_membership(self, x: Tensor, k: int | Tensor, mask: Tensor | None, weights: Tensor) -> SoftSelection:
        """Return the membership of weighted items from checked input; see `membership`."""
        w = weights.detach().to(x.dtype)
        valid = w > 0 if mask is None else mask & (w > 0)
        if x.shape[1] < 2:  # padding gives `select_weighted` two items
            more = (0, 2 - x.shape[1])
            wide = self.weighted_membership(pad(x, more), k, pad(valid, more, value=False), pad(w, more))
            return SoftSelection(wide.log_p[:, : x.shape[1]], wide.log_q[:, : x.shape[1]], valid)
        w = torch.where(valid, w, 0.0)
        total = w.sum(1)
        ks = k.to(x.dtype) if isinstance(k, Tensor) else torch.full_like(total, k)
        whole = (1.0 - SLACK) * total  # ten weights of 0.1 have the sum 1
        proper = (ks > 0) & (ks < whole)
        # Lists with k = 0 or k >= the total weight have an exact result. Equal scores replace them below.
        row = proper[:, None]
        inner = valid & row
        selection = self.select_weighted(
            torch.where(inner, x, 0.0), torch.where(proper, ks, 1.0), valid | ~row, torch.where(row, w, 1.0)
        )
        everything = valid & (ks >= whole)[:, None]
        log_p = torch.where(everything, 0.0, torch.full_like(x, -math.inf))
        log_q = torch.where(everything, -math.inf, torch.zeros_like(x))
        return SoftSelection(
            torch.where(inner, selection.log_p, log_p), torch.where(inner, selection.log_q, log_q), valid
        )

    def membership(self, x: Tensor, k: int | Tensor, mask: Tensor | None) -> SoftSelection:
        """Return the membership from checked input: float32 or float64 scores, any values where masked."""
        if mask is None and not isinstance(k, Tensor) and 0 < k < x.shape[1] and x.shape[0] > 0:
            return self.select(x, k, full_mask(x))
        return self._select_general(x, k, full_mask(x) if mask is None else mask)

    def _select_general(self, x: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        full = is_full(mask)
        count = torch.full(x.shape[:1], x.shape[1], device=x.device) if full else count_true(mask)
        if isinstance(k, Tensor) and k.is_floating_point():
            if x.shape[1] == 1:  # a single item can be selected in part; padding gives `select` two items
                wide = self._select_general(pad(x, (0, 1)), k, pad(mask, (0, 1), value=False))
                return SoftSelection(wide.log_p[:, :1], wide.log_q[:, :1], mask)
            wanted = torch.minimum(k.to(x.dtype), count.to(x.dtype))
        else:
            wanted = torch.minimum(k.long() if isinstance(k, Tensor) else torch.full_like(count, k), count)
        proper = (wanted > 0) & (wanted < count)
        if may_read(x) and len(x) and bool(proper.all()):
            same = not isinstance(k, Tensor) and bool((wanted == k).all())
            selection = self.select(x if full else fill_masked(x, mask, 0.0), k if same else wanted, mask)
            if full:
                return selection
            return SoftSelection(
                fill_masked(selection.log_p, mask, -math.inf), fill_masked(selection.log_q, mask, 0.0), mask
            )
        everything = mask & (wanted >= count)[:, None]
        log_p = torch.where(everything, 0.0, torch.full_like(x, -math.inf))
        log_q = torch.where(everything, -math.inf, torch.zeros_like(x))
        if x.shape[1] < 2 or x.shape[0] == 0:
            return SoftSelection(log_p + 0.0 * _connected_zero(x), log_q + 0.0 * _connected_zero(x), mask)
        # Lists with an exact result also pass through `select`, replaced by equal scores.
        inner = mask & proper[:, None]
        selection = self.select(
            torch.where(inner, x, 0.0), torch.where(proper, wanted, 1), mask if full else mask | ~proper[:, None]
        )
        return SoftSelection(
            torch.where(inner, selection.log_p, log_p), torch.where(inner, selection.log_q, log_q), mask
        )

    def extra_repr(self) -> str:
        """Show the temperature."""
        return f"tau={self.tau_text}"

    @property
    def tau_text(self) -> str:
        """The temperature as text: a number, or ``"auto"``."""
        return f"{self.tau:g}" if self.tau_state is None else "auto"


def _connected_zero(x: Tensor) -> Tensor:
    """Return a scalar 0 with a zero gradient with respect to `x`, for any values of `x`."""
    return torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0.0).sum()


registry = Registry("operator", "recsys_topk.operators", "recsys_topk.operators", TopKOperator)
