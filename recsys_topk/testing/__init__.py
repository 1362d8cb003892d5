"""Contract tests for plug-in authors: checks of losses, operators, objectives, stages, metrics and data modules.

Needs torch only; `check_data_module` also needs Lightning, and `check_stage` TorchRec.
"""

from __future__ import annotations

from recsys_topk.testing.contract import check_data_module, check_loss, check_objective, check_operator, check_stage
from recsys_topk.testing.lists import Lists
from recsys_topk.testing.metric_rules import check_metric

__all__ = [
    "Lists",
    "check_data_module",
    "check_loss",
    "check_metric",
    "check_objective",
    "check_operator",
    "check_stage",
]
