"""Comparisons and error reports of the contract suite."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

Rule: TypeAlias = Callable[..., None]
LOOSE = 1e-4
TIGHT = 1e-7


def require(holds: bool, message: str, given: object) -> None:
    """Raise an AssertionError with the message and the input unless `holds`."""
    if not holds:
        raise AssertionError(f"{message}; given {given}")


def require_same(got: Tensor, expected: Tensor, message: str, given: object, tolerance: float = TIGHT) -> None:
    """Raise unless two tensors agree up to `tolerance`, relative to the largest finite entry if that exceeds 1.

    Infinities must be at the same positions. NaN never agrees.
    """
    require(got.shape == expected.shape, f"{message}: shape {tuple(got.shape)} != {tuple(expected.shape)}", given)
    a, b = got.detach().double(), expected.detach().double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    require(bool((finite | (a == b)).all()), f"{message}: {a.tolist()} != {b.tolist()}", given)
    if not bool(finite.any()):
        return
    scale = max(1.0, float(b[finite].abs().max()))
    worst = float((a - b)[finite].abs().max())
    require(worst <= tolerance * scale, f"{message}: off by {worst:.3g} ({a.tolist()} != {b.tolist()})", given)


def require_finite(value: Tensor, message: str, given: object) -> None:
    """Raise unless every entry is finite."""
    require(bool(torch.isfinite(value).all()), f"{message} is not finite: {value.tolist()}", given)


def gradient_of(value: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Return the gradient of the sum of `value`; zeros for inputs on which it does not depend."""
    total = value.sum()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def weighted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the sum of the results of a function with different weights, so that no constant sum hides an error."""

    def total(*arguments: Tensor) -> Tensor:
        value = function(*arguments)
        return (torch.cos(1.0 + torch.arange(value.numel(), dtype=value.dtype)).view_as(value) * value).sum()

    return total


def second_derivative_along(total: Callable[[Tensor], Tensor], scores: Tensor, direction: Tensor) -> Tensor | None:
    """Return the derivative along `direction` of the gradient of `total`, by two backward passes.

    Returns None if the function raises a RuntimeError for it, which is allowed. The derivative of a gradient without a
    graph is taken as 0, which is correct only if the gradient is constant.
    """
    x = scores.clone().requires_grad_()
    value = total(x)
    if not value.requires_grad:
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    if not slope.requires_grad:
        return torch.zeros_like(x)
    try:
        (bend,) = torch.autograd.grad((slope * direction).sum(), x, allow_unused=True)
    except RuntimeError:
        return None
    return torch.zeros_like(x) if bend is None else bend


def require_second_derivative(function: Callable[[Tensor], Tensor], scores: Tensor, exact: bool, given: object) -> None:
    """Raise unless the second derivative is correct, or raises.

    If `exact`, it is compared with finite differences of the gradient. Otherwise (parts are held constant for the
    gradient) it is compared with `torch.func`, which uses a different code path. The scores, (B, N), have no ties.
    """
    total, direction = weighted(function), torch.cos(torch.arange(scores.numel(), dtype=scores.dtype)).view_as(scores)
    found = second_derivative_along(total, scores, direction)
    if found is None:
        return
    if exact:
        step = 1e-5
        moved = [(scores + sign * step * direction).requires_grad_() for sign in (1.0, -1.0)]
        above, below = (gradient_of(total(x), x)[0] for x in moved)
        expected = (above - below) / (2.0 * step)
    else:
        slope = torch.func.grad(total)
        expected = torch.func.grad(lambda x: (slope(x) * direction).sum())(scores)
    require_same(found, expected, "the second derivative is wrong (create_graph=True)", given, 1e-5)


def require_refused_second_derivative(function: Callable[[Tensor], Tensor], scores: Tensor, given: object) -> None:
    """Raise unless a random function raises for its second derivative."""
    refused = second_derivative_along(weighted(function), scores, torch.ones_like(scores)) is None
    require(refused, "random results have no second derivative, but it does not raise", given)


def require_transforms(function: Callable[..., Tensor], scores: Tensor, mask: Tensor, given: object) -> None:
    """Raise unless `torch.func.grad`, `vmap` and `jacrev`, and forward mode, agree with autograd and a loop.

    The result of the function of scores and mask, (B, N), has first dimension B.
    """
    x = scores.clone().requires_grad_()
    plain = function(x, mask)
    weights = torch.cos(torch.arange(plain.numel(), dtype=plain.dtype)).view_as(plain)
    expected = gradient_of(plain * weights, x)[0]
    slope = torch.func.grad(lambda s: (function(s, mask) * weights).sum())(scores)
    require_same(slope, expected, "torch.func.grad differs from autograd", given, 1e-6)
    examples, masks = torch.stack((scores, scores.flip(0), -scores)), torch.stack((mask, mask.flip(0), mask))
    mapped = torch.func.vmap(function)(examples, masks)
    looped = torch.stack([function(s, m) for s, m in zip(examples, masks, strict=True)])
    require_same(mapped, looped, "torch.func.vmap differs from a loop", given, 1e-6)
    jacobian = torch.func.jacrev(lambda s: function(s, mask))(scores)
    along = torch.tensordot(weights, jacobian, dims=weights.dim())
    require_same(along, expected, "torch.func.jacrev differs from autograd", given, 1e-6)
    forward = torch.func.jacfwd(lambda s: function(s, mask))(scores)
    require_same(forward, jacobian, "torch.func.jacfwd differs from jacrev", given, 1e-6)
    direction = torch.sin(1.0 + torch.arange(scores.numel(), dtype=scores.dtype)).view_as(scores)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scores, direction)  # type: ignore[no-untyped-call]
        tangent = forward_ad.unpack_dual(function(dual, mask)).tangent  # type: ignore[no-untyped-call]
    require(tangent is not None, "forward mode (torch.autograd.forward_ad) lost the derivative", given)
    moved = torch.tensordot(jacobian, direction, dims=2)
    require_same(tangent, moved, "torch.autograd.forward_ad differs from jacrev", given, 1e-6)
    slopes = torch.func.grad(lambda s: (function(s, mask) * weights).sum())
    bend = torch.func.jvp(slopes, (scores,), (direction,))[1]
    twice = torch.func.grad(lambda s: (slopes(s) * direction).sum())(scores)
    require_same(bend, twice, "torch.func.hessian (forward over reverse) differs from reverse mode", given, 1e-5)


def require_refused_transform(function: Callable[..., Tensor], scores: Tensor, mask: Tensor, given: object) -> None:
    """Raise unless `torch.func.vmap` of the function raises a RuntimeError that mentions torch.func."""
    try:
        torch.func.vmap(function)(scores[None], mask[None])
    except RuntimeError as error:
        require("torch.func" in str(error), f"the error does not name torch.func as the reason: {error}", given)
    else:
        require(False, "transformable = False is declared, but torch.func.vmap works", given)


def run_rules(subject: str, rules: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Run every rule, then raise one AssertionError that names each broken rule, the class and the input."""
    broken = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*skipped every list of ")  # some rules use such batches
        for name, rule in rules:
            try:
                rule()
            except AssertionError as failure:
                broken.append(f"rule '{name}': {failure}")
            except Exception as error:  # any exception of the class under test breaks the rule
                broken.append(f"rule '{name}': raised {type(error).__name__}: {error}")
    if broken:
        raise AssertionError(f"{subject} breaks {len(broken)} rule(s) of the contract:\n- " + "\n- ".join(broken))


def title(rule: Callable[..., None]) -> str:
    """Return the name of a rule with spaces."""
    return rule.__name__.replace("_", " ")


def rules_for(subject: type, *modules: str) -> tuple[list[Rule], list[Rule]]:
    """Return the rules of a kind of subject in modules: those for any lists, and those with lists of their own.

    A rule is a public function whose first argument is annotated with the class of the subject or one of its bases.
    """
    kinds = [cls.__name__ for cls in subject.__mro__]
    functions = [
        value for module in modules for value in vars(sys.modules[module]).values() if inspect.isfunction(value)
    ]
    rules = [f for f in functions if f.__annotations__.get("subject") in kinds and f.__module__ in modules]
    rules = [f for f in rules if not f.__name__.startswith(("_", "require"))]
    return [f for f in rules if "lists" in f.__annotations__], [f for f in rules if "lists" not in f.__annotations__]
