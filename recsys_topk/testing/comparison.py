"""How the contract suite compares, collects and reports."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

LOOSE = 1e-4
TIGHT = 1e-7


def require(holds: bool, message: str, given: object) -> None:
    """Raise an AssertionError with the message and the input unless `holds`."""
    if not holds:
        raise AssertionError(f"{message}; given {given}")


def require_same(got: Tensor, expected: Tensor, message: str, given: object, tolerance: float = TIGHT) -> None:
    """Raise unless two tensors agree to `tolerance`, relative to the largest finite entry where that exceeds 1.

    Infinities must stand in the same places; NaN agrees with nothing.
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
    """Return the gradient of the sum of `value`; zeros where it does not depend on an input."""
    total = value.sum()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def run_rules(subject: str, rules: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Run every rule, then raise one AssertionError that names each broken rule, the class and the input."""
    broken = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*left out every list of a batch")  # some rules try such batches
        for name, rule in rules:
            try:
                rule()
            except AssertionError as failure:
                broken.append(f"rule '{name}': {failure}")
            except Exception as error:  # whatever the class under test raises is its breach of this rule
                broken.append(f"rule '{name}': raised {type(error).__name__}: {error}")
    if broken:
        raise AssertionError(f"{subject} breaks {len(broken)} rule(s) of the contract:\n- " + "\n- ".join(broken))


def title(rule: Callable[..., None]) -> str:
    """Return the name of a rule as words."""
    return rule.__name__.replace("_", " ")
