"""Metrics of ranked lists and of cascades, as functions of tensors: one value a list. Needs torch only.

Conventions, the same for all of them:

- Lists are rows. `mask` is boolean, True = a real item; padding never competes for a place, whatever its score.
- An item is *positive* when its label is above `positive_above`. A list without a valid positive says nothing about
  the model: its value is 0 and its entry in `counted` is False.
- Ties go against the model: among equal scores the item with the lower label comes first. A model that scores
  everything alike can therefore not profit from the order in which the data hold their positives.
- A NaN score ranks last.
"""

from recsys_topk.metrics.functional.kendall import kendall_tau
from recsys_topk.metrics.functional.mass import selection_mass
from recsys_topk.metrics.functional.ranks import average_precision_at, dcg_at, ndcg_at, precision_at, reciprocal_rank_at
from recsys_topk.metrics.functional.recall import joint_recall, recall_at, recall_of, survivors, top

__all__ = [
    "average_precision_at",
    "dcg_at",
    "joint_recall",
    "kendall_tau",
    "ndcg_at",
    "precision_at",
    "recall_at",
    "recall_of",
    "reciprocal_rank_at",
    "selection_mass",
    "survivors",
    "top",
]
