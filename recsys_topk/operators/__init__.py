"""Differentiable top-k operators: functions from scores and k to a soft membership. Needs torch and numpy only."""

from __future__ import annotations

from typing import Any

from recsys_topk.operators.base import SoftSelection, TopKOperator, registry
from recsys_topk.operators.dftopk import DFTopK
from recsys_topk.operators.diffsort import DiffSort
from recsys_topk.operators.hard import HardTopK
from recsys_topk.operators.lapsum import LapSum
from recsys_topk.operators.neuralsort import NeuralSort
from recsys_topk.operators.perturbed import PerturbedTopK
from recsys_topk.operators.sigmoid import SigmoidTopK
from recsys_topk.operators.sinkhorn import SinkhornTopK
from recsys_topk.operators.smooth_topk import SmoothTopK
from recsys_topk.operators.softsort import SoftSort
from recsys_topk.operators.sparse import SparseTopK

__all__ = [
    "DFTopK",
    "DiffSort",
    "HardTopK",
    "LapSum",
    "NeuralSort",
    "PerturbedTopK",
    "SigmoidTopK",
    "SinkhornTopK",
    "SmoothTopK",
    "SoftSelection",
    "SoftSort",
    "SparseTopK",
    "TopKOperator",
    "available",
    "get",
    "registry",
]


def get(name: str, /, **arguments: Any) -> TopKOperator:
    """Build an operator by name, class name or class path.

    Example:
        >>> get("dftopk", tau=0.5)
        DFTopK(tau=0.5)
    """
    return registry.get(name, **arguments)


def available() -> tuple[str, ...]:
    """Return the names of all operators, including those of installed plug-ins."""
    return registry.available()


def __getattr__(name: str) -> Any:
    """Return a registered operator class by its class name, for operators that this module does not import."""
    if not name.startswith("_"):
        for cls in registry.classes().values():
            if cls.__name__ == name:
                return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
