"""Contract tests for plug-in authors: checks of losses, operators, objectives and data modules.

Needs torch only; `check_data_module` also needs Lightning.
"""

from __future__ import annotations

from recsys_topk.testing.contract import check_data_module, check_loss, check_objective, check_operator
from recsys_topk.testing.lists import Lists

__all__ = ["Lists", "check_data_module", "check_loss", "check_objective", "check_operator"]
