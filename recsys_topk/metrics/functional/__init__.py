"""Metrics of ranked lists and of cascades, as functions of tensors that return one value per list. Needs torch only.

Conventions of all metrics:

- Lists are rows: scores, labels and mask are (B, N). Labels are finite and >= 0, bigger is better. `mask` is boolean,
  True = a real item; None = all items are real. Padding is never ranked, whatever its score.
- A metric of lists returns its value for each list, float64 (B,), and which lists are counted, boolean (B,).
- An item is *positive* if its label is above `positive_above`. A list without a valid positive is skipped: its value is
  0 and its entry in `counted` is False.
- Ties count against the model: among equal scores the item with the lower label comes first. A model with constant
  scores therefore does not benefit from the order of the items in the data.
- A NaN score ranks last.
"""

from recsys_topk.metrics.functional.beyond_accuracy import (
    catalogue_coverage,
    gini,
    intra_list_diversity,
    mean_novelty,
    mean_popularity,
)
from recsys_topk.metrics.functional.kendall import kendall_tau
from recsys_topk.metrics.functional.mass import selection_mass
from recsys_topk.metrics.functional.ranks import average_precision_at, dcg_at, ndcg_at, precision_at, reciprocal_rank_at
from recsys_topk.metrics.functional.recall import joint_recall, recall_at, recall_of, survivors, top

__all__ = [
    "average_precision_at",
    "catalogue_coverage",
    "dcg_at",
    "gini",
    "intra_list_diversity",
    "joint_recall",
    "kendall_tau",
    "mean_novelty",
    "mean_popularity",
    "ndcg_at",
    "precision_at",
    "recall_at",
    "recall_of",
    "reciprocal_rank_at",
    "selection_mass",
    "survivors",
    "top",
]
