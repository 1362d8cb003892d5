"""Cascade objectives, one file each, available by name.

The classes are not re-exported here: configs store their class paths, and the parser would shorten a class path that
has two forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys_topk.lazy import attach

if TYPE_CHECKING:
    from recsys_topk.cascades.objectives.base import CascadeObjective as CascadeObjective
    from recsys_topk.cascades.objectives.base import ObjectiveOutput as ObjectiveOutput
    from recsys_topk.cascades.objectives.base import registry as registry

__getattr__, __dir__ = attach(__name__)
