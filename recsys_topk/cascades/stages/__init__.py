"""The stages: one file each, found by name. Classes are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recsys_topk.cascades.stages.din import DIN as DIN
    from recsys_topk.cascades.stages.mlp import MLPStage as MLPStage
    from recsys_topk.cascades.stages.two_tower import TwoTower as TwoTower

_HOME = {
    "DIN": "din",
    "MLPStage": "mlp",
    "TwoTower": "two_tower",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
