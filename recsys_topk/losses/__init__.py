"""Ranking losses behind one interface: `loss(scores, labels, mask)`. Needs torch and numpy only."""

from __future__ import annotations

from typing import Any

from recsys_topk.losses import functional
from recsys_topk.losses.approx_ndcg import ApproxNDCGLoss
from recsys_topk.losses.arf import ARFLoss, ARFV2Loss
from recsys_topk.losses.base import RankingLoss, registry
from recsys_topk.losses.bce import BCELoss
from recsys_topk.losses.lambdaloss import LambdaLoss
from recsys_topk.losses.lambdarank import LambdaRankLoss
from recsys_topk.losses.listmle import ListMLELoss
from recsys_topk.losses.listnet import ListNetLoss
from recsys_topk.losses.neural_ndcg import NeuralNDCGLoss
from recsys_topk.losses.operator_losses import (
    DFTopKLoss,
    DiffSortLoss,
    HardTopKLoss,
    LapSumLoss,
    NeuralSortLoss,
    PerturbedTopKLoss,
    SigmoidTopKLoss,
    SinkhornTopKLoss,
    SmoothTopKLoss,
    SoftSortLoss,
    SparseTopKLoss,
)
from recsys_topk.losses.ranknet import RankNetLoss
from recsys_topk.losses.smooth_topk_svm import SmoothTopKSVMLoss
from recsys_topk.losses.softmax import SoftmaxLoss
from recsys_topk.losses.softmax_at_k import SoftmaxAtKLoss
from recsys_topk.losses.topk import TopKLoss

__all__ = [
    "ARFLoss",
    "ARFV2Loss",
    "ApproxNDCGLoss",
    "BCELoss",
    "DFTopKLoss",
    "DiffSortLoss",
    "HardTopKLoss",
    "LambdaLoss",
    "LambdaRankLoss",
    "LapSumLoss",
    "ListMLELoss",
    "ListNetLoss",
    "NeuralNDCGLoss",
    "NeuralSortLoss",
    "PerturbedTopKLoss",
    "RankNetLoss",
    "RankingLoss",
    "SigmoidTopKLoss",
    "SinkhornTopKLoss",
    "SmoothTopKLoss",
    "SmoothTopKSVMLoss",
    "SoftSortLoss",
    "SoftmaxAtKLoss",
    "SoftmaxLoss",
    "SparseTopKLoss",
    "TopKLoss",
    "available",
    "functional",
    "get",
    "registry",
]


def get(name: str, /, **arguments: Any) -> RankingLoss:
    """Build a loss by name, class name or class path.

    Example:
        >>> get("dftopk", k=10, tau=0.5).k
        10
    """
    return registry.get(name, **arguments)


def available() -> tuple[str, ...]:
    """Return the names of all losses, including those of installed plug-ins."""
    return registry.available()


def __getattr__(name: str) -> Any:
    """Return a registered loss class by its class name, for losses that this module does not import."""
    if not name.startswith("_"):
        for cls in registry.classes().values():
            if cls.__name__ == name:
                return cls
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; to use the loss of an operator from another package, import "
        "that package, or install it with an entry point of recsys_topk.operators"
    )
