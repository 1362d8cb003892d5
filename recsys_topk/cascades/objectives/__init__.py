"""Cascade objectives, one file each, available by name.

The classes are not re-exported here: configs store their class paths, and the parser would shorten a class path that
has two forms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys_topk.cascades.objectives.base import CascadeObjective as CascadeObjective
    from recsys_topk.cascades.objectives.base import ObjectiveOutput as ObjectiveOutput
    from recsys_topk.cascades.objectives.base import registry as registry

_HOME = {
    "CascadeObjective": "base",
    "ObjectiveOutput": "base",
    "registry": "base",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
