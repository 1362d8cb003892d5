"""Contract tests for plug-in authors: checks of losses, operators, objectives, stages and data modules.

Needs torch only; `check_data_module` also needs Lightning, and `check_stage` TorchRec.
"""

from __future__ import annotations

from recsys_topk.testing.contract import check_data_module, check_loss, check_objective, check_operator, check_stage
from recsys_topk.testing.lists import Lists

__all__ = ["Lists", "check_data_module", "check_loss", "check_objective", "check_operator", "check_stage"]
