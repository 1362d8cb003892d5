"""The generated losses of this package's operators, declared for type checkers and editors; `loss_of` creates them.

A new operator needs no entry here. Its loss is available by name: ``losses.get("name")`` and ``--loss name``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk import operators
from recsys_topk.losses.from_operator import loss_of
from recsys_topk.losses.topk import TopKLoss

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from recsys_topk.losses.base import LossOptions
    from recsys_topk.operators.diffsort import Distribution, Network
    from recsys_topk.operators.score_scale import Tau

    class DFTopKLoss(TopKLoss):
        """Cross-entropy of `DFTopK`."""

        def __init__(self, tau: Tau = 1.0, alpha: float = 0.5, **options: Unpack[LossOptions]) -> None: ...

    class DiffSortLoss(TopKLoss):
        """Cross-entropy of `DiffSort`."""

        def __init__(
            self,
            tau: Tau = 1.0,
            network: Network = "bitonic",
            distribution: Distribution = "cauchy",
            **options: Unpack[LossOptions],
        ) -> None: ...

    class HardTopKLoss(TopKLoss):
        """Cross-entropy of `HardTopK`."""

        def __init__(
            self, tau: float = 1.0, straight_through: str | None = "dftopk", **options: Unpack[LossOptions]
        ) -> None: ...

    class LapSumLoss(TopKLoss):
        """Cross-entropy of `LapSum`."""

        def __init__(self, tau: Tau = 1.0, **options: Unpack[LossOptions]) -> None: ...

    class NeuralSortLoss(TopKLoss):
        """Cross-entropy of `NeuralSort`."""

        def __init__(self, tau: Tau = 1.0, eps: float = 0.0, **options: Unpack[LossOptions]) -> None: ...

    class PerturbedTopKLoss(TopKLoss):
        """Cross-entropy of `PerturbedTopK`."""

        def __init__(
            self, tau: Tau = 1.0, samples: int = 64, seed: int | None = None, **options: Unpack[LossOptions]
        ) -> None: ...

    class SigmoidTopKLoss(TopKLoss):
        """Cross-entropy of `SigmoidTopK`."""

        def __init__(self, tau: Tau = 1.0, **options: Unpack[LossOptions]) -> None: ...

    class SinkhornTopKLoss(TopKLoss):
        """Cross-entropy of `SinkhornTopK`."""

        def __init__(self, tau: float = 1.0, **options: Unpack[LossOptions]) -> None: ...

    class SmoothTopKLoss(TopKLoss):
        """Cross-entropy of `SmoothTopK`."""

        def __init__(self, tau: Tau = 1.0, **options: Unpack[LossOptions]) -> None: ...

    class SoftSortLoss(TopKLoss):
        """Cross-entropy of `SoftSort`."""

        def __init__(self, tau: Tau = 1.0, eps: float = 0.0, **options: Unpack[LossOptions]) -> None: ...

    class SparseTopKLoss(TopKLoss):
        """Cross-entropy of `SparseTopK`."""

        def __init__(self, tau: Tau = 1.0, **options: Unpack[LossOptions]) -> None: ...

else:
    DFTopKLoss = loss_of(operators.DFTopK)
    DiffSortLoss = loss_of(operators.DiffSort)
    HardTopKLoss = loss_of(operators.HardTopK)
    LapSumLoss = loss_of(operators.LapSum)
    NeuralSortLoss = loss_of(operators.NeuralSort)
    PerturbedTopKLoss = loss_of(operators.PerturbedTopK)
    SigmoidTopKLoss = loss_of(operators.SigmoidTopK)
    SinkhornTopKLoss = loss_of(operators.SinkhornTopK)
    SmoothTopKLoss = loss_of(operators.SmoothTopK)
    SoftSortLoss = loss_of(operators.SoftSort)
    SparseTopKLoss = loss_of(operators.SparseTopK)
