"""Tests that plug-in authors can run against their own losses, operators and objectives. Needs torch only."""

from __future__ import annotations

from recsys_topk.testing.contract import check_loss, check_objective, check_operator
from recsys_topk.testing.lists import Lists

__all__ = ["Lists", "check_loss", "check_objective", "check_operator"]
