"""The metrics of ranked lists: recall, NDCG, DCG, MAP, MRR, precision and Kendall's tau."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from recsys_topk.metrics import functional
from recsys_topk.metrics.mean import ListMean
from recsys_topk.ops.losses.dcg import Gain, check_gain


class RankedMean(ListMean):
    """Mean over lists of a function of scores and labels. A subclass sets `name`, `measure` and `options`.

    Class attributes:
        measure: A function of scores, labels, mask and the `options`. It returns one value per list and the lists that
            are counted.
        options: The attributes that are keyword arguments of `measure`.
    """

    measure: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    options: ClassVar[tuple[str, ...]] = ()

    def update(self, scores: Any, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N); a metric of a cascade takes scores per stage."""
        self.add(*type(self).measure(scores, labels, mask, **{name: getattr(self, name) for name in self.options}))


class KendallTau(RankedMean):
    """Kendall's tau; mean over the lists with two different labels. See `recsys_topk.metrics.functional.kendall_tau`.

    Example:
        >>> import torch
        >>> metric = KendallTau()
        >>> metric.update(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[2.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.3333)
    """

    name: ClassVar[str] = "kendall_tau"
    measure = functional.kendall_tau


class MeanAtK(RankedMean):
    """Mean over lists of a function with a cut-off k.

    Args:
        k: Cut-off; None = no cut-off.
        positive_above: Items with a label above this are positive.
    """

    options: ClassVar[tuple[str, ...]] = ("k", "positive_above")

    def __init__(self, k: int | None = None, positive_above: float = 0.0) -> None:
        super().__init__()
        self.k, self.positive_above = k, positive_above

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return self.name if self.k is None else f"{self.name}@{self.k}"


class RecallAt(MeanAtK):
    """recall@k@m: the share of the true top k that is among the m items with the best scores; mean over lists.

    See `recsys_topk.metrics.functional.recall_at` for the definition and the treatment of ties.

    Args:
        k: Size of the true set.
        m: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> metric = RecallAt(k=2, m=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "recall"
    measure = functional.recall_at
    options = (*MeanAtK.options, "m")

    def __init__(self, k: int, m: int, positive_above: float = 0.0) -> None:
        super().__init__(k, positive_above)
        self.m = m

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return f"{self.name}@{self.k}@{self.m}"


class JointRecall(MeanAtK):
    """The share of the true top k that survives all stages with their quotas; mean over lists.

    See `recsys_topk.metrics.functional.joint_recall` for the definition and the treatment of ties. `update` takes one
    (B, N) tensor of scores per stage.

    Args:
        k: Size of the true set.
        quotas: Number of items that each stage passes on, first stage first.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> metric = JointRecall(k=2, quotas=(3, 2))
        >>> stages = [torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])]
        >>> metric.update(stages, torch.tensor([[0.0, 0.0, 1.0, 1.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "joint_recall"
    whole_cascade: ClassVar[bool] = True
    measure = functional.joint_recall
    options = (*MeanAtK.options, "quotas")

    def __init__(self, k: int, quotas: Sequence[int], positive_above: float = 0.0) -> None:
        super().__init__(k, positive_above)
        self.quotas = tuple(quotas)

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return f"{self.name}@{self.k}@{self.quotas[-1]}"


class MAPAt(MeanAtK):
    """MAP@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.average_precision_at`.

    The arguments are those of `MeanAtK`.

    Example:
        >>> import torch
        >>> metric = MAPAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "map"
    measure = functional.average_precision_at


class MRRAt(MeanAtK):
    """MRR@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.reciprocal_rank_at`.

    The arguments are those of `MeanAtK`.

    Example:
        >>> import torch
        >>> metric = MRRAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "mrr"
    measure = functional.reciprocal_rank_at


class PrecisionAt(MeanAtK):
    """precision@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.precision_at`.

    Args:
        k: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> metric = PrecisionAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "precision"
    measure = functional.precision_at

    def __init__(self, k: int, positive_above: float = 0.0) -> None:
        super().__init__(k, positive_above)


class DCGAt(MeanAtK):
    """DCG@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.dcg_at`.

    Args:
        k: Cut-off; None = no cut-off.
        gain: ``"exponential"`` (2^y - 1) or ``"linear"`` (y).
        positive_above: Lists without a label above this are skipped.

    Example:
        >>> import torch
        >>> metric = DCGAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.6309)
    """

    name: ClassVar[str] = "dcg"
    measure = functional.dcg_at
    options = (*MeanAtK.options, "gain")

    def __init__(self, k: int | None = None, gain: Gain = "exponential", positive_above: float = 0.0) -> None:
        super().__init__(k, positive_above)
        self.gain = check_gain(gain)


class NDCGAt(DCGAt):
    """NDCG@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.ndcg_at`.

    The arguments are those of `DCGAt`.

    Example:
        >>> import torch
        >>> metric = NDCGAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.6309)
    """

    name: ClassVar[str] = "ndcg"
    measure = functional.ndcg_at
