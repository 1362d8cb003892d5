"""Differentiable top-k operators: scores and k in, soft membership of the top k out. Needs torch and numpy only."""

from __future__ import annotations

from typing import Any

from recsys_topk.operators.base import SoftSelection, TopKOperator, registry
from recsys_topk.operators.dftopk import DFTopK

__all__ = ["DFTopK", "SoftSelection", "TopKOperator", "available", "get", "registry"]


def get(name: str, /, **arguments: Any) -> TopKOperator:
    """Build an operator by name, class name or class path.

    Example:
        >>> get("dftopk", tau=0.5)
        DFTopK(tau=0.5)
    """
    return registry.get(name, **arguments)


def available() -> tuple[str, ...]:
    """Return the names of all operators, those of installed plug-ins included."""
    return registry.available()
